"""Decisions of remote storage: the parts of a log to upload and to delete, and when.

A log with remote storage is a sequence of pieces, oldest first: the objects on the committed list
up to the remote end, then the segments on the leader's disk.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple


class Piece(NamedTuple):
    """A part of the log that leaves it as a whole."""

    end: int
    """End offset, exclusive."""
    size_bytes: int
    last_append_ms: int


class ClosedSegment(NamedTuple):
    """A segment on the leader's disk that gets no more batches."""

    start: int
    end: int
    """End offset, exclusive."""
    size_bytes: int
    last_append_ms: int


def closed_above(segments: Iterable[ClosedSegment], remote_end: int) -> list[Piece]:
    """The parts of closed segments above the remote end. The bytes of a segment across it are
    counted in proportion to its offsets."""
    pieces = []
    for segment in segments:
        if segment.end > remote_end:
            above = segment.end - max(segment.start, remote_end)
            size_bytes = segment.size_bytes * above // (segment.end - segment.start)
            pieces.append(Piece(segment.end, size_bytes, segment.last_append_ms))
    return pieces


def retention_start(
    pieces: Iterable[Piece],
    size_bytes: int,
    *,
    now_ms: int,
    limit_offset: int,
    retention_ms: int | None,
    retention_bytes: int | None,
) -> int | None:
    """The log start that retention demands. None: everything stays.

    Pieces are removed, oldest first, if their newest append is older than `retention_ms`, or while
    the whole log, of `size_bytes`, is larger than `retention_bytes`. It does not matter whether
    they were stored. No piece is removed that ends above `limit_offset`, the minimum of the last
    stable offset and of all pins.
    """
    start = None
    for piece in pieces:
        is_old = retention_ms is not None and now_ms - piece.last_append_ms > retention_ms
        is_too_much = retention_bytes is not None and size_bytes > retention_bytes
        if piece.end > limit_offset or not (is_old or is_too_much):
            break
        start = piece.end
        size_bytes -= piece.size_bytes
    return start


def upload_limit(segments: Sequence[ClosedSegment], stable_offset: int) -> int | None:
    """Maximum end of the next uploads: the end of the last closed segment that is completely below
    `stable_offset`. (A part of a segment would make small objects.) None: nothing can be
    uploaded."""
    ends = [segment.end for segment in segments if segment.end <= stable_offset]
    return max(ends, default=None)


def due(removed: Iterable[tuple[str, int]], now_ms: int, delay_ms: int) -> list[str]:
    """The objects to delete now, out of those that left the committed list at the given times."""
    return [name for name, removed_ms in removed if now_ms - removed_ms >= delay_ms]


def dated_ahead(removed: Iterable[tuple[str, int]], now_ms: int) -> list[str]:
    """The objects of the same list whose time is still to come: the clock that dated them was
    ahead, or the present one is behind."""
    return [name for name, removed_ms in removed if removed_ms > now_ms]


def is_backlog_too_large(
    backlog_bytes: int, limit_bytes: int | None, free_bytes: int, *, is_stuck: bool
) -> bool:
    """Returns whether topics with remote storage accept no more records, since too much on a disk
    waits for the object store. Without a limit that is as much as the disk has free. While uploads
    succeed (not `is_stuck`), however slowly, the disk may be filled further."""
    limit_bytes = free_bytes if limit_bytes is None else limit_bytes
    return backlog_bytes > limit_bytes and (is_stuck or backlog_bytes > 4 * free_bytes)


class StoredObject(NamedTuple):
    """An object of the partition as the store lists it."""

    name: str
    is_manifest: bool
    version: int
    """Version of a manifest."""
    leader_epoch: int
    """Epoch of the leader that wrote it."""
    modified_ms: int
    """Time of the last change by the store's clock."""


def sweepable(
    listed: Sequence[StoredObject],
    *,
    named: Container[str],
    committed: tuple[int, int],
    leader_epoch: int,
    before_ms: int,
) -> list[str]:
    """The objects that a sweep deletes: leftovers of a crash or of a failed attempt.

    `named` is the committed manifest and everything that it refers to; `committed` is its leader
    epoch and version. Objects that were written from `before_ms` on (by the store's clock) stay. So
    do all objects of the leader's own epoch: a change in progress may name them.

    A leader whose metadata were lost would adopt a manifest later than the committed one: while one
    is listed, the sweep deletes only manifests. Other objects wait for the next sweep.
    """
    old = [
        listed_object
        for listed_object in listed
        if listed_object.name not in named
        and listed_object.leader_epoch < leader_epoch
        and listed_object.modified_ms < before_ms
    ]
    has_later = any(
        listed_object.is_manifest
        and listed_object.leader_epoch < leader_epoch
        and (listed_object.leader_epoch, listed_object.version) > committed
        for listed_object in listed
    )
    return [
        listed_object.name for listed_object in old if listed_object.is_manifest or not has_later
    ]
