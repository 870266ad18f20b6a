"""Consumer groups: how long a rebalance takes, and how many commits a coordinator takes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import rayq
from benchmarks.report import Row
from proving.chaos.groups import is_settled
from proving.chaos.load import LoadSpec
from proving.chaos.members import Member
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.client.consuming.consumer import Consumer
from rayq.testing import LocalCluster

REPETITIONS = 4
POLL_TIMEOUT_S = 0.5
SETTLE_TIMEOUT_S = 600.0
CREATE_TIMEOUT_S = 600.0
"""These are no budgets: what takes so long hangs, also on a slow machine."""
LOOK_S = 0.002
STABLE_TARGET_MS = 500.0
LARGE_MEMBERS = 200
SETTLED_TARGET_S = 5.0
FIRST_RECORDS_TARGET_S = 5.0
HALF_LEFT_TARGET_S = 2.0
KILLED_TARGET_S = 2.0


class _One(NamedTuple):
    """A member, and the thread that polls it."""

    consumer: Consumer
    stop: threading.Event
    has_read: threading.Event
    thread: threading.Thread


class _Crowd:
    """Members in threads of this process that poll promptly."""

    def __init__(self, cluster: rayq.Cluster, topic: str, group: str) -> None:
        self._cluster = cluster
        self._topic = topic
        self._group = group
        self._members: list[_One] = []

    def join(self) -> None:
        consumer = self._cluster.consumer(
            self._topic, group=self._group, auto_offset_reset="earliest"
        )
        stop, has_read = threading.Event(), threading.Event()

        def poll() -> None:
            while not stop.is_set():
                if consumer.poll(timeout_s=POLL_TIMEOUT_S):
                    has_read.set()
            consumer.close()

        thread = threading.Thread(target=poll, daemon=True)
        thread.start()
        self._members.append(_One(consumer, stop, has_read, thread))

    def leave(self, count: int = 1) -> None:
        """Lets so many members leave at once. Returns when they have left."""
        leaving, self._members = self._members[-count:], self._members[:-count]
        for one in leaving:
            one.stop.set()
        for one in leaving:
            one.thread.join()

    def is_level(self, partitions: int) -> bool:
        """Whether all members have taken their share."""
        sizes = [len(one.consumer.assignment()) for one in self._members]
        return sum(sizes) == partitions and max(sizes) - min(sizes) <= 1

    def has_read(self) -> bool:
        """Whether each member has had a record."""
        return all(one.has_read.is_set() for one in self._members)

    def close(self) -> None:
        if self._members:
            self.leave(len(self._members))


def _wait(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"After {SETTLE_TIMEOUT_S:.0f} s still not: {what}")
        time.sleep(LOOK_S)


@contextmanager
def _topic(cluster: rayq.Cluster, partitions: int) -> Iterator[str]:
    """A topic with one replica for each partition: further replicas would play no part here."""
    cluster.admin.create_topic("of-members", partitions, 1, timeout_s=CREATE_TIMEOUT_S)
    yield "of-members"
    cluster.admin.delete_topic("of-members")


@contextmanager
def _crowd(
    cluster: rayq.Cluster, topic: str, partitions: int, members: int
) -> Iterator[_Crowd]:
    crowd = _Crowd(cluster, topic, "crowd")
    try:
        for _ in range(members):
            crowd.join()
        _wait(lambda: crowd.is_level(partitions), f"{members} members share")
        yield crowd
    finally:
        crowd.close()


def _joins(
    cluster: rayq.Cluster, topic: str, partitions: int, members: int, where: str
) -> Row:
    samples_ms = []
    with _crowd(cluster, topic, partitions, members - 1) as crowd:
        for _ in range(REPETITIONS):
            started_s = time.monotonic()
            crowd.join()
            _wait(lambda: crowd.is_level(partitions), "the newcomer has its share")
            samples_ms.append((time.monotonic() - started_s) * 1000)
            crowd.leave()
            _wait(lambda: crowd.is_level(partitions), "the others have it back")
    return Row(
        name=f"rebalance after a join, {partitions} partitions / {members} members, {where}",
        unit="ms",
        samples=samples_ms,
        target=STABLE_TARGET_MS,
        better="lower",
        note="until every member has taken its share; threads that poll promptly",
    )


def groups_local(directory: Path) -> list[Row]:
    """Groups where one process runs the servers and all members."""
    with LocalCluster(brokers=3, data_dir=str(directory / "groups-local")) as cluster:
        with _topic(cluster, 100) as topic:
            rows = [_joins(cluster, topic, 100, 10, "LocalCluster")]
        with _topic(cluster, LARGE_MEMBERS) as topic:
            return rows + _large_group(cluster, topic)


def _large_group(cluster: rayq.Cluster, topic: str) -> list[Row]:
    """A large group: all members begin together, and half of them leave together."""
    with cluster.producer() as producer:
        for partition in range(LARGE_MEMBERS):
            producer.send(topic, b"v", partition=partition)
    crowd = _Crowd(cluster, topic, "large")
    started_s = time.monotonic()
    try:
        for _ in range(LARGE_MEMBERS):
            crowd.join()
        _wait(lambda: crowd.is_level(LARGE_MEMBERS), f"{LARGE_MEMBERS} members share")
        settled_s = time.monotonic() - started_s
        _wait(crowd.has_read, "each member has read a record")
        first_records_s = time.monotonic() - started_s
        started_s = time.monotonic()
        crowd.leave(LARGE_MEMBERS // 2)
        half_left_s = time.monotonic() - started_s
        _wait(lambda: crowd.is_level(LARGE_MEMBERS), "the others have it all")
    finally:
        crowd.close()
    note = f"threads of the servers' process that poll {POLL_TIMEOUT_S:g} s at a time"
    return [
        Row(
            name=f"{LARGE_MEMBERS} members join at once: until each has its share",
            unit="s",
            samples=[settled_s],
            target=SETTLED_TARGET_S,
            better="lower",
            note=note,
        ),
        Row(
            name="  until each has a record",
            unit="s",
            samples=[first_records_s],
            target=FIRST_RECORDS_TARGET_S,
            better="lower",
        ),
        Row(
            name=f"  {LARGE_MEMBERS // 2} of them leave at once",
            unit="s",
            samples=[half_left_s],
            target=HALF_LEFT_TARGET_S,
            better="lower",
        ),
    ]


def groups(cluster: rayq.Cluster, directory: Path) -> list[Row]:
    """Groups on Ray: joins, a member that dies, commits."""
    partitions = 12
    with _topic(cluster, partitions) as topic:
        rows = [
            _joins(cluster, topic, partitions, 4, "Ray"),
            _kills(cluster, topic, partitions, directory),
        ]
    return rows + _commits(cluster)


def _kills(cluster: rayq.Cluster, topic: str, partitions: int, directory: Path) -> Row:
    group = "killed-members"
    spec = LoadSpec(
        ",".join(cluster.addresses),
        cluster.token,
        topic,
        partitions,
        str(directory / "history.jsonl"),
        records_per_s=0,
        seed=0,
    )
    members: list[Member] = []

    def add() -> None:
        members.append(Member(spec, group, f"member-{time.monotonic_ns()}"))
        members[-1].wait_joined()

    def settled() -> bool:
        return is_settled(cluster, group, len(members), partitions)

    samples_s = []
    try:
        for _ in range(4):
            add()
        _wait(settled, "four members share")
        for _ in range(REPETITIONS):
            started_s = time.monotonic()
            members.pop(0).kill()
            _wait(settled, "three members share")
            samples_s.append(time.monotonic() - started_s)
            add()
            _wait(settled, "four members share")
    finally:
        for member in members:
            member.abort()
    return Row(
        name="a member of 4 SIGKILLed, 12 partitions: until stable",
        unit="s",
        samples=samples_s,
        target=KILLED_TARGET_S,
        better="lower",
        note="1 s of it is the grace for a broken connection",
    )


COMMITTERS = 64
COMMITS_S = 3.0
COMMITS_TARGET_PER_S = 2000


def _commits(cluster: rayq.Cluster) -> list[Row]:
    """Commits of many consumers, one position after the other, and of one alone, for the
    latency."""
    cluster.create_topic("committed", partitions=1)
    per_s, alone_ms = asyncio.run(_commit_for_a_while(cluster))
    cluster.admin.delete_topic("committed")
    return [
        Row(
            name=f"commits of {COMMITTERS} consumers on one coordinator, acks=all, RF 3",
            unit="commits/s",
            samples=per_s,
            target=COMMITS_TARGET_PER_S,
            note="each waits for its answer before the next",
        ),
        Row(name="  of one consumer alone", unit="ms", samples=alone_ms, better="lower"),
    ]


async def _commit_for_a_while(cluster: rayq.Cluster) -> tuple[list[float], list[float]]:
    place = rayq.TopicPartition("committed", 0)
    consumers = [
        cluster.async_consumer(group=f"committer-{number}") for number in range(COMMITTERS)
    ]
    for consumer in consumers:
        await consumer.assign([place])
        await consumer.commit({place: 0})
    alone_ms: list[float] = []
    for number in range(200):
        started_s = time.perf_counter()
        await consumers[0].commit({place: number})
        alone_ms.append((time.perf_counter() - started_s) * 1000)
    per_s = [await _commit_round(consumers, place) for _ in range(3)]
    for consumer in consumers:
        await consumer.close()
    return per_s, alone_ms


async def _commit_round(consumers: list[AsyncConsumer], place: rayq.TopicPartition) -> float:
    started_s = time.monotonic()
    end_s = started_s + COMMITS_S

    async def commit(consumer: AsyncConsumer) -> int:
        count = 0
        while time.monotonic() < end_s:
            count += 1
            await consumer.commit({place: count})
        return count

    counts = await asyncio.gather(*(commit(consumer) for consumer in consumers))
    return sum(counts) / (time.monotonic() - started_s)
