"""Shares of a rate, by what clients want of each process."""

from __future__ import annotations

import math
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayq.core.access.quota_shares import (
    REPORT_AGE_MAX_S,
    SHARE_MIN,
    DemandMeter,
    ShareBook,
)
from rayq.core.access.quotas import AccountKey, QuotaTable, RateAccount, max_min_shares
from rayq.messages.quotas import Quota, QuotaDemand

RATE = 1000.0
KEY = AccountKey("anna", None, "producer_byte_rate")
QUOTAS = QuotaTable([Quota("anna", None, {"producer_byte_rate": RATE})])


def wants(demand: float) -> list[QuotaDemand]:
    return [QuotaDemand(*KEY, demand)]


def shares(book: ShareBook[int], count: int, now_s: float = 0.0) -> list[float]:
    return [
        share.share for number in range(count) for share in book.shares(number, QUOTAS, now_s)
    ]


def filled_like_water(rate: float, demands: list[float]) -> list[float]:
    """Max-min fairness as one would pour it: a drop for each who still wants one, in turns, then
    the rest for all."""
    drop = rate / 2000
    given = [0.0] * len(demands)
    left, is_wanted = rate, True
    while left > drop / 2 and is_wanted:
        is_wanted = False
        for number, demand in enumerate(demands):
            if given[number] + drop / 2 < demand and left > drop / 2:
                given[number] += drop
                left -= drop
                is_wanted = True
    return [amount + left / len(demands) for amount in given]


@given(st.lists(st.floats(0, 2000), min_size=1, max_size=8))
def test_shares_are_max_min_fair(demands: list[float]) -> None:
    found = max_min_shares(RATE, dict(enumerate(demands)))
    expected = filled_like_water(RATE, demands)
    slack = RATE / 2000 * 2 * len(demands)
    assert all(abs(found[number] - expected[number]) <= slack for number in found)


@given(st.lists(st.floats(0, 5000), min_size=1, max_size=8), st.floats(0.001, 1))
def test_shares_are_fractions_of_what_there_is_to_divide(
    demands: list[float], whole: float
) -> None:
    book: ShareBook[int] = ShareBook()
    for number, demand in enumerate(demands):
        book.report(number, wants(demand), 0.0)
    given = [
        share.share
        for number in range(len(demands))
        for share in book.shares(number, QUOTAS, 0.0, lambda key: whole)
    ]
    assert whole * (1 - 1e-6) <= sum(given) <= whole * (1 + SHARE_MIN * len(demands) + 1e-6)
    assert min(given) >= SHARE_MIN * whole * (1 - 1e-6)
    (total,) = book.totals(0.0)
    assert math.isclose(total.demand, sum(demands), abs_tol=1e-6)


def test_a_process_that_could_use_more_gets_what_others_leave() -> None:
    book: ShareBook[int] = ShareBook()
    for number, demand in enumerate((100, 1e15, 1e15)):
        book.report(number, wants(demand), 0.0)
    assert shares(book, 3) == pytest.approx([0.1, 0.45, 0.45])


def test_an_old_report_does_not_count() -> None:
    book: ShareBook[int] = ShareBook()
    book.report(0, wants(1e15), 0.0)
    book.report(1, wants(1e15), REPORT_AGE_MAX_S + 0.1)
    now_s = REPORT_AGE_MAX_S + 0.2
    assert [share.share for share in book.shares(1, QUOTAS, now_s)] == [1.0]
    book.tidy(now_s)
    assert book.shares(0, QUOTAS, now_s) == []
    book.tidy(now_s + 10)
    assert book.totals(now_s + 10) == []


def test_a_limit_that_is_gone_or_another_has_no_shares() -> None:
    book: ShareBook[int] = ShareBook()
    book.report(0, wants(5), 0.0)
    assert book.shares(0, QuotaTable(), 0.0) == []
    default = QuotaTable([Quota(None, None, {"producer_byte_rate": 5.0})])
    assert len(book.shares(0, default, 0.0)) == 1
    nothing = QuotaTable([Quota("anna", None, {"producer_byte_rate": 0.0})])
    assert [share.share for share in book.shares(0, nothing, 0.0)] == [1.0]
    own = [QuotaDemand("anna", "etl", "producer_byte_rate", 5)]
    book.report(0, own, 0.0)
    assert len(book.shares(0, QUOTAS, 0.0)) == 1  # That client id has no limit of its own.


def test_a_meter_tells_what_was_used_and_that_more_was_wanted() -> None:
    meter = DemandMeter(0.0)
    assert meter.idle_s(1.0) == math.inf
    now_s = 0.0
    for _ in range(40):
        meter.used(50, now_s)
        now_s += 0.5
        demand = meter.measure(now_s, throttled_s=0.0)
    assert demand == pytest.approx(105, rel=0.01)
    assert meter.measure(now_s, throttled_s=0.2) >= 1e15
    for _ in range(10):
        now_s += 0.5
        demand = meter.measure(now_s, throttled_s=0.2)
    assert demand < 1
    assert meter.idle_s(now_s) == pytest.approx(5.5)
    assert meter.measure(now_s + 0.5, throttled_s=0.2, is_waiting=True) >= 1e15


@given(
    rates=st.lists(st.floats(50, 3000), min_size=3, max_size=3),
    later=st.lists(st.floats(50, 3000), min_size=3, max_size=3),
)
def test_a_load_that_shifts_has_its_quota_again_within_two_seconds(
    rates: list[float], later: list[float]
) -> None:
    """Three processes whose clients send a request of 10 units as often as they may. Reports go
    each half second, and shares come back half a second later."""
    book: ShareBook[int] = ShareBook()
    meters = [DemandMeter(0.0) for _ in range(3)]
    accounts = [RateAccount(RATE / 3, 0.0) for _ in range(3)]
    wanted = [0.0] * 3
    used: deque[tuple[float, float]] = deque()
    news: list[tuple[float, int, float]] = []
    step_s, shift_s, end_s = 0.01, 12.0, 24.0
    for step in range(int(end_s / step_s)):
        now_s = step * step_s
        load = rates if now_s < shift_s else later
        for number, account in enumerate(accounts):
            wanted[number] = min(wanted[number] + load[number] * step_s, 200.0)
            account.use(0.0, now_s)
            while wanted[number] >= 10 and account.debt_s == 0:
                wanted[number] -= 10
                account.use(10, now_s)
                meters[number].used(10, now_s)
                used.append((now_s, 10))
        if step % 50 == 0:
            for number, (meter, account) in enumerate(zip(meters, accounts, strict=True)):
                demand = meter.measure(now_s, throttled_s=account.throttled_s)
                book.report(number, wants(demand), now_s)
            for number in range(3):
                (share,) = book.shares(number, QUOTAS, now_s)
                news.append((now_s + 0.5, number, share.share))
        while news and news[0][0] <= now_s:
            _, number, share_of = news.pop(0)
            accounts[number].set_rate(RATE * share_of, now_s)
    for from_s, load in ((2.0, rates), (shift_s + 2.0, later)):
        served = sum(units for at_s, units in used if from_s <= at_s < from_s + 10.0) / 10.0
        assert served >= 0.95 * min(RATE, sum(load)) - 10
        assert served <= 1.05 * RATE + 10
