"""Followers of a partition to which nobody writes: their leader holds their fetches for long."""

from __future__ import annotations

import pytest

from tests.simulated.staged import Stage, play


def test_an_idle_follower_whose_broker_was_cut_off_comes_back_into_sync_at_once() -> None:
    async def script(stage: Stage) -> None:
        topic = "idle"
        await stage.process.run(stage.admin.create_topic(topic, 1, 3))
        await stage.send(topic, [b"the last record"])
        await stage.pause(20)  # Longer than a follower may lag.
        assert stage.in_sync(topic) == {0, 1, 2}
        follower = next(one for one in (0, 1, 2) if not stage.leads(topic, one))
        others = [host for number, host in enumerate(stage.hosts) if number != follower]
        stage.network.cut([stage.hosts[follower]], [*others, stage.cluster.controller_host])
        await stage.until(lambda: follower not in stage.in_sync(topic), "its session to end")
        stage.network.heal()
        await stage.until(lambda: follower in stage.in_sync(topic), "it to be in sync", limit_s=3)

    play(script)


@pytest.mark.slow
def test_a_record_that_comes_after_long_is_acknowledged_at_once() -> None:
    async def script(stage: Stage) -> None:
        await stage.process.run(stage.admin.create_topic("idle", 1, 3))
        for _ in range(3):
            await stage.pause(45)
            start_s = stage.world.now_s
            await stage.send("idle", [b"one more"])
            assert stage.world.now_s - start_s < 1
            assert stage.in_sync("idle") == {0, 1, 2}

    play(script)


def test_an_idle_follower_that_goes_dark_holds_a_write_up_for_no_longer_than_it_may_lag() -> None:
    async def script(stage: Stage) -> None:
        await stage.process.run(stage.admin.create_topic("idle", 1, 3))
        await stage.send("idle", [b"before"])
        await stage.pause(45)
        follower = next(one for one in (0, 1, 2) if not stage.leads("idle", one))
        others = [host for number, host in enumerate(stage.hosts) if number != follower]
        stage.network.cut([stage.hosts[follower]], others)  # The controller still hears it.
        start_s = stage.world.now_s
        await stage.send("idle", [b"after"])
        limit_s = stage.cluster.config.replica_lag_time_max_ms / 1000
        assert limit_s - 1 < stage.world.now_s - start_s < limit_s + 3
        assert stage.in_sync("idle") == {0, 1, 2} - {follower}
        stage.network.heal()
        await stage.until(lambda: follower in stage.in_sync("idle"), "it to be in sync")

    play(script)
