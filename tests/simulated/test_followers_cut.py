"""Where a follower cuts its log when its leader's differs (KIP-279), and when it refuses to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from proving.simulation import World
from proving.simulation.process import Process
from rayq.actors.replica.follower import Follower
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.config import ClusterConfig
from rayq.storage.data_directory import PartitionDirectory
from rayq.storage.producer_state import ProducerState
from rayq.wire import messages
from tests.storage.support import append

EPOCHS = [(2, 0), (4, 10), (6, 20)]
END = 30
WAIT_S = 5.0


class PlayedLeader:
    """A pool and a connection in one: it gives the answers in a list, then none."""

    closed = False

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers
        self.fetches: list[messages.ReplicaFetch] = []

    async def get(self, host: str, port: int) -> PlayedLeader:
        return self

    async def request(self, request: Any, **timeouts: float) -> Any:
        if isinstance(request, messages.ReplicaFetch):
            self.fetches.append(request)
        if not self.answers:
            await asyncio.get_running_loop().create_future()
        return self.answers.pop(0)

    def send(self, request: Any) -> None:
        pass


def assignment(*, last_unclean_epoch: int | None = None) -> messages.PartitionAssignment:
    return messages.PartitionAssignment(
        "t", "id", 0, {}, 1, "theirs", "leader", 1, 8, 1, last_unclean_epoch,
        [(1, "theirs")], [(0, "ours"), (1, "theirs")],
    )


def diverging(epoch: int | None, end: int) -> tuple[messages.ReplicaFetchResponse, bytes]:
    return messages.ReplicaFetchResponse(0, 0, 40, epoch, end), b""


def follow(
    answers: list[Any],
    *,
    high_watermark: int = 0,
    last_unclean_epoch: int | None = None,
    prepare: Callable[[ReplicaLog], Awaitable[None]] | None = None,
) -> tuple[ReplicaLog, PlayedLeader]:
    """A log of 30 records in three epochs, and its state after these answers."""
    leader = PlayedLeader(answers)

    async def script(process: Process) -> ReplicaLog:
        environment = process.environment
        log = ReplicaLog(
            environment,
            ClusterConfig(),
            assignment(),
            broker=0,
            incarnation="ours",
            on_flushed=lambda _: None,
            on_failure=lambda: None,
        )
        await log.open(
            PartitionDirectory.open(
                environment, "/data/t-0", topic="t", topic_id="id", partition=0,
                incarnation="ours", pid_start_time=1,
            )
        )
        for epoch, start in EPOCHS:
            for number in range(start, start + 10):
                append(log.log, epoch=epoch, producer_id=epoch, base_sequence=number - start)
        log.high_watermark = high_watermark
        await log.checkpoint()
        if prepare is not None:
            await prepare(log)
        follower = Follower(
            log, cast(Any, leader), assignment(last_unclean_epoch=last_unclean_epoch)
        )
        follower.start()
        await asyncio.sleep(WAIT_S)
        return log

    with World(seed=1) as world:
        process = world.host("broker").process("replica")
        return world.run(process.run(script(process))), leader


@pytest.mark.parametrize(
    "epoch, end, cut",
    [
        (6, 25, 25),  # It has fewer of our last epoch,
        (4, 12, 12),  # or of an earlier one, and none of later ones;
        (4, 28, 20),  # or more of it than we have.
        (5, 23, 20),  # It has an epoch that we lack: the one before that ends here,
        (3, 15, 10),
        (2, 4, 4),  # or there.
        (1, 9, 0),  # Nothing is common.
        (None, 7, 7),  # We have no batch that it could compare.
        (None, 40, 30),
    ],
)
def test_a_follower_cuts_where_the_last_common_epoch_ends_here_or_there(
    epoch: int | None, end: int, cut: int
) -> None:
    log, leader = follow([diverging(epoch, end)])
    assert log.failure is None
    assert log.log.end_offset == cut
    again = leader.fetches[1]
    assert (again.offset, again.last_epoch) == (cut, log.log.epochs.epoch_of(cut - 1))
    assert again.flushed <= cut


def test_what_is_cut_is_forgotten_of_the_producers_too() -> None:
    log, _ = follow([diverging(4, 12)])
    expected = ProducerState()
    assert log.log.producers.ids_from(0, 10) == [2, 4]
    expected.load(log.log.producers.snapshot())
    assert expected.batches_below(1 << 40) == (5, 6, 7, 8, 9, 10, 11)


@pytest.mark.parametrize("last_unclean_epoch", [None, 5, 6])
def test_a_follower_does_not_cut_what_it_knows_to_be_committed(
    last_unclean_epoch: int | None,
) -> None:
    log, _ = follow(
        [diverging(4, 20)], high_watermark=21, last_unclean_epoch=last_unclean_epoch
    )
    assert log.failure is not None and "holds committed records up to 21" in log.failure


def test_a_follower_cuts_at_its_high_watermark() -> None:
    log, _ = follow([diverging(4, 20)], high_watermark=20)
    assert (log.failure, log.log.end_offset) == (None, 20)


def test_what_the_last_checkpoint_says_is_committed_is_not_cut_either() -> None:
    async def forget(log: ReplicaLog) -> None:
        log.high_watermark = 0

    log, _ = follow([diverging(4, 20)], high_watermark=21, prepare=forget)
    assert log.failure is not None and "holds committed records up to 21" in log.failure


def test_after_an_unclean_election_committed_records_go_and_the_high_watermark_with_them() -> None:
    log, _ = follow([diverging(4, 20)], high_watermark=25, last_unclean_epoch=7)
    assert (log.failure, log.log.end_offset, log.high_watermark) == (None, 20, 20)


def test_a_follower_that_ends_below_its_own_start_begins_anew_as_its_leader_says() -> None:
    async def delete(log: ReplicaLog) -> None:
        await log.advance_log_start(15)

    theirs = ProducerState()
    log, leader = follow(
        [
            diverging(2, 5),
            (messages.ReplicaSnapshotResponse(9, [(2, 0), (7, 5)]), theirs.snapshot()),
        ],
        high_watermark=20,
        last_unclean_epoch=7,
        prepare=delete,
    )
    assert log.failure is None
    assert (log.log.start_offset, log.log.end_offset, log.high_watermark) == (9, 9, 9)
    assert (leader.fetches[1].offset, leader.fetches[1].last_epoch) == (9, 7)
    assert log.log.producers.ids_from(0, 10) == []


def test_a_log_that_is_compacted_while_the_cut_waits_begins_anew() -> None:
    """What the records to be cut had superseded went with the pass of the cleaner."""

    async def compact_meanwhile(log: ReplicaLog) -> None:
        await log.files_lock.acquire()

        async def swap() -> None:
            await asyncio.sleep(1.0)
            log.log.learned(log.log._clean.learned(20, 0))
            log.files_lock.release()

        log.environment.tasks.spawn(swap(), "swap")

    snapshot = messages.ReplicaSnapshotResponse(0, []), ProducerState().snapshot()
    log, leader = follow(
        [diverging(4, 12), snapshot], last_unclean_epoch=7, prepare=compact_meanwhile
    )
    assert log.failure is None
    assert (log.log.start_offset, log.log.end_offset) == (0, 0)
    assert leader.fetches[1].offset == 0
