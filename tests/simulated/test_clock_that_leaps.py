"""A leader's wall clock is far ahead for a while."""

from __future__ import annotations

import pytest

from rayq.config import DAY_MS, KIB
from tests.simulated.staged import Stage, play


@pytest.mark.slow
def test_ten_days_ahead_for_seventy_seconds_delete_nothing() -> None:
    async def script(stage: Stage) -> None:
        await stage.process.run(
            stage.admin.create_topic("t", 1, 3, retention_ms=7 * DAY_MS, segment_bytes=KIB)
        )
        for number in range(20):
            await stage.send("t", [b"%d" % number * 100])
        await stage.pause(60)
        leader = stage.value("t").leader
        assert leader is not None
        stage.hosts[leader].jump_clock(10 * DAY_MS)
        await stage.pause(70)
        stage.hosts[leader].jump_clock(-10 * DAY_MS)
        await stage.pause(60)
        held = stage.log("t", leader)
        assert held is not None and len(held.log.local_segments()) > 1
        assert held.log.start_offset == 0

    play(script)


@pytest.mark.slow
def test_what_is_old_is_deleted_all_the_same() -> None:
    async def script(stage: Stage) -> None:
        await stage.process.run(
            stage.admin.create_topic("t", 1, 3, retention_ms=60_000, segment_bytes=KIB)
        )
        for number in range(20):
            await stage.send("t", [b"%d" % number * 100])
        await stage.pause(120)
        leader = stage.value("t").leader
        assert leader is not None
        held = stage.log("t", leader)
        assert held is not None and held.log.start_offset > 0

    play(script)
