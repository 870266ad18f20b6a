"""`rayq transactions`: list, describe, abort, find-hanging."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import msgspec
import typer

from rayq.cli import output
from rayq.cli.confirm import Yes, agree, check_can_ask, one_by_one
from rayq.cli.current import connected
from rayq.cli.options import (
    COMPLETION_TIMEOUT_S,
    ClusterAddress,
    Json,
    complete_topic,
    offered,
    quickly,
)
from rayq.errors import RayqError
from rayq.records import HangingTransaction, TransactionInfo, TransactionListing


def _complete_id(ctx: typer.Context, incomplete: str) -> list[str]:
    with contextlib.suppress(RayqError, OSError), quickly(ctx) as cluster:
        listed = cluster.admin.list_transactions(timeout_s=COMPLETION_TIMEOUT_S)
        return offered([listing.transactional_id for listing in listed], incomplete)
    return []


TransactionalIds = Annotated[
    list[str], typer.Argument(metavar="TRANSACTIONAL-ID", autocompletion=_complete_id)
]


def list_transactions(
    idle: Annotated[
        bool,
        typer.Option(
            "-a", "--all", help="Include transactional ids with no transaction under way."
        ),
    ] = False,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """List the transactions that are under way, the oldest first."""
    with connected(cluster) as connection:
        listed = connection.admin.list_transactions(idle=idle)
    if json:
        output.print_json([_as_json(listing) for listing in listed])
    else:
        _show(listed)


def _show(listed: list[TransactionListing]) -> None:
    output.table(
        ("transactional id", "state", "age s", "time-out s", "partitions", "producer", "epoch"),
        [
            (
                listing.transactional_id,
                listing.state + (", hanging" if listing.is_hanging else ""),
                listing.age_ms and listing.age_ms // 1000,
                listing.transaction_timeout_ms // 1000,
                listing.partitions,
                listing.producer_id,
                listing.epoch,
            )
            for listing in listed
        ],
        styles=["warning" if listing.is_hanging else "ok" for listing in listed],
        optional=("producer", "epoch", "time-out s"),
    )


def _as_json(listing: TransactionListing) -> dict[str, Any]:
    return {**msgspec.to_builtins(listing), "is_hanging": listing.is_hanging}


def describe(
    transactional_ids: TransactionalIds, json: Json = False, cluster: ClusterAddress = None
) -> None:
    """Show the open transactions of transactional ids, and their partitions."""
    with connected(cluster) as connection:
        infos = [
            connection.admin.describe_transaction(transactional_id)
            for transactional_id in transactional_ids
        ]
    if json:
        shown = [
            {
                **msgspec.to_builtins(info),
                "transactions": [_as_json(transaction) for transaction in info.transactions],
                "participants": [
                    {
                        "producer_id": participant.producer_id,
                        "epoch": participant.epoch,
                        **participant.topic_partition._asdict(),
                        "has_marker": participant.has_marker,
                    }
                    for participant in info.participants
                ],
            }
            for info in infos
        ]
        output.print_json_of(transactional_ids, shown)
        return
    for number, info in enumerate(infos):
        if number:
            output.say()
        _show_info(info)


def _show_info(info: TransactionInfo) -> None:
    output.heading(
        f"{info.transactional_id}: owner {info.owner}, time-out "
        f"{info.transaction_timeout_ms / 1000:g} s"
        + ("" if info.last_name is None else f", last name {info.last_name}")
    )
    output.say()
    _show(info.transactions)
    if info.participants:
        output.say()
        output.table(
            ("topic", "partition", "epoch", "marker"),
            [
                (*participant.topic_partition, participant.epoch, participant.has_marker)
                for participant in info.participants
            ],
        )


def abort(
    transactional_ids: TransactionalIds,
    yes: Yes = False,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Abort the open transactions of transactional ids."""
    check_can_ask(yes)
    with connected(cluster) as connection:
        agree(f"Abort the open transactions of {', '.join(transactional_ids)}?", yes)
        one_by_one(
            list(transactional_ids),
            connection.admin.abort_transaction,
            "Aborted the transaction of",
            json,
        )
    if json:
        output.print_json({"aborted": transactional_ids})


def find_hanging(
    topics: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TOPIC", help="Topics. Default: all.", autocompletion=complete_topic
        ),
    ] = None,
    abort: Annotated[
        bool, typer.Option("--abort", help="Abort each of them in its partition.")
    ] = False,
    yes: Yes = False,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Find transactions in partitions that no coordinator knows, and that are therefore never
    ended."""
    check_can_ask(yes or not abort)
    with connected(cluster, topics=topics or ()) as connection:
        found = connection.admin.find_hanging_transactions(topics)
        if not json:
            _show_hanging(found)
        if found and abort:
            agree(
                "Abort them in these partitions? Where such a transaction was committed, readers "
                "lose its records there.",
                yes,
            )
            for transaction in found:
                connection.admin.abort_hanging_transaction(transaction)
            if not json:
                output.say(f"Aborted {output.counted(len(found), 'transaction')}.")
    if json:
        output.print_json(
            [
                {
                    **transaction.topic_partition._asdict(),
                    "first_offset": transaction.first_offset,
                    "producer_id": transaction.producer_id,
                    "epoch": transaction.epoch,
                    "aborted": abort,
                }
                for transaction in found
            ]
        )


def _show_hanging(found: list[HangingTransaction]) -> None:
    if not found:
        output.say("No transaction hangs.")
        return
    output.table(
        ("topic", "partition", "first offset", "producer", "epoch"),
        [
            (
                *transaction.topic_partition,
                transaction.first_offset,
                transaction.producer_id,
                transaction.epoch,
            )
            for transaction in found
        ],
    )
