"""The admin against a played cluster."""

from __future__ import annotations

import inspect
import pydoc
import time
from typing import Any

import msgspec
import pytest

from rayq.client.admin.admin import Admin, AsyncAdmin
from rayq.client.client import Client
from rayq.client.cluster import Cluster
from rayq.errors import (
    AuthorizationError,
    ConfigError,
    InvalidPartitionsError,
    InvalidRequestError,
    OffsetOutOfRangeError,
    RemoteSlowError,
    TimeoutError,
    TopicExistsError,
    UnknownTopicError,
)
from rayq.messages import (
    AlterTopicConfig,
    CreateTopic,
    DeleteTopic,
    DescribeObjectStore,
    DescribeObjectStoreResponse,
    DescribeReplica,
    Metadata,
    PinSummary,
)
from rayq.records import BrokerInfo, ReplicaInfo, TopicPartition
from tests.client.fake_broker import FakeCluster


def test_a_topic_is_created_described_and_deleted(fake3: FakeCluster) -> None:
    with fake3.cluster() as cluster:
        cluster.create_topic("t", 2, retention_ms=None, **{"segment.bytes": 2048})
        assert cluster.admin.list_topics() == ["t"]
        fake3.write("t", [b"a", b"b"], 1)
        topic = cluster.admin.describe_topic("t")
        assert topic.name == "t"
        assert topic.config["retention_ms"] is None
        assert topic.config["segment_bytes"] == 2048
        assert [partition.partition for partition in topic.partitions] == [0, 1]
        second = topic.partitions[1]
        assert (second.leader, second.leader_epoch, second.isr) == (2, 1, [1, 2, 3])
        first = second.replicas[0]
        assert first.size_bytes
        assert msgspec.structs.replace(first, size_bytes=None) == ReplicaInfo(
            1, "127.0.0.1", fake3.brokers[1].port, 1001, 0, 2, 2
        )
        cluster.admin.delete_topic("t")
        assert cluster.admin.list_topics() == []
        with pytest.raises(UnknownTopicError):
            cluster.admin.describe_topic("t")
        with pytest.raises(UnknownTopicError):
            cluster.admin.delete_topic("t")


def test_creating_again_with_exist_ok_succeeds_or_says_what_differs(fake3: FakeCluster) -> None:
    with fake3.cluster() as cluster:
        for _ in range(2):
            cluster.create_topic("t", 2, exist_ok=True, **{"segment.bytes": 2048})
        cluster.create_topic("t", 2, 3, exist_ok=True)  # The rest as it may be.
        with pytest.raises(TopicExistsError, match="'t' exists"):
            cluster.create_topic("t", 2)
        with pytest.raises(TopicExistsError) as raised:
            cluster.admin.create_topic("t", 1, 2, exist_ok=True, segment_bytes=4096)
        assert (
            "It has 2 partitions, not 1; replication_factor 3, not 2; segment_bytes 2048, not 4096."
        ) in str(raised.value)
        # A broker that is down keeps no caller from using a topic that exists.
        fake3.call(lambda: fake3.topics["t"].partitions[0].isr.remove(3))
        cluster.create_topic("t", 2, exist_ok=True, timeout_s=30)


def test_a_replica_that_does_not_answer_is_shown_without_offsets(fake3: FakeCluster) -> None:
    fake3.create_topic("t")
    fake3.fault(DescribeReplica, disconnect=True, matches=lambda _request, broker: broker == 2)
    fake3.stop_broker(3)
    with fake3.cluster() as cluster:
        replicas = cluster.admin.describe_topic("t").partitions[0].replicas
    assert [replica.pid for replica in replicas] == [1001, None, None]
    assert replicas[2] == ReplicaInfo(3, None, None, None, None, None, None)


def test_creating_waits_for_leaders_and_full_in_sync_sets(
    fake3: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = fake3.make_topic

    def unready(*arguments: Any) -> Any:
        topic = create(*arguments)
        topic.partitions[0].isr = [1]
        if topic.name == "t":
            fake3.loop.call_later(0.2, get_ready)
        return topic

    monkeypatch.setattr(fake3, "make_topic", unready)

    def get_ready() -> None:
        fake3.topics["t"].partitions[0].isr = [1, 2, 3]
        fake3.bump_version()

    with fake3.cluster() as cluster:
        cluster.create_topic("t")
        assert fake3.topics["t"].partitions[0].isr == [1, 2, 3]
        with pytest.raises(TimeoutError, match="partition 0 lacks the replicas of brokers 2, 3"):
            cluster.admin.create_topic("u", timeout_s=2)


def test_creating_goes_on_for_as_long_as_replicas_come_in_sync(
    fake3: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = fake3.make_topic

    def unready(*arguments: Any) -> Any:
        topic = create(*arguments)
        for partition in topic.partitions:
            partition.isr = [1]
        fake3.loop.call_later(0.15, get_readier)
        return topic

    monkeypatch.setattr(fake3, "make_topic", unready)
    steps = [(number, isr) for number in range(10) for isr in ([1, 2], [1, 2, 3])]

    def get_readier() -> None:
        number, isr = steps.pop(0)
        fake3.topics["t"].partitions[number].isr = isr
        fake3.bump_version()
        if steps:
            fake3.loop.call_later(0.15, get_readier)

    with fake3.cluster() as cluster:
        began = time.monotonic()
        cluster.admin.create_topic("t", 10, timeout_s=2.5)
        assert time.monotonic() - began > 2.5


def test_what_a_topic_waited_for_is_told_and_not_how_the_last_question_ended(
    fake3: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake3.fault(Metadata, times=1000, is_lost=True, matches=lambda asked, _broker: bool(asked.topics))
    with fake3.cluster() as cluster, pytest.raises(TimeoutError, match="'t' exists, but for 2 s"):
        cluster.admin.create_topic("t", timeout_s=2)


def test_a_change_whose_answer_was_lost_is_repeated_under_the_same_id(fake3: FakeCluster) -> None:
    fake3.fault(CreateTopic, disconnect=True, carry_out=True)
    fake3.fault(DeleteTopic, disconnect=True, carry_out=True)
    with fake3.cluster() as cluster:
        cluster.create_topic("t")
        with pytest.raises(TopicExistsError):
            cluster.create_topic("t")
        first, second, third = (asked.request_id for asked in fake3.asked(CreateTopic))
        assert first == second != third
        cluster.admin.delete_topic("t")
        assert cluster.admin.list_topics() == []


def test_a_refusal_of_a_change_whose_answer_was_lost_says_that_it_may_have_been_made(
    fake3: FakeCluster,
) -> None:
    denied = AuthorizationError("You may not: rayq acl add you")
    fake3.fault(CreateTopic, error=denied)
    with fake3.cluster() as cluster:
        with pytest.raises(AuthorizationError, match=r"^You may not"):
            cluster.create_topic("t")
        fake3.fault(CreateTopic, disconnect=True, carry_out=True)
        fake3.fault(CreateTopic, error=denied)
        with pytest.raises(AuthorizationError, match=r"^CreateTopic may have been made .*acl add"):
            cluster.create_topic("t")


def test_a_change_that_could_not_be_sent_is_not_taken_for_done(
    fake3: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, live = (("127.0.0.1", fake3.brokers[broker].port) for broker in (2, 1))
    fake3.stop_broker(2)
    monkeypatch.setattr(Client, "addresses", lambda _self: [dead, live])
    with fake3.cluster() as cluster, pytest.raises(UnknownTopicError):
        cluster.admin.delete_topic("nope")


def test_why_a_change_was_refused_is_told_and_not_how_the_last_attempt_was_cut_short(
    fake3: FakeCluster,
) -> None:
    fake3.fault(CreateTopic, error=RemoteSlowError("the object store is not mounted"))
    fake3.fault(CreateTopic, times=1000, is_lost=True)
    with fake3.cluster() as cluster, pytest.raises(TimeoutError, match="is not mounted"):
        cluster.admin.create_topic("t", timeout_s=0.5)


def test_partitions_configs_and_leaders_are_changed(fake3: FakeCluster) -> None:
    with fake3.cluster() as cluster:
        cluster.create_topic("t")
        cluster.admin.create_partitions("t", 3)
        assert len(cluster.admin.describe_topic("t").partitions) == 3
        cluster.admin.alter_topic_config("t", **{"max.message.bytes": 4096})
        assert cluster.admin.describe_topic("t").config["max_message_bytes"] == 4096
        assert fake3.asked(AlterTopicConfig)[0].changes == {"max_message_bytes": 4096}
        cluster.admin.elect_leaders("t", [1])
        described = cluster.admin.describe_topic("t")
        assert [partition.leader for partition in described.partitions] == [1, 1, 3]


def test_records_are_deleted_up_to_an_offset(fake: FakeCluster, cluster: Cluster) -> None:
    fake.create_topic("t", partitions=2)
    fake.write("t", [b"v"] * 10, 0)
    fake.write("t", [b"v"] * 10, 1)
    first, second = TopicPartition("t", 0), TopicPartition("t", 1)
    assert cluster.admin.delete_records({first: 4, second: None}) == {first: 4, second: 10}
    with cluster.consumer() as consumer:
        assert consumer.beginning_offsets([first, second]) == {first: 4, second: 10}
    with pytest.raises(OffsetOutOfRangeError):
        cluster.admin.delete_records({first: 11})
    with pytest.raises(InvalidRequestError, match="offset from 0"):
        cluster.admin.delete_records({first: -1})
    with pytest.raises(InvalidRequestError, match="partitions 0 to 1"):
        cluster.admin.delete_records({TopicPartition("t", 2): 1})


def test_the_cluster_describes_itself(fake3: FakeCluster) -> None:
    with fake3.cluster() as cluster:
        info = cluster.admin.describe_cluster()
        assert info.cluster_id == fake3.cluster_id == cluster.cluster_id
        assert info.voters == [1, 2, 3]
        assert info.brokers[0] == BrokerInfo(1, "127.0.0.1", fake3.brokers[1].port, "node", True)


def test_a_broker_that_is_behind_a_change_does_not_tell_of_the_object_store(
    fake: FakeCluster, cluster: Cluster
) -> None:
    cluster.create_topic("t")
    gone = PinSummary("pin", "t", {0: 0}, 1000)

    def as_of_before(now: DescribeObjectStoreResponse, _: bytes) -> Any:
        return msgspec.structs.replace(now, pins=[gone], version=now.version - 1), b""

    fake.fault(DescribeObjectStore, times=2, change=as_of_before)  # asked each, then asked any
    assert cluster.admin.describe_object_store().pins == []


def test_bad_input_is_refused_with_a_typed_error(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="retention_ms"):
        cluster.create_topic("t", retension_ms=5)
    with pytest.raises(ConfigError, match="segment_bytes"):
        cluster.create_topic("t", segment_bytes=5)
    with pytest.raises(InvalidPartitionsError):
        cluster.create_topic("t", partitions=0)
    with pytest.raises(TypeError, match="partitions"):
        cluster.create_topic("t", partitions="3")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name must be a str"):
        cluster.create_topic(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="at least one key"):
        cluster.admin.alter_topic_config("t")


def test_the_admin_for_threads_has_every_method_of_the_other_with_its_help() -> None:
    def calls(kind: type) -> dict[str, Any]:
        members = inspect.getmembers(kind, inspect.isfunction)
        return {name: method for name, method in members if not name.startswith("_")}

    blocking, coroutines = calls(Admin), calls(AsyncAdmin)
    assert blocking.keys() == coroutines.keys() - {"close"}
    for name, method in blocking.items():
        assert inspect.signature(method) == inspect.signature(coroutines[name])
        assert method.__doc__ == coroutines[name].__doc__ and method.__doc__, name
        assert not inspect.iscoroutinefunction(method)
    shown = pydoc.plain(pydoc.render_doc(Admin.create_topic))
    assert "create_topic(self, name: 'str', partitions: 'int' = 1" in shown
    assert "exist_ok" in shown and "Creates a topic" in shown
