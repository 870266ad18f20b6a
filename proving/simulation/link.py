"""The way from one host to another, as slow as it is, cut or not."""

from __future__ import annotations

import random
from typing import Protocol

from proving.simulation.loop import SimulationLoop


class NetworkHost(Protocol):
    """The network's view of a host."""

    name: str
    address: str
    up: bool


CHUNKING = 0.1
LATE_SHARE = 0.005
LATE_TIMES = 20.0


class Link:
    """The way from one host to another. Knobs: `chunking` is the probability that a receiver gets
    the arrived bytes in parts; `late_share` of what is sent takes up to `late_times` as long;
    `break_share` of the arrivals end their connection instead."""

    def __init__(
        self,
        source: NetworkHost,
        target: NetworkHost,
        delay_s: tuple[float, float],
        loop: SimulationLoop,
        rng: random.Random,
    ) -> None:
        self.source = source
        self.target = target
        self.cut = False
        self.delay_s = delay_s
        self.bytes_per_s: float | None = None
        self.chunking = CHUNKING
        self.late_share = LATE_SHARE
        self.late_times = LATE_TIMES
        self.break_share = 0.0
        self._loop = loop
        self._rng = rng
        self._busy_until = 0.0

    def is_cut(self) -> bool:
        return self.cut or not self.source.up or not self.target.up

    def arrival(self, size: int) -> float:
        """The time when this many bytes arrive that are sent now."""
        least, usual = self.delay_s
        delay = least + (usual - least) * self._rng.random() ** 2
        if self._rng.random() < self.late_share:
            delay *= self._rng.uniform(1, self.late_times)
        start = now = self._loop.time()
        if self.bytes_per_s is not None:
            start = max(now, self._busy_until)
            self._busy_until = start = start + size / self.bytes_per_s
        return start + delay
