"""Faults of queues: a record that nobody settled, or that came again although it was done; one lock
given out twice, or while its holder still had time; keys out of order; delays cut short; dead
letters that are lost, or there twice.

It is judged by what consumers asked for and were told. A consumer whose answer is lost may hold a
lock that nobody knows of, and what it settled may be settled or not: what such a doubt could
explain is not a fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from rayq.testing.checker.facts import Facts, Fault
from rayq.testing.checker.history import (
    Begun,
    ClockInDoubt,
    Cut,
    Delayed,
    Disturbed,
    Found,
    KeeperInDoubt,
    Killed,
    Purged,
    QueueClosed,
    QueueOpened,
    Settled,
    Settling,
    Took,
)

LEFT_OUT = "record that a queue left out"
AGAIN = "record given out again though settled"
TWICE = "lock given out twice"
STOLEN = "record given to another while its lock held"
LOST_EARLY = "lock lost before its time"
EARLY = "delayed record given out early"
OUT_OF_ORDER = "records of a key out of order"
DEAD_TWICE = "dead letter twice, or of a settled record"
REDRIVEN_TWICE = "dead letter redriven twice"
UNSEEN = "dead letter for its deliveries that no consumer has seen"
FOREIGN = "record given out that is not in the topic"
PURGED = "record given out though purged"

DELIVERIES = "deliveries"
"""In the header `rayq.reason` of a dead letter that nobody rejected."""
EARLY_S = 0.25
"""A clock that leaps ahead for some seconds takes delays with it by so much at most."""

_Place = tuple[int, int]
"""A partition of the queue's topic, and an offset in it."""
_Spot = tuple[int, int, int]
"""The same; and for a loose queue the state epoch, since there may be another record in each."""


class _Lock(NamedTuple):
    """One delivery of a record to a consumer."""

    consumer: str
    state_epoch: int | None
    number: int
    asked_s: float
    at_s: float

    @property
    def name(self) -> tuple[int | None, int]:
        return self.state_epoch, self.number

    def is_after(self, other: tuple[int | None, int]) -> bool:
        """Returns whether it was given out after the lock of this state epoch and count."""
        epoch, count = other
        if epoch is None or self.state_epoch is None or epoch == self.state_epoch:
            return self.number > count
        return self.state_epoch > epoch


@dataclass(slots=True)
class _Record:
    """The history of one record of one queue."""

    value: str
    key: str | None
    locks: list[_Lock] = field(default_factory=list)
    last: _Lock | None = None
    given_up: bool = False
    """True if its holder has asked to settle it."""
    ends_s: float = 0.0
    """The time until which the last lock holds at least."""
    asks: int = 0
    """The number of times that a consumer has asked to acknowledge it, and was not told that its
    lock had gone."""
    rejected: bool = False
    """True if any consumer has asked to reject it."""
    not_before_s: float = 0.0
    """The end of the delay that a nack asked for."""
    nacked: set[str] = field(default_factory=set)
    """The consumers that know that their nack or reject was heard."""
    acked: tuple[int | None, int] | None = None
    """The state epoch and count of the lock under which it was acknowledged, for sure."""
    acked_s: float = 0.0
    """The time at which that was heard."""
    acked_in_time: bool = False
    """True if that was heard while the lock held for sure. Who acknowledges later is told so too
    where the record is done with by then, perhaps as a dead letter."""


def check_queues(facts: Facts) -> Iterator[Fault]:
    """All faults of queues in a history that ended with every queue settled and every topic of a
    queue read to its end."""
    queues = {
        event.queue: _Queue(event) for event in facts.queue_events if isinstance(event, QueueOpened)
    }
    if not queues:
        return
    dead = _dead_letters(facts)
    for queue in queues.values():
        queue.dead = dead.get(queue.opened.dead_letters or "", Counter())
    due_s: dict[str, float] = {}
    doubts = 0
    for event in facts.queue_events:
        match event:
            case Delayed():
                if not doubts:
                    due_s[event.value] = event.due_s
            case ClockInDoubt():
                doubts += -1 if event.is_over else 1
                due_s.clear()
                for queue in queues.values():
                    queue.doubt_delays(goes_on=doubts > 0)
            case Took():
                yield from queues[event.queue].take(event, due_s)
            case Settling():
                queues[event.queue].settle(event)
            case Settled():
                for queue in queues.values():
                    yield from queue.end(event)
            case QueueClosed():
                queues[event.queue].is_closed = True
            case Purged():
                queues[event.queue].purge(event)
            case Cut():
                for queue in queues.values():
                    queue.cut(event)
            case KeeperInDoubt():
                for queue in queues.values():
                    queue.doubt_keeper()
            case Killed():
                for queue in queues.values():
                    queue.disturb(event.consumer)
            case Disturbed():
                for queue in queues.values():
                    queue.disturb(event.consumer, event.at_s)
            case _:
                pass
    yield from _judge_unseen(facts)
    for queue in queues.values():
        lives, puts = _lives(facts, queue.opened), _puts(facts, queue.opened.topic)
        if queue.opened.is_loose:
            yield from queue.judge_loosely(lives, puts)
        else:
            yield from queue.judge(lives, puts)


def _judge_unseen(facts: Facts) -> Iterator[Fault]:
    """Checks that records which consumers had locked, and none of them began, have no deliveries
    that count."""
    topics = {
        event.queue: event.dead_letters
        for event in facts.queue_events
        if isinstance(event, QueueOpened)
    }
    seen: dict[str, set[str]] = {topic: set() for topic in topics.values() if topic is not None}
    for event in facts.queue_events:
        if isinstance(event, Took | Begun):
            values = event.values if isinstance(event, Begun) else [lock[2] for lock in event.locks]
            seen.setdefault(topics[event.queue] or "", set()).update(values)
    for event in facts.queue_events:
        if isinstance(event, Found) and event.topic in seen:
            for value, reason in zip(event.values, event.reasons, strict=False):
                if reason == DELIVERIES and value not in seen[event.topic]:
                    yield Fault(UNSEEN, f"{value!r} in {event.topic!r}.")


def _dead_letters(facts: Facts) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for event in facts.queue_events:
        if isinstance(event, Found):
            found.setdefault(event.topic, Counter()).update(event.values)
    return found


def _lives(facts: Facts, opened: QueueOpened) -> dict[_Place, str]:
    """The value at each offset of a queue's topic."""
    if opened.is_own:
        return {
            (event.partition, offset): value
            for event in facts.queue_events
            if isinstance(event, Found) and event.topic == opened.topic
            for offset, value in zip(event.offsets, event.values, strict=True)
        }
    return {
        (partition, offset): next(iter(values))
        for (topic, partition), offsets in facts.log.items()
        if topic == opened.topic
        for offset, values in offsets.items()
    }


def _puts(facts: Facts, topic: str) -> Iterable[str]:
    """The values that a topic has to hold."""
    return [
        send.value
        for send in (*facts.sends, *facts.queue_sends)
        if send.topic == topic and send.outcome == "ok"
    ]


class _Queue:
    """One queue, while its history goes by."""

    def __init__(self, opened: QueueOpened) -> None:
        self.opened = opened
        self.dead: Counter[str] = Counter()
        """The number of times that each value stands among its dead letters in the end."""
        self._held: dict[str, set[_Spot]] = {}
        """By consumer: the records whose last lock it has, as far as it lasts for sure."""
        self._disturbed_s: dict[str | None, float] = {}
        """By consumer, None for all: when one of its connections may last have broken."""
        self._are_delays_sure = True
        self._records: dict[_Spot, _Record] = {}
        self._of_key: dict[tuple[int, str], list[int]] = {}
        """The offsets of each key in a partition, as they were first seen."""
        self._under_way: dict[tuple[str, int], Settling] = {}
        self.is_closed = False
        """True if it was deleted."""
        self._purged: dict[int, tuple[int, float]] = {}
        """By partition: the last purge that was answered, and when that was heard."""
        self._perhaps_purged: dict[int, int] = {}
        self._cuts: dict[int, int] = {}
        self._is_doubted = False
        """True if its keeper may have lost what was settled."""

    def _spot(self, partition: int, offset: int, state_epoch: int | None) -> _Spot:
        epoch = state_epoch if self.opened.is_loose else None
        return partition, offset, epoch or 0

    def _name(self, spot: _Place | _Spot) -> str:
        return f"{self.opened.queue!r}: {self.opened.topic}-{spot[0]}@{spot[1]}"

    # --- deliveries -------------------------------------------------------------------------------

    def take(self, event: Took, due_s: dict[str, float]) -> Iterator[Fault]:
        for offset, count, value, key in event.locks:
            spot = self._spot(event.partition, offset, event.state_epoch)
            lock = _Lock(event.consumer, event.state_epoch, count, event.asked_s, event.at_s)
            known = self._records.get(spot)
            if known is None:
                known = self._records[spot] = _Record(value, key)
                if key is not None:
                    self._of_key.setdefault((event.partition, key), []).append(offset)
            yield from self._judge_lock(spot, known, lock)
            due = max(due_s.get(value, 0.0), known.not_before_s)
            early_s = due - event.at_s
            if early_s > EARLY_S:
                yield Fault(EARLY, f"{self._name(spot)} {value!r}: {early_s:.3f} s too early.")
            known.locks.append(lock)
            if known.last is None or lock.is_after(known.last.name):
                known.last, known.given_up = lock, False
                known.ends_s = event.asked_s + self.opened.timeout_s
                if not self._is_doubted and not self._was_disturbed_since(event):
                    self._held.setdefault(event.consumer, set()).add(spot)
        if self.opened.ordered_by_key:
            for offset, count, _, key in event.locks:
                yield from self._judge_order(event, offset, count, key)

    def _judge_lock(self, spot: _Spot, known: _Record, lock: _Lock) -> Iterator[Fault]:
        name = self._name(spot)
        is_sure = known.acked_in_time or lock.asked_s >= known.acked_s
        if known.acked is not None and is_sure and lock.is_after(known.acked):
            yield Fault(
                AGAIN,
                f"{name} {known.value!r} was acknowledged under count {known.acked[1]} (state "
                f"epoch {known.acked[0]}), and {lock.consumer} got it with count {lock.number} "
                f"(state epoch {lock.state_epoch}).",
            )
        purged, purged_at_s = self._purged.get(spot[0], (0, 0.0))
        if lock.number == 1 and spot[1] < purged and lock.asked_s > purged_at_s:
            yield Fault(PURGED, f"{name}: all below {purged} was settled at {purged_at_s:.3f}.")
        for other in known.locks:
            if other.name == lock.name and not self._is_doubted:
                yield Fault(
                    TWICE,
                    f"{name} {known.value!r}, state epoch {lock.state_epoch}, count {lock.number}: "
                    f"{other.consumer} got it at {other.at_s:.3f}, {lock.consumer} at "
                    f"{lock.at_s:.3f}.",
                )
        last = known.last
        if last is None or self.opened.ordered_by_key:
            return  # Where keys are in order, the end of one lock ends others.
        is_held = self._is_held(spot, last.consumer) and not known.given_up
        if lock.at_s < known.ends_s and is_held and lock.is_after(last.name):
            yield Fault(
                STOLEN,
                f"{name} {known.value!r}: {last.consumer} holds it with count {last.number} until "
                f"{known.ends_s:.3f} at least, {lock.consumer} got it with count {lock.number} at "
                f"{lock.at_s:.3f}.",
            )

    def _judge_order(
        self, event: Took, offset: int, count: int, key: str | None
    ) -> Iterator[Fault]:
        """A record may be given out where every earlier one of its key is done with, or is held by
        the same consumer."""
        if key is None:
            return
        for earlier in self._of_key[event.partition, key]:
            spot = self._spot(event.partition, earlier, None)
            known = self._records[spot]
            if earlier >= offset or known.asks or known.rejected or self.dead[known.value]:
                continue
            before = [lock for lock in known.locks if lock.at_s <= event.asked_s]
            is_held = any(
                lock.consumer == event.consumer for lock in known.locks if lock.at_s > event.asked_s
            ) or (
                bool(before)
                and before[-1].consumer == event.consumer
                and event.consumer not in known.nacked
            )
            if not is_held:
                yield Fault(
                    OUT_OF_ORDER,
                    f"{self._name((event.partition, offset))} went to {event.consumer} (count "
                    f"{count}) at {event.at_s:.3f}, before offset {earlier} of the same key "
                    f"{key!r} was settled, which it does not hold.",
                )

    # --- settling ---------------------------------------------------------------------------------

    def settle(self, event: Settling) -> None:
        self._under_way[event.consumer, event.number] = event
        for offset, _ in event.locks:
            known = self._records.get(self._spot(event.partition, offset, event.state_epoch))
            if known is None:
                continue
            if event.what == "ack":
                known.asks += 1
            if event.what == "reject":
                known.rejected = True
            if event.what != "extend" and known.last is not None:
                known.given_up |= known.last.consumer == event.consumer

    def doubt_delays(self, *, goes_on: bool) -> None:
        self._are_delays_sure = not goes_on
        for known in self._records.values():
            known.not_before_s = 0.0

    def _is_held(self, spot: _Spot, consumer: str) -> bool:
        return spot in self._held.get(consumer, ())

    def _was_disturbed_since(self, take: Took) -> bool:
        """Returns whether the connection may have broken that the take was answered over."""
        found = (self._disturbed_s.get(scope, 0.0) for scope in (take.consumer, None))
        return max(found) > take.asked_s

    def disturb(self, consumer: str | None, at_s: float = 0.0) -> None:
        """None: of all consumers."""
        self._disturbed_s[consumer] = max(at_s, self._disturbed_s.get(consumer, 0.0))
        if consumer is None:
            self._held.clear()
        else:
            self._held.pop(consumer, None)

    def doubt_keeper(self) -> None:
        self._is_doubted = True
        self._held.clear()
        for known in self._records.values():
            known.acked, known.acked_in_time = None, False
            known.not_before_s = 0.0
            known.nacked.clear()

    def purge(self, event: Purged) -> None:
        if event.is_sure:
            self._purged[event.partition] = event.offset, event.at_s
        before = self._perhaps_purged.get(event.partition, 0)
        self._perhaps_purged[event.partition] = max(before, event.offset)

    def cut(self, event: Cut) -> None:
        if event.topic == self.opened.topic:
            self._cuts[event.partition] = event.offset

    def end(self, event: Settled) -> Iterator[Fault]:
        asked = self._under_way.pop((event.consumer, event.number), None)
        if asked is None or event.outcome != "ok":
            return
        lost = set(event.lost)
        for offset, count in asked.locks:
            spot = self._spot(asked.partition, offset, asked.state_epoch)
            known = self._records.get(spot)
            if known is None:
                continue
            is_in_time = (
                known.last is not None
                and known.last.number == count
                and event.at_s < known.ends_s
                and self._is_held(spot, asked.consumer)
            )
            if offset in lost:
                known.asks -= asked.what == "ack"
                # A nack that is repeated, as its first answer was lost, may find the record with
                # the next consumer: it was the nack that freed it.
                is_freed = asked.what in ("nack", "release") or self.opened.ordered_by_key
                if is_in_time and not is_freed:
                    yield Fault(
                        LOST_EARLY,
                        f"{self._name(spot)} {known.value!r}: {asked.consumer} holds it with count "
                        f"{count} until {known.ends_s:.3f} at least, and was refused at "
                        f"{event.at_s:.3f} ({asked.what}).",
                    )
                continue
            if self._is_doubted:
                continue
            if asked.what == "ack":
                known.acked_in_time |= is_in_time
                if known.acked is None:
                    known.acked, known.acked_s = (asked.state_epoch, count), event.at_s
                yield from self._judge_handled(asked, offset, known)
            elif asked.what == "extend":
                # Of an extension beyond the queue's timeout another leader knows nothing.
                if asked.seconds is not None and is_in_time:
                    sure_s = min(asked.seconds, self.opened.timeout_s)
                    known.ends_s = max(known.ends_s, asked.at_s + sure_s)
            else:
                known.nacked.add(asked.consumer)
                is_delayed = asked.what == "nack" and asked.seconds is not None
                if is_delayed and is_in_time and self._are_delays_sure:
                    known.not_before_s = asked.at_s + (asked.seconds or 0.0)

    def _judge_handled(self, asked: Settling, offset: int, known: _Record) -> Iterator[Fault]:
        """Consumers acknowledge the records of a key in order."""
        # A keeper that lost a nack takes the later records of its key for locked still.
        if not self.opened.ordered_by_key or known.key is None or self._is_doubted:
            return
        for earlier in self._of_key[asked.partition, known.key]:
            other = self._records[self._spot(asked.partition, earlier, None)]
            if earlier < offset and not (
                other.asks or other.rejected or self.dead[other.value]
            ):
                yield Fault(
                    OUT_OF_ORDER,
                    f"{self._name((asked.partition, offset))} was settled by {asked.consumer} "
                    f"before offset {earlier} of the same key {known.key!r}.",
                )

    # --- the end ----------------------------------------------------------------------------------

    def judge(self, lives: dict[_Place, str], puts: Iterable[str]) -> Iterator[Fault]:
        """`lives` are the records that stand in the topic, `puts` those that have to."""
        for spot, known in self._records.items():
            if lives.get(spot[:2]) != known.value:
                yield Fault(
                    FOREIGN,
                    f"{self._name(spot)}: {known.value!r}, but there is {lives.get(spot[:2])!r}.",
                )
        stands: dict[str, list[_Place]] = {}
        for place, value in lives.items():
            stands.setdefault(value, []).append(place)
        for value in puts:
            if value not in stands:
                yield Fault(LEFT_OUT, f"{self.opened.queue!r}: {value!r} is not in its topic.")
        for value, spots in stands.items():
            yield from self._judge_value(value, spots)

    def _judge_value(self, value: str, spots: list[_Place]) -> Iterator[Fault]:
        known = [self._records.get(self._spot(*spot, None)) for spot in spots]
        dead = self.dead[value]
        where = f"{self.opened.queue!r}: {value!r} at {_spots(spots)}"
        unasked = sum(record is None or not record.asks for record in known)
        acked = sum(record is not None and record.acked_in_time for record in known)
        if unasked > dead and self.opened.dead_letters is not None:
            yield Fault(LEFT_OUT, f"{where} was never acknowledged; {dead} dead letters of it.")
        if self._is_doubted:
            return  # What was moved may be moved again.
        if dead > len(spots) - acked:
            yield Fault(
                DEAD_TWICE, f"{where} was acknowledged {acked} times; {dead} dead letters of it."
            )
        if self.opened.is_own and len(spots) > 1 + dead:
            yield Fault(REDRIVEN_TWICE, f"{where}; {dead} dead letters of it.")

    def judge_loosely(
        self, lives: dict[_Place, str], puts: Iterable[str]
    ) -> Iterator[Fault]:
        """Each record that is still there was handled in some state epoch; and what was settled
        below all cuts has not come again in a later one."""
        handled: set[tuple[int, int, str]] = set()
        by_place: dict[_Place, list[tuple[int, _Record]]] = {}
        for (partition, offset, epoch), known in self._records.items():
            if known.asks:
                handled.add((partition, offset, known.value))
            by_place.setdefault((partition, offset), []).append((epoch, known))
        for (partition, offset), value in lives.items():
            is_purged = offset < self._perhaps_purged.get(partition, 0)
            is_handled = (partition, offset, value) in handled or self.dead[value] > 0
            if not (is_handled or is_purged or self.is_closed):
                yield Fault(
                    LEFT_OUT,
                    f"{self.opened.queue!r}: {value!r} at {partition}@{offset} was never "
                    "acknowledged, and is not a dead letter.",
                )
        if self.opened.holds:
            values = {value for _, _, value in handled}
            for value in puts:
                if value not in values and not self.dead[value]:
                    yield Fault(LEFT_OUT, f"{self.opened.queue!r}: {value!r} was never handled.")
        for (partition, offset), found in by_place.items():
            if offset >= self._cuts.get(partition, 0):
                continue
            for epoch, known in found:
                for later, other in found:
                    again = [lock for lock in other.locks if lock.asked_s >= known.acked_s]
                    if known.acked is not None and later > epoch and again:
                        yield Fault(
                            AGAIN,
                            f"{self.opened.queue!r}: {known.value!r} at {partition}@{offset} was "
                            f"acknowledged in state epoch {epoch}, and {again[0].consumer} got it "
                            f"in {later}; nothing below {self._cuts[partition]} was cut off.",
                        )


def _spots(spots: list[_Place]) -> str:
    return ", ".join(f"{partition}@{offset}" for partition, offset in sorted(spots))
