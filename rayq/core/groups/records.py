"""The records of `__consumer_offsets`: nothing else changes a coordinator's durable state.

The topic is compacted, so each record is the whole value of its key and stands for itself; None as
value (a tombstone) ends the key. Key and value are msgpack arrays:

- key: `[kind, ...]` with kind "group", "member", "offset", "pending" or "ended", then what it
  names;
- value: `[version, ...]`. Fields may be appended with a default; a change that an older rayq must
  not misread raises the version, and a higher one than this rayq's is refused.

Partitions inside a value are grouped by topic: `[[topic id, [partition, ...]], ...]`, sorted.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple
from zlib import crc32

import msgspec

from rayq.core.record_version import check_version
from rayq.errors import CorruptBatchError
from rayq.records import TopicIdPartition

VERSION = 1

Partitions = frozenset[TopicIdPartition]
NOTHING: Partitions = frozenset()


def partition_of_group(group: str, partitions: int) -> int:
    """The partition of `__consumer_offsets` that holds a group, forever: the number of partitions
    is fixed. Its leader coordinates the group."""
    return crc32(group.encode()) % partitions


class GroupValue(msgspec.Struct, frozen=True):
    """A group. `epoch` grows with each change of what members may own; `reason` and
    `rebalance_time_ms` tell of the last rebalance; `empty_since_ms` is None while it has members.
    """

    assignor: str = "uniform"
    epoch: int = 0
    reason: str = ""
    rebalance_time_ms: int = 0
    empty_since_ms: int | None = None


class MemberValue(msgspec.Struct, frozen=True):
    """A member, with its subscription and its partitions.

    `target` is what the assignor gave it, `assigned` what it may own now, `revoking` what it may no
    longer own but has not given up yet. `member_epoch` changes with each change of `assigned`;
    commits are also accepted under `previous_epoch`. `principal` and `host` are those of a named
    principal with a pattern, which matches the topics that it may read from there.
    """

    instance: str | None
    client: str
    topics: tuple[str, ...]
    pattern: str | None
    assignor: str
    session_timeout_ms: int
    max_poll_interval_ms: int
    member_epoch: int = 0
    previous_epoch: int = 0
    target: Partitions = NOTHING
    assigned: Partitions = NOTHING
    revoking: Partitions = NOTHING
    principal: str | None = None
    host: str = ""

    @property
    def owned(self) -> Partitions:
        """The partitions that no other member may have."""
        return self.assigned | self.revoking if self.revoking else self.assigned


class OffsetValue(msgspec.Struct, frozen=True):
    """A committed position: the offset of the next record and the leader epoch of the last one."""

    offset: int
    last_epoch: int | None
    metadata: str
    commit_time_ms: int


class PendingOffset(msgspec.Struct, frozen=True):
    """A position that takes effect if its transaction commits."""

    family: int
    epoch: int
    member: str
    """"" if no member committed it."""
    sequence: int
    """Sequence of the commit, by which late commits are recognised."""
    offset: int
    last_epoch: int | None
    metadata: str


class EndedTransaction(msgspec.Struct, frozen=True):
    """The latest transaction of a family that has ended here. It is kept for a day, so that no late
    request brings its positions back."""

    epoch: int
    coordinator_epoch: int
    """The leader epoch of the transaction's coordinator."""
    ended_ms: int


class GroupRecord(NamedTuple):
    group: str
    value: GroupValue | None


class MemberRecord(NamedTuple):
    group: str
    member: str
    value: MemberValue | None


class OffsetRecord(NamedTuple):
    group: str
    topic_id: str
    partition: int
    value: OffsetValue | None


class PendingRecord(NamedTuple):
    group: str
    topic_id: str
    partition: int
    value: PendingOffset | None


class EndedRecord(NamedTuple):
    family: int
    value: EndedTransaction | None


Record = GroupRecord | MemberRecord | OffsetRecord | PendingRecord | EndedRecord


# --- bytes --------------------------------------------------------------------------------------


class _GroupKey(msgspec.Struct, tag="group", array_like=True, frozen=True):
    group: str


class _MemberKey(msgspec.Struct, tag="member", array_like=True, frozen=True):
    group: str
    member: str


class _OffsetKey(msgspec.Struct, tag="offset", array_like=True, frozen=True):
    group: str
    topic_id: str
    partition: int


class _PendingKey(msgspec.Struct, tag="pending", array_like=True, frozen=True):
    group: str
    topic_id: str
    partition: int


class _EndedKey(msgspec.Struct, tag="ended", array_like=True, frozen=True):
    family: int


_Key = _GroupKey | _MemberKey | _OffsetKey | _PendingKey | _EndedKey
_Grouped = list[tuple[str, list[int]]]


class _StoredGroup(msgspec.Struct, array_like=True, frozen=True):
    version: int
    assignor: str
    epoch: int
    reason: str
    rebalance_time_ms: int
    empty_since_ms: int | None


class _StoredMember(msgspec.Struct, array_like=True, frozen=True):
    version: int
    instance: str | None
    client: str
    topics: tuple[str, ...]
    pattern: str | None
    assignor: str
    session_timeout_ms: int
    max_poll_interval_ms: int
    member_epoch: int
    previous_epoch: int
    target: _Grouped
    assigned: _Grouped
    revoking: _Grouped
    principal: str | None = None
    host: str = ""


class _StoredOffset(msgspec.Struct, array_like=True, frozen=True):
    version: int
    offset: int
    last_epoch: int | None
    metadata: str
    commit_time_ms: int


class _StoredPending(msgspec.Struct, array_like=True, frozen=True):
    version: int
    family: int
    epoch: int
    member: str
    sequence: int
    offset: int
    last_epoch: int | None
    metadata: str


class _StoredEnded(msgspec.Struct, array_like=True, frozen=True):
    version: int
    epoch: int
    coordinator_epoch: int
    ended_ms: int


_encoder = msgspec.msgpack.Encoder()
_key_decoder = msgspec.msgpack.Decoder(_Key)
_group_decoder = msgspec.msgpack.Decoder(_StoredGroup)
_member_decoder = msgspec.msgpack.Decoder(_StoredMember)
_offset_decoder = msgspec.msgpack.Decoder(_StoredOffset)
_pending_decoder = msgspec.msgpack.Decoder(_StoredPending)
_ended_decoder = msgspec.msgpack.Decoder(_StoredEnded)


def encode(record: Record) -> tuple[bytes, bytes | None]:
    """`(key, value)` of the log's record."""
    key: _Key
    if isinstance(record, OffsetRecord):
        key = _OffsetKey(record.group, record.topic_id, record.partition)
    elif isinstance(record, PendingRecord):
        key = _PendingKey(record.group, record.topic_id, record.partition)
    elif isinstance(record, EndedRecord):
        key = _EndedKey(record.family)
    elif isinstance(record, MemberRecord):
        key = _MemberKey(record.group, record.member)
    else:
        key = _GroupKey(record.group)
    value = None if record.value is None else _encoder.encode(_stored(record.value))
    return _encoder.encode(key), value


def decode(key: bytes | None, value: bytes | None) -> Record:
    """Decodes the bytes that `encode` made of a record. Raises CorruptBatchError for other bytes,
    UnsupportedFormatError for a newer rayq's."""
    try:
        named = _key_decoder.decode(key or b"")
        if value is not None:
            check_version(value, "__consumer_offsets", VERSION)
        if isinstance(named, _OffsetKey):
            offset = None if value is None else OffsetValue(*_fields(_offset_decoder.decode(value)))
            return OffsetRecord(named.group, named.topic_id, named.partition, offset)
        if isinstance(named, _MemberKey):
            member = None if value is None else _member(_member_decoder.decode(value))
            return MemberRecord(named.group, named.member, member)
        if isinstance(named, _PendingKey):
            pending = (
                None if value is None else PendingOffset(*_fields(_pending_decoder.decode(value)))
            )
            return PendingRecord(named.group, named.topic_id, named.partition, pending)
        if isinstance(named, _EndedKey):
            ended = (
                None if value is None else EndedTransaction(*_fields(_ended_decoder.decode(value)))
            )
            return EndedRecord(named.family, ended)
        group = None if value is None else GroupValue(*_fields(_group_decoder.decode(value)))
        return GroupRecord(named.group, group)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptBatchError(
            f"A record of __consumer_offsets with key {key!r} is not a group's: {error}"
        ) from error


def _stored(
    value: GroupValue | MemberValue | OffsetValue | PendingOffset | EndedTransaction,
) -> tuple[Any, ...]:
    """The version, then the value's fields in their order. A member's record is as it was before
    there were principals, unless it has one."""
    fields = msgspec.structs.astuple(value)
    if isinstance(value, MemberValue) and value.principal is None:
        fields = fields[:-2]
    return (
        VERSION,
        *(_grouped(field) if isinstance(field, frozenset) else field for field in fields),
    )


def _fields(
    stored: _StoredGroup | _StoredMember | _StoredOffset | _StoredPending | _StoredEnded,
) -> tuple[Any, ...]:
    return msgspec.structs.astuple(stored)[1:]


def _member(stored: _StoredMember) -> MemberValue:
    *fields, target, assigned, revoking, principal, host = _fields(stored)
    partitions = (_flat(target), _flat(assigned), _flat(revoking))
    values: list[Any] = [*fields, *partitions, principal, host]
    return MemberValue(*values)


def _grouped(partitions: Collection[TopicIdPartition]) -> _Grouped:
    numbers_by_topic: dict[str, list[int]] = {}
    for topic_id, partition in sorted(partitions):
        numbers_by_topic.setdefault(topic_id, []).append(partition)
    return list(numbers_by_topic.items())


def _flat(grouped: _Grouped) -> Partitions:
    return frozenset((topic_id, number) for topic_id, numbers in grouped for number in numbers)
