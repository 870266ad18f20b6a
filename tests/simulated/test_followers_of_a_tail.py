"""A follower of a leader whose older records are in the object store only: it copies the tail."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from rayq import messages
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.errors import DivergedLogError, RemoteStorageError
from rayq.storage.producer_state import ProducerState
from tests.simulated.followed import diverging
from tests.simulated.test_followers_cut import follow
from tests.simulated.test_leaders_promises import END, LEADER_EPOCH, Led, assignment, leading
from tests.storage.support import append

EPOCHS = [(2, 0), (4, 10), (6, 20)]


def test_it_begins_at_the_leaders_local_start_with_all_epochs_from_the_log_start() -> None:
    reset = messages.ReplicaFetchResponse(90, 5, 40, reset_to=80)
    snapshot = messages.ReplicaSnapshotResponse(5, [*EPOCHS, (7, 35)], 80)
    log, leader = follow([(reset, b""), (snapshot, ProducerState().snapshot())])
    assert log.failure is None
    found = log.log
    assert (found.start_offset, found.local_start_offset, found.end_offset) == (5, 80, 80)
    assert (found.epochs.entries(), log.high_watermark) == ([*EPOCHS, (7, 35)], 80)
    again = leader.fetches[1]
    assert (again.offset, again.last_epoch) == (80, 7)
    assert (again.log_start_offset, again.local_start_offset) == (5, 80)


def test_a_cut_below_its_own_local_start_begins_again() -> None:
    async def drop(log: ReplicaLog) -> None:
        await log.drop_local(20)

    snapshot = messages.ReplicaSnapshotResponse(0, [(2, 0), (4, 10)], 12)
    log, leader = follow(
        [diverging(4, 15), (snapshot, ProducerState().snapshot())],
        last_unclean_epoch=7,
        prepare=drop,
    )
    assert log.failure is None
    assert (log.log.local_start_offset, log.log.end_offset) == (12, 12)
    assert (leader.fetches[1].offset, leader.fetches[1].last_epoch) == (12, 4)


def test_what_a_leader_tells_those_that_end_below_its_local_start() -> None:
    async def work(led: Led) -> None:
        await led.log.drop_local(20)
        await led.all_agree()
        await led.log.advance_log_start(3)
        with pytest.raises(DivergedLogError, match="in sync"):
            await led.fetched(2, 19, 4)
        led.leader.committed(assignment(2, [(1, "1a"), (3, "3a")]))
        assert (await led.fetched(2, 19, 4)).reset_to == 20
        answer, payload = led.leader.followers.snapshot(
            messages.ReplicaSnapshot("id", 0, LEADER_EPOCH)
        )
        assert (answer.log_start_offset, answer.local_start_offset) == (3, 20)
        assert answer.epochs == [(2, 0), (4, 10)]
        ProducerState().load(payload)
        # One that restarted from the store lacked what others in sync may lack, too.
        led.log.restarted_at = 20
        assert (await led.fetched(3, 19, 4)).reset_to == 20

    leading(work)


def test_a_fetch_that_waits_while_the_records_leave_the_disk() -> None:
    async def work(led: Led) -> None:
        led.leader.committed(assignment(2, [(1, "1a"), (3, "3a")]))
        waits = asyncio.ensure_future(
            led.leader.followers.fetch(
                messages.ReplicaFetch(
                    "id", 0, 2, "2a", LEADER_EPOCH, END, END, 0, 6, 1 << 20, 5000
                )
            )
        )
        await asyncio.sleep(0.1)
        for _ in range(5):
            append(led.log.log, epoch=LEADER_EPOCH)
        await led.log.flusher.checkpoint()
        await led.log.drop_local(END + 3)
        led.log.appended.notify()
        answer, payload = await waits
        assert (answer.reset_to, payload) == (END + 3, b"")

    leading(work)


def test_a_follower_with_a_hole_is_copied_again_once_it_is_out_of_sync() -> None:
    """What it dropped counted as stored by metadata that were lost."""

    async def work(led: Led) -> None:
        fetch = messages.ReplicaFetch(
            "id", 0, 2, "2a", LEADER_EPOCH, END, END, 0, 6, 1 << 20, 0, local_start_offset=20
        )
        with pytest.raises(RemoteStorageError, match="out of the in-sync"):
            await led.leader.followers.fetch(fetch)
        led.leader.committed(assignment(2, [(1, "1a"), (3, "3a")]))
        answer, _ = await led.leader.followers.fetch(fetch)
        assert answer.reset_to == 0
        # None where this log has no more itself, or the log starts there.
        other = msgspec.structs.replace(fetch, log_start_offset=20)
        assert (await led.leader.followers.fetch(other))[0].reset_to is None
        await led.log.drop_local(20)
        assert (await led.leader.followers.fetch(fetch))[0].reset_to is None

    leading(work)
