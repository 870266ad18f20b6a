"""What is read of transactions from real leaders. Most tests play the producers and the coordinator
themselves."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from rayq import Cluster, TopicPartition
from rayq.actors.peers import Peers
from rayq.batch.offset_ranges import Split, end_offsets, snapshot, split_ranges
from rayq.batch.range_reader import read_range
from rayq.config import GIB
from rayq.errors import (
    FencedEpochError,
    NotLeaderError,
    OpenTransactionError,
    TransactionAbortedError,
    TransactionOutcomeUnknownError,
)
from rayq.messages import Produce, WriteMarker
from rayq.messages.transaction_ids import make_family
from rayq.runtime import cleaner_process
from rayq.storage.batch import encode_batch
from rayq.testing import LocalCluster
from rayq.wire.authentication import Identity
from tests.local.support import (
    ask,
    client_identity,
    eventually,
    leader_endpoint,
    leader_of,
    wait_in_sync,
)

NewTopic = Callable[..., str]
D = make_family(0, 9)
A, B, C = ((make_family(0, number), number) for number in range(1, 4))
Transaction = tuple[int, int]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test is the coordinator."""

    async def join(*_: object, principal: object) -> None:
        """The coordinator agrees."""

    monkeypatch.setattr(Peers, "join", join)


class Writer:
    """Writes and ends transactions in the partitions of a topic."""

    def __init__(self, cluster: LocalCluster, topic: str) -> None:
        self._cluster = cluster
        self._topic = topic
        self._sequences: Counter[tuple[int, Transaction]] = Counter()

    def write(self, of: Transaction, values: list[bytes], partition: int = 0) -> None:
        place = partition, of
        batch = encode_batch(
            values,
            values,
            producer_id=of[0],
            producer_epoch=of[1],
            base_sequence=self._sequences[place],
            is_transactional=True,
        )
        self._sequences[place] += len(values)
        self._ask(client_identity(self._cluster), Produce, partition, (-1, 60_000), batch)

    def end(self, of: Transaction, partitions: Iterable[int] = (0,), *, is_commit: bool = True) -> None:
        identity = Identity(
            role="server", key=self._cluster._servers.secret, cluster_id=None, broker=1
        )
        for partition in partitions:
            self._ask(identity, WriteMarker, partition, (*of, is_commit, 1), b"")

    def _ask(
        self,
        identity: Identity,
        kind: type[Any],
        partition: int,
        rest: tuple[Any, ...],
        payload: bytes | bytearray,
    ) -> None:
        while True:
            info = self._cluster.admin.describe_topic(self._topic)
            epoch = info.partitions[partition].leader_epoch
            request = kind(info.topic_id, partition, epoch, *rest)
            at = leader_endpoint(self._cluster, self._topic, partition)
            try:
                ask(at, identity, request, payload)
                return
            except (NotLeaderError, FencedEpochError):
                continue


def values(cluster: Cluster, splits: Iterable[Split], **options: Any) -> list[bytes]:
    batches = [batch for split in splits for batch in read_range(cluster, split, **options)]
    return [value for batch in batches for value in batch["value"].to_pylist()]


def consumed(cluster: Cluster, topic: str, **config: Any) -> list[bytes | None]:
    with cluster.consumer(topic, auto_offset_reset="earliest", **config) as consumer:
        found = [record.value for record in consumer.until_end(60)]
        assert set(consumer.lag().values()) == {0}
        return found


def interleave(cluster: LocalCluster, topic: str) -> Writer:
    """A aborts, B commits, C stays open; each before the others end."""
    writer = Writer(cluster, topic)
    writer.write(A, [b"a0"])
    writer.write(B, [b"b0"])
    writer.write(A, [b"a1", b"a2"])
    writer.end(B)
    writer.write(C, [b"c0"])
    writer.end(A, is_commit=False)
    with cluster.producer() as producer:
        producer.send(topic, b"n0", key=b"n0")
    return writer


@pytest.mark.usefixtures("played")
def test_consumers_of_both_levels(cluster: LocalCluster, topic: str) -> None:
    writer = interleave(cluster, topic)
    everything = [b"a0", b"b0", b"a1", b"a2", b"c0", b"n0"]
    assert consumed(cluster, topic) == [b"b0"]
    assert consumed(cluster, topic, isolation_level="read_uncommitted") == everything
    with cluster.consumer(topic, isolation_level="read_uncommitted") as consumer:
        consumer.seek_to_last(2)
        assert [record.value for record in consumer.until_end(60)] == [b"c0", b"n0"]
    writer.end(C)
    assert consumed(cluster, topic) == [b"b0", b"c0", b"n0"]
    with cluster.consumer(topic) as consumer:
        consumer.seek_to_last(3)
        assert [record.value for record in consumer.until_end(60)] == [b"b0", b"c0", b"n0"]


@pytest.mark.usefixtures("played")
def test_a_snapshot_waits_for_nobody_and_stays_as_it_was(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic = new_topic(partitions=2)
    writer = Writer(cluster, topic)
    for number in (0, 1):
        writer.write(A, [b"a"], number)
        writer.write(B, [b"b"], number)
        writer.write(C, [b"c"], number)
    writer.end(B, (0, 1))
    writer.end(C, (1, 0), is_commit=False)
    writer.end(A, (0,))
    taken = snapshot(cluster, topic)
    assert [read.without for read in taken] == [(A,), (A,)]
    assert values(cluster, taken) == [b"b", b"b"]
    writer.end(A, (1,))
    assert values(cluster, split_ranges(taken, 8)) == [b"b", b"b"]
    assert values(cluster, snapshot(cluster, topic)) == [b"a", b"b"] * 2


@pytest.mark.usefixtures("played")
def test_jobs_follow_each_other_by_the_last_stable_offset(
    cluster: LocalCluster, topic: str
) -> None:
    writer = interleave(cluster, topic)
    first = snapshot(cluster, topic, ending_offsets="last_stable")
    assert values(cluster, first) == [b"b0"]
    writer.end(C)
    second = snapshot(
        cluster, topic, starting_offsets=end_offsets(first), ending_offsets="last_stable"
    )
    assert values(cluster, second) == [b"c0", b"n0"]


@pytest.mark.usefixtures("played")
def test_a_range_with_a_given_end_says_for_whom_it_waits(
    cluster: LocalCluster, topic: str
) -> None:
    writer = interleave(cluster, topic)
    (taken,) = snapshot(cluster, topic, ending_offsets={TopicPartition(topic, 0): 7})
    with pytest.raises(OpenTransactionError, match=f"producer {C[0]}, epoch {C[1]}.*offset 5"):
        values(cluster, [taken], timeout_s=0.5)
    writer.end(C, is_commit=False)
    assert values(cluster, [taken]) == [b"b0"]


@pytest.mark.usefixtures("played")
def test_the_next_leader_shows_the_same(fragile: LocalCluster) -> None:
    fragile.create_topic("t")
    wait_in_sync(fragile, "t")
    writer = interleave(fragile, "t")
    taken = snapshot(fragile, "t")
    before = leader_of(fragile, "t")
    fragile.kill_replica("t", 0, before)
    eventually(lambda: leader_of(fragile, "t") != before, "another leader")
    assert values(fragile, taken) == [b"b0", b"n0"]
    assert consumed(fragile, "t") == [b"b0"]
    writer.end(C)
    assert consumed(fragile, "t") == [b"b0", b"c0", b"n0"]
    assert values(fragile, taken) == [b"b0", b"n0"]


@pytest.mark.usefixtures("played")
def test_compaction_changes_nothing_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleaner_process, "IDLE_PATIENCE_S", 1.0)
    with LocalCluster(
        brokers=1,
        data_dir=tmp_path / "data",
        compaction_check_interval_ms=100,
        compaction_bytes_per_s=GIB,
    ) as cluster:
        cluster.create_topic(
            "t",
            cleanup_policy="compact",
            segment_bytes=4096,
            min_cleanable_dirty_ratio=0.0,
            max_compaction_lag_ms=100,
            delete_retention_ms=0,
        )
        writer = interleave(cluster, "t")
        taken = snapshot(cluster, "t")
        writer.end(C)
        for epoch in range(10):
            writer.write((D, epoch), [b"d" * 3000])
            writer.end((D, epoch), is_commit=epoch < 5)

        def is_clean() -> bool:
            """Whether what was aborted is gone, and what was committed is there once."""
            found = consumed(cluster, "t", isolation_level="read_uncommitted")
            return found[:3] == [b"b0", b"c0", b"n0"] and len(found) <= 6

        eventually(is_clean, "the log is compacted")
        assert values(cluster, taken) == [b"b0", b"n0"]
        expected = [b"b0", b"c0", b"n0", b"d" * 3000]
        assert consumed(cluster, "t") == values(cluster, snapshot(cluster, "t")) == expected


class Load:
    """Producers that commit some transactions and abort others, from threads, until the end of the
    `with` block. Each record of a transaction is its name."""

    def __init__(self, cluster: LocalCluster, topic: str) -> None:
        self._cluster = cluster
        self._topic = topic
        self.records: dict[bytes, set[int]] = {}
        """How many records of each transaction may be visible in the end."""
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._write, args=(writer,)) for writer in range(3)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(120)

    def _write(self, writer: int) -> None:
        rng = random.Random(writer)
        with self._cluster.producer(transactional_id=f"{self._topic}-{writer}") as producer:
            for number in itertools.count():
                if self._over.is_set():
                    return
                name, count = b"%d-%d" % (writer, number), rng.randint(2, 20)
                self.records[name] = {0, count}
                try:
                    with producer.transaction():
                        for _ in range(count):
                            producer.send(self._topic, name, partition=rng.randrange(3))
                        if rng.random() < 0.3:
                            raise KeyError
                    self.records[name] = {count}
                except (KeyError, TransactionAbortedError):
                    self.records[name] = {0}
                except TransactionOutcomeUnknownError:
                    pass

    def check(self, found: Counter[bytes]) -> None:
        assert all(count in self.records[name] for name, count in found.items())


def test_snapshots_show_all_or_nothing_while_leaders_and_coordinators_die(
    fragile: LocalCluster,
) -> None:
    fragile.create_topic("t", partitions=3)
    taken: list[tuple[list[Split], Counter[bytes]]] = []
    with Load(fragile, "t") as load:
        eventually(lambda: len(load.records) > 9, "transactions are under way")
        for round_ in range(16):
            ranges = snapshot(fragile, "t")
            taken.append((ranges, Counter(values(fragile, ranges))))
            if round_ in (4, 10):
                for topic in ("t", "__transaction_state"):
                    fragile.kill_replica(topic, 0, leader_of(fragile, topic))
                    wait_in_sync(fragile, topic)
            time.sleep(0.1)
    assert any(ranges[0].without for ranges, _ in taken)
    for ranges, found in taken:
        load.check(found)
        assert Counter(values(fragile, split_ranges(ranges, 7))) == found
    everything = Counter(value for value in consumed(fragile, "t") if value is not None)
    load.check(everything)
    assert all(everything[name] in counts for name, counts in load.records.items())
