"""The object server alone: what it stores, how it reads through its cache, what it tells."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from proving.simulation import World
from rayq import messages
from rayq.actors.hosting import ObjectServerSpec
from rayq.actors.objects import object_cache, object_server
from rayq.actors.objects.folder_claims import CLAIM_S
from rayq.actors.objects.object_server import PROBE_AGAIN_S_MAX, ObjectServer
from rayq.config import ClusterConfig
from rayq.environment import ObjectMeta
from rayq.errors import (
    CorruptBatchError,
    InvalidRequestError,
    ProtocolError,
    RemoteDamagedError,
    RemoteDeniedError,
    RemoteListError,
    RemoteMissingError,
    RemoteSlowError,
    RemoteStorageError,
    StaleBrokerError,
    StorageError,
)
from rayq.messages.remote_names import (
    ObjectKind,
    RemoteName,
    new_name,
    owner_mark,
    owners_prefix,
    partition_prefix,
    takeover_mark,
)
from rayq.runtime.local_runtime import wait_until
from rayq.storage import checked_file
from rayq.storage.batch import encode_batch, stamp
from rayq.storage.data_directory import ENDPOINT, format_directory
from rayq.storage.remote import data_object
from rayq.storage.remote.data_object import read_footer
from rayq.wire.authentication import Identity
from rayq.wire.pool import ConnectionPool
from rayq.wire.server import Server
from tests.simulated.memory_store import MemoryStore, flipped, raises, short

CLUSTER_ID, TOPIC_ID = "c" * 32, "d" * 32
PREFIX = partition_prefix(CLUSTER_ID, TOPIC_ID, 0)
OWNERS = owners_prefix(CLUSTER_ID)
OTHER_ID = "a" * 32
DATA_PATH = "/data/broker-1"
SEGMENT = f"{DATA_PATH}/t-0/00000000000000000000.log"
SECRET = b"s" * 32
PART = 1000
"""Bytes for each CRC in these tests."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_object, "CRC_BYTES", PART)
    monkeypatch.setattr(data_object, "PLACE_BYTES", PART)
    monkeypatch.setattr(object_cache, "GET_BYTES_MAX", 4 * PART)


class Node:
    """A node with an object server, and a broker that a test plays."""

    def __init__(self, **config: Any) -> None:
        self.world = World(1)
        self.host = self.world.host()
        self.store = MemoryStore()
        self.config = ClusterConfig(remote_storage_url="s3://simulated", **config)
        self.client = self.host.process("replica")
        self.attached: list[messages.AttachObjectServer] = []
        self.wants = True
        environment = self.client.environment
        self.disk = environment.disk
        format_directory(
            environment, DATA_PATH, cluster_id=CLUSTER_ID, broker=1, secret=SECRET
        )
        self.identity = Identity(role="server", key=SECRET, cluster_id=CLUSTER_ID, broker=1)
        self.broker = Server(environment, self.identity, self._broker_answers, self.config)
        self.pool = ConnectionPool(environment, self.identity, self.config)
        self.started = 0

    def _broker_answers(self, peer: object, request: Any, payload: memoryview) -> Any:
        assert isinstance(request, messages.AttachObjectServer)
        if not self.wants:
            raise StaleBrokerError("not wanted")
        self.attached.append(request)
        return messages.Done()

    def start(self) -> asyncio.Task[None]:
        """Starts the object server's process."""
        self.started += 1
        process = self.host.process(f"objects {self.started}")
        spec = ObjectServerSpec("test", 1, f"incarnation-{self.started}", DATA_PATH)
        self.process = process
        server = self.server = process.call(
            lambda: ObjectServer(
                process.environment,
                self.config,
                spec,
                self.store,
                host=self.host.address,
                pid_start_time=7,
            )
        )
        return process.start(server.run())

    async def until_attached(self, *, works: bool = True) -> None:
        def is_told() -> bool:
            return bool(self.attached) and (self.attached[-1].trouble is None) == works

        await wait_until(is_told, 200, "the object server's word")

    async def ask(self, request: Any, payload: bytes = b"") -> Any:
        at = self.attached[-1]
        answer, content = await self.pool.request(
            at.host, at.port, request, payload, timeout_s=300
        )
        return (answer, bytes(content)) if content else answer

    def run(self, script: Coroutine[Any, Any, None], *, starts: bool = True) -> None:
        async def work() -> None:
            await self.broker.start(self.host.address, 0)
            endpoint = f"{self.broker.host} {self.broker.port}\n".encode()
            checked_file.replace(self.disk, f"{DATA_PATH}/{ENDPOINT}", endpoint)
            if starts:
                self.start()
                await self.until_attached()
            await script

        with self.world:
            self.world.run(self.client.run(work()), limit_s=3600)

    # --- records ----------------------------------------------------------------------------------

    def write_segment(self, sizes: list[int], *, start: int = 0) -> bytes:
        """A segment file with batches of one record."""
        rng = random.Random(3)
        data = bytearray()
        for number, size in enumerate(sizes):
            batch = encode_batch([rng.randbytes(size)], timestamps_ms=9, compression="none")
            stamp(batch, 0, base_offset=start + number, leader_epoch=2, append_time_ms=9)
            data += batch
        checked_file.make_directory(self.disk, f"{DATA_PATH}/t-0")
        checked_file.replace(self.disk, SEGMENT, bytes(data))
        return bytes(data)

    def store_request(self, data: bytes, end: int, **changes: Any) -> messages.StoreRecords:
        fields: dict[str, Any] = {
            "name": new_name(self.client.environment.random, PREFIX, ObjectKind.DATA, 0, 2),
            "start": 0,
            "end": end,
            "ranges": [messages.LocalRange(SEGMENT, 0, len(data))],
            "aborted": [],
        }
        return messages.StoreRecords(**fields | changes)

    async def stored(self, sizes: list[int]) -> tuple[str, bytes, messages.StoreRecordsResponse]:
        """An object in the store: its name and bytes, and what was said of it."""
        data = self.write_segment(sizes)
        request = self.store_request(data, len(sizes))
        answer = await self.ask(request)
        return request.name, self.store.objects[request.name], answer

    async def read(
        self, name: str, content: bytes, position: int, length: int, **changes: Any
    ) -> bytes:
        """What a replica reads of an object, by the way of the cache's file."""
        answer = await self.ask(self.read_request(name, content, position, length, **changes))
        file = self.disk.open(answer.path, writable=False)
        found = file.pread(answer.length, answer.position)
        file.close()
        return found

    def read_request(
        self, name: str, content: bytes, position: int, length: int, **changes: Any
    ) -> messages.ReadObject:
        footer_length = int.from_bytes(content[-16:-12], "little") + 16
        fields: dict[str, Any] = {
            "name": name,
            "object_bytes": len(content),
            "data_bytes": len(content) - footer_length,
            "position": position,
            "length": length,
            "read_ahead_bytes": 0,
            "wait_ms": 5000,
        }
        return messages.ReadObject(**fields | changes)

    def cache_files(self) -> list[str]:
        above = f"{DATA_PATH}/{object_cache.DIRECTORY}"
        return [
            f"{name}/{file}"
            for name in self.disk.list(above)
            for file in self.disk.list(f"{above}/{name}")
        ]


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    assert made.world.errors == []


# --- storing --------------------------------------------------------------------------------------


def test_records_are_stored_as_they_are_in_the_log(node: Node) -> None:
    async def script() -> None:
        data = node.write_segment([500] * 9)
        half = len(data) // 9 * 4
        request = node.store_request(
            data,
            9,
            aborted=[(5, 1)],
            ranges=[
                messages.LocalRange(SEGMENT, 0, half),
                messages.LocalRange(SEGMENT, half, len(data) - half),
            ],
        )
        answer = await node.ask(request)
        content = node.store.objects[request.name]
        assert content[: answer.data_bytes] == data
        assert (answer.object_bytes, answer.end_epoch) == (len(content), 2)
        footer = read_footer(content[answer.data_bytes :], request.name)
        assert (footer.topic_id, footer.start, footer.end) == (TOPIC_ID, 0, 9)
        assert footer.aborted == [(5, 1)]

    node.run(script())


def test_what_is_damaged_on_this_disk_is_not_stored(node: Node) -> None:
    async def script() -> None:
        data = node.write_segment([500] * 9)
        checked_file.replace(node.disk, SEGMENT, flipped(data))
        with pytest.raises(CorruptBatchError):
            await node.ask(node.store_request(data, 9))
        checked_file.replace(node.disk, SEGMENT, data[:-1])
        with pytest.raises(CorruptBatchError):
            await node.ask(node.store_request(data, 9))
        node.disk.remove(SEGMENT)
        with pytest.raises(StorageError):
            await node.ask(node.store_request(data, 9))
        assert not any("/data/" in name for name in node.store.objects)

    node.run(script())


def test_only_files_of_this_broker_and_names_of_this_form_are_taken(node: Node) -> None:
    async def script() -> None:
        data = node.write_segment([500])
        refused = [
            {"name": f"{PREFIX}elsewhere"},
            {"start": 1},
            {"ranges": []},
            {"ranges": [messages.LocalRange(f"{DATA_PATH}/../../etc/shadow", 0, 9)]},
            {"ranges": [messages.LocalRange(SEGMENT, -1, 9)]},
            {"ranges": [messages.LocalRange(SEGMENT, 0, 1 << 30)]},
            {"ranges": [messages.LocalRange(SEGMENT, 0, 1 << 40)]},
        ]
        for changes in refused:
            with pytest.raises((InvalidRequestError, ProtocolError)):
                await node.ask(node.store_request(data, 1, **changes))

    node.run(script())


def test_a_request_of_unknown_outcome_is_repeated(node: Node) -> None:
    async def script() -> None:
        node.store.faults["put"] = [raises(RemoteStorageError("503"))] * 2
        name, content, _ = await node.stored([100])
        assert content
        node.store.faults["delete"] = [raises(RemoteStorageError("timeout"))]
        await node.ask(messages.DeleteObjects([name]))
        assert name not in node.store.objects
        await node.ask(messages.DeleteObjects([name]))
        node.store.faults["put"] = [raises(RemoteStorageError("503"))] * 3
        with pytest.raises(RemoteStorageError, match="503"):
            await node.stored([100])

    node.run(script())


def test_uploads_keep_to_their_pace_and_one_that_comes_too_late_is_refused() -> None:
    node = Node(remote_upload_bytes_per_s=1000)

    async def script() -> None:
        clock = node.client.environment.clock
        began_s = clock.monotonic()
        for _ in range(2):
            await node.stored([5000])
        assert 3 < clock.monotonic() - began_s < 12
        with pytest.raises(RemoteSlowError):
            await asyncio.gather(*(node.stored([20_000]) for _ in range(3)))

    node.run(script())


# --- reading --------------------------------------------------------------------------------------


def test_what_was_read_once_is_read_from_this_disk(node: Node) -> None:
    async def script() -> None:
        name, content, answer = await node.stored([700] * 20)
        rng = random.Random(4)
        for _ in range(40):
            start = rng.randrange(len(content))
            length = rng.randint(1, len(content) - start)
            found = await node.read(name, content, start, length)
            assert found == content[start : start + length]
        read = sum(length or 0 for got, _, length in node.store.gets if got == name)
        assert read == len(content), "each byte was read once"
        assert answer.data_bytes < len(content)

    node.run(script())


def test_read_ahead_makes_the_next_read_a_hit(node: Node) -> None:
    async def script() -> None:
        name, content, _ = await node.stored([700] * 20)
        await node.read(name, content, 0, PART, read_ahead_bytes=3 * PART)
        await asyncio.sleep(1)
        gets = len(node.store.gets)
        found = await node.read(name, content, PART, 3 * PART)
        assert found == content[PART : 4 * PART]
        assert len(node.store.gets) == gets

    node.run(script())


def test_readers_of_the_same_bytes_wait_for_one_request(node: Node) -> None:
    async def script() -> None:
        name, content, _ = await node.stored([700] * 20)
        gets = len(node.store.gets)
        node.store.latency_s = 1.0
        await asyncio.gather(*(node.read(name, content, 0, len(content)) for _ in range(5)))
        assert len(node.store.gets) - gets == -(-len(content) // (4 * PART))

    node.run(script())


@pytest.mark.parametrize("fault", [flipped, short])
@pytest.mark.parametrize("position", [0, -20], ids=["records", "footer"])
def test_bytes_that_are_damaged_on_the_way_are_read_again(
    node: Node, fault: Any, position: int
) -> None:
    async def script() -> None:
        name, content, _ = await node.stored([700] * 20)
        start = position % len(content)
        node.store.faults["get"] = [fault]
        found = await node.read(name, content, start, 20)
        assert found == content[start : start + 20]

    node.run(script())


def test_an_object_that_is_damaged_in_the_store_is_never_served(node: Node) -> None:
    async def script() -> None:
        name, content, _ = await node.stored([700] * 20)
        damaged = bytearray(content)
        damaged[PART + 1] ^= 1
        node.store.objects[name] = bytes(damaged)
        with pytest.raises(RemoteDamagedError, match=name):
            await node.read(name, content, PART, 1)
        assert await node.read(name, content, 5 * PART, 9) == content[5 * PART : 5 * PART + 9]
        del node.store.objects[name]
        with pytest.raises(RemoteMissingError, match=name):
            await node.read(name, content, 9 * PART, 1)

    node.run(script())


def test_bytes_that_are_wrong_each_time_in_another_way_are_asked_for_again_later(
    node: Node,
) -> None:
    async def script() -> None:
        name, content, _ = await node.stored([700] * 3)
        node.store.faults["get"] = [lambda data, n=n: data[:n] for n in range(3)]  # type: ignore[misc]
        with pytest.raises(RemoteStorageError, match="on the way"):
            await node.read(name, content, len(content) - 20, 9)
        assert await node.read(name, content, len(content) - 20, 9) == content[-20:-11]

    node.run(script())


def test_a_slow_read_goes_on_behind_the_error(node: Node) -> None:
    async def script() -> None:
        name, content, _ = await node.stored([700] * 3)
        node.store.latency_s = 4.0
        gets = len(node.store.gets)
        with pytest.raises(RemoteSlowError):
            await node.read(name, content, 0, 9, wait_ms=1000)
        assert await node.read(name, content, 0, 9, wait_ms=4000) == content[:9]
        assert len(node.store.gets) - gets == 2, "the footer, and the records"

    node.run(script())


def test_what_a_reader_found_wrong_is_read_again(node: Node) -> None:
    async def script() -> None:
        name, content, _ = await node.stored([700] * 3)
        answer = await node.ask(node.read_request(name, content, 0, 9))
        checked_file.replace(node.disk, answer.path, bytes(len(content)))  # A disk that rots.
        assert await node.read(name, content, 0, 9) == bytes(9)
        await node.ask(messages.DropCached(name))
        assert await node.read(name, content, 0, 9) == content[:9]

    node.run(script())


def test_objects_that_cannot_be_read_are_not_remembered(node: Node) -> None:
    async def script() -> None:
        name, content, _ = await node.stored([900] * 3)
        assert await node.read(name, content, 0, 100) == content[:100]
        del node.store.objects[name]
        for number in range(3):
            random = node.client.environment.random
            missing = new_name(random, PREFIX, ObjectKind.DATA, number, 2)
            with pytest.raises(RemoteMissingError):
                await node.read(missing, content, 0, 100)
        assert len(node.cache_files()) == 1
        assert list(node.server._cache._objects) == [name]

    node.run(script())


def test_the_cache_keeps_to_its_size_and_drops_what_was_used_longest_ago() -> None:
    node = Node(remote_cache_bytes=10 * PART)

    async def script() -> None:
        stored = [await node.stored([700] * 5) for _ in range(4)]
        for name, content, _ in stored:
            await node.read(name, content, 0, len(content))
            await asyncio.sleep(object_cache.GRACE_S + 1)
        await asyncio.sleep(1)
        assert len(node.cache_files()) == 2
        gets = len(node.store.gets)
        for name, content, _ in stored[2:]:
            assert await node.read(name, content, 0, len(content)) == content
        assert len(node.store.gets) == gets

    node.run(script())


def test_the_cache_leaves_the_disk_to_the_logs(node: Node) -> None:
    async def script() -> None:
        name, content, _ = await node.stored([700] * 5)
        await node.read(name, content, 0, len(content))
        used = node.host.disk.capacity_bytes
        assert used is None
        node.host.disk.capacity_bytes = object_cache.KEPT_FREE_BYTES
        await asyncio.sleep(object_cache.GRACE_S + 2)
        assert node.cache_files() == []
        assert await node.read(name, content, 0, 9) == content[:9]

    node.run(script())


def test_a_crash_leaves_nothing_of_the_cache_to_the_next_process(node: Node) -> None:
    async def script() -> None:
        name, content, _ = await node.stored([700] * 5)
        for operation in range(1, 9):
            node.process.kill_at_disk_operation(operation)
            try:
                await node.read(name, content, 0, len(content))
                node.process.kill()
            except Exception:  # noqa: BLE001 - whatever a dead process is to its client
                assert not node.process.alive
            node.attached.clear()
            node.start()
            await node.until_attached()
            assert node.cache_files() == []
            assert await node.read(name, content, 0, len(content)) == content

    node.run(script())


# --- other objects --------------------------------------------------------------------------------


def test_a_manifest_is_checked_on_its_way_in_and_out(node: Node) -> None:
    async def script() -> None:
        name = new_name(node.client.environment.random, PREFIX, ObjectKind.MANIFEST, 1, 1)
        content = checked_file.encode("remote-manifest", 1, b"x" * 50)
        with pytest.raises(InvalidRequestError):
            await node.ask(messages.PutBlob(name), flipped(content))
        await node.ask(messages.PutBlob(name), content)
        node.store.faults["get"] = [flipped, short]
        assert (await node.ask(messages.GetBlob(name)))[1] == content
        node.store.objects[name] = flipped(content)
        with pytest.raises(RemoteDamagedError):
            await node.ask(messages.GetBlob(name))
        with pytest.raises(RemoteMissingError):
            await node.ask(messages.GetBlob(name + "x"))

    node.run(script())


def test_objects_are_listed_by_pages_looked_at_and_signed(node: Node) -> None:
    async def script() -> None:
        marks = [owner_mark(CLUSTER_ID, epoch, "m") for epoch in range(5)]
        for number, name in enumerate(marks):
            await node.ask(messages.PutBlob(name), b"x" * number)
        found: list[str] = []
        after: str | None = ""
        while after is not None:
            page = await node.ask(messages.ListObjects(OWNERS, after))
            found += [name for name, _, _ in page.objects]
            after = page.next_after
        assert found == marks
        heads = await node.ask(messages.HeadObjects([marks[4], "a/nothing"]))
        assert heads.objects == [(4, 1000), None]
        signed = await node.ask(messages.SignObjects([marks[4]], expires_ms=9000))
        assert signed.urls == [f"https://store/{marks[4]}?for=9"]

    node.run(script())


async def change(node: Node, name: str) -> None:
    """Each request that writes or deletes an object of this name."""
    content = checked_file.encode("remote-manifest", 1, b"")
    await node.ask(messages.PutBlob(name), content)
    await node.ask(messages.DeleteObjects([name]))


@pytest.mark.parametrize(
    "name",
    ["a/4", f"{CLUSTER_ID}/", f"{PREFIX}../x", "../x", "/etc/x", "a\0", f"{PREFIX}x",
     f"{CLUSTER_ID}/probes/1/x", f"{CLUSTER_ID}/owners/x", owner_mark(OTHER_ID, 1, "m"),
     f"{CLUSTER_ID}/owners/../{TOPIC_ID}/0/data/x"],
)
def test_only_objects_that_rayq_names_are_written_deleted_and_listed(node: Node, name: str) -> None:
    async def script() -> None:
        node.store.objects[name] = b"somebody's"
        requests = [
            (messages.PutBlob(name), b"other"),
            (messages.DeleteObjects([f"{PREFIX}data/{0:020d}-{0:010d}-{0:016x}", name]), b""),
            (messages.ListObjects(name), b""),
        ]
        for request, payload in requests:
            with pytest.raises(InvalidRequestError, match=r"is not (the name|a folder)"):
                await node.ask(request, payload)
        assert node.store.objects[name] == b"somebody's"

    node.run(script())


def test_the_folder_of_another_cluster_is_changed_only_once_it_is_taken_over(node: Node) -> None:
    """What a pointer names may be in any folder of the bucket."""

    async def script() -> None:
        prefix = partition_prefix(OTHER_ID, TOPIC_ID, 0)
        name = str(RemoteName(prefix, ObjectKind.MANIFEST, 1, 1, 1))
        node.store.objects[name] = b"theirs"
        marks = node.store.objects
        marks[owner_mark(OTHER_ID, 7, "theirs")] = b""
        with pytest.raises(RemoteStorageError, match="of another cluster"):
            await change(node, name)
        marks[takeover_mark(OTHER_ID, "b" * 32)] = b""  # A third one.
        marks[takeover_mark(OTHER_ID, CLUSTER_ID)] = b""
        with pytest.raises(RemoteStorageError, match="of another cluster"):
            await change(node, name)
        segment = messages.StoreRecords(
            str(RemoteName(prefix, ObjectKind.DATA, 0, 1, 1)), 0, 1,
            [messages.LocalRange(SEGMENT, 0, 9)], [])
        with pytest.raises(RemoteStorageError, match="of another cluster"):
            await node.ask(segment)
        assert node.store.objects[name] == b"theirs"
        del marks[takeover_mark(OTHER_ID, "b" * 32)]
        await change(node, name)
        assert name not in node.store.objects
        # They took theirs back: that is seen within a minute.
        node.store.objects[name] = b"theirs"
        del marks[takeover_mark(OTHER_ID, CLUSTER_ID)]
        await asyncio.sleep(CLAIM_S)
        with pytest.raises(RemoteStorageError, match="of another cluster"):
            await node.ask(messages.DeleteObjects([name]))

    node.run(script())


@pytest.mark.parametrize("fault", ["begins again", "goes back", "twice", "elsewhere"])
def test_a_store_whose_lists_cannot_be_is_told_of_and_counted(node: Node, fault: str) -> None:
    async def script() -> None:
        store, asked = node.store, list[str]()
        sound = store.list

        async def wrong(prefix: str, after: str = "") -> list[ObjectMeta]:
            asked.append(prefix)
            page = await sound(prefix, "" if fault == "begins again" else after)
            if fault == "goes back":
                return page[::-1]
            elsewhere = [ObjectMeta(f"{PREFIX}data/x", 1, 1)] if fault == "elsewhere" else []
            return [one for one in page for _ in range(1 + (fault == "twice"))] + elsewhere

        for epoch in range(3):
            store.objects[owner_mark(CLUSTER_ID, epoch, "m")] = b""
        store.list = wrong  # type: ignore[method-assign]
        with pytest.raises(RemoteListError, match="s3://simulated was asked .* and listed 'c"):
            for after in ("", owner_mark(CLUSTER_ID, 1, "m")):
                await node.ask(messages.ListObjects(OWNERS, after))
        samples = {
            (sample.name, sample.labels.get("error")): sample.value
            for sample in node.process.environment.metrics.collect()
        }
        assert samples["rayq_remote_errors_total", "RemoteListError"] > 0
        if fault in ("begins again", "elsewhere"):
            # Also where nobody lists anything: the probe does.
            await node.until_attached(works=False)
            assert "s3://simulated was asked" in (node.attached[-1].trouble or "")
            before = len(asked)
            await asyncio.sleep(1200)
            assert len(asked) - before < 3 * 1200 / PROBE_AGAIN_S_MAX + 30
            store.list = sound  # type: ignore[method-assign]
            await node.until_attached()
            assert not any("probe" in name for name in store.objects)

    node.run(script())


# --- the broker -----------------------------------------------------------------------------------


def test_the_broker_is_told_whether_the_store_works(node: Node) -> None:
    async def script() -> None:
        node.store.faults["probe"] = [raises(RemoteDeniedError("403: these credentials"))] * 3
        node.start()
        await wait_until(
            lambda: bool(node.attached) and "403" in (node.attached[-1].trouble or ""),
            60,
            "the trouble",
        )
        await node.until_attached()
        assert not any("probe" in name for name in node.store.objects)
        # An error of anybody's request is looked after at once.
        node.store.faults |= {
            "list": [raises(RemoteStorageError("away"))] * 3,
            "probe": [raises(RemoteStorageError("away"))] * 6,
        }
        with pytest.raises(RemoteStorageError):
            await node.ask(messages.ListObjects(OWNERS))
        await node.until_attached(works=False)
        await node.until_attached()

    node.run(script(), starts=False)


def test_an_object_server_that_its_broker_does_not_want_ends(node: Node) -> None:
    async def script() -> None:
        task = node.start()
        await node.until_attached()
        node.wants = False
        async with asyncio.timeout(60):
            await task

    node.run(script(), starts=False)


def test_an_object_server_without_a_broker_ends(node: Node) -> None:
    async def script() -> None:
        task = node.start()
        await node.until_attached()
        node.broker.close()
        async with asyncio.timeout(2 * object_server.ORPHAN_S):
            await task

    node.run(script(), starts=False)


def test_the_figures_count_bytes_requests_and_errors(node: Node) -> None:
    async def script() -> None:
        name, content, _ = await node.stored([700] * 3)
        node.store.faults["get"] = [raises(RemoteStorageError("503"))]
        await node.read(name, content, 0, 9)
        await node.read(name, content, 0, 9)
        samples = (await node.ask(messages.DescribeMetrics())).samples
        figures = {
            (one.name, one.labels.get("error")): one.value
            for one in samples
            if one.name.startswith("rayq_remote")
        }
        assert figures["rayq_remote_uploaded_bytes_total", None] >= len(content)
        assert figures["rayq_remote_errors_total", "RemoteStorageError"] == 1
        assert figures["rayq_remote_cache_hits_total", None] == 1
        assert figures["rayq_remote_cache_misses_total", None] == 1
        assert 0 < figures["rayq_remote_cache_bytes", None] <= len(content)

    node.run(script())
