"""Large values over real servers, end to end."""

from __future__ import annotations

import base64
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import rayq
from rayq.client.large.collect import collect_values
from rayq.config import MIB
from rayq.core.large.values import chunk_headers
from rayq.errors import AuthorizationError, InvalidRequestError
from rayq.messages import Produce
from rayq.storage.batch import encode_batch
from rayq.testing import LocalCluster
from tests.local.cli_support import Command
from tests.local.principal_support import Named
from tests.local.support import read_all

NewTopic = Callable[..., str]


def bytes_of(size_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


@pytest.mark.parametrize("size_mib", [8, pytest.param(64, marks=pytest.mark.thorough)])
def test_a_value_of_many_mib_arrives_whole(
    cluster: LocalCluster, new_topic: NewTopic, size_mib: int
) -> None:
    topic = new_topic()
    large = bytes_of(size_mib * MIB)
    with cluster.producer(large_values="chunks") as producer:
        sent = producer.send(topic, large, key=b"k", headers=[("h", b"1")]).result(120)
    (record,) = read_all(cluster, topic)
    assert (record.offset, record.key, record.headers) == (sent.offset, b"k", [("h", b"1")])
    assert record.value == large
    # A reader that begins at the record has to read every chunk back.
    with cluster.consumer() as consumer:
        consumer.assign([rayq.TopicPartition(topic, 0)])
        consumer.seek(rayq.TopicPartition(topic, 0), record.offset)
        assert consumer.poll(timeout_s=60)[0].value == large


def test_several_producers_and_a_transaction_send_large_values_at_once(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic = new_topic(max_message_bytes=16_384)
    sizes = [40_000, 100_000, 17_000]
    with (
        cluster.producer(large_values="chunks") as one,
        cluster.producer(large_values="chunks") as two,
        cluster.producer(large_values="chunks", transactional_id=topic) as three,
    ):
        aborted = three.begin_transaction()
        aborted.send(topic, bytes_of(90_000, 99))
        for seed, size in enumerate(sizes):
            one.send(topic, bytes_of(size, seed), key=b"one")
            two.send(topic, b"small", key=b"two")
            two.send(topic, bytes_of(size, 10 + seed), key=b"two")
        one.flush()
        aborted.abort()
        with three.transaction() as tx:
            tx.send(topic, bytes_of(50_000, 20), key=b"three")
    records = read_all(cluster, topic)
    by_key = {key: [one.value for one in records if one.key == key] for key in (b"one", b"two")}
    assert by_key[b"one"] == [bytes_of(size, seed) for seed, size in enumerate(sizes)]
    assert by_key[b"two"] == [
        value
        for seed, size in enumerate(sizes)
        for value in (b"small", bytes_of(size, 10 + seed))
    ]
    assert [record.value for record in records if record.key == b"three"] == [bytes_of(50_000, 20)]
    assert len(records) == 3 + 6 + 1


def test_a_group_goes_on_behind_a_large_value(cluster: LocalCluster, new_topic: NewTopic) -> None:
    topic = new_topic(max_message_bytes=16_384)
    with cluster.producer(large_values="chunks") as producer:
        for seed in range(4):
            producer.send(topic, bytes_of(50_000, seed))
    seen: list[bytes | None] = []
    for _ in range(4):
        with cluster.consumer(group=topic, auto_offset_reset="earliest") as consumer:
            consumer.subscribe(topic)
            record = next(iter(consumer))
            seen.append(record.value)
            consumer.commit()
    assert seen == [bytes_of(50_000, seed) for seed in range(4)]


def test_a_compacted_topic_takes_objects_and_no_chunks(
    cluster: LocalCluster, new_topic: NewTopic, tmp_path: Path
) -> None:
    topic = new_topic(cleanup_policy="compact", max_message_bytes=16_384)
    url = f"file://{tmp_path}"
    with cluster.producer(large_values=url) as producer:
        producer.send_and_wait(topic, bytes_of(50_000), key=b"k", timeout_s=60)
    with (
        cluster.producer(large_values="chunks") as producer,
        pytest.raises(InvalidRequestError, match="compacted"),
    ):
        producer.send(topic, bytes_of(50_000), key=b"k")
    client, background = cluster.shared_client()
    chunk = encode_batch([b"x"], [b"k"], [chunk_headers(b"i" * 16, 0)], is_chunk=True)
    with pytest.raises(InvalidRequestError, match="compacted"):
        background.run(
            client.exchange_with_leader(
                topic,
                0,
                lambda topic_id, leader: Produce(
                    topic_id=topic_id,
                    partition=0,
                    leader_epoch=leader.epoch,
                    acks=-1,
                    timeout_ms=10_000,
                ),
                bytes(chunk),
                timeout_s=60,
                attempt_timeout_s=60,
            )
        )
    (record,) = read_all(cluster, topic, large_values=url)
    assert record.value == bytes_of(50_000)


def take_one(queue: rayq.Queue) -> rayq.QueueTask:
    for _ in range(12):
        for task in queue.take(1, timeout_s=5):
            return task
    raise AssertionError("nothing came within a minute")


def test_a_queue_gives_out_whole_values_also_as_dead_letters_and_redriven(
    cluster: LocalCluster, rayq_command: Command, new_topic: NewTopic, tmp_path: Path
) -> None:
    topic = new_topic(max_message_bytes=16_384)
    name = f"q.{topic}"
    large, stored = bytes_of(100_000, 1), bytes_of(100_000, 2)
    with cluster.create_queue(name, topic=topic, backoff_s=0.5) as queue:
        queue.put(b"small")
        queue.put(large, key=b"k")
        values: dict[bytes | None, bytes | None] = {}
        while len(values) < 2:
            for task in queue.take(10, timeout_s=5):
                values[task.key] = task.value
                task.ack() if task.value == b"small" else task.reject("too large for me")
        assert values == {None: b"small", b"k": large}
        queue.flush()
        with cluster.queue(f"{name}.dead") as dead:
            task = take_one(dead)
            assert task.value == large and dict(task.headers)["rayq.error"] == b"too large for me"
            task.nack(delay_s=0)
        shown = rayq_command.well("dead-letters", "show", name, f"0/{task.offset}", "--json").json
        assert shown["is_large"] and base64.b64decode(shown["value"]["base64"]) == large
        place = rayq.TopicPartition(f"{name}.dead", 0)
        cluster.admin.move_queue_records(f"{name}.dead", {place: [task.offset]})
        task = take_one(queue)
        assert (task.key, task.value) == (b"k", large)
        task.ack()
        # A value in an object: only who says where values are kept reads it.
        url = f"file://{tmp_path}"
        with cluster.queue(name, large_values=url) as other:
            other.put(stored)
            assert queue.take(1, timeout_s=0.5) == []
            task = take_one(other)
            assert task.value == stored and task.delivery_count > 1
            task.reject("no")
            other.flush()
        with cluster.queue(f"{name}.dead", large_values=url) as dead:
            offset = take_one(dead).offset
        shown = rayq_command.well("dead-letters", "show", name, f"0/{offset}").out
        assert "value: not read:" in shown and "reads no objects" in " ".join(shown.split())


def test_the_command_sends_reads_and_collects_values_in_objects(
    cluster: LocalCluster, rayq_command: Command, new_topic: NewTopic, tmp_path: Path
) -> None:
    topic = new_topic(max_message_bytes=16_384)
    url = f"file://{tmp_path}/values"
    large = base64.b64encode(bytes_of(60_000))
    for way in (url, "chunks"):
        rayq_command.well("topic", "produce", topic, "-X", f"large_values={way}", stdin=large)
    ran = rayq_command.well("topic", "consume", topic, "-e", "-X", f"large_values={url}")
    assert ran.out.split() == [large.decode()] * 2
    # An object whose producer died before it sent the record.
    (stored,) = (tmp_path / "values").rglob("*.value")
    left = stored.with_name(f"{'0' * 32}.value")
    left.write_bytes(large)
    then_s = time.time() - 7 * 86_400
    for path in (stored, left):
        os.utime(path, (then_s, then_s))
    shown = rayq_command.well("values", "collect", url, "--dry-run")
    assert "1 object" in shown.out and "1 in use" in shown.out and left.exists()
    found = rayq_command.well("values", "collect", url, "-y", "--json").json
    assert [one["uri"] for one in found["objects"]] == [f"file://{left}"]
    assert stored.exists() and not left.exists()


def test_a_sweep_removes_nothing_while_topics_are_hidden_from_it(
    cluster: LocalCluster, topic: str, tmp_path: Path
) -> None:
    url, value = f"file://{tmp_path}", bytes_of(2 * MIB)
    with cluster.producer(large_values=url) as producer:
        producer.send(topic, value).result(60)
    for path in tmp_path.rglob("*.value"):
        os.utime(path, (0, 0))
    anna = Named(cluster, ("describe", "cluster", "cluster"))
    with anna.connect() as connection:
        client, background = connection.shared_client()
        for dry_run in (True, False):
            with pytest.raises(AuthorizationError, match="Nothing was removed"):
                background.run(collect_values(client, url, dry_run=dry_run))
        anna.allow(("read", "topic", "*"))
        swept = background.run(collect_values(client, url))
        assert (len(swept.removed), swept.kept) == (0, 1)
    (record,) = read_all(cluster, topic, large_values=url)
    assert record.value == value
