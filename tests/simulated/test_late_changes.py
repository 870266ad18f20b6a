"""What cannot be done in time is refused before it costs."""

from __future__ import annotations

import pytest

from rayq import messages
from rayq.actors.controller.controller import CHANGE_PATIENCE_S, Controller
from rayq.errors import OverloadedError
from tests.simulated.staged import Stage, play


async def refused(controller: Controller, change: messages.CreateTopic) -> bool:
    try:
        await controller.handle(change)
    except OverloadedError:
        return True
    return False


@pytest.mark.parametrize("waits_s, is_made", [(CHANGE_PATIENCE_S - 0.5, True), (
    CHANGE_PATIENCE_S + 0.5, False,
)])
def test_a_change_whose_turn_comes_when_nobody_waits_any_longer_is_refused(
    waits_s: float, is_made: bool
) -> None:
    async def script(stage: Stage) -> None:
        assert stage.cluster.controller is not None
        controller = stage.cluster.controller.controller_host.controller
        assert controller is not None
        process = stage.cluster.controller_process
        assert process is not None
        await stage.pause(2)
        async with controller._changes:  # Others are before it.
            change = process.start(refused(controller, messages.CreateTopic("t", 1, 1, {})))
            await stage.pause(waits_s)
        await stage.pause(0.5)
        assert change.result() is not is_made
        assert ("t" in controller.state.topic_ids) is is_made

    play(script)
