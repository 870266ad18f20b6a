"""Which time counts for the locks of a queue's records."""

from __future__ import annotations

from typing import cast

import pytest

from rayq.actors.queues.waiting import GAP_S, LockClock
from rayq.environment import Clock

LOOK_S = 0.25


class Leader:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.hears = True
        self.clock = LockClock(cast(Clock, self), lambda: self.hears)

    def monotonic(self) -> float:
        return self.now_s

    def prolonged_s(self, passed_s: float, looks: int = 1) -> float:
        """By how much locks are prolonged in that time."""
        found = 0.0
        for _ in range(looks):
            self.now_s += passed_s / looks
            found += self.clock.look()
        return found


def test_time_in_which_a_leader_hears_everybody_counts() -> None:
    assert Leader().prolonged_s(60.0, looks=240) == 0.0


@pytest.mark.parametrize("looks", [1, 5, 80])
def test_time_in_which_it_hears_nobody_does_not_count_and_that_after_it_does(looks: int) -> None:
    leader = Leader()
    leader.hears = False
    assert leader.prolonged_s(20.0, looks) == pytest.approx(20.0)
    leader.hears = True
    assert leader.prolonged_s(LOOK_S) == 0.0, "the outage is told once"


def test_of_a_pause_of_the_process_only_the_beginning_counts() -> None:
    leader = Leader()
    assert leader.prolonged_s(30.0) == pytest.approx(30.0 - GAP_S)
    assert leader.prolonged_s(LOOK_S) == 0.0
