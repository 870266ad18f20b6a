"""The pauses of writes around each fault, from the times of sends and acknowledgements."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from proving.chaos.faults import Injected, Kind
from proving.chaos.load import Acknowledged


class Times(NamedTuple):
    """A distribution, in seconds."""

    n: int
    p50_s: float
    p99_s: float
    max_s: float


def times_of(values: Iterable[float]) -> Times | None:
    """The distribution of values, with percentiles by nearest rank. None without values."""
    ranked = sorted(values)
    if not ranked:
        return None
    count = len(ranked)
    p50, p99 = (ranked[max(-(-count * percent // 100), 1) - 1] for percent in (50, 99))
    return Times(count, p50, p99, ranked[-1])


class Measured(NamedTuple):
    """One partition around one fault, in seconds."""

    fault: Injected
    partition: int
    next_write_s: float
    """The time from the signal to the first acknowledgement of a record that was sent after it."""
    pause_s: float
    """The longest time without an acknowledgement, from the signal to the end of the fault."""
    recovery_pause_s: float
    """The longest time without an acknowledgement, from the end of the fault until all replicas
    were in sync again."""

    @property
    def is_affected(self) -> bool:
        return self.partition in self.fault.target.partitions


def measure(faults: Sequence[Injected], acknowledged: Sequence[Acknowledged]) -> list[Measured]:
    """Measures every partition around every fault."""
    return [
        Measured(
            fault,
            partition,
            next_write_s(times, fault.started_s),
            longest_pause_s(times.acknowledged_s, fault.started_s, fault.healed_s),
            longest_pause_s(times.acknowledged_s, fault.healed_s, fault.settled_s),
        )
        for fault in faults
        for partition, times in enumerate(acknowledged)
    ]


def next_write_s(times: Acknowledged, from_s: float) -> float:
    """The time until a record that was sent after `from_s` is acknowledged; infinite where none is.

    Records that were sent earlier do not count: their acknowledgement may still have been in a
    socket, and says nothing about the time after the fault.
    """
    start = bisect_left(times.acknowledged_s, from_s)
    for index in range(start, len(times.acknowledged_s)):
        if times.sent_s[index] >= from_s:
            return times.acknowledged_s[index] - from_s
    return float("inf")


def longest_pause_s(at_s: array[float], from_s: float, until_s: float) -> float:
    """The longest gap between neighbours among `from_s`, the times between the two limits, and
    `until_s`."""
    within = at_s[bisect_right(at_s, from_s) : bisect_left(at_s, until_s)]
    return max(later - sooner for sooner, later in pairwise([from_s, *within, until_s]))


def violations(measured: Iterable[Measured], leniency: float = 1.0) -> list[str]:
    """The partitions whose writes paused for longer than `leniency` times the fault's limit, and
    the time in which the machine stood still."""
    return [
        f"{measurement.fault.target.kind} of {measurement.fault.target.what}: "
        f"partition {measurement.partition} made no progress for "
        f"{max(measurement.next_write_s, measurement.pause_s):.2f} s, more than "
        f"{measurement.fault.limit_s:g} s; the machine stood still for "
        f"{measurement.fault.stood_still_s:.2f} s meanwhile."
        for measurement in measured
        if max(measurement.next_write_s, measurement.pause_s) - measurement.fault.stood_still_s
        > leniency * measurement.fault.limit_s
    ]


def by_kind(measured: Iterable[Measured]) -> dict[Kind, list[Measured]]:
    """The pauses of the affected partitions, in the order of the kinds."""
    found: dict[Kind, list[Measured]] = {}
    for measurement in measured:
        if measurement.is_affected:
            found.setdefault(measurement.fault.target.kind, []).append(measurement)
    return {kind: found[kind] for kind in Kind if kind in found}
