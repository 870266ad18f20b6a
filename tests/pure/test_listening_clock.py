"""Which time counts for a judge of others: only that in which it could hear them."""

from __future__ import annotations

from typing import cast

import pytest

from rayq.actors.listening_clock import SLACK_S, ListeningClock
from rayq.environment import Clock

INTERVAL_S = 0.25


class Judge:
    def __init__(self) -> None:
        self.at_s = 100.0
        self.can_hear = True
        self.clock = ListeningClock(cast(Clock, self), INTERVAL_S)

    def monotonic(self) -> float:
        return self.at_s

    def unheard_s(self, passed_s: float, looks: int = 1) -> float:
        """The part of that time which does not count."""
        found = 0.0
        for _ in range(looks):
            self.at_s += passed_s / looks
            found += self.clock.look(can_hear=self.can_hear)
        return found


def test_time_in_which_a_judge_hears_everybody_counts() -> None:
    judge = Judge()
    assert judge.unheard_s(60.0, looks=240) == 0.0
    assert judge.clock.now_s() == pytest.approx(160.0)
    judge.at_s += 0.1
    assert judge.clock.now_s() == pytest.approx(160.1), "between two looks it runs as well"


@pytest.mark.parametrize("looks", [1, 5, 80])
def test_time_in_which_it_hears_nobody_does_not_count_and_that_after_it_does(looks: int) -> None:
    judge = Judge()
    judge.can_hear = False
    assert judge.unheard_s(20.0, looks) == pytest.approx(20.0)
    judge.can_hear = True
    assert judge.unheard_s(INTERVAL_S) == 0.0, "the outage is told once"


def test_of_a_standstill_only_the_beginning_counts_also_before_the_first_look_after_it() -> None:
    judge = Judge()
    judge.at_s += 30.0
    assert judge.clock.now_s() == pytest.approx(100.0 + INTERVAL_S + SLACK_S)
    assert judge.clock.look() == pytest.approx(30.0 - INTERVAL_S - SLACK_S)
    assert judge.clock.now_s() == pytest.approx(100.0 + INTERVAL_S + SLACK_S)
    assert judge.unheard_s(INTERVAL_S) == 0.0


def test_many_small_delays_add_up() -> None:
    judge = Judge()
    judge.unheard_s(40.0, looks=40)
    assert judge.clock.now_s() == pytest.approx(100.0 + 40 * (INTERVAL_S + SLACK_S))
