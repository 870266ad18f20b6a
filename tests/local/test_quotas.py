"""Quotas in a whole cluster: a client that has used one up waits, and loses nothing by it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator

import pytest

from rayq import Cluster, messages
from rayq.errors import (
    AuthorizationError,
    InvalidRequestError,
    QuotaLimitError,
    RayqError,
    UnknownPrincipalError,
)
from rayq.testing import LocalCluster
from tests.local.conftest import NewTopic
from tests.local.principal_support import Named
from tests.local.support import eventually

VALUE = os.urandom(10_000)
RATE = 200_000


@pytest.fixture
def anna(cluster: LocalCluster) -> Named:
    named = Named(cluster)
    named.allow(
        ("all", "topic", "*"),
        ("all", "group", "*"),
        ("all", "queue", "*"),
        ("all", "transactional_id", "*"),
    )
    return named


@pytest.fixture
def hers(anna: Named) -> Iterator[Cluster]:
    with anna.connect() as connection:
        yield connection


@pytest.mark.thorough
def test_a_rate_holds_in_the_whole_cluster_and_its_removal_at_once(
    cluster: LocalCluster, new_topic: NewTopic, anna: Named, hers: Cluster
) -> None:
    topic = new_topic(partitions=6, replication_factor=1)
    cluster.admin.set_quota(anna.name, producer_byte_rate=RATE)
    with hers.producer(compression_type="none", batch_size=20_000) as producer:
        delivered: list[float] = []
        for _ in range(300):
            future = producer.send(topic, VALUE)
            future.add_done_callback(lambda _: delivered.append(time.monotonic()))
        began_s = time.monotonic()
        time.sleep(8.0)
        steady = [at_s for at_s in delivered if began_s + 3 < at_s <= began_s + 8]
        assert 0.8 * RATE * 5 <= len(steady) * len(VALUE) <= 1.2 * RATE * 5
        assert len(delivered) < 300
        cluster.admin.remove_quota(anna.name)
        producer.flush(timeout_s=5)
        assert len(delivered) == 300


def test_a_throttled_member_keeps_its_place_and_commits_on_time(
    cluster: LocalCluster, new_topic: NewTopic, anna: Named, hers: Cluster
) -> None:
    topic = new_topic(partitions=2)
    with cluster.producer(compression_type="none") as producer:
        for number in range(200):
            producer.send(topic, VALUE, partition=number % 2)
    lost: list[object] = []
    with hers.consumer(
        topic,
        group=f"of-{topic}",
        auto_offset_reset="earliest",
        group_session_timeout_ms=3000,
        group_heartbeat_interval_ms=500,
        on_lost=lost.append,
    ) as consumer:
        assert consumer.poll(timeout_s=30)
        cluster.admin.set_quota(anna.name, consumer_byte_rate=RATE / 4)
        late_s, read = 0.0, 0
        until_s = time.monotonic() + 8
        while time.monotonic() < until_s:
            read += len(consumer.poll(timeout_s=0.2))
            began_s = time.monotonic()
            consumer.commit()
            late_s = max(late_s, time.monotonic() - began_s)
        assert read < 200 and late_s < 2.0 and not lost
        cluster.admin.remove_quota(anna.name)
        eventually(lambda: not consumer.poll(timeout_s=0.5), "all is read")


@pytest.mark.thorough
def test_a_throttled_worker_keeps_its_locks_and_acknowledges_on_time(
    cluster: LocalCluster, new_topic: NewTopic, anna: Named, hers: Cluster
) -> None:
    topic = new_topic(partitions=1)
    name = f"queue-of-{topic}"
    cluster.create_queue(name, topic=topic, visibility_timeout_s=2).close()
    with cluster.producer() as producer:
        for number in range(40):
            producer.send(topic, b"%d" % number)
    cluster.admin.set_quota(anna.name, take_rate=4)
    with hers.queue(name) as queue:
        taken = 0
        began_s = time.monotonic()
        while time.monotonic() - began_s < 8:
            for task in queue.take(10, timeout_s=1):
                taken += 1
                assert task.delivery_count == 1
                time.sleep(0.05)
                before_s = time.monotonic()
                task.ack()
                assert time.monotonic() - before_s < 2.0
        assert 20 <= taken < 40
    cluster.admin.remove_quota(anna.name)


@pytest.mark.thorough
def test_throttling_times_no_transaction_out(
    cluster: LocalCluster, new_topic: NewTopic, anna: Named, hers: Cluster
) -> None:
    topic = new_topic(partitions=1)
    with hers.producer(
        transactional_id=f"of-{topic}",
        transaction_timeout_ms=12_000,
        compression_type="none",
        batch_size=20_000,
    ) as producer:
        with producer.transaction():
            producer.send(topic, VALUE)
        cluster.admin.set_quota(anna.name, producer_byte_rate=20_000)
        began_s = time.monotonic()
        with producer.transaction():
            for _ in range(40):
                producer.send(topic, VALUE)
        assert time.monotonic() - began_s > 14.0
    cluster.admin.remove_quota(anna.name)
    with cluster.consumer(topic, auto_offset_reset="earliest") as consumer:
        read: list[object] = []

        def is_all() -> bool:
            read.extend(consumer.poll(timeout_s=1))
            return len(read) == 41

        eventually(is_all, "both transactions are committed")


def test_nothing_at_all_waits_until_it_is_allowed(
    cluster: LocalCluster, topic: str, anna: Named, hers: Cluster
) -> None:
    cluster.admin.set_quota(anna.name, producer_byte_rate=0, consumer_byte_rate=0)
    with hers.producer() as producer, cluster.producer() as other:
        future = producer.send(topic, b"v")
        producer_waits = threading.Event()
        other.send(topic, b"w").result(timeout=30)
        assert not producer_waits.wait(1.0) and not future.done()
        with hers.consumer(topic, auto_offset_reset="earliest") as consumer:
            assert not consumer.poll(timeout_s=1)
            cluster.admin.remove_quota(anna.name)
            assert future.result(timeout=10).offset == 1
            eventually(lambda: bool(consumer.poll(timeout_s=1)), "it reads on")


def test_a_topic_too_many_is_refused_and_says_what_to_do(
    cluster: LocalCluster, topic: str, anna: Named, hers: Cluster
) -> None:
    cluster.admin.set_quota(anna.name, max_topics=1)
    hers.create_topic(f"a-{topic}")
    with pytest.raises(QuotaLimitError, match=f"rayq quota set {anna.name} max_topics="):
        hers.create_topic(f"b-{topic}")
    cluster.create_topic(f"b-{topic}")
    hers.admin.delete_topic(f"a-{topic}")
    hers.create_topic(f"c-{topic}")


def test_creating_and_deleting_partitions_has_a_rate(
    cluster: LocalCluster, topic: str, anna: Named, hers: Cluster
) -> None:
    cluster.admin.set_quota(anna.name, controller_mutation_rate=6)
    began_s = time.monotonic()
    for number in range(6):  # Each of the three brokers takes a first one at once.
        hers.create_topic(f"r{number}-{topic}", partitions=8, replication_factor=1)
    assert time.monotonic() - began_s > 1.0


def test_requests_to_create_partitions_that_come_at_once_wait_for_each_other(
    cluster: LocalCluster, topic: str, anna: Named, hers: Cluster
) -> None:
    cluster.admin.set_quota(anna.name, controller_mutation_rate=3)
    client, background = hers.shared_client()

    async def create_all() -> None:
        requests = [
            client.change(messages.CreateTopic(
                name=f"w{number}-{topic}", partitions=4, replication_factor=1, config={}
            ), timeout_s=60)
            for number in range(20)
        ]  # fmt: skip
        _, waiting = await asyncio.wait(map(asyncio.ensure_future, requests), timeout=1.5)
        for request in waiting:
            request.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    background.run(create_all())
    # One at each of three brokers, and perhaps another when its share has grown.
    created = [name for name in cluster.admin.list_topics() if name.endswith(f"-{topic}")]
    assert 1 <= len(created) <= 6


def test_all_see_the_quotas_that_were_just_set(cluster: LocalCluster, anna: Named) -> None:
    cluster.admin.set_quota(anna.name, client_id="etl", take_rate=1)
    cluster.admin.set_quota(anna.name, take_rate=5, max_topics=2)
    mine = [quota for quota in cluster.admin.list_quotas() if quota.principal == anna.name]
    assert [(quota.client_id, quota.limits) for quota in mine] == [
        (None, {"take_rate": 5, "max_topics": 2}),
        ("etl", {"take_rate": 1}),
    ]
    cluster.admin.remove_quota(anna.name, "take_rate")
    cluster.admin.remove_quota(anna.name, client_id="etl")
    mine = [quota for quota in cluster.admin.list_quotas() if quota.principal == anna.name]
    assert [quota.limits for quota in mine] == [{"max_topics": 2}]


def test_a_team_sees_its_own_quotas_and_how_far_they_are_used_up(
    cluster: LocalCluster, new_topic: NewTopic
) -> None:
    topic = new_topic(partitions=1)
    anna, other = Named(cluster, ("write", "topic", topic)), Named(cluster)
    admin = cluster.admin
    admin.set_quota(None, take_rate=7, max_topics=5)
    admin.set_quota(anna.name, producer_byte_rate=RATE / 20, max_topics=3)
    admin.set_quota(anna.name, client_id="etl", consumer_byte_rate=0)
    admin.set_quota(other.name, producer_byte_rate=1)
    try:
        with anna.connect() as hers:
            default, *own = hers.admin.list_quotas()
            assert (default.principal, default.limits) == (None, {"take_rate": 7, "max_topics": 5})
            assert [(quota.principal, quota.client_id) for quota in own] == [
                (anna.name, None), (anna.name, "etl"),
            ]  # fmt: skip
            limits = {limit.name: limit for limit in hers.admin.describe_quotas(anna.name)}
            assert {name: limit.value for name, limit in limits.items()} == {
                "take_rate": 7, "producer_byte_rate": RATE / 20, "max_topics": 3,
                "consumer_byte_rate": 0,
            }  # fmt: skip
            assert limits["take_rate"].is_default and not limits["max_topics"].is_default
            assert limits["consumer_byte_rate"].client_id == "etl"
            assert limits["producer_byte_rate"].throttled_s == 0
            with hers.producer(compression_type="none") as producer:
                for _ in range(20):
                    producer.send(topic, VALUE)

                def is_told() -> bool:
                    limits = {limit.name: limit for limit in hers.admin.describe_quotas(anna.name)}
                    rate = limits["producer_byte_rate"]
                    return rate.throttled_s > 0 and rate.wait_s > 0

                eventually(is_told, "she is throttled")
                assert [limit for limit in admin.describe_quotas(other.name) if limit.wait_s] == []
                admin.remove_quota(anna.name)
            with pytest.raises(AuthorizationError, match=f"describe principal '{other.name}'"):
                hers.admin.describe_quotas(other.name)
        with pytest.raises(UnknownPrincipalError, match="no principal 'nobody-there'"):
            admin.describe_quotas("nobody-there")
        assert {quota.principal for quota in admin.list_quotas()} >= {None, other.name}
    finally:
        admin.remove_quota(None)


def test_nobody_goes_round_the_quotas_of_brokers_to_the_controller(
    cluster: LocalCluster, topic: str, anna: Named, hers: Cluster
) -> None:
    host, _, port = str(cluster.admin.describe_cluster().controller).rpartition(":")
    client, background = hers.shared_client()
    request = messages.CreateTopic(f"other-{topic}", 1, 1, {})

    def is_refused() -> bool:
        try:
            background.run(client.ask((host, int(port)), request, timeout_s=60))
        except InvalidRequestError as error:
            return "answers brokers" in str(error)
        except RayqError as error:
            assert error.retriable, error  # It looks for the ACLs of a new principal now and then.
        return False

    eventually(is_refused, "the controller answers brokers only")
    assert f"other-{topic}" not in cluster.admin.list_topics()
