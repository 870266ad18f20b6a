"""The log warns of partitions without a leader, but not while a start gets on."""

from __future__ import annotations

import logging

import pytest

from rayq.actors.controller.controller import OFFLINE_PATIENCE_S
from tests.simulated.staged import Stage, play


@pytest.mark.slow
def test_a_partition_that_stays_offline_after_a_start_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "rayq.actors.controller.metrics")

    def levels() -> list[int]:
        return [one.levelno for one in caplog.records if "_offline " in one.getMessage()]

    async def script(stage: Stage) -> None:
        cluster = stage.cluster
        await stage.process.run(stage.admin.create_topic("t", 1, 1))
        await stage.send("t", [b"one"])
        leader = stage.value("t").leader
        assert leader is not None and levels() == []
        cluster.kill_controller()
        cluster.kill_broker(leader)
        await stage.until(lambda: levels() != [], "its loss to be told", limit_s=30)
        assert levels() == [logging.INFO]
        await stage.pause(OFFLINE_PATIENCE_S)
        assert levels() == [logging.INFO, logging.WARNING]
        assert f"waits for broker {leader}" in caplog.text
        # From now on the warning comes at once, and once.
        cluster.start_broker(leader)
        await stage.until(lambda: stage.value("t").leader == leader, "it to lead", limit_s=30)
        cluster.kill_broker(leader)
        await stage.pause(OFFLINE_PATIENCE_S)
        assert levels() == [logging.INFO, logging.WARNING, logging.WARNING]

    play(script)
