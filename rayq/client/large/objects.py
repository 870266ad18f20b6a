"""Objects of large values: files below a directory, or objects of a store that fsspec knows.

The caller has the credentials of its own process; a record has none. All of this blocks. A crash
may leave an object that no record names: `rayq values collect` removes it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from rayq.config.urls import without_credentials
from rayq.errors import (
    LargeValueRefusedError,
    MissingExtraError,
    RayqError,
    RemoteDeniedError,
    RemoteListError,
    RemoteMissingError,
    RemoteStorageError,
)

VALUE_SUFFIX = ".value"
TEMPORARY_SUFFIX = ".tmp"
"""Suffix of a file that is being written."""
_NO_OBJECT = (errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR)
"""Errors that mean that the name is not that of an object, and never will be."""


_VALUE = re.compile(
    r"(?P<topic>[A-Za-z0-9._-]{1,249})/(?P<id>[0-9a-f]{32})\.value(?P<rest>\.tmp)?"
)
"""The names that `object_uri` gives to objects below the prefix of a cluster."""


class StoredObject(NamedTuple):
    """A large value in the store. `time_s` is its time of writing, Unix time by the store."""

    uri: str
    size_bytes: int
    time_s: float
    topic: str
    value_id: str
    """The id in hex. Empty for a leftover of a crash."""


def object_uri(url: str, cluster_id: str, topic: str, value_id: bytes) -> str:
    """The URI of a value's object. No other value has the name."""
    return f"{prefix_of(url, cluster_id)}{topic}/{value_id.hex()}{VALUE_SUFFIX}"


def prefix_of(url: str, cluster_id: str) -> str:
    """The prefix of the objects of a cluster."""
    return f"{url.rstrip('/')}/{cluster_id}/"


def is_below(uri: str, url: str) -> bool:
    """Returns whether a reader that may read objects below `url` may read `uri`, which a record
    names."""
    prefix = url.rstrip("/") + "/"
    rest = unquote(uri[len(prefix) :])
    is_plain = not any(part in ("", ".", "..") for part in rest.split("/")) and "\\" not in rest
    return uri.startswith(prefix) and is_plain and not {"?", "#", "\0", ":"} & set(rest)


def write_object(uri: str, value: bytes) -> None:
    """Writes an object; it is durable when this returns. Raises RemoteStorageError,
    RemoteDeniedError, MissingExtraError."""
    path = _local_path(uri)
    if path is not None:
        _write_file(path, value)
        return
    files, name = _opened(uri)
    try:
        files.makedirs(files._parent(name), exist_ok=True)
        files.pipe_file(name, value)
        files.invalidate_cache()
        size_bytes = int(files.info(name)["size"])
    except Exception as error:
        raise _failure(uri, error) from error
    if size_bytes != len(value):
        raise RemoteStorageError(
            f"{uri} has {size_bytes} bytes in the store, and {len(value)} were written."
        )


def read_object(uri: str, size_bytes: int, url: str) -> bytes:
    """Reads an object, or its beginning if it is longer than `size_bytes`. `url` is the store that
    has it. Raises RemoteMissingError, RemoteStorageError (the store is unavailable),
    RemoteDeniedError, MissingExtraError."""
    path = _local_path(uri)
    root = _local_path(url)
    try:
        if root is not None and not os.path.isdir(root):
            raise RemoteStorageError(f"{url} is not there: is the store mounted here?")
        if path is not None:
            return _read_file(uri, path, size_bytes + 1)
        files, name = _opened(uri)
        data: bytes = files.cat_file(name, start=0, end=size_bytes + 1)
    except RayqError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_OBJECT:
            raise RemoteMissingError(f"{uri} is not an object: {error}") from error
        raise _failure(uri, error) from error
    return data


def list_objects(prefix: str) -> Iterator[StoredObject]:
    """Lists all values below a prefix, which ends with `/`, and leftovers of crashes. Objects with
    names that rayq does not give belong to somebody else, and are left out. Raises as `read_object`
    does, and RemoteListError if the store lists objects that are not below; a prefix that does not
    exist gives nothing."""
    path = _local_path(prefix)
    try:
        if path is not None:
            yield from _listed_files(prefix, path)
            return
        files, root = _opened(prefix)
        files.invalidate_cache()
        root = root.rstrip("/")
        found = files.find(root, detail=True) if files.exists(root) else {}
    except RayqError:
        raise
    except Exception as error:
        raise _failure(prefix, error) from error
    folder = root.lstrip("/") + "/"
    for name, info in sorted(found.items()):
        if not name.lstrip("/").startswith(folder):
            raise RemoteListError(
                f"{prefix} was listed, and {name!r} is not below it: nothing is removed by such a "
                "list."
            )
        rest = name.lstrip("/").removeprefix(folder)
        if (value := _parsed(rest)) is not None:
            uri = prefix + rest
            yield StoredObject(uri, int(info["size"]), _time_of(uri, info), *value)


def _parsed(rest: str) -> tuple[str, str] | None:
    """The `(topic, value id)` of an object's name below the cluster's prefix; None for other
    names."""
    match = _VALUE.fullmatch(rest)
    if match is None or match["topic"] in (".", ".."):
        return None
    return match["topic"], "" if match["rest"] else match["id"]


def delete_objects(uris: Sequence[str]) -> None:
    """Deletes objects; a missing one is not an error. Raises as `write_object` does."""
    for uri in uris:
        path = _local_path(uri)
        try:
            if path is not None:
                os.remove(path)
            else:
                files, name = _opened(uri)
                files.rm_file(name)
        except FileNotFoundError:
            continue
        except RayqError:
            raise
        except Exception as error:
            raise _failure(uri, error) from error


# --- files ----------------------------------------------------------------------------------------


def _local_path(uri: str) -> str | None:
    parts = urlsplit(uri)
    return unquote(parts.path) if parts.scheme == "file" and not parts.netloc else None


def _read_file(uri: str, path: str, size_bytes: int) -> bytes:
    """Reads the beginning of a file. Raises RemoteMissingError if it is not a regular file: opening
    a pipe would wait until somebody writes into it."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise RemoteMissingError(f"{uri} is not a file.")
        return file.read(size_bytes)


def _write_file(path: str, value: bytes) -> None:
    """Writes a file. A crash leaves a temporary file, or the whole one."""
    directory = os.path.dirname(path)
    temporary = path + TEMPORARY_SUFFIX
    try:
        existing = directory
        while not os.path.isdir(existing):
            existing = os.path.dirname(existing)
        os.makedirs(directory, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(value)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        # The directories of topic, cluster and the URL may be new; those above them only if they
        # were made here.
        made = directory.count("/") - existing.count("/")
        for _ in range(max(3, made + 1)):
            _sync_directory(directory)
            directory = os.path.dirname(directory)
    except OSError as error:
        raise _failure(f"file://{path}", error) from error


def _sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _listed_files(prefix: str, root: str) -> Iterator[StoredObject]:
    for directory, _, names in sorted(os.walk(root)):
        for name in sorted(names):
            path = os.path.join(directory, name)
            rest = os.path.relpath(path, root)
            if (value := _parsed(rest)) is not None:
                status = os.lstat(path)
                yield StoredObject(prefix + rest, status.st_size, status.st_mtime, *value)


# --- fsspec ---------------------------------------------------------------------------------------


def _opened(uri: str) -> tuple[Any, str]:
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError(
            f"Large values in {uri} need fsspec: pip install fsspec, and what it needs for "
            f"{urlsplit(uri).scheme} (s3fs, gcsfs, adlfs)."
        ) from error
    try:
        files, name = fsspec.core.url_to_fs(uri)
    except (ImportError, ValueError) as error:
        raise MissingExtraError(
            f"{uri} cannot be opened here: {without_credentials(str(error))}"
        ) from error
    except Exception as error:
        raise _failure(uri, error) from error
    return files, name


def _time_of(uri: str, info: dict[str, Any]) -> float:
    """The time at which an object was written."""
    for name in ("LastModified", "last_modified", "mtime", "updated", "created"):
        found: Any = info.get(name)
        if isinstance(found, int | float):
            return float(found)
        if hasattr(found, "timestamp"):
            return float(found.timestamp())
    raise LargeValueRefusedError(
        f"The store does not say when {uri} was written, so its age is not known."
    )


def _failure(uri: str, error: BaseException) -> RayqError:
    if isinstance(error, FileNotFoundError):
        return RemoteMissingError(f"{uri} is not there: is the store mounted or reachable here?")
    if isinstance(error, PermissionError):
        return RemoteDeniedError(f"{uri}: {without_credentials(str(error))}")
    return RemoteStorageError(
        f"{uri}: {type(error).__name__}: {without_credentials(str(error))}"
    )
