"""The broker of a node, acted by the test, and a replica process that it has started."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from proving.simulation import World
from proving.simulation.process import Process
from rayq import messages
from rayq.actors.hosting import ReplicaHostSpec
from rayq.actors.replica.replica_host import ReplicaHost
from rayq.actors.signal import Signal
from rayq.config import ClusterConfig
from rayq.core.cluster.topic_changes import OFFSETS_TOPIC, QUEUES_TOPIC, TRANSACTIONS_TOPIC
from rayq.errors import ProtocolError, RayqError, StalePartitionError, TimeoutError, to_wire
from rayq.storage.data_directory import DataDirectory, format_directory, read_secret
from rayq.wire.authentication import Identity, client_key
from rayq.wire.peer import Peer
from rayq.wire.pool import ConnectionPool
from rayq.wire.server import Server
from tests.simulated.followed import LEADER_EPOCH, assignment
from tests.storage.support import make_batch

CONFIG = ClusterConfig()
CLUSTER_ID, DATA = "c" * 32, "/data"
IDS = {
    topic: letter * 32
    for topic, letter in {
        "t": "a", "u": "b", OFFSETS_TOPIC: "d", TRANSACTIONS_TOPIC: "e", QUEUES_TOPIC: "f",
    }.items()
}
INCARNATION = "1" * 32
LEADS: dict[str, Any] = {
    "leader": 3, "leader_incarnation": INCARNATION, "leader_host": "here",
    "isr": [(3, INCARNATION)], "replicas": [(3, INCARNATION)],
}


def assigned(topic: str = "t", **changes: Any) -> messages.PartitionAssignment:
    """A partition that the process leads alone, unless the changes say something else."""
    config = {"min_insync_replicas": 1} | changes.pop("config", {})
    return assignment(topic=topic, topic_id=IDS[topic], config=config, **(LEADS | changes))


class Broker:
    """The broker of the node, as the replica process sees it, and the process."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.node = world.host("node")
        self.process = self.node.process("broker")
        self.environment = self.process.environment
        call = self.process.call
        secret = b"s" * 32
        call(lambda: format_directory(
            self.environment, DATA, cluster_id=CLUSTER_ID, broker=3, secret=secret
        ))
        self.directory = call(DataDirectory.open, self.environment, DATA)
        self.identity = Identity(
            role="server", key=call(read_secret, self.environment.disk, DATA),
            cluster_id=CLUSTER_ID, broker=3,
        )
        self.pool = ConnectionPool(self.environment, self.identity, CONFIG)
        self.client_pool = ConnectionPool(
            self.environment,
            Identity(role="client", key=client_key(secret), cluster_id=CLUSTER_ID, broker=None),
            CONFIG,
        )
        self.received: list[tuple[float, Any]] = []
        self.news: list[dict[str, Any]] = []
        self.refusals: list[RayqError] = []
        self.is_silent = False
        self.session = 0
        self.takes_batches = True
        self.refused_partitions: set[int] = set()
        self._told = Signal()
        self.is_over = False
        self.watch: Callable[[], None] = lambda: None
        """Called after each event of the simulation."""

    # --- the broker -------------------------------------------------------------------------------

    async def listen(self) -> Server:
        server = Server(self.environment, self.identity, self._handle, CONFIG)
        await server.start(self.node.address, 0)
        self.directory.write_endpoint(server.host, server.port)
        return server

    def _handle(self, _peer: Peer, request: messages.AnyRequest, _payload: memoryview) -> Any:
        self.received.append((self.now_s, request))
        match request:
            case messages.AttachReplicaHost():
                return messages.AttachReplicaHostResponse(CLUSTER_ID, self.session)
            case messages.ReplicaHostHeartbeat():
                return self._answer(request)
            case messages.AlterPartition():
                return messages.ChangeResponse(1)
            case messages.AlterPartitions():
                return self._alter(request)
        raise TimeoutError("It tells nothing else.")

    async def _alter(
        self, request: messages.AlterPartitions
    ) -> messages.AlterPartitionsResponse:
        if not self.takes_batches:
            raise ProtocolError("There is no request of this kind: this server is an older rayq.")
        await asyncio.sleep(0.01)
        return messages.AlterPartitionsResponse(
            [
                (proposal.topic_id, proposal.partition, *to_wire(StalePartitionError("no")))
                for proposal in request.proposals
                if proposal.partition in self.refused_partitions
            ]
        )

    async def _answer(
        self, request: messages.ReplicaHostHeartbeat
    ) -> messages.ReplicaHostHeartbeatResponse:
        if self.refusals:
            raise self.refusals.pop(0)
        if self.is_silent:
            await asyncio.get_running_loop().create_future()
        news: dict[str, Any] = {}
        if request.wait_ms:
            if not self.news:
                await self._told.wait(request.wait_ms / 1000)
            if self.news:
                news = self.news.pop(0)
        return messages.ReplicaHostHeartbeatResponse(
            **{"version": request.version, "assignments": [], "removed": []} | news
        )

    async def tell(self, *assignments: messages.PartitionAssignment, **news: Any) -> None:
        """The process hears of this with its next heartbeat, at once, and has time to act."""
        self.news.append({"assignments": list(assignments)} | news)
        self._told.notify()
        await asyncio.sleep(0.3)

    @property
    def now_s(self) -> float:
        return self.environment.clock.monotonic()

    def all(self, kind: type[Any]) -> list[Any]:
        return [request for _, request in self.received if isinstance(request, kind)]

    @property
    def beats(self) -> list[messages.ReplicaHostHeartbeat]:
        return self.all(messages.ReplicaHostHeartbeat)

    @property
    def attached(self) -> list[messages.AttachReplicaHost]:
        return self.all(messages.AttachReplicaHost)

    # --- the replica process ----------------------------------------------------------------------

    async def start(self) -> None:
        """Starts the process, and waits until it is attached."""
        process = self.node.process("replicas")
        self.replicas: Process = process
        spec = ReplicaHostSpec("cluster", 3, INCARNATION, DATA, ())

        async def live() -> None:
            self.host = ReplicaHost(
                process.environment, CONFIG, spec, host=self.node.address, pid_start_time=77
            )
            await self.host.run()
            self.is_over = True

        process.start(live())
        await asyncio.sleep(0.3)

    async def ask(self, request: Any, payload: bytes | bytearray = b"") -> Any:
        """What the process answers."""
        at = self.host._server
        answer, _ = await self.pool.request(at.host, at.port, request, payload, timeout_s=5)
        return answer

    async def ask_as_client(self, request: Any, payload: bytes | bytearray = b"") -> Any:
        """What the process answers a client, which has the cluster's token."""
        at = self.host._server
        answer, _ = await self.client_pool.request(
            at.host, at.port, request, payload, timeout_s=5
        )
        return answer

    async def describe(self, topic: str = "t") -> messages.DescribeReplicaResponse:
        answer = await self.ask(messages.DescribeReplica(IDS[topic], 0))
        assert isinstance(answer, messages.DescribeReplicaResponse)
        return answer

    async def produce(self, topic: str = "t", *, acks: int = -1, timeout_ms: int = 1000) -> Any:
        request = messages.Produce(IDS[topic], 0, LEADER_EPOCH, acks, timeout_ms)
        return await self.ask(request, make_batch(0))


def playing(script: Callable[[Broker], Awaitable[None]], *, is_started: bool = True) -> None:
    with World(seed=1) as world:
        broker = Broker(world)

        async def run() -> None:
            if is_started:
                await broker.listen()
                await broker.start()
            await script(broker)

        world.loop.observer = lambda _: broker.watch()
        world.run(broker.process.run(run()))
        assert world.errors == []
