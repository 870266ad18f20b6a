"""A set of integers, stored as runs: cheap if its members are contiguous."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable


class NumberRuns:
    """Runs `(first, last)`, ascending, with at least one number missing between two of them."""

    __slots__ = ("_firsts", "_lasts")

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in runs:
            self.add(first, last)

    def __bool__(self) -> bool:
        return bool(self._firsts)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._firsts, number) - 1
        return at >= 0 and number <= self._lasts[at]

    def runs(self) -> list[tuple[int, int]]:
        return list(zip(self._firsts, self._lasts, strict=True))

    def count(self) -> int:
        return sum(self._lasts) - sum(self._firsts) + len(self._firsts)

    def last_of_run(self, number: int) -> int:
        """The last number of the run that has this one; the number before it where none has."""
        at = bisect_right(self._firsts, number) - 1
        return max(number - 1, self._lasts[at]) if at >= 0 else number - 1

    def add(self, first: int, last: int) -> None:
        """Adds the numbers of [first, last]."""
        if first > last:
            return
        start = bisect_left(self._lasts, first - 1)
        end = bisect_right(self._firsts, last + 1)
        if start < end:
            first = min(first, self._firsts[start])
            last = max(last, self._lasts[end - 1])
        self._firsts[start:end] = [first]
        self._lasts[start:end] = [last]

    def remove_below(self, number: int) -> None:
        at = bisect_left(self._lasts, number)
        del self._firsts[:at], self._lasts[:at]
        if self._firsts and self._firsts[0] < number:
            self._firsts[0] = number

    def remove_from(self, number: int) -> None:
        """Removes `number` and everything above."""
        at = bisect_left(self._firsts, number)
        del self._firsts[at:], self._lasts[at:]
        if self._lasts and self._lasts[-1] >= number:
            self._lasts[-1] = number - 1
