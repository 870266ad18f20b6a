"""A file system that crashes: `environment.Disk` over a page cache and what is durable below it.

A process crash keeps the page cache. At a power loss each file and directory keeps what was synced,
and some of the rest, as on a real disk: any subset of the unsynced pages, with the last write torn
at any byte and the old size, the new one or one between; and of the unsynced changes of a directory
a first part, in their order.
"""

from __future__ import annotations

import errno
import functools
import os
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from proving.simulation.files import Change, Directory, StoredFile
from proving.simulation.trace import Trace
from rayq.environment import Buffer

T = TypeVar("T")

FREE_BYTES = 1 << 40
"""The free bytes of a disk without a capacity."""

SYNC_S = (0.00005, 0.002)
"""The time that a good disk takes for a sync, at least and usually at most; one sync in a hundred
takes 20 times as long."""


class DiskUser(Protocol):
    """The interface of the process that uses the disk."""

    handled_bytes: int
    """Raised by what it writes and reads."""

    def enter_disk(self, *, changes: bool, of_names: bool = False) -> bool:
        """Called before each operation: `changes` for those that change the disk, `of_names` for
        those of them that change names or lengths, or make that durable. Raises `ProcessDied` where
        the process is dead. Returns True where the process dies in this operation."""
        ...

    def die_on_disk(self) -> None:
        """Ends the process and raises `ProcessDied`."""
        ...

    def spend(self, seconds: float) -> None:
        """Lets the calling thread wait for the disk."""
        ...

    def ahead_s(self) -> float:
        """The time that the calling thread has waited already, beyond the loop's time."""
        ...


@dataclass
class Fault:
    """An injected error. `heal` ends it."""

    operations: tuple[str, ...]
    path_part: str
    error: int
    times_left: int | None

    def heal(self) -> None:
        self.times_left = 0


class SimulatedDisk:
    """One disk: the methods of a test, and the look-up of names. Processes use a `ProcessDisk`.

    Knobs: `capacity_bytes` (None: endless); `sync_s`, how long a sync takes, at least and usually
    at most; `short_writes`, `cold_reads` and `writebacks`, the probabilities that a write stops
    early, that `pread_cached` answers None, and that the kernel writes a page early.
    """

    def __init__(
        self,
        name: str,
        rng: random.Random,
        trace: Trace,
        now: Callable[[], float],
        root: Directory | None = None,
    ) -> None:
        self.name = name
        self.capacity_bytes: int | None = None
        self.sync_s = SYNC_S
        self.short_writes = 0.0
        self.cold_reads = 0.05
        self.writebacks = 0.05
        self.rng = rng
        self.trace = trace
        self._now = now
        self._root = root or Directory()
        self._found: dict[str, Directory | StoredFile] = {}
        """The nodes that were looked up since a directory changed, by path."""
        self._changes: list[Change] = []
        self._faults: list[Fault] = []
        self._stalled_until = 0.0

    # --- for the test -----------------------------------------------------------------------------

    def fail(
        self,
        *operations: str,
        path_part: str = "",
        error: int = errno.EIO,
        times: int | None = None,
    ) -> Fault:
        """Makes the operations (open, read, write, truncate, sync, rename, remove, sync_dir,
        make_dirs) on paths that contain `path_part` fail, the next `times` or until `heal`. A
        failed sync loses the pages that it should have written."""
        fault = Fault(operations, path_part, error, times)
        self._faults.append(fault)
        self.trace.note(f"{self.name}: {', '.join(operations)} of *{path_part}* will fail")
        return fault

    def stall(self, seconds: float) -> None:
        """Lets no sync end in the next `seconds`."""
        self._stalled_until = self._now() + seconds
        self.trace.note(f"{self.name}: stalls for {seconds} s")

    def flip_bit(self, path: str, position: int | None = None) -> int:
        """Flips a bit of a file, in the page cache and below. Returns the position of its byte."""
        file = self.find_file(path)
        if position is None:
            position = self.rng.randrange(len(file.current))
        file.flip(position, 1 << self.rng.randrange(8))
        self.trace.note(f"{self.name}: a bit of {path} flips at {position}")
        return position

    def power_loss(self) -> None:
        """A power loss: the disk loses some of the changes that were not synced, or all."""
        self.trace.note(f"{self.name}: power loss")
        stopped: set[Directory] = set()
        keep = self.rng.choice((0.0, 0.5, 0.9, 1.0))
        for change in self._changes:
            if stopped.isdisjoint(change.directories()) and self.rng.random() < keep:
                change.make_durable()
            else:
                stopped.update(change.directories())
        self._changes.clear()
        self._root.power_loss()
        self._found.clear()
        for path, file in self._root.walk():
            file.power_loss(self.rng)
            self.trace.mix(zlib.crc32(path.encode()), zlib.crc32(file.current))

    def copy(self, name: str) -> SimulatedDisk:
        """A backup: another disk with the present files of this disk, all of them durable."""
        disk = SimulatedDisk(name, self.rng, self.trace, self._now, self._root.copy())
        disk.capacity_bytes, disk.sync_s = self.capacity_bytes, self.sync_s
        return disk

    def read(self, path: str) -> bytes:
        """A file's bytes as processes see them."""
        return bytes(self.find_file(path).current)

    def checksum(self, path: str, start: int, stop: int) -> int:
        """CRC-32 of a part of a file as processes see it."""
        with memoryview(self.find_file(path).current) as view, view[start:stop] as part:
            return zlib.crc32(part)

    def is_durable(self, path: str, start: int, stop: int) -> bool:
        """Returns whether a power loss now would leave this part of a file as processes see it."""
        node: Directory | StoredFile | None = self._root
        for part in _parts(path):
            node = node.durable.get(part) if isinstance(node, Directory) else None
        file = self.find_file(path)
        return node is file and file.is_durable(start, stop)

    def paths(self) -> list[str]:
        """The paths of all files, sorted by directory."""
        return [path for path, _ in self._root.walk()]

    # --- for ProcessDisk --------------------------------------------------------------------------

    def check_fault(self, operation: str, path: str) -> None:
        for fault in self._faults:
            if operation in fault.operations and fault.path_part in path and fault.times_left != 0:
                if fault.times_left is not None:
                    fault.times_left -= 1
                self.trace.note(f"{self.name}: {operation} of {path} fails")
                raise _error(fault.error, path)

    def sync_cost_s(self, ahead_s: float) -> float:
        """The time of a sync of a thread that is so far ahead of the loop's time. It waits once for
        a stall."""
        least, usual = self.sync_s
        cost = least + (usual - least) * self.rng.random() ** 3
        if self.rng.random() < 0.01:
            cost *= 20
        return cost + max(0.0, self._stalled_until - self._now() - ahead_s)

    def free_bytes(self) -> int:
        if self.capacity_bytes is None:
            return FREE_BYTES
        return max(0, self.capacity_bytes - sum(len(f.current) for _, f in self._root.walk()))

    def find(self, path: str) -> Directory | StoredFile | None:
        found = self._found.get(path)
        if found is not None:
            return found
        node: Any = self._root
        try:
            for part in _parts(path):
                node = node.entries[part]
        except (KeyError, AttributeError):  # There is no such name, or a file stands in its place.
            return None
        there: Directory | StoredFile = node
        self._found[path] = there
        return there

    def find_file(self, path: str) -> StoredFile:
        node = self.find(path)
        if node is None:
            raise _error(errno.ENOENT, path)
        if isinstance(node, Directory):
            raise _error(errno.EISDIR, path)
        return node

    def find_directory(self, path: str) -> Directory:
        node = self.find(path)
        if node is None:
            raise _error(errno.ENOENT, path)
        if not isinstance(node, Directory):
            raise _error(errno.ENOTDIR, path)
        return node

    def place_of(self, path: str) -> tuple[Directory, str]:
        """The directory that holds, or would hold, the path, and the name in it."""
        parts = _parts(path)
        return self.find_directory("/" + "/".join(parts[:-1])), parts[-1]

    def change(self, *parts: tuple[Directory, str, Directory | StoredFile | None]) -> None:
        """Changes directory entries, durably only after `sync_directory`."""
        change = Change(*parts)
        change.apply()
        self._found.clear()
        self._changes.append(change)
        self.trace.mix(*(zlib.crc32(name.encode()) for _, name, _ in parts))

    def sync_directory(self, directory: Directory) -> None:
        """Makes a directory's changes durable, and the changes of others that must come before."""
        needed = {directory}
        synced: list[Change] = []
        kept: list[Change] = []
        for change in reversed(self._changes):
            if needed.isdisjoint(change.directories()):
                kept.append(change)
            else:
                needed.update(change.directories())
                synced.append(change)
        for change in reversed(synced):
            change.make_durable()
        self._changes = kept[::-1]


class ProcessDisk:
    """`environment.Disk` for one process. An operation in which the process dies has happened, or
    has not, or (for a write) has happened in part."""

    def __init__(self, disk: SimulatedDisk, user: DiskUser) -> None:
        self.disk = disk
        self._user = user
        self._files: dict[ProcessFile, None] = {}

    def release(self) -> None:
        """Closes the files and frees the locks of the process, which died."""
        for file in list(self._files):
            file.unlock()
        self._files.clear()

    def operate(self, operation: str, path: str, action: Callable[[], T]) -> T:
        """Does `action` unless a fault is set. The process dies before or after it when its time
        has come."""
        dies = self._user.enter_disk(
            changes=operation not in ("read", "open"),
            of_names=operation not in ("read", "open", "sync"),
        )
        if dies and self.disk.rng.random() < 0.5:
            self._user.die_on_disk()
        self.disk.check_fault(operation, path)
        result = action()
        if dies:
            self._user.die_on_disk()
        return result

    def look(self) -> SimulatedDisk:
        """The disk, for questions that cannot fail."""
        self._user.enter_disk(changes=False)
        return self.disk

    def write(self, file: StoredFile, path: str, data: Buffer, position: int) -> int:
        content = bytes(data)
        self._user.handled_bytes += len(content)
        disk = self.disk
        dies = self._user.enter_disk(changes=True)
        if dies:
            file.write(content[: disk.rng.randint(0, len(content))], position)
            self._user.die_on_disk()
        disk.check_fault("write", path)
        if disk.short_writes and content and disk.rng.random() < disk.short_writes:
            content = content[: disk.rng.randrange(len(content)) + 1]
        growth = position + len(content) - len(file.current)
        if disk.capacity_bytes is not None and growth > 0:
            missing = growth - disk.free_bytes()
            if missing >= len(content):
                raise _error(errno.ENOSPC, path)
            if missing > 0:
                content = content[:-missing]
        file.write(content, position)
        disk.trace.mix(position, len(content), zlib.crc32(content))
        if disk.writebacks and disk.rng.random() < disk.writebacks:
            file.write_back(disk.rng)
        return len(content)

    def sync(self, file: StoredFile, path: str) -> None:
        self._user.spend(self.disk.sync_cost_s(self._user.ahead_s()))
        try:
            self.operate("sync", path, file.sync)
        except OSError:
            file.lose_dirty_pages(self.disk.rng)
            raise
        self.disk.trace.mix(zlib.crc32(path.encode()))

    def read(self, file: StoredFile, path: str, length: int, position: int) -> bytes:
        content = self.operate(
            "read", path, lambda: bytes(file.current[position : position + length])
        )
        self._user.handled_bytes += len(content)
        return content

    def closed(self, file: ProcessFile) -> None:
        self._files.pop(file, None)

    # --- environment.Disk -------------------------------------------------------------------------

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> ProcessFile:
        disk = self.look()
        disk.check_fault("open", path)
        node = disk.find(path)
        if node is None and create:
            node = StoredFile()
            directory, name = disk.place_of(path)
            self.operate("create", path, lambda: disk.change((directory, name, node)))
        file = ProcessFile(self, disk.find_file(path), path, writable)
        self._files[file] = None
        return file

    def exists(self, path: str) -> bool:
        return self.look().find(path) is not None

    def list(self, path: str) -> list[str]:
        node = self.look().find(path)
        return sorted(node.entries) if isinstance(node, Directory) else []

    def make_dirs(self, path: str, *, syncs: bool = True) -> None:
        disk = self.look()
        above = ""
        for name in _parts(path):
            below = f"{above}/{name}"
            if disk.find(below) is None:
                change = (disk.find_directory(above or "/"), name, Directory())
                self.operate("make_dirs", path, lambda change=change: disk.change(change))  # type: ignore[misc]
                if syncs:
                    self.sync_dir(above or "/")
            above = below
        disk.find_directory(path)

    def rename(self, source: str, target: str) -> None:
        disk = self.look()
        from_directory, from_name = disk.place_of(source)
        to_directory, to_name = disk.place_of(target)
        node = disk.find(source)
        if node is None:
            raise _error(errno.ENOENT, source)
        old = disk.find(target)
        if isinstance(old, Directory) and not isinstance(node, Directory):
            raise _error(errno.EISDIR, target)
        if isinstance(old, Directory) and old.entries:
            raise _error(errno.ENOTEMPTY, target)
        if isinstance(old, StoredFile) and isinstance(node, Directory):
            raise _error(errno.ENOTDIR, target)
        if old is node:
            return
        parts = ((from_directory, from_name, None), (to_directory, to_name, node))
        self.operate("rename", source, lambda: disk.change(*parts))

    def remove(self, path: str) -> None:
        disk = self.look()
        disk.find_file(path)
        directory, name = disk.place_of(path)
        self.operate("remove", path, lambda: disk.change((directory, name, None)))

    def remove_tree(self, path: str) -> None:
        disk = self.look()
        for name in list(disk.find_directory(path).entries):
            below = f"{path.rstrip('/')}/{name}"
            if isinstance(disk.find(below), Directory):
                self.remove_tree(below)
            else:
                self.remove(below)
        directory, name = disk.place_of(path)
        self.operate("remove", path, lambda: disk.change((directory, name, None)))

    def sync_dir(self, path: str) -> None:
        directory = self.look().find_directory(path)
        self._user.spend(self.disk.sync_cost_s(self._user.ahead_s()))
        self.operate("sync_dir", path, lambda: self.disk.sync_directory(directory))

    def free_bytes(self, path: str) -> int:
        return self.look().free_bytes()


class ProcessFile:
    """`environment.File` on a simulated disk."""

    def __init__(self, disk: ProcessDisk, file: StoredFile, path: str, writable: bool) -> None:
        self._disk = disk
        self._file = file
        self._path = path
        self._writable = writable
        self._closed = False

    def pwrite(self, data: Buffer, position: int) -> int:
        self._check_writable()
        return self._disk.write(self._file, self._path, data, position)

    def pread(self, length: int, position: int) -> bytes:
        self._check_open()
        return self._disk.read(self._file, self._path, length, position)

    def pread_cached(self, length: int, position: int) -> bytes | None:
        self._check_open()
        disk = self._disk.look()
        if disk.cold_reads and disk.rng.random() < disk.cold_reads:
            return None
        return self.pread(length, position)

    def size(self) -> int:
        self._check_open()
        self._disk.look()
        return len(self._file.current)

    def truncate(self, size: int) -> None:
        self._check_writable()
        self._disk.operate("truncate", self._path, lambda: self._file.truncate(size))

    def sync_data(self) -> None:
        self._check_open()
        self._disk.sync(self._file, self._path)

    def is_at(self, path: str) -> bool:
        return self._disk.look().find(path) is self._file

    def try_lock(self) -> bool:
        self._check_open()
        self._disk.look()
        if self._file.locked_by not in (None, self):
            return False
        self._file.locked_by = self
        return True

    def close(self) -> None:
        if not self._closed:
            self._disk.look()
            self._closed = True
            self.unlock()
            self._disk.closed(self)

    def unlock(self) -> None:
        if self._file.locked_by is self:
            self._file.locked_by = None

    def _check_open(self) -> None:
        if self._closed:
            raise _error(errno.EBADF, self._path)

    def _check_writable(self) -> None:
        if self._closed or not self._writable:
            raise _error(errno.EBADF, self._path)


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


@functools.lru_cache
def _parts(path: str) -> tuple[str, ...]:
    assert path.startswith("/"), f"{path!r} is not absolute"
    parts = tuple(part for part in path.split("/") if part)
    assert "." not in parts and ".." not in parts, path
    return parts
