"""Where a checkpoint's files are: a local directory, or any file system that fsspec knows.

Both replace a file as a whole. A local one is durable when `write` returns (temporary file,
fdatasync, rename, fsync of the directory), and its lock is the kernel's: it goes with the process.
Elsewhere a file is written under another name and moved, which is as durable as the file system
makes it; and the lock is a lease, a file that its holder rewrites every few seconds (`LeaseLock`).
"""

from __future__ import annotations

import fcntl
import os
import posixpath
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from rayq.client.environment import boot_id
from rayq.environment import Disk, File
from rayq.errors import CheckpointError, CheckpointInUseError, MissingExtraError, StorageError
from rayq.runtime.processes import process_start_time
from rayq.storage import checked_file
from rayq.storage.disk import LocalDisk, LocalFile

ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/(?!/)")
"""`s3:/bucket/x`, as Hadoop's paths may be written: not to be taken for a directory named `s3:`."""
LOCK = "lock"
LEASE_S = 30.0
"""A lease that its holder did not renew for so long is over."""
RENEWALS_PER_LEASE = 6
SETTLE_S = 1.0
"""Between taking a lease and looking whether another process took it at the same moment."""


class CheckpointHolder(msgspec.Struct, frozen=True):
    """Who uses a checkpoint. `started` is the process's start (clock ticks since boot): with the
    pid, the boot and the pid namespace it names one process for ever. The host's name is for people
    alone: machines and containers may share one."""

    host: str
    pid: int
    started: int | None
    run_id: str
    boot_id: str | None = None
    pid_namespace: str | None = None
    """As Linux names them; None where it does not say (or an earlier version did not ask)."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (run {self.run_id})"


class Lease(msgspec.Struct, frozen=True):
    """Content of the lock file that is no kernel's lock."""

    holder: CheckpointHolder
    beat: int
    """Grows with each renewal."""


class Store(Protocol):
    """The files of one checkpoint, by paths relative to it. All methods raise CheckpointError where
    the disk or the file system fails."""

    path: str

    def make_directories(self, *names: str) -> None: ...

    def read(self, name: str) -> bytes | None:
        """None: no such file."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Replaces a file, atomically."""
        ...

    def names(self, directory: str) -> list[str]: ...

    def remove(self, name: str) -> None:
        """Does nothing where there is no such file."""
        ...

    def lock(self) -> None:
        """Raises CheckpointInUseError."""
        ...

    def check_lock(self) -> None:
        """Raises CheckpointInUseError where the lock was lost."""
        ...

    def unlock(self) -> None: ...


def this_process(run_id: str) -> CheckpointHolder:
    pid = os.getpid()
    return CheckpointHolder(
        socket.gethostname(), pid, process_start_time(pid), run_id, boot_id(), _pid_namespace()
    )


def _pid_namespace() -> str | None:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def open_store(path: str | os.PathLike[str], run_id: str) -> Store:
    """The store for a path or URL. Raises CheckpointError, MissingExtraError."""
    text = os.fspath(path)
    if not isinstance(text, str) or not text:
        raise CheckpointError(f"checkpoint={path!r}: give the path of a directory, or a URL.")
    if found := ONE_SLASH.match(text):
        raise CheckpointError(
            f"checkpoint={path!r} looks like a URL that lacks a slash: write "
            f"{found[1]}://... (as a str, a Path takes a slash away), or ./{text} for a directory."
        )
    protocol, separator, rest = text.partition("://")
    if not separator or protocol in ("file", "local"):
        local = os.path.abspath(os.path.expanduser(rest if separator else text))
        return LocalStore(LocalDisk(), local, this_process(run_id))
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError(
            f"The checkpoint {text} needs fsspec: pip install fsspec, and what it needs for "
            f"{protocol}."
        ) from error
    try:
        files, root = fsspec.core.url_to_fs(text)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"The checkpoint {text} cannot be opened: {error}") from error
    return FsspecStore(files, root, text, this_process(run_id))


# --- a local directory ----------------------------------------------------------------------------


class LocalStore:
    """A directory of this machine (or one that is mounted, where flock works)."""

    def __init__(self, disk: Disk, path: str, holder: CheckpointHolder) -> None:
        self.path = path
        self._disk = disk
        self._holder = holder
        self._lock: File | None = None

    def make_directories(self, *names: str) -> None:
        try:
            for name in names:
                checked_file.make_directory(self._disk, f"{self.path}/{name}")
        except OSError as error:
            raise self._failed("made", self.path, error) from error

    def read(self, name: str) -> bytes | None:
        try:
            return checked_file.read_whole(self._disk, f"{self.path}/{name}")
        except (OSError, StorageError) as error:
            raise self._failed("read", name, error) from error

    def write(self, name: str, data: bytes) -> None:
        try:
            checked_file.replace(self._disk, f"{self.path}/{name}", data)
        except OSError as error:
            raise self._failed("written", name, error) from error

    def names(self, directory: str) -> list[str]:
        try:
            return self._disk.list(f"{self.path}/{directory}")
        except OSError as error:
            raise self._failed("listed", directory, error) from error

    def remove(self, name: str) -> None:
        try:
            self._disk.remove(f"{self.path}/{name}")
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._failed("removed", name, error) from error

    def lock(self) -> None:
        try:
            checked_file.make_directory(self._disk, self.path)
            file = self._disk.open(f"{self.path}/{LOCK}", create=True)
            try:
                if not file.try_lock():
                    raise _in_use(self.path, _holder_in(file.pread(file.size(), 0)))
                file.truncate(0)
                checked_file.write_all(file, msgspec.json.encode(self._holder), 0)
            except BaseException:
                file.close()
                raise
        except OSError as error:
            raise self._failed("locked", LOCK, error) from error
        self._lock = file

    def check_lock(self) -> None:
        assert self._lock is not None, "a kernel's lock is not lost"

    def unlock(self) -> None:
        if self._lock is not None:
            # A child that was forked shares the open file: until it ends as well, closing ours
            # does not unlock. Nor may it unlock what is its parent's.
            if isinstance(self._lock, LocalFile) and self._holder.pid == os.getpid():
                fcntl.flock(self._lock.descriptor, fcntl.LOCK_UN)
            self._lock.close()
            self._lock = None

    def _failed(self, what: str, name: str, error: Exception) -> CheckpointError:
        return CheckpointError(f"{name} of the checkpoint {self.path} cannot be {what}: {error}")


def _holder_in(content: bytes) -> CheckpointHolder | None:
    try:
        return msgspec.json.decode(content, type=CheckpointHolder)
    except msgspec.DecodeError:
        return None  # it has yet to sign


def _in_use(path: str, holder: CheckpointHolder | None) -> CheckpointInUseError:
    who = "another process" if holder is None else str(holder)
    return CheckpointInUseError(
        f"The checkpoint {path} is in use by {who}. One streaming query at a time may use it: stop "
        "that one first, or give this one a checkpoint of its own."
    )


# --- fsspec ---------------------------------------------------------------------------------------


class FsspecStore:
    """Files of an fsspec file system, whose errors may be of any class."""

    def __init__(self, files: Any, root: str, url: str, holder: CheckpointHolder) -> None:
        self.path = url
        self._files = files
        self._root = root.rstrip("/")
        self._lease = LeaseLock(self, holder)

    def make_directories(self, *names: str) -> None:
        try:
            for name in names:
                self._files.makedirs(self._full(name), exist_ok=True)
        except Exception as error:
            raise self._failed("made", self.path, error) from error

    def read(self, name: str) -> bytes | None:
        try:
            self._files.invalidate_cache()
            found: bytes = self._files.cat_file(self._full(name))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._failed("read", name, error) from error
        return found

    def write(self, name: str, data: bytes) -> None:
        full = self._full(name)
        temporary = full + checked_file.TEMPORARY_SUFFIX
        try:
            self._files.pipe_file(temporary, data)
            self._files.mv(temporary, full)
        except Exception as error:
            raise self._failed("written", name, error) from error

    def names(self, directory: str) -> list[str]:
        try:
            self._files.invalidate_cache()
            found = self._files.ls(self._full(directory), detail=False)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise self._failed("listed", directory, error) from error
        return sorted(posixpath.basename(name.rstrip("/")) for name in found)

    def remove(self, name: str) -> None:
        try:
            self._files.rm_file(self._full(name))
        except FileNotFoundError:
            return
        except Exception as error:
            raise self._failed("removed", name, error) from error

    def lock(self) -> None:
        self.make_directories("")
        self._lease.take()

    def check_lock(self) -> None:
        self._lease.check()

    def unlock(self) -> None:
        self._lease.release()

    def _full(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _failed(self, what: str, name: str, error: Exception) -> CheckpointError:
        return CheckpointError(f"{name} of the checkpoint {self.path} cannot be {what}: {error}")


class LeaseLock:
    """A lock by a file, for file systems without locks.

    The file names its holder and a beat that grows every few seconds. Who finds it watches: a beat
    that moves means in use; one that stands still for `LEASE_S` means that the holder is dead (at
    once where it was a process of this boot and pid namespace that is gone). No clocks are
    compared.

    Without a compare-and-swap this is no proof: of two that take a dead holder's lease at the same
    moment the later writer wins, and the other sees so after `SETTLE_S`, or before its next batch
    (`check`). So two may decide one batch only where a process stood still for longer than that
    between the look and the write.
    """

    def __init__(
        self,
        store: Store,
        holder: CheckpointHolder,
        *,
        lease_s: float = LEASE_S,
        settle_s: float = SETTLE_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._holder = holder
        self._lease_s = lease_s
        self._settle_s = settle_s
        self._sleep = sleep
        self._beat = 0
        self._is_over = threading.Event()
        self._renewer: threading.Thread | None = None

    def take(self) -> None:
        """Raises CheckpointInUseError."""
        current = self._read()
        if current is not None and not _is_gone(current.holder):
            self._wait_until_over(current)
        self._write()
        self._sleep(self._settle_s)
        self.check()
        self._renewer = threading.Thread(target=self._renew, name="rayq-checkpoint", daemon=True)
        self._renewer.start()

    def check(self) -> None:
        """Raises CheckpointInUseError where another holds it by now."""
        current = self._read()
        if current is None or current.holder != self._holder:
            raise _in_use(self._store.path, None if current is None else current.holder)

    def release(self) -> None:
        self._is_over.set()
        if self._renewer is not None:
            self._renewer.join()
            self._renewer = None
            current = self._read()
            if current is not None and current.holder == self._holder:
                self._store.remove(LOCK)

    def _wait_until_over(self, seen: Lease) -> None:
        steps = RENEWALS_PER_LEASE * 2
        for _ in range(steps):
            self._sleep(self._lease_s / steps)
            current = self._read()
            if current is None:
                return
            if current != seen:
                raise _in_use(self._store.path, current.holder)

    def _renew(self) -> None:
        while not self._is_over.wait(self._lease_s / RENEWALS_PER_LEASE):
            try:
                current = self._read()
                if current is None or current.holder != self._holder:
                    return  # taken by another: `check` will say so
                self._beat += 1
                self._write()
            except CheckpointError:
                continue  # tried again, long before the lease is over

    def _read(self) -> Lease | None:
        content = self._store.read(LOCK)
        if content is None:
            return None
        try:
            return msgspec.json.decode(content, type=Lease)
        except msgspec.DecodeError as error:
            raise CheckpointError(
                f"{LOCK} of the checkpoint {self._store.path} is not readable ({error}): remove it "
                "if no query uses the checkpoint."
            ) from error

    def _write(self) -> None:
        self._store.write(LOCK, msgspec.json.encode(Lease(self._holder, self._beat)))


def _is_gone(holder: CheckpointHolder) -> bool:
    """A process that this one would see, and that has ended; of others nothing is known."""
    if holder.started is None or None in (holder.boot_id, holder.pid_namespace):
        return False
    if (holder.boot_id, holder.pid_namespace) != (boot_id(), _pid_namespace()):
        return False
    return process_start_time(holder.pid) != holder.started
