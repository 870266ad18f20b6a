"""Check of how much of the log that a queue has learned is still there: an unclean election
truncates a log, which then continues with other records."""

from __future__ import annotations

from collections.abc import Sequence

Epochs = Sequence[tuple[int, int]]
"""`(leader epoch, its first offset)`, ascending. An epoch ends where the next one begins."""


def common_end(
    known: Epochs, learned: int, log: Epochs, log_end: int, *, log_start: int
) -> int:
    """Up to where the log is the one that was `known` up to `learned`: `learned`, unless it was
    cut. What lies below `log_start` is gone, and nothing to compare."""
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
    """Where the log's part of an epoch begins and ends. Without one: None, and where the epochs
    before it end."""
    for place, (one, first) in enumerate(log):
        if one > epoch:
            return None, first
        if one == epoch:
            return first, log[place + 1][1] if place + 1 < len(log) else log_end
    return None, log_end
