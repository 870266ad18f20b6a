"""`rayq cluster reassign`, `drain`, `undrain` and `remove-broker`: placement of partitions."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from rayq.cli import output
from rayq.cli.confirm import Yes, YesOrExecute, agree, check_can_ask
from rayq.cli.current import connected
from rayq.cli.formats import InputError
from rayq.cli.options import ClusterAddress, DryRun, Json, TopicNames
from rayq.cli.values import WrongUseError, partition_numbers, rate_bytes_per_s, topic_partition
from rayq.client.cluster import Cluster
from rayq.errors import (
    InvalidReassignmentError,
    InvalidRequestError,
    RayqError,
    UnknownBrokerError,
    UnknownTopicError,
)
from rayq.records import DrainProgress, PartitionInfo, Reassignment, TopicPartition

Plan = dict[TopicPartition, list[int]]

LOOK_S = 0.5
"""The interval at which a progress bar checks the moves."""
DAY_S = 86_400.0

BrokerNumber = Annotated[int, typer.Argument(metavar="BROKER", help="The broker's number.")]
Throttle = Annotated[
    str | None,
    typer.Option("--throttle", metavar="SIZE", help="Maximum bytes copied per second, e.g. 50MB."),
]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the moves are done.")]
MovesTimeout = Annotated[
    float, typer.Option("--timeout", help="Seconds to wait; the moves continue after it.", min=0)
]


def reassign(
    move: Annotated[
        list[str] | None,
        typer.Option(
            "-m",
            "--move",
            metavar="TOPIC/N=BROKERS",
            help="The new replicas of a partition, the preferred leader first, e.g. "
            "flights/0=1,2,3; may be repeated.",
        ),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            "--plan",
            metavar="FILE",
            help="Moves as JSON in Kafka's form, as --json prints a plan; - is stdin.",
        ),
    ] = None,
    spread: Annotated[
        bool,
        typer.Option(
            "--spread",
            help="Plan a few moves that balance the load, e.g. after adding a broker.",
        ),
    ] = False,
    dry_run: DryRun = False,
    yes: YesOrExecute = False,
    show: Annotated[bool, typer.Option("--list", help="Show the moves under way.")] = False,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="Cancel the moves under way, or those of --move.")
    ] = False,
    throttle: Throttle = None,
    wait: Wait = True,
    timeout_s: MovesTimeout = DAY_S,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Move partitions to other brokers, under load: shows the plan, and asks.

    New replicas copy the log and join the in-sync set before any other goes.
    """
    # --cancel may name partitions by --move.
    if sum((bool(move) and not cancel, plan is not None, spread, show, cancel)) != 1:
        raise typer.BadParameter("give one of --move, --plan, --spread, --list and --cancel")
    check_can_ask(yes or dry_run or show or cancel)
    bytes_per_s = None if throttle is None else rate_bytes_per_s(throttle)
    given: Plan = {}
    if not cancel:  # which takes partitions without brokers
        given = _plan_of(map(_move, move or ()) if plan is None else _read_plan(plan))
    with connected(cluster, topics=[place.topic for place in given]) as connection:
        if show:
            _show_moves(connection.admin.list_reassignments(), json)
            return
        if cancel:
            _cancel(connection, move, json)
            return
        moves = connection.admin.plan_spread() if spread else given
        if dry_run or not moves or not (yes or json):
            _show_plan(connection, moves, json)
        if not moves:
            return
        if dry_run:
            _say_nothing_moved(json)
            return
        agree(f"Move {output.counted(len(moves), 'partition')}?", yes)
        _execute(connection, moves, bytes_per_s, wait, timeout_s)
    done = "done" if wait else "begun: see `rayq cluster reassign --list`"
    if json:
        output.print_json({"moved" if wait else "moving": _as_kafka(moves)["partitions"]})
    else:
        output.say(f"{output.counted(len(moves), 'move')} {done}.")


def _move(text: str) -> tuple[TopicPartition, list[int]]:
    place, _, brokers = text.partition("=")
    try:
        return topic_partition(place), partition_numbers(brokers)
    except InvalidRequestError:
        raise WrongUseError(f"{text!r} is not a move, e.g. flights/0=1,2,3.") from None


class _PlannedMove(msgspec.Struct):
    topic: str
    partition: int
    replicas: list[int]


class _PlanFile(msgspec.Struct):
    """A plan in Kafka's form. The other fields that Kafka's tools write (`version`, `log_dirs`) are
    ignored."""

    partitions: list[_PlannedMove]


def _read_plan(path: str) -> Iterable[tuple[TopicPartition, list[int]]]:
    data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    try:
        found = msgspec.json.decode(data, type=_PlanFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(
            f"{path} is not a plan: {error}. It has the form "
            '{"partitions": [{"topic": "flights", "partition": 0, "replicas": [1, 2, 3]}]}.'
        ) from error
    return [
        (TopicPartition(partition.topic, partition.partition), partition.replicas)
        for partition in found.partitions
    ]


def _plan_of(moves: Iterable[tuple[TopicPartition, list[int]]]) -> Plan:
    plan: Plan = {}
    for place, target in moves:
        if place in plan:
            raise WrongUseError(f"{place.topic}/{place.partition} is given twice.")
        plan[place] = target
    return plan


def _as_kafka(moves: Mapping[TopicPartition, list[int]]) -> dict[str, Any]:
    return {
        "version": 1,
        "partitions": [
            {"topic": place.topic, "partition": place.partition, "replicas": list(replicas)}
            for place, replicas in sorted(moves.items())
        ],
    }


def _show_plan(cluster: Cluster, moves: Plan, json: bool) -> None:
    topics = {
        name: cluster.admin.describe_topic(name).partitions
        for name in sorted({place.topic for place in moves})
    }
    _check_plan(cluster, moves, topics)
    if json:
        output.print_json(_as_kafka(moves))
        return
    if not moves:
        output.say("Nothing to move.")
        return
    rows = []
    for name, partitions in topics.items():
        for partition in partitions:
            target = moves.get(TopicPartition(name, partition.partition))
            if target is None:
                continue
            now = [replica.broker for replica in partition.replicas]
            size = max((replica.size_bytes or 0 for replica in partition.replicas), default=0)
            copies = len(set(target) - set(now))
            rows.append(
                (
                    name,
                    partition.partition,
                    output.numbers(now),
                    output.numbers(target),
                    output.human_size(size * copies),
                )
            )
    output.table(("topic", "partition", "brokers now", "brokers then", "to copy"), rows)


def _say_nothing_moved(json: bool) -> None:
    if not json:
        output.say("Nothing was moved: run it without --dry-run to move.")


def _check_plan(
    cluster: Cluster, moves: Plan, topics: Mapping[str, Sequence[PartitionInfo]]
) -> None:
    """Raises the error that the controller would answer: a plan that it refuses for sure should not
    be shown as one."""
    brokers = [broker.broker for broker in cluster.admin.describe_cluster().brokers]
    for (name, number), target in moves.items():
        if not 0 <= number < len(topics[name]):
            raise UnknownTopicError(f"Topic {name!r} has no partition {number}.")
        unknown = sorted(set(target) - set(brokers))
        if unknown:
            raise UnknownBrokerError(
                f"There is no broker {unknown[0]} to move {name}/{number} to; the cluster has "
                f"{brokers}."
            )
        partition = topics[name][number]
        count = len(partition.target or partition.replicas)
        if len(target) != count or len(set(target)) != count:
            raise InvalidReassignmentError(
                f"{name}/{number} has {count} replicas: name {count} different brokers, not "
                f"{target}."
            )


def _execute(
    cluster: Cluster, moves: Plan, throttle: int | None, wait: bool, timeout_s: float
) -> None:
    with (
        output.progress("moving partitions", len(moves), wanted=wait) as advance,
        _watched(cluster, moves, advance),
        _told_that_moves_continue("rayq cluster reassign --list"),
    ):
        cluster.admin.reassign_partitions(
            moves, throttle_bytes_per_s=throttle, wait=wait, timeout_s=timeout_s
        )


@contextlib.contextmanager
def _watched(
    cluster: Cluster, moves: Iterable[TopicPartition], advance: output.Advance
) -> Iterator[None]:
    """Updates a progress bar with the number of finished moves, for the `with` block."""
    wanted = set(moves)
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_S):
            with contextlib.suppress(RayqError):
                under_way = {move.topic_partition for move in cluster.admin.list_reassignments()}
                advance(len(wanted - under_way))

    thread = threading.Thread(target=look, daemon=True)
    if sys.stderr.isatty():
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.is_alive():
            thread.join()


@contextlib.contextmanager
def _told_that_moves_continue(command: str) -> Iterator[None]:
    """Tells the user after an interrupt that only the wait has ended, and the moves continue."""
    try:
        yield
    except KeyboardInterrupt:
        output.note(f"The moves that were started continue: {command}")
        raise


def _cancel(cluster: Cluster, move: list[str] | None, json: bool) -> None:
    chosen = [topic_partition(text.partition("=")[0]) for text in move or ()] or None
    cancelled = cluster.admin.cancel_reassignments(chosen)
    if json:
        output.print_json({"cancelled": [place._asdict() for place in cancelled]})
    elif cancelled:
        for place in cancelled:
            output.say(f"{place.topic}/{place.partition} stays where it was.")
    else:
        output.say("No move is under way.")


def _show_moves(moves: list[Reassignment], json: bool) -> None:
    if json:
        output.print_json(
            [
                {
                    **reassignment.topic_partition._asdict(),
                    **_without_place(msgspec.to_builtins(reassignment)),
                }
                for reassignment in moves
            ]
        )
        return
    if not moves:
        output.say("No move is under way.")
        return
    output.table(
        ("topic", "partition", "adding", "removing", "brokers then", "throttle/s", "waits for"),
        [
            (
                *reassignment.topic_partition,
                output.numbers(reassignment.adding),
                output.numbers(reassignment.removing),
                output.numbers(reassignment.target),
                output.human_size(reassignment.throttle_bytes_per_s),
                reassignment.waits_for,
            )
            for reassignment in moves
        ],
        optional=("throttle/s", "brokers then"),
    )


def _without_place(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "topic_partition"}


# --- more replicas, or fewer ---------------------------------------------------------------------


def set_replication_factor(
    topics: TopicNames,
    replicas: Annotated[
        int,
        typer.Option(
            "-r",
            "--replicas",
            "--replication-factor",
            help="Replicas of each partition.",
            min=1,
            show_default=False,
        ),
    ],
    yes: Yes = False,
    throttle: Throttle = None,
    wait: Wait = True,
    timeout_s: MovesTimeout = DAY_S,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Give the partitions of topics more replicas, or fewer, under load.

    More copy the log from the leader; of too many, those on the brokers with most go.
    """
    check_can_ask(yes)
    bytes_per_s = None if throttle is None else rate_bytes_per_s(throttle)
    with connected(cluster, topics=topics) as connection:
        places: list[TopicPartition] = []
        for name in topics:
            partitions = connection.admin.describe_topic(name).partitions
            places += [TopicPartition(name, partition.partition) for partition in partitions]
        agree(
            f"Give {output.counted(len(places), 'partition')} of {', '.join(topics)} "
            f"{output.counted(replicas, 'replica')} each?",
            yes,
        )
        with (
            output.progress("moving partitions", len(places), wanted=wait) as advance,
            _watched(connection, places, advance),
            _told_that_moves_continue("rayq cluster reassign --list"),
        ):
            for may_wait in (False, wait):  # All of them begin, then they are waited for.
                for name in topics:
                    connection.admin.set_replication_factor(
                        name,
                        replicas,
                        throttle_bytes_per_s=bytes_per_s,
                        wait=may_wait,
                        timeout_s=timeout_s,
                    )
    if json:
        output.print_json(
            [{"topic": name, "replication_factor": replicas, "done": wait} for name in topics]
        )
        return
    for name in topics:
        output.say(
            f"{name} has {output.counted(replicas, 'replica')} of each partition now."
            if wait
            else f"{name} will have {output.counted(replicas, 'replica')} of each partition: see "
            "`rayq cluster reassign --list`"
        )


# --- whole brokers --------------------------------------------------------------------------------


def drain(
    broker: BrokerNumber,
    dry_run: DryRun = False,
    yes: Yes = False,
    throttle: Throttle = None,
    concurrency: Annotated[
        int,
        typer.Option(
            "--concurrency", help="Maximum number of partitions that move at the same time.", min=1
        ),
    ] = 4,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            help="Seconds to wait; run the command again to continue.",
            min=0,
            show_default="none",
        ),
    ] = None,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Move all replicas of a broker to others, under load; the broker gets no new ones from then
    on."""
    check_can_ask(yes or dry_run)
    bytes_per_s = None if throttle is None else rate_bytes_per_s(throttle)
    with connected(cluster) as connection:
        moves = connection.admin.plan_drain(broker)
        if dry_run or not (yes or json):
            _show_plan(connection, moves, json)
        if dry_run:
            _say_nothing_moved(json)
            return
        agree(f"Move all of it off broker {broker}, and give it nothing new?", yes)
        with (
            output.progress(f"draining broker {broker}", len(moves)) as advance,
            _told_that_moves_continue(f"rayq cluster drain {broker} (to wait for them)"),
        ):

            def tell(progress: DrainProgress) -> None:
                advance(progress.done)

            connection.admin.drain_broker(
                broker,
                throttle_bytes_per_s=bytes_per_s,
                concurrency=concurrency,
                timeout_s=timeout_s,
                on_progress=tell,
            )
    if json:
        output.print_json({"broker": broker, "moved": _as_kafka(moves)["partitions"]})
    else:
        moved = output.counted(len(moves), "partition was", "partitions were")
        output.say(f"Broker {broker} holds nothing now; {moved} moved.")
        output.say(
            f"Next: stop its node, or only it: `rayq cluster stop-broker {broker}`; then `rayq "
            f"cluster remove-broker {broker}`. Or take it back: `rayq cluster undrain {broker}`."
        )


def undrain(broker: BrokerNumber, json: Json = False, cluster: ClusterAddress = None) -> None:
    """Let a drained broker take replicas again."""
    with connected(cluster) as connection:
        connection.admin.undrain_broker(broker)
    if json:
        output.print_json({"broker": broker, "cordoned": False})
    else:
        output.say(f"Broker {broker} takes replicas again. Next: rayq cluster reassign --spread")


def remove_broker(broker: BrokerNumber, json: Json = False, cluster: ClusterAddress = None) -> None:
    """Remove a broker that was drained and stopped from the cluster."""
    with connected(cluster) as connection:
        connection.admin.remove_broker(broker)
    if json:
        output.print_json({"broker": broker, "removed": True})
    else:
        output.say(f"Broker {broker} is no longer part of the cluster.")
