"""The real disk: `environment.Disk` through the module `os`."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import threading

from rayq.environment import Buffer

FILE_MODE = 0o600
"""Files hold users' records and the cluster's secret, so only their owner may read them."""
DIRECTORY_MODE = 0o700


class LocalFile:
    """One file descriptor. It is closed by `close`, or when the last reference to it goes. So a
    reader in a thread can continue with a file that the log has deleted meanwhile."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @property
    def descriptor(self) -> int:
        """The number of the descriptor. Raises OSError when it is closed."""
        if self._descriptor is None:
            raise OSError(errno.EBADF, "the file is closed")
        return self._descriptor

    def pwrite(self, data: Buffer, position: int) -> int:
        return os.pwrite(self.descriptor, data, position)

    def pread(self, length: int, position: int) -> bytes:
        return os.pread(self.descriptor, length, position)

    def pread_cached(self, length: int, position: int) -> bytes | None:
        buffer = bytearray(length)
        try:
            got = os.preadv(self.descriptor, [buffer], position, os.RWF_NOWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno == errno.EOPNOTSUPP:
                return None
            raise
        if got == length:
            return bytes(buffer)
        if position + got < self.size():
            return None
        return bytes(memoryview(buffer)[:got])

    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def truncate(self, size: int) -> None:
        os.ftruncate(self.descriptor, size)

    def sync_data(self) -> None:
        os.fdatasync(self.descriptor)

    def try_lock(self) -> bool:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_at(self, path: str) -> bool:
        try:
            return os.path.samestat(os.stat(path), os.fstat(self.descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


class _SpareDescriptor:
    """One file descriptor in reserve. It is free for others within a `with` block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._keep()

    def _keep(self) -> None:
        with contextlib.suppress(OSError):
            self._descriptor = os.open(os.devnull, os.O_RDONLY)

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __exit__(self, *_: object) -> None:
        self._keep()
        self._lock.release()


_spare = _SpareDescriptor()


def _sync_dir(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LocalDisk:
    """The file system of this machine. Every method may raise OSError."""

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> LocalFile:
        flags = os.O_RDWR if writable else os.O_RDONLY
        if create:
            flags |= os.O_CREAT
        return LocalFile(os.open(path, flags, FILE_MODE))

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def list(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def make_dirs(self, path: str, *, syncs: bool = True) -> None:
        if os.path.isdir(path):
            return
        parent = os.path.dirname(path)
        if parent != path:
            self.make_dirs(parent, syncs=syncs)
        try:
            os.mkdir(path, DIRECTORY_MODE)
        except FileExistsError:
            return
        if syncs:
            self.sync_dir(parent)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def remove(self, path: str) -> None:
        os.remove(path)

    def remove_tree(self, path: str) -> None:
        shutil.rmtree(path)

    def sync_dir(self, path: str) -> None:
        try:
            _sync_dir(path)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            # A flush that fails ends its replica. A lack of descriptors must not do that.
            with _spare:
                _sync_dir(path)

    def free_bytes(self, path: str) -> int:
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize
