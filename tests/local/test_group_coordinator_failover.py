"""Coordinators die and move: members, assignments and positions survive, no member is rebalanced,
and acknowledged commits stay."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayq import messages
from rayq.errors import RayqError
from rayq.messages.secret_names import shown_part
from rayq.testing import LocalCluster
from tests.local.group_support import (
    OFFSETS_TOPIC,
    Member,
    coordinators,
    settle,
)
from tests.local.support import FAST, leader_of, wait_in_sync


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[LocalCluster]:
    """Three brokers to kill, with a topic `t` of six partitions."""
    with LocalCluster(brokers=3, data_dir=tmp_path / "data", **FAST) as cluster:
        cluster.create_topic("t", partitions=6)
        yield cluster


async def kill_coordinator(cluster: LocalCluster) -> None:
    def kill() -> None:
        cluster.kill_replica(OFFSETS_TOPIC, 0, leader_of(cluster, OFFSETS_TOPIC))

    await asyncio.to_thread(kill)


async def wait_for_replicas(cluster: LocalCluster) -> None:
    await asyncio.to_thread(wait_in_sync, cluster, OFFSETS_TOPIC)


def test_members_and_positions_survive_the_coordinator_and_nobody_is_rebalanced(
    groups: LocalCluster,
) -> None:
    async def story() -> None:
        async with coordinators(groups, attempt_timeout_s=3.0) as coordinator:
            members = [Member(coordinator, "g", ["t"]) for _ in range(3)]
            members.append(Member(coordinator, "g", ["t"], instance="i"))
            await settle(*members)
            for place, one in enumerate(members):
                await one.commit(10 + place)
            before = await coordinator.describe("g")
            held = [asyncio.create_task(one.beat(wait_ms=2000)) for one in members]
            await wait_for_replicas(groups)
            await kill_coordinator(groups)
            started_s = time.monotonic()
            after = await coordinator.describe("g")
            assert time.monotonic() - started_s < 18
            assert after == before
            await asyncio.gather(*held)
            for one in members:
                epoch = one.epoch
                await one.settle()
                assert one.epoch == epoch
                assert await one.commit(20) == []
            assert await coordinator.describe("g") != before
            assert (await coordinator.describe("g")).epoch == before.epoch
            assert set((await coordinator.committed("g")).values()) == {20}

    asyncio.run(story())


def test_a_rebalance_that_a_coordinator_began_is_ended_by_the_next(groups: LocalCluster) -> None:
    async def story() -> None:
        async with coordinators(groups, attempt_timeout_s=3.0) as coordinator:
            one, other = (Member(coordinator, "g", ["t"]) for _ in range(2))
            await settle(one)
            await other.beat()
            await one.beat()
            assert len(one.owned) == 6 and len(one.assigned) == 3
            await wait_for_replicas(groups)
            await kill_coordinator(groups)
            await one.beat()  # the member knows, but has not given up yet
            await other.beat()
            assert other.assigned == set()
            await settle(one, other)
            assert (len(one.owned), len(other.owned)) == (3, 3)
            assert not one.owned & other.owned

    asyncio.run(story())


def test_a_member_that_died_with_its_coordinator_is_out_after_its_session(
    groups: LocalCluster,
) -> None:
    async def story() -> None:
        async with coordinators(groups, attempt_timeout_s=3.0) as coordinator:
            one = Member(coordinator, "g", ["t"])
            async with coordinators(groups) as doomed:
                lost = Member(doomed, "g", ["t"], session_timeout_ms=4000)
                await settle(one, lost)
                await settle(one, lost)
            await kill_coordinator(groups)
            while len(one.assigned) < 6:
                await one.beat(wait_ms=1000)
            assert "was silent" in (await coordinator.describe("g")).rebalance_reason

    asyncio.run(story())


def test_what_was_acknowledged_survives_while_the_leadership_moves_under_load(
    groups: LocalCluster,
) -> None:
    """Positions only grow, and no acknowledged position is lost."""

    async def story() -> None:
        async with coordinators(groups, attempt_timeout_s=3.0) as coordinator:
            members = [Member(coordinator, "g", ["t"]) for _ in range(6)]
            await settle(*members)
            acknowledged = dict.fromkeys((at for one in members for at in one.owned), 0)
            epochs = [one.epoch for one in members]
            is_over = False

            async def commit_on(one: Member) -> None:
                (at,) = one.owned
                while not is_over:
                    offset = acknowledged[at] + 1
                    try:
                        assert await one.commit(offset) == []
                    except RayqError as error:
                        assert error.retriable or isinstance(error, TimeoutError)
                    else:
                        acknowledged[at] = offset
                        found = (await coordinator.committed("g"))[at]
                        assert found == offset

            tasks = [asyncio.create_task(commit_on(one)) for one in members]
            for turn in range(3):
                await wait_for_replicas(groups)
                await kill_coordinator(groups)
                await asyncio.sleep(0.5)
                await wait_for_replicas(groups)
                if turn != 1:  # back to the preferred leader, while the other lives
                    await asyncio.to_thread(groups.admin.elect_leaders, OFFSETS_TOPIC)
                await asyncio.sleep(0.3)
            is_over = True
            await asyncio.gather(*tasks)
            committed = await coordinator.committed("g")
            assert committed == acknowledged
            assert min(acknowledged.values()) > 0
            assert [one.epoch for one in members] == epochs

    asyncio.run(story())


def test_while_brokers_are_missing_groups_wait_and_nobody_loses_anything(
    groups: LocalCluster,
) -> None:
    async def story() -> None:
        async with coordinators(groups, attempt_timeout_s=2.0) as coordinator:
            one = Member(coordinator, "g", ["t"], session_timeout_ms=2500)
            await wait_for_replicas(groups)
            await settle(one)
            epoch = one.epoch

            is_refused_for_longer_than_a_session = asyncio.Event()

            async def beat_on() -> None:
                answered_s = time.monotonic()
                while True:
                    try:
                        await one.beat(timeout_s=0.5)
                        answered_s = time.monotonic()
                    except TimeoutError:
                        if time.monotonic() > answered_s + 3.5:
                            is_refused_for_longer_than_a_session.set()
                    await asyncio.sleep(0.1)

            beats = asyncio.create_task(beat_on())
            leader = await asyncio.to_thread(leader_of, groups, OFFSETS_TOPIC)
            others = [broker for broker in range(3) if broker != leader]
            for broker in others:
                await asyncio.to_thread(groups.kill_broker, broker)
            offsets = [(*at, 1, None, "") for at in sorted(one.owned)]
            with pytest.raises(TimeoutError):
                await coordinator.ask(
                    messages.CommitOffsets, "g", one.member, one.epoch, 0, offsets, timeout_s=3.0
                )
            await asyncio.wait_for(is_refused_for_longer_than_a_session.wait(), 60)
            for broker in others:
                await asyncio.to_thread(groups.start_broker, broker)
            assert not beats.done()
            beats.cancel()
            await one.settle()
            assert await one.commit(3) == []
            assert one.epoch == epoch

    asyncio.run(story())


def test_a_restarted_cluster_remembers_its_groups(tmp_path: Path) -> None:
    async def begin(cluster: LocalCluster) -> Member:
        async with coordinators(cluster) as coordinator:
            one = Member(coordinator, "g", ["t"], instance="i")
            await settle(one)
            await one.commit(5)
            return one

    async def go_on(cluster: LocalCluster, one: Member) -> None:
        async with coordinators(cluster) as coordinator:
            one.coordinator = coordinator
            assert set((await coordinator.committed("g")).values()) == {5}
            epoch = one.epoch
            await one.settle()
            assert one.epoch == epoch
            _check_is_alone(await coordinator.describe("g"), one)

    with LocalCluster(brokers=3, data_dir=tmp_path, **FAST) as cluster:
        cluster.create_topic("t", partitions=2)
        member = asyncio.run(begin(cluster))
    with LocalCluster(data_dir=tmp_path, **FAST) as cluster:
        asyncio.run(go_on(cluster, member))


def _check_is_alone(answer: messages.DescribeGroupResponse, one: Member) -> None:
    (found,) = answer.members
    assert found.member == shown_part(one.member)
    assert {(each.topic_id, each.partition) for each in found.assigned} == one.owned


def test_many_offsets_partitions_share_the_groups(tmp_path: Path) -> None:
    async def story(cluster: LocalCluster) -> None:
        async with coordinators(cluster) as coordinator:
            members = [Member(coordinator, f"g{one}", ["t"]) for one in range(12)]
            await settle(*members)
            for one in members:
                assert one.partitions == [0]
            topic = await coordinator.client.topic(OFFSETS_TOPIC, timeout_s=30)
            leaders = {partition.leader for partition in topic.partitions}
            assert leaders == {0, 1, 2}

    with LocalCluster(brokers=3, data_dir=tmp_path, offsets_topic_partitions=4) as cluster:
        cluster.create_topic("t")
        asyncio.run(story(cluster))


def test_a_coordinator_refuses_requests_of_another_epoch(
    groups: LocalCluster,
) -> None:
    async def story() -> None:
        async with coordinators(groups) as coordinator:
            await Member(coordinator, "g", ["t"]).beat()
            client = coordinator.client
            leader = client.metadata.leader(
                OFFSETS_TOPIC, client.metadata.topics[OFFSETS_TOPIC].topic_id, 0
            )
            assert leader is not None
            topic_id = client.metadata.topics[OFFSETS_TOPIC].topic_id
            for epoch, code in (
                (leader.epoch - 1, "FencedEpochError"),
                (leader.epoch + 1, "UnknownEpochError"),
            ):
                with pytest.raises(RayqError) as caught:
                    await client.ask(
                        (leader.host, leader.port),
                        messages.FetchCommitted(topic_id, 0, epoch, "g", None),
                        timeout_s=30,
                    )
                assert type(caught.value).__name__ == code

    asyncio.run(story())
