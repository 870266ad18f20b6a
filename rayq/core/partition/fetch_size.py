"""Size of a follower's fetch, adapted to the speed of the link."""

from __future__ import annotations

from rayq.config import KIB, MIB

FETCH_BYTES_MAX = 4 * MIB
FETCH_BYTES_MIN = 64 * KIB
"""Minimum size of a fetch, however slow answers are: the machine may be slow and not the link."""
SLOW_S = 3.0
"""Maximum time of an answer; one that takes longer was too large."""
QUICK_S = 1.0
"""Time within which a full answer may be followed by a larger one."""


class FetchSize:
    """`bytes_max` for the next fetch, by how the earlier fetches went."""

    def __init__(self) -> None:
        self.bytes_max = FETCH_BYTES_MAX

    def answered(self, size_bytes: int, took_s: float) -> None:
        """Takes note of an answer of `size_bytes`, `took_s` after its request."""
        if took_s > SLOW_S:
            # One batch may be larger than what was asked for.
            self._set(min(self.bytes_max, size_bytes) * SLOW_S / took_s)
        elif took_s < QUICK_S and 2 * size_bytes >= self.bytes_max:
            self._set(2 * self.bytes_max)

    def timed_out(self) -> None:
        """Takes note that no answer came in time."""
        self._set(self.bytes_max / 2)

    def _set(self, bytes_max: float) -> None:
        self.bytes_max = max(FETCH_BYTES_MIN, min(FETCH_BYTES_MAX, int(bytes_max)))
