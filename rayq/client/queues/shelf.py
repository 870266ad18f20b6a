"""Shelf of records that users' threads can take without asking the loop, because a round trip there
costs more than a short task."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from rayq.client.queues.taken import Row, Taken
from rayq.client.queues.task import Decisions, Lease, QueueTask

SHELF_MAX = 64
SHELF_BYTES_MAX = 1024 * 1024
SHELF_SHARE = 8
"""Minimum ratio of the shelf to the number of records asked for: a thread that asks for more goes
to the loop, which has all waiting records."""


class Shelf:
    """See the module. There is no lock: a record belongs to the thread, or loop, that pops it. The
    records here still count as waiting, and the loop takes them back before it decides about
    waiting records."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Row, Lease]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, count: int) -> list[QueueTask]:
        """Takes `count` records; [] if there are fewer. May be called from any thread."""
        found: list[QueueTask] = []
        if len(self._waiting) < count:
            return found
        while len(found) < count:
            try:
                row, lease = self._waiting.popleft()
            except IndexError:  # Another thread was faster.
                break
            # If a Ctrl+C comes before the next line, the lease gives the record back.
            if row.offset in lease.taken.open:
                found.append(QueueTask(row, lease))
                lease.is_seen = True
        return found

    def put(self, parts: Iterable[tuple[Taken, list[Row]]], decisions: Decisions) -> None:
        """Puts records on the shelf. Runs on the loop."""
        self._waiting.extend(
            (row, Lease(taken, [row.offset], decisions)) for taken, rows in parts for row in rows
        )

    def take_back(self) -> list[tuple[Taken, list[Row]]]:
        """Takes back all records that no thread has taken, in their order. Runs on the loop."""
        parts: list[tuple[Taken, list[Row]]] = []
        while self._waiting:
            try:
                row, lease = self._waiting.popleft()
            except IndexError:
                break
            lease.end()
            if not parts or parts[-1][0] is not lease.taken:
                parts.append((lease.taken, []))
            parts[-1][1].append(row)
        return parts
