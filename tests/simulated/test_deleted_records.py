"""Records whose deletion was acknowledged do not come back, whichever replica leads."""

from __future__ import annotations

import asyncio
import errno

import pytest

from rayq import messages
from rayq.actors.replica.leader import CONFIRM_CHECK_S
from rayq.errors import (
    NotEnoughReplicasError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    TimeoutError,
)
from rayq.records import TopicPartition
from tests.simulated.leader_stage import ALL, END, Led, assignment, leading
from tests.simulated.staged import Stage, play

PLACE = TopicPartition("t", 0)
WAIT_S = 2.0


def test_deleted_records_do_not_come_back_with_a_leader_that_was_away() -> None:
    async def script(stage: Stage) -> None:
        run, admin = stage.process.run, stage.admin
        await run(admin.create_topic("t", 1, 3))
        await run(admin.reassign_partitions({PLACE: [2, 3, 4]}))  # The voters are 0, 1 and 2.
        await stage.send("t", [b"%d" % number for number in range(50)])
        stage.hosts[3].power_loss()
        stage.hosts[4].power_loss()
        await stage.until(lambda: stage.in_sync("t") == {2}, "one to go on")
        # The replica that left last may lead without it, and has all the records.
        with pytest.raises(TimeoutError, match="min_insync_replicas = 2"):
            await run(admin.delete_records({PLACE: 40}, timeout_s=5))
        stage.cluster.start_broker(3)
        stage.cluster.start_broker(4)
        assert await run(admin.delete_records({PLACE: 40}, timeout_s=20)) == {PLACE: 40}
        await stage.until(lambda: len(stage.in_sync("t")) == 3, "all to be in sync")
        stage.hosts[2].power_loss()
        await stage.until(lambda: stage.value("t").leader in (3, 4), "another to lead")
        leader = stage.value("t").leader
        assert leader is not None
        await stage.until(lambda: stage.leads("t", leader), "it to know")
        held = stage.log("t", leader)
        assert held is not None and held.log.start_offset == 40

    play(script, brokers=5)


def test_they_do_not_come_back_with_a_member_that_joined_after_they_were_deleted() -> None:
    """A replica that was away lacks only the news that records were deleted: it may join at its
    first fetch, and be the only one left right after that."""

    async def script(stage: Stage) -> None:
        run, admin = stage.process.run, stage.admin
        await run(admin.create_topic("t", 1, 3))
        await run(admin.reassign_partitions({PLACE: [3, 4, 5]}))
        await stage.send("t", [b"%d" % number for number in range(50)])
        stage.hosts[5].power_loss()
        await stage.until(lambda: stage.in_sync("t") == {3, 4}, "two to go on")
        assert await run(admin.delete_records({PLACE: 40}, timeout_s=5)) == {PLACE: 40}
        stage.cluster.start_broker(5)
        await stage.until(lambda: 5 in stage.in_sync("t"), "the third to join")
        stage.hosts[3].power_loss()
        stage.hosts[4].power_loss()
        await stage.until(lambda: stage.value("t").leader == 5, "it to lead")
        await stage.until(lambda: stage.leads("t", 5), "it to know")
        held = stage.log("t", 5)
        assert held is not None and held.log.start_offset == 40

    play(script, brokers=6)


def test_a_follower_whose_disk_is_full_confirms_nothing_that_a_crash_would_undo() -> None:
    async def script(stage: Stage) -> None:
        run, admin = stage.process.run, stage.admin
        await run(admin.create_topic("t", 1, 3))
        await stage.send("t", [b"%d" % number for number in range(50)])
        await stage.until(lambda: len(stage.in_sync("t")) == 3, "all to be in sync")
        full = next(iter(stage.in_sync("t") - {stage.value("t").leader}))
        checkpoint = "t-0/checkpoint"
        fault = stage.hosts[full].disk.fail("write", path_part=checkpoint, error=errno.ENOSPC)
        with pytest.raises(TimeoutError):
            await run(admin.delete_records({PLACE: 40}, timeout_s=5))
        fault.heal()
        assert await run(admin.delete_records({PLACE: 40}, timeout_s=20)) == {PLACE: 40}
        for broker in stage.in_sync("t"):
            held = stage.log("t", broker)
            assert held is not None and held.log.persisted_log_start == 40
        assert full in stage.in_sync("t")

    play(script)


# --- a leader alone -------------------------------------------------------------------------------


async def moves(led: Led, broker: int, log_start: int) -> None:
    await led.fetched(broker, END, 6, log_start=log_start)


def test_a_deletion_is_answered_as_soon_as_all_who_may_lead_have_done_it() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        deleting = asyncio.ensure_future(led.deleting(9, timeout_ms=60_000))
        await asyncio.sleep(WAIT_S)
        await moves(led, 2, 9)
        await moves(led, 3, 8)
        # From then on the leader looks by itself only after a pause.
        await asyncio.sleep(CONFIRM_CHECK_S / 2)
        assert not deleting.done() and led.log.log.persisted_log_start == 9
        await moves(led, 3, 9)
        answer = await asyncio.wait_for(deleting, CONFIRM_CHECK_S / 10)
        assert answer == messages.DeleteRecordsResponse(9)

    leading(work)


def test_a_deletion_is_answered_when_who_held_it_up_has_left_the_set() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        deleting = asyncio.ensure_future(led.deleting(9, timeout_ms=60_000))
        await asyncio.sleep(WAIT_S)
        await moves(led, 2, 9)
        led.leader.committed(assignment(2, ALL[:2]))
        assert (await asyncio.wait_for(deleting, 1)).log_start_offset == 9

    leading(work)


def test_a_deletion_that_is_not_confirmed_in_time_says_so() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        began_s = led.clock.monotonic()
        with pytest.raises(TimeoutError, match=r"t-0 \(3, min.* = 2\).* start at offset 9"):
            await led.deleting(9, timeout_ms=3_030)
        assert led.clock.monotonic() - began_s == pytest.approx(3.03, abs=0.02)
        with pytest.raises(TimeoutError):
            await led.deleting(9)
        await led.all_agree(log_start=9)
        assert (await led.deleting(9)).log_start_offset == 9
        assert (await led.deleting(4)).log_start_offset == 9, "it is deleted already"

    leading(work)


def test_a_deletion_says_how_far_all_who_may_lead_have_moved() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        with pytest.raises(TimeoutError):
            await led.deleting(20)
        await moves(led, 2, 15)
        await moves(led, 3, 13)
        assert (await led.deleting(9)).log_start_offset == 13

    leading(work)


def test_only_committed_records_are_deleted_and_by_default_all_of_them() -> None:
    async def work(led: Led) -> None:
        with pytest.raises(OffsetNotAvailableError):
            await led.deleting(0)
        await led.all_agree()
        led.produce(0, acks=1)
        with pytest.raises(OffsetOutOfRangeError, match="Offset 31 is past the high watermark 30"):
            await led.deleting(31)
        assert led.log.log.start_offset == 0
        with pytest.raises(TimeoutError):
            await led.deleting(END)
        assert led.log.log.start_offset == END
        led.flushed(31)
        await led.all_agree(31, log_start=31)
        assert (await led.deleting(None)).log_start_offset == 31

    leading(work)


def test_nothing_is_deleted_below_min_insync() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        led.leader.committed(assignment(2, ALL[:1]))
        with pytest.raises(NotEnoughReplicasError, match="t-0 has 1 in-sync.*Nothing was deleted"):
            await led.deleting(9)
        assert led.log.log.start_offset == 0

    leading(work)
