"""Files of a checkpoint, in a local directory or in any file system that fsspec knows.

Both replace a file as a whole. A local file is durable when `write` returns (temporary file,
fdatasync, rename, fsync of the directory), and the lock there is the kernel's, which ends with the
process. Elsewhere a file is written under another name and moved, which is as durable as the file
system makes it. The lock there is a lease: a file that its holder rewrites every few seconds
(`LeaseLock`).
"""

from __future__ import annotations

import fcntl
import os
import posixpath
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import msgspec

from rayq.client.environment import boot_id
from rayq.config.urls import check_url, without_credentials
from rayq.environment import Disk, File
from rayq.errors import CheckpointError, CheckpointInUseError, ConfigError, MissingExtraError
from rayq.runtime.processes import process_start_time
from rayq.storage import checked_file
from rayq.storage.disk import LocalDisk, LocalFile

ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/(?!/)")
"""Hadoop's paths may look like `s3:/bucket/x`. That is not a directory with the name `s3:`."""
LOCK = "lock"
LEASE_S = 30.0
"""A lease ends when its holder has not renewed it for this long."""
RENEWALS_PER_LEASE = 6
SETTLE_S = 1.0
"""Time after which a process that took a lease checks whether another process took it as well."""


class CheckpointHolder(msgspec.Struct, frozen=True):
    """The process that uses a checkpoint. `started` is the start of the process (clock ticks since
    boot). With the pid, the boot and the pid namespace it identifies one process forever. The
    host's name is only for people, because machines and containers may share a name."""

    host: str
    pid: int
    started: int | None
    run_id: str
    boot_id: str | None = None
    pid_namespace: str | None = None
    """Linux's name for it. None where Linux gives none, or an earlier version wrote the file."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (run {self.run_id})"


class Lease(msgspec.Struct, frozen=True):
    """The content of the lock file where the lock is a lease."""

    holder: CheckpointHolder
    beat: int
    """Grows with each renewal."""


class Store(Protocol):
    """The files of one checkpoint, by paths relative to it. All methods raise CheckpointError if
    the disk or the file system fails."""

    path: str

    def make_directories(self, *names: str) -> None: ...

    def read(self, name: str) -> bytes | None:
        """The content of a file, or None when there is no such file."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Replaces a file, atomically."""
        ...

    def names(self, directory: str) -> list[str]: ...

    def remove(self, name: str) -> None:
        """Removes a file; does nothing if it does not exist."""
        ...

    def lock(self) -> None:
        """Takes the lock. Raises CheckpointInUseError."""
        ...

    def check_lock(self) -> None:
        """Raises CheckpointInUseError if the lock was lost."""
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
            f"checkpoint={without_credentials(text)!r} looks like a URL that lacks a slash: write "
            f"{found[1]}://... (as a str, a Path takes a slash away), or begin with ./ for a "
            "directory."
        )
    protocol, separator, rest = text.partition("://")
    if not separator or protocol in ("file", "local"):
        local = os.path.abspath(os.path.expanduser(rest if separator else text))
        return LocalStore(LocalDisk(), local, this_process(run_id))
    try:
        check_url("checkpoint", text, allows_user=True)
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
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
        raise CheckpointError(
            f"The checkpoint {text} cannot be opened: {without_credentials(str(error))}"
        ) from error
    return FsspecStore(files, root, text, this_process(run_id))


@contextmanager
def _failing(path: str, name: str, what: str) -> Iterator[None]:
    """Raises errors of the file system, which may be of any class, as CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        said = without_credentials(str(error))
        raise CheckpointError(f"{name} of the checkpoint {path} cannot be {what}: {said}") from (
            error
        )


# --- a local directory ----------------------------------------------------------------------------


class LocalStore:
    """A directory of this machine (or one that is mounted, where flock works)."""

    def __init__(self, disk: Disk, path: str, holder: CheckpointHolder) -> None:
        self.path = path
        self._disk = disk
        self._holder = holder
        self._lock: File | None = None

    def make_directories(self, *names: str) -> None:
        with _failing(self.path, self.path, "made"):
            for name in names:
                checked_file.make_directory(self._disk, f"{self.path}/{name}")
                # A process that was killed may have left files whose names are not on disk yet.
                # The caller goes by them.
                self._disk.sync_dir(f"{self.path}/{name}")

    def read(self, name: str) -> bytes | None:
        with _failing(self.path, name, "read"):
            return checked_file.read_whole(self._disk, f"{self.path}/{name}")

    def write(self, name: str, data: bytes) -> None:
        with _failing(self.path, name, "written"):
            checked_file.replace(self._disk, f"{self.path}/{name}", data)

    def names(self, directory: str) -> list[str]:
        with _failing(self.path, directory, "listed"):
            return self._disk.list(f"{self.path}/{directory}")

    def remove(self, name: str) -> None:
        with _failing(self.path, name, "removed"), suppress(FileNotFoundError):
            self._disk.remove(f"{self.path}/{name}")

    def lock(self) -> None:
        with _failing(self.path, LOCK, "locked"):
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
        self._lock = file

    def check_lock(self) -> None:
        assert self._lock is not None, "a kernel's lock is not lost"

    def unlock(self) -> None:
        if self._lock is not None:
            # A forked child shares the open file: as long as the child runs, closing the file here
            # does not unlock it. And the child must not unlock the file of its parent.
            if isinstance(self._lock, LocalFile) and self._holder.pid == os.getpid():
                fcntl.flock(self._lock.descriptor, fcntl.LOCK_UN)
            self._lock.close()
            self._lock = None


def _holder_in(content: bytes) -> CheckpointHolder | None:
    try:
        return msgspec.json.decode(content, type=CheckpointHolder)
    except msgspec.DecodeError:
        return None  # The holder has not written its line yet.


def _in_use(path: str, holder: CheckpointHolder | None) -> CheckpointInUseError:
    who = "another process" if holder is None else str(holder)
    return CheckpointInUseError(
        f"The checkpoint {path} is in use by {who}. One streaming query at a time may use it: stop "
        "that one first, or give this one a checkpoint of its own."
    )


# --- fsspec ---------------------------------------------------------------------------------------


class FsspecStore:
    """The files of an fsspec file system, whose errors may be of any class."""

    def __init__(self, files: Any, root: str, url: str, holder: CheckpointHolder) -> None:
        self.path = url
        self._files = files
        self._root = root.rstrip("/")
        self._lease = LeaseLock(self, holder)

    def make_directories(self, *names: str) -> None:
        with _failing(self.path, self.path, "made"):
            for name in names:
                self._files.makedirs(self._full(name), exist_ok=True)

    def read(self, name: str) -> bytes | None:
        with _failing(self.path, name, "read"), suppress(FileNotFoundError):
            self._files.invalidate_cache()
            found: bytes = self._files.cat_file(self._full(name))
            return found
        return None

    def write(self, name: str, data: bytes) -> None:
        temporary = self._full(name) + checked_file.TEMPORARY_SUFFIX
        with _failing(self.path, name, "written"):
            self._files.pipe_file(temporary, data)
            self._files.mv(temporary, self._full(name))

    def names(self, directory: str) -> list[str]:
        with _failing(self.path, directory, "listed"), suppress(FileNotFoundError):
            self._files.invalidate_cache()
            found = self._files.ls(self._full(directory), detail=False)
            return sorted(posixpath.basename(name.rstrip("/")) for name in found)
        return []

    def remove(self, name: str) -> None:
        with _failing(self.path, name, "removed"), suppress(FileNotFoundError):
            self._files.rm_file(self._full(name))

    def lock(self) -> None:
        self.make_directories("")
        self._lease.take()

    def check_lock(self) -> None:
        self._lease.check()

    def unlock(self) -> None:
        self._lease.release()

    def _full(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


class LeaseLock:
    """A lock by a file, for file systems without locks.

    The file names its holder, and a number (`beat`) that the holder raises every few seconds. A
    process that finds the file watches it. When the number grows, the checkpoint is in use. When it
    does not grow for `LEASE_S`, the holder is dead; a holder of this boot and pid namespace whose
    process is gone counts as dead at once. No clocks are compared.

    Without a compare-and-swap this is not proof. When two processes take a dead holder's lease at
    the same moment, the later writer wins, and the other finds that out after `SETTLE_S`, or before
    its next batch (`check`). So two processes can decide one batch only if one of them was
    suspended for longer than that between its check and its write.
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
        """Takes the lease. Raises CheckpointInUseError."""
        current = self._read()
        if current is not None and not _is_gone(current.holder):
            self._wait_until_over(current)
        self._write()
        self._sleep(self._settle_s)
        self.check()
        self._renewer = threading.Thread(target=self._renew, name="rayq-checkpoint", daemon=True)
        self._renewer.start()

    def check(self) -> None:
        """Raises CheckpointInUseError if another process holds the lease by now."""
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
                    return  # Another process took the lease: `check` reports it.
                self._beat += 1
                self._write()
            except CheckpointError:
                continue  # There is time for another attempt before the lease ends.

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
    """Returns whether the holder has certainly ended. Only processes of this boot and namespace are
    known."""
    if holder.started is None or None in (holder.boot_id, holder.pid_namespace):
        return False
    if (holder.boot_id, holder.pid_namespace) != (boot_id(), _pid_namespace()):
        return False
    return process_start_time(holder.pid) != holder.started
