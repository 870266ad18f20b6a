"""Records whose deletion was acknowledged do not come back, whichever replica leads."""

from __future__ import annotations

import errno

import pytest

from rayq.errors import TimeoutError
from rayq.records import TopicPartition
from tests.simulated.staged import Stage, play

PLACE = TopicPartition("t", 0)


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
