"""Transactions of a producer against a coordinator that a test plays, with faults."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from rayq.client import finalizers
from rayq.client.cluster import Cluster
from rayq.client.producing import transaction_core
from rayq.errors import (
    AlreadyCommittedError,
    ClosedError,
    CommitRefusedError,
    ConfigError,
    DeliveryError,
    DiskFullError,
    InvalidRequestError,
    ProducerFencedError,
    RayqError,
    RecordTooLargeError,
    TimeoutError,
    TransactionAbortedError,
    TransactionCommittedError,
    TransactionEndedError,
    TransactionOutcomeUnknownError,
    UnknownMemberError,
    UnknownTopicError,
)
from rayq.messages import (
    AllocateProducerId,
    AnyRequest,
    CommitOffsets,
    EndTransaction,
    InitProducer,
    Produce,
)
from rayq.messages.transaction_ids import make_family
from rayq.records import OffsetAndMetadata, TopicPartition
from tests.client.fake_broker import FakeCluster

Eventually = Callable[[Callable[[], bool]], None]
FAMILY = make_family(0, 0)


def numbers(fake: FakeCluster, topic: str = "t", partition: int = 0) -> list[tuple[int, int]]:
    """Epoch and first sequence of each batch."""
    headers = fake.headers(topic, partition)
    assert all(header.producer_id == FAMILY and header.is_transactional for header in headers)
    return [(header.producer_epoch, header.base_sequence or 0) for header in headers]


def ends(fake: FakeCluster) -> list[tuple[int, bool]]:
    """Epoch and wish of each request for an end."""
    return [(asked.epoch, asked.is_commit) for asked in fake.asked(EndTransaction)]


# --- all or none ----------------------------------------------------------------------------------


def test_a_block_commits_what_it_sent_to_all_partitions(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t", partitions=2)
    with cluster.producer(transactional_id="billing") as producer:
        with producer.transaction() as tx:
            first = tx.send("t", b"a", partition=0)
            tx.send_many("t", [b"b", b"c"], partition=1)
            producer.send("t", b"d", partition=1)
        assert first.done()
        assert fake.transactions.committed("t", 0) == [b"a"]
        assert fake.transactions.committed("t", 1) == [b"b", b"c", b"d"]
        with producer.transaction() as tx:
            tx.send("t", b"e", partition=0)
    assert ends(fake) == [(0, True), (1, True)]
    assert numbers(fake) == [(0, 0), (1, 0)], "each transaction has an epoch, and counts from 0"
    assert len(fake.asked(InitProducer)) == 1
    assert not fake.asked(AllocateProducerId)


def test_an_exception_aborts_and_goes_on(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    with cluster.producer(transactional_id="billing") as producer:
        for error in (ValueError("mine"), KeyboardInterrupt()):
            with pytest.raises(type(error)), producer.transaction() as tx:
                tx.send("t", b"not this").result(timeout=30)
                raise error
        with producer.transaction() as tx:
            tx.send("t", b"this")
    assert fake.values("t") == [b"not this", b"not this", b"this"]
    assert fake.transactions.committed("t") == [b"this"]
    assert ends(fake) == [(0, False), (1, False), (2, True)]


def test_a_topic_hidden_in_the_middle_of_a_transaction_gets_no_number_twice(
    fake: FakeCluster, cluster: Cluster
) -> None:
    topic = fake.create_topic("t")
    fake.create_topic("u")
    with cluster.producer(transactional_id="billing") as producer:
        with producer.transaction() as tx:
            tx.send("t", b"a").result(30)
            fake.delete_topic("t")
            tx.send("u", b"b").result(30)  # The metadata that this needs have no t.
            fake.bring_back(topic)
            assert tx.send("t", b"c").result(30).offset == 1
        assert fake.transactions.committed("t") == [b"a", b"c"]
        with producer.transaction() as tx:
            tx.send("t", b"d")
    assert numbers(fake) == [(0, 0), (0, 1), (1, 0)]


def test_what_was_not_sent_yet_is_not_sent_when_a_block_aborts(
    fake: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    fake.create_topic("t")
    held = fake.fault(Produce, is_held=True, carry_out=True)
    with cluster.producer(
        transactional_id="billing", max_in_flight_requests_per_connection=1
    ) as producer:
        with pytest.raises(ValueError, match="mine"), producer.transaction() as tx:
            under_way = tx.send("t", b"under way")
            eventually(lambda: len(fake.asked(Produce)) == 1)
            waits = tx.send("t", b"waits")
            raise ValueError("mine")
        for future in (under_way, waits):
            assert isinstance(future.exception(timeout=30), TransactionAbortedError)
        fake.release(held)
        with producer.transaction() as tx:
            tx.send("t", b"next")
    assert b"waits" not in fake.values("t")
    assert fake.transactions.committed("t") == [b"next"]


def test_the_explicit_calls_do_the_same(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    with cluster.producer(transactional_id="billing") as producer:
        tx = producer.begin_transaction()
        producer.send("t", b"no")
        tx.send("t", b"no")
        producer.abort_transaction()
        producer.begin_transaction()
        producer.send("t", b"yes")
        producer.commit_transaction()
        for call in (producer.commit_transaction, producer.abort_transaction):
            with pytest.raises(InvalidRequestError, match="not open"):
                call()
    assert fake.transactions.committed("t") == [b"yes"]


def test_what_sent_nothing_and_has_no_name_asks_for_nothing(
    fake: FakeCluster, cluster: Cluster
) -> None:
    with cluster.producer(transactional_id="billing") as producer:
        with producer.transaction():
            pass
        with pytest.raises(ValueError), producer.transaction():
            raise ValueError
        assert not fake.asked(EndTransaction)
        with producer.transaction(name="n"):
            pass
    assert ends(fake) == [(0, True)]


def test_asyncio_has_the_same(fake: FakeCluster) -> None:
    fake.create_topic("t")

    async def scenario() -> None:
        cluster = fake.cluster()
        async with cluster.async_producer(transactional_id="billing") as producer:
            with pytest.raises(InvalidRequestError, match="outside"):
                await producer.send("t", b"outside")
            async with producer.transaction() as tx:
                await tx.send("t", b"a")
                await tx.send_many("t", [b"b"])
                await tx.send_offsets({TopicPartition("t", 0): 5}, group="g")
                with pytest.raises(InvalidRequestError, match="one at a time"):
                    async with producer.transaction():
                        pass
            with pytest.raises(ValueError):
                async with producer.transaction() as tx:
                    await tx.send("t", b"no")
                    raise ValueError
            await producer.begin_transaction(name="n")
            await producer.send("t", b"c")
            await producer.commit_transaction()
            with pytest.raises(AlreadyCommittedError):
                await producer.begin_transaction(name="n")
            await producer.begin_transaction()
            await producer.abort_transaction()

    asyncio.run(scenario())
    assert fake.transactions.committed("t") == [b"a", b"b", b"c"]
    assert fake.groups.committed("t") == 5


# --- what is refused ------------------------------------------------------------------------------


def test_records_belong_to_a_transaction_or_are_refused(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    with cluster.producer(transactional_id="billing") as producer:
        calls: list[Callable[[], Any]] = [
            lambda: producer.send("t", b"v"),
            lambda: producer.send("no such topic", b"v"),
            lambda: producer.send_many("t", [b"v"]),
            lambda: producer.send_and_wait("t", b"v"),
        ]
        for call in calls:
            with pytest.raises(InvalidRequestError, match="outside of a transaction"):
                call()
        with producer.transaction() as tx:
            with pytest.raises(InvalidRequestError, match="one at a time"):
                producer.begin_transaction()
            tx.send("t", b"v")
        for call in calls:
            with pytest.raises(InvalidRequestError, match="outside of a transaction"):
                call()
        with producer.transaction():
            with pytest.raises(InvalidRequestError, match="not open"):
                tx.send("t", b"of the one before")
    assert fake.values("t") == [b"v"]


def test_a_send_while_the_transaction_ends_is_refused(
    fake: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    fake.create_topic("t")
    with cluster.producer(transactional_id="billing") as producer:
        for kind in (Produce, EndTransaction):
            held = fake.fault(kind, is_held=True, carry_out=True)
            before = len(fake.asked(kind))
            tx = producer.begin_transaction()
            tx.send("t", b"v")
            thread = threading.Thread(target=producer.commit_transaction)
            thread.start()
            eventually(lambda: len(fake.asked(kind)) > before)  # noqa: B023
            eventually(lambda: tx._transactions.state.phase == "ending")  # noqa: B023
            with pytest.raises(InvalidRequestError, match="ends"):
                producer.send("t", b"too late")
            fake.release(held)
            thread.join()
    assert fake.transactions.committed("t") == [b"v", b"v"]


@pytest.mark.parametrize(
    "config",
    [
        {"transactional_id": ""},
        {"transactional_id": "x" * 257},
        {"transactional_id": "\ud800"},
        {"transactional_id": 7},
        {"transactional_id": "x", "acks": 1},
        {"transactional_id": "x", "enable_idempotence": False},
        {"transactional_id": "x", "transaction_timeout_ms": 10},
    ],
)
def test_a_config_that_cannot_be_is_refused(cluster: Cluster, config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        cluster.producer(**config)


def test_a_block_whose_end_never_came_can_be_aborted_by_hand(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    with cluster.producer(transactional_id="billing") as producer:
        tx = producer.transaction().__enter__()
        tx.send("t", b"no").result(timeout=30)
        producer.abort_transaction()
        with producer.transaction() as tx:
            tx.send("t", b"yes")
    assert fake.transactions.committed("t") == [b"yes"]


def test_numbers_that_lay_idle_for_long_are_asked_for_again(
    fake: FakeCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.create_topic("t")
    monkeypatch.setattr(transaction_core, "NUMBERS_AGE_MAX_S", 0.0)
    with cluster.producer(transactional_id="billing") as producer:
        for forgets in (False, True, False):
            if forgets:
                fake.call(fake.transactions.producers.clear)
            with producer.transaction() as tx:
                tx.send("t", b"v")
    assert len(fake.transactions.committed("t")) == 3


def test_wrong_arguments_say_what_to_do(fake: FakeCluster, cluster: Cluster) -> None:
    with cluster.producer() as plain:
        with pytest.raises(InvalidRequestError, match="transactional_id"):
            plain.transaction()
        with pytest.raises(InvalidRequestError, match="begun"):
            plain.commit_transaction()
    with cluster.producer(transactional_id="billing") as producer:
        for name in ("", "x" * 257, "\ud800"):
            with pytest.raises(InvalidRequestError, match="256"):
                producer.transaction(name=name)
        with pytest.raises(TypeError):
            producer.transaction(name=7)  # type: ignore[arg-type]


# --- failures of records --------------------------------------------------------------------------


def test_a_record_that_fails_has_its_transaction_aborted_and_the_block_can_be_run_again(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t", partitions=2)
    with cluster.producer(transactional_id="billing") as producer:
        for attempt in range(2):
            if attempt == 0:
                fake.fault(Produce, error=RecordTooLargeError("too large"))
            try:
                with producer.transaction() as tx:
                    bad = tx.send("t", b"bad", partition=0)
                    tx.send("t", b"good", partition=1)
                break
            except TransactionAbortedError as error:
                assert isinstance(error.__cause__, RecordTooLargeError | TransactionAbortedError)
                assert str(error).endswith(f"The reason: {error.__cause__}"), "it may be a command"
                assert bad.exception(timeout=0) is not None
        assert attempt == 1
        producer.flush()
    assert fake.transactions.committed("t", 0) == [b"bad"]
    assert fake.transactions.committed("t", 1) == [b"good"]
    assert {epoch for epoch, _ in ends(fake)} <= {0, 1}


def test_after_a_failure_nothing_more_is_sent(
    fake: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    fake.create_topic("t")
    with cluster.producer(transactional_id="billing") as producer:
        with pytest.raises(TransactionAbortedError), producer.transaction() as tx:
            fake.fault(Produce, error=RecordTooLargeError("too large"))
            bad = tx.send("t", b"bad")
            assert isinstance(bad.exception(timeout=30), RecordTooLargeError)
            with pytest.raises(DeliveryError):
                producer.flush()
            with pytest.raises(TransactionAbortedError, match="run it again"):
                tx.send("t", b"more")
            assert fake.values("t") == []
        with producer.transaction() as tx:
            tx.send("t", b"again")
    assert numbers(fake)[0][1] == 0
    assert fake.transactions.committed("t") == [b"again"]


def test_a_batch_in_doubt_is_never_committed(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    config = {"delivery_timeout_ms": 300, "request_timeout_ms": 100}
    with cluster.producer(transactional_id="billing", **config) as producer:  # type: ignore[arg-type]
        fake.fault(Produce, times=1000, is_lost=True, carry_out=True)
        with pytest.raises(TransactionAbortedError), producer.transaction() as tx:
            tx.send("t", b"perhaps")
        fake.clear_faults()
        with producer.transaction() as tx:
            tx.send("t", b"surely")
    assert fake.values("t") == [b"perhaps", b"surely"]
    assert fake.transactions.committed("t") == [b"surely"]
    assert ends(fake) == [(0, False), (1, True)]


def test_a_lost_answer_of_a_leader_is_repeated_under_the_same_numbers(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    with cluster.producer(transactional_id="billing") as producer:
        for error in ({"disconnect": True, "carry_out": True}, {"error": DiskFullError("full")}):
            fake.fault(Produce, **error)
            with producer.transaction() as tx:
                tx.send("t", b"once")
    assert fake.values("t") == [b"once", b"once"]
    assert ends(fake) == [(0, True), (1, True)]


def test_a_transaction_that_timed_out_is_aborted_and_the_next_one_commits(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    with cluster.producer(transactional_id="billing") as producer:
        with pytest.raises(TransactionAbortedError, match="transaction_timeout_ms"):
            with producer.transaction() as tx:
                tx.send("t", b"a").result(timeout=30)
                fake.transactions.time_out("billing")
        with pytest.raises(TransactionAbortedError), producer.transaction() as tx:
            tx.send("t", b"b").result(timeout=30)
            fake.transactions.time_out("billing")
            late = tx.send("t", b"c")
            assert isinstance(late.exception(timeout=30), TransactionAbortedError)
        with producer.transaction() as tx:
            tx.send("t", b"d")
    assert fake.transactions.committed("t") == [b"d"]


def test_what_somebody_else_committed_is_not_called_aborted(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    with cluster.producer(transactional_id="billing") as producer:
        with pytest.raises(TransactionCommittedError, match="was committed before its producer"):
            with producer.transaction() as tx:
                tx.send("t", b"a").result(timeout=30)
                fake.transactions.commit_for("billing")
                late = tx.send("t", b"b")
                assert isinstance(late.exception(timeout=30), TransactionCommittedError)
                with pytest.raises(TransactionCommittedError):
                    tx.send("t", b"c")
        with pytest.raises(TransactionCommittedError) as caught, producer.transaction() as tx:
            tx.send("t", b"d").result(timeout=30)
            fake.transactions.commit_for("billing")
            raise ValueError("mine")
        assert isinstance(caught.value.__context__, ValueError)
        with pytest.raises(TransactionCommittedError), producer.transaction() as tx:
            tx.send("t", b"e").result(timeout=30)
            fake.transactions.commit_for("billing")
            tx.send_offsets({TopicPartition("t", 0): 1}, group="g")
        producer.begin_transaction()
        producer.send("t", b"f").result(timeout=30)
        fake.transactions.commit_for("billing")
        with pytest.raises(TransactionCommittedError):
            producer.abort_transaction()
        with producer.transaction() as tx:
            tx.send("t", b"g")
    assert fake.transactions.committed("t") == [b"a", b"d", b"e", b"f", b"g"]
    assert len(fake.asked(InitProducer)) == 5


def test_a_late_refusal_of_a_batch_ends_nothing_of_the_next_transaction(
    fake: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    fake.create_topic("t")
    with cluster.producer(transactional_id="billing") as producer:
        held = fake.fault(Produce, is_held=True, error=TransactionEndedError("too late"))
        with pytest.raises(ValueError, match="mine"), producer.transaction() as tx:
            tx.send("t", b"not this")
            eventually(lambda: len(fake.asked(Produce)) == 1)
            raise ValueError("mine")
        with producer.transaction() as tx:
            tx.send("t", b"this").result(timeout=30)
            fake.release(held)
            tx.send("t", b"and this").result(timeout=30)
    assert fake.transactions.committed("t") == [b"this", b"and this"]
    assert ends(fake) == [(0, False), (1, True)]


def test_on_an_event_loop_what_somebody_else_committed_is_not_called_aborted(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")

    async def story() -> None:
        async with cluster.async_producer(transactional_id="billing") as producer:
            with pytest.raises(TransactionCommittedError):
                async with producer.transaction() as tx:
                    await (await tx.send("t", b"a"))
                    fake.transactions.commit_for("billing")
                    with pytest.raises(TransactionCommittedError):
                        await (await tx.send("t", b"b"))
            with pytest.raises(TransactionCommittedError) as caught:
                async with producer.transaction() as tx:
                    await (await tx.send("t", b"d"))
                    fake.transactions.commit_for("billing")
                    raise ValueError("mine")
            assert isinstance(caught.value.__context__, ValueError)

    asyncio.run(story())
    assert fake.transactions.committed("t") == [b"a", b"d"]


def test_where_nobody_knows_how_a_transaction_ended_that_is_said(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    with cluster.producer(transactional_id="billing") as producer:
        with pytest.raises(TransactionOutcomeUnknownError, match="does not say how: forgotten"):
            with producer.transaction() as tx:
                tx.send("t", b"a").result(timeout=30)
                fake.transactions.time_out("billing")
                fake.fault(EndTransaction, times=2, error=TransactionEndedError("forgotten"))
                late = tx.send("t", b"b")
                assert isinstance(late.exception(timeout=30), TransactionOutcomeUnknownError)
        # Who hears it later says it later.
        with pytest.raises(TransactionAbortedError, match="aborted before its commit"):
            with producer.transaction() as tx:
                tx.send("t", b"c").result(timeout=30)
                fake.transactions.time_out("billing")
                fake.fault(EndTransaction, error=TransactionEndedError("not yet"))
                tx.send("t", b"d").exception(timeout=30)
    assert fake.transactions.committed("t") == []


# --- the coordinator's answers --------------------------------------------------------------------


def test_a_lost_answer_to_a_commit_is_asked_for_again(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    fake.fault(EndTransaction, disconnect=True, carry_out=True)
    fake.fault(InitProducer, disconnect=True, carry_out=True)
    with cluster.producer(transactional_id="billing") as producer, producer.transaction() as tx:
        tx.send("t", b"v")
    assert ends(fake) == [(0, True), (0, True)]
    assert fake.transactions.committed("t") == [b"v"]


@pytest.mark.parametrize("carry_out", [True, False])
def test_a_commit_without_an_answer_is_settled_by_the_next_transaction(
    fake: FakeCluster, cluster: Cluster, carry_out: bool
) -> None:
    fake.create_topic("t")
    with cluster.producer(
        transactional_id="billing", max_block_ms=300, request_timeout_ms=100
    ) as producer:
        fake.fault(EndTransaction, times=1000, is_lost=True, carry_out=carry_out)
        with pytest.raises(TransactionOutcomeUnknownError), producer.transaction() as tx:
            tx.send("t", b"a")
        with pytest.raises(TimeoutError):
            producer.begin_transaction()
        with pytest.raises(InvalidRequestError, match="outside"):
            producer.send("t", b"no")
        fake.clear_faults()
        with producer.transaction() as tx:
            assert fake.transactions.committed("t") == [b"a"]
            tx.send("t", b"b")
    assert fake.transactions.committed("t") == [b"a", b"b"]
    assert {is_commit for _, is_commit in ends(fake)} == {True}


def test_an_abort_without_an_answer_is_settled_by_the_next_transaction(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    with cluster.producer(
        transactional_id="billing", max_block_ms=300, request_timeout_ms=100
    ) as producer:
        fake.fault(EndTransaction, times=1000, is_lost=True)
        producer.begin_transaction()
        producer.send("t", b"a").result(timeout=30)
        with pytest.raises(TimeoutError):
            producer.abort_transaction()
        fake.clear_faults()
        with producer.transaction() as tx:
            tx.send("t", b"b")
    assert fake.transactions.committed("t") == [b"b"]
    assert {(0, True), (1, False)}.isdisjoint(ends(fake))


def test_a_name_commits_once(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    for _ in range(2):
        with cluster.producer(transactional_id="billing") as producer:
            try:
                with producer.transaction(name="batch-7") as tx:
                    tx.send("t", b"v")
            except AlreadyCommittedError:
                pass
            with pytest.raises(AlreadyCommittedError), producer.transaction(name="batch-7"):
                raise AssertionError("the block does not run")
    assert fake.values("t") == [b"v"]


def test_a_name_that_is_committed_meanwhile_has_the_transaction_aborted(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    fake.fault(EndTransaction, error=AlreadyCommittedError("n is committed"))
    with cluster.producer(transactional_id="billing") as producer:
        with pytest.raises(AlreadyCommittedError), producer.transaction(name="n") as tx:
            tx.send("t", b"v")
        with producer.transaction() as tx:
            tx.send("t", b"w")
    assert ends(fake) == [(0, True), (0, False), (1, True)]
    assert fake.transactions.committed("t") == [b"w"]


def test_a_name_in_doubt_can_be_run_again_and_commits_once(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    with cluster.producer(
        transactional_id="billing", max_block_ms=300, request_timeout_ms=100
    ) as producer:
        fake.fault(EndTransaction, times=1000, is_lost=True, carry_out=True)
        with pytest.raises(TransactionOutcomeUnknownError), producer.transaction(name="n") as tx:
            tx.send("t", b"v")
        fake.clear_faults()
        with pytest.raises(AlreadyCommittedError), producer.transaction(name="n"):
            raise AssertionError("the block does not run")
    assert fake.transactions.committed("t") == [b"v"]


def test_after_a_bug_in_an_end_the_numbers_are_not_used_again(
    fake: FakeCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.create_topic("t")
    with cluster.producer(transactional_id="billing") as producer:
        with pytest.raises(RuntimeError), producer.transaction() as tx:
            tx.send("t", b"a").result(timeout=30)
            monkeypatch.setattr(tx._transactions, "_drain", explode)
        monkeypatch.undo()
        with producer.transaction() as tx:
            tx.send("t", b"b")
    assert fake.transactions.committed("t") == [b"b"]
    assert ends(fake) == [(0, False), (1, True)]


async def explode() -> None:
    raise RuntimeError("a bug")


# --- another owner --------------------------------------------------------------------------------


def test_another_owner_is_the_end_of_a_producer(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    old = cluster.producer(transactional_id="billing")
    with old.transaction() as tx:
        tx.send("t", b"old")
    old.begin_transaction()
    old.send("t", b"lost").result(timeout=30)
    new = cluster.producer(transactional_id="billing")
    with new.transaction() as tx:
        tx.send("t", b"new")
    with pytest.raises((ProducerFencedError, TransactionAbortedError)):
        old.commit_transaction()
    before = len(fake.values("t"))
    for _ in range(2):
        with pytest.raises(ProducerFencedError):
            old.begin_transaction()
        with pytest.raises(ProducerFencedError):
            old.send("t", b"zombie")
    assert len(fake.values("t")) == before
    with new.transaction() as tx:
        tx.send("t", b"again")
    old.close()
    new.close()
    assert fake.transactions.committed("t") == [b"old", b"new", b"again"]


def test_an_owner_that_is_replaced_between_blocks_never_uses_numbers_of_the_other(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    with cluster.producer(transactional_id="billing") as producer:
        for is_commit in (True, False):
            producer.begin_transaction()
            producer.send("t", b"v").result(timeout=30)
            if is_commit:
                producer.commit_transaction()
            else:
                producer.abort_transaction()
        fake.transactions.take_over("billing")
        with pytest.raises(ProducerFencedError), producer.transaction() as tx:
            tx.send("t", b"zombie")
    assert fake.values("t") == [b"v", b"v"]


def test_a_commit_in_doubt_of_a_producer_that_is_fenced_stays_unknown(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    with cluster.producer(transactional_id="billing") as producer:
        producer.begin_transaction()
        producer.send("t", b"v").result(timeout=30)
        fake.fault(EndTransaction, disconnect=True)
        fake.fault(EndTransaction, error=ProducerFencedError("another"))
        with pytest.raises(TransactionOutcomeUnknownError):
            producer.commit_transaction()
        with pytest.raises(ProducerFencedError):
            producer.begin_transaction()


# --- positions of groups --------------------------------------------------------------------------


def test_positions_of_partitions_assigned_by_hand_are_part_of_a_transaction(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("in")
    fake.write("in", [b"a", b"b"])
    place = TopicPartition("in", 0)
    with (
        cluster.producer(transactional_id="billing") as producer,
        cluster.consumer(
            group="g", enable_auto_commit=False, auto_offset_reset="earliest"
        ) as consumer,
    ):
        consumer.assign([place])
        with producer.transaction() as tx:
            records = consumer.until_end()
            assert [record.value for record in records] == [b"a", b"b"]
            tx.send_offsets(consumer)
        assert consumer.committed([place]) == {place: 2}



def test_positions_are_committed_with_the_records_or_not_at_all(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("in", partitions=2)
    with cluster.producer(transactional_id="billing") as producer:
        with pytest.raises(ValueError), producer.transaction() as tx:
            tx.send_offsets({TopicPartition("in", 0): 3}, group="g")
            raise ValueError
        assert fake.groups.committed("in") is None
        with producer.transaction() as tx:
            tx.send_offsets(
                {TopicPartition("in", 0): 3, TopicPartition("in", 1): OffsetAndMetadata(4, "m")},
                group="g",
            )
            assert fake.groups.committed("in") is None
            tx.send_offsets({}, group="g")
    assert fake.groups.committed("in") == 3
    assert fake.groups.committed("in", 1) == 4
    assert [asked.transaction for asked in fake.asked(CommitOffsets)] == [(FAMILY, 0), (FAMILY, 1)]
    assert ends(fake) == [(0, False), (1, True)]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"error": UnknownMemberError("gone")}, CommitRefusedError),
        ({"error": InvalidRequestError("never")}, InvalidRequestError),
        ({"times": 1000, "is_lost": True}, TimeoutError),
    ],
)
def test_positions_that_are_refused_make_the_transaction_fail(
    fake: FakeCluster, cluster: Cluster, fault: dict[str, Any], expected: type[RayqError]
) -> None:
    fake.create_topic("in")
    fake.create_topic("out")
    with cluster.producer(
        transactional_id="billing", max_block_ms=300, request_timeout_ms=100
    ) as producer:
        fake.fault(CommitOffsets, **fault)
        with pytest.raises(TransactionAbortedError), producer.transaction() as tx:
            tx.send("out", b"v").result(timeout=30)
            with pytest.raises(expected):
                tx.send_offsets({TopicPartition("in", 0): 3}, group="g")
    assert fake.transactions.committed("out") == []


def test_the_end_waits_for_positions_that_another_thread_sends(
    fake: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    fake.create_topic("in")
    held = fake.fault(CommitOffsets, is_held=True, carry_out=True)
    with cluster.producer(transactional_id="billing") as producer:
        tx = producer.begin_transaction()
        thread = threading.Thread(target=tx.send_offsets, args=({("in", 0): 3},), kwargs={"group": "g"})
        thread.start()
        eventually(lambda: bool(fake.asked(CommitOffsets)))
        end = threading.Thread(target=tx.commit)
        end.start()
        eventually(lambda: tx._transactions.state.phase == "ending")
        with pytest.raises(InvalidRequestError):
            tx.send_offsets({TopicPartition("in", 0): 4}, group="g")
        assert not fake.asked(EndTransaction)
        fake.release(held)
        thread.join()
        end.join()
    assert fake.groups.committed("in") == 3


def test_wrong_positions_are_refused_before_anything_is_sent(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("in")
    wrong: list[tuple[Any, Any, type[BaseException]]] = [
        ({TopicPartition("in", 0): -1}, "g", InvalidRequestError),
        ({TopicPartition("in", 9): 1}, "g", InvalidRequestError),
        ({TopicPartition("no such topic", 0): 1}, "g", UnknownTopicError),
        ({("in", 0): "x"}, "g", TypeError),
        ({TopicPartition("in", 0): 1}, None, TypeError),
        ({TopicPartition("in", 0): 1}, "", InvalidRequestError),
    ]
    with cluster.producer(transactional_id="billing") as producer, producer.transaction() as tx:
        for offsets, group, expected in wrong:
            with pytest.raises(expected):
                tx.send_offsets(offsets, group=group)
    assert not fake.asked(CommitOffsets)


# --- threads, cancellation, close, fork -----------------------------------------------------------


def test_threads_share_a_transaction_and_its_end_waits_for_what_they_sent(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t", partitions=3)
    fake.fault(Produce, times=20, delay_s=0.01, carry_out=True)
    with cluster.producer(transactional_id="billing", linger_ms=1) as producer:
        for _ in range(3):
            with producer.transaction() as tx:
                threads = [
                    threading.Thread(
                        target=lambda: [tx.send("t", b"v") for _ in range(100)]
                    )
                    for _ in range(4)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
    assert sum(len(fake.transactions.committed("t", number)) for number in range(3)) == 1200


@pytest.mark.slow
def test_what_a_send_says_about_the_end_is_true_for_each_thread(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    accepted: list[int] = []
    with cluster.producer(transactional_id="billing") as producer:
        stop = threading.Event()

        def send() -> None:
            while not stop.is_set():
                try:
                    producer.send("t", b"v")
                    accepted.append(1)
                except InvalidRequestError:
                    pass

        threads = [threading.Thread(target=send) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            with producer.transaction():
                pass
        stop.set()
        for thread in threads:
            thread.join()
    assert len(fake.transactions.committed("t")) == len(accepted)


def test_a_cancelled_commit_that_was_asked_for_is_settled_by_the_next_begin(
    fake: FakeCluster, eventually: Eventually
) -> None:
    fake.create_topic("t")

    async def scenario() -> None:
        async with fake.cluster().async_producer(transactional_id="billing") as producer:
            held = fake.fault(EndTransaction, is_held=True, carry_out=True)
            await producer.begin_transaction()
            await producer.send("t", b"a")
            commit = asyncio.create_task(producer.commit_transaction())
            await asyncio.to_thread(eventually, lambda: bool(fake.asked(EndTransaction)))
            commit.cancel()
            with pytest.raises(asyncio.CancelledError):
                await commit
            asyncio.get_running_loop().call_later(0.05, fake.release, held)
            async with producer.transaction() as tx:
                assert fake.transactions.committed("t") == [b"a"]
                await tx.send("t", b"b")

    asyncio.run(scenario())
    assert fake.transactions.committed("t") == [b"a", b"b"]


def test_a_commit_that_is_cancelled_before_it_is_asked_for_is_an_abort(
    fake: FakeCluster, eventually: Eventually
) -> None:
    fake.create_topic("t")

    async def scenario() -> None:
        async with fake.cluster().async_producer(transactional_id="billing") as producer:
            held = fake.fault(Produce, is_held=True, carry_out=True)
            await producer.begin_transaction()
            await producer.send("t", b"a")
            commit = asyncio.create_task(producer.commit_transaction())
            await asyncio.to_thread(eventually, lambda: bool(fake.asked(Produce)))
            commit.cancel()
            with pytest.raises(asyncio.CancelledError):
                await commit
            async with producer.transaction() as tx:
                await tx.send("t", b"b")
            fake.release(held)

    asyncio.run(scenario())
    assert fake.transactions.committed("t") == [b"b"]
    assert ends(fake) == [(0, False), (1, True)]


@pytest.mark.parametrize("kind", [InitProducer, Produce, EndTransaction])
def test_an_interrupted_thread_leaves_no_transaction_open(
    fake: FakeCluster, cluster: Cluster, eventually: Eventually, kind: type[AnyRequest]
) -> None:
    """A Ctrl+C at the beginning, while the end waits for records, and while it waits for the
    coordinator."""
    fake.create_topic("t")
    with cluster.producer(transactional_id="billing") as producer:
        held = fake.fault(kind, is_held=True, carry_out=True)
        signal.signal(signal.SIGALRM, signal.default_int_handler)

        def interrupt() -> None:
            eventually(lambda: bool(fake.asked(kind)))
            os.kill(os.getpid(), signal.SIGALRM)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt), producer.transaction() as tx:
            tx.send("t", b"a")
        thread.join()
        fake.release(held)
        with producer.transaction() as tx:
            tx.send("t", b"b")
    is_asked = kind is EndTransaction
    assert fake.transactions.committed("t") == ([b"a", b"b"] if is_asked else [b"b"])


def test_close_aborts_what_is_open(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    producer = cluster.producer(transactional_id="billing")
    tx = producer.begin_transaction()
    tx.send("t", b"a").result(timeout=30)
    producer.close()
    assert ends(fake) == [(0, False)]
    for call in (lambda: tx.send("t", b"b"), tx.commit, producer.begin_transaction):
        with pytest.raises((ClosedError, InvalidRequestError)):
            call()
    with cluster.producer(transactional_id="other") as unreachable:
        unreachable.begin_transaction()
        unreachable.send("t", b"c").result(timeout=30)
        fake.fault(EndTransaction, times=1000, is_lost=True)
        unreachable.close(timeout_s=0.1)
    assert fake.transactions.committed("t") == []


def test_a_cluster_closes_its_producers_side_by_side(fake: FakeCluster) -> None:
    fake.create_topic("t")
    cluster = fake.cluster()
    # Whoever is garbage is closed by nobody.
    producers = [cluster.producer(transactional_id=f"p-{number}") for number in range(3)]
    for producer in producers:
        producer.begin_transaction().send("t", b"v").result(timeout=30)
    held = fake.fault(EndTransaction, times=3, is_held=True)
    closing = threading.Thread(target=cluster.close)
    closing.start()
    deadline = time.monotonic() + 30
    while len(ends(fake)) < 3:
        assert time.monotonic() < deadline, "one waits for the other"
        time.sleep(0.001)
    fake.release(held)
    closing.join(30)
    assert not closing.is_alive()


@pytest.mark.parametrize("wait_ms", [0, 1000])
def test_a_commit_waits_for_readers_as_its_producer_says(
    fake: FakeCluster, cluster: Cluster, wait_ms: int
) -> None:
    fake.create_topic("t")
    with cluster.producer(transactional_id="billing", commit_wait_ms=wait_ms) as producer:
        with producer.transaction() as tx:
            tx.send("t", b"v")
        with pytest.raises(ZeroDivisionError), producer.transaction() as tx:
            tx.send("t", b"v")
            raise ZeroDivisionError
    assert [asked.wait_ms for asked in fake.asked(EndTransaction)] == [wait_ms, 0]


def test_the_end_of_the_program_tells_of_what_nobody_ended(
    fake: FakeCluster, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    fake.create_topic("t")
    with cluster.producer(transactional_id="billing") as producer:
        with producer.transaction():
            pass
        finalizers._deliver()
        assert "transaction" not in caplog.text
        producer.begin_transaction()
        finalizers._deliver()
        assert "open transaction, which nobody ended" in caplog.text


def test_a_forked_child_ends_no_transaction_of_its_parent(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    with cluster.producer(transactional_id="billing") as producer:
        with producer.transaction() as tx:
            tx.send("t", b"a")
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    tx.commit()
                except ClosedError:
                    try:
                        tx.send("t", b"from the child")
                    except ClosedError:
                        code = 0
                os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
    assert ends(fake) == [(0, True)]
    assert fake.transactions.committed("t") == [b"a"]
