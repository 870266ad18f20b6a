"""Deletion by age follows a wall clock only once the clock has been right for long."""

from __future__ import annotations

from rayq.actors.clock_watch import (
    CATCH_UP_RATE,
    DELAYS_DOUBT_MS,
    DELAYS_RATE,
    ClockWatch,
    DelayClock,
)

MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000


class TwoClocks:
    """A wall clock beside a clock that only counts."""

    def __init__(self) -> None:
        self.true_ms = 1_000 * DAY_MS
        self.off_ms = 0

    def monotonic(self) -> float:
        return self.true_ms / 1000

    def wall_ms(self) -> int:
        return self.true_ms + self.off_ms

    def watched(self, watch: ClockWatch, passed_ms: int, looks: int = 10) -> int:
        """The answer of the watch after so much more time."""
        for _ in range(looks):
            self.true_ms += passed_ms // looks
            watch.look()
        return watch.now_ms()


def test_a_clock_that_is_right_is_followed() -> None:
    clocks = TwoClocks()
    watch = ClockWatch(clocks)
    assert clocks.watched(watch, DAY_MS) == clocks.true_ms


def test_ten_days_ahead_for_seventy_seconds_make_nothing_old() -> None:
    clocks = TwoClocks()
    watch = ClockWatch(clocks)
    clocks.off_ms = 10 * DAY_MS
    assert clocks.watched(watch, 70_000) - clocks.true_ms <= 70_000 * CATCH_UP_RATE
    clocks.off_ms = 0
    assert clocks.watched(watch, 1000) == clocks.true_ms


def test_a_clock_that_stays_ahead_is_believed_in_the_end() -> None:
    clocks = TwoClocks()
    watch = ClockWatch(clocks)
    clocks.off_ms = 10 * DAY_MS
    assert clocks.watched(watch, 9 * HOUR_MS, looks=1000) < clocks.wall_ms()
    assert clocks.watched(watch, 2 * HOUR_MS, looks=1000) == clocks.wall_ms()


def test_what_is_dated_while_the_watch_catches_up_is_not_older_than_it_is() -> None:
    clocks = TwoClocks()
    watch = ClockWatch(clocks)
    watch.doubt(clocks.true_ms - DAY_MS)
    clocks.watched(watch, MINUTE_MS)
    dated_ms, then_ms = watch.latest_ms(), clocks.true_ms
    assert watch.now_ms() < then_ms == dated_ms
    now_ms = clocks.watched(watch, 2 * HOUR_MS, looks=200)
    assert now_ms - dated_ms == clocks.true_ms - then_ms


def test_a_clock_that_goes_back_is_followed_at_once() -> None:
    clocks = TwoClocks()
    watch = ClockWatch(clocks)
    clocks.off_ms = -DAY_MS
    assert clocks.watched(watch, 1000) == clocks.wall_ms()


def test_a_long_time_without_a_look_is_no_word_for_a_leap() -> None:
    clocks = TwoClocks()
    watch = ClockWatch(clocks)
    clocks.off_ms = 10 * DAY_MS
    assert clocks.watched(watch, DAY_MS, looks=1) - clocks.true_ms <= CATCH_UP_RATE * MINUTE_MS


def test_what_was_written_last_is_as_old_as_an_unwatched_clock_says_only_after_a_while() -> None:
    clocks = TwoClocks()
    clocks.off_ms = 10 * DAY_MS
    watch = ClockWatch(clocks)
    watch.doubt(clocks.true_ms - MINUTE_MS)
    assert clocks.watched(watch, MINUTE_MS) - clocks.true_ms <= CATCH_UP_RATE * MINUTE_MS


def test_a_clock_that_is_ahead_for_a_while_hardly_cuts_a_delay_short() -> None:
    clocks = TwoClocks()
    clock = DelayClock(clocks)
    clocks.off_ms = HOUR_MS
    assert clocks.watched(clock, MINUTE_MS) <= clocks.true_ms + DELAYS_RATE * MINUTE_MS
    clocks.off_ms = 0
    assert clocks.watched(clock, MINUTE_MS) == clocks.true_ms


def test_delays_go_on_as_soon_as_a_clock_that_was_behind_is_right_again() -> None:
    clocks = TwoClocks()
    clock = DelayClock(clocks)
    clocks.off_ms = -HOUR_MS
    assert clocks.watched(clock, MINUTE_MS) == clocks.true_ms - HOUR_MS
    clocks.off_ms = 0
    assert clock.now_ms() >= clocks.true_ms - 2 * DELAYS_RATE * MINUTE_MS


def test_delays_that_began_under_a_clock_that_was_behind_go_on_once_it_is_right() -> None:
    clocks = TwoClocks()
    newest_ms = clocks.true_ms - 10_000
    clocks.off_ms = -20 * MINUTE_MS
    clock = DelayClock(clocks)
    clock.begin_after(newest_ms)
    assert clocks.watched(clock, MINUTE_MS) == clocks.true_ms - 20 * MINUTE_MS, "not before"
    clocks.off_ms = 0
    assert 0 <= clocks.true_ms - clock.now_ms() <= 10_000 + DELAYS_RATE * MINUTE_MS


def test_what_is_dated_ahead_makes_no_delay_end_early() -> None:
    clocks = TwoClocks()
    clock = DelayClock(clocks)
    clock.begin_after(clocks.true_ms + HOUR_MS)
    assert clocks.watched(clock, MINUTE_MS) == clocks.true_ms


def test_a_clock_that_stays_ahead_is_believed_after_a_while() -> None:
    # As after a machine slept, whose monotonic clock stood still, or started with a clock behind.
    clocks = TwoClocks()
    clock = DelayClock(clocks)
    clocks.off_ms = 8 * HOUR_MS
    before_ms = clocks.watched(clock, DELAYS_DOUBT_MS - MINUTE_MS)
    assert before_ms <= clocks.true_ms + DELAYS_RATE * DELAYS_DOUBT_MS
    clocks.watched(clock, 2 * MINUTE_MS)
    assert clock.now_ms() >= clocks.wall_ms() - 2 * DELAYS_RATE * DELAYS_DOUBT_MS


def test_of_a_clock_that_leaps_again_only_what_lasted_is_believed() -> None:
    clocks = TwoClocks()
    clock = DelayClock(clocks)
    clocks.off_ms = HOUR_MS
    clocks.watched(clock, DELAYS_DOUBT_MS - MINUTE_MS)
    clocks.off_ms = 240 * HOUR_MS
    assert clocks.watched(clock, 2 * MINUTE_MS) <= clocks.true_ms + HOUR_MS + DELAYS_RATE * HOUR_MS
