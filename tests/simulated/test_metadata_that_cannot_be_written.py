"""The disk fails under a broker's copy of the metadata: the broker does not go on with old
metadata."""

from __future__ import annotations

import errno

from tests.simulated.staged import Stage, play


def test_one_failed_write_of_the_metadata_costs_nothing() -> None:
    async def script(stage: Stage) -> None:
        await stage.process.run(stage.admin.create_topic("t", 1, 3))
        await stage.send("t", [b"%d" % number for number in range(20)])
        leader = stage.value("t").leader
        assert leader is not None
        disk = stage.hosts[leader].disk
        disk.fail("write", path_part="/metadata", error=errno.EIO, times=1)
        follower = next(one for one in (0, 1, 2) if one != leader)
        stage.hosts[follower].power_loss()  # The leader has to hear that it is out of sync.
        began_s = stage.world.now_s
        await stage.send("t", [b"more"] * 20)
        assert stage.world.now_s - began_s < 6
        assert stage.value("t").leader == leader

    play(script)


def test_a_broker_that_cannot_write_metadata_gives_up_its_session_until_it_can() -> None:
    async def script(stage: Stage) -> None:
        await stage.process.run(stage.admin.create_topic("t", 1, 3))
        await stage.send("t", [b"%d" % number for number in range(20)])
        leader = stage.value("t").leader
        assert leader is not None
        fault = stage.hosts[leader].disk.fail("write", "sync", path_part="/metadata")
        await stage.process.run(stage.admin.alter_topic_config("t", retention_ms=1_000_000))
        await stage.until(
            lambda: stage.value("t").leader not in (None, leader), "another to lead", limit_s=10
        )
        await stage.send("t", [b"more"] * 20)
        fault.heal()
        await stage.until(stage.cluster.is_whole, "all to be well", limit_s=20)

    play(script)


def test_a_broker_whose_write_of_metadata_hangs_gives_up_its_session_until_it_ends() -> None:
    async def script(stage: Stage) -> None:
        await stage.process.run(stage.admin.create_topic("t", 1, 3))
        await stage.send("t", [b"%d" % number for number in range(20)])
        leader = stage.value("t").leader
        assert leader is not None
        stage.hosts[leader].disk.stall(40)
        await stage.process.run(stage.admin.alter_topic_config("t", retention_ms=1_000_000))
        await stage.until(
            lambda: stage.value("t").leader not in (None, leader), "another to lead", limit_s=15
        )
        await stage.send("t", [b"more"] * 20)
        await stage.until(stage.cluster.is_whole, "all to be well", limit_s=60)

    play(script)
