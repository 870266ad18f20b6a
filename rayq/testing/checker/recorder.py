"""Writes down what clients do and see, while they do it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import BinaryIO, Literal

from rayq.errors import RayqError
from rayq.records import Record, RecordMetadata
from rayq.testing.checker.history import (
    Assigned,
    Event,
    Polled,
    ProducerOpened,
    Sending,
    Sent,
    encode_event,
)


class Recorder:
    """Collects events, in memory or in `file` (each on its way before the call returns), from any
    thread."""

    def __init__(self, file: BinaryIO | None = None) -> None:
        self.events: list[Event] = []
        """Those that did not go to a file."""
        self.acknowledged = 0
        self._file = file
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}

    def opened(
        self, producer: str, *, acks: Literal["all", "1", "0"] = "all", idempotent: bool = True
    ) -> None:
        self._note(ProducerOpened(producer, acks, idempotent))

    def sending(self, producer: str, topic: str, key: bytes | None, value: bytes) -> int:
        """Call it before the send, in the order of the sends; returns the send's number."""
        number = self._numbers[producer] = self._numbers.get(producer, 0) + 1
        shown_key = None if key is None else as_text(key)
        self._note(Sending(producer, number, topic, shown_key, as_text(value)))
        return number

    def delivered(self, producer: str, number: int, metadata: RecordMetadata) -> None:
        self.acknowledged += 1
        self._note(Sent(producer, number, "ok", metadata.partition, metadata.offset))

    def not_delivered(self, producer: str, number: int, error: BaseException) -> None:
        """rayq's errors say whether the record may have been written all the same."""
        is_unknown = not isinstance(error, RayqError) or error.outcome_unknown
        outcome: Literal["failed", "unknown"] = "unknown" if is_unknown else "failed"
        self._note(Sent(producer, number, outcome, error=f"{type(error).__name__}: {error}"))

    def assigned(self, consumer: str, topic: str, partition: int) -> None:
        self._note(Assigned(consumer, topic, partition))

    def polled(self, consumer: str, records: Sequence[Record]) -> None:
        """What one poll returned."""
        by_place: dict[tuple[str, int], tuple[list[int], list[str]]] = {}
        for record in records:
            offsets, values = by_place.setdefault((record.topic, record.partition), ([], []))
            offsets.append(record.offset)
            values.append(as_text(record.value or b""))
        for (topic, partition), (offsets, values) in by_place.items():
            self._note(Polled(consumer, topic, partition, offsets, values))

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
