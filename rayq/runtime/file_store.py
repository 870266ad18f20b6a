"""`environment.ObjectStore` in a directory: a mount that all nodes share (`file:///mnt/store/rayq`).

An object is a file below the directory. It is written to a temporary file, synced, and renamed;
then the directories are synced. A crash leaves a temporary file, which `list` removes a day later.

The directory itself is never made here: where the mount is missing, so is a directory on it, and
nothing is written to the disk below. Empty directories of objects that were deleted stay.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, TypeVar
from urllib.parse import quote

from rayq.config import DAY_MS, MIB, is_unicode
from rayq.environment import Buffer, Disk, Environment, ObjectMeta
from rayq.errors import (
    ConfigError,
    InvalidRequestError,
    RemoteDeniedError,
    RemoteMissingError,
    RemoteStorageError,
)
from rayq.storage import checked_file

T = TypeVar("T")

PATIENCE_S = 15.0
PATIENT_BYTES_PER_S = MIB
"""The deadline of a call is `PATIENCE_S`, and as long as its bytes take at this pace."""
WHOLE_BYTES_MAX = 32 * MIB
"""The maximum size of an object that is read whole, such as a manifest."""
REFUSED_WHOLE_BYTES = 256 * MIB
"""A larger object is not read whole, whatever a store says its size is."""
LIST_OBJECTS_MAX = 1000
DURABLE_MAX = 10_000
"""Maximum number of directories that are remembered. The others are synced once more."""
_TEMPORARY_SUFFIX = ".part"
_TEMPORARY_KEPT_MS = DAY_MS


class FileStore:
    """See the module. The calls run in threads: one that hangs keeps its thread."""

    def __init__(self, environment: Environment, directory: str) -> None:
        if not os.path.isabs(directory) or os.path.normpath(directory) == "/":
            raise ConfigError(
                f"file://{directory} names no directory for remote storage: give an absolute path "
                "on a mount that all nodes share, as file:///mnt/store/rayq."
            )
        self._environment = environment
        self._directory = os.path.normpath(directory)
        self._durable: set[str] = set()
        """Directories of objects that a loss of power leaves, with all that are above."""

    async def put(self, name: str, data: Buffer) -> None:
        temporary = f".{self._environment.new_id()}{_TEMPORARY_SUFFIX}"
        path, disk = self._path(name), self._environment.disk
        await self._run(
            name, len(data), _put, disk, self._directory, self._durable, path, temporary, data
        )

    async def get(self, name: str, position: int = 0, length: int | None = None) -> bytes:
        size_bytes = WHOLE_BYTES_MAX if length is None else length
        return await self._run(
            name, size_bytes, _get, self._environment.disk, self._path(name), position, length
        )

    async def head(self, name: str) -> ObjectMeta:
        size_bytes, modified_ms = await self._run(name, 0, _head, self._path(name))
        return ObjectMeta(name, size_bytes, modified_ms)

    async def list(self, prefix: str, after: str = "") -> list[ObjectMeta]:
        return await self._run(prefix, 0, _list, self._directory, prefix, after)

    async def delete(self, names: Sequence[str]) -> None:
        paths = [self._path(name) for name in names]
        await self._run(names[0] if names else "", 0, _delete, self._environment.disk, paths)

    async def sign(self, name: str, expires_s: float) -> str:
        return f"file://{quote(self._path(name))}"

    def _path(self, name: str) -> str:
        is_plain = not any(part == "" or part.startswith(".") for part in name.split("/"))
        if not is_plain or not is_unicode(name) or "\0" in name:
            raise InvalidRequestError(f"{name!r} is not the name of an object.")
        return f"{self._directory}/{name}"

    async def _run(
        self, name: str, size_bytes: int, job: Callable[..., T], *arguments: Any
    ) -> T:
        """The result of `job` in a thread; its errors are those of an object store."""
        disk = self._environment.disk
        patience_s = PATIENCE_S + size_bytes / PATIENT_BYTES_PER_S
        whole = f"file://{self._directory}/{name}"
        try:
            async with asyncio.timeout(patience_s):
                return await self._environment.threads.run(
                    _with_directory, disk, self._directory, job, *arguments
                )
        except TimeoutError as error:
            raise RemoteStorageError(
                f"{whole} was not done with after {patience_s:.0f} s: does the mount hang?"
            ) from error
        except FileNotFoundError as error:
            raise RemoteMissingError(f"{whole} does not exist.") from error
        except PermissionError as error:
            raise RemoteDeniedError(f"{whole} is not allowed: {error.strerror}.") from error
        except OSError as error:
            raise RemoteStorageError(f"{whole} failed: {error.strerror or error}.") from error


def _with_directory(disk: Disk, directory: str, job: Callable[..., T], *arguments: Any) -> T:
    if not disk.exists(directory):
        raise NotADirectoryError(
            errno.ENOTDIR, "the directory does not exist. Is it mounted? Else make it, once"
        )
    return job(*arguments)


def _put(
    disk: Disk, root: str, durable: set[str], path: str, temporary: str, data: Buffer
) -> None:
    directory = os.path.dirname(path)
    partial = f"{directory}/{temporary}"
    disk.make_dirs(directory, syncs=False)
    try:
        with closing(disk.open(partial, create=True)) as file:
            checked_file.write_all(file, data, 0)
            file.sync_data()
        disk.rename(partial, path)
    except OSError:
        if disk.exists(partial):
            disk.remove(partial)
        raise
    disk.sync_dir(directory)
    # Whoever made the directories above may have died before it synced them.
    synced = []
    while directory != root and directory not in durable:
        synced.append(directory)
        directory = os.path.dirname(directory)
        disk.sync_dir(directory)
    if len(durable) > DURABLE_MAX:
        durable.clear()
    durable.update(synced)


def _get(disk: Disk, path: str, position: int, length: int | None) -> bytes:
    with closing(disk.open(path, writable=False)) as file:
        if length is None:
            length = max(0, file.size() - position)
            if length > REFUSED_WHOLE_BYTES:
                raise OSError(errno.EFBIG, f"it has {length} bytes, which are not read at once")
        return file.pread(length, position)


def _head(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns // 1_000_000


def _list(directory: str, prefix: str, after: str) -> list[ObjectMeta]:
    found = []
    for name in _walk(directory, "", prefix, after):
        try:
            size_bytes, modified_ms = _head(f"{directory}/{name}")
        except FileNotFoundError:
            continue  # It was deleted meanwhile.
        found.append(ObjectMeta(name, size_bytes, modified_ms))
        if len(found) == LIST_OBJECTS_MAX:
            break
    return found


def _walk(directory: str, above: str, prefix: str, after: str) -> Iterator[str]:
    """The names behind `after` that begin with `prefix`, in their order. Directories are sorted
    with a `/` behind them, as it stands in the names."""
    try:
        entries = list(os.scandir(f"{directory}/{above}"))
    except FileNotFoundError:
        return
    names = {}
    for entry in entries:
        if not is_unicode(entry.name):
            continue  # No object has such a name, and none can be told of it.
        is_directory = entry.is_dir(follow_symlinks=False)
        names[above + entry.name + ("/" if is_directory else "")] = is_directory
    for name in sorted(names):
        if names[name]:
            is_within = name.startswith(prefix) or prefix.startswith(name)
            if is_within and (name > after or after.startswith(name)):
                yield from _walk(directory, name, prefix, after)
        elif name.endswith(_TEMPORARY_SUFFIX):
            _remove_old(f"{directory}/{name}")
        elif name.startswith(prefix) and name > after:
            yield name


def _remove_old(path: str) -> None:
    """Removes a temporary file that a crash has left."""
    try:
        found = os.stat(path)
        if stat.S_ISREG(found.st_mode) and time.time() - found.st_mtime > _TEMPORARY_KEPT_MS / 1000:
            os.remove(path)
    except OSError:
        return


def _delete(disk: Disk, paths: Sequence[str]) -> None:
    for path in paths:
        try:
            disk.remove(path)
        except FileNotFoundError:
            continue
    for directory in sorted({os.path.dirname(path) for path in paths}):
        if disk.exists(directory):
            disk.sync_dir(directory)
