"""Records that wait where users' threads can take them without asking the loop: to go there and
back costs more than a short task does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from rayq.client.queues.taken import Row, Taken
from rayq.client.queues.task import Decisions, Lease, QueueTask

SHELF_MAX = 64
SHELF_BYTES_MAX = 1024 * 1024
SHELF_SHARE = 8
"""A thread that asks for more than one record in so many of the shelf goes to the loop, which has
all that wait."""


class Shelf:
    """See the module. Whoever pops a record has it, a thread or the loop: there is no lock. What is
    here still counts as waiting, and the loop takes it back before it decides about what waits."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Row, Lease]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, count: int) -> list[QueueTask]:
        """From any thread. [] where there are fewer."""
        found: list[QueueTask] = []
        if len(self._waiting) < count:
            return found
        while len(found) < count:
            try:
                row, lease = self._waiting.popleft()
            except IndexError:  # Another thread was faster.
                break
            # Where a Ctrl+C comes before the next line, the lease gives it back.
            if row.offset in lease.taken.open:
                found.append(QueueTask(row, lease))
                lease.is_seen = True
        return found

    def put(self, parts: Iterable[tuple[Taken, list[Row]]], decisions: Decisions) -> None:
        """On the loop."""
        self._waiting.extend(
            (row, Lease(taken, [row.offset], decisions)) for taken, rows in parts for row in rows
        )

    def take_back(self) -> list[tuple[Taken, list[Row]]]:
        """All that no thread has taken, in their order. On the loop."""
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
