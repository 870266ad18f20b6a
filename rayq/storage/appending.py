"""What batches must pass before they are appended: room on the disk, their order, the segment."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from rayq.config import MIB, TopicConfig
from rayq.environment import Disk
from rayq.errors import CorruptBatchError, DiskFullError, OpenFilesLimitError, StorageError
from rayq.storage.batch import BatchHeader
from rayq.storage.segment import Segment

RESERVED_BYTES = 64 * MIB
"""Room that data leaves to the metadata on each disk."""
ROOM_CHECK_BYTES = 4 * MIB
"""Free space is looked up once for so many bytes appended at least."""
LOGS_PER_DISK = 1024
"""So many logs may share a disk and fill it at the same time: one look lets a log have this part of
what is free above the reserve."""
RELATIVE_OFFSET_MAX = 2**32 - 2
"""Offsets in a segment fit the index entries."""


class Room:
    """Keeps the metadata's reserve free, which all logs on the disk share with each other and know
    nothing of each other. After a refusal every append asks the disk anew."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory
        self._bytes_left = 0

    def take(self, length: int) -> None:
        """Raises `DiskFullError` when `length` more bytes would reach into the reserve, OSError."""
        self._bytes_left -= length
        if self._bytes_left >= 0:
            return
        free_bytes = self._disk.free_bytes(self._directory)
        spare_bytes = free_bytes - RESERVED_BYTES - length
        if spare_bytes < 0:
            raise self.refusal(f"{free_bytes} bytes are free, {RESERVED_BYTES} are reserved")
        self._bytes_left = min(ROOM_CHECK_BYTES, spare_bytes // LOGS_PER_DISK)

    def forget(self) -> None:
        """What was looked up is old: other logs have gone on meanwhile."""
        self._bytes_left = 0

    def refused(self, error: OSError) -> DiskFullError:
        """The error of an append that the disk refused so (`is_full`)."""
        if _is_out_of_descriptors(error):
            return OpenFilesLimitError(
                f"{self._directory}: no file for the append: {error}. Raise the limit (ulimit -n) "
                "or host fewer replicas in this process; appends go on by themselves then."
            )
        return self.refusal(str(error))

    def refusal(self, why: str) -> DiskFullError:
        self.forget()
        return DiskFullError(
            f"{self._directory}: no room for the append ({why}). Free space on this disk or "
            "shorten retention; appends go on by themselves then."
        )


def is_full(error: OSError) -> bool:
    """Whether there was no room on the disk, or no descriptor for the file: that heals, and what
    was tried can be tried again."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT) or _is_out_of_descriptors(error)


def _is_out_of_descriptors(error: OSError) -> bool:
    return error.errno in (errno.EMFILE, errno.ENFILE)


def open_failed(path: str, error: OSError) -> StorageError:
    """The error of opening what is in a directory: a full disk heals, as does a lack of file
    descriptors; others do not."""
    if _is_out_of_descriptors(error):
        return OpenFilesLimitError(
            f"{path} cannot be opened: {error}. Raise the limit (ulimit -n) or host fewer replicas "
            "in this process; it is tried again."
        )
    if is_full(error):
        return DiskFullError(
            f"{path} cannot be opened: no room on the disk. Free space on it; it is tried again."
        )
    return StorageError(f"{path} cannot be opened: {error}")


def check_order(
    where: str,
    batches: Sequence[tuple[int, BatchHeader]],
    end_offset: int,
    last_epoch: int | None,
    allow_gaps_below: int,
) -> None:
    """Whether a leader's batches continue a log that ends at `end_offset` in `last_epoch`.

    Raises `CorruptBatchError`.
    """
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
    config: TopicConfig, active: Segment, batches: Sequence[tuple[int, BatchHeader]]
) -> int:
    """How many of these batches the active segment takes before it must roll; all their headers
    are stamped. At least one when it is empty."""
    size, first_append_time_ms = active.size, active.first_append_time_ms
    for number, (_, header) in enumerate(batches):
        if first_append_time_ms is None:
            first_append_time_ms = header.append_time_ms
        elif (
            size + header.length > config.segment_bytes
            or header.append_time_ms - first_append_time_ms >= config.segment_ms
            or header.last_offset - active.base_offset > RELATIVE_OFFSET_MAX
        ):
            return number
        size += header.length
    return len(batches)
