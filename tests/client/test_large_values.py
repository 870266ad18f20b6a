"""Large values against a fake cluster: in chunks and as objects, whole and checked, or an error."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rayq.batch.offset_ranges import Split
from rayq.batch.range_reader import read_range
from rayq.client.cluster import Cluster
from rayq.client.consuming.consumer import Consumer
from rayq.client.large import reader as reader_module
from rayq.config import KIB, MIB
from rayq.core.large.values import (
    crc_of,
    manifest_of_chunks,
    pinned,
)
from rayq.errors import (
    AuthorizationError,
    ConfigError,
    DeliveryTimeoutError,
    InvalidRequestError,
    LargeValueError,
    LargeValueRefusedError,
    NotEnoughReplicasError,
    OffsetOutOfRangeError,
    RecordTooLargeError,
    UnknownTopicError,
)
from rayq.messages import CheckRange, Fetch, Produce
from rayq.records import TopicPartition
from rayq.storage.batch import HEADER_BYTES
from tests.client.fake_broker import FakeCluster
from tests.client.large_values import (
    ID,
    LIMIT,
    OTHER_ID,
    T0,
    bytes_of,
    read,
    write_chunks,
    write_manifest,
)

Eventually = Callable[[Callable[[], bool]], None]


@pytest.fixture
def topic(fake: FakeCluster) -> str:
    fake.create_topic("t", max_message_bytes=LIMIT)
    return "t"


@pytest.fixture
def consumer(cluster: Cluster, topic: str) -> Iterator[Consumer]:
    with cluster.consumer(auto_offset_reset="earliest") as made:
        made.assign([T0])
        yield made


# --- sending and reading --------------------------------------------------------------------------


def test_a_large_value_is_read_whole_at_the_offset_of_its_record(
    fake: FakeCluster, cluster: Cluster, consumer: Consumer
) -> None:
    large = bytes_of(5 * LIMIT)
    with cluster.producer(large_values="chunks") as producer:
        producer.send("t", b"before")
        sent = producer.send("t", large, key=b"k", headers=[("h", b"1")], timestamp_ms=77)
        after = producer.send("t", b"after")
    records = list(consumer.until_end())
    assert [record.value for record in records] == [b"before", large, b"after"]
    assert (records[1].key, records[1].headers, records[1].timestamp_ms) == (b"k", [("h", b"1")], 77)
    assert sent.result() == ("t", 0, records[1].offset, 77)
    assert after.result().offset == records[2].offset
    chunks = [one for one in fake.headers("t") if one.is_chunk]
    assert len(chunks) == 6 and all(one.length <= LIMIT for one in chunks)
    # They had just come by, so nothing was asked for again.
    assert all(one.bytes_max > LIMIT * 2 for one in fake.asked(Fetch))


def test_records_that_others_send_lie_between_the_chunks(
    fake: FakeCluster, cluster: Cluster, consumer: Consumer
) -> None:
    large = bytes_of(9 * LIMIT)
    with cluster.producer(large_values="chunks") as one, cluster.producer() as other:
        futures = []
        held = fake.fault(Produce, times=1, is_held=True)
        futures.append(one.send("t", large, key=b"large"))
        for number in range(3):
            other.send("t", str(number).encode()).result(30)
        fake.release(held)
        one.send("t", b"behind", key=b"large").result(30)
        other.send("t", b"last").result(30)
    values = [value for _, value in read(consumer)]
    assert sorted(values, key=len) == sorted(  # type: ignore[arg-type]
        [b"0", b"1", b"2", b"last", b"behind", large], key=len
    )
    assert values.index(large) < values.index(b"behind"), "the order of a producer's records stays"


def test_a_reader_that_begins_at_the_record_reads_the_chunks_back(
    fake: FakeCluster, cluster: Cluster, consumer: Consumer
) -> None:
    large = bytes_of(5 * LIMIT)
    with cluster.producer(large_values="chunks") as producer:
        offset = producer.send("t", large).result(30).offset
    assert offset is not None
    for start in (offset, 2):
        consumer.seek(T0, start)
        assert read(consumer) == [(offset, large)]
    consumer.seek(T0, offset + 1)
    assert read(consumer) == []
    consumer.seek_to_last(1)
    assert read(consumer) == [(offset, large)]


def test_positions_and_counts_are_those_of_records(
    fake: FakeCluster, cluster: Cluster, consumer: Consumer
) -> None:
    with cluster.producer(large_values="chunks") as producer:
        for number in range(3):
            producer.send("t", str(number).encode()).result(30)
            producer.send("t", bytes_of(3 * LIMIT, number)).result(30)
    consumer.seek_to_last(3)
    assert [value for _, value in read(consumer)] == [
        bytes_of(3 * LIMIT, 1),
        b"2",
        bytes_of(3 * LIMIT, 2),
    ]
    assert consumer.position(T0) == 3 * (1 + 4 + 1)


def test_arrow_and_the_range_reader_get_whole_values(
    fake: FakeCluster, cluster: Cluster, consumer: Consumer
) -> None:
    large = bytes_of(5 * LIMIT)
    with cluster.producer(large_values="chunks") as producer:
        producer.send("t", b"small", key=b"a").result(30)
        offset = producer.send("t", large, key=b"b").result(30).offset
    assert offset is not None
    polled: list[bytes] = []
    while len(polled) < 2:  # In one table, or in two.
        polled += consumer.poll_arrow(timeout_s=30).column("value").to_pylist()
    assert polled == [b"small", large]
    topic_id = fake.topics["t"].topic_id
    for start, values in ((0, [b"small", large]), (offset, [large])):
        split = Split("t", topic_id, 0, start, offset + 1)
        batches = list(read_range(cluster, split))
        assert [one for batch in batches for one in batch.column("value").to_pylist()] == values
    # A range that ends among the chunks has nothing of the value.
    (batch,) = read_range(cluster, Split("t", topic_id, 0, 0, offset))
    assert batch.column("value").to_pylist() == [b"small"]


def test_coroutines_send_and_read_them_too(fake: FakeCluster, topic: str) -> None:
    large = bytes_of(3 * LIMIT)

    async def main() -> bytes | None:
        with fake.cluster() as cluster:
            async with cluster.async_producer(large_values="chunks") as producer:
                await producer.send_and_wait("t", large)
            async with cluster.async_consumer(auto_offset_reset="earliest") as consumer:
                await consumer.subscribe("t")
                return (await anext(consumer)).value

    assert asyncio.run(main()) == large


def test_a_value_larger_than_the_buffer_is_sent_once_the_buffer_is_empty(
    fake: FakeCluster, cluster: Cluster, consumer: Consumer
) -> None:
    large = bytes_of(30 * LIMIT)
    with cluster.producer(
        large_values="chunks", buffer_memory=8 * KIB, batch_size=4 * KIB
    ) as producer:
        for _ in range(2):
            producer.send("t", b"small")
            producer.send("t", large)
    assert [value for _, value in read(consumer)] == [b"small", large] * 2


def test_many_values_at_once_do_not_overfill_the_consumer(
    fake: FakeCluster, cluster: Cluster, topic: str
) -> None:
    with cluster.producer(large_values="chunks") as producer:
        for number in range(8):
            producer.send("t", bytes_of(40 * LIMIT, number))
    with cluster.consumer(
        auto_offset_reset="earliest", fetch_buffer_bytes=64 * KIB, max_poll_records=2
    ) as consumer:
        consumer.assign([T0])
        values = [record.value for record in consumer.until_end()]
    assert values == [bytes_of(40 * LIMIT, number) for number in range(8)]


@pytest.mark.parametrize("options", [{}, {"acks": 1}, {"compression_type": "none"}])
def test_lost_answers_and_new_leaders_on_the_way_change_nothing(
    fake3: FakeCluster, options: dict[str, Any]
) -> None:
    fake3.create_topic("t", max_message_bytes=LIMIT)
    values = [bytes_of(12 * LIMIT, number) for number in range(3)]
    with fake3.cluster() as cluster, cluster.producer(large_values="chunks", **options) as producer:
        producer.send("t", b"first").result(30)
        for number, value in enumerate(values):
            fake3.fault(Produce, times=2, carry_out=True, disconnect=True)
            producer.send("t", value)
            fake3.fault(Produce, times=1, disconnect=True)
            fake3.move_leader("t", 0, 1 + (number + 1) % 3)
        producer.flush()
        chunks = sum(header.is_chunk for header in fake3.headers("t"))
        assert options.get("acks") == 1 or chunks == 3 * 14, "each was written once"
        with cluster.consumer(auto_offset_reset="earliest") as consumer:
            consumer.assign([T0])
            found = [value for _, value in read(consumer)]
    # Without idempotence even a record may be there twice: whole each time.
    assert list(dict.fromkeys(found)) == [b"first", *values]


# --- what cannot be sent --------------------------------------------------------------------------


def test_without_the_option_a_large_value_is_refused(cluster: Cluster, topic: str) -> None:
    with cluster.producer() as producer, pytest.raises(RecordTooLargeError, match="large_values"):
        producer.send("t", bytes_of(LIMIT + 1))
    with (
        cluster.producer(large_values="chunks") as producer,
        pytest.raises(RecordTooLargeError, match="send_many"),
    ):
        producer.send_many("t", [bytes_of(LIMIT + 1)])
    with (
        cluster.producer(large_values="chunks") as producer,
        pytest.raises(RecordTooLargeError, match="Chunks do not help"),
    ):
        producer.send("t", b"", key=bytes_of(LIMIT + 1))
    for wrong in ({"acks": 0, "large_values": "chunks"}, {"large_values": "pieces"}):
        with pytest.raises(ConfigError, match="large_values"):
            cluster.producer(**wrong)


def test_chunks_are_refused_where_logs_are_compacted(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("c", max_message_bytes=LIMIT, cleanup_policy="compact")
    with (
        cluster.producer(large_values="chunks") as producer,
        pytest.raises(InvalidRequestError, match="compacted"),
    ):
        producer.send("c", bytes_of(2 * LIMIT), key=b"k")


def test_a_chunk_that_fails_takes_the_record_with_it(
    fake: FakeCluster, cluster: Cluster, consumer: Consumer
) -> None:
    with cluster.producer(
        large_values="chunks", delivery_timeout_ms=300, request_timeout_ms=100
    ) as producer:
        producer.send("t", b"warm").result(30)
        lost = fake.fault(
            Produce, times=10**6, error=NotEnoughReplicasError("Too few."), matches=_is_third()
        )
        future = producer.send("t", bytes_of(9 * LIMIT))
        with pytest.raises(DeliveryTimeoutError):
            future.result(30)
        lost.times = 0
        producer.send("t", b"next").result(30)
        with pytest.raises(Exception, match="1 record"):
            producer.flush()
    assert [value for _, value in read(consumer)] == [b"warm", b"next"]
    assert not any(header.is_large for header in fake.headers("t"))


def _is_third() -> Callable[[Any, int], bool]:
    seen: list[Any] = []

    def matches(request: Any, _broker: int) -> bool:
        seen.append(request)
        return len(seen) >= 3

    return matches


# --- what cannot be read --------------------------------------------------------------------------


def bad_values(fake: FakeCluster) -> dict[str, tuple[bytes, str]]:
    """Manifests that name what cannot be put together, by what is wrong, and what is told."""
    value, other = bytes_of(300, 1), bytes_of(300, 2)
    offsets = write_chunks(fake, value, 3)
    others = write_chunks(fake, other, 3, OTHER_ID)
    plain = fake.write("t", [b"plain"])
    mixed = [offsets[0], others[1], offsets[2]]
    swapped = [offsets[1], offsets[0], offsets[2]]
    good = crc_of(value)
    return {
        "a chunk never came": (
            manifest_of_chunks(300, good, ID, [*offsets[:2], plain]),
            "not at offset",
        ),
        "wrong crc": (manifest_of_chunks(300, good ^ 1, ID, offsets), "CRC32C"),
        "wrong size": (manifest_of_chunks(301, good, ID, offsets), "300 bytes"),
        "less than there is": (manifest_of_chunks(250, good, ID, offsets), "more than its"),
        "chunks of another value": (manifest_of_chunks(300, good, ID, mixed), OTHER_ID.hex()),
        "another order": (manifest_of_chunks(300, good, ID, swapped), "chunk 1 of"),
        "an id that was used before": (manifest_of_chunks(300, good, ID, others), OTHER_ID.hex()),
        "behind itself": (manifest_of_chunks(300, good, ID, [*offsets[:2], 10**6]), "cannot be"),
        "before the beginning": (manifest_of_chunks(300, good, ID, [-1, 0]), "cannot be"),
        "one chunk twice": (manifest_of_chunks(300, good, ID, [0, 0, 1]), "cannot be"),
        "no manifest": (b"plain bytes", "is none"),
        "of tomorrow": (b"\x97\x02" + manifest_of_chunks(300, good, ID, offsets)[2:], "version 2"),
    }


def test_what_cannot_be_put_together_is_an_error_and_never_a_wrong_value(
    fake: FakeCluster, cluster: Cluster, consumer: Consumer
) -> None:
    bad = bad_values(fake)
    places = {what: write_manifest(fake, manifest) for what, (manifest, _) in bad.items()}
    end = fake.write("t", [b"end"])
    for what, offset in places.items():
        consumer.seek(T0, offset)
        with pytest.raises((LargeValueError, LargeValueRefusedError)) as caught:
            consumer.poll(timeout_s=30)
        assert bad[what][1] in caught.value.message, (what, caught.value)
        assert (caught.value.topic_partition, caught.value.offset) == (T0, offset)
        assert caught.value.next_offset == offset + 1
    consumer.seek(T0, end)
    assert read(consumer) == [(end, b"end")]
    split = Split("t", fake.topics["t"].topic_id, 0, 0, end + 1)
    with pytest.raises(LargeValueError, match="cannot be read"):
        list(read_range(cluster, split))
    with cluster.consumer(auto_offset_reset="earliest", on_corrupt="skip") as skipping:
        skipping.assign([T0])
        assert [value for _, value in read(skipping)] == [b"plain", b"end"]


def test_an_id_that_two_values_share_joins_each_by_its_own_offsets(
    fake: FakeCluster, consumer: Consumer
) -> None:
    first, second = bytes_of(300, 1), bytes_of(300, 2)
    offsets, others = write_chunks(fake, first, 3), write_chunks(fake, second, 3)
    write_manifest(fake, manifest_of_chunks(300, crc_of(second), ID, others))
    write_manifest(fake, manifest_of_chunks(300, crc_of(first), ID, offsets))
    assert [value for _, value in read(consumer)] == [second, first]


def test_what_is_not_complete_is_never_seen(fake: FakeCluster, consumer: Consumer) -> None:
    write_chunks(fake, bytes_of(300), 3)
    fake.write("t", [b"plain"])
    assert read(consumer) == [(3, b"plain")]


def test_a_value_whose_chunks_are_below_the_log_start_has_expired(
    fake: FakeCluster, cluster: Cluster, topic: str
) -> None:
    value = bytes_of(300)
    offsets = write_chunks(fake, value, 3)
    place = write_manifest(fake, manifest_of_chunks(300, crc_of(value), ID, offsets))
    fake.write("t", [b"plain"])
    fake.delete_before("t", 0, 1)
    with cluster.consumer(auto_offset_reset="earliest") as consumer:
        consumer.assign([T0])
        assert read(consumer) == [(place + 1, b"plain")]
        assert consumer._core.fetcher.large.expired == 1
    split = Split("t", fake.topics["t"].topic_id, 0, 1, place + 2)
    with pytest.raises(OffsetOutOfRangeError, match="expired"):
        list(read_range(cluster, split))
    (batch,) = read_range(cluster, split, fail_on_data_loss=False)
    assert batch.column("value").to_pylist() == [b"plain"]


def test_a_chunk_that_arrives_damaged_is_fetched_again(
    fake: FakeCluster, cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "TRIES_MAX", 2)
    value = bytes_of(300)
    offsets = write_chunks(fake, value, 3)
    place = write_manifest(fake, manifest_of_chunks(300, crc_of(value), ID, offsets))

    def damage(answer: Any, payload: bytes) -> tuple[Any, bytes]:
        payload = bytes(payload)
        return answer, payload[:HEADER_BYTES] + b"\0" + payload[HEADER_BYTES + 1 :]

    def is_of_chunks(request: Any, _broker: int) -> bool:
        return bool(request.offset == 0)

    with cluster.consumer(auto_offset_reset="none") as consumer:
        consumer.assign([T0])
        fake.fault(Fetch, times=1, carry_out=True, change=damage, matches=is_of_chunks)
        consumer.seek(T0, place)
        assert read(consumer) == [(place, value)]
        fake.fault(Fetch, times=10, carry_out=True, change=damage, matches=is_of_chunks)
        consumer.seek(T0, place)
        with pytest.raises(LargeValueError, match="CRC"):
            consumer.poll(timeout_s=30)
    assert len(fake.asked(CheckRange)) == 2


def test_a_reader_refuses_more_than_it_takes(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t")
    value = bytes_of(300)
    offsets = write_chunks(fake, value, 3)
    place = write_manifest(fake, manifest_of_chunks(2**60, 0, ID, offsets))
    end = fake.write("t", [b"end"])
    options: dict[str, Any] = {"auto_offset_reset": "earliest", "large_value_max_bytes": MIB}
    with cluster.consumer(**options) as consumer:
        consumer.assign([T0])
        with pytest.raises(LargeValueRefusedError, match="large_value_max_bytes") as caught:
            consumer.poll(timeout_s=30)
        assert caught.value.next_offset == place + 1
    with cluster.consumer(**options, on_corrupt="skip") as consumer:
        consumer.assign([T0])
        assert read(consumer) == [(end, b"end")]


def test_a_copy_in_another_topic_reads_the_chunks_where_they_are(
    fake: FakeCluster, cluster: Cluster, consumer: Consumer
) -> None:
    value = bytes_of(300)
    offsets = write_chunks(fake, value, 3)
    manifest = manifest_of_chunks(300, crc_of(value), ID, offsets)
    copy = pinned(manifest, "t", fake.topics["t"].topic_id, 0)
    fake.create_topic("dead")
    fake.write("dead", [copy], is_large=True)  # type: ignore[list-item]
    assert pinned(copy, "dead", "x", 3) == copy, "the chunks stay where they are"
    with cluster.consumer(auto_offset_reset="earliest") as other:
        other.assign([TopicPartition("dead", 0)])
        assert [value for _, value in read(other)] == [value]
        fake.delete_before("t", 0, 1)
        other.seek_to_beginning()
        with pytest.raises(LargeValueError, match="have expired there"):
            other.poll(timeout_s=30)


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_value_whose_topic_may_not_be_read_for_a_while_is_read_once_it_may(
    fake: FakeCluster, cluster: Cluster, topic: str, eventually: Eventually, is_hidden: bool
) -> None:
    value = bytes_of(300)
    offsets = write_chunks(fake, value, 3)
    offset = write_manifest(fake, manifest_of_chunks(300, crc_of(value), ID, offsets))

    def is_of_chunks(request: Fetch, _broker: int) -> bool:
        return request.offset < offset

    with cluster.consumer("t", fetch_max_wait_ms=50, on_corrupt="skip") as consumer:
        if is_hidden:
            held = fake.fault(Fetch, is_held=True, matches=is_of_chunks)
        else:
            denied = AuthorizationError("You may not read topic 't'.")
            fake.fault(Fetch, error=denied, matches=is_of_chunks)
        consumer.seek(T0, offset)
        if is_hidden:
            assert consumer.poll(timeout_s=0.1) == []
            eventually(lambda: any(is_of_chunks(request, 0) for request in fake.asked(Fetch)))
            hidden = fake.hide_topic("t")
            assert cluster.admin.list_topics() == []
            fake.release(held)
            with pytest.raises((AuthorizationError, UnknownTopicError)):
                list(consumer.until_end())
            fake.bring_back(hidden)
        found: list[bytes | None] = []
        deadline = time.monotonic() + 30
        while not found and time.monotonic() < deadline:
            with contextlib.suppress(AuthorizationError, UnknownTopicError):
                found += [record.value for record in consumer.poll(timeout_s=0.1)]
        assert found == [value]


def test_what_cannot_be_read_may_come_twice_in_a_row_and_last(
    fake: FakeCluster, cluster: Cluster, topic: str
) -> None:
    fake.write("t", [b"good"])
    for _ in range(2):
        write_manifest(fake, b"no manifest")
    with cluster.consumer("t", auto_offset_reset="earliest", on_corrupt="skip") as consumer:
        assert read(consumer) == [(0, b"good")]
        assert consumer.position(T0) == 3
    with cluster.consumer("t", auto_offset_reset="earliest") as consumer:
        assert [record.value for record in consumer.poll(30)] == [b"good"]
        for offset in (1, 2):
            with pytest.raises(LargeValueError) as caught:
                list(consumer.until_end())
            assert (caught.value.offset, caught.value.next_offset) == (offset, offset + 1)
            consumer.seek(T0, offset + 1)
        assert read(consumer) == []
    split = Split("t", fake.topics["t"].topic_id, 0, 0, 3)
    (batch,) = read_range(cluster, split, on_corrupt="skip")
    assert batch.column("value").to_pylist() == [b"good"]
