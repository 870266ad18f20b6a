"""Quotas: which limits hold for whom, a cluster-wide rate divided among the processes that serve,
and the account of each.

Kafka's quotas hold for each broker, so more brokers give more. Here a rate holds for the cluster:
each process reports its demand, and the controller divides the rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from rayq.messages.acls import QuotaName
from rayq.messages.quotas import SHARED_QUOTAS, Quota

ProcessT = TypeVar("ProcessT")


RATES: tuple[QuotaName, ...] = (
    *SHARED_QUOTAS,
    "request_percentage",
    "connection_creation_rate",
)
"""The limits that have accounts. The others count what there is."""


class AccountKey(NamedTuple):
    """The account of a limit: all that share it have one."""

    principal: str
    client_id: str | None
    """None: of all clients of the principal without a limit of their own."""
    name: QuotaName


class Limit(NamedTuple):
    """A limit, and the account that it holds for."""

    key: AccountKey
    value: float


class QuotaTable:
    """The quotas of a cluster. A limit of a client id holds before one of its principal, and that
    before the default. A default is for each principal by itself."""

    def __init__(self, quotas: Iterable[Quota] = ()) -> None:
        self._limits: dict[tuple[str | None, str | None], Mapping[str, float]] = {
            (quota.principal, quota.client_id): quota.limits for quota in quotas
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QuotaTable) and self._limits == other._limits

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"QuotaTable({self._limits})"

    def __len__(self) -> int:
        return len(self._limits)

    def __iter__(self) -> Iterator[Quota]:
        for (principal, client_id), limits in self._limits.items():
            yield Quota(principal, client_id, limits)

    def replace(
        self, principal: str | None, client_id: str | None, limits: Mapping[str, float]
    ) -> None:
        """Sets all limits of a principal, of one of its client ids, or by default."""
        if limits:
            self._limits[principal, client_id] = limits
        else:
            self._limits.pop((principal, client_id), None)

    def forget(self, principal: str) -> None:
        """Removes the limits of a principal and of its client ids."""
        for key in [key for key in self._limits if key[0] == principal]:
            del self._limits[key]

    def limits_of(self, principal: str | None, client_id: str | None) -> Mapping[str, float]:
        """The limits that were set for exactly this principal or client id."""
        return self._limits.get((principal, client_id), {})

    def limit(self, principal: str, client_id: str, name: QuotaName) -> Limit | None:
        """The limit that holds for a client of a principal. None: there is none."""
        own = self._limits.get((principal, client_id), {}).get(name)
        if own is not None:
            return Limit(AccountKey(principal, client_id, name), own)
        for entity in ((principal, None), (None, None)):
            shared = self._limits.get(entity, {}).get(name)
            if shared is not None:
                return Limit(AccountKey(principal, None, name), shared)
        return None

    def rates(self, principal: str, client_id: str) -> Iterator[Limit]:
        """Yields the rates that limit a client of a principal."""
        if self._limits:
            for name in RATES:
                limit = self.limit(principal, client_id, name)
                if limit is not None:
                    yield limit


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
    throttled_s: float = 0.0
    """The time so far in which there was a debt."""

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
        if self.balance < 0:
            self.throttled_s += min(passed_s, self.debt_s)
        self.now_s = max(self.now_s, now_s)
        self.balance = min(self.balance + self.rate * passed_s, self.rate)
