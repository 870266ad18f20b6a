"""Loss of what queues have settled: an operator makes a replica leader that was behind.

All in-sync replicas of a partition of `__queue_state` fail. The topic takes no unclean election by
itself, so somebody asks for it, as one does when disks are gone. Records may be handled again, and
dead letters moved again; but none is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

from proving.simulation.cluster import SimulatedCluster
from proving.simulation.faults import Faults, Injection
from proving.simulation.unclean_topic import elect_uncleanly, value_of
from rayq.client.admin.admin import AsyncAdmin
from rayq.client.client import Client
from rayq.core.cluster.topic_changes import QUEUES_TOPIC
from rayq.errors import RayqError
from rayq.records import TopicPartition
from rayq.testing.checker import Recorder

LOOK_S = 0.3
ASK_TIMEOUT_S = 3.0
UNCLEAN_WEIGHT = 6
"""Weight among the faults."""


class UncleanKeeper:
    """See the module."""

    def __init__(
        self, cluster: SimulatedCluster, rng: random.Random, recorder: Recorder
    ) -> None:
        self._cluster = cluster
        self._recorder = recorder
        number = rng.randrange(cluster.config.queue_state_partitions)
        self._place = TopicPartition(QUEUES_TOPIC, number)
        self._is_under_way = False

    @property
    def faults(self) -> tuple[Injection, ...]:
        return (self._lose,) * UNCLEAN_WEIGHT

    async def _lose(self, faults: Faults) -> None:
        if self._is_under_way:
            return  # Two at once seldom take anything away.
        self._recorder.keeper_in_doubt()
        self._is_under_way = True
        try:
            await elect_uncleanly(self._place, faults, kills=True)
        finally:
            self._is_under_way = False

    async def operate(self, client: Client, is_on: Callable[[], bool]) -> None:
        """Asks for the unclean election, while the fault lasts."""
        while is_on():
            await asyncio.sleep(LOOK_S)
            value = value_of(self._cluster, self._place)
            if self._is_under_way and value is not None and value.leader is None:
                with contextlib.suppress(RayqError):
                    await AsyncAdmin(client).elect_leaders(
                        QUEUES_TOPIC,
                        [self._place.partition],
                        unclean=True,
                        timeout_s=ASK_TIMEOUT_S,
                    )
