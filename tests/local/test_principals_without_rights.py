"""A principal without rights: each request of clients is refused, names are in no answer, and
nothing changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from proving.raw_socket import RawSocket
from rayq import messages
from rayq.core.cluster.records import ProducerIdsAllocated, RequestDone
from rayq.core.cluster.topic_changes import AUDIT_TOPIC, OWN_TOPICS
from rayq.errors import AuthorizationError, RayqError, UnknownQueueError, UnknownTopicError
from rayq.messages import AnyRequest
from rayq.messages.acls import Acl, ResourceType
from rayq.testing import LocalCluster
from rayq.wire.codec import ENCODER, decode_error
from tests.local.generated_requests import OF_CLIENTS, Generator
from tests.local.principal_support import Named, change
from tests.local.support import eventually, leader_endpoint

Address = tuple[str, int]
OPEN_TO_ALL = (
    messages.Metadata,
    messages.DescribeQueues,
    messages.ListGroups,
    messages.ListTransactions,
    messages.DescribePrincipals,
    messages.DescribeAcls,
    messages.DescribeQuotas,
    messages.ConfirmMetadata,
    messages.EnsureOffsetsTopic,
    messages.EnsureTransactionsTopic,
)
"""Requests that each principal may send. Their answers have what it may describe, and nothing that
was not there before changes by them but numbers."""
REFUSALS = (AuthorizationError, UnknownTopicError, UnknownQueueError)
EACH = 10
"""Number of requests of each class."""


class Stage:
    """A cluster with one of each resource, whose names are to be hidden."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        cluster.create_topic("secret-orders", remote_storage=True)
        cluster.create_topic("mine")
        cluster.create_queue("secret-payroll", topic="mine", ordered_by_key=True).close()
        cluster.create_queue("secret-mails", topic="secret-orders").close()
        with cluster.producer(transactional_id="secret-transfers") as producer, producer.transaction():
            producer.send("secret-orders", b"v")
        self.consumer = cluster.consumer(
            "secret-orders", group="secret-billing", group_instance_id="secret-instance",
            auto_offset_reset="earliest",
        )
        self.consumer.poll(10)
        self.consumer.commit()
        self.ben = Named(cluster, ("read", "topic", "secret-orders"))
        self.stranger = Named(cluster)
        eventually(self._has_audit, "the audit has a leader")
        topics = cluster.admin.list_topics(internal=True)
        described = {name: cluster.admin.describe_topic(name) for name in topics}
        self.topic_ids = {name: info.topic_id for name, info in described.items()}
        self.leader_epochs = {
            info.topic_id: info.partitions[0].leader_epoch for info in described.values()
        }
        topic_id = self.topic_ids["secret-orders"]
        change(cluster, messages.PinSnapshot(
            pin_id="secret-pin", topic_id=topic_id, starts={0: 0}, ttl_ms=3_600_000,
        ))  # fmt: skip
        self.queue_ids = {
            name: cluster.admin.describe_queue(name).queue_id for name in cluster.admin.list_queues()
        }
        self.names = {
            *self.topic_ids, *self.queue_ids, "secret-billing", "secret-transfers", "secret-pin",
            "secret-instance", self.ben.name,
        } - {"mine", *OWN_TOPICS}  # fmt: skip
        host, _, port = cluster.addresses[0].rpartition(":")
        self.broker: Address = host, int(port)
        self.leaders = {
            topic_id: leader_endpoint(cluster, name) for name, topic_id in self.topic_ids.items()
        }

    def _has_audit(self) -> bool:
        admin = self.cluster.admin
        if AUDIT_TOPIC not in admin.list_topics(internal=True):
            return False
        (partition,) = admin.describe_topic(AUDIT_TOPIC).partitions
        return partition.leader is not None

    def generator(self, seed: int, words: Iterable[str] = ()) -> Generator:
        """Requests with these names; with those of all that is secret by default."""
        ids = {*self.topic_ids.values(), *self.queue_ids.values()}
        return Generator(
            seed,
            values={
                "topic_id": list(self.topic_ids.values()),
                "queue_id": list(self.queue_ids.values()),
                "group": ["secret-billing"],
                "transactional_id": ["secret-transfers"],
                "pin_id": ["secret-pin"],
                "instance": ["secret-instance", None],
                "timeout_ms": [1],
                "config": [{}, {"retention": "hold"}, {"min_insync_replicas": 1}],
                "changes": [{"retention_ms": 1}],
                "topic_config": [{}],
            },
            words=[*sorted(words or self.names), *sorted(ids)],
            leader_epochs=self.leader_epochs,
        )

    def address_of(self, request: AnyRequest) -> Address:
        """A process that would answer."""
        if isinstance(request, messages.ToPartition):
            return self.leaders[request.topic_id]
        if isinstance(request, messages.DescribeMetrics):
            return self.leaders[self.topic_ids["secret-orders"]]
        return self.broker

    def state(self) -> dict[str, Any]:
        """All that requests could change."""
        cluster, servers = self.cluster, self.cluster._servers
        assert servers is not None
        passing = (RequestDone, ProducerIdsAllocated)
        metadata = [
            record
            for record in servers.brokers[0].metadata.state.snapshot()
            if not isinstance(record, passing)
        ]
        queues = {name: cluster.admin.describe_queue(name) for name in self.queue_ids}
        return {
            "metadata": metadata,
            "group": cluster.admin.describe_group("secret-billing"),
            "transactions": cluster.admin.list_transactions(idle=True),
            "queues": {
                name: [(part.start_offset, part.ready, part.locked) for part in info.partitions]
                for name, info in queues.items()
            },
            "ends": {
                name: cluster.admin.describe_topic(name).partitions[0].replicas[0].log_end_offset
                for name in self.topic_ids
                if name != AUDIT_TOPIC  # It has the denials.
            },
        }


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with _stage(tmp_path_factory.mktemp("strangers")) as stage:
        yield stage


@pytest.fixture
def own_stage(tmp_path: Path) -> Iterator[Stage]:
    """A stage of the test's own."""
    with _stage(tmp_path) as stage:
        yield stage


@contextlib.contextmanager
def _stage(root: Path) -> Iterator[Stage]:
    (root / "store").mkdir()
    with LocalCluster(
        1,
        root / "data",
        remote_storage_url=(root / "store").as_uri(),
        offsets_topic_partitions=1,
        transaction_state_partitions=1,
        queue_state_partitions=1,
    ) as cluster:
        stage = Stage(cluster)
        yield stage
        stage.consumer.close()


class Connections:
    """Raw connections of a principal, one to each process."""

    def __init__(self, who: Named) -> None:
        self._who = who
        self._open: dict[Address, RawSocket] = {}

    def ask(self, at: Address, requests: list[AnyRequest]) -> list[tuple[bool, bytes]]:
        """Whether each answer is an error, and all of its bytes."""
        if at not in self._open:
            self._open[at] = RawSocket(at, timeout_s=60)
            self._open[at].authenticate(self._who.token)
        self._open[at].ask(requests, b"payload")
        answers: dict[int, tuple[bool, bytes]] = {}
        while len(answers) < len(requests):
            number, is_error, header, payload = self._open[at].read_frame()
            answers[number] = is_error, header + payload
        return [answers[number] for number in sorted(answers)]

    def close(self) -> None:
        for connection in self._open.values():
            connection.close()


def check_hidden(stage: Stage, request: AnyRequest, is_error: bool, answer: bytes) -> None:
    """Checks that an answer is a refusal, if the request is not open to all, and has no name of
    what exists but those that the request gives."""
    what = f"{request} was answered {answer!r}"
    if is_error:
        error = decode_error(answer)
        is_open = isinstance(request, OPEN_TO_ALL)
        assert isinstance(error, REFUSALS) or (is_open and isinstance(error, RayqError)), what
    else:
        assert isinstance(request, OPEN_TO_ALL), what
    given = ENCODER.encode(request)
    for name in stage.names:
        assert name.encode() in given or name.encode() not in answer, f"{name}: {what}"


@pytest.mark.parametrize(
    "seeds", [range(1), pytest.param(range(1, 40), marks=pytest.mark.thorough)], ids=["one", "many"]
)
def test_a_stranger_is_refused_hears_no_name_and_changes_nothing(
    stage: Stage, seeds: range
) -> None:
    before = stage.state()
    connections = Connections(stage.stranger)
    for seed in seeds:
        generator = stage.generator(seed)
        by_address: dict[Address, list[AnyRequest]] = {}
        for kind in OF_CLIENTS:
            for _ in range(EACH):
                request = generator.make(kind)
                by_address.setdefault(stage.address_of(request), []).append(request)
        for at, requests in by_address.items():
            for request, answer in zip(requests, connections.ask(at, requests), strict=True):
                check_hidden(stage, request, *answer)
    connections.close()
    assert stage.state() == before


def test_each_topic_and_queue_is_tried_with_each_request_about_it(stage: Stage) -> None:
    connections = Connections(stage.stranger)
    generator = stage.generator(0)
    for name, topic_id in stage.topic_ids.items():
        requests = [
            generator.make(kind, topic_id=topic_id)
            for kind in OF_CLIENTS
            if issubclass(kind, messages.ToPartition)
        ]
        for request, answer in zip(
            requests, connections.ask(stage.leaders[topic_id], requests), strict=True
        ):
            check_hidden(stage, request, *answer)
            if name not in OWN_TOPICS:
                assert isinstance(decode_error(answer[1]), UnknownTopicError)
    connections.close()


def test_a_principal_with_all_other_rights_never_hears_of_hidden_topics_and_queues(
    own_stage: Stage,
) -> None:
    stage, anna = own_stage, own_stage.stranger
    hidden = {*stage.topic_ids, *stage.queue_ids} & stage.names
    everything: tuple[ResourceType, ...] = (
        "topic", "group", "queue", "transactional_id", "principal"
    )  # fmt: skip
    anna.allow(("all", "cluster", "cluster"), *(("all", kind, "*") for kind in everything))
    denied = [
        Acl(anna.name, "deny", "all", kind, name) for kind in ("topic", "queue") for name in hidden
    ]
    change(stage.cluster, messages.CreateAcls(denied))
    connections = Connections(anna)
    generator = stage.generator(0, ["mine"] * 20 + ["other"])
    # They end the test, or show rules and the audit, which name what is hidden.
    left_out = (
        messages.CordonBroker, messages.DeletePrincipal, messages.DeleteAcls, messages.DeleteTopic,
        messages.DescribeAcls, messages.ReadAudit,
    )  # fmt: skip
    kinds = [kind for kind in OF_CLIENTS if kind not in left_out]
    answered = 0
    for _ in range(EACH):
        for kind in kinds:
            request = generator.make(kind)
            ((is_error, answer),) = connections.ask(stage.address_of(request), [request])
            answered += not is_error
            for name in hidden:
                assert name.encode() not in answer, f"{name}: {request} was answered {answer!r}"
    connections.close()
    assert answered > len(kinds)


def test_a_denial_that_hides_a_name_is_in_the_audit_with_it(stage: Stage) -> None:
    claire = Named(stage.cluster)
    connections = Connections(claire)
    topic_id = stage.topic_ids["secret-orders"]
    request = messages.DescribeReplica(topic_id, 0)
    ((is_error, answer),) = connections.ask(stage.leaders[topic_id], [request])
    assert is_error and b"secret" not in answer
    connections.close()

    offset: int | None = None

    def is_told() -> bool:
        nonlocal offset
        lines, offset, _ = stage.cluster.admin.read_audit(offset=offset)
        return any(
            line.principal == claire.name and "secret-orders" in line.what for line in lines
        )

    eventually(is_told, "the audit has the denial")
