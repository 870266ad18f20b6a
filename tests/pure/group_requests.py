"""Requests to a group coordinator, and what it decides on them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rayq import messages
from rayq.core.decision import Times
from rayq.core.groups import offsets as group_offsets
from rayq.core.groups import transactions as group_transactions
from rayq.core.groups.decisions import DECISIONS
from rayq.core.groups.offsets import Refused
from rayq.core.groups.records import Record
from rayq.core.groups.state import GroupState

WHERE = ("offsets", 0, 1)
"""Topic id, partition and leader epoch of the coordinator's partition."""


def heartbeat_of(
    member: str,
    member_epoch: int,
    instance: str | None,
    client: str,
    topics: Iterable[str],
    pattern: str | None,
    assignor: str,
    session_timeout_ms: int,
    max_poll_interval_ms: int,
    owned: Collection[tuple[str, int]],
    group: str = "g",
) -> messages.GroupHeartbeat:
    return messages.GroupHeartbeat(
        *WHERE,
        group,
        member,
        member_epoch,
        instance,
        client,
        list(topics),
        pattern,
        assignor,
        session_timeout_ms,
        max_poll_interval_ms,
        list(owned),
        wait_ms=0,
    )


def commit(
    state: GroupState,
    group: str,
    member: str,
    member_epoch: int,
    sequence: int,
    offsets: Sequence[messages.OffsetCommit],
    *,
    now_ms: int,
    transaction: tuple[int, int] | None = None,
) -> tuple[list[Record], list[Refused]]:
    """The records, and the positions that are refused."""
    request = messages.CommitOffsets(
        *WHERE, group, member, member_epoch, sequence, [*offsets], transaction
    )
    decide = group_offsets.commit if transaction is None else group_transactions.commit
    decision = decide(state, request, Times(0, now_ms))
    return [*decision.records], decision.answer().refused


def set_offsets(
    state: GroupState, group: str, offsets: Iterable[messages.OffsetCommit], *, now_ms: int
) -> list[Record]:
    asked = [(commit.topic_id, commit.partition, commit.offset) for commit in offsets]
    request = messages.SetGroupOffsets(*WHERE, group, asked)
    return [*DECISIONS[type(request)](state, request, Times(0, now_ms)).records]


def delete_group(state: GroupState, group: str) -> list[Record]:
    request = messages.DeleteGroup(*WHERE, group)
    return [*DECISIONS[type(request)](state, request, Times(0, 0)).records]
