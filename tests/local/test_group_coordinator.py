"""The coordinator as its messages show it: joining, handing over, committing, listing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rayq.testing import LocalCluster
from rayq.wire import messages
from tests.local.group_support import Coordinator, Member, coordinators, new_group, settle


def run(cluster: LocalCluster, story: Callable[[Coordinator], Awaitable[None]]) -> None:
    async def connect_and_run() -> None:
        async with coordinators(cluster) as coordinator:
            await story(coordinator)

    asyncio.run(connect_and_run())


def test_a_third_member_takes_exactly_one_partition_of_three(
    cluster: LocalCluster, new_topic: Callable[..., str]
) -> None:
    topic, group = new_topic(partitions=3), new_group()

    async def story(coordinator: Coordinator) -> None:
        first = Member(coordinator, group, [topic], name="c1")
        second = Member(coordinator, group, [topic], name="c2")
        await settle(first)
        assert first.partitions == [0, 1, 2]
        await settle(first, second)
        assert sorted(first.partitions + second.partitions) == [0, 1, 2]
        before = {0: (first.epoch, first.partitions), 1: (second.epoch, second.partitions)}
        third = Member(coordinator, group, [topic], name="c3")
        await settle(first, second, third)
        assert len(third.partitions) == 1
        moved = [i for i, one in enumerate((first, second)) if before[i] != (one.epoch, one.partitions)]
        assert len(moved) == 1
        assert sorted(first.partitions + second.partitions + third.partitions) == [0, 1, 2]
        assert (await coordinator.describe(group)).state == "stable"

    run(cluster, story)


def test_commits_are_read_back(cluster: LocalCluster, topic: str) -> None:
    group = new_group()

    async def story(coordinator: Coordinator) -> None:
        one = Member(coordinator, group, [topic])
        await settle(one)
        assert await one.commit(7) == []
        ((at, offset),) = (await coordinator.committed(group)).items()
        assert (at, offset) == (min(one.owned), 7)
        answer: Any = await coordinator.ask(messages.DescribeGroup, group)
        assert answer.offsets[0].offset == 7

    run(cluster, story)
