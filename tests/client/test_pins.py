"""The pins of batch jobs, whose changes may come late."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from rayq.batch.offset_ranges import Split
from rayq.batch.pins import _Hold, _Pins
from rayq.client.environment import system_environment
from rayq.errors import TimeoutError, UnknownTopicError
from rayq.messages import PinSnapshot, UnpinSnapshot


class PlayedController:
    """Keeps pins as the controller does. A change that is lost is still under way."""

    environment = system_environment()

    def __init__(self) -> None:
        self.pins: dict[str, dict[int, int]] = {}
        self.loses = False
        self.hides = False
        self.late: list[Any] = []

    async def change(self, request: Any, **options: Any) -> None:
        if self.hides:
            raise UnknownTopicError("There is no topic of this id.")
        if self.loses:
            self.late.append(request)
            raise TimeoutError("no answer")
        self.take(request)

    def take(self, request: Any) -> None:
        if isinstance(request, UnpinSnapshot):
            self.pins.pop(request.pin_id, None)
        else:
            assert isinstance(request, PinSnapshot)
            self.pins[request.pin_id] = dict(request.starts)


def test_a_pin_that_comes_late_takes_back_nothing_that_was_pinned_since() -> None:
    async def script() -> None:
        controller = PlayedController()
        pins = _Pins(cast(Any, controller))

        def holds(start: int) -> _Hold:
            hold = _Hold(pins, [Split("t", "tid", 0, start, 500)])
            pins.holds[hold] = None
            return hold

        holds(100)
        controller.loses = True
        await pins.renew()
        controller.loses = False
        holds(50)
        await pins.renew()
        for request in controller.late:
            controller.take(request)
        assert min(starts[0] for starts in controller.pins.values()) == 50
        await pins.renew()
        assert len(controller.pins) == 2  # The late one ends by its time.

    asyncio.run(script())


def test_a_topic_that_is_hidden_for_a_while_is_pinned_again() -> None:
    async def script() -> None:
        controller = PlayedController()
        pins = _Pins(cast(Any, controller))
        pins.holds[_Hold(pins, [Split("t", "tid", 0, 100, 500)])] = None
        await pins.renew()
        controller.hides = True
        await pins.renew()
        controller.hides, controller.pins = False, {}  # The one before has ended by its time.
        await pins.renew()
        assert list(controller.pins.values()) == [{0: 100}]

    asyncio.run(script())
