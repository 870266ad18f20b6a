"""A follower fetches less where answers take long, and more again where they do not."""

from __future__ import annotations

from rayq.core.fetch_size import FETCH_BYTES_MAX, FETCH_BYTES_MIN, SLOW_S, FetchSize


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
