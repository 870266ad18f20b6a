"""How far retention may go in a topic that one queue owns: up to what the queue has settled.

The chunks of a large value lie below the record that names them, and the queue passes over them at
once: they count as long as that record is not settled (`LargeHolds`). What was passed over before
this opening is not known: so nothing is deleted before all that was known then is settled, and no
value can be open any more whose chunks were appended then.
"""

from __future__ import annotations

from rayq.actors.clock_watch import ClockWatch
from rayq.actors.queues.reads import Piece
from rayq.core.large_holds import LargeHolds


class QueueRetention:
    """See the module. Of one opening."""

    def __init__(
        self, clock_watch: ClockWatch, *, log_start: int, known: int, open_until_s: float
    ) -> None:
        """All from `known` on is told to `learned`. What was learned before may be chunks of values
        that are open until `open_until_s`; the log begins at `log_start` now."""
        self._clock_watch = clock_watch
        self._holds = LargeHolds()
        self._log_start = log_start
        self._known = known
        self._open_until_s = open_until_s

    def learned(self, piece: Piece, first: int, end: int) -> None:
        """The queue has learned the offsets [first, end) of this piece."""
        for offset, append_time_ms, first_chunk in piece.large(first, end):
            if first_chunk is None:
                self._holds.chunk(offset, append_time_ms)
            elif first_chunk >= 0:
                self._holds.large(offset, first_chunk)

    def limit(self, kept_start: int, now_s: float) -> int:
        """The log start may go up to here, for a queue whose start was kept so."""
        if kept_start < self._known or now_s < self._open_until_s:
            return self._log_start
        return self._holds.floor(kept_start, self._clock_watch.now_ms())
