"""A verb that waits says on stderr what it waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rayq.cli import output
from rayq.testing import LocalCluster
from tests.local.cli_support import Command
from tests.local.faulty_disk import Faults
from tests.local.support import FAST, leader_of


@contextmanager
def mended(after_s: float, mend: Callable[[], object]) -> Iterator[None]:
    timer = threading.Timer(after_s, mend)
    timer.start()
    yield
    timer.join()


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    made = Faults()
    made.install(monkeypatch)
    return made


@pytest.fixture
def three(faults: Faults, tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(3, data_dir=tmp_path / "data", **FAST) as cluster:
        yield cluster


def test_a_verb_that_waits_says_for_what(
    faults: Faults,
    three: LocalCluster,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rayq = Command(three, tmp_path / "home", capfd, monkeypatch)
    three.create_topic("t")
    three.create_topic("single", replication_factor=1)
    rayq.well("topic", "produce", "single", stdin=b"there\n")
    rayq.well("queue", "create", "q", "-t", "t")
    monkeypatch.setattr(output, "PATIENCE_S", 0.3)

    for verb in (("topic", "produce", "t"), ("queue", "put", "q")):
        faults.full.add(f"broker-{leader_of(three, 't')}/t-0")
        with mended(2.0, faults.full.clear):
            ran = rayq(*verb, stdin=b"one\n")
        assert ran.code == 0 and ran.err.count("\n") == 1, ran
        assert ran.err.startswith("Waiting for 1 write to be acknowledged"), ran
        assert "`rayq cluster health`" in ran.err
        if verb[1] == "produce":
            assert "no room" in ran.err, ran

    dead = leader_of(three, "single")
    three.kill_broker(dead)
    with mended(2.0, lambda: three.start_broker(dead)):
        ran = rayq("topic", "consume", "single", "-n", "1")
    assert ran.code == 0 and ran.out == "there\n", ran
    assert "Waiting for a leader of single-0." in ran.err, ran

    rayq.well("queue", "create", "idle", "-r", "1")
    leader = leader_of(three, "idle")
    three.kill_broker(leader)
    ran = rayq("queue", "take", "idle", "--wait", "10ms")
    assert ran.code == 0 and ran.out == "", ran
    assert "Partition 0 gave nothing: " in ran.err and "no leader" in ran.err, ran
    three.start_broker(leader)
    ran = rayq("queue", "take", "q", "--wait", "10s", "-n", "1")
    assert ran.code == 0 and ran.out == "one\n" and "nothing" not in ran.err, ran

    for broker in (1, 2):
        three.kill_broker(broker)
    with mended(2.0, lambda: [three.start_broker(broker) for broker in (1, 2)]):
        ran = rayq("topic", "create", "new", "-r", "1")
    assert "Waiting for the cluster." in ran.err, ran
