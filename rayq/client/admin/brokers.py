"""Administration of brokers: empty one, spread the load, remove one.

These are plans of moves, made from the metadata, and a loop that has a few of them begin at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence

from rayq.client.admin.base import ADMIN_TIMEOUT_S, AdminMethods
from rayq.client.admin.moves import (
    PAUSE_S,
    WATCH_MS,
    all_metadata,
    begin_moves,
    check_throttle,
    partitions_of,
    reassignments,
    waits_of,
)
from rayq.client.arguments import whole_number
from rayq.client.callbacks import call_callback, finish_callback
from rayq.client.client import Client
from rayq.client.timeouts import takes_timeout
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
from rayq.messages import CordonBroker, MetadataResponse, PartitionMetadata, RemoveBroker
from rayq.records import DrainProgress, TopicPartition
from rayq.user_functions import check_function, check_ran

STUCK_PATIENCE_S = 30.0
"""Maximum time a drain waits for brokers to come back if too few are left to take the remaining
replicas."""
VOTE_PATIENCE_S = 10.0
"""Maximum time a drain waits for another broker to take over the vote."""
OnProgress = Callable[[DrainProgress], Awaitable[None] | None]
"""A user's function. An async admin awaits its result."""


class BrokerAdmin(AdminMethods):
    """Methods of `AsyncAdmin` about brokers."""

    @takes_timeout
    async def plan_drain(
        self, broker: int, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> dict[TopicPartition, list[int]]:
        """Plans the moves that `drain_broker` would make, without making them. Raises
        UnknownBrokerError, InvalidReassignmentError (too few other brokers)."""
        whole_number("broker", broker)
        return _plan_drain(await all_metadata(self._client, timeout_s=timeout_s), broker)

    @takes_timeout
    async def drain_broker(
        self,
        broker: int,
        *,
        throttle_bytes_per_s: int | None = None,
        concurrency: int = 4,
        timeout_s: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Moves all replicas of a broker to others; it takes no new replicas from now on, and
        another broker takes over its vote. Returns when it holds nothing; then it can be stopped
        and removed.

        `concurrency` partitions move at a time, all together copying at most
        `throttle_bytes_per_s`, which also applies to moves that are already in progress.
        `on_progress(DrainProgress)` is called on the event loop (for `Admin`: in the thread of its
        loop) when something has changed. For an async admin it may be a coroutine function.

        TimeoutError (`timeout_s` None: never) leaves the broker cordoned; call it again to
        continue. Raises UnknownBrokerError, InvalidReassignmentError (the last broker, or too few
        would be left: nothing was changed), NoReassignmentError (somebody undrained it meanwhile).
        If nothing could be moved for half a minute, it raises the reason, InvalidReassignmentError
        or ReplicaLimitError, and leaves the broker cordoned. Raises HandlerError (for example,
        on_progress is a coroutine function that nobody awaits).
        """
        if on_progress is not None:
            check_function("on_progress", on_progress, is_awaited=self._awaits_callbacks)
        whole_number("broker", broker)
        if whole_number("concurrency", concurrency) < 1:
            raise InvalidReassignmentError(f"concurrency must be at least 1, not {concurrency}.")
        check_throttle(throttle_bytes_per_s)
        share = None
        if throttle_bytes_per_s is not None:
            share = max(1, throttle_bytes_per_s // concurrency)
        client = self._client
        deadline = None if timeout_s is None else client.now + timeout_s
        response = await all_metadata(client, timeout_s=ADMIN_TIMEOUT_S)
        _plan_drain(response, broker)  # Refused before anything was changed.
        await _cordon(client, broker, True, timeout_s=ADMIN_TIMEOUT_S)
        seen: set[TopicPartition] = set()
        reported: DrainProgress | None = None
        version, stuck_since = 0, client.now
        while True:
            response = await all_metadata(
                client,
                timeout_s=ADMIN_TIMEOUT_S,
                version_min=version + 1,
                wait_ms=WATCH_MS if version else 0,
            )
            is_first, is_newer = version == 0, response.version > version
            version = response.version
            if any(b.broker == broker and not b.cordoned for b in response.brokers):
                raise NoReassignmentError(
                    f"Broker {broker} was undrained by another client meanwhile: what is on it "
                    "stays, and moves under way continue. Drain it again to continue."
                )
            left = {
                place: partition
                for place, partition in partitions_of(response)
                if any(replica.broker == broker for replica in partition.replicas)
            }
            seen |= left.keys()
            moving = [place for place, partition in left.items() if partition.target]
            if is_first:
                await _throttle_again(client, left, broker, share)
            begun, refusal = await _begin_some(
                client, response, broker, moving, concurrency, share
            )
            if moving or begun:
                stuck_since = client.now
            elif left and client.now - stuck_since > STUCK_PATIENCE_S:
                _plan_drain(response, broker)  # Says why not.
                if refusal is not None:
                    raise refusal
            if on_progress is not None:
                progress = DrainProgress(
                    done=len(seen) - len(left),
                    moving=len(moving) + begun,
                    waiting=len(left) - len(moving) - begun,
                    waits_for={
                        move.topic_partition: move.waits_for
                        for move in await reassignments(client)
                        if move.topic_partition in left and move.waits_for is not None
                    },
                )
                if progress != reported:
                    reported = progress
                    await self._report(on_progress, progress)
            if not left:
                break
            if deadline is not None and client.now >= deadline:
                raise TimeoutError(
                    f"After {timeout_s:g} s broker {broker} still has {len(left)} replicas: "
                    f"{await waits_of(client, left)}. It stays cordoned, and moves under way "
                    "continue: drain it again to wait for them, or undrain it."
                )
            if not is_newer:
                await asyncio.sleep(PAUSE_S)
        await _until_voted_out(client, broker)

    async def _report(self, on_progress: OnProgress, progress: DrainProgress) -> None:
        result = call_callback("on_progress", on_progress, progress)
        if self._awaits_callbacks:
            await finish_callback("on_progress", result)
        else:
            check_ran("on_progress", result, may_go_on=True)

    @takes_timeout
    async def undrain_broker(self, broker: int, *, timeout_s: float = ADMIN_TIMEOUT_S) -> None:
        """Lets a broker take replicas again; nothing moves back by itself (see `plan_spread`).
        Raises UnknownBrokerError."""
        await _cordon(
            self._client, whole_number("broker", broker), False, timeout_s=timeout_s
        )

    @takes_timeout
    async def plan_spread(
        self, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> dict[TopicPartition, list[int]]:
        """The few moves after which brokers carry and lead equally many replicas, with
        those of a partition on different nodes: for `reassign_partitions`, after brokers were
        added. Empty if there is nothing to do."""
        response = await all_metadata(self._client, timeout_s=timeout_s)
        live = {broker.broker for broker in response.brokers if broker.live}
        moving = {place for place, partition in partitions_of(response) if partition.target}
        plan = move_plans.spread(_takers(response), _placements(response))
        # Partitions that are already moving, or wait for a broker that is down, are left for a
        # later plan.
        return {
            place: target
            for place, target in plan.items()
            if place not in moving and live.issuperset(target)
        }

    @takes_timeout
    async def remove_broker(self, broker: int, *, timeout_s: float = ADMIN_TIMEOUT_S) -> None:
        """Makes the cluster forget a broker that was drained and stopped. If it starts again with
        its directory, it joins as a new one. Raises UnknownBrokerError, BrokerInUseError (it runs,
        holds replicas, or is the last one)."""
        request = RemoveBroker(broker=whole_number("broker", broker))
        await self._client.change(request, timeout_s=timeout_s)


async def _cordon(client: Client, broker: int, cordoned: bool, *, timeout_s: float) -> None:
    await client.change(CordonBroker(broker=broker, cordoned=cordoned), timeout_s=timeout_s)


async def _begin_some(
    client: Client,
    response: MetadataResponse,
    broker: int,
    moving: Sequence[TopicPartition],
    concurrency: int,
    throttle_bytes_per_s: int | None,
) -> tuple[int, RayqError | None]:
    """Begins moves away from a broker, until `concurrency` are in progress. Returns the number that
    it began, and the controller's reason for the last refusal. It asks for one move at a time: a
    partition that cannot move now must not hold up the others."""
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
            await begin_moves(client, {place: target}, throttle_bytes_per_s)
            begun += 1
        except (InvalidReassignmentError, ReplicaLimitError) as error:
            refusal = error  # It may be possible once another broker is back.
        except (ReassignmentInProgressError, UnknownTopicError):
            continue  # The cluster has changed meanwhile: the next look makes another plan.
    return begun, refusal


async def _throttle_again(
    client: Client,
    left: Mapping[TopicPartition, PartitionMetadata],
    broker: int,
    throttle_bytes_per_s: int | None,
) -> None:
    """Sets the throttle of this drain on the moves that an earlier drain began."""
    for place, partition in left.items():
        target = list(partition.target)
        if not target or broker in target:
            continue
        if partition.throttle_bytes_per_s != throttle_bytes_per_s:
            with contextlib.suppress(
                InvalidReassignmentError, ReassignmentInProgressError, UnknownTopicError
            ):
                await begin_moves(client, {place: target}, throttle_bytes_per_s)


async def _until_voted_out(client: Client, broker: int) -> None:
    deadline = client.now + VOTE_PATIENCE_S
    while client.now < deadline:
        response = await all_metadata(client, timeout_s=ADMIN_TIMEOUT_S)
        candidates = set(_takers(response)) - set(response.voters)
        if broker not in response.voters or not candidates:
            return
        await asyncio.sleep(PAUSE_S)


def _takers(response: MetadataResponse) -> dict[int, str]:
    """The brokers that take new replicas, and their nodes."""
    return {
        broker.broker: broker.node_id
        for broker in response.brokers
        if broker.live and not broker.cordoned
    }


def _placements(response: MetadataResponse) -> dict[TopicPartition, list[int]]:
    """The brokers of each partition's replicas, now or once its move is done."""
    return {
        place: list(partition.target) or [replica.broker for replica in partition.replicas]
        for place, partition in partitions_of(response)
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
