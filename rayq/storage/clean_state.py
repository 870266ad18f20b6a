"""What compaction has done to a log: the file `cleaned` of a partition directory."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from rayq.environment import Disk
from rayq.errors import StorageError
from rayq.storage import checked_file

CLEANED = "cleaned"
_KIND = "cleaned"
_VERSION = 1
MARKS_MAX = 64
"""Marks closer than `delete_retention_ms` / this become one, the later: tombstones then stay a
little longer than they must."""


class Mark(NamedTuple):
    """Since `time_ms` (wall clock) each key has at most one record below `offset`."""

    offset: int
    time_ms: int


class CleanState(msgspec.Struct, array_like=True, frozen=True):
    """The file `cleaned`: a msgpack array of these fields. No file: nothing was ever cleaned.

    A crash leaves this state or the one before. It is written before a record that it speaks of is
    appended (by a follower), and in one swap with the cleaned segments, see `swap`.
    """

    cleaned_offset: int = 0
    """Below it offsets may be missing: what was there has a later record of its key, or none was
    left of it. That of a leader counts as well, for what was copied from it."""
    tombstone_horizon: int = 0
    """Below it tombstones may be missing. Whoever holds records of before, and does not reach
    further, may hold some that were deleted: it has to begin anew."""
    clean_until: int = 0
    """How far this replica has compacted; what follows is dirty."""
    marks: tuple[Mark, ...] = ()
    """Ascending. A tombstone may go `delete_retention_ms` after the first mark above it."""
    tombstones: int = 0
    """How many the last pass has left."""

    def removable_below(self, now_ms: int, delete_retention_ms: int) -> int:
        """Tombstones below have been there for long enough."""
        due = [mark.offset for mark in self.marks if mark.time_ms <= now_ms - delete_retention_ms]
        return max(due, default=0)

    def after_pass(
        self,
        clean_until: int,
        *,
        removed_below: int,
        horizon: int,
        tombstones: int,
        now_ms: int,
        delete_retention_ms: int,
    ) -> CleanState:
        """The state after a pass that reached `clean_until`, in which tombstones below
        `removed_below` went, the last of them just below `horizon`."""
        marks = [mark for mark in self.marks if mark.offset > removed_below]
        if clean_until > max(removed_below, marks[-1].offset if marks else 0):
            spacing_ms = delete_retention_ms // MARKS_MAX
            if len(marks) > 1 and marks[-1].time_ms - marks[-2].time_ms < spacing_ms:
                marks.pop()
            marks.append(Mark(clean_until, now_ms))
        return CleanState(
            max(self.cleaned_offset, clean_until),
            max(self.tombstone_horizon, horizon),
            clean_until,
            tuple(marks),
            tombstones,
        )

    def learned(self, cleaned_offset: int, tombstone_horizon: int) -> CleanState:
        """With what a leader says of the records that are copied from it."""
        return msgspec.structs.replace(
            self,
            cleaned_offset=max(self.cleaned_offset, cleaned_offset),
            tombstone_horizon=max(self.tombstone_horizon, tombstone_horizon),
        )

    def cut(self, end_offset: int) -> CleanState:
        """After a truncation. What may be missing below stays missing, so the other two offsets
        stay: too high they are safe."""
        if self.clean_until <= end_offset:
            return self
        return msgspec.structs.replace(
            self,
            clean_until=end_offset,
            marks=tuple(Mark(min(mark.offset, end_offset), mark.time_ms) for mark in self.marks),
        )


_decoder = msgspec.msgpack.Decoder(CleanState)


def write_clean_state(disk: Disk, directory: str, state: CleanState) -> None:
    """Replaces the file, durably. Raises OSError."""
    content = msgspec.msgpack.encode(state)
    checked_file.write(disk, f"{directory}/{CLEANED}", _KIND, _VERSION, content)


def read_clean_state(disk: Disk, directory: str) -> CleanState:
    """Raises `StorageError` when it is damaged, `UnsupportedFormatError` for another version."""
    path = f"{directory}/{CLEANED}"
    content = checked_file.read(disk, path, _KIND, _VERSION)
    if content is None:
        return CleanState()
    try:
        return _decoder.decode(content)
    except msgspec.DecodeError as error:
        raise StorageError(f"{path} is damaged: {error}") from error
