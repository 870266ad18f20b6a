"""`rayq audit`: who changed the metadata, logged in, or was denied."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
import typer

from rayq.cli import output
from rayq.cli.current import connected
from rayq.cli.options import ClusterAddress, Json
from rayq.cli.values import WrongUseError, time_ms
from rayq.core.access.audit import KINDS, AuditLine

SEEN_MAX = 10_000
WAIT_MS = 1_000
NONE_YET_S = 1.0


def audit(
    principal: Annotated[
        list[str] | None,
        typer.Option("--principal", help="Only events of this principal; may be repeated."),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            help=f"Only events of this kind ({', '.join(KINDS)}); may be repeated.",
        ),
    ] = None,
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="Only events since this time, e.g. -1h.")
    ] = "-1d",
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Keep printing new events.")
    ] = False,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Show who changed what, logged in, was denied, got signed URLs, or redrove records.

    In order of time; with --follow as the lines come, of which some come later than others.
    """
    since_ms = time_ms(since, output.now_ms())
    for name in kind or ():
        if name not in KINDS:
            raise WrongUseError(f"{name!r} is not an event kind; choose from {', '.join(KINDS)}.")
    wanted = _Wanted(principal, kind)
    offset: int | None = None
    shown: list[AuditLine] = []
    with connected(cluster) as connection:
        while True:
            page = connection.admin.read_audit(
                since_ms=since_ms, offset=offset, wait_ms=WAIT_MS if follow else 0
            )
            shown += [line for line in page.lines if wanted.has(line)]
            offset = page.next_offset
            if follow:
                for line in shown:
                    _print(line, json=json)
                shown.clear()
            if page.is_end and not follow:
                break
            if offset is None:
                time.sleep(NONE_YET_S)
    # A server sends some lines later than others: over all pages they are in order only now.
    shown.sort(key=lambda line: line.time_ms)
    if json:
        for line in shown:
            _print(line, json=json)
    else:
        _table(shown)


class _Wanted:
    """The filters, and the ids of lines already shown: a server may send a line twice."""

    def __init__(self, principals: list[str] | None, kinds: list[str] | None) -> None:
        self._principals = principals
        self._kinds = kinds
        self._seen: dict[str, None] = {}

    def has(self, line: AuditLine) -> bool:
        if line.id in self._seen:
            return False
        if line.id:
            self._seen[line.id] = None
            if len(self._seen) > SEEN_MAX:
                del self._seen[next(iter(self._seen))]
        return (self._principals is None or line.principal in self._principals) and (
            self._kinds is None or line.kind in self._kinds
        )


def _print(line: AuditLine, *, json: bool) -> None:
    if json:
        output.print_json_line(msgspec.to_builtins(line))
    else:
        output.say("  ".join(str(cell) for cell in _cells(line) if cell), hang=2)


def _cells(line: AuditLine) -> tuple[Any, ...]:
    what = line.what
    if line.left_out:
        what += f" (and {line.left_out} more before)"
    return (
        output.moment(line.time_ms),
        line.kind,
        line.principal,
        line.address,
        line.token_id,
        line.client_id,
        line.request,
        what.strip(),
    )


def _table(lines: list[AuditLine]) -> None:
    output.table(
        ("time", "kind", "principal", "address", "token", "client id", "request", "what"),
        [_cells(line) for line in lines],
        styles=[
            "warning" if line.kind in ("denied", "failed_login", "lost") else "ok"
            for line in lines
        ],
        optional=("client id", "token", "address"),
    )
