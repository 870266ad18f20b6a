"""Decisions of a consumer on the records of one partition, collected until a request is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from rayq.client.queues.taken import Taken, runs_of
from rayq.messages import QUEUE_RANGES_MAX

WEIGHTS = {"begins": 1, "acks": 1, "nacks": 1, "rejects": 10, "extends": 1, "releases": 1}
"""All kinds of decisions, in the order in which they are sent, with the weight of each in ranges of
one request: a reject carries a reason."""


class Settlement:
    """Decisions for the locks of one holder under one state epoch: by offset, with the lock's
    count. No offset is in two of them, except for `extends` and `begins`."""

    __slots__ = ("holder", "state_epoch", *WEIGHTS)

    def __init__(self, holder: str, state_epoch: int) -> None:
        self.holder = holder
        self.state_epoch = state_epoch
        self.acks: dict[int, tuple[int, Taken]] = {}
        self.nacks: dict[int, tuple[int, int | None, Taken]] = {}
        """The delay in ms; None means the queue's back-off."""
        self.rejects: dict[int, tuple[int, str, bool, Taken]] = {}
        """The reason, and whether it failed its last delivery."""
        self.extends: dict[int, tuple[int, float, Taken]] = {}
        """The new timeout in seconds."""
        self.releases: dict[int, tuple[int, Taken]] = {}
        self.begins: dict[int, tuple[int, Taken]] = {}

    def parts(self) -> Iterator[Settlement]:
        """This settlement, divided so that each request names at most QUEUE_RANGES_MAX."""
        sizes = (weight * len(getattr(self, name)) for name, weight in WEIGHTS.items())
        if sum(sizes) <= QUEUE_RANGES_MAX:
            yield self
            return
        part, size = Settlement(self.holder, self.state_epoch), 0
        for name, weight in WEIGHTS.items():
            for offset, decided in getattr(self, name).items():
                getattr(part, name)[offset] = decided
                size += weight
                if size >= QUEUE_RANGES_MAX:
                    yield part
                    part, size = Settlement(self.holder, self.state_epoch), 0
        if size:
            yield part

    def fields(self) -> dict[str, Any]:
        """The fields of a `Settle`."""
        nacks: dict[int | None, list[tuple[int, int]]] = {}
        for offset, (count, delay_ms, _) in self.nacks.items():
            nacks.setdefault(delay_ms, []).append((offset, count))
        extends: dict[float, list[tuple[int, int]]] = {}
        for offset, (count, timeout_s, _) in self.extends.items():
            extends.setdefault(timeout_s, []).append((offset, count))
        return {
            "holder": self.holder,
            "state_epoch": self.state_epoch,
            "acks": list(runs_of((offset, count) for offset, (count, _) in self.acks.items())),
            "nacks": [
                (*run, delay) for delay, records in nacks.items() for run in runs_of(records)
            ],
            "rejects": self._dying(is_failure=False),
            "failures": self._dying(is_failure=True),
            "extends": [
                (*run, max(round(timeout_s * 1000), 1))
                for timeout_s, records in extends.items()
                for run in runs_of(records)
            ],
            "releases": list(
                runs_of((offset, count) for offset, (count, _) in self.releases.items())
            ),
            "begins": list(runs_of((offset, count) for offset, (count, _) in self.begins.items())),
        }

    def _dying(self, *, is_failure: bool) -> list[tuple[int, int, str]]:
        return [
            (offset, count, reason)
            for offset, (count, reason, has_failed, _) in self.rejects.items()
            if has_failed == is_failure
        ]

    def decided_in(self, first: int, last: int) -> Iterator[tuple[int, Taken]]:
        """The users' decisions on these offsets that do not hold without the lock. (Records that
        were given back are gone, as they should be, even if an earlier request did it.)"""
        for kind in (self.acks, self.rejects):
            for offset, decided in kind.items():
                if first <= offset <= last:
                    yield offset, decided[-1]


class Round:
    """The settlements that go to the leader together."""

    def __init__(self) -> None:
        self.settlements: dict[tuple[str, int], Settlement] = {}
        self._done: asyncio.Event = asyncio.Event()
        self._later: list[Round] = []

    def of(self, holder: str, state_epoch: int) -> Settlement:
        found = self.settlements.get((holder, state_epoch))
        if found is None:
            found = self.settlements[holder, state_epoch] = Settlement(holder, state_epoch)
        return found

    def add(self, later: Round) -> None:
        """Adds the later decisions; callers that wait for `later` then wait for this round."""
        for lock, settlement in later.settlements.items():
            known = self.of(*lock)
            for name in WEIGHTS:
                getattr(known, name).update(getattr(settlement, name))
        self._later.append(later)

    def done(self) -> None:
        self._done.set()
        for later in self._later:
            later.done()

    async def wait(self) -> None:
        await self._done.wait()
