"""Administration of quotas: how much principals may use of the cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import cast, get_args

from rayq.client.admin.access import get_principal, principal_name
from rayq.client.admin.base import ADMIN_TIMEOUT_S, WAIT_MS, AdminMethods, Call
from rayq.client.admin.metrics import PROCESS_TIMEOUT_S, ask_all, processes_of
from rayq.client.arguments import shown
from rayq.client.timeouts import takes_timeout
from rayq.environment import Address
from rayq.errors import AuthorizationError, InvalidRequestError, RayqError
from rayq.messages import (
    DescribeQuotas,
    DescribeQuotaUse,
    Quota,
    QuotaUse,
    RemoveQuota,
    SetQuota,
)
from rayq.messages.acls import QuotaName
from rayq.records import QuotaInfo

NUMBER_MAX = 1e300


class QuotaAdmin(AdminMethods):
    """Methods of `AsyncAdmin` about quotas."""

    @takes_timeout
    async def set_quota(
        self,
        principal: str | None,
        /,
        *,
        client_id: str | None = None,
        timeout_s: float = ADMIN_TIMEOUT_S,
        **limits: float,
    ) -> None:
        """Limits what a principal may use of the cluster, such as
        `set_quota("billing", producer_byte_rate=5_000_000)`. Limits that are not named stay as they
        are. With `client_id` it is about those of its clients alone. The principal None is the
        default, for each principal that has no such limit of its own. The most specific one holds.

        `producer_byte_rate`, `consumer_byte_rate` (bytes), `take_rate` (records from queues) and
        `controller_mutation_rate` (partitions created and deleted) are per second, in the whole
        cluster. A client that uses more has to wait: no request fails, and heartbeats, commits,
        acknowledgements and ends of transactions never wait. `request_percentage` (of the
        process's time), `connection_creation_rate` and `max_connections` hold for each server
        process; `max_topics` and `max_partitions` count what the principal has created. A topic or
        a connection too many is a QuotaLimitError. 0 allows nothing at all.

        Superusers have no quotas. Raises UnknownPrincipalError, InvalidRequestError,
        PrincipalLimitError, AuthorizationError.
        """
        checked = {_quota_name(name): _number(name, value) for name, value in limits.items()}
        await self._client.change(
            SetQuota(_text("principal", principal), _text("client_id", client_id), checked),
            timeout_s=timeout_s,
        )

    @takes_timeout
    async def remove_quota(
        self,
        principal: str | None,
        names: str | Iterable[str] = (),
        *,
        client_id: str | None = None,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> None:
        """Removes limits of a principal, of one of its client ids, or of the default (None);
        without names all of them. Whoever waits for one continues at once. What does not exist is
        passed over. Raises InvalidRequestError, AuthorizationError."""
        listed = [names] if isinstance(names, str) else names
        if not isinstance(listed, Iterable):
            raise TypeError(f"Names of limits must be a list of str, not {shown(names)}.")
        checked = [_quota_name(name) for name in listed]
        await self._client.change(
            RemoveQuota(_text("principal", principal), _text("client_id", client_id), checked),
            timeout_s=timeout_s,
        )

    @takes_timeout
    async def list_quotas(self, *, timeout_s: float = ADMIN_TIMEOUT_S) -> list[Quota]:
        """The quotas of the principals that one may describe, which a principal itself always may:
        first the default, then those of principals by name, each followed by those of its client
        ids."""
        call = Call(self._client, timeout_s)
        await call.confirm_metadata()
        version_min = self._client.metadata.oldest_acceptable
        return (await call.ask_metadata(DescribeQuotas(version_min, WAIT_MS))).quotas

    @takes_timeout
    async def describe_quotas(
        self, principal: str, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> list[QuotaInfo]:
        """The limits that hold for a principal: of its own, by default, and of its client ids, each
        with how far it is used up. A principal may always describe itself. A process that does not
        answer now is left out. Raises UnknownPrincipalError, AuthorizationError."""
        call = Call(self._client, timeout_s)
        await get_principal(call, principal_name(principal))
        quotas = await self.list_quotas(timeout_s=call.left_s)
        response = await self._client.fetch_all(timeout_s=call.left_s)
        uses = await self._uses_of(principal, processes_of(response), call)
        return [
            QuotaInfo(
                name,
                value,
                quota.client_id,
                quota.principal is None,
                max((use.throttled_s for use in uses.get((quota.client_id, name), ())), default=0),
                max((use.wait_s for use in uses.get((quota.client_id, name), ())), default=0),
            )
            for quota, name, value in holding(quotas, principal)
        ]

    async def _uses_of(
        self, principal: str, addresses: Sequence[Address], call: Call
    ) -> dict[tuple[str | None, str], list[QuotaUse]]:
        """The use in each process, by client id and name of the limit."""
        request, limit_s = DescribeQuotaUse(principal), min(PROCESS_TIMEOUT_S, call.left_s)

        def asking(address: Address) -> Callable[[], Awaitable[list[QuotaUse]]]:
            async def ask() -> list[QuotaUse]:
                try:
                    answer, _ = await self._client.ask(address, request, timeout_s=limit_s)
                except AuthorizationError:
                    raise
                except RayqError:
                    return []
                return answer.uses

            return ask

        uses: dict[tuple[str | None, str], list[QuotaUse]] = {}
        for answer in await ask_all(map(asking, addresses)):
            for use in answer:
                uses.setdefault((use.client_id, use.name), []).append(use)
        return uses


def holding(
    quotas: Sequence[Quota], principal: str
) -> Iterator[tuple[Quota, str, float]]:
    """Yields the limits that hold for a principal: the default ones first, which it has no such
    limit of its own for."""
    own = [quota for quota in quotas if quota.principal == principal]
    replaced = {name for quota in own if quota.client_id is None for name in quota.limits}
    for quota in quotas:
        if quota in own or quota.principal is None:
            for name, value in quota.limits.items():
                if quota in own or name not in replaced:
                    yield quota, name, value


def _text(what: str, given: object) -> str | None:
    if given is not None and not isinstance(given, str):
        raise TypeError(f"{what} must be a str or None, not {shown(given)}.")
    return given


def _quota_name(given: object) -> QuotaName:
    known = get_args(QuotaName)
    if given not in known:
        raise InvalidRequestError(
            f"{shown(given)} is not a quota: it is one of {', '.join(known)}."
        )
    return cast(QuotaName, given)


def _number(name: str, given: object) -> float:
    if not isinstance(given, int | float) or isinstance(given, bool):
        raise TypeError(f"{name} must be a number, not {shown(given)}.")
    if not -NUMBER_MAX <= given <= NUMBER_MAX:
        raise InvalidRequestError(f"{name} is {shown(given)}, which no cluster could use.")
    return float(given)
