"""Quotas: a cluster-wide rate divided among the processes that serve, and the account of each.

Kafka's quotas hold for each broker, so more brokers give more. Here a rate holds for the cluster:
each process reports its demand, and the controller divides the rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

ProcessT = TypeVar("ProcessT")


def max_min_shares(rate: float, demands: Mapping[ProcessT, float]) -> dict[ProcessT, float]:
    """Divides a rate among processes by max-min fairness: nobody gets less than an equal part
    unless it asks for less, and what others leave is divided again.

    `rate` and the demands are in units per second, not negative. The shares sum up to the rate:
    what nobody asks for is divided equally, so that a process may begin to serve before its next
    report.
    """
    shares: dict[ProcessT, float] = {}
    left, waiting = rate, len(demands)
    for process, demand in sorted(demands.items(), key=lambda item: item[1]):
        shares[process] = min(demand, left / waiting)
        left -= shares[process]
        waiting -= 1
    if shares and left > 0:
        more = left / len(shares)
        shares = {process: share + more for process, share in shares.items()}
    return {process: shares[process] for process in demands}


@dataclass(slots=True)
class RateAccount:
    """A token bucket of one second that may go into debt: work is done and then paid for, and who
    is in debt is answered late."""

    rate: float
    """Units per second."""
    now_s: float
    balance: float = field(init=False)
    """Units that may be used at once. Negative: a debt."""

    def __post_init__(self) -> None:
        self.balance = self.rate

    def set_rate(self, rate: float, now_s: float) -> None:
        """Changes the rate from now on. A debt stays; savings are cut to the new second."""
        self._accrue(now_s)
        self.rate = rate
        self.balance = min(self.balance, rate)

    def use(self, units: float, now_s: float) -> float:
        """Takes units, and returns the time in seconds by which the answer has to be late."""
        self._accrue(now_s)
        self.balance -= units
        return self.debt_s

    @property
    def debt_s(self) -> float:
        """The time until the debt is paid. Infinite for a rate of 0."""
        if self.balance >= 0:
            return 0.0
        return -self.balance / self.rate if self.rate > 0 else float("inf")

    def _accrue(self, now_s: float) -> None:
        passed_s = max(now_s - self.now_s, 0.0)
        self.now_s = max(self.now_s, now_s)
        self.balance = min(self.balance + self.rate * passed_s, self.rate)
