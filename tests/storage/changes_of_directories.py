"""The changes of a broker's directory and of what lies beside it, for `test_crash_points`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

from rayq.config import ClusterConfig
from rayq.core.cluster.records import Voter
from rayq.environment import Environment, LoopTasks, SystemClock
from rayq.runtime.file_store import FileStore
from rayq.runtime.kept_settings import KeptSettings, read_settings, write_settings
from rayq.runtime.layout import (
    Directory,
    find_directories,
    format_broker,
    metadata_path,
    write_first_record,
)
from rayq.runtime.recover_quorum import recover_quorum
from rayq.spark.checkpoint_store import LocalStore, this_process
from rayq.storage import checked_file
from rayq.storage.checked_file import make_directory
from rayq.storage.data_directory import (
    QUARANTINE,
    DataDirectory,
    PartitionDirectory,
    read_meta,
    read_secret,
)
from rayq.storage.log import Log
from rayq.storage.metadata_log import Entry, MetadataLog
from rayq.wire.network import AsyncioNetwork
from tests.storage.changes_of_logs import PLAIN, LogState, extend, go_on, state_of
from tests.storage.crash_disk import CrashDisk
from tests.storage.crash_points import Change, Step
from tests.storage.support import NOW_MS

T = TypeVar("T")

ROOT = "/mnt/data"
BROKER = f"{ROOT}/broker-0"
SECRET = b"s" * 32
STORE = "/mnt/store"


class InlineThreads:
    """`environment.Threads` that runs a job at once."""

    def run(self, job: Callable[..., T], *arguments: Any) -> Awaitable[T]:
        async def result() -> T:
            return job(*arguments)

        return result()


def environment(disk: CrashDisk, seed: int = 0) -> Environment:
    return Environment(
        clock=SystemClock(),
        random=random.Random(seed),
        disk=disk,
        network=AsyncioNetwork(ClusterConfig()),
        threads=InlineThreads(),
        tasks=LoopTasks(),
        pid=1,
        boot_id="boot",
    )


# --- the metadata log -----------------------------------------------------------------------------


class MetadataState(NamedTuple):
    promised_epoch: int
    snapshot: tuple[int | None, int | None, bytes | None]
    entries: tuple[Entry, ...]


def entries(first: int, last: int, epoch: int = 1) -> list[Entry]:
    return [(index, epoch, b"record %d.%d" % (index, epoch)) for index in range(first, last + 1)]


def open_metadata(disk: CrashDisk) -> MetadataLog:
    return MetadataLog.open(disk, metadata_path(BROKER))


def look_at_metadata(disk: CrashDisk) -> MetadataState:
    log = open_metadata(disk)
    return MetadataState(
        log.promised_epoch,
        (log.snapshot_index, log.snapshot_epoch, log.snapshot_data),
        tuple(log.read(log.first_index, 1 << 30)),
    )


def go_on_with_metadata(disk: CrashDisk) -> None:
    log = open_metadata(disk)
    log.append([(log.last_index + 1, 90, b"resumed")])


METADATA_STEPS: tuple[Callable[[MetadataLog], None], ...] = (
    lambda log: log.append(entries(1, 3)),
    lambda log: log.promise(2),
    lambda log: log.append(entries(4, 6, 2)),
    lambda log: log.append(entries(5, 5, 3)),  # Cuts what another leader had written.
    lambda log: log.compact(3, 1, b"a snapshot"),
    lambda log: log.append(entries(6, 6, 3)),
    lambda log: log.install_snapshot(5, 3, b"a snapshot that agrees"),
    lambda log: log.install_snapshot(20, 4, b"a snapshot of another log"),
    lambda log: log.append(entries(21, 21, 4)),
)

# --- the broker's directory -----------------------------------------------------------------------


def settings(revision: int) -> KeptSettings:
    return KeptSettings(revision=revision, cluster_name="default", port=9000, config={})


def format_it(disk: CrashDisk) -> Directory:
    return format_broker(
        environment(disk), ROOT, 0, cluster_id="c1", secret=SECRET, settings=settings(1)
    )


def format_and_begin(disk: CrashDisk) -> None:
    made = format_it(disk)
    write_first_record(environment(disk), made.path, (Voter(0, made.directory_id),))


class BrokerState(NamedTuple):
    start_counter: int
    directory_id: str
    secret: bytes
    revision: int
    endpoint: tuple[str, int] | None
    records: tuple[Entry, ...]


def look_at_broker(disk: CrashDisk) -> BrokerState | None:
    """What a start finds. None: a blank directory, or none, which it formats again."""
    found = find_directories(environment(disk), ROOT)
    if not found or found[0].is_blank:
        format_it(disk)
        return None
    meta, kept = read_meta(disk, BROKER), read_settings(disk, BROKER)
    assert meta is not None
    assert kept is not None
    log = open_metadata(disk)
    return BrokerState(
        meta.start_counter,
        meta.directory_id,
        read_secret(disk, BROKER),
        kept.revision,
        DataDirectory.read_endpoint(disk, BROKER),
        tuple(log.read(1, 1 << 30)),
    )


def begun_broker(disk: CrashDisk) -> CrashDisk:
    make_directory(disk, ROOT)
    format_and_begin(disk)
    return disk


def open_broker(disk: CrashDisk) -> DataDirectory:
    return DataDirectory.open(environment(disk, seed=1), BROKER)


def opened_broker(disk: CrashDisk) -> DataDirectory:
    begun_broker(disk)
    return open_broker(disk)


def lose_majority(disk: CrashDisk) -> CrashDisk:
    """The directories of two of three voters are lost."""
    made = format_it(disk)
    voters = tuple(Voter(broker, made.directory_id) for broker in range(3))
    write_first_record(environment(disk), made.path, voters)
    return disk


def all_entries_or_none(before: MetadataState, after: MetadataState, found: MetadataState) -> bool:
    """A promise alone does no harm: the one who runs it runs it once more."""
    return (
        found.entries in (before.entries, after.entries)
        and found.snapshot == before.snapshot
        and found.promised_epoch in (before.promised_epoch, after.promised_epoch)
    )


# --- partitions -----------------------------------------------------------------------------------

PARTITION = f"{BROKER}/topic-0"


class PartitionState(NamedTuple):
    topic_id: str
    log: LogState


def open_partition(disk: CrashDisk, topic_id: str) -> Log:
    """As a replica does it."""
    directory = PartitionDirectory.open(
        environment(disk),
        PARTITION,
        topic="topic",
        topic_id=topic_id,
        partition=0,
        incarnation="i1",
        pid_start_time=1,
    )
    directory.sync(disk)
    log = Log.open(disk, PARTITION, PLAIN, checkpoint_bytes=1 << 20, now_ms=NOW_MS)
    directory.close()
    return log


def look_at_partition(disk: CrashDisk) -> PartitionState | None:
    """What a broker finds that starts: None where the partition holds nothing. What is on its way
    out is removed."""
    directory = open_broker(disk)
    for path in directory.leftovers():
        disk.remove_tree(path)
    for path in directory.unfinished():
        disk.remove_tree(directory.quarantine(path, to_remove=True))
    found = [(meta, path) for meta, path in directory.partitions() if path == PARTITION]
    directory.close()
    if not found:
        return None
    state = state_of(open_partition(disk, found[0][0].topic_id))
    return PartitionState(found[0][0].topic_id, state) if state.end else None


def begin_partition(disk: CrashDisk, topic_id: str = "t1") -> None:
    go_on(open_partition(disk, topic_id), 1)


def resume_partition(disk: CrashDisk) -> None:
    """The topic is there again, or another one of its name is."""
    found = DataDirectory.partition_topic_id(disk, PARTITION)
    go_on(open_partition(disk, found or "t3"), 1)


def with_partition(disk: CrashDisk) -> CrashDisk:
    begun_broker(disk)
    extend(open_partition(disk, "t1"), 2)
    return disk


def keep_aside(disk: CrashDisk) -> None:
    directory = open_broker(disk)
    directory.quarantine(PARTITION)
    directory.close()


def look_at_either(disk: CrashDisk) -> LogState:
    """The log of the partition, which is in its place or in the quarantine."""
    directory = open_broker(disk)
    kept = [f"{BROKER}/{QUARANTINE}/{name}" for name in disk.list(f"{BROKER}/{QUARANTINE}")]
    path = PARTITION if disk.exists(PARTITION) else kept[0]
    directory.close()
    return state_of(Log.open(disk, path, PLAIN, checkpoint_bytes=1 << 20, now_ms=NOW_MS))


def put_aside(disk: CrashDisk) -> None:
    directory = open_broker(disk)
    directory.quarantine(PARTITION, to_remove=True)
    directory.close()


# --- the checkpoint of a streaming query ----------------------------------------------------------

QUERY = f"{ROOT}/query"


def open_query(disk: CrashDisk) -> LocalStore:
    """As a start does, which goes by the files that it finds."""
    store = LocalStore(disk, QUERY, this_process("run"))
    store.make_directories("offsets", "commits")
    return store


def begun_query(disk: CrashDisk) -> LocalStore:
    make_directory(disk, ROOT)
    return open_query(disk)


def look_at_query(disk: CrashDisk) -> tuple[bytes | None, bytes | None]:
    store = open_query(disk)
    return store.read("offsets/0"), store.read("commits/0")


def finish_batch(disk: CrashDisk) -> None:
    store = open_query(disk)
    if store.read("offsets/0") is not None:
        store.write("commits/0", b"the end of the batch")


# --- objects --------------------------------------------------------------------------------------


class OpenStore(NamedTuple):
    disk: CrashDisk
    store: FileStore


NAMES = ("c1/t1/0/data/0-0-a", "c1/t1/0/data/9-0-b", "c1/t1/0/manifest/1-0-c")


def open_store(disk: CrashDisk) -> OpenStore:
    make_directory(disk, STORE)
    return OpenStore(disk, FileStore(environment(disk), STORE))


def put(number: int) -> Step:
    def run(opened: OpenStore) -> None:
        asyncio.run(opened.store.put(NAMES[number], b"%d" % number * 100))

    return Step(run)


def delete(*numbers: int) -> Step:
    def run(opened: OpenStore) -> None:
        asyncio.run(opened.store.delete([NAMES[number] for number in numbers]))

    def allows(before: Any, after: Any, found: Any) -> bool:
        return all(one in two for one, *two in zip(found, before, after, strict=True))

    return Step(run, allows)


def look_at_objects(disk: CrashDisk) -> tuple[bytes | None, ...]:
    return tuple(checked_file.read_whole(disk, f"{STORE}/{name}") for name in NAMES)


def put_again(disk: CrashDisk) -> None:
    """Another process puts an object: it does not know what of the directories is durable."""
    asyncio.run(FileStore(environment(disk), STORE).put(NAMES[1], b"1" * 100))


def replace_small_file(content: bytes) -> Step:
    return Step(lambda disk: checked_file.write(disk, f"{ROOT}/small", "kind", 1, content))


def made_root(disk: CrashDisk) -> CrashDisk:
    make_directory(disk, ROOT)
    return disk


DIRECTORY_CHANGES: dict[str, Change] = {
    "a small file": Change(
        prepare=made_root,
        steps=[replace_small_file(b"a" * 60), replace_small_file(b"b" * 40)],
        look=lambda disk: checked_file.read(disk, f"{ROOT}/small", "kind", 1),
        resume=replace_small_file(b"c" * 50).run,
    ),
    "a metadata log": Change(
        prepare=lambda disk: open_metadata(disk),
        steps=[Step(run) for run in METADATA_STEPS],
        look=look_at_metadata,
        resume=go_on_with_metadata,
    ),
    "a metadata log in a new directory": Change(
        prepare=lambda disk: disk,
        steps=[Step(lambda disk: open_metadata(disk).append(entries(1, 2)))],
        look=look_at_metadata,
        resume=go_on_with_metadata,
    ),
    "a first start": Change(
        prepare=lambda disk: disk,
        steps=[Step(format_and_begin)],
        look=look_at_broker,
    ),
    "a start of a broker": Change(
        prepare=begun_broker,
        steps=[Step(lambda disk: open_broker(disk).close())],
        look=look_at_broker,
    ),
    "other settings": Change(
        prepare=begun_broker,
        steps=[Step(lambda disk: write_settings(disk, BROKER, settings(2)))],
        look=look_at_broker,
    ),
    "another directory id": Change(
        prepare=opened_broker,
        steps=[Step(DataDirectory.renew_directory_id)],
        look=look_at_broker,
    ),
    "another endpoint": Change(
        prepare=opened_broker,
        steps=[Step(lambda directory: directory.write_endpoint("host", 9000))],
        look=look_at_broker,
    ),
    "a quorum that is recovered": Change(
        prepare=lose_majority,
        steps=[Step(lambda disk: recover_quorum(environment(disk), BROKER), all_entries_or_none)],
        look=look_at_metadata,
    ),
    "a new partition": Change(
        prepare=begun_broker,
        steps=[Step(begin_partition)],
        look=look_at_partition,
        resume=resume_partition,
    ),
    "a partition that goes, and one that takes its name": Change(
        prepare=with_partition,
        steps=[
            Step(put_aside),
            Step(lambda disk: begin_partition(disk, "t2")),
        ],
        look=look_at_partition,
        resume=resume_partition,
    ),
    "a partition that is put aside, and kept": Change(
        prepare=with_partition,
        steps=[Step(keep_aside)],
        look=look_at_either,
    ),
    "a batch of a streaming query": Change(
        prepare=begun_query,
        steps=[
            Step(lambda store: store.write("offsets/0", b"the ranges of the batch")),
            Step(lambda store: store.write("commits/0", b"the end of the batch")),
        ],
        look=look_at_query,
        resume=finish_batch,
    ),
    "objects in a directory": Change(
        prepare=open_store,
        steps=[put(0), put(1), put(2), delete(0, 2)],
        look=look_at_objects,
        resume=put_again,
        acknowledged=lambda found: found[1],
    ),
}
