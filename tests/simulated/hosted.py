"""A replica alone, with its process, its leader, its broker and its object server acted by the
test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

from proving.simulation import World
from proving.simulation.process import Process
from proving.simulation.server_view import replica_log_of
from proving.simulation.world import Host
from rayq import messages
from rayq.actors.access import Access
from rayq.actors.hosting import RunCleaner
from rayq.actors.listening_clock import ListeningClock
from rayq.actors.replica.context import ReplicaContext
from rayq.actors.replica.replica import Replica
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.config import ClusterConfig, QueueConfig, as_dict
from rayq.storage.data_directory import PartitionDirectory
from tests.simulated.followed import US, PlayedLeader, assignment
from tests.simulated.queue_stage import Keeper
from tests.simulated.remote_store import TOPIC_ID, PlayedController, PlayedObjects
from tests.storage.support import make_batch

LEADS: dict[str, Any] = {
    "leader": 0, "leader_incarnation": "ours", "leader_host": "here", "isr": [US],
}
"""The change of an assignment that has this replica lead, alone in sync."""
QUEUE = messages.QueueMetadata("q" * 32, "q", TOPIC_ID, "t", as_dict(QueueConfig()), 1)
SEGMENT_BYTES = 1024
RECORD_BYTES = 130
"""A segment has five of these."""


class Hosted:
    """A replica in the making. `open` it; it takes an assignment with each `told`."""

    def __init__(
        self,
        process: Process,
        host: Host,
        config: ClusterConfig,
        changes: dict[str, Any],
        run_cleaner: RunCleaner | None = None,
    ) -> None:
        environment = process.environment
        self.process, self.host, self.environment = process, host, environment
        self.leader = PlayedLeader([])
        """The other replica, when that leads."""
        self.objects, self.controller = PlayedObjects(environment), PlayedController()
        self.has_lease = True
        self.proposals: list[messages.AlterPartition] = []
        self.asked: list[Any] = []
        self.failures = 0
        self.changes = changes
        self.partition_epoch = 1
        listening = ListeningClock(environment.clock, 0.25)
        environment.tasks.spawn(listening.run(), "listening clock")
        context = ReplicaContext(
            environment=environment,
            config=config,
            pool=cast(Any, self.leader),
            broker=0,
            incarnation="ours",
            listening=listening,
            has_lease=lambda: self.has_lease,
            propose=self._propose,
            on_failure=self._failed,
            ask_broker=cast(Any, self._ask),
            metadata_version=lambda: 7,
            peers=Keeper(),
            objects=self.objects,
            access=Access(environment.clock),
            run_cleaner=run_cleaner,
        )
        self.replica = Replica(context, self.given())

    @property
    def log(self) -> ReplicaLog:
        return replica_log_of(self.replica)

    def given(self, **changes: Any) -> messages.PartitionAssignment:
        changes = {"topic_id": TOPIC_ID, "partition_epoch": self.partition_epoch} | (
            self.changes | changes
        )
        config = {"min_insync_replicas": 1} | changes.pop("config", {})
        return assignment(config=config, **changes)

    async def open(self) -> None:
        """Opens it as its process does."""
        await self.replica.open(
            PartitionDirectory.open(
                self.environment, "/data/t-0", topic=self.replica.assignment.topic,
                topic_id=TOPIC_ID, partition=0, incarnation="ours", pid_start_time=1,
            )
        )
        self.replica.apply(self.replica.assignment)

    def told(self, **changes: Any) -> None:
        """Newer metadata arrive, which keep these changes."""
        self.partition_epoch += 1
        self.changes |= changes
        self.replica.apply(self.given())

    def produce(
        self, records: int = 1, *, acks: int = -1, timeout_ms: int = 60_000
    ) -> list[asyncio.Future[messages.ProduceResponse]]:
        """Sends the leader so many records; the answers that are still to come."""
        leader = self.replica.leader(self.replica.assignment.leader_epoch)
        request = messages.Produce(
            TOPIC_ID, 0, self.replica.assignment.leader_epoch, acks, timeout_ms
        )
        answers = [
            leader.produce(request, memoryview(make_batch(number, size=RECORD_BYTES)), principal=None)
            for number in range(records)
        ]
        return [answer for answer in answers if isinstance(answer, asyncio.Future)]

    async def write(self, records: int) -> None:
        """Sends the leader so many records, and waits until they are committed and on disk."""
        await asyncio.gather(*self.produce(records))
        await self.log.flusher.checkpoint()

    @property
    def now_s(self) -> float:
        return self.environment.clock.monotonic()

    async def tick(self, seconds: float = 1.0) -> None:
        """Time passes; then what is due is done."""
        await asyncio.sleep(seconds)
        self.replica.tick(self.now_s)
        await asyncio.sleep(0.2)

    def samples(self) -> dict[str, float]:
        """What its process measures of it now, by names."""
        samples = self.environment.metrics.collect()
        return {
            sample.name: sample.value
            for sample in samples
            if "partition" in sample.labels and sample.count is None
        }

    async def _propose(self, request: messages.AlterPartition) -> None:
        self.proposals.append(request)

    async def _ask(self, request: Any) -> Any:
        self.asked.append(request)
        if not isinstance(request, messages.MoveRemote):
            await asyncio.get_running_loop().create_future()
        return await self.controller.ask(request)

    def _failed(self) -> None:
        self.failures += 1


def hosting(
    work: Callable[[Hosted], Awaitable[None]],
    *,
    is_open: bool = True,
    cluster_config: ClusterConfig | None = None,
    run_cleaner: RunCleaner | None = None,
    **changes: Any,
) -> None:
    """Runs `work` in the process of a replica whose assignment has these changes."""

    async def script(process: Process, host: Host) -> None:
        config = cluster_config or ClusterConfig()
        hosted = Hosted(process, host, config, changes, run_cleaner)
        if is_open:
            await hosted.open()
        await work(hosted)

    with World(seed=1) as world:
        host = world.host("broker")
        process = host.process("replica")
        world.run(process.run(script(process, host)))
        assert world.errors == []
