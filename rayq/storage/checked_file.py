"""Small files that are replaced as a whole: checkpoints, leader epochs, snapshots, promises.

One line, then the content::

    rayq <kind> <version> <crc32c of the content, 8 hex digits>\n
    content

Written to `<name>.tmp`, synced, renamed over the old one, the directory synced: a crash leaves the
old file or the new one, and perhaps a `.tmp` that nobody reads.
"""

from __future__ import annotations

import os.path

import google_crc32c

from rayq.environment import Buffer, Disk, File
from rayq.errors import StorageError, UnsupportedFormatError

TEMPORARY_SUFFIX = ".tmp"
CONTENT_BYTES_MAX = 1 << 30
_FIRST_LINE_BYTES_MAX = 100


def encode(kind: str, version: int, content: bytes) -> bytes:
    """The bytes of a checked file."""
    return b"rayq %s %d %08x\n" % (kind.encode(), version, google_crc32c.value(content)) + content


def decode(kind: str, version: int, data: bytes, path: str) -> bytes:
    """The content of a checked file; `path` is for the errors only.

    Raises `UnsupportedFormatError` for another version, `StorageError` for anything damaged.
    """
    line, separator, content = data[:_FIRST_LINE_BYTES_MAX].partition(b"\n")
    words = line.split(b" ")
    if not separator or len(words) != 4 or words[:2] != [b"rayq", kind.encode()]:
        raise StorageError(f"{path} is damaged: it does not begin like a {kind} file (position 0).")
    if words[2] != b"%d" % version:
        found = words[2].decode("ascii", "replace")
        raise UnsupportedFormatError(
            f"{path} has format {found}; this rayq reads {version}: use a matching rayq."
        )
    content = data[len(line) + 1 :]
    if words[3] != b"%08x" % google_crc32c.value(content):
        raise StorageError(
            f"{path} is damaged: its content (position {len(line) + 1}) does not match its CRC."
        )
    return content


def write(disk: Disk, path: str, kind: str, version: int, content: bytes) -> None:
    """Replaces a checked file, durably. Raises OSError."""
    replace(disk, path, encode(kind, version, content))


def read(disk: Disk, path: str, kind: str, version: int) -> bytes | None:
    """The content of a checked file, None when there is no such file. Raises as `decode`."""
    data = read_whole(disk, path)
    return None if data is None else decode(kind, version, data, path)


def replace(disk: Disk, path: str, data: bytes) -> None:
    """Replaces a whole file, durably and atomically. Raises OSError."""
    temporary = path + TEMPORARY_SUFFIX
    file = disk.open(temporary, create=True)
    try:
        file.truncate(0)
        write_all(file, data, 0)
        file.sync_data()
    finally:
        file.close()
    disk.rename(temporary, path)
    disk.sync_dir(os.path.dirname(path))


def make_directory(disk: Disk, path: str) -> None:
    """Makes a directory and its parents, durably: also those that a process made which died before
    it had synced them. Raises OSError."""
    disk.make_dirs(path)
    while (parent := os.path.dirname(path)) != path:
        try:
            disk.sync_dir(parent)
        except PermissionError:
            return  # Not readable for us, so it is not one of those we make.
        path = parent


def read_whole(disk: Disk, path: str) -> bytes | None:
    """A whole small file, None when it is not there. Raises `StorageError` when it is too large."""
    try:
        file = disk.open(path, writable=False)
    except FileNotFoundError:
        return None
    try:
        size = file.size()
        if size > CONTENT_BYTES_MAX:
            raise StorageError(f"{path} has {size} bytes: more than any such file may have.")
        return file.pread(size, 0)
    finally:
        file.close()


def write_all(file: File, data: Buffer, position: int) -> None:
    """Writes all of `data`. A disk that fills up on the way raises its OSError."""
    view = memoryview(data)
    while view:
        written = file.pwrite(view, position)
        view = view[written:]
        position += written
