"""Ray Data over the log: reads and writes are exact, also when processes die meanwhile."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
import ray

import rayq
from rayq import Cluster, OffsetRange, TopicPartition
from rayq.batch.task_writer import begin_write
from rayq.data import TopicDatasource, from_json, read_topic, snapshot, source, write_topic
from rayq.data.sink import Written
from rayq.demo import flights_csv
from rayq.errors import (
    AlreadyCommittedError,
    InvalidRequestError,
    OffsetOutOfRangeError,
    PartitionOfflineError,
    RewriteMismatchError,
    UnknownTopicError,
    UnreadableRecordError,
)
from rayq.testing import LocalCluster
from tests.local import unreadable
from tests.local.support import eventually, partition_of, read_all, values
from tests.real.support import actor_pid

_numbers = itertools.count(1)
BATCH_DRIVER = Path(__file__).with_name("batch_driver.py")
PADDING = b" " + b"x" * 1000


@pytest.fixture(scope="module")
def cluster(ray_here: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three brokers on Ray, each with all its replicas in one process: there are many topics."""
    path = str(tmp_path_factory.mktemp("data"))
    made = rayq.start(path, brokers=3, port=19592, name="data", replicas_per_process=100)
    yield made
    made.stop()


@pytest.fixture(scope="module", autouse=True)
def quiet(ray_here: None) -> Iterator[None]:
    context = ray.data.DataContext.get_current()
    before = context.enable_progress_bars
    context.enable_progress_bars = False
    yield
    context.enable_progress_bars = before


@pytest.fixture
def new_topic(cluster: Cluster) -> Callable[..., str]:
    def make(**options: Any) -> str:
        name = f"data-{next(_numbers)}"
        cluster.create_topic(name, **options)
        return name

    return make


def fill(cluster: Cluster, topic: str, count: int, *, padding: bytes = b"") -> None:
    """Writes numbered records, in runs over all partitions."""
    with cluster.producer() as producer:
        producer.send_many(topic, [b"%d" % number + padding for number in range(count)])


def numbers_of(dataset: ray.data.Dataset) -> list[int]:
    return sorted(int(row["value"].split(b" ")[0]) for row in dataset.iter_rows())


def numbers_in(cluster: Cluster, topic: str) -> list[int]:
    return sorted(int((value or b"").split(b" ")[0]) for value in values(read_all(cluster, topic)))


def pid_of_leader(cluster: Cluster, topic: str) -> int:
    partition = partition_of(cluster, topic)
    (pid,) = (one.pid for one in partition.replicas if one.broker == partition.leader)
    assert pid is not None
    return pid


# --- reading --------------------------------------------------------------------------------------


def test_a_topic_is_a_dataset_of_typed_columns_that_keeps_headers(
    cluster: Cluster, new_topic: Callable[..., str]
) -> None:
    topic = new_topic()
    headers = [("a", b"1"), ("b", b""), ("a", b"2")]
    with cluster.producer() as producer:
        producer.send(topic, b"v", key=b"k", headers=headers, timestamp_ms=1_234)
        producer.send(topic, None, key=b"k").result(60)
    dataset = read_topic(topic)
    kinds = dict(zip(dataset.schema().names, dataset.schema().types, strict=True))
    assert kinds["key"] == kinds["value"] == pa.binary()
    assert kinds["timestamp"] == pa.timestamp("us", tz="UTC")
    first, second = dataset.take_all()
    assert (first["key"], first["value"], first["topic"]) == (b"k", b"v", topic)
    assert (first["offset"], first["timestamp"].timestamp()) == (0, 1.234)
    assert first["headers"] == [{"key": name, "value": value} for name, value in headers]
    assert (second["value"], second["headers"]) == (None, [])


def test_a_dataset_is_the_snapshot_and_the_next_goes_on_where_it_ended(
    cluster: Cluster, new_topic: Callable[..., str]
) -> None:
    topic = new_topic(partitions=2)
    fill(cluster, topic, 1000)
    taken = snapshot(topic, cluster=cluster)
    dataset = read_topic(taken)
    fill(cluster, topic, 500)
    assert numbers_of(dataset) == list(range(1000))
    assert dataset.count() == 1000, "read again, it is the same"
    assert numbers_of(read_topic(topic, starting_offsets=taken.end_offsets)) == list(range(500))
    with pytest.raises(InvalidRequestError, match="bounds"):
        read_topic(taken, starting_offsets="latest")


def test_a_partition_is_cut_into_read_tasks_of_estimated_size(
    cluster: Cluster, new_topic: Callable[..., str]
) -> None:
    topic = new_topic()
    fill(cluster, topic, 5000, padding=PADDING)
    dataset = read_topic(topic, min_partitions=5, columns=["value"])
    assert numbers_of(dataset) == list(range(5000))
    source = TopicDatasource(snapshot(topic), cluster=cluster)
    tasks = source.get_read_tasks(5)
    assert len(tasks) == 5
    sizes = [task.metadata.size_bytes for task in tasks]
    assert sum(sizes) == pytest.approx(5000 * (len(PADDING) + 70), rel=0.15)
    assert max(sizes) - min(sizes) <= 1
    assert [task.metadata.num_rows for task in tasks] == [None] * 5


def test_an_empty_topic_is_an_empty_dataset_with_a_schema(new_topic: Callable[..., str]) -> None:
    dataset = read_topic(new_topic(partitions=2), columns=["offset", "value"])
    assert dataset.count() == 0
    assert dataset.schema().names == ["offset", "value"]


@pytest.mark.thorough
def test_a_leader_killed_during_a_read_leaves_out_nothing(
    cluster: Cluster, new_topic: Callable[..., str]
) -> None:
    topic = new_topic()
    fill(cluster, topic, 60_000, padding=PADDING)
    blocks = iter(
        read_topic(topic, min_partitions=12, columns=["value"]).iter_batches(
            batch_size=None, batch_format="pyarrow", prefetch_batches=0
        )
    )
    read = [next(blocks)]
    os.kill(pid_of_leader(cluster, topic), signal.SIGKILL)
    read += blocks
    found = [int(one.as_py().split(b" ")[0]) for block in read for one in block["value"]]
    assert sorted(found) == list(range(60_000))


def test_the_blocks_of_a_task_are_the_same_each_time_it_runs(
    cluster: Cluster, new_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = new_topic()
    fill(cluster, topic, 2_000, padding=PADDING)
    monkeypatch.setattr(source, "BLOCK_BYTES", 100_000)
    (task,) = TopicDatasource(
        snapshot(topic), cluster=cluster, columns=["offset", "value"], fail_on_data_loss=False
    ).get_read_tasks(1)
    first = [block["offset"].to_pylist() for block in task()]
    assert len(first) > 10
    assert [offset for block in first for offset in block] == list(range(2_000))
    cluster.admin.delete_records({TopicPartition(topic, 0): first[5][0]})
    again = [block["offset"].to_pylist() for block in task()]
    assert again == [[]] * 5 + first[5:], "whatever is gone, a block holds its own offsets"


def test_what_cannot_be_read_is_an_error_of_its_kind(
    cluster: Cluster, new_topic: Callable[..., str]
) -> None:
    with pytest.raises(UnknownTopicError):
        read_topic("nosuch")
    topic = new_topic()
    fill(cluster, topic, 100)
    with pytest.raises(OffsetOutOfRangeError, match="past the end 100"):
        read_topic(topic, starting_offsets={topic: {0: 101}})
    with pytest.raises(InvalidRequestError, match="ends before it starts"):
        read_topic(topic, starting_offsets={topic: {0: 9}}, ending_offsets={topic: {0: 8}})
    with pytest.raises(InvalidRequestError, match="columns"):
        read_topic(topic, columns=["name"])


def test_what_expires_after_the_snapshot_is_an_error_or_left_out(
    cluster: Cluster, new_topic: Callable[..., str]
) -> None:
    topic = new_topic()
    fill(cluster, topic, 100)
    taken = snapshot(topic)
    cluster.admin.delete_records({TopicPartition(topic, 0): 60})
    with pytest.raises(OffsetOutOfRangeError, match="log start 60"):
        read_topic(taken).materialize()
    assert read_topic(taken, fail_on_data_loss=False).count() == 40


@pytest.mark.thorough
def test_records_that_cannot_be_read_are_named_by_the_error_or_skipped(
    ray_here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalCluster(brokers=1) as local:
        local.create_topic("bad")
        log = unreadable.fill(local, "bad", tmp_path, monkeypatch)
        options: dict[str, Any] = {"cluster": local, "large_values": f"file://{tmp_path}"}
        skipping = read_topic("bad", on_corrupt="skip", **options)
        assert [row["value"] for row in skipping.iter_rows()] == log.good
        offset, next_offset = next(iter(log.bad.items()))
        with pytest.raises(UnreadableRecordError, match=f"offset {offset} of bad-0") as caught:
            read_topic("bad", **options).take_all()
        error = caught.value
        assert error.topic_partition == ("bad", 0)
        assert (error.offset, error.next_offset) == (offset, next_offset)


def test_a_topic_deleted_after_the_snapshot_is_told(
    cluster: Cluster, new_topic: Callable[..., str]
) -> None:
    topic = new_topic()
    fill(cluster, topic, 10)
    dataset = read_topic(topic)
    cluster.admin.delete_topic(topic)
    with pytest.raises(UnknownTopicError):
        dataset.materialize()


def test_a_leader_that_does_not_answer_is_an_error_and_never_part_of_the_records(
    cluster: Cluster, new_topic: Callable[..., str]
) -> None:
    topic = new_topic(replication_factor=1)
    fill(cluster, topic, 100)
    taken = snapshot(topic)
    # The broker stands still as well: it would kill the leader after a while, and start another.
    broker = actor_pid(f"rayq:data:broker-{partition_of(cluster, topic).leader}")
    assert broker is not None
    stopped = (broker, pid_of_leader(cluster, topic))
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises((TimeoutError, PartitionOfflineError), match=r"no progress for 1\.5 s"):
            read_topic(taken, timeout_s=1.5).materialize()
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    assert read_topic(taken, timeout_s=100).count() == 100


# --- writing --------------------------------------------------------------------------------------


def rows(count: int, blocks: int = 1) -> ray.data.Dataset:
    return ray.data.range(count, override_num_blocks=blocks).map_batches(
        lambda batch: {"value": [b"%d" % number + PADDING for number in batch["id"]]}
    )


def test_a_dataset_is_written_with_keys_and_headers_and_read_back_the_same(
    cluster: Cluster, new_topic: Callable[..., str]
) -> None:
    source, target = new_topic(), new_topic(partitions=3)
    headers = [("a", b"1"), ("a", b"2"), ("b", b"")]
    with cluster.producer() as producer:
        for number in range(50):
            producer.send(source, b"%d" % number, key=b"k%d" % number, headers=headers)
    written = write_topic(read_topic(source), target, key="key", headers="headers")
    assert (written.records, written.repeated) == (50, 0)
    assert sum(one.end - one.start for one in written.ranges) == 50
    with cluster.producer() as producer:
        for record in read_all(cluster, target):
            assert record.headers == headers
            assert producer.send(target, b"", key=record.key).result(60).partition == (
                record.partition
            )


def test_the_columns_to_write_have_to_be_there(new_topic: Callable[..., str]) -> None:
    with pytest.raises(InvalidRequestError, match="no column 'id2'"):
        write_topic(ray.data.range(5), new_topic(), value="id2")
    with pytest.raises(InvalidRequestError, match="binary or string"):
        write_topic(ray.data.range(5), new_topic(), value="id")
    with pytest.raises(UnknownTopicError):
        write_topic(ray.data.range(5), "nosuch", value="id")


@pytest.mark.thorough
def test_a_leader_killed_during_a_write_loses_and_doubles_nothing(
    cluster: Cluster, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = new_topic()
    marker, pid = tmp_path / "killed", pid_of_leader(cluster, topic)

    def kill_once(batch: dict[str, Any]) -> dict[str, Any]:
        if 7000 in batch["id"] and not marker.exists():
            marker.touch()
            os.kill(pid, signal.SIGKILL)
        return {"value": [b"%d" % number + PADDING for number in batch["id"]]}

    dataset = ray.data.range(20_000, override_num_blocks=3).map_batches(kill_once, batch_size=500)
    assert write_topic(dataset, topic).records == 20_000
    assert marker.exists()
    assert numbers_in(cluster, topic) == list(range(20_000))


@pytest.mark.thorough
def test_a_task_whose_worker_is_killed_is_repeated_without_doubles(
    cluster: Cluster,
    new_topic: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Otherwise the write gets its first block when the task has made all rows.
    monkeypatch.setattr(ray.data.DataContext.get_current(), "target_max_block_size", 2**20)
    for attempt in range(5):
        topic, marker = new_topic(partitions=2), tmp_path / f"killed-{attempt}"

        def die_once(batch: dict[str, Any], marker: Path = marker) -> dict[str, Any]:
            if 15_000 in batch["id"] and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return {"value": [b"%d" % number + PADDING for number in batch["id"]]}

        rows = ray.data.range(20_000, override_num_blocks=1)
        written = write_topic(rows.map_batches(die_once, batch_size=500), topic)
        assert marker.exists()
        assert numbers_in(cluster, topic) == list(range(20_000))
        # On a busy machine the task can be killed before its first batch is acknowledged.
        if written.repeated:
            return
    pytest.fail("no first attempt had written anything")


def test_a_write_that_is_repeated_as_the_same_job_writes_nothing_again(
    cluster: Cluster, new_topic: Callable[..., str]
) -> None:
    topic = new_topic()
    job = begin_write(cluster, topic)
    for repeated in (0, 3000):
        written = write_topic(rows(3000, blocks=2), topic, job=job)
        assert (written.records, written.repeated) == (3000, repeated)
    assert written.ranges == [OffsetRange(topic, 0, 0, 3000)]
    assert numbers_in(cluster, topic) == list(range(3000))
    with pytest.raises(RewriteMismatchError):
        write_topic(rows(2999, blocks=1), topic, job=job)


@pytest.mark.thorough
def test_an_atomic_write_whose_worker_is_killed_becomes_visible_once_and_whole(
    cluster: Cluster, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic, marker = new_topic(partitions=2), tmp_path / "killed"

    def die_once(batch: dict[str, Any]) -> dict[str, Any]:
        if 15_000 in batch["id"] and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"value": [b"%d" % number + PADDING for number in batch["id"]]}

    dataset = ray.data.range(20_000, override_num_blocks=2).map_batches(die_once, batch_size=500)
    assert write_topic(dataset, topic, atomic=True).records == 20_000
    assert marker.exists()
    assert numbers_in(cluster, topic) == list(range(20_000))


def test_an_atomic_write_that_fails_leaves_nothing_and_a_named_one_commits_once(
    cluster: Cluster, new_topic: Callable[..., str]
) -> None:
    topic = new_topic(partitions=2)

    def fail(batch: dict[str, Any]) -> dict[str, Any]:
        if 2999 in batch["id"]:
            raise ZeroDivisionError
        return {"value": [b"%d" % number for number in batch["id"]]}

    job = begin_write(cluster, topic, transactional_id="import", name="monday")
    with pytest.raises(Exception, match="ZeroDivisionError"):
        write_topic(ray.data.range(3000).map_batches(fail, batch_size=100), topic, job=job)
    assert numbers_in(cluster, topic) == []
    assert write_topic(rows(3000, blocks=2), topic, job=job).records == 3000
    with pytest.raises(AlreadyCommittedError):
        write_topic(rows(3000, blocks=2), topic, job=job)
    assert numbers_in(cluster, topic) == list(range(3000))


@pytest.mark.thorough
def test_an_atomic_write_outlives_its_coordinator_and_another_run_its_driver(
    cluster: Cluster, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic, half, killed = new_topic(partitions=2), tmp_path / "half", tmp_path / "killed"
    transactional_id = f"of-{topic}"

    def wait_half_way(batch: dict[str, Any]) -> dict[str, Any]:
        if 15_000 in batch["id"]:
            half.touch()
            eventually(killed.exists, "the coordinator is killed")
        return {"value": [b"%d" % number + PADDING for number in batch["id"]]}

    def write(name: str, dataset: ray.data.Dataset) -> Written:
        job = begin_write(cluster, topic, transactional_id=transactional_id, name=name)
        return write_topic(dataset, topic, job=job)

    def is_half_written() -> bool:
        ends = [partition_of(cluster, topic, one).replicas[0].log_end_offset for one in (0, 1)]
        return all(ends)

    numbers = ray.data.range(20_000, override_num_blocks=2)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(write, "monday", numbers.map_batches(wait_half_way, batch_size=500))
        eventually(lambda: half.exists() or running.done(), "half is written", 120)
        os.kill(pid_of_leader(cluster, "__transaction_state"), signal.SIGKILL)
        killed.touch()
        assert running.result().records == 20_000
    assert numbers_in(cluster, topic) == list(range(20_000))

    topic = new_topic(partitions=2)
    address = ray.get_runtime_context().gcs_address
    driver = subprocess.Popen(
        [sys.executable, BATCH_DRIVER, address, "data", topic, transactional_id, "tuesday"],
        stdout=subprocess.DEVNULL,
    )
    try:
        eventually(is_half_written, "the driver's tasks have written", 180)
    finally:
        driver.kill()
        driver.wait()
    assert numbers_in(cluster, topic) == []
    assert write("tuesday", rows(3_000)).records == 3_000
    assert numbers_in(cluster, topic) == list(range(3_000))


# --- JSON -----------------------------------------------------------------------------------------

FLIGHT = pa.schema([("carrier", pa.string()), ("delay", pa.float64()), ("number", pa.int32())])


def test_json_becomes_columns_and_what_does_not_parse_a_dead_letter(
    cluster: Cluster, new_topic: Callable[..., str]
) -> None:
    topic, dead = new_topic(), new_topic()
    good = b'{"carrier":"UA","delay":2,"number":1545,"more":[]}'
    bad = [b"{", b"[1]", b'{"delay":"late"}', b'{"number":3000000000}', None, b'{"carrier":"\xff"}']
    with cluster.producer() as producer:
        producer.send_many(topic, [good, *bad, b'{"carrier":null}'], keys=[b"k"] * 8)
    parsed = from_json(read_topic(topic).materialize(), FLIGHT, keep=["offset"])
    assert parsed.rows.take_all() == [
        {"offset": 0, "carrier": "UA", "delay": 2.0, "number": 1545},
        {"offset": 7, "carrier": None, "delay": None, "number": None},
    ]
    write_topic(parsed.dead_letters, dead, key="key", header_columns=["error"])
    found = read_all(cluster, dead)
    assert values(found) == bad
    errors = [dict(record.headers)["error"].decode() for record in found]
    assert "truncated" in errors[0]
    assert "Expected `object`, got `array`" in errors[1]
    assert "$.delay" in errors[2]
    assert "$.number" in errors[3]
    assert errors[4] == "the value is null"
    assert {record.key for record in found} == {b"k"}


def test_the_flights_of_a_topic_come_out_as_they_went_in(
    cluster: Cluster, new_topic: Callable[..., str]
) -> None:
    every = pd.read_csv(io.BytesIO(flights_csv()))
    flights = every[["carrier", "flight", "dep_delay", "tailnum"]].head(50_000)
    topic = new_topic(partitions=3)
    lines = flights.to_json(orient="records", lines=True).encode().splitlines()
    with cluster.producer() as producer:
        producer.send_many(topic, lines, keys=[line[:14] for line in lines])
    schema = pa.schema(
        [
            ("carrier", pa.string()),
            ("flight", pa.int64()),
            ("dep_delay", pa.float64()),
            ("tailnum", pa.string()),
        ]
    )
    parsed = from_json(read_topic(topic, columns=["value"]), schema)
    found = sorted(json.dumps(row) for row in parsed.rows.iter_rows())
    assert found == sorted(json.dumps(json.loads(line)) for line in lines)


def test_rayq_data_is_imported_at_first_use() -> None:
    assert rayq.data.read_topic is read_topic
