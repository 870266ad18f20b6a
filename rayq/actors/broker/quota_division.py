"""A broker's part in dividing rates of the whole cluster: it adds up what its processes report, has
the controller give it a share, and divides that among them.

Without a controller the last shares stay for 10 s, then each broker has an equal part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rayq import messages
from rayq.actors.metadata.metadata_keeper import MetadataKeeper
from rayq.actors.quotas import Quotas
from rayq.core.access.quota_shares import SHARE_AGE_MAX_S, ShareBook
from rayq.core.access.quotas import AccountKey
from rayq.environment import Clock

_BROKER = ""
"""The reporter that is the broker's own process."""


class QuotaNews(NamedTuple):
    """The shares of a replica process."""

    part: float
    """The fraction of each other rate."""
    shares: list[messages.QuotaShare]


NO_QUOTAS = QuotaNews(1.0, [])


class QuotaDivision:
    """See the module. `quotas` are those of the broker's own process."""

    def __init__(self, quotas: Quotas, metadata: MetadataKeeper, clock: Clock) -> None:
        self._quotas = quotas
        self._metadata = metadata
        self._now_s = clock.monotonic
        self._book: ShareBook[str] = ShareBook()
        self._given: dict[AccountKey, tuple[float, float]] = {}
        """The broker's share of each rate, and when the controller gave it."""

    def report(self, process: str, demands: Iterable[messages.QuotaDemand]) -> None:
        """Takes what the clients of a replica process want."""
        self._book.report(process, demands, self._now_s())

    def demands(self) -> list[messages.QuotaDemand]:
        """The demands of the clients of all processes of this broker."""
        now_s = self._now_s()
        self._book.report(_BROKER, self._quotas.demands(), now_s)
        return self._book.totals(now_s)

    def take_shares(self, shares: Sequence[messages.QuotaShare]) -> bool:
        """Takes the shares that the controller gave this broker. Returns whether it gave any."""
        now_s = self._now_s()
        for share in shares:
            key = AccountKey(share.principal, share.client_id, share.name)
            self._given[key] = share.share, now_s
        for key, (_, at_s) in list(self._given.items()):
            if now_s - at_s > SHARE_AGE_MAX_S:
                del self._given[key]
        self._quotas.set_shares(*self.news(_BROKER, 1))
        return bool(shares)

    def news(self, process: str, processes: int) -> QuotaNews:
        """The shares of a replica process, of which the broker has this many."""
        if not len(self._metadata.state.quotas):
            return NO_QUOTAS
        return QuotaNews(self._part / max(processes, 1), self._shares_of(process))

    def _shares_of(self, process: str) -> list[messages.QuotaShare]:
        return self._book.shares(
            process, self._metadata.state.quotas, self._now_s(), self._whole_of
        )

    @property
    def _part(self) -> float:
        """An equal part of a rate: the same for each live broker."""
        live = sum(broker.live for broker in self._metadata.state.brokers.values())
        return 1 / max(live, 1)

    def _whole_of(self, key: AccountKey) -> float:
        share, at_s = self._given.get(key, (0.0, -SHARE_AGE_MAX_S))
        return share if self._now_s() - at_s <= SHARE_AGE_MAX_S else self._part
