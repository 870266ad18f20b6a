"""A leader of one partition with a queue, alone: followers and the keeper are played."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from proving.simulation import World
from proving.simulation.process import Process
from proving.simulation.world import Host
from rayq import messages
from rayq.actors.access import Access
from rayq.actors.clock_watch import ClockWatch, DelayClock
from rayq.actors.peers import Build, Peers
from rayq.actors.queues.leader import PartitionQueues
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.config import ClusterConfig, QueueConfig, as_dict
from rayq.core.large.values import chunk_headers
from rayq.core.queues.queue_states import QueueStates, StateKey, pack, unpack
from rayq.errors import RayqError
from rayq.records import Headers
from rayq.storage.batch import decode_columns, due_header, encode_batch, split_batches
from rayq.storage.data_directory import PartitionDirectory
from rayq.wire.answer_room import AnswerRoom
from rayq.wire.peer import Peer

TICK_S = 0.25
Lock = tuple[int, int, int]


class Keeper(Peers):
    """Keeps what leaders write, in memory. The test may hold back its answers."""

    def __init__(self) -> None:  # It has no network.
        self.kept = QueueStates()
        self.writes = 0
        self.open = asyncio.Event()
        self.open.set()
        self.failure: RayqError | None = None
        """What each request is answered by."""

    async def ask_queue_state(
        self, queue_id: str, build: Build[messages.ResponseT], payload: bytes = b""
    ) -> tuple[messages.ResponseT, memoryview]:
        request: Any = build("keepers", 0, 1)
        answer, given = await self._handle(request, payload)
        return cast(messages.ResponseT, answer), memoryview(given)

    async def _handle(self, request: Any, payload: bytes) -> tuple[messages.Response, bytes]:
        await self.open.wait()
        await asyncio.sleep(0.001)
        if self.failure is not None:
            raise self.failure
        at = StateKey(request.queue_id, request.data_partition)
        if isinstance(request, messages.OpenQueueState):
            fence, records = self.kept.open_state(
                at,
                data_leader_epoch=request.data_leader_epoch,
                opener=request.opener,
                is_first_page=not request.after,
            )
            for record in records:
                self.kept.replay(record)
            page, after = self.kept.read(at, request.after)
            return messages.OpenQueueStateResponse(fence, after, self.kept.fence_min), pack(page)
        assert isinstance(request, messages.WriteQueueState)
        records = unpack(payload)
        for record in self.kept.write(at, request.fence, records, gives_out=request.gives_out):
            self.kept.replay(record)
        self.writes += 1
        return messages.WriteQueueStateResponse(self.kept.is_full), b""


class Taken:
    """What a take brought."""

    def __init__(
        self, answer: messages.TakeResponse, parts: Sequence[Any], holder: str = "one"
    ) -> None:
        self.holder = holder
        self.answer, self.epoch, self.locks = answer, answer.state_epoch, answer.locks
        self.payload = b"".join(bytes(part) for part in parts)
        offsets = {
            offset for first, last, _ in answer.locks for offset in range(first, last + 1)
        }
        self.offsets = sorted(offsets)
        self.values: list[bytes | None] = []
        for position, header in split_batches(self.payload):
            columns = decode_columns(self.payload, position, header)
            self.values += [
                value
                for offset, value in zip(columns.offsets, columns.values, strict=True)
                if offset in offsets
            ]


class QueueStage:
    """The partition's leader, its queue and its clients."""

    def __init__(self, host: Host, log: ReplicaLog, config: dict[str, Any]) -> None:
        self.host = host
        self.log = log
        self.clock = log.environment.clock
        self.clock_watch = DelayClock(self.clock)
        self.age_watch = ClockWatch(self.clock)
        self.keeper = Keeper()
        self.access = Access(self.clock)
        self.has_lease = True
        self.epoch = 0
        self.queues: list[messages.QueueMetadata] = [self.queue(**config)]
        self._ticking: asyncio.Task[None] | None = None

    @staticmethod
    def queue(name: str = "q", **config: Any) -> messages.QueueMetadata:
        return messages.QueueMetadata(
            f"{name}-id", name, "id", "t", as_dict(QueueConfig(**config)), 1
        )

    @property
    def assignment(self) -> messages.PartitionAssignment:
        members = [(1, "1a"), (2, "2a")]
        return messages.PartitionAssignment(
            "t", "id", 0, {}, 1, "1a", "h", 1, self.epoch, self.epoch, None,
            members, [*members], queues=self.queues,
        )

    async def lead(self, *, resigned: bool = False) -> None:
        """A new epoch begins: all that the leader before had in memory is gone."""
        if self.epoch and not resigned:
            self.resign()
        self.epoch += 1
        given = self.assignment
        self.leader = Leader(
            self.log, given, propose=self._propose, has_lease=lambda: self.has_lease,
            now_s=self.log.environment.clock.monotonic, peers=self.keeper,
        )
        self.leader.committed(given)
        self.served = PartitionQueues(
            self.log, self.leader, given, peers=self.keeper, clock_watch=self.clock_watch,
            age_watch=self.age_watch, access=self.access,
        )
        await self.copied()
        if self._ticking is None:
            self._ticking = self.log.environment.tasks.spawn(self._tick(), "ticks")

    def resign(self) -> None:
        self.served.end("another leads")
        self.leader.end("another leads")

    def changed(self) -> None:
        """The metadata name other queues, or other configs of them."""
        self.served.committed(self.assignment)

    async def _propose(self, request: messages.AlterPartition) -> None:
        pass

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.clock_watch.look()
            self.served.tick()

    # --- records --------------------------------------------------------------------------------

    async def copied(self) -> None:
        """Leader and follower have all on disk: it is committed."""
        end = self.log.log.end_offset
        self.leader.flushed(end)
        await self.leader.followers.fetch(
            messages.ReplicaFetch(
                "id", 0, 2, "2a", self.epoch, end, end, 0, self.log.log.last_epoch, 1 << 20, 0
            )
        )
        await asyncio.sleep(0.01)

    async def put(
        self, *values: bytes, keys: list[bytes | None] | None = None,
        headers: list[Headers | None] | None = None, is_committed: bool = True,
        is_chunk: bool = False, is_large: bool = False,
    ) -> None:
        """One batch of these records."""
        if is_chunk:
            headers = [chunk_headers(bytes(16), 0)]
        batch = encode_batch(
            list(values), keys, headers, timestamps_ms=1, is_chunk=is_chunk, is_large=is_large
        )
        request = messages.Produce("id", 0, self.epoch, -1, 30_000)
        self.leader.produce(request, memoryview(batch), principal=None)
        if is_committed:
            await self.copied()

    async def put_due(self, value: bytes, delay_ms: int) -> None:
        await self.put(value, headers=[[due_header(self.clock.wall_ms() + delay_ms)]])

    # --- consumers ------------------------------------------------------------------------------

    def peer(self) -> Peer:
        """A connection. Its end: `peer.closed.set_result(None)`."""
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        return Peer("client", None, "client", closed, AnswerRoom(lambda: True))

    def handle(self, peer: Peer, kind: Callable[..., Any], *fields: Any, **parts: Any) -> Any:
        request = kind("id", 0, self.epoch, parts.pop("queue_id", "q-id"), *fields, **parts)
        return self.served.handle(peer, request)

    async def ask(self, kind: Callable[..., Any], *fields: Any, **parts: Any) -> Any:
        answer = self.handle(parts.pop("peer", None) or self.peer(), kind, *fields, **parts)
        return await answer if isinstance(answer, Awaitable) else answer

    async def take(
        self, count: int = 100, *, holder: str = "one", wait_ms: int = 100,
        peer: Peer | None = None, bytes_max: int = 1 << 20, **parts_of_it: bool,
    ) -> Taken:
        answer, parts = await self.ask(
            messages.Take, holder, count, bytes_max, wait_ms, peer=peer, **parts_of_it
        )
        return Taken(answer, parts, holder)

    async def settle(
        self, taken: Taken, *, holder: str | None = None, peer: Peer | None = None, **parts: Any
    ) -> list[tuple[int, int, str]]:
        holder = holder or taken.holder
        answer = await self.ask(messages.Settle, holder, taken.epoch, peer=peer, **parts)
        assert isinstance(answer, messages.SettleResponse)
        return answer.lost

    async def ack(self, taken: Taken, **options: Any) -> list[tuple[int, int, str]]:
        return await self.settle(taken, acks=taken.locks, **options)

    async def describe(self) -> messages.DescribeQueueResponse:
        answer = await self.ask(messages.DescribeQueue)
        assert isinstance(answer, messages.DescribeQueueResponse)
        return answer


def staged(work: Callable[[QueueStage], Awaitable[None]], **config: Any) -> None:
    """Plays `work` with a queue of this config."""

    async def script(process: Process, host: Host) -> None:
        environment = process.environment
        given = messages.PartitionAssignment(
            "t", "id", 0, {}, 1, "1a", "h", 1, 1, 1, None, [(1, "1a")], [(1, "1a")]
        )
        log = ReplicaLog(
            environment, ClusterConfig(), given, broker=1, incarnation="1a",
            on_flushed=lambda _: None, on_failure=lambda: None,
        )
        await log.open(
            PartitionDirectory.open(
                environment, "/data/t-0", topic="t", topic_id="id", partition=0, incarnation="1a",
                pid_start_time=1,
            )
        )
        stage = QueueStage(host, log, config)
        await stage.lead()
        await work(stage)
        stage.resign()

    with World(seed=1) as world:
        host = world.host("broker")
        process = host.process("replica")
        world.run(process.run(script(process, host)), limit_s=100_000)
