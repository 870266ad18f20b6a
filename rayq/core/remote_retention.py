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
    """Exclusive."""
    size_bytes: int
    last_append_ms: int


class ClosedSegment(NamedTuple):
    """A segment on the leader's disk that gets no more batches."""

    start: int
    end: int
    """Exclusive."""
    size_bytes: int
    last_append_ms: int


def closed_above(segments: Iterable[ClosedSegment], remote_end: int) -> list[Piece]:
    """What closed segments have above the remote end. Of one that lies across it the bytes are
    taken in proportion to its offsets."""
    pieces = []
    for one in segments:
        if one.end > remote_end:
            above = one.end - max(one.start, remote_end)
            size_bytes = one.size_bytes * above // (one.end - one.start)
            pieces.append(Piece(one.end, size_bytes, one.last_append_ms))
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
    """The log start that retention calls for. None: everything stays.

    Pieces go, oldest first, whose newest append is older than `retention_ms`, or while the whole
    log, of `size_bytes`, is larger than `retention_bytes`. It does not matter whether they were
    stored. No piece goes that ends above `limit_offset`, the least of the last stable offset and of
    all pins.
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
    """Where the next uploads end at most: at the end of the last closed segment that lies below
    `stable_offset` as a whole. (A part of a segment would make small objects.) None: nowhere."""
    ends = [one.end for one in segments if one.end <= stable_offset]
    return max(ends, default=None)


def due(removed: Iterable[tuple[str, int]], now_ms: int, delay_ms: int) -> list[str]:
    """The objects to delete now, of those that left the committed list at the given times."""
    return [name for name, removed_ms in removed if now_ms - removed_ms >= delay_ms]


def dated_ahead(removed: Iterable[tuple[str, int]], now_ms: int) -> list[str]:
    """Of the same list what was dated by a clock that was ahead: it is dated anew, so that it does
    not stay for as long as that."""
    return [name for name, removed_ms in removed if removed_ms > now_ms]


def is_backlog_too_large(
    backlog_bytes: int, limit_bytes: int | None, free_bytes: int, *, is_stuck: bool
) -> bool:
    """Whether topics with remote storage take no more records, since so much on a disk waits for
    the object store. Without a limit that is as much as the disk has free. While uploads get
    through (not `is_stuck`), however slowly, the disk may be filled further."""
    limit_bytes = free_bytes if limit_bytes is None else limit_bytes
    return backlog_bytes > limit_bytes and (is_stuck or backlog_bytes > 4 * free_bytes)


class StoredObject(NamedTuple):
    """An object of the partition as the store lists it."""

    name: str
    is_manifest: bool
    version: int
    """Of a manifest."""
    leader_epoch: int
    """Of the leader that wrote it."""
    modified_ms: int
    """By the store's clock."""


def sweepable(
    listed: Sequence[StoredObject],
    *,
    named: Container[str],
    committed: tuple[int, int],
    leader_epoch: int,
    before_ms: int,
) -> list[str]:
    """What a sweep deletes: objects that a crash, or an attempt that failed, has left behind.

    `named` is all that the committed manifest refers to, and itself; `committed` is its leader
    epoch and version. What was written from `before_ms` on (by the store's clock) stays. So do all
    objects of the leader's own epoch: a change that is under way may name them.

    A manifest later than the committed one is what a leader would adopt whose metadata were lost:
    while one is listed, the sweep takes manifests only. The others wait for the next sweep.
    """
    old = [
        one
        for one in listed
        if one.name not in named
        and one.leader_epoch < leader_epoch
        and one.modified_ms < before_ms
    ]
    has_later = any(
        one.is_manifest
        and one.leader_epoch < leader_epoch
        and (one.leader_epoch, one.version) > committed
        for one in listed
    )
    return [one.name for one in old if one.is_manifest or not has_later]
