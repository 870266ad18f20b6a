"""The leaders of the partitions that records of queues are moved to: a batch is appended under its
number, or found there. Errors are those of `Links.exchange`."""

from __future__ import annotations

from typing import NamedTuple

from rayq.actors.transactions.links import Links
from rayq.config import MIB
from rayq.core.queue_moves import Move
from rayq.errors import OffsetOutOfRangeError, ProducerFencedError, RayqError
from rayq.storage.batch import BatchHeader, split_batches
from rayq.wire import messages

SCAN_BYTES = 4 * MIB
PRODUCE_TIMEOUT_MS = 5_000


class Target(NamedTuple):
    topic_id: str
    partition: int


class MoveTargets:
    """See the module."""

    def __init__(self, links: Links) -> None:
        self._links = links

    async def append(self, move: Move, payload: bytearray) -> str | None:
        """Returns None once the batch is in the target's log; or why it never gets there."""
        try:
            answer, _ = await self._links.exchange(
                move.topic_id,
                move.partition,
                lambda topic_id, partition, epoch: messages.Produce(
                    topic_id, partition, epoch, acks=-1, timeout_ms=PRODUCE_TIMEOUT_MS
                ),
                bytes(payload),
            )
        except RayqError as error:
            if not (error.breaks_sequence or isinstance(error, ProducerFencedError)):
                raise
            # The leader knows this producer id in a later epoch, or with other sequences.
            is_there, _ = await self.look(move, move.scan_from)
            return None if is_there else f"its number was used by another producer: {error}"
        if answer.is_repeat and not await self._is_ours(move, answer.base_offset):
            return "its number was used by another producer"
        return None

    async def look(self, move: Move, offset: int) -> tuple[bool, int]:
        """Whether the target's log has the batch, among what is committed from `offset` on; and
        where to look on if not."""
        while True:
            try:
                headers, next_offset = await self._fetch(move, offset)
            except OffsetOutOfRangeError:
                target = Target(move.topic_id, move.partition)
                start = await self._offset(target, messages.EARLIEST)
                if start <= offset:  # An unclean election cut the log below.
                    return False, offset
                offset = start
                continue
            if any(_is_of(header, move) for header in headers):
                return True, next_offset
            if next_offset <= offset:
                return False, offset
            offset = next_offset

    async def _is_ours(self, move: Move, offset: int) -> bool:
        """Whether the batch at this offset, which has the move's number, is the move's."""
        try:
            headers, _ = await self._fetch(move, offset)
        except OffsetOutOfRangeError:  # It expired meanwhile.
            return True
        found = [header for header in headers if header.base_offset == offset]
        return not found or _is_of(found[0], move)

    async def _fetch(self, move: Move, offset: int) -> tuple[list[BatchHeader], int]:
        """The headers of committed batches of the target, and where to go on."""
        answer, payload = await self._links.exchange(
            move.topic_id,
            move.partition,
            lambda topic_id, partition, epoch: messages.Fetch(
                topic_id,
                partition,
                epoch,
                offset=offset,
                last_epoch=None,
                bytes_max=SCAN_BYTES,
                wait_ms=0,
                isolation=messages.READ_UNCOMMITTED,
            ),
        )
        return [header for _, header in split_batches(payload)], answer.next_offset

    async def end_of(self, target: Target) -> int:
        """Where the target ends now: what is appended later is not below."""
        return await self._offset(target, messages.LATEST)

    async def _offset(self, target: Target, which: int) -> int:
        answer = await self._links.ask_leader(
            *target,
            lambda topic_id, partition, epoch: messages.ListOffsets(
                topic_id, partition, epoch, which
            ),
        )
        assert answer.offset is not None, "only times can be missed"
        return answer.offset


def _is_of(header: BatchHeader, move: Move) -> bool:
    """Whether a batch in the target's log is that of a move."""
    if (header.producer_id, header.producer_epoch) != (move.producer_id, move.producer_epoch):
        return False
    is_whole = header.record_count == header.last_offset_delta + 1
    return header.base_sequence == 0 and (header.body_crc == move.crc or not is_whole)
