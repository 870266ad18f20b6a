"""`AsyncConsumer`, a consumer on the caller's event loop.

Fetching and the heartbeats of a group's member run ahead on the same loop. The task that polls
decodes records, and takes and gives up partitions.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from rayq.client.arguments import as_partitions, by_partition
from rayq.client.callbacks import call_callback, finish_callback
from rayq.client.client import Client
from rayq.client.consuming import polling
from rayq.client.consuming.arrow import ARROW_RECORDS_MAX, load_pyarrow, table_of
from rayq.client.consuming.consumer_core import ConsumerCore
from rayq.client.consuming.group_consumer import (
    Call,
    Callback,
    Callbacks,
    Offsets,
    Step,
    WaitForNews,
)
from rayq.client.consuming.one_thread import concurrent_use_error
from rayq.client.consuming.until_end import UNTIL_END_TIMEOUT_S, UntilEnd
from rayq.client.group_positions import GroupPositions
from rayq.client.timeouts import takes_timeout
from rayq.client.user_objects import no_pickle_error
from rayq.config import ConsumerConfig
from rayq.messages import EARLIEST, LATEST
from rayq.records import (
    GroupMembership,
    KeyT_co,
    OffsetAndMetadata,
    OfValueAndKey,
    Record,
    TopicPartition,
    ValueT_co,
)

T = TypeVar("T")


class AsyncConsumer(OfValueAndKey, Generic[ValueT_co, KeyT_co]):
    """A consumer on the running event loop, made by `cluster.async_consumer(*topics, **config)`.
    Each method does the same as the method of `Consumer` with that name, as a coroutine
    (`until_end` returns an async iterator); callbacks may be coroutine functions."""

    def __init__(
        self,
        client: Client,
        config: ConsumerConfig,
        topics: tuple[str, ...] = (),
        on_close: Callable[[], None] = lambda: None,
        *,
        group: str | None = None,
        pattern: str | re.Pattern[str] | None = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        callbacks = callbacks or Callbacks()
        callbacks.check(is_awaited=True)
        self.config = config
        self._core = ConsumerCore(client, config, on_close, group)
        self._topics = topics
        self._pattern = pattern
        self._callbacks = callbacks
        self._core.check_callbacks(self._callbacks)
        self._starting = asyncio.Lock()
        self._is_polling = False
        self._news = asyncio.Event()
        self._core.fetcher.add_listener(self._news.set)

    def __repr__(self) -> str:
        return f"<AsyncConsumer {self._core.describe(self._topics, self._pattern)}>"

    @property
    def core(self) -> ConsumerCore:
        """The core that the cluster watches, so that a dropped consumer leaves its group."""
        return self._core

    async def _start(self) -> ConsumerCore:
        """Subscribes to the topics that the consumer was made with, before anything else is
        done."""
        if self._topics or self._pattern is not None:
            async with self._starting:
                if self._topics or self._pattern is not None:
                    await self._core.subscribe(self._topics, self._pattern)
                    self._topics, self._pattern = (), None
        self._core.check_open()
        return self._core

    async def subscribe(
        self,
        topics: str | Iterable[str] = (),
        *,
        pattern: str | re.Pattern[str] | None = None,
        on_assigned: Callback | None = None,
        on_revoked: Callback | None = None,
        on_lost: Callback | None = None,
    ) -> None:
        callbacks = Callbacks(on_assigned, on_revoked, on_lost)
        callbacks.check(is_awaited=True)
        self._core.check_callbacks(callbacks)
        self._callbacks = callbacks.or_those_of(self._callbacks)
        self._topics, self._pattern = (), None
        await self._core.subscribe(topics, pattern)

    async def assign(self, partitions: Iterable[TopicPartition]) -> None:
        wanted = as_partitions(partitions)
        self._core.check_open()
        self._topics, self._pattern = (), None
        if self._core.group is not None:
            await self._carry_out(self._core.group.give_up_steps())
        await self._core.assign_by_hand(wanted)

    async def assignment(self) -> set[TopicPartition]:
        core = await self._start()
        core.look_for_new_partitions()
        return set(core.subscription.assigned)

    async def group_membership(self) -> GroupMembership:
        return (await self._start()).committing_group().membership()

    async def _carry_out(self, steps: Generator[Step, None, T]) -> T:
        with contextlib.closing(steps):
            while True:
                try:
                    step = next(steps)
                except StopIteration as end:
                    result: T = end.value
                    return result
                if isinstance(step, Call):
                    callback = getattr(self._callbacks, step.callback)
                    if callback is not None:
                        result = call_callback(step.callback, callback, step.partitions)
                        await finish_callback(step.callback, result)
                elif isinstance(step, WaitForNews):
                    with contextlib.suppress(builtins.TimeoutError):
                        async with asyncio.timeout(step.timeout_s):
                            await self._news.wait()
                    self._news.clear()
                else:
                    await step

    async def _poll(self, core: ConsumerCore, steps: Generator[Step, None, T]) -> T:
        """Carries out the steps of a poll; only one poll may run at a time."""
        if self._is_polling:
            steps.close()
            if core.group is not None:
                core.group.check_may_poll()
            raise concurrent_use_error("task")
        self._is_polling = True
        try:
            return await self._carry_out(steps)
        finally:
            self._is_polling = False

    @takes_timeout
    async def poll(
        self, timeout_s: float = 1.0, max_records: int | None = None
    ) -> list[Record[ValueT_co, KeyT_co]]:
        core = await self._start()
        await asyncio.sleep(0)  # lets other tasks run between polls in a loop, also with timeout 0
        records_max = core.records_max(max_records)
        return await self._poll(
            core, polling.poll(core, lambda: core.take_records(records_max), timeout_s)
        )

    @takes_timeout
    async def poll_arrow(self, timeout_s: float = 1.0, max_records: int = ARROW_RECORDS_MAX) -> Any:
        load_pyarrow()
        core = await self._start()
        await asyncio.sleep(0)
        records_max = core.records_max(max_records)
        table = await self._poll(
            core, polling.poll(core, lambda: core.take_table(records_max), timeout_s)
        )
        return table_of([], []) if table is None else table

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Record[ValueT_co, KeyT_co]:
        record = await self._next(await self._start(), None)
        assert record is not None, "without an end there is a next one"
        return record

    @takes_timeout
    def until_end(
        self, timeout_s: float = UNTIL_END_TIMEOUT_S
    ) -> AsyncIterator[Record[ValueT_co, KeyT_co]]:
        return self._until_end(timeout_s)

    async def _until_end(self, timeout_s: float) -> AsyncIterator[Record[ValueT_co, KeyT_co]]:
        core = await self._start()
        until = UntilEnd(core, timeout_s)
        while (record := await self._next(core, until)) is not None:
            yield record

    @takes_timeout
    async def begin_until_end(self, timeout_s: float = UNTIL_END_TIMEOUT_S) -> UntilEnd:
        return UntilEnd(await self._start(), timeout_s)

    async def poll_until(
        self, until: UntilEnd, max_records: int | None = None
    ) -> list[Record[ValueT_co, KeyT_co]]:
        core = await self._start()
        await asyncio.sleep(0)
        records_max = core.records_max(max_records)
        return await self._poll(core, polling.poll_until(core, until, records_max))

    async def _next(
        self, core: ConsumerCore, until: UntilEnd | None
    ) -> Record[ValueT_co, KeyT_co] | None:
        if not core.is_ahead(until):
            await asyncio.sleep(0)
            if not await self._poll(core, polling.fill_ahead(core, until)):
                return None
        try:
            return core.ahead.popleft()
        except IndexError:
            raise concurrent_use_error("task") from None

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        (await self._start()).seek(partition, offset)

    async def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        (await self._start()).seek_to(partitions, EARLIEST)

    async def seek_to_end(self, *partitions: TopicPartition) -> None:
        core = await self._start()
        await core.resolved(core.seek_to(partitions, LATEST))

    async def seek_to_last(self, count: int, *partitions: TopicPartition) -> None:
        await (await self._start()).seek_to_last(count, partitions)

    async def position(self, partition: TopicPartition) -> int:
        return await (await self._start()).position(partition)

    async def commit(self, offsets: Offsets | None = None) -> None:
        group = (await self._start()).committing_group()
        await group.commit(*group.wanted(offsets))

    async def commit_async(self, offsets: Offsets | None = None) -> asyncio.Future[None]:
        group = (await self._start()).committing_group()
        commit = asyncio.ensure_future(group.commit(*group.wanted(offsets)))
        await asyncio.sleep(0)  # Starts it, so that `close` waits for it.
        return commit

    async def positions_to_send(self, offsets: Offsets | None = None) -> GroupPositions:
        """Does the same as `Consumer.positions_to_send`, for the given offsets if there are any."""
        return (await self._start()).committing_group().positions_to_send(offsets)

    async def mark_positions(self) -> object:
        return (await self._start()).committing_group().mark()

    async def go_back(self, mark: Any, *, is_aborted: bool) -> None:
        if not self._core.is_closed:
            self._core.committing_group().go_back(mark, is_aborted=is_aborted)

    async def committed(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, int | None]:
        found = await self.committed_with_metadata(partitions)
        return {
            partition: None if commit is None else commit.offset
            for partition, commit in found.items()
        }

    async def committed_with_metadata(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata | None]:
        wanted = as_partitions(partitions)
        return await (await self._start()).committing_group().committed(wanted)

    async def pause(self, *partitions: TopicPartition) -> None:
        (await self._start()).set_paused(partitions, True)

    async def resume(self, *partitions: TopicPartition) -> None:
        (await self._start()).set_paused(partitions, False)

    async def lag(self) -> dict[TopicPartition, int]:
        return await (await self._start()).lag()

    async def beginning_offsets(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, int]:
        return await self._core.beginning_offsets(as_partitions(partitions))

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return await self._core.end_offsets(as_partitions(partitions))

    async def offsets_for_times(
        self, times: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int | None]:
        return await self._core.offsets(by_partition(times, "a time"), by_time=True)

    @takes_timeout
    async def close(self, timeout_s: float | None = None) -> None:
        await self._close(timeout_s, may_commit=True)

    async def _close(self, timeout_s: float | None, *, may_commit: bool) -> None:
        core = self._core
        if core.is_closed:
            return
        try:
            if core.group is not None:
                steps = core.group.give_up_steps(may_commit=may_commit, timeout_s=timeout_s)
                await self._carry_out(steps)
        finally:
            await core.leave(timeout_s)

    def __reduce__(self) -> str:
        raise no_pickle_error(self, "a consumer")

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        await self._close(None, may_commit=kind is None)
