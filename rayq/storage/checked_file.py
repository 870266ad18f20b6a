"""Small files that are replaced as a whole: checkpoints, leader epochs, snapshots, promises.

Each file is one line, then the content::

    rayq <kind> <version> <crc32c of the content, 8 hex digits>\n
    content

A new file is written to `<name>.tmp`, synced, and renamed over the old file; then the directory is
synced. A crash leaves the old file or the new file, and perhaps a `.tmp` that nothing reads.
"""

from __future__ import annotations

import errno
import os.path
from contextlib import closing

import google_crc32c

from rayq.environment import Buffer, Disk, File
from rayq.errors import StorageError, UnsupportedFormatError

TEMPORARY_SUFFIX = ".tmp"
CONTENT_BYTES_MAX = 1 << 30
_FIRST_LINE_BYTES_MAX = 100


def encode(kind: str, version: int, content: bytes) -> bytes:
    """The bytes of a checked file."""
    return b"rayq %s %d %08x\n" % (kind.encode(), version, google_crc32c.value(content)) + content


def decode(kind: str, version: int, data: bytes, path: str, *others: int) -> bytes:
    """The content of a checked file of this version or of one of `others`. `path` is only for the
    errors.

    Raises `UnsupportedFormatError` for another version, `StorageError` for a damaged file.
    """
    line, separator, content = data[:_FIRST_LINE_BYTES_MAX].partition(b"\n")
    words = line.split(b" ")
    if not separator or len(words) != 4 or words[:2] != [b"rayq", kind.encode()]:
        raise StorageError(f"{path} is damaged: it does not begin like a {kind} file (position 0).")
    known = [version, *others]
    if words[2] not in [b"%d" % number for number in known]:
        found = words[2].decode("ascii", "replace")
        raise UnsupportedFormatError(
            f"{path} has format {found}; this rayq reads {' and '.join(map(str, known))}: use a "
            "matching rayq."
        )
    content = data[len(line) + 1 :]
    if words[3] != b"%08x" % google_crc32c.value(content):
        raise StorageError(
            f"{path} is damaged: its content (position {len(line) + 1}) does not match its CRC."
        )
    return content


def is_intact(data: bytes) -> bool:
    """Returns whether these are the bytes of a checked file, of any kind and version."""
    line, separator, _ = data[:_FIRST_LINE_BYTES_MAX].partition(b"\n")
    words = line.split(b" ")
    if not separator or len(words) != 4 or words[0] != b"rayq":
        return False
    content = data[len(line) + 1 :]
    return words[3] == b"%08x" % google_crc32c.value(content)


def write(
    disk: Disk,
    path: str,
    kind: str,
    version: int,
    content: bytes,
    *,
    syncs_directory: bool = True,
) -> None:
    """Like `replace`, for a checked file."""
    replace(disk, path, encode(kind, version, content), syncs_directory=syncs_directory)


def read(disk: Disk, path: str, kind: str, version: int, *others: int) -> bytes | None:
    """The content of a checked file, or None when there is no such file. Raises as `decode`."""
    data = read_whole(disk, path)
    return None if data is None else decode(kind, version, data, path, *others)


def replace(disk: Disk, path: str, data: bytes, *, syncs_directory: bool = True) -> None:
    """Replaces a whole file, atomically, and durably once its directory is synced: a caller that
    makes several files does that itself. Raises OSError."""
    temporary = path + TEMPORARY_SUFFIX
    with closing(disk.open(temporary, create=True)) as file:
        file.truncate(0)
        write_all(file, data, 0)
        file.sync_data()
    disk.rename(temporary, path)
    if syncs_directory:
        disk.sync_dir(os.path.dirname(path))


def make_directory(disk: Disk, path: str) -> None:
    """Makes a directory and its parents, durably. Existing parents are synced too: the process that
    made them may have died before its sync. Raises OSError."""
    disk.make_dirs(path)
    while (parent := os.path.dirname(path)) != path:
        try:
            disk.sync_dir(parent)
        except PermissionError:
            return  # rayq makes no directories that it cannot read.
        path = parent


def read_whole(disk: Disk, path: str) -> bytes | None:
    """A whole small file, or None where there is none. Raises `StorageError` for a large one."""
    try:
        opened = disk.open(path, writable=False)
    except FileNotFoundError:
        return None
    with closing(opened) as file:
        size = file.size()
        if size > CONTENT_BYTES_MAX:
            raise StorageError(f"{path} has {size} bytes: more than any such file may have.")
        return file.pread(size, 0)


def write_all(file: File, data: Buffer, position: int) -> None:
    """Writes all of `data`. Raises the OSError of a disk that becomes full meanwhile, also of one
    that takes nothing and reports no error."""
    view = memoryview(data)
    while view:
        written = file.pwrite(view, position)
        if not written:
            raise OSError(errno.ENOSPC, "a write of nothing")
        view = view[written:]
        position += written
