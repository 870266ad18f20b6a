"""The producer against a fake cluster: which records arrive, in which order, and what futures
say."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time
import zlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy
import pytest

from rayq.client.cluster import Cluster
from rayq.client.consuming.consumer import Consumer
from rayq.client.producing import intake
from rayq.client.producing import sender as sender_module
from rayq.client.producing.futures import DeliveryFuture, Outcome
from rayq.client.producing.producer import Producer
from rayq.config import KIB, MIB
from rayq.errors import (
    BufferFullError,
    ClosedError,
    ConfigError,
    DeliveryError,
    DeliveryTimeoutError,
    InvalidRequestError,
    InvalidTimestampError,
    LeadershipEndedError,
    NotEnoughReplicasError,
    NotLeaderError,
    OutcomeUnknownError,
    RayqError,
    RecordTooLargeError,
    TimeoutError,
    UnknownTopicError,
)
from rayq.messages import AllocateProducerId, Produce
from rayq.records import OffsetRange, RecordMetadata
from rayq.storage.batch import decode_columns, encode_batch
from tests.client.fake_broker import FakeCluster

Eventually = Callable[[Callable[[], bool]], None]


def test_a_record_arrives_with_all_that_it_carries(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    with cluster.producer() as producer:
        future = producer.send(
            "t", b"value", key=b"key", headers=[("a", b"1"), ("a", b"2")], timestamp_ms=77
        )
        assert future.result(timeout=30) == RecordMetadata("t", 0, 0, 77)
    ((header, data),) = fake.topics["t"].partitions[0].batches
    columns = decode_columns(data, 0, header)
    assert columns.values == [b"value"]
    assert columns.keys == [b"key"]
    assert columns.headers == [[("a", b"1"), ("a", b"2")]]
    assert columns.timestamps_ms == [77]


def test_records_of_one_partition_keep_their_order(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    values = [str(number).encode() for number in range(5000)]
    with cluster.producer(batch_size=KIB) as producer:
        futures = [producer.send("t", value) for value in values]
        offsets = [future.result(30).offset for future in futures]
    assert fake.values("t") == values
    assert offsets == list(range(5000))
    assert all(header.producer_id is not None for header in fake.headers("t"))


def test_a_lone_record_does_not_wait_for_linger(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    with cluster.producer(linger_ms=60_000) as producer:
        for _ in range(3):
            producer.send("t", b"x").result(timeout=30)
    assert len(fake.headers("t")) == 3


def test_records_gather_while_a_batch_is_in_flight(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    with cluster.producer(linger_ms=60_000) as producer:
        producer.send("t", b"warm").result(timeout=30)
        slow = fake.fault(Produce, is_held=True)
        futures = [producer.send("t", b"first")]
        while not fake.asked(Produce)[1:]:
            time.sleep(0.001)
        futures += [producer.send("t", str(n).encode()) for n in range(100)]
        fake.release(slow)
        for future in futures:
            future.result(timeout=30)
    assert [header.record_count for header in fake.headers("t")] == [1, 1, 100]


def test_linger_bounds_the_wait_behind_a_slow_batch(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    with cluster.producer(linger_ms=20) as producer:
        producer.send("t", b"warm").result(timeout=30)
        held = fake.fault(Produce, is_held=True)
        slow = producer.send("t", b"slow")
        while not fake.asked(Produce)[1:]:
            time.sleep(0.001)
        producer.send("t", b"after").result(timeout=30)
        assert not slow.done()
        fake.release(held)


# --- partitions -----------------------------------------------------------------------------------


def test_a_key_chooses_the_partition_by_crc32(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t", partitions=5)
    keys = [f"key-{n}".encode() for n in range(50)]
    with cluster.producer() as producer:
        placed = [producer.send("t", b"v", key=key).result(30).partition for key in keys]
        many = producer.send_many("t", [b"v"] * 50, keys=keys).result(30)
    assert placed == [zlib.crc32(key) % 5 for key in keys]
    assert {part.partition: part.end - part.start for part in many} == {
        partition: placed.count(partition) for partition in set(placed)
    }


def test_records_without_a_key_spread_batch_by_batch(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t", partitions=4)
    with cluster.producer(batch_size=KIB) as producer:
        for _ in range(2000):
            producer.send("t", b"x" * 100)
    counts = [len(fake.values("t", partition)) for partition in range(4)]
    assert sum(counts) == 2000
    assert min(counts) > 100
    assert max(header.record_count for header in fake.headers("t")) > 1


def test_records_without_a_key_gather_in_one_partition_before_they_go_to_another(
    fake: FakeCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a rate at which each could go at once to a partition with nothing in flight."""
    monkeypatch.setattr(intake, "STICKY_S", 3600.0)
    fake.create_topic("t", partitions=4)
    with cluster.producer() as producer:
        first = producer.send("t", b"x").result(30).partition
        held = fake.fault(Produce, is_held=True)
        futures = [producer.send("t", b"x") for _ in range(20)]
        fake.release(held)
        assert {future.result(30).partition for future in futures} == {first}


def test_a_record_without_a_key_goes_elsewhere_after_a_while(
    fake: FakeCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "STICKY_S", 0.0)
    fake.create_topic("t", partitions=4)
    with cluster.producer() as producer:
        places = [producer.send("t", b"x").result(30).partition for _ in range(20)]
    assert all(place != following for place, following in pairwise(places))


def test_send_many_without_keys_spreads_too(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t", partitions=4)
    with cluster.producer(batch_size=KIB) as producer:
        ranges = producer.send_many("t", [b"x" * 100] * 2000).result(30)
    assert sum(part.end - part.start for part in ranges) == 2000
    assert {part.partition for part in ranges} == {0, 1, 2, 3}


def test_an_explicit_partition_wins(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t", partitions=3)
    with cluster.producer() as producer:
        assert producer.send("t", b"v", key=b"k", partition=2).result(30).partition == 2
        assert producer.send_many("t", [b"v"], keys=[b"k"], partition=1).result(30) == [
            OffsetRange("t", 1, 0, 1)
        ]
        for wrong in (3, -1):
            with pytest.raises(InvalidRequestError, match="partitions 0 to 2"):
                producer.send("t", b"v", partition=wrong)


def test_a_users_own_partitioner_decides(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t", partitions=3)
    with cluster.producer(partitioner=lambda key, count: len(key or b"") % count) as producer:
        assert producer.send("t", b"v", key=b"four").result(30).partition == 1
        assert producer.send("t", b"v").result(30).partition == 0
        assert producer.send_many("t", [b"a", b"b"], keys=[b"12", None]).result(30) == [
            OffsetRange("t", 2, 0, 1),
            OffsetRange("t", 0, 1, 2),
        ]
    with (
        cluster.producer(partitioner=lambda key, count: count) as producer,
        pytest.raises(InvalidRequestError, match="from 0 to 2"),
    ):
        producer.send("t", b"v")


def test_send_many_takes_any_number_and_answers_with_ranges(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    values = [str(number).encode() * 20 for number in range(20_000)]
    with cluster.producer() as producer:
        producer.send("t", b"before")
        assert producer.send_many("t", values).result(30) == [OffsetRange("t", 0, 1, 20_001)]
        assert producer.send_many("t", []).result(30) == []
    assert fake.values("t") == [b"before", *values]


def test_send_and_send_many_keep_one_order(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    expected: list[bytes] = []
    with cluster.producer(batch_size=KIB) as producer:
        for turn in range(50):
            some = [f"{turn}-{number}".encode() * 5 for number in range(turn * 3)]
            producer.send("t", f"{turn}".encode())
            producer.send_many("t", some)
            expected += [f"{turn}".encode(), *some]
    assert fake.values("t") == expected


def test_new_partitions_are_used_once_they_are_known(
    fake: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    fake.create_topic("t")
    with cluster.producer() as producer:
        producer.send("t", b"v").result(30)
        cluster.admin.create_partitions("t", 3)
        assert producer.send("t", b"v", partition=2).result(30).partition == 2


# --- futures --------------------------------------------------------------------------------------


def test_a_future_has_the_methods_of_concurrent_futures(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    slow = fake.fault(Produce, is_held=True)
    with cluster.producer() as producer:
        future = producer.send("t", b"v")
        called: list[Any] = []
        future.add_done_callback(called.append)
        assert not future.done()
        assert future.running()
        assert not future.cancel()
        assert not future.cancelled()
        with pytest.raises(TimeoutError):
            future.result(timeout=0.01)
        fake.release(slow)
        assert future.exception(timeout=30) is None
        assert future.done()
        assert not future.running()
        assert called == [future]
        future.add_done_callback(called.append)
        assert called == [future, future]


def test_on_delivery_hears_of_success_and_of_failure(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    heard: list[tuple[Any, Any]] = []

    def on_delivery(metadata: RecordMetadata | None, error: BaseException | None) -> None:
        heard.append((metadata, error))

    with cluster.producer() as producer:
        good = producer.send("t", b"v", timestamp_ms=5, on_delivery=on_delivery)
        good.result(30)
        fake.fault(Produce, error=RecordTooLargeError("too large"))
        bad = producer.send("t", b"v", on_delivery=on_delivery)
        assert isinstance(bad.exception(30), RecordTooLargeError)
        with pytest.raises(DeliveryError, match=r"1 record .*RecordTooLargeError"):
            producer.flush()
        producer.flush()  # told once
    assert heard[0] == (RecordMetadata("t", 0, 0, 5), None)
    assert heard[1][0] is None
    assert isinstance(heard[1][1], RecordTooLargeError)


def test_a_callback_that_raises_harms_nobody(
    fake: FakeCluster, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    fake.create_topic("t")
    fake.fault(Produce, delay_s=0.05)
    with cluster.producer() as producer:
        producer.send("t", b"warm")
        futures = [producer.send("t", b"v", on_delivery=_explode) for _ in range(2)]
        for future in futures:
            assert future.result(30).offset is not None
        producer.flush()
    assert "a delivery callback failed" in caplog.text


def _explode(metadata: RecordMetadata | None, error: BaseException | None) -> None:
    raise ZeroDivisionError


def test_a_callback_that_closes_the_producer_changes_no_other_outcome(
    fake: FakeCluster, cluster: Cluster
) -> None:
    # The batches that failed together with the first count as not written.
    fake.create_topic("t")

    async def run() -> list[type[BaseException]]:
        producer = cluster.async_producer(
            linger_ms=0, batch_size=KIB, delivery_timeout_ms=3000, request_timeout_ms=2500
        )
        await (await producer.send("t", b"warm"))
        fake.fault(Produce, times=100, is_lost=True, carry_out=True)
        futures = [
            await producer.send(
                "t", b"x" * 600, on_delivery=lambda metadata, error: producer.abandon()
            )
            for _ in range(7)
        ]
        return [
            type(error)
            for error in await asyncio.gather(*futures, return_exceptions=True)
            if isinstance(error, BaseException)
        ]

    assert asyncio.run(run()) == [OutcomeUnknownError] * 5 + [ClosedError] * 2


def test_a_callback_may_send_but_not_wait(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    seen: list[Any] = []
    done = threading.Event()
    with cluster.producer() as producer:

        def again(metadata: RecordMetadata | None, error: BaseException | None) -> None:
            seen.append(producer.send("t", b"second"))
            try:
                producer.flush()
            except InvalidRequestError as refused:
                seen.append(refused)
            done.set()

        producer.send("t", b"first", on_delivery=again)
        assert done.wait(30)
        assert seen[0].result(30).offset == 1
        assert isinstance(seen[1], InvalidRequestError)


def test_futures_can_be_waited_for_by_many_threads(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    fake.fault(Produce, delay_s=0.1)
    with cluster.producer() as producer, concurrent.futures.ThreadPoolExecutor(8) as threads:
        futures = [producer.send("t", b"v") for _ in range(8)]
        results = list(threads.map(lambda future: future.result(30).offset, futures))
    assert results == list(range(8))


def test_topics_with_append_time_report_the_leaders_time(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t", message_timestamp_type="append")
    with cluster.producer() as producer:
        metadata = producer.send("t", b"v", timestamp_ms=1).result(30)
    assert metadata.timestamp_ms == fake.append_time_ms
    assert fake.headers("t")[0].has_append_time


# --- retries --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what",
    [
        {"disconnect": True},
        {"disconnect": True, "carry_out": True},
        {"error": LeadershipEndedError("moved"), "carry_out": True},
        {"error": NotLeaderError("moved")},
        {"error": NotEnoughReplicasError("too few")},
    ],
    ids=lambda what: (
        "-".join(what) + ("-" + type(what["error"]).__name__ if "error" in what else "")
    ),
)
def test_retries_append_once_and_in_order(
    fake: FakeCluster, cluster: Cluster, what: dict[str, Any]
) -> None:
    fake.create_topic("t")
    fake.fault(Produce, times=15, matches=_every(3), **what)
    values = [str(number).encode() for number in range(3000)]
    with cluster.producer(batch_size=KIB) as producer:
        futures = [producer.send("t", value) for value in values]
        offsets = [future.result(30).offset for future in futures]
    assert fake.values("t") == values
    assert offsets == list(range(3000))
    assert {header.producer_epoch for header in fake.headers("t")} == {0}


def _every(nth: int) -> Callable[[Any, int], bool]:
    count = 0

    def matches(_request: Any, _broker: int) -> bool:
        nonlocal count
        count += 1
        return count % nth == 0

    return matches


def test_a_lost_answer_is_asked_for_again(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    with cluster.producer(request_timeout_ms=1000) as producer:
        producer.send("t", b"warm").result(30)
        fake.fault(Produce, is_lost=True, carry_out=True)
        assert producer.send("t", b"v").result(30).offset == 1
    assert fake.values("t") == [b"warm", b"v"]
    assert len(fake.asked(Produce)) >= 3


def test_what_is_refused_after_a_process_that_did_not_lead_was_asked_is_surely_not_written(
    fake: FakeCluster, cluster: Cluster
) -> None:
    # The replicas of a new topic hear of it a moment later than its first producer.
    fake.create_topic("t")
    fake.fault(Produce, times=2, error=NotLeaderError("not yet"))
    fake.fault(Produce, error=InvalidTimestampError("in the future"))
    with cluster.producer() as producer:
        assert isinstance(producer.send("t", b"v").exception(30), InvalidTimestampError)
        with pytest.raises(DeliveryError):
            producer.flush()
    assert fake.values("t") == []


def test_without_idempotence_a_retry_may_append_twice(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    fake.fault(Produce, error=LeadershipEndedError("moved"), carry_out=True)
    with cluster.producer(acks=1) as producer:
        assert producer.send("t", b"v").result(30).offset == 1
    assert fake.values("t") == [b"v", b"v"]
    assert not fake.asked(AllocateProducerId)
    assert fake.asked(Produce)[0].acks == 1


def test_acks_0_waits_for_nothing(
    fake: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    fake.create_topic("t")
    with cluster.producer(acks=0) as producer:
        metadata = producer.send("t", b"v", timestamp_ms=3).result(30)
        assert metadata == RecordMetadata("t", 0, None, 3)
        assert producer.send_many("t", [b"a", b"b"]).result(30) == []
    eventually(lambda: len(fake.values("t")) == 3)


def test_acks_0_finds_a_new_leader_although_the_old_one_lives(
    fake3: FakeCluster, eventually: Eventually
) -> None:
    fake3.create_topic("t")
    with fake3.cluster() as cluster, cluster.producer(acks=0) as producer:
        producer.send("t", b"v")
        eventually(lambda: len(fake3.values("t")) == 1)
        fake3.move_leader("t", 0, 2)

        def arrives() -> bool:
            producer.send("t", b"v").result(30)
            return len(fake3.values("t")) > 1

        eventually(arrives)


def test_what_acks_0_sent_and_a_leader_refused_is_told(
    fake: FakeCluster, cluster: Cluster, eventually: Eventually, caplog: pytest.LogCaptureFixture
) -> None:
    fake.create_topic("t")
    fake.fault(Produce, error=RecordTooLargeError("above the limit"))
    with cluster.producer(acks=0) as producer:
        producer.send("t", b"v").result(30)
        eventually(lambda: "are lost: above the limit" in caplog.text)
        producer.send("t", b"w").result(30)
        eventually(lambda: fake.values("t") == [b"w"])


def test_a_record_of_a_deleted_topic_fails_although_its_thread_stood_still(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    with cluster.producer(delivery_timeout_ms=60_000) as producer:
        producer.send("t", b"first").result(30)
        is_held, go_on = threading.Event(), threading.Event()
        futures: list[DeliveryFuture] = []

        def stand_still() -> None:
            with producer._core.accumulator._lock:
                futures.append(producer.send("t", b"v"))
                is_held.set()
                go_on.wait(30)

        thread = threading.Thread(target=stand_still)
        thread.start()
        assert is_held.wait(30)
        fake.delete_topic("t")
        client, background = cluster.shared_client()
        background.run(client.refresh(["t"], timeout_s=30))
        go_on.set()
        thread.join()
        assert isinstance(futures[0].exception(30), UnknownTopicError)
        with pytest.raises(DeliveryError):
            producer.flush(30)


def test_the_cluster_stops_only_once_producers_have_delivered(fake: FakeCluster) -> None:
    """This holds also where a consumer cannot be closed, because another thread polls it."""
    found_at_stop: list[list[bytes | None]] = []

    class Servers:
        def stop(self) -> None:
            found_at_stop.append(fake.values("t"))

    fake.create_topic("t")
    cluster = fake.cluster(lifecycle=Servers())
    consumers = [cluster.consumer("t") for _ in range(3)]
    producers = [cluster.producer(linger_ms=60_000) for _ in range(3)]

    def poll(consumer: Consumer) -> None:
        with contextlib.suppress(ClosedError):
            while True:
                consumer.poll(20)

    threads = [threading.Thread(target=poll, args=(polling,), daemon=True) for polling in consumers]
    for thread in threads:
        thread.start()
    while not all(polling._is_polling for polling in consumers):
        time.sleep(0.001)
    for producer in producers:
        producer.send("t", b"v")
    cluster.stop()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert found_at_stop == [[b"v"] * 3]


def test_callbacks_of_others_are_not_called_by_who_adds_one() -> None:
    outcome = Outcome("t", 0, 0)
    is_called, go_on = threading.Event(), threading.Event()
    called: list[tuple[str, bool]] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: called.append((name, threading.current_thread() is sender))

    def block() -> None:
        is_called.set()
        go_on.wait(30)

    outcome.when_done(block)
    outcome.when_done(note("before"))
    sender = threading.Thread(target=outcome.succeed, args=(0, None))
    sender.start()
    assert is_called.wait(30)
    outcome.when_done(note("late"))
    assert called == [("late", False)]
    go_on.set()
    sender.join()
    assert called == [("late", False), ("before", True)]


@pytest.mark.parametrize("failing", [1, 2, 4])
def test_a_batch_that_fails_for_good_does_not_hold_up_the_others(
    fake: FakeCluster, cluster: Cluster, failing: int
) -> None:
    fake.create_topic("t")
    with cluster.producer(linger_ms=0) as producer:
        producer.send("t", b"warm").result(30)
        count = 0

        def matches(_request: Any, _broker: int) -> bool:
            nonlocal count
            count += 1
            return count == failing

        fake.fault(Produce, matches=matches, error=RecordTooLargeError("too large"))
        futures = []
        for number in range(8):  # one batch each, up to five in flight
            futures.append(producer.send_many("t", [str(number).encode()] * 10, partition=0))
            time.sleep(0.002)
        failed = [future for future in futures if future.exception(30) is not None]
        assert all(isinstance(future.exception(), RecordTooLargeError) for future in failed)
        assert failed
        with pytest.raises(DeliveryError):
            producer.flush()
        producer.send("t", b"last").result(30)
    values = fake.values("t")
    delivered = [str(n).encode() for n, future in enumerate(futures) if future.exception() is None]
    assert list(dict.fromkeys(values)) == [b"warm", *delivered, b"last"]
    assert len(values) == len(set(fake.records("t")))
    assert fake.headers("t")[-1].producer_epoch == 1


def test_a_leader_that_lost_the_producers_state_gets_a_new_epoch(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    with cluster.producer() as producer:
        producer.send("t", b"a").result(30)
        fake.forget_producers("t")
        assert producer.send("t", b"b").result(30).offset == 1
    epochs = [(header.producer_epoch, header.base_sequence) for header in fake.headers("t")]
    assert epochs == [(0, 0), (1, 0)]


def test_lost_producer_state_and_a_batch_in_doubt_is_an_unknown_outcome(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    with cluster.producer() as producer:
        producer.send("t", b"a").result(30)
        fake.fault(Produce, error=LeadershipEndedError("moved"))
        fake.forget_producers("t")
        error = producer.send("t", b"b").exception(30)
        assert isinstance(error, OutcomeUnknownError)
        assert producer.send("t", b"c").result(30).offset == 1
        with pytest.raises(DeliveryError):
            producer.flush()
    assert fake.values("t") == [b"a", b"c"]


def test_an_unclean_election_that_cut_the_log_does_not_stop_the_producer(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    with cluster.producer() as producer:
        for number in range(3):
            producer.send("t", str(number).encode()).result(30)
        fake.truncate("t", 0, 1)
        assert producer.send("t", b"after").result(30).offset == 1
    assert fake.values("t") == [b"0", b"after"]


# --- time -----------------------------------------------------------------------------------------


def test_a_record_never_sent_fails_as_not_written(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    fake.move_leader("t", 0, None)
    with cluster.producer(delivery_timeout_ms=2000) as producer:
        error = producer.send("t", b"v").exception(30)
        assert isinstance(error, DeliveryTimeoutError)
        assert "waiting for broker 9" in str(error)
        with pytest.raises(DeliveryError):
            producer.flush()
        fake.move_leader("t", 0, 1)
        assert producer.send("t", b"w").result(30).offset == 0
    assert fake.values("t") == [b"w"]


def test_a_refused_record_fails_as_not_written(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    fake.fault(Produce, times=1000, error=NotEnoughReplicasError("2 of 3 are away"))
    with cluster.producer(delivery_timeout_ms=2000, retry_backoff_ms=4500) as producer:
        error = producer.send("t", b"v").exception(30)
        assert isinstance(error, DeliveryTimeoutError)
        assert "2 of 3 are away" in str(error)
        fake.clear_faults()
        assert producer.send("t", b"w").result(30).offset == 0
        with pytest.raises(DeliveryError):
            producer.flush()


def test_a_record_sent_without_an_answer_fails_as_unknown(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    with cluster.producer(delivery_timeout_ms=2000) as producer:
        producer.send("t", b"warm").result(30)
        fake.fault(Produce, times=1000, is_lost=True, carry_out=True)
        error = producer.send("t", b"v").exception(30)
        assert isinstance(error, OutcomeUnknownError)
        assert error.outcome_unknown
        fake.clear_faults()
        assert producer.send("t", b"w").result(30).offset == 2
        with pytest.raises(DeliveryError):
            producer.flush()
    assert fake.values("t") == [b"warm", b"v", b"w"]
    assert [header.producer_epoch for header in fake.headers("t")] == [0, 0, 1]


def test_flush_gives_up_after_its_own_timeout_and_can_be_repeated(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    slow = fake.fault(Produce, is_held=True)
    with cluster.producer() as producer:
        future = producer.send("t", b"v")
        with pytest.raises(TimeoutError, match="1 batches"):
            producer.flush(timeout_s=0.05)
        fake.release(slow)
        producer.flush(timeout_s=30)
        assert future.done()


def test_flush_sends_what_lingers(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    with cluster.producer(linger_ms=60_000) as producer:
        fake.fault(Produce, delay_s=0.1)
        futures = [producer.send("t", str(n).encode()) for n in range(10)]
        producer.flush(timeout_s=30)
        assert all(future.done() for future in futures)


# --- memory ---------------------------------------------------------------------------------------


def test_a_full_buffer_blocks_and_then_raises(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    fake.move_leader("t", 0, None)
    with cluster.producer(
        buffer_memory=64 * KIB, batch_size=16 * KIB, max_block_ms=2000, compression_type="none"
    ) as producer:
        start = time.monotonic()
        with pytest.raises(BufferFullError, match="buffer_memory"):
            _send_many_times(producer, b"x" * KIB)
        assert time.monotonic() - start >= 2
        fake.move_leader("t", 0, 1)
        producer.flush(timeout_s=30)
        assert producer._core.accumulator.buffered_bytes == 0
        for _ in range(1000):  # far more than the buffer holds: it waits for room again and again
            producer.send("t", b"y" * KIB)
    assert fake.values("t").count(b"y" * KIB) == 1000


def _send_many_times(producer: Producer, value: bytes) -> None:
    for _ in range(1000):
        producer.send("t", value)


def test_send_many_goes_through_a_small_buffer(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t", partitions=3)
    values = [str(number).encode() * 30 for number in range(5000)]
    keys = [str(number % 7).encode() for number in range(5000)]
    with cluster.producer(buffer_memory=16 * KIB, batch_size=4 * KIB) as producer:
        producer.send_many("t", values, keys=keys)
        producer.send_many("t", values)
    stored = [value for partition in range(3) for value in fake.values("t", partition)]
    assert sorted(stored) == sorted([*values, *values])


def test_many_partitions_share_a_buffer_smaller_than_their_batches(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t", partitions=50)
    with cluster.producer(
        buffer_memory=64 * KIB, batch_size=16 * KIB, linger_ms=60_000
    ) as producer:
        for number in range(2000):
            producer.send("t", b"x" * 50, partition=number % 50)
    assert [len(fake.values("t", partition)) for partition in range(50)] == [40] * 50


def test_open_batches_of_many_partitions_reserve_little_of_the_buffer(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t", partitions=50)
    for partition in range(50):
        fake.move_leader("t", partition, None)
    with cluster.producer(buffer_memory=MIB, batch_size=256 * KIB, max_block_ms=200) as producer:
        for number in range(500):
            producer.send("t", b"x" * 100, partition=number % 50)
        for partition in range(50):
            fake.move_leader("t", partition, 1)
        producer.flush(timeout_s=10)
        assert producer._core.accumulator.buffered_bytes == 0
    for partition in fake.topics["t"].partitions:
        assert [header.record_count for header, _ in partition.batches] == [10]


@pytest.mark.parametrize("is_many", [False, True])
def test_a_batch_grows_up_to_its_size(fake: FakeCluster, cluster: Cluster, is_many: bool) -> None:
    fake.create_topic("t", partitions=2)
    for partition in range(2):
        fake.move_leader("t", partition, None)
    values = [b"x" * 1000] * 400
    with cluster.producer(batch_size=100 * KIB, compression_type="none") as producer:
        if is_many:
            producer.send_many("t", values)
        else:
            for value in values:
                producer.send("t", value)
        for partition in range(2):
            fake.move_leader("t", partition, 1)
        producer.flush(timeout_s=10)
        assert producer._core.accumulator.buffered_bytes == 0
    counts = [
        header.record_count
        for partition in fake.topics["t"].partitions
        for header, _ in partition.batches
    ]
    assert sorted(counts) == [100, 100, 100, 100]


def test_a_record_larger_than_a_batch_or_the_buffer_goes_alone(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    big = bytes(range(256)) * 2048
    with cluster.producer(batch_size=KIB, buffer_memory=64 * KIB) as producer:
        futures = [producer.send("t", value) for value in (b"small", big, b"small", big)]
        assert [future.result(30).offset for future in futures] == [0, 1, 2, 3]
        producer.send_many("t", [b"small", big, b"small"]).result(30)
    assert fake.values("t")[1] == big


def test_acks_0_waits_while_a_server_reads_nothing(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    value = os.urandom(100 * KIB)
    with cluster.producer(
        acks=0, buffer_memory=MIB, max_block_ms=1000, delivery_timeout_ms=3000
    ) as producer:
        producer.send("t", value).result(30)
        (client, _) = cluster.shared_client()
        (connection,) = client.pool._connections.values()
        transport = connection._transport
        assert transport is not None
        go_on = threading.Event()
        fake.stand_still(go_on)
        futures = []
        with pytest.raises(BufferFullError):
            for _ in range(1000):
                futures.append(producer.send("t", value))
        held_bytes = producer._core.accumulator.buffered_bytes + transport.get_write_buffer_size()
        assert held_bytes < 4 * MIB
        assert isinstance(futures[-1].exception(30), DeliveryTimeoutError)
        go_on.set()
        producer.send("t", b"after").result(30)
        with pytest.raises(DeliveryError):
            producer.flush(30)
    delivered = sum(future.exception(0) is None for future in futures)
    deadline = time.monotonic() + 30
    while len(fake.values("t")) < delivered + 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert fake.values("t")[-1] == b"after"


# --- bad input ------------------------------------------------------------------------------------


def test_what_is_not_bytes_is_a_type_error(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    with cluster.producer() as producer:
        bad: Any
        for bad in ("text", 5, bytearray(b"x"), memoryview(b"x")):
            with pytest.raises(TypeError, match="bytes"):
                producer.send("t", bad)
            with pytest.raises(TypeError, match="bytes"):
                producer.send("t", b"v", key=bad)
            with pytest.raises(TypeError, match="bytes"):
                producer.send_many("t", [b"v", bad])
            with pytest.raises(TypeError, match="bytes"):
                producer.send_many("t", [b"v", b"w"], keys=[b"k", bad])
        for headers in ([("name", "text")], [(b"name", b"value")], {"name": b"value"}):
            with pytest.raises(TypeError, match=r"[Hh]eader"):
                producer.send("t", b"v", headers=headers)  # type: ignore[arg-type]
        producer.send("t", None, key=b"tombstone").result(30)
    assert fake.values("t") == [None]


class Bytes(bytes):
    def __bytes__(self) -> bytes:
        return b"something else"


class Text(str):
    def __str__(self) -> str:
        return "something else"


def test_subclasses_of_bytes_are_sent_as_what_they_are(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    with cluster.producer() as producer:
        for made in (numpy.bytes_, Bytes):
            headers = [(Text("name"), made(b"h"))]
            producer.send("t", made(b"v"), key=made(b"k"), headers=headers).result(30)
            producer.send_many("t", [made(b"v"), None], keys=[b"k", made(b"l")]).result(30)
        producer.flush(30)
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        records = consumer.poll(30)
    assert [record.value for record in records] == [b"v", b"v", None] * 2
    assert [record.key for record in records] == [b"k", b"k", b"l"] * 2
    assert records[0].headers == records[3].headers == [("name", b"h")]


def test_what_cannot_be_packed_fails_and_nothing_else_does(
    fake: FakeCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an error in rayq's own code would show, or a lack of memory."""
    fake.create_topic("t")

    def encode(values: Any, *columns: Any, **options: Any) -> bytearray:
        if b"bad" in values:
            raise MemoryError("no room")
        return encode_batch(values, *columns, **options)

    monkeypatch.setattr(sender_module, "encode_batch", encode)
    with cluster.producer(linger_ms=0) as producer:
        producer.send("t", b"before").result(30)
        bad = [producer.send("t", b"bad") for _ in range(3)]
        for future in bad:
            assert isinstance(future.exception(30), InvalidRequestError)
        with pytest.raises(DeliveryError, match="no room"):
            producer.flush(30)
        producer.send("t", b"after").result(30)
    assert fake.values("t") == [b"before", b"after"]
    assert {header.producer_epoch for header in fake.headers("t")} == {0}, "no number was used up"


def test_values_over_max_message_bytes_are_refused_at_once(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t", max_message_bytes=10 * KIB)
    noise = zlib.compress(bytes(1)) + bytes((i * i * 7 + i) % 251 for i in range(11 * KIB))
    with cluster.producer(compression_type="none") as producer:
        with pytest.raises(RecordTooLargeError, match="max_message_bytes"):
            producer.send("t", noise)
        with pytest.raises(RecordTooLargeError, match="max_message_bytes"):
            producer.send_many("t", [b"ok", noise])
        producer.send("t", noise[: 9 * KIB]).result(30)
    with cluster.producer() as producer:  # the limit is on the stored size
        producer.send("t", bytes(MIB)).result(30)
    assert len(fake.values("t")) == 2


def test_batches_stay_below_max_message_bytes(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t", max_message_bytes=2 * KIB)
    with cluster.producer(compression_type="none") as producer:
        futures = [producer.send("t", b"", key=b"", timestamp_ms=n * 10**9) for n in range(1000)]
        futures += [producer.send("t", b"x", headers=[("é" * 5, b"y")] * 3) for _ in range(500)]
        for future in futures:
            future.result(30)


def test_bad_timestamps_and_configs_are_refused(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    with cluster.producer() as producer:
        with pytest.raises(InvalidTimestampError):
            producer.send("t", b"v", timestamp_ms=-1)
        with pytest.raises(TypeError):
            producer.send("t", b"v", timestamp_ms=1.5)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="1 values and 2 keys"):
            producer.send_many("t", [b"v"], keys=[b"a", b"b"])
    with pytest.raises(ConfigError, match="linger_ms"):
        cluster.producer(linger_mss=5)
    with pytest.raises(ConfigError, match="acks"):
        cluster.producer(acks="some")


def test_an_unknown_topic_is_an_error_of_send(fake: FakeCluster, cluster: Cluster) -> None:
    with cluster.producer() as producer:
        with pytest.raises(UnknownTopicError, match="create_topic"):
            producer.send("nowhere", b"v")
        with pytest.raises(UnknownTopicError):
            producer.send_many("nowhere", [b"v"])
        fake.create_topic("nowhere")
        producer.send("nowhere", b"v").result(30)


def test_a_topic_deleted_meanwhile_fails_what_waits_for_it(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    with cluster.producer() as producer:
        producer.send("t", b"v").result(30)
        fake.delete_topic("t")
        assert isinstance(producer.send("t", b"w").exception(30), UnknownTopicError)
        fake.create_topic("t")
        assert producer.send("t", b"x").result(30).offset == 0
        with pytest.raises(DeliveryError):
            producer.flush()
    assert fake.values("t") == [b"x"]


def test_records_of_a_topic_that_was_hidden_meanwhile_are_no_repetitions(
    fake: FakeCluster, cluster: Cluster
) -> None:
    topic = fake.create_topic("t")
    with cluster.producer() as producer:
        producer.send("t", b"v").result(30)
        fake.delete_topic("t")
        assert isinstance(producer.send("t", b"w").exception(30), UnknownTopicError)
        fake.bring_back(topic)
        assert producer.send("t", b"x").result(30).offset == 1
        with pytest.raises(DeliveryError):
            producer.flush()
    assert fake.values("t") == [b"v", b"x"]


# --- the end --------------------------------------------------------------------------------------


def test_close_delivers_and_is_idempotent(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    producer = cluster.producer()
    futures = [producer.send("t", b"v") for _ in range(100)]
    producer.close()
    producer.close()
    assert all(future.done() for future in futures)
    assert len(fake.values("t")) == 100
    for use in (lambda: producer.send("t", b"v"), lambda: producer.send_many("t", [b"v"])):
        with pytest.raises(ClosedError):
            use()


def test_close_says_what_was_not_delivered(
    fake: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    fake.create_topic("t")
    producer = cluster.producer()
    producer.send("t", b"warm").result(30)
    fake.fault(Produce, times=1000, is_lost=True)
    future = producer.send("t", b"v")
    eventually(lambda: len(fake.asked(Produce)) == 2)
    with pytest.raises(TimeoutError):
        producer.close(timeout_s=0.2)
    assert isinstance(future.exception(30), OutcomeUnknownError)


def test_the_error_of_a_with_block_is_not_hidden(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    fake.fault(Produce, error=RecordTooLargeError("too large"))

    def fail() -> None:
        with cluster.producer() as producer:
            producer.send("t", b"v")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_closing_the_cluster_closes_its_producers(fake: FakeCluster) -> None:
    fake.create_topic("t")
    with fake.cluster() as cluster:
        producer = cluster.producer()
        future = producer.send("t", b"v")
    assert future.done()
    with pytest.raises(ClosedError):
        producer.send("t", b"v")
    with pytest.raises(ClosedError):
        cluster.producer()


# --- asyncio --------------------------------------------------------------------------------------


def test_the_async_producer_has_the_same_methods(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t", partitions=2)

    async def scenario() -> None:
        async with cluster.async_producer() as producer:
            futures = [await producer.send("t", b"v", partition=0) for _ in range(100)]
            results = await asyncio.gather(*futures)
            assert [result.offset for result in results] == list(range(100))
            many = await producer.send_many("t", [b"v"] * 10, partition=1)
            assert await many == [OffsetRange("t", 1, 0, 10)]
            await producer.flush(timeout_s=30)
            with pytest.raises(UnknownTopicError):
                await producer.send("nowhere", b"v")
        with pytest.raises(ClosedError):
            await producer.send("t", b"v")

    asyncio.run(scenario())


def test_the_async_producer_waits_for_room(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")

    async def scenario() -> None:
        async with cluster.async_producer(
            buffer_memory=16 * KIB, batch_size=4 * KIB, max_block_ms=2000
        ) as producer:
            for _ in range(500):
                await producer.send("t", b"x" * 500)
            fake.fault(Produce, times=1000, is_lost=True)
            with pytest.raises(BufferFullError):
                await asyncio.gather(*(producer.send("t", b"x" * 500) for _ in range(500)))
            with pytest.raises(TimeoutError):
                await producer.close(timeout_s=0.1)

    asyncio.run(scenario())


def test_an_awaited_failure_is_the_deliverys_error(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    fake.fault(Produce, error=RecordTooLargeError("too large"))

    async def scenario() -> None:
        producer = cluster.async_producer()
        with pytest.raises(RecordTooLargeError):
            await (await producer.send("t", b"v"))
        with pytest.raises(DeliveryError):
            await producer.close()

    asyncio.run(scenario())


def test_async_classes_need_a_running_loop(cluster: Cluster) -> None:
    with pytest.raises(RayqError, match="async function"):
        cluster.async_producer()
