"""A replica's log while threads work in its directory, on a disk that a test holds up."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from rayq import messages
from rayq.actors.access import Access
from rayq.actors.listening_clock import ListeningClock
from rayq.actors.replica.context import ReplicaContext
from rayq.actors.replica.follower import Follower
from rayq.actors.replica.replica import Replica
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.client.environment import system_environment
from rayq.config import ClusterConfig
from rayq.environment import Environment
from rayq.errors import DirectoryInUseError
from rayq.storage.batch import encode_batch, stamp
from rayq.storage.checkpoint import read_checkpoint
from rayq.storage.data_directory import PartitionDirectory
from rayq.storage.disk import LocalDisk

PATIENCE_S = 60.0


class HeldDisk(LocalDisk):
    """A disk on which threads wait before they rename a file to one of these names, until `go_on`
    is set."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.is_met = threading.Event()
        self.go_on = threading.Event()

    def rename(self, source: str, target: str) -> None:
        is_thread = threading.current_thread() is not threading.main_thread()
        if is_thread and target.rpartition("/")[2] in self.held:
            self.is_met.set()
            assert self.go_on.wait(PATIENCE_S)
        super().rename(source, target)

    async def met(self) -> None:
        assert await asyncio.to_thread(self.is_met.wait, PATIENCE_S)


class PlayedLeader:
    """A pool and a connection in one: it answers the follower's fetches from a list, then never."""

    closed = False

    def __init__(self, answers: list[tuple[messages.ReplicaFetchResponse, bytes]]) -> None:
        self.answers = answers
        self.fetched: list[int] = []

    async def get(self, host: str, port: int) -> PlayedLeader:
        return self

    async def request(self, request: Any, **timeouts: float) -> Any:
        self.fetched.append(request.offset)
        if not self.answers:
            await asyncio.get_running_loop().create_future()
        return self.answers.pop(0)

    def send(self, request: Any) -> None:
        pass


def assignment(topic_id: str = "id") -> messages.PartitionAssignment:
    return messages.PartitionAssignment(
        "t", topic_id, 0, {}, 1, "theirs", "leader", 1, 3, 1, None, [(1, "theirs")], [(0, "ours")]
    )


async def opened(environment: Environment, path: Path, topic_id: str = "id") -> ReplicaLog:
    log = ReplicaLog(
        environment,
        ClusterConfig(),
        assignment(topic_id),
        broker=0,
        incarnation="ours",
        on_flushed=lambda _: None,
        on_failure=lambda: None,
    )
    await log.open(directory(environment, path, topic_id))
    return log


def directory(environment: Environment, path: Path, topic_id: str) -> PartitionDirectory:
    return PartitionDirectory.open(
        environment,
        str(path),
        topic="t",
        topic_id=topic_id,
        partition=0,
        incarnation="ours",
        pid_start_time=1,
    )


async def until(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s, what
        await asyncio.sleep(0.005)


def run(work: Callable[[Environment, HeldDisk], Awaitable[None]]) -> None:
    async def main() -> None:
        disk = HeldDisk()
        environment = replace(system_environment(), disk=disk)
        try:
            await work(environment, disk)
        finally:
            disk.go_on.set()
            environment.tasks.cancel_all()

    asyncio.run(main())


@pytest.mark.parametrize("held", ["checkpoint", "leader-epochs"])
def test_a_follower_that_restarts_at_its_leaders_first_batch_waits_for_the_checkpoint_under_way(
    tmp_path: Path, held: str
) -> None:
    batch = encode_batch([b"%d" % number for number in range(10)], timestamps_ms=1)
    stamp(batch, 0, base_offset=50, leader_epoch=3, append_time_ms=1)
    answer = messages.ReplicaFetchResponse(60, 55, 50, None, None, None, 0, 0)

    async def work(environment: Environment, disk: HeldDisk) -> None:
        log = await opened(environment, tmp_path / "t-0")
        log.log.reset(55, [(3, 50)], b"")
        log.log.epochs.assign(3, 50)
        disk.held = {held}
        checkpoint = asyncio.ensure_future(log.flusher.checkpoint())
        await disk.met()
        leader = PlayedLeader([(answer, bytes(batch))])
        follower = Follower(log, cast(Any, leader), assignment())
        follower.start()
        await until(lambda: leader.fetched != [], "it fetches")
        await asyncio.sleep(0.05)  # Only a wrong append is in time to do harm.
        disk.go_on.set()
        await checkpoint
        await until(lambda: leader.fetched == [55, 60], "it has appended the batch")
        await log.flusher.checkpoint()
        assert log.failure is None
        found = read_checkpoint(disk, str(tmp_path / "t-0"))
        assert found is not None
        assert (found.recovery_point, found.log_start) == (60, 55)
        follower.end("the test is over")
        await log.close()
        again = await opened(environment, tmp_path / "t-0")
        assert (again.log.start_offset, again.log.end_offset) == (55, 60)
        await again.close()

    run(work)


def test_a_directory_is_held_until_no_thread_works_in_it(tmp_path: Path) -> None:
    async def work(environment: Environment, disk: HeldDisk) -> None:
        log = await opened(environment, tmp_path / "t-0")
        disk.held = {"checkpoint"}
        checkpoint = asyncio.ensure_future(log.flusher.checkpoint())
        await disk.met()
        log.abandon()
        with pytest.raises(DirectoryInUseError):
            directory(environment, tmp_path / "t-0", "id")
        disk.go_on.set()
        await asyncio.wait((checkpoint,))

        def is_free() -> bool:
            try:
                directory(environment, tmp_path / "t-0", "id").close()
            except DirectoryInUseError:
                return False
            return True

        await until(is_free, "the directory is free")

    run(work)


def test_the_error_of_a_flush_that_the_replica_has_abandoned_is_no_news(tmp_path: Path) -> None:
    async def work(environment: Environment, disk: HeldDisk) -> None:
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        log = await opened(environment, tmp_path / "t-0")
        go_on = threading.Event()

        def flush() -> None:
            assert go_on.wait(PATIENCE_S)
            raise OSError("Input/output error")

        flushing = asyncio.ensure_future(log._jobs.run(flush))
        await asyncio.sleep(0)
        log.abandon()
        flushing.cancel()
        await asyncio.wait((flushing,))
        go_on.set()
        await until(lambda: not log._jobs._running, "the flush has ended")
        del flushing
        gc.collect()
        assert told == []

    run(work)


def test_a_replica_that_was_let_go_of_while_it_opened_leaves_nothing_running(
    tmp_path: Path,
) -> None:
    async def work(environment: Environment, disk: HeldDisk) -> None:
        before = asyncio.all_tasks()
        context = ReplicaContext(
            environment=environment,
            config=ClusterConfig(),
            pool=cast(Any, PlayedLeader([])),
            broker=0,
            incarnation="ours",
            listening=ListeningClock(environment.clock, 0.25),
            has_lease=lambda: True,
            propose=cast(Any, None),
            on_failure=lambda: None,
            ask_broker=cast(Any, None),
            metadata_version=lambda: 0,
            peers=cast(Any, None),
            objects=cast(Any, None),
            access=Access(environment.clock),
        )
        replica = Replica(context, assignment())
        opening = asyncio.ensure_future(
            replica.open(directory(environment, tmp_path / "t-0", "id"))
        )
        await asyncio.sleep(0)
        replica.abandon()
        await opening
        assert asyncio.all_tasks() == before

    run(work)
