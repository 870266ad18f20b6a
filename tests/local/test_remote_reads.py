"""What a leader reads out of the object server's cache: exact, ahead of who goes on, and again where
the cache lost or damaged it. The object server is a fake one over files."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from rayq import messages
from rayq.actors.remote import reads
from rayq.actors.remote.reads import RemoteReads, cut_batches
from rayq.actors.remote.remote_log import RemoteLog
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.client.environment import system_environment
from rayq.config import KIB, MIB
from rayq.environment import Environment
from rayq.errors import (
    OffsetOutOfRangeError,
    RemoteDamagedError,
    RemoteMissingError,
    RemoteSlowError,
)
from rayq.messages.remote_pointer import RemotePointer
from rayq.storage.batch import split_batches
from rayq.storage.remote.data_object import Span
from rayq.storage.remote.manifest import Manifest, RemoteObject
from tests.stored_objects import PREFIX, log_of, object_of

BATCH_RECORDS, VALUE_BYTES = 10, 10 * KIB
BATCHES = 200
"""About 20 MiB in each of two objects."""


class FakeLog:
    def __init__(self, start: int, local_start: int) -> None:
        self.start_offset, self.local_start_offset = start, local_start


class FakeObjects:
    """An object server that keeps each object in a file of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = itertools.count()
        self.stored: dict[str, bytes] = {}
        self._files: dict[str, Path] = {}
        self.asked: list[messages.ReadObject] = []
        self.is_away = False

    async def ask(
        self, request: messages.Request[Any], payload: bytes = b"", *, timeout_s: float = 0.0
    ) -> tuple[Any, memoryview]:
        answer: messages.Response
        match request:
            case messages.ReadObject():
                self.asked.append(request)
                if self.is_away:
                    raise RemoteSlowError("it takes long")
                file = self.file_of(request.name)
                length = min(request.length, file.stat().st_size - request.position)
                answer = messages.ReadObjectResponse(str(file), request.position, length)
            case messages.DropCached():
                self._files.pop(request.name, None)
                answer = messages.Done()
            case messages.SignObjects():
                answer = messages.SignObjectsResponse([f"signed:{name}" for name in request.names])
            case _:
                raise AssertionError(request)
        return answer, memoryview(b"")

    def lose(self, name: str) -> None:
        self._files.pop(name).unlink()

    def damage(self, name: str) -> None:
        with self.file_of(name).open("r+b") as file:
            file.write(b"\xff" * 100)

    def file_of(self, name: str) -> Path:
        if name not in self._files:
            self._files[name] = self._directory / str(next(self._numbers))
            self._files[name].write_bytes(self.stored[name])
        return self._files[name]


class FakeRemoteLog:
    def __init__(self, objects: FakeObjects, manifest: Manifest) -> None:
        self.objects = objects
        self.pointer: RemotePointer | None = manifest.pointer("manifest")
        self.loaded: Callable[[], Awaitable[Manifest]] | None = None
        self._manifest = manifest

    async def manifest(self) -> Manifest:
        return self._manifest if self.loaded is None else await self.loaded()


class FakeReplicaLog:
    def __init__(self, environment: Environment, log: FakeLog) -> None:
        self.environment, self.log, self.where = environment, log, "t-0"


class Setting:
    """Two objects with the offsets from 1000 to 3000 and to 5000; the disk begins at 5000."""

    def __init__(self, directory: Path, batches: int = BATCHES) -> None:
        environment = system_environment()
        self.objects = FakeObjects(directory)
        self.rows: list[RemoteObject] = []
        self.data = b""
        start = 1000
        for aborted in ([(7, 1)], [(8, 2)]):
            row, data = object_of(
                environment,
                start,
                [BATCH_RECORDS] * batches,
                value_bytes=VALUE_BYTES,
                aborted=aborted,
            )
            self.rows.append(row)
            self.objects.stored[row.name] = data
            self.data += data[: row.data_bytes]
            start = row.end
        manifest = Manifest(
            cluster_id="0" * 32,
            topic="t",
            topic_id="1" * 32,
            partition=0,
            partitions=1,
            config={},
            replication_factor=1,
            prefix=PREFIX,
            log_start=1000,
            end=1000,
        ).appended(*self.rows)
        self.remote_log = FakeRemoteLog(self.objects, manifest)
        self.log = FakeLog(1000, start)
        self.reads = RemoteReads(
            cast(ReplicaLog, FakeReplicaLog(environment, self.log)),
            cast(RemoteLog, self.remote_log),
        )

    async def read(self, offset: int, bytes_max: int = MIB) -> tuple[bytes, int]:
        cached = await self.reads.bring(offset, bytes_max)
        return await self.reads.read(cached, offset, bytes_max)

    @property
    def aheads(self) -> list[int]:
        """How much was asked to be read ahead, of data."""
        return [
            request.read_ahead_bytes
            for request in self.objects.asked
            if request.position + request.length <= request.data_bytes
        ]


def run(directory: Path, work: Callable[[Setting], Awaitable[None]], **options: int) -> None:
    async def main() -> None:
        await work(Setting(directory, **options))

    asyncio.run(main())


def test_a_reader_gets_every_batch_in_order_across_objects(tmp_path: Path) -> None:
    async def work(at: Setting) -> None:
        offset, found, aborted = 1000, b"", []
        while offset < at.log.local_start_offset:
            cached = await at.reads.bring(offset, MIB)
            data, offset = await at.reads.read(cached, offset, MIB)
            assert len(data) <= MIB
            found += data
            aborted.append(cached.aborted)
        assert found == at.data
        assert offset == 5000
        assert (aborted[0], aborted[-1]) == ([(7, 1)], [(8, 2)])

    run(tmp_path, work)


def test_who_goes_on_is_read_ahead_of_and_who_jumps_is_not(tmp_path: Path) -> None:
    async def work(at: Setting) -> None:
        offset = 1000
        for _ in range(6):
            _, offset = await at.read(offset)
        await at.read(4000)
        assert at.aheads == [0, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 8 * MIB, 0]

    run(tmp_path, work)


def test_the_next_object_is_begun_before_the_reader_is_there(tmp_path: Path) -> None:
    async def work(at: Setting) -> None:
        offset = 1000
        while offset < 2500:
            _, offset = await at.read(offset)
        assert at.reads._next_read is not None
        await at.reads._next_read[1]
        assert any(
            request.name == at.rows[1].name and request.position == 0
            for request in at.objects.asked
        )

    run(tmp_path, work)


def test_a_small_answer_begins_with_the_batch_that_was_asked_for(tmp_path: Path) -> None:
    async def work(at: Setting) -> None:
        data, next_offset = await at.read(1234, bytes_max=1)
        ((_, header),) = split_batches(data)
        assert (header.base_offset, header.next_offset, next_offset) == (1230, 1240, 1240)

    run(tmp_path, work)


def test_a_file_that_left_the_cache_is_asked_for_again(tmp_path: Path) -> None:
    async def work(at: Setting) -> None:
        cached = await at.reads.bring(1000, MIB)
        at.objects.lose(cached.found.name)
        data, next_offset = await at.reads.read(cached, 1000, MIB)
        assert data == at.data[: len(data)]
        assert next_offset > 1000

    run(tmp_path, work)


def test_damage_in_the_cache_is_brought_again_and_damage_in_the_store_has_a_name(
    tmp_path: Path,
) -> None:
    async def work(at: Setting) -> None:
        name = at.rows[0].name
        whole, _ = await at.read(1000)
        at.objects.damage(name)
        assert (await at.read(1000))[0] == whole
        # Where a header is sound, its reader finds the damage, and tells of it.
        await at.reads.drop_cached(1000)
        at.objects.stored[name] = b"\xff" * 100 + at.objects.stored[name][100:]
        with pytest.raises(RemoteDamagedError, match=name):
            await at.read(1000)

    run(tmp_path, work, batches=30)


def test_a_store_that_is_away_is_told_and_the_read_can_be_repeated(tmp_path: Path) -> None:
    async def work(at: Setting) -> None:
        at.objects.is_away = True
        with pytest.raises(RemoteSlowError):
            await at.read(1000)
        at.objects.is_away = False
        assert (await at.read(1000))[0] == at.data[: len((await at.read(1000))[0])]

    run(tmp_path, work, batches=30)


def test_a_manifest_that_takes_long_is_loaded_behind_those_who_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "WAIT_S", 0.05)

    async def work(at: Setting) -> None:
        arrives = asyncio.Event()
        manifest = await at.remote_log.manifest()
        times = 0

        async def load() -> Manifest:
            nonlocal times
            times += 1
            await arrives.wait()
            return manifest

        at.remote_log.loaded = load
        for _ in range(2):
            with pytest.raises(RemoteSlowError):
                await at.read(1000)
        arrives.set()
        await at.read(1000)
        assert times <= 2, "those who waited began no second load"

    run(tmp_path, work, batches=30)


def test_a_reader_that_begins_as_a_load_ends_slows_no_reader_that_waited(tmp_path: Path) -> None:
    async def work(at: Setting) -> None:
        manifest = await at.remote_log.manifest()
        later: list[asyncio.Task[tuple[int, int] | None]] = []

        async def load() -> Manifest:
            if later:
                await asyncio.sleep(0)
            else:  # The other reader begins when this load has ended, before the first goes on.
                later.append(asyncio.create_task(at.reads.offset_for_time(0)))
            return manifest

        at.remote_log.loaded = load
        assert await at.reads.offset_for_time(0) == (1000, 2000)
        assert await later[0] == (1000, 2000)

    run(tmp_path, work, batches=30)


def test_what_the_manifest_does_not_list_is_missing_or_out_of_range(tmp_path: Path) -> None:
    async def work(at: Setting) -> None:
        at.log.local_start_offset = 9000
        with pytest.raises(RemoteMissingError, match="1000 to 1600"):
            await at.read(5000)
        at.log.start_offset = 8000
        with pytest.raises(OffsetOutOfRangeError, match="log start 8000"):
            await at.read(5000)

    run(tmp_path, work, batches=30)


@pytest.mark.parametrize(
    ("timestamp_ms", "log_start", "found"),
    [
        (0, 1000, (1000, 2000)),
        (2345, 1000, (1345, 2345)),
        (2345, 1400, (1400, 2400)),
        (2555, 1000, (1555, 2555)),
        (2600, 1000, None),
    ],
)
def test_a_time_is_found_where_its_record_is(
    tmp_path: Path, timestamp_ms: int, log_start: int, found: tuple[int, int] | None
) -> None:
    async def work(at: Setting) -> None:
        at.log.start_offset = log_start
        assert await at.reads.offset_for_time(timestamp_ms) == found

    run(tmp_path, work, batches=30)


def test_a_time_below_the_disk_is_not_looked_for_above_it(tmp_path: Path) -> None:
    async def work(at: Setting) -> None:
        at.log.local_start_offset = at.rows[1].start
        assert await at.reads.offset_for_time(at.rows[1].newest_timestamp_ms) is None

    run(tmp_path, work, batches=30)


def test_objects_of_a_range_are_named_from_the_one_with_its_start(tmp_path: Path) -> None:
    async def work(at: Setting) -> None:
        first, second = at.rows
        found = await at.reads.ranges(1100, 1500, ranges_max=10)
        assert [part.name for part in found] == [first.name, second.name]
        assert [part.url for part in found] == [None, None]
        signed = await at.reads.signed(found, 1000)
        assert [part.url for part in signed] == [f"signed:{row.name}" for row in at.rows]
        assert [(part.start_offset, part.end_offset) for part in found] == [
            (1000, 1300),
            (1300, 1600),
        ]
        (only,) = await at.reads.ranges(1300, 5000, ranges_max=1)
        assert (only.name, only.url) == (second.name, None)
        assert await at.reads.ranges(1600, 5000, ranges_max=10) == []
        sizes = [each.object_bytes for each in found]
        for bytes_max, count in ((0, 1), (sum(sizes) - 1, 1), (sum(sizes), 2)):
            some = await at.reads.ranges(1100, 1500, ranges_max=10, bytes_max=bytes_max)
            assert len(some) == count, "the first one always"
        assert await at.reads.append_time_ms(1599) == second.first_append_ms

    run(tmp_path, work, batches=30)


def test_a_cut_holds_whole_batches_from_the_offset_on() -> None:
    data = log_of(50, [5] * 20)
    batches = list(split_batches(data))
    span = Span(50, 150, 0, len(data))
    for offset, bytes_max in itertools.product(range(50, 150, 7), (1, 700, 1500, 10**9)):
        cut, next_offset = cut_batches(data, span, offset, bytes_max)
        headers = [header for _, header in split_batches(cut)]
        assert headers[0].base_offset <= offset < headers[0].next_offset
        assert headers[-1].next_offset == next_offset
        assert len(cut) <= bytes_max or len(headers) == 1
        follows = [batch for _, batch in batches if batch.base_offset == next_offset]
        assert not follows or len(cut) + follows[0].length > bytes_max
