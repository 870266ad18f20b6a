"""A follower alone, with its leader acted by the test: no cluster, and no network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, cast

import msgspec

from proving.simulation import World
from proving.simulation.process import Process
from proving.simulation.world import Host
from rayq import messages
from rayq.actors.replica.follower import Follower
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.config import ClusterConfig
from rayq.storage.batch import stamp
from rayq.storage.data_directory import PartitionDirectory
from rayq.storage.producer_state import ProducerState
from tests.storage.support import NOW_MS, append, make_batch

EPOCHS = [(2, 0), (4, 10), (6, 20)]
END = 30
LEADER_EPOCH = 8
US, THEM = (0, "ours"), (1, "theirs")
IN_SYNC: dict[str, Any] = {"isr": [THEM, US]}
"""The change of an assignment that has this replica in sync."""
SNAPSHOT = messages.ReplicaSnapshotResponse(0, []), ProducerState().snapshot()
"""Of an empty log."""
WAIT_S = 5.0

Answer = tuple[messages.Response, Any]


class Late(NamedTuple):
    """An answer, or an error, that comes after a while."""

    after_s: float
    answer: Answer | Exception


class Asked(NamedTuple):
    """A request, and when it came."""

    at_s: float
    request: Any
    timeout_s: float
    patience_s: float


class PlayedLeader:
    """A pool and a connection in one: it gives the answers in a list, then none."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers
        self.closed = False
        self.places: list[tuple[str, int]] = []
        self.asked: list[Asked] = []
        self.sent: list[Any] = []
        self.on_request: Callable[[Any], None] = lambda _: None

    @property
    def fetches(self) -> list[messages.ReplicaFetch]:
        return [one for one in self.requests if isinstance(one, messages.ReplicaFetch)]

    @property
    def requests(self) -> list[Any]:
        return [one.request for one in self.asked]

    @property
    def pauses_s(self) -> list[float]:
        """How long after each request the next one came."""
        times = [one.at_s for one in self.asked]
        return [round(b - a, 4) for a, b in zip(times, times[1:], strict=False)]

    async def get(self, host: str, port: int) -> PlayedLeader:
        self.places.append((host, port))
        return self

    def request(
        self, request: Any, *, timeout_s: float, patience_s: float = 0.0
    ) -> asyncio.Future[Answer]:
        loop = asyncio.get_running_loop()
        self.asked.append(Asked(loop.time(), request, timeout_s, patience_s))
        self.on_request(request)
        future: asyncio.Future[Answer] = loop.create_future()
        if self.answers:
            found = self.answers.pop(0)
            late = found if isinstance(found, Late) else Late(0.0, found)
            if late.after_s:
                loop.call_later(late.after_s, _give, future, late.answer)
            else:
                _give(future, late.answer)
        return future

    def send(self, request: Any) -> None:
        self.sent.append(request)


def _give(future: asyncio.Future[Answer], answer: Answer | Exception) -> None:
    if future.done():
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)


class Followed:
    """A log of 30 records in three epochs, or an empty one, and who follows a leader with it."""

    def __init__(self, process: Process, host: Host) -> None:
        self.host = host
        self.is_over = False
        self.follower: Follower | None = None
        self.log = ReplicaLog(
            process.environment,
            ClusterConfig(),
            assignment(),
            broker=0,
            incarnation="ours",
            on_flushed=self._flushed,
            on_failure=self._failed,
        )

    async def open(self, high_watermark: int, *, is_empty: bool) -> None:
        environment = self.log.environment
        await self.log.open(
            PartitionDirectory.open(
                environment, "/data/t-0", topic="t", topic_id="id", partition=0,
                incarnation="ours", pid_start_time=1,
            )
        )
        for epoch, start in () if is_empty else EPOCHS:
            for number in range(start, start + 10):
                append(self.log.log, epoch=epoch, producer_id=epoch, base_sequence=number - start)
        self.log.advance_high_watermark(high_watermark)
        await self.log.flusher.checkpoint()

    def made(self, leader: PlayedLeader, **changes: Any) -> Follower:
        """Follows that leader once it is started, by an assignment with these changes."""
        self.follower = Follower(self.log, cast(Any, leader), assignment(**changes))
        return self.follower

    async def follow(
        self, answers: list[Any], *, wait_s: float = WAIT_S, **changes: Any
    ) -> PlayedLeader:
        """Follows a leader that gives these answers, for a while."""
        leader = PlayedLeader(answers)
        self.made(leader, **changes).start()
        await asyncio.sleep(wait_s)
        return leader

    def committed(self, **changes: Any) -> None:
        """Newer metadata, with these changes."""
        assert self.follower is not None
        self.follower.committed(assignment(**changes))

    def _flushed(self, offset: int) -> None:
        if self.follower is not None:
            self.follower.flushed(offset)

    def _failed(self) -> None:
        self.is_over = True


def following(
    work: Callable[[Followed], Awaitable[None]],
    *,
    high_watermark: int = 0,
    is_empty: bool = False,
) -> None:
    """Runs `work` in the process of a replica."""

    async def script(process: Process, host: Host) -> None:
        followed = Followed(process, host)
        await followed.open(high_watermark, is_empty=is_empty)
        await work(followed)

    with World(seed=1) as world:
        host = world.host("broker")
        process = host.process("replica")
        world.run(process.run(script(process, host)))
        assert world.errors == []


def assignment(**changes: Any) -> messages.PartitionAssignment:
    """This replica is out of sync, unless the changes say something else."""
    return msgspec.structs.replace(
        messages.PartitionAssignment(
            "t", "id", 0, {}, 1, "theirs", "leader", 1, LEADER_EPOCH, 1, None, [THEM], [US, THEM]
        ),
        **changes,
    )


def diverging(epoch: int | None, end: int) -> Answer:
    return messages.ReplicaFetchResponse(0, 0, 40, epoch, end), b""


def answer(
    high_watermark: int = 0,
    payload: bytes | bytearray = b"",
    *,
    log_start: int = 0,
    cleaned: int = 0,
    horizon: int = 0,
) -> Answer:
    return (
        messages.ReplicaFetchResponse(
            high_watermark, log_start, END, cleaned_offset=cleaned, tombstone_horizon=horizon
        ),
        memoryview(payload),
    )


def batch(offset: int, count: int = 1, *, epoch: int = LEADER_EPOCH, size: int = 20) -> bytearray:
    """A batch as a leader has it in its log."""
    made = make_batch(offset, count, size=size)
    stamp(made, 0, base_offset=offset, leader_epoch=epoch, append_time_ms=NOW_MS)
    return made
