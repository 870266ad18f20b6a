"""Groups under any order of events: joins, leaves, silence, late heartbeats, coordinators that die."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rayq import messages
from rayq.core.decision import Times
from rayq.core.groups import changes as group_changes
from rayq.core.groups.assignors import load_assignors
from rayq.core.groups.records import GroupRecord, MemberRecord, OffsetRecord, Record
from rayq.core.groups.state import GroupState, SubscribedTopic
from rayq.errors import FencedMemberError, GroupNotEmptyError, RayqError, UnknownMemberError
from rayq.messages import OffsetCommit
from tests.pure import all_groups, group_requests
from tests.pure.group_requests import heartbeat_of

GROUP = "g"
GRACE_MS = 1000
SESSION_MS = 10_000
MAX_POLL_MS = 60_000
CLIENTS_MAX = 5
ASSIGNORS = load_assignors(None)


def fresh(topics: dict[str, SubscribedTopic]) -> GroupState:
    state = GroupState(ASSIGNORS)
    all_groups.set_topics(state, topics, now_ms=0)
    return state


def compacted(records: list[Record], *, keep_tombstones: bool) -> list[Record]:
    """The latest record of each key, in the order of the log."""
    latest: dict[tuple[Any, ...], int] = {key_of(one): at for at, one in enumerate(records)}
    return [
        one
        for at, one in enumerate(records)
        if latest[key_of(one)] == at and (keep_tombstones or one.value is not None)
    ]


def key_of(record: Record) -> tuple[Any, ...]:
    return (type(record).__name__, *record[:-1])


@dataclass
class Reader:
    """A member as its own process sees it."""

    member: str
    instance: str | None
    topics: tuple[str, ...]
    epoch: int = 0
    assigned: frozenset[tuple[str, int]] = frozenset()
    owned: frozenset[tuple[str, int]] = frozenset()
    positions: dict[tuple[str, int], int] = field(default_factory=dict)
    sequence: int = 0
    is_connected: bool = True

    def begin_again(self) -> None:
        self.epoch = 0
        self.assigned = self.owned = frozenset()
        self.positions = {}


@dataclass
class Answer:
    """An answer, which is on its way until the records that it is based on are committed."""

    decided: int
    reader: Reader
    life: int
    epoch: int
    assigned: frozenset[tuple[str, int]]


class Groups(RuleBasedStateMachine):
    """Members and a coordinator whose log is committed bit by bit. A coordinator that dies leaves
    the committed records, and any part of the others; requests that were on their way to it are
    fenced."""

    def __init__(self) -> None:
        super().__init__()
        self.topics = {"t": SubscribedTopic("T", 3), "u": SubscribedTopic("U", 2)}
        self.state = fresh(self.topics)
        self.log: list[list[Record]] = []
        self.committed = 0
        self.readers: dict[str, Reader] = {}
        self.answers: list[Answer] = []
        self.late: list[tuple[str, Any]] = []
        self.now_s = 0.0
        self.names = 0
        self.life = 0
        self.committed_offsets: dict[tuple[str, int], int] = {}

    # --- the coordinator --------------------------------------------------------------------

    def append(self, records: list[Record]) -> None:
        if records:
            self.log.append(records)
            for record in records:
                self.state.replay(record)

    @property
    def now(self) -> dict[str, Any]:
        return {"now_s": self.now_s, "now_ms": int(self.now_s * 1000)}

    def commit_up_to(self, count: int) -> None:
        self.committed = max(self.committed, count)
        for answer in [one for one in self.answers if one.decided <= self.committed]:
            self.answers.remove(answer)
            self.deliver(answer)

    def deliver(self, answer: Answer) -> None:
        reader = answer.reader
        if self.readers.get(reader.member) is not reader or answer.epoch < reader.epoch:
            return
        reader.epoch, reader.assigned = answer.epoch, answer.assigned

    @rule(count=st.integers(1, 3))
    def some_is_committed(self, count: int) -> None:
        self.commit_up_to(min(len(self.log), self.committed + count))

    @rule(kept=st.integers(0, 3), cut=st.integers(0, 100), keep_tombstones=st.booleans())
    def the_coordinator_dies(self, kept: int, cut: int, keep_tombstones: bool) -> None:
        self.log = self.log[: self.committed + kept]
        self.commit_up_to(len(self.log))
        self.answers, self.late = [], []
        self.life += 1
        place = min(cut, len(self.log))
        clean = [one for records in self.log[:place] for one in records]
        self.state = fresh({})
        for record in compacted(clean, keep_tombstones=keep_tombstones):
            self.state.replay(record)
        for records in self.log[place:]:
            for record in records:
                self.state.replay(record)
        self.append(all_groups.set_topics(self.state, self.topics, now_ms=self.now["now_ms"]))

    @rule(seconds=st.sampled_from([0.1, 0.7, 4.0, 20.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.append(
            all_groups.end_sessions(self.state, disconnect_grace_ms=GRACE_MS, **self.now)
        )

    @rule(topic=st.sampled_from(["t", "u"]))
    def a_topic_grows(self, topic: str) -> None:
        info = self.topics[topic]
        if info.partitions < 6:
            self.topics = {**self.topics, topic: info._replace(partitions=info.partitions + 1)}
            self.append(all_groups.set_topics(self.state, self.topics, now_ms=self.now["now_ms"]))

    # --- the members ------------------------------------------------------------------------

    @precondition(lambda self: len(self.readers) < CLIENTS_MAX)
    @rule(topics=st.sampled_from([("t",), ("t", "u")]), instance=st.sampled_from([None, None, "i", "j"]))
    def a_member_starts(self, topics: tuple[str, ...], instance: str | None) -> None:
        self.names += 1
        name = f"m{self.names}"
        self.readers[name] = Reader(name, instance, topics)
        self.beat(name)

    def pick(self, which: int) -> str | None:
        names = sorted(self.readers)
        return names[which % len(names)] if names else None

    def beat_of(self, reader: Reader) -> messages.GroupHeartbeat:
        return heartbeat_of(
            reader.member, reader.epoch, reader.instance, "", reader.topics, None, "uniform",
            SESSION_MS, MAX_POLL_MS, reader.owned,
        )

    def beat(self, name: str) -> None:
        self.hear(self.beat_of(self.readers[name]))

    def hear(self, beat: messages.GroupHeartbeat) -> None:
        reader = self.readers.get(beat.member)
        try:
            records = group_changes.heartbeat(self.state, beat, Times(**self.now))
        except (UnknownMemberError, FencedMemberError):
            if reader is not None and beat.member_epoch == reader.epoch:
                reader.begin_again()
            return
        self.append(records)
        if reader is not None:
            value = self.state.groups[GROUP].members[beat.member]
            self.answers.append(
                Answer(len(self.log), reader, self.life, value.member_epoch, value.assigned)
            )

    @rule(which=st.integers(0, 9))
    def a_member_beats(self, which: int) -> None:
        if name := self.pick(which):
            self.beat(name)

    @rule(which=st.integers(0, 9), turns=st.integers(1, 3))
    def a_member_works(self, which: int, turns: int) -> None:
        """A member heartbeats, answers at once, obeys, reads, and commits."""
        if name := self.pick(which):
            for _ in range(turns):
                self.beat(name)
                self.obey(self.readers[name])
                self.read(self.readers[name], 1)

    @rule(turns=st.integers(1, 3))
    def all_members_work(self, turns: int) -> None:
        for which in range(len(self.readers)):
            self.a_member_works(which, turns)

    @rule(which=st.integers(0, 9))
    def a_heartbeat_is_held_up(self, which: int) -> None:
        name = self.pick(which)
        if name and len(self.late) < 4 and self.readers[name].epoch > 0:
            self.late.append(("beat", self.beat_of(self.readers[name])))

    @rule(which=st.integers(0, 9))
    def what_was_held_up_arrives(self, which: int) -> None:
        if self.late:
            kind, what = self.late.pop(which % len(self.late))
            if kind == "beat":
                self.hear(what)
            else:
                self.hear_commit(*what)

    @rule(which=st.integers(0, 9))
    def a_member_obeys(self, which: int) -> None:
        if name := self.pick(which):
            self.obey(self.readers[name])

    def obey(self, reader: Reader) -> None:
        """Gives up the partitions that it may own no more; takes the others at their committed
        positions."""
        self.commit_up_to(len(self.log))  # only committed positions are read
        for at in reader.assigned - reader.owned:
            offsets = self.state.groups[GROUP].offsets if GROUP in self.state.groups else {}
            found = offsets.get(at)
            reader.positions[at] = 0 if found is None else found.offset
        reader.owned = reader.assigned

    @rule(which=st.integers(0, 9), count=st.integers(1, 5), is_late=st.booleans())
    def a_member_reads_and_commits(self, which: int, count: int, is_late: bool) -> None:
        if name := self.pick(which):
            self.read(self.readers[name], count, is_late=is_late)

    def read(self, reader: Reader, count: int, *, is_late: bool = False) -> None:
        for at in reader.owned:
            reader.positions[at] += count
        reader.sequence += 1
        positions = {at: reader.positions[at] for at in sorted(reader.owned)}
        commit = (reader.member, reader.epoch, reader.sequence, positions)
        if is_late and len(self.late) < 4:
            self.late.append(("commit", commit))
        else:
            self.hear_commit(*commit)

    def hear_commit(
        self, member: str, epoch: int, sequence: int, positions: dict[tuple[str, int], int]
    ) -> None:
        offsets = [OffsetCommit(*at, offset, None, "") for at, offset in positions.items()]
        try:
            records, _ = group_requests.commit(
                self.state, GROUP, member=member, member_epoch=epoch, sequence=sequence,
                offsets=offsets, now_ms=self.now["now_ms"],
            )
        except RayqError as error:
            assert member or isinstance(error, GroupNotEmptyError)
            return
        self.append(list(records))

    @rule(which=st.integers(0, 9))
    def a_member_leaves(self, which: int) -> None:
        if name := self.pick(which):
            del self.readers[name]
            self.append(group_changes.leave(self.state, GROUP, name, "", now_ms=self.now["now_ms"]))

    @rule(which=st.integers(0, 9))
    def a_static_member_goes_away(self, which: int) -> None:
        name = self.pick(which)
        if name and self.readers[name].instance is not None:
            del self.readers[name]
            self.append(group_changes.leave_static(self.state, GROUP, name, **self.now))

    @rule(which=st.integers(0, 9), is_dead=st.booleans())
    def a_connection_breaks(self, which: int, is_dead: bool) -> None:
        if name := self.pick(which):
            group_changes.disconnected(self.state, GROUP, name, now_s=self.now_s)
            if is_dead:
                del self.readers[name]

    @rule(which=st.integers(0, 9))
    def a_member_subscribes_again(self, which: int) -> None:
        if name := self.pick(which):
            reader = self.readers[name]
            reader.topics = ("t",) if len(reader.topics) > 1 else ("t", "u")

    # --- in the end -------------------------------------------------------------------------

    @rule()
    def all_settles(self) -> None:
        """Where members do what they are told, every partition has one owner, in fair shares."""
        self.late = []
        newest: dict[str, str] = {}
        for name, reader in sorted(self.readers.items(), key=lambda pair: int(pair[0][1:])):
            if reader.instance is not None:
                if reader.instance in newest:
                    del self.readers[newest[reader.instance]]
                newest[reader.instance] = name
        for _ in range(6):
            self.now_s += SESSION_MS / 1000 * 0.9
            for name in sorted(self.readers):
                for _ in range(3):
                    self.beat(name)
                    self.commit_up_to(len(self.log))
                    self.obey(self.readers[name])
            self.append(
                all_groups.end_sessions(self.state, disconnect_grace_ms=GRACE_MS, **self.now)
            )
        self.commit_up_to(len(self.log))
        self.check_settled()

    def check_settled(self) -> None:
        group = self.state.groups.get(GROUP)
        if group is None or not self.readers:
            assert group is None or not group.members
            return
        assert set(group.members) == set(self.readers)
        assert group.name_of_state == "stable"
        owned = sorted(at for reader in self.readers.values() for at in reader.owned)
        read = {name for reader in self.readers.values() for name in reader.topics}
        assert owned == sorted(
            (self.topics[name].topic_id, number)
            for name in read
            for number in range(self.topics[name].partitions)
        )
        if len({reader.topics for reader in self.readers.values()}) == 1:
            loads = [len(reader.owned) for reader in self.readers.values()]
            assert max(loads) - min(loads) <= 1
        before = dataclasses.replace(self.readers[min(self.readers)])
        self.beat(before.member)
        assert self.readers[before.member] == before, "a stable group stays as it is"

    # --- always -----------------------------------------------------------------------------

    @invariant()
    def each_partition_has_one_owner(self) -> None:
        self.state.validate()

    @invariant()
    def whose_commits_count_is_alone(self) -> None:
        group = self.state.groups.get(GROUP)
        if group is None:
            return
        seen: set[tuple[str, int]] = set()
        for member, one in group.members.items():
            reader = self.readers.get(member)
            if reader is not None and reader.epoch in (one.member_epoch, one.previous_epoch):
                assert reader.owned <= one.owned, "it reads what may be another's"
                assert not reader.owned & seen
                seen |= reader.owned

    @invariant()
    def a_committed_offset_never_goes_back(self) -> None:
        for records in self.log[: self.committed]:
            for record in records:
                if isinstance(record, OffsetRecord) and record.value is not None:
                    at = (record.topic_id, record.partition)
                    assert record.value.offset >= self.committed_offsets.get(at, 0)
                    self.committed_offsets[at] = record.value.offset
        self.committed_offsets = {}

    @invariant()
    def the_log_alone_gives_the_state(self) -> None:
        replayed = GroupState(ASSIGNORS)
        for records in self.log:
            for record in records:
                assert isinstance(record, (GroupRecord, MemberRecord, OffsetRecord))
                replayed.replay(record)
        assert durable(replayed) == durable(self.state)

    @initialize()
    def begin(self) -> None:
        self.a_member_starts(("t",), None)


def durable(state: GroupState) -> Any:
    return {
        name: (group.value, group.members, group.offsets) for name, group in state.groups.items()
    }


TestGroups = pytest.mark.slow(Groups.TestCase)
TestGroups.settings = settings(max_examples=60, stateful_step_count=40)
