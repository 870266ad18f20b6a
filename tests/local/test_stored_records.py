"""Records that only the object store has, read in each way there is: nothing of them differs."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rayq import AuditLine, TopicPartition
from rayq.actors.objects import object_cache
from rayq.actors.remote.reads import RemoteReads
from rayq.actors.replica import leader_reads
from rayq.batch import direct_reads
from rayq.batch.direct_reads import DirectReads
from rayq.batch.offset_ranges import Split, snapshot, split_ranges
from rayq.batch.pins import pin_ranges
from rayq.batch.range_reader import read_range
from rayq.batch.stored_ranges import object_starts
from rayq.config import OnCorrupt
from rayq.core.remote.urls import url_validity_ms
from rayq.errors import (
    OffsetOutOfRangeError,
    RayqError,
    RemoteMissingError,
    TransactionAbortedError,
    UnreadableRecordError,
)
from rayq.messages import RemoteRange
from rayq.records import RemotePartitionInfo
from rayq.testing import LocalCluster
from tests.local import unreadable
from tests.local.principal_support import Named
from tests.local.support import FAST, eventually, leader_of, read_all, wait_in_sync

_numbers = itertools.count()
STORED, RECORDS = 300, 360
"""So many records are in the object store only, and so many there are."""
FIRST_MS = 1_700_000_000_000
TIERED = {
    "remote_storage": True,
    "segment_bytes": 8192,
    "local_retention_bytes": 0,
    "remote_max_lag_ms": 200,
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def shared_tiered(
    tmp_path_factory: pytest.TempPathFactory, store: Path
) -> Iterator[LocalCluster]:
    with LocalCluster(
        brokers=2,
        data_dir=tmp_path_factory.mktemp("tiered"),
        remote_storage_url=f"file://{store}",
        retention_check_interval_ms=100,
    ) as cluster:
        yield cluster


@pytest.fixture
def tiered(shared_tiered: LocalCluster) -> LocalCluster:
    return shared_tiered.make_current()


@pytest.fixture
def topic(tiered: LocalCluster) -> str:
    return make_topic(tiered)


@pytest.fixture(autouse=True)
def small_ranges_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_reads, "DIRECT_BYTES_MIN", 1)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offsets where runs of batches begin that were read directly."""
    found: list[int] = []
    original = DirectReads._next

    async def counted(self: DirectReads, offset: int, bytes_max: int) -> Any:
        fetched = await original(self, offset, bytes_max)
        if fetched is not None:
            found.append(offset)
        return fetched

    monkeypatch.setattr(DirectReads, "_next", counted)
    return found


def make_topic(cluster: LocalCluster, **options: Any) -> str:
    topic = f"stored-{next(_numbers)}"
    cluster.create_topic(topic, timeout_s=120.0, **(TIERED | options))
    return topic


def value_of(number: int) -> bytes:
    return b"%d" % number + b"." * 100


def send(cluster: LocalCluster, topic: str, numbers: range) -> None:
    """Numbered records in small batches; the timestamp of each is its number in ms later."""
    with cluster.producer(batch_size=512) as producer:
        for number in numbers:
            producer.send(topic, value_of(number), timestamp_ms=FIRST_MS + number)


def fill(cluster: LocalCluster, topic: str) -> None:
    """The first records go to the object store, the last ones stay on the disk."""
    send(cluster, topic, range(STORED))
    wait_stored(cluster, topic, STORED)
    keep_the_rest(cluster, topic)
    send(cluster, topic, range(STORED, RECORDS))


def keep_the_rest(cluster: LocalCluster, topic: str) -> None:
    cluster.admin.alter_topic_config(topic, remote_max_lag_ms=3_600_000)


def where(cluster: LocalCluster, topic: str) -> RemotePartitionInfo:
    (found,) = cluster.admin.describe_remote_storage([topic])
    return found


def wait_stored(cluster: LocalCluster, topic: str, offset: int) -> None:
    """Waits until the leader's disk begins at `offset`."""
    eventually(
        lambda: where(cluster, topic).local_start_offset == offset,
        f"{topic} below {offset} is in the object store only",
        120.0,
    )


def numbers(values: Iterator[bytes | None] | list[bytes | None]) -> list[int]:
    return [int((value or b"").split(b".")[0]) for value in values]


def read_splits(cluster: LocalCluster, splits: list[Split]) -> list[int]:
    batches = [batch for split in splits for batch in read_range(cluster, split, timeout_s=60.0)]
    return numbers([value for batch in batches for value in batch.column("value").to_pylist()])


def object_files(store: Path) -> list[Path]:
    return sorted(store.glob("*/*/*/data/*"))


def test_consumers_read_on_from_the_store_to_the_disk(tiered: LocalCluster, topic: str) -> None:
    fill(tiered, topic)
    records = read_all(tiered, topic)
    assert [record.offset for record in records] == list(range(RECORDS))
    assert numbers([record.value for record in records]) == list(range(RECORDS))
    assert {record.timestamp_ms - record.offset for record in records} == {FIRST_MS}
    place = TopicPartition(topic, 0)
    with tiered.consumer() as consumer:
        consumer.assign([place])
        consumer.seek(place, 123)
        table = consumer.poll_arrow(60.0)
        assert table["offset"].to_pylist()[0] == 123
        for offset in (0, 123, STORED - 1, STORED, RECORDS - 1):
            assert consumer.offsets_for_times({place: FIRST_MS + offset}) == {place: offset}
        assert consumer.offsets_for_times({place: FIRST_MS + RECORDS}) == {place: None}


def test_batch_jobs_meet_what_cannot_be_read_in_objects_as_in_logs(
    tiered: LocalCluster,
    topic: str,
    direct: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = unreadable.fill(tiered, topic, tmp_path, monkeypatch)
    (split,) = snapshot(tiered, topic)
    wait_stored(tiered, topic, split.end)
    large = f"file://{tmp_path}"

    def values_of(part: Split, on_corrupt: OnCorrupt) -> Iterator[bytes]:
        for batch in read_range(tiered, part, large_values=large, on_corrupt=on_corrupt):
            yield from batch.column("value").to_pylist()

    assert list(values_of(split, "skip")) == log.good
    found: list[bytes] = []
    errors: dict[int, int] = {}
    start = split.start
    while len(found) < len(log.good):
        try:
            for value in values_of(split._replace(start=start), "raise"):
                found.append(value)
        except UnreadableRecordError as error:
            assert error.topic_partition == (topic, 0)
            assert error.offset is not None and error.next_offset is not None
            errors[error.offset] = start = error.next_offset
    assert found == log.good and errors == log.bad
    assert len(direct) > len(log.bad)


def test_batch_jobs_read_objects_and_the_rest_from_the_leader(
    tiered: LocalCluster, topic: str, direct: list[int]
) -> None:
    fill(tiered, topic)
    taken = snapshot(tiered, topic)
    assert read_splits(tiered, taken) == list(range(RECORDS))
    assert direct[0] == 0, "how many objects there are depends on when they were stored"
    assert max(direct) < STORED
    cuts = object_starts(tiered, taken, timeout_s=60.0)
    (starts,) = cuts.values()
    assert starts[-1] == STORED
    for parts in (2, 7):
        splits = split_ranges(taken, parts, cuts)
        assert len(splits) == parts
        assert read_splits(tiered, splits) == list(range(RECORDS))


def test_tasks_that_do_not_reach_the_store_read_through_the_leader(
    tiered: LocalCluster, topic: str, direct: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tiered, topic)
    taken = snapshot(tiered, topic)

    async def unmounted(
        self: RemoteReads, found: list[RemoteRange], valid_ms: int
    ) -> list[RemoteRange]:
        return [msgspec.structs.replace(part, url="file:///not/mounted/here") for part in found]

    monkeypatch.setattr(RemoteReads, "signed", unmounted)
    assert read_splits(tiered, taken) == list(range(RECORDS))
    assert direct == []


@pytest.mark.parametrize(
    ("direct_reads", "is_direct"), [("all", True), ("superuser", False), ("none", False)]
)
def test_a_job_of_a_principal_reads_through_the_leader_where_it_gets_no_urls(
    tiered: LocalCluster,
    topic: str,
    direct: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    direct_reads: str,
    is_direct: bool,
) -> None:
    def valid_ms(wanted_ms: int, **of: Any) -> int:
        return url_validity_ms(wanted_ms, **{**of, "direct_reads": direct_reads})

    monkeypatch.setattr(leader_reads, "url_validity_ms", valid_ms)
    caplog.set_level(logging.DEBUG)
    fill(tiered, topic)
    anna = Named(tiered, ("read", "topic", topic))
    with anna.connect() as connection:
        assert read_splits(connection, snapshot(connection, topic)) == list(range(RECORDS))
        assert bool(direct) == is_direct

        def noted() -> list[AuditLine]:
            lines = tiered.admin.read_audit().lines
            return [line for line in lines if (line.kind, line.principal) == ("urls", anna.name)]

        if is_direct:
            eventually(lambda: bool(noted()), "it is in the audit")
        assert all(f"objects of {topic}-0, by URLs" in line.what for line in noted())
        assert all(line.objects > 0 and line.bytes > 0 for line in noted())
        assert bool(noted()) == is_direct
        assert "file:///" not in caplog.text + str(noted())
        # Without the right there are neither records nor URLs.
        anna.forbid(("read", "topic", topic))
        direct.clear()
        with pytest.raises(RayqError):
            read_splits(connection, snapshot(connection, topic))
        assert direct == []


def test_transactions_are_shown_whole_across_the_border(
    tiered: LocalCluster, topic: str, direct: list[int]
) -> None:
    expected: list[int] = []
    aborted: list[int] = []
    with tiered.producer(transactional_id="border", batch_size=512) as producer:
        for number in range(40):
            if number == 30:
                end = where(tiered, topic).high_watermark
                assert end is not None
                wait_stored(tiered, topic, end)
                keep_the_rest(tiered, topic)
            values = range(number * 10, number * 10 + 10)
            try:
                with producer.transaction():
                    for value in values:
                        producer.send(topic, value_of(value))
                    if number % 3 == 1:
                        producer.flush(60.0)
                        raise ArithmeticError
            except (ArithmeticError, TransactionAbortedError):
                aborted += values
            else:
                expected += values
    records = read_all(tiered, topic)
    assert numbers([record.value for record in records]) == expected
    with tiered.consumer(
        topic, isolation_level="read_uncommitted", auto_offset_reset="earliest"
    ) as consumer:
        seen = numbers([record.value for record in consumer.until_end(60.0)])
    assert sorted(seen) == sorted(expected + aborted)
    for taken in (snapshot(tiered, topic), snapshot(tiered, topic, ending_offsets="last_stable")):
        assert read_splits(tiered, split_ranges(taken, 5)) == expected
    assert direct


def test_what_is_deleted_is_shown_to_nobody(tiered: LocalCluster, topic: str) -> None:
    fill(tiered, topic)
    taken = snapshot(tiered, topic)
    tiered.admin.delete_records({TopicPartition(topic, 0): 150})
    assert numbers([record.value for record in read_all(tiered, topic)]) == list(range(150, RECORDS))
    with pytest.raises(OffsetOutOfRangeError, match="log start 150"):
        read_splits(tiered, taken)


def test_damage_in_the_cache_is_mended_from_the_store(
    tiered: LocalCluster, topic: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    fill(tiered, topic)
    before = cached_files(tiered)
    assert len(read_all(tiered, topic)) == RECORDS
    for path in cached_files(tiered) - before:
        data = bytearray(path.read_bytes())
        data[200] ^= 0xFF  # In the body of the first batch.
        path.write_bytes(data)
    assert numbers([record.value for record in read_all(tiered, topic)]) == list(range(RECORDS))


def cached_files(cluster: LocalCluster) -> set[Path]:
    found = Path(cluster.data_dir).rglob(f"{object_cache.DIRECTORY}/*/*")
    return {path for path in found if path.is_file()}


def test_an_object_that_is_gone_has_a_name(
    tiered: LocalCluster, store: Path, topic: str
) -> None:
    before = set(object_files(store))
    fill(tiered, topic)
    taken = snapshot(tiered, topic)
    gone = sorted(set(object_files(store)) - before)[0]
    hidden = gone.rename(gone.with_suffix(".hidden"))
    try:
        with tiered.consumer(topic, auto_offset_reset="earliest") as consumer:
            with pytest.raises(RemoteMissingError, match=gone.name):
                for _ in range(100):
                    consumer.poll(1.0)
        with pytest.raises(RemoteMissingError, match=gone.name):
            read_splits(tiered, taken)
    finally:
        hidden.rename(gone)
    assert read_splits(tiered, taken) == list(range(RECORDS))


def test_the_next_leader_reads_the_store_too(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with LocalCluster(
        brokers=3,
        data_dir=tmp_path / "data",
        remote_storage_url=f"file://{tmp_path / 'store'}",
        retention_check_interval_ms=100,
        **FAST,
    ) as cluster:
        topic = make_topic(cluster, replication_factor=2, min_insync_replicas=1)
        fill(cluster, topic)
        wait_in_sync(cluster, topic, 2)
        with cluster.consumer(
            topic, auto_offset_reset="earliest", max_poll_records=20
        ) as consumer:
            found = [record.offset for record in consumer.poll(60.0)]
            cluster.kill_broker(leader_of(cluster, topic))
            deadline_s = time.monotonic() + 120
            while len(found) < RECORDS and time.monotonic() < deadline_s:
                found += [record.offset for record in consumer.poll(1.0)]
        assert found == list(range(RECORDS))


def test_a_pin_lasts_until_the_last_job_that_reads_has_ended(
    tiered: LocalCluster, topic: str
) -> None:
    send(tiered, topic, range(10))
    taken = snapshot(tiered, topic)

    def pinned() -> list[dict[int, int]]:
        return [
            dict(pin.starts)
            for pin in tiered.admin.describe_object_store().pins
            if pin.topic == topic
        ]

    high = pin_ranges(tiered, [span._replace(start=7) for span in taken], timeout_s=60.0)
    eventually(lambda: pinned() == [{0: 7}], "the start is pinned, as any broker tells")
    low = pin_ranges(tiered, [span._replace(start=3) for span in taken], timeout_s=60.0)
    eventually(lambda: pinned() == [{0: 3}], "the lower start is pinned")
    low()
    eventually(lambda: pinned() == [{0: 7}], "the other job's start is pinned")
    high()
    eventually(lambda: pinned() == [], "nothing is pinned")
