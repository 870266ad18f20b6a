"""The trace of a run. Two runs of one seed must have the same trace."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable

_TAIL_NOTES = 200


class Trace:
    """A hash over all events, and the last of them as text."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.value = 0
        self._notes: deque[str] = deque(maxlen=_TAIL_NOTES)

    def note(self, text: str) -> None:
        """Notes an event that is worth reading when a run has failed."""
        self.value = hash((self.value, zlib.crc32(text.encode())))
        self._notes.append(f"{self._now():.6f} {text}")

    def mix(self, *numbers: float) -> None:
        """Notes an event that only has to be the same in the next run of this seed."""
        self.value = hash((self.value, numbers))

    def digest(self) -> str:
        return f"{self.value & 0xFFFF_FFFF_FFFF_FFFF:016x}"

    def tail(self) -> list[str]:
        """The last notes, oldest first, each with its virtual time."""
        return list(self._notes)
