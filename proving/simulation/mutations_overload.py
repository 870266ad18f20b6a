"""Bugs planted into what a cluster does under load: see `mutations`."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from proving.simulation.patches import Patch
from proving.simulation.planting import plants
from rayq import messages
from rayq.actors.controller.controller import Controller
from rayq.actors.listening_clock import ListeningClock
from rayq.backoff import Backoff, RetryBudget
from rayq.core.cluster import election

OVERLOAD = "overload"
STEPS_BEFORE = 300
"""Steps of other work that a heartbeat has to wait for."""


@plants("5", "the controller hears heartbeats after the work that is queued before them", OVERLOAD)
def heartbeats_behind_data() -> list[Patch]:
    handle = Controller.handle

    async def mutated(self: Any, request: Any) -> Any:
        if isinstance(request, messages.BrokerHeartbeat):
            for _ in range(STEPS_BEFORE):
                await asyncio.sleep(0)
        return await handle(self, request)

    return [(Controller, "handle", mutated)]


@plants("5", "a judge that was late counts that time as silence", OVERLOAD)
def session_ended_by_a_late_judge() -> list[Patch]:
    async def read_nothing() -> None:
        pass

    return [
        (ListeningClock, "now_s", lambda self: self._clock.monotonic()),
        (ListeningClock, "look", lambda self, *, can_hear=True: 0.0),
        (ListeningClock, "read_arrived", staticmethod(read_nothing)),
    ]


@plants("5", "a leader that was just elected is elected again by the next change", OVERLOAD)
def election_repeated() -> list[Patch]:
    settle = election.settle

    def mutated(value: Any, live: Any, **options: Any) -> Any:
        after = settle(value, live, **options)
        if after is not None or value.leader not in live:
            return after
        return msgspec.structs.replace(
            value,
            leader_epoch=value.leader_epoch + 1,
            partition_epoch=value.partition_epoch + 1,
        )

    return [(election, "settle", mutated)]


@plants("5", "requests that failed are repeated at once, and without end", OVERLOAD)
def retries_without_a_budget() -> list[Patch]:
    return [
        (Backoff, "next_s", lambda self: 0.0),
        (RetryBudget, "take", lambda self: True),
    ]
