"""Moves of partitions between brokers: plan, begin, watch, cancel; empty a broker, spread the load.

The controller decides and completes moves (`rayq.core.cluster.reassignment`); this module asks it,
makes plans from the metadata, and waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from rayq.client.admin.topics import DESCRIBE_TIMEOUT_S
from rayq.client.arguments import as_partitions, by_partition, shown, whole_number
from rayq.client.client import Client
from rayq.core.cluster import move_plans
from rayq.errors import (
    InvalidReassignmentError,
    NoReassignmentError,
    RayqError,
    ReassignmentInProgressError,
    ReplicaLimitError,
    TimeoutError,
    UnknownBrokerError,
    UnknownTopicError,
    counted,
)
from rayq.messages import (
    MOVES_MAX,
    AlterReassignments,
    CordonBroker,
    DescribeReplica,
    DescribeReplicaResponse,
    MetadataResponse,
    PartitionMetadata,
    RemoveBroker,
    ReplicaEndpoint,
    SetReplicationFactor,
    TopicMetadata,
)
from rayq.records import DrainProgress, Reassignment, TopicPartition

WATCH_MS = 500
"""Maximum time a broker holds a request for newer metadata while moves are in progress."""
PAUSE_S = 0.05
STUCK_PATIENCE_S = 30.0
"""Maximum time a drain waits for brokers to come back if too few are left to take the remaining
replicas."""
VOTE_PATIENCE_S = 10.0
"""Maximum time a drain waits for another broker to take over the vote."""
OnProgress = Callable[[DrainProgress], Awaitable[None] | None]
"""A user's function. An async admin awaits its result."""
Move = tuple[str, int, list[int] | None]


class MoveAdmin:
    """One call of the admin on moves; `AsyncAdmin` documents the methods."""

    def __init__(self, client: Client, timeout_s: float) -> None:
        """`timeout_s` bounds every single request."""
        self._client = client
        self._timeout_s = timeout_s

    # --- moves ------------------------------------------------------------------------------------

    async def reassign(
        self,
        moves: Mapping[TopicPartition, Sequence[int]],
        *,
        throttle_bytes_per_s: int | None,
        wait: bool,
        timeout_s: float,
    ) -> None:
        targets = by_partition(moves, "the brokers that are to have it")
        wanted = {partition: _brokers(partition, to) for partition, to in targets.items()}
        _check_throttle(throttle_bytes_per_s)
        if not wanted:
            return
        deadline = self._client.now + timeout_s
        await self._begin(wanted, throttle_bytes_per_s, min(timeout_s, self._timeout_s))
        if wait:
            await self._until_moved(wanted, deadline, timeout_s)

    async def set_replication_factor(
        self,
        topic: str,
        factor: int,
        *,
        throttle_bytes_per_s: int | None,
        wait: bool,
        timeout_s: float,
    ) -> None:
        _check_throttle(throttle_bytes_per_s)
        deadline = self._client.now + timeout_s
        request = SetReplicationFactor(topic, factor, throttle_bytes_per_s)
        await self._client.change(request, timeout_s=min(timeout_s, self._timeout_s))
        if not wait:
            return
        left_s = max(deadline - self._client.now, 0.0)
        known = await self._client.topic(topic, timeout_s=left_s, age_max_s=0.0)
        wanted = {
            TopicPartition(topic, partition.partition): list(partition.target)
            or [replica.broker for replica in partition.replicas]
            for partition in known.partitions
        }
        other = [place for place, brokers in wanted.items() if len(brokers) != factor]
        if other:
            raise NoReassignmentError(
                f"{topic}-{other[0].partition} goes to {wanted[other[0]]} by now: somebody else "
                "cancelled the change, or made another one."
            )
        await self._until_moved(wanted, deadline, timeout_s)

    async def cancel(self, partitions: Iterable[TopicPartition] | None) -> list[TopicPartition]:
        asked = moving = _targets(await self._all())
        if partitions is not None:
            places = as_partitions(partitions)
            if not moving.keys() >= set(places):
                # Refused with the reason, or the move began just now.
                await self._take_back(places)
                return places
            asked = moving = {place: moving[place] for place in places}
        while moving:
            try:
                await self._take_back(moving)
                break
            except NoReassignmentError:
                # One of them has ended since, or all have, and the answer was lost: look again.
                await asyncio.sleep(PAUSE_S)
                moving = {
                    place: target
                    for place, target in _targets(await self._all()).items()
                    if asked.get(place) == target
                }
        if not asked:
            return []
        known = dict(_partitions(await self._all()))
        return [
            place
            for place, target in asked.items()
            if place in known and [replica.broker for replica in known[place].replicas] != target
        ]

    async def reassignments(self) -> list[Reassignment]:
        response = await self._all()
        live = _live(response)
        moving = [
            (place, topic_id, partition)
            for place, topic_id, partition in _partitions_with_ids(response)
            if partition.target
        ]
        waits = await asyncio.gather(
            *(self._waits_for(topic_id, partition, live) for _, topic_id, partition in moving)
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
            for (place, _, partition), lacks in zip(moving, waits, strict=True)
        ]

    # --- brokers ----------------------------------------------------------------------------------

    async def plan_drain(self, broker: int) -> dict[TopicPartition, list[int]]:
        return _plan_drain(await self._all(), broker)

    async def plan_spread(self) -> dict[TopicPartition, list[int]]:
        response = await self._all()
        live = _live(response)
        moving = {place for place, partition in _partitions(response) if partition.target}
        plan = move_plans.spread(_takers(response), _placements(response))
        # Partitions that are already moving, or wait for a broker that is down, are left for a
        # later plan.
        return {
            place: target
            for place, target in plan.items()
            if place not in moving and live.issuperset(target)
        }

    async def drain(
        self,
        broker: int,
        *,
        throttle_bytes_per_s: int | None,
        concurrency: int,
        timeout_s: float | None,
        tell: Callable[[DrainProgress], Awaitable[None]] | None,
    ) -> None:
        if whole_number("concurrency", concurrency) < 1:
            raise InvalidReassignmentError(f"concurrency is at least 1, not {concurrency}.")
        _check_throttle(throttle_bytes_per_s)
        share = None
        if throttle_bytes_per_s is not None:
            share = max(1, throttle_bytes_per_s // concurrency)
        deadline = None if timeout_s is None else self._client.now + timeout_s
        _plan_drain(await self._all(), broker)  # Refused before anything was changed.
        await self.cordon(broker, True)
        seen: set[TopicPartition] = set()
        told: DrainProgress | None = None
        version, stuck_since = 0, self._client.now
        while True:
            response = await self._all(version_min=version + 1, wait_ms=WATCH_MS if version else 0)
            is_first, is_newer = version == 0, response.version > version
            version = response.version
            if any(b.broker == broker and not b.cordoned for b in response.brokers):
                raise NoReassignmentError(
                    f"Broker {broker} was undrained by somebody else meanwhile: what is on it "
                    "stays, and what moves goes on moving. Drain it again to go on."
                )
            left = {
                place: partition
                for place, partition in _partitions(response)
                if any(replica.broker == broker for replica in partition.replicas)
            }
            seen |= left.keys()
            moving = [place for place, partition in left.items() if partition.target]
            if is_first:
                await self._throttle_anew(left, broker, share)
            begun, refusal = await self._begin_some(response, broker, moving, concurrency, share)
            if moving or begun:
                stuck_since = self._client.now
            elif left and self._client.now - stuck_since > STUCK_PATIENCE_S:
                _plan_drain(response, broker)  # Says why not.
                if refusal is not None:
                    raise refusal
            if tell is not None:
                waits = {
                    move.topic_partition: move.waits_for for move in await self.reassignments()
                }
                progress = DrainProgress(
                    done=len(seen) - len(left),
                    moving=len(moving) + begun,
                    waiting=len(left) - len(moving) - begun,
                    waits_for={
                        place: lacks
                        for place, lacks in waits.items()
                        if place in left and lacks is not None
                    },
                )
                if progress != told:
                    told = progress
                    await tell(progress)
            if not left:
                break
            if deadline is not None and self._client.now >= deadline:
                raise TimeoutError(
                    f"After {timeout_s:g} s broker {broker} still has {len(left)} replicas: "
                    f"{await self._told(left)}. It stays cordoned and what moves goes on moving: "
                    "drain it again to go on, or undrain it."
                )
            if not is_newer:
                await asyncio.sleep(PAUSE_S)
        await self._until_voted_out(broker)

    async def cordon(self, broker: int, cordoned: bool) -> None:
        request = CordonBroker(broker=broker, cordoned=cordoned)
        await self._client.change(request, timeout_s=self._timeout_s)

    async def remove(self, broker: int) -> None:
        await self._client.change(RemoveBroker(broker=broker), timeout_s=self._timeout_s)

    # --- inside -----------------------------------------------------------------------------------

    async def _take_back(self, places: Iterable[TopicPartition]) -> None:
        moves: list[Move] = [(*place, None) for place in places]
        _check_count(moves)
        request = AlterReassignments(moves=moves)
        await self._client.change(request, timeout_s=self._timeout_s)

    async def _begin(
        self,
        wanted: Mapping[TopicPartition, list[int]],
        throttle_bytes_per_s: int | None,
        timeout_s: float,
    ) -> None:
        moves: list[Move] = [(*place, target) for place, target in wanted.items()]
        _check_count(moves)
        request = AlterReassignments(moves, throttle_bytes_per_s)
        await self._client.change(request, timeout_s=timeout_s)

    async def _begin_some(
        self,
        response: MetadataResponse,
        broker: int,
        moving: Sequence[TopicPartition],
        concurrency: int,
        throttle_bytes_per_s: int | None,
    ) -> tuple[int, RayqError | None]:
        """Begins moves away from a broker, until `concurrency` are in progress. Returns the number
        that it began, and the controller's reason for the last refusal. It asks for one move at a
        time: a partition that cannot move now must not hold up the others."""
        room = concurrency - len(moving)
        if room <= 0:
            return 0, None
        plan, _ = move_plans.replace(_takers(response), _placements(response), {broker})
        begun, refusal = 0, None
        for place, target in plan.items():
            if begun == room:
                break
            if place in moving:
                continue
            try:
                await self._begin({place: target}, throttle_bytes_per_s, self._timeout_s)
                begun += 1
            except (InvalidReassignmentError, ReplicaLimitError) as error:
                refusal = error  # It may be possible once another broker is back.
            except (ReassignmentInProgressError, UnknownTopicError):
                continue  # The cluster has changed meanwhile: the next look makes another plan.
        return begun, refusal

    async def _throttle_anew(
        self,
        left: Mapping[TopicPartition, PartitionMetadata],
        broker: int,
        throttle_bytes_per_s: int | None,
    ) -> None:
        """Sets the throttle of this drain on the moves that an earlier drain began."""
        begun = {
            place: list(partition.target)
            for place, partition in left.items()
            if partition.target
            and broker not in partition.target
            and partition.throttle_bytes_per_s != throttle_bytes_per_s
        }
        for place, target in begun.items():
            with contextlib.suppress(
                InvalidReassignmentError, ReassignmentInProgressError, UnknownTopicError
            ):
                await self._begin({place: target}, throttle_bytes_per_s, self._timeout_s)

    async def _until_moved(
        self, wanted: Mapping[TopicPartition, list[int]], deadline: float, timeout_s: float
    ) -> None:
        client = self._client
        topics = {place.topic for place in wanted}
        version = 0
        while True:
            left_s = deadline - client.now
            moving = list(wanted)
            if version:
                moving = [place for place in wanted if self._is_moving(place, wanted[place])]
            if not moving:
                return
            if left_s <= PAUSE_S:
                raise TimeoutError(
                    f"After {timeout_s:g} s {len(moving)} of {len(wanted)} moves are still under "
                    f"way: {await self._told(moving)}. They go on; cancel_reassignments ends them."
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

    def _is_moving(self, place: TopicPartition, target: Sequence[int]) -> bool:
        """Returns whether the move is still in progress. Raises NoReassignmentError if somebody
        else ended it, and UnknownTopicError if the topic was deleted."""
        topic = self._client.metadata.topics.get(place.topic)
        if topic is None or place.partition >= len(topic.partitions):
            raise UnknownTopicError(f"Topic {place.topic!r} was deleted while it was moved.")
        known = topic.partitions[place.partition]
        replicas = [replica.broker for replica in known.replicas]
        if known.target:
            if list(known.target) != list(target):
                raise NoReassignmentError(
                    f"{place.topic}-{place.partition} is being moved to {list(known.target)} by "
                    "now, by somebody else."
                )
            return True
        if replicas != list(target):
            raise NoReassignmentError(
                f"The move of {place.topic}-{place.partition} to {list(target)} was cancelled: it "
                f"stays on {replicas}."
            )
        return False

    async def _until_voted_out(self, broker: int) -> None:
        deadline = self._client.now + VOTE_PATIENCE_S
        while self._client.now < deadline:
            response = await self._all()
            candidates = set(_takers(response)) - set(response.voters)
            if broker not in response.voters or not candidates:
                return
            await asyncio.sleep(PAUSE_S)

    async def _told(self, places: Iterable[TopicPartition]) -> str:
        """A text of what the first few moves of these partitions wait for."""
        wanted = set(places)
        told = [
            f"{move.topic_partition.topic}-{move.topic_partition.partition}: {move.waits_for}"
            for move in await self.reassignments()
            if move.topic_partition in wanted and move.waits_for is not None
        ]
        return "; ".join(told[:3]) or "they wait for their turn"

    async def _all(self, *, version_min: int = 0, wait_ms: int = 0) -> MetadataResponse:
        """All metadata, from a broker that knows a controller: a broker that has just started may
        know none."""
        deadline = self._client.now + self._timeout_s
        while True:
            response = await self._client.fetch_all(
                timeout_s=self._timeout_s, version_min=version_min, wait_ms=wait_ms
            )
            if response.controller is not None:
                return response
            if self._client.now >= deadline:
                raise TimeoutError(
                    f"The brokers that answered within {self._timeout_s:g} s have just started and "
                    "know no controller yet: try again."
                )
            await asyncio.sleep(PAUSE_S)

    async def _waits_for(
        self, topic_id: str, partition: PartitionMetadata, live: set[int]
    ) -> str | None:
        absent = [
            replica
            for replica in partition.replicas
            if replica.broker in partition.target and replica.broker not in partition.isr
        ]
        if not absent:
            return None
        leader = next(
            (r for r in partition.replicas if r.broker == partition.leader), None
        )
        if leader is None:
            return partition.offline_reason or "it has no leader"
        ahead = await self._describe(topic_id, partition.partition, leader)
        end = ahead.log_end_offset if isinstance(ahead, DescribeReplicaResponse) else None
        told = []
        for replica in absent:
            if replica.broker not in live:
                told.append(f"broker {replica.broker} is not running")
                continue
            answer = await self._describe(topic_id, partition.partition, replica)
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
        self, topic_id: str, partition: int, replica: ReplicaEndpoint
    ) -> DescribeReplicaResponse | str:
        """A replica's description of itself, or the reason why it does not answer."""
        if replica.host is None or replica.port is None:
            return "its replica is starting"
        request = DescribeReplica(topic_id=topic_id, partition=partition)
        try:
            answer, _ = await self._client.ask(
                (replica.host, replica.port), request, timeout_s=DESCRIBE_TIMEOUT_S
            )
        except RayqError as error:
            return str(error)
        return answer


def _brokers(place: TopicPartition, brokers: Iterable[int]) -> list[int]:
    target = list(brokers) if isinstance(brokers, Iterable) else [brokers]
    if not isinstance(brokers, Iterable) or not all(type(broker) is int for broker in target):
        raise TypeError(f"The target of {place} is a list of broker ids, not {shown(brokers)}.")
    return target


def _check_count(moves: Sequence[Move]) -> None:
    if len(moves) > MOVES_MAX:
        raise InvalidReassignmentError(
            f"{len(moves)} moves cannot begin or end together, {MOVES_MAX} can: name fewer "
            "partitions at once."
        )


def _check_throttle(throttle_bytes_per_s: object) -> None:
    if throttle_bytes_per_s is not None:
        whole_number("throttle_bytes_per_s", throttle_bytes_per_s)


def _live(response: MetadataResponse) -> set[int]:
    return {broker.broker for broker in response.brokers if broker.live}


def _takers(response: MetadataResponse) -> dict[int, str]:
    """The brokers that take new replicas, and their nodes."""
    return {
        broker.broker: broker.node_id
        for broker in response.brokers
        if broker.live and not broker.cordoned
    }


def _partitions_with_ids(
    response: MetadataResponse,
) -> Iterable[tuple[TopicPartition, str, PartitionMetadata]]:
    topic: TopicMetadata
    for topic in sorted(response.topics, key=lambda topic: topic.name):
        for partition in topic.partitions:
            yield TopicPartition(topic.name, partition.partition), topic.topic_id, partition


def _partitions(response: MetadataResponse) -> list[tuple[TopicPartition, PartitionMetadata]]:
    return [(place, partition) for place, _, partition in _partitions_with_ids(response)]


def _targets(response: MetadataResponse) -> dict[TopicPartition, list[int]]:
    """The targets of the moves in progress."""
    return {place: list(p.target) for place, p in _partitions(response) if p.target}


def _placements(response: MetadataResponse) -> dict[TopicPartition, list[int]]:
    """The brokers of each partition's replicas, now or once its move is done."""
    return {
        place: list(partition.target) or [replica.broker for replica in partition.replicas]
        for place, partition in _partitions(response)
    }


def _plan_drain(response: MetadataResponse, broker: int) -> dict[TopicPartition, list[int]]:
    """The moves that drain a broker. Raises UnknownBrokerError, InvalidReassignmentError."""
    known = sorted(b.broker for b in response.brokers)
    if broker not in known:
        raise UnknownBrokerError(f"There is no broker {broker}; the cluster has {known}.")
    takers = {taker: node for taker, node in _takers(response).items() if taker != broker}
    if not takers:
        raise InvalidReassignmentError(
            f"Broker {broker} cannot be drained: no other broker runs and takes replicas. Add "
            "another broker first."
        )
    placements = _placements(response)
    plan, impossible = move_plans.replace(takers, placements, {broker})
    if impossible:
        place = impossible[0]
        raise InvalidReassignmentError(
            f"Broker {broker} cannot be drained: {counted(len(impossible), 'partition')}, such as "
            f"{place.topic}-{place.partition} with {counted(len(placements[place]), 'replica')}, "
            f"would have only the brokers {sorted(takers)} to take them. Add a broker first, or "
            "lower the replication factor of these topics (admin.set_replication_factor, `rayq "
            "topic set-replication-factor`)."
        )
    return plan
