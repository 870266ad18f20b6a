"""Calls of users' serializers, with errors that name the record that failed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rayq.client.arguments import many
from rayq.config import ProducerConfig, Serializer
from rayq.errors import SerializationError
from rayq.user_functions import close_unrun, name_of, told


class Serializers:
    """The serializers of a producer, one or both. They are never called with None, which is a
    tombstone or a missing key."""

    def __init__(self, of_key: Serializer | None, of_value: Serializer | None) -> None:
        self._of_key = of_key
        self._of_value = of_value

    @classmethod
    def of(cls, config: ProducerConfig) -> Serializers | None:
        """The serializers of a config, or None if it has none: `send` then pays nothing for
        them."""
        if config.key_serializer is None and config.value_serializer is None:
            return None
        return cls(config.key_serializer, config.value_serializer)

    def pair(self, topic: str, value: Any, key: Any) -> tuple[Any, Any]:
        """The value and key of one record, serialized. Raises SerializationError."""
        if value is not None and self._of_value is not None:
            value = _serialized("value", self._of_value, value, topic, None)
        if key is not None and self._of_key is not None:
            key = _serialized("key", self._of_key, key, topic, None)
        return value, key

    def columns(
        self, topic: str, values: Iterable[Any], keys: Iterable[Any] | None
    ) -> tuple[Sequence[Any], Sequence[Any] | None]:
        """The values and keys of many records, serialized. Raises SerializationError, which has the
        index."""
        return (
            _serialized_column("value", self._of_value, values, topic),
            None if keys is None else _serialized_column("key", self._of_key, keys, topic),
        )


def _serialized_column(
    what: str, serializer: Serializer | None, column: Iterable[Any], topic: str
) -> list[Any]:
    items = many(f"{what}s", column)
    if serializer is None:
        return items
    return [
        item if item is None else _serialized(what, serializer, item, topic, index)
        for index, item in enumerate(items)
    ]


def _serialized(what: str, serializer: Serializer, item: Any, topic: str, index: int | None) -> Any:
    data: Any
    try:
        data = serializer(item)
    except (KeyboardInterrupt, SystemExit):  # They come from the caller's own thread.
        raise
    except BaseException as error:
        failed = f"raised {told(error)}"
        raise _serialization_error(what, serializer, item, topic, index, failed) from error
    if not isinstance(data, bytes):
        close_unrun(data)
        failed = f"returned {type(data).__name__}, not bytes."
        raise _serialization_error(what, serializer, item, topic, index, failed)
    return data


def _serialization_error(
    what: str, serializer: Serializer, item: Any, topic: str, index: int | None, failed: str
) -> SerializationError:
    place = f"the {what}" if index is None else f"{what}s[{index}]"
    error = SerializationError(
        f"{what}_serializer {name_of(serializer)} was given {place} of a record for topic "
        f"{topic!r}, of type {type(item).__name__}, and {failed} Nothing of this call was accepted."
    )
    error.topic, error.index = topic, index
    return error
