"""A group coordinator's decisions about committed offsets: which count, and when they expire.

Each function reads the state and returns a decision, or its records. Errors are those of
`rayq.errors`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rayq import messages
from rayq.core.decision import Decision, Times
from rayq.core.groups.changes import find_group, find_member
from rayq.core.groups.draft import check_group_count
from rayq.core.groups.records import (
    GroupRecord,
    GroupValue,
    OffsetRecord,
    OffsetValue,
    PendingRecord,
    Record,
)
from rayq.core.groups.state import Group, GroupState
from rayq.errors import (
    CommitRefusedError,
    FencedMemberError,
    GroupLimitError,
    GroupNotEmptyError,
    OffsetPendingError,
    counted,
    to_wire,
)
from rayq.messages.secret_names import shown_part
from rayq.records import TopicIdPartition

OFFSETS_MAX = 100_000
"""Maximum number of committed positions of a group, and of a commit."""
POSITIONS_MAX = 1_000_000
"""Maximum number of positions of all groups of a coordinator. No group may add more beyond it.
"""
METADATA_LENGTH_MAX = 1024 * 1024
"""Maximum number of characters of metadata with all positions of a group together."""
TOPIC_GONE_S = 10.0
"""Time after which positions of a topic that is missing in the metadata are forgotten: it was
deleted."""

Refused = tuple[str, int, str, str]
"""`(topic id, partition, error code, message)`"""


OffsetsDecision = Decision[Record, messages.CommitOffsetsResponse]


def commit(
    state: GroupState, request: messages.CommitOffsets, times: Times
) -> OffsetsDecision:
    """Commits positions of a member, or, if `member` is empty, of a consumer that assigned its
    partitions to itself. Raises UnknownMemberError, FencedMemberError, GroupNotEmptyError,
    GroupLimitError, OffsetPendingError."""
    group, member, sequence = request.group, request.member, request.sequence
    known = state.groups.get(group)
    check_metadata(known, group, request.offsets)
    taken, refused = committable(state, request)
    if member:
        session = state.groups[group].sessions[member]
        if sequence <= session.transaction_sequence:
            reason = "the member has put newer positions into a transaction since"
            return answered([], [_refusal(offset, reason) for offset in request.offsets])
        if session.last_sequence is not None and sequence < session.last_sequence:
            return answered([], [])
        session.last_sequence = sequence
    check_none_pending(known, group, places_of(taken))
    return answered(_set(state, group, taken, times.now_ms), refused)


def answered(records: list[Record], refused: list[Refused]) -> OffsetsDecision:
    """The decision on a commit of which these positions are refused."""
    return Decision(records, lambda: messages.CommitOffsetsResponse(refused))


def committable(
    state: GroupState, request: messages.CommitOffsets
) -> tuple[Sequence[messages.OffsetCommit], list[Refused]]:
    """Splits positions into those that the member, or a consumer without a member, may commit, and
    those refused. Raises UnknownMemberError, FencedMemberError, GroupNotEmptyError."""
    group, member, member_epoch = request.group, request.member, request.member_epoch
    if not member:
        known = state.groups.get(group)
        _check_no_members(known, group, "Positions can be committed without a member")
        return request.offsets, []
    value = find_member(state, group, member, None)
    if member_epoch not in (value.member_epoch, value.previous_epoch):
        raise FencedMemberError(
            f"Member {shown_part(member)} of group {group!r} is in epoch {value.member_epoch}, the "
            f"commit in {member_epoch}: it is refused."
        )
    owned = value.owned
    if member_epoch != value.member_epoch:
        # Those that it had under that epoch it gave up.
        owned -= state.groups[group].sessions[member].gained
    taken: list[messages.OffsetCommit] = []
    refused: list[Refused] = []
    for offset in request.offsets:
        if (offset.topic_id, offset.partition) in owned:
            taken.append(offset)
        else:
            where = f"{state.name_of_topic(offset.topic_id)}-{offset.partition}"
            reason = (
                f"{where} is not assigned to member {shown_part(member)} of group {group!r}: it "
                "was taken away meanwhile, and another may have continued from the last commit."
            )
            refused.append(_refusal(offset, reason))
    return taken, refused


def set_offsets(
    state: GroupState, request: messages.SetGroupOffsets, times: Times
) -> Decision[Record, messages.Done]:
    """Sets the positions of a group without members. Raises GroupNotEmptyError, GroupLimitError,
    OffsetPendingError."""
    group = request.group
    offsets = [messages.OffsetCommit(*position, None, "") for position in request.offsets]
    known = state.groups.get(group)
    _check_no_members(known, group, "Its positions can be set")
    check_none_pending(known, group, places_of(offsets))
    return Decision(_set(state, group, offsets, times.now_ms), messages.Done)


def fetch_committed(
    state: GroupState, request: messages.FetchCommitted, _: Times
) -> Decision[Record, messages.FetchCommittedResponse]:
    """Tells committed positions. Raises OffsetPendingError."""
    group = state.groups.get(request.group)
    check_none_pending(group, request.group, request.partitions)
    # A record that changes nothing: when it is committed, no newer coordinator had started.
    unchanged = GroupRecord(request.group, None if group is None else group.value)

    def answer() -> messages.FetchCommittedResponse:
        known = group or Group()
        wanted = sorted(known.offsets) if request.partitions is None else request.partitions
        return messages.FetchCommittedResponse(committed_offsets(known, wanted))

    return Decision([unchanged], answer)


def committed_offsets(
    group: Group, wanted: Iterable[TopicIdPartition]
) -> list[messages.CommittedOffset]:
    """The committed offsets of those wanted partitions that have one."""
    return [
        messages.CommittedOffset(
            topic_id=topic_id,
            partition=partition,
            offset=committed.offset,
            last_epoch=committed.last_epoch,
            metadata=committed.metadata,
            commit_time_ms=committed.commit_time_ms,
        )
        for topic_id, partition in wanted
        if (committed := group.offsets.get((topic_id, partition))) is not None
    ]


def delete_group(
    state: GroupState, request: messages.DeleteGroup, _: Times
) -> Decision[Record, messages.Done]:
    """Deletes a group and its positions. Raises UnknownGroupError, GroupNotEmptyError,
    OffsetPendingError."""
    known = find_group(state, request.group)
    _check_no_members(known, request.group, "It can be deleted")
    check_none_pending(known, request.group, None)
    return Decision(_tombstones(request.group, known.offsets, is_whole=True), messages.Done)


def expire_offsets(
    state: GroupState, name: str, *, now_ms: int, retention_ms: int
) -> list[Record]:
    """Forgets old positions of a group without members, and the group if it has nothing left."""
    group = state.groups.get(name)
    if group is None or group.members:
        return []
    empty_since_ms = group.value.empty_since_ms or 0
    old = [
        at
        for at, offset in group.offsets.items()
        if now_ms - max(empty_since_ms, offset.commit_time_ms) > retention_ms
        and at not in group.pending
    ]
    is_whole = len(old) == len(group.offsets) and not group.pending
    return _tombstones(name, old, is_whole=is_whole) if old or is_whole else []


def topics_gone(state: GroupState, *, now_s: float) -> set[str]:
    """The ids of topics with positions that have been missing for long: those topics were
    deleted."""
    existing = {info.topic_id for info in state.topics.values()}
    missing = {
        topic_id
        for group in state.groups.values()
        for topic_id in {topic_id for topic_id, _ in group.offsets}
        if topic_id not in existing
    }
    since_s = {topic_id: state.topics_gone.get(topic_id, now_s) for topic_id in missing}
    state.topics_gone = since_s
    return {topic_id for topic_id, at_s in since_s.items() if now_s - at_s > TOPIC_GONE_S}


def forget_topics(state: GroupState, name: str, gone: Collection[str]) -> list[Record]:
    """Forgets a group's positions in these topics."""
    group = state.groups.get(name)
    if group is None:
        return []
    places = [at for at in group.offsets if at[0] in gone and at not in group.pending]
    return [OffsetRecord(name, *at, None) for at in sorted(places)]


def _set(
    state: GroupState, group: str, offsets: Sequence[messages.OffsetCommit], now_ms: int
) -> list[Record]:
    records: list[Record] = []
    known = state.groups.get(group)
    if known is None:
        check_group_count(state)
        records.append(GroupRecord(group, GroupValue(empty_since_ms=now_ms)))
    for offset in offsets:
        value = OffsetValue(offset.offset, offset.last_epoch, offset.metadata, now_ms)
        records.append(OffsetRecord(group, offset.topic_id, offset.partition, value))
    check_offset_count(state, known, group, records)
    return records


def places_of(offsets: Iterable[messages.OffsetCommit]) -> list[TopicIdPartition]:
    return [(offset.topic_id, offset.partition) for offset in offsets]


def _refusal(commit: messages.OffsetCommit, reason: str) -> Refused:
    return (commit.topic_id, commit.partition, *to_wire(CommitRefusedError(reason)))


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
            f"Group {group!r} has {counted(len(known.members), 'member')}. {what} only while it "
            "has none: stop them first."
        )


def check_none_pending(
    known: Group | None, group: str, wanted: Collection[TopicIdPartition] | None
) -> None:
    """Raises OffsetPendingError if a transaction holds one of these positions (None: any)."""
    if known is None or not known.pending:
        return
    for topic_id, partition in known.pending if wanted is None else wanted:
        held = known.pending.get((topic_id, partition))
        if held is not None:
            raise OffsetPendingError(
                f"The position of group {group!r} in partition {partition} of the topic with id "
                f"{topic_id} waits for the end of a transaction (family {held.family}, epoch "
                f"{held.epoch})."
            )


def check_metadata(
    known: Group | None, group: str, offsets: Sequence[messages.OffsetCommit]
) -> None:
    length = sum(len(offset.metadata) for offset in offsets)
    if length == 0:
        return
    if known is not None:
        length += known.metadata_characters
        for at in set(places_of(offsets)):
            replaced = (known.offsets.get(at), known.pending.get(at))
            length -= sum(len(offset.metadata) for offset in replaced if offset is not None)
    if length > METADATA_LENGTH_MAX:
        raise GroupLimitError(
            f"Group {group!r} would have {length} characters of metadata with its positions, the "
            f"most are {METADATA_LENGTH_MAX}."
        )


def check_offset_count(
    state: GroupState, known: Group | None, group: str, records: Sequence[Record]
) -> None:
    known = known or Group()
    most = len(known.offsets) + len(known.pending) + len(records)
    if most <= OFFSETS_MAX and state.positions + len(records) <= POSITIONS_MAX:
        return
    added = sum(
        isinstance(record, OffsetRecord | PendingRecord)
        and (record.topic_id, record.partition) not in known.offsets
        and (record.topic_id, record.partition) not in known.pending
        for record in records
    )
    count = len(known.offsets) + sum(at not in known.offsets for at in known.pending) + added
    if count > OFFSETS_MAX:
        raise GroupLimitError(
            f"Group {group!r} would have {count} positions, the most are {OFFSETS_MAX}."
        )
    if added and state.positions + added > POSITIONS_MAX:
        raise GroupLimitError(
            f"The groups of this coordinator have {state.positions} positions, of {POSITIONS_MAX} "
            f"that there may be: group {group!r} gets no more of them. Delete old groups, or let "
            "them expire sooner (offsets_retention_ms)."
        )
