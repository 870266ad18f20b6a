"""Read, process, write: the positions of a consumer go with a transaction, or it goes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rayq.client.cluster import Cluster
from rayq.errors import (
    CommitRefusedError,
    InvalidRequestError,
    OffsetPendingError,
    TransactionAbortedError,
    TransactionOutcomeUnknownError,
)
from rayq.messages import CommitOffsets, EndTransaction, FetchCommitted, Produce
from rayq.records import TopicPartition
from tests.client.fake_broker import FakeCluster
from tests.client.test_group_consumer import FAST, numbers, poll_until, read

Eventually = Callable[[Callable[[], bool]], None]
T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


@pytest.fixture
def two(fake: FakeCluster) -> FakeCluster:
    """A topic of two partitions with ten records each, and one to write to."""
    fake.create_topic("t", partitions=2)
    fake.create_topic("out")
    for partition in range(2):
        fake.write("t", numbers(0, 10), partition)
    return fake


def committed(fake: FakeCluster) -> list[int | None]:
    return [fake.groups.committed("t", 0), fake.groups.committed("t", 1)]


def test_positions_go_with_the_transaction(two: FakeCluster, cluster: Cluster) -> None:
    with (
        cluster.consumer("t", group="g", **FAST) as consumer,
        cluster.producer(transactional_id="id") as producer,
    ):
        with producer.transaction(reads=consumer) as tx:
            for record in read(consumer, 20):
                tx.send("out", record.value)
        assert committed(two) == [10, 10]
        (request,) = two.asked(CommitOffsets)
        membership = consumer.group_membership()
        assert (request.member, request.member_epoch) == (
            membership.member, membership.member_epoch,
        )
        with producer.transaction(reads=consumer):  # There is nothing new.
            consumer.poll(timeout_s=0.01)
        assert len(two.asked(CommitOffsets)) == len(two.asked(EndTransaction)) == 1
        two.write("t", numbers(10, 12))
        with producer.transaction() as tx:
            read(consumer, 2)
            tx.send_offsets(consumer)
        assert committed(two) == [12, 10]


@pytest.mark.parametrize("is_iterated", [False, True])
def test_what_an_aborted_transaction_read_is_read_again(
    two: FakeCluster, cluster: Cluster, is_iterated: bool
) -> None:
    two.groups.commit("t", 0, 4)

    def read_again() -> None:
        """Records from what is committed on; which partition comes first is open."""
        records = [next(consumer) for _ in range(8)] if is_iterated else read(consumer, 16)
        for partition, start in ((0, 4), (1, 0)):
            offsets = [record.offset for record in records if record.partition == partition]
            assert offsets == list(range(start, start + len(offsets)))

    with (
        cluster.consumer("t", group="g", **FAST) as consumer,
        cluster.producer(transactional_id="id") as producer,
    ):
        with pytest.raises(ValueError), producer.transaction(reads=consumer):
            read_again()
            raise ValueError
        assert committed(two) == [4, None]
        with pytest.raises(ValueError), producer.transaction(reads=consumer):
            read_again()
            raise ValueError
        two.fault(Produce, error=InvalidRequestError("never"))
        with pytest.raises(TransactionAbortedError), producer.transaction(reads=consumer) as tx:
            read_again()
            tx.send("out", b"v")
        with producer.transaction(reads=consumer):
            read_again()
        assert committed(two) == ([10, 10] if not is_iterated else committed(two))


def test_after_a_commit_in_doubt_reading_goes_on_at_what_is_committed(
    two: FakeCluster, cluster: Cluster
) -> None:
    with (
        cluster.consumer("t", group="g", **FAST) as consumer,
        cluster.producer(transactional_id="id", max_block_ms=300) as producer,
    ):
        poll_until(consumer, lambda: consumer.assignment() == {T0, T1})
        consumer.seek_to_beginning()
        with pytest.raises(TransactionOutcomeUnknownError), producer.transaction(reads=consumer):
            read(consumer, 20)
            two.groups.commit("t", 0, 7)
            two.fault(EndTransaction, times=1000, is_lost=True)
        assert sorted((record.partition, record.offset) for record in read(consumer, 13)) == [
            (0, 7), (0, 8), (0, 9), *((1, offset) for offset in range(10)),
        ]


def test_a_partition_that_goes_in_the_middle_makes_the_transaction_fail(
    two: FakeCluster, cluster: Cluster
) -> None:
    with (
        cluster.consumer("t", group="g", **FAST) as consumer,
        cluster.producer(transactional_id="id") as producer,
    ):
        with (
            pytest.raises(TransactionAbortedError, match="run it again.*t-1"),
            producer.transaction(reads=consumer),
        ):
            read(consumer, 20)
            two.groups.grant(("t", 0))
            poll_until(consumer, lambda: consumer.assignment() == {T0})
        assert committed(two) == [None, None]
        with producer.transaction(reads=consumer):  # What it still has is read again.
            assert {one.partition for one in read(consumer, 10)} == {0}
        assert committed(two) == [10, None]


def test_a_refusal_that_the_block_ignores_aborts_all_the_same(
    two: FakeCluster, cluster: Cluster
) -> None:
    with (
        cluster.consumer("t", group="g", **FAST) as consumer,
        cluster.producer(transactional_id="id") as producer,
        pytest.raises(TransactionAbortedError),
        producer.transaction() as tx,
    ):
        read(consumer, 20)
        two.groups.grant(("t", 0))
        poll_until(consumer, lambda: consumer.assignment() == {T0})
        with pytest.raises(CommitRefusedError):
            tx.send_offsets(consumer)


def test_positions_that_were_sent_before_their_partition_went_are_in_the_transaction(
    two: FakeCluster, cluster: Cluster
) -> None:
    with (
        cluster.consumer("t", group="g", **FAST) as consumer,
        cluster.producer(transactional_id="id") as producer,
    ):
        with producer.transaction() as tx:
            read(consumer, 20)
            tx.send_offsets(consumer)
            two.groups.grant(("t", 0))
            poll_until(consumer, lambda: consumer.assignment() == {T0})
            tx.send_offsets(consumer)
        assert committed(two) == [10, 10]


@pytest.mark.parametrize("is_noticed", [False, True])
def test_a_member_that_is_out_commits_nothing(
    two: FakeCluster, cluster: Cluster, is_noticed: bool
) -> None:
    lost: list[set[TopicPartition]] = []
    with (
        cluster.consumer("t", group="g", on_lost=lost.append, **FAST) as consumer,
        cluster.producer(transactional_id="id") as producer,
    ):
        with pytest.raises(TransactionAbortedError), producer.transaction(reads=consumer):
            read(consumer, 20)
            two.groups.forget_member()
            if is_noticed:
                poll_until(consumer, lambda: bool(lost))
        assert committed(two) == [None, None]
        with producer.transaction(reads=consumer):
            read(consumer, 20)
        assert committed(two) == [10, 10]


def test_a_partition_is_not_read_while_a_transaction_holds_its_position(
    two: FakeCluster, cluster: Cluster
) -> None:
    two.groups.commit("t", 0, 4)
    two.groups.commit("t", 1, 4)
    two.fault(FetchCommitted, times=5, error=OffsetPendingError("a transaction is open"))
    with cluster.consumer("t", group="g", retry_backoff_ms=10, **FAST) as consumer:
        assert {record.offset for record in read(consumer, 12)} == set(range(4, 10))


def test_a_consumer_that_commits_by_itself_is_refused(two: FakeCluster, cluster: Cluster) -> None:
    options: list[dict[str, Any]] = [{"group": "g", "enable_auto_commit": True}, {}]
    for more in options:
        with (
            cluster.consumer("t", **more) as consumer,
            cluster.producer(transactional_id="id") as producer,
        ):
            with pytest.raises(InvalidRequestError), producer.transaction(reads=consumer):
                pass
            with pytest.raises(InvalidRequestError), producer.transaction() as tx:
                tx.send_offsets(consumer)


def test_what_is_no_consumer_of_this_kind_is_refused_at_once(
    two: FakeCluster, cluster: Cluster
) -> None:
    with (
        cluster.producer(transactional_id="id") as producer,
        cluster.consumer("t", group="g", **FAST) as consumer,
    ):
        wrong: list[Any] = ["t", 7]
        for reads in wrong:
            with pytest.raises(TypeError, match=r"cluster\.consumer"):
                producer.transaction(reads=reads)
            with producer.transaction() as tx, pytest.raises(TypeError):
                tx.send_offsets(reads)
        with producer.transaction() as tx, pytest.raises(TypeError, match="leave out group"):
            tx.send_offsets(consumer, group="other")

    async def on_a_loop() -> None:
        async with (
            cluster.async_producer(transactional_id="id") as producer,
            cluster.async_consumer("t", group="g") as of_a_loop,
        ):
            with pytest.raises(TypeError, match="AsyncConsumer"):
                producer.transaction(reads=consumer)  # type: ignore[arg-type]
            with (
                cluster.producer(transactional_id="other") as other,
                pytest.raises(TypeError, match=r"cluster\.consumer"),
            ):
                other.transaction(reads=of_a_loop)  # type: ignore[arg-type]

    asyncio.run(on_a_loop())


@pytest.mark.parametrize("is_polled_before", [False, True])
def test_what_an_aborted_transaction_dealt_with_is_read_again(
    two: FakeCluster, cluster: Cluster, is_polled_before: bool
) -> None:
    with (
        cluster.consumer("t", group="g", **FAST) as consumer,
        cluster.producer(transactional_id="id") as producer,
    ):
        for _ in range(2):
            if is_polled_before:
                read(consumer, 20)
            with pytest.raises(KeyError), producer.transaction(reads=consumer):
                if not is_polled_before:
                    read(consumer, 20)
                raise KeyError
        assert committed(two) == [None, None]
        with producer.transaction(reads=consumer):
            read(consumer, 20)
        assert committed(two) == [10, 10]
