"""A coordinator of groups alone: its members, their heartbeats and sessions, and the topics."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Collection
from typing import Any

import msgspec
import pytest

from rayq import messages
from rayq.actors.coordinator import LOADING_WAIT_S
from rayq.actors.groups.group_coordinator import (
    OFFSETS_CHECK_INTERVAL_S,
    TICK_S,
    TOPICS_INTERVAL_S,
    TOPICS_WAIT_MS,
    GroupCoordinator,
)
from rayq.errors import (
    ControllerUnavailableError,
    CoordinatorLoadingError,
    FencedMemberError,
    InvalidRequestError,
    NotEnoughReplicasError,
    NotLeaderError,
    UnknownGroupError,
    UnknownMemberError,
)
from rayq.messages import TopicPartitionId
from tests.simulated.coordinator_stage import now_s
from tests.simulated.group_stage import Groups, coordinating

LEAVE, LEAVE_STATIC = messages.MEMBER_EPOCH_LEAVE, messages.MEMBER_EPOCH_LEAVE_STATIC
GRACE_S = 1.0
"""Of a member whose connection broke."""


def partitions(*numbers: int) -> list[TopicPartitionId]:
    return [TopicPartitionId("t", "T", one) for one in numbers]


async def joined(of: Groups, *members: str) -> dict[str, int]:
    """The epochs of these members, once each has its part of the two partitions."""
    epochs = dict.fromkeys(members, 0)
    owned: dict[str, list[int]] = {one: [] for one in members}
    for _ in range(4):
        for member in members:
            answer = await of.heartbeat(member, *owned[member], epoch=epochs[member])
            epochs[member] = answer.member_epoch
            owned[member] = [one.partition for one in answer.assigned]
    return epochs


# --- heartbeats -----------------------------------------------------------------------------------


def test_members_share_the_partitions_and_are_described() -> None:
    async def work(of: Groups) -> None:
        answer = await of.heartbeat("a")
        assert answer == messages.GroupHeartbeatResponse(1, partitions(0, 1))
        assert await of.heartbeat("a", 0, 1, epoch=1) == answer
        assert await of.heartbeat("b", instance="i") == messages.GroupHeartbeatResponse(2, [])
        described = await of.describe()
        (kept,) = (await of.heartbeat("a", 0, 1, epoch=1)).assigned
        (moved,) = {0, 1} - {kept.partition}
        at = described.rebalance_time_ms
        member = messages.GroupMemberDescription
        assert described == messages.DescribeGroupResponse(
            group="g",
            state="rebalancing",
            epoch=2,
            assignor="uniform",
            members=[
                member("a", None, "a test", 2, [kept], partitions(moved)),
                member("b", "i", "a test", 2, [], []),
            ],
            offsets=[],
            rebalance_reason="member b (a test) joined",
            rebalance_time_ms=at,
        )
        assert abs(at - of.environment.clock.wall_ms()) < 1_000
        assert await of.heartbeat("a", kept.partition, epoch=2) == (
            messages.GroupHeartbeatResponse(2, [kept])
        )
        answer = await of.heartbeat("b", epoch=2, instance="i")
        assert answer == messages.GroupHeartbeatResponse(3, partitions(moved))
        described = await of.describe()
        assert described.state == "stable"
        assert [(one.assigned, one.revoking) for one in described.members] == [
            ([kept], []),
            (partitions(moved), []),
        ]
        assert await of.list_groups() == [messages.GroupSummary("g", "stable", 2)]
        assert of.measured("rayq_consumergroup_members") == {"g": 2}
        assert of.measured("rayq_consumergroup_rebalances_total") == {"g": 2}

    coordinating(work)


def test_a_heartbeat_is_held_for_its_time_and_half_a_session_at_most() -> None:
    async def work(of: Groups) -> None:
        await joined(of, "a")
        for wait_ms, session_ms, held_s in (
            (700, 45_000, 0.7),
            (9_000, 3_000, 1.5),
            (0, 45_000, 0),
        ):
            began_s = now_s()
            epoch = await of.beat("a", 0, 1, epoch=1, wait_ms=wait_ms, session_ms=session_ms)
            assert epoch == 1 and now_s() - began_s == pytest.approx(held_s, abs=0.05)

    coordinating(work)


def test_a_held_heartbeat_hears_of_news_at_once() -> None:
    async def work(of: Groups) -> None:
        await joined(of, "a")
        held = asyncio.ensure_future(of.heartbeat("a", 0, 1, epoch=1, wait_ms=20_000))
        await asyncio.sleep(1)
        assert not held.done()
        began_s = now_s()
        await of.beat("b")
        answer = await held
        assert answer.member_epoch == 2 and len(answer.assigned) == 1
        assert now_s() - began_s < 0.1
        assert of.coordinator._held == of.coordinator._latest == {}

    coordinating(work)


def test_only_the_newest_heartbeat_is_held() -> None:
    async def work(of: Groups) -> None:
        await joined(of, "a")
        held = []
        for _ in range(3):
            held.append(asyncio.ensure_future(of.beat("a", 0, 1, epoch=1, wait_ms=20_000)))
            await asyncio.sleep(0.1)
            assert [one.done() for one in held] == [True] * (len(held) - 1) + [False]
        assert await asyncio.gather(*held[:2]) == [1, 1]
        await of.beat("b")
        assert await held[2] == 2

    coordinating(work)


def test_the_heartbeats_of_other_members_and_groups_answer_none() -> None:
    async def work(of: Groups) -> None:
        epochs = await joined(of, "a", "b")
        owned = {one.member: one.assigned[0].partition for one in (await of.describe()).members}
        held = asyncio.ensure_future(of.beat("a", owned["a"], epoch=epochs["a"], wait_ms=20_000))
        await asyncio.sleep(0.1)
        await of.beat("b", owned["b"], epoch=epochs["b"])
        await of.beat("a", group="h")
        await of.set_offsets(3, 0, group="i")
        await asyncio.sleep(1)
        assert not held.done()
        await of.beat("b", epoch=LEAVE)
        assert await held > epochs["a"]

    coordinating(work)


def test_a_member_that_leaves_is_gone_for_all() -> None:
    async def work(of: Groups) -> None:
        epochs = await joined(of, "a", "b")
        held = asyncio.ensure_future(of.beat("a", epoch=epochs["a"], wait_ms=20_000))
        await asyncio.sleep(0.1)
        answer = await of.heartbeat("a", epoch=LEAVE, reason="it was enough")
        assert answer == messages.GroupHeartbeatResponse(0, [])
        with pytest.raises(UnknownMemberError):
            await asyncio.wait_for(held, 1)
        described = await of.describe()
        assert described.rebalance_reason == "member a (a test) left: it was enough"
        assert [one.member for one in described.members] == ["b"]
        assert await of.heartbeat("a", epoch=LEAVE) == answer, "it has left"
        await of.beat("b", epoch=LEAVE)
        assert await of.list_groups() == [messages.GroupSummary("g", "empty", 0)]

    coordinating(work)


def test_a_static_member_may_come_back_for_a_session() -> None:
    async def work(of: Groups) -> None:
        epoch = await of.beat("a", instance="i", session_ms=2_000)
        await of.beat("a", 0, 1, epoch=epoch, instance="i", session_ms=2_000)
        held = asyncio.ensure_future(
            of.beat("a", 0, 1, epoch=epoch, instance="i", session_ms=2_000, wait_ms=900)
        )
        await asyncio.sleep(0.1)
        answer = await of.heartbeat("a", epoch=LEAVE_STATIC, instance="i")
        assert answer == messages.GroupHeartbeatResponse(0, [])
        await held
        await asyncio.sleep(0.9)
        assert await of.members() == ["a"]
        answer = await of.heartbeat("b", instance="i", session_ms=2_000)
        assert answer.assigned == partitions(0, 1) and await of.members() == ["b"]
        with pytest.raises(FencedMemberError):
            await of.beat("a", epoch=epoch, instance="i")
        await of.beat("b", epoch=LEAVE_STATIC, instance="i")
        await asyncio.sleep(2.5)
        assert await of.members() == []

    coordinating(work)


# --- sessions -------------------------------------------------------------------------------------


def test_a_silent_member_is_out_when_its_session_ends() -> None:
    async def work(of: Groups) -> None:
        epoch = await of.beat("a", session_ms=2_000)
        await asyncio.sleep(1.5)
        await of.beat("a", 0, 1, epoch=epoch, session_ms=2_000)
        await asyncio.sleep(1.9)
        assert await of.members() == ["a"]
        await asyncio.sleep(0.1 + 2 * TICK_S)
        assert await of.members() == []
        with pytest.raises(UnknownMemberError):
            await of.beat("a", 0, 1, epoch=epoch, session_ms=2_000)

    coordinating(work)


def test_time_in_which_no_member_could_be_heard_ends_no_session() -> None:
    async def work(of: Groups) -> None:
        await of.beat("a", session_ms=2_000)
        await asyncio.sleep(1)
        for begin, end in ((of.is_starved, of.commits), (of.lose, of.regain)):
            begin()
            await asyncio.sleep(20)
            end()
            await asyncio.sleep(TICK_S)
        assert await of.members() == ["a"]
        of.pause(20)
        await asyncio.sleep(0.5)  # It takes as long as the pause.
        await asyncio.sleep(0.4)
        assert await of.members() == ["a"]
        await asyncio.sleep(0.8)
        assert await of.members() == []

    coordinating(work)


def test_a_busy_process_gives_no_member_more_time() -> None:
    async def work(of: Groups) -> None:
        await of.beat("a", session_ms=5_000)
        await of.is_busy(4.8)
        assert await of.members() == ["a"]
        await of.is_busy(0.5)
        assert await of.members() == []

    coordinating(work)


def test_a_new_coordinator_gives_each_member_a_whole_session() -> None:
    async def work(of: Groups) -> None:
        await of.beat("a", session_ms=2_000)
        await asyncio.sleep(1.5)
        of.coordinator.end("a test")
        await asyncio.sleep(10)
        of.begin()
        await asyncio.sleep(1.9)
        assert await of.members() == ["a"]
        assert (await of.heartbeat("a", 0, 1, epoch=1, session_ms=2_000)).member_epoch == 1
        await asyncio.sleep(1.9)
        assert await of.members() == ["a"]
        await asyncio.sleep(0.5)
        assert await of.members() == []

    coordinating(work)


def test_members_that_come_and_go_over_one_connection_leave_nothing() -> None:
    async def work(of: Groups) -> None:
        peer = of.connection()
        tables = {name for name, kept in vars(of.coordinator).items() if isinstance(kept, dict)}
        for number in range(5):
            await of.beat(f"member-{number}", peer=peer)
            await of.beat(f"member-{number}", epoch=LEAVE, peer=peer)
            callbacks = len(peer.closed._callbacks)
            sizes = {name: len(getattr(of.coordinator, name)) for name in tables}
            if number == 0:
                before = callbacks, sizes
            assert (callbacks, sizes) == before
        peer.closed.set_result(None)
        await asyncio.sleep(0)
        assert of.coordinator._watched == {}

    coordinating(work)


def test_a_broken_connection_ends_the_session_of_those_who_do_not_come_back() -> None:
    async def work(of: Groups) -> None:
        broken, sound = of.connection(), of.connection()
        await of.beat("gone", peer=broken)
        await of.beat("back", peer=broken)
        await of.beat("static", peer=broken, instance="i")
        epoch = await of.beat("moved", peer=broken)
        await of.beat("moved", epoch=epoch, peer=sound)
        await of.beat("left", peer=broken)
        await of.beat("left", epoch=LEAVE, peer=broken)
        assert ("g", "left") not in of.coordinator._connections, "nothing is left of it"
        broken.closed.set_result(None)
        await asyncio.sleep(GRACE_S / 2)
        epoch = (await of.describe()).members[0].member_epoch
        await of.beat("back", epoch=epoch, peer=sound)
        assert len(await of.members()) == 4
        await asyncio.sleep(GRACE_S / 2 + 2 * TICK_S)
        described = await of.describe()
        assert [one.member for one in described.members] == ["ba", "mo", "sta"]
        assert "member go (a test) is gone: its connection broke" in described.rebalance_reason
        sound.closed.set_result(None)
        await asyncio.sleep(GRACE_S + 2 * TICK_S)
        assert await of.members() == ["sta"]
        assert of.coordinator._connections == {}

    coordinating(work)


def test_the_end_of_a_connection_looks_at_no_member_of_another_one() -> None:
    """Thousands may end at once, each beside the members of all others."""

    async def work(of: Groups) -> None:
        class Noted(dict[Any, Any]):
            def items(self) -> Any:
                raise AssertionError("all members are looked at")

            __iter__ = values = items

        broken, sound = of.connection(), of.connection()
        await of.beat("a", peer=broken)
        epoch = await of.beat("b", peer=broken)
        await of.beat("b", epoch=epoch, peer=sound)
        await of.beat("c", peer=broken)
        await of.beat("c", epoch=LEAVE, peer=broken)
        coordinator = of.coordinator
        coordinator._connections = Noted(coordinator._connections)
        broken.closed.set_result(None)
        await asyncio.sleep(GRACE_S + 2 * TICK_S)
        assert await of.members() == ["b"]
        assert list(coordinator._watched.values()) == [{("g", "b"): None}]

    coordinating(work)


def test_connections_of_an_earlier_state_mean_nothing() -> None:
    async def work(of: Groups) -> None:
        first, second = of.connection(), of.connection()
        await of.beat("a", peer=first)
        await of.beat("b", peer=second)
        of.refuse_appends(NotEnoughReplicasError("refused"))
        with pytest.raises(NotEnoughReplicasError):
            await of.set_offsets(1, 0, group="h")
        of.refuse_appends(None)
        first.closed.set_result(None)
        await asyncio.sleep(GRACE_S + 3 * TICK_S)
        assert await of.members() == ["a", "b"], "each has a whole session"
        for member in (await of.describe()).members:
            await of.beat(member.member, epoch=member.member_epoch, peer=second)
        second.closed.set_result(None)
        await asyncio.sleep(GRACE_S + 3 * TICK_S)
        assert await of.members() == []

    coordinating(work)


# --- beginning again ------------------------------------------------------------------------------


def test_held_heartbeats_end_when_the_state_is_dropped() -> None:
    async def work(of: Groups) -> None:
        await joined(of, "a")
        held = asyncio.ensure_future(of.beat("a", 0, 1, epoch=1, wait_ms=20_000))
        await asyncio.sleep(0.1)
        of.refuse_appends(NotEnoughReplicasError("refused"))
        with pytest.raises(NotEnoughReplicasError):
            await of.set_offsets(1, 0, group="h")
        with pytest.raises(CoordinatorLoadingError, match="starts over"):
            await asyncio.wait_for(held, 0.1)
        of.refuse_appends(None)
        await asyncio.sleep(0.5)
        assert await of.heartbeat("a", 0, 1, epoch=1) == (
            messages.GroupHeartbeatResponse(1, partitions(0, 1))
        )
        held = asyncio.ensure_future(of.beat("a", 0, 1, epoch=1, wait_ms=20_000))
        await asyncio.sleep(0.1)
        of.coordinator.end("it moved")
        with pytest.raises(NotLeaderError, match="it moved"):
            await asyncio.wait_for(held, 0.1)

    coordinating(work)


def test_members_get_partitions_however_the_state_and_the_topics_come_back() -> None:
    async def work(of: Groups) -> None:
        await of.beat("a")
        for number in range(20):
            of.coordinator._reset(NotEnoughReplicasError("a test"))
            await asyncio.sleep(0.01 * number)
            answer = await of.heartbeat("a", group=f"group-{number}")
            assert answer.assigned == partitions(0, 1)

    coordinating(work)


def test_the_next_coordinator_knows_the_members_and_counts_again() -> None:
    async def work(of: Groups) -> None:
        epochs = await joined(of, "a", "b")
        before = await of.describe()
        of.coordinator.end("a test")
        assert of.measured("rayq_consumergroup_members") == {}
        assert of.measured("rayq_consumergroup_rebalances_total") == {}
        of.begin()
        assert await of.describe() == before
        for member, epoch in epochs.items():
            owned = next(one for one in before.members if one.member == member).assigned
            assert await of.heartbeat(member, owned[0].partition, epoch=epoch) == (
                messages.GroupHeartbeatResponse(epoch, owned)
            )

    coordinating(work)


# --- the topics -----------------------------------------------------------------------------------


def test_members_wait_for_the_topics_and_follow_them() -> None:
    async def work(of: Groups) -> None:
        await asyncio.sleep(20)
        assert of.looks == [], "without groups nobody needs them"
        began_s = now_s()
        epoch = await of.beat("a")
        assert now_s() - began_s < LOADING_WAIT_S / 2, "it waits for the answer, and no longer"
        assert of.looks[0] == messages.Metadata(None, 1, TOPICS_WAIT_MS)
        held = asyncio.ensure_future(of.heartbeat("a", 0, 1, epoch=epoch, wait_ms=20_000))
        await asyncio.sleep(1)
        assert {one.version_min for one in of.looks[1:]} == {2}
        of.change_topics(t=3)
        answer = await held
        assert answer.assigned == partitions(0, 1, 2)
        await of.beat("a", 0, 1, 2, epoch=answer.member_epoch)
        assert (await of.describe()).rebalance_reason == "the partitions of t changed"
        await asyncio.sleep(1)
        assert of.looks[-1].version_min == 3
        of.change_topics()
        await asyncio.sleep(1)
        assert (await of.describe()).members[0].assigned == []

    coordinating(work)


def test_topics_are_looked_at_at_most_so_often() -> None:
    async def work(of: Groups) -> None:
        await of.beat("a")
        count = len(of.looks)
        await asyncio.sleep(3)
        assert len(of.looks) - count <= 3 / (0.1 + TOPICS_INTERVAL_S) + 1  # An answer takes 0.1 s.

    coordinating(work)


def test_older_topics_are_not_taken() -> None:
    async def work(of: Groups) -> None:
        of.version = 0
        began_s = now_s()
        with pytest.raises(CoordinatorLoadingError):
            await of.beat("a")
        assert now_s() - began_s == pytest.approx(LOADING_WAIT_S)
        of.version = 1
        await of.beat("a")
        of.topics = {}  # Of the same version: nobody has changed anything.
        await asyncio.sleep(1)
        assert (await of.describe()).members[0].assigned == partitions(0, 1)

    coordinating(work)


def test_without_its_broker_a_coordinator_takes_commits_and_no_members() -> None:
    async def work(of: Groups) -> None:
        of.failure = ControllerUnavailableError("nobody there")
        for asked in of.beat("a"), of.describe():
            with pytest.raises(CoordinatorLoadingError, match="is starting"):
                await asked
        await of.set_offsets(3, 0)
        assert await of.fetch() == {0: 3}
        assert (await of.list_groups()) == [messages.GroupSummary("g", "empty", 0)]
        count = len(of.looks)
        await asyncio.sleep(2)
        assert 5 < len(of.looks) - count < 15, "it is asked again"
        of.failure = None
        await asyncio.sleep(0.5)
        began_s = now_s()
        await of.beat("a")
        assert now_s() - began_s < 0.1

    coordinating(work)


def test_topics_are_asked_for_again_once_there_are_groups() -> None:
    async def work(of: Groups) -> None:
        await of.beat("a")
        await of.beat("a", epoch=LEAVE)
        await of.delete()
        await asyncio.sleep(1)
        count = len(of.looks)
        await asyncio.sleep(20)
        assert len(of.looks) == count
        of.change_topics(t=1)
        assert (await of.heartbeat("a")).assigned == partitions(0)

    coordinating(work)


def test_a_group_of_another_coordinator_is_refused() -> None:
    def of_group(name: str) -> int:
        return zlib.crc32(name.encode()) % 3

    async def work(of: Groups) -> None:
        of.change_topics(t=2, __consumer_offsets=3)
        own, other = (
            next(name for name in "abcdefgh" if (of_group(name) == 0) is here)
            for here in (True, False)
        )
        await of.beat("m", group=own)
        for refused in (
            of.beat("m", group=other), of.describe(other), of.delete(other),
            of.set_offsets(1, 0, group=other), of.committed(group=other),
        ):  # fmt: skip
            with pytest.raises(InvalidRequestError) as told:
                await refused
            assert told.value.message == (
                f"Group {other!r} belongs to partition {of_group(other)} of __consumer_offsets, "
                "not to 0."
            )
        await of.beat("m", epoch=LEAVE, group=own)
        assert [one.group for one in await of.list_groups()] == [own]

    coordinating(work)


def test_a_group_of_another_coordinator_is_refused_before_any_topic_is_known() -> None:
    """It was listed twice then, and nobody could describe or delete it."""

    async def work(of: Groups) -> None:
        of.given = msgspec.structs.replace(of.given, partitions=3)
        of.failure = ControllerUnavailableError("no topics")
        of.begin_again()
        other = next(name for name in "abcdefgh" if zlib.crc32(name.encode()) % 3)
        for refused in (
            of.set_offsets(1, 0, group=other), of.committed(group=other), of.delete(other),
        ):  # fmt: skip
            with pytest.raises(InvalidRequestError, match="belongs to partition"):
                await refused
        assert await of.list_groups() == []

    coordinating(work)


# --- what is told of a rebalance ------------------------------------------------------------------


def test_each_rebalance_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def work(of: Groups) -> None:
        with caplog.at_level(logging.INFO, "rayq.actors.groups.group_coordinator"):
            caplog.clear()
            await joined(of, "a", "b")
            await of.set_offsets(1, 0, group="h")
        lines = [one.getMessage() for one in caplog.records if "rebalanced" in one.getMessage()]
        assert len(lines) == 2
        assert lines == [
            'group_rebalanced group=g epoch=1 members=1 reason="member a (a test) joined"',
            'group_rebalanced group=g epoch=2 members=2 reason="member b (a test) joined"',
        ]
        assert of.measured("rayq_consumergroup_rebalances_total") == {"g": 2}
        assert of.measured("rayq_consumergroup_members") == {"g": 2, "h": 0}
        for member in "ab":
            await of.beat(member, epoch=LEAVE)
        await of.delete()
        assert of.measured("rayq_consumergroup_rebalances_total") == {}
        assert of.measured("rayq_consumergroup_members") == {"h": 0}
        with pytest.raises(UnknownGroupError):
            await of.describe()

    coordinating(work)


def test_what_concerns_many_groups_is_decided_for_one_in_a_turn_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All at once would keep the heartbeats of the process waiting, until its broker kills it; and
    one decision for all may be larger than a batch."""

    async def work(of: Groups) -> None:
        groups = [f"g{number}" for number in range(20)]
        gone = of.connection()
        for group in groups:
            await of.beat("a", group=group)
            await of.beat("b", group=group, peer=gone)
        await of.set_offsets(1, 0, group="old")
        await of.set_offsets(1, 0, group="older")
        turn, noted = 0, list[tuple[int, set[str]]]()
        append = GroupCoordinator._append

        def bump() -> None:
            nonlocal turn
            turn += 1

        def note(self: GroupCoordinator, records: Any) -> None:
            if records:
                noted.append((turn, {one.group for one in records}))
                asyncio.get_running_loop().call_soon(bump)
            append(self, records)

        monkeypatch.setattr(GroupCoordinator, "_append", note)

        def check(decided: Collection[str]) -> None:
            assert {group for _, named in noted for group in named} == set(decided)
            assert all(len(named) == 1 for _, named in noted)
            assert len({turn for turn, _ in noted}) == len(noted) == len(decided)
            noted.clear()

        of.change_topics(t=4)
        await asyncio.sleep(1.0)
        check(groups)
        gone.closed.set_result(None)
        await asyncio.sleep(5.0)
        check(groups)
        of.change_topics()
        await asyncio.sleep(2.0)
        check(groups)
        await asyncio.sleep(3 * OFFSETS_CHECK_INTERVAL_S)
        assert [named for _, named in noted if named <= {"old", "older"}][:2] == [{"old"}, {"older"}]

    coordinating(work)
