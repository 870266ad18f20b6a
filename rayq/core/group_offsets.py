"""What a coordinator decides about committed positions: which count, and when they expire.

Each function reads the state and returns the records to commit. Errors are those of `rayq.errors`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from rayq.core.group_changes import find_group, find_member
from rayq.core.group_draft import check_group_count
from rayq.core.group_records import GroupRecord, GroupValue, OffsetRecord, OffsetValue, Record
from rayq.core.group_state import Group, GroupState
from rayq.errors import (
    CommitRefusedError,
    FencedMemberError,
    GroupLimitError,
    GroupNotEmptyError,
    to_wire,
)
from rayq.records import TopicIdPartition

OFFSETS_MAX = 100_000
"""The most committed positions of one group, and of one commit."""
METADATA_LENGTH_MAX = 1024 * 1024
"""The most characters of metadata with all positions of one group together."""
TOPIC_GONE_S = 10.0
"""Positions of a topic are forgotten once the metadata lacked it for so long: it was deleted."""

Refused = tuple[str, int, str, str]
"""`(topic id, partition, error code, message)`"""


class OffsetCommit(NamedTuple):
    topic_id: str
    partition: int
    offset: int
    last_epoch: int | None
    metadata: str


def commit(
    state: GroupState,
    group: str,
    *,
    member: str,
    member_epoch: int,
    sequence: int,
    offsets: Sequence[OffsetCommit],
    now_ms: int,
) -> tuple[list[Record], list[Refused]]:
    """Commits positions of a member, or, where `member` is empty, of a consumer that assigned its
    partitions to itself. Raises UnknownMemberError, FencedMemberError, GroupNotEmptyError,
    GroupLimitError."""
    known = state.groups.get(group)
    _check_metadata(known, group, offsets)
    if not member:
        _check_no_members(known, group, "Positions can be committed without a member")
        return _set(state, group, offsets, now_ms), []
    value = find_member(state, group, member, None)
    if member_epoch not in (value.member_epoch, value.previous_epoch):
        raise FencedMemberError(
            f"Member {member} of group {group!r} is in epoch {value.member_epoch}, the commit in "
            f"{member_epoch}: it is refused."
        )
    session = state.groups[group].sessions[member]
    if session.last_sequence is not None and sequence < session.last_sequence:
        return [], []
    session.last_sequence = sequence
    committable = value.owned
    if member_epoch != value.member_epoch:
        committable -= session.gained  # What it had of them under that epoch it gave up.
    records: list[Record] = []
    refused: list[Refused] = []
    for one in offsets:
        at = (one.topic_id, one.partition)
        if at in committable:
            records.append(_offset_record(group, one, now_ms))
        else:
            where = f"{state.name_of_topic(one.topic_id)}-{one.partition}"
            error = CommitRefusedError(
                f"{where} is not assigned to member {member} of group {group!r}: it was taken "
                "away meanwhile, and another may have gone on from the last commit."
            )
            refused.append((*at, *to_wire(error)))
    _check_offset_count(known, group, records)
    return records, refused


def set_offsets(
    state: GroupState, group: str, offsets: Sequence[OffsetCommit], *, now_ms: int
) -> list[Record]:
    """Sets the positions of a group without members. Raises GroupNotEmptyError, GroupLimitError."""
    _check_no_members(state.groups.get(group), group, "Its positions can be set")
    return _set(state, group, offsets, now_ms)


def delete_group(state: GroupState, group: str) -> list[Record]:
    """Deletes a group and its positions. Raises UnknownGroupError, GroupNotEmptyError."""
    known = find_group(state, group)
    _check_no_members(known, group, "It can be deleted")
    return _tombstones(group, known.offsets, is_whole=True)


def expire_offsets(state: GroupState, *, now_ms: int, retention_ms: int) -> list[Record]:
    """Forgets old positions of groups without members, and groups that have nothing left."""
    records: list[Record] = []
    for name, group in state.groups.items():
        if group.members:
            continue
        empty_since_ms = group.value.empty_since_ms or 0
        old = [
            at
            for at, one in group.offsets.items()
            if now_ms - max(empty_since_ms, one.commit_time_ms) > retention_ms
        ]
        is_whole = len(old) == len(group.offsets)
        if old or is_whole:
            records += _tombstones(name, old, is_whole=is_whole)
    return records


def forget_topics(state: GroupState, *, now_s: float) -> list[Record]:
    """Forgets positions in topics that were missing for long: those topics were deleted."""
    existing = {info.topic_id for info in state.topics.values()}
    missing = {
        topic_id
        for group in state.groups.values()
        for topic_id in {topic_id for topic_id, _ in group.offsets}
        if topic_id not in existing
    }
    since_s = {topic_id: state.topics_gone.get(topic_id, now_s) for topic_id in missing}
    state.topics_gone = since_s
    gone = {topic_id for topic_id, at_s in since_s.items() if now_s - at_s > TOPIC_GONE_S}
    if not gone:
        return []
    return [
        OffsetRecord(name, topic_id, partition, None)
        for name, group in state.groups.items()
        for topic_id, partition in sorted(group.offsets)
        if topic_id in gone
    ]


def _set(
    state: GroupState, group: str, offsets: Sequence[OffsetCommit], now_ms: int
) -> list[Record]:
    records: list[Record] = []
    known = state.groups.get(group)
    if known is None:
        check_group_count(state)
        records.append(GroupRecord(group, GroupValue(empty_since_ms=now_ms)))
    records += [_offset_record(group, one, now_ms) for one in offsets]
    _check_offset_count(known, group, records)
    return records


def _offset_record(group: str, one: OffsetCommit, now_ms: int) -> OffsetRecord:
    value = OffsetValue(one.offset, one.last_epoch, one.metadata, now_ms)
    return OffsetRecord(group, one.topic_id, one.partition, value)


def _tombstones(
    group: str, offsets: Collection[TopicIdPartition], *, is_whole: bool
) -> list[Record]:
    records: list[Record] = [OffsetRecord(group, *at, None) for at in sorted(offsets)]
    if is_whole:
        records.append(GroupRecord(group, None))
    return records


def _check_no_members(known: Group | None, group: str, what: str) -> None:
    if known is not None and known.members:
        raise GroupNotEmptyError(
            f"Group {group!r} has {len(known.members)} members. {what} only while it has none: "
            "stop them first."
        )


def _check_metadata(known: Group | None, group: str, offsets: Sequence[OffsetCommit]) -> None:
    length = sum(len(one.metadata) for one in offsets)
    if length == 0:
        return
    if known is not None:
        replaced = {(one.topic_id, one.partition) for one in offsets}
        length += sum(len(one.metadata) for at, one in known.offsets.items() if at not in replaced)
    if length > METADATA_LENGTH_MAX:
        raise GroupLimitError(
            f"Group {group!r} would have {length} characters of metadata with its positions, the "
            f"most are {METADATA_LENGTH_MAX}."
        )


def _check_offset_count(known: Group | None, group: str, records: Sequence[Record]) -> None:
    count = len(records)
    if known is not None:
        if len(known.offsets) + count <= OFFSETS_MAX:
            return
        count = len(known.offsets)
        count += sum(
            isinstance(one, OffsetRecord) and (one.topic_id, one.partition) not in known.offsets
            for one in records
        )
    if count > OFFSETS_MAX:
        raise GroupLimitError(
            f"Group {group!r} would have {count} positions, the most are {OFFSETS_MAX}."
        )
