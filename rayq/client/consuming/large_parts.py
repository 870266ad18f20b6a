"""Division of a fetched answer with large values into parts that the consumer has room for.

A part has at most one large value, and earlier records were handed over before. So a value that
takes time, or that is unavailable for now, does not delay the records before it.
"""

from __future__ import annotations

from rayq.client.consuming.subscription import Fetched, LargeValue, Stream
from rayq.client.large.reader import LargeValues
from rayq.client.record_errors import is_final
from rayq.errors import (
    CorruptBatchError,
    OffsetOutOfRangeError,
    UnreadableRecordError,
    UnsupportedFormatError,
)
from rayq.storage.batch import BatchHeader, decode_columns


class LargeParts:
    """The parts of one answer, in order. Belongs to the loop."""

    def __init__(
        self,
        values: LargeValues,
        stream: Stream,
        topic_id: str,
        fetched: Fetched,
        *,
        refuses_loss: bool,
    ) -> None:
        """`refuses_loss`: an expired value is an error."""
        self.is_over = False
        """True if `next` has returned the last part."""
        self._values = values
        self._stream = stream
        self._topic_id = topic_id
        self._fetched = fetched
        self._refuses_loss = refuses_loss
        self._index = 0
        """The index of the first batch that is in no part yet."""

    async def next(self) -> Fetched | None:
        """The next part; None if there are no more. Raises the errors of asking a leader for
        chunks; nothing is lost then, because reading continues where the last part ended."""
        if self.is_over:
            return None
        fetched = self._fetched
        first = self._index
        large: dict[int, LargeValue] = {}
        has_records = False
        for index in range(first, len(fetched.batches)):
            at, header = fetched.batches[index]
            if header.is_chunk:
                place = self._stream.partition
                self._values.came_by(
                    self._topic_id, place.partition, fetched.payload, at, header
                )
                continue
            if header.is_large and self._is_wanted(header):
                if has_records:
                    return self._part(first, index, header.base_offset, large)
                large = await self._value(at, header)
            has_records = True
        self.is_over = True
        return self._part(first, len(fetched.batches), fetched.next_offset, large)

    def _is_wanted(self, header: BatchHeader) -> bool:
        stream = self._stream
        return (
            header.next_offset > (stream.fetch_offset or 0)
            and (stream.end is None or header.base_offset < stream.end)
            and stream.is_shown(header, self._fetched.aborted)
        )

    async def _value(self, at: int, header: BatchHeader) -> dict[int, LargeValue]:
        """The value of a manifest; {} for a batch that cannot be decoded, which the consumer
        reports, or that has no record left."""
        place, offset = self._stream.partition, header.base_offset
        try:
            columns = decode_columns(self._fetched.payload, at, header)
        except (CorruptBatchError, UnsupportedFormatError):
            return {}
        if len(columns.values) != 1:
            return {}
        try:
            found = await self._values.value(place, self._topic_id, offset, columns.values[0])
        except UnreadableRecordError as error:
            if not is_final(error):
                raise
            return {offset: error}
        if found is None and self._refuses_loss:
            return {
                offset: OffsetOutOfRangeError(
                    f"The large value of offset {offset} has expired: chunks of it are below the "
                    "log start."
                )
            }
        return {offset: found}

    def _part(
        self, first: int, stop: int, next_offset: int, large: dict[int, LargeValue]
    ) -> Fetched:
        """The batches from `first` to `stop`, with the bytes between them."""
        self._index = stop
        fetched = self._fetched
        start = fetched.batches[first][0] if first else 0
        is_last = stop == len(fetched.batches)
        end = len(fetched.payload) if is_last else fetched.batches[stop][0]
        return fetched._replace(
            payload=fetched.payload[start:end],
            batches=[(at - start, header) for at, header in fetched.batches[first:stop]],
            next_offset=next_offset,
            large=large,
        )
