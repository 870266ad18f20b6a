"""The content of a history, arranged for the questions that are asked of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from rayq.testing.checker.history import (
    Assigned,
    Begun,
    ClockInDoubt,
    CommitsSeen,
    CommitsSet,
    Committed,
    Committing,
    Cut,
    Delayed,
    Disturbed,
    Event,
    Found,
    GroupOpened,
    KeeperInDoubt,
    Killed,
    Polled,
    ProducerOpened,
    Purged,
    QueueClosed,
    QueueOpened,
    Released,
    Sending,
    Sent,
    Settled,
    Settling,
    Took,
)

Place = tuple[str, int]
"""`(topic, partition)`"""


class Fault(NamedTuple):
    """Something that must not happen. `kind` is one of the names in the checks' modules."""

    kind: str
    what: str


@dataclass(slots=True)
class Send:
    """One record, from its send to its outcome."""

    producer: str
    number: int
    topic: str
    key: str | None
    value: str
    outcome: str = "unknown"
    partition: int | None = None
    offset: int | None = None

    def __str__(self) -> str:
        return f"{self.value!r} (send {self.number} of {self.producer}, {self.outcome})"


@dataclass(slots=True)
class Reading:
    """The records that one consumer polled of one partition within one assignment."""

    consumer: str
    place: Place
    reads_all: bool = False
    offsets: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Facts:
    """`log[place][offset]` are the values that acknowledgements and polls put
    there, each with one witness: more than one value is a fault. `read[place]` are the offsets that
    any consumer polled, `found[place]` those that the readers of everything found in the end."""

    producers: dict[str, ProducerOpened] = field(default_factory=dict)
    sends: list[Send] = field(default_factory=list)
    by_value: dict[str, Send] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)
    log: dict[Place, dict[int, dict[str, str]]] = field(default_factory=dict)
    read: dict[Place, set[int]] = field(default_factory=dict)
    found: dict[Place, set[int]] = field(default_factory=dict)
    """Has only places that a reader of everything was assigned."""
    read_before: dict[Place, set[int]] = field(default_factory=dict)
    """The records that had been read when the first reader of everything began."""
    places_of: dict[str, set[tuple[str, int, int]]] = field(default_factory=dict)
    """The place of each polled value: `(topic, partition, offset)`."""
    records_polled: int = 0
    group_events: list[Event] = field(default_factory=list)
    """All that concerns groups, in order, for `rayq.testing.checker.groups`."""
    queue_events: list[Event] = field(default_factory=list)
    """All that concerns queues, in order, for `rayq.testing.checker.queues`."""
    queue_sends: list[Send] = field(default_factory=list)
    """The records of topics that only queues read; they are not among `sends`."""

    def promises_durability(self, send: Send) -> bool:
        opened = self.producers.get(send.producer)
        return opened is None or opened.acks == "all"

    def is_idempotent(self, send: Send) -> bool:
        opened = self.producers.get(send.producer)
        return opened is None or opened.idempotent

    def saw(self, place: Place, offset: int, value: str, witness: str) -> None:
        self.log.setdefault(place, {}).setdefault(offset, {}).setdefault(value, witness)


def gather(events: Iterable[Event]) -> Facts:
    """Raises ValueError for a history that contradicts itself: a value sent twice, an outcome
    without a send."""
    facts = Facts()
    open_sends: dict[tuple[str, int], Send] = {}
    current: dict[tuple[str, Place], Reading] = {}
    members: set[str] = set()
    for event in events:
        match event:
            case ProducerOpened():
                facts.producers[event.producer] = event
            case Sending():
                send = Send(
                    producer=event.producer,
                    number=event.number,
                    topic=event.topic,
                    key=event.key,
                    value=event.value,
                )
                if event.value in facts.by_value:
                    raise ValueError(f"value {event.value!r} was sent twice: values must differ.")
                facts.by_value[event.value] = send
                facts.sends.append(send)
                open_sends[event.producer, event.number] = send
            case Sent():
                _resolve(facts, open_sends, event)
            case Assigned():
                place = (event.topic, event.partition)
                current[event.consumer, place] = _new_reading(
                    facts, event.consumer, place, event.reads_all
                )
                if event.group is not None:
                    members.add(event.consumer)
                    facts.group_events.append(event)
            case Polled():
                place = (event.topic, event.partition)
                reading = current.get((event.consumer, place))
                if reading is None:
                    reading = _new_reading(facts, event.consumer, place)
                    current[event.consumer, place] = reading
                _poll(facts, reading, event)
                if event.consumer in members:
                    facts.group_events.append(event)
            case Killed():
                facts.group_events.append(event)
                facts.queue_events.append(event)
            case (
                QueueOpened()
                | QueueClosed()
                | Purged()
                | Cut()
                | KeeperInDoubt()
                | Delayed()
                | Took()
                | Begun()
                | Settling()
                | Settled()
                | Disturbed()
                | ClockInDoubt()
                | Found()
            ):
                facts.queue_events.append(event)
            case (
                GroupOpened()
                | Released()
                | Committing()
                | Committed()
                | CommitsSeen()
                | CommitsSet()
            ):
                facts.group_events.append(event)
    own = {
        event.topic
        for event in facts.queue_events
        if isinstance(event, QueueOpened) and event.is_own
    }
    facts.queue_sends = [send for send in facts.sends if send.topic in own]
    facts.sends = [send for send in facts.sends if send.topic not in own]
    loose = {
        event.topic
        for event in facts.queue_events
        if isinstance(event, QueueOpened) and event.is_loose
    }
    facts.log = {place: found for place, found in facts.log.items() if place[0] not in loose}
    return facts


def _new_reading(
    facts: Facts, consumer: str, place: Place, reads_all: bool = False
) -> Reading:
    reading = Reading(consumer, place, reads_all)
    facts.readings.append(reading)
    if reads_all:
        facts.found.setdefault(place, set())
        facts.read_before.setdefault(place, set(facts.read.get(place, ())))
    return reading


def _resolve(facts: Facts, open_sends: dict[tuple[str, int], Send], event: Sent) -> None:
    send = open_sends.get((event.producer, event.number))
    if send is None:
        raise ValueError(f"an outcome for send {event.number} of {event.producer}, never sent.")
    send.outcome, send.partition, send.offset = event.outcome, event.partition, event.offset
    if event.outcome != "ok" or event.partition is None or event.offset is None:
        return
    if facts.promises_durability(send):
        witness = f"acknowledged to {event.producer}"
        facts.saw((send.topic, event.partition), event.offset, send.value, witness)


def _poll(facts: Facts, reading: Reading, event: Polled) -> None:
    reading.offsets.extend(event.offsets)
    facts.records_polled += len(event.offsets)
    facts.read.setdefault(reading.place, set()).update(event.offsets)
    if reading.reads_all:
        facts.found[reading.place].update(event.offsets)
    for offset, value in zip(event.offsets, event.values, strict=True):
        facts.saw(reading.place, offset, value, f"polled by {event.consumer}")
        facts.places_of.setdefault(value, set()).add((*reading.place, offset))
