"""Backoff between two attempts."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rayq.backoff import BUDGET_MAX, BUDGET_PER_ANSWER, BUDGET_PER_S, Backoff, RetryBudget


@pytest.mark.parametrize("seed", range(5))
def test_wait_times_double_up_to_the_maximum_each_with_a_quarter_of_jitter(seed: int) -> None:
    backoff = Backoff(cast(Any, SimpleNamespace(random=random.Random(seed))), 0.1, 0.7)
    for _ in range(2):
        waits_s = [backoff.next_s() for _ in range(5)]
        assert waits_s == pytest.approx([0.1, 0.2, 0.4, 0.7, 0.7], rel=0.25)
        assert len(set(waits_s)) == 5
        backoff.reset()


class Client:
    def __init__(self) -> None:
        self.now_s = 50.0
        self.random = random.Random(1)
        self.budget = RetryBudget(cast(Any, self))

    def monotonic(self) -> float:
        return self.now_s

    def taken(self, count: int = 1000) -> int:
        """Number of repetitions, of so many, that it may make now."""
        return sum(self.budget.take() for _ in range(count))


def test_repetitions_come_back_with_time_and_with_answers_and_do_not_pile_up() -> None:
    client = Client()
    assert client.taken() == BUDGET_MAX
    assert client.taken() == 0
    client.now_s += 2
    assert client.taken() == 2 * BUDGET_PER_S
    for _ in range(55):
        client.budget.answered()
    assert client.taken() == int(55 * BUDGET_PER_ANSWER)
    client.now_s += 3600
    assert client.taken() == BUDGET_MAX


def test_without_a_budget_left_each_wait_is_the_longest() -> None:
    client = Client()
    client.taken()
    backoff = Backoff(cast(Any, client), 0.1, 0.8, client.budget)
    assert backoff.next_s() == pytest.approx(0.8, rel=0.25)
    client.now_s += 10
    backoff.reset()
    assert backoff.next_s() == pytest.approx(0.1, rel=0.25)
