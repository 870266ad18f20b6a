"""Consumer groups: how long a rebalance takes, and how many commits a coordinator takes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import rayq
from benchmarks.report import Row
from rayq.client.consumer import AsyncConsumer, Consumer
from rayq.testing import LocalCluster
from rayq.testing.chaos.groups import is_settled
from rayq.testing.chaos.load import LoadSpec
from rayq.testing.chaos.members import Member

REPETITIONS = 4
POLL_TIMEOUT_S = 0.5
SETTLE_TIMEOUT_S = 600.0
CREATE_TIMEOUT_S = 600.0
"""No budgets: what takes so long on a slow machine, too, hangs."""
LOOK_S = 0.002
STABLE_TARGET_MS = 500.0
KILLED_TARGET_S = 2.0


class _Crowd:
    """Members in threads of this process that poll promptly."""

    def __init__(self, cluster: rayq.Cluster, topic: str, group: str) -> None:
        self._cluster = cluster
        self._topic = topic
        self._group = group
        self._members: list[tuple[Consumer, threading.Event, threading.Thread]] = []

    def join(self) -> None:
        consumer = self._cluster.consumer(self._topic, group=self._group)
        stop = threading.Event()

        def poll() -> None:
            while not stop.is_set():
                consumer.poll(timeout_s=POLL_TIMEOUT_S)
            consumer.close()

        thread = threading.Thread(target=poll, daemon=True)
        thread.start()
        self._members.append((consumer, stop, thread))

    def leave(self) -> None:
        _, stop, thread = self._members.pop()
        stop.set()
        thread.join()

    def is_level(self, partitions: int) -> bool:
        """Whether all members have taken their share."""
        sizes = [len(consumer.assignment()) for consumer, _, _ in self._members]
        return sum(sizes) == partitions and max(sizes) - min(sizes) <= 1

    def close(self) -> None:
        for _, stop, _ in self._members:
            stop.set()
        for _, _, thread in self._members:
            thread.join()


def _wait(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"After {SETTLE_TIMEOUT_S:.0f} s still not: {what}")
        time.sleep(LOOK_S)


@contextmanager
def _topic(cluster: rayq.Cluster, partitions: int) -> Iterator[str]:
    """With one replica for each partition: the others would play no part here."""
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
    """One process for servers and all members."""
    partitions = 100
    with (
        LocalCluster(brokers=3, data_dir=str(directory / "groups-local")) as cluster,
        _topic(cluster, partitions) as topic,
    ):
        return [_joins(cluster, topic, partitions, 10, "LocalCluster")]


def groups(cluster: rayq.Cluster, directory: Path) -> list[Row]:
    """On Ray: joins, a member that dies, commits."""
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
    """Many consumers that commit one position after the other; one alone, for the latency."""
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
