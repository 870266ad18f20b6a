"""Queues whose partitions move, and whose topics grow, while tasks are in flight.

In some seeds there is one broker more, and two operators move the partitions of all topics: those
of tasks, of dead letters, and of `__queue_state`, whose leaders keep the queues
(`workload_moves`). In some a topic gets one partition more, which workers and producers have to
learn of.
"""

from __future__ import annotations

import asyncio
import contextlib
import random

from proving.simulation.cluster import SimulatedCluster
from proving.simulation.process import Process
from proving.simulation.unclean_topic import value_of
from proving.simulation.workload_moves import OPERATORS, Operators
from proving.simulation.workload_queues import LATER, ORDERS, PARTITIONS, QueueWorkload
from rayq.client.admin.admin import AsyncAdmin
from rayq.errors import RayqError
from rayq.records import TopicPartition

GROWS_SHARE = 0.3
GROWS_AFTER_S = (1.0, 12.0)
GROW_TIMEOUT_S = 8.0


class QueueMovesWorkload(Operators, QueueWorkload):
    """See the module."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        super().__init__(cluster)
        self._operator_count = OPERATORS if len(cluster.hosts) > 3 else 0
        rng = cluster.world.new_random("queue moves")
        self._growing = rng.choice((ORDERS, LATER)) if rng.random() < GROWS_SHARE else None

    @classmethod
    def broker_count(cls, rng: random.Random) -> int:
        return rng.choice((3, 3, 3, 4))

    def start(self) -> None:
        super().start()
        if self._growing is not None:
            self._start("grower", self._grow)

    async def stop_sending(self) -> None:
        await super().stop_sending()
        await self._end("grower")

    def partition_count(self, topic: str) -> int:
        if topic != self._growing:
            return super().partition_count(topic)
        added = value_of(self._cluster, TopicPartition(topic, PARTITIONS))
        return PARTITIONS + (added is not None)

    async def _grow(self, name: str, process: Process, rng: random.Random) -> None:
        """Adds a partition, perhaps while nobody can answer."""
        assert self._growing is not None
        await asyncio.sleep(rng.uniform(*GROWS_AFTER_S))
        client = self._client(process)
        self._cluster.world.trace.note(f"GROWS {self._growing}")
        with contextlib.suppress(RayqError):
            # A key's later records may go elsewhere, where their order is their own.
            await AsyncAdmin(client).create_partitions(
                self._growing, PARTITIONS + 1, force=True, timeout_s=GROW_TIMEOUT_S
            )
        client.close()
