"""`rayq transaction`: list, describe, abort."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from rayq.cli import output
from rayq.cli.confirm import Yes, agree, check_can_ask
from rayq.cli.current import connected
from rayq.cli.options import ClusterAddress, Json
from rayq.records import TransactionListing

app = typer.Typer(help="Transactions of producers.", no_args_is_help=True)

TransactionalId = Annotated[str, typer.Argument(metavar="TRANSACTIONAL_ID")]


@app.command("list")
def list_transactions(json: Json = False, cluster: ClusterAddress = None) -> None:
    """List the transactional ids, and what each has open."""
    with connected(cluster) as connection:
        found = connection.admin.list_transactions()
    if json:
        output.print_json(msgspec.to_builtins(found))
        return
    output.table(
        ("transactional id", "state", "seconds", "partitions"),
        [(one.transactional_id, one.state, _age_s(one), one.partitions) for one in found],
    )


@app.command()
def describe(
    transactional_id: TransactionalId, json: Json = False, cluster: ClusterAddress = None
) -> None:
    """Show what an id has open, and which partitions wait for its end."""
    with connected(cluster) as connection:
        info = connection.admin.describe_transaction(transactional_id)
    if json:
        output.print_json(
            {
                "transactional_id": info.transactional_id,
                "owner": info.owner,
                "transaction_timeout_ms": info.transaction_timeout_ms,
                "last_name": info.last_name,
                "transactions": [
                    {
                        **msgspec.to_builtins(one),
                        "unmarked": [
                            {"topic": place.topic, "partition": place.partition}
                            for place in info.unmarked.get((one.family, one.epoch), ())
                        ],
                    }
                    for one in info.transactions
                ],
            }
        )
        return
    name = "" if info.last_name is None else f", last name {info.last_name}"
    output.heading(
        f"{info.transactional_id}: {output.counted(len(info.unmarked), 'transaction')} under way, "
        f"time-out {info.transaction_timeout_ms / 1000:g} s{name}"
    )
    output.table(
        ("epoch", "state", "seconds", "topic", "partition"),
        [
            (one.epoch, one.state, _age_s(one), place.topic, place.partition)
            for one in info.transactions
            for place in info.unmarked.get((one.family, one.epoch), ())
        ],
    )


@app.command()
def abort(
    transactional_id: TransactionalId, yes: Yes = False, cluster: ClusterAddress = None
) -> None:
    """Abort what an id has open: its readers go on, its producer is told."""
    check_can_ask(yes)
    with connected(cluster) as connection:
        agree(f"Abort the open transaction of {transactional_id}?", yes)
        connection.admin.abort_transaction(transactional_id)
    output.say(f"Aborted the transaction of {transactional_id}.")


def _age_s(one: TransactionListing) -> int | None:
    return None if one.age_ms is None else one.age_ms // 1000
