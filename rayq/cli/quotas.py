"""`rayq quota`: set, list, describe, remove."""

from __future__ import annotations

import math
from typing import Annotated, get_args

import msgspec
import typer

from rayq.cli import output
from rayq.cli.confirm import Yes, agree, check_can_ask
from rayq.cli.current import connected
from rayq.cli.options import ClusterAddress, Json, PrincipalName, PrincipalOrAll
from rayq.cli.values import WrongUseError, did_you_mean, rate_bytes_per_s
from rayq.messages import Quota
from rayq.messages.acls import QuotaName
from rayq.records import QuotaInfo

QUOTAS: tuple[QuotaName, ...] = get_args(QuotaName)

IsDefault = Annotated[
    bool,
    typer.Option("--default", help="Set the default for principals without their own limit."),
]
ClientId = Annotated[
    str | None,
    typer.Option("--client-id", metavar="ID", help="Only for clients with this client id."),
]


def set_quota(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[PRINCIPAL] NAME=VALUE...",
            help=f"NAME is one of {', '.join(QUOTAS)}.",
            show_default=False,
        ),
    ],
    default: IsDefault = False,
    client_id: ClientId = None,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Limit how much of the cluster a principal may use. Other limits are kept.

    Rates are per second, in the whole cluster. A client that uses more has to wait; no request
    fails.
    """
    principal, rest = _who(words, default)
    limits: dict[str, float] = dict(_limit(word) for word in rest)
    if not limits:
        raise WrongUseError(f"Give a limit, such as {QUOTAS[0]}=1000000.")
    with connected(cluster) as connection:
        connection.admin.set_quota(principal, client_id=client_id, **limits)
    if json:
        output.print_json(msgspec.structs.asdict(Quota(principal, client_id, limits)))
        return
    for name, value in limits.items():
        output.say(f"Set {name} of {_shown(principal, client_id)} to {value:.15g}.")


def list_quotas(
    principal: PrincipalOrAll = None,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """List the limits of the principals that you may describe, or those of one, with the default.

    Everybody sees those of its own principal.
    """
    with connected(cluster) as connection:
        if principal is not None:
            connection.admin.describe_principal(principal)  # Hidden limits are not none.
        quotas = connection.admin.list_quotas()
    if principal is not None:
        quotas = [quota for quota in quotas if quota.principal in (principal, None)]
    if json:
        output.print_json([msgspec.structs.asdict(quota) for quota in quotas])
        return
    output.table(
        ("principal", "client id", "quota", "value"),
        [
            (
                "by default" if quota.principal is None else quota.principal,
                quota.client_id or "",
                name,
                f"{value:.15g}",
            )
            for quota in quotas
            for name, value in quota.limits.items()
        ],
        optional=("client id",),
    )


def describe(
    principal: PrincipalName,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Show the limits that hold for a principal, and whether they are used up.

    'waits' is how long requests that count for a rate wait now, 'throttled' the total time since
    the servers started in which the rate was used up. Both are of the process where it is longest.
    """
    with connected(cluster) as connection:
        limits = connection.admin.describe_quotas(principal)
    if json:
        output.print_json([msgspec.structs.asdict(limit) for limit in limits])
        return
    output.table(
        ("quota", "value", "of", "waits", "throttled"),
        [
            (
                limit.name,
                f"{limit.value:.15g}",
                _holds_for(limit),
                _seconds(limit.wait_s),
                _seconds(limit.throttled_s),
            )
            for limit in limits
        ],
    )


def remove(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PRINCIPAL] [NAME...]",
            help="Limits to remove. Without NAME: all.",
            show_default=False,
        ),
    ] = None,
    default: IsDefault = False,
    client_id: ClientId = None,
    yes: Yes = False,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Remove limits of a principal. Throttled clients resume at once."""
    principal, rest = _who(words or [], default)
    names = [_quota_name(word) for word in rest]
    who = _shown(principal, client_id)
    check_can_ask(yes)
    with connected(cluster) as connection:
        there = [
            name
            for quota in connection.admin.list_quotas()
            if (quota.principal, quota.client_id) == (principal, client_id)
            for name in quota.limits
        ]
        removed = [name for name in there if not names or name in names]
        if removed:
            agree(f"Remove {', '.join(removed)} of {who}?", yes)
            connection.admin.remove_quota(principal, removed, client_id=client_id)
    if json:
        output.print_json({"principal": principal, "client_id": client_id, "removed": removed})
    else:
        output.say(f"Removed {', '.join(removed)} of {who}." if removed else f"{who} has none.")


# --- what is typed --------------------------------------------------------------------------------


def _who(words: list[str], is_default: bool) -> tuple[str | None, list[str]]:
    """Returns the principal (None: the default) and the other words."""
    if is_default:
        return None, words
    if not words or "=" in words[0]:
        raise WrongUseError("Give a principal first, or --default.")
    return words[0], words[1:]


def _shown(principal: str | None, client_id: str | None) -> str:
    who = "each principal by default" if principal is None else principal
    return who if client_id is None else f"{who}, client id {client_id}"


def _holds_for(limit: QuotaInfo) -> str:
    if limit.client_id is not None:
        return f"client id {limit.client_id}"
    return "each by default" if limit.is_default else "the principal"


def _seconds(duration_s: float) -> str:
    return "forever" if duration_s == math.inf else f"{duration_s:.1f} s" if duration_s else ""


def _limit(word: str) -> tuple[QuotaName, float]:
    name, separator, value = word.partition("=")
    if not separator:
        raise WrongUseError(f"{word!r} is not NAME=VALUE.")
    quota = _quota_name(name)
    try:
        return quota, float(value)
    except ValueError:
        if quota.endswith("_byte_rate"):
            return quota, rate_bytes_per_s(value)
        raise WrongUseError(f"{value!r} is not a number: {quota} must be 0 or more.") from None


def _quota_name(text: str) -> QuotaName:
    word = text.strip().lower().replace("-", "_").replace(".", "_")
    if word in QUOTAS:
        return word
    hint = did_you_mean(word, QUOTAS, f"It is one of {', '.join(QUOTAS)}.")
    raise WrongUseError(f"{text!r} is not a quota. {hint}")
