"""A follower fetches less where answers take long, and more again where they do not."""

from __future__ import annotations

import pytest

from rayq.config import KIB, MIB
from rayq.core.partition.fetch_size import FETCH_BYTES_MAX, FETCH_BYTES_MIN, SLOW_S, FetchSize


def fetches(size: FetchSize, bytes_per_s: float, count: int) -> float:
    """The seconds that the last of `count` full answers took on a link of that rate."""
    took_s = 0.0
    for _ in range(count):
        took_s = size.bytes_max / bytes_per_s
        size.answered(size.bytes_max, took_s)
    return took_s


def test_answers_take_no_longer_than_slow_after_a_few_fetches() -> None:
    for bytes_per_s in (2**16, 2**18, 2**20, 2**22, 2**30):
        assert fetches(FetchSize(), bytes_per_s, 5) <= SLOW_S


def test_it_asks_for_all_again_once_the_link_is_quick() -> None:
    size = FetchSize()
    fetches(size, 2**14, 10)
    assert size.bytes_max == FETCH_BYTES_MIN
    fetches(size, 2**28, 10)
    assert size.bytes_max == FETCH_BYTES_MAX


def test_what_never_comes_was_too_much() -> None:
    size = FetchSize()
    for _ in range(20):
        size.timed_out()
    assert size.bytes_max == FETCH_BYTES_MIN


def test_small_answers_that_were_held_say_nothing_about_the_link() -> None:
    size = FetchSize()
    size.answered(0, 0.5)
    size.answered(100, 0.5)
    assert size.bytes_max == FETCH_BYTES_MAX


@pytest.mark.parametrize(
    ("before", "size_bytes", "took_s", "after"),
    [
        (MIB, MIB, 6.0, MIB // 2),
        (MIB, MIB, 4.0, 3 * MIB // 4),
        (MIB, MIB // 2, 6.0, MIB // 4),  # What came took so long, not what was asked for.
        (MIB, 4 * MIB, 6.0, MIB // 2),  # One batch may be larger than what was asked for.
        (MIB, 0, 3.1, 64 * KIB),
        (64 * KIB, 64 * KIB, 60.0, 64 * KIB),
        (MIB, MIB // 2, 3.0, MIB),
        (MIB, MIB, 1.0, MIB),
        (MIB, MIB, 0.9, 2 * MIB),
        (MIB, MIB // 2, 0.9, 2 * MIB),
        (MIB, MIB // 2 - 1, 0.9, MIB),
        (MIB, 8 * MIB, 0.0, 2 * MIB),
        (3 * MIB, 3 * MIB, 0.1, 4 * MIB),
        (64 * KIB, 64 * KIB, 0.1, 128 * KIB),
    ],
)
def test_one_answer_changes_what_is_asked_for_next(
    before: int, size_bytes: int, took_s: float, after: int
) -> None:
    size = FetchSize()
    assert size.bytes_max == 4 * MIB
    size.bytes_max = before
    size.answered(size_bytes, took_s)
    assert (size.bytes_max, type(size.bytes_max)) == (after, int)


def test_each_time_out_halves_what_is_asked_for() -> None:
    size, asked = FetchSize(), []
    for _ in range(8):
        size.timed_out()
        asked.append(size.bytes_max // KIB)
    assert asked == [2048, 1024, 512, 256, 128, 64, 64, 64]
