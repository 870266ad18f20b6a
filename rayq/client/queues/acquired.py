"""Records that one take has acquired and that are not settled yet. No network.

A record *waits* here until a call of `take` hands it out; it is *open* until it is settled, or its
lock is gone. All of this belongs to the loop, except `lost`, which the tasks read.
"""

from __future__ import annotations

from typing import NamedTuple

from rayq.client.queues.partition_client import QueuePartitionClient
from rayq.errors import (
    CorruptBatchError,
    LockLostError,
    ProtocolError,
    RayqError,
    UnreadableRecordError,
    UnsupportedBatchError,
    UnsupportedFormatError,
)
from rayq.messages import TakeResponse
from rayq.records import Headers
from rayq.storage.batch import decode_columns, is_as_written, split_batches

TAKE_RECORDS_MAX = 10_000


class AcquiredRecord(NamedTuple):
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


class AcquiredBatch:
    """See the module."""

    __slots__ = (
        "partition",
        "holder",
        "state_epoch",
        "acquired_at_s",
        "until_s",
        "renew_at_s",
        "records",
        "next_record",
        "open",
        "keys",
        "excused",
        "unbegun",
        "is_told_long",
        "lost",
    )

    def __init__(
        self,
        partition: QueuePartitionClient,
        holder: str,
        state_epoch: int,
        acquired_at_s: float,
        records: list[AcquiredRecord],
    ) -> None:
        """`acquired_at_s` is the time at which the take was *sent*: the leader counts from
        later."""
        self.partition = partition
        self.holder = holder
        self.state_epoch = state_epoch
        self.acquired_at_s = acquired_at_s
        config = partition.queue.config
        self.until_s = acquired_at_s + config.visibility_timeout_s
        """The time at which the locks end unless they are extended."""
        self.renew_at_s = acquired_at_s + config.visibility_timeout_s / 3
        self.records = records
        """The records; those from `next_record` on wait."""
        self.next_record = 0
        self.keys: dict[int, bytes | None] = {}
        """The keys by offset, in a queue that is ordered by key."""
        if config.ordered_by_key:
            self.keys = {record.offset: record.key for record in records}
        self.open = {record.offset: record.delivery_count for record in records}
        self.excused: dict[int, int] = {}
        """The number of deliveries that were not failures, by offset."""
        self.unbegun: set[int] = set()
        """The offsets of which the leader is told before a user gets them."""
        self.is_told_long = False
        self.lost: dict[int, LockLostError] = {}

    def handling_left_s(self) -> float:
        """The time for which its records may still be handled."""
        partition = self.partition
        return self.acquired_at_s + partition.queue.config.max_handling_s - partition.client.now

    def withhold(self) -> list[AcquiredRecord]:
        """Removes and returns its records, which count as handed out until they are put back into
        `records`."""
        records, self.records = self.records, []
        return records

    @property
    def waiting_bytes(self) -> int:
        """The size of the waiting values."""
        return sum(len(record.value or b"") for record in self.records[self.next_record :])

    @property
    def waiting(self) -> int:
        """The number of records that were not handed out."""
        return len(self.records) - self.next_record

    def waiting_offsets(self) -> list[int]:
        """The open offsets that were not handed out."""
        waiting = self.records[self.next_record :]
        return [record.offset for record in waiting if record.offset in self.open]

    def keys_out(self) -> set[bytes]:
        """The keys of the records that users hold, in a queue that is ordered by key."""
        waiting = set(self.waiting_offsets())
        keys = (self.keys[offset] for offset in self.open if offset not in waiting)
        return {key for key in keys if key is not None}

    def hand_out(
        self, count: int, busy: set[bytes] | None, *, is_at_once: bool = False
    ) -> list[AcquiredRecord]:
        """Hands out up to `count` open records, which then no longer wait. A record whose key is
        `busy` is kept; the keys of the records handed out become busy. `is_at_once`: only records
        before the first one of which the leader has to be told."""
        if busy is None:
            found: list[AcquiredRecord] = []
            while self.next_record < len(self.records) and len(found) < count:
                part = self.records[self.next_record : self.next_record + count - len(found)]
                if is_at_once and self.unbegun:
                    part = part[:1]
                    if part[0].offset in self.unbegun:
                        break
                self.next_record += len(part)
                found += [record for record in part if record.offset in self.open]
            return found
        found, kept = [], []
        for record in self.records:
            if record.offset not in self.open:
                continue
            if len(found) == count or record.key in busy:
                kept.append(record)
                continue
            found.append(record)
            if record.key is not None:
                busy.add(record.key)
        self.records = kept
        return found

    def give_back(self, count: int) -> list[int]:
        """Removes the last `count` of the waiting records, or all, and returns their open
        offsets."""
        start = max(self.next_record, len(self.records) - count)
        given = [record.offset for record in self.records[start:] if record.offset in self.open]
        del self.records[start:]
        return given

    def give_back_all(self) -> list[int]:
        """Removes all waiting records, and returns their open offsets."""
        given = self.waiting_offsets()
        self.records, self.next_record = [], 0
        return given

    def put_back(self, records: list[AcquiredRecord]) -> None:
        """Puts back records that were handed out to nobody: they are the next ones again."""
        self.records[self.next_record : self.next_record] = records

    def lose(self, offset: int, error: LockLostError) -> bool:
        """Marks the lock of an offset as gone. Returns False if it was settled, or lost, before."""
        if self.open.pop(offset, None) is None:
            return False
        waiting = self.records[self.next_record :]
        self.records = [record for record in waiting if record.offset != offset]
        self.next_record = 0
        self.lost[offset] = error
        return True


# --- an answer to a take --------------------------------------------------------------------------


def acquired_batches(
    partition: QueuePartitionClient,
    holder: str,
    sent_at_s: float,
    response: TakeResponse,
    payload: memoryview,
) -> tuple[list[AcquiredBatch], dict[int, UnreadableRecordError]]:
    """The records of an answer with locks, and the errors of unreadable ones by offset. The first
    batch has the records that can be handed out as they are; each large value, and each unreadable
    record, has a batch of its own. Raises CorruptBatchError."""
    records, unreadable = records_of(response, payload)
    parts: list[list[AcquiredRecord]] = [[]]
    for record in records:
        if record.is_large or record.offset in unreadable:
            parts.append([record])
        else:
            parts[0].append(record)
    batches = [
        AcquiredBatch(partition, holder, response.state_epoch, sent_at_s, part) for part in parts
    ]
    excused = {
        offset: many
        for first, last, many in response.excused
        for offset in range(first, last + 1)
    }
    unbegun = {offset for first, last in response.unbegun for offset in range(first, last + 1)}
    for batch in batches:
        batch.excused = excused
        batch.unbegun = unbegun & batch.open.keys()
    return batches, unreadable


def check_ranges(response: TakeResponse) -> None:
    """Raises ProtocolError where an answer is about more records than can be asked for: each of
    them is looked at one by one."""
    for ranges in (response.locks, response.excused, response.unbegun):
        if sum(max(last - first + 1, 0) for first, last, *_ in ranges) > TAKE_RECORDS_MAX:
            raise ProtocolError(
                f"The answer to a take is about more than {TAKE_RECORDS_MAX} records, which is the "
                "most that can be asked for. It is not used."
            )


def records_of(
    response: TakeResponse, payload: memoryview
) -> tuple[list[AcquiredRecord], dict[int, UnreadableRecordError]]:
    """The records of a take, out of the batches that hold them, and the errors of unreadable ones
    by offset; an unreadable record has only its offset. Raises CorruptBatchError."""
    locks = iter(response.locks)
    first, last, count = next(locks)
    records: list[AcquiredRecord] = []
    unreadable: dict[int, UnreadableRecordError] = {}
    for position, header in split_batches(payload):
        if header.is_control or header.next_offset <= first:
            continue
        try:
            offsets, times, keys, values, headers = decode_columns(payload, position, header)
        except (CorruptBatchError, UnsupportedFormatError) as error:
            failure = _unreadable(error, is_as_written(payload, position, header))
            for begin, end, its_count in response.locks:
                for offset in range(
                    max(begin, header.base_offset), min(end, header.last_offset) + 1
                ):
                    records.append(AcquiredRecord(offset, its_count, None, None, None, 0))
                    unreadable[offset] = failure
            continue
        for index, offset in enumerate(offsets):
            while offset > last:
                first, last, count = next(locks, (1 << 62, 1 << 62, 0))
            if offset >= first:
                records.append(
                    AcquiredRecord(
                        offset,
                        count,
                        None if keys is None else keys[index],
                        values[index],
                        None if headers is None else headers[index],
                        times[index],
                        header.is_large,
                    )
                )
    return records, unreadable


def _unreadable(error: RayqError, is_as_written: bool) -> UnreadableRecordError:
    message = f"A record cannot be read: {error.message}"
    if isinstance(error, UnsupportedFormatError):
        return UnsupportedBatchError(message)
    found = CorruptBatchError(message)
    found.crc_matches = is_as_written
    return found
