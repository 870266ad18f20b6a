"""Acknowledgements of the records of one partition, collected until a request is sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rayq.client.queues.acquired import AcquiredBatch
from rayq.messages import QUEUE_RANGES_MAX

WEIGHTS = {"begins": 1, "acks": 1, "nacks": 1, "rejects": 10, "extends": 1, "releases": 1}
"""All kinds of acknowledgements, in the order in which they are sent, with the weight of each in
ranges of one request: a reject carries a reason."""

Run = tuple[int, int, int]
"""`(first offset, last offset, count)`."""


class AckBatch:
    """Acknowledgements for the locks of one holder under one state epoch: by offset, with the
    lock's count. No offset is in two of them, except for `extends` and `begins`."""

    __slots__ = ("holder", "state_epoch", *WEIGHTS)

    def __init__(self, holder: str, state_epoch: int) -> None:
        self.holder = holder
        self.state_epoch = state_epoch
        self.acks: dict[int, tuple[int, AcquiredBatch]] = {}
        self.nacks: dict[int, tuple[int, int | None, AcquiredBatch]] = {}
        """The delay in ms; None means the queue's back-off."""
        self.rejects: dict[int, tuple[int, str, bool, AcquiredBatch]] = {}
        """The reason, and whether it failed its last delivery."""
        self.extends: dict[int, tuple[int, float, AcquiredBatch]] = {}
        """The new timeout in seconds."""
        self.releases: dict[int, tuple[int, AcquiredBatch]] = {}
        self.begins: dict[int, tuple[int, AcquiredBatch]] = {}

    def add(self, later: AckBatch) -> None:
        """Adds later acknowledgements for the same locks."""
        for name in WEIGHTS:
            getattr(self, name).update(getattr(later, name))

    def parts(self) -> Iterator[AckBatch]:
        """This batch, divided so that each request names at most QUEUE_RANGES_MAX."""
        sizes = (weight * len(getattr(self, name)) for name, weight in WEIGHTS.items())
        if sum(sizes) <= QUEUE_RANGES_MAX:
            yield self
            return
        part, size = AckBatch(self.holder, self.state_epoch), 0
        for name, weight in WEIGHTS.items():
            for offset, decided in getattr(self, name).items():
                getattr(part, name)[offset] = decided
                size += weight
                if size >= QUEUE_RANGES_MAX:
                    yield part
                    part, size = AckBatch(self.holder, self.state_epoch), 0
        if size:
            yield part

    def fields(self) -> dict[str, Any]:
        """The fields of a `Settle`."""
        return {
            "holder": self.holder,
            "state_epoch": self.state_epoch,
            "acks": _runs(self.acks),
            "nacks": _runs_by_detail(self.nacks),
            "rejects": self._failed(is_failure=False),
            "failures": self._failed(is_failure=True),
            "extends": [
                (*run, max(round(timeout_s * 1000), 1))
                for *run, timeout_s in _runs_by_detail(self.extends)
            ],
            "releases": _runs(self.releases),
            "begins": _runs(self.begins),
        }

    def _failed(self, *, is_failure: bool) -> list[tuple[int, int, str]]:
        return [
            (offset, count, reason)
            for offset, (count, reason, has_failed, _) in self.rejects.items()
            if has_failed == is_failure
        ]

    def decided_in(self, first: int, last: int) -> Iterator[tuple[int, AcquiredBatch]]:
        """The users' decisions on these offsets that do not hold without the lock. (Records that
        were given back are gone, as they should be, even if an earlier request did it.)"""
        for kind in (self.acks, self.rejects):
            for offset, decided in kind.items():
                if first <= offset <= last:
                    yield offset, decided[-1]

    def held_in(self, first: int, last: int) -> Iterator[tuple[int, AcquiredBatch]]:
        """The offsets in this range whose locks are kept."""
        for kind in (self.extends, self.begins):
            for offset, kept in kind.items():
                if first <= offset <= last:
                    yield offset, kept[-1]


def _runs(kind: dict[int, tuple[int, AcquiredBatch]]) -> list[Run]:
    return list(runs_of((offset, count) for offset, (count, _) in kind.items()))


def _runs_by_detail(kind: dict[int, tuple[int, Any, AcquiredBatch]]) -> list[tuple[Any, ...]]:
    """Runs of offsets with the same count and the same delay, or timeout, which they end with."""
    same: dict[Any, list[tuple[int, int]]] = {}
    for offset, (count, detail, _) in kind.items():
        same.setdefault(detail, []).append((offset, count))
    return [(*run, detail) for detail, records in same.items() for run in runs_of(records)]


def runs_of(records: Iterable[tuple[int, int]]) -> Iterator[Run]:
    """Runs of consecutive offsets with the same count, ascending, from the `(offset, count)` of
    records."""
    first = last = count = -1
    for offset, its_count in sorted(records):
        if offset == last + 1 and its_count == count:
            last = offset
            continue
        if count >= 0:
            yield first, last, count
        first = last = offset
        count = its_count
    if count >= 0:
        yield first, last, count
