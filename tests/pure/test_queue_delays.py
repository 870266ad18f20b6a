"""When delayed records of a queue are due."""

from __future__ import annotations

import pytest

from rayq.core.queues.delays import Delay, DelayTimes


def test_how_long_a_delay_lasts_goes_by_the_monotonic_clock_and_its_end_is_kept() -> None:
    delay = Delay.of_length(1500, now_ms=100_000, now_s=40)
    assert delay == Delay(101_500, 1500, 41.5)
    # The wall clock may leap: what is left of it stays.
    for now_ms in (0, 100_000, 10**9):
        assert delay.due_at_ms(now_ms=now_ms, now_s=40) == now_ms + 1500
        assert delay.due_at_ms(now_ms=now_ms, now_s=41.25) == now_ms + 250
        assert delay.due_at_ms(now_ms=now_ms, now_s=41.5) == now_ms
        assert delay.due_at_ms(now_ms=now_ms, now_s=42) == now_ms - 500
        # A part of a millisecond is waited for.
        assert delay.due_at_ms(now_ms=now_ms, now_s=41.5 - 1 / 4096) == now_ms + 1


def test_a_time_of_day_is_due_by_the_wall_clock_alone() -> None:
    delay = Delay(90_000)
    assert (delay.length_ms, delay.end_s) == (None, None)
    for now_ms, now_s in ((0, 0.0), (90_000, 1e6), (200_000, 7.0)):
        assert delay.due_at_ms(now_ms=now_ms, now_s=now_s) == 90_000
        assert delay.taken_up(now_ms=now_ms, now_s=now_s) == delay


@pytest.mark.parametrize(
    ("now_ms", "left_s"),
    [
        (100_000, 1.5), (100_500, 1.0), (101_499, 0.001), (101_500, 0), (101_501, 0), (10**9, 0),
        # A clock behind that of the leader before.
        (99_999, 1.5), (0, 1.5),
    ],
)
def test_the_next_leader_goes_on_with_what_is_left_and_no_more_than_the_whole(
    now_ms: int, left_s: float
) -> None:
    kept = Delay(101_500, 1500)
    assert kept.taken_up(now_ms=now_ms, now_s=7) == Delay(101_500, 1500, 7 + left_s)


def test_delays_end_by_the_clock_that_they_go_by() -> None:
    times = DelayTimes()
    assert times.next_in_ms(now_ms=0, now_s=0) is None
    day = [(1, Delay(3000)), (2, Delay(2000)), (3, Delay(2000))]
    length = [(4, Delay(0, 500, 12.5)), (5, Delay(0, 250, 12.25)), (6, Delay(9**9, 250, 12.25))]
    for offset, delay in day + length:
        times.add(offset, delay)
    assert times.next_in_ms(now_ms=1000, now_s=12) == 250
    assert times.next_in_ms(now_ms=1900, now_s=12) == 100
    assert times.next_in_ms(now_ms=2001, now_s=12) == 0, "never a time that is past"
    assert not list(times.ended(now_ms=1999, now_s=12.125))
    assert list(times.ended(now_ms=2000, now_s=12)) == day[1:]
    assert times.next_in_ms(now_ms=2000, now_s=12.125) == 125
    assert list(times.ended(now_ms=0, now_s=12.25)) == length[1:]
    assert times.next_in_ms(now_ms=2990, now_s=12.25) == 10
    assert times.next_in_ms(now_ms=0, now_s=12.25) == 250
    assert list(times.ended(now_ms=3001, now_s=13)) == [day[0], length[0]]
    assert not list(times.ended(now_ms=10**9, now_s=1e9))
    assert times.next_in_ms(now_ms=0, now_s=0) is None
