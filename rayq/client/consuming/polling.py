"""Polls, iterations and reading up to an end, for both consumers, as steps.

Each is written once, though one consumer waits by blocking and the other by awaiting: a generator
yields anything that takes time or calls the user, and the consumer carries it out in its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from rayq.client.consuming.consumer_core import ConsumerCore
from rayq.client.consuming.group_consumer import Step, WaitForNews
from rayq.client.consuming.until_end import UntilEnd
from rayq.records import Record

T = TypeVar("T")

NEXT_POLL_S = 1.0
"""Maximum time iteration waits at once: new partitions are looked for between two polls."""


def poll(core: ConsumerCore, take: Callable[[], T], timeout_s: float) -> Generator[Step, None, T]:
    """Returns the result of `take` as soon as there is any; after `timeout_s`, even an empty
    one."""
    group = core.group
    deadline = core.client.now + timeout_s
    if group is not None:
        group.poll_began()
    try:
        while True:
            if group is not None and group.is_due:
                yield from group.poll_steps()
            if taken := take():
                return taken
            left_s = deadline - core.client.now
            if left_s <= 0:
                core.errors.raise_held()
                return taken
            left_s = core.errors.patience_s(left_s)
            yield WaitForNews(left_s if group is None else group.patience_s(left_s))
    finally:
        if group is not None:
            group.poll_ended()


def poll_until(
    core: ConsumerCore, until: UntilEnd, records_max: int
) -> Generator[Step, None, list[Record[Any, Any]]]:
    """The next records before the end, as soon as there are some; [] when all were read."""
    until.made_progress()
    while True:
        if until.has_question:
            yield until.ask()
            if until.is_over:
                return []
        yield from poll(core, lambda: until.take(records_max), until.patience_s())
        if until.records:
            return until.records


def fill_ahead(core: ConsumerCore, until: UntilEnd | None) -> Generator[Step, None, bool]:
    """Returns whether there is a next record, which then is in `core.ahead`. Waits for one forever,
    or up to the end."""
    if until is not core.ahead_until and until is not None:
        core.give_back()
    group, records_max = core.group, core.config.max_poll_records
    if group is not None and core.ahead:
        group.poll_began()
        try:
            if group.is_due:
                yield from group.poll_steps()
        finally:
            group.poll_ended()
    while not core.ahead:
        if until is None:
            records = yield from poll(core, lambda: core.take_records(records_max), NEXT_POLL_S)
        else:
            records = yield from poll_until(core, until, records_max)
            if not records:
                return False
        core.ahead.extend(records)
        core.ahead_until = until
    return True
