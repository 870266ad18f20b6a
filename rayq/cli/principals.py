"""`rayq principal`: create, list, describe, delete."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any

import msgspec
import typer

from rayq.cli import output
from rayq.cli.acls import acls_as_json, show_acls
from rayq.cli.confirm import Yes, agree, check_can_ask, one_by_one
from rayq.cli.current import connected
from rayq.cli.options import ClusterAddress, Json, PrincipalNames
from rayq.cli.tokens import show_tokens, valid_tokens
from rayq.errors import PrincipalExistsError
from rayq.messages.acls import Acl
from rayq.records import PrincipalInfo

Principals = list[tuple[PrincipalInfo, list[Acl]]]


def create(
    principals: PrincipalNames,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="Do not fail if the principal exists.")
    ] = False,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Create principals: names for programs or people, which may do nothing yet. `rayq acl add`
    gives them rights, `rayq token create` a token to log in with."""
    made = []
    with connected(cluster) as connection:
        for name in principals:
            try:
                connection.admin.create_principal(name)
                is_new = True
            except PrincipalExistsError:
                if not if_not_exists:
                    raise
                is_new = False
            made.append({"principal": name, "created": is_new})
            if not json:
                output.say(
                    f"Created principal {name}." if is_new else f"Principal {name} exists already."
                )
    if json:
        output.print_json(made)


def list_principals(json: Json = False, cluster: ClusterAddress = None) -> None:
    """List the principals, with how many valid tokens and ACLs each has.

    `superuser`, which holds the cluster's own token (`rayq token`), may do everything and is not
    listed.
    """
    with connected(cluster) as connection:
        infos = connection.admin.describe_principals()
        acls = Counter(acl.principal for acl in connection.admin.list_acls())
    now_ms = output.now_ms()
    if json:
        output.print_json([{**_as_json(info), "acls": acls[info.name]} for info in infos])
        return
    rows = []
    for info in infos:
        valid = valid_tokens(info.tokens, now_ms)
        last = output.moment(info.tokens_end_ms)
        rows.append((info.name, acls[info.name], len(valid), last))
    output.table(
        ("principal", "acls", "valid tokens", "last one expires"),
        rows,
        styles=["ok" if row[2] else "warning" for row in rows],
    )


def describe(
    principals: PrincipalNames, json: Json = False, cluster: ClusterAddress = None
) -> None:
    """Show the tokens of principals, without their secret parts, and their ACLs."""
    with connected(cluster) as connection:
        admin = connection.admin
        found: Principals = [
            (admin.describe_principal(name), admin.list_acls(principal=name))
            for name in principals
        ]
    if json:
        output.print_json_of(
            principals,
            [{**_as_json(info), "acls": acls_as_json(acls)} for info, acls in found],
        )
        return
    for number, (info, acls) in enumerate(found):
        if number:
            output.say()
        output.heading(f"{info.name}: created at {output.moment(info.created_ms)}")
        if info.tokens:
            output.say()
            show_tokens([(info.name, token) for token in info.tokens])
        else:
            output.say(f"It has no token: rayq token create {info.name}")
        if acls:
            output.say()
            show_acls(acls)
        else:
            output.say(f"It may do nothing: rayq acl add {info.name} read topic NAME")


def _as_json(info: PrincipalInfo) -> dict[str, Any]:
    builtins: dict[str, Any] = msgspec.to_builtins(info)
    return builtins


def delete(
    principals: PrincipalNames,
    yes: Yes = False,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Delete principals with their tokens and ACLs; their connections end.

    What they wrote stays. The superuser cannot be deleted.
    """
    check_can_ask(yes)
    with connected(cluster) as connection:
        agree(f"Delete {', '.join(principals)}, with all tokens and ACLs?", yes)
        one_by_one(
            list(principals), connection.admin.delete_principal, "Deleted principal", json
        )
    if json:
        output.print_json({"deleted": principals})
