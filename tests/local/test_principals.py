"""Named principals in a whole cluster: they connect by a token, and may do what ACLs allow."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from pathlib import Path

import pytest

import rayq
from rayq import Acl, Cluster, QueueTask, TopicPartition, messages
from rayq.actors.broker.replica_supervisor import ReplicaSupervisor
from rayq.client.addresses import parse_addresses
from rayq.client.admin.admin import AsyncAdmin
from rayq.client.admin.dead_letters import DeadLetters
from rayq.client.client import Client
from rayq.client.environment import system_environment
from rayq.client.producing.producer import AsyncProducer
from rayq.config import ClusterConfig, ProducerConfig
from rayq.errors import (
    AuthenticationError,
    AuthorizationError,
    ConfigError,
    DeliveryError,
    TimeoutError,
)
from rayq.messages.acls import Operation, ResourceType
from rayq.runtime.layout import directory_path
from rayq.storage.data_directory import read_secret
from rayq.storage.disk import LocalDisk
from rayq.testing import LocalCluster
from rayq.wire.authentication import Identity
from tests.local.conftest import NewTopic
from tests.local.group_support import Coordinator
from tests.local.principal_support import Named, change
from tests.local.support import eventually, values


def told(
    caught: pytest.ExceptionInfo[AuthorizationError], who: Named, operation: str, resource: str
) -> None:
    """Checks that an error names principal, operation and resource, and the command that helps."""
    kind, name = resource.split()
    text = f"Principal {who.name!r} may not {operation} {kind} {name!r}"
    assert text in str(caught.value)
    assert str(caught.value).endswith(f"rayq acl add {who.name} {operation} {resource}")


def test_a_principal_changes_what_it_may_and_is_told_what_it_may_not(
    cluster: LocalCluster, topic: str
) -> None:
    anna = Named(cluster, ("create", "topic", f"of-{topic}"))
    with anna.connect() as connection:
        connection.create_topic(f"of-{topic}")
        for attempt, command in (
            (lambda: connection.admin.delete_topic(topic), f"delete topic {topic}"),
            (lambda: connection.create_topic("other"), "create topic other"),
            (lambda: connection.admin.elect_leaders(topic), "alter cluster cluster"),
        ):
            with pytest.raises(AuthorizationError) as caught:
                attempt()
            assert str(caught.value).startswith(f"Principal {anna.name!r} may not ")
            assert str(caught.value).endswith(f"rayq acl add {anna.name} {command}")
    assert topic in cluster.admin.list_topics()


@pytest.mark.parametrize("way", ["argument", "environment", "file"])
def test_each_way_to_give_a_token_takes_that_of_a_principal(
    cluster: LocalCluster, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    anna = Named(cluster)
    monkeypatch.delenv("RAYQ_TOKEN", raising=False)
    monkeypatch.setenv("RAYQ_HOME", str(tmp_path))
    text = f" {anna.token.text}\n"
    if way == "environment":
        monkeypatch.setenv("RAYQ_TOKEN", text)
    elif way == "file":
        (tmp_path / "token").write_text(text)
    given = text if way == "argument" else None
    with rayq.connect(cluster.addresses[0], token=given) as connection:
        assert connection.token == anna.token.text
        with pytest.raises(AuthorizationError, match=f"Principal '{anna.name}' may not create"):
            connection.create_topic("other")
        with pickle.loads(pickle.dumps(connection)) as again:
            assert again.token == anna.token.text
    cluster.make_current()


def test_principals_of_one_process_share_no_connection(cluster: LocalCluster, topic: str) -> None:
    anna, ben = Named(cluster, ("delete", "topic", topic)), Named(cluster)
    with anna.connect() as hers, ben.connect() as his:
        assert hers.admin.list_topics() == [topic]
        assert his.admin.list_topics() == []  # Both are connected.
        with pytest.raises(AuthorizationError, match=ben.name):
            his.admin.delete_topic(topic)
        hers.admin.delete_topic(topic)


def test_the_error_for_a_cut_or_wrong_token_does_not_show_it(
    cluster: LocalCluster,
) -> None:
    anna, other = Named(cluster), Named(cluster)
    at = cluster.addresses[0]
    with pytest.raises(ConfigError, match="not a rayq token") as cut:
        rayq.connect(at, token=anna.token.text[:-1])
    assert anna.token.text[-20:-1] not in str(cut.value)
    swapped = anna.token.text.replace(anna.name, other.name)
    nobody = anna.token.text.replace(anna.name, "nobody")
    for text, name in ((swapped, other.name), (nobody, "nobody")):
        with (
            rayq.connect(at, token=text) as connection,
            pytest.raises(AuthenticationError, match=f"'{name}'.*revoked or expired") as caught,
        ):
            connection.admin.list_topics()
        assert text not in str(caught.value)
    cluster.make_current()


def test_an_illegal_client_id_is_refused_before_any_request() -> None:
    for name in ("x" * 65, "a\nb"):
        with pytest.raises(ConfigError, match="client_id"):
            Cluster("127.0.0.1:1", b"key", client_id=name)


def test_a_revoked_token_ends_its_connections_and_no_others(cluster: LocalCluster) -> None:
    anna = Named(cluster)
    _, new = anna.create_token()
    with anna.connect() as old_connection, anna.connect(new) as connection:
        old_connection.admin.list_topics()
        connection.admin.list_topics()
        anna.revoke()

        def is_refused() -> bool:
            try:
                old_connection.admin.list_topics(timeout_s=5)
            except AuthenticationError:
                return True
            return False

        eventually(is_refused, "the old token is refused")
        connection.admin.list_topics()


def send(cluster: Cluster, topic: str, value: bytes) -> None:
    with cluster.producer() as producer:
        producer.send(topic, value=value).result(60)


def test_a_principal_produces_and_consumes_what_it_may(
    cluster: LocalCluster, topic: str, new_topic: NewTopic
) -> None:
    group, other = f"group-of-{topic}", new_topic()
    anna = Named(
        cluster,
        ("write", "topic", topic),
        ("read", "topic", topic),
        ("read", "group", group),
        ("describe", "topic", other),
    )
    send(cluster, other, b"secret")
    with anna.connect() as connection:
        with connection.producer() as producer:
            producer.send(topic, value=b"v").result(60)
            refused = producer.send(other, value=b"v")
            with pytest.raises(AuthorizationError) as caught:
                refused.result(60)
            told(caught, anna, "write", f"topic {other}")
            with pytest.raises(DeliveryError, match="AuthorizationError"):
                producer.flush()
        with connection.consumer(topic, group=group, auto_offset_reset="earliest") as consumer:
            assert values(consumer.until_end(60)) == [b"v"]
            consumer.commit()
        with connection.consumer(topic, group=group) as consumer:
            assert values(consumer.until_end(60)) == []
        with (
            connection.consumer(other, auto_offset_reset="earliest") as consumer,
            pytest.raises(AuthorizationError) as caught,
        ):
            list(consumer.until_end(60))
        told(caught, anna, "read", f"topic {other}")
        with (
            connection.consumer(topic, group=f"not-{group}") as consumer,
            pytest.raises(AuthorizationError) as caught,
        ):
            list(consumer.until_end(60))
        told(caught, anna, "read", f"group not-{group}")


def test_a_producer_id_is_for_who_may_write_to_some_topic(
    cluster: LocalCluster, topic: str, new_topic: NewTopic
) -> None:
    """The ids of all producers are one counter in the metadata."""
    other = new_topic()
    stranger = Named(cluster)
    anna = Named(cluster, ("write", "topic", topic), ("describe", "topic", other))

    def ask(connection: Cluster, name: str | None) -> int:
        client, background = connection.shared_client()
        asking = client.ask_any(messages.AllocateProducerId(name), timeout_s=60)
        return int(background.run(asking).producer_id)

    with stranger.connect() as his, anna.connect() as hers:
        before = ask(cluster, None)
        for name in (topic, other, "not-there"):
            with pytest.raises(AuthorizationError) as caught:
                ask(his, name)
            told(caught, stranger, "write", f"topic {name}")
        for connection in (his, hers):
            with pytest.raises(AuthorizationError, match="may not alter the cluster"):
                ask(connection, None)
        with pytest.raises(AuthorizationError) as caught:
            ask(hers, other)
        told(caught, anna, "write", f"topic {other}")
        assert len({before, ask(hers, topic), ask(cluster, None)}) == 3
        with hers.producer() as producer:
            with pytest.raises(AuthorizationError) as caught:
                producer.send(other, value=b"v").result(60)
            told(caught, anna, "write", f"topic {other}")
            producer.send(topic, value=b"v").result(60)
            with pytest.raises(DeliveryError, match="AuthorizationError"):
                producer.flush()


def test_a_commit_needs_the_topics_that_it_names_wherever_they_are_hosted(
    cluster: LocalCluster, topic: str, new_topic: NewTopic
) -> None:
    group, other = f"group-of-{topic}", new_topic()
    anna = Named(cluster, ("read", "topic", topic), ("read", "group", group))
    change(cluster, messages.EnsureOffsetsTopic())
    ids = {name: cluster.admin.describe_topic(name).topic_id for name in (topic, other)}

    async def commit(client: Client, name: str) -> None:
        offset = messages.OffsetCommit(ids[name], 0, 0, None, "")
        await Coordinator(client).ask(messages.CommitOffsets, group, "", 0, 0, [offset])

    with anna.connect() as connection:
        client, background = connection.shared_client()
        background.run(commit(client, topic))
        with pytest.raises(AuthorizationError, match="may not read a topic that this Commit"):
            background.run(commit(client, other))
        known = cluster.admin.describe_group(group).partitions
        assert list(known) == [TopicPartition(topic, 0)]


def test_a_principal_works_on_the_queues_that_it_may_and_their_topics(
    cluster: LocalCluster, topic: str
) -> None:
    name = f"queue-of-{topic}"
    cluster.create_queue(name, topic=topic).close()
    send(cluster, topic, b"v")
    described: list[tuple[Operation, ResourceType, str]] = [
        ("describe", "queue", name), ("describe", "topic", topic)
    ]  # fmt: skip
    anna = Named(cluster, ("read", "queue", name), *described)
    ben = Named(cluster, ("read", "topic", topic), *described)
    for who, missing in ((anna, f"topic {topic}"), (ben, f"queue {name}")):
        with (
            who.connect() as connection,
            connection.queue(name) as queue,
            pytest.raises(AuthorizationError) as caught,
        ):
            queue.take(1, 60)
        told(caught, who, "read", missing)
    anna.allow(("read", "topic", topic))
    with anna.connect() as connection, connection.queue(name) as queue:

        def takes() -> list[QueueTask]:
            try:
                return queue.take(1, 60)
            except AuthorizationError:
                return []

        taken: list[QueueTask] = []
        eventually(lambda: bool(taken or taken.extend(takes()) or taken), "it takes the record")
        assert taken[0].value == b"v"
        taken[0].ack()


def test_a_queue_that_is_hidden_for_a_while_is_taken_from_again_and_its_acks_hold(
    cluster: LocalCluster, topic: str
) -> None:
    name = f"queue-hidden-{topic}"
    cluster.create_queue(name, topic=topic).close()
    send(cluster, topic, b"first")
    anna = Named(cluster, ("read", "queue", name), ("read", "topic", topic))
    with anna.connect() as connection, connection.queue(name) as queue:
        (first,) = queue.take(1, 60)
        anna.forbid(("read", "queue", name))

        def is_denied() -> bool:
            try:
                queue.take(1, 1)
            except AuthorizationError as error:
                return "describe queue" in str(error)  # The queue was looked up.
            return False

        eventually(is_denied, "it may take no more")
        first.ack()
        with pytest.raises(TimeoutError):
            queue.flush(1)
        anna.allow(("read", "queue", name))
        queue.flush(60)
        send(cluster, topic, b"second")
        taken: list[QueueTask] = []

        def takes() -> bool:
            with contextlib.suppress(AuthorizationError):
                taken.extend(queue.take(1, 1))
            return bool(taken)

        eventually(takes, "it takes again")
        assert taken[0].value == b"second"
        taken[0].ack()


def test_dead_letters_that_are_hidden_are_not_said_to_be_none(
    cluster: LocalCluster, topic: str
) -> None:
    name = f"queue-dying-{topic}"
    cluster.create_queue(name, topic=topic).close()
    anna = Named(cluster, ("read", "queue", name), ("read", "topic", topic))
    with anna.connect() as connection:
        client, background = connection.shared_client()
        letters = DeadLetters(client, name, timeout_s=60)
        with pytest.raises(AuthorizationError, match=f"{name}.dead"):
            background.run(letters.topic())


def test_the_right_to_describe_the_cluster_gives_the_metrics_of_each_process(
    tmp_path: Path, store: Path
) -> None:
    with LocalCluster(1, tmp_path / "data", remote_storage_url=store.as_uri()) as cluster:
        cluster.create_topic("orders")
        anna, ben = Named(cluster, ("describe", "cluster", "cluster")), Named(cluster)

        def processes(who: Named) -> list[float]:
            with who.connect() as connection:
                try:
                    samples = connection.metrics()
                except AuthorizationError:
                    return []
            return [sample.value for sample in samples if sample.name == "rayq_process_up"]

        # A broker, a replica process, the object server and the controller.
        eventually(lambda: processes(anna) == [1.0] * 4, "anna hears from each process")
        assert processes(ben) == []


def test_a_server_that_acts_for_a_principal_may_what_the_principal_may(
    cluster: LocalCluster, topic: str, new_topic: NewTopic
) -> None:
    """A gateway holds the secret and no token: it has found out by itself for whom it acts."""
    other = new_topic()
    anna = Named(cluster, ("write", "topic", topic), ("describe", "topic", other))
    anna.revoke()  # No token is needed.
    secret = read_secret(LocalDisk(), directory_path(cluster.data_dir, 0))

    async def act() -> None:
        gateway = Identity(
            role="server", key=secret, cluster_id=None, broker=None, acts_for=anna.name
        )
        bootstrap = parse_addresses(cluster.addresses)
        client = Client(system_environment(), gateway, bootstrap, ClusterConfig(), name="gateway")
        try:
            producer = AsyncProducer(client, ProducerConfig())
            await (await producer.send(topic, b"v"))
            with pytest.raises(AuthorizationError) as caught:
                await (await producer.send(other, b"v"))
            told(caught, anna, "write", f"topic {other}")
            with pytest.raises(DeliveryError):
                await producer.close()
            with pytest.raises(AuthorizationError) as caught:
                await AsyncAdmin(client).create_topic("of-the-gateway")
            told(caught, anna, "create", "topic of-the-gateway")
            # What servers ask each other is not for it.
            at = bootstrap[0]
            with pytest.raises(AuthenticationError, match="is for the cluster's servers"):
                await client.ask(at, messages.FindController(), timeout_s=60)
        finally:
            client.close()

    asyncio.run(act())
    change(cluster, messages.DeletePrincipal(anna.name))
    with pytest.raises(AuthenticationError, match=f"no principal '{anna.name}' to act for"):
        asyncio.run(act())


def test_without_principals_nothing_is_pushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[messages.ReplicaHostHeartbeatResponse] = []
    heartbeat = ReplicaSupervisor.heartbeat

    async def listen(
        self: ReplicaSupervisor, request: messages.ReplicaHostHeartbeat
    ) -> messages.ReplicaHostHeartbeatResponse:
        heard.append(await heartbeat(self, request))
        return heard[-1]

    monkeypatch.setattr(ReplicaSupervisor, "heartbeat", listen)
    with LocalCluster(1, tmp_path / "data", heartbeat_interval_ms=50) as cluster:
        cluster.create_topic("orders")
        send(cluster, "orders", b"v")
        eventually(lambda: len(heard) > 5, "heartbeats are answered")
        assert all(answer.access is None for answer in heard)
        anna = Named(cluster)
        eventually(lambda: heard[-1].access is not None, "the process is told of her")
        change(cluster, messages.DeletePrincipal(anna.name))
        eventually(lambda: heard[-1].access is None, "the process knows that she is gone")


def test_a_rule_for_a_host_counts_for_connections_from_there_whatever_their_port(
    cluster: LocalCluster, topic: str
) -> None:
    anna = Named(cluster, ("alter_configs", "topic", topic), ("create", "topic", f"of-{topic}"))
    here, there = (
        Acl(anna.name, "deny", "all", "topic", name, host=host)
        for name, host in ((topic, "127.0.0.1"), (f"of-{topic}", "127.0.0.2"))
    )
    change(cluster, messages.CreateAcls([here, there]))
    with anna.connect() as connection:
        connection.create_topic(f"of-{topic}")
        with pytest.raises(AuthorizationError, match="an ACL says"):
            connection.admin.alter_topic_config(topic, retention_ms=1)
