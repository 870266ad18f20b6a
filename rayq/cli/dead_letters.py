"""`rayq dead-letters`: list, show, redrive, discard."""

from __future__ import annotations

import contextlib
import re
from typing import Annotated, Any

import typer

from rayq.cli import output
from rayq.cli.confirm import Yes, agree, check_can_ask
from rayq.cli.current import connected
from rayq.cli.formats import as_json, shown, to_bytes
from rayq.cli.options import (
    COMPLETION_TIMEOUT_S,
    ClusterAddress,
    DryRun,
    Json,
    Limit,
    complete_topic,
    offered,
    quickly,
)
from rayq.cli.values import WrongUseError, is_number, time_ms
from rayq.client.admin.dead_letters import Aim, DeadLetter, DeadLetters, Filter, Progress
from rayq.client.cluster import Cluster
from rayq.core.cluster.queue_changes import DEAD
from rayq.core.queues.moved_records import (
    COUNT_HEADER,
    REASON_HEADER,
    SOURCE_HEADER,
    header_of,
)
from rayq.errors import RayqError

TIMEOUT_S = 60.0
LIMIT = 100
ERROR_WIDTH = 60
QUEUE, PRODUCER = "queue", "producer"
"""Writers of dead letters: a queue's leader; or a producer, which chose the headers, too."""
_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)(?:/(s|m|h))?", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, None: 1}


def _complete_queue(ctx: typer.Context, incomplete: str) -> list[str]:
    with contextlib.suppress(RayqError, OSError), quickly(ctx) as cluster:
        names = cluster.admin.list_queues(timeout_s=COMPLETION_TIMEOUT_S)
        return offered(
            [name.removesuffix(DEAD) for name in names if name.endswith(DEAD)], incomplete
        )
    return []


Queue = Annotated[
    str,
    typer.Argument(
        metavar="QUEUE",
        help="The queue that the dead letters come from, or the dead-letter topic of a pool.",
        autocompletion=_complete_queue,
        show_default=False,
    ),
]
Where = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="WHAT=VALUE",
        help="Filter: error=PART, key=KEY, since=TIME (-1h) or header=NAME=VALUE. May be repeated: "
        "all must match (of several keys, any).",
    ),
]
Rate = Annotated[
    str | None,
    typer.Option("--rate", metavar="N/s", help="Maximum rate, e.g. 100/s or 30/m."),
]


def filter_of(conditions: list[str] | None, now_ms: int) -> Filter:
    """Parses the values of `--where`. Raises WrongUseError."""
    errors: list[str] = []
    keys: list[bytes] = []
    headers: list[tuple[str, bytes]] = []
    since_ms: int | None = None
    for text in conditions or ():
        kind, equals, value = text.partition("=")
        if not equals or (kind != "key" and not value):
            raise _no_condition(text)
        match kind:
            case "error":
                errors.append(value)
            case "key":
                keys.append(to_bytes(value))
            case "since":
                since_ms = max(since_ms or 0, time_ms(value, now_ms))
            case "header":
                name, equals, content = value.partition("=")
                if not (name and equals):
                    raise WrongUseError(f"{text!r} names no header: header=NAME=VALUE.")
                headers.append((name, to_bytes(content)))
            case _:
                raise _no_condition(text)
    return Filter(tuple(errors), tuple(keys), since_ms, tuple(headers))


def _no_condition(text: str) -> WrongUseError:
    return WrongUseError(
        f"{text!r} is not a condition: error=PART, key=KEY, since=TIME or header=NAME=VALUE."
    )


def rate_per_s(text: str) -> float:
    """Reads `100/s`, `30/m`, `100`. Raises WrongUseError."""
    found = _RATE.fullmatch(text.strip())
    rate = float(found[1]) / _SECONDS[found[2]] if found else 0.0
    if rate <= 0:
        raise WrongUseError(f"{text!r} is not a rate, e.g. 100/s or 30/m.")
    return rate


def list_letters(
    queue: Queue,
    where: Where = None,
    limit: Limit = LIMIT,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """List the unsettled dead letters, the oldest of each partition first."""
    which = filter_of(where, output.now_ms())
    with connected(cluster) as connection:
        letters, run = _letters(connection, queue)
        found = run(letters.listed(which, limit))
    if json:
        output.print_json([_as_json(letter) for letter in found])
        return
    if not found:
        output.say("There are none.")
        return
    output.table(
        ("id", "time", "source", "by", "count", "key", "error", "state"),
        [
            (
                f"{letter.record.partition}/{letter.record.offset}",
                output.moment(letter.record.timestamp_ms),
                _header(letter, SOURCE_HEADER),
                QUEUE if letter.is_by_queue else PRODUCER,
                _header(letter, COUNT_HEADER),
                None if letter.record.key is None else shown(letter.record.key)[1:-1],
                _short(letter.error),
                letter.state,
            )
            for letter in found
        ],
        optional=("state", "key", "count", "time"),
    )
    if len(found) == limit:
        output.say(f"There may be more than {limit}: --limit shows them.")


def show(
    queue: Queue,
    ids: Annotated[
        list[str], typer.Argument(metavar="ID", help="PARTITION/OFFSET, as `list` shows it.")
    ],
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Show dead letters with their headers and values."""
    places = [_place(letter_id) for letter_id in ids]
    with connected(cluster) as connection:
        letters, run = _letters(connection, queue)
        found = [run(letters.show(*place)) for place in places]
    if json:
        output.print_json_of(ids, [_as_json(letter) for letter in found])
        return
    for number, letter in enumerate(found):
        if number:
            output.say()
        record = letter.record
        output.heading(f"{record.topic} {record.partition}/{record.offset}: {letter.state}")
        output.say(f"time: {output.moment(record.timestamp_ms)}")
        output.say(f"written by: a {QUEUE if letter.is_by_queue else PRODUCER}")
        output.say(f"error: {letter.error or '-'}", hang=2)
        output.say("key: " + ("null" if record.key is None else _text(record.key)), hang=2)
        for name, value in record.headers:
            output.say(f"header {name}: {_text(value)}", hang=2)
        output.say(f"value: {_value(letter)}", hang=2)


def redrive(
    queue: Queue,
    where: Where = None,
    rate: Rate = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="TOPIC",
            help="The target topic. Default: the topic that each came from.",
            autocompletion=complete_topic,
        ),
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Send dead letters back, each exactly once. If it is interrupted, run it again."""
    aim = "the topics that they came from" if to is None else f"topic {to}"
    _settle(
        cluster,
        queue,
        where,
        rate,
        to or "",
        question=f"Send the dead letters of {queue} that match to {aim}?",
        done="sent back",
        dry_run=dry_run,
        yes=yes,
        json=json,
    )


def discard(
    queue: Queue,
    where: Where = None,
    rate: Rate = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Discard dead letters: they are no longer delivered."""
    _settle(
        cluster,
        queue,
        where,
        rate,
        None,
        question=f"Drop the dead letters of {queue} that match?",
        done="dropped",
        dry_run=dry_run,
        yes=yes,
        json=json,
    )


def _settle(
    address: str | None,
    queue: str,
    where: list[str] | None,
    rate: str | None,
    to_topic: str | None,
    *,
    question: str,
    done: str,
    dry_run: bool,
    yes: bool,
    json: bool,
) -> None:
    check_can_ask(yes or dry_run)
    which = filter_of(where, output.now_ms())
    per_s = None if rate is None else rate_per_s(rate)
    with connected(address, topics=[to_topic] if to_topic else ()) as connection:
        if to_topic:
            connection.admin.describe_topic(to_topic)
        letters, run = _letters(connection, queue)
        if not (yes or dry_run):
            found = run(letters.settle(which, to_topic=to_topic, dry_run=True))
            if found.matched:
                _show_targets(found)
                agree(f"{question} {output.counted(found.matched, 'match', 'match')}.", yes)
        with output.progress(done, None, wanted=not (json or dry_run)) as advance:
            moved = 0

            def on_progress(progress: Progress) -> None:
                nonlocal moved
                advance(progress.moved - moved)
                moved = progress.moved

            result = run(
                letters.settle(
                    which,
                    to_topic=to_topic,
                    rate_per_s=per_s,
                    dry_run=dry_run,
                    on_progress=on_progress,
                )
            )
    if json:
        output.print_json(
            {
                "seen": result.seen,
                "matched": result.matched,
                "moved": result.moved,
                "refused": result.refused,
                "targets": [
                    {"topic": topic, "letters": aim.letters, "by_producers": aim.by_producers}
                    for topic, aim in sorted(result.targets.items(), key=_by_name)
                ],
            }
        )
        return
    letters_text = output.counted(result.matched, "dead letter")
    if dry_run:
        _show_targets(result)
        output.say(f"{letters_text} of {result.seen:,} match. Nothing was changed.")
        return
    output.say(f"{output.counted(result.moved, 'dead letter')} {done}, of {result.matched:,}.")
    for why, count in sorted(result.refused.items()):
        output.say(f"{count:,} left: {why}", hang=2)


def _show_targets(found: Progress) -> None:
    for topic, aim in sorted(found.targets.items(), key=_by_name):
        where = "without a target" if topic is None else f"to topic {topic}"
        by = f", {aim.by_producers:,} of them written by a producer" if aim.by_producers else ""
        output.say(f"{output.counted(aim.letters, 'dead letter')} {where}{by}")


def _by_name(item: tuple[str | None, Aim]) -> str:
    return item[0] or ""


def _letters(cluster: Cluster, queue: str) -> tuple[DeadLetters, Any]:
    client, background = cluster.shared_client()
    return DeadLetters(client, queue, timeout_s=TIMEOUT_S), background.run


def _as_json(letter: DeadLetter) -> dict[str, Any]:
    headers = letter.record.headers
    count = header_of(headers, COUNT_HEADER)
    return {
        **as_json(letter.record),
        "state": letter.state,
        "source": _header(letter, SOURCE_HEADER),
        "reason": _header(letter, REASON_HEADER),
        "count": int(count) if count is not None and is_number(count) else None,
        "error": letter.error,
        "is_large": letter.is_large,
        "by": QUEUE if letter.is_by_queue else PRODUCER,
        "unread": letter.unread,
    }


def _header(letter: DeadLetter, name: str) -> str | None:
    value = header_of(letter.record.headers, name)
    return None if value is None else value.decode(errors="replace")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= ERROR_WIDTH else line[: ERROR_WIDTH - 3] + "..."


def _value(letter: DeadLetter) -> str:
    if letter.unread is not None:
        return f"not read: {letter.unread}"
    value = letter.record.value
    return "null" if value is None else _text(value)


def _text(data: bytes) -> str:
    return data.decode(errors="backslashreplace")


def _place(text: str) -> tuple[int, int]:
    partition, slash, offset = text.partition("/")
    if not (slash and is_number(partition) and is_number(offset)):
        raise WrongUseError(
            f"{text!r} is not a dead letter's id: PARTITION/OFFSET, such as 0/7."
        )
    return int(partition), int(offset)
