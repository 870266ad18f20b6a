"""What the next leader does before it appends: its log goes on where the list of objects ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
import pytest

from proving.simulation import World
from proving.simulation.process import Process
from rayq import messages
from rayq.actors.remote.catch_up import LISTING_DELAY_S, RemoteCatchUp, must_catch_up
from rayq.actors.remote.remote_log import RemoteLog
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.config import ClusterConfig
from rayq.errors import RemoteMissingError, RemoteStorageError
from rayq.messages.remote_names import ObjectKind, RemoteName
from rayq.messages.remote_pointer import RemotePointer
from rayq.storage.batch import BatchHeader, stamp
from rayq.storage.data_directory import PartitionDirectory
from rayq.storage.epochs import LEADER_EPOCHS
from rayq.storage.producer_state import ProducerState
from rayq.storage.remote.manifest import Manifest, RemoteObject
from tests.storage.support import NOW_MS, append, make_batch

CLUSTER_ID, TOPIC_ID = "c" * 32, "d" * 32
PREFIX = f"{CLUSTER_ID}/{TOPIC_ID}/0/"
EPOCHS = [(2, 0), (4, 10), (6, 20)]
END = 30
LEADER_EPOCH = 9
OPTIONS: dict[str, object] = {"remote_storage": True, "segment_bytes": 1024}


class PlayedStore:
    """An object server with a store in memory, and a broker that commits remote pointers."""

    def __init__(self) -> None:
        self.cluster_id = CLUSTER_ID
        self.blobs: dict[str, bytes] = {}
        self.sizes: dict[str, int] = {}
        self.is_away = False
        self.moves: list[messages.MoveRemote] = []

    def put(self, manifest: Manifest) -> RemotePointer:
        name = str(
            RemoteName(
                PREFIX,
                ObjectKind.MANIFEST,
                manifest.version,
                manifest.leader_epoch,
                len(self.blobs),
            )
        )
        self.blobs[name] = manifest.encode()
        self.sizes |= {one.name: one.object_bytes for one in manifest.objects}
        return manifest.pointer(name)

    async def ask(self, request: Any, payload: bytes = b"", **_: object) -> Any:
        await asyncio.sleep(0.01)
        if self.is_away:
            raise RemoteStorageError("The store is away.")
        match request:
            case messages.GetBlob(name):
                if name not in self.blobs:
                    raise RemoteMissingError(f"{name} is not there.")
                return messages.Done(), memoryview(self.blobs[name])
            case messages.PutBlob(name):
                self.blobs[name] = bytes(payload)
                return messages.Done(), memoryview(b"")
            case messages.ListObjects(prefix):
                found = [(name, 1, 1) for name in sorted(self.blobs) if name.startswith(prefix)]
                return messages.ListObjectsResponse(found, None), memoryview(b"")
            case messages.HeadObjects(names):
                sizes = [self.sizes.get(name) for name in names]
                found = [None if size is None else (size, 1) for size in sizes]
                return messages.HeadObjectsResponse(found), memoryview(b"")
        raise AssertionError(request)

    async def ask_broker(self, request: Any) -> Any:
        assert isinstance(request, messages.MoveRemote)
        self.moves.append(request)
        return messages.ChangeResponse(1)


def manifest(
    end: int,
    *,
    version: int = 5,
    leader_epoch: int = 6,
    start: int = 0,
    log_start: int = 0,
    epochs: list[tuple[int, int]] = EPOCHS,
    producer_snapshot: bytes = b"",
) -> Manifest:
    """Of objects with ten records each."""
    list_of_epochs = [one for one in epochs if one[1] < end]
    found = Manifest(
        prefix=PREFIX,
        cluster_id=CLUSTER_ID,
        topic="t",
        topic_id=TOPIC_ID,
        partition=0,
        partitions=1,
        config=OPTIONS,
        replication_factor=2,
        version=version,
        leader_epoch=leader_epoch,
        log_start=log_start,
        epochs=list_of_epochs,
        producer_snapshot=producer_snapshot,
    )
    for first in range(start, end, 10):
        epoch = max(one for one, begins in list_of_epochs if begins < first + 10)
        name = str(RemoteName(PREFIX, ObjectKind.DATA, first, leader_epoch, first + version))
        one = RemoteObject(first, min(first + 10, end), name, 900, 800, 7, 1, 2, 3, epoch)
        found = found.appended(one)
    return found


def assigned(pointer: RemotePointer | None, **more: Any) -> messages.PartitionAssignment:
    return messages.PartitionAssignment(
        "t", TOPIC_ID, 0, OPTIONS, 0, "ours", "here", 1, LEADER_EPOCH, 1, None,
        [(0, "ours")], [(0, "ours"), (1, "theirs")], remote=pointer, **more,
    )


class Adopted:
    """What an adoption came to."""

    def __init__(self, replica: ReplicaLog, remote_log: RemoteLog) -> None:
        self.replica = replica
        self.log = replica.log
        self.remote_log = remote_log
        self.is_done = False
        self.was_needed = False

    @property
    def starts(self) -> tuple[int, int, int]:
        return self.log.start_offset, self.log.local_start_offset, self.log.end_offset


async def open_log(process: Process, pointer: RemotePointer | None) -> ReplicaLog:
    environment = process.environment
    replica = ReplicaLog(
        environment,
        ClusterConfig(),
        assigned(pointer),
        broker=0,
        incarnation="ours",
        on_flushed=lambda _: None,
        on_failure=lambda: None,
    )
    await replica.open(
        PartitionDirectory.open(
            environment, "/data/t-0", topic="t", topic_id=TOPIC_ID, partition=0,
            incarnation="ours", pid_start_time=1,
        )
    )
    return replica


async def fill(replica: ReplicaLog, end: int = END) -> None:
    for epoch, start in EPOCHS:
        for number in range(start, min(start + 10, end)):
            append(replica.log, epoch=epoch, producer_id=epoch, base_sequence=number - start)
    replica.advance_high_watermark(end)
    await replica.flusher.checkpoint()


def adopt(
    store: PlayedStore,
    pointer: RemotePointer | None,
    *,
    prepare: Callable[[ReplicaLog], Awaitable[None]] = fill,
    meanwhile: Callable[[ReplicaLog], Awaitable[None]] | None = None,
    wait_s: float = 3 * LISTING_DELAY_S,
    is_doubted: bool = False,
) -> Adopted:
    async def script(process: Process) -> Adopted:
        replica = await open_log(process, pointer)
        await prepare(replica)
        assignment = assigned(pointer, is_remote_doubted=is_doubted)
        remote_log = RemoteLog(
            replica,
            assignment,
            cast(Any, store),
            ask_broker=store.ask_broker,
            has_lease=lambda: True,
        )
        found = Adopted(replica, remote_log)
        found.was_needed = must_catch_up(replica.log, assignment)
        if found.was_needed:
            adoption = RemoteCatchUp(
                replica, assignment, remote_log, on_done=lambda: setattr(found, "is_done", True)
            )
            adoption.start()
            if meanwhile is not None:
                await meanwhile(replica)
            await asyncio.sleep(wait_s)
            adoption.end("the test is over")
        return found

    with World(seed=1) as world:
        process = world.host("b").process("replica")
        return world.run(process.run(script(process)), limit_s=7200)


def test_a_log_that_goes_on_where_the_list_ends_needs_nothing() -> None:
    store = PlayedStore()
    for end in (10, 30):
        assert not adopt(store, store.put(manifest(end))).was_needed
    assert not adopt(store, None).was_needed


def test_a_log_that_ends_below_restarts_at_the_end_of_the_list() -> None:
    store, snapshot = PlayedStore(), ProducerState().snapshot()
    pointer = store.put(manifest(40, start=10, log_start=13, producer_snapshot=snapshot))
    store.is_away = True

    async def come_back(replica: ReplicaLog) -> None:
        await asyncio.sleep(3600)
        assert replica.log.end_offset == END, "it waits for the store"
        assert replica.trouble is not None and "The store is away" in replica.trouble
        store.is_away = False

    found = adopt(store, pointer, meanwhile=come_back)
    assert found.is_done
    assert found.starts == (13, 40, 40)
    assert found.log.epochs.entries() == EPOCHS
    assert (found.replica.high_watermark, found.replica.trouble) == (40, None)
    assert not must_catch_up(found.log, assigned(pointer))
    assert store.moves == []


def test_a_log_that_restarts_knows_the_producers_of_what_is_stored() -> None:
    """A batch that its producer sends again is not appended twice."""

    def header(offset: int) -> BatchHeader:
        batch = make_batch(offset, producer_id=7, base_sequence=offset)
        return stamp(batch, 0, base_offset=offset, leader_epoch=6, append_time_ms=NOW_MS)

    producers = ProducerState()
    for offset in range(40):
        producers.update(header(offset))
    store = PlayedStore()
    pointer = store.put(manifest(40, producer_snapshot=producers.snapshot()))
    found = adopt(store, pointer)
    assert found.starts == (0, 40, 40)
    again = [found.log.producers.check(header(offset)) for offset in (35, 39)]
    assert [place and place.base_offset for place in again] == [35, 39]
    assert found.log.producers.check(header(40)) is None, "this one follows"
    assert found.log.producers.snapshot() == producers.snapshot()


def test_a_log_of_another_history_restarts_and_keeps_what_is_stored() -> None:
    store = PlayedStore()
    pointer = store.put(manifest(20, leader_epoch=7, epochs=[(2, 0), (3, 10)]))
    found = adopt(store, pointer)
    assert found.is_done
    assert found.starts == (0, 20, 20)
    assert found.log.epochs.entries() == [(2, 0), (3, 10)]


def test_the_newest_manifest_that_can_be_trusted_is_adopted() -> None:
    store = PlayedStore()
    pointer = store.put(manifest(10, version=1))
    best = manifest(40, version=3)
    store.put(best)
    # Later ones: of a history that an election left, and with an object that is gone.
    store.put(manifest(30, version=6, epochs=[(2, 0), (3, 10), (5, 15)]))
    gone = manifest(50, version=7)
    store.put(gone)
    del store.sizes[gone.objects[1].name]
    found = adopt(store, pointer, is_doubted=True)
    assert found.is_done
    assert found.starts == (0, 40, 40)
    (move,) = store.moves
    assert (move.pointer.version, move.pointer.leader_epoch) == (2, LEADER_EPOCH)
    assert (move.pointer.start, move.pointer.end, move.pointer.end_epoch) == (0, 40, 6)
    assert move.pointer.manifest in store.blobs
    assert found.remote_log.pointer == move.pointer


def test_a_doubt_ends_also_where_nothing_was_lost() -> None:
    store = PlayedStore()
    pointer = store.put(manifest(20, version=4))
    found = adopt(store, pointer, is_doubted=True)
    assert found.is_done
    assert found.starts == (0, 0, END)
    assert [move.pointer.version for move in store.moves] == [5]
    found = adopt(PlayedStore(), None, is_doubted=True)
    assert found.is_done and found.remote_log.end_offset == 0


async def drop_twenty(replica: ReplicaLog) -> None:
    await fill(replica)
    start = max(one.base_offset for one in replica.log.local_segments() if one.base_offset <= 20)
    assert start > 10
    await replica.drop_local(start)


def test_a_log_whose_records_are_only_in_the_store_finds_their_list_again() -> None:
    store = PlayedStore()
    pointer = store.put(manifest(10, version=1))
    store.put(manifest(20, version=2))
    found = adopt(store, pointer, prepare=drop_twenty)
    assert found.is_done
    assert found.log.start_offset == 0 and found.log.end_offset == END
    assert [move.pointer.end for move in store.moves] == [20]


def test_a_log_whose_records_are_nowhere_stays_offline_and_says_so() -> None:
    store = PlayedStore()
    pointer = store.put(manifest(10, version=1))
    found = adopt(store, pointer, prepare=drop_twenty)
    assert not found.is_done
    assert store.moves == []
    assert found.replica.trouble is not None
    assert "no manifest" in found.replica.trouble and "delete_remote" in found.replica.trouble


def test_where_the_manifest_is_lost_another_takes_its_place() -> None:
    store = PlayedStore()
    store.put(manifest(30, version=1))
    pointer = store.put(manifest(40, version=2))
    del store.blobs[pointer.manifest]
    found = adopt(store, pointer, wait_s=LISTING_DELAY_S - 1)
    assert not found.is_done, "it may be read again"
    found = adopt(store, pointer)
    assert found.is_done
    assert found.starts == (0, 0, END), "all that is left is here"
    assert [(move.pointer.version, move.pointer.end) for move in store.moves] == [(3, 30)]


def test_epochs_that_the_disk_lost_come_from_the_manifest() -> None:
    store = PlayedStore()
    pointer = store.put(manifest(20))

    async def script(process: Process) -> None:
        replica = await open_log(process, pointer)
        await drop_twenty(replica)
        known = replica.log.epochs.entries()
        await replica.close()
        process.environment.disk.remove(f"/data/t-0/{LEADER_EPOCHS}")
        replica = await open_log(process, pointer)
        assert replica.log.epochs.entries() != known
        remote_log = RemoteLog(
            replica,
            assigned(pointer),
            cast(Any, store),
            ask_broker=store.ask_broker,
            has_lease=lambda: True,
        )
        assert must_catch_up(replica.log, assigned(pointer))
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        RemoteCatchUp(
            replica, assigned(pointer), remote_log, on_done=lambda: done.set_result(None)
        ).start()
        await done
        assert replica.log.epochs.entries() == known
        await replica.close()

    with World(seed=1) as world:
        process = world.host("b").process("replica")
        world.run(process.run(script(process)))


@pytest.mark.parametrize("log_start", [12, 25, END])
def test_a_log_start_above_the_end_of_the_list_needs_nothing(log_start: int) -> None:
    store = PlayedStore()

    async def prepare(replica: ReplicaLog) -> None:
        await fill(replica)
        await replica.advance_log_start(log_start)

    pointer = store.put(manifest(10))
    assert not adopt(store, pointer, prepare=prepare).was_needed
    other = msgspec.structs.replace(pointer, end_epoch=7)
    assert adopt(store, other, prepare=prepare).was_needed, "an epoch above those that follow"


def test_a_disk_that_fails_as_the_log_restarts_ends_the_replica() -> None:
    """Another broker can lead then; this one would be offline until it is started again."""
    store = PlayedStore()
    pointer = store.put(manifest(40))

    async def breaks(replica: ReplicaLog) -> None:
        await fill(replica, 20)

        def reset(*arguments: Any) -> None:
            raise OSError(5, "Input/output error")

        replica.log._reset = reset  # type: ignore[method-assign]

    found = adopt(store, pointer, prepare=breaks)
    assert not found.is_done
    assert found.replica.failure is not None and "check the disk" in found.replica.failure
