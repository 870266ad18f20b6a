"""Requests to the leaders of the partitions that queues move records to: append a batch under its
number, or find it. Errors are those of `Peers.exchange`."""

from __future__ import annotations

from typing import NamedTuple

from rayq import messages
from rayq.actors.peers import Peers
from rayq.config import MIB
from rayq.core.queues.moves import Move
from rayq.errors import (
    LogTruncatedError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    ProducerFencedError,
    ProtocolError,
    RayqError,
)
from rayq.storage.batch import BatchHeader, split_batches

SCAN_BYTES = 4 * MIB
PRODUCE_TIMEOUT_MS = 5_000
RESTARTS_MAX = 3
"""Maximum number of times that one look starts over at the log start; then its caller waits."""


class Target(NamedTuple):
    topic_id: str
    partition: int


class End(NamedTuple):
    """The end of a target: later appends are not below it."""

    offset: int
    epoch: int | None
    """The leader epoch of the last batch below; None: there is none, or it is not known."""


class Looked(NamedTuple):
    """Result of a scan of a target."""

    is_there: bool
    """True if the batch is in the target's log."""
    next_offset: int
    epoch: int | None
    """The leader epoch of the last batch below `next_offset`, as `End.epoch`."""
    has_gaps: bool = False
    """True if the batch may have been there and may be gone: retention or compaction removed some
    of the range to scan."""


def unlooked(move: Move) -> Looked:
    """The state before the first scan."""
    return Looked(False, move.scan_from, move.scan_epoch)


class MoveTargets:
    """See the module."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    async def append(self, move: Move, payload: bytearray) -> str | None:
        """Appends the batch. Returns None once it is in the target's log, or the reason that it
        never gets there."""
        try:
            answer, _ = await self._peers.exchange(
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
            is_there = (await self.look(move, unlooked(move))).is_there
            return None if is_there else f"its number was used by another producer: {error}"
        if answer.is_repeat and not await self._is_ours(move, answer.base_offset):
            return "its number was used by another producer"
        return None

    async def look(self, move: Move, before: Looked) -> Looked:
        """Looks for the batch in the committed log, from the end of an earlier scan."""
        _, offset, epoch, has_gaps = before
        looks_from = offset
        restarts = 0
        while True:
            try:
                answer, headers = await self._fetch(move, offset, epoch)
            except (OffsetOutOfRangeError, LogTruncatedError) as error:
                restarts += 1
                if restarts > RESTARTS_MAX:
                    raise OffsetNotAvailableError(
                        f"The leader of partition {move.partition} of topic {move.topic_id} had "
                        f"nothing where its log begins, {restarts} times: {error}"
                    ) from error
                # Retention removed the range to read; or an unclean election truncated the log
                # below it, so the batch may be anywhere in the records written since.
                start = await self._offset(Target(move.topic_id, move.partition))
                has_gaps = has_gaps or start > 0
                offset, epoch, looks_from = start, None, 0
                continue
            if any(_is_of(header, move) for header in headers):
                return Looked(True, answer.next_offset, None)
            has_gaps = has_gaps or answer.cleaned_offset > looks_from
            if answer.next_offset <= offset:
                return Looked(False, offset, epoch, has_gaps)
            offset = answer.next_offset
            epoch = headers[-1].leader_epoch if headers else None

    async def remembers(self, move: Move) -> bool:
        """Returns whether the target's leader knows the producer id of the move: then it knows
        which batch it appended last."""
        answer = await self._peers.ask_leader(
            move.topic_id,
            move.partition,
            lambda topic_id, partition, epoch: messages.DescribeProducers(
                topic_id, partition, epoch, move.producer_id, 1
            ),
        )
        return bool(answer.producer_ids)

    async def _is_ours(self, move: Move, offset: int) -> bool:
        """Returns whether the batch at this offset, which has the move's number, is the move's."""
        try:
            _, headers = await self._fetch(move, offset, None)
        except OffsetOutOfRangeError:  # It expired meanwhile.
            return True
        matches = [header for header in headers if header.base_offset == offset]
        return not matches or _is_of(matches[0], move)

    async def _fetch(
        self, move: Move, offset: int, last_epoch: int | None
    ) -> tuple[messages.FetchResponse, list[BatchHeader]]:
        """Reads committed batches of the target, of which only the headers count."""
        answer, payload = await self._peers.exchange(
            move.topic_id,
            move.partition,
            lambda topic_id, partition, epoch: messages.Fetch(
                topic_id,
                partition,
                epoch,
                offset=offset,
                last_epoch=last_epoch,
                bytes_max=SCAN_BYTES,
                wait_ms=0,
                isolation=messages.READ_UNCOMMITTED,
            ),
        )
        return answer, [header for _, header in split_batches(payload)]

    async def end_of(self, target: Target) -> End:
        answer = await self._ask_offset(target, messages.LATEST)
        return End(_known(answer, target), answer.last_epoch)

    async def _offset(self, target: Target) -> int:
        """Returns the log start."""
        return _known(await self._ask_offset(target, messages.EARLIEST), target)

    async def _ask_offset(self, target: Target, which: int) -> messages.ListOffsetsResponse:
        return await self._peers.ask_leader(
            *target,
            lambda topic_id, partition, epoch: messages.ListOffsets(
                topic_id, partition, epoch, which
            ),
        )


def _known(answer: messages.ListOffsetsResponse, target: Target) -> int:
    if answer.offset is None:
        raise ProtocolError(
            f"The leader of partition {target.partition} of topic {target.topic_id} does not say "
            "where its log begins or ends."
        )
    return answer.offset


def _is_of(header: BatchHeader, move: Move) -> bool:
    """Returns whether a batch in the target's log is that of a move."""
    if (header.producer_id, header.producer_epoch) != (move.producer_id, move.producer_epoch):
        return False
    is_whole = header.record_count == header.last_offset_delta + 1
    return header.base_sequence == 0 and (header.body_crc == move.crc or not is_whole)
