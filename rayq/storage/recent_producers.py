"""Producer states of the last while, in memory: a truncation begins at one of them."""

from __future__ import annotations

from typing import NamedTuple

from rayq.storage.producer_state import ProducerState

STEP_BATCHES = 1_000
"""One state is taken after so many batches, and as many as it has producers: so it costs 2 us per
batch at most. Of 100,000 producers it takes 0.2 s, as the snapshot of a checkpoint does."""
STATES_MAX = 8


class RecentState(NamedTuple):
    """The producers of all batches below `offset`, as in a snapshot file."""

    offset: int
    snapshot: bytes


class RecentProducers:
    """The states of one log, from the one at the high watermark on: nothing below that is cut, but
    after an unclean election.

    A leader that was elected has its followers cut what it lacks, and no write is acknowledged
    until they did. The snapshot files are up to `flush_checkpoint_bytes` apart: to read the log
    again from there takes seconds where batches are small. From here on it is some thousand
    batches.
    """

    def __init__(self) -> None:
        self._states: list[RecentState] = []
        self._batches = 0
        """The number of batches appended since the last state."""

    def begin(self, end_offset: int, producers: ProducerState) -> None:
        """The log has these producers now, whatever was before."""
        self._states.clear()
        self._add(end_offset, producers)

    def appended(self, end_offset: int, producers: ProducerState) -> None:
        """One more batch was appended."""
        self._batches += 1
        if self._batches >= STEP_BATCHES and self._batches >= len(producers):
            self._add(end_offset, producers)

    def _add(self, end_offset: int, producers: ProducerState) -> None:
        self._batches = 0
        self._states.append(RecentState(end_offset, producers.snapshot()))
        if len(self._states) > STATES_MAX:  # The high watermark stands still: keep the first.
            del self._states[1]

    def forget_below(self, high_watermark: int) -> None:
        """Keeps the newest state at or below the high watermark, and all above."""
        while len(self._states) > 1 and self._states[1].offset <= high_watermark:
            del self._states[0]

    def cut(self, end_offset: int) -> RecentState | None:
        """The log ends at `end_offset` now. Returns the newest state that is still one of it."""
        while self._states and self._states[-1].offset > end_offset:
            self._states.pop()
        return self._states[-1] if self._states else None
