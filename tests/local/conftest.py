"""One cluster for all tests of this floor that do not harm it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rayq.client import consumer_pool as pool_handle
from rayq.core import pool_scaling
from rayq.pools import pool_member, running_pool
from rayq.testing import LocalCluster
from tests.local.cli_support import Command
from tests.local.support import FAST, STILL_RUNNING

_numbers = itertools.count(1)
NewTopic = Callable[..., str]
CREATED_TIMEOUT_S = 120.0
"""The limit for a new topic, whose files are synced on a disk that other work may keep busy."""


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three brokers, for tests that leave all servers alive."""
    with LocalCluster(
        brokers=3, data_dir=tmp_path_factory.mktemp("shared"), retention_check_interval_ms=100
    ) as cluster:
        STILL_RUNNING.append(cluster)
        yield cluster


@pytest.fixture
def cluster(shared: LocalCluster) -> LocalCluster:
    return shared.make_current()


@pytest.fixture
def topic(cluster: LocalCluster) -> str:
    """A topic of one partition, with three replicas."""
    name = f"topic-{next(_numbers)}"
    cluster.create_topic(name, timeout_s=CREATED_TIMEOUT_S)
    return name


@pytest.fixture
def new_topic(cluster: LocalCluster) -> NewTopic:
    """Makes further topics: `new_topic(partitions=2, ...)` returns the name."""

    def make(**options: Any) -> str:
        name = f"topic-{next(_numbers)}"
        cluster.create_topic(name, timeout_s=CREATED_TIMEOUT_S, **options)
        return name

    return make


@pytest.fixture
def fragile(tmp_path: Path) -> Iterator[LocalCluster]:
    """Three brokers of the test's own, with short sessions, for tests that kill servers."""
    with LocalCluster(brokers=3, data_dir=tmp_path / "data", **FAST) as cluster:
        yield cluster


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The directory of an object store."""
    path = tmp_path / "store"
    path.mkdir()
    return path


@pytest.fixture
def pools_are_twenty_times_as_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (running_pool, "LOOK_INTERVAL_S", 0.05),
        (pool_handle, "IDLE_CHECK_S", 0.01),
        (pool_member, "POLL_S", 0.05),
        (pool_scaling, "WINDOW_S", 0.25),
        (pool_scaling, "SETTLE_S", 0.15),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def rayq_command(
    cluster: LocalCluster,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Command:
    """The `rayq` command, for the shared cluster."""
    return Command(cluster, tmp_path / "home", capfd, monkeypatch)
