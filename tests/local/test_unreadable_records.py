"""Whatever cannot be read while one record is read is an error of that record, for every reader:
its neighbours are delivered, the error names it, and it is skipped or becomes a dead letter."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

import rayq
from rayq import Outgoing, QueueTask, Record, TopicPartition
from rayq.actors.replica import leader as leader_module
from rayq.batch.offset_ranges import Split
from rayq.batch.range_reader import read_range
from rayq.client import client as client_module
from rayq.client.admin.dead_letters import DeadLetters, Filter
from rayq.client.consuming import poll_errors
from rayq.client.large import reader as large_reader
from rayq.core.large.values import chunk_headers, crc_of, manifest_of_chunks
from rayq.core.queues.moved_records import source_of
from rayq.errors import InvalidRecordError, UnreadableRecordError
from rayq.pools import pool_member
from rayq.storage.batch import encode_batch
from rayq.testing import LocalCluster
from tests.local.cli_support import Command
from tests.local.support import eventually, produce_raw
from tests.local.unreadable import ID, Log, fill, manifests

_numbers = itertools.count(1)
SOON: dict[str, Any] = {"cool_down_s": 0.25, "retry_backoff_ms": 5}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster for this module: what nobody can read would be in the way of other tests."""
    with LocalCluster(brokers=1, data_dir=tmp_path_factory.mktemp("own")) as cluster:
        yield cluster


@pytest.fixture
def cluster(own: LocalCluster) -> LocalCluster:
    return own.make_current()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"file://{tmp_path_factory.mktemp('values')}"


@pytest.fixture(scope="module")
def log(own: LocalCluster, url: str) -> Log:
    own.create_topic("unreadable", timeout_s=120)
    with pytest.MonkeyPatch.context() as patch:
        return fill(own, "unreadable", Path(url.removeprefix("file://")), patch)


@pytest.fixture(autouse=True)
def patience_is_short(
    pools_are_twenty_times_as_fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (client_module, large_reader):
        monkeypatch.setattr(module, "UNKNOWN_TOPIC_PATIENCE_S", 0.05)
    monkeypatch.setattr(large_reader, "STALE_LEADER_S", 0.05)
    monkeypatch.setattr(poll_errors, "ERROR_PAUSE_S", 0.01)
    monkeypatch.setattr(pool_member, "FAILED_POLL_PAUSE_S", 0.02)


@pytest.fixture
def name() -> str:
    return f"of-unreadable-{next(_numbers)}"


# --- consumers ------------------------------------------------------------------------------------


class Reading:
    """A consumer that seeks past what cannot be read, until it has read all of the log."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.values: list[bytes | None] = []
        self.errors: dict[int, int] = {}

    @property
    def is_going_on(self) -> bool:
        return len(self.values) < len(self._log.good)

    def note(self, error: UnreadableRecordError) -> tuple[TopicPartition, int]:
        assert error.topic_partition == (self._log.topic, 0)
        assert error.offset is not None and error.next_offset is not None
        self.errors[error.offset] = error.next_offset
        # All before it, and nothing behind it, was handed out.
        assert len(self.values) == len([one for one in self._log.bad if one <= error.offset])
        return error.topic_partition, error.next_offset


def read_in_turn(consumer: rayq.Consumer, log: Log, take: Callable[[], list[Any]]) -> Reading:
    reading = Reading(log)
    while reading.is_going_on:
        try:
            reading.values += take()
        except UnreadableRecordError as error:
            consumer.seek(*reading.note(error))
    return reading


def poll(cluster: LocalCluster, log: Log, name: str, **options: Any) -> Reading:
    with cluster.consumer(log.topic, **options) as consumer:
        return read_in_turn(consumer, log, lambda: [record.value for record in consumer.poll(30)])


def poll_arrow(cluster: LocalCluster, log: Log, name: str, **options: Any) -> Reading:
    with cluster.consumer(log.topic, **options) as consumer:
        return read_in_turn(
            consumer, log, lambda: consumer.poll_arrow(30).column("value").to_pylist()
        )


def iterate(cluster: LocalCluster, log: Log, name: str, **options: Any) -> Reading:
    with cluster.consumer(log.topic, **options) as consumer:
        return read_in_turn(consumer, log, lambda: [next(consumer).value])


def poll_in_a_group(cluster: LocalCluster, log: Log, name: str, **options: Any) -> Reading:
    with cluster.consumer(log.topic, group=name, **options) as consumer:
        reading = read_in_turn(consumer, log, lambda: [one.value for one in consumer.poll(30)])
        consumer.commit()
    assert cluster.admin.describe_group(name).lag == 0
    return reading


def poll_with_auto_commit(cluster: LocalCluster, log: Log, name: str, **options: Any) -> Reading:
    options = {**options, "enable_auto_commit": True, "max_poll_records": 1}
    with cluster.consumer(log.topic, group=name, **options) as consumer:
        return read_in_turn(consumer, log, lambda: [record.value for record in consumer.poll(30)])


def poll_with_asyncio(cluster: LocalCluster, log: Log, name: str, **options: Any) -> Reading:
    reading = Reading(log)

    async def main() -> None:
        async with cluster.async_consumer(log.topic, **options) as consumer:
            while reading.is_going_on:
                try:
                    reading.values += [one.value for one in await consumer.poll(30)]
                except UnreadableRecordError as error:
                    await consumer.seek(*reading.note(error))

    asyncio.run(main())
    return reading


def read_ranges(cluster: LocalCluster, log: Log, name: str, **options: Any) -> Reading:
    """As the tasks of Spark and Ray Data do."""
    reading = Reading(log)
    topic_id = cluster.admin.describe_topic(log.topic).topic_id
    options.pop("auto_offset_reset")
    start, end = 0, max(log.bad.values()) + 1
    while reading.is_going_on:
        try:
            for batch in read_range(cluster, Split(log.topic, topic_id, 0, start, end), **options):
                reading.values += batch.column("value").to_pylist()
        except UnreadableRecordError as error:
            _, start = reading.note(error)
    return reading


def read_compute_write(cluster: LocalCluster, log: Log, name: str, **options: Any) -> Reading:
    """As docs/how-to/poison-records.md has it."""
    reading = Reading(log)
    cluster.create_topic(f"{name}.out", timeout_s=120)
    with (
        cluster.producer(transactional_id=name) as producer,
        cluster.consumer(log.topic, group=name, **options) as consumer,
    ):
        while reading.is_going_on:
            with producer.transaction(reads=consumer) as tx:
                records: list[Record] = []
                try:
                    records = consumer.poll(30)
                except UnreadableRecordError as error:
                    place, next_offset = reading.note(error)
                    tx.send(f"{name}.out", b"bad", key=b"%d" % (error.offset or 0))
                    consumer.seek(place, next_offset)
                reading.values += [record.value for record in records]
                for record in records:
                    tx.send(f"{name}.out", record.value)
        with cluster.consumer(f"{name}.out", auto_offset_reset="earliest") as out:
            written = list(out.until_end())
    assert [one.value for one in written if one.key is None] == reading.values
    assert [int(one.key) for one in written if one.key is not None] == list(reading.errors)
    return reading


CONSUMERS = [
    poll,
    poll_arrow,
    iterate,
    poll_in_a_group,
    poll_with_auto_commit,
    poll_with_asyncio,
    read_ranges,
    read_compute_write,
]


@pytest.mark.parametrize("on_corrupt", ["raise", "skip"])
@pytest.mark.parametrize("read", CONSUMERS, ids=lambda one: one.__name__)
def test_the_neighbours_of_an_unreadable_record_are_delivered_and_the_error_names_it(
    cluster: LocalCluster,
    log: Log,
    name: str,
    url: str,
    read: Callable[..., Reading],
    on_corrupt: str,
) -> None:
    reading = read(
        cluster, log, name, auto_offset_reset="earliest", large_values=url, on_corrupt=on_corrupt
    )
    assert reading.values == log.good
    assert reading.errors == ({} if on_corrupt == "skip" else log.bad)


def test_the_command_prints_the_neighbours(
    log: Log, rayq_command: Command, url: str
) -> None:
    options = ("-e", "-X", f"large_values={url}")
    ran = rayq_command.well("topic", "consume", log.topic, *options, "-X", "on_corrupt=skip")
    assert ran.out.split() == [one.decode() for one in log.good]
    ran = rayq_command("topic", "consume", log.topic, *options)
    assert ran.code != 0 and ran.out.split() == ["good-0"] and "Seek to" in " ".join(ran.err.split())


# --- queues ---------------------------------------------------------------------------------------

Handed = list[bytes | None]


def take(queue: rayq.Queue, is_done: Callable[[], bool], seen: Handed) -> None:
    while not is_done():
        for task in queue.take(7, 0.3):
            seen.append(task.value)
            task.ack()


def work(queue: rayq.Queue, seen: Handed) -> None:
    queue.work(lambda task: seen.append(task.value), concurrency=2, stop_when_idle_s=1.5)


@pytest.mark.parametrize(
    ("consume", "ordered_by_key"),
    [
        ("take", False),
        ("take", True),
        ("work", False),
        ("async_take", False),
        ("async_work", True),
        ("pool", False),
        ("command", False),
    ],
)
def test_a_queue_makes_what_cannot_be_read_a_dead_letter_and_hands_out_the_rest(
    cluster: LocalCluster,
    log: Log,
    name: str,
    url: str,
    rayq_command: Command,
    consume: str,
    ordered_by_key: bool,
) -> None:
    options: dict[str, Any] = {"max_deliveries": 2, "backoff_s": 0.01, "backoff_max_s": 0.02}
    queue = cluster.create_queue(
        name, topic=log.topic, ordered_by_key=ordered_by_key, large_values=url, **options
    )
    seen: Handed = []

    def handle(task: QueueTask) -> None:
        seen.append(task.value)

    def is_done() -> bool:
        is_handled = len(seen) >= len(log.good)
        return is_handled and len(letters(cluster, name)) >= len(log.bad)

    with queue:
        if consume == "take":
            take(queue, is_done, seen)
        elif consume == "work":
            work(queue, seen)
        elif consume == "pool":
            with cluster.queue_pool(name, handle, large_values=url, cool_down_s=0.25):
                eventually(is_done, "all were handled, or are dead letters")
        elif consume == "command":
            ran = rayq_command.well("queue", "take", name, "--wait", "2s")
            seen += [line.encode() for line in ran.out.split()]
        else:
            works = consume == "async_work"
            asyncio.run(_with_asyncio(cluster, name, url, is_done, seen, works=works))
        eventually(is_done, "all were handled, or are dead letters")
    assert sorted(seen, key=str) == sorted(log.good, key=str)
    if ordered_by_key:
        assert seen == log.good
    found = letters(cluster, name)
    assert found.keys() == log.bad.keys()
    assert all("cannot be read" in reason for reason in found.values())


async def _with_asyncio(
    cluster: LocalCluster,
    name: str,
    url: str,
    is_done: Callable[[], bool],
    seen: Handed,
    *,
    works: bool,
) -> None:
    async with cluster.async_queue(name, large_values=url) as queue:
        if works:
            await queue.work(lambda task: seen.append(task.value), stop_when_idle_s=1.5)
            return
        while not await asyncio.to_thread(is_done):
            for task in await queue.take(7, 0.3):
                seen.append(task.value)
                task.ack()


def letters(cluster: LocalCluster, name: str) -> dict[int, str]:
    """By the offset of each record that became a dead letter, what it says why."""
    client, background = cluster.shared_client()
    listed = background.run(DeadLetters(client, name, timeout_s=60).listed(Filter(), 1_000))
    found: dict[int, str] = {}
    for one in listed:
        source = dict(one.record.headers)["rayq.source"].decode()
        assert source_of(one.record.headers) is not None
        offset = int(source.rpartition("/")[2])
        assert offset not in found, "each once"
        found[offset] = one.error
    return found


# --- pools ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", ["records", "arrow"])
@pytest.mark.parametrize("exactly_once", [False, True])
def test_a_pool_makes_what_cannot_be_read_a_dead_letter_and_handles_the_rest(
    cluster: LocalCluster,
    log: Log,
    name: str,
    exactly_once: bool,
    batch: Literal["records", "arrow"],
) -> None:
    dead = f"{name}.dead"
    cluster.create_topic(dead, timeout_s=120)
    seen: Handed = []

    def handle(given: Any) -> list[Outgoing] | None:
        seen.extend(
            given.column("value").to_pylist() if batch == "arrow" else [one.value for one in given]
        )
        return [] if exactly_once else None

    with cluster.consumer_pool(
        log.topic,
        name,
        handle,
        dead_letter_topic=dead,
        exactly_once=exactly_once,
        batch=batch,
        **SOON,
    ) as pool:
        pool.wait_idle(120)
    assert seen == log.good
    with cluster.consumer(dead, auto_offset_reset="earliest") as consumer:
        headers = [dict(one.headers) for one in consumer.until_end()]
    offsets = [int(one["rayq.source"].rpartition(b"/")[2]) for one in headers]
    assert offsets == list(log.bad)
    assert all(b"cannot be read" in one["rayq.error.message"] for one in headers)


def test_the_dead_letters_of_a_topic_are_listed_around_those_that_cannot_be_read(
    cluster: LocalCluster, log: Log
) -> None:
    client, background = cluster.shared_client()
    listed = background.run(DeadLetters(client, log.topic, timeout_s=60).listed(Filter(), 1_000))
    assert [one.record.value for one in listed if one.record.offset not in log.bad] == log.good
    bad = {one.record.offset: one for one in listed if one.record.offset in log.bad}
    assert bad.keys() == log.bad.keys()
    assert all(one.is_large or one.unread for one in bad.values())


def test_a_pool_tries_again_what_it_cannot_have_for_now(
    cluster: LocalCluster,
    new_topic: Callable[..., str],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic, dead = new_topic(max_message_bytes=16_384), new_topic()
    values = [b"before", os.urandom(40_000), b"after"]
    with cluster.producer(large_values="chunks") as producer:
        for value in values:
            producer.send(topic, value)
    joined, short = large_reader._joined, [MemoryError(), MemoryError()]

    def without_memory(*arguments: Any) -> bytes:
        if short:
            raise short.pop()
        return joined(*arguments)

    monkeypatch.setattr(large_reader, "_joined", without_memory)
    seen: Handed = []
    with cluster.consumer_pool(
        topic,
        name,
        lambda records: seen.extend(record.value for record in records),
        dead_letter_topic=dead,
        **SOON,
    ) as pool:
        assert pool.wait_idle(60).dead_letters == 0
    assert seen == values and not short


# --- leaders --------------------------------------------------------------------------------------


def test_a_leader_refuses_a_manifest_that_no_reader_could_follow_and_knows_retries(
    cluster: LocalCluster, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = new_topic()
    topic_id = cluster.admin.describe_topic(topic).topic_id
    chunks = [
        produce_raw(
            cluster, topic, encode_batch([b"x"], None, [chunk_headers(ID, n)], is_chunk=True)
        ).base_offset
        for n in range(2)
    ]
    refused = {
        "a partition that is not there",
        "a topic that never was",
        "a topic that was deleted",
        "a topic whose name cannot be",
        "a chunk behind the end",
        "a chunk above all offsets",
        "a chunk that is a record",  # At an offset that is not written yet.
        "a chunk that is a manifest",
        "no manifest",
        "a manifest of tomorrow",
    }
    for what, value in manifests(topic, topic_id, chunks, tmp_path).items():
        if what in refused:
            with pytest.raises(InvalidRecordError):
                produce_raw(cluster, topic, encode_batch([value], [b"key"], is_large=True))
    good = manifest_of_chunks(2, crc_of(b"xx"), ID, chunks)
    numbered = encode_batch(
        [good], [b"key"], is_large=True, producer_id=2**40, producer_epoch=0, base_sequence=0
    )
    first = produce_raw(cluster, topic, numbered)
    cluster.admin.delete_records({TopicPartition(topic, 0): 1})
    again = produce_raw(cluster, topic, numbered)
    assert (again.base_offset, again.is_repeat) == (first.base_offset, True)
    with pytest.raises(InvalidRecordError, match="the log begins at 1"):
        produce_raw(cluster, topic, encode_batch([good], [b"key"], is_large=True))


def test_a_producer_whose_chunks_expired_is_told_and_sends_on(
    cluster: LocalCluster, new_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = new_topic(max_message_bytes=16_384)
    check, is_first = leader_module.check_manifest, True

    def check_after_retention(*arguments: Any, log_start: int, **ends: Any) -> None:
        nonlocal is_first
        log_start, is_first = (1 if is_first else log_start), False
        check(*arguments, log_start=log_start, **ends)

    monkeypatch.setattr(leader_module, "check_manifest", check_after_retention)
    large = os.urandom(40_000)
    with cluster.producer(large_values="chunks") as producer:
        lost = producer.send(topic, large)
        sent = [producer.send(topic, value) for value in (b"small", large)]
        with pytest.raises(InvalidRecordError, match="the log begins at 1"):
            lost.result(60)
        assert all(one.result(60).offset is not None for one in sent)
        with pytest.raises(rayq.DeliveryError):
            producer.flush()
    with cluster.consumer(topic, auto_offset_reset="earliest") as consumer:
        assert [record.value for record in consumer.until_end()] == [b"small", large]
