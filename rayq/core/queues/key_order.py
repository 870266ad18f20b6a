"""Unsettled records of a partition that have the same key, in their order."""

from __future__ import annotations

from collections.abc import Iterator


class KeyOrder:
    """One line for each key, of the offsets of its unsettled records. Keys are told apart by their
    hash: two that share one wait for each other, and nothing else."""

    __slots__ = ("_after", "_before", "_hash", "_last")

    def __init__(self) -> None:
        self._hash: dict[int, int] = {}
        self._before: dict[int, int] = {}
        self._after: dict[int, int] = {}
        self._last: dict[int, int] = {}

    def add(self, offset: int, key: bytes) -> None:
        """Adds `offset` to the end of the line of its key."""
        hashed = hash(key)
        before = self._last.get(hashed)
        self._last[hashed] = offset
        self._hash[offset] = hashed
        if before is not None:
            self._before[offset] = before
            self._after[before] = offset

    def remove(self, offset: int) -> int | None:
        """Removes `offset` from its line. Returns the new first offset of the line if this one was
        first."""
        hashed = self._hash.pop(offset, None)
        if hashed is None:
            return None
        before = self._before.pop(offset, None)
        after = self._after.pop(offset, None)
        if after is None:
            if before is None:
                del self._last[hashed]
            else:
                self._last[hashed] = before
                del self._after[before]
            return None
        if before is None:
            del self._before[after]
            return after
        self._before[after] = before
        self._after[before] = after
        return None

    def is_first(self, offset: int) -> bool:
        """Returns whether nothing of its key is before this one. True for a record without a
        key."""
        return offset not in self._before

    def before(self, offset: int) -> int | None:
        return self._before.get(offset)

    def after(self, offset: int) -> int | None:
        return self._after.get(offset)

    def all_after(self, offset: int) -> Iterator[int]:
        """The later ones of its key, ascending. No line may change meanwhile."""
        after = self._after.get(offset)
        while after is not None:
            yield after
            after = self._after.get(after)
