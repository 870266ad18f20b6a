"""The events of a history, and its file: one JSON object per line, in the order they happened.

A history that was cut off by a crash is still one: a half-written last line is left out, and a send
without an outcome counts as unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec

Outcome = Literal["ok", "failed", "unknown"]


class _Event(msgspec.Struct, frozen=True, tag_field="event"):
    """Base of the events."""


class ProducerOpened(_Event, frozen=True, tag="producer"):
    """A producer and what it promises: only under acks "all" may no record be lost, only an
    idempotent one never repeats or reorders."""

    producer: str
    acks: Literal["all", "1", "0"]
    idempotent: bool


class Sending(_Event, frozen=True, tag="sending"):
    """A record was handed to a producer. `number` counts the sends of that producer upwards."""

    producer: str
    number: int
    topic: str
    key: str | None
    value: str


class Sent(_Event, frozen=True, tag="sent"):
    """The outcome: "ok" (where it is), "failed" (it was not written and never will be), or
    "unknown" (either)."""

    producer: str
    number: int
    outcome: Outcome
    partition: int | None = None
    offset: int | None = None
    error: str | None = None


class Assigned(_Event, frozen=True, tag="assigned"):
    """A consumer begins to read a partition, or begins again (another assignment, a seek): what it
    polled of it before says nothing about what comes next. With a `group`: it owns the partition in
    it from now on, as a member of this `epoch`. With `reads_all`: nothing is written any more, and
    it reads the partition from its first record to its last, so whatever it does not find is gone,
    whoever has read it before."""

    consumer: str
    topic: str
    partition: int
    group: str | None = None
    epoch: int | None = None
    reads_all: bool = False


class Polled(_Event, frozen=True, tag="polled"):
    """One poll returned these records of one partition, in this order."""

    consumer: str
    topic: str
    partition: int
    offsets: list[int]
    values: list[str]


class GroupOpened(_Event, frozen=True, tag="group"):
    """A group reads these topics from their beginning; its members commit only what they have
    dealt with."""

    group: str
    topics: list[str]


class Released(_Event, frozen=True, tag="released"):
    """A member is about to own a partition no more: it gives it up ("revoked"), leaves ("closed"),
    or notices that it was taken away some time ago ("lost")."""

    consumer: str
    topic: str
    partition: int
    how: Literal["revoked", "closed", "lost"]


class Killed(_Event, frozen=True, tag="killed"):
    """A member's process is killed now; the sender of the signal writes it before."""

    consumer: str


class Committing(_Event, frozen=True, tag="committing"):
    """A member commits: the offsets of the next records. `number` counts its commits."""

    consumer: str
    group: str
    number: int
    offsets: list[tuple[str, int, int]]
    """`(topic, partition, offset)`"""


class Committed(_Event, frozen=True, tag="committed"):
    """The outcome: "ok", or "unknown" (all, some or nothing of it is committed)."""

    consumer: str
    number: int
    outcome: Literal["ok", "unknown"]
    error: str | None = None


class CommitsSeen(_Event, frozen=True, tag="commits-seen"):
    """The owner of these partitions, before its first commit, reads what is committed."""

    consumer: str
    group: str
    offsets: list[tuple[str, int, int | None]]


class CommitsSet(_Event, frozen=True, tag="commits-set"):
    """An operator set a group's offsets on purpose."""

    group: str
    offsets: list[tuple[str, int, int]]


class QueueOpened(_Event, frozen=True, tag="queue"):
    """A queue over a topic, and the topic of its dead letters. With `is_own` only the queue reads
    its topic, where dead letters may stand again: then no other check judges its records. With
    `is_loose` something takes records of the topic away, or what is known of them: an unclean
    election, an operator. Then each record that is there in the end has to be acknowledged or a
    dead letter, and the rest is judged within one state epoch. With `holds` no record leaves the
    topic before it is settled."""

    queue: str
    topic: str
    dead_letters: str | None
    timeout_s: float
    ordered_by_key: bool = False
    is_own: bool = False
    is_loose: bool = False
    holds: bool = False


class QueueClosed(_Event, frozen=True, tag="queue-closed"):
    """A queue was deleted: what it left unsettled is nobody's."""

    queue: str


class Purged(_Event, frozen=True, tag="purged"):
    """An operator settled what lay below `offset` in a partition. In the end `is_sure` is False:
    purges whose answer was lost went so far at most."""

    queue: str
    partition: int
    offset: int
    at_s: float
    is_sure: bool = True


class Cut(_Event, frozen=True, tag="cut"):
    """In the end: unclean elections took records away from this offset on, and none below."""

    topic: str
    partition: int
    offset: int


class KeeperInDoubt(_Event, frozen=True, tag="keeper-in-doubt"):
    """The state of queues may be lost from now on, and with it what any answer rests on: no lock
    and nothing settled is sure. Each record is still acknowledged, or a dead letter."""


class Delayed(_Event, frozen=True, tag="delayed"):
    """No queue may give this record out before `due_s`."""

    value: str
    due_s: float


class Took(_Event, frozen=True, tag="took"):
    """A consumer got these records of a partition from a queue. `asked_s` is when the consumer sent
    the request, `at_s` when the answer was there; all seconds of a history are of one clock."""

    queue: str
    consumer: str
    partition: int
    asked_s: float
    at_s: float
    locks: list[tuple[int, int, str, str | None]]
    """`(offset, count, value, key)`"""
    state_epoch: int | None = None
    """None: the consumer does not know it."""


class Begun(_Event, frozen=True, tag="begun"):
    """A consumer is about to tell a queue's leader that it begins records of these values."""

    queue: str
    values: list[str]


class Settling(_Event, frozen=True, tag="settling"):
    """A consumer is about to settle these locks of one partition, to give them back ("release"), or
    to extend them. `number` counts what it settles, upwards."""

    queue: str
    consumer: str
    number: int
    partition: int
    what: Literal["ack", "nack", "reject", "release", "extend"]
    at_s: float
    locks: list[tuple[int, int]]
    """`(offset, count)`"""
    state_epoch: int | None = None
    seconds: float | None = None
    """The length of an extension, or the delay that a nack asks for."""


class Settled(_Event, frozen=True, tag="settled"):
    """The outcome: "ok" (except for the locks at the offsets in `lost`, which had gone) or
    "unknown" (any of it may be settled)."""

    consumer: str
    number: int
    outcome: Literal["ok", "unknown"]
    at_s: float
    lost: list[int] = msgspec.field(default_factory=list)
    error: str | None = None


class Disturbed(_Event, frozen=True, tag="disturbed"):
    """A connection of the consumer (None: of any) may have broken: no lock that it has is sure to
    last for its time, nor one of a take that it had asked for before `at_s`."""

    consumer: str | None = None
    at_s: float = 0.0


class ClockInDoubt(_Event, frozen=True, tag="clock-in-doubt"):
    """Tells that, from now on (until one that `is_over`) the wall clock of a server is ahead, which
    began with it: no delay from before or meanwhile is sure."""

    is_over: bool = False


class Found(_Event, frozen=True, tag="found"):
    """In the end, when nothing is written any more, these records are in a partition of a queue's
    own topic, or of a topic of dead letters."""

    topic: str
    partition: int
    offsets: list[int]
    values: list[str]
    reasons: list[str] = []
    """Why each became a dead letter, "" where that is not said; [] where none is one."""


Event = (    ProducerOpened
    | Sending
    | Sent
    | Assigned
    | Polled
    | GroupOpened
    | Released
    | Killed
    | Committing
    | Committed
    | CommitsSeen
    | CommitsSet
    | QueueOpened
    | QueueClosed
    | Purged
    | Cut
    | KeeperInDoubt
    | Delayed
    | Took
    | Begun
    | Settling
    | Settled
    | Disturbed
    | ClockInDoubt
    | Found
)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Event)


def encode_event(event: Event) -> bytes:
    """One line of a history file, with its line end."""
    return _encoder.encode(event) + b"\n"


def read_history(lines: Iterable[bytes]) -> Iterator[Event]:
    """The events of a history file. Raises ValueError naming a line that is none, unless it is the
    last and has no line end: a crash cut it off."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            event: Event = _decoder.decode(line)
        except msgspec.DecodeError as error:
            if not line.endswith(b"\n"):
                return
            raise ValueError(f"line {number} is not an event of a history: {error}") from error
        yield event
