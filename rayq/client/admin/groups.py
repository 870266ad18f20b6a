"""Administration of groups: list, describe, set offsets, delete."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rayq.client.admin.base import ADMIN_TIMEOUT_S, AdminMethods, Call, Fields
from rayq.client.arguments import as_partition, by_partition, shown
from rayq.client.client import check_partition
from rayq.client.coordinator import GroupCoordinator, offsets_partitions
from rayq.client.group_positions import check_group
from rayq.client.timeouts import takes_timeout
from rayq.config import ConsumerConfig
from rayq.core.cluster.topic_changes import OFFSETS_TOPIC
from rayq.errors import (
    GroupNotEmptyError,
    InvalidRequestError,
    OutcomeUnknownError,
    RayqError,
    UnknownGroupError,
)
from rayq.messages import (
    EARLIEST,
    LATEST,
    POSITIONS_MAX,
    READ_COMMITTED,
    CommittedOffset,
    DeleteGroup,
    DescribeGroup,
    FetchCommitted,
    ListGroups,
    ListOffsets,
    Request,
    ResponseT,
    SetGroupOffsets,
    TopicPartitionId,
)
from rayq.records import (
    GroupInfo,
    GroupListing,
    GroupMemberInfo,
    GroupOffset,
    TopicPartition,
)

Target = str | int | Mapping[TopicPartition, int]
"""Target of set offsets: "earliest", "latest", an offset, or one for each partition."""

END_OFFSET_TIMEOUT_S = 5.0
"""Timeout for a partition's end offset; without it the partition is shown without lag."""


class GroupAdmin(AdminMethods):
    """Methods of `AsyncAdmin` about consumer groups."""

    @takes_timeout
    async def list_groups(self, *, timeout_s: float = ADMIN_TIMEOUT_S) -> list[GroupListing]:
        """All consumer groups, sorted by name, with their state and number of members."""
        call = Call(self._client, timeout_s)
        count = await offsets_partitions(self._client, create=False, timeout_s=call.left_s)
        answers = await asyncio.gather(
            *(call.ask_leader(OFFSETS_TOPIC, partition, ListGroups) for partition in range(count))
        )
        return sorted(
            (
                GroupListing(group.group, group.state, group.members)
                for answer in answers
                for group in answer.groups
            ),
            key=lambda listing: listing.group,
        )

    @takes_timeout
    async def describe_group(self, group: str, *, timeout_s: float = ADMIN_TIMEOUT_S) -> GroupInfo:
        """Describes a group: its state, its members and their partitions, its offset and lag in
        each partition, and the reason for the last rebalance. Raises UnknownGroupError."""
        call = Call(self._client, timeout_s)
        await _check_any_group(call, group)
        response = await _ask_coordinator(call, group, DescribeGroup)
        names = await _topic_names(call)
        members = [
            GroupMemberInfo(
                member=member.member,
                client=member.client,
                instance=member.instance,
                member_epoch=member.member_epoch,
                assigned=_places(member.assigned),
                revoking=_places(member.revoking),
            )
            for member in response.members
        ]
        owner = {place: m.member for m in members for place in (*m.revoking, *m.assigned)}
        committed = _named(response.offsets, names)
        places = sorted({*owner, *committed})
        ends = await asyncio.gather(*(_end_offset(call, place) for place in places))
        return GroupInfo(
            group=response.group,
            state=response.state,
            epoch=response.epoch,
            assignor=response.assignor,
            members=members,
            partitions={
                place: _progress(committed.get(place), end, owner.get(place))
                for place, end in zip(places, ends, strict=True)
            },
            rebalance_reason=response.rebalance_reason,
            rebalance_time_ms=response.rebalance_time_ms,
        )

    @takes_timeout
    async def set_group_offsets(
        self,
        group: str,
        topics: str | Iterable[str | TopicPartition] | None = None,
        *,
        to: Target | None = None,
        timestamp_ms: int | None = None,
        shift: int | None = None,
        dry_run: bool = False,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> dict[TopicPartition, int]:
        """Sets the offsets at which a group without members resumes, and returns them.

        `topics` is a name, or several names or partitions; None means everything that the group has
        committed. Give one of: `to` "earliest", "latest", an offset, or `{partition: offset}`
        (without `topics`); `timestamp_ms`, the first record at or after that time; `shift`, the
        number of records forward (or, if negative, back) from the committed offset. An offset
        outside the log is moved to its nearer end. `dry_run` only returns the offsets. Raises
        GroupNotEmptyError, UnknownTopicError, InvalidRequestError, OutcomeUnknownError (an answer
        was lost, and members joined since).
        """
        if sum(choice is not None for choice in (to, timestamp_ms, shift)) != 1:
            raise InvalidRequestError(
                "set_group_offsets takes one of to=, timestamp_ms= and shift=."
            )
        call = Call(self._client, timeout_s)
        committed = await _committed(call, group)
        if isinstance(to, Mapping):
            if topics is not None:
                raise InvalidRequestError("to={partition: offset} names the partitions already.")
            offsets = by_partition(to, "an offset")
            wanted = {place: _offset(offset) for place, offset in offsets.items()}
            places = list(wanted)
            await _check_places(call, places)
        else:
            wanted = {}
            places = await _places_of(call, topics, committed)
        found = await asyncio.gather(
            *(
                _new_offset(
                    call, place, wanted.get(place, to), timestamp_ms, shift, committed.get(place)
                )
                for place in places
            )
        )
        offsets = dict(zip(places, found, strict=True))
        if offsets and not dry_run:
            await _set_offsets(call, group, offsets)
        return offsets

    @takes_timeout
    async def delete_group(self, group: str, *, timeout_s: float = ADMIN_TIMEOUT_S) -> None:
        """Deletes a group without members, and its offsets. Raises UnknownGroupError,
        GroupNotEmptyError."""
        call = Call(self._client, timeout_s)
        await _check_any_group(call, group)
        await _ask_coordinator(call, group, DescribeGroup)
        # The group existed a moment ago. If it is gone now, an earlier attempt deleted it (and its
        # answer was lost), or somebody else did.
        with contextlib.suppress(UnknownGroupError):
            await _ask_coordinator(call, group, DeleteGroup)


async def _ask_coordinator(
    call: Call,
    group: str,
    request: Callable[[str, int, int, str, *Fields], Request[ResponseT]],
    *fields: *Fields,
) -> ResponseT:
    coordinator = GroupCoordinator(call.client, check_group(group), ConsumerConfig())
    answer: ResponseT = await coordinator.ask(
        lambda topic_id, number, epoch: request(topic_id, number, epoch, group, *fields),
        timeout_s=call.left_s,
    )
    return answer


async def _check_any_group(call: Call, group: str) -> None:
    """Raises UnknownGroupError if no group was ever used."""
    check_group(group)
    count = await offsets_partitions(call.client, create=False, timeout_s=call.left_s)
    if count == 0:
        raise UnknownGroupError(f"There is no group {group!r}: no group was used so far.")


# --- looking --------------------------------------------------------------------------------------


async def _topic_names(call: Call) -> dict[str, str]:
    response = await call.client.fetch_all(timeout_s=call.left_s)
    return {topic.topic_id: topic.name for topic in response.topics}


async def _end_offset(call: Call, place: TopicPartition) -> int | None:
    try:
        timeout_s = min(END_OFFSET_TIMEOUT_S, call.left_s)
        return await _list_offset(call, place, LATEST, timeout_s)
    except RayqError:
        return None


async def _list_offset(
    call: Call, place: TopicPartition, timestamp_ms: int, timeout_s: float
) -> int | None:
    answer = await call.ask_leader(
        *place, ListOffsets, timestamp_ms, READ_COMMITTED, timeout_s=timeout_s
    )
    return answer.offset


async def _committed(call: Call, group: str) -> dict[TopicPartition, CommittedOffset]:
    response = await _ask_coordinator(call, group, FetchCommitted, None)
    return _named(response.offsets, await _topic_names(call))


# --- setting offsets ------------------------------------------------------------------------------


async def _set_offsets(call: Call, group: str, offsets: Mapping[TopicPartition, int]) -> None:
    topics_known = call.client.metadata.topics
    places = list(offsets)
    attempts = 0

    def build(topic_id: str, number: int, epoch: int, group: str) -> SetGroupOffsets:
        nonlocal attempts
        attempts += 1
        positions = [
            (topics_known[place.topic].topic_id, place.partition, offset)
            for place, offset in some.items()
        ]
        return SetGroupOffsets(topic_id, number, epoch, group, positions)

    try:
        for first in range(0, len(places), POSITIONS_MAX):
            some = {place: offsets[place] for place in places[first : first + POSITIONS_MAX]}
            await _ask_coordinator(call, group, build)
    except GroupNotEmptyError as error:
        if attempts == 1:
            raise
        raise OutcomeUnknownError(
            f"Positions of group {group!r} may be set: an answer was lost, or only some had "
            "been set, and then the group had members, which may have begun there. See "
            "describe_group."
        ) from error


async def _places_of(
    call: Call,
    topics: str | Iterable[str | TopicPartition] | None,
    committed: Mapping[TopicPartition, CommittedOffset],
) -> list[TopicPartition]:
    if topics is None:
        return sorted(committed)
    if not isinstance(topics, Iterable):
        raise TypeError(
            f"topics must be a name, or a list of names and partitions, not {shown(topics)}."
        )
    places: list[TopicPartition] = []
    for wanted in [topics] if isinstance(topics, str | TopicPartition) else topics:
        if isinstance(wanted, str):
            topic = await call.client.topic(wanted, timeout_s=call.left_s)
            places += [TopicPartition(wanted, number) for number in range(len(topic.partitions))]
        else:
            places.append(as_partition(wanted))
    await _check_places(call, places)
    return places


async def _check_places(call: Call, places: Iterable[TopicPartition]) -> None:
    for topic, partition in places:
        check_partition(await call.client.topic(topic, timeout_s=call.left_s), partition)


async def _new_offset(
    call: Call,
    place: TopicPartition,
    to: Any,
    timestamp_ms: int | None,
    shift: int | None,
    committed: CommittedOffset | None,
) -> int:
    """The offset to set, moved to the nearer end if it lies outside the log."""
    first = await _list_offset(call, place, EARLIEST, call.left_s)
    end = await _list_offset(call, place, LATEST, call.left_s)
    assert first is not None and end is not None, "a log has a beginning and an end"
    if timestamp_ms is not None:
        if type(timestamp_ms) is not int or timestamp_ms < 0:
            raise InvalidRequestError(
                f"timestamp_ms must be Unix time in milliseconds, not {timestamp_ms!r}."
            )
        found = await _list_offset(call, place, timestamp_ms, call.left_s)
        return end if found is None else found
    if shift is not None:
        if type(shift) is not int:
            raise TypeError(f"shift must be an int, not {type(shift).__name__}.")
        if committed is None:
            raise InvalidRequestError(
                f"{place.topic}-{place.partition} has no committed offset to shift: set it "
                "with to= or timestamp_ms=."
            )
        return min(max(committed.offset + shift, first), end)
    if to == "earliest":
        return first
    if to == "latest":
        return end
    return min(max(_offset(to), first), end)


def _offset(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise InvalidRequestError(
            'to is "earliest", "latest", an offset from 0, or {partition: offset}, not '
            f"{value!r}."
        )
    return value


def _places(partitions: Iterable[TopicPartitionId]) -> list[TopicPartition]:
    return sorted(TopicPartition(partition.topic, partition.partition) for partition in partitions)


def _named(
    offsets: Iterable[CommittedOffset], names: Mapping[str, str]
) -> dict[TopicPartition, CommittedOffset]:
    """The offsets by partition. Those of deleted topics are left out."""
    return {
        TopicPartition(names[commit.topic_id], commit.partition): commit
        for commit in offsets
        if commit.topic_id in names
    }


def _progress(
    committed: CommittedOffset | None, end: int | None, member: str | None
) -> GroupOffset:
    if committed is None:
        return GroupOffset(
            offset=None, end_offset=end, lag=None, metadata="", commit_time_ms=None, member=member
        )
    return GroupOffset(
        offset=committed.offset,
        end_offset=end,
        lag=None if end is None else max(end - committed.offset, 0),
        metadata=committed.metadata,
        commit_time_ms=committed.commit_time_ms,
        member=member,
    )
