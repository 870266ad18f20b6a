"""The records of `__transaction_state`: nothing else changes a coordinator's durable state.

The topic is compacted, so each record is the whole value of its key and stands for itself; None as
value (a tombstone) ends the key. Key and value are msgpack arrays:

- key: `["id", transactional id]` or `["transaction", family, epoch]`;
- value: `[version, ...]`. Fields may be appended with a default; a change that an older rayq must
  not misread raises the version, and a higher one than this rayq's is refused.

Participants inside a value are grouped by topic: `{topic id: [partition, ...]}`, sorted.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from rayq.core.record_version import check_version
from rayq.errors import CorruptBatchError
from rayq.records import TopicIdPartition

VERSION = 1

State = Literal["open", "sealed", "committing", "aborting"]


class TransactionKey(NamedTuple):
    """A transaction: a family of producer ids and an epoch, used once."""

    family: int
    epoch: int


class Outcome(NamedTuple):
    """The outcome of a transaction."""

    key: TransactionKey
    is_committed: bool


class IdValue(msgspec.Struct, frozen=True):
    """A transactional id.

    `next` is the transaction that its owner has open or may begin, `last` the outcome of the one
    before. `former_owners` are those that were fenced, the latest last. `used_ms` is the time at
    which the id got its owner or its last transaction ended.
    """

    owner: str
    transaction_timeout_ms: int
    next: TransactionKey
    used_ms: int
    last: Outcome | None = None
    last_name: str | None = None
    """The name of the last named transaction that committed."""
    former_owners: tuple[str, ...] = ()
    principal: str | None = None
    """The principal of the owner: the family is its. None: a superuser, or an older rayq wrote it.
    """


class TransactionValue(msgspec.Struct, frozen=True):
    """A transaction from its first participant until each has its marker.

    `participants` are partitions with its records, or those of `__consumer_offsets` with its
    positions. `start_ms` is the time at which the first of them joined. A sealed transaction gets
    no more of them. `is_touched`: its owner reports from time to time that it still works on it,
    and it may stay open for longer than its timeout.
    """

    transactional_id: str
    state: State
    start_ms: int
    participants: frozenset[TopicIdPartition]
    is_touched: bool = False

    @property
    def is_decided(self) -> bool:
        return self.state in ("committing", "aborting")


class IdRecord(NamedTuple):
    transactional_id: str
    value: IdValue | None


class TransactionRecord(NamedTuple):
    key: TransactionKey
    value: TransactionValue | None


Record = IdRecord | TransactionRecord


# --- bytes --------------------------------------------------------------------------------------


class _IdKey(msgspec.Struct, tag="id", array_like=True, frozen=True):
    transactional_id: str


class _TransactionKey(msgspec.Struct, tag="transaction", array_like=True, frozen=True):
    family: int
    epoch: int


class _StoredId(msgspec.Struct, array_like=True, frozen=True):
    version: int
    owner: str
    transaction_timeout_ms: int
    next: TransactionKey
    used_ms: int
    last: Outcome | None
    last_name: str | None
    former_owners: tuple[str, ...]
    principal: str | None = None


class _StoredTransaction(msgspec.Struct, array_like=True, frozen=True):
    version: int
    transactional_id: str
    state: State
    start_ms: int
    participants: dict[str, list[int]]
    is_touched: bool = False


_encoder = msgspec.msgpack.Encoder()
_key_decoder = msgspec.msgpack.Decoder(_IdKey | _TransactionKey)
_id_decoder = msgspec.msgpack.Decoder(_StoredId)
_transaction_decoder = msgspec.msgpack.Decoder(_StoredTransaction)


def encode(record: Record) -> tuple[bytes, bytes | None]:
    """`(key, value)` of the log's record."""
    if isinstance(record, IdRecord):
        key = _encoder.encode(_IdKey(record.transactional_id))
        if record.value is None:
            return key, None
        return key, _encoder.encode(_StoredId(VERSION, *msgspec.structs.astuple(record.value)))
    key = _encoder.encode(_TransactionKey(*record.key))
    if record.value is None:
        return key, None
    value = record.value
    grouped: dict[str, list[int]] = {}
    for topic_id, partition in sorted(value.participants):
        grouped.setdefault(topic_id, []).append(partition)
    stored = _StoredTransaction(
        VERSION, value.transactional_id, value.state, value.start_ms, grouped, value.is_touched
    )
    return key, _encoder.encode(stored)


def decode(key: bytes | None, value: bytes | None) -> Record:
    """Decodes the bytes that `encode` made of a record. Raises CorruptBatchError for other bytes,
    UnsupportedFormatError for a newer rayq's."""
    try:
        named = _key_decoder.decode(key or b"")
        if value is not None:
            check_version(value, "__transaction_state", VERSION)
        if isinstance(named, _IdKey):
            if value is None:
                return IdRecord(named.transactional_id, None)
            _, *fields = msgspec.structs.astuple(_id_decoder.decode(value))
            return IdRecord(named.transactional_id, IdValue(*fields))
        at = TransactionKey(named.family, named.epoch)
        if value is None:
            return TransactionRecord(at, None)
        stored = _transaction_decoder.decode(value)
        participants = frozenset(
            (topic_id, partition)
            for topic_id, numbers in stored.participants.items()
            for partition in numbers
        )
        return TransactionRecord(
            at,
            TransactionValue(
                stored.transactional_id,
                stored.state,
                stored.start_ms,
                participants,
                stored.is_touched,
            ),
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptBatchError(
            f"A record of __transaction_state with key {key!r} is not a transaction's: {error}"
        ) from error
