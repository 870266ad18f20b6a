"""Faults of reading: within one assignment offsets rise, and nothing that exists is left out."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise

from rayq.testing.checker.facts import Facts, Fault, Place

SKIP = "poll skip"
NONMONOTONIC = "non-monotonic poll"


def check_polls(facts: Facts) -> Iterator[Fault]:
    known: dict[Place, list[int]] = {place: sorted(offsets) for place, offsets in facts.log.items()}
    for reading in facts.readings:
        topic, number = reading.place
        for before, after in pairwise(reading.offsets):
            where = f"{reading.consumer} polled {topic}-{number} at {before}, then at {after}"
            if after <= before:
                yield Fault(NONMONOTONIC, f"{where}.")
                continue
            offsets = known[reading.place]
            first = bisect_right(offsets, before)
            missing = bisect_left(offsets, after) - first
            if missing > 0:
                yield Fault(SKIP, f"{where}: {missing} records between, from {offsets[first]} on.")
