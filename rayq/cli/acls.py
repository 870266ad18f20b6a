"""`rayq acl`: add, list, remove, check."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast, get_args

import msgspec
import typer

from rayq.cli import output
from rayq.cli.confirm import Yes, agree, check_can_ask
from rayq.cli.current import connected
from rayq.cli.exit_codes import UNHEALTHY
from rayq.cli.options import ClusterAddress, Json, PrincipalName, PrincipalOrAll
from rayq.cli.values import WrongUseError, did_you_mean
from rayq.core.access.rights import is_own_topic
from rayq.core.cluster.access_changes import OPERATIONS
from rayq.errors import InvalidRequestError
from rayq.messages.acls import ANY, CLUSTER, SUPERUSER, Acl, Operation, ResourceType

RESOURCE_TYPES: tuple[ResourceType, ...] = get_args(ResourceType)

OperationWords = Annotated[
    str,
    typer.Argument(
        metavar="OPERATION", help=f"{', '.join(get_args(Operation))}; several separated by commas."
    ),
]
OperationWord = Annotated[
    str, typer.Argument(metavar="OPERATION", help=f"{', '.join(get_args(Operation)[1:])}.")
]
TypeWord = Annotated[
    str, typer.Argument(metavar="RESOURCE_TYPE", help=f"{', '.join(RESOURCE_TYPES)}.")
]
Name = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME]",
        help="Resource name, or '*' for all. Omit for `cluster`.",
        show_default=False,
    ),
]
Prefix = Annotated[
    bool, typer.Option("--prefix", help="Match every name that starts with NAME.")
]
Deny = Annotated[
    bool, typer.Option("--deny", help="Deny instead of allow; deny overrides allow.")
]
FromHost = Annotated[
    str,
    typer.Option("--host", metavar="ADDRESS", help="Only for clients at this address."),
]


def add(
    principal: PrincipalName,
    operations: OperationWords,
    resource_type: TypeWord,
    name: Name = None,
    prefix: Prefix = False,
    deny: Deny = False,
    host: FromHost = ANY,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Allow a principal an operation on a resource, or deny it. PRINCIPAL '*' means every
    principal.

    Read, write, delete and alter imply describe. A principal without a rule may do nothing.
    """
    acls = _acls(principal, operations, resource_type, name, prefix, deny, host)
    with connected(cluster) as connection:
        connection.admin.create_acls(acls)
    _tell("Added", acls, json)


def list_acls(
    principal: PrincipalOrAll = None,
    resource_type: Annotated[
        str | None,
        typer.Option(
            "--type", metavar="RESOURCE_TYPE", help="Only rules for resources of this type."
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Only rules that apply to the resource of this name."),
    ] = None,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """List the rules, of a principal or of all."""
    kind = None if resource_type is None else _resource_type(resource_type)
    with connected(cluster) as connection:
        acls = connection.admin.list_acls(
            principal=principal,
            resource_type=kind,
            name=name,
            pattern=None if name is None else "match",
        )
    if json:
        output.print_json(acls_as_json(acls))
    else:
        show_acls(acls)


def show_acls(acls: Sequence[Acl]) -> None:
    output.table(
        ("principal", "permission", "operation", "resource", "name", "host"),
        [
            (
                acl.principal,
                acl.permission,
                acl.operation,
                acl.resource_type,
                f"{acl.name} --prefix" if acl.pattern == "prefixed" else acl.name,
                acl.host,
            )
            for acl in acls
        ],
        styles=["ok" if acl.permission == "allow" else "warning" for acl in acls],
        optional=("host",),
    )


def acls_as_json(acls: Sequence[Acl]) -> list[dict[str, Any]]:
    return [msgspec.structs.asdict(acl) for acl in acls]


def _tell(done: str, acls: Sequence[Acl], json: bool) -> None:
    if json:
        output.print_json(acls_as_json(acls))
        return
    for acl in acls:
        output.say(f"{done}: {acl}.")


def remove(
    principal: PrincipalName,
    operations: OperationWords,
    resource_type: TypeWord,
    name: Name = None,
    prefix: Prefix = False,
    deny: Deny = False,
    host: FromHost = ANY,
    yes: Yes = False,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Remove a rule. Pass the arguments it was added with.

    Without a rule that allows it, a principal may do nothing, so removing a rule that allows never
    opens anything.
    """
    acls = _acls(principal, operations, resource_type, name, prefix, deny, host)
    check_can_ask(yes)
    with connected(cluster) as connection:
        there = connection.admin.list_acls(principal=principal)
        missing = [acl for acl in acls if acl not in there]
        if missing:
            raise InvalidRequestError(
                f"There is no rule {str(missing[0])!r}: `rayq acl list {shlex.quote(principal)}` "
                "lists the existing rules."
            )
        agree(f"Remove {'; '.join(map(str, acls))}?", yes)
        connection.admin.delete_acls(acls)
    _tell("Removed", acls, json)


def check(
    principal: PrincipalName,
    operation: OperationWord,
    resource_type: TypeWord,
    name: Name = None,
    host: FromHost = ANY,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Show whether a principal may do an operation, and which rule decides. Exits with 3 if it may
    not.

    Host-specific rules are considered only with a matching --host.
    """
    [asked] = _acls(principal, operation, resource_type, name, False, False, host, several=False)
    with connected(cluster) as connection:
        is_allowed, acl = connection.admin.check_acl(
            principal, asked.operation, asked.resource_type, asked.name, host=host
        )
    if json:
        rule = None if acl is None else msgspec.structs.asdict(acl)
        output.print_json({"allowed": is_allowed, "acl": rule})
    elif is_allowed:
        output.verdict(f"Allowed: {_why_allowed(asked, acl)}", "ok")
    else:
        output.verdict(f"Denied: {_why_denied(asked, acl)}", "error")
    if not is_allowed:
        raise typer.Exit(UNHEALTHY)


def _why_allowed(asked: Acl, acl: Acl | None) -> str:
    if acl is not None:
        return f"a rule says {acl}. To remove it: {command('remove', acl)}"
    if asked.principal == SUPERUSER:
        return f"{SUPERUSER} may do everything."
    return "each principal may describe and alter itself."


def _why_denied(asked: Acl, acl: Acl | None) -> str:
    if acl is not None:
        return f"a rule says {acl}. To remove it: {command('remove', acl)}"
    if is_own_topic(asked.resource_type, asked.name):
        return (
            "it is one of rayq's own topics. Principals with cluster describe can read it; with "
            "cluster alter, alter it; nobody can write it."
        )
    allow = msgspec.structs.replace(asked, host=ANY)
    return f"no rule allows it. To allow it: {command('add', allow)}"


def command(verb: Literal["add", "remove"], acl: Acl) -> str:
    """The command that adds or removes a rule."""
    words = ["rayq", "acl", verb, acl.principal, acl.operation, acl.resource_type]
    if acl.resource_type != "cluster":
        words.append(acl.name)
    if acl.pattern == "prefixed":
        words.append("--prefix")
    if acl.permission == "deny":
        words.append("--deny")
    if acl.host != ANY:
        words += ["--host", acl.host]
    return shlex.join(words)


# --- what is typed --------------------------------------------------------------------------------


def _acls(
    principal: str,
    operations: str,
    resource_type: str,
    name: str | None,
    prefix: bool,
    deny: bool,
    host: str,
    *,
    several: bool = True,
) -> list[Acl]:
    """Raises WrongUseError."""
    kind = _resource_type(resource_type)
    if kind == "cluster":
        if name not in (None, CLUSTER) or prefix:
            raise WrongUseError("The cluster has no name: leave out NAME and --prefix.")
        name = CLUSTER
    elif name is None:
        raise WrongUseError(f"NAME is missing: give the name of a {kind}, or '*' for all.")
    elif name.endswith(ANY) and (name != ANY or prefix):
        stem = name.rstrip(ANY)
        raise WrongUseError(
            f"{name!r} is a literal name: use {shlex.quote(stem)} --prefix for every {kind} whose "
            "name starts so."
            if stem
            else f"Use '*' without --prefix for every {kind}."
        )
    words = operations.split(",") if several else [operations]
    return [
        Acl(
            principal,
            "deny" if deny else "allow",
            _operation(word, kind, may_be_all=several),
            kind,
            name,
            "prefixed" if prefix else "literal",
            host,
        )
        for word in dict.fromkeys(words)
    ]


def _resource_type(text: str) -> ResourceType:
    return cast(ResourceType, _word(text, RESOURCE_TYPES, "a resource type"))


def _operation(text: str, kind: ResourceType, *, may_be_all: bool) -> Operation:
    known = (*(("all",) if may_be_all else ()), *OPERATIONS[kind])
    return cast(Operation, _word(text, known, f"an operation on a {kind}", get_args(Operation)))


def _word(text: str, known: Sequence[str], what: str, known_elsewhere: Sequence[str] = ()) -> str:
    """Raises WrongUseError: with the nearest known word for a typing error, with all known words
    for a word that is valid elsewhere."""
    word = text.strip().lower().replace("-", "_")
    if word in known:
        return word
    hint = f"It is one of {', '.join(known)}."
    if word not in known_elsewhere:
        hint = did_you_mean(word, known, hint)
    raise WrongUseError(f"{text!r} is not {what}. {hint}")
