"""What a coordinator decides when members come, stay and go, and when positions are committed.

Each function reads the state and returns the records to commit; of the state it changes only what
is soft (who was heard when). Errors are those of `rayq.errors`. Rebalancing is cooperative:

- who joins, leaves or subscribes anew makes the assignor compute a *target* for every member;
- what a member has beyond its target moves from `assigned` to `revoking` at once, and is nobody
  else's until the member says that it gave it up (or is gone);
- what is in nobody's `assigned` or `revoking` goes to the member whose target it is;
- each change of `assigned` has a new epoch, and waits until the member knows the one before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from rayq.core.assignors import find_assignor, run_assignor
from rayq.core.group_records import (
    NOTHING,
    GroupRecord,
    GroupValue,
    MemberRecord,
    MemberValue,
    OffsetRecord,
    OffsetValue,
    Partitions,
    Record,
)
from rayq.core.group_state import (
    PATTERNS_MAX,
    Group,
    GroupState,
    Session,
    SubscribedTopic,
    partitions_of,
)
from rayq.core.topic_pattern import check_pattern
from rayq.errors import (
    CommitRefusedError,
    FencedMemberError,
    GroupLimitError,
    GroupNotEmptyError,
    InvalidAssignmentError,
    InvalidRequestError,
    RayqError,
    UnknownAssignorError,
    UnknownGroupError,
    UnknownMemberError,
    to_wire,
)
from rayq.records import TopicIdPartition, TopicPartition

GROUPS_MAX = 10_000
"""Of one coordinator."""
MEMBERS_MAX = 1_000
"""Of one group."""
OFFSETS_MAX = 100_000
"""Committed positions of one group, and of one commit."""
TOPICS_MAX = 1_000
"""Topics that one member names."""
CLIENT_LENGTH_MAX = 256
SUBSCRIPTION_BYTES_MAX = 16 * 1024
"""Names of topics that one member names, together: a rebalance writes them for every member."""
METADATA_LENGTH_MAX = 1024 * 1024
"""Characters of metadata with all positions of one group."""
REASON_LENGTH_MAX = 512
SESSION_TIMEOUT_MS_MIN = 100
TOPIC_GONE_S = 10.0
"""Positions of a topic that the metadata lacked for so long are forgotten: it was deleted."""

Refused = tuple[str, int, str, str]
"""`(topic id, partition, error code, message)`"""


class Beat(NamedTuple):
    """What a member says of itself with each heartbeat."""

    member: str
    member_epoch: int
    instance: str | None
    client: str
    topics: tuple[str, ...]
    pattern: str | None
    assignor: str
    session_timeout_ms: int
    max_poll_interval_ms: int
    owned: Partitions


class OffsetCommit(NamedTuple):
    topic_id: str
    partition: int
    offset: int
    last_epoch: int | None
    metadata: str


# --- members ------------------------------------------------------------------------------------


def heartbeat(
    state: GroupState, group: str, beat: Beat, *, now_s: float, now_ms: int
) -> list[Record]:
    """A member joins (epoch 0) or stays. Raises UnknownMemberError, FencedMemberError,
    UnknownAssignorError, InvalidAssignmentError, InvalidRequestError, GroupLimitError."""
    known = state.groups.get(group)
    before = None if known is None else known.members.get(beat.member)
    if beat.member_epoch == 0:
        _check_beat(state, beat)
        if known is not None and before is not None:
            known.sessions[beat.member].heard_s = now_s
            known.sessions[beat.member].disconnected_s = None
        return _join(state, group, beat, before, now_ms=now_ms)
    if known is None or before is None:
        raise _unknown(known, group, beat.member, beat.instance)
    session = known.sessions[beat.member]
    if beat.member_epoch not in (before.member_epoch, before.previous_epoch):
        raise FencedMemberError(
            f"Member {beat.member} of group {group!r} is in epoch {before.member_epoch}, the "
            f"heartbeat in {beat.member_epoch}: join anew."
        )
    is_changed = not _says_the_same(before, beat)
    if is_changed:
        _check_beat(state, beat)
    session.heard_s, session.disconnected_s = now_s, None
    is_ack = beat.member_epoch == before.member_epoch
    has_news = is_ack and not session.is_acked
    session.is_acked = session.is_acked or is_ack
    given_up = before.revoking - beat.owned if is_ack and before.revoking else NOTHING
    if not is_changed and not given_up and (not has_news or known.is_settled):
        return []
    draft = _GroupDraft(state, group, now_ms)
    if is_changed:
        draft.members[beat.member] = _with(before, beat)
    if given_up:
        draft.put(beat.member, revoking=before.revoking - given_up)
    if is_changed and _asks_for(before) != _asks_for(draft.members[beat.member]):
        draft.rebalance(f"{_who(beat.member, beat.client)} subscribed anew", may_fail=True)
    draft.reconcile()
    return draft.records()


def _join(
    state: GroupState, group: str, beat: Beat, before: MemberValue | None, *, now_ms: int
) -> list[Record]:
    draft = _GroupDraft(state, group, now_ms)
    who = _who(beat.member, beat.client)
    twin = draft.member_of_instance(beat.instance)
    if before is not None and twin in (None, beat.member):
        # Its first answer was lost, or it begins anew: then it owns nothing.
        session = draft.sessions[beat.member]
        if not session.is_acked and _says_the_same(before, beat):
            return []
        draft.members[beat.member] = _with(before, beat)
        draft.put(beat.member, revoking=NOTHING)
        draft.renew(beat.member)
        if _asks_for(before) != _asks_for(draft.members[beat.member]):
            draft.rebalance(f"{who} subscribed anew", may_fail=True)
    elif twin is not None and twin != beat.member:
        # A static member came back as another process: it takes over what the one before had.
        old = draft.members[twin]
        draft.remove(twin)
        if before is not None:
            draft.remove(beat.member)
        draft.members[beat.member] = _with(old, beat)
        draft.put(beat.member, revoking=NOTHING)
        draft.renew(beat.member)
        asks = _asks_for(draft.members[beat.member])
        if before is not None or _asks_for(old) != asks:
            draft.rebalance(f"{who} took over the instance {beat.instance!r}", may_fail=True)
    else:
        if len(draft.members) >= MEMBERS_MAX:
            raise GroupLimitError(
                f"Group {group!r} has {len(draft.members)} members, the most there may be."
            )
        draft.members[beat.member] = _with(None, beat)
        draft.renew(beat.member)
        draft.rebalance(f"{who} joined", may_fail=True)
    draft.reconcile()
    return draft.records()


def leave(
    state: GroupState, group: str, member: str, reason: str, *, now_ms: int
) -> list[Record]:
    """A member goes; one that is not known has gone already."""
    known = state.groups.get(group)
    if known is None or member not in known.members:
        return []
    because = f": {reason}" if reason else ""
    who = _who(member, known.members[member].client)
    return _remove(state, group, {member: f"{who} left{because}"}, now_ms)


def leave_static(
    state: GroupState, group: str, member: str, *, now_s: float, now_ms: int
) -> list[Record]:
    """A static member's process ends; it may be back within the session, and keeps its
    partitions. What it was asked to give up is given up now."""
    known = state.groups.get(group)
    if known is None or member not in known.members:
        return []
    if known.members[member].instance is None:
        return leave(state, group, member, "", now_ms=now_ms)
    session = known.sessions[member]
    session.heard_s, session.is_acked = now_s, False
    if not known.members[member].revoking:
        return []
    draft = _GroupDraft(state, group, now_ms)
    draft.put(member, revoking=NOTHING)
    draft.reconcile()
    return draft.records()


def disconnected(state: GroupState, group: str, member: str, *, now_s: float) -> None:
    """The connection of a member's heartbeats broke; static members have their whole session."""
    known = state.groups.get(group)
    if known is not None and member in known.members and known.members[member].instance is None:
        known.sessions[member].disconnected_s = now_s


def end_sessions(
    state: GroupState, *, now_s: float, now_ms: int, disconnect_grace_ms: int
) -> list[Record]:
    """Takes out who was silent for a session, did not come back after its connection broke, or
    did not give up partitions in time."""
    records: list[Record] = []
    for name, group in list(state.groups.items()):
        gone: dict[str, str] = {}
        for member, one in group.members.items():
            reason = _why_gone(one, group.sessions[member], now_s, disconnect_grace_ms)
            if reason is not None:
                gone[member] = f"{_who(member, one.client)} {reason}"
        if gone:
            records += _remove(state, name, gone, now_ms)
    return records


def _why_gone(
    one: MemberValue, session: Session, now_s: float, disconnect_grace_ms: int
) -> str | None:
    if session.heard_s is None:
        session.heard_s = now_s
    if not one.revoking:
        session.revoking_since_s = None
    elif session.revoking_since_s is None:
        session.revoking_since_s = now_s
    if (
        session.disconnected_s is not None
        and now_s - session.disconnected_s > disconnect_grace_ms / 1000
    ):
        return f"is gone: its connection broke and it did not come back in {disconnect_grace_ms} ms"
    silent_s = now_s - session.heard_s
    if silent_s > one.session_timeout_ms / 1000:
        return (
            f"was silent for {silent_s:.1f} s, its session is "
            f"{one.session_timeout_ms / 1000:g} s"
        )
    since_s = session.revoking_since_s
    if since_s is not None and now_s - since_s > one.max_poll_interval_ms / 1000:
        return (
            "did not give up partitions within max_poll_interval_ms = "
            f"{one.max_poll_interval_ms}"
        )
    return None


def prolong_sessions(state: GroupState, late_s: float) -> None:
    """This process was not running for so long: nobody could be heard."""
    for _, group, member, _ in state.all_members():
        session = group.sessions[member]
        if session.heard_s is not None:
            session.heard_s += late_s
        if session.disconnected_s is not None:
            session.disconnected_s += late_s
        if session.revoking_since_s is not None:
            session.revoking_since_s += late_s


def _remove(
    state: GroupState, group: str, gone: Mapping[str, str], now_ms: int
) -> list[Record]:
    """`gone`: member to the reason why."""
    draft = _GroupDraft(state, group, now_ms)
    for member in gone:
        draft.remove(member)
    reason = "; ".join(list(gone.values())[:3])
    more = f" (and {len(gone) - 3} more)" if len(gone) > 3 else ""
    draft.rebalance(reason + more, may_fail=False)
    draft.reconcile()
    return draft.records()


# --- topics -------------------------------------------------------------------------------------


def set_topics(
    state: GroupState, topics: Mapping[str, SubscribedTopic], *, now_ms: int
) -> list[Record]:
    """The cluster's topics as the metadata has them now: groups that read what appeared, grew or
    went are rebalanced."""
    if topics == state.topics:
        return []
    state.take_topics(topics)
    records: list[Record] = []
    for name, group in state.groups.items():
        if group.members:
            records += _follow_topics(state, name, now_ms)
    return records


def _follow_topics(state: GroupState, name: str, now_ms: int) -> list[Record]:
    draft = _GroupDraft(state, name, now_ms)
    wanted = partitions_of(draft.topics_read())
    aimed: set[TopicIdPartition] = set()
    for one in draft.members.values():
        aimed |= one.target
    if wanted == aimed:
        return []
    changed = {state.name_of_topic(topic_id) for topic_id, _ in wanted ^ aimed}
    shown = ", ".join(sorted(changed)[:3]) + (", ..." if len(changed) > 3 else "")
    draft.rebalance(f"the partitions of {shown} changed", may_fail=False)
    draft.reconcile()
    return draft.records()


def forget_topics(state: GroupState, *, now_s: float) -> list[Record]:
    """Positions in topics that were missing for long: they were deleted."""
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


# --- offsets ------------------------------------------------------------------------------------


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
    """Positions of a member, or (`member` empty) of a consumer that assigned itself its
    partitions. Raises UnknownMemberError, FencedMemberError, GroupNotEmptyError,
    GroupLimitError."""
    known = state.groups.get(group)
    _check_metadata(known, group, offsets)
    if not member:
        _check_no_members(known, group, "Positions can be committed without a member")
        return _set(state, group, offsets, now_ms), []
    if known is None or member not in known.members:
        raise _unknown(known, group, member, None)
    value = known.members[member]
    if member_epoch not in (value.member_epoch, value.previous_epoch):
        raise FencedMemberError(
            f"Member {member} of group {group!r} is in epoch {value.member_epoch}, the commit in "
            f"{member_epoch}: it is refused."
        )
    session = known.sessions[member]
    if session.last_sequence is not None and sequence < session.last_sequence:
        return [], []
    session.last_sequence = sequence
    committable = value.owned
    if member_epoch != value.member_epoch:
        committable -= session.gained  # What it had of these under that epoch, it gave up.
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
    """Raises GroupNotEmptyError, GroupLimitError."""
    _check_no_members(state.groups.get(group), group, "Its positions can be set")
    return _set(state, group, offsets, now_ms)


def delete_group(state: GroupState, group: str) -> list[Record]:
    """Raises UnknownGroupError, GroupNotEmptyError."""
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


def find_member(state: GroupState, group: str, member: str, instance: str | None) -> MemberValue:
    """Raises UnknownMemberError, FencedMemberError."""
    known = state.groups.get(group)
    if known is None or member not in known.members:
        raise _unknown(known, group, member, instance)
    return known.members[member]


def find_group(state: GroupState, group: str) -> Group:
    """Raises UnknownGroupError."""
    known = state.groups.get(group)
    if known is None:
        raise UnknownGroupError(f"There is no group {group!r}.")
    return known


def _set(
    state: GroupState, group: str, offsets: Sequence[OffsetCommit], now_ms: int
) -> list[Record]:
    records: list[Record] = []
    known = state.groups.get(group)
    if known is None:
        _check_group_count(state)
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


# --- checks -------------------------------------------------------------------------------------


def _check_beat(state: GroupState, beat: Beat) -> None:
    find_assignor(state.assignors, beat.assignor)
    if beat.pattern is not None:
        check_pattern(beat.pattern)
        _check_pattern_count(state, beat.pattern)
    names_bytes = sum(len(name.encode()) for name in beat.topics)
    if len(beat.topics) > TOPICS_MAX or names_bytes > SUBSCRIPTION_BYTES_MAX:
        raise InvalidRequestError(
            f"A member names up to {TOPICS_MAX} topics of {SUBSCRIPTION_BYTES_MAX} bytes in all, "
            f"not {len(beat.topics)} of {names_bytes}: subscribe by a pattern."
        )
    if len(beat.client) > CLIENT_LENGTH_MAX:
        raise InvalidRequestError(
            f"A client says who it is in up to {CLIENT_LENGTH_MAX} characters, not "
            f"{len(beat.client)}."
        )
    if len(beat.owned) > OFFSETS_MAX:
        raise InvalidRequestError(
            f"A member owns up to {OFFSETS_MAX} partitions, not {len(beat.owned)}."
        )
    if beat.session_timeout_ms < SESSION_TIMEOUT_MS_MIN:
        raise InvalidRequestError(
            f"group_session_timeout_ms is at least {SESSION_TIMEOUT_MS_MIN}, not "
            f"{beat.session_timeout_ms}."
        )


def _check_pattern_count(state: GroupState, pattern: str) -> None:
    known = state.patterns()
    if pattern not in known and len(known) >= PATTERNS_MAX:
        raise GroupLimitError(
            f"The members of this coordinator's groups have {len(known)} different patterns, the "
            "most there may be: subscribe by names, or by a pattern that others have."
        )


def _check_no_members(known: Group | None, group: str, what: str) -> None:
    if known is not None and known.members:
        raise GroupNotEmptyError(
            f"Group {group!r} has {len(known.members)} members. {what} only while it has none: "
            "stop them first."
        )


def _check_group_count(state: GroupState) -> None:
    if len(state.groups) >= GROUPS_MAX:
        raise GroupLimitError(
            f"This coordinator has {len(state.groups)} groups, the most there may be: delete old "
            "ones, or let them expire sooner (offsets_retention_ms)."
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


def _unknown(known: Group | None, group: str, member: str, instance: str | None) -> RayqError:
    other = None if known is None else known.member_of_instance(instance)
    if other is not None:
        return FencedMemberError(
            f"Another process joined group {group!r} as {instance!r}: member {member} is out. "
            "Give each process a group_instance_id of its own."
        )
    return UnknownMemberError(
        f"Group {group!r} has no member {member}: its session ended, or it left. It has to join "
        "anew."
    )


def _who(member: str, client: str) -> str:
    return f"member {member[:8]} ({client})" if client else f"member {member[:8]}"


def _asks_for(one: MemberValue) -> tuple[tuple[str, ...], str | None, str, str | None]:
    """What a target depends on."""
    return one.topics, one.pattern, one.assignor, one.instance


def _says_the_same(one: MemberValue, beat: Beat) -> bool:
    return (
        one.topics == beat.topics
        and one.pattern == beat.pattern
        and one.assignor == beat.assignor
        and one.instance == beat.instance
        and one.client == beat.client
        and one.session_timeout_ms == beat.session_timeout_ms
        and one.max_poll_interval_ms == beat.max_poll_interval_ms
    )


def _with(before: MemberValue | None, beat: Beat) -> MemberValue:
    said = MemberValue(
        beat.instance,
        beat.client,
        beat.topics,
        beat.pattern,
        beat.assignor,
        beat.session_timeout_ms,
        beat.max_poll_interval_ms,
    )
    if before is None:
        return said
    return msgspec.structs.replace(
        said,
        member_epoch=before.member_epoch,
        previous_epoch=before.previous_epoch,
        target=before.target,
        assigned=before.assigned,
        revoking=before.revoking,
    )


# --- one decision -------------------------------------------------------------------------------


class _GroupDraft:
    """A group as it will be, from which the records follow. Raises GroupLimitError for one group
    too many."""

    def __init__(self, state: GroupState, group: str, now_ms: int) -> None:
        known = state.groups.get(group)
        if known is None:
            _check_group_count(state)
            known = Group()
        self._state = state
        self._group = group
        self._now_ms = now_ms
        self._before = known
        self._next_epoch = known.value.epoch + 1
        self._renewed: set[str] = set()
        self.members = dict(known.members)
        self.sessions = known.sessions
        self._value = known.value

    def member_of_instance(self, instance: str | None) -> str | None:
        return self._before.member_of_instance(instance)

    def put(self, member: str, *, revoking: Partitions) -> None:
        self.members[member] = msgspec.structs.replace(self.members[member], revoking=revoking)

    def remove(self, member: str) -> None:
        self.members.pop(member)

    def renew(self, member: str) -> None:
        """The member begins under an epoch of its own: none from before is accepted."""
        self._renewed.add(member)
        self._value = msgspec.structs.replace(self._value, epoch=self._next_epoch)
        self.members[member] = msgspec.structs.replace(
            self.members[member], member_epoch=self._next_epoch, previous_epoch=self._next_epoch
        )

    def topics_read(self) -> dict[str, SubscribedTopic]:
        """The existing topics that any member subscribes to."""
        subscription = self._state.subscription
        names = {name for one in self.members.values() for name in subscription(one).topics}
        return {name: self._state.topics[name] for name in sorted(names)}

    def rebalance(self, reason: str, *, may_fail: bool) -> None:
        """Computes every member's target. Where a user's assignor fails, the request that caused
        the rebalance is refused (`may_fail`), or `uniform` stands in for it."""
        name = self._choose_assignor()
        topics = self.topics_read()
        subscriptions = {
            member: self._state.subscription(one)
            for member, one in sorted(self.members.items())
        }
        names = {info.topic_id: topic for topic, info in topics.items()}
        current = {
            member: frozenset(
                TopicPartition(names[topic_id], number)
                for topic_id, number in self.members[member].target
                if topic_id in names
            )
            for member in subscriptions
        }
        counts = {topic: info.partitions for topic, info in topics.items()}
        assignors = self._state.assignors
        try:
            found = run_assignor(
                name, find_assignor(assignors, name), subscriptions, counts, current
            )
        except (InvalidAssignmentError, UnknownAssignorError) as error:
            if may_fail:
                raise
            reason = f"{reason} (uniform instead of {name!r}: {error})"
            found = run_assignor(
                "uniform", find_assignor(assignors, "uniform"), subscriptions, counts, current
            )
        for member, given in found.items():
            target = frozenset((topics[one.topic].topic_id, one.partition) for one in given)
            if target != self.members[member].target:
                self.members[member] = msgspec.structs.replace(
                    self.members[member], target=target
                )
        self._value = GroupValue(
            name,
            self._next_epoch,
            reason[:REASON_LENGTH_MAX],
            self._now_ms,
            None if self.members else self._now_ms,
        )

    def _choose_assignor(self) -> str:
        """The one that most members name; the group's present one where that is a tie."""
        votes: dict[str, int] = {}
        for one in self.members.values():
            votes[one.assignor] = votes.get(one.assignor, 0) + 1
        present = self._value.assignor
        if not votes:
            return present
        return max(sorted(votes), key=lambda name: (votes[name], name == present))

    def reconcile(self) -> None:
        """Moves what may move now."""
        changed: dict[str, MemberValue] = {}
        taken: set[TopicIdPartition] = set()
        for member, one in self.members.items():
            if self._may_change(member) and (one.revoking or one.assigned != one.target):
                lost = one.assigned - one.target
                back = one.revoking & one.target
                if lost or back:
                    one = changed[member] = msgspec.structs.replace(
                        one,
                        assigned=(one.assigned - lost) | back,
                        revoking=(one.revoking | lost) - back,
                    )
            taken |= one.assigned
            taken |= one.revoking
        for member, one in self.members.items():
            if self._may_change(member):
                one = changed.get(member, one)
                gained = one.target - one.assigned - taken
                if gained:
                    changed[member] = msgspec.structs.replace(one, assigned=one.assigned | gained)
        for member, one in changed.items():
            if member not in self._renewed:
                one = msgspec.structs.replace(
                    one, member_epoch=self._next_epoch, previous_epoch=one.member_epoch
                )
            self.members[member] = one
        if changed:
            self._value = msgspec.structs.replace(self._value, epoch=self._next_epoch)

    def _may_change(self, member: str) -> bool:
        return member in self._renewed or self.sessions[member].is_acked

    def records(self) -> list[Record]:
        """What differs from before: members first, the group last."""
        records: list[Record] = [
            MemberRecord(self._group, member, None)
            for member in self._before.members
            if member not in self.members
        ]
        records += [
            MemberRecord(self._group, member, one)
            for member, one in self.members.items()
            if self._before.members.get(member) is not one
        ]
        if self._value is not self._before.value:
            records.append(GroupRecord(self._group, self._value))
        return records
