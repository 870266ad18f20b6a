"""Each seed draws its own small selection: of clients, faults, sizes and timings.

Where a run has a little of everything, two rare things seldom meet. Here a seed draws few kinds of
faults and has many of each, and few kinds of clients. Segments, indexes and snapshots are tiny in
one seed and large in the next. Threads may be so slow that faults fall between two steps (A. Groce
et al., Swarm Testing, ISSTA 2012).
"""

from __future__ import annotations

import asyncio
import random
from contextlib import AbstractContextManager
from typing import Any

from proving.simulation import buggify
from proving.simulation.buggify import POINTS, Disturbance
from proving.simulation.charged import CHARGED_TIME
from proving.simulation.cluster import SimulatedCluster
from proving.simulation.compacted_topic import TOPIC as COMPACTED
from proving.simulation.faults import Injection
from proving.simulation.faults_groups import WITH_GROUPS
from proving.simulation.faults_ordinary import AFTERMATHS, BETWEEN_STEPS, ORDINARY
from proving.simulation.new_topic import create_topic
from proving.simulation.principals import PRINCIPALS, Rights, may
from proving.simulation.process import THREAD_S, Process
from proving.simulation.trimmed_topic import PARTITIONS as TRIMMED_PARTITIONS
from proving.simulation.trimmed_topic import TOPIC as TRIMMED
from proving.simulation.trimmed_topic import TrimmedTopic
from proving.simulation.workload import CONSUMERS, Workload
from proving.simulation.workload_groups import KEEPERS
from proving.simulation.workload_moves import OPERATORS, GroupMovesWorkload
from rayq.core.cluster.topic_changes import OFFSETS_TOPIC

FAULT_KINDS_MAX = 5
CLIENTS = ("group", "table", "moves", "trimmed")
FAULTS: dict[str, Injection] = {
    fault.__name__: fault for fault in [*ORDINARY, *BETWEEN_STEPS, *WITH_GROUPS]
}
LARGE_VALUES = "large-values"
LARGE_SEEDS_SHARE, LARGE_VALUES_SHARE = 0.2, 0.02
LARGE_VALUE_BYTES = (100_000, 900_000)
"""Larger than segments and than many a fetch. They do not become smaller by compression."""
FEATURES = frozenset([*CLIENTS, *FAULTS, *POINTS, LARGE_VALUES, CHARGED_TIME, PRINCIPALS])
"""Everything that a seed draws, by name: clients, kinds of faults, points of `buggify`, large
values, charged time, principals."""
SLOW_THREADS_S = (0.001, 0.05)
"""The delays on a machine whose cores are all busy: jobs wait for a thread, and the loop hears
late."""
TRIMMERS = 2
"""The number of producers of the topic whose oldest records are removed."""


class SwarmWorkload(GroupMovesWorkload):
    """See the module."""

    points: frozenset[str] = frozenset()
    """The seed's points of `buggify`."""
    features: frozenset[str] | None = None
    """The clients, faults and points of the run. None: as the seed draws them."""
    has_large_values = False

    def __init__(self, cluster: SimulatedCluster) -> None:
        super().__init__(cluster)
        rng = self._swarm_rng = cluster.world.new_random("swarm")
        has_group, has_table, has_moves, has_trimmed = (rng.random() < 0.5 for _ in range(4))
        features = self.features
        if features is not None:
            has_group, has_table, has_moves, has_trimmed = (
                client in features for client in CLIENTS
            )
        self._slot_count = rng.choice((3, 4)) if has_group else 0
        self._keeper_count = KEEPERS if has_table else 0
        self._operator_count = OPERATORS if has_moves else 0
        self._producer_count = rng.choice((1, 3, 6))
        self.trimmed = TrimmedTopic(cluster, rng, self.problems) if has_trimmed else None
        topics = ["orders"]
        topics += [OFFSETS_TOPIC] if has_group else []
        topics += [COMPACTED] if has_table else []
        topics += [TRIMMED] if has_trimmed else []
        self.topics_on_disk = tuple(topics)
        self.topic_options |= {
            "segment_bytes": rng.choice((1024, 4096, 1 << 20)),
            "index_interval_bytes": rng.choice((64, 256, 4096)),
        }
        kinds = [*dict.fromkeys(ORDINARY), *BETWEEN_STEPS, *(WITH_GROUPS if has_group else [])]
        kinds = rng.sample(kinds, rng.randint(1, FAULT_KINDS_MAX))
        if features is not None:
            kinds = [FAULTS[feature] for feature in sorted(features & FAULTS.keys())]
        # A run of nothing but clock jumps shows little, so in every run some process dies.
        self.fault_kinds = [*kinds, rng.choice(AFTERMATHS)]
        self.more_faults = ()
        self._disturbance = Disturbance(cluster, self.points)
        self._large_rng = cluster.world.new_random(LARGE_VALUES)
        threads_s = rng.choice((THREAD_S, THREAD_S, SLOW_THREADS_S))
        for host in cluster.hosts:
            host.thread_s = threads_s

    @classmethod
    def of_seed(cls, seed: int, features: frozenset[str] | None) -> type[SwarmWorkload]:
        points = buggify.drawn(seed) if features is None else features & POINTS.keys()
        # By random numbers of its own: what else a seed draws is the same with and without.
        has_large_values = random.Random(f"{LARGE_VALUES} {seed}").random() < LARGE_SEEDS_SHARE
        if features is not None:
            has_large_values = LARGE_VALUES in features
        drawn = {"points": points, "features": features, "has_large_values": has_large_values}
        return type(cls.__name__, (cls,), drawn)

    @classmethod
    def conditions(cls, seed: int) -> AbstractContextManager[None]:
        return buggify.patched(cls.points)

    @classmethod
    def broker_count(cls, rng: random.Random) -> int:
        return rng.choice((3, 3, 4, 5))

    @classmethod
    def cluster_options(cls, rng: random.Random) -> dict[str, Any]:
        return {
            **super().cluster_options(rng),
            "metadata_snapshot_records": rng.choice((5, 20, 10_000)),
            "flush_checkpoint_bytes": rng.choice((500, 5_000, 1 << 26)),
            "replica_lag_time_max_ms": rng.choice((1_000, 4_000, 20_000)),
            "retention_check_interval_ms": rng.choice((200, 2_000)),
            **buggify.options(cls.points),
        }

    async def create_topics(self) -> None:
        if self._slot_count or self._keeper_count:
            await super().create_topics()
        else:
            await Workload.create_topics(self)
        trimmed = self.trimmed
        if trimmed is None:
            return
        process = self._process("trimmed-admin")

        async def create() -> None:
            client = self._client(process)
            await create_topic(client, TRIMMED, TRIMMED_PARTITIONS, **trimmed.options)
            client.close()

        await process.run(create())

    def rights(self) -> Rights:
        read = may("read", "topic", TRIMMED)
        return {
            **super().rights(),
            "trimmer": may("write", "topic", TRIMMED),
            "trim-operator": [*read, *may("delete", "topic", TRIMMED)],
            "trimmed-reader": read,
            "final-trimmed-reader": read,
        }

    def start(self) -> None:
        super().start()
        self._disturbance.start()
        if not self._slot_count:
            for number in range(CONSUMERS):
                self._start(f"consumer-{number}", self._consume)
        if self.trimmed is not None:
            for number in range(TRIMMERS):
                self._start(f"trimmer-{number}", self._write_trimmed)
            self._start("trim-operator", self._trim)
            self._start("trimmed-reader", self._read_trimmed)

    def calm_down(self) -> None:
        super().calm_down()
        self._disturbance.calm_down()

    async def stop_sending(self) -> None:
        await super().stop_sending()
        await self._end("trim")

    async def stop_reading(self) -> None:
        await super().stop_reading()
        await self._end("consumer")

    async def read_all(self, limit_s: float) -> int:
        if self.trimmed is not None:
            await self._end("trimmed-reader")
            await self._read_trimmed_in_the_end(self.trimmed, limit_s)
        return await super().read_all(limit_s)

    def _padding(self, rng: random.Random) -> bytes:
        if self.has_large_values and self._large_rng.random() < LARGE_VALUES_SHARE:
            length = self._large_rng.randint(*LARGE_VALUE_BYTES)
            return self._large_rng.randbytes(length // 2).hex().encode()
        return super()._padding(rng)

    # --- the topic whose oldest records are removed -----------------------------------------------

    async def _write_trimmed(self, name: str, process: Process, rng: random.Random) -> None:
        assert self.trimmed is not None
        client = self._client(process)
        await self.trimmed.write(name, client, rng, lambda: self._is_sending)
        client.close()

    async def _trim(self, name: str, process: Process, rng: random.Random) -> None:
        assert self.trimmed is not None
        client = self._client(process)
        await self.trimmed.trim(client, rng, lambda: self._is_sending)
        client.close()

    async def _read_trimmed(self, name: str, process: Process, rng: random.Random) -> None:
        assert self.trimmed is not None
        client = self._client(process)
        await self.trimmed.read_now_and_then(client, rng, lambda: self._is_sending)
        client.close()

    async def _read_trimmed_in_the_end(self, trimmed: TrimmedTopic, limit_s: float) -> None:
        process = self._process("final-trimmed-reader")

        async def read() -> None:
            client = self._client(process)
            await asyncio.wait_for(trimmed.read_in_the_end(client), limit_s)
            client.close()

        await process.run(read())
