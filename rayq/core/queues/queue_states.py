"""State of a queue state coordinator: what it stores of queues, as records of `__queue_state`.

The topic is compacted, so each record is the whole value of its key; None as value (a tombstone)
ends the key. A key is the msgpack array `[queue id, data partition, key]`. The empty key is the
*opening*: it says which leader of the data partition may write, and in which epoch. Its value is
the msgpack array `[version, data leader epoch, fence, opener]`. All other keys and values belong to
the queue's leader (`core.queues.records`), and mean nothing here.

The functions that decide (`open_state`, `write`, `forget`) return the records to append, which
`replay` then takes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from rayq.config import MIB
from rayq.errors import (
    CorruptBatchError,
    InvalidRequestError,
    QueueFencedError,
    QueueLimitError,
    QueuePartsMissingError,
    UnsupportedFormatError,
)

VERSION = 1
HELD_BYTES_MAX = 64 * MIB
"""Maximum size that a coordinator holds before it asks its queues to give out no more records."""
RESERVE_BYTES = 32 * MIB
"""Reserve beyond the limit in which locks are still taken. Settlements are always taken: they are
of records that were given out before."""
RECORD_BYTES = 100
"""Approximate memory of a record besides its key and value."""
WRITE_BYTES_MAX = 16 * MIB
"""Maximum size of a request to a coordinator, or of a record. A larger write has parts."""
DECISION_BYTES_MAX = 60 * MIB
"""Maximum size of all parts of a write: they are one batch of the log, which takes 64 MiB.
"""
LOG_RECORD_BYTES = 70
"""Approximate size of a record in the log besides its key and value."""
PAGE_BYTES = 4 * MIB
FENCE_BITS = 32
"""A fence begins with the leader epoch of the coordinator that drew it. So none is drawn twice,
though an unclean election may take an opening away."""
OPENING = b""
"""The key of the record that names who may write."""

KeptRecord = tuple[bytes, bytes | None]
"""Key and whole value; None ends the key."""


class StateKey(NamedTuple):
    """The part of a queue that the leader of one data partition has."""

    queue_id: str
    data_partition: int


class Record(NamedTuple):
    """A record of `__queue_state`."""

    state_key: StateKey
    key: bytes
    value: bytes | None


def queue_state_partition(queue_id: str, partitions: int) -> int:
    """The partition of `__queue_state` that has a queue's state."""
    return zlib.crc32(queue_id.encode()) % partitions


# --- bytes --------------------------------------------------------------------------------------


class _Key(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    queue_id: str
    data_partition: int
    key: bytes


class Opening(msgspec.Struct, array_like=True, frozen=True):
    """The allowed writer: the leader of the data partition in this epoch, by this opening."""

    version: int
    data_leader_epoch: int
    fence: int
    opener: str


_ARRAY_BYTES, _PAIR_BYTES = 5, 11
"""Maximum size that msgpack adds: to an array, and to a pair of two byte strings."""
_encoder = msgspec.msgpack.Encoder()
_key_decoder = msgspec.msgpack.Decoder(_Key)
_opening_decoder = msgspec.msgpack.Decoder(Opening)
_records_decoder = msgspec.msgpack.Decoder(list[tuple[bytes, bytes | None]])


def encode(record: Record) -> tuple[bytes, bytes | None]:
    """`(key, value)` of the log's record."""
    return _encoder.encode(_Key(*record.state_key, record.key)), record.value


def decode(key: bytes | None, value: bytes | None) -> Record:
    """Decodes the bytes that `encode` made of a record. Raises CorruptBatchError for other
    bytes."""
    try:
        named = _key_decoder.decode(key or b"")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptBatchError(
            f"A record of __queue_state with key {key!r} is not a queue's: {error}"
        ) from error
    return Record(StateKey(named.queue_id, named.data_partition), named.key, value)


def pack(records: Iterable[KeptRecord]) -> bytes:
    """Kept records as the payload of a request or an answer."""
    return _encoder.encode(list(records))


def unpack(payload: bytes | memoryview) -> list[KeptRecord]:
    """Unpacks the bytes that `pack` made of records. Raises InvalidRequestError."""
    try:
        records: list[KeptRecord] = _records_decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(f"The payload holds no records of a queue: {error}") from error
    return records


def parts_of(records: Sequence[KeptRecord]) -> list[bytes]:
    """Kept records as the payloads of one or several requests, in their order."""
    packed = pack(records)
    if len(packed) <= WRITE_BYTES_MAX or len(records) == 1:
        return [packed]
    parts: list[list[KeptRecord]] = [[]]
    size_bytes = _ARRAY_BYTES
    for key, value in records:
        record_bytes = len(key) + len(value or b"") + _PAIR_BYTES
        if size_bytes + record_bytes > WRITE_BYTES_MAX and parts[-1]:
            parts.append([])
            size_bytes = _ARRAY_BYTES
        parts[-1].append((key, value))
        size_bytes += record_bytes
    return [pack(part) for part in parts]


def unpack_part(payload: memoryview) -> list[KeptRecord]:
    """Unpacks one payload of `parts_of`. Raises InvalidRequestError."""
    records = unpack(payload)
    if len(payload) > WRITE_BYTES_MAX and len(records) > 1:
        raise InvalidRequestError(
            f"A part of a write has {len(payload)} bytes, and {WRITE_BYTES_MAX} at most where it "
            "has more than one record: send it in more parts."
        )
    return records


class WriteParts:
    """The parts of one write that came before its last one."""

    def __init__(self) -> None:
        self._number = (0, 0)
        self._parts: list[list[KeptRecord]] = []
        self._size_bytes = 0

    def add(self, number: tuple[int, int], part: int, records: list[KeptRecord]) -> None:
        """Adds a part of the write of this fence and sequence. A repetition changes nothing. Raises
        QueuePartsMissingError, InvalidRequestError."""
        if number > self._number and part == 0:
            self._number, self._parts, self._size_bytes = number, [], 0
        if number != self._number or part > len(self._parts):
            raise _parts_missing(part)
        if part == len(self._parts):
            self._grow(records)
            self._parts.append(records)

    def whole(
        self, number: tuple[int, int], part: int, records: list[KeptRecord]
    ) -> list[KeptRecord]:
        """All records of the write whose last part this is. Raises as `add` does."""
        if number != self._number or part != len(self._parts):
            raise _parts_missing(part)
        self._grow(records)
        return [record for before in (*self._parts, records) for record in before]

    def _grow(self, records: list[KeptRecord]) -> None:
        self._size_bytes += sum(
            len(key) + len(value or b"") + LOG_RECORD_BYTES for key, value in records
        )
        if self._size_bytes > DECISION_BYTES_MAX:
            raise InvalidRequestError(
                f"A write has {self._size_bytes} bytes or more, and {DECISION_BYTES_MAX} at most."
            )


def _parts_missing(part: int) -> QueuePartsMissingError:
    return QueuePartsMissingError(
        f"Part {part} of a write came, and not all parts before it: send the write again."
    )


def _opening(value: bytes) -> Opening:
    try:
        opening = _opening_decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptBatchError(f"An opening in __queue_state cannot be read: {error}") from error
    if opening.version > VERSION:
        raise UnsupportedFormatError(
            f"An opening in __queue_state has version {opening.version}, this rayq reads up to "
            f"{VERSION}: it was written by a newer one."
        )
    return opening


# --- state --------------------------------------------------------------------------------------


class _State:
    """The kept records of one part of a queue."""

    def __init__(self) -> None:
        self.opening: Opening | None = None
        self.records: dict[bytes, bytes] = {}


class QueueStates:
    """See the module. Only `replay` changes it."""

    def __init__(self, *, coordinator_epoch: int = 0, unclean_epoch: int = 0) -> None:
        """The leader epoch of the coordinator, and the last one that began with an unclean
        election."""
        self._fence_first = coordinator_epoch << FENCE_BITS
        self.fence_min = unclean_epoch << FENCE_BITS
        """Minimum valid fence. An opening with a lower one may depend on records that an unclean
        election has lost: it must open its state again, and its locks are void."""
        self._states: dict[StateKey, _State] = {}
        self.held_bytes = 0

    def __iter__(self) -> Iterator[StateKey]:
        return iter(self._states)

    @property
    def is_full(self) -> bool:
        return self.held_bytes > HELD_BYTES_MAX

    def queue_ids(self) -> set[str]:
        return {key.queue_id for key in self._states}

    def replay(self, record: Record) -> None:
        """Applies one record of the log. Raises CorruptBatchError, UnsupportedFormatError."""
        state = self._states.get(record.state_key)
        if record.value is None:
            if state is None:
                return
            if record.key == OPENING:
                state.opening = None
            elif (before := state.records.pop(record.key, None)) is not None:
                self.held_bytes -= _size(record.key, before)
            if state.opening is None and not state.records:
                del self._states[record.state_key]
            return
        if state is None:
            state = self._states[record.state_key] = _State()
        if record.key == OPENING:
            state.opening = _opening(record.value)
            return
        before = state.records.get(record.key)
        if before is not None:
            self.held_bytes -= _size(record.key, before)
        state.records[record.key] = record.value
        self.held_bytes += _size(record.key, record.value)

    def open_state(
        self,
        state_key: StateKey,
        *,
        data_leader_epoch: int,
        opener: str,
        is_first_page: bool = True,
    ) -> tuple[int, list[Record]]:
        """Returns the fence of an opening, and the records that make it the one that may write:
        none if it already is, as it must be from the second page on. Raises QueueFencedError if a
        later leader has opened the state."""
        before = self._opening_of(state_key)
        if before is not None:
            if data_leader_epoch < before.data_leader_epoch:
                raise QueueFencedError(
                    f"Partition {state_key.data_partition} of queue {state_key.queue_id} was opened"
                    f" in leader epoch {before.data_leader_epoch}: {data_leader_epoch} is over."
                )
            is_known = (data_leader_epoch, opener) == (before.data_leader_epoch, before.opener)
            if is_known and before.fence >= self.fence_min:
                return before.fence, []
        if not is_first_page:
            raise QueueFencedError(
                f"Partition {state_key.data_partition} of queue {state_key.queue_id} was opened by "
                "another leader while this one read its state, or the queue was deleted."
            )
        fence = max(self._fence_first, 0 if before is None else before.fence) + 1
        opening = Opening(VERSION, data_leader_epoch, fence, opener)
        return fence, [Record(state_key, OPENING, _encoder.encode(opening))]

    def read(self, state_key: StateKey, after: bytes) -> tuple[list[KeptRecord], bytes | None]:
        """Returns a page of the kept records with keys after this one, in the order of the keys,
        and the last of its keys if there are more."""
        state = self._states.get(state_key)
        records = {} if state is None else state.records
        page: list[KeptRecord] = []
        size_bytes = 0
        for key in sorted(key for key in records if key > after):
            if size_bytes > PAGE_BYTES:
                return page, page[-1][0]
            page.append((key, records[key]))
            size_bytes += _size(key, records[key])
        return page, None

    def write(
        self,
        state_key: StateKey,
        fence: int,
        records: Sequence[KeptRecord],
        *,
        gives_out: bool = True,
    ) -> list[Record]:
        """Returns the log records that store these parts of a queue's state. Raises
        QueueFencedError if another opening may write, QueueLimitError if it `gives_out` too much,
        InvalidRequestError."""
        opening = self._opening_of(state_key)
        if opening is None or opening.fence != fence:
            raise QueueFencedError(
                f"Partition {state_key.data_partition} of queue {state_key.queue_id} is open under "
                f"fence {None if opening is None else opening.fence}, not {fence}: another leader "
                "has taken it over, or the queue was deleted."
            )
        if fence < self.fence_min:
            raise QueueFencedError(
                f"Partition {state_key.data_partition} of queue {state_key.queue_id} was opened "
                "before an unclean election of its coordinator, which lost records: open it again."
            )
        state = self._states[state_key]
        grown_bytes = 0
        for key, value in records:
            if key == OPENING:
                raise InvalidRequestError("A kept record has an empty key.")
            grown_bytes += 0 if value is None else _size(key, value)
            before = state.records.get(key)
            grown_bytes -= 0 if before is None else _size(key, before)
        is_beyond = self.held_bytes + grown_bytes > HELD_BYTES_MAX + RESERVE_BYTES
        if gives_out and grown_bytes > 0 and is_beyond:
            raise QueueLimitError(
                f"The coordinator of this queue holds {self.held_bytes} bytes, and takes "
                f"{HELD_BYTES_MAX + RESERVE_BYTES} at most: settle records of its queues first, or "
                "start the next cluster with more queue_state_partitions."
            )
        return [Record(state_key, key, value) for key, value in records]

    def forget(self, state_key: StateKey) -> list[Record]:
        """Returns the tombstones of all records of one part of a queue, including the opening."""
        state = self._states.get(state_key)
        if state is None:
            return []
        return [Record(state_key, key, None) for key in (OPENING, *state.records)]

    def _opening_of(self, state_key: StateKey) -> Opening | None:
        state = self._states.get(state_key)
        return None if state is None else state.opening


def _size(key: bytes, value: bytes) -> int:
    return len(key) + len(value) + RECORD_BYTES
