"""The state that a partition keeps of its idempotent producers, so that a retry appends once, and
of their transactions."""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import NamedTuple

import msgspec

from rayq.config import DAY_MS
from rayq.environment import Disk
from rayq.errors import (
    OutOfOrderSequenceError,
    ProducerFencedError,
    StorageError,
    TransactionLimitError,
    UnknownProducerError,
)
from rayq.messages.transaction_ids import family_of, is_transactional
from rayq.storage import checked_file
from rayq.storage.batch import SEQUENCE_COUNT, BatchHeader
from rayq.storage.open_transactions import (
    AbortedTransaction,
    OpenTransactions,
    TransactionsSnapshot,
)

BATCHES_REMEMBERED = 5
"""A producer may have this many batches in flight, and may send each of them again."""
PRODUCER_EXPIRY_MS = DAY_MS
"""A producer is forgotten when the partition's time has advanced by this since its last append."""
APPEND_STEP_MAX_MS = 600_000
"""The maximum by which the partition's time advances from one append to the next. So a leader's
clock that leaps ahead makes no producer expire."""
PRODUCERS_MAX = 100_000
"""Above this the producer that has been silent longest is forgotten."""
SNAPSHOTS_KEPT = 3
SNAPSHOT_SUFFIX = ".snapshot"
_KIND = "producer-snapshot"
_VERSION = 2


class DuplicateBatch(NamedTuple):
    """The place of a batch that its producer has sent again."""

    base_offset: int
    last_offset: int
    append_time_ms: int


class _Batch(NamedTuple):
    base_sequence: int
    last_sequence: int
    base_offset: int
    last_offset: int
    append_time_ms: int


class _Unknown(Enum):
    UNKNOWN = auto()


_UNKNOWN = _Unknown.UNKNOWN


class _Producer:
    """One producer id: its epoch and its last batches, oldest first. It has at least one batch."""

    __slots__ = ("active_ms", "batches", "epoch", "principal")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.principal: str | _Unknown | None = _UNKNOWN
        """The principal that wrote here since this replica leads. The log does not say it."""
        self.active_ms = 0
        """The partition's time at the last append."""
        self.batches: deque[_Batch] = deque(maxlen=BATCHES_REMEMBERED)


class _ProducerSnapshot(msgspec.Struct, array_like=True):
    producer_id: int
    epoch: int
    batches: list[_Batch]
    active_ms: int = 0


class _StateSnapshot(msgspec.Struct, array_like=True):
    newest_append_time_ms: int
    producers: list[_ProducerSnapshot]
    time_ms: int = 0
    transactions: TransactionsSnapshot | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_StateSnapshot)


class ProducerState:
    """The last five batches of each producer id, from the batch headers of the log.

    The state is a pure function of the batches that `update` gets in order, so the leader and the
    followers agree on it. Sequences wrap at 2**31. Time is that of the appends, in steps of at most
    `APPEND_STEP_MAX_MS`: without appends no producer expires, so the only producer of a partition
    never does. (A replica that copies a compacted log gets fewer batches, and may forget a producer
    later than its leader.) A producer whose transaction is open is not forgotten.
    """

    def __init__(self) -> None:
        # In the order of their last appends.
        self._producers: dict[int, _Producer] = {}
        self._newest_append_time_ms = 0
        self._time_ms = 0
        """The partition's time."""
        self.transactions = OpenTransactions()

    def __len__(self) -> int:
        return len(self._producers)

    def check(self, header: BatchHeader) -> DuplicateBatch | None:
        """Checks whether a batch may be appended. None: it is the producer's next batch (or its
        producer is not idempotent). Else it was appended before, and this is its place.

        Raises `UnknownProducerError`, `ProducerFencedError`, `OutOfOrderSequenceError`, or
        `TransactionLimitError` where it would be forgotten at once.
        """
        if header.producer_id is None or header.base_sequence is None:
            return None
        producer = self._producers.get(header.producer_id)
        if producer is None or self._expired(header.producer_id, producer):
            if header.base_sequence != 0:
                raise UnknownProducerError(
                    f"Producer {header.producer_id} is not known here and its batch begins at "
                    f"sequence {header.base_sequence}, not 0: take a new epoch and number from 0."
                )
            if len(self._producers) >= PRODUCERS_MAX and self._idle() is None:
                raise TransactionLimitError(
                    f"{PRODUCERS_MAX} producers have transactions open in this partition, the "
                    "limit: nothing was written. A batch write with fewer tasks, or to more "
                    "partitions, stays below it."
                )
            return None
        if header.producer_epoch < producer.epoch:
            raise ProducerFencedError(
                f"Producer {header.producer_id} has epoch {producer.epoch} by now, this batch has "
                f"epoch {header.producer_epoch}: another producer took over the id."
            )
        if header.producer_epoch > producer.epoch:
            if header.base_sequence != 0:
                raise OutOfOrderSequenceError(
                    f"The first batch of producer {header.producer_id} in epoch "
                    f"{header.producer_epoch} begins at sequence {header.base_sequence}, not 0."
                )
            return None
        for batch in producer.batches:
            if (
                batch.base_sequence == header.base_sequence
                and batch.last_sequence == header.last_sequence
            ):
                return DuplicateBatch(batch.base_offset, batch.last_offset, batch.append_time_ms)
        expected = (producer.batches[-1].last_sequence + 1) % SEQUENCE_COUNT
        if header.base_sequence != expected:
            raise OutOfOrderSequenceError(
                f"Producer {header.producer_id} sent sequence {header.base_sequence}; expected "
                f"{expected}, or one of its last {len(producer.batches)} batches again."
            )
        return None

    def check_principal(self, producer_id: int, principal: str) -> None:
        """Raises ProducerFencedError if another principal writes under this producer id. Ids are
        guessed easily: without this, whoever may write to a topic could fence its producers, or
        take their next sequences, so that their records count as repetitions."""
        producer = self._producers.get(producer_id)
        if producer is None or producer.principal == principal or producer.principal is _UNKNOWN:
            return
        raise ProducerFencedError(
            f"Another principal than {principal!r} writes under producer id {producer_id} here: "
            "nothing was written. Take a new producer id."
        )

    def wrote(self, producer_id: int, principal: str | None) -> None:
        """Notes the principal of the producer of a batch that was just appended."""
        producer = self._producers.get(producer_id)
        if producer is not None and producer.principal is _UNKNOWN:
            producer.principal = principal

    def _expired(self, producer_id: int, producer: _Producer) -> bool:
        is_silent = self._time_ms - producer.active_ms > PRODUCER_EXPIRY_MS
        return is_silent and not self.transactions.is_open(producer_id)

    def _idle(self) -> int | None:
        """The producer that has been silent longest, of those without an open transaction."""
        return next(
            (
                producer_id
                for producer_id in self._producers
                if not self.transactions.is_open(producer_id)
            ),
            None,
        )

    def update(self, header: BatchHeader) -> AbortedTransaction | None:
        """Remembers a batch that was appended. Returns the transaction that it aborted."""
        step_ms = header.append_time_ms - self._newest_append_time_ms
        if step_ms > 0:
            self._newest_append_time_ms = header.append_time_ms
            self._time_ms += min(step_ms, APPEND_STEP_MAX_MS)
        producer_id = header.producer_id
        if producer_id is None or header.base_sequence is None:
            return self.transactions.update(header, self._time_ms)
        producer = self._producers.pop(producer_id, None)
        if (
            producer is None
            or producer.epoch != header.producer_epoch
            or self._expired(producer_id, producer)
        ):
            producer = _Producer(header.producer_epoch)
        self.transactions.update(header, self._time_ms)
        producer.active_ms = self._time_ms
        self._producers[producer_id] = producer
        if len(self._producers) > PRODUCERS_MAX:
            idle = self._idle()
            del self._producers[producer_id if idle is None else idle]
        last_sequence = (header.base_sequence + header.last_offset_delta) % SEQUENCE_COUNT
        producer.batches.append(
            _Batch(
                base_sequence=header.base_sequence,
                last_sequence=last_sequence,
                base_offset=header.base_offset,
                last_offset=header.last_offset,
                append_time_ms=header.append_time_ms,
            )
        )
        return None

    def ids_from(self, first: int, count: int) -> list[int]:
        """The ids from `first` on, `count` of them, whose producers are remembered; ascending."""
        ids = range(first, first + count)
        return sorted(
            producer_id
            for producer_id, producer in self._producers.items()
            if producer_id in ids and not self._expired(producer_id, producer)
        )

    def records_of(self, family: int, epoch: int) -> list[tuple[int, int]]:
        """Each producer id of a family that wrote in the family's open transaction, and how many
        records; ascending."""
        return sorted(
            (producer_id, producer.batches[-1].last_sequence + 1)
            for producer_id, producer in self._producers.items()
            if producer.epoch == epoch
            and is_transactional(producer_id)
            and family_of(producer_id) == family
        )

    def batches_below(self, offset: int) -> tuple[int, ...]:
        """The base offsets of the remembered batches that end before `offset`. Compaction keeps
        their headers, so that replicas that copy the log remember them too."""
        return tuple(
            sorted(
                batch.base_offset
                for producer_id, producer in self._producers.items()
                if not self._expired(producer_id, producer)
                for batch in producer.batches
                if batch.last_offset < offset
            )
        )

    def clear(self) -> None:
        self._producers.clear()
        self._newest_append_time_ms = self._time_ms = 0
        self.transactions = OpenTransactions()

    def forget_from(self, offset: int) -> None:
        """Drops the batches that contain or follow `offset`, for a log that begins again there."""
        self.transactions.forget_from(offset)
        for producer_id, producer in list(self._producers.items()):
            kept = [batch for batch in producer.batches if batch.last_offset < offset]
            if kept:
                producer.batches.clear()
                producer.batches.extend(kept)
            else:
                del self._producers[producer_id]

    def snapshot(self, high_watermark: int = 0) -> bytes:
        """The state in the format of a snapshot file. Forgets the expired producers. Of the
        markers below the high watermark it has the epochs only."""
        expired = [key for key, producer in self._producers.items() if self._expired(key, producer)]
        for producer_id in expired:
            del self._producers[producer_id]
        self.transactions.forget_ended_before(self._time_ms - PRODUCER_EXPIRY_MS)
        producers = [
            _ProducerSnapshot(
                producer_id, producer.epoch, list(producer.batches), producer.active_ms
            )
            for producer_id, producer in self._producers.items()
        ]
        content = _encoder.encode(
            _StateSnapshot(
                self._newest_append_time_ms,
                producers,
                self._time_ms,
                self.transactions.snapshot(high_watermark),
            )
        )
        return checked_file.encode(_KIND, _VERSION, content)

    def load(self, data: bytes, path: str = "the producer snapshot") -> None:
        """Replaces the state by a snapshot. Empty bytes stand for the state of an empty log.

        Raises `StorageError` when it is damaged, `UnsupportedFormatError` for another version. Then
        the state stays as it was.
        """
        if not data:
            self.clear()
            return
        content = checked_file.decode(_KIND, _VERSION, data, path)
        try:
            snapshot = _decoder.decode(content)
        except msgspec.DecodeError as error:
            raise StorageError(f"{path} is damaged: {error}") from error
        producers = {}
        for entry in snapshot.producers:
            if not entry.batches:
                raise StorageError(f"{path} is damaged: producer {entry.producer_id} is empty.")
            producer = producers[entry.producer_id] = _Producer(entry.epoch)
            producer.batches.extend(entry.batches)
            producer.active_ms = entry.active_ms
        self._producers = producers
        self._newest_append_time_ms = snapshot.newest_append_time_ms
        self._time_ms = snapshot.time_ms
        self.transactions = OpenTransactions.of(snapshot.transactions)


def snapshot_path(directory: str, offset: int) -> str:
    """The file with the producer state of all batches below `offset`."""
    return f"{directory}/{offset:020d}{SNAPSHOT_SUFFIX}"


def snapshot_offsets(disk: Disk, directory: str) -> list[int]:
    """The offsets of the snapshot files of a partition directory, ascending."""
    names = (
        name.removesuffix(SNAPSHOT_SUFFIX)
        for name in disk.list(directory)
        if name.endswith(SNAPSHOT_SUFFIX)
    )
    return sorted(int(name) for name in names if name.isdecimal())
