"""Result of one take, and its records that are not settled yet. No network.

A record *waits* here until a call of `take` hands it out; it is *open* until it is settled, or its
lock is gone. All of this belongs to the loop, except `lost`, which the tasks read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from rayq.config import QueueConfig
from rayq.errors import LockLostError
from rayq.records import Headers

Run = tuple[int, int, int]
"""`(first offset, last offset, count)`."""


class Row(NamedTuple):
    """A record of a take."""

    offset: int
    delivery_count: int
    """The lock's count, including deliveries that do not count as failures."""
    key: bytes | None
    value: bytes | None
    headers: Headers | None
    timestamp_ms: int
    is_large: bool = False
    """The value is the manifest of a large value, which is not here yet."""


class Origin(Protocol):
    """The queue that records were taken from."""

    name: str
    topic: str
    config: QueueConfig


class Settles(Protocol):
    """The lane that has taken the records, and settles them."""

    partition: int

    @property
    def source(self) -> Origin: ...

    @property
    def name(self) -> str: ...

    def handling_left_s(self, taken: Taken) -> float: ...

    def ack(self, taken: Taken, offset: int) -> None: ...

    def nack(self, taken: Taken, offset: int, delay_ms: int | None) -> None: ...

    def reject(
        self, taken: Taken, offset: int, reason: str, *, is_failure: bool = False
    ) -> None: ...

    def release(self, taken: Taken, offsets: list[int]) -> None: ...

    def extend(self, taken: Taken, offset: int, timeout_s: float) -> None: ...

    def begin(self, taken: Taken, offsets: list[int]) -> None: ...

    async def flush(self) -> None: ...


class Taken:
    """See the module."""

    __slots__ = (
        "lane",
        "holder",
        "state_epoch",
        "taken_at_s",
        "until_s",
        "renew_at_s",
        "rows",
        "next_row",
        "open",
        "keys",
        "excused",
        "unbegun",
        "is_told_long",
        "lost",
    )

    def __init__(
        self, lane: Settles, holder: str, state_epoch: int, taken_at_s: float, rows: list[Row]
    ) -> None:
        """`taken_at_s` is the time at which the take was *sent*: the leader counts from later."""
        self.lane = lane
        self.holder = holder
        self.state_epoch = state_epoch
        self.taken_at_s = taken_at_s
        timeout_s = lane.source.config.visibility_timeout_s
        self.until_s = taken_at_s + timeout_s
        """The time at which the locks end unless they are extended."""
        self.renew_at_s = taken_at_s + timeout_s / 3
        self.rows = rows
        """The rows; those from `next_row` on wait."""
        self.next_row = 0
        self.keys: dict[int, bytes | None] = {}
        """The keys by offset, in a queue that is ordered by key."""
        if lane.source.config.ordered_by_key:
            self.keys = {row.offset: row.key for row in rows}
        self.open = {row.offset: row.delivery_count for row in rows}
        self.excused: dict[int, int] = {}
        """The number of deliveries that were no failures, by offset."""
        self.unbegun: set[int] = set()
        """The offsets of which the leader is told before a user gets them."""
        self.is_told_long = False
        self.lost: dict[int, LockLostError] = {}

    def withhold(self) -> list[Row]:
        """Removes and returns its rows, which count as handed out until they are put back into
        `rows`."""
        rows, self.rows = self.rows, []
        return rows

    @property
    def waiting_bytes(self) -> int:
        """The size of the waiting values."""
        return sum(len(row.value or b"") for row in self.rows[self.next_row :])

    @property
    def waiting(self) -> int:
        """The number of rows that were not handed out."""
        return len(self.rows) - self.next_row

    def waiting_offsets(self) -> list[int]:
        """The open offsets that were not handed out."""
        return [row.offset for row in self.rows[self.next_row :] if row.offset in self.open]

    def hand_out(
        self, count: int, busy: set[bytes] | None, *, is_at_once: bool = False
    ) -> list[Row]:
        """Hands out up to `count` open rows, which then no longer wait. A row whose key is `busy`
        is kept; the keys of the rows handed out become busy. `is_at_once`: only rows before the
        first one of which the leader has to be told."""
        if busy is None:
            found: list[Row] = []
            while self.next_row < len(self.rows) and len(found) < count:
                part = self.rows[self.next_row : self.next_row + count - len(found)]
                if is_at_once and self.unbegun:
                    part = part[:1]
                    if part[0].offset in self.unbegun:
                        break
                self.next_row += len(part)
                found += [row for row in part if row.offset in self.open]
            return found
        found, kept = [], []
        for row in self.rows:
            if row.offset not in self.open:
                continue
            if len(found) == count or row.key in busy:
                kept.append(row)
                continue
            found.append(row)
            if row.key is not None:
                busy.add(row.key)
        self.rows = kept
        return found

    def give_back(self, count: int) -> list[int]:
        """Removes the last `count` of the waiting rows, or all, and returns their open offsets."""
        start = max(self.next_row, len(self.rows) - count)
        given = [row.offset for row in self.rows[start:] if row.offset in self.open]
        del self.rows[start:]
        return given

    def put_back(self, rows: list[Row]) -> None:
        """Puts back rows that were handed out to nobody: they are the next ones again."""
        self.rows[self.next_row : self.next_row] = rows

    def lose(self, offset: int, error: LockLostError) -> bool:
        """Marks the lock of an offset as gone. Returns False if it was settled, or lost, before."""
        if self.open.pop(offset, None) is None:
            return False
        self.rows = [row for row in self.rows[self.next_row :] if row.offset != offset]
        self.next_row = 0
        self.lost[offset] = error
        return True


def runs_of(records: Iterable[tuple[int, int]]) -> Iterator[Run]:
    """Runs of consecutive offsets with the same count, ascending, from the `(offset, count)` of
    records."""
    first = last = count = -1
    for offset, its_count in sorted(records):
        if offset == last + 1 and its_count == count:
            last = offset
            continue
        if count >= 0:
            yield first, last, count
        first = last = offset
        count = its_count
    if count >= 0:
        yield first, last, count
