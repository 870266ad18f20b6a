"""A fake cluster of one broker, or of as many as a test asks for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from rayq.client import client as client_module
from rayq.client.cluster import Cluster
from tests.client.fake_broker import FakeCluster


@pytest.fixture(autouse=True)
def topics_are_soon_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake brokers never lag behind, so that a missing topic soon counts as missing."""
    monkeypatch.setattr(client_module, "UNKNOWN_TOPIC_PATIENCE_S", 0.1)


@pytest.fixture
def fake() -> Iterator[FakeCluster]:
    with FakeCluster() as cluster:
        yield cluster


@pytest.fixture
def fake3() -> Iterator[FakeCluster]:
    with FakeCluster(brokers=3) as cluster:
        yield cluster


@pytest.fixture
def cluster(fake: FakeCluster) -> Iterator[Cluster]:
    with fake.cluster() as made:
        yield made


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Waits for a condition, for at most 30 s."""

    def wait(holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not holds():
            assert time.monotonic() < deadline, "it never came true"
            time.sleep(0.002)

    return wait
