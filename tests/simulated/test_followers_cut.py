"""Where a follower cuts its log when its leader's differs (KIP-279), when it refuses to, and when it
copies the log again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from proving.simulation.server_view import clean_state_of
from rayq import messages
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.storage.producer_state import ProducerState
from tests.simulated.followed import (
    END,
    IN_SYNC,
    LEADER_EPOCH,
    SNAPSHOT,
    Followed,
    PlayedLeader,
    answer,
    batch,
    diverging,
    following,
)

ASKS_FOR_SNAPSHOT = messages.ReplicaSnapshot("id", 0, LEADER_EPOCH)


def follow(
    answers: list[Any],
    *,
    high_watermark: int = 0,
    prepare: Callable[[ReplicaLog], Awaitable[None]] | None = None,
    **changes: Any,
) -> tuple[ReplicaLog, PlayedLeader]:
    """A log of 30 records in three epochs, and its state after these answers. The assignment has
    these changes."""
    found: list[tuple[ReplicaLog, PlayedLeader]] = []

    async def work(followed: Followed) -> None:
        if prepare is not None:
            await prepare(followed.log)
        found.append((followed.log, await followed.follow(answers, **changes)))

    following(work, high_watermark=high_watermark)
    return found[0]


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


def test_where_nothing_is_common_all_that_is_left_is_cut() -> None:
    async def delete(log: ReplicaLog) -> None:
        await log.advance_log_start(5)

    log, leader = follow([diverging(1, 9)], prepare=delete)
    assert (log.failure, log.log.start_offset, log.log.end_offset) == (None, 5, 5)
    assert [type(one) for one in leader.requests] == [messages.ReplicaFetch] * 2


def test_a_cut_and_a_restart_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rayq.actors.replica.follower")
    reset = messages.ReplicaFetchResponse(90, 0, 40, reset_to=0), b""

    async def delete(log: ReplicaLog) -> None:
        await log.drop_local(10)

    follow([diverging(4, 12), diverging(2, 5), SNAPSHOT, reset, SNAPSHOT], prepare=delete)
    place = {"topic": "t", "partition": 0, "epoch": LEADER_EPOCH, "broker": 0}
    found = [(one.__dict__["rayq_event"], one.__dict__["rayq_fields"]) for one in caplog.records]
    assert found == [
        ("log_truncated", {**place, "from_offset": END, "to_offset": 12}),
        ("log_restarted", {**place, "offset": 0}),
        ("log_restarted", {**place, "offset": 0}),
    ]


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
        log._known_high_watermark = 0

    log, _ = follow([diverging(4, 20)], high_watermark=21, prepare=forget)
    assert log.failure is not None and "holds committed records up to 21" in log.failure


def test_after_an_unclean_election_committed_records_go_and_the_high_watermark_with_them() -> None:
    log, _ = follow([diverging(4, 20)], high_watermark=25, last_unclean_epoch=7)
    assert (log.failure, log.log.end_offset, log.high_watermark) == (None, 20, 20)


def test_a_follower_that_ends_below_its_own_start_begins_again_as_its_leader_says() -> None:
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


def test_a_log_that_is_compacted_while_the_cut_waits_begins_again() -> None:
    """What the records to be cut had superseded went with the pass of the cleaner."""

    async def compact_meanwhile(log: ReplicaLog) -> None:
        await log.files_lock.acquire()

        async def swap() -> None:
            await asyncio.sleep(1.0)
            log.log.learned(clean_state_of(log.log).learned(20, 0))
            log.files_lock.release()

        log.environment.tasks.spawn(swap(), "swap")

    log, leader = follow(
        [diverging(4, 12), SNAPSHOT], last_unclean_epoch=7, prepare=compact_meanwhile
    )
    assert log.failure is None
    assert (log.log.start_offset, log.log.end_offset) == (0, 0)
    assert leader.fetches[1].offset == 0


@pytest.mark.parametrize(
    "cleaned, last_unclean_epoch, is_copied_again",
    [
        (31, 7, True),
        (30, 7, False),  # The log was whole.
        (31, None, False),
        (31, 6, False),  # It knows of that election.
    ],
)
def test_a_log_that_was_half_copied_is_whole_only_below_leaders_that_were_elected_cleanly(
    cleaned: int, last_unclean_epoch: int | None, is_copied_again: bool
) -> None:
    async def work(followed: Followed) -> None:
        await learn(followed, cleaned)
        leader = await followed.follow(
            [SNAPSHOT] if is_copied_again else [], last_unclean_epoch=last_unclean_epoch
        )
        offsets = [one.offset for one in leader.fetches]
        if is_copied_again:
            assert (leader.requests[0], offsets) == (ASKS_FOR_SNAPSHOT, [0])
        else:
            assert (len(leader.requests), offsets) == (1, [END])
        assert followed.log.failure is None

    following(work)


def test_whether_the_log_was_half_copied_is_asked_once() -> None:
    """While it is copied from this leader it is no reason to begin again."""

    async def work(followed: Followed) -> None:
        await learn(followed, 40)
        copied = [answer(0, batch(number, epoch=4), cleaned=40) for number in (0, 1)]
        leader = await followed.follow([SNAPSHOT, *copied], last_unclean_epoch=7)
        assert [one.offset for one in leader.fetches] == [0, 1, 2]
        assert leader.requests.count(ASKS_FOR_SNAPSHOT) == 1

    following(work, is_empty=True)


@pytest.mark.parametrize(
    "changes, is_over",
    [
        (IN_SYNC, True),  # A member in sync has nothing but what its leader has.
        ({**IN_SYNC, "last_unclean_epoch": 6}, True),
        ({**IN_SYNC, "last_unclean_epoch": 7}, False),
        ({}, False),
    ],
)
def test_a_cut_into_what_must_stay_whole_ends_a_member_in_sync_and_has_others_begin_again(
    changes: dict[str, Any], is_over: bool
) -> None:
    async def work(followed: Followed) -> None:
        await followed.log.drop_local(20)
        leader = await followed.follow([diverging(4, 15), SNAPSHOT], **changes)
        if is_over:
            assert followed.log.failure is not None and "only up to 15" in followed.log.failure
            assert len(leader.requests) == 1
        else:
            assert followed.log.failure is None
            assert leader.requests[1] == ASKS_FOR_SNAPSHOT
            assert [one.offset for one in leader.fetches] == [END, 0]

    following(work)


@pytest.mark.parametrize("local_start, start", [(None, 5), (5, 5), (80, 80)])
def test_it_begins_again_with_the_leaders_epochs_and_producers(
    local_start: int | None, start: int
) -> None:
    async def work(followed: Followed) -> None:
        theirs = ProducerState()
        theirs.load(followed.log.log.producers.snapshot())
        theirs.forget_from(20)
        snapshot = messages.ReplicaSnapshotResponse(5, [(2, 0), (4, 3)], local_start)
        reset = messages.ReplicaFetchResponse(90, 5, 40, reset_to=start), b""
        leader = await followed.follow([reset, (snapshot, theirs.snapshot())])
        assert leader.requests[1] == ASKS_FOR_SNAPSHOT
        assert (leader.asked[1].timeout_s, leader.asked[1].patience_s) == (3, 300)
        log = followed.log.log
        assert (log.start_offset, log.local_start_offset, log.end_offset) == (5, start, start)
        assert log.epochs.entries() == [(2, 0), (4, 3)]
        assert log.producers.ids_from(0, 10) == [2, 4]
        assert followed.log.high_watermark == start
        assert leader.fetches[1].offset == start

    following(work, high_watermark=20)


@pytest.mark.parametrize("lock", ["files_lock", "flush_lock"])
@pytest.mark.parametrize("is_cut", [True, False])
def test_the_log_is_not_cut_or_restarted_beside_a_flush_or_a_swap(lock: str, is_cut: bool) -> None:
    async def work(followed: Followed) -> None:
        reset = messages.ReplicaFetchResponse(90, 0, 40, reset_to=0), b""
        answers = [diverging(4, 12)] if is_cut else [reset, SNAPSHOT]
        async with getattr(followed.log, lock):
            await followed.follow(answers)
            assert followed.log.log.end_offset == END
        await asyncio.sleep(1.0)
        assert followed.log.log.end_offset == (12 if is_cut else 0)

    following(work)


async def learn(followed: Followed, cleaned: int) -> None:
    """An earlier leader has said so of the records that it sent."""
    await followed.log.learn(0, cleaned, 0)
