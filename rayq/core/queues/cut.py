"""Finds how much of the log that a queue has scanned survives an unclean election, which truncates
the log. Other records follow there."""

from __future__ import annotations

from collections.abc import Sequence

Epochs = Sequence[tuple[int, int]]
"""`(leader epoch, its first offset)`, ascending. An epoch ends where the next one begins."""


def common_end(
    known: Epochs, learned: int, log: Epochs, log_end: int, *, log_start: int
) -> int:
    """End of the part of the log that is as it was `known` up to `learned`: `learned`, unless it
    was truncated. What lies below `log_start` is gone, and nothing to compare."""
    for number, (epoch, first) in enumerate(known):
        end = known[number + 1][1] if number + 1 < len(known) else learned
        if end <= log_start:
            continue
        begin, stop = _place(epoch, log, log_end)
        if begin is None or begin > max(first, log_start):
            # The log has other records where this epoch was: those before it are in common.
            return max(min(first, stop), log_start)
        if stop < end:
            return max(stop, log_start)
    return min(learned, max(log_end, log_start))


def _place(epoch: int, log: Epochs, log_end: int) -> tuple[int | None, int]:
    """Start and end of an epoch in the log. Without that epoch: None, and the end of the epochs
    before it."""
    for index, (log_epoch, first) in enumerate(log):
        if log_epoch > epoch:
            return None, first
        if log_epoch == epoch:
            return first, log[index + 1][1] if index + 1 < len(log) else log_end
    return None, log_end
