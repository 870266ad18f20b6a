"""Batch jobs that read objects by their URLs: exact, within their memory, and through the leader
where anything is wrong."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from rayq import TopicPartition
from rayq.batch import direct_reads
from rayq.batch.direct_reads import FAILURES_MAX, DirectReads
from rayq.batch.job_partition import JobPartition
from rayq.client.client import Client
from rayq.client.environment import system_environment
from rayq.config import KIB, MIB
from rayq.environment import ObjectBytes
from rayq.errors import (
    RayqError,
    RemoteDeniedError,
    RemoteMissingError,
    RemoteStorageError,
    TimeoutError,
)
from rayq.messages import RemoteRange
from rayq.storage.batch import decode_columns
from tests.stored_objects import object_of

BATCHES = [10] * 150
"""About 1.5 MiB in each of two objects: offsets 100 to 1600, and to 3100."""


class Bytes:
    def __init__(self, store: Store, data: bytes) -> None:
        self._store, self._data, self._at = store, data, 0
        store.open += 1

    def read(self, length: int) -> bytes:
        if self._store.breaks_after is not None and self._at >= self._store.breaks_after:
            raise RemoteStorageError("it broke off")
        piece = self._data[self._at : self._at + min(length, self._store.piece_bytes)]
        self._at += len(piece)
        return piece

    def close(self) -> None:
        self._store.open -= 1


class Store:
    """The leader's answers, and the object store behind its URLs."""

    def __init__(self) -> None:
        environment = system_environment()
        self.client = SimpleNamespace(
            environment=replace(environment, open_object=self._open)
        )
        self.objects: dict[str, bytes] = {}
        self.ranges: list[RemoteRange] = []
        self.piece_bytes = 10**9
        self.open = self.opened = self.asked = 0
        self.breaks_after: int | None = None
        self.error: RayqError | None = None
        self.leader_error: RayqError | None = None
        start = 100
        for aborted in ([], [(5, 1)]):
            row, data = object_of(
                environment, start, BATCHES, value_bytes=KIB, aborted=aborted
            )
            self.objects[row.name] = data
            self.ranges.append(
                RemoteRange(row.name, start, row.end, row.data_bytes, row.object_bytes, row.name)
            )
            start = row.end

    async def objects_of(self, start: int, end: int, **_: Any) -> list[RemoteRange]:
        self.asked += 1
        if self.leader_error is not None:
            raise self.leader_error
        if not any(part.start_offset <= start < part.end_offset for part in self.ranges):
            return []
        return [part for part in self.ranges if part.end_offset > start and part.start_offset < end]

    def _open(self, url: str, position: int, length: int) -> ObjectBytes:
        self.opened += 1
        if self.error is not None:
            raise self.error
        return Bytes(self, self.objects[url][position : position + length])

    def reads(self, end: int = 3100) -> DirectReads:
        partition = JobPartition(
            cast(Client, self.client), TopicPartition("t", 0), "1" * 32, timeout_s=60.0
        )
        found = DirectReads(partition, end)
        found._partition = cast(JobPartition, SimpleNamespace(objects=self.objects_of))
        return found


async def offsets_of(reads: DirectReads, start: int, end: int, bytes_max: int = MIB) -> list[int]:
    """The offsets that come directly, from `start` on."""
    found: list[int] = []
    at = start
    while at < end and (fetched := await reads.next(at, bytes_max)) is not None:
        assert fetched.batches[0][1].next_offset > at
        for position, header in fetched.batches:
            columns = decode_columns(fetched.payload, position, header, check_crc=True)
            found += [offset for offset in columns.offsets if at <= offset < end]
        at = fetched.next_offset
    if at >= end:
        reads.stop()
    return found


def run(work: Callable[[Store], Awaitable[None]]) -> None:
    async def main() -> None:
        store = Store()
        await work(store)
        async with asyncio.timeout(10):
            while store.open:  # noqa: ASYNC110 - what a thread reads is closed behind it
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_where_the_leader_gives_no_urls_it_is_asked_for_the_records(
    caplog: pytest.LogCaptureFixture
) -> None:
    async def work(store: Store) -> None:
        store.ranges = [msgspec.structs.replace(found, url=None) for found in store.ranges]
        assert await offsets_of(store.reads(), 100, 3100) == []
        assert store.asked == 1 and store.opened == 0 and not caplog.records

    run(work)


@pytest.mark.parametrize("piece_bytes", [50_000, 10**9])
@pytest.mark.parametrize(("start", "end"), [(100, 3100), (777, 2222), (1599, 1601), (1600, 1700)])
def test_a_range_is_read_whole_from_within_objects(
    start: int, end: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_reads, "DIRECT_BYTES_MIN", 0)

    async def work(store: Store) -> None:
        store.piece_bytes = piece_bytes
        assert await offsets_of(store.reads(end), start, end, 200_000) == list(range(start, end))

    run(work)


def test_a_batch_that_is_larger_than_the_room_is_read_all_the_same() -> None:
    async def work(store: Store) -> None:
        reads = store.reads()
        fetched = await reads.next(100, 1)
        reads.stop()
        assert fetched is not None
        assert [header.base_offset for _, header in fetched.batches] == [100]
        assert (fetched.next_offset, fetched.aborted) == (110, frozenset())
        later = await store.reads().next(3000, MIB)
        assert later is None, "little is left there: the leader has it sooner"

    run(work)


def test_aborted_transactions_come_with_their_object() -> None:
    async def work(store: Store) -> None:
        reads = store.reads()
        fetched = await reads.next(1600, MIB)
        assert fetched is not None
        assert fetched.aborted == {(5, 1)}
        reads.stop()

    run(work)


def test_where_the_objects_end_the_leader_is_asked() -> None:
    async def work(store: Store) -> None:
        reads = store.reads(9999)
        assert await offsets_of(reads, 100, 9999) == list(range(100, 3100))
        assert await reads.next(3100, MIB) is None
        assert store.asked == 2

    run(work)


@pytest.mark.parametrize(
    "error",
    [RemoteDeniedError("403"), RemoteMissingError("404"), RemoteStorageError("no route")],
)
def test_what_cannot_be_read_here_is_asked_for_once_more_and_then_of_the_leader(
    error: RayqError, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(store: Store) -> None:
        store.error = error
        reads = store.reads()
        with caplog.at_level(logging.WARNING):
            assert await reads.next(100, MIB) is None
        assert (store.asked, store.opened) == (FAILURES_MAX, FAILURES_MAX)
        assert [record.getMessage().count(str(error)) for record in caplog.records] == [1]
        assert await reads.next(100, MIB) is None
        assert store.asked == FAILURES_MAX, "it does not try forever"

    run(work)


def test_a_store_that_breaks_off_loses_and_repeats_nothing() -> None:
    async def work(store: Store) -> None:
        store.breaks_after = 300_000
        store.piece_bytes = 100_000
        found = await offsets_of(store.reads(), 100, 3100, 100_000)
        assert found == list(range(100, 3100)), "each break comes after some batches"
        assert store.asked > 5

    run(work)


def test_damaged_and_exchanged_objects_are_not_read() -> None:
    async def work(store: Store) -> None:
        first, second = store.ranges
        whole = store.objects[first.name]
        wrong: list[bytes] = [
            whole[:50_000] + b"\xff" * 40_000 + whole[90_000:],
            whole[:-100] + b"\xff" * 100,
            whole[: -len(whole) // 2],
            store.objects[second.name],
        ]
        for data in wrong:
            store.objects[first.name] = data
            found = await offsets_of(store.reads(), 100, 3100)
            assert found == list(range(100, 100 + len(found)))
            assert len(found) < 1500

    run(work)


def test_a_leader_that_does_not_tell_is_asked_for_the_records() -> None:
    async def work(store: Store) -> None:
        store.leader_error = TimeoutError("no leader")
        assert await store.reads().next(100, MIB) is None

    run(work)


def test_a_reader_that_stops_leaves_nothing_open() -> None:
    async def work(store: Store) -> None:
        reads = store.reads()
        assert await reads.next(100, 100_000) is not None
        assert store.open == 1
        waiting = asyncio.ensure_future(reads.next(1600, 100_000))
        await asyncio.sleep(0)
        waiting.cancel()
        reads.stop()

    run(work)
