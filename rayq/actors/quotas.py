"""The quotas that a server process enforces: the accounts of its clients, and those that wait.

An account is a bucket of one second that may go into debt. Work is charged when it is known, and a
client in debt waits: one that was told does so by itself, and the requests of others wait here,
first come, first served. Most rates hold in the whole cluster, and this process has a share of
them: see `rayq.core.access.quota_shares`.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from rayq.core.access.quota_shares import DemandMeter
from rayq.core.access.quotas import AccountKey, Limit, QuotaTable, RateAccount
from rayq.environment import Clock, Environment
from rayq.errors import DisconnectedError, QuotaLimitError
from rayq.messages import AnyRequest
from rayq.messages.acls import QuotaName
from rayq.messages.quotas import (
    SHARED_QUOTAS,
    Quota,
    QuotaDemand,
    QuotaShare,
    QuotaUse,
)
from rayq.metrics import Sample

DEBT_MAX_S = 0.5
"""Produce requests of a client that is told to wait are taken up to this debt: they were on their
way. Further ones wait here. While an account is in debt nobody can tell that its clients have gone
elsewhere, so with more debt a load that shifts would wait for its share for longer."""
TOLD_S_MIN = 0.001
TOLD_S_MAX = 60.0
"""Maximum time that a client is told to wait. It is told again when it sends more too early."""
WAITS_UNREAD: tuple[QuotaName, ...] = ("producer_byte_rate", "request_percentage")
"""The quotas by which requests wait before they are read. By the others their handlers wait."""
AT_ONCE_S = 0.25
"""One request reads or takes at most what the rate allows in this time, but for one batch or
record: others would have to wait for long."""
TOLD_AGAIN_S = 10.0
"""Interval at which a client is told again while its requests wait here, behind those of others:
else it would give them up."""
IDLE_S = 10.0
"""An account that nobody has used for this long gets no share."""

Go = Callable[[], None]


@dataclass(eq=False, frozen=True, slots=True)
class Place:
    """A place in the line of those that wait for an account."""

    debt_max_s: float
    """The debt up to which it may go."""
    units: float
    """The units that it then takes."""
    go: Go
    """Called when it has taken them."""


class Account:
    """One limit of this process, and the requests that wait for it."""

    def __init__(self, key: AccountKey, rate: float, clock: Clock) -> None:
        self.key = key
        self._now_s = clock.monotonic
        self._bucket = RateAccount(rate, clock.monotonic())
        self._waiting: OrderedDict[Place, None] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        self.meter = DemandMeter(clock.monotonic())

    @property
    def rate(self) -> float:
        return self._bucket.rate

    @property
    def throttled_s(self) -> float:
        """The time so far in which the account was in debt."""
        self._bucket.use(0.0, self._now_s())
        return self._bucket.throttled_s

    @property
    def debt_s(self) -> float:
        """The time until the debt is paid. Infinite where nothing at all is allowed."""
        if self.rate <= 0:
            return math.inf
        return self._bucket.use(0.0, self._now_s())

    def demand(self) -> float:
        """Units per second that the clients want of this process, since the last call."""
        return self.meter.measure(
            self._now_s(), throttled_s=self.throttled_s, is_waiting=bool(self._waiting)
        )

    def is_free(self, debt_max_s: float) -> bool:
        """Returns whether work may be done now that goes by this account."""
        if self._waiting:
            return False
        # Time since the last look can only have brought more.
        return (self._bucket.balance >= 0 and self.rate > 0) or self.debt_s <= debt_max_s

    def use(self, units: float) -> float:
        """Takes units. Returns the debt in seconds."""
        now_s = self._now_s()
        self.meter.used(units, now_s)
        debt_s = self._bucket.use(units, now_s)
        if units < 0 and self._waiting:
            self._schedule()
        return debt_s

    def set_rate(self, rate: float) -> None:
        if rate != self.rate:
            self._bucket.set_rate(rate, self._now_s())
            self._schedule()

    def wait(self, debt_max_s: float, units: float, go: Go) -> Place:
        """Calls `go()` once the debt is at most `debt_max_s`; the units are taken then. Returns the
        place in the line. A caller that stops waiting has to `leave` it: others come sooner then,
        and nobody is charged."""
        place = Place(debt_max_s, units, go)
        self._waiting[place] = None
        if len(self._waiting) == 1:
            self._schedule()
        return place

    def leave(self, place: Place) -> None:
        """Gives a place up. Does nothing once it was called."""
        if place in self._waiting:
            is_first = self._first is place
            del self._waiting[place]
            if is_first:
                self._schedule()

    @property
    def _first(self) -> Place:
        return next(iter(self._waiting))

    def end(self) -> None:
        """Ends the limit: nobody waits for it any longer."""
        self._stop_timer()
        waiting, self._waiting = self._waiting, OrderedDict()
        for place in waiting:
            asyncio.get_running_loop().call_soon(place.go)

    def _schedule(self) -> None:
        self._stop_timer()
        if self._waiting:
            wait_s = self.debt_s - self._first.debt_max_s
            if wait_s < math.inf:
                self._timer = asyncio.get_running_loop().call_later(max(wait_s, 0.0), self._next)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _next(self) -> None:
        """Lets the first go, if it may: the others are looked at in the next turn of the loop, when
        it may have used more."""
        self._timer = None
        if self._waiting and self.debt_s - self._first.debt_max_s <= TOLD_S_MIN:
            place, _ = self._waiting.popitem(last=False)
            if place.units:
                self.use(place.units)
            place.go()
        self._schedule()


class ClientThrottle:
    """The quotas of one connection's client (`rayq.wire.throttling.Throttle`)."""

    def __init__(
        self,
        quotas: Quotas,
        principal: str,
        client_id: str,
        tell: Callable[[QuotaName, float], None],
    ) -> None:
        self._quotas = quotas
        self.principal = principal
        self.client_id = client_id
        self._tell = tell
        self._now_s = quotas.clock.monotonic
        self._accounts: dict[QuotaName, Account] = {}
        self.limited_by: Collection[QuotaName] = self._accounts.keys()
        self._waits_for: dict[type[AnyRequest], tuple[tuple[Account, bool], ...]] = {}
        """The accounts by which a kind of requests waits before it is read, and whether it costs
        its bytes there; found when the kind is first needed."""
        self._told_until_s: dict[QuotaName, float] = {}
        self._waiting: Counter[QuotaName] = Counter()
        """The number of requests that wait here, by the quota that they wait for now."""
        self._parked: dict[Place, Account] = {}
        """Places of requests that wait before they are read."""
        self._acquiring: dict[asyncio.Future[None], None] = {}
        """Handlers that wait."""
        self._has_ended = False
        self._timer: asyncio.TimerHandle | None = None

    def refresh(self) -> None:
        """Takes the accounts by the quotas that hold now."""
        self._accounts = self._quotas.accounts_of(self.principal, self.client_id)
        self.limited_by = self._accounts.keys()
        self._waits_for.clear()

    def retell(self) -> None:
        """Tells the client what it has to wait now, where it was told a longer time."""
        now_s = self._now_s()
        for name, until_s in list(self._told_until_s.items()):
            wait_s = self._debt_s(name)
            if until_s > now_s + wait_s + TOLD_S_MIN:
                self._tell_it(name, wait_s)

    def _tell_it(self, name: QuotaName, wait_s: float) -> None:
        wait_s = min(wait_s, TOLD_S_MAX)
        self._told_until_s[name] = self._now_s() + wait_s
        self._tell(name, wait_s)

    def _charge(self, account: Account, units: float) -> None:
        debt_s = account.use(units)
        if debt_s >= TOLD_S_MIN:
            self._tell_it(account.key.name, debt_s)

    def _debt_s(self, name: QuotaName) -> float:
        account = self._accounts.get(name)
        return 0.0 if account is None else account.debt_s

    def throttled_s(self, kind: type[AnyRequest]) -> float:
        accounts = self._accounts
        return max((accounts[name].debt_s for name in kind.quotas if name in accounts), default=0.0)

    # --- requests -------------------------------------------------------------------------------

    def admits(self, kind: type[AnyRequest], size: int) -> bool:
        accounts = self._accounts_of(kind)
        for account, _ in accounts:
            if not account.is_free(DEBT_MAX_S):
                return False
        for account, costs_bytes in accounts:
            if costs_bytes:
                self._charge(account, size)
        return True

    def _accounts_of(self, kind: type[AnyRequest]) -> tuple[tuple[Account, bool], ...]:
        accounts = self._waits_for.get(kind)
        if accounts is None:
            accounts = self._waits_for[kind] = tuple(
                (self._accounts[name], name == "producer_byte_rate")
                for name in kind.quotas
                if name in WAITS_UNREAD and name in self._accounts
            )
        return accounts

    def wait(self, kind: type[AnyRequest], size: int, go: Go) -> None:
        self._wait_all(
            [
                (account, size if costs_bytes else 0)
                for account, costs_bytes in self._accounts_of(kind)
            ],
            go,
        )

    def _wait_all(self, wanted: Sequence[tuple[Account, float]], go: Go) -> None:
        """Waits for one after the other."""
        if not wanted:
            asyncio.get_running_loop().call_soon(go)
            return
        (account, units), *others = wanted

        def granted() -> None:
            if self._parked.pop(place, None) is None:
                return  # The connection has ended.
            self._waiting[account.key.name] -= 1
            self._tell_debt(account.key.name)
            if others:
                self._wait_all(others, go)
            else:
                go()

        self._begin_waiting(account.key.name)
        place = account.wait(DEBT_MAX_S, units, granted)
        self._parked[place] = account

    def _begin_waiting(self, name: QuotaName) -> None:
        self._tell_debt(name)
        self._waiting[name] += 1
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(TOLD_AGAIN_S, self._tell_again)

    def _tell_again(self) -> None:
        self._timer = None
        waiting = [name for name, count in self._waiting.items() if count > 0]
        for name in waiting:
            self._tell_it(name, max(self._debt_s(name), TOLD_S_MIN))
        if waiting:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(TOLD_AGAIN_S, self._tell_again)

    def _tell_debt(self, name: QuotaName) -> None:
        debt_s = self._debt_s(name)
        if debt_s >= TOLD_S_MIN:
            self._tell_it(name, debt_s)

    def most(self, name: QuotaName, units: float) -> float:
        account = self._accounts.get(name)
        return units if account is None else min(units, max(account.rate * AT_ONCE_S, 1.0))

    async def acquire(self, name: QuotaName, units: float) -> None:
        account = self._accounts.get(name)
        if account is None:
            return
        if account.is_free(0.0):
            account.use(units)
            return
        if self._has_ended:
            raise _gone()
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def go() -> None:
            if granted.done():  # The handler has stopped waiting.
                account.use(-units)
            else:
                granted.set_result(None)

        self._begin_waiting(name)
        place = account.wait(0.0, units, go)
        self._acquiring[granted] = None
        try:
            await granted
        except asyncio.CancelledError:
            was_granted = granted.done() and not granted.cancelled() and not granted.exception()
            if was_granted:
                account.use(-units)
            raise
        finally:
            account.leave(place)
            self._acquiring.pop(granted, None)
            self._waiting[name] -= 1

    def use(self, name: QuotaName, units: float) -> None:
        account = self._accounts.get(name)
        if account is not None:
            self._charge(account, units)

    def spent(self, seconds: float) -> None:
        account = self._accounts.get("request_percentage")
        if account is not None:
            self._charge(account, seconds)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        # A place holds all of its connection: a client that comes and goes would fill the memory.
        self._has_ended = True
        parked, self._parked = self._parked, {}
        for place, account in parked.items():
            account.leave(place)
        for granted in self._acquiring:
            if not granted.done():
                granted.set_exception(_gone())
        self._quotas.disconnect(self)


def _gone() -> DisconnectedError:
    return DisconnectedError("The client has gone while it waited for its quota.")


class Quotas:
    """The quotas that this process knows (`rayq.wire.throttling.Throttles`)."""

    def __init__(self, environment: Environment) -> None:
        self.clock = environment.clock
        self._metrics = environment.metrics
        self._table = QuotaTable()
        self._part = 1.0
        """The equal part of this process, for accounts without a share."""
        self._shares: dict[AccountKey, float] = {}
        self._accounts: dict[AccountKey, Account] = {}
        self._clients: dict[ClientThrottle, None] = {}
        self._open: dict[tuple[str, str], int] = {}
        """Open connections by principal and client id."""
        self._throttled_s: dict[tuple[str, QuotaName], float] = {}
        """The time in which accounts that are gone were in debt."""
        environment.metrics.add_source(self._measure)

    # --- what holds -----------------------------------------------------------------------------

    def replace(self, quotas: Iterable[Quota]) -> None:
        """Takes all quotas of the cluster."""
        table = QuotaTable(quotas)
        if table == self._table:
            return
        self._table = table
        for key in list(self._accounts):
            limit = self._table.limit(key.principal, key.client_id or "", key.name)
            if limit is None or limit.key != key:
                self._forget(key)
            else:
                self._set_rate(key, limit.value)
        self._refresh()

    def set_shares(self, part: float, shares: Iterable[QuotaShare]) -> None:
        """Takes this process's shares of the rates, as fractions. `part` is that of all others."""
        news = {
            AccountKey(share.principal, share.client_id, share.name): share.share
            for share in shares
        }
        if part == self._part and news == self._shares:
            return
        self._part, self._shares = part, news
        for key in self._accounts:
            limit = self._table.limit(key.principal, key.client_id or "", key.name)
            if limit is not None:
                self._set_rate(key, limit.value)
        for client in self._clients:
            client.retell()

    def demands(self) -> list[QuotaDemand]:
        """The demands of the clients of this process for rates that hold in the whole cluster."""
        return [
            QuotaDemand(*key, account.demand())
            for key, account in self._accounts.items()
            if key.name in SHARED_QUOTAS and account.meter.idle_s(self.clock.monotonic()) < IDLE_S
        ]

    def _set_rate(self, key: AccountKey, value: float) -> None:
        self._accounts[key].set_rate(self._rate(key, value))

    def _rate(self, key: AccountKey, value: float) -> float:
        """The rate of an account in this process."""
        if key.name == "request_percentage":
            return value / 100
        if key.name in SHARED_QUOTAS:
            return value * self._shares.get(key, self._part)
        return value

    def _forget(self, key: AccountKey) -> None:
        account = self._accounts.pop(key)
        label = key.principal, key.name
        self._throttled_s[label] = self._throttled_s.get(label, 0.0) + account.throttled_s
        account.end()

    def _refresh(self) -> None:
        for client in self._clients:
            client.refresh()
        for client in self._clients:
            client.retell()

    # --- connections ----------------------------------------------------------------------------

    def connect(
        self, principal: str, client_id: str, tell: Callable[[QuotaName, float], None]
    ) -> ClientThrottle:
        self._check_connection(principal, client_id)
        client = ClientThrottle(self, principal, client_id, tell)
        self._clients[client] = None
        who = principal, client_id
        self._open[who] = self._open.get(who, 0) + 1
        client.refresh()
        return client

    def _check_connection(self, principal: str, client_id: str) -> None:
        limit = self._table.limit(principal, client_id, "max_connections")
        if limit is not None:
            count = sum(
                count
                for who, count in self._open.items()
                if who[0] == principal and self._shares_limit(who, limit)
            )
            if count >= limit.value:
                raise QuotaLimitError(
                    f"Principal {principal!r} has {count} connections to this process, and its "
                    f"quota max_connections is {limit.value:g}: close some, or ask whoever "
                    f"administers the cluster for more (rayq quota set {principal})."
                )
        account = self.accounts_of(principal, client_id).get("connection_creation_rate")
        if account is not None:
            if not account.is_free(0.0):
                raise QuotaLimitError(
                    f"Principal {principal!r} connects more often to this process than its quota "
                    f"connection_creation_rate allows, {account.rate:g} a second: wait a moment, "
                    "keep connections open, or ask an administrator of the cluster for more (rayq "
                    f"quota set {principal})."
                )
            account.use(1.0)

    def _shares_limit(self, who: tuple[str, str], limit: Limit) -> bool:
        other = self._table.limit(*who, limit.key.name)
        return other is not None and other.key == limit.key

    def disconnect(self, client: ClientThrottle) -> None:
        """Takes note that a connection has ended."""
        if self._clients.pop(client, self) is self:
            return
        who = client.principal, client.client_id
        self._open[who] -= 1
        if not self._open[who]:
            del self._open[who]

    def accounts_of(self, principal: str, client_id: str) -> dict[QuotaName, Account]:
        """The accounts of a client, one for each rate that limits it."""
        accounts: dict[QuotaName, Account] = {}
        for limit in self._table.rates(principal, client_id):
            account = self._accounts.get(limit.key)
            if account is None:
                rate = self._rate(limit.key, limit.value)
                account = self._accounts[limit.key] = Account(limit.key, rate, self.clock)
            accounts[limit.key.name] = account
        return accounts

    def uses_of(self, principal: str) -> list[QuotaUse]:
        """The use of each rate of a principal that its clients have used in this process."""
        uses: dict[tuple[str | None, QuotaName], QuotaUse] = {
            (None, name): QuotaUse(None, name, throttled_s, 0.0)
            for (who, name), throttled_s in self._throttled_s.items()
            if who == principal
        }
        for key, account in self._accounts.items():
            if key.principal == principal:
                before = uses.get((key.client_id, key.name))
                throttled_s = account.throttled_s + (before.throttled_s if before else 0.0)
                uses[key.client_id, key.name] = QuotaUse(
                    key.client_id, key.name, throttled_s, account.debt_s
                )
        return list(uses.values())

    def _measure(self) -> list[Sample]:
        throttled_s = dict(self._throttled_s)
        for key, account in self._accounts.items():
            label = key.principal, key.name
            throttled_s[label] = throttled_s.get(label, 0.0) + account.throttled_s
        return [
            self._metrics.sample("rayq_throttled_seconds_total", value, principal=who, quota=name)
            for (who, name), value in throttled_s.items()
        ]
