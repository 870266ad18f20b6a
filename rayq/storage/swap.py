"""The segments that a pass of the cleaner covers, and the swap that puts its result into the log.

First the file `swap` is written, durably: it says which segments in `cleaning/` replace which
segments of the log, and the new content of `cleaned`. Then the new files are renamed, the replaced
files removed, `cleaned` is written, and `swap` removed. A crash before the file `swap` exists
leaves the old log (the next start clears `cleaning/`). After a later crash the next start does the
missing steps. So readers, in memory or after a crash, see the old segments or the new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import msgspec

from rayq.config import TopicConfig
from rayq.environment import Disk
from rayq.errors import StorageError
from rayq.storage import checked_file
from rayq.storage.aborted_index import write_aborted
from rayq.storage.appending import RELATIVE_OFFSET_MAX
from rayq.storage.clean_state import CleanState, write_clean_state
from rayq.storage.cleaner import (
    CLEANING,
    CleaningJob,
    CleaningResult,
    SourceSegment,
    remove_cleaning,
)
from rayq.storage.segment import LOG_SUFFIX, SUFFIXES, Segment, remove_segment, segment_path

SWAP = "swap"
_KIND, _VERSION = "swap", 1


# --- what to clean ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cleaning:
    """A pass that is under way, and the segments that it covers."""

    job: CleaningJob
    generation: int
    segments: tuple[Segment, ...]
    """Only the log looks at these."""


def cleanable(
    config: TopicConfig, segments: Sequence[Segment], limit_offset: int, now_ms: int
) -> list[Segment]:
    """The closed segments, from the first, that end at or below `limit_offset` and whose newest
    record is older than min_compaction_lag_ms."""
    found: list[Segment] = []
    for segment in segments[:-1]:
        newest_ms = segment.last_append_time_ms
        is_young = newest_ms is not None and newest_ms > now_ms - config.min_compaction_lag_ms
        if segment.next_offset > limit_offset or (config.min_compaction_lag_ms and is_young):
            break
        found.append(segment)
    return found


def is_due(
    config: TopicConfig, segments: Sequence[Segment], state: CleanState, now_ms: int
) -> bool:
    """Returns whether a pass over these cleanable segments is due: by the share of dirty bytes, by
    the age of dirty records, or by tombstones that may go."""
    dirty = [segment for segment in segments if segment.next_offset > state.clean_until]
    dirty_bytes = sum(segment.size for segment in dirty)
    if dirty_bytes:
        all_bytes = sum(segment.size for segment in segments)
        if dirty_bytes >= config.min_cleanable_dirty_ratio * all_bytes:
            return True
        oldest_ms = dirty[0].first_append_time_ms
        lag_ms = config.max_compaction_lag_ms
        if lag_ms is not None and oldest_ms is not None and oldest_ms <= now_ms - lag_ms:
            return True
    return state.tombstones > 0 and state.removable_below(now_ms, config.delete_retention_ms) > 0


def grouped(
    config: TopicConfig, segments: Sequence[Segment]
) -> tuple[tuple[SourceSegment, ...], ...]:
    """Groups of consecutive segments, each of which fits into one segment. Where retention deletes
    records too, it goes by whole segments, and by their newest record: so a group spans at most
    segment_ms and retention_ms. Otherwise an old key would stay as long as it shared a segment with
    a key that is written all the time."""
    span_max_ms = config.segment_ms
    if config.retention_ms is not None:
        span_max_ms = min(span_max_ms, config.retention_ms)
    groups: list[tuple[SourceSegment, ...]] = []
    group: list[SourceSegment] = []
    first: Segment | None = None
    for segment in segments:
        if first is not None:
            size_bytes = sum(source.size_bytes for source in group)
            span_ms = (segment.last_append_time_ms or 0) - (first.first_append_time_ms or 0)
            if (
                size_bytes + segment.size > config.segment_bytes
                or segment.next_offset - first.base_offset > RELATIVE_OFFSET_MAX
                or (config.is_deleted_by_retention and span_ms > span_max_ms)
            ):
                groups.append(tuple(group))
                group, first = [], None
        first = first or segment
        group.append(SourceSegment(segment.base_offset, segment.next_offset, segment.size))
    if group:
        groups.append(tuple(group))
    return tuple(groups)


# --- the swap -----------------------------------------------------------------------------------


class SwapGroup(msgspec.Struct, array_like=True, frozen=True):
    """One new segment, under the base offset of the first segment that it replaces."""

    base_offsets: tuple[int, ...]
    next_offset: int
    size_bytes: int


class Swap(msgspec.Struct, array_like=True, frozen=True):
    """The file `swap` is a msgpack array of these fields. It exists while a swap is under way."""

    groups: tuple[SwapGroup, ...]
    state: CleanState


_decoder = msgspec.msgpack.Decoder(Swap)


@dataclass(frozen=True)
class SwapPlan:
    """The swap of one finished pass: `prepare` in a thread, `Log.apply_swap` on the loop, `finish`
    in a thread. The log must not be truncated or reset, and its start must not move, meanwhile."""

    disk: Disk
    directory: str
    swap: Swap
    replaced: tuple[tuple[Segment, ...], ...]
    """The old segments of each group. Only the log looks at these."""
    index_interval_bytes: int
    aborted: tuple[bytes, ...]
    """The part of the index of aborted transactions for each group. Empty where the log has none.
    """

    def prepare(self) -> list[Segment]:
        """Checks the new segments and writes the file `swap`. Raises `StorageError` or OSError:
        then call `cancel`."""
        segments = []
        for group in self.swap.groups:
            segment = Segment(self.disk, f"{self.directory}/{CLEANING}", group.base_offsets[0])
            is_indexed = segment.load(group.next_offset, self.index_interval_bytes, is_closed=True)
            if not is_indexed or segment.size != group.size_bytes:
                raise StorageError(f"{segment.path} is not what the cleaner has made.")
            segment.release()  # There may be many segments, and none is read now.
            segments.append(segment)
        if self.aborted:
            cleaning = f"{self.directory}/{CLEANING}"
            for group, entries in zip(self.swap.groups, self.aborted, strict=True):
                write_aborted(self.disk, cleaning, group.base_offsets[0], entries)
            self.disk.sync_dir(cleaning)
        content = msgspec.msgpack.encode(self.swap)
        checked_file.write(self.disk, f"{self.directory}/{SWAP}", _KIND, _VERSION, content)
        return segments

    def finish(self) -> None:
        """Does the steps on disk. After `StorageError` or OSError the next start does them."""
        _complete(self.disk, self.directory, self.swap)

    def cancel(self) -> None:
        """The old log stays. Raises OSError."""
        path = f"{self.directory}/{SWAP}"
        if self.disk.exists(path):
            self.disk.remove(path)
            self.disk.sync_dir(self.directory)
        remove_cleaning(self.disk, self.directory)


def swap_of(result: CleaningResult, state: CleanState) -> Swap:
    groups = [
        SwapGroup(group.base_offsets, group.next_offset, group.size_bytes)
        for group in result.groups
        if group.size_bytes is not None
    ]
    return Swap(tuple(groups), state)


def finish_swap(disk: Disk, directory: str) -> None:
    """At a start: does the steps of a swap that a crash has left, or removes a half-made pass.

    Raises `StorageError`, `UnsupportedFormatError`, OSError.
    """
    swap = read_swap(disk, directory)
    if swap is None:
        remove_cleaning(disk, directory)
        return
    _complete(disk, directory, swap)


def read_swap(disk: Disk, directory: str) -> Swap | None:
    """The swap that is under way, or None. Raises `StorageError`, `UnsupportedFormatError`."""
    path = f"{directory}/{SWAP}"
    content = checked_file.read(disk, path, _KIND, _VERSION)
    if content is None:
        return None
    try:
        return _decoder.decode(content)
    except msgspec.DecodeError as error:
        raise StorageError(f"{path} is damaged: {error}") from error


def _complete(disk: Disk, directory: str, swap: Swap) -> None:
    """Does all steps that follow the file `swap`. A step that was done already does nothing."""
    cleaning = f"{directory}/{CLEANING}"
    for group in swap.groups:
        for suffix in SUFFIXES:
            made = segment_path(cleaning, group.base_offsets[0], suffix)
            if disk.exists(made):
                disk.rename(made, segment_path(directory, group.base_offsets[0], suffix))
        path = segment_path(directory, group.base_offsets[0], LOG_SUFFIX)
        with closing(disk.open(path, writable=False)) as file:
            size_bytes = file.size()
        if size_bytes != group.size_bytes:
            raise StorageError(
                f"{path} has {size_bytes} bytes, the compacted segment had {group.size_bytes}: the "
                "disk lost what was synced. Nothing was deleted."
            )
    # The new segments are on disk before the old ones go.
    disk.sync_dir(directory)
    if disk.exists(cleaning):
        disk.sync_dir(cleaning)
    for group in swap.groups:
        for base_offset in group.base_offsets[1:]:
            remove_segment(disk, directory, base_offset)
    write_clean_state(disk, directory, swap.state)
    disk.remove(f"{directory}/{SWAP}")
    disk.sync_dir(directory)
    remove_cleaning(disk, directory)
