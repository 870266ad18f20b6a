"""Patterns of named principals in a group: they match what the principal may read, and nothing
else is told."""

from __future__ import annotations

import contextlib

import pytest

from rayq import TopicPartition
from rayq.errors import AuthorizationError
from rayq.testing import LocalCluster
from tests.local.principal_support import Named
from tests.local.support import eventually


def test_a_pattern_matches_what_its_principal_may_read_and_follows_its_rights(
    cluster: LocalCluster,
) -> None:
    group = "of-patterns"
    for name in ("of-anna-a", "of-anna-b", "of-anna-c"):
        cluster.create_topic(name)
        with cluster.producer() as producer:
            producer.send(name, name.encode()).result(60)
    anna = Named(cluster, ("read", "group", group), ("read", "topic", "of-anna-a"))
    with (
        anna.connect() as connection,
        connection.consumer(
            pattern="of-anna-.*", group=group, auto_offset_reset="earliest"
        ) as consumer,
    ):

        def reads(*names: str) -> bool:
            consumer.poll(0.1)
            return consumer.assignment() == {TopicPartition(name, 0) for name in names}

        eventually(lambda: reads("of-anna-a"), "she reads what she may")
        anna.allow(("read", "topic", "of-anna-b"))
        eventually(lambda: reads("of-anna-a", "of-anna-b"), "she reads what she may since")
        anna.forbid(("read", "topic", "of-anna-a"))
        eventually(lambda: reads("of-anna-b"), "she reads no more what she may not")
        # The member that may read everything has the rest of the group's topics.
        with cluster.consumer(pattern="of-anna-.*", group=group) as other:

            def has_the_rest() -> bool:
                other.poll(0.1)
                reads("of-anna-b")
                return {place.topic for place in other.assignment()} >= {"of-anna-a", "of-anna-c"}

            eventually(has_the_rest, "a superuser reads the others")
            told = connection.admin.describe_group(group)
            assert "of-anna-c" not in repr(told) and "of-anna-a" not in repr(told)


@pytest.mark.parametrize("is_pattern", [False, True])
def test_a_member_that_may_not_read_a_topic_for_a_while_skips_nothing_of_it(
    cluster: LocalCluster, is_pattern: bool
) -> None:
    topic, place = f"hides-{is_pattern}", TopicPartition(f"hides-{is_pattern}", 0)
    cluster.create_topic(topic)
    anna = Named(cluster, ("read", "group", topic), ("read", "topic", topic))
    with anna.connect() as connection, cluster.producer() as producer:
        # Nothing is committed yet, so the group itself would begin at the end again.
        with connection.consumer(
            *(() if is_pattern else (topic,)),
            pattern=f"{topic}.*" if is_pattern else None,
            group=topic,
            auto_offset_reset="latest",
            enable_auto_commit=True,
            auto_commit_interval_ms=600_000,
        ) as consumer:
            values: list[bytes | None] = []

            def polls() -> bool:
                """Returns whether the consumer has the partition, and is not refused."""
                try:
                    values.extend(record.value for record in consumer.poll(0.1))
                except AuthorizationError:
                    return False
                return consumer.assignment() == {place}

            eventually(polls, "it is a member")
            assert consumer.position(place) == 0
            anna.forbid(("read", "topic", topic))
            eventually(lambda: not polls(), "it may not read")
            producer.send(topic, b"meanwhile").result(60)
            with contextlib.suppress(AuthorizationError):
                values.extend(record.value for record in consumer.poll(0.5))
            anna.allow(("read", "topic", topic))
            eventually(lambda: polls() and values == [b"meanwhile"], "it goes on where it was")
