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


class Link:
    """The way from one host to another. `chunking` is the probability that a receiver gets the
    arrived bytes in parts."""

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
        self.chunking = 0.1
        self._loop = loop
        self._rng = rng
        self._busy_until = 0.0

    def is_cut(self) -> bool:
        return self.cut or not self.source.up or not self.target.up

    def arrival(self, size: int) -> float:
        """The time when this many bytes arrive that are sent now."""
        least, usual = self.delay_s
        delay = least + (usual - least) * self._rng.random() ** 2
        if self._rng.random() < 0.005:
            delay *= self._rng.uniform(1, 20)
        start = now = self._loop.time()
        if self.bytes_per_s is not None:
            start = max(now, self._busy_until)
            self._busy_until = start = start + size / self.bytes_per_s
        return start + delay
