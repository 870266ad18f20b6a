"""Partitions that move while everything else goes wrong.

Two operators, each a client process, move partitions to any brokers, cancel moves, drain brokers
and let them take replicas again, spread the load, and change the order and the number of replicas.
Whether a request of theirs is refused or times out does not matter; its effect is checked.

- `MovesWorkload`: the ordinary clients, on four or five brokers, and a topic that is deleted and
  created again while its partitions move;
- `GroupMovesWorkload`: groups and compacted topics, so that `__consumer_offsets` moves too.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any

from proving.simulation.cluster import ROOT, SimulatedCluster
from proving.simulation.files import Directory
from proving.simulation.invariants import Invariants
from proving.simulation.invariants_moves import MoveInvariants
from proving.simulation.owner import Owner
from proving.simulation.principals import Rights, may
from proving.simulation.process import Process
from proving.simulation.recreated_topic import TOPIC as RECREATED
from proving.simulation.recreated_topic import RecreatedTopic
from proving.simulation.workload import Workload
from proving.simulation.workload_groups import GroupWorkload
from proving.simulation.world import Host
from rayq.client.admin.admin import AsyncAdmin
from rayq.client.client import Client
from rayq.errors import RayqError
from rayq.messages.acls import ANY, CLUSTER
from rayq.records import TopicPartition
from rayq.storage.data_directory import QUARANTINE, REMOVED_SUFFIX

OPERATORS = 2
REST_S = 2.5
"""About how long an operator pauses between two requests."""
QUESTION_TIMEOUT_S = 6.0
THROTTLES = (None, None, 3_000, 30_000)
THROTTLED_END_S = 60.0
"""Time for throttled moves in the end. Then the operators give them again without a throttle: a
log that grew faster than its throttle, of megabytes, would take as many minutes."""
END_LIMIT_S = 120.0


class Operators(Workload):
    """The part that both workloads share. At the end every move has to be over, and a broker's disk
    has to hold no replica that is not placed there any more."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        super().__init__(cluster)
        self.moves = MoveInvariants(cluster)
        self._may_move = True
        self._operator_count = OPERATORS

    @classmethod
    def broker_count(cls, rng: random.Random) -> int:
        return rng.choice((4, 5))

    @classmethod
    def cluster_options(cls, rng: random.Random) -> dict[str, Any]:
        return {
            **super().cluster_options(rng),
            "replica_rebuild_delay_ms": rng.choice((None, None, 4_000, 9_000)),
        }

    def rights(self) -> Rights:
        operate = [
            *may("alter", "cluster", CLUSTER),
            *may("describe", "cluster", CLUSTER),
            *may("describe", "topic", ANY),
        ]
        return {**super().rights(), "operator": operate, "last-operator": operate}

    def observer(self, invariants: Invariants) -> Callable[[Owner], None]:
        observe_others = super().observer(invariants)
        self.moves.watch(invariants)

        def observe(owner: Owner) -> None:
            observe_others(owner)
            self.moves.observe()

        return observe

    def start(self) -> None:
        super().start()
        for number in range(self._operator_count):
            self._start(f"operator-{number}", self._operate)

    def calm_down(self) -> None:
        super().calm_down()
        self._may_move = False

    async def read_all(self, limit_s: float) -> int:
        await self._end("operator")
        if self.moves.state.moving:
            process = self._process("last-operator")
            await process.run(self._lift_throttles(process))
        await self._cluster.wait_until(
            lambda: not self.moves.state.moving, "every move to be over", limit_s=END_LIMIT_S
        )
        await self._wait_for_none(self._left_behind, "are on disks, and placed elsewhere")
        return await super().read_all(limit_s)

    async def _lift_throttles(self, process: Process) -> None:
        """Lifts the throttle of moves that do not end within `THROTTLED_END_S`."""
        for _ in range(round(THROTTLED_END_S / REST_S)):
            if not self.moves.state.moving:
                return
            await asyncio.sleep(REST_S)
        client = self._client(process)
        admin = AsyncAdmin(client)
        until_s = self._cluster.world.now_s + END_LIMIT_S
        while self.moves.state.moving and self._cluster.world.now_s < until_s:
            with contextlib.suppress(RayqError):
                await self._hurry(admin)
            await asyncio.sleep(REST_S)
        client.close()

    async def _hurry(self, admin: AsyncAdmin) -> None:
        for move in await admin.list_reassignments(timeout_s=QUESTION_TIMEOUT_S):
            if move.throttle_bytes_per_s is not None:
                self._cluster.world.trace.note(f"OPERATOR hurries {move.topic_partition}")
                await admin.reassign_partitions(
                    {move.topic_partition: move.target}, wait=False, timeout_s=QUESTION_TIMEOUT_S
                )

    def _left_behind(self) -> list[str]:
        state = self.moves.state
        left = []
        for number, host in enumerate(self._cluster.hosts):
            placed = {
                f"{topic.name}-{partition}" for topic, partition, _ in state.replicas_on(number)
            }
            path = f"{ROOT}/broker-{number}"
            found = [name for name in _names(host, path) if name.rpartition("-")[2].isdecimal()]
            left += [f"{path}/{name}" for name in found if name not in placed]
            left += _names(host, f"{path}/{QUARANTINE}")
        return left

    # --- an operator ------------------------------------------------------------------------------

    async def _operate(self, name: str, process: Process, rng: random.Random) -> None:
        client = self._client(process)
        admin = AsyncAdmin(client)
        drained: list[int] = []
        while self._may_move:
            await asyncio.sleep(rng.expovariate(1 / REST_S))
            what = rng.choice(
                (
                    *("move", "move", "move", "there and back", "cancel", "drain", "spread"),
                    *("order", "factor"),
                )
            )
            with contextlib.suppress(RayqError):
                await self._act(what, client, admin, drained, rng)
            if drained and rng.random() < 0.5:
                with contextlib.suppress(RayqError):
                    await admin.undrain_broker(drained.pop(), timeout_s=QUESTION_TIMEOUT_S)
        client.close()

    async def _act(
        self,
        what: str,
        client: Client,
        admin: AsyncAdmin,
        drained: list[int],
        rng: random.Random,
    ) -> None:
        response = await client.fetch_all(timeout_s=QUESTION_TIMEOUT_S)
        replicas = {
            TopicPartition(topic.name, partition.partition): [
                replica.broker for replica in partition.replicas
            ]
            for topic in response.topics
            for partition in topic.partitions
        }
        factors = {
            TopicPartition(topic.name, partition.partition): len(
                partition.target or partition.replicas
            )
            for topic in response.topics
            for partition in topic.partitions
        }
        brokers = [broker.broker for broker in response.brokers]
        if not replicas:
            return  # The answer came from a broker that has just started.
        places = rng.sample(sorted(replicas), min(len(replicas), rng.choice((1, 1, 2, 4))))
        trace = self._cluster.world.trace
        trace.note(f"OPERATOR {what} {places}")
        if what == "move":
            targets = {
                place: rng.sample(brokers, min(factors[place], len(brokers))) for place in places
            }
            await self._move(admin, targets, rng)
        elif what == "there and back":
            # The process of a replica may not notice that the replica was away.
            back = {
                place: replicas[place] for place in places if len(replicas[place]) == factors[place]
            }
            away = {place: rng.sample(brokers, min(factors[place], len(brokers))) for place in back}
            await self._move(admin, away, rng)
            await asyncio.sleep(rng.choice((0.0, 0.1, 1.0)))
            if rng.random() < 0.5:
                await admin.cancel_reassignments(places, timeout_s=QUESTION_TIMEOUT_S)
            await self._move(admin, back, rng)
        elif what == "cancel":
            await admin.cancel_reassignments(timeout_s=QUESTION_TIMEOUT_S)
        elif what == "drain":
            broker = rng.choice(brokers)
            drained.append(broker)
            await admin.drain_broker(
                broker,
                throttle_bytes_per_s=rng.choice(THROTTLES),
                concurrency=rng.choice((1, 4)),
                timeout_s=rng.uniform(1.0, 12.0),
                on_progress=lambda _: None,
            )
            trace.note(f"OPERATOR drained {broker}")
        elif what == "spread":
            plan = await admin.plan_spread(timeout_s=QUESTION_TIMEOUT_S)
            await self._move(admin, dict(plan), rng)
        elif what == "factor":
            # Not 1: a lost disk would then lose acknowledged records.
            await admin.set_replication_factor(
                places[0].topic,
                rng.choice((2, 3, 4)),
                throttle_bytes_per_s=rng.choice(THROTTLES),
                wait=rng.random() < 0.5,
                timeout_s=rng.uniform(0.5, 8.0),
            )
        else:
            order = {place: rng.sample(replicas[place], len(replicas[place])) for place in places}
            await self._move(admin, order, rng)

    async def _move(
        self, admin: AsyncAdmin, moves: dict[TopicPartition, list[int]], rng: random.Random
    ) -> None:
        await admin.reassign_partitions(
            moves,
            throttle_bytes_per_s=rng.choice(THROTTLES),
            wait=rng.random() < 0.5,
            timeout_s=rng.uniform(0.5, 8.0),
        )


def _names(host: Host, path: str) -> list[str]:
    found = host.disk.find(path)
    return sorted(found.entries) if isinstance(found, Directory) else []


class MovesWorkload(Operators):
    """See the module."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        super().__init__(cluster)
        self.recreated = RecreatedTopic(self.problems, self.topic_options)

    def rights(self) -> Rights:
        own = [
            *may("create", "topic", RECREATED),
            *may("delete", "topic", RECREATED),
            *may("read", "topic", RECREATED),
            *may("write", "topic", RECREATED),
        ]
        return {**super().rights(), "owner": own, "final-owner": own}

    def start(self) -> None:
        super().start()
        self._start("owner", self._own)

    async def stop_sending(self) -> None:
        await super().stop_sending()
        await self._end("owner")

    async def read_all(self, limit_s: float) -> int:
        count = await super().read_all(limit_s)
        process = self._process("final-owner")

        async def read() -> None:
            client = self._client(process)
            await asyncio.wait_for(self.recreated.read(client), limit_s)
            client.close()

        await process.run(read())
        return count

    def _left_behind(self) -> list[str]:
        """Directories of topics that were deleted while their broker was away may stay, put
        aside."""
        return [
            item
            for item in super()._left_behind()
            if not item.startswith(RECREATED) or item.endswith(REMOVED_SUFFIX)
        ]

    async def _own(self, name: str, process: Process, rng: random.Random) -> None:
        client = self._client(process)
        await self.recreated.own(client, rng, lambda: self._is_sending)
        client.close()


class GroupMovesWorkload(Operators, GroupWorkload):
    """See the module."""
