"""The directories of a broker and of its partitions: their owners, and their locks.

A broker's directory (`<root>/broker-<id>`)::

    meta.json       `Meta`; written last when the directory is formatted
    secret          the cluster's secret, readable by the owner only
    broker.lock     held by the broker process
    endpoint        `host port` of the broker, for its replica processes
    metadata/       the metadata log
    remote-cache/   what was read from the object store; emptied by the object server that starts
    quarantine/     partition directories that belong to no topic of this cluster; those named
                    *.removed are on their way out
    <topic>-<n>/    a partition: partition.json, lock, and the log's files

A lock file is held by flock, which ends with its process, and names the process in one JSON line.
All other files are replaced as a whole: a crash leaves the old file or the new file. A
partition.json is written once; a crash may leave a part of it, and no checkpoint beside it.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from typing import TypeVar

import msgspec

from rayq.environment import Disk, Environment, File
from rayq.errors import (
    DirectoryInUseError,
    StorageError,
    UnsupportedFormatError,
    WrongClusterError,
)
from rayq.storage import checked_file
from rayq.storage.appending import open_failed
from rayq.storage.checkpoint import CHECKPOINT
from rayq.storage.cleaner import CLEANING

FORMAT_VERSION = 1
"""The format of a broker's directory. A change that older versions cannot read raises it."""
META, SECRET, BROKER_LOCK, ENDPOINT = "meta.json", "secret", "broker.lock", "endpoint"
QUARANTINE = "quarantine"
REMOVED_SUFFIX = ".removed"
PARTITION_META, PARTITION_LOCK = "partition.json", "lock"
BROKER_PREFIX = "broker-"
_LOCK_BYTES = 512
"""The line of a lock file is padded to this size, so that one write replaces it."""
_HOLDER_READS_MAX = 10_000
"""A lock that was taken this moment is read this often, until its holder has written its line."""


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """The file `meta.json` of a broker's directory."""

    format_version: int
    cluster_id: str
    broker: int
    directory_id: str
    """A random id. A new id says that the directory may have lost what it held."""
    start_counter: int
    """The number of times that a broker process has opened the directory. An old copy has a lower
    count."""


class PartitionMeta(msgspec.Struct, frozen=True, kw_only=True):
    """The file `partition.json`: the partition that a directory holds. A topic that was created
    again has another id."""

    format_version: int
    topic: str
    topic_id: str
    partition: int


class DirectoryHolder(msgspec.Struct, frozen=True, kw_only=True):
    """The process that wrote a lock file. `start_time` tells it from a later process with the same
    pid; None where it is not known."""

    pid: int
    start_time: int | None
    boot_id: str
    incarnation: str | None


class _Format(msgspec.Struct, frozen=True):
    format_version: int


Json = TypeVar("Json", Meta, PartitionMeta)


# --- formatting and finding ---------------------------------------------------------------------


def read_meta(disk: Disk, path: str) -> Meta | None:
    """The `meta.json` of a broker's directory, or None where there is none.

    Raises `UnsupportedFormatError` for another format version, `StorageError` when it is damaged.
    """
    return _read_json(disk, f"{path}/{META}", Meta)


def read_secret(disk: Disk, path: str) -> bytes:
    """The cluster's secret. Raises `StorageError` when it is missing."""
    secret = checked_file.read_whole(disk, f"{path}/{SECRET}")
    if not secret:
        raise StorageError(
            f"{path}/{SECRET} is missing or empty: copy it from another broker's directory."
        )
    return secret


def find_brokers(disk: Disk, root: str) -> list[tuple[int, str]]:
    """(broker id, path) of each formatted broker directory `<root>/broker-<id>`, by id."""
    found = []
    for name in disk.list(root):
        number = name.removeprefix(BROKER_PREFIX)
        if name.startswith(BROKER_PREFIX) and number.isdecimal():
            path = f"{root}/{name}"
            if disk.exists(f"{path}/{META}"):
                found.append((int(number), path))
    return sorted(found)


def format_directory(
    environment: Environment, path: str, *, cluster_id: str, broker: int, secret: bytes
) -> Meta:
    """Makes `path` a broker's directory. A crash meanwhile leaves a directory that is not
    formatted. A directory that is formatted already gets a new id. Raises `StorageError`.
    """
    disk = environment.disk
    meta = Meta(
        format_version=FORMAT_VERSION,
        cluster_id=cluster_id,
        broker=broker,
        directory_id=environment.new_id(),
        start_counter=0,
    )
    try:
        checked_file.make_directory(disk, path)
        checked_file.replace(disk, f"{path}/{SECRET}", secret)
        _write_json(disk, f"{path}/{META}", meta)
    except OSError as error:
        raise StorageError(f"{path} cannot be made a data directory: {error}") from error
    return meta


def _read_json(disk: Disk, path: str, kind: type[Json]) -> Json | None:
    data = checked_file.read_whole(disk, path)
    if data is None:
        return None
    try:
        version = msgspec.json.decode(data, type=_Format).format_version
        if version != FORMAT_VERSION:
            raise UnsupportedFormatError(
                f"{path} has format {version}, this rayq reads {FORMAT_VERSION}: use another."
            )
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise StorageError(f"{path} is damaged: {error}. Restore it from a copy.") from error


def _partition_meta(disk: Disk, path: str) -> PartitionMeta | None:
    """The `partition.json` of a directory. None also where it cannot be read: one such directory
    must not stop a broker with many. The replica that opens the directory reports the error."""
    try:
        return _read_json(disk, f"{path}/{PARTITION_META}", PartitionMeta)
    except (OSError, StorageError, UnsupportedFormatError):
        return None


def _whole_partition_meta(disk: Disk, path: str) -> PartitionMeta | None:
    """The `partition.json` of a directory. None where there is none, or a part of one that a power
    loss has left: a log that was ever opened there has a checkpoint. Raises as `_read_json`."""
    try:
        return _read_json(disk, f"{path}/{PARTITION_META}", PartitionMeta)
    except UnsupportedFormatError:
        raise
    except StorageError:
        if disk.exists(f"{path}/{CHECKPOINT}"):
            raise
        return None


def _write_json(disk: Disk, path: str, value: Meta) -> None:
    checked_file.replace(disk, path, _json(value))


def _json(value: Meta | PartitionMeta) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value)) + b"\n"


# --- locks --------------------------------------------------------------------------------------


def _sign(file: File, holder: DirectoryHolder) -> None:
    checked_file.write_all(file, msgspec.json.encode(holder).ljust(_LOCK_BYTES - 1) + b"\n", 0)


def _read_holder(file: File) -> DirectoryHolder | None:
    try:
        return msgspec.json.decode(file.pread(_LOCK_BYTES, 0), type=DirectoryHolder)
    except msgspec.DecodeError:
        return None


def lock_holder(disk: Disk, path: str) -> DirectoryHolder | None:
    """The process that holds a lock file, or None when no process does. Raises OSError."""
    try:
        opened = disk.open(path, writable=False)
    except FileNotFoundError:
        return None
    with closing(opened) as file:
        for _ in range(_HOLDER_READS_MAX):
            if file.try_lock():
                return None
            holder = _read_holder(file)
            if holder is not None:
                return holder
    raise StorageError(f"{path} is locked by a process that does not say who it is.")


def _in_use(path: str, holder: DirectoryHolder | None) -> DirectoryInUseError:
    who = "another process" if holder is None else f"process {holder.pid}"
    error = DirectoryInUseError(
        f"{path} is in use by {who}. Stop it first, or use another directory."
    )
    if holder is not None:
        error.holder_pid = holder.pid
        error.holder_start_time = holder.start_time
    return error


def _lock(path: str, file: File, holder: DirectoryHolder) -> None:
    """Takes a lock file and writes the holder's line. On an error it closes the file, since a
    failed attempt must not keep others out. Raises `DirectoryInUseError` when another process holds
    the lock, or OSError."""
    if not file.try_lock():
        current = _read_holder(file)
        file.close()
        raise _in_use(path, current)
    try:
        _sign(file, holder)
    except OSError:
        file.close()
        raise


# --- a broker's directory -----------------------------------------------------------------------


class DataDirectory:
    """A broker's directory, held by this process until `close`."""

    def __init__(
        self, environment: Environment, path: str, meta: Meta, secret: bytes, lock: File
    ) -> None:
        """Use `DataDirectory.open`."""
        self._environment = environment
        self._lock = lock
        self.path = path
        self.meta = meta
        self.secret = secret

    @staticmethod
    def open(environment: Environment, path: str, cluster_id: str | None = None) -> DataDirectory:
        """Locks a formatted directory and counts the start, durably.

        Raises `DirectoryInUseError` with the pid, `WrongClusterError` when the directory belongs to
        another cluster than `cluster_id` (None: any), `UnsupportedFormatError`, `StorageError`.
        """
        disk = environment.disk
        try:
            if read_meta(disk, path) is None:
                raise StorageError(f"{path} is not a data directory: {META} is missing.")
            lock = disk.open(f"{path}/{BROKER_LOCK}", create=True)
            holder = DirectoryHolder(
                pid=environment.pid,
                start_time=None,
                boot_id=environment.boot_id,
                incarnation=None,
            )
            _lock(path, lock, holder)
            try:
                meta = read_meta(disk, path)
                assert meta is not None
                if cluster_id is not None and meta.cluster_id != cluster_id:
                    raise WrongClusterError(
                        f"{path} belongs to cluster {meta.cluster_id}, not to {cluster_id}: use "
                        "another directory."
                    )
                if disk.exists(f"{path}/{QUARANTINE}"):
                    # A process that was killed may have put something aside without the syncs. With
                    # that of `path`, below, it is durable before anything there is removed.
                    disk.sync_dir(f"{path}/{QUARANTINE}")
                meta = msgspec.structs.replace(meta, start_counter=meta.start_counter + 1)
                _write_json(disk, f"{path}/{META}", meta)
                secret = read_secret(disk, path)
            except BaseException:
                lock.close()
                raise
        except OSError as error:
            raise StorageError(f"{path} cannot be opened: {error}") from error
        return DataDirectory(environment, path, meta, secret, lock)

    @property
    def trouble(self) -> str | None:
        """Why what this process writes here is as good as lost: the directory at `path` is not the
        one that it holds any more."""
        try:
            is_here = self._lock.is_at(f"{self.path}/{BROKER_LOCK}")
        except OSError as error:
            return f"{self.path} cannot be looked at: {error}"
        if is_here:
            return None
        return (
            f"the data directory {self.path} was removed, emptied or replaced, or its disk is no "
            "longer mounted"
        )

    def renew_directory_id(self) -> None:
        """Takes a new directory id, durably, since this directory is an old copy."""
        self.meta = msgspec.structs.replace(self.meta, directory_id=self._environment.new_id())
        self._change(lambda: _write_json(self._environment.disk, f"{self.path}/{META}", self.meta))

    def write_endpoint(self, host: str, port: int) -> None:
        """Writes where this broker listens, for its replica processes."""
        content = f"{host} {port}\n".encode()
        path = f"{self.path}/{ENDPOINT}"
        self._change(lambda: checked_file.replace(self._environment.disk, path, content))

    @staticmethod
    def read_endpoint(disk: Disk, path: str) -> tuple[str, int] | None:
        """The last endpoint that the broker of the directory `path` wrote, or None."""
        content = checked_file.read_whole(disk, f"{path}/{ENDPOINT}")
        words = (content or b"").decode("utf-8", "replace").split()
        return (words[0], int(words[1])) if len(words) == 2 and words[1].isdecimal() else None

    # --- partitions -------------------------------------------------------------------------------

    @staticmethod
    def path_of_partition(path: str, topic: str, partition: int) -> str:
        """The directory of a partition in the broker directory `path`."""
        return f"{path}/{topic}-{partition}"

    def partition_path(self, topic: str, partition: int) -> str:
        return self.path_of_partition(self.path, topic, partition)

    @staticmethod
    def partition_topic_id(disk: Disk, path: str) -> str | None:
        """The id of the topic whose partition the directory `path` holds. None when it holds no
        partition, or cannot be read."""
        meta = _partition_meta(disk, path)
        return None if meta is None else meta.topic_id

    @staticmethod
    def partition_holder(disk: Disk, path: str) -> DirectoryHolder | None:
        """The replica process that holds a partition's directory, or None when no process does."""
        return lock_holder(disk, f"{path}/{PARTITION_LOCK}")

    def partitions(
        self, except_for: Collection[tuple[str, int]] = ()
    ) -> list[tuple[PartitionMeta, str]]:
        """`(partition, path)` of each partition directory here that can be read. Those of
        `except_for`, each a topic's name and a partition, are not looked at."""
        found = []
        for path in self._partition_paths(except_for):
            meta = _partition_meta(self._environment.disk, path)
            if meta is not None:
                found.append((meta, path))
        return found

    def unfinished(self, except_for: Collection[tuple[str, int]] = ()) -> list[str]:
        """The paths of directories that a process began to make for a partition, and that hold
        nothing but its lock and a part of its name; or that a compaction made once more, which
        continued when the partition had been removed. Those of `except_for` are not looked at."""
        found = []
        for path in self._partition_paths(except_for):
            try:
                files = self._environment.disk.list(path)
            except OSError:  # It is a file, or cannot be read.
                continue
            is_named = _partition_meta(self._environment.disk, path) is not None
            if not is_named and {PARTITION_LOCK, PARTITION_META, CLEANING}.issuperset(files):
                found.append(path)
        return found

    def _partition_paths(self, except_for: Collection[tuple[str, int]]) -> Iterator[str]:
        known = {f"{topic}-{partition}" for topic, partition in except_for}
        for name in self._environment.disk.list(self.path):
            if name not in known and name.rpartition("-")[2].isdecimal():
                yield f"{self.path}/{name}"

    def quarantine(self, path: str, *, to_remove: bool = False) -> str:
        """Puts a partition's directory aside; returns where it is now. What is to be removed is put
        aside first, so that a crash leaves nothing half removed under a live name; `leftovers`
        finds it (`to_remove`)."""
        disk = self._environment.disk
        topic_id = self.partition_topic_id(disk, path) or "unknown"
        name = path.rpartition("/")[2]
        suffix = REMOVED_SUFFIX if to_remove else ""
        aside = f"{self.path}/{QUARANTINE}/{name}.{topic_id}{suffix}"
        number = 1
        while disk.exists(aside):
            number += 1
            aside = f"{self.path}/{QUARANTINE}/{name}.{topic_id}.{number}{suffix}"

        def move() -> None:
            disk.make_dirs(f"{self.path}/{QUARANTINE}")
            disk.rename(path, aside)
            disk.sync_dir(f"{self.path}/{QUARANTINE}")
            disk.sync_dir(self.path)

        self._change(move)
        return aside

    def leftovers(self) -> list[str]:
        """The paths of directories in the quarantine that still have to be removed."""
        aside = f"{self.path}/{QUARANTINE}"
        names = self._environment.disk.list(aside)
        return [f"{aside}/{name}" for name in names if name.endswith(REMOVED_SUFFIX)]

    def close(self) -> None:
        """Releases the lock."""
        self._lock.close()

    def _change(self, change: Callable[[], None]) -> None:
        try:
            change()
        except OSError as error:
            raise StorageError(f"{self.path}: the disk failed: {error}") from error


class PartitionDirectory:
    """A partition's directory, held by this process until `close`."""

    def __init__(self, path: str, meta: PartitionMeta, lock: File, *, is_new: bool) -> None:
        """Use `PartitionDirectory.open`."""
        self.path = path
        self._is_new = is_new
        self.meta = meta
        self._lock = lock

    @staticmethod
    def open(
        environment: Environment,
        path: str,
        *,
        topic: str,
        topic_id: str,
        partition: int,
        incarnation: str,
        pid_start_time: int,
    ) -> PartitionDirectory:
        """Makes the directory, or checks that it holds this partition, and locks it. It waits for
        no sync: `sync` before a log is opened here.

        Raises `DirectoryInUseError` with `holder_pid` and `holder_start_time` when another process
        holds it (a killed process takes a moment to end: try again), `WrongClusterError` when it
        holds another topic, `UnsupportedFormatError`, `StorageError`.
        """
        disk = environment.disk
        holder = DirectoryHolder(
            pid=environment.pid,
            start_time=pid_start_time,
            boot_id=environment.boot_id,
            incarnation=incarnation,
        )
        wanted = PartitionMeta(
            format_version=FORMAT_VERSION, topic=topic, topic_id=topic_id, partition=partition
        )
        try:
            disk.make_dirs(path, syncs=False)
            lock = disk.open(f"{path}/{PARTITION_LOCK}", create=True)
            _lock(path, lock, holder)
            try:
                meta = _whole_partition_meta(disk, path)
                if meta is not None and meta != wanted:
                    raise WrongClusterError(
                        f"{path} holds partition {meta.partition} of topic {meta.topic} "
                        f"({meta.topic_id}), not {partition} of {topic} ({topic_id})."
                    )
                # The name may be that of a process that died before its sync, or whose sync failed.
                # After a failed sync the page cache proves nothing: it is written again.
                is_new = meta is None or not disk.exists(f"{path}/{CHECKPOINT}")
                if is_new:
                    with closing(disk.open(f"{path}/{PARTITION_META}", create=True)) as file:
                        file.truncate(0)
                        checked_file.write_all(file, _json(wanted), 0)
            except BaseException:
                lock.close()
                raise
        except OSError as error:
            raise open_failed(path, error) from error
        return PartitionDirectory(path, wanted, lock, is_new=is_new)

    def check_here(self, disk: Disk) -> None:
        """Raises StorageError where the directory was removed or replaced although that of its
        broker is there: what is written here is as good as lost. Where all is gone the broker
        notices (`DataDirectory.trouble`), and it may be back in a moment."""
        broker_path = os.path.dirname(self.path)
        if not self._lock.is_at(f"{self.path}/{PARTITION_LOCK}") and disk.exists(
            f"{broker_path}/{META}"
        ):
            raise StorageError(f"{self.path} was removed, emptied or replaced.")

    def sync(self, disk: Disk) -> None:
        """In a thread: what `open` has made is durable once the directory is synced. Raises
        StorageError."""
        if self._is_new:
            try:
                with closing(disk.open(f"{self.path}/{PARTITION_META}")) as file:
                    file.sync_data()
            except OSError as error:
                raise open_failed(self.path, error) from error

    def close(self) -> None:
        """Lets go of the lock."""
        self._lock.close()
