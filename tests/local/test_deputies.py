"""What servers do because a principal asked: they do nothing that the principal itself may not."""

from __future__ import annotations

import pytest

from rayq import Cluster, TopicPartition
from rayq.core.access.audit import AuditLine
from rayq.errors import AuthorizationError
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
    """Whoever writes to the letters' topic chooses their targets."""
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
        return [one for one in cluster.admin.read_audit().lines if one.principal == anna.name]

    eventually(lambda: {"denied", "redrive"} <= {one.kind for one in noted()}, "it is audited")
    redriven = next(one for one in noted() if one.kind == "redrive")
    assert redriven.objects == 1 and letters in redriven.what
    anna.allow(("write", "topic", payments))
    with anna.connect() as connection:

        def is_moved() -> bool:
            answer = connection.admin.move_queue_records(letters, {place: [0]}, to_topic="")
            return answer[place].moved == [0]

        eventually(is_moved, "it is sent to where she may write by now")
    assert len(values(cluster, payments)) == 1


def test_whoever_moves_records_may_read_them(
    cluster: LocalCluster, topic: str, new_topic: NewTopic
) -> None:
    """Else a queue would launder its topic into one that the mover reads."""
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
