"""Servers that act because a principal asked: they do nothing that the principal itself may not
do."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from rayq import Cluster, TopicPartition, messages
from rayq.batch.task_writer import begin_write, finish_write, write_task, writing
from rayq.core.access.audit import AuditLine
from rayq.core.cluster.topic_changes import TRANSACTIONS_TOPIC
from rayq.errors import AuthorizationError, TransactionAbortedError
from rayq.messages.transaction_ids import coordinator_partition
from rayq.storage.batch import encode_batch
from rayq.testing import LocalCluster
from tests.local.conftest import NewTopic
from tests.local.principal_support import Named
from tests.local.support import eventually, read_all


def values(cluster: Cluster, topic: str) -> list[bytes | None]:
    return [record.value for record in read_all(cluster, topic)]


def send(cluster: Cluster, topic: str, value: bytes, source: str | None = None) -> None:
    headers = [] if source is None else [("rayq.source", source.encode())]
    with cluster.producer() as producer:
        producer.send(topic, value, headers=headers).result(60)


def test_a_forged_letter_goes_only_where_its_redriver_may_write(
    cluster: LocalCluster, topic: str, new_topic: NewTopic
) -> None:
    """A principal that writes to the letters' topic chooses their targets."""
    queue, payments = f"of-{topic}", new_topic()
    cluster.create_queue(queue, topic=topic).close()
    letters = queue + ".dead"
    place = TopicPartition(letters, 0)
    anna = Named(
        cluster,
        ("read", "topic", letters),
        ("write", "topic", letters),
        ("read", "queue", letters),
        ("alter", "queue", letters),
        ("write", "topic", topic),
    )
    with anna.connect() as connection:
        for source in (f"{payments}/0/7", f"{topic}/0/7", "nowhere/0/7"):
            send(connection, letters, source.encode(), source)
        eventually(
            lambda: len(cluster.admin.list_queue_records(letters)) == 3, "the letters are known"
        )
        admin = connection.admin
        moved = admin.move_queue_records(letters, {place: [0, 1, 2]}, to_topic="")[place]
        assert moved.moved == [1]
        for offset, named in ((0, payments), (2, "nowhere")):
            why = moved.refused[offset]
            assert f"Principal {anna.name!r} may not write topic {named!r}" in why, why
        assert values(cluster, payments) == [] and len(values(cluster, topic)) == 1
        with pytest.raises(AuthorizationError):
            admin.move_queue_records(letters, {place: [0]}, to_topic=payments)

    def noted() -> list[AuditLine]:
        return [line for line in cluster.admin.read_audit().lines if line.principal == anna.name]

    eventually(lambda: {"denied", "redrive"} <= {line.kind for line in noted()}, "it is audited")
    redriven = next(line for line in noted() if line.kind == "redrive")
    assert redriven.objects == 1 and letters in redriven.what
    anna.allow(("write", "topic", payments))
    with anna.connect() as connection:

        def is_moved() -> bool:
            answer = connection.admin.move_queue_records(letters, {place: [0]}, to_topic="")
            return answer[place].moved == [0]

        eventually(is_moved, "it is sent to where she may write by now")
    assert len(values(cluster, payments)) == 1


def test_moving_records_needs_the_right_to_read_them(
    cluster: LocalCluster, topic: str, new_topic: NewTopic
) -> None:
    """Without that right a queue would launder its topic into one that the mover reads."""
    queue, own = f"of-{topic}", new_topic()
    cluster.create_queue(queue, topic=topic).close()
    send(cluster, topic, b"secret")
    anna = Named(
        cluster, ("alter", "queue", queue), ("describe", "topic", topic), ("all", "topic", own)
    )
    place = TopicPartition(topic, 0)
    with anna.connect() as connection, pytest.raises(AuthorizationError, match="may not read"):
        connection.admin.move_queue_records(queue, {place: [0]}, to_topic=own)
    assert values(cluster, own) == []


def test_a_queue_does_not_write_its_dead_letters_into_anothers_topic(
    cluster: LocalCluster, topic: str
) -> None:
    queue = f"of-{topic}"
    cluster.create_topic(queue + ".dead")
    anna = Named(
        cluster, ("read", "topic", topic), ("create", "queue", queue), ("alter", "queue", queue)
    )
    with anna.connect() as connection:
        with pytest.raises(AuthorizationError, match=f"may not write topic '{queue}.dead'"):
            connection.create_queue(queue, topic=topic)
        connection.create_queue(queue, topic=topic, dead_letters="discard").close()
        with pytest.raises(AuthorizationError):
            connection.admin.alter_queue(queue, dead_letters="keep")


# --- families -------------------------------------------------------------------------------------


def test_nobody_writes_in_the_transaction_of_another(
    cluster: LocalCluster, topic: str
) -> None:
    """A principal that may write to a topic can guess or read the producer ids of others."""
    name = f"id-of-{topic}"
    may_write = ("write", "topic", topic), ("read", "topic", topic)
    anna = Named(cluster, *may_write, ("write", "transactional_id", name))
    ben = Named(cluster, *may_write)
    with anna.connect() as connection, connection.producer(transactional_id=name) as producer:
        producer.begin_transaction()
        producer.send(topic, b"hers").result(60)
        (listed,) = cluster.admin.list_transactions()
        family, epoch = listed.producer_id, listed.epoch
        with ben.connect() as other:
            for sequence in (0, 1, 7):
                with pytest.raises(AuthorizationError, match=f"Principal '{ben.name}' may not"):
                    append(other, topic, family, epoch, sequence)
            with pytest.raises(AuthorizationError):
                seal(other, topic, family, epoch)
            with pytest.raises(AuthorizationError):
                other.admin.abort_transaction(name)
            with pytest.raises(AuthorizationError):
                other.producer(transactional_id=name).begin_transaction()
        producer.send(topic, b"too").result(60)
        producer.commit_transaction()
    with cluster.consumer(topic, auto_offset_reset="earliest") as consumer:
        assert [record.value for record in consumer.until_end(60)] == [b"hers", b"too"]


def test_the_batch_write_of_a_principal_is_a_transaction_of_its_own(
    cluster: LocalCluster, topic: str
) -> None:
    """Its driver seals each partition, and its tasks have the same principal."""
    name = f"job-of-{topic}"
    anna = Named(
        cluster,
        ("write", "topic", topic),
        ("read", "topic", topic),
        ("write", "transactional_id", name),
    )
    rows = pa.table({"value": pa.array([b"a", b"b", b"c"], pa.binary())})
    with anna.connect() as connection:
        job = begin_write(connection, topic, transactional_id=name)
        written = [write_task(connection, job, task, [rows]) for task in range(2)]
        counts = [(task.task, task.partitions) for task in written]
        with writing(connection, job):
            finish_write(connection, job, counts)
    assert sorted(values(cluster, topic)) == sorted(2 * [b"a", b"b", b"c"])


def test_the_right_to_alter_an_id_aborts_its_transaction_and_no_other(
    cluster: LocalCluster, topic: str
) -> None:
    name = f"id-of-{topic}"
    operator = Named(cluster, ("alter", "transactional_id", name))
    with cluster.producer(transactional_id=name) as producer:
        producer.begin_transaction()
        producer.send(topic, b"v").result(60)
        (listed,) = (info for info in cluster.admin.list_transactions() if info.partitions)
        with operator.connect() as connection:
            other = Named(cluster, ("alter", "transactional_id", "another"))
            with other.connect() as stranger:
                abort_as(stranger, name, "another", listed.producer_id, listed.epoch)
            assert cluster.admin.describe_transaction(name).transactions[0].state == "open"
            connection.admin.abort_transaction(name)
        with pytest.raises(TransactionAbortedError):
            producer.commit_transaction()


def abort_as(cluster: Cluster, name: str, claimed: str, family: int, epoch: int) -> None:
    """Tries to abort by an id that it may abort, and with the family of another id."""
    client, background = cluster.shared_client()

    async def work() -> None:
        topic = await client.topic(TRANSACTIONS_TOPIC, timeout_s=60)
        await client.ask_leader(
            TRANSACTIONS_TOPIC,
            coordinator_partition(name, len(topic.partitions)),
            lambda topic_id, leader: messages.AbortTransaction(
                topic_id,
                coordinator_partition(name, len(topic.partitions)),
                leader.epoch,
                family,
                epoch,
                claimed,
            ),
            timeout_s=60,
            attempt_timeout_s=5,
        )

    background.run(work())


def append(cluster: Cluster, topic: str, family: int, epoch: int, sequence: int) -> None:
    batch = encode_batch(
        [b"forged"],
        timestamps_ms=1,
        producer_id=family,
        producer_epoch=epoch,
        base_sequence=sequence,
        is_transactional=True,
    )
    ask(
        cluster,
        topic,
        lambda topic_id, leader: messages.Produce(topic_id, 0, leader.epoch, -1, 10_000),
        bytes(batch),
    )


def seal(cluster: Cluster, topic: str, family: int, epoch: int) -> None:
    ask(
        cluster,
        topic,
        lambda topic_id, leader: messages.SealPartition(topic_id, 0, leader.epoch, family, epoch),
    )


def ask(cluster: Cluster, topic: str, build: Any, payload: bytes = b"") -> None:
    client, background = cluster.shared_client()
    background.run(
        client.exchange_with_leader(
            topic, 0, build, payload, timeout_s=60, attempt_timeout_s=20
        )
    )
