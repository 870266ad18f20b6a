"""When locks run out, in ticks of a tenth of a second."""

from __future__ import annotations

import pytest

from rayq.core.queues.lock_times import LockTimes


@pytest.mark.parametrize(
    ("now_s", "prolonged_s", "tick", "after_a_second"),
    [
        (0, 0, 0, 10), (7, 0, 70, 80), (7.0625, 0, 70, 81), (7.125, 0, 71, 82),
        (7, 0.5, 65, 75), (7.125, 2, 51, 62), (1, 2, -10, 0), (0.0625, 1, -10, 1),
    ],
)
def test_a_tick_has_come_once_it_is_over_and_a_wait_ends_no_sooner_than_asked(
    now_s: float, prolonged_s: float, tick: int, after_a_second: int
) -> None:
    times = LockTimes()
    times.prolong(prolonged_s)
    assert times.tick_at(now_s) == tick
    assert times.tick_after(now_s, 1) == after_a_second


def test_what_is_left_of_a_lock_grows_by_the_time_that_counts_for_none() -> None:
    times = LockTimes()
    assert [times.left_ms(tick, 5) for tick in (49, 50, 51, 62)] == [0, 0, 100, 1200]
    assert times.left_ms(62, 5.125) == 1075
    times.prolong(2)
    times.prolong(0.5)
    assert [times.left_ms(tick, 5) for tick in (24, 25, 26, 50)] == [0, 0, 100, 2500]


def test_blocks_are_told_once_their_tick_has_come_and_once_only() -> None:
    times = LockTimes()
    assert times.next_s is None and times.ended(10**6) == []
    for tick, number in ((30, 2), (20, 9), (30, 1), (30, 2), (20, 1), (40, 7)):
        times.watch(tick, number)
    assert times.next_s == 2.0
    assert times.ended(19) == [] and times.next_s == 2.0
    assert times.ended(20) == [1, 9] and times.next_s == 3.0
    times.watch(20, 5)  # A tick that was looked at may get blocks again.
    times.watch(39, 2)
    assert times.next_s == 2.0
    assert times.ended(39) == [1, 2, 5] and times.next_s == 4.0
    assert times.ended(39) == []
    times.prolong(1.5)
    assert times.next_s == 5.5
    assert times.ended(40) == [7] and times.next_s is None
