"""A group coordinator's decisions when members join, stay and leave, and when topics change.

Each function reads the state and returns the records to commit; of the state it changes only what
is soft (when each member was heard). Errors are those of `rayq.errors`. Rebalancing is cooperative:

- when a member joins, leaves or changes its subscription, the assignor computes a *target* for
  every member;
- partitions that a member has beyond its target move from `assigned` to `revoking` at once, and go
  to no other member until this one confirms that it gave them up (or is gone);
- a partition that is in no member's `assigned` or `revoking` goes to the member that has it in its
  target;
- each change of `assigned` has a new epoch, and waits until the member knows the previous one.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rayq import messages
from rayq.core.decision import Times
from rayq.core.groups.assignors import find_assignor
from rayq.core.groups.draft import GroupDraft
from rayq.core.groups.records import NOTHING, MemberValue, Record
from rayq.core.groups.state import (
    PATTERNS_MAX,
    PATTERNS_OF_PRINCIPAL_MAX,
    Group,
    GroupState,
    Reader,
    Session,
    partitions_of,
    reader_of,
)
from rayq.core.groups.topic_pattern import check_pattern
from rayq.errors import (
    FencedMemberError,
    GroupLimitError,
    InvalidRequestError,
    RayqError,
    UnknownGroupError,
    UnknownMemberError,
)
from rayq.messages.secret_names import shown_part
from rayq.records import TopicIdPartition

MEMBERS_MAX = 1_000
"""Maximum number of members of a group."""
OWNED_MAX = 100_000
"""Maximum number of partitions that a heartbeat names as the member's own."""
TOPICS_MAX = 1_000
"""Maximum number of topics that a member names."""
CLIENT_LENGTH_MAX = 256
SUBSCRIPTION_BYTES_MAX = 16 * 1024
"""Maximum size of the topic names of a member: a rebalance writes them for every member."""
SESSION_TIMEOUT_MS_MIN = 100
TOPICS_CHANGED = "the partitions of "
"""Beginning of a rebalance reason that ends with names of topics."""


# --- members ------------------------------------------------------------------------------------


def heartbeat(
    state: GroupState,
    request: messages.GroupHeartbeat,
    times: Times,
    reader: Reader | None = None,
) -> list[Record]:
    """Decides when a member joins (epoch 0), stays or leaves (-1, -2). `reader` is the named
    principal that sends it. Raises UnknownMemberError, FencedMemberError, UnknownAssignorError,
    InvalidAssignmentError, InvalidRequestError, GroupLimitError."""
    group, member = request.group, request.member
    now_s, now_ms = times
    if request.member_epoch == messages.MEMBER_EPOCH_LEAVE_STATIC:
        return leave_static(state, group, member, now_s=now_s, now_ms=now_ms)
    if request.member_epoch < 0:
        return leave(state, group, member, request.reason, now_ms=now_ms)
    known = state.groups.get(group)
    before = None if known is None else known.members.get(member)
    if request.member_epoch == 0:
        _check_heartbeat(state, request, reader)
        if known is not None and before is not None:
            known.sessions[member].heard_s = now_s
            known.sessions[member].disconnected_s = None
        return _join(state, request, reader, before, now_ms=now_ms)
    if known is None or before is None:
        raise _unknown(known, group, member, request.instance)
    session = known.sessions[member]
    if request.member_epoch not in (before.member_epoch, before.previous_epoch):
        raise FencedMemberError(
            f"Member {shown_part(member)} of group {group!r} is in epoch "
            f"{before.member_epoch}, the heartbeat in {request.member_epoch}: join again."
        )
    is_changed = not _says_the_same(before, request, reader)
    if is_changed:
        _check_heartbeat(state, request, reader)
    session.heard_s, session.disconnected_s = now_s, None
    is_ack = request.member_epoch == before.member_epoch
    has_news = is_ack and not session.is_acked
    session.is_acked = session.is_acked or is_ack
    given_up = NOTHING
    if is_ack and before.revoking:
        given_up = before.revoking.difference(request.owned)
    if not is_changed and not given_up and (not has_news or known.is_settled):
        return []
    draft = GroupDraft(state, group, now_ms)
    if is_changed:
        draft.members[member] = _with(before, request, reader)
    if given_up:
        draft.put(member, revoking=before.revoking - given_up)
    if is_changed and _asks_for(before) != _asks_for(draft.members[member]):
        draft.rebalance(f"{_who(member, request.client)} changed its subscription", may_fail=True)
    draft.reconcile()
    return draft.records()


def _join(
    state: GroupState,
    request: messages.GroupHeartbeat,
    reader: Reader | None,
    before: MemberValue | None,
    *,
    now_ms: int,
) -> list[Record]:
    group, member = request.group, request.member
    draft = GroupDraft(state, group, now_ms)
    who = _who(member, request.client)
    twin = draft.member_of_instance(request.instance)
    if before is not None and twin in (None, member):
        # The member's first answer was lost, or the member starts over: then it owns nothing.
        session = draft.sessions[member]
        if not session.is_acked and _says_the_same(before, request, reader):
            return []
        draft.members[member] = _with(before, request, reader)
        draft.put(member, revoking=NOTHING)
        draft.renew(member)
        if _asks_for(before) != _asks_for(draft.members[member]):
            draft.rebalance(f"{who} changed its subscription", may_fail=True)
    elif twin is not None:
        # A static member came back as another process: it takes over what the earlier process had.
        old = draft.members[twin]
        draft.remove(twin)
        if before is not None:
            draft.remove(member)
        draft.members[member] = _with(old, request, reader)
        draft.put(member, revoking=NOTHING)
        draft.renew(member)
        asks = _asks_for(draft.members[member])
        if before is not None or _asks_for(old) != asks:
            draft.rebalance(f"{who} took over the instance {request.instance!r}", may_fail=True)
    else:
        if len(draft.members) >= MEMBERS_MAX:
            raise GroupLimitError(
                f"Group {group!r} has {len(draft.members)} members, the most there may be."
            )
        draft.members[member] = _with(None, request, reader)
        draft.renew(member)
        draft.rebalance(f"{who} joined", may_fail=True)
    draft.reconcile()
    return draft.records()


def leave(
    state: GroupState, group: str, member: str, reason: str, *, now_ms: int
) -> list[Record]:
    """Removes a member that leaves; an unknown member has left already."""
    known = state.groups.get(group)
    if known is None or member not in known.members:
        return []
    because = f": {reason}" if reason else ""
    who = _who(member, known.members[member].client)
    return _remove(state, group, {member: f"{who} left{because}"}, now_ms)


def leave_static(
    state: GroupState, group: str, member: str, *, now_s: float, now_ms: int
) -> list[Record]:
    """Takes note that a static member's process ends. The member may be back within the session,
    and keeps its partitions. Those that it was asked to give up are given up now."""
    known = state.groups.get(group)
    if known is None or member not in known.members:
        return []
    if known.members[member].instance is None:
        return leave(state, group, member, "", now_ms=now_ms)
    session = known.sessions[member]
    session.heard_s, session.is_acked = now_s, False
    if not known.members[member].revoking:
        return []
    draft = GroupDraft(state, group, now_ms)
    draft.put(member, revoking=NOTHING)
    draft.reconcile()
    return draft.records()


def disconnected(state: GroupState, group: str, member: str, *, now_s: float) -> None:
    """Takes note that the connection of a member's heartbeats broke; static members have their
    whole session."""
    known = state.groups.get(group)
    if known is not None and member in known.members and known.members[member].instance is None:
        known.sessions[member].disconnected_s = now_s


def end_sessions(
    state: GroupState, name: str, *, now_s: float, now_ms: int, disconnect_grace_ms: int
) -> list[Record]:
    """Removes the members of a group that were silent for a session, did not come back after their
    connection broke, or did not give up partitions in time."""
    group = state.groups.get(name)
    if group is None:
        return []
    gone: dict[str, str] = {}
    for member, value in group.members.items():
        reason = _why_gone(value, group.sessions[member], now_s, disconnect_grace_ms)
        if reason is not None:
            gone[member] = f"{_who(member, value.client)} {reason}"
    return _remove(state, name, gone, now_ms) if gone else []


def _why_gone(
    member: MemberValue, session: Session, now_s: float, disconnect_grace_ms: int
) -> str | None:
    if session.heard_s is None:
        session.heard_s = now_s
    if not member.revoking:
        session.revoking_since_s = None
    elif session.revoking_since_s is None:
        session.revoking_since_s = now_s
    if (
        session.disconnected_s is not None
        and now_s - session.disconnected_s > disconnect_grace_ms / 1000
    ):
        return f"is gone: its connection broke and it did not come back in {disconnect_grace_ms} ms"
    silent_s = now_s - session.heard_s
    if silent_s > member.session_timeout_ms / 1000:
        return (
            f"was silent for {silent_s:.1f} s, its session is "
            f"{member.session_timeout_ms / 1000:g} s"
        )
    since_s = session.revoking_since_s
    if since_s is not None and now_s - since_s > member.max_poll_interval_ms / 1000:
        return (
            "did not give up partitions within max_poll_interval_ms = "
            f"{member.max_poll_interval_ms}"
        )
    return None


def prolong_sessions(state: GroupState, late_s: float) -> None:
    """Prolongs all sessions by `late_s`, in which this process did not run and heard no member."""
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
    """Removes members; `gone` gives the reason for each."""
    draft = GroupDraft(state, group, now_ms)
    for member in gone:
        draft.remove(member)
    reason = "; ".join(list(gone.values())[:3])
    more = f" (and {len(gone) - 3} more)" if len(gone) > 3 else ""
    draft.rebalance(reason + more, may_fail=False)
    draft.reconcile()
    return draft.records()


# --- topics -------------------------------------------------------------------------------------


def follow_topics(state: GroupState, name: str, *, now_ms: int) -> list[Record]:
    """Rebalances a group when a topic that it reads has appeared, grown or gone, or its members may
    read other topics, since the state took other topics or another access."""
    if name not in state.groups or not state.groups[name].members:
        return []
    draft = GroupDraft(state, name, now_ms)
    wanted = partitions_of(draft.topics_read())
    aimed: set[TopicIdPartition] = set()
    for member in draft.members.values():
        aimed |= member.target
    if wanted == aimed:
        if not any(_aims_at_hidden(state, member) for member in draft.members.values()):
            return []
        draft.rebalance("members may read other topics", may_fail=False)
        draft.reconcile()
        return draft.records()
    changed = {state.name_of_topic(topic_id) for topic_id, _ in wanted ^ aimed}
    shown = ", ".join(sorted(changed)[:3]) + (", ..." if len(changed) > 3 else "")
    draft.rebalance(f"{TOPICS_CHANGED}{shown} changed", may_fail=False)
    draft.reconcile()
    return draft.records()


def _aims_at_hidden(state: GroupState, member: MemberValue) -> bool:
    """Returns whether the target of a member has a topic that its principal may not read any
    more."""
    if reader_of(member) is None:
        return False
    topics = state.subscription(member).topics
    topic_ids = {state.topics[name].topic_id for name in topics}
    return any(topic_id not in topic_ids for topic_id, _ in member.target)


# --- look-ups -----------------------------------------------------------------------------------


def find_member(state: GroupState, group: str, member: str, instance: str | None) -> MemberValue:
    """The member of that id and instance id. Raises UnknownMemberError, FencedMemberError."""
    known = state.groups.get(group)
    if known is None or member not in known.members:
        raise _unknown(known, group, member, instance)
    return known.members[member]


def find_group(state: GroupState, group: str) -> Group:
    """The group of that name. Raises UnknownGroupError."""
    known = state.groups.get(group)
    if known is None:
        raise UnknownGroupError(f"There is no group {group!r}.")
    return known


# --- checks -------------------------------------------------------------------------------------


def _check_heartbeat(
    state: GroupState, request: messages.GroupHeartbeat, reader: Reader | None
) -> None:
    find_assignor(state.assignors, request.assignor)
    if request.pattern is not None:
        check_pattern(request.pattern)
        _check_pattern_count(state, request.pattern, reader)
    names_bytes = sum(len(name.encode()) for name in request.topics)
    if len(request.topics) > TOPICS_MAX or names_bytes > SUBSCRIPTION_BYTES_MAX:
        raise InvalidRequestError(
            f"A member names up to {TOPICS_MAX} topics of {SUBSCRIPTION_BYTES_MAX} bytes in all, "
            f"not {len(request.topics)} of {names_bytes}: subscribe by a pattern."
        )
    if len(request.client) > CLIENT_LENGTH_MAX:
        raise InvalidRequestError(
            f"A client says who it is in up to {CLIENT_LENGTH_MAX} characters, not "
            f"{len(request.client)}."
        )
    if len(request.owned) > OWNED_MAX:
        raise InvalidRequestError(
            f"A member owns up to {OWNED_MAX} partitions, not {len(request.owned)}."
        )
    if request.session_timeout_ms < SESSION_TIMEOUT_MS_MIN:
        raise InvalidRequestError(
            f"group_session_timeout_ms is at least {SESSION_TIMEOUT_MS_MIN}, not "
            f"{request.session_timeout_ms}."
        )


def _check_pattern_count(state: GroupState, pattern: str, reader: Reader | None) -> None:
    if reader is not None:
        own = state.patterns_of(reader.principal)
        if pattern not in own and len(own) >= PATTERNS_OF_PRINCIPAL_MAX:
            raise GroupLimitError(
                f"The members of principal {reader.principal!r} have {len(own)} different patterns "
                "at this coordinator of groups, the most that one principal may have: subscribe by "
                "names, or by a pattern that others of them have."
            )
    known = state.patterns()
    if pattern not in known and len(known) >= PATTERNS_MAX:
        raise GroupLimitError(
            f"The members of this coordinator's groups have {len(known)} different patterns, the "
            "most there may be: subscribe by names, or by a pattern that others have."
        )


def _unknown(known: Group | None, group: str, member: str, instance: str | None) -> RayqError:
    other, part = None if known is None else known.member_of_instance(instance), shown_part(member)
    if other is not None:
        return FencedMemberError(
            f"Another process joined group {group!r} as {instance!r}: member {part} is out. "
            "Give each process a group_instance_id of its own."
        )
    return UnknownMemberError(
        f"Group {group!r} has no member {part}: its session ended, or it left. It has to join "
        "again."
    )


def _who(member: str, client: str) -> str:
    return f"member {shown_part(member)} ({client})" if client else f"member {shown_part(member)}"


def _asks_for(member: MemberValue) -> tuple[object, ...]:
    """The values that a member's target depends on."""
    said = (member.topics, member.pattern, member.assignor, member.instance)
    return (*said, reader_of(member))


def _says_the_same(
    member: MemberValue, request: messages.GroupHeartbeat, reader: Reader | None
) -> bool:
    return (
        member.topics == tuple(request.topics)
        and member.pattern == request.pattern
        and member.assignor == request.assignor
        and member.instance == request.instance
        and member.client == request.client
        and member.session_timeout_ms == request.session_timeout_ms
        and member.max_poll_interval_ms == request.max_poll_interval_ms
        and reader_of(member) == (None if request.pattern is None else reader)
    )


def _with(
    before: MemberValue | None, request: messages.GroupHeartbeat, reader: Reader | None
) -> MemberValue:
    owner = (None, "") if reader is None or request.pattern is None else reader
    said = MemberValue(
        instance=request.instance,
        client=request.client,
        topics=tuple(request.topics),
        pattern=request.pattern,
        assignor=request.assignor,
        session_timeout_ms=request.session_timeout_ms,
        max_poll_interval_ms=request.max_poll_interval_ms,
        principal=owner[0],
        host=owner[1],
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


