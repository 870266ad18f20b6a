"""The checks before batches are appended: room on the disk, their order, room in the segment."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from rayq.config import GIB, INT64_MAX, MIB, TopicConfig
from rayq.environment import Disk
from rayq.errors import CorruptBatchError, DiskFullError, OpenFilesLimitError, StorageError
from rayq.storage.batch import BatchHeader
from rayq.storage.segment import Segment

RESERVED_BYTES = 64 * MIB
"""The room that records leave to the metadata on each disk."""
ROOM_CHECK_BYTES = 4 * MIB
"""A log that has appended this many bytes looks up the free space again, at the latest."""
LOGS_PER_DISK = 1024
"""This many logs may share a disk and fill it at the same time. So after one look a log may append
this part of the free space above the reserve."""
UNSYNCED_SEGMENTS_MAX = 64
"""While so many closed segments wait for their sync, with their files open, none is closed."""
SEGMENT_BYTES_MAX = 2 * GIB
"""The maximum of the config `segment_bytes`: index entries have 32 bits for a position."""
RELATIVE_OFFSET_MAX = 2**32 - 2
"""The highest relative offset in a segment: index entries have 32 bits for it."""


class Room:
    """Keeps the metadata's reserve free. All logs on the disk share it, and know nothing of each
    other. After a refusal every append asks the disk again."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory
        self._bytes_left = 0

    def take(self, length: int) -> None:
        """Raises `DiskFullError` where `length` more bytes would use the reserve, or OSError."""
        self._bytes_left -= length
        if self._bytes_left >= 0:
            return
        free_bytes = self._disk.free_bytes(self._directory)
        spare_bytes = free_bytes - RESERVED_BYTES - length
        if spare_bytes < 0:
            raise self.refusal(f"{free_bytes} bytes are free, {RESERVED_BYTES} are reserved")
        self._bytes_left = min(ROOM_CHECK_BYTES, spare_bytes // LOGS_PER_DISK)

    def forget(self) -> None:
        """The last look at the free space is too old: other logs may have appended since."""
        self._bytes_left = 0

    def refused(self, error: OSError) -> DiskFullError:
        """The error for an append that the disk refused with `error`, for which `is_full` holds."""
        if _is_out_of_descriptors(error):
            return OpenFilesLimitError(
                f"{self._directory}: no file for the append: {error}. Raise the limit (ulimit -n) "
                "or host fewer replicas in this process; appends then resume by themselves."
            )
        return self.refusal(str(error))

    def refusal(self, why: str) -> DiskFullError:
        self.forget()
        return DiskFullError(
            f"{self._directory}: no room for the append ({why}). Free space on this disk or "
            "shorten retention; appends then resume by themselves."
        )


def is_full(error: OSError) -> bool:
    """Returns whether the disk had no room, or the process no descriptor for the file. Both pass,
    and the same change can be tried again."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT) or _is_out_of_descriptors(error)


def _is_out_of_descriptors(error: OSError) -> bool:
    return error.errno in (errno.EMFILE, errno.ENFILE)


def open_failed(path: str, error: OSError) -> StorageError:
    """The error for files that cannot be opened. A full disk and a lack of file descriptors pass;
    other errors do not."""
    if _is_out_of_descriptors(error):
        return OpenFilesLimitError(
            f"{path} cannot be opened: {error}. Raise the limit (ulimit -n) or host fewer replicas "
            "in this process; it will be retried."
        )
    if is_full(error):
        return DiskFullError(
            f"{path} cannot be opened: no room on the disk. Free space on it; it will be retried."
        )
    return StorageError(f"{path} cannot be opened: {error}")


def check_order(
    where: str,
    batches: Sequence[tuple[int, BatchHeader]],
    end_offset: int,
    last_epoch: int | None,
    allow_gaps_below: int,
) -> None:
    """Raises `CorruptBatchError` unless a leader's batches continue a log that ends at `end_offset`
    in `last_epoch`."""
    for _, header in batches:
        base_offset = header.base_offset
        if base_offset != end_offset and not end_offset < base_offset <= allow_gaps_below:
            raise CorruptBatchError(
                f"{where}: the leader sent offset {base_offset} where {end_offset} comes next."
            )
        if last_epoch is not None and header.leader_epoch < last_epoch:
            raise CorruptBatchError(
                f"{where}: the leader sent offset {base_offset} of epoch {header.leader_epoch} "
                f"after epoch {last_epoch}."
            )
        end_offset, last_epoch = header.next_offset, header.leader_epoch


def count_fitting(
    config: TopicConfig,
    active: Segment,
    batches: Sequence[tuple[int, BatchHeader]],
    *,
    unsynced_segments: int,
) -> int:
    """The number of these batches, whose headers are stamped, that the active segment takes before
    it must roll. An empty segment takes at least one. While too many closed segments are not
    synced, it takes all that a file may hold: writers would use up the descriptors of the process
    faster than the disk syncs."""
    bytes_max, age_max_ms = config.segment_bytes, config.segment_ms
    if unsynced_segments >= UNSYNCED_SEGMENTS_MAX:
        bytes_max, age_max_ms = SEGMENT_BYTES_MAX, INT64_MAX
    size, first_append_time_ms = active.size, active.first_append_time_ms
    for number, (_, header) in enumerate(batches):
        if first_append_time_ms is None:
            first_append_time_ms = header.append_time_ms
        elif (
            size + header.length > bytes_max
            or header.append_time_ms - first_append_time_ms >= age_max_ms
            or header.last_offset - active.base_offset > RELATIVE_OFFSET_MAX
        ):
            return number
        size += header.length
    return len(batches)
