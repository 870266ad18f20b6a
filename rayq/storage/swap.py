"""From a pass of the cleaner to the log: what to clean, and the swap that crashes cannot tear.

The swap. First the file `swap` is written, durably: which segments in `cleaning/` replace which of
the log's, and what `cleaned` is to say then. Then the files are renamed, the replaced ones removed,
`cleaned` is written, and `swap` removed. A crash before the file `swap` is there leaves the old log
(and rubbish in `cleaning/`, which goes); after that the next start does all the steps that are
missing. So readers, in memory or after a crash, see the old segments or the new ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from rayq.config import TopicConfig
from rayq.environment import Disk
from rayq.errors import StorageError
from rayq.storage import checked_file
from rayq.storage.appending import RELATIVE_OFFSET_MAX
from rayq.storage.clean_state import CleanState, write_clean_state
from rayq.storage.cleaner import (
    CLEANING,
    CleaningJob,
    CleaningResult,
    SourceSegment,
    remove_cleaning,
)
from rayq.storage.segment import LOG_SUFFIX, SUFFIXES, Segment, segment_path

SWAP = "swap"
_KIND, _VERSION = "swap", 1


# --- what to clean ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cleaning:
    """A pass that is under way, and what it was about."""

    job: CleaningJob
    generation: int
    segments: tuple[Segment, ...]
    """Only the log looks at them."""


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
    """Whether a pass over these cleanable segments is worth its while, or owed."""
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
    """Neighbours that fit one segment together. Where retention deletes, it also does so by whole
    segments, and by the newest record: one spans no more than segment_ms and retention_ms. Without
    that an old key that shares a segment with one that is written all the time would stay."""
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
    """One new segment, under the base offset of the first that it replaces."""

    base_offsets: tuple[int, ...]
    next_offset: int
    size_bytes: int


class Swap(msgspec.Struct, array_like=True, frozen=True):
    """The file `swap`: a msgpack array of these fields. It is there while a swap is under way."""

    groups: tuple[SwapGroup, ...]
    state: CleanState


_decoder = msgspec.msgpack.Decoder(Swap)


@dataclass(frozen=True)
class SwapPlan:
    """The swap of one finished pass: `prepare` in a thread, `Log.apply_swap` on the loop, `finish`
    in a thread. Nobody may truncate or reset the log or move its start meanwhile."""

    disk: Disk
    directory: str
    swap: Swap
    replaced: tuple[tuple[Segment, ...], ...]
    """For each group; only the log looks at them."""
    index_interval_bytes: int

    def prepare(self) -> list[Segment]:
        """Checks the new segments and writes the file `swap`. Raises `StorageError`, OSError:
        then, `cancel`."""
        segments = []
        for group in self.swap.groups:
            segment = Segment(self.disk, f"{self.directory}/{CLEANING}", group.base_offsets[0])
            is_indexed = segment.load(group.next_offset, self.index_interval_bytes, is_closed=True)
            if not is_indexed or segment.size != group.size_bytes:
                raise StorageError(f"{segment.path} is not what the cleaner has made.")
            segment.release()  # There may be many, and they are not read now.
            segments.append(segment)
        content = msgspec.msgpack.encode(self.swap)
        checked_file.write(self.disk, f"{self.directory}/{SWAP}", _KIND, _VERSION, content)
        return segments

    def finish(self) -> None:
        """Raises `StorageError`, OSError: the swap is then for the next start to finish."""
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
    """At a start: does what a crash has left undone of a swap, or removes a half-made pass.

    Raises `StorageError`, `UnsupportedFormatError`, OSError.
    """
    swap = read_swap(disk, directory)
    if swap is None:
        remove_cleaning(disk, directory)
        return
    _complete(disk, directory, swap)


def read_swap(disk: Disk, directory: str) -> Swap | None:
    """The swap that is under way, if one is. Raises `StorageError`, `UnsupportedFormatError`."""
    path = f"{directory}/{SWAP}"
    content = checked_file.read(disk, path, _KIND, _VERSION)
    if content is None:
        return None
    try:
        return _decoder.decode(content)
    except msgspec.DecodeError as error:
        raise StorageError(f"{path} is damaged: {error}") from error


def _complete(disk: Disk, directory: str, swap: Swap) -> None:
    """All steps that follow the file `swap`; those that were done already do nothing."""
    cleaning = f"{directory}/{CLEANING}"
    for group in swap.groups:
        for suffix in SUFFIXES:
            made = segment_path(cleaning, group.base_offsets[0], suffix)
            if disk.exists(made):
                disk.rename(made, segment_path(directory, group.base_offsets[0], suffix))
        path = segment_path(directory, group.base_offsets[0], LOG_SUFFIX)
        file = disk.open(path, writable=False)
        try:
            size_bytes = file.size()
        finally:
            file.close()
        if size_bytes != group.size_bytes:
            raise StorageError(
                f"{path} has {size_bytes} bytes, the compacted segment had {group.size_bytes}: the "
                "disk lost what was synced. Nothing was deleted."
            )
    # The new segments are there for certain before the old ones go.
    disk.sync_dir(directory)
    if disk.exists(cleaning):
        disk.sync_dir(cleaning)
    for group in swap.groups:
        for base_offset in group.base_offsets[1:]:
            for suffix in SUFFIXES:
                path = segment_path(directory, base_offset, suffix)
                if disk.exists(path):
                    disk.remove(path)
    write_clean_state(disk, directory, swap.state)
    disk.remove(f"{directory}/{SWAP}")
    disk.sync_dir(directory)
    remove_cleaning(disk, directory)
