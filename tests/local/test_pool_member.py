"""One consumer of a pool, and its pool, against a group and brokers that a test plays."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from rayq import Record, TopicPartition
from rayq.client.client import Client
from rayq.client.cluster import Cluster
from rayq.client.consumer_pool import Handler, PoolSpec
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.client.environment import system_environment
from rayq.config import PoolConfig
from rayq.errors import DisconnectedError, HandlerError, RayqError, UnknownTopicError
from rayq.pools import member as pools_member
from rayq.pools import pool_member, running_pool
from rayq.pools.group_progress import GroupProgress
from rayq.pools.member import MemberDiedError, MemberReport
from rayq.pools.pool_member import PoolMember
from rayq.pools.running_pool import PoolHosting, RunningPool
from rayq.runtime.local_pool import with_one_thread

Step = Callable[["PlayedConsumer"], Awaitable[list[Record]]]


def record(partition: int, offset: int) -> Record:
    return Record("t", partition, offset, 0, None, b"%d/%d" % (partition, offset), [])


def place(partition: int) -> TopicPartition:
    return TopicPartition("t", partition)


class PlayedConsumer:
    """Polls go through `steps`. After the last step the member is drained."""

    def __init__(self, steps: list[Step], **callbacks: Any) -> None:
        self.steps = steps
        self.on_assigned = callbacks["on_assigned"]
        self.on_revoked = callbacks["on_revoked"]
        self.positions: dict[int, int] = {}
        self.paused: set[TopicPartition] = set()
        self.commits: list[dict[TopicPartition, int] | None] = []
        self.member: PoolMember | None = None

    async def poll(self, timeout_s: float, records_max: int | None = None) -> list[Record]:
        if self.paused:
            await asyncio.sleep(min(timeout_s, 0.001))
            return []
        if not self.steps:
            assert self.member is not None
            self.member.drain()
            return []
        records = await self.steps.pop(0)(self)
        for read in records:
            self.positions[read.partition] = read.offset + 1
        return records

    async def position(self, partition: TopicPartition) -> int:
        return self.positions[partition.partition]

    async def assignment(self) -> set[TopicPartition]:
        return {place(position) for position in self.positions}

    async def pause(self, *places: TopicPartition) -> None:
        self.paused.update(places)

    async def resume(self, *places: TopicPartition) -> None:
        self.paused.difference_update(places)

    async def commit(self, offsets: dict[TopicPartition, int] | None = None) -> None:
        self.commits.append(offsets)

    async def close(self, timeout_s: float) -> None: ...

    @property
    def committed(self) -> dict[int, int]:
        """The positions that the group has at the end; a commit of all positions is left out."""
        found: dict[int, int] = {}
        for commit in self.commits:
            found |= {place.partition: offset for place, offset in (commit or {}).items()}
        return found


class PlayedProducer:
    """Refuses records as often as it is told to."""

    def __init__(self, refusals: list[RayqError]) -> None:
        self.refusals = refusals
        self.letters: list[tuple[bytes | None, dict[str, bytes]]] = []
        self.is_closed = False

    async def send(self, topic: str, value: bytes | None, *, headers: Any, **_: Any) -> Any:
        delivery: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.refusals:
            delivery.set_exception(self.refusals.pop(0))
        else:
            self.letters.append((value, dict(headers)))
            delivery.set_result(None)
        return delivery

    def abandon(self) -> None:
        self.is_closed = True


class Played:
    """A member on its consumer, both for one test."""

    def __init__(
        self,
        steps: list[Step],
        handler: Handler | None = None,
        *,
        load: Callable[[], Handler] | None = None,
        refusals: list[RayqError] | None = None,
        **config: Any,
    ) -> None:
        self.producer = PlayedProducer(refusals or [])
        self.producer_config: dict[str, Any] = {}
        self.steps = steps
        spec = PoolSpec("p", "t", "g", PoolConfig(**{"retry_backoff_ms": 1, **config}))
        self.member = PoolMember(
            with_one_thread(system_environment(None)),
            cast(Cluster, self),
            spec,
            "m",
            load or (lambda: cast(Handler, handler)),
        )

    def async_consumer(self, *_: str, **config: Any) -> AsyncConsumer:
        self.consumer = PlayedConsumer(self.steps, **config)
        self.consumer.member = self.member
        return cast(AsyncConsumer, self.consumer)

    def async_producer(self, **config: Any) -> PlayedProducer:
        self.producer_config = config
        return self.producer

    async def run(self) -> MemberReport:
        async with asyncio.timeout(60):
            await self.member.run()
        return self.member.report()


def given(*records: Record) -> Step:
    async def step(_consumer: PlayedConsumer) -> list[Record]:
        return list(records)

    return step


def test_a_partition_that_goes_and_comes_back_within_one_poll_loses_no_record() -> None:
    seen: list[int] = []
    failures = iter([OSError("away")])

    def handler(records: list[Record]) -> None:
        for error in failures:
            raise error
        seen.extend(read.offset for read in records)

    async def comes_back(consumer: PlayedConsumer) -> list[Record]:
        await consumer.on_revoked({place(0)})
        await consumer.on_assigned({place(0)})
        return [record(0, 0), record(0, 1)]

    async def play() -> None:
        played = Played([comes_back], handler)
        await played.run()
        assert seen == [0, 1]
        assert played.consumer.committed == {0: 2}

    asyncio.run(play())


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


RAISED: dict[bytes, BaseException] = {
    b"0/0": SystemExit(3),
    b"0/1": KeyboardInterrupt(),
    b"0/2": asyncio.CancelledError(),
    b"0/3": UnprintableError(),
    b"0/4": StopIteration(),
    b"0/5": StopAsyncIteration(),
    b"0/6": GeneratorExit(),
}


@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_a_handler_raises_ends_neither_the_loop_nor_the_consumer(is_async: bool) -> None:
    seen: list[bytes | None] = []

    def handler(records: list[Record]) -> None:
        for read in records:
            if (error := RAISED.get(read.value or b"")) is not None:
                raise error
        seen.extend(read.value for read in records)

    async def async_handler(records: list[Record]) -> None:
        await asyncio.sleep(0)
        handler(records)

    async def play() -> None:
        played = Played(
            [given(*[record(0, offset) for offset in range(9)])],
            async_handler if is_async else handler,
            retries=0,
            dead_letter_topic="dead",
        )
        report = await played.run()
        assert report.dead_letters == len(RAISED) and report.failure is None
        letters = dict(played.producer.letters)
        assert letters.keys() == RAISED.keys()
        assert letters[b"0/0"]["rayq.error.class"] == b"SystemExit"
        assert b"RuntimeError" in letters[b"0/3"]["rayq.error.message"]
        assert seen == [b"0/7", b"0/8"]
        assert played.consumer.committed == {0: 9}

    asyncio.run(play())


async def _nothing(_given: object = None) -> None:
    pass


async def _nested(_given: object) -> Any:
    return _nothing()


@pytest.mark.parametrize(
    "handler",
    [
        lambda records: (read for read in records),
        lambda records: map(print, records),
        lambda records: _nested(records),
        _nested,
    ],
)
def test_what_has_not_run_has_not_handled_anything(handler: Any) -> None:
    async def play() -> None:
        played = Played([given(record(0, 0))], handler, retries=0, dead_letter_topic="dead")
        assert (await played.run()).dead_letters == 1

    asyncio.run(play())


def test_a_coroutine_that_comes_back_is_awaited_and_so_is_that_of_close() -> None:
    seen: list[object] = []

    async def handle(records: list[Record]) -> None:
        await asyncio.sleep(0)
        seen.append(len(records))

    class Decorated:
        def __call__(self, records: list[Record]) -> Any:
            return handle(records)

        async def close(self) -> None:
            await asyncio.sleep(0)
            seen.append("closed")

    async def play() -> None:
        played = Played([given(record(0, 0), record(0, 1))], Decorated)
        report = await played.run()
        assert report.records == 2 and report.dead_letters == 0
        assert played.consumer.committed == {0: 2}

    asyncio.run(play())
    assert seen == [2, "closed"]


def test_a_handler_that_cancels_itself_has_failed_and_goes_on() -> None:
    async def handler(records: list[Record]) -> None:
        if records[0].offset == 0:
            current = asyncio.current_task()
            assert current is not None
            current.cancel()
            await asyncio.sleep(60)

    async def play() -> None:
        played = Played(
            [given(record(0, 0)), given(record(0, 1))],
            handler,
            retries=0,
            dead_letter_topic="dead",
        )
        report = await played.run()
        assert report.dead_letters == 1 and report.records == 2
        assert played.consumer.committed == {0: 2}

    asyncio.run(play())


def test_nothing_is_committed_past_a_dead_letter_that_cannot_be_written() -> None:
    uncommitted: list[dict[int, int]] = []
    closed: list[bool] = []

    class Handling:
        def __call__(self, records: list[Record]) -> None:
            if any(read.offset == 1 for read in records):
                raise ValueError("never")

        def close(self) -> None:
            closed.append(True)

    class Watched(PlayedConsumer):
        async def poll(self, timeout_s: float, records_max: int | None = None) -> list[Record]:
            if self.paused:
                uncommitted.append(self.committed)
            return await super().poll(timeout_s, records_max)

    async def play() -> None:
        played = Played(
            [given(record(0, 0), record(0, 1), record(0, 2))],
            Handling,
            refusals=[UnknownTopicError("no such topic"), DisconnectedError("no answer")],
            retries=0,
            dead_letter_topic="dead",
            max_poll_interval_ms=6_000,
        )

        def watched(*_: str, **config: Any) -> AsyncConsumer:
            played.consumer = Watched(played.steps, **config)
            played.consumer.member = played.member
            return cast(AsyncConsumer, played.consumer)

        played.async_consumer = watched  # type: ignore[method-assign]
        report = await played.run()
        assert len(uncommitted) >= 2 and all(commit == {0: 1} for commit in uncommitted)
        assert played.consumer.committed == {0: 3}
        assert report.dead_letters == 1 and closed == [True] and played.producer.is_closed
        # Between two tries it polls, well within max_poll_interval_ms.
        assert sum(
            value for name, value in played.producer_config.items() if name.endswith("_ms")
        ) < 6_000 / 2

    asyncio.run(play())


def test_a_coroutine_that_is_cancelled_with_its_consumer_has_not_handled_its_batch() -> None:
    async def play() -> None:
        at_work = asyncio.Event()

        async def handler(records: list[Record]) -> None:
            at_work.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass  # and says that all is well

        played = Played([given(record(0, 0)), given(record(0, 1))], handler)
        task = asyncio.create_task(played.run())
        await at_work.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert played.consumer.committed == {}

    asyncio.run(play())


def test_partitions_that_bring_nothing_are_committed_while_others_are_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_member, "COMMIT_INTERVAL_S", 0.0)

    async def play() -> None:
        played = Played([given(record(0, 0)), given(record(0, 1))], lambda records: None)
        commits: list[int] = []

        async def last(consumer: PlayedConsumer) -> list[Record]:
            commits.append(consumer.commits.count(None))
            return []

        played.steps.append(last)
        await played.run()
        # Compaction may have moved the position of a partition past its last record.
        assert commits == [2]

    asyncio.run(play())


def test_a_consumer_whose_polls_keep_failing_ends_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pools_member, "FAILED_POLLS_MAX", 3)
    monkeypatch.setattr(pool_member, "FAILED_POLL_PAUSE_S", 0.0)

    async def fails(_consumer: PlayedConsumer) -> list[Record]:
        raise UnknownTopicError("it was deleted")

    async def play() -> None:
        quiet = given()
        played = Played([fails, fails, quiet, fails, fails, fails, quiet], lambda records: None)
        report = await played.run()
        assert "it was deleted" in (report.failure or "") and not report.is_leaving
        assert len(played.steps) == 1

    asyncio.run(play())


def test_a_consumer_without_a_pool_ends_though_its_handler_keeps_failing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pools_member, "LEASE_S", 0.05)

    def handler(records: list[Record]) -> None:
        raise OSError("away")

    async def play() -> None:
        played = Played([given(record(0, 0))], handler, retry_backoff_max_ms=10)
        report = await played.run()
        assert report.is_leaving and report.retries > 0
        assert played.consumer.committed == {}

    asyncio.run(play())


def test_a_handler_that_hangs_while_it_is_made_counts_as_a_call() -> None:
    is_loading, go_on = threading.Event(), threading.Event()

    def load() -> Handler:
        is_loading.set()
        assert go_on.wait(60)
        raise HandlerError("cannot be loaded")

    async def play() -> None:
        played = Played([], load=load)
        task = asyncio.create_task(played.run())
        await asyncio.to_thread(is_loading.wait, 60)
        assert played.member.report().handling_s > 0
        go_on.set()
        report = await task
        assert report.handling_s == 0.0 and report.failure == "cannot be loaded"

    asyncio.run(play())


# --- the pool -------------------------------------------------------------------------------------

WORKING = MemberReport("here", 1, [0], 10, 1.0, 0, 0, 0.0, None, False, None)


class PlayedHandle:
    """A consumer as its pool sees it."""

    def __init__(self, report: MemberReport | None) -> None:
        """`report` None: the consumer does not answer."""
        self.answer = report
        self.calls: list[str] = []

    async def report(self) -> MemberReport:
        if self.answer is None:
            await asyncio.sleep(60)
            raise MemberDiedError("too late")
        return self.answer

    async def drain(self) -> MemberReport:
        self.calls.append("drain")
        assert self.answer is not None
        return self.answer

    def kill(self) -> None:
        self.calls.append("kill")


class PlayedClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def wall_ms(self) -> int:
        return 0


def pool_with(handle: PlayedHandle | None, clock: PlayedClock, **config: Any) -> RunningPool:
    environment = dataclasses.replace(system_environment(None), clock=clock)
    spec = PoolSpec("p", "t", "g", PoolConfig(**config))
    pool = RunningPool(
        environment, cast(Cluster, SimpleNamespace(name="c")), spec, cast(PoolHosting, None)
    )
    if handle is not None:
        pool._members["m"] = running_pool._Member("m", handle)
    return pool


def test_a_consumer_that_an_earlier_process_had_drained_is_not_taken_for_one_at_work() -> None:
    async def play() -> None:
        handle = PlayedHandle(msgspec.structs.replace(WORKING, is_leaving=True))
        pool = pool_with(handle, PlayedClock())
        await pool._hear_members(those_on_their_way=True)
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        assert handle.calls == ["drain", "kill"]
        assert pool.status().records == 10 and pool.status().problem is None

    asyncio.run(play())


def test_a_pool_that_looked_for_long_does_not_take_its_consumers_for_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running_pool, "REPORT_PATIENCE_S", 0.01)

    async def play() -> None:
        handle, clock = PlayedHandle(WORKING), PlayedClock()
        pool = pool_with(handle, clock, max_poll_interval_ms=5_000)
        await pool._hear_members(those_on_their_way=True)
        handle.answer = None
        clock.now_s = 20.0  # the look in between took so long
        await pool._hear_members()
        assert handle.calls == []
        clock.now_s = 26.0  # and the next one
        await pool._hear_members()
        assert handle.calls == []
        for _ in range(8):
            clock.now_s += 1.0
            pool._listening.look()
        await pool._hear_members()
        assert handle.calls == ["kill"] and "max_poll_interval_ms" in (pool.status().problem or "")

    asyncio.run(play())


class Watcher:
    """A topic of two partitions whose records are all handled."""

    def __init__(self) -> None:
        self.offline: set[int] = set()
        self.commits: list[dict[TopicPartition, int]] = []

    async def committed(self, places: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(places, 5)

    async def end_offsets(self, places: list[TopicPartition]) -> dict[TopicPartition, int]:
        if self.offline & {place.partition for place in places}:
            raise DisconnectedError("its leader is away")
        return dict.fromkeys(places, 5)

    async def commit(self, offsets: dict[TopicPartition, int]) -> None:
        self.commits.append(offsets)

    async def look(self, pool: RunningPool) -> None:
        async def topic(*_: Any, **__: Any) -> Any:
            return SimpleNamespace(partitions=[0, 1])

        client = cast(Client, SimpleNamespace(topic=topic))
        if pool._progress is None:
            pool._progress = GroupProgress(
                pool._environment.clock, pool._spec, client, cast(AsyncConsumer, self)
            )
        await pool._look(pool._progress)


def test_positions_of_a_pool_that_sleeps_for_long_do_not_expire() -> None:
    async def play() -> None:
        handle, clock, watcher = PlayedHandle(WORKING), PlayedClock(), Watcher()
        pool = pool_with(handle, clock)
        for _ in range(6):
            await watcher.look(pool)
            clock.now_s += 300
        assert watcher.commits == [{place(0): 5, place(1): 5}] * 2
        await pool._hear_members(those_on_their_way=True)
        for _ in range(6):
            await watcher.look(pool)
            clock.now_s += 300
        assert len(watcher.commits) == 2  # A member keeps them.

    asyncio.run(play())


def test_a_look_that_missed_a_partition_is_not_counted_as_one() -> None:
    async def play() -> None:
        pool, watcher = pool_with(None, PlayedClock()), Watcher()
        await watcher.look(pool)
        assert pool.status().looks == 1 and pool.status().lag == 0
        watcher.offline.add(1)
        await watcher.look(pool)
        # The lag may be anything by now, so the pool must not take the topic for handled.
        assert pool.status().looks == 1 and "[1]" in (pool.status().problem or "")
        watcher.offline.clear()
        await watcher.look(pool)
        assert pool.status().looks == 2 and pool.status().problem is None

    asyncio.run(play())
