"""`rayq token`: that of the cluster; and create, rotate, revoke, list those of principals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
import typer

from rayq.cli import output
from rayq.cli.confirm import Yes, agree, check_can_ask
from rayq.cli.current import connected
from rayq.cli.options import ClusterAddress, Json, PrincipalName, PrincipalOrAll
from rayq.cli.values import duration_ms
from rayq.client.admin.access import NewToken
from rayq.errors import InvalidRequestError
from rayq.records import TokenInfo

NEVER = "never"
Expires = Annotated[
    str | None,
    typer.Option(
        "--expires",
        "--expires-in",
        metavar="DURATION",
        help="Lifetime of the token, e.g. 90d, or `never`.",
        show_default=False,
    ),
]


def show(context: typer.Context, json: Json = False, cluster: ClusterAddress = None) -> None:
    """Print the token that a client outside of Ray needs besides an address. Whoever has it may do
    everything: treat it as a password. The subcommands manage
    principals' tokens."""
    if context.invoked_subcommand is not None:
        for name in ("json", "cluster"):
            source = context.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                raise typer.BadParameter(
                    f"put --{name} after {context.invoked_subcommand}"
                )
        return
    with connected(cluster) as connection:
        found = {"token": connection.token, "addresses": connection.addresses}
    if json:
        output.print_json(found)
    else:
        output.say(connection.token)


def create(
    principal: PrincipalName,
    expires: Expires = None,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Create a token for a principal, and print it once.

    Its other tokens stay valid. Without --expires the token does not expire.
    """
    expires_in_s = _expires_in_s(expires)
    with connected(cluster) as connection:
        token = connection.admin.create_token(principal, expires_in_s=expires_in_s)
    _show_new(token, json, "")


def rotate(
    principal: PrincipalName,
    overlap: Annotated[
        str,
        typer.Option(
            "--overlap",
            metavar="DURATION",
            help="How long the other tokens stay valid, e.g. 12h; 0 revokes them at once.",
        ),
    ] = "1d",
    expires: Expires = None,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Create a token for a principal, print it once, and let its other tokens expire.

    Give the new token to the principal's programs, and restart them, before the overlap ends.
    Without --expires the token gets the lifetime of the newest one.
    """
    overlap_s = duration_ms(overlap) / 1000
    expires_in_s = _expires_in_s(expires)
    with connected(cluster) as connection:
        token = connection.admin.rotate_token(
            principal, overlap_s=overlap_s, expires_in_s=expires_in_s
        )
    ends = output.moment(output.now_ms() + int(overlap_s * 1000))
    others = f"Its other tokens expire at {ends}." if overlap_s else "Its other tokens are gone."
    _show_new(token, json, others)


def revoke(
    principal: PrincipalName,
    token_ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TOKEN_ID", help="Token ids, as listed by `rayq token list`."
        ),
    ] = None,
    all_tokens: Annotated[
        bool, typer.Option("-a", "--all", help="All tokens of the principal.")
    ] = False,
    yes: Yes = False,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Revoke tokens of a principal. Connections that were opened with them end within a second.

    A thief may have created more tokens: use --all if one was stolen.
    """
    if bool(token_ids) == all_tokens:
        raise typer.BadParameter("give token ids, or --all")
    check_can_ask(yes)
    with connected(cluster) as connection:
        ids = token_ids or [token.token_id for token in connection.admin.list_tokens(principal)]
        if ids:
            said = output.counted(len(ids), "token")
            agree(f"Revoke {said} of {principal}: {', '.join(ids)}?", yes)
        if all_tokens:
            ids = connection.admin.revoke_tokens(principal)
        for token_id in ids:
            if not all_tokens:
                connection.admin.revoke_token(principal, token_id)
            if not json:
                output.say(f"Revoked token {token_id} of {principal}.")
    if json:
        output.print_json({"principal": principal, "revoked": ids})
    elif not ids:
        output.say(f"{principal} has no token.")


def list_tokens(
    principal: PrincipalOrAll = None,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """List the tokens of a principal, or of all, without their secret parts."""
    with connected(cluster) as connection:
        admin = connection.admin
        infos = (
            admin.describe_principals()
            if principal is None
            else [admin.describe_principal(principal)]
        )
    tokens = [(info.name, token) for info in infos for token in info.tokens]
    if json:
        output.print_json(
            [{"principal": name, **msgspec.structs.asdict(token)} for name, token in tokens]
        )
    else:
        show_tokens(tokens)


# --- showing --------------------------------------------------------------------------------------


def show_tokens(tokens: Sequence[tuple[str, TokenInfo]]) -> None:
    now_ms = output.now_ms()
    valid = [bool(valid_tokens([token], now_ms)) for _, token in tokens]
    output.table(
        ("principal", "token", "created", "expires", "valid"),
        [
            (
                name,
                token.token_id,
                output.moment(token.created_ms),
                NEVER if token.expires_ms is None else output.moment(token.expires_ms),
                is_valid,
            )
            for (name, token), is_valid in zip(tokens, valid, strict=True)
        ],
        styles=["ok" if is_valid else "warning" for is_valid in valid],
        optional=("created",),
    )


def valid_tokens(tokens: Iterable[TokenInfo], now_ms: int) -> list[TokenInfo]:
    """The tokens that have not expired."""
    return [
        token for token in tokens if token.expires_ms is None or token.expires_ms > now_ms
    ]


def _show_new(token: NewToken, json: bool, others: str) -> None:
    """Prints the token alone on stdout, for `$(rayq token create ...)`, and the rest on stderr."""
    if json:
        output.print_json(msgspec.structs.asdict(token))
        return
    output.say(token.token)
    ends = (
        "does not expire"
        if token.expires_ms is None
        else f"expires at {output.moment(token.expires_ms)}"
    )
    output.note(
        f"Token {token.token_id} of {token.principal} {ends}. It is not shown again: store it like "
        f"a password. {others}".rstrip()
    )


def _expires_in_s(text: str | None) -> float | None:
    if text is None:
        return None
    if text.strip().lower() == NEVER:
        return math.inf
    found_ms = duration_ms(text)
    if not found_ms:
        raise InvalidRequestError("--expires must be positive, e.g. 90d.")
    return found_ms / 1000
