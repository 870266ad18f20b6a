"""The consumer against a played cluster: positions, resets, pauses, damaged and missing bytes."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from rayq.client.cluster import Cluster
from rayq.client.consuming import fetcher as fetcher_module
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.client.consuming.consumer import Consumer
from rayq.client.consuming.consumer_core import ConsumerCore
from rayq.errors import (
    AuthorizationError,
    ClosedError,
    ConcurrentUseError,
    ConfigError,
    CorruptBatchError,
    InvalidRequestError,
    LogTruncatedError,
    MissingExtraError,
    NotLeaderError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    RayqError,
    UnknownTopicError,
)
from rayq.messages import LATEST, CheckRange, Fetch, FetchResponse, ListOffsets
from rayq.records import Record, TopicPartition
from tests.client.fake_broker import FakeCluster

Eventually = Callable[[Callable[[], bool]], None]
T0 = TopicPartition("t", 0)
T1 = TopicPartition("t", 1)


def numbers(first: int, last: int) -> list[bytes]:
    return [str(number).encode() for number in range(first, last)]


def read(consumer: Consumer, count: int, **options: Any) -> list[Record]:
    """Polls until that many records have come."""
    found: list[Record] = []
    deadline = time.monotonic() + 30
    while len(found) < count and time.monotonic() < deadline:
        found += consumer.poll(timeout_s=0.2, **options)
    assert len(found) == count
    return found


def poll_forever(consumer: Consumer) -> None:
    """Polls until a poll raises."""
    for _ in range(1000):
        consumer.poll(timeout_s=0.05)


def test_everything_written_is_read_in_order(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    for first in range(0, 1000, 100):
        fake.write("t", numbers(first, first + 100))
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        records = read(consumer, 1000)
        assert [record.value for record in records] == numbers(0, 1000)
        assert [record.offset for record in records] == list(range(1000))
        assert consumer.position(T0) == 1000
        assert consumer.poll(timeout_s=0.05) == []


def test_a_record_has_all_its_fields(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    fake.write(
        "t",
        [b"v", b"w"],
        keys=[b"k", None],
        headers=[[("a", b"1"), ("a", b"2")], None],
        timestamps_ms=[5, 7],
    )
    fake.write("t", [b"x", b"y"])
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        records = read(consumer, 4)
    assert records[:2] == [
        Record("t", 0, 0, 5, b"k", b"v", [("a", b"1"), ("a", b"2")]),
        Record("t", 0, 1, 7, None, b"w", []),
    ]
    records[2].headers.append(("mine", b"own"))
    assert records[3].headers == []


def test_poll_returns_as_soon_as_there_is_one_record(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    with cluster.consumer("t") as consumer:
        timer = threading.Timer(0.1, lambda: fake.write("t", [b"v"]))
        timer.start()
        start = time.monotonic()
        assert [record.value for record in consumer.poll(timeout_s=30)] == [b"v"]
        assert time.monotonic() - start < 15
        timer.join()


def test_latest_means_after_the_consumer_was_made(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    fake.write("t", [b"before"])
    with cluster.consumer("t") as consumer:
        fake.write("t", [b"after"])
        assert [record.value for record in read(consumer, 1)] == [b"after"]


def test_max_records_cuts_inside_a_batch_and_the_rest_is_kept(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    fake.write("t", numbers(0, 10))
    fake.write("t", numbers(10, 20))
    options: dict[str, Any] = {"max_poll_records": 3, "fetch_max_wait_ms": 30_000}
    with cluster.consumer("t", auto_offset_reset="earliest", **options) as consumer:
        sizes = []
        found: list[bytes | None] = []
        while len(found) < 20:
            records = consumer.poll(timeout_s=1)
            sizes.append(len(records))
            found += [record.value for record in records]
            assert consumer.position(T0) == len(found)
        assert max(sizes) == 3
        assert found == numbers(0, 20)
        with pytest.raises(InvalidRequestError, match="max_records"):
            consumer.poll(max_records=0)
    assert len(fake.asked(Fetch)) < 10


def test_all_partitions_get_their_turn(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t", partitions=3)
    for partition in range(3):
        fake.write("t", numbers(0, 100), partition)
    with cluster.consumer("t", auto_offset_reset="earliest", max_poll_records=10) as consumer:
        assert consumer.assignment() == {TopicPartition("t", n) for n in range(3)}
        first = read(consumer, 10)
        rest = read(consumer, 290)
    for partition in range(3):
        mine = [one.value for one in [*first, *rest] if one.partition == partition]
        assert mine == numbers(0, 100)
    assert {one.partition for one in rest[:50]} != {first[0].partition}


def test_iterating_yields_records_and_position_counts_what_was_yielded(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t", partitions=2)
    fake.write("t", numbers(0, 10), 0)
    fake.write("t", numbers(0, 10), 1)
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        yielded = [next(consumer) for _ in range(7)]
        for partition in (T0, T1):
            count = sum(one.partition == partition.partition for one in yielded)
            assert consumer.position(partition) == count
        yielded += consumer.poll(max_records=4)
        yielded += [next(consumer) for _ in range(9)]
    for number in (0, 1):
        assert [one.value for one in yielded if one.partition == number] == numbers(0, 10)


# --- positions ------------------------------------------------------------------------------------


def test_seek_goes_anywhere_even_while_a_fetch_is_under_way(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    fake.write("t", numbers(0, 100))
    with cluster.consumer("t", auto_offset_reset="earliest", fetch_max_wait_ms=30_000) as consumer:
        read(consumer, 100)
        time.sleep(0.05)  # now the fetch waits at the end
        start = time.monotonic()
        for offset in (40, 99, 0, 7):
            consumer.seek(T0, offset)
            assert consumer.position(T0) == offset
            assert read(consumer, 1, max_records=1)[0].offset == offset
        assert time.monotonic() - start < 15
        consumer.seek_to_end(T0)
        assert consumer.position(T0) == 100
        consumer.seek_to_beginning()
        assert consumer.position(T0) == 0
        assert len(read(consumer, 100)) == 100


def test_an_answer_from_before_a_seek_is_dropped(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    fake.write("t", numbers(0, 10))
    fake.write("t", numbers(10, 20))
    fake.fault(Fetch, delay_s=0.2, matches=lambda request, _broker: request.offset == 0)
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        while not fake.asked(Fetch):
            time.sleep(0.001)
        consumer.seek(T0, 15)
        assert [record.offset for record in read(consumer, 5)] == [15, 16, 17, 18, 19]
        time.sleep(0.25)
        assert consumer.poll(timeout_s=0.05) == []


def test_bad_seeks_are_refused(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    with cluster.consumer("t") as consumer:
        with pytest.raises(InvalidRequestError, match="count from 0"):
            consumer.seek(T0, -1)
        with pytest.raises(TypeError):
            consumer.seek(T0, 1.5)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            consumer.seek("t", 1)  # type: ignore[arg-type]
        for use in (consumer.position, consumer.pause, consumer.seek_to_end):
            with pytest.raises(InvalidRequestError, match="not assigned"):
                use(TopicPartition("t", 9))
        with pytest.raises(InvalidRequestError, match="partitions 0 to 0"):
            consumer.assign([TopicPartition("t", 1)])
        with pytest.raises(UnknownTopicError):
            consumer.assign([TopicPartition("nowhere", 0)])


def test_a_position_below_the_log_start_is_reset(
    fake: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    fake.create_topic("t")
    for first in range(0, 30, 10):
        fake.write("t", numbers(first, first + 10))
    fake.delete_before("t", 0, 20)
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        consumer.seek(T0, 5)
        assert [record.offset for record in read(consumer, 10)] == list(range(20, 30))
        assert consumer.position(T0) == 30
    with cluster.consumer("t", auto_offset_reset="latest") as consumer:
        consumer.seek(T0, 5)
        eventually(lambda: consumer.poll(timeout_s=0.1) == [] and consumer.position(T0) == 30)
        fake.write("t", [b"new"])
        assert [record.offset for record in read(consumer, 1)] == [30]


def test_without_a_reset_policy_a_missing_offset_is_an_error(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    fake.write("t", numbers(0, 10))
    fake.write("t", numbers(10, 20))
    fake.delete_before("t", 0, 10)
    with cluster.consumer("t", auto_offset_reset="none") as consumer:
        for timeout_s in (30.0, 0.05):
            with pytest.raises(OffsetOutOfRangeError, match="seek"):
                consumer.poll(timeout_s)
        with pytest.raises(OffsetOutOfRangeError):
            consumer.position(T0)
        consumer.seek(T0, 5)
        for timeout_s in (30.0, 0.05):
            with pytest.raises(OffsetOutOfRangeError, match="starts at 10"):
                consumer.poll(timeout_s)
        consumer.seek(T0, 12)
        assert [record.offset for record in read(consumer, 8)] == list(range(12, 20))


def test_a_position_past_the_end_follows_the_reset_policy(
    fake: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    fake.create_topic("t")
    fake.write("t", numbers(0, 10))
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        consumer.seek(T0, 11)
        assert [record.offset for record in read(consumer, 10)] == list(range(10))
        assert consumer.position(T0) == 10
    with cluster.consumer("t", auto_offset_reset="latest") as consumer:
        consumer.seek(T0, 1000)
        eventually(lambda: consumer.poll(timeout_s=0.1) == [] and consumer.position(T0) == 10)
        fake.write("t", numbers(10, 11))
        assert [record.offset for record in read(consumer, 1)] == [10]
    with cluster.consumer("t", auto_offset_reset="none") as consumer:
        consumer.seek(T0, 12)
        with pytest.raises(OffsetOutOfRangeError, match="ends at 11"):
            consumer.poll(30)
        assert consumer.position(T0) == 12
        consumer.seek(T0, 10)
        assert len(read(consumer, 1)) == 1
        consumer.seek(T0, 11)  # The end itself is a position: the fetch waits.
        assert consumer.poll(timeout_s=0.1) == []


def test_what_was_read_and_is_gone_is_told_whatever_the_reset_policy_says(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    fake.write("t", numbers(0, 10))
    with cluster.consumer("t", auto_offset_reset="earliest", fetch_max_wait_ms=50) as consumer:
        assert len(read(consumer, 10)) == 10
        fake.truncate("t", 0, 5)
        with pytest.raises(LogTruncatedError, match="ends at 5"):
            poll_forever(consumer)
        assert consumer.position(T0) == 10


def test_records_before_an_error_are_handed_out_first(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    fake.write("t", numbers(0, 10))
    fake.fault(
        Fetch,
        error=LogTruncatedError("the log branched off"),
        matches=lambda request, _broker: request.offset == 10,
    )
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        time.sleep(0.1)
        assert len(read(consumer, 10)) == 10
        with pytest.raises(LogTruncatedError, match="branched off"):
            consumer.poll(30)


def test_a_fetch_names_the_epoch_of_the_last_batch_read(
    fake: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    fake.create_topic("t")
    fake.write("t", numbers(0, 10))
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        read(consumer, 10)
        eventually(lambda: len(fake.asked(Fetch)) > 1)
        assert [one.last_epoch for one in fake.asked(Fetch)][:2] == [None, 1]
        consumer.seek(T0, 3)
        eventually(lambda: fake.asked(Fetch)[-1].offset != 3 and len(fake.asked(Fetch)) > 3)
        assert [one.last_epoch for one in fake.asked(Fetch) if one.offset == 3] == [None]


def test_offsets_by_time_and_the_ends(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t", partitions=2)
    fake.write("t", numbers(0, 3), timestamps_ms=[100, 200, 300])
    with cluster.consumer() as consumer:
        assert consumer.beginning_offsets([T0, T1]) == {T0: 0, T1: 0}
        assert consumer.end_offsets([T0, T1]) == {T0: 3, T1: 0}
        assert consumer.offsets_for_times({T0: 150, T1: 150}) == {T0: 1, T1: None}
        assert consumer.offsets_for_times({T0: 301}) == {T0: None}
        with pytest.raises(InvalidRequestError, match="Unix time"):
            consumer.offsets_for_times({T0: -1})
        with pytest.raises(InvalidRequestError):
            consumer.end_offsets([TopicPartition("t", 7)])
        with pytest.raises(UnknownTopicError):
            consumer.end_offsets([TopicPartition("nowhere", 0)])
        consumer.assign([T0, T1])
        consumer.seek(T0, 1)
        assert consumer.lag() == {T0: 2, T1: 0}


# --- assignment -----------------------------------------------------------------------------------


def test_assign_reads_exactly_these_and_keeps_positions(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t", partitions=2)
    fake.write("t", numbers(0, 10), 0)
    fake.write("t", numbers(0, 10), 1)
    with cluster.consumer(auto_offset_reset="earliest") as consumer:
        assert consumer.assignment() == set()
        assert consumer.poll(timeout_s=0.01) == []
        consumer.assign([T1])
        assert {one.partition for one in read(consumer, 4, max_records=4)} == {1}
        consumer.assign([T0, ("t", 1)])  # type: ignore[list-item]
        assert consumer.position(T1) == 4
        assert len(read(consumer, 16)) == 16
        consumer.assign([])
        assert consumer.assignment() == set()
        fake.write("t", [b"x"])
        assert consumer.poll(timeout_s=0.05) == []


def test_subscribe_replaces_what_was_read(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    fake.create_topic("u")
    fake.write("u", [b"u"])
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        consumer.subscribe(["u"])
        assert consumer.assignment() == {TopicPartition("u", 0)}
        assert [one.topic for one in read(consumer, 1)] == ["u"]
        consumer.subscribe("t")
        assert consumer.assignment() == {T0}
        with pytest.raises(UnknownTopicError, match="create_topic"):
            consumer.subscribe(["nowhere"])


def test_partitions_added_later_are_read_from_their_beginning(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    with cluster.consumer("t") as consumer:
        fake.add_partitions("t", 2)
        fake.write("t", [b"early"], 1)
        cluster.admin.describe_topic("t")  # stands for the regular refresh
        assert [record.value for record in read(consumer, 1)] == [b"early"]
        assert consumer.assignment() == {T0, T1}


def test_a_paused_partition_keeps_what_was_fetched(
    fake: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    fake.create_topic("t", partitions=2)
    fake.write("t", numbers(0, 10), 0)
    fake.write("t", numbers(0, 10), 1)
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        first = read(consumer, 2, max_records=2)
        eventually(lambda: {one.partition for one in fake.asked(Fetch)} == {0, 1})
        consumer.pause(T0)
        mine = read(consumer, 10 - sum(one.partition for one in first))
        assert {one.partition for one in mine} <= {1}
        assert consumer.poll(timeout_s=0.2) == []
        asked = [one for one in fake.asked(Fetch) if one.partition == 0]
        consumer.resume(T0)
        rest = read(consumer, 18 - len(mine))
        assert {one.partition for one in rest} <= {0}
        assert [one.offset for one in asked].count(0) == 1
        fake.write("t", [b"more"], 0)
        assert len(read(consumer, 1)) == 1


def test_a_paused_partition_is_not_fetched(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    with cluster.consumer(auto_offset_reset="earliest", fetch_max_wait_ms=50) as consumer:
        consumer.assign([T0])
        consumer.pause(T0)
        # The pause may have come after a first fetch. Without it each would last 50 ms.
        before = -1
        while before != len(fake.asked(Fetch)):
            before = len(fake.asked(Fetch))
            assert before <= 1
            time.sleep(0.2)
        fake.write("t", [b"v"])
        assert consumer.poll(timeout_s=0.05) == []
        consumer.resume(T0)
        assert len(read(consumer, 1)) == 1


# --- memory ---------------------------------------------------------------------------------------


def test_fetching_stops_at_the_bound_and_goes_on(
    fake: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    fake.create_topic("t")
    for _ in range(50):
        fake.write("t", [bytes(1000)] * 10, compression="none")
    with cluster.consumer(
        "t", auto_offset_reset="earliest", fetch_buffer_bytes=80_000, max_poll_records=10
    ) as consumer:
        eventually(lambda: len(fake.asked(Fetch)) == 2)
        time.sleep(0.1)
        assert len(fake.asked(Fetch)) == 2
        assert all(one.bytes_max == 40_000 for one in fake.asked(Fetch))
        assert len(read(consumer, 500)) == 500


def test_a_batch_larger_than_the_bound_still_comes(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    fake.write("t", [bytes(100_000)], compression="none")
    fake.write("t", [b"after"])
    with cluster.consumer(
        "t", auto_offset_reset="earliest", fetch_buffer_bytes=2000, fetch_max_bytes=1000
    ) as consumer:
        assert [len(record.value or b"") for record in read(consumer, 2)] == [100_000, 5]


# --- bytes that are missing or wrong --------------------------------------------------------------


def test_gaps_between_offsets_are_legal(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    for first in range(0, 50, 10):
        fake.write("t", numbers(first, first + 10))
    fake.replace_batch("t", 3, None)
    fake.replace_batch("t", 1, None)
    fake.replace_batch("t", 2, None)  # now the last batch: the end is emptied
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        assert [record.offset for record in read(consumer, 20)] == [*range(10), *range(20, 30)]
        deadline = time.monotonic() + 30
        while consumer.position(T0) != 50 and time.monotonic() < deadline:
            assert consumer.poll(timeout_s=0.05) == []
        assert consumer.position(T0) == 50


def test_a_wrong_crc_is_reported_to_the_leader_and_read_again(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    fake.write("t", numbers(0, 10))
    fake.write("t", numbers(10, 20))

    def damage(response: Any, data: bytes) -> Any:
        half = len(data) // 2
        return response, data[: half + 30] + b"\0\0\0" + data[half + 33 :]

    fake.fault(Fetch, times=2, change=damage)
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        assert [record.value for record in read(consumer, 20)] == numbers(0, 20)
    assert [one.offset for one in fake.checked][:1] == [10]


def test_a_damaged_header_is_reported_too(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    fake.write("t", numbers(0, 10))
    fake.fault(Fetch, change=lambda response, data: (response, b"\xff" + data[1:]))
    fake.fault(Fetch, change=lambda response, data: (response, data[:-1]))
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        assert len(read(consumer, 10)) == 10
    assert len(fake.asked(CheckRange)) == 2


def test_lasting_damage_is_told_to_the_consumer(
    fake: FakeCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher_module, "CORRUPT_TRIES_MAX", 2)
    fake.create_topic("t")
    fake.write("t", numbers(0, 10))
    fake.write("t", numbers(10, 20))
    damaged = bytearray(fake.topics["t"].partitions[0].batches[1][1])
    damaged[-1] ^= 1
    fake.replace_batch("t", 1, bytes(damaged))
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        assert len(read(consumer, 10)) == 10
        with pytest.raises(CorruptBatchError, match="offset 10"):
            poll_forever(consumer)
        assert consumer.position(T0) == 10


# --- leaders --------------------------------------------------------------------------------------


def test_reading_follows_the_leader(fake3: FakeCluster) -> None:
    fake3.create_topic("t")
    with (
        fake3.cluster() as cluster,
        cluster.consumer("t", auto_offset_reset="earliest") as consumer,
    ):
        for turn in range(6):
            fake3.write("t", [str(turn).encode()])
            assert [record.offset for record in read(consumer, 1)] == [turn]
            fake3.move_leader("t", 0, 1 + (turn + 1) % 3)


def test_a_leader_that_dies_or_hangs_is_replaced_quickly(fake3: FakeCluster) -> None:
    fake3.create_topic("t")
    # A request to a leader that hangs would be waited for this long.
    patience: dict[str, Any] = {"fetch_max_wait_ms": 500, "request_timeout_ms": 60_000}
    with fake3.cluster() as cluster, cluster.consumer("t", **patience) as consumer:
        fake3.stop_broker(1)
        timer = threading.Timer(0.2, lambda: fake3.move_leader("t", 0, 2))
        timer.start()
        fake3.write("t", [b"v"])
        assert len(read(consumer, 1)) == 1
        timer.join()
        while fake3.asked(Fetch)[-1].offset != 1:
            time.sleep(0.01)  # until a fetch waits at the end
        hung = fake3.fault(
            Fetch, times=100, is_lost=True, matches=lambda _request, broker: broker == 2
        )
        fake3.write("t", [b"w"])
        read(consumer, 1)  # the fetch that was under way
        while hung.times == 100:
            time.sleep(0.01)
        fake3.write("t", [b"x"])
        fake3.move_leader("t", 0, 3)
        assert len(read(consumer, 1)) == 1


@pytest.mark.parametrize(
    "error", [OffsetNotAvailableError("not yet"), NotLeaderError("elsewhere")], ids=str
)
def test_retriable_errors_are_retried(
    fake: FakeCluster, cluster: Cluster, error: RayqError
) -> None:
    fake.create_topic("t")
    fake.write("t", [b"v"])
    fake.fault(Fetch, times=3, error=error)
    fake.fault(ListOffsets, times=3, error=error)
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        assert len(read(consumer, 1)) == 1


def test_a_deleted_topic_is_an_error_of_poll(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    with cluster.consumer("t", fetch_max_wait_ms=50) as consumer:
        fake.delete_topic("t")
        fake.create_topic("t")
        with pytest.raises(UnknownTopicError, match="deleted"):
            poll_forever(consumer)


def test_a_topic_that_was_created_again_is_read_once_it_is_subscribed_to_again(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    with cluster.consumer("t", auto_offset_reset="earliest", fetch_max_wait_ms=50) as consumer:
        fake.delete_topic("t")
        fake.create_topic("t")
        fake.write("t", [b"new"])
        with pytest.raises(UnknownTopicError, match=r"Subscribe or assign again"):
            poll_forever(consumer)
        consumer.subscribe("t")
        assert [record.value for record in read(consumer, 1)] == [b"new"]


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_a_consumer_goes_on_where_it_was_once_it_may_read_a_topic_again(
    fake: FakeCluster, cluster: Cluster, is_forgotten: bool
) -> None:
    fake.create_topic("t")
    fake.write("t", [b"a"])
    with cluster.consumer("t", auto_offset_reset="earliest", fetch_max_wait_ms=50) as consumer:
        assert [record.value for record in read(consumer, 1)] == [b"a"]
        topic = fake.hide_topic("t")
        if is_forgotten:  # A list of all topics leaves it out, and does not say why.
            assert cluster.admin.list_topics() == []
        with pytest.raises((AuthorizationError, UnknownTopicError)):
            poll_forever(consumer)
        fake.bring_back(topic)
        fake.write("t", [b"b"])
        found: list[Record] = []
        deadline = time.monotonic() + 30
        while not found and time.monotonic() < deadline:
            with contextlib.suppress(AuthorizationError, UnknownTopicError):
                found += consumer.poll(timeout_s=0.1)
        assert [(record.offset, record.value) for record in found] == [(1, b"b")]


# --- arrow ----------------------------------------------------------------------------------------


def test_poll_arrow_has_the_documented_columns(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t", partitions=2)
    fake.create_topic("u")
    fake.write("t", numbers(0, 3), 0, timestamps_ms=[1, 2, 3])
    fake.write(
        "t",
        [b"a", None],
        1,
        keys=[b"k", None],
        headers=[[("h", b"1"), ("h", b"2")], None],
        timestamps_ms=1_700_000_000_000,
    )
    fake.write("u", [b"u"])
    with cluster.consumer("t", "u", auto_offset_reset="earliest") as consumer:
        tables = []
        while sum(table.num_rows for table in tables) < 6:
            tables.append(consumer.poll_arrow(timeout_s=1))
        empty = consumer.poll_arrow(timeout_s=0)
    header = pa.struct([pa.field("name", pa.string()), pa.field("value", pa.binary())])
    assert empty.schema == pa.schema(
        [
            ("topic", pa.dictionary(pa.int32(), pa.string())),
            ("partition", pa.int32()),
            ("offset", pa.int64()),
            ("timestamp", pa.timestamp("ms", tz="UTC")),
            ("key", pa.binary()),
            ("value", pa.binary()),
            ("headers", pa.list_(header)),
        ]
    )
    table = pa.concat_tables([*tables, empty]).unify_dictionaries()
    table.validate(full=True)
    rows = sorted(
        table.to_pylist(), key=lambda row: (row["topic"], row["partition"], row["offset"])
    )
    assert [row["value"] for row in rows] == [b"0", b"1", b"2", b"a", None, b"u"]
    assert [row["key"] for row in rows] == [None, None, None, b"k", None, None]
    assert [row["offset"] for row in rows] == [0, 1, 2, 0, 1, 0]
    assert [row["timestamp"].timestamp() for row in rows][:4] == [0.001, 0.002, 0.003, 1.7e9]
    assert rows[3]["headers"] == [{"name": "h", "value": b"1"}, {"name": "h", "value": b"2"}]
    assert [row["headers"] for row in rows[:3]] == [[], [], []]


def test_poll_arrow_cuts_and_keeps_as_poll_does(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    fake.write("t", numbers(0, 10))
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        table = consumer.poll_arrow(timeout_s=30, max_records=4)
        assert table["offset"].to_pylist() == [0, 1, 2, 3]
        assert [record.offset for record in read(consumer, 6)] == [4, 5, 6, 7, 8, 9]


def test_without_pyarrow_the_extra_is_named(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with (
        cluster.consumer() as consumer,
        pytest.raises(MissingExtraError, match=r"pip install 'rayq\[arrow\]'"),
    ):
        consumer.poll_arrow()


# --- the rest -------------------------------------------------------------------------------------


def test_without_a_group_there_is_nothing_to_commit_to(cluster: Cluster) -> None:
    with cluster.consumer() as consumer:
        with pytest.raises(RayqError, match="no group"):
            consumer.commit()
        with pytest.raises(RayqError, match="no group"):
            consumer.committed([T0])


def test_bad_configs_and_topics_are_refused_when_the_consumer_is_made(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="auto_offset_reset"):
        cluster.consumer("t", auto_offset_resett="latest")
    with pytest.raises(ConfigError, match="earliest"):
        cluster.consumer("t", auto_offset_reset="begin")
    with pytest.raises(UnknownTopicError):
        cluster.consumer("nowhere")


def test_a_closed_consumer_says_so(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    consumer = cluster.consumer("t")
    consumer.close()
    consumer.close()
    uses: list[Callable[[], Any]] = [
        consumer.poll,
        consumer.poll_arrow,
        consumer.assignment,
        consumer.lag,
        lambda: next(consumer),
        lambda: consumer.seek(T0, 1),
        lambda: consumer.pause(T0),
        lambda: consumer.end_offsets([T0]),
        lambda: consumer.subscribe(["t"]),
        consumer.commit,
    ]
    for use in uses:
        with pytest.raises(ClosedError):
            use()


def test_the_async_consumer_has_the_same_methods(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t", partitions=2)
    fake.write("t", numbers(0, 10), 0)

    async def scenario() -> None:
        async with cluster.async_consumer("t", auto_offset_reset="earliest") as consumer:
            assert await consumer.assignment() == {T0, T1}
            records = await consumer.poll(timeout_s=30, max_records=4)
            assert [record.offset for record in records] == [0, 1, 2, 3]
            assert (await anext(consumer)).offset == 4
            assert await consumer.position(T0) == 5
            table = await consumer.poll_arrow(timeout_s=30)
            assert table["offset"].to_pylist() == [5, 6, 7, 8, 9]
            await consumer.seek(T0, 8)
            async for record in consumer:
                assert record.offset == 8
                break
            assert await consumer.lag() == {T0: 1, T1: 0}
            await consumer.pause(T0)
            assert await consumer.poll(timeout_s=0.05) == []
            await consumer.resume(T0)
            assert len(await consumer.poll(timeout_s=30)) == 1
            await consumer.seek_to_beginning(T0)
            await consumer.seek_to_end(T0)
            assert await consumer.position(T0) == 10
            assert await consumer.beginning_offsets([T0]) == {T0: 0}
            assert await consumer.end_offsets([T0]) == {T0: 10}
            assert await consumer.offsets_for_times({T0: 0}) == {T0: 0}
            await consumer.subscribe(["t"])
            await consumer.assign([T1])
            assert await consumer.assignment() == {T1}
            with pytest.raises(RayqError, match="no group"):
                await consumer.commit()
        with pytest.raises(ClosedError):
            await consumer.poll()

    asyncio.run(scenario())


def test_a_cancelled_poll_loses_nothing(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")

    async def scenario() -> None:
        async with cluster.async_consumer("t", auto_offset_reset="earliest") as consumer:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(consumer.poll(timeout_s=30), 0.1)
            await asyncio.to_thread(fake.write, "t", [b"v"])
            assert [one.value for one in await consumer.poll(timeout_s=30)] == [b"v"]

    asyncio.run(scenario())


def test_latest_is_asked_for_once(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    with cluster.consumer("t") as consumer:
        consumer.poll(timeout_s=0.05)
    assert [one.timestamp_ms for one in fake.asked(ListOffsets)] == [LATEST]


# --- threads and tasks ----------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["poll", "poll_arrow", "iterate", "seek", "commit", "close"])
@pytest.mark.parametrize("group", [None, "g"])
def test_two_threads_at_once_are_refused(
    fake: FakeCluster, cluster: Cluster, use: str, group: str | None
) -> None:
    fake.create_topic("t")
    place = TopicPartition("t", 0)
    with cluster.consumer("t", group=group) as consumer:
        taken: list[Record] = []
        thread = threading.Thread(target=lambda: taken.extend(consumer.poll(20)))
        thread.start()
        uses: dict[str, Callable[[], object]] = {
            "poll": lambda: consumer.poll(30),
            "poll_arrow": lambda: consumer.poll_arrow(30),
            "iterate": lambda: next(consumer),
            "seek": lambda: consumer.seek(place, 0),
            "commit": lambda: consumer.commit({place: 1}),
            "close": consumer.close,
        }
        deadline = time.monotonic() + 30
        while not consumer._is_polling:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        with pytest.raises(ConcurrentUseError, match="consumer of its own"):
            uses[use]()
        assert consumer.end_offsets([place]) == {place: 0}
        consumer.assignment()
        while not taken:
            fake.write("t", [b"v"])
            time.sleep(0.01)
        thread.join()
        consumer.poll(0.01)  # from one thread to the other


def test_a_thread_that_only_asks_for_the_assignment_disturbs_no_poll(
    fake: FakeCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.create_topic("t")
    look = ConsumerCore.look_for_new_partitions

    def look_slowly(core: ConsumerCore) -> None:
        look(core)
        time.sleep(0.001)  # another thread has its turn

    monkeypatch.setattr(ConsumerCore, "look_for_new_partitions", look_slowly)
    with cluster.consumer("t") as consumer:
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.is_set():
                assert consumer.assignment() == {TopicPartition("t", 0)}

        watchers = [threading.Thread(target=watch) for _ in range(2)]
        for one in watchers:
            one.start()
        try:
            for _ in range(50):
                consumer.poll(timeout_s=0)
        finally:
            is_over.set()
            for one in watchers:
                one.join()


def test_threads_that_take_turns_read_everything_once(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    wanted = [b"%d" % number for number in range(2000)]
    for at in range(0, 2000, 100):
        fake.write("t", wanted[at : at + 100])
    found: list[bytes | None] = []
    turn = threading.Lock()
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:

        def read() -> None:
            while len(found) < len(wanted):
                with turn:
                    found.extend(record.value for record in consumer.poll(0.1, max_records=7))

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == wanted


def test_a_cluster_closes_consumers_that_other_threads_poll(fake: FakeCluster) -> None:
    fake.create_topic("t")
    told: list[BaseException] = []
    cluster = fake.cluster()
    consumer = cluster.consumer("t", group="g")

    def read() -> None:
        try:
            consumer.poll(20)
        except ClosedError as error:
            told.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    deadline = time.monotonic() + 30
    while not consumer._is_polling:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    cluster.close()
    thread.join(30)
    assert len(told) == 1


@pytest.mark.parametrize("method", ["poll", "poll_arrow"])
def test_polling_without_a_timeout_lets_other_tasks_run(
    fake: FakeCluster, cluster: Cluster, method: str
) -> None:
    fake.create_topic("t")

    async def work() -> tuple[int, int]:
        turns = polls = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        async with cluster.async_consumer("t") as consumer:
            task = asyncio.create_task(count())
            while polls < 50:
                await getattr(consumer, method)(0)
                polls += 1
            task.cancel()
        return turns, polls

    turns, polls = asyncio.run(work())
    assert turns >= polls - 1


# --- the same methods -----------------------------------------------------------------------------


def public_methods(kind: type) -> dict[str, Callable[..., Any]]:
    return {
        name: method
        for name, method in vars(kind).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }


def test_the_async_consumer_has_the_methods_of_the_synchronous_one_as_coroutines() -> None:
    plain, coroutines = public_methods(Consumer), public_methods(AsyncConsumer)
    del plain["abandon"]  # only the consumer for threads needs it
    assert plain.keys() == coroutines.keys()
    others = {"until_end", "commit_async"}  # They return an iterator and a future of their kind.
    for name, method in plain.items():
        expected, found = inspect.signature(method), inspect.signature(coroutines[name])
        assert found.parameters == expected.parameters, name
        if name not in others:
            assert found.return_annotation == expected.return_annotation, name
        if name != "until_end":
            assert inspect.iscoroutinefunction(inspect.unwrap(coroutines[name])), name


def test_every_method_of_a_consumer_says_what_it_does() -> None:
    for name, method in public_methods(Consumer).items():
        assert inspect.getdoc(method), name


def test_the_async_consumer_reads_up_to_the_end_a_poll_at_a_time(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    fake.write("t", numbers(0, 10))

    async def scenario() -> list[list[bytes | None]]:
        found = []
        async with cluster.async_consumer("t", auto_offset_reset="earliest") as consumer:
            until = await consumer.begin_until_end()
            while records := await consumer.poll_until(until, 4):
                found.append([record.value for record in records])
                await asyncio.to_thread(fake.write, "t", [b"behind the end"])
        return found

    assert asyncio.run(scenario()) == [numbers(0, 4), numbers(4, 8), numbers(8, 10)]


def test_a_leader_that_gives_nothing_of_a_log_that_goes_on_is_asked_seldom(
    fake: FakeCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.create_topic("stuck")
    fake.write("stuck", [b"x"])
    asked: list[int] = []
    fetch = FakeCluster.fetch

    async def gives_nothing(self: FakeCluster, broker: int, request: Fetch) -> Any:
        answer, payload = await fetch(self, broker, request)
        asked.append(request.offset)
        if len(asked) > 3:
            return answer, payload
        return msgspec.structs.replace(answer, next_offset=request.offset), b""

    monkeypatch.setattr(FakeCluster, "fetch", gives_nothing)
    with cluster.consumer("stuck", auto_offset_reset="earliest", retry_backoff_ms=100) as consumer:
        began_s = time.monotonic()
        assert consumer.poll(30)[0].value == b"x"
        assert time.monotonic() - began_s > 0.15


def test_a_leader_that_refuses_the_offset_that_it_names_itself_is_asked_now_and_then(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    fake.write("t", [b"v"])
    fake.fault(Fetch, times=10**6, error=OffsetOutOfRangeError("not in the log"))
    options = {"retry_backoff_ms": 100, "auto_offset_reset": "earliest"}
    with cluster.consumer("t", **options) as consumer:
        assert consumer.poll(timeout_s=1.0) == []
        assert 1 <= len(fake.asked(Fetch)) < 20
        fake.clear_faults()
        assert [record.value for record in read(consumer, 1)] == [b"v"]


@pytest.mark.parametrize("step", [0, 1, -1])
def test_a_leader_that_has_nothing_and_does_not_hold_fetches_is_asked_now_and_then(
    fake: FakeCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    fake.create_topic("t")
    fake.write("t", [b"v"])
    plain = fake.fetch

    def hurried(broker: int, request: Fetch) -> Any:
        if request.offset == 0:
            return plain(broker, request)
        return FetchResponse(request.offset, 0, 0, request.offset + step), b""

    monkeypatch.setattr(fake, "fetch", hurried)
    options = {"retry_backoff_ms": 100, "auto_offset_reset": "earliest"}
    with cluster.consumer("t", **options) as consumer:
        assert [record.value for record in read(consumer, 1)] == [b"v"]
        assert consumer.poll(timeout_s=1.0) == []
        assert len(fake.asked(Fetch)) < 40
