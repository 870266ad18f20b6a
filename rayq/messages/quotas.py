"""Requests about quotas: how much a principal may use of the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import msgspec

from rayq.messages.acls import PRINCIPAL_NAME_LENGTH_MAX, QuotaName, Right, Rights
from rayq.messages.any_broker import Change
from rayq.messages.base import (
    Answerer,
    CheckedName,
    Counter,
    Milliseconds,
    Name,
    Request,
    Response,
    ToBroker,
)

SHARED_QUOTAS: tuple[QuotaName, ...] = (
    "producer_byte_rate",
    "consumer_byte_rate",
    "controller_mutation_rate",
    "take_rate",
)
"""Rates of the whole cluster, of which each process has a share."""
CheckedNumber = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
"""A number that the handler checks; also NaN."""
ClientId = Annotated[str, msgspec.Meta(max_length=PRINCIPAL_NAME_LENGTH_MAX)]
Limits = Annotated[dict[QuotaName, CheckedNumber], msgspec.Meta(max_length=32)]


class Quota(msgspec.Struct, array_like=True, frozen=True):
    """The limits of a principal, of one of its client ids, or by default of each principal."""

    principal: str | None
    """None: the default of principals that have no limit of that name."""
    client_id: str | None
    """None: all clients of the principal together, except those with a limit of their own."""
    limits: Mapping[str, float]
    """Values by `QuotaName`; also names that only a newer version knows."""


class QuotaDemand(msgspec.Struct, array_like=True, frozen=True):
    """Use that clients want to make of a rate, at one broker or one of its processes."""

    principal: Name
    client_id: ClientId | None
    name: QuotaName
    demand: Annotated[float, msgspec.Meta(ge=0, le=1e18)]
    """Units per second."""


class QuotaShare(msgspec.Struct, array_like=True, frozen=True):
    """The part of a rate that a broker, or one of its processes, may give to clients."""

    principal: str
    client_id: str | None
    name: QuotaName
    share: float
    """Fraction of the rate."""


QuotaDemands = Annotated[list[QuotaDemand], msgspec.Meta(max_length=100_000)]


class Throttled(Response, frozen=True):
    """Tells a client for how long to send no more requests that count for a quota
    (`Request.quotas`). A server sends it at any time, as a frame of its own under `THROTTLED_API`,
    for all requests of a connection; older clients pass over it."""

    quota: str
    throttle_ms: Annotated[int, msgspec.Meta(ge=0, le=3_600_000)]
    """0: the client may continue."""


THROTTLED_API = 154
"""Number of the frames that carry `Throttled`. No request has it."""


class SetQuota(Change, frozen=True):
    """Sets limits; those that are not named stay. Raises UnknownPrincipalError,
    InvalidRequestError, PrincipalLimitError."""

    api: ClassVar[int] = 150
    rights: ClassVar[Rights] = (Right("alter", "cluster"),)
    principal: CheckedName | None
    client_id: CheckedName | None
    limits: Limits


class RemoveQuota(Change, frozen=True):
    """Removes limits. Those that do not exist are passed over, also of unknown principals."""

    api: ClassVar[int] = 151
    rights: ClassVar[Rights] = (Right("alter", "cluster"),)
    principal: CheckedName | None
    client_id: CheckedName | None
    names: Annotated[list[QuotaName], msgspec.Meta(max_length=32)] = msgspec.field(
        default_factory=list
    )
    """The limits to remove. Empty: all of this principal or client id."""


class DescribeQuotasResponse(Response, frozen=True):
    quotas: list[Quota]
    version: int = 0
    """Metadata version, as that of `MetadataResponse`."""


class DescribeQuotas(ToBroker[DescribeQuotasResponse], frozen=True):
    """Lists the default, then the quotas of the principals that the sender may describe, sorted by
    name. The broker waits up to `wait_ms` for metadata of at least `version_min`, then answers by
    what it has."""

    api: ClassVar[int] = 152
    rights: ClassVar[Rights] = ()
    ends_with_connection: ClassVar[bool] = True
    version_min: Counter = 0
    wait_ms: Milliseconds = 0
    checked_when_answered: ClassVar[bool] = True


class QuotaUse(msgspec.Struct, array_like=True, frozen=True):
    """The use of a rate in one process."""

    client_id: str | None
    """None: of all clients of the principal without such a limit of their own."""
    name: str
    throttled_s: float
    """Time so far in which it was used up, since the start of the process."""
    wait_s: float
    """Time until it is no longer used up, if nobody uses more. Infinite where nothing is allowed.
    """


class DescribeQuotaUseResponse(Response, frozen=True):
    uses: list[QuotaUse]


class DescribeQuotaUse(Request[DescribeQuotaUseResponse], frozen=True):
    """Tells how far a principal has used up its rates in this process."""

    api: ClassVar[int] = 155
    answered_by: ClassVar[tuple[Answerer, ...]] = ("broker", "replica host")
    rights: ClassVar[Rights] = (Right("describe", "principal", "principal"),)
    checked_when_answered: ClassVar[bool] = True
    principal: CheckedName
