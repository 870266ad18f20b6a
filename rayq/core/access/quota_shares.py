"""The shares of a rate that holds in the whole cluster: what processes report, and who gets what.

Each process reports for each account what its clients want of it; a broker adds up its processes,
and the controller its brokers. The shares take the same way back, as fractions of the rate. Who
reports nothing of an account has an equal part of it, until it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from rayq.core.access.quotas import AccountKey, QuotaTable, max_min_shares
from rayq.messages.quotas import QuotaDemand, QuotaShare

ReporterT = TypeVar("ReporterT", bound=Hashable)

SMOOTHING_S = 0.7
"""Time over which use that falls is averaged: clients send in bursts."""
SHORT_PART = 0.1
"""Clients had to wait, if the account was in debt for this part of the time."""
SLACK = 1.05
"""Factor by which more is wanted than was used, so that use may grow."""
MUCH = 1e15
"""Demand of a process whose clients had to wait: it could use any share."""
REPORT_AGE_MAX_S = 2.5
"""A report that is older than this counts no more."""
SHARE_AGE_MAX_S = 10.0
"""Shares stay for so long without news."""
SHARE_MIN = 0.001
"""Minimum share: with nothing at all, nobody could ask for more."""


class DemandMeter:
    """Measures the demand of the clients of an account for one process."""

    def __init__(self, now_s: float) -> None:
        self._units = 0.0
        self._since_s = now_s
        self._used_at_s = -math.inf
        self._per_s = 0.0
        self._throttled_s = 0.0

    def used(self, units: float, now_s: float) -> None:
        self._units += units
        self._used_at_s = now_s

    def idle_s(self, now_s: float) -> float:
        """The time for which nobody has used the account."""
        return now_s - self._used_at_s

    def measure(self, now_s: float, *, throttled_s: float, is_waiting: bool = False) -> float:
        """The units per second that are wanted, for a report. `throttled_s` is the time so far in
        which the account was in debt; `is_waiting`: clients wait now."""
        passed_s = now_s - self._since_s
        if passed_s > 0:
            per_s = max(self._units, 0.0) / passed_s
            weight = 1.0 if per_s > self._per_s else min(passed_s / SMOOTHING_S, 1.0)
            self._per_s += weight * (per_s - self._per_s)
            self._since_s, self._units = now_s, 0.0
        is_short = throttled_s - self._throttled_s > SHORT_PART * passed_s
        self._throttled_s = throttled_s
        return MUCH if is_short or is_waiting else self._per_s * SLACK


class ShareBook(Generic[ReporterT]):
    """Divides rates among those who report: the controller among brokers, a broker among its
    processes."""

    def __init__(self) -> None:
        self._reports: dict[AccountKey, dict[ReporterT, tuple[float, float]]] = {}
        """Demand and time of the last report."""

    def report(
        self, reporter: ReporterT, demands: Iterable[QuotaDemand], now_s: float
    ) -> None:
        """Takes what somebody wants now."""
        for demand in demands:
            key = AccountKey(demand.principal, demand.client_id, demand.name)
            self._reports.setdefault(key, {})[reporter] = demand.demand, now_s

    def tidy(self, now_s: float) -> None:
        """Forgets the reports that count no more."""
        for key, reports in list(self._reports.items()):
            fresh = {
                reporter: report
                for reporter, report in reports.items()
                if now_s - report[1] <= REPORT_AGE_MAX_S
            }
            if fresh:
                self._reports[key] = fresh
            else:
                del self._reports[key]

    def totals(self, now_s: float) -> list[QuotaDemand]:
        """The demands of all who report, added up."""
        self.tidy(now_s)
        return [
            QuotaDemand(*key, min(sum(demand for demand, _ in reports.values()), MUCH))
            for key, reports in self._reports.items()
        ]

    def shares(
        self,
        reporter: ReporterT,
        quotas: QuotaTable,
        now_s: float,
        whole_of: Callable[[AccountKey], float] = lambda key: 1.0,
    ) -> list[QuotaShare]:
        """The shares of one who reports. `whole_of(account)` is the fraction of its rate that there
        is to divide."""
        shares = []
        for key, reports in self._reports.items():
            if reporter not in reports:
                continue
            limit = quotas.limit(key.principal, key.client_id or "", key.name)
            if limit is None or limit.key != key:
                continue
            whole = whole_of(key)
            rate = limit.value * whole
            demands = {
                other: min(demand, rate)
                for other, (demand, at_s) in reports.items()
                if now_s - at_s <= REPORT_AGE_MAX_S or other == reporter
            }
            part = max_min_shares(rate, demands)[reporter] / rate if rate > 0 else 1 / len(demands)
            shares.append(QuotaShare(*key, min(max(part, SHARE_MIN) * whole, 1.0)))
        return shares
