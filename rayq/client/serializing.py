"""Calls the serializers and deserializers of users, and says where one failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from rayq.client.subscription import Slice
from rayq.config import ConsumerConfig, Deserializer, ProducerConfig, Serializer
from rayq.errors import DeserializationError, SerializationError
from rayq.records import Record, TopicPartition

Batch = TypeVar("Batch")


class Serializers:
    """Those of a producer, one at least. None is never given to them: it is a tombstone, or no
    key."""

    def __init__(self, of_key: Serializer | None, of_value: Serializer | None) -> None:
        self._of_key = of_key
        self._of_value = of_value

    @classmethod
    def of(cls, config: ProducerConfig) -> Serializers | None:
        """None where there are none: then `send` pays nothing for it."""
        if config.key_serializer is None and config.value_serializer is None:
            return None
        return cls(config.key_serializer, config.value_serializer)

    def pair(self, topic: str, value: Any, key: Any) -> tuple[Any, Any]:
        """Value and key of one record. Raises SerializationError."""
        if value is not None and self._of_value is not None:
            value = _serialized("value", self._of_value, value, topic, None)
        if key is not None and self._of_key is not None:
            key = _serialized("key", self._of_key, key, topic, None)
        return value, key

    def columns(
        self, topic: str, values: Iterable[Any], keys: Iterable[Any] | None
    ) -> tuple[Sequence[Any], Sequence[Any] | None]:
        """Those of many records. Raises SerializationError, which has the index."""
        return (
            _serialized_column("value", self._of_value, values, topic),
            None if keys is None else _serialized_column("key", self._of_key, keys, topic),
        )


def _serialized_column(
    what: str, serializer: Serializer | None, column: Iterable[Any], topic: str
) -> list[Any]:
    if serializer is None:
        return list(column)
    return [
        item if item is None else _serialized(what, serializer, item, topic, index)
        for index, item in enumerate(column)
    ]


def _serialized(what: str, serializer: Serializer, item: Any, topic: str, index: int | None) -> Any:
    data: Any
    try:
        data = serializer(item)
    except Exception as error:
        failed = f"raised {_told(error)}"
        raise _serialization_error(what, serializer, item, topic, index, failed) from error
    if not isinstance(data, bytes):
        failed = f"returned {type(data).__name__}, not bytes."
        raise _serialization_error(what, serializer, item, topic, index, failed)
    return data


def _serialization_error(
    what: str, serializer: Serializer, item: Any, topic: str, index: int | None, failed: str
) -> SerializationError:
    place = f"the {what}" if index is None else f"{what}s[{index}]"
    error = SerializationError(
        f"{what}_serializer {_name(serializer)} was given {place} of a record for topic {topic!r}, "
        f"of type {type(item).__name__}, and {failed} Nothing of this call was accepted."
    )
    error.topic, error.index = topic, index
    return error


class Deserializers:
    """Those of a consumer, one at least. None is never given to them: it is a tombstone, or no
    key."""

    def __init__(self, of_key: Deserializer | None, of_value: Deserializer | None) -> None:
        self._of_key = of_key
        self._of_value = of_value

    @classmethod
    def of(cls, config: ConsumerConfig) -> Deserializers | None:
        """None where there are none."""
        if config.key_deserializer is None and config.value_deserializer is None:
            return None
        return cls(config.key_deserializer, config.value_deserializer)

    def apply_all(
        self, parts: Iterable[tuple[Batch, Slice]]
    ) -> tuple[list[tuple[Batch, Slice]], DeserializationError | None]:
        """As `apply`, of slices that follow on each other, each with its batch."""
        read: list[tuple[Batch, Slice]] = []
        for batch, part in parts:
            found, failure = self.apply(part)
            if found.values:
                read.append((batch, found))
            if failure is not None:
                return read, failure
        return read, None

    def apply(self, part: Slice) -> tuple[Slice, DeserializationError | None]:
        """The records up to the first that cannot be read, with keys and values as users see them;
        and why that one cannot, None if all can."""
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
) -> tuple[list[Any], Exception | None]:
    """As far as it goes, and what it ended with."""
    if deserializer is None:
        return column, None
    read: list[Any] = []
    add = read.append
    try:
        for data in column:
            add(None if data is None else deserializer(data))
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        return read, error
    return read, None


def _failure(
    what: str, deserializer: Deserializer | None, part: Slice, index: int, cause: Exception
) -> DeserializationError:
    offset = part.offsets[index]
    raw = Record(
        part.topic,
        part.partition,
        offset,
        part.timestamps_ms[index],
        None if part.keys is None else part.keys[index],
        part.values[index],
        list((part.headers and part.headers[index]) or ()),
    )
    error = DeserializationError(
        f"{what}_deserializer {_name(deserializer)} was given the {what} of offset {offset} of "
        f"{part.topic}-{part.partition} and raised {_told(cause)} The record is as it was sent in "
        f"`error.record`; seek to {offset + 1} to go on without it."
    )
    error.topic_partition = TopicPartition(part.topic, part.partition)
    error.offset, error.next_offset = offset, offset + 1
    error.record = raw
    error.__cause__ = cause
    return error


def _name(function: Callable[..., Any] | None) -> str:
    """Where a user finds it."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    module = getattr(function, "__module__", None)
    return f"{module}.{name}" if isinstance(module, str) else str(name)


def _told(error: Exception) -> str:
    """Ends in a full stop."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a user's class may do anything
        text = ""
    name = type(error).__qualname__
    return (f"{name}: {text}" if text else name).removesuffix(".") + "."
