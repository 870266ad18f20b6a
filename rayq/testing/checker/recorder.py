"""Writes down what clients do and see, while they do it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import BinaryIO, Literal

from rayq.errors import RayqError
from rayq.records import Record, RecordMetadata, TopicPartition
from rayq.testing.checker.history import (
    Assigned,
    Begun,
    ClockInDoubt,
    CommitsSeen,
    CommitsSet,
    Committed,
    Committing,
    Cut,
    Delayed,
    Disturbed,
    Event,
    Found,
    GroupOpened,
    KeeperInDoubt,
    Killed,
    Polled,
    ProducerOpened,
    Purged,
    QueueClosed,
    QueueOpened,
    Released,
    Sending,
    Sent,
    Settled,
    Settling,
    Took,
    encode_event,
)

REASON_HEADER = "rayq.reason"
"""The header of a dead letter of a queue that has the reason."""


class Recorder:
    """Collects events, in memory or in `file` (each on its way before the call returns), from any
    thread."""

    def __init__(self, file: BinaryIO | None = None) -> None:
        self.events: list[Event] = []
        """The events that did not go to a file."""
        self.acknowledged = 0
        self._file = file
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._commits: dict[str, int] = {}
        self._settlings: dict[str, int] = {}

    def opened(
        self, producer: str, *, acks: Literal["all", "1", "0"] = "all", idempotent: bool = True
    ) -> None:
        self._note(ProducerOpened(producer, acks, idempotent))

    def sending(self, producer: str, topic: str, key: bytes | None, value: bytes) -> int:
        """Call it before the send, in the order of the sends; returns the send's number."""
        number = self._numbers[producer] = self._numbers.get(producer, 0) + 1
        sending = Sending(
            producer=producer,
            number=number,
            topic=topic,
            key=None if key is None else as_text(key),
            value=as_text(value),
        )
        self._note(sending)
        return number

    def delivered(self, producer: str, number: int, metadata: RecordMetadata) -> None:
        self.acknowledged += 1
        partition, offset = metadata.partition, metadata.offset
        self._note(Sent(producer, number, "ok", partition=partition, offset=offset))

    def not_delivered(self, producer: str, number: int, error: BaseException) -> None:
        """rayq's errors say whether the record may have been written all the same."""
        is_unknown = not isinstance(error, RayqError) or error.outcome_unknown
        outcome: Literal["failed", "unknown"] = "unknown" if is_unknown else "failed"
        self._note(Sent(producer, number, outcome, error=f"{type(error).__name__}: {error}"))

    def outcome(
        self,
        producer: str,
        number: int,
        metadata: RecordMetadata | None,
        error: BaseException | None,
    ) -> None:
        """Notes what a delivery callback was called with: one of the last two is not None."""
        if metadata is not None:
            self.delivered(producer, number, metadata)
        else:
            assert error is not None
            self.not_delivered(producer, number, error)

    def assigned(
        self, consumer: str, topic: str, partition: int, *, reads_all: bool = False
    ) -> None:
        """`reads_all` is for the reader that reads everything in the end, see `Assigned`."""
        self._note(Assigned(consumer, topic, partition, reads_all=reads_all))

    def polled(self, consumer: str, records: Sequence[Record]) -> None:
        """Notes the records that one poll returned."""
        by_place: dict[tuple[str, int], tuple[list[int], list[str]]] = {}
        for record in records:
            offsets, values = by_place.setdefault((record.topic, record.partition), ([], []))
            offsets.append(record.offset)
            values.append(as_text(record.value or b""))
        for (topic, partition), (offsets, values) in by_place.items():
            self._note(Polled(consumer, topic, partition, offsets=offsets, values=values))

    # --- groups ---------------------------------------------------------------------------------

    def group_opened(self, group: str, topics: Iterable[str]) -> None:
        """Call it before the first member joins."""
        self._note(GroupOpened(group, list(topics)))

    def owns(self, consumer: str, group: str, epoch: int, places: Iterable[TopicPartition]) -> None:
        """Call it from `on_assigned`."""
        for topic, partition in sorted(places):
            self._note(Assigned(consumer, topic, partition, group=group, epoch=epoch))

    def released(
        self,
        consumer: str,
        places: Iterable[TopicPartition],
        how: Literal["revoked", "closed", "lost"],
    ) -> None:
        """Call it at the end of `on_revoked`, and from `on_lost`."""
        for topic, partition in sorted(places):
            self._note(Released(consumer, topic, partition, how))

    def killed(self, consumer: str) -> None:
        """Call it just before the kill."""
        self._note(Killed(consumer))

    def committing(self, consumer: str, group: str, offsets: Mapping[TopicPartition, int]) -> int:
        """Call it before the commit; returns the commit's number."""
        number = self._commits[consumer] = self._commits.get(consumer, 0) + 1
        self._note(Committing(consumer, group, number, [(*p, o) for p, o in offsets.items()]))
        return number

    def committed(self, consumer: str, number: int) -> None:
        self._note(Committed(consumer, number, "ok"))

    def not_committed(self, consumer: str, number: int, error: BaseException) -> None:
        self._note(Committed(consumer, number, "unknown", f"{type(error).__name__}: {error}"))

    def commits_seen(
        self, consumer: str, group: str, offsets: Mapping[TopicPartition, int | None]
    ) -> None:
        """Notes the answer of `consumer.committed` in `on_assigned`."""
        self._note(CommitsSeen(consumer, group, [(*p, o) for p, o in offsets.items()]))

    def commits_set(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Notes the answer of `admin.set_group_offsets`."""
        self._note(CommitsSet(group, [(*p, o) for p, o in offsets.items()]))

    # --- queues ---------------------------------------------------------------------------------

    def queue_opened(
        self,
        queue: str,
        topic: str,
        *,
        dead_letters: str | None,
        timeout_s: float,
        ordered_by_key: bool = False,
        is_own: bool = False,
        is_loose: bool = False,
        holds: bool = False,
    ) -> None:
        """See `QueueOpened`."""
        self._note(
            QueueOpened(
                queue, topic, dead_letters, timeout_s, ordered_by_key, is_own, is_loose, holds
            )
        )

    def queue_closed(self, queue: str) -> None:
        """Call it before the queue is deleted."""
        self._note(QueueClosed(queue))

    def purged(
        self, queue: str, partition: int, offset: int, *, at_s: float, is_sure: bool = True
    ) -> None:
        """Notes the answer of a purge. See `Purged`."""
        self._note(Purged(queue, partition, offset, at_s, is_sure))

    def cut(self, topic: str, partition: int, offset: int) -> None:
        """See `Cut`."""
        self._note(Cut(topic, partition, offset))

    def keeper_in_doubt(self) -> None:
        """See `KeeperInDoubt`."""
        self._note(KeeperInDoubt())

    def delayed(self, value: bytes, due_s: float) -> None:
        """Call it before the record is sent."""
        self._note(Delayed(as_text(value), due_s))

    def took(
        self,
        queue: str,
        consumer: str,
        partition: int,
        locks: Iterable[tuple[int, int, bytes, bytes | None]],
        *,
        asked_s: float,
        at_s: float,
        state_epoch: int | None = None,
    ) -> None:
        """Notes the records that a take brought: `(offset, count, value, key)` of each record."""
        found = [
            (offset, count, as_text(value), None if key is None else as_text(key))
            for offset, count, value, key in locks
        ]
        self._note(Took(queue, consumer, partition, asked_s, at_s, found, state_epoch))

    def begun(self, queue: str, values: Iterable[bytes]) -> None:
        """See `Begun`."""
        self._note(Begun(queue, [as_text(value) for value in values]))

    def settling(
        self,
        queue: str,
        consumer: str,
        partition: int,
        what: Literal["ack", "nack", "reject", "release", "extend"],
        locks: Sequence[tuple[int, int]],
        *,
        at_s: float,
        state_epoch: int | None = None,
        seconds: float | None = None,
    ) -> int:
        """Call it before the request; returns its number."""
        number = self._settlings[consumer] = self._settlings.get(consumer, 0) + 1
        self._note(
            Settling(
                queue, consumer, number, partition, what, at_s, list(locks), state_epoch, seconds
            )
        )
        return number

    def settled(self, consumer: str, number: int, *, at_s: float, lost: Iterable[int] = ()) -> None:
        """`lost` are the offsets of the locks that had gone."""
        self._note(Settled(consumer, number, "ok", at_s, list(lost)))

    def not_settled(
        self, consumer: str, number: int, error: BaseException, *, at_s: float
    ) -> None:
        text = f"{type(error).__name__}: {error}"
        self._note(Settled(consumer, number, "unknown", at_s, error=text))

    def disturbed(self, consumer: str | None = None, *, at_s: float = 0.0) -> None:
        """Call it before connections of a consumer (None: of any) are broken. `at_s` is on the
        clock of `took`; where it is left out, takes that are under way count as asked for later."""
        self._note(Disturbed(consumer, at_s))

    def clock_in_doubt(self, *, is_over: bool = False) -> None:
        """See `ClockInDoubt`."""
        self._note(ClockInDoubt(is_over))

    def found(self, records: Sequence[Record]) -> None:
        """Notes what the final read of a queue's own topic, or of its dead letters, returned."""
        by_place: dict[tuple[str, int], tuple[list[int], list[str], list[str]]] = {}
        for record in records:
            place = record.topic, record.partition
            offsets, values, reasons = by_place.setdefault(place, ([], [], []))
            offsets.append(record.offset)
            values.append(as_text(record.value or b""))
            reasons.append(as_text(dict(record.headers).get(REASON_HEADER, b"")))
        for (topic, partition), found in by_place.items():
            self._note(Found(topic, partition, *found))

    def _note(self, event: Event) -> None:
        if self._file is None:
            self.events.append(event)
            return
        line = encode_event(event)
        with self._lock:
            self._file.write(line)
            self._file.flush()


def as_text(value: bytes) -> str:
    """A value as histories show it."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.hex()
