"""Batches that a consumer cannot read: an error names a way past them, or they are passed over."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayq.batch.offset_ranges import Split
from rayq.batch.range_reader import read_range
from rayq.client.cluster import Cluster
from rayq.client.consuming import consumer_core, poll_errors
from rayq.client.consuming import fetcher as fetcher_module
from rayq.client.consuming.consumer import Consumer
from rayq.client.consuming.subscription import Fetched, Stream
from rayq.config import MIB
from rayq.errors import (
    BatchTooLargeError,
    ConfigError,
    CorruptBatchError,
    RayqError,
    UnreadableRecordError,
    UnsupportedBatchError,
)
from rayq.messages import CheckRange
from rayq.records import TopicPartition
from rayq.storage.batch import decode_columns, encode_batch, split_batches, stamp
from tests.client.fake_broker import FakeCluster
from tests.wrong_batches import (
    CONTROL,
    KEYED,
    bomb,
    moved,
    mutated_batches,
    pack,
    records,
    sealed,
)

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
NOT_A_BODY = b"\xc1garbage"
Damage = Callable[[FakeCluster], None]


def wrong(fake: FakeCluster) -> None:
    """Makes offsets 2 to 4 of partition 0 bytes with right CRCs that are no records."""
    fake.replace_batch("t", 1, moved(sealed(records(3), NOT_A_BODY), 2))


def damaged(fake: FakeCluster) -> None:
    """Makes offsets 2 to 4 bytes that do not match their CRC, and never will."""
    data = bytearray(fake.topics["t"].partitions[0].batches[1][1])
    data[-1] ^= 1
    fake.replace_batch("t", 1, bytes(data))


@pytest.fixture(params=[wrong, damaged])
def unreadable(
    fake: FakeCluster, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Partition 0 has offsets 0 to 7, of which 2 to 4 cannot be read; partition 1 has 0 and 1."""
    monkeypatch.setattr(fetcher_module, "CORRUPT_TRIES_MAX", 2)
    fake.create_topic("t", partitions=2)
    for count in (2, 3, 3):
        fake.write("t", [b"v"] * count)
    fake.write("t", [b"other"] * 2, partition=1)
    request.param(fake)
    return str(request.param.__name__)


def offsets(consumer: Consumer, count: int) -> list[tuple[int, int]]:
    """Partition and offset of that many records."""
    found: list[tuple[int, int]] = []
    deadline_s = time.monotonic() + 30
    while len(found) < count and time.monotonic() < deadline_s:
        found += [(record.partition, record.offset) for record in consumer.poll(timeout_s=0.2)]
    return sorted(found)


def error_of(consumer: Consumer) -> CorruptBatchError:
    with pytest.raises(CorruptBatchError) as caught:
        for _ in range(400):
            consumer.poll(timeout_s=0.1)
    return caught.value


def test_the_error_says_where_and_a_seek_goes_past_it(
    unreadable: str, fake: FakeCluster, cluster: Cluster
) -> None:
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        assert offsets(consumer, 4) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        error = error_of(consumer)
        assert (error.topic_partition, error.offset, error.next_offset) == (T0, 2, 5)
        assert error.crc_matches == (unreadable == "wrong")
        assert "Offsets 2 to 4 of t-0 cannot be read" in str(error)
        assert consumer.position(T0) == 2
        assert pickle.loads(pickle.dumps(error)).next_offset == 5
        assert error_of(consumer) is not error
        consumer.seek(T0, error.next_offset or 0)
        assert offsets(consumer, 3) == [(0, 5), (0, 6), (0, 7)]
        # No replica has better bytes than those that match their CRC, so no leader is asked to
        # look.
        assert len(fake.asked(CheckRange)) == (0 if unreadable == "wrong" else 1)


def test_skip_goes_on_after_it(
    unreadable: str, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    with cluster.consumer("t", auto_offset_reset="earliest", on_corrupt="skip") as consumer:
        assert offsets(consumer, 7) == [(0, 0), (0, 1), (0, 5), (0, 6), (0, 7), (1, 0), (1, 1)]
        assert consumer.position(T0) == 8
    (line,) = [one for one in caplog.messages if "passed over" in one]
    assert "Offsets 2 to 4 of t-0" in line


def test_a_consumer_of_asyncio_and_arrow_tables_do_the_same(
    unreadable: str, cluster: Cluster
) -> None:
    async def read() -> tuple[list[int], CorruptBatchError]:
        found: list[int] = []
        async with cluster.async_consumer(auto_offset_reset="earliest") as consumer:
            await consumer.assign([T0])
            with pytest.raises(CorruptBatchError) as caught:
                while True:
                    found += (await consumer.poll_arrow(30))["offset"].to_pylist()
            await consumer.seek(T0, caught.value.next_offset or 0)
            while len(found) < 5:
                found += [one.offset for one in await consumer.poll(30.0)]
        return found, caught.value

    found, error = asyncio.run(read())
    assert found == [0, 1, 5, 6, 7]
    assert (error.offset, error.next_offset) == (2, 5)


@pytest.mark.slow
def test_who_polls_on_after_errors_does_not_spin_and_reads_the_other_partitions(
    unreadable: str, fake: FakeCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poll_errors, "ERROR_PAUSE_S", 0.2)
    errors, found = 0, 0
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        assert len(offsets(consumer, 4)) == 4
        error_of(consumer)
        began_s = time.monotonic()
        while errors < 4:
            fake.write("t", [b"new"], partition=1)
            try:
                found += len(consumer.poll(timeout_s=30))
            except CorruptBatchError:
                errors += 1
        assert time.monotonic() - began_s >= 4 * 0.2 - 0.05
        assert found >= 4
        # A poll that ends sooner raises all the same: an empty poll must not look as if all was
        # well.
        consumer.pause(T1)
        with pytest.raises(CorruptBatchError):
            consumer.poll(timeout_s=0.05)


def test_a_batch_job_has_all_before_it_and_passes_over_it_as_asked(
    unreadable: str, fake: FakeCluster, cluster: Cluster
) -> None:
    split = Split("t", fake.topics["t"].topic_id, 0, 0, 8)
    found: list[int] = []
    with pytest.raises(CorruptBatchError) as caught:
        for batch in read_range(cluster, split):
            found += batch.column("offset").to_pylist()
    assert found == [0, 1]
    assert (caught.value.offset, caught.value.next_offset) == (2, 5)
    batches = read_range(cluster, split, on_corrupt="skip")
    assert [one for batch in batches for one in batch.column("offset").to_pylist()] == [0, 1, 5, 6, 7]
    with pytest.raises(ConfigError, match="on_corrupt"):
        read_range(cluster, split, on_corrupt="drop")  # type: ignore[arg-type]


def test_a_time_that_no_column_holds_is_an_error_of_its_batch(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t")
    for timestamp_ms in (5, 2**60, 6):
        fake.write("t", [b"v"], timestamps_ms=timestamp_ms)
    split = Split("t", fake.topics["t"].topic_id, 0, 0, 3)
    with pytest.raises(UnreadableRecordError, match="times up to") as caught:
        list(read_range(cluster, split))
    assert (caught.value.offset, caught.value.next_offset) == (1, 2)
    batches = read_range(cluster, split, on_corrupt="skip")
    assert [one for batch in batches for one in batch.column("offset").to_pylist()] == [0, 2]
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        assert [one.timestamp_ms for one in consumer.until_end()] == [5, 2**60, 6]


def test_an_error_is_told_also_where_other_partitions_never_run_out_of_records(
    unreadable: str, fake: FakeCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poll_errors, "ERROR_PAUSE_S", 0.05)
    for _ in range(4):
        fake.write("t", [b"more"] * 5_000, partition=1)
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        found: list[tuple[int, int]] = []
        errors = 0
        while errors < 2:
            try:
                found += [(one.partition, one.offset) for one in consumer.poll(30, max_records=1)]
            except CorruptBatchError as error:
                assert (error.topic_partition, error.offset) == (T0, 2)
                errors += 1
    assert len(found) < 20_000, "there was always something else"
    assert [offset for partition, offset in found if partition == 1] == list(range(len(found) - 2))


def test_a_batch_of_a_newer_rayq_is_told_and_does_not_keep_other_partitions_waiting(
    fake: FakeCluster, cluster: Cluster
) -> None:
    fake.create_topic("t", partitions=2)
    fake.write("t", [b"v"])
    fake.write("t", [b"v"])
    fake.write("t", [b"other"], partition=1)
    fake.replace_batch("t", 0, sealed({"attributes": 1 << 12}, KEYED))
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        assert offsets(consumer, 1) == [(1, 0)]
        with pytest.raises(UnsupportedBatchError, match="Seek to 1") as caught:
            consumer.poll(timeout_s=30)
        error = caught.value
        assert (error.topic_partition, error.offset, error.next_offset) == (T0, 0, 1)
        consumer.seek(T0, 1)
        assert offsets(consumer, 1) == [(0, 1)]
    with cluster.consumer("t", auto_offset_reset="earliest", on_corrupt="skip") as consumer:
        assert offsets(consumer, 2) == [(0, 1), (1, 0)]


def test_a_bomb_costs_a_reader_nothing(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    fake.write("t", [b"v"])
    fake.write("t", [b"v"])
    fake.replace_batch("t", 0, bomb(3_000_000))
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        began_s = time.process_time()
        error = error_of(consumer)
        assert "claims 3000000 records" in str(error)
        assert time.process_time() - began_s < 0.5


def test_a_poll_unpacks_no_more_than_its_share_of_memory(
    fake: FakeCluster, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_core, "UNPACK_BYTES_MIN", 3 * MIB)
    fake.create_topic("t", max_message_bytes=64 * MIB)
    for _ in range(10):
        fake.write("t", [bytes(MIB)])
    fake.write("t", [bytes(4 * MIB)])
    with cluster.consumer(
        "t", auto_offset_reset="earliest", fetch_buffer_bytes=100_000
    ) as consumer:
        found: list[int] = []
        while len(found) < 10:
            polled = consumer.poll(timeout_s=30)
            assert 1 <= len(polled) <= 3
            found += [one.offset for one in polled]
        with pytest.raises(
            BatchTooLargeError, match="raise fetch_buffer_bytes, or seek to 11"
        ) as caught:
            consumer.poll(timeout_s=30)
        assert (caught.value.offset, caught.value.next_offset) == (10, 11)
        consumer.seek(T0, 0)
        assert consumer.poll_arrow(timeout_s=30).num_rows <= 4
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        assert offsets(consumer, 11)[-1] == (0, 10)
    fake.create_topic("headers")
    for _ in range(6):
        fake.write("headers", [b"v"], headers=[[("", b"")] * 20_000])
    with cluster.consumer(
        "headers", auto_offset_reset="earliest", fetch_buffer_bytes=100_000
    ) as consumer:
        time.sleep(0.1)
        assert 1 <= len(consumer.poll(timeout_s=30)) <= 3


def stream_of(*batches: bytes | bytearray, next_offset: int) -> Stream:
    payload = b"".join(batches)
    stream = Stream(T0, 0)
    stream.offset_known(0)
    fetched = Fetched(memoryview(payload), list(split_batches(payload)), next_offset)
    stream.received(fetched, next_offset)
    return stream


def of_epoch(batch: bytes | bytearray, base_offset: int, leader_epoch: int) -> bytearray:
    data = bytearray(batch)
    stamp(data, 0, base_offset=base_offset, leader_epoch=leader_epoch, append_time_ms=5)
    return data


@pytest.mark.parametrize(
    "passed_over",
    [
        sealed({"record_count": 0, "last_offset_delta": 1}, pack([], None, None, [], None)),
        sealed({"attributes": CONTROL} | records(2), NOT_A_BODY),
        sealed(records(2), NOT_A_BODY),
    ],
    ids=["emptied by compaction", "control", "unreadable"],
)
def test_a_position_after_a_batch_that_is_passed_over_has_its_epoch(passed_over: bytes) -> None:
    """Epoch 1 ends at offset 2: a commit of offset 4 under epoch 1 would look as if the log had
    been cut off."""
    first = of_epoch(encode_batch([b"a", b"b"], timestamps_ms=5), 0, 1)
    stream = stream_of(first, of_epoch(passed_over, 2, 2), next_offset=4)
    ((batch, _),) = stream.peek(1, True)
    stream.consume(batch, 1)
    assert (stream.position, stream.position_epoch) == (1, 1)
    found = stream.peek(10, True)
    if len(found) == 1 and stream.position == 1:
        stream.consume(found[0][0], 1)
    try:
        assert stream.peek(10, True) == []
    except CorruptBatchError:
        assert (stream.position, stream.position_epoch) == (2, 1)
        stream.skip_batch()
        assert stream.peek(10, True) == []
    assert (stream.position, stream.position_epoch) == (4, 2)


def test_a_position_that_was_reset_has_no_epoch() -> None:
    stream = stream_of(of_epoch(encode_batch([b"a"], timestamps_ms=5), 0, 1), next_offset=1)
    stream.jump(100)
    ((batch, _),) = stream.peek(10, True)
    stream.consume(batch, 1)
    assert stream.peek(10, True) == []
    assert (stream.position, stream.position_epoch) == (100, None)


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(mutated_batches(), min_size=1, max_size=4))
def test_whatever_bodies_there_are_a_stream_ends_where_the_log_does(mutated: list[bytes]) -> None:
    good = encode_batch([b"good"], timestamps_ms=5)
    payload, at, wanted = bytearray(), 0, 0
    for batch in [*mutated, good]:
        data = moved(bytes(batch), at)
        payload += data
        ((_, header),) = split_batches(data)
        at = header.next_offset
        try:
            columns = decode_columns(data, 0, header)
        except RayqError:
            continue
        wanted += 0 if header.is_control else len(columns.values)
    stream = stream_of(payload, next_offset=at)
    found: list[Any] = []
    while stream.has_records:
        try:
            taken = stream.peek(3, True)
        except (CorruptBatchError, UnsupportedBatchError):
            stream.skip_batch()
            continue
        for batch, part in taken:
            found += part.values
            stream.consume(batch, len(part.values))
    assert stream.position == at
    assert len(found) == wanted
    assert found[-1] == b"good"
