"""How a rate is divided among processes, and what each of them may use of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayq.core.access.quotas import RateAccount, max_min_shares

RATES = st.floats(0, 1e9)
DEMANDS = st.dictionaries(st.integers(0, 20), RATES, min_size=1, max_size=12)
PRECISION = 1e-6


@given(RATES, DEMANDS)
def test_the_whole_rate_is_divided_and_no_more(rate: float, demands: dict[int, float]) -> None:
    shares = max_min_shares(rate, demands)
    assert list(shares) == list(demands)
    assert math.isclose(sum(shares.values()), rate, rel_tol=PRECISION, abs_tol=PRECISION)
    assert all(share >= 0 for share in shares.values())


@given(RATES, DEMANDS)
def test_who_gets_less_than_it_asks_for_gets_no_less_than_anybody(
    rate: float, demands: dict[int, float]
) -> None:
    shares = max_min_shares(rate, demands)
    slack = PRECISION * (rate + 1)
    for process, share in shares.items():
        if share < demands[process] - slack:
            assert all(share >= other - slack for other in shares.values())
            assert share >= rate / len(shares) - slack


@given(RATES, DEMANDS, st.integers(0, 20), RATES)
def test_asking_for_more_never_brings_less(
    rate: float, demands: dict[int, float], process: int, more: float
) -> None:
    demands.setdefault(process, 0.0)
    before = max_min_shares(rate, demands)[process]
    asked = {**demands, process: demands[process] + more}
    assert max_min_shares(rate, asked)[process] >= before - PRECISION * (rate + 1)


def test_what_others_leave_is_divided_again() -> None:
    assert max_min_shares(90, {"a": 10, "b": 100, "c": 100}) == {"a": 10, "b": 40, "c": 40}
    assert max_min_shares(90, {"a": 10, "b": 20}) == {"a": 40, "b": 50}
    assert max_min_shares(90, {"a": 0, "b": 0}) == {"a": 45, "b": 45}
    assert max_min_shares(0, {"a": 5}) == {"a": 0}
    assert max_min_shares(90, {}) == {}


@given(
    st.floats(1, 1e6),
    st.lists(st.tuples(st.floats(0, 2), st.floats(0, 1e6)), min_size=1, max_size=30),
)
def test_who_heeds_the_delay_uses_no_more_than_its_rate_and_a_second_of_savings(
    rate: float, steps: list[tuple[float, float]]
) -> None:
    account, now_s, used = RateAccount(rate, 0.0), 0.0, 0.0
    for pause_s, units in steps:
        now_s += pause_s
        delay_s = account.use(units, now_s)
        used += units
        now_s += delay_s
        assert used <= rate * (now_s + 1) * (1 + PRECISION) + PRECISION


def test_a_debt_is_paid_at_the_rate() -> None:
    account = RateAccount(100.0, 0.0)
    assert account.use(100, 0.0) == 0, "a second's worth is there at first"
    assert account.use(50, 0.0) == pytest.approx(0.5)
    assert account.use(0, 0.25) == pytest.approx(0.25)
    assert account.use(0, 0.5) == pytest.approx(0)
    assert account.use(0, 100.0) == 0
    assert account.use(101, 100.0) == pytest.approx(0.01), "savings end at a second's worth"


def test_a_rate_that_changes_keeps_the_debt() -> None:
    account = RateAccount(100.0, 0.0)
    account.use(300, 0.0)
    assert account.debt_s == pytest.approx(2)
    account.set_rate(50, 1.0)
    assert account.debt_s == pytest.approx(2)
    account.set_rate(0, 2.0)
    assert account.debt_s == math.inf
    account.set_rate(1000, 3.0)
    assert account.use(0, 3.05) == pytest.approx(0)


def test_a_clock_that_goes_back_gives_nothing() -> None:
    account = RateAccount(100.0, 10.0)
    account.use(200, 10.0)
    assert account.use(0, 9.0) == pytest.approx(1)
    assert account.use(0, 10.5) == pytest.approx(0.5)
