"""A coordinator alone: it lives with the leader of one partition of an internal topic, in the
simulated world. What it asks others is played by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import ClassVar, TypeVar

import msgspec

from proving.simulation import World
from proving.simulation.process import Process
from rayq import messages
from rayq.actors.peers import Peers
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.config import ClusterConfig
from rayq.core.cluster.topic_changes import OWN_TOPIC_OPTIONS
from rayq.errors import RayqError
from rayq.storage.batch import encode_batch
from rayq.storage.data_directory import PartitionDirectory
from rayq.wire.answer_room import AnswerRoom
from rayq.wire.peer import Peer

EPOCH = 8
"""The leader epoch of the coordinator's partition."""


class Led:
    """The partition and its leader. A subclass begins the coordinator."""

    topic: ClassVar[str]
    topic_id: ClassVar[str]
    partition: ClassVar[int] = 0
    config: ClassVar[ClusterConfig] = ClusterConfig()

    def __init__(
        self, process: Process, log: ReplicaLog, given: messages.PartitionAssignment
    ) -> None:
        self.process, self.log, self.given = process, log, given
        self.environment = log.environment
        self.has_lease = True
        self.leader = Leader(
            log, given, propose=self._propose, has_lease=lambda: self.has_lease,
            now_s=log.environment.clock.monotonic, peers=self.peers(),
        )
        self.leader.committed(given)
        self.leader.flushed(log.log.flushed_offset)

    def peers(self) -> Peers:
        return Peers.__new__(Peers)  # Nobody is asked.

    async def _propose(self, request: messages.AlterPartition) -> None:
        pass

    @staticmethod
    def connection() -> Peer:
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        return Peer("client", None, "", closed, AnswerRoom(lambda: True))

    # --- the in-sync set --------------------------------------------------------------------

    def commits(self) -> None:
        """From now on, and for what was appended so far: a record is committed once it is on this
        disk."""
        self._replicas(1, in_sync=1)

    def waits(self) -> None:
        """Nothing is committed from now on: another replica is in sync, and copies nothing."""
        self._replicas(2, in_sync=2)

    def is_starved(self) -> None:
        """Too few replicas are in sync."""
        self._replicas(2, in_sync=1)

    def lose(self) -> None:
        """The process is without its broker's lease: another may lead."""
        self.has_lease = False

    def regain(self) -> None:
        self.has_lease = True

    def pause(self, seconds: float) -> None:
        """No code of the process runs for so long, once its task waits."""
        self.process.pause()
        loop = self.process.host.world.loop
        loop.call_later(seconds, self.process.resume, context=loop.root.context)

    async def is_busy(self, seconds: float) -> None:
        """For so long most of the process's time is taken, a little at a time."""
        until_s = now_s() + seconds
        while now_s() < until_s:
            self.pause(0.03)
            await asyncio.sleep(0.01)

    def _replicas(self, count: int, *, in_sync: int) -> None:
        members = [(number, f"{number}a") for number in range(1, count + 1)]
        self.given = msgspec.structs.replace(
            self.given,
            partition_epoch=self.given.partition_epoch + 1,
            isr=members[:in_sync],
            replicas=[*members],
        )
        self.leader.committed(self.given)

    # --- the log ----------------------------------------------------------------------------

    async def store(self, *records: tuple[bytes | None, bytes | None]) -> None:
        """Writes these keys and values, in a batch each, and returns once they are committed."""
        for key, value in records:
            batch = encode_batch([value], None if key is None else [key], timestamps_ms=1)
            request = messages.Produce(self.topic_id, self.partition, EPOCH, -1, 60_000)
            answer = self.leader.produce(request, memoryview(batch), principal=None)
            if isinstance(answer, asyncio.Future):
                await answer

    @property
    def end_offset(self) -> int:
        return self.log.log.end_offset

    def refuse_appends(self, error: RayqError | None) -> None:
        """Each append fails from now on, or none does."""

        def produce(
            request: messages.Produce, payload: memoryview, *, principal: str | None
        ) -> messages.ProduceResponse | asyncio.Future[messages.ProduceResponse]:
            if error is None:
                return Leader.produce(self.leader, request, payload, principal=principal)
            raise error

        self.leader.produce = produce  # type: ignore[method-assign]


def now_s() -> float:
    return asyncio.get_running_loop().time()


LedT = TypeVar("LedT", bound=Led)


def leading(of: type[LedT], work: Callable[[LedT], Awaitable[None]]) -> None:
    """Plays `work` with the leader of an empty partition."""
    members = [(1, "1a")]
    given = messages.PartitionAssignment(
        of.topic,
        of.topic_id,
        of.partition,
        OWN_TOPIC_OPTIONS,
        1,
        "1a",
        "h",
        1,
        EPOCH,
        1,
        None,
        members,
        [*members],
    )

    async def script(process: Process) -> None:
        environment = process.environment
        led: list[LedT] = []
        log = ReplicaLog(
            environment,
            of.config,
            given,
            broker=1,
            incarnation="1a",
            on_flushed=lambda offset: led[0].leader.flushed(offset) if led else None,
            on_failure=lambda: None,
        )
        await log.open(
            PartitionDirectory.open(
                environment,
                "/data/o-0",
                topic=of.topic,
                topic_id=of.topic_id,
                partition=of.partition,
                incarnation="1a",
                pid_start_time=1,
            )
        )
        led.append(of(process, log, given))
        await work(led[0])

    with World(seed=1) as world:
        process = world.host("broker").process("replica")
        world.run(process.run(script(process)), limit_s=7_200)
        assert world.errors == []
