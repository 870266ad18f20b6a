"""Measures how long the machine stood still, by a thread that wakes often and notes when it is
late.

What else a machine does can hold up all processes on it for seconds. rayq counts such time for
nobody ("When something fails" in docs/architecture.md), so it comes on top of every pause.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType

INTERVAL_S = 0.05
LATE_S_MIN = 0.25
"""A controller, too, begins to count here."""


class Standstill:
    """A context manager that watches."""

    def __init__(self) -> None:
        self._late: list[tuple[float, float]] = []
        """The times at which the thread woke up too late, and by how much, in seconds."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="standstill", daemon=True)

    def _watch(self) -> None:
        last_s = time.monotonic()
        while not self._is_over.wait(INTERVAL_S):
            now_s = time.monotonic()
            late_s = now_s - last_s - INTERVAL_S
            last_s = now_s
            if late_s > LATE_S_MIN:
                self._late.append((now_s, late_s))

    def between_s(self, from_s: float, until_s: float) -> float:
        """The number of seconds between two times (`time.monotonic`) in which the machine stood
        still."""
        return sum(
            max(0.0, min(woke_s, until_s) - max(woke_s - late_s, from_s))
            for woke_s, late_s in list(self._late)
        )

    def __enter__(self) -> Standstill:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()
