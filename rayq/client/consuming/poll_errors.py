"""Errors that keep partitions from continuing, and when a poll raises them.

A poll that has records of other partitions returns those first. The same error of a partition is
raised again after ERROR_PAUSE_S at the earliest, unless the time of the poll is up, so that a loop
that ignores errors and polls again does not spin.
"""

from __future__ import annotations

from collections.abc import Mapping

from rayq.environment import Clock
from rayq.errors import DeserializationError, RayqError
from rayq.records import TopicPartition

ERROR_PAUSE_S = 1.0
"""Minimum interval between two raises of a partition's error, and the maximum time for which the
records of other partitions come before it."""


class PollErrors:
    """The errors of a consumer's partitions."""

    def __init__(self, clock: Clock) -> None:
        self._now_s = clock.monotonic
        self._raised: dict[TopicPartition, tuple[object, float]] = {}
        """The last error raised for each partition, and its time."""
        self._waiting: dict[TopicPartition, tuple[object, float]] = {}
        """The error of each partition that was not raised because other partitions have records,
        and since when it waits."""
        self._held: tuple[TopicPartition, RayqError] | None = None
        """An error that was raised recently, and is to be raised again at the end of the poll."""
        self._held_until_s = 0.0

    def begin(self) -> None:
        """Forgets the held error, before partitions are looked at again."""
        self._held = None

    def is_overdue(self, failed: Mapping[TopicPartition, RayqError]) -> bool:
        """Returns whether one of these errors has waited for ERROR_PAUSE_S: the other partitions
        may never run out of records."""
        now_s = self._now_s()
        is_overdue = False
        for partition, error in failed.items():
            known, since_s = self._waiting.get(partition, (None, now_s))
            if known != _identity(error):
                since_s = now_s
            self._waiting[partition] = _identity(error), since_s
            is_overdue = is_overdue or now_s - since_s >= ERROR_PAUSE_S
        return is_overdue

    def raise_next(self, failed: Mapping[TopicPartition, RayqError]) -> None:
        """Raises the first error that was not raised recently. If all were, holds one of them."""
        now_s = self._now_s()
        for partition, error in failed.items():
            known, raised_s = self._raised.get(partition, (None, now_s))
            until_s = raised_s + ERROR_PAUSE_S if known == _identity(error) else now_s
            if until_s <= now_s:
                self._raise(partition, error)
            if self._held is None or until_s < self._held_until_s:
                self._held, self._held_until_s = (partition, error), until_s

    def _raise(self, place: TopicPartition, error: RayqError) -> None:
        self._held = None
        self._waiting.pop(place, None)
        self._raised[place] = (_identity(error), self._now_s())
        raise error.with_message(error.message) from error.__cause__

    def raise_held(self) -> None:
        """Raises the held error at the end of a poll that found nothing, as the reason for it."""
        if self._held is not None:
            self._raise(*self._held)

    def patience_s(self, left_s: float) -> float:
        """Maximum time a poll may wait for news: until the held error is to be raised."""
        if self._held is None:
            return left_s
        return min(left_s, max(self._held_until_s - self._now_s(), 0.0))


def _identity(error: RayqError) -> object:
    """The identity of an error, equal if the error comes again. The message of a deserializer may
    differ each time, so there the offset counts."""
    return error.offset if isinstance(error, DeserializationError) else error.message
