"""Consumer groups on a cluster in this process: each promise of the consumer."""

from __future__ import annotations

import asyncio
import gc
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import rayq
from rayq import OffsetAndMetadata, Record, TopicPartition
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.client.consuming.consumer import Consumer
from rayq.testing import LocalCluster
from tests.local.group_support import new_group
from tests.local.support import eventually, place

NewTopic = Callable[..., str]
EARLIEST: dict[str, Any] = {"auto_offset_reset": "earliest"}


@pytest.fixture
def group() -> str:
    return new_group()


def fill(cluster: LocalCluster, topic: str, partitions: int, each: int, first: int = 0) -> None:
    with cluster.producer() as producer:
        for partition in range(partitions):
            for number in range(first, first + each):
                producer.send(topic, b"%d" % number, partition=partition)


def settle(consumers: Iterable[Consumer], holds: Callable[[], bool], what: str) -> list[Record]:
    """Polls all consumers in turn until a condition holds."""
    records: list[Record] = []
    members = list(consumers)

    def turn() -> bool:
        for one in members:
            records.extend(one.poll(timeout_s=0.01))
        return holds()

    eventually(turn, what)
    return records


def spread(*consumers: Consumer) -> list[int]:
    return sorted(len(one.assignment()) for one in consumers)


# --- who owns what --------------------------------------------------------------------------------


def test_a_member_that_is_dropped_leaves_its_partitions_to_the_others(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic = new_topic(partitions=3)
    with cluster.consumer(topic, group=group) as stays:
        kept = [cluster.consumer(topic, group=group)]
        kept[0].subscribe([topic], on_revoked=partial(print, kept[0]))

        def shares() -> list[int]:
            for consumer in (stays, *kept):
                consumer.poll(0.02)
            return spread(stays, *kept)

        eventually(lambda: shares() == [1, 2], "both share")

        def has_all() -> bool:
            gc.collect()  # The client's own thread may have held it a moment ago.
            return shares() == [3]

        def drop() -> None:
            kept.clear()
            eventually(has_all, "who stays has all")

        with pytest.warns(ResourceWarning, match=f"of group '{group}' of '{topic}' was dropped"):
            drop()


def test_the_textbook_example_moves_exactly_one_partition(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic = new_topic(partitions=3)
    fill(cluster, topic, 3, 10)
    moved: list[tuple[str, str, list[int]]] = []

    def member(name: str) -> Consumer:
        def note(what: str) -> Callable[[set[TopicPartition]], None]:
            return lambda places: moved.append((name, what, sorted(p for _, p in places)))

        return cluster.consumer(
            topic,
            group=group,
            on_assigned=note("assigned"),
            on_revoked=note("revoked"),
            on_lost=note("lost"),
            **EARLIEST,
        )

    with member("C1") as first:
        settle([first], lambda: spread(first) == [3], "C1 owns all")
        with member("C2") as second:
            settle([first, second], lambda: spread(first, second) == [1, 2], "C1: two, C2: one")
            moved.clear()
            before = {
                **dict.fromkeys(first.assignment(), 1),
                **dict.fromkeys(second.assignment(), 2),
            }
            with member("C3") as third:
                settle(
                    [first, second, third],
                    lambda: spread(first, second, third) == [1, 1, 1],
                    "1 each",
                )
                (one,) = third.assignment()
                assert before[one] == 1
                assert moved == [
                    ("C1", "revoked", [one.partition]),
                    ("C3", "assigned", [one.partition]),
                ]
                moved.clear()
                info = cluster.admin.describe_group(group)
                assert info.state == "stable" and len(info.members) == 3
                assert "joined" in info.rebalance_reason


def test_closing_gives_the_partitions_to_the_others_at_once(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic = new_topic(partitions=4)
    # With these settings the news is late unless it wakes the heartbeat that waits.
    slow: dict[str, Any] = {
        "group_heartbeat_interval_ms": 300_000,
        "group_session_timeout_ms": 900_000,
    }
    with cluster.consumer(topic, group=group, **slow) as stays:
        leaves = cluster.consumer(topic, group=group, **slow)
        settle([stays, leaves], lambda: spread(stays, leaves) == [2, 2], "two each")
        leaves.close()
        settle([stays], lambda: spread(stays) == [4], "the rest came")
        leaves.close()
        with pytest.raises(rayq.errors.ClosedError):
            leaves.poll()


@pytest.mark.thorough
def test_two_hundred_members_settle_and_half_of_them_leave(
    cluster: LocalCluster, group: str
) -> None:
    members = partitions = 200
    cluster.admin.create_topic(group, partitions, 1, timeout_s=150)
    fill(cluster, group, partitions, 1)

    async def poll(consumer: AsyncConsumer, leaving: asyncio.Event, read: set[int]) -> None:
        async with consumer:
            while not leaving.is_set():
                read.update(one.partition for one in await consumer.poll(timeout_s=0.1))

    async def until(holds: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + 120
        while not holds():
            assert time.monotonic() < deadline_s, what
            await asyncio.sleep(0.05)

    def is_level(consumers: list[AsyncConsumer]) -> bool:
        sizes = [len(one._core.subscription.assigned) for one in consumers]
        return sum(sizes) == partitions and max(sizes) - min(sizes) <= 1

    async def scenario() -> None:
        consumers = [
            cluster.async_consumer(group, group=group, **EARLIEST) for _ in range(members)
        ]
        read: list[set[int]] = [set() for _ in range(members)]
        leaving = [asyncio.Event() for _ in range(members)]
        polls = [
            asyncio.ensure_future(poll(*one))
            for one in zip(consumers, leaving, read, strict=True)
        ]
        await until(lambda: is_level(consumers), "all share")
        await until(lambda: set().union(*read) == set(range(partitions)), "every record is read")
        for one in leaving[: members // 2]:
            one.set()
        await asyncio.gather(*polls[: members // 2])
        await until(lambda: is_level(consumers[members // 2 :]), "the others have it all")
        for one in leaving:
            one.set()
        await asyncio.gather(*polls)

    asyncio.run(scenario())
    cluster.admin.delete_topic(group)


def test_topics_by_pattern_come_and_grow(cluster: LocalCluster, group: str) -> None:
    cluster.create_topic(f"{group}-a")
    with cluster.consumer(
        group=group, pattern=re.compile(f"{group}-[a-z]"), **EARLIEST
    ) as consumer:
        settle([consumer], lambda: spread(consumer) == [1], "the first topic")
        cluster.create_topic(f"{group}-b", partitions=2)
        cluster.create_topic(f"{group}-other")
        with cluster.producer() as producer:
            producer.send(f"{group}-b", b"v", partition=1)
        records = settle([consumer], lambda: spread(consumer) == [3], "the second topic")
        cluster.admin.create_partitions(f"{group}-a", 2)
        records += settle([consumer], lambda: spread(consumer) == [4], "a new partition")
        eventually(lambda: records.extend(consumer.poll(timeout_s=0.1)) or bool(records), "it came")
        assert [one.topic for one in records] == [f"{group}-b"]
        cluster.admin.delete_topic(f"{group}-b")
        settle([consumer], lambda: spread(consumer) == [2], "the second topic is gone")


def test_groups_do_not_disturb_each_other(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic = new_topic(partitions=2)
    fill(cluster, topic, 2, 5)
    with (
        cluster.consumer(topic, group=group, **EARLIEST) as one,
        cluster.consumer(topic, group=f"{group}-too", **EARLIEST) as other,
    ):
        for consumer in (one, other):
            records: list[Record] = []
            while len(records) < 10:
                records += consumer.poll()
        one.commit()
        places = [place(topic, number) for number in range(2)]
        assert one.committed(places) == dict.fromkeys(places, 5)
        assert other.committed(places) == dict.fromkeys(places)


def test_range_gives_consecutive_partitions(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic = new_topic(partitions=4)
    with (
        cluster.consumer(topic, group=group, assignor="range") as one,
        cluster.consumer(topic, group=group, assignor="range") as two,
    ):
        settle([one, two], lambda: spread(one, two) == [2, 2], "two each")
        for consumer in (one, two):
            first, second = sorted(number for _, number in consumer.assignment())
            assert second == first + 1
    with (
        cluster.consumer(topic, group=group, assignor="nobody's") as consumer,
        pytest.raises(rayq.errors.UnknownAssignorError),
    ):
        settle([consumer], lambda: False, "it is refused")


def test_a_static_member_that_comes_back_keeps_its_partitions(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic = new_topic(partitions=4)
    moved: list[set[TopicPartition]] = []
    stays = cluster.consumer(
        topic,
        group=group,
        group_instance_id="a",
        on_assigned=moved.append,
        on_revoked=moved.append,
        on_lost=moved.append,
    )
    goes = cluster.consumer(topic, group=group, group_instance_id="b")
    with stays:
        settle([stays, goes], lambda: spread(stays, goes) == [2, 2], "two each")
        had = goes.assignment()
        moved.clear()
        goes.close()
        with cluster.consumer(topic, group=group, group_instance_id="b") as back:
            settle([stays, back], lambda: back.assignment() == had, "the same partitions")
            assert moved == []
            with cluster.consumer(topic, group=group, group_instance_id="b") as thief:
                settle([stays, thief], lambda: thief.assignment() == had, "it took over")
                with pytest.raises(rayq.errors.FencedMemberError):
                    settle([back], lambda: False, "it is fenced")


def test_a_member_whose_connection_breaks_comes_back_as_itself(
    group: str, tmp_path: Path
) -> None:
    with LocalCluster(1, data_dir=tmp_path, group_disconnect_grace_ms=3000) as cluster:
        cluster.create_topic("t", partitions=2)
        with cluster.consumer("t", group=group) as consumer:
            settle([consumer], lambda: spread(consumer) == [2], "it has joined")
            epoch = cluster.admin.describe_group(group).epoch
            member = consumer.group_membership()

            async def break_connections() -> None:
                for connection in list(consumer._core.client.pool._connections.values()):
                    connection.end(None)

            consumer._background.run(break_connections())
            time.sleep(3.5)  # longer than the grace
            consumer.poll(timeout_s=0.1)
            assert consumer.group_membership() == member
            assert cluster.admin.describe_group(group).epoch == epoch


# --- going on -------------------------------------------------------------------------------------


def test_the_next_member_goes_on_from_the_last_commit(
    cluster: LocalCluster, topic: str, group: str
) -> None:
    fill(cluster, topic, 1, 20)
    with cluster.consumer(topic, group=group, max_poll_records=5, **EARLIEST) as consumer:
        consumer.commit()  # nothing yet
        first: list[Record] = []
        while len(first) < 5:
            first += consumer.poll()
        consumer.commit({place(topic): OffsetAndMetadata(5, "so far")})
    with cluster.consumer(topic, group=group, **EARLIEST) as consumer:
        second: list[Record] = []
        while len(second) < 15:
            second += consumer.poll()
        assert [one.offset for one in second] == list(range(5, 20))
        found = consumer.committed_with_metadata([place(topic)])
        assert found == {place(topic): OffsetAndMetadata(5, "so far")}
        assert consumer.lag() == {place(topic): 0}
    assert first[0].offset == 0


def test_auto_commit_leaves_nothing_to_repeat_at_close(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic = new_topic(partitions=2)
    fill(cluster, topic, 2, 10)
    seen: list[tuple[int, int]] = []
    for _ in range(4):
        with cluster.consumer(
            topic, group=group, enable_auto_commit=True, max_poll_records=5, **EARLIEST
        ) as consumer:
            records = settle([consumer], lambda: bool(consumer.assignment()), "it has joined")
            while len(records) < 5:
                records += consumer.poll(max_records=5 - len(records))
            seen += [(record.partition, record.offset) for record in records]
    assert sorted(seen) == [(number, offset) for number in range(2) for offset in range(10)]


def test_iterating_through_rebalances_skips_and_repeats_nothing(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic = new_topic(partitions=4)
    fill(cluster, topic, 4, 300)
    seen: list[tuple[int, int]] = []
    lock = threading.Lock()

    def work(limit: int) -> None:
        with cluster.consumer(topic, group=group, enable_auto_commit=True, **EARLIEST) as consumer:
            for record in itertools.islice(consumer, limit):
                with lock:
                    seen.append((record.partition, record.offset))
                time.sleep(0.001)

    threads = [threading.Thread(target=work, args=(400,)) for _ in range(3)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    # The record that is yielded last is committed once the next one is asked for, or by `close`.
    assert sorted(seen) == [(number, offset) for number in range(4) for offset in range(300)]


def test_a_new_group_may_begin_some_time_ago(cluster: LocalCluster, topic: str, group: str) -> None:
    now_ms = time.time_ns() // 1_000_000
    with cluster.producer() as producer:
        for hours in (5, 3, 1):
            producer.send(topic, b"%d" % hours, timestamp_ms=now_ms - hours * 3_600_000)
            producer.flush()
    with cluster.consumer(topic, group=group, auto_offset_reset=timedelta(hours=4)) as consumer:
        records: list[Record] = []
        while len(records) < 2:
            records += consumer.poll()
        assert [record.value for record in records] == [b"3", b"1"]


def test_partitions_assigned_by_hand_commit_while_nobody_is_a_member(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic = new_topic(partitions=2)
    fill(cluster, topic, 2, 10)
    with cluster.consumer(group=group, **EARLIEST) as by_hand:
        by_hand.assign([place(topic, 1)])
        records: list[Record] = []
        while len(records) < 10:
            records += by_hand.poll()
        by_hand.commit()
        assert by_hand.committed([place(topic, 1)]) == {place(topic, 1): 10}
        with cluster.consumer(topic, group=group, **EARLIEST) as member:
            settle([member], lambda: spread(member) == [2], "it has joined")
            assert member.position(place(topic, 1)) == 10
            with pytest.raises(rayq.errors.GroupNotEmptyError):
                by_hand.commit({place(topic, 1): 3})


def test_paused_partitions_stay_paused_through_a_rebalance(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic = new_topic(partitions=2)
    with cluster.consumer(topic, group=group, **EARLIEST) as consumer:
        settle([consumer], lambda: spread(consumer) == [2], "it has joined")
        consumer.pause(*consumer.assignment())
        fill(cluster, topic, 2, 5)
        with cluster.consumer(topic, group=group, **EARLIEST) as other:
            settle([consumer, other], lambda: spread(consumer, other) == [1, 1], "one each")
            assert consumer.poll(timeout_s=0.2) == []
            consumer.resume(*consumer.assignment())
            records: list[Record] = []
            while len(records) < 5:
                records += consumer.poll(timeout_s=60)
            assert len(records) == 5


# --- being taken out ------------------------------------------------------------------------------


def test_who_is_slow_loses_its_partitions_and_cannot_commit(
    cluster: LocalCluster, topic: str, group: str
) -> None:
    fill(cluster, topic, 1, 10)
    lost: list[set[TopicPartition]] = []
    slow = cluster.consumer(
        topic, group=group, max_poll_interval_ms=1500, on_lost=lost.append, **EARLIEST
    )
    with slow:
        settle([slow], lambda: spread(slow) == [1], "it has joined")
        with cluster.consumer(topic, group=group, **EARLIEST) as other:
            records: list[Record] = []
            while len(records) < 10:  # another member took over
                records += other.poll()
            with pytest.raises(rayq.CommitRefusedError, match="max_poll_records"):
                slow.commit({place(topic): 3})
            with pytest.raises(rayq.errors.MaxPollIntervalError, match="max_poll_interval_ms"):
                slow.poll()
            assert lost == [{place(topic)}]
            other.commit()
        settle([slow], lambda: spread(slow) == [1], "it is back")
        assert slow.position(place(topic)) == 10


def test_heartbeats_go_on_while_a_handler_works(
    cluster: LocalCluster, topic: str, group: str
) -> None:
    with cluster.consumer(
        topic, group=group, group_session_timeout_ms=4000, group_heartbeat_interval_ms=500
    ) as consumer:
        settle([consumer], lambda: spread(consumer) == [1], "it has joined")
        before = consumer.group_membership()
        time.sleep(6.0)
        consumer.poll(timeout_s=0.05)
        assert consumer.group_membership() == before


# --- administration -------------------------------------------------------------------------------


def test_a_group_is_described_moved_and_deleted(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic = new_topic(partitions=2)
    fill(cluster, topic, 2, 10)
    places = [place(topic, number) for number in range(2)]
    admin = cluster.admin
    with pytest.raises(rayq.errors.UnknownGroupError):
        admin.describe_group(group)
    with cluster.consumer(topic, group=group, **EARLIEST) as consumer:
        records: list[Record] = []
        while len(records) < 20:
            records += consumer.poll()
        consumer.commit(dict.fromkeys(places, 4))
        info = admin.describe_group(group)
        (member,) = info.members
        assert (info.state, info.lag, member.assigned) == ("stable", 12, places)
        assert {one.lag for one in info.partitions.values()} == {6}
        with pytest.raises(rayq.errors.GroupNotEmptyError):
            admin.set_group_offsets(group, topic, to="earliest")
    assert admin.describe_group(group).state == "empty"
    assert (group, "empty", 0) in [(g.group, g.state, g.members) for g in admin.list_groups()]
    assert admin.set_group_offsets(group, topic, to="earliest", dry_run=True) == dict.fromkeys(
        places, 0
    )
    assert admin.set_group_offsets(group, shift=2) == dict.fromkeys(places, 6)
    with cluster.consumer(topic, group=group, **EARLIEST) as consumer:
        records = settle([consumer], lambda: spread(consumer) == [2], "it has joined")
        while len(records) < 8:
            records += consumer.poll()
        assert min(record.offset for record in records) == 6
    admin.delete_group(group)
    with pytest.raises(rayq.errors.UnknownGroupError):
        admin.delete_group(group)
    with pytest.raises(rayq.errors.InvalidTopicError):
        cluster.create_topic("__consumer_offsets")
    assert "__consumer_offsets" not in admin.list_topics()


# --- asyncio, and many ----------------------------------------------------------------------------


def test_async_members_share_a_topic(
    cluster: LocalCluster, new_topic: NewTopic, group: str
) -> None:
    topic = new_topic(partitions=4)
    fill(cluster, topic, 4, 50)

    async def scenario() -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []

        async def work() -> None:
            async with cluster.async_consumer(
                topic, group=group, max_poll_records=10, **EARLIEST
            ) as consumer:
                while len(set(seen)) < 200:
                    records = await consumer.poll(timeout_s=0.1)
                    seen.extend((record.partition, record.offset) for record in records)
                    await consumer.commit()
                    await asyncio.sleep(0.005)

        async with asyncio.timeout(120):
            await asyncio.gather(work(), work())
        return seen

    seen = asyncio.run(scenario())
    assert sorted(seen) == [(number, offset) for number in range(4) for offset in range(50)]


def test_a_join_at_a_hundred_partitions_and_ten_members_is_settled_soon(
    new_topic: NewTopic, group: str, tmp_path: Any
) -> None:
    with LocalCluster(brokers=1, data_dir=tmp_path) as cluster:
        cluster.create_topic("wide", partitions=100)
        stop = threading.Event()
        members: list[Consumer] = []
        # With these settings a join that waited for a heartbeat's time would take minutes.
        slow = {"group_heartbeat_interval_ms": 300_000, "group_session_timeout_ms": 900_000}

        def poll(consumer: Consumer) -> None:
            while not stop.is_set():
                consumer.poll(timeout_s=0.5)
            consumer.close()

        def join() -> threading.Thread:
            consumer = cluster.consumer("wide", group=group, **slow)
            members.append(consumer)
            thread = threading.Thread(target=poll, args=(consumer,))
            thread.start()
            return thread

        threads = [join() for _ in range(9)]
        try:
            eventually(lambda: spread(*members) == [11] * 8 + [12], "nine share")
            started_s = time.monotonic()
            threads.append(join())
            eventually(lambda: spread(*members) == [10] * 10, "ten share")
            took_ms = (time.monotonic() - started_s) * 1000
            print(f"join at 100 partitions: {took_ms:.0f} ms until stable")  # noqa: T201
            assert took_ms < 60_000
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
