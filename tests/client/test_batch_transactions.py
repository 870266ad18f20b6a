"""What batch jobs read of transactions, against a played cluster."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayq.batch.offset_ranges import Split, end_offsets, snapshot, split_ranges
from rayq.batch.range_reader import read_range
from rayq.batch.task_writer import begin_write
from rayq.client.cluster import Cluster
from rayq.errors import OpenTransactionError, TimeoutError
from rayq.messages import (
    READ_COMMITTED,
    READ_UNCOMMITTED,
    DescribeOpenTransactions,
    DescribeOpenTransactionsResponse,
    Fetch,
    ListOffsets,
)
from rayq.records import TopicPartition
from rayq.storage.batch import read_header, without_transaction
from tests.client.fake_broker import FakeCluster
from tests.client.fake_transaction_log import (
    marker_batch,
    transaction,
    transactional_batch,
)

Eventually = Callable[[Callable[[], bool]], None]
A, B = transaction(1), transaction(2, epoch=3)


def values(cluster: Cluster, splits: Sequence[Split], **options: Any) -> list[str]:
    batches = [batch for one in splits for batch in read_range(cluster, one, **options)]
    return [value.decode() for batch in batches for value in batch["value"].to_pylist()]


def test_a_snapshot_of_ordinary_topics_asks_as_often_as_before_there_were_transactions(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t", partitions=3)
    fake.write("t", [b"n0"], 1)
    taken = snapshot(cluster, "t")
    assert [(one.start, one.end, one.without) for one in taken] == [(0, 0, ()), (0, 1, ()), (0, 0, ())]
    assert len(fake.asked(ListOffsets)) == len(fake.asked(DescribeOpenTransactions)) == 3
    assert values(cluster, taken) == ["n0"]


def test_a_snapshot_leaves_out_what_is_open_in_every_partition_and_forever(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t", partitions=2)
    fake.write_in(A, "t", [b"a0"], 0)
    fake.write("t", [b"n0"], 0)
    fake.write_in(A, "t", [b"a1"], 1, writer=5)
    fake.write_in(B, "t", [b"b0"], 0)
    fake.write_in(B, "t", [b"b1"], 1)
    fake.end_in(B, "t", 0)
    fake.end_in(B, "t", 1)
    fake.end_in(A, "t", 0)  # Its other marker is not written yet.
    taken = snapshot(cluster, "t")
    assert [(one.end, one.without) for one in taken] == [(5, (A,)), (3, (A,))]
    expected = ["n0", "b0", "b1"]
    assert values(cluster, taken) == expected, "it waits for nobody"
    fake.end_in(A, "t", 1)
    fake.write("t", [b"later"], 1)
    assert values(cluster, taken) == expected
    assert values(cluster, split_ranges(taken, 6)) == expected
    batches = fake.topics["t"].partitions[0].batches
    data = without_transaction(batches[0][1])
    fake.call(lambda: batches.__setitem__(0, (read_header(data), data)))
    assert values(cluster, taken) == expected, "compaction clears the bit of what is committed"
    assert values(cluster, snapshot(cluster, "t")) == ["a0", "n0", "b0", "a1", "b1", "later"]


def test_a_snapshot_shows_no_aborted_record_whatever_is_open_before_it(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    fake.write_in(A, "t", [b"a0"])
    fake.write_in(B, "t", [b"b0", b"b1"])
    fake.end_in(B, "t", is_commit=False)
    fake.write("t", [b"n0"])
    taken = snapshot(cluster, "t")
    assert values(cluster, taken) == ["n0"]
    assert {one.isolation for one in fake.asked(Fetch)} == {READ_UNCOMMITTED}
    fake.end_in(A, "t", is_commit=False)
    assert values(cluster, taken) == ["n0"]


def test_what_ends_between_the_two_passes_is_left_out(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t", partitions=2)
    fake.write_in(A, "t", [b"a0"], 1)

    def lives_meanwhile(request: DescribeOpenTransactions, _: int) -> bool:
        """B writes to both partitions and commits after partition 0 has answered the second time,
        and before partition 1 has."""
        if request.since_offset is not None and request.partition == 1:
            for partition in fake.topics["t"].partitions:
                fake.append(partition, transactional_batch([b"b"], B))
            for partition in fake.topics["t"].partitions:
                fake.append(partition, marker_batch(B, is_commit=True))
        return False

    fake.fault(DescribeOpenTransactions, matches=lives_meanwhile)
    taken = snapshot(cluster, "t")
    assert [(one.end, one.without) for one in taken] == [(0, (A, B)), (3, (A, B))]
    assert values(cluster, taken) == []


def test_a_cut_begins_again_where_a_leader_that_was_replaced_has_answered(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t", partitions=2)
    for partition in (0, 1):
        fake.write_in(A, "t", [b"a%d" % partition], partition)
        fake.end_in(A, "t", partition)
    fake.move_leader("t", 1, 1)
    before = {"high_watermark": 0, "last_stable_offset": 0, "leader_epoch": 1}
    fake.fault(
        DescribeOpenTransactions,
        matches=lambda request, _: request.partition == 1,
        carry_out=True,
        times=2,
        change=lambda answer, data: (msgspec.structs.replace(answer, **before), data),
    )
    assert values(cluster, snapshot(cluster, "t")) == ["a0", "a1"]


def test_a_cut_begins_again_where_compaction_removed_markers_meanwhile(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    fake.write_in(A, "t", [b"a0"])
    fake.fault(
        DescribeOpenTransactions,
        carry_out=True,
        times=2,
        change=lambda answer, data: (_cleaned(answer), data),
        matches=lambda request, _: request.since_offset is not None,
    )
    assert [(one.end, one.without) for one in snapshot(cluster, "t")] == [(1, (A,))]
    assert len(fake.asked(DescribeOpenTransactions)) == 4
    fake.fault(
        DescribeOpenTransactions,
        carry_out=True,
        times=10**6,
        change=lambda answer, data: (_cleaned(answer), data),
        matches=lambda request, _: request.since_offset is not None,
    )
    with pytest.raises(TimeoutError, match="delete_retention_ms"):
        snapshot(cluster, "t", timeout_s=0.2)


def _cleaned(answer: DescribeOpenTransactionsResponse) -> DescribeOpenTransactionsResponse:
    return DescribeOpenTransactionsResponse(
        answer.high_watermark, answer.last_stable_offset, answer.open, None
    )


# --- jobs that follow each other ------------------------------------------------------------------


def test_jobs_that_end_at_the_last_stable_offset_follow_each_other(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    fake.write("t", [b"n0"])
    fake.write_in(A, "t", [b"a0"])
    fake.write("t", [b"n1"])
    first = snapshot(cluster, "t", ending_offsets="last_stable")
    assert [(one.end, one.without) for one in first] == [(1, None)]
    assert values(cluster, first) == ["n0"]
    fake.end_in(A, "t")
    second = snapshot(
        cluster, "t", starting_offsets=end_offsets(first), ending_offsets="last_stable"
    )
    assert values(cluster, second) == ["a0", "n1"]


def test_a_start_at_latest_is_where_the_range_ends(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    fake.write_in(A, "t", [b"a0"])
    for end, expected in (("latest", 1), ("last_stable", 0)):
        (taken,) = snapshot(cluster, "t", starting_offsets="latest", ending_offsets=end)
        assert (taken.start, taken.end) == (expected, expected)


def test_a_position_above_the_last_stable_offset_does_not_go_back(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    fake.write_in(A, "t", [b"a0", b"a1"])
    starts = {TopicPartition("t", 0): 2}
    (taken,) = snapshot(cluster, "t", starting_offsets=starts, ending_offsets="last_stable")
    assert (taken.start, taken.end) == (2, 2)


# --- ends that users name -------------------------------------------------------------------------


def test_a_range_with_a_given_end_waits_for_the_transactions_in_it(
    fake: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    fake.create_topic("t")
    fake.write("t", [b"n0"])
    fake.write_in(A, "t", [b"a0"])
    fake.write("t", [b"n1"])
    taken = snapshot(cluster, "t", ending_offsets={TopicPartition("t", 0): 3})
    assert taken[0].without is None
    read: list[str] = []
    reading = threading.Thread(target=lambda: read.extend(values(cluster, taken)))
    reading.start()
    eventually(lambda: any(one.offset == 1 for one in fake.asked(Fetch)))
    assert reading.is_alive() and not read
    fake.end_in(A, "t")
    reading.join(20)
    assert read == ["n0", "a0", "n1"]
    assert {one.isolation for one in fake.asked(Fetch)} == {READ_COMMITTED}


def test_a_range_that_waits_too_long_says_for_whom(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    fake.write("t", [b"n0"])
    fake.write_in(A, "t", [b"a0"])
    fake.write_in(B, "t", [b"b0"])
    for end, is_open in ((1, False), (2, True), (3, True)):
        taken = snapshot(cluster, "t", ending_offsets={TopicPartition("t", 0): end})
        if not is_open:
            assert values(cluster, taken, timeout_s=0.3) == ["n0"]
            continue
        with pytest.raises(OpenTransactionError, match=f"producer {A[0]}, epoch 0.*offset 1"):
            values(cluster, taken, timeout_s=0.3)


def test_an_end_by_time_waits_and_one_after_all_records_does_not(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    fake.write_in(A, "t", [b"a0"], timestamps_ms=1000)
    fake.write("t", [b"n0"], timestamps_ms=2000)
    (at,) = snapshot(cluster, "t", ending_timestamp=2000)
    assert (at.end, at.without) == (1, None)
    (after,) = snapshot(cluster, "t", ending_timestamp=3000)
    assert (after.end, after.without) == (2, (A,))
    assert values(cluster, [after]) == ["n0"]


# --- jobs that write ------------------------------------------------------------------------------


def test_a_write_begins_at_the_high_watermark_whatever_is_open(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    fake.write_in(A, "t", [b"a0"])
    assert begin_write(cluster, "t").start_offsets == [1]


# --- any interleaving -----------------------------------------------------------------------------


class Writers:
    """Transactions over the partitions of a topic, which go on a little before each question."""

    def __init__(self, fake: FakeCluster, topic: str, seed: int) -> None:
        self._fake = fake
        self._random = random.Random(seed)
        self._partitions = fake.topics[topic].partitions
        self._open: list[tuple[int, list[int]]] = []
        self._ending: list[tuple[int, bool, list[int]]] = []
        self.written: dict[bytes, int] = {}
        """Records of each transaction that were acknowledged."""
        self.aborted: set[bytes] = set()

    def go_on(self, _request: object, _broker: int) -> bool:
        for _ in range(self._random.randrange(12)):
            self._step()
        return False

    def settle(self) -> None:
        """Ends what is open, and writes all markers."""
        while self._open or self._ending:
            self._end()

    def _step(self) -> None:
        if self._random.random() < 0.5:
            self._write()
        else:
            self._end()

    def _write(self) -> None:
        if len(self._open) < 3:
            self._open.append((len(self.written), []))
            self.written[b"%d" % self._open[-1][0]] = 0
        number, joined = self._random.choice(self._open)
        partition = self._random.choice(self._partitions)
        batch = transactional_batch([b"%d" % number] * 2, transaction(number))
        self._fake.append(partition, batch)
        self.written[b"%d" % number] += 2
        joined.append(partition.number)

    def _end(self) -> None:
        if self._open and self._random.random() < 0.4:
            number, joined = self._open.pop(self._random.randrange(len(self._open)))
            is_commit = self._random.random() < 0.7
            self._ending.append((number, is_commit, sorted(set(joined))))
            if not is_commit:
                self.aborted.add(b"%d" % number)
        if self._ending:
            number, is_commit, left = self._random.choice(self._ending)
            if not left:
                self._ending.remove((number, is_commit, left))
                return
            partition = self._partitions[left.pop(self._random.randrange(len(left)))]
            self._fake.append(partition, marker_batch(transaction(number), is_commit=is_commit))


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_any_snapshot_reads_all_or_nothing_of_each_transaction_now_and_later(
    fake: FakeCluster, cluster: Cluster, seed: int
) -> None:
    topic = f"t{len(fake.topics)}"
    fake.create_topic(topic, partitions=3)
    writers = Writers(fake, topic, seed)
    fake.clear_faults()
    for kind in (DescribeOpenTransactions, Fetch):
        fake.fault(kind, times=10**9, matches=writers.go_on)
    taken = [snapshot(cluster, topic) for _ in range(4)]
    found = [Counter(values(cluster, one)) for one in taken]
    fake.clear_faults()
    fake.call(writers.settle)
    for ranges, before in zip(taken, found, strict=True):
        for value, count in before.items():
            assert value.encode() not in writers.aborted
            assert count == writers.written[value.encode()], ranges
        assert Counter(values(cluster, split_ranges(ranges, 9))) == before
