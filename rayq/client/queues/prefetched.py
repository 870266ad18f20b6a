"""Prefetched records that users' threads take without asking the loop, because a round trip there
costs more than a short task."""

from __future__ import annotations

from collections import deque

from rayq.client.queues.acquired import AcquiredRecord
from rayq.client.queues.task import Delivery, HandedOut, QueueTask

PREFETCHED_MAX = 64
PREFETCHED_BYTES_MAX = 1024 * 1024
PREFETCHED_SHARE = 8
"""Minimum ratio of PREFETCHED_MAX to the number of records asked for: a thread that asks for more
goes to the loop, which has all waiting records."""


class Prefetched:
    """See the module. There is no lock: a record belongs to the thread, or loop, that pops it. The
    records here still count as waiting, and the loop takes them back before it decides about
    waiting records."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[AcquiredRecord, Delivery]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, count: int) -> list[QueueTask]:
        """Takes `count` records; [] if there are fewer. May be called from any thread."""
        found: list[QueueTask] = []
        if len(self._waiting) < count:
            return found
        while len(found) < count:
            try:
                record, delivery = self._waiting.popleft()
            except IndexError:  # Another thread was faster.
                break
            # If a Ctrl+C comes before the next line, the delivery gives the record back.
            if record.offset in delivery.batch.open:
                found.append(QueueTask(record, delivery))
                delivery.is_seen = True
        return found

    def put(self, parts: HandedOut) -> None:
        """Adds records. Runs on the loop."""
        for whole, records in parts:
            whole.end()
            for record in records:
                delivery = Delivery(
                    whole.batch, [record.offset], whole.acknowledger, whole.inbox
                )
                self._waiting.append((record, delivery))

    def put_back(self) -> None:
        """Puts all records that no thread has taken back into their batches. Runs on the loop."""
        parts: HandedOut = []
        while self._waiting:
            try:
                record, delivery = self._waiting.popleft()
            except IndexError:
                break
            if parts and parts[-1][0].batch is delivery.batch:
                delivery.end()
                parts[-1][1].append(record)
            else:
                parts.append((delivery, [record]))
        put_back(parts)


def put_back(parts: HandedOut) -> None:
    """Puts records that were handed out to nobody back into their batches."""
    for delivery, records in parts:
        delivery.end()
        delivery.batch.put_back(records)
