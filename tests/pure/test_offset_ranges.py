"""Cutting and limiting ranges of offsets, and wrong bounds before any broker is asked."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayq import TopicPartition
from rayq.batch import offset_ranges
from rayq.batch.offset_ranges import (
    Split,
    _time_ms,
    end_offsets,
    limit_ranges,
    snapshot,
    split_ranges,
    start_offsets,
)
from rayq.client.cluster import Cluster
from rayq.errors import InvalidRequestError

SIZES = st.lists(st.integers(0, 50), max_size=8)


def ranges_of(sizes: list[int], start: int = 100) -> list[Split]:
    return [Split("t", "id", number, start, start + size) for number, size in enumerate(sizes)]


def offsets_of(ranges: list[Split]) -> list[tuple[int, int]]:
    return [(one.partition, offset) for one in ranges for offset in range(one.start, one.end)]


@given(SIZES, st.integers(1, 60))
def test_splits_hold_every_offset_once_and_none_is_empty(sizes: list[int], parts: int) -> None:
    ranges = ranges_of(sizes)
    splits = split_ranges(ranges, parts)
    assert offsets_of(splits) == offsets_of(ranges)
    assert all(not one.is_empty for one in splits)
    filled = sum(size > 0 for size in sizes)
    assert len(splits) == min(max(parts, filled), sum(sizes))


@given(SIZES, st.integers(1, 60), st.lists(st.integers(90, 160), max_size=9))
def test_cuts_at_objects_lose_nothing_and_leave_no_split_empty(
    sizes: list[int], parts: int, cuts: list[int]
) -> None:
    ranges = ranges_of(sizes)
    plain = split_ranges(ranges, parts)
    splits = split_ranges(ranges, parts, {one.place: sorted(set(cuts)) for one in ranges})
    assert offsets_of(splits) == offsets_of(ranges)
    assert all(not one.is_empty for one in splits)
    assert len(splits) == len(plain)


def test_a_range_is_cut_where_an_object_begins_near_by() -> None:
    (one,) = ranges_of([100], start=0)
    splits = split_ranges([one], 4, {one.place: [3, 20, 27, 99]})
    assert [split.start for split in splits] == [0, 27, 50, 75]


def test_without_min_partitions_each_range_that_is_not_empty_is_one_split() -> None:
    assert [one.partition for one in split_ranges(ranges_of([3, 0, 5]))] == [0, 2]


def test_the_largest_ranges_are_cut_first_and_into_equal_parts() -> None:
    splits = split_ranges(ranges_of([10, 90]), 4)
    assert [(one.partition, one.offsets) for one in splits] == [(0, 10), (1, 30), (1, 30), (1, 30)]


@given(SIZES, st.integers(1, 60))
def test_limited_ranges_are_beginnings_of_the_ranges_and_use_the_limit(
    sizes: list[int], limit: int
) -> None:
    ranges = ranges_of(sizes)
    limited = limit_ranges(ranges, limit)
    assert start_offsets(limited) == start_offsets(ranges)
    assert all(cut.end <= whole.end for cut, whole in zip(limited, ranges, strict=True))
    assert sum(one.offsets for one in limited) == min(limit, sum(sizes))
    if limit >= sum(size > 0 for size in sizes):
        assert all(
            not cut.is_empty for cut, size in zip(limited, sizes, strict=True) if size > 0
        ), "a small partition starves beside a large one"


def test_a_limit_is_shared_in_proportion() -> None:
    assert [one.offsets for one in limit_ranges(ranges_of([100, 300, 0]), 40)] == [10, 30, 0]


def test_ends_are_where_the_next_job_starts() -> None:
    ranges = ranges_of([3, 0])
    assert end_offsets(ranges) == {TopicPartition("t", 0): 103, TopicPartition("t", 1): 100}


@pytest.mark.parametrize("bad", [0, -1, 1.5, "2", True])
def test_counts_are_positive_ints(bad: Any) -> None:
    with pytest.raises(InvalidRequestError, match="positive int"):
        split_ranges([], bad)
    with pytest.raises(InvalidRequestError, match="positive int"):
        limit_ranges([], bad)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"topics": "t", "pattern": "t.*"},
        {"topics": "t", "starting_offsets": "newest"},
        {"topics": "t", "ending_offsets": "earliest"},
        {"topics": "t", "starting_offsets": -1},
        {"topics": "t", "starting_offsets": {"t": 5}},
        {"topics": "t", "starting_offsets": {"t": {0: -5}}},
        {"topics": "t", "starting_offsets": {"t": {0: True}}},
        {"topics": "t", "starting_offsets": {"t": {-1: 5}}},
        {"topics": "t", "starting_offsets": {"t": {"0": 5, 0: 6}}},
        {"topics": "t", "starting_offsets": {"t": {"first": 5}}},
        {"topics": "t", "starting_offsets": {"t": {"-1": 5, 0: 5}}},
        {"topics": "t", "starting_offsets": {"t": {"٣": 5}}},
        {"topics": "t", "starting_offsets": {"t": {1.0: 5}}},
        {"topics": "t", "starting_offsets": {"t": {True: 5}}},
        {"topics": "t", "starting_offsets": {"t": {None: 5}}},
        {"topics": "t", "starting_offsets": {("t", None): 5, ("t", 0): 5}},
        {"topics": "t", "starting_offsets": {(1, 0): 5, ("t", 0): 5}},
        {"topics": "t", "ending_timestamps": {"t": {"first": 5}}},
        {"topics": "t", "starting_timestamp": -1},
        {"topics": "t", "starting_timestamp": datetime(2026, 1, 1)},
        {"topics": "t", "starting_timestamp": 5, "starting_timestamps": {"t": {0: 5}}},
        {"topics": "t", "ending_timestamp": 5, "ending_offsets": {"t": {0: 5}}},
        {"topics": "t", "new_partitions": "latest"},
        {"pattern": "("},
    ],
)
def test_bounds_that_cannot_be_are_refused_before_anybody_is_asked(options: dict[str, Any]) -> None:
    nowhere = Cluster("127.0.0.1:1", key=b"none")
    with pytest.raises(InvalidRequestError):
        snapshot(nowhere, options.pop("topics", ()), **options)


@pytest.mark.parametrize(
    "given",
    [
        {"t": {"0": 5, 1: "latest"}},
        {"t": {"0": 5, "1": "latest"}},
        {TopicPartition("t", 0): 5, "t": {"1": "latest"}},
        {("t", "0"): 5, ("t", 1): "latest"},
    ],
)
def test_partitions_may_be_named_as_json_does(given: Any) -> None:
    bound = offset_ranges._Bound("starting", given, "earliest", None, None)
    places = [TopicPartition("t", 0), TopicPartition("t", 1)]
    assert [at.offset for at in bound.of(places).values()] == [5, "latest"]


def test_a_time_is_the_millisecond_that_it_says() -> None:
    """Through a float some are a millisecond too early."""
    for ms in (1_078_625_331_860, 1_092_748_005_452, 1_074_829_487_820, 0, 4_102_444_800_999):
        at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)
        assert _time_ms("starting_timestamp", at) == ms


def test_times_may_be_datetimes_with_a_zone() -> None:
    nowhere = Cluster("127.0.0.1:1", key=b"none")
    with pytest.raises(TimeoutError):  # it got as far as asking
        snapshot(nowhere, "t", starting_timestamp=datetime(2026, 1, 1, tzinfo=UTC), timeout_s=0.05)
    nowhere.close()


def test_what_is_left_out_goes_along_with_every_part_of_a_range() -> None:
    without = ((2**61, 3), (2**61, 4))
    ranges = [one._replace(without=without) for one in ranges_of([10, 20])]
    for parts in (split_ranges(ranges, 7), limit_ranges(ranges, 11)):
        assert {one.without for one in parts} == {without}


def test_nothing_goes_on_at_the_end_of_a_range_that_leaves_out_transactions() -> None:
    ranges = ranges_of([10, 20])
    kept = [one._replace(without=()) for one in ranges]
    assert end_offsets(kept) == end_offsets(ranges)
    with pytest.raises(InvalidRequestError, match="last_stable"):
        end_offsets([ranges[0], ranges[1]._replace(without=((2**61, 0),))])


@pytest.mark.parametrize("without", [None, (), ((2**61, 3), (2**61 + 2**52, 65_535))])
def test_a_range_survives_pickle_and_json(without: tuple[tuple[int, int], ...] | None) -> None:
    split = Split("t", "id", 0, 3, 9, without)
    assert pickle.loads(pickle.dumps(split)) == split
    assert msgspec.json.decode(msgspec.json.encode(split), type=Split) == split
