"""Consumers without groups: `AsyncConsumer` on the caller's event loop, `Consumer` for a thread.

Fetching runs ahead on the client's loop; records are decoded by the thread that polls.
"""

from __future__ import annotations

import asyncio
import builtins
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from rayq.client.arrow import load_pyarrow, table_of
from rayq.client.background import BackgroundLoop
from rayq.client.client import Client
from rayq.client.consumer_core import ConsumerCore
from rayq.config import ConsumerConfig
from rayq.records import Record, TopicPartition
from rayq.wire.messages import EARLIEST, LATEST

T = TypeVar("T")

ARROW_RECORDS_MAX = 100_000
"""Default of `poll_arrow(max_records=...)`."""


class AsyncConsumer:
    """Consumes on the running event loop; made by `cluster.async_consumer(*topics, **config)`. The
    methods of `Consumer`, as coroutines."""

    def __init__(
        self,
        client: Client,
        config: ConsumerConfig,
        topics: tuple[str, ...] = (),
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self._core = ConsumerCore(client, config, on_close)
        self._topics = topics
        self._starting = asyncio.Lock()
        self._news = asyncio.Event()
        self._core.fetcher.add_listener(self._news.set)

    async def _start(self) -> ConsumerCore:
        """Subscribes to the topics it was made with, before anything else is done."""
        if self._topics:
            async with self._starting:
                if self._topics:
                    await self._core.subscribe(self._topics)
                    self._topics = ()
        self._core.check_open()
        return self._core

    async def subscribe(self, topics: Iterable[str]) -> None:
        self._topics = ()
        await self._core.subscribe(topics)

    async def assign(self, partitions: Iterable[TopicPartition]) -> None:
        self._topics = ()
        await self._core.assign_by_hand(partitions)

    async def assignment(self) -> set[TopicPartition]:
        core = await self._start()
        core.look_for_new_partitions()
        return set(core.subscription.assigned)

    async def _wait(self, take: Callable[[], T], timeout_s: float) -> T:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            self._news.clear()
            if taken := take():
                return taken
            left_s = deadline - loop.time()
            if left_s <= 0:
                return taken
            try:
                async with asyncio.timeout(left_s):
                    await self._news.wait()
            except builtins.TimeoutError:
                return take()

    async def poll(self, timeout_s: float = 1.0, max_records: int | None = None) -> list[Record]:
        core = await self._start()
        records_max = core.records_max(max_records)
        return await self._wait(lambda: core.take_records(records_max), timeout_s)

    async def poll_arrow(self, timeout_s: float = 1.0, max_records: int = ARROW_RECORDS_MAX) -> Any:
        load_pyarrow()
        core = await self._start()
        records_max = core.records_max(max_records)
        table = await self._wait(lambda: core.take_table(records_max), timeout_s)
        return table_of([], []) if table is None else table

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Record:
        core = await self._start()
        while not core.ahead:
            core.ahead.extend(await self.poll())
        return core.ahead.popleft()

    async def seek(self, partition: TopicPartition, offset: int) -> None:
        (await self._start()).seek(partition, offset)

    async def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        (await self._start()).seek_to(partitions, EARLIEST)

    async def seek_to_end(self, *partitions: TopicPartition) -> None:
        core = await self._start()
        await core.resolved(core.seek_to(partitions, LATEST))

    async def position(self, partition: TopicPartition) -> int:
        return await (await self._start()).position(partition)

    async def commit(self, offsets: Mapping[TopicPartition, int] | None = None) -> None:
        raise (await self._start()).refuse_commit()

    async def committed(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, int | None]:
        raise (await self._start()).refuse_commit()

    async def pause(self, *partitions: TopicPartition) -> None:
        (await self._start()).set_paused(partitions, True)

    async def resume(self, *partitions: TopicPartition) -> None:
        (await self._start()).set_paused(partitions, False)

    async def lag(self) -> dict[TopicPartition, int]:
        return await (await self._start()).lag()

    async def beginning_offsets(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, int]:
        return await self._core.beginning_offsets(partitions)

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return await self._core.end_offsets(partitions)

    async def offsets_for_times(
        self, times: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int | None]:
        return await self._core.offsets(times, by_time=True)

    async def close(self, timeout_s: float | None = None) -> None:
        self._core.close()

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        await self.close()


class Consumer:
    """Consumes in one thread at a time; made by `cluster.consumer(*topics, **config)`.

    Without a group it reads every partition of its topics (or those of `assign`), and keeps its
    positions itself. Iterating yields records for ever.
    """

    def __init__(self, core: ConsumerCore, background: BackgroundLoop) -> None:
        self.config = core.config
        self._core = core
        self._background = background
        self._news = threading.Event()
        core.fetcher.add_listener(self._news.set)
        background.on_fork(self._forked)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._background.run(work)

    def subscribe(self, topics: Iterable[str]) -> None:
        """Reads all partitions of these topics instead of what was read before, also partitions
        that are added later (from their beginning). Raises UnknownTopicError."""
        self._run(self._core.subscribe(topics))

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Reads exactly these partitions; those that were read before keep their position. Raises
        UnknownTopicError, InvalidRequestError (no such partition)."""
        self._run(self._core.assign_by_hand(list(partitions)))

    def assignment(self) -> set[TopicPartition]:
        """The partitions that are read now."""
        self._core.check_open()
        self._core.look_for_new_partitions()
        return set(self._core.subscription.assigned)

    def _wait(self, take: Callable[[], T], timeout_s: float) -> T:
        now = self._core.client.env.clock.monotonic
        deadline = now() + timeout_s
        while True:
            self._news.clear()
            if taken := take():
                return taken
            left_s = deadline - now()
            if left_s <= 0 or not self._news.wait(left_s):
                return taken

    def poll(self, timeout_s: float = 1.0, max_records: int | None = None) -> list[Record]:
        """The next records, as soon as there is one; [] after `timeout_s` seconds without any.

        At most `max_records` (default `max_poll_records`). Raises OffsetOutOfRangeError (a position
        below the log start, or none at all, and auto_offset_reset is "none"), LogTruncatedError
        (records read before are gone: seek to go on), UnknownTopicError (the topic was deleted),
        CorruptBatchError (the leader keeps sending damaged bytes), ClosedError; the partition stays
        where it is.
        """
        records_max = self._core.records_max(max_records)
        return self._wait(lambda: self._core.take_records(records_max), timeout_s)

    def poll_arrow(self, timeout_s: float = 1.0, max_records: int = ARROW_RECORDS_MAX) -> Any:
        """As `poll`, as a `pyarrow.Table` of the columns topic (dictionary), partition (int32),
        offset (int64), timestamp (milliseconds, UTC), key, value (binary), headers (list of name
        and value). Raises MissingExtraError without pyarrow."""
        load_pyarrow()
        records_max = self._core.records_max(max_records)
        table = self._wait(lambda: self._core.take_table(records_max), timeout_s)
        return table_of([], []) if table is None else table

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Record:
        """Waits for the next record, for ever. `position` counts only what was yielded."""
        ahead = self._core.ahead
        while not ahead:
            ahead.extend(self.poll())
        return ahead.popleft()

    def seek(self, partition: TopicPartition, offset: int) -> None:
        """The next poll of the partition begins at `offset`. Raises InvalidRequestError."""
        self._core.seek(partition, offset)

    def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        """To the log start; of all partitions when none are given."""
        self._core.seek_to(partitions, EARLIEST)

    def seek_to_end(self, *partitions: TopicPartition) -> None:
        """To the end as it is now; of all partitions when none are given."""
        self._run(self._core.resolved(self._core.seek_to(partitions, LATEST)))

    def position(self, partition: TopicPartition) -> int:
        """The offset of the next record. Raises InvalidRequestError (not assigned),
        OffsetOutOfRangeError (there is none, and auto_offset_reset is "none"), TimeoutError."""
        return self._run(self._core.position(partition))

    def commit(self, offsets: Mapping[TopicPartition, int] | None = None) -> None:
        """Needs a group: raises InvalidRequestError."""
        raise self._core.refuse_commit()

    def committed(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int | None]:
        """Needs a group: raises InvalidRequestError."""
        raise self._core.refuse_commit()

    def pause(self, *partitions: TopicPartition) -> None:
        """Polls return nothing of these until `resume`; what was fetched already is kept."""
        self._core.set_paused(partitions, True)

    def resume(self, *partitions: TopicPartition) -> None:
        self._core.set_paused(partitions, False)

    def lag(self) -> dict[TopicPartition, int]:
        """How many offsets each assigned partition is behind its end."""
        return self._run(self._core.lag())

    def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The log start of each."""
        return self._run(self._core.beginning_offsets(list(partitions)))

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The offset after the last record that may be read (the high watermark) of each."""
        return self._run(self._core.end_offsets(list(partitions)))

    def offsets_for_times(
        self, times: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int | None]:
        """The first offset whose record is at or after a time (Unix, milliseconds); None where no
        record is so late."""
        return self._run(self._core.offsets(dict(times), by_time=True))

    def close(self, timeout_s: float | None = None) -> None:
        """Stops fetching. Idempotent. Without a group there is nothing to wait for."""
        if not self._core.is_closed:
            self._run(self._close())

    async def _close(self) -> None:
        self._core.close()

    def _forked(self) -> None:
        self._core.is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()
