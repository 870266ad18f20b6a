"""What goes to the object store, what leaves it, and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayq.core.remote.retention import (
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
    segments = [ClosedSegment(0, 10, 70, 3), ClosedSegment(10, 20, 100, 5), ClosedSegment(20, 23, 9, 6)]
    last = Piece(23, 9, 6)
    assert closed_above(segments, 9) == [Piece(10, 7, 3), Piece(20, 100, 5), last]
    assert closed_above(segments, 10) == [Piece(20, 100, 5), last]
    assert closed_above(segments, 16) == [Piece(20, 40, 5), last]
    assert closed_above(segments, 21) == [Piece(23, 6, 6)]
    assert closed_above(segments, 22) == [Piece(23, 3, 6)]
    assert closed_above(segments, 23) == closed_above(segments, 24) == closed_above([], 0) == []


@pytest.mark.parametrize(
    ("limits", "start"),
    [
        ({}, None),
        ({"retention_ms": 40}, None),
        ({"retention_ms": 39}, 10),
        ({"retention_ms": 20}, 10),
        ({"retention_ms": 19}, 20),
        ({"retention_ms": 0}, 20),
        ({"retention_ms": 0, "now_ms": 51}, 30),
        ({"retention_bytes": 65}, None),
        ({"retention_bytes": 64}, 10),
        ({"retention_bytes": 55}, 10),
        ({"retention_bytes": 54}, 20),
        ({"retention_bytes": 0}, 30),
        ({"retention_bytes": 54, "retention_ms": 1000}, 20),
        ({"retention_bytes": 1000, "retention_ms": 19}, 20),
        ({"retention_bytes": 0, "limit_offset": 30}, 30),
        ({"retention_bytes": 0, "limit_offset": 29}, 20),
        ({"retention_ms": 0, "limit_offset": 10}, 10),
        ({"retention_ms": 0, "limit_offset": 9}, None),
    ],
)
def test_retention_goes_exactly_as_far_as_age_size_and_pins_say(
    limits: dict[str, int], start: int | None
) -> None:
    pieces = [Piece(10, 10, 10), Piece(20, 20, 30), Piece(30, 30, 50)]
    values = {
        "now_ms": 50, "limit_offset": 99, "retention_ms": None, "retention_bytes": None, **limits,
    }
    assert retention_start(pieces, 65, **values) == start


@given(lengths, st.integers(0, 80))
def test_uploads_end_where_a_whole_segment_is_stable(
    parts: list[tuple[int, int, int]], stable_offset: int
) -> None:
    segments = segments_of(parts)
    limit = upload_limit(segments, stable_offset)
    whole = [one.end for one in segments if one.end <= stable_offset]
    assert limit == (whole[-1] if whole else None)


def test_what_left_the_list_is_due_after_the_delay() -> None:
    removed = [("a", 0), ("b", 50), ("c", 51)]
    assert due(removed, 100, 50) == ["a", "b"]
    assert due(removed, 101, 50) == due(removed, 51, 0) == ["a", "b", "c"]
    assert dated_ahead(removed, 50) == ["c"]
    assert dated_ahead(removed, 49) == ["b", "c"]
    assert dated_ahead(removed, 51) == []


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


def test_a_sweep_waits_with_data_objects_while_a_later_manifest_is_listed() -> None:
    listed = [
        StoredObject("data", False, 0, 3, 4),
        StoredObject("manifest", True, 1, 3, 4),
        StoredObject("named", True, 2, 3, 4),
        StoredObject("own data", False, 0, 5, 4),
        StoredObject("own manifest", True, 9, 5, 4),
        StoredObject("new data", False, 0, 3, 5),
        StoredObject("new manifest", True, 1, 3, 5),
        StoredObject("older data", False, 9, 2, 0),
    ]

    def swept(*more: StoredObject) -> list[str]:
        return sweepable(
            [*listed, *more], named={"named"}, committed=(3, 2), leader_epoch=5, before_ms=5)

    assert swept() == ["data", "manifest", "older data"]
    for version, epoch in ((3, 3), (0, 4)):
        late = StoredObject("late", True, version, epoch, 4)
        assert swept(late) == ["manifest", "late"]
        # One that is too new to be taken counts as well.
        assert swept(late._replace(modified_ms=5)) == ["manifest"]
    for other in (
        StoredObject("same", True, 2, 3, 4),
        StoredObject("sooner", True, 9, 2, 4),
        StoredObject("large", False, 9, 4, 4),
    ):
        assert swept(other) == ["data", "manifest", "older data", other.name]


def test_a_disk_that_waits_for_the_store_is_never_filled() -> None:
    def refuses(backlog: int, limit: int | None, free: int, *, is_stuck: bool) -> bool:
        return is_backlog_too_large(backlog, limit, free, is_stuck=is_stuck)

    assert not refuses(50, None, 50, is_stuck=True)
    assert refuses(51, None, 50, is_stuck=True)
    assert not refuses(200, None, 50, is_stuck=False)
    assert refuses(201, None, 50, is_stuck=False)
    assert refuses(11, 10, 1000, is_stuck=True) and not refuses(11, 10, 1000, is_stuck=False)
    # A limit is a limit, however little or much is free; 0 is one too.
    assert not refuses(10, 10, 1000, is_stuck=True) and not refuses(10, 10, 0, is_stuck=False)
    assert refuses(1, 0, 1000, is_stuck=True) and refuses(11, 10, 0, is_stuck=False)
    assert not refuses(51, 100, 10, is_stuck=False) and not refuses(0, None, 0, is_stuck=True)
