"""What a coordinator decides of one group after the other, for all groups at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayq.core.groups import changes as group_changes
from rayq.core.groups import offsets as group_offsets
from rayq.core.groups.records import Record
from rayq.core.groups.state import GroupState, SubscribedTopic


def set_topics(
    state: GroupState, topics: Mapping[str, SubscribedTopic], *, now_ms: int
) -> list[Record]:
    """The coordinator hears of these topics."""
    if topics == state.topics:
        return []
    state.take_topics(topics)
    return [
        record
        for name in state.groups
        for record in group_changes.follow_topics(state, name, now_ms=now_ms)
    ]


def end_sessions(state: GroupState, **options: Any) -> list[Record]:
    return [
        record
        for name in state.groups
        for record in group_changes.end_sessions(state, name, **options)
    ]


def expire_offsets(state: GroupState, **options: Any) -> list[Record]:
    return [
        record
        for name in state.groups
        for record in group_offsets.expire_offsets(state, name, **options)
    ]


def forget_topics(state: GroupState, *, now_s: float) -> list[Record]:
    gone = group_offsets.topics_gone(state, now_s=now_s)
    return [
        record
        for name in state.groups
        for record in group_offsets.forget_topics(state, name, gone)
    ]
