"""Operations on the servers: `rayq cluster restart-broker`, `stop-broker`, `replace-disk` and
`recover-quorum`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from rayq.cli import output
from rayq.cli.confirm import YesOrExecute, agree, check_can_ask
from rayq.cli.current import operated
from rayq.cli.options import Json
from rayq.cli.servers import OtherRay
from rayq.client.environment import system_environment
from rayq.errors import InvalidRequestError
from rayq.runtime import recover_quorum as quorum

BROKERS_TIMEOUT_S = 300.0


def restart_broker(
    brokers: Annotated[
        list[int] | None,
        typer.Argument(
            metavar="BROKER", help="Default: all brokers one by one, then the controller."
        ),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="Seconds to wait until each is in sync again.", min=0)
    ] = BROKERS_TIMEOUT_S,
    ray_address: OtherRay = None,
    json: Json = False,
) -> None:
    """Restart brokers under load, one after the other; no write fails.

    Restarts the next broker once the last one is in sync again. Run it where Ray can be reached: on
    the machine where `rayq start` was run, or with RAY_ADDRESS.
    """
    with operated(ray_address) as connection:
        known = [
            broker.broker for broker in connection.admin.describe_cluster().brokers if broker.live
        ]
        wanted = brokers or known
        with output.progress("restarting brokers", len(wanted)) as advance:
            for number, broker in enumerate(wanted, start=1):
                connection.restart_broker(broker, timeout_s=timeout_s)
                advance(number)
                if not json:
                    output.say(f"Broker {broker} was restarted and is in sync.")
        if not brokers:
            connection.restart_controller()
            if not json:
                output.say("The controller was restarted.")
    if json:
        output.print_json({"restarted": wanted})


def stop_broker(
    broker: Annotated[int, typer.Argument(metavar="BROKER", help="A broker that was drained.")],
    ray_address: OtherRay = None,
    json: Json = False,
) -> None:
    """Stop a drained broker for good; its node may stay, with other brokers on it."""
    with operated(ray_address) as connection, output.waiting(f"Stopping broker {broker}"):
        connection.stop_broker(broker)
    if json:
        output.print_json({"broker": broker, "stopped": True})
    else:
        output.say(f"Broker {broker} is stopped. Next: rayq cluster remove-broker {broker}")


def replace_disk(
    broker: Annotated[int, typer.Argument(metavar="BROKER", help="The broker whose data is lost.")],
    node: Annotated[
        str | None,
        typer.Option(
            "--node", help="The node to start it on instead: an address, or a node id of Ray."
        ),
    ] = None,
    ray_address: OtherRay = None,
    json: Json = False,
) -> None:
    """Start a broker whose disk was lost on a new, empty one, which the others fill again."""
    with operated(ray_address) as connection, output.waiting(f"Starting broker {broker}"):
        connection.replace_disk(broker, node=node)
    if json:
        output.print_json({"broker": broker})
    else:
        output.say(
            f"Broker {broker} runs on an empty disk and copies what it is to hold. Next: rayq "
            "cluster health"
        )


def recover_quorum(
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="DIR",
            help="The directory of the broker whose copy is used from then on, or its parent.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show the copies found.")
    ] = False,
    yes: YesOrExecute = False,
    json: Json = False,
) -> None:
    """The last resort where a majority of the voters' directories is lost for good. Offline.

    One broker's copy of the metadata becomes the whole truth; its newest changes may be missing.
    All brokers must be stopped. It shows the copies below DIR, the best one first, and asks.
    """
    if source is None:
        raise typer.BadParameter("give --from DIR, a directory that is left")
    check_can_ask(yes or dry_run)
    path = os.path.abspath(os.path.expanduser(source))
    if not os.path.isdir(path):
        raise InvalidRequestError(f"There is no directory {source}.")
    environment = system_environment(None)
    if dry_run or not yes:
        found = quorum.survivors(environment, path)
        rows = [
            (
                survivor.directory.broker,
                survivor.directory.path,
                survivor.epoch,
                survivor.last_index,
                survivor.is_voter,
            )
            for survivor in found
        ]
        if json and dry_run:
            names = ("broker", "path", "epoch", "last_index", "voter")
            output.print_json([dict(zip(names, row, strict=True)) for row in rows])
            return
        if not json:
            output.table(("broker", "directory", "epoch", "last index", "voter"), rows)
            output.say(
                "Other machines may have better copies: recover from the one with the highest "
                "epoch, then index, by --from ITS-DIRECTORY."
            )
        if dry_run:
            output.say("Nothing was changed: run it without --dry-run to change it.")
            return
        agree("Let the best of these be the whole truth? What only others know is lost.", yes)
    done = quorum.recover_quorum(environment, path)
    if json:
        output.print_json(
            {
                "path": done.directory.path,
                "broker": done.directory.broker,
                "epoch": done.epoch,
                "topics": done.topics,
            }
        )
    else:
        output.say(
            f"Broker {done.directory.broker} ({done.directory.path}) is the only voter now, in "
            f"epoch {done.epoch}; it knows {output.counted(done.topics, 'topic')}."
        )
        output.say("Next: rayq start DIR with the directories that are left; rayq cluster health.")
