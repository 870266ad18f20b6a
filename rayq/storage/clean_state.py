"""The file `cleaned` of a partition directory: how far compaction has changed the log."""

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
"""Maximum number of marks: of two less than `delete_retention_ms` / MARKS_MAX apart, the later
stays. Tombstones then stay a little longer than they must."""


class Mark(NamedTuple):
    """A mark: since `time_ms` (wall clock) each key has at most one record below `offset`."""

    offset: int
    time_ms: int


class CleanState(msgspec.Struct, array_like=True, frozen=True):
    """The file `cleaned` is a msgpack array of these fields. Without the file the log was never
    compacted.

    A crash leaves this state or the one before. A follower writes it before it appends records from
    a compacted part of its leader's log. The cleaner's result brings it in one swap with the
    cleaned segments, see `swap`.
    """

    cleaned_offset: int = 0
    """Below it offsets may be missing: compaction removed records that have a later record of their
    key, or tombstones. For records that were copied from a leader, the leader's offset counts."""
    tombstone_horizon: int = 0
    """Below it tombstones and markers of transactions may be missing. So another replica whose log
    ends below may hold records that were deleted, or transactions without an end, and has to copy
    the log from scratch."""
    clean_until: int = 0
    """This replica has compacted its log up to here. The part from here on is dirty. No batch below
    belongs to a transaction any more."""
    marks: tuple[Mark, ...] = ()
    """Ascending. A tombstone may go `delete_retention_ms` after the first mark above it."""
    tombstones: int = 0
    """The number of tombstones and markers that the last pass left."""

    def removable_below(self, now_ms: int, delete_retention_ms: int) -> int:
        """The offset below which tombstones have been in the log for long enough."""
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
            cleaned_offset=max(self.cleaned_offset, clean_until),
            tombstone_horizon=max(self.tombstone_horizon, horizon),
            clean_until=clean_until,
            marks=tuple(marks),
            tombstones=tombstones,
        )

    def learned(self, cleaned_offset: int, tombstone_horizon: int) -> CleanState:
        """The state with both offsets of a leader from which records are copied."""
        return msgspec.structs.replace(
            self,
            cleaned_offset=max(self.cleaned_offset, cleaned_offset),
            tombstone_horizon=max(self.tombstone_horizon, tombstone_horizon),
        )

    def cut(self, end_offset: int) -> CleanState:
        """The state after a truncation. The two offsets below which something may be missing stay:
        an offset that is too high is safe."""
        if self.clean_until <= end_offset:
            return self
        return msgspec.structs.replace(
            self,
            clean_until=end_offset,
            marks=tuple(Mark(min(mark.offset, end_offset), mark.time_ms) for mark in self.marks),
        )


_decoder = msgspec.msgpack.Decoder(CleanState)


def write_clean_state(
    disk: Disk, directory: str, state: CleanState, *, syncs_directory: bool = True
) -> None:
    """Replaces the file, durably once the directory is synced. Raises OSError."""
    path, content = f"{directory}/{CLEANED}", msgspec.msgpack.encode(state)
    checked_file.write(disk, path, _KIND, _VERSION, content, syncs_directory=syncs_directory)


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
