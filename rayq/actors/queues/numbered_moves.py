"""Exactly-once move of one batch of records from a queue to its target (docs/protocol.md).

Each batch has its own number: a producer id that this opening of the queue drew, and a new epoch of
it, with sequence 0. The number and the batch's records are kept before the batch is appended. So
whoever finds an unfinished move, perhaps a later leader, appends the batch under the same number,
and the target's leader recognises a duplicate. Because the target may have forgotten the number
(producers expire), it is read first, from where it ended when the move began.

A number is used for nothing else. It is dropped if the batch will never get into the target, and if
nobody can know whether it is there, because the target has both forgotten the number and deleted
records that it got since.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from rayq import messages
from rayq.actors.peers import Peers
from rayq.backoff import Backoff
from rayq.config import MIB
from rayq.core.large.values import pinned
from rayq.core.queues.moved_records import dead_letter_headers, own_headers
from rayq.core.queues.moves import FailedRecord, Move, Outcome
from rayq.core.queues.state import QueueState
from rayq.environment import Environment
from rayq.errors import (
    LogTruncatedError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    OutcomeUnknownError,
    ProducerFencedError,
    ProtocolError,
    RayqError,
    UnknownTopicError,
)
from rayq.records import Headers
from rayq.storage.batch import (
    BATCH_BYTES_MAX,
    BatchHeader,
    encode_batch,
    read_header,
    split_batches,
)

logger = logging.getLogger(__name__)

RETRY_S, RETRY_MAX_S = 0.1, 2.0
PATIENCE_S = 15.0
"""Timeout after which the caller of a move is told that the target's leader does not answer."""
EPOCHS = 60_000
"""Number of batches under one producer id (an epoch has 16 bits), before a new one is used."""
BATCH_BYTES = MIB // 2
"""Maximum size of the records of a batch; a single record may be larger."""
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
    """Requests to the leaders of the partitions that queues move records to: append a batch under
    its number, or find it. Errors are those of `Peers.exchange`."""

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


class MovedRecord(NamedTuple):
    """A record as the source's log has it."""

    key: bytes | None
    value: bytes | None
    headers: Headers
    is_large: bool = False
    """True if the value is a manifest (`core.large.values`)."""

    @property
    def size_bytes(self) -> int:
        headers_bytes = sum(len(name) + len(value) for name, value in self.headers)
        return len(self.value or b"") + len(self.key or b"") + headers_bytes


Records = list[tuple[FailedRecord, MovedRecord]]
Refusal = Callable[[], str | None]
"""Function that returns the reason that the client may not have a move done (any more).
"""


def nobody_asked() -> str | None:
    """The `Refusal` of what a queue moves by itself."""
    return None



def batches(records: Records) -> Iterator[Records]:
    """Splits records into batches. A large record has a batch of its own."""
    batch: Records = []
    batch_bytes = 0
    for pair in records:
        size_bytes = pair[1].size_bytes + len(pair[0].error)
        is_alone = bool(batch) and (pair[1].is_large or batch[0][1].is_large)
        if is_alone or (batch and batch_bytes + size_bytes > BATCH_BYTES):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(pair)
        batch_bytes += size_bytes
    if batch:
        yield batch


class TargetSilentError(Exception):
    """Error: the leader of a target does not answer, and nothing was begun."""


class MoveSource(Protocol):
    """The interface that moves need from the queue's leader in one partition."""

    queue: str
    topic: str
    topic_id: str
    partition: int

    async def read_records(
        self, offsets: Sequence[int], bytes_max: int
    ) -> tuple[dict[int, MovedRecord], int]:
        """Returns the records of the first of these offsets, up to `bytes_max` bytes, and the
        number of these offsets, at least one. Records that are gone are missing. Raises
        CorruptBatchError, StorageError, and other errors of a read."""
        ...

    def hold_moved(self, value: bytes | None) -> None:
        """Keeps the chunks of this manifest for a while: its record goes to another partition."""
        ...

    async def commit(self) -> None:
        """Returns once all decisions of the state so far are kept. Raises if this opening has
        ended: its decisions no longer count from then on."""
        ...

    def wake(self) -> None:
        """Wakes the queue, as records can be given out again."""
        ...

    def failed(self, error: Exception) -> None:
        """Ends this opening, and another one begins: a move ended by a bug."""
        ...


class NumberedMoves:
    """See the module. One opening of one queue in one partition.

    `troubles` says what keeps batches from being moved, by subject.
    """

    def __init__(
        self, state: QueueState, source: MoveSource, peers: Peers, environment: Environment
    ) -> None:
        self.where = f"queue {source.queue} in {source.topic}-{source.partition}"
        self.troubles: dict[object, str] = {}
        self._state = state
        self._source = source
        self._peers = peers
        self._targets = MoveTargets(peers)
        self._environment = environment
        self._locks: dict[Target, asyncio.Lock] = {}
        """At most one batch of a producer id is in flight per target partition."""
        self._producer_id: int | None = None
        self._epoch = 0
        self._last_move_id = max((move.move_id for move in state.moves.all()), default=0)

    async def move(
        self,
        target: Target,
        outcome: Outcome,
        records: Records,
        refused: Refusal = nobody_asked,
    ) -> str | None:
        """Moves failed or claimed records as one batch, unless it is `refused` before the append.
        Returns None once it is in the target, or the reason that it is certainly not. For claimed
        records, raises OutcomeUnknownError if nobody can know. After both the records return to
        their state before. Raises TargetSilentError, after which the records stay claimed. Raises
        other RayqErrors if the opening ended.

        A dead letter in doubt is moved once more, and marked so: it must not be lost.
        """
        async with self._locks.setdefault(target, asyncio.Lock()):
            while True:
                try:
                    return await self._move(target, outcome, records, refused)
                except OutcomeUnknownError as error:
                    logger.warning("%s: %s", self.where, error)
                    if outcome == "done":
                        raise
                records = [
                    (msgspec.structs.replace(failed, is_in_doubt=True), record)
                    for failed, record in records
                ]

    async def resume(self, move: Move) -> str | None:
        """Finishes a move that an earlier leader began. Returns None once it is in the target, or
        the reason that it is not, or may not be. Then its records return to their state before."""
        offsets = [record.offset for record in move.records]
        trouble = "move", move.move_id
        backoff = Backoff(self._environment, RETRY_S, RETRY_MAX_S)
        while True:
            try:
                moved, _ = await self._source.read_records(offsets, BATCH_BYTES_MAX)
                break
            except RayqError as error:
                self.troubles[trouble] = f"{self.where}: offset {offsets[0]} is unreadable: {error}"
            await asyncio.sleep(backoff.next_s())
        self.troubles.pop(trouble, None)
        payload = None
        if len(moved) == len(offsets):
            records = [(record, moved[record.offset]) for record in move.records]
            payload = self._encode(move.outcome, records, (move.producer_id, move.producer_epoch))
            if read_header(payload).body_crc != move.crc:
                payload = None  # The source was truncated, or another rayq encodes otherwise.
        try:
            # The client was allowed to ask for it when it was begun.
            return await self._carry_out(move, payload, nobody_asked, is_new=False)
        except OutcomeUnknownError as error:
            logger.warning("%s: %s", self.where, error)
            return str(error)

    # --- steps ----------------------------------------------------------------------------------

    async def _move(
        self, target: Target, outcome: Outcome, records: Records, refused: Refusal
    ) -> str | None:
        """Makes one attempt of `move`. Raises OutcomeUnknownError."""
        numbered = await self._number(target, outcome)
        refusal = "its target was deleted" if numbered is None else refused()
        if numbered is None or refusal is not None:
            if outcome == "done":
                self._state.moves.unclaim([record.offset for record, _ in records])
            return refusal
        number, end = numbered
        payload = self._encode(outcome, records, number)
        self._last_move_id += 1
        move = Move(
            move_id=self._last_move_id,
            outcome=outcome,
            topic_id=target.topic_id,
            partition=target.partition,
            producer_id=number[0],
            producer_epoch=number[1],
            scan_from=end.offset,
            scan_epoch=end.epoch,
            crc=read_header(payload).body_crc,
            records=tuple(record for record, _ in records),
        )
        if records[0][1].is_large:
            self._source.hold_moved(records[0][1].value)
        self._state.moves.begin(move)
        await self._source.commit()
        return await self._carry_out(move, payload, refused, is_new=True)

    async def _number(
        self, target: Target, outcome: Outcome
    ) -> tuple[tuple[int, int], End] | None:
        """Returns the number of the next batch, and the present end of its target; None: the target
        was deleted."""
        clock = self._environment.clock
        backoff = Backoff(self._environment, RETRY_S, RETRY_MAX_S)
        silent_s = clock.monotonic() + PATIENCE_S
        while True:
            try:
                if self._producer_id is None or self._epoch >= EPOCHS:
                    self._producer_id, self._epoch = await self._peers.new_producer_id(), 0
                end = await self._targets.end_of(target)
                break
            except RayqError as error:
                if self._peers.is_gone(target.topic_id):
                    self.troubles.pop(target, None)
                    return None
                if outcome == "done" and clock.monotonic() > silent_s:
                    self.troubles.pop(target, None)
                    raise TargetSilentError(f"its target does not answer: {error}") from None
                self.troubles[target] = f"{self.where}: records cannot be moved: {error}"
            await asyncio.sleep(backoff.next_s())
        self.troubles.pop(target, None)
        self._epoch += 1
        return (self._producer_id, self._epoch), end

    def _encode(self, outcome: Outcome, records: Records, number: tuple[int, int]) -> bytearray:
        """Encodes the batch, the same each time: its records have the time of the append."""
        source = self._source
        headers = [
            dead_letter_headers(source.topic, source.partition, failed, record.headers)
            if outcome == "dead"
            else own_headers(record.headers)
            for failed, record in records
        ]
        values = [
            pinned(record.value, source.topic, source.topic_id, source.partition)
            if record.is_large
            else record.value
            for _, record in records
        ]
        return encode_batch(
            values,
            [record.key for _, record in records],
            headers,
            producer_id=number[0],
            producer_epoch=number[1],
            base_sequence=0,
            append_time=True,
            is_large=records[0][1].is_large,
            is_dead_letter=outcome == "dead",
        )

    async def _carry_out(
        self, move: Move, payload: bytearray | None, refused: Refusal, *, is_new: bool
    ) -> str | None:
        """Appends the batch of a move that was begun, unless it is there or refused, and ends the
        move. Returns as `move`. `payload` None: records of it are gone from the source. Raises
        OutcomeUnknownError.
        """
        trouble = "move", move.move_id
        may_be_there = looks = not is_new
        looked = unlooked(move)
        refusal: str | None = None
        doubt: OutcomeUnknownError | None = None
        backoff = Backoff(self._environment, RETRY_S, RETRY_MAX_S)
        while True:
            try:
                if looks:
                    looked = await self._targets.look(move, looked)
                    if looked.is_there:
                        break
                    looks = False
                if looked.has_gaps and not await self._targets.remembers(move):
                    doubt = _in_doubt(move)
                elif payload is None:
                    refusal = "records of it are gone"
                elif (refusal := refused()) is None:
                    refusal = await self._targets.append(move, payload)
                    break
                # The request of an earlier leader may still be in flight.
                if backoff.is_at_max:
                    break
                looks, doubt, refusal = True, None, None
            except RayqError as error:
                if self._peers.is_gone(move.topic_id):
                    refusal = "its target was deleted"
                    break
                if error.retriable or isinstance(error, UnknownTopicError):
                    may_be_there = True
                elif not may_be_there:
                    refusal = str(error)
                    break
                self.troubles[trouble] = f"{self.where}: records cannot be moved: {error}"
            await asyncio.sleep(backoff.next_s())
            # After a while the target's leader may have forgotten the number.
            looks = looks or (may_be_there and backoff.is_at_max)
        self.troubles.pop(trouble, None)
        if refusal is None and doubt is None:
            self._state.moves.end(move.move_id)
        else:
            self._state.moves.release(move.move_id, is_in_doubt=doubt is not None)
        await self._source.commit()
        if doubt is not None:
            raise doubt
        return refusal


def _in_doubt(move: Move) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        f"it may have been moved before, or not: partition {move.partition} of its target has "
        "deleted records that it got since the move began, and has forgotten its number. To move "
        "it again may make a copy."
    )
