"""Records from batches, and calls of users' deserializers, with errors that name the record."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Any, TypeVar

from rayq.client.consuming.subscription import Slice
from rayq.config import ConsumerConfig, Deserializer
from rayq.errors import DeserializationError, HandlerError
from rayq.records import Headers, Record, TopicPartition
from rayq.user_functions import LAZY, check_ran, close_unrun, name_of, told

Batch = TypeVar("Batch")


class Deserializers:
    """The deserializers of a consumer, at least one. They are never called with None, which is a
    tombstone or a missing key."""

    def __init__(self, of_key: Deserializer | None, of_value: Deserializer | None) -> None:
        self._of_key = of_key
        self._of_value = of_value

    @classmethod
    def of(cls, config: ConsumerConfig) -> Deserializers | None:
        """The deserializers of a config, or None if it has none."""
        if config.key_deserializer is None and config.value_deserializer is None:
            return None
        return cls(config.key_deserializer, config.value_deserializer)

    def apply_all(
        self, parts: Iterable[tuple[Batch, Slice]]
    ) -> tuple[list[tuple[Batch, Slice]], DeserializationError | None]:
        """Does the same as `apply` for consecutive slices, each with its batch."""
        read: list[tuple[Batch, Slice]] = []
        for batch, part in parts:
            found, failure = self.apply(part)
            if found.values:
                read.append((batch, found))
            if failure is not None:
                return read, failure
        return read, None

    def apply(self, part: Slice) -> tuple[Slice, DeserializationError | None]:
        """The records up to the first that cannot be read, with keys and values as users see them,
        and the error of that record, or None if all can be read."""
        keys, key_error = _deserialized(self._of_key, part.keys or [])
        values, value_error = _deserialized(
            self._of_value, part.values if key_error is None else part.values[: len(keys)]
        )
        count = len(part.values)
        failure: DeserializationError | None = None
        if value_error is not None:
            count = len(values)
            failure = _failure("value", self._of_value, part, count, value_error)
        elif key_error is not None:
            count = len(keys)
            failure = _failure("key", self._of_key, part, count, key_error)
        read = part._replace(keys=None if part.keys is None else keys[:count], values=values)
        if failure is not None:
            headers = part.headers
            read = read._replace(
                offsets=part.offsets[:count],
                timestamps_ms=part.timestamps_ms[:count],
                headers=None if headers is None else headers[:count],
            )
        return read, failure


def _deserialized(
    deserializer: Deserializer | None, column: list[bytes | None]
) -> tuple[list[Any], BaseException | None]:
    """The column up to the first failure, and that failure. Errors that end a program pass through.
    A CancelledError of a deserializer cancels nothing: it is a failure like others."""
    if deserializer is None:
        return column, None
    read: list[Any] = []
    add = read.append
    try:
        for data in column:
            add(None if data is None else deserializer(data))
    except (KeyboardInterrupt, SystemExit):  # They come from the caller's own thread.
        raise
    except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
        return read, error
    return _up_to_unrun(read)


def _up_to_unrun(read: list[Any]) -> tuple[list[Any], BaseException | None]:
    """The results of a deserializer, up to the first that shows that it has not run."""
    unrun = {
        kind
        for kind in set(map(type, read))
        if issubclass(kind, LAZY)
        or hasattr(kind, "__await__")
        or hasattr(kind, "add_done_callback")
    }
    if not unrun:
        return read, None
    for index, value in enumerate(read):
        try:
            if type(value) in unrun:
                check_ran("It", value)
        except HandlerError as error:
            for later in read[index + 1 :]:
                close_unrun(later)
            return read[:index], error
    return read, None


def _failure(
    what: str, deserializer: Deserializer | None, part: Slice, index: int, cause: BaseException
) -> DeserializationError:
    offset = part.offsets[index]
    raw = Record(
        topic=part.topic,
        partition=part.partition,
        offset=offset,
        timestamp_ms=part.timestamps_ms[index],
        key=None if part.keys is None else part.keys[index],
        value=part.values[index],
        headers=list((part.headers and part.headers[index]) or ()),
    )
    error = DeserializationError(
        f"{what}_deserializer {name_of(deserializer)} was given the {what} of offset {offset} of "
        f"{part.topic}-{part.partition} and raised {told(cause)} The record is as it was sent in "
        f"`error.record`; seek to {offset + 1} to continue without it."
    )
    error.topic_partition = TopicPartition(part.topic, part.partition)
    error.offset, error.next_offset = offset, offset + 1
    error.record = raw
    error.__cause__ = cause
    return error


def records_of(part: Slice) -> list[Record]:
    """One Record for each row; each has its own list of headers."""
    headers: Iterable[Headers]
    if part.headers is None:
        headers = iter(list, None)
    else:
        headers = [row or [] for row in part.headers]
    return list(
        map(
            Record,
            repeat(part.topic),
            repeat(part.partition),
            part.offsets,
            part.timestamps_ms,
            repeat(None) if part.keys is None else part.keys,
            part.values,
            headers,
        )
    )
