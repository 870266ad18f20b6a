"""Administration of moves of partitions between brokers: begin, watch, cancel.

The controller decides and completes moves (`rayq.core.cluster.reassignment`); this module asks it,
and waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence

from rayq.client.admin.base import ADMIN_TIMEOUT_S, AdminMethods
from rayq.client.admin.topics import DESCRIBE_TIMEOUT_S
from rayq.client.arguments import as_partitions, by_partition, shown, topic_name, whole_number
from rayq.client.client import Client
from rayq.client.timeouts import takes_timeout
from rayq.errors import (
    InvalidReassignmentError,
    NoReassignmentError,
    RayqError,
    TimeoutError,
    UnknownTopicError,
)
from rayq.messages import (
    MOVES_MAX,
    AlterReassignments,
    DescribeReplica,
    DescribeReplicaResponse,
    MetadataResponse,
    PartitionMetadata,
    ReplicaEndpoint,
    SetReplicationFactor,
)
from rayq.records import Reassignment, TopicPartition

MOVE_TIMEOUT_S = 600.0
"""Default of `reassign_partitions(timeout_s=...)`. Each request has ADMIN_TIMEOUT_S."""
WATCH_MS = 500
"""Maximum time a broker holds a request for newer metadata while moves are in progress."""
PAUSE_S = 0.05
Move = tuple[str, int, list[int] | None]


class MoveAdmin(AdminMethods):
    """Methods of `AsyncAdmin` about moves of partitions."""

    @takes_timeout
    async def reassign_partitions(
        self,
        moves: Mapping[TopicPartition, Sequence[int]],
        *,
        throttle_bytes_per_s: int | None = None,
        wait: bool = True,
        timeout_s: float = MOVE_TIMEOUT_S,
    ) -> None:
        """Moves partitions to other brokers, under load; each target names as many as the topic's
        replication factor says, the preferred leader first.

        New replicas copy the log, at most `throttle_bytes_per_s` each, and join the in-sync set.
        The other replicas are removed once all of the target are in sync, never before. All of the
        moves begin, or none. With `wait` it returns when all are done. TimeoutError says which
        moves are still in progress and what they wait for; they continue all the same. Giving a
        move in progress again with the same target sets the new throttle: a throttle below the rate
        of writes to the partition keeps a move from ever ending. While a broker of its target is
        down, a move takes another target that includes all added replicas that are in sync.

        Raises InvalidReassignmentError (unknown, duplicate, too few or stopped brokers),
        ReassignmentInProgressError, ReplicaLimitError, UnknownTopicError, NoReassignmentError
        (somebody cancelled it meanwhile).
        """
        targets = by_partition(moves, "the brokers that are to have it")
        wanted = {partition: _brokers(partition, to) for partition, to in targets.items()}
        check_throttle(throttle_bytes_per_s)
        if not wanted:
            return
        client = self._client
        deadline = client.now + timeout_s
        await begin_moves(
            client, wanted, throttle_bytes_per_s, timeout_s=min(timeout_s, ADMIN_TIMEOUT_S)
        )
        if wait:
            await _until_moved(client, wanted, deadline, timeout_s)

    @takes_timeout
    async def set_replication_factor(
        self,
        topic: str,
        replication_factor: int,
        *,
        throttle_bytes_per_s: int | None = None,
        wait: bool = True,
        timeout_s: float = MOVE_TIMEOUT_S,
    ) -> None:
        """Sets the number of replicas of every partition of a topic, under load, by moves like
        those of `reassign_partitions`; partitions that are added later get the same number. This
        works for rayq's own topics too: `__consumer_offsets` of a cluster that began with one
        broker.

        With a higher factor, replicas are added on the brokers that carry the fewest; leaders and
        existing replicas stay (`plan_spread` spreads the leaders too). With a lower factor, the
        leader and in-sync replicas stay if possible, and those on the brokers that carry the most
        go. If `min_insync_replicas` is not set, it is the majority of the new factor once a
        partition has all of its replicas. `throttle_bytes_per_s`, `wait` and `timeout_s` are as in
        `reassign_partitions`; called again for the same factor, it continues to wait.

        Raises InvalidReplicationFactorError (0, below `min_insync_replicas`, more than the running
        brokers that take replicas; or a partition has no leader), ReassignmentInProgressError (a
        partition is being moved), ReplicaLimitError, UnknownTopicError, NoReassignmentError
        (somebody cancelled it meanwhile).
        """
        request = SetReplicationFactor(
            topic_name(topic),
            whole_number("replication_factor", replication_factor),
            throttle_bytes_per_s,
        )
        check_throttle(throttle_bytes_per_s)
        client = self._client
        deadline = client.now + timeout_s
        await client.change(request, timeout_s=min(timeout_s, ADMIN_TIMEOUT_S))
        if not wait:
            return
        left_s = max(deadline - client.now, 0.0)
        known = await client.topic(topic, timeout_s=left_s, age_max_s=0.0)
        wanted = {
            TopicPartition(topic, partition.partition): list(partition.target)
            or [replica.broker for replica in partition.replicas]
            for partition in known.partitions
        }
        other = [place for place, brokers in wanted.items() if len(brokers) != replication_factor]
        if other:
            raise NoReassignmentError(
                f"{topic}-{other[0].partition} goes to {wanted[other[0]]} now: another client "
                "cancelled the change, or made another one."
            )
        await _until_moved(client, wanted, deadline, timeout_s)

    @takes_timeout
    async def list_reassignments(
        self, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> list[Reassignment]:
        """The moves in progress, and what each of them waits for."""
        return await reassignments(self._client, timeout_s=timeout_s)

    @takes_timeout
    async def cancel_reassignments(
        self,
        partitions: Iterable[TopicPartition] | None = None,
        *,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> list[TopicPartition]:
        """Cancels moves (None: all in progress), all of them or none, and returns their partitions.
        The replicas are again those from before. Raises NoReassignmentError for a partition that is
        not being moved, InvalidReassignmentError while that would leave too few in sync."""
        client = self._client
        asked = moving = _targets(await all_metadata(client, timeout_s=timeout_s))
        if partitions is not None:
            places = as_partitions(partitions)
            if not moving.keys() >= set(places):
                # Refused with the reason, or the move began just now.
                await _cancel(client, places, timeout_s=timeout_s)
                return places
            asked = moving = {place: moving[place] for place in places}
        while moving:
            try:
                await _cancel(client, moving, timeout_s=timeout_s)
                break
            except NoReassignmentError:
                # One of them has ended since, or all have, and the answer was lost: look again.
                await asyncio.sleep(PAUSE_S)
                now = _targets(await all_metadata(client, timeout_s=timeout_s))
                moving = {
                    place: target for place, target in now.items() if asked.get(place) == target
                }
        if not asked:
            return []
        known = dict(partitions_of(await all_metadata(client, timeout_s=timeout_s)))
        return [
            place
            for place, target in asked.items()
            if place in known and [replica.broker for replica in known[place].replicas] != target
        ]


# --- requests -------------------------------------------------------------------------------------


async def all_metadata(
    client: Client, *, timeout_s: float, version_min: int = 0, wait_ms: int = 0
) -> MetadataResponse:
    """All metadata, from a broker that knows a controller: a broker that has just started may know
    none."""
    deadline = client.now + timeout_s
    while True:
        response = await client.fetch_all(
            timeout_s=timeout_s, version_min=version_min, wait_ms=wait_ms
        )
        if response.controller is not None:
            return response
        if client.now >= deadline:
            raise TimeoutError(
                f"The brokers that answered within {timeout_s:g} s have just started and know no "
                "controller yet: try again."
            )
        await asyncio.sleep(PAUSE_S)


async def begin_moves(
    client: Client,
    wanted: Mapping[TopicPartition, list[int]],
    throttle_bytes_per_s: int | None,
    *,
    timeout_s: float = ADMIN_TIMEOUT_S,
) -> None:
    """Begins all of these moves, or none."""
    moves: list[Move] = [(*place, target) for place, target in wanted.items()]
    _check_count(moves)
    await client.change(AlterReassignments(moves, throttle_bytes_per_s), timeout_s=timeout_s)


async def _cancel(
    client: Client, places: Iterable[TopicPartition], *, timeout_s: float
) -> None:
    moves: list[Move] = [(*place, None) for place in places]
    _check_count(moves)
    await client.change(AlterReassignments(moves=moves), timeout_s=timeout_s)


# --- waiting --------------------------------------------------------------------------------------


async def _until_moved(
    client: Client,
    wanted: Mapping[TopicPartition, list[int]],
    deadline: float,
    timeout_s: float,
) -> None:
    topics = {place.topic for place in wanted}
    topic_ids: dict[str, str] = {}
    version = 0
    while True:
        left_s = deadline - client.now
        moving = list(wanted)
        if version:
            moving = [
                place
                for place, target in wanted.items()
                if _is_moving(client, place, target, topic_ids)
            ]
        if not moving:
            return
        if left_s <= PAUSE_S:
            raise TimeoutError(
                f"After {timeout_s:g} s {len(moving)} of {len(wanted)} moves are still under "
                f"way: {await waits_of(client, moving)}. They continue; cancel_reassignments ends "
                "them."
            )
        with contextlib.suppress(TimeoutError):  # The time has passed then: see above.
            await client.refresh(
                topics,
                timeout_s=left_s,
                version_min=version + 1,
                wait_ms=min(WATCH_MS, int(left_s * 500)) if version else 0,
            )
        if client.metadata.version == version:
            await asyncio.sleep(PAUSE_S)
        version = client.metadata.version


def _is_moving(
    client: Client, place: TopicPartition, target: Sequence[int], topic_ids: dict[str, str]
) -> bool:
    """Returns whether the move is still in progress. Raises NoReassignmentError if somebody else
    ended it, and UnknownTopicError if the topic was deleted. `topic_ids` are the ids of the topics
    when they were seen first."""
    topic = client.metadata.topics.get(place.topic)
    if (
        topic is None
        or topic_ids.setdefault(place.topic, topic.topic_id) != topic.topic_id
        or place.partition >= len(topic.partitions)
    ):
        raise UnknownTopicError(f"Topic {place.topic!r} was deleted while it was moved.")
    known = topic.partitions[place.partition]
    replicas = [replica.broker for replica in known.replicas]
    if known.target:
        if list(known.target) != list(target):
            raise NoReassignmentError(
                f"{place.topic}-{place.partition} is being moved to {list(known.target)} by now, "
                "by another client."
            )
        return True
    if replicas != list(target):
        raise NoReassignmentError(
            f"The move of {place.topic}-{place.partition} to {list(target)} was cancelled: it "
            f"stays on {replicas}."
        )
    return False


async def waits_of(client: Client, places: Iterable[TopicPartition]) -> str:
    """A text of what the first few moves of these partitions wait for."""
    wanted = set(places)
    waits = [
        f"{move.topic_partition.topic}-{move.topic_partition.partition}: {move.waits_for}"
        for move in await reassignments(client)
        if move.topic_partition in wanted and move.waits_for is not None
    ]
    return "; ".join(waits[:3]) or "they wait for their turn"


async def reassignments(
    client: Client, *, timeout_s: float = ADMIN_TIMEOUT_S
) -> list[Reassignment]:
    """The moves in progress, and what each of them waits for."""
    response = await all_metadata(client, timeout_s=timeout_s)
    live = {broker.broker for broker in response.brokers if broker.live}
    topic_ids = {topic.name: topic.topic_id for topic in response.topics}
    moving = [(place, p) for place, p in partitions_of(response) if p.target]
    waits = await asyncio.gather(
        *(
            _waits_for(client, topic_ids[place.topic], partition, live)
            for place, partition in moving
        )
    )
    return [
        Reassignment(
            place,
            replicas=[replica.broker for replica in partition.replicas],
            adding=[broker for broker in partition.target if broker not in partition.origin],
            removing=[broker for broker in partition.origin if broker not in partition.target],
            target=list(partition.target),
            throttle_bytes_per_s=partition.throttle_bytes_per_s,
            waits_for=lacks,
        )
        for (place, partition), lacks in zip(moving, waits, strict=True)
    ]


async def _waits_for(
    client: Client, topic_id: str, partition: PartitionMetadata, live: set[int]
) -> str | None:
    absent = [
        replica
        for replica in partition.replicas
        if replica.broker in partition.target and replica.broker not in partition.isr
    ]
    if not absent:
        return None
    leader = next((r for r in partition.replicas if r.broker == partition.leader), None)
    if leader is None:
        return partition.offline_reason or "it has no leader"
    ahead = await _describe(client, topic_id, partition.partition, leader)
    end = ahead.log_end_offset if isinstance(ahead, DescribeReplicaResponse) else None
    told = []
    for replica in absent:
        if replica.broker not in live:
            told.append(f"broker {replica.broker} is not running")
            continue
        answer = await _describe(client, topic_id, partition.partition, replica)
        if isinstance(answer, str):
            told.append(f"broker {replica.broker}: {answer}")
        elif answer.trouble is not None:
            told.append(f"broker {replica.broker} has trouble: {answer.trouble}")
        else:
            of = "" if end is None else f" of {end}"
            told.append(
                f"broker {replica.broker} has copied up to offset {answer.log_end_offset}{of}"
            )
    return "; ".join(told)


async def _describe(
    client: Client, topic_id: str, partition: int, replica: ReplicaEndpoint
) -> DescribeReplicaResponse | str:
    """A replica's description of itself, or the reason why it does not answer."""
    if replica.host is None or replica.port is None:
        return "its replica is starting"
    request = DescribeReplica(topic_id=topic_id, partition=partition)
    try:
        answer, _ = await client.ask(
            (replica.host, replica.port), request, timeout_s=DESCRIBE_TIMEOUT_S
        )
    except RayqError as error:
        return str(error)
    return answer


# --- values ---------------------------------------------------------------------------------------


def partitions_of(response: MetadataResponse) -> list[tuple[TopicPartition, PartitionMetadata]]:
    """All partitions, by the names of their topics."""
    return [
        (TopicPartition(topic.name, partition.partition), partition)
        for topic in sorted(response.topics, key=lambda topic: topic.name)
        for partition in topic.partitions
    ]


def _targets(response: MetadataResponse) -> dict[TopicPartition, list[int]]:
    """The targets of the moves in progress."""
    return {place: list(p.target) for place, p in partitions_of(response) if p.target}


def _brokers(place: TopicPartition, brokers: Iterable[int]) -> list[int]:
    target = list(brokers) if isinstance(brokers, Iterable) else [brokers]
    if not isinstance(brokers, Iterable) or not all(type(broker) is int for broker in target):
        raise TypeError(
            f"The target of {place} must be a list of broker ids, not {shown(brokers)}."
        )
    return target


def _check_count(moves: Sequence[Move]) -> None:
    if len(moves) > MOVES_MAX:
        raise InvalidReassignmentError(
            f"{len(moves)} moves cannot begin or end together, {MOVES_MAX} can: name fewer "
            "partitions at once."
        )


def check_throttle(throttle_bytes_per_s: object) -> None:
    """Checks a throttle. Raises TypeError."""
    if throttle_bytes_per_s is not None:
        whole_number("throttle_bytes_per_s", throttle_bytes_per_s)
