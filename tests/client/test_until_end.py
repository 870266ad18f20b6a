"""`until_end`, `seek_to_last` and `tail` against a played cluster."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rayq import messages
from rayq.client.cluster import Cluster
from rayq.client.consuming import until_end as until_end_module
from rayq.client.consuming.consumer import Consumer
from rayq.errors import (
    ConfigError,
    CorruptBatchError,
    InvalidRequestError,
    OffsetOutOfRangeError,
    TimeoutError,
    UnknownTopicError,
)
from rayq.messages import LATEST, DescribeGroup, Fetch, ListOffsets, ListOffsetsResponse
from rayq.records import TopicPartition
from rayq.storage.batch import encode_batch
from tests.client.fake_broker import FakeCluster

Eventually = Callable[[Callable[[], bool]], None]
T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
EARLIEST: dict[str, Any] = {"auto_offset_reset": "earliest", "fetch_max_wait_ms": 50}
GROUP: dict[str, Any] = {
    **EARLIEST,
    "group": "g",
    "group_heartbeat_interval_ms": 100,
    "group_session_timeout_ms": 20_000,
}


def numbers(first: int, last: int) -> list[bytes]:
    return [str(number).encode() for number in range(first, last)]


def write_tens(fake: FakeCluster, count: int, partition: int = 0) -> None:
    """Writes batches of ten records."""
    for first in range(0, 10 * count, 10):
        fake.write("t", numbers(first, first + 10), partition)


# --- what is yielded ------------------------------------------------------------------------------


def test_everything_there_is_comes_and_then_it_ends(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t", partitions=3)  # the third is empty
    write_tens(fake, 3, 0)
    write_tens(fake, 1, 1)
    with cluster.consumer("t", max_poll_records=7, **EARLIEST) as consumer:
        records = []
        for record in consumer.until_end():
            records.append(record)
            fake.write("t", [b"later"], record.partition)
        assert len(records) == 40
        for place, count in ((T0, 30), (T1, 10)):
            mine = [record.offset for record in records if record.partition == place.partition]
            assert mine == list(range(count))
            assert consumer.position(place) == count
        later = list(consumer.until_end())
        assert [one.value for one in later] == [b"later"] * 40
        assert list(consumer.until_end()) == []


def test_an_empty_topic_ends_at_once(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t", partitions=2)
    start = time.monotonic()
    with cluster.consumer("t", **EARLIEST) as consumer:
        assert list(consumer.until_end()) == []
    with cluster.consumer("t") as consumer:
        assert list(consumer.until_end()) == []
    with cluster.consumer() as consumer:
        assert list(consumer.until_end()) == []
    assert time.monotonic() - start < 15


def test_position_counts_what_was_yielded(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    write_tens(fake, 2)
    with cluster.consumer("t", **EARLIEST) as consumer:
        for record in consumer.until_end():
            assert consumer.position(T0) == record.offset + 1
            if record.offset == 4:
                break
        assert [record.offset for record in consumer.poll(max_records=2)] == [5, 6]
        reading = consumer.until_end()
        assert next(reading).offset == 7
        fake.write("t", numbers(20, 25))
        assert next(consumer).offset == 8  # from the records that it took ahead
        assert [record.offset for record in reading] == list(range(9, 20))
        assert next(consumer).offset == 20


def test_plain_iteration_in_between_brings_nothing_from_behind_the_end(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    write_tens(fake, 1)
    with cluster.consumer("t", max_poll_records=4, **EARLIEST) as consumer:
        reading = consumer.until_end()
        assert next(reading).offset == 0
        write_tens(fake, 1)
        consumer.seek(T0, 8)
        assert next(consumer).offset == 8  # It takes records behind the end ahead, too.
        assert [record.offset for record in reading] == [9]
        assert consumer.poll()[0].offset == 10


def test_values_may_be_deserialized(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    write_tens(fake, 2)
    with cluster.consumer("t", value_deserializer=int, **EARLIEST) as consumer:
        reading = consumer.until_end()
        assert [next(reading).value for _ in range(5)] == [0, 1, 2, 3, 4]
        assert [record.value for record in consumer.poll(max_records=3)] == [5, 6, 7]
        assert [record.value for record in reading] == list(range(8, 20))
    assert [one.value for one in cluster.tail("t", 2, value_deserializer=int)] == [18, 19]


def test_the_end_may_lie_inside_a_batch(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    write_tens(fake, 1)
    fake.fault(
        ListOffsets,
        change=lambda *_: (ListOffsetsResponse(7, None), []),
        matches=lambda request, _broker: request.timestamp_ms == LATEST,
    )
    with cluster.consumer(**EARLIEST) as consumer:
        consumer.assign([T0])
        consumer.seek(T0, 2)
        assert [record.offset for record in consumer.until_end()] == [2, 3, 4, 5, 6]
        assert consumer.position(T0) == 7
        assert [record.offset for record in consumer.until_end()] == [7, 8, 9]


def test_gaps_that_compaction_left_do_not_hold_it_up(fake: FakeCluster, cluster: Cluster) -> None:
    """There are gaps at the beginning, in the middle, at the end, and where the next record lies
    behind the end."""
    fake.create_topic("t")
    write_tens(fake, 6)
    for index in (5, 4, 2, 0):
        fake.replace_batch("t", index, None)
    expected = [*range(10, 20), *range(30, 40)]
    start = time.monotonic()
    with cluster.consumer("t", **EARLIEST) as consumer:
        assert [record.offset for record in consumer.until_end()] == expected
        assert consumer.position(T0) == 60
        consumer.seek_to_beginning()
        reading = consumer.until_end()
        assert next(reading).offset == 10
        fake.write("t", [b"later"])
        assert [record.offset for record in reading] == expected[1:]
        assert [record.value for record in consumer.poll()] == [b"later"]
    assert time.monotonic() - start < 15


def test_a_bad_batch_behind_the_end_is_none_of_its_business(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    write_tens(fake, 2)
    fake.replace_batch("t", 1, None)
    with cluster.consumer("t", **EARLIEST) as consumer:
        reading = consumer.until_end()
        assert next(reading).offset == 0
        fake.call(lambda: _append_damaged(fake))
        assert [record.offset for record in reading] == list(range(1, 10))
        with pytest.raises(CorruptBatchError):
            list(consumer.until_end())


def _append_damaged(fake: FakeCluster) -> None:
    partition = fake.topics["t"].partitions[0]
    fake.append(partition, encode_batch([b"bad"], timestamps_ms=1000))
    header, data = partition.batches[-1]
    partition.batches[-1] = (header, data[:-1] + bytes([data[-1] ^ 1]))


def test_retention_may_overtake_it(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    write_tens(fake, 5)
    only_one = {**EARLIEST, "fetch_max_bytes": 1, "fetch_buffer_bytes": 1}
    with cluster.consumer("t", max_poll_records=1, **only_one) as consumer:
        reading = consumer.until_end()
        assert next(reading).offset == 0
        fake.delete_before("t", 0, 40)
        rest = [record.offset for record in reading]
        assert rest[-10:] == list(range(40, 50)) and len(rest) < 49
    with cluster.consumer("t", **EARLIEST) as consumer:
        consumer.seek(T0, 0)
        fake.delete_before("t", 0, 50)
        assert list(consumer.until_end()) == []
        assert consumer.position(T0) == 50


def test_a_position_behind_the_end_follows_the_reset_policy(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    write_tens(fake, 1)
    with cluster.consumer("t", **EARLIEST) as consumer:
        consumer.seek(T0, 99)
        assert [record.offset for record in consumer.until_end()] == list(range(10))
    with cluster.consumer("t", fetch_max_wait_ms=50) as consumer:
        consumer.seek(T0, 99)
        assert list(consumer.until_end()) == []
        assert consumer.position(T0) == 10
    with cluster.consumer("t", auto_offset_reset="none") as consumer:
        consumer.seek(T0, 99)
        with pytest.raises(OffsetOutOfRangeError):
            list(consumer.until_end())


def test_paused_partitions_are_left_out(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t", partitions=2)
    write_tens(fake, 1, 0)
    write_tens(fake, 1, 1)
    with cluster.consumer("t", **EARLIEST) as consumer:
        consumer.pause(T1)
        assert {one.partition for one in consumer.until_end()} == {0}
        consumer.resume(T1)
        assert [one.partition for one in consumer.until_end()] == [1] * 10


def test_partitions_that_are_added_meanwhile_are_not_part_of_it(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    write_tens(fake, 1)
    with cluster.consumer("t", max_poll_records=1, **EARLIEST) as consumer:
        reading = consumer.until_end()
        next(reading)
        fake.add_partitions("t", 2)
        fake.write("t", [b"later"], 1)
        cluster.admin.describe_topic("t")  # stands for the regular refresh
        assert consumer.assignment() == {T0, T1}
        assert [one.partition for one in reading] == [0] * 9
        assert [record.value for record in consumer.until_end()] == [b"later"]


def test_async_for_ends_too(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t", partitions=2)
    write_tens(fake, 3, 0)

    async def read() -> None:
        async with cluster.async_consumer("t", max_poll_records=7, **EARLIEST) as consumer:
            offsets = [record.offset async for record in consumer.until_end()]
            assert offsets == list(range(30))
            fake.write("t", [b"later"])
            assert [record.value async for record in consumer.until_end(30.0)] == [b"later"]
            await consumer.seek_to_last(3)
            reading = consumer.until_end()
            assert (await anext(reading)).offset == 28
            assert (await anext(consumer)).offset == 29
            assert [record.offset async for record in reading] == [30]
            fake.move_leader("t", 0, None)
            with pytest.raises(TimeoutError, match="t-0"):
                async for _ in consumer.until_end(timeout_s=0.2):
                    pass
            with pytest.raises(InvalidRequestError, match="seconds"):
                consumer.until_end(-1)

    asyncio.run(read())


# --- what keeps it from ending --------------------------------------------------------------------


def test_what_does_not_come_is_an_error_and_no_early_end(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t", partitions=2)
    write_tens(fake, 2, 0)
    write_tens(fake, 2, 1)
    fake.fault(
        Fetch,
        times=1_000_000,
        is_lost=True,
        matches=lambda request, _broker: request.partition == 1 and request.offset == 20,
    )
    options = {**EARLIEST, "request_timeout_ms": 1000}
    with cluster.consumer("t", max_poll_records=10, **options) as consumer:
        reading = consumer.until_end()
        assert len([next(reading) for _ in range(40)]) == 40  # No record was held back.
        with pytest.raises(StopIteration):
            next(reading)
        fake.move_leader("t", 1, None)
        with pytest.raises(TimeoutError, match="t-1"):
            list(consumer.until_end(timeout_s=0.2))
        fake.move_leader("t", 1, 1)
        fake.write("t", [b"more"], 1)
        with pytest.raises(TimeoutError, match=r"3 s: t-1 is at 20, and its end at 21"):
            list(consumer.until_end(timeout_s=3))
        fake.clear_faults()
        assert [record.value for record in consumer.until_end()] == [b"more"]
        with pytest.raises(InvalidRequestError, match="seconds"):
            consumer.until_end(timeout_s=-1)


def test_the_time_counts_from_the_last_record_on_and_not_what_the_loop_takes(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    write_tens(fake, 2)
    with cluster.consumer("t", max_poll_records=10, **EARLIEST) as consumer:
        count = 0
        for record in consumer.until_end(timeout_s=1.0):
            count += 1
            if record.offset in (9, 19):
                time.sleep(1.2)
    assert count == 20


def test_a_topic_that_is_deleted_meanwhile_is_an_error(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    write_tens(fake, 5)
    only_one = {**EARLIEST, "fetch_max_bytes": 1, "fetch_buffer_bytes": 1}
    with cluster.consumer("t", max_poll_records=1, **only_one) as consumer:
        reading = consumer.until_end()
        next(reading)
        fake.delete_topic("t")
        with pytest.raises(UnknownTopicError):
            list(reading)


# --- in a group -----------------------------------------------------------------------------------


def test_a_member_reads_its_share_from_the_commits_on(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t", partitions=3)
    for partition in range(3):
        write_tens(fake, 1, partition)
    fake.groups.commit("t", 0, 4)
    start = time.monotonic()
    with cluster.consumer("t", **GROUP) as consumer:
        for record in consumer.until_end():
            if record.offset == 9:
                consumer.commit()
        assert consumer.lag() == {TopicPartition("t", number): 0 for number in range(3)}
    assert [fake.groups.committed("t", number) for number in range(3)] == [10, 10, 10]
    assert time.monotonic() - start < 15


def test_a_member_without_a_share_has_nothing_to_read(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    write_tens(fake, 1)
    fake.groups.group().grants_nothing = True
    with cluster.consumer("t", **GROUP) as consumer:
        assert list(consumer.until_end()) == []
        assert consumer.group_membership().member_epoch > 0


def test_while_the_group_is_rebalanced_it_does_not_end(
    fake: FakeCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    """Another member may have to give up a partition that is this member's."""
    monkeypatch.setattr(until_end_module, "SETTLE_PAUSE_S", 0.01)
    fake.create_topic("t", partitions=2)
    write_tens(fake, 1, 0)
    write_tens(fake, 1, 1)
    fake.groups.group().grants_nothing = True

    def still_moving(response: Any, payload: bytes) -> Any:
        return msgspec.structs.replace(response, state="rebalancing"), [payload]

    def grant_and_settle() -> None:
        eventually(lambda: len(fake.groups.group().members) == 1)
        time.sleep(0.2)
        fake.groups.grant(("t", 0), ("t", 1))
        time.sleep(0.2)
        fake.clear_faults()

    fake.fault(DescribeGroup, times=1_000_000, change=still_moving)
    with cluster.consumer("t", **GROUP) as consumer:
        thread = threading.Thread(target=grant_and_settle)
        thread.start()
        assert len(list(consumer.until_end())) == 20
        fake.fault(DescribeGroup, times=1_000_000, change=still_moving)
        with pytest.raises(TimeoutError, match="rebalanced"):
            list(consumer.until_end(timeout_s=1))
        thread.join()


def has_news(consumer: Consumer) -> bool:
    group = consumer._core.group
    assert group is not None and group.member is not None
    return group.member.has_news


def test_partitions_that_go_meanwhile_are_not_waited_for(
    fake: FakeCluster, cluster: Cluster, eventually: Eventually
) -> None:
    fake.create_topic("t", partitions=2)
    write_tens(fake, 1, 0)
    write_tens(fake, 1, 1)
    with cluster.consumer("t", max_poll_records=1, **GROUP) as consumer:
        seen = []
        for record in consumer.until_end():
            seen.append(record)
            if len(seen) == 5:
                fake.groups.grant(("t", 0))
                eventually(lambda: has_news(consumer))
        assert [one.offset for one in seen if one.partition == 0] == list(range(10))
        assert len(seen) < 20
        assert consumer.assignment() == {T0}


# --- the last records -----------------------------------------------------------------------------


def test_the_last_records_of_each_partition(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t", partitions=3)
    write_tens(fake, 3, 0)
    fake.write("t", [b"only"], 1)
    with cluster.consumer("t", fetch_max_wait_ms=50) as consumer:
        for count in (0, 1, 5, 10, 29, 30, 31, 10**9):
            consumer.seek_to_last(count)
            offsets = [record.offset for record in consumer.until_end() if record.partition == 0]
            assert offsets == list(range(30))[max(30 - count, 0) :], count
        consumer.seek_to_end()
        before = len(fake.asked(Fetch))
        consumer.seek_to_last(2, T0)
        asked = [one.offset for one in fake.asked(Fetch)[before:] if one.partition == 0]
        assert min(asked) == 28, "without gaps nothing has to be read"
        assert [record.offset for record in consumer.until_end()] == [28, 29]
        for wrong in (-1, 1.5, True, "3", None):
            with pytest.raises(InvalidRequestError, match="int from 0"):
                consumer.seek_to_last(wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="not assigned"):
            consumer.seek_to_last(1, TopicPartition("t", 7))


def test_records_are_counted_and_not_offsets(
    fake: FakeCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compaction has left gaps; windows of several widths lead to the same records."""
    fake.create_topic("t")
    write_tens(fake, 20)
    for index in (18, 17, 15, *range(13, 2, -1), 0):
        fake.replace_batch("t", index, None)
    kept = [one.offset for one in _all(cluster)]
    assert len(kept) == 50 and fake.topics["t"].partitions[0].cleaned == 190
    for width in (1, 7, 1000):
        monkeypatch.setattr("rayq.client.consuming.last_records.OFFSETS_MIN", width)
        with cluster.consumer("t", **EARLIEST) as consumer:
            for count in (1, 9, 10, 11, 25, 30, 49, 50, 51):
                consumer.seek_to_last(count)
                assert [record.offset for record in consumer.until_end()] == kept[-count:], count


def _all(cluster: Cluster) -> list[Any]:
    with cluster.consumer("t", **EARLIEST) as consumer:
        return list(consumer.until_end())


def test_retention_may_be_faster_than_the_count(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    write_tens(fake, 20)
    for index in range(18, 4, -1):
        fake.replace_batch("t", index, None)
    kept = [one.offset for one in _all(cluster)]
    fake.fault(
        ListOffsets,  # The start is asked for first; meanwhile it has moved.
        change=lambda *_: (ListOffsetsResponse(0, None), []),
        matches=lambda request, _broker: request.timestamp_ms == messages.EARLIEST,
    )
    fake.delete_before("t", 0, 45)
    with cluster.consumer("t", fetch_max_wait_ms=50) as consumer:
        consumer.seek_to_last(40)
        assert [one.offset for one in consumer.until_end()] == [one for one in kept if one >= 45]


def test_tail_is_the_newest_of_the_whole_topic(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t", partitions=3)
    fake.write("t", [b"a1", b"a4", b"a3"], 0, timestamps_ms=[1, 4, 3])
    fake.write("t", [b"b2", b"b5"], 1, timestamps_ms=[2, 5])
    assert [one.value for one in cluster.tail("t")] == [b"a1", b"b2", b"a4", b"a3", b"b5"]
    assert [one.value for one in cluster.tail("t", 2)] == [b"a3", b"b5"]
    assert [one.value for one in cluster.tail("t", 1)] == [b"b5"]
    assert cluster.tail("t", 0) == []
    with pytest.raises(InvalidRequestError, match="int from 0"):
        cluster.tail("t", -1)
    with pytest.raises(UnknownTopicError):
        cluster.tail("nowhere")
    with pytest.raises(ConfigError):
        cluster.tail("t", 1, grup="g")
