"""Faults of groups: a partition with two owners, records that no member dealt with or that came
again although they were committed, commits that went back.

A member that was taken out without knowing it may still read for a while: what it does until it
notices ("lost") or dies is not a fault, what it could still *commit* would be one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from rayq.testing.checker.facts import Facts, Fault, Place
from rayq.testing.checker.history import (
    Assigned,
    CommitsSeen,
    CommitsSet,
    Committed,
    Committing,
    GroupOpened,
    Killed,
    Polled,
    Released,
)

TWO_OWNERS = "two owners at once"
UNPROCESSED = "record a group left out"
REPEATED = "record polled again though committed"
WENT_BACK = "committed offset went back"

Where = tuple[str, Place]
"""A group and a partition."""


@dataclass(eq=False, slots=True)
class _Ownership:
    """One member owns one partition for some time."""

    consumer: str
    where: Where
    epoch: int | None
    committed: int
    """The offset that had been committed when it began: nothing below it may come again."""
    beside: list[_Ownership] = field(default_factory=list)
    """Other ownerships that had not ended when this one began."""
    how: str | None = None
    """The way in which it ended."""

    def __str__(self) -> str:
        end = "not ended" if self.how is None else self.how
        return f"{self.consumer} (epoch {self.epoch}, {end})"


class _Commit(NamedTuple):
    offset: int
    consumer: str
    at: int
    """The time of its acknowledgement, as a count of events."""


@dataclass
class GroupVerdict:
    faults: list[Fault] = field(default_factory=list)
    repeated: int = 0


def judge_groups(facts: Facts) -> GroupVerdict:
    """All faults of groups in a history that ended with everything read."""
    judge = _Judge(facts)
    judge.run()
    return judge.verdict


class _Judge:
    def __init__(self, facts: Facts) -> None:
        self.verdict = GroupVerdict()
        self._facts = facts
        self._topics_of: dict[str, list[str]] = {}
        self._owned: dict[tuple[str, Place], _Ownership] = {}
        """By consumer and partition: what it owns now."""
        self._ownerships: list[_Ownership] = []
        self._commits: dict[Where, _Commit] = {}
        self._under_way: dict[tuple[str, int], tuple[int, Committing]] = {}
        self._polled: dict[Where, set[int]] = {}
        self._in_hand: dict[str, list[tuple[Where, list[int]]]] = {}
        """By consumer: polled, and perhaps not yet dealt with."""
        self._processed: dict[Where, set[int]] = {}
        self._moved_on: dict[Where, int] = {}
        """Below this offset an operator decided what is left out."""
        self._killed: set[str] = set()
        self._now = 0

    def _fault(self, kind: str, what: str) -> None:
        self.verdict.faults.append(Fault(kind, what))

    def run(self) -> None:
        for event in self._facts.group_events:
            self._now += 1
            match event:
                case GroupOpened():
                    self._topics_of[event.group] = event.topics
                case Assigned():
                    self._assigned(event)
                case Polled():
                    self._poll(event)
                case Released():
                    self._dealt_with(event.consumer)
                    self._end(event.consumer, (event.topic, event.partition), event.how)
                case Killed():
                    self._killed.add(event.consumer)
                    for consumer, place in list(self._owned):
                        if consumer == event.consumer:
                            self._end(consumer, place, "killed")
                case Committing():
                    self._dealt_with(event.consumer)
                    self._under_way[event.consumer, event.number] = (self._now, event)
                case Committed():
                    self._committed(event)
                case CommitsSeen():
                    self._seen(event)
                case CommitsSet():
                    for topic, partition, offset in event.offsets:
                        where = (event.group, (topic, partition))
                        self._commits[where] = _Commit(offset, "somebody on purpose", self._now)
                        self._moved_on[where] = max(self._moved_on.get(where, 0), offset)
        for consumer in list(self._in_hand):
            if consumer not in self._killed:
                self._dealt_with(consumer)
        self._judge_owners()
        self._judge_left_out()

    # --- owners ---------------------------------------------------------------------------------

    def _assigned(self, event: Assigned) -> None:
        assert event.group is not None, "others are not among the events of groups"
        place = (event.topic, event.partition)
        where = (event.group, place)
        self._end(event.consumer, place, "begun again")
        commit = self._commits.get(where)
        ownership = _Ownership(
            event.consumer, where, event.epoch, 0 if commit is None else commit.offset
        )
        ownership.beside = [
            ownership for ownership in self._owned.values() if ownership.where == where
        ]
        self._owned[event.consumer, place] = ownership
        self._ownerships.append(ownership)

    def _end(self, consumer: str, place: Place, how: str) -> None:
        ownership = self._owned.pop((consumer, place), None)
        if ownership is not None:
            ownership.how = how

    def _judge_owners(self) -> None:
        for later in self._ownerships:
            for other in later.beside:
                # Order by epoch, not arrival: an assignment can arrive after it ended.
                is_late = (later.epoch or 0) < (other.epoch or 0)
                older, newer = (later, other) if is_late else (other, later)
                if older.how not in ("lost", "killed"):
                    self._fault(
                        TWO_OWNERS,
                        f"{_name(later.where)}: {newer} began while {older} owned it.",
                    )

    # --- records --------------------------------------------------------------------------------

    def _poll(self, event: Polled) -> None:
        place = (event.topic, event.partition)
        in_hand = self._in_hand.setdefault(event.consumer, [])
        if any(where[1] == place for where, _ in in_hand):  # a later poll: the one before is done
            self._dealt_with(event.consumer)
            in_hand = self._in_hand.setdefault(event.consumer, [])
        ownership = self._owned.get((event.consumer, place))
        if ownership is None:
            return  # read on after a kill was announced
        in_hand.append((ownership.where, event.offsets))
        polled = self._polled.setdefault(ownership.where, set())
        self.verdict.repeated += len(polled.intersection(event.offsets))
        again = [
            offset for offset in event.offsets if offset in polled and offset < ownership.committed
        ]
        if again:
            self._fault(
                REPEATED,
                f"{_name(ownership.where)}: {ownership} polled {len(again)} records from "
                f"{again[0]} on again, {ownership.committed} had been committed before.",
            )
        polled.update(event.offsets)

    def _dealt_with(self, consumer: str) -> None:
        for where, offsets in self._in_hand.pop(consumer, []):
            self._processed.setdefault(where, set()).update(offsets)

    def _judge_left_out(self) -> None:
        for group, topics in self._topics_of.items():
            for place, offsets in self._facts.log.items():
                if place[0] not in topics:
                    continue
                where = (group, place)
                first = self._moved_on.get(where, 0)
                done = self._processed.get(where, set())
                missing = sorted(
                    offset for offset in offsets if offset >= first and offset not in done
                )
                if missing:
                    self._fault(
                        UNPROCESSED,
                        f"{_name(where)}: {len(missing)} records were never dealt with, the first "
                        f"at {missing[0]}, the last at {missing[-1]}.",
                    )

    # --- commits --------------------------------------------------------------------------------

    def _committed(self, event: Committed) -> None:
        begun_at, commit = self._under_way.pop((event.consumer, event.number), (0, None))
        if commit is None or event.outcome != "ok":
            return
        for topic, partition, offset in commit.offsets:
            where = (commit.group, (topic, partition))
            before = self._commits.get(where)
            if (
                before is not None
                and offset < before.offset
                and before.consumer != event.consumer
                and before.at < begun_at
            ):
                self._fault(
                    WENT_BACK,
                    f"{_name(where)}: {event.consumer} committed {offset} after "
                    f"{before.consumer} had committed {before.offset}.",
                )
            self._commits[where] = _Commit(offset, event.consumer, self._now)

    def _seen(self, event: CommitsSeen) -> None:
        for topic, partition, offset in event.offsets:
            where = (event.group, (topic, partition))
            before = self._commits.get(where)
            if before is not None and (offset is None or offset < before.offset):
                self._fault(
                    WENT_BACK,
                    f"{_name(where)}: {event.consumer} found {offset} committed, but "
                    f"{before.consumer} had committed {before.offset}.",
                )


def _name(where: Where) -> str:
    group, (topic, partition) = where
    return f"group {group!r}, {topic}-{partition}"
