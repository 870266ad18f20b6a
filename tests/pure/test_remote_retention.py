"""What goes to the object store, what leaves it, and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rayq.core.remote_retention import (
    ClosedSegment,
    Piece,
    StoredObject,
    closed_above,
    dated_ahead,
    due,
    is_backlog_too_large,
    retention_start,
    sweepable,
    upload_limit,
)

lengths = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 99), st.integers(0, 99)), max_size=8)


def pieces_of(parts: list[tuple[int, int, int]]) -> list[Piece]:
    """Pieces that follow each other, with append times that do not go back."""
    pieces, end, append_ms = [], 0, 0
    for length, size_bytes, passed_ms in parts:
        end, append_ms = end + length, append_ms + passed_ms
        pieces.append(Piece(end, size_bytes, append_ms))
    return pieces


def segments_of(parts: list[tuple[int, int, int]]) -> list[ClosedSegment]:
    starts = [0, *(piece.end for piece in pieces_of(parts))]
    return [
        ClosedSegment(start, *piece)
        for start, piece in zip(starts, pieces_of(parts), strict=False)
    ]


@given(
    lengths,
    st.integers(0, 900),
    st.integers(0, 80),
    st.none() | st.integers(0, 300),
    st.none() | st.integers(0, 500),
)
def test_retention_takes_the_shortest_beginning_that_has_to_go(
    parts: list[tuple[int, int, int]],
    now_ms: int,
    limit_offset: int,
    retention_ms: int | None,
    retention_bytes: int | None,
) -> None:
    pieces = pieces_of(parts)
    size_bytes = sum(piece.size_bytes for piece in pieces) + 7  # The active segment.

    def has_to_go(number: int) -> bool:
        left = size_bytes - sum(piece.size_bytes for piece in pieces[:number])
        is_old = retention_ms is not None and now_ms - pieces[number].last_append_ms > retention_ms
        return is_old or (retention_bytes is not None and left > retention_bytes)

    start = retention_start(
        iter(pieces),
        size_bytes,
        now_ms=now_ms,
        limit_offset=limit_offset,
        retention_ms=retention_ms,
        retention_bytes=retention_bytes,
    )
    gone = [number for number, piece in enumerate(pieces) if piece.end <= (start or 0)]
    assert start in (None, *(piece.end for piece in pieces)) and (start or 0) <= limit_offset
    assert all(has_to_go(number) for number in gone)
    if len(gone) < len(pieces) and pieces[len(gone)].end <= limit_offset:
        assert not has_to_go(len(gone))


@given(lengths, st.integers(0, 80))
def test_what_is_above_the_remote_end_is_counted_once(
    parts: list[tuple[int, int, int]], remote_end: int
) -> None:
    segments = segments_of(parts)
    above = closed_above(segments, remote_end)
    assert [piece.end for piece in above] == [one.end for one in segments if one.end > remote_end]
    assert closed_above(segments, 0) == pieces_of(parts)
    for piece, one in zip(above, segments[len(segments) - len(above) :], strict=True):
        assert piece.size_bytes == one.size_bytes or one.start < remote_end
        assert 0 <= piece.size_bytes <= one.size_bytes


def test_a_segment_across_the_remote_end_counts_by_its_offsets() -> None:
    assert closed_above([ClosedSegment(10, 20, 100, 5)], 16) == [Piece(20, 40, 5)]


@given(lengths, st.integers(0, 80))
def test_uploads_end_where_a_whole_segment_is_stable(
    parts: list[tuple[int, int, int]], stable_offset: int
) -> None:
    segments = segments_of(parts)
    limit = upload_limit(segments, stable_offset)
    assert limit is None or limit <= stable_offset
    assert all(one.end <= (limit or 0) for one in segments if one.end <= stable_offset)


def test_what_left_the_list_is_due_after_the_delay() -> None:
    removed = [("a", 0), ("b", 50), ("c", 51)]
    assert due(removed, 100, 50) == ["a", "b"]
    assert dated_ahead(removed, 50) == ["c"]


names = st.lists(
    st.builds(
        StoredObject,
        name=st.integers(0, 30).map(str),
        is_manifest=st.booleans(),
        version=st.integers(0, 5),
        leader_epoch=st.integers(0, 5),
        modified_ms=st.integers(0, 9),
    ),
    max_size=12,
    unique_by=lambda one: one.name,
)


@given(names, st.sets(st.integers(0, 30).map(str)), st.integers(0, 5), st.integers(0, 9))
def test_a_sweep_takes_nothing_that_is_named_or_new_or_could_still_be_committed(
    listed: list[StoredObject], named: set[str], leader_epoch: int, before_ms: int
) -> None:
    swept = set(
        sweepable(
            listed,
            named=named,
            committed=(3, 2),
            leader_epoch=leader_epoch,
            before_ms=before_ms,
        )
    )
    taken = [one for one in listed if one.name in swept]
    assert not swept & named
    assert all(one.leader_epoch < leader_epoch and one.modified_ms < before_ms for one in taken)
    later = [
        one
        for one in listed
        if one.is_manifest
        and one.leader_epoch < leader_epoch
        and (one.leader_epoch, one.version) > (3, 2)
    ]
    if later:
        assert all(one.is_manifest for one in taken)
    else:
        assert {one.name for one in taken} == {
            one.name
            for one in listed
            if one.name not in named
            and one.leader_epoch < leader_epoch
            and one.modified_ms < before_ms
        }


def test_a_disk_that_waits_for_the_store_is_never_filled() -> None:
    def refuses(backlog: int, limit: int | None, free: int, *, is_stuck: bool) -> bool:
        return is_backlog_too_large(backlog, limit, free, is_stuck=is_stuck)

    assert not refuses(50, None, 50, is_stuck=True)
    assert refuses(51, None, 50, is_stuck=True)
    assert not refuses(200, None, 50, is_stuck=False)
    assert refuses(201, None, 50, is_stuck=False)
    assert refuses(11, 10, 1000, is_stuck=True) and not refuses(11, 10, 1000, is_stuck=False)
