"""The coordinator through its messages: joining, handing over, committing, listing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rayq import messages
from rayq.client.cluster import Cluster
from rayq.errors import (
    FencedMemberError,
    GroupNotEmptyError,
    InvalidAssignmentError,
    InvalidRequestError,
    InvalidTopicError,
    ProtocolError,
    RayqError,
    UnknownAssignorError,
    UnknownGroupError,
    UnknownMemberError,
)
from rayq.messages.secret_names import shown_part
from rayq.storage.batch import encode_batch
from rayq.testing import LocalCluster
from tests.local.group_support import (
    OFFSETS_TOPIC,
    Coordinator,
    Member,
    coordinators,
    new_group,
    settle,
)
from tests.local.support import FAST, produce_raw

NewTopic = Callable[..., str]
ASSIGNORS = {
    "first": "tests.local.group_support:all_to_the_first",
    "fails": "tests.local.group_support:fails",
    "missing": "no.such.module:assign",
}


def run(cluster: Cluster, story: Callable[[Coordinator], Awaitable[None]]) -> None:
    async def connect_and_run() -> None:
        async with coordinators(cluster) as coordinator:
            await story(coordinator)

    asyncio.run(connect_and_run())


async def until(holds: Callable[[], Awaitable[bool]], timeout_s: float = 60.0) -> float:
    """Waits for a condition. Returns the seconds that it took."""
    started_s = time.monotonic()
    while not await holds():
        assert time.monotonic() < started_s + timeout_s
        await asyncio.sleep(0.02)
    return time.monotonic() - started_s


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One broker with assignors of its own and quick expiry."""
    path = tmp_path_factory.mktemp("lone")
    options = {**FAST, "group_assignors": ASSIGNORS, "offsets_retention_ms": 400}
    with LocalCluster(brokers=1, data_dir=path, **options) as cluster:
        yield cluster


# --- members --------------------------------------------------------------------------------------


def test_a_third_member_takes_exactly_one_partition_of_three(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic, group = new_topic(partitions=3), new_group()

    async def story(coordinator: Coordinator) -> None:
        first = Member(coordinator, group, [topic], name="c1")
        second = Member(coordinator, group, [topic], name="c2")
        await settle(first)
        assert first.partitions == [0, 1, 2]
        await settle(first, second)
        assert sorted(first.partitions + second.partitions) == [0, 1, 2]
        before = [(one.epoch, one.partitions) for one in (first, second)]
        third = Member(coordinator, group, [topic], name="c3")
        await settle(first, second, third)
        assert len(third.partitions) == 1
        after = [(one.epoch, one.partitions) for one in (first, second)]
        assert sum(one != other for one, other in zip(before, after, strict=True)) == 1
        assert sorted(first.partitions + second.partitions + third.partitions) == [0, 1, 2]
        answer = await coordinator.describe(group)
        assert (answer.state, answer.assignor) == ("stable", "uniform")
        assert answer.rebalance_reason == "member c (a test) joined"

    run(cluster, story)


def test_held_heartbeats_hear_at_once_what_to_give_up_and_what_to_take(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic, group = new_topic(partitions=2), new_group()

    async def story(coordinator: Coordinator) -> None:
        old, new = (Member(coordinator, group, [topic]) for _ in range(2))
        await settle(old)
        held = asyncio.create_task(old.beat(wait_ms=20_000))
        await asyncio.sleep(0.1)
        assert not held.done()
        started_s = time.monotonic()
        await new.beat()
        assert new.assigned == set()
        await held
        (moving,) = old.owned - old.assigned
        waiting = asyncio.create_task(new.beat(wait_ms=20_000))
        await old.beat()  # the member still owns both
        await asyncio.sleep(0.1)
        assert not waiting.done()
        described = {one.member: one for one in (await coordinator.describe(group)).members}
        leaving = described[shown_part(old.member)].revoking
        assert [(one.topic_id, one.partition) for one in leaving] == [moving]
        old.obey()
        await old.beat()
        await waiting
        assert new.assigned == {moving}
        assert time.monotonic() - started_s < 18

    run(cluster, story)


def test_a_newer_heartbeat_answers_the_one_that_is_held(cluster: LocalCluster, topic: str) -> None:
    async def story(coordinator: Coordinator) -> None:
        one = Member(coordinator, new_group(), [topic])
        await settle(one)
        held = asyncio.create_task(one.beat(wait_ms=20_000))
        await asyncio.sleep(0.1)
        await one.beat()
        await asyncio.wait_for(held, 18)

    run(cluster, story)


def test_the_newest_heartbeat_hears_the_news_even_if_it_changed_something_itself(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    """The earlier heartbeat was woken by that change, too, and must not take the newer one's
    place."""
    topic, group = new_topic(partitions=2), new_group()

    async def story(coordinator: Coordinator) -> None:
        stays, leaves = (Member(coordinator, group, [topic]) for _ in range(2))
        await settle(stays)
        await leaves.beat()
        await stays.beat()
        older = asyncio.create_task(stays.beat(wait_ms=20_000))
        await asyncio.sleep(0.1)
        stays.obey()
        newest = asyncio.create_task(stays.beat(wait_ms=20_000))  # the member gives one up
        await asyncio.wait_for(older, 18)
        await leaves.settle()
        await leaves.leave()
        await asyncio.wait_for(newest, 18)
        assert stays.partitions == [0, 1]

    run(cluster, story)


def test_a_heartbeat_without_news_is_answered_when_its_time_is_up(
    cluster: LocalCluster, topic: str
) -> None:
    async def story(coordinator: Coordinator) -> None:
        one = Member(coordinator, new_group(), [topic])
        await settle(one)
        started_s = time.monotonic()
        await one.beat(wait_ms=300)
        assert 0.29 < time.monotonic() - started_s < 18

    run(cluster, story)


def test_a_member_that_leaves_is_replaced_at_once(cluster: LocalCluster, topic: str) -> None:
    group = new_group()

    async def story(coordinator: Coordinator) -> None:
        one, other = (Member(coordinator, group, [topic]) for _ in range(2))
        await settle(one, other)
        (owner,) = (each for each in (one, other) if each.owned)
        (idle,) = (each for each in (one, other) if not each.owned)
        waiting = asyncio.create_task(idle.beat(wait_ms=20_000))
        await asyncio.sleep(0.05)
        await owner.leave()
        await asyncio.wait_for(waiting, 18)
        assert idle.partitions == [0]
        with pytest.raises(UnknownMemberError):
            await owner.beat(epoch=1)
        await owner.leave()  # repeated: the member has left

    run(cluster, story)


def test_a_broken_connection_is_noticed_within_the_grace(
    cluster: LocalCluster, topic: str
) -> None:
    group = new_group()

    async def story(coordinator: Coordinator) -> None:
        one = Member(coordinator, group, [topic])
        async with coordinators(cluster) as doomed:
            lost = Member(doomed, group, [topic], name="0-lost")
            static = Member(doomed, group, [topic], name="static", instance="i")
            await settle(lost, static)
            await settle(lost, static, one)
            began_s = time.monotonic()
        await until(lambda: gone(coordinator, "0-lost"))
        assert time.monotonic() - began_s > 0.5
        answer = await coordinator.describe(group)
        assert "connection broke" in answer.rebalance_reason
        assert {member.member for member in answer.members} == {shown_part(one.member), shown_part("static")}
        await one.settle()

    async def gone(coordinator: Coordinator, member: str) -> bool:
        answer = await coordinator.describe(group)
        return all(one.member != shown_part(member) for one in answer.members)

    run(cluster, story)


def test_a_member_that_comes_back_within_the_grace_is_not_missed(tmp_path: Path) -> None:
    topic, group = "t", new_group()

    async def story(coordinator: Coordinator) -> None:
        async with coordinators(cluster) as first:
            one = Member(first, group, [topic])
            await settle(one)
            epoch = one.epoch
        one.coordinator = coordinator
        await one.beat(wait_ms=5000)
        assert one.epoch == epoch

    with LocalCluster(1, data_dir=tmp_path, group_disconnect_grace_ms=4000) as cluster:
        cluster.create_topic(topic)
        run(cluster, story)


def test_a_silent_member_is_out_when_its_session_ends(cluster: LocalCluster, topic: str) -> None:
    group = new_group()

    async def story(coordinator: Coordinator) -> None:
        silent = Member(coordinator, group, [topic], name="0", session_timeout_ms=3000)
        other = Member(coordinator, group, [topic], name="1")
        await settle(silent)
        await other.beat()
        while not other.assigned:
            await other.beat(wait_ms=3000)
        assert "was silent" in (await coordinator.describe(group)).rebalance_reason
        with pytest.raises(UnknownMemberError):
            await silent.beat()

    run(cluster, story)


def test_a_static_member_returns_under_another_id_without_a_rebalance(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic, group = new_topic(partitions=4), new_group()

    async def story(coordinator: Coordinator) -> None:
        other = Member(coordinator, group, [topic])
        one = Member(coordinator, group, [topic], instance="i")
        await settle(other, one)
        had, reason = one.partitions, (await coordinator.describe(group)).rebalance_reason
        await one.leave(messages.MEMBER_EPOCH_LEAVE_STATIC)
        again = Member(coordinator, group, [topic], instance="i")
        held = asyncio.create_task(other.beat(wait_ms=1000))
        await settle(again)
        assert again.partitions == had
        epoch = other.epoch
        await held
        assert other.epoch == epoch
        assert (await coordinator.describe(group)).rebalance_reason == reason
        twin = Member(coordinator, group, [topic], instance="i")
        await settle(twin)
        with pytest.raises(FencedMemberError, match="group_instance_id"):
            await again.beat()

    run(cluster, story)


def test_a_group_follows_a_pattern_and_topics_that_grow_or_go(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic, group = new_topic(), new_group()

    async def story(coordinator: Coordinator) -> None:
        one = Member(coordinator, group, pattern=f"{topic}|later-.*")
        await settle(one)
        assert len(one.owned) == 1
        for change, count in (
            (lambda: cluster.create_topic("later-1", partitions=2), 3),
            (lambda: cluster.admin.create_partitions("later-1", 3), 4),
            (lambda: cluster.admin.delete_topic("later-1"), 1),
        ):
            held = asyncio.create_task(one.beat(wait_ms=15_000))
            await asyncio.to_thread(change)
            await held
            while len(one.assigned) != count:
                await one.beat(wait_ms=3000)
            await one.settle()
        assert "later-1 changed" in (await coordinator.describe(group)).rebalance_reason

    run(cluster, story)


def test_a_users_assignor_decides_and_a_failing_one_refuses_the_join(lone: LocalCluster) -> None:
    lone.create_topic("assigned", partitions=3)
    group = new_group()

    async def story(coordinator: Coordinator) -> None:
        one, other = (
            Member(coordinator, group, ["assigned"], name=name, assignor="first") for name in "ab"
        )
        await settle(one, other)
        assert (len(one.owned), len(other.owned)) == (3, 0)
        with pytest.raises(InvalidAssignmentError, match="boom"):
            await Member(coordinator, new_group(), ["assigned"], assignor="fails").beat()
        with pytest.raises(UnknownAssignorError, match="No module"):
            await Member(coordinator, group, ["assigned"], assignor="missing").beat()
        with pytest.raises(UnknownAssignorError, match="uniform"):
            await Member(coordinator, group, ["assigned"], assignor="nobodys").beat()

    run(lone, story)


@pytest.mark.parametrize(
    "options, error",
    [
        ({"pattern": "("}, InvalidRequestError),
        ({"pattern": "(?=a)b"}, InvalidRequestError),
        ({"pattern": "x" * 2000}, InvalidRequestError),
        ({"topics": ["x" * 250]}, ProtocolError),
        ({"topics": [f"{n}" for n in range(1001)]}, InvalidRequestError),
        ({"name": "x" * 65}, ProtocolError),
        ({"instance": "x" * 250}, ProtocolError),
        ({"assignor": ""}, ProtocolError),
        ({"session_timeout_ms": 0}, InvalidRequestError),
        ({"max_poll_interval_ms": 0}, ProtocolError),
    ],
)
def test_bad_input_is_refused_with_a_typed_error(
    cluster: LocalCluster, options: dict[str, Any], error: type[RayqError]
) -> None:
    async def story(coordinator: Coordinator) -> None:
        group = new_group()
        values = {"topics": ["t"], **options}
        with pytest.raises(error):
            await Member(coordinator, group, **values).beat()
        with pytest.raises(UnknownGroupError):
            await coordinator.describe(group)

    run(cluster, story)


def test_a_catastrophic_pattern_keeps_nobody_waiting(cluster: LocalCluster) -> None:
    cluster.create_topic("a" * 199)

    async def story(coordinator: Coordinator) -> None:
        started_s = time.monotonic()
        await Member(coordinator, new_group(), pattern="(a+)+" * 20 + "b").beat()
        assert time.monotonic() - started_s < 18

    run(cluster, story)


def test_other_topics_coordinate_no_groups(cluster: LocalCluster) -> None:
    async def story(coordinator: Coordinator) -> None:
        with pytest.raises(InvalidRequestError, match="coordinates no groups"):
            topic = await coordinator.client.topic("plain", timeout_s=30)
            await coordinator.client.ask_leader(
                topic.name,
                0,
                lambda topic_id, leader: messages.DescribeGroup(topic_id, 0, leader.epoch, "g"),
                timeout_s=30,
                attempt_timeout_s=30,
            )

    cluster.create_topic("plain")
    run(cluster, story)


# --- offsets --------------------------------------------------------------------------------------


def test_commits_follow_the_rules(cluster: LocalCluster, new_topic: NewTopic) -> None:
    topic, group = new_topic(partitions=2), new_group()

    async def story(coordinator: Coordinator) -> None:
        one, other = (Member(coordinator, group, [topic]) for _ in range(2))
        await settle(one)
        first, second = sorted(one.owned)
        assert await one.commit(7) == []
        assert await coordinator.committed(group) == {first: 7, second: 7}
        epoch = one.epoch
        await settle(one, other)
        (kept,), (moved,) = one.owned, other.owned
        one.owned = {kept, moved}  # the member has not noticed
        refused = await one.commit(9)
        assert [(*at, code) for *at, code, _ in refused] == [(*moved, "CommitRefusedError")]
        assert await coordinator.committed(group) == {kept: 9, moved: 7}
        assert await other.commit(8, sequence=5) == []
        assert await other.commit(3, sequence=4) == []  # Overtaken: done, and dropped.
        assert await coordinator.committed(group) == {kept: 9, moved: 8}
        for wrong in (epoch - 1, one.epoch + 1):
            with pytest.raises(FencedMemberError):
                await one.commit(10, epoch=wrong)
        with pytest.raises(UnknownMemberError):
            await Member(coordinator, group, name="stranger").commit(1)
        with pytest.raises(GroupNotEmptyError):
            await Member(coordinator, group, name="").commit(1)

    run(cluster, story)


def test_positions_without_members_are_committed_set_listed_and_deleted(
    cluster: LocalCluster, topic: str
) -> None:
    group = new_group()
    topic_id = cluster.admin.describe_topic(topic).topic_id

    async def story(coordinator: Coordinator) -> None:
        manual = Member(coordinator, group, name="")
        manual.owned = {(topic_id, 0)}
        await manual.commit(5)
        assert await coordinator.committed(group) == {(topic_id, 0): 5}
        answer = await coordinator.ask(messages.FetchCommitted, group, [(topic_id, 0), ("x", 9)])
        assert [(one.offset, one.metadata) for one in answer.offsets] == [(5, "")]
        assert (await coordinator.describe(group)).state == "empty"
        await coordinator.ask(messages.SetGroupOffsets, group, [(topic_id, 0, 2)])
        assert await coordinator.committed(group) == {(topic_id, 0): 2}
        member = Member(coordinator, group, [topic])
        await settle(member)
        for kind, arguments in ((messages.SetGroupOffsets, [[]]), (messages.DeleteGroup, [])):
            with pytest.raises(GroupNotEmptyError, match="1 member"):
                await coordinator.ask(kind, group, *arguments)
        assert (group, "stable", 1) in await listed(coordinator)
        await member.leave()
        assert (group, "empty", 0) in await listed(coordinator)
        await coordinator.ask(messages.DeleteGroup, group)
        assert await coordinator.committed(group) == {}
        for kind in (messages.DeleteGroup, messages.DescribeGroup):
            with pytest.raises(UnknownGroupError):
                await coordinator.ask(kind, group)

    run(cluster, story)


async def listed(coordinator: Coordinator) -> list[tuple[str, str, int]]:
    answer = await coordinator.client.ask_leader(
        OFFSETS_TOPIC,
        0,
        lambda topic_id, leader: messages.ListGroups(topic_id, 0, leader.epoch),
        timeout_s=30,
        attempt_timeout_s=30,
    )
    return [(one.group, one.state, one.members) for one in answer.groups]


def test_positions_of_an_idle_group_expire(lone: LocalCluster) -> None:
    lone.create_topic("expiring")
    topic_id = lone.admin.describe_topic("expiring").topic_id
    idle, used = new_group(), new_group()

    async def story(coordinator: Coordinator) -> None:
        member = Member(coordinator, used, ["expiring"])

        async def has_the_new_topic() -> bool:
            await settle(member)
            return member.partitions == [0]

        await until(has_the_new_topic)
        await member.commit(3)
        await coordinator.ask(messages.SetGroupOffsets, idle, [(topic_id, 0, 2)])

        async def is_gone() -> bool:
            await member.beat()
            return await coordinator.committed(idle) == {}

        await until(is_gone)
        assert await coordinator.committed(used) == {(topic_id, 0): 3}

    run(lone, story)


# --- the topic ------------------------------------------------------------------------------------


def test_the_offsets_topic_is_rayqs_own(cluster: LocalCluster) -> None:
    async def story(coordinator: Coordinator) -> None:
        client = coordinator.client
        topic = await client.topic(OFFSETS_TOPIC, timeout_s=30)
        assert topic.config["cleanup_policy"] == "compact"
        assert len(topic.partitions[0].replicas) == 3
        for change in (
            messages.DeleteTopic(OFFSETS_TOPIC),
            messages.CreatePartitions(OFFSETS_TOPIC, 9),
            messages.AlterTopicConfig(OFFSETS_TOPIC, {"cleanup.policy": "delete"}),
            messages.CreateTopic(OFFSETS_TOPIC, 1, None, {}),
        ):
            with pytest.raises(InvalidTopicError):
                await client.change(change, timeout_s=30)
        await client.change(
            messages.AlterTopicConfig(OFFSETS_TOPIC, {"min_cleanable_dirty_ratio": 0.4}),
            timeout_s=30,
        )
        for _ in range(2):
            await client.change(messages.EnsureOffsetsTopic(), timeout_s=30)
        with pytest.raises(InvalidTopicError):
            await client.ask_leader(
                OFFSETS_TOPIC,
                0,
                lambda topic_id, leader: messages.DeleteRecords(topic_id, 0, leader.epoch, 0, 1000),
                timeout_s=30,
                attempt_timeout_s=30,
            )

    run(cluster, story)
    with pytest.raises(InvalidTopicError, match="rayq's own"):
        produce_raw(cluster, OFFSETS_TOPIC, encode_batch([b"v"], [b"k"], timestamps_ms=0))
