"""Requests that cost a server more than they look: each kind, as large as it may be, and in a row.

The bounds are far above what is measured (a twentieth of a second at most), and far below what
would make a broker take a process for dead.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
from msgspec import inspect

from proving.raw_socket import RawSocket
from rayq import messages
from rayq.actors.controller.controller import Controller
from rayq.actors.groups.group_coordinator import GroupCoordinator
from rayq.client.admin import groups
from rayq.client.consuming import group_offsets
from rayq.client.producing import transaction_core
from rayq.core.cluster.topic_changes import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from rayq.core.groups import changes as group_changes
from rayq.core.groups.records import partition_of_group
from rayq.errors import RayqError
from rayq.messages import REQUESTS, AnyRequest
from rayq.records import TopicPartition
from rayq.testing import LocalCluster
from rayq.wire.accepted_connection import CLIENT_HEADER_BYTES_MAX, REQUESTS_PER_TURN
from rayq.wire.codec import ENCODER
from rayq.wire.server import Server
from rayq.wire.tokens import key_of_token
from tests.local.support import ask, client_identity, leader_endpoint

COST_S_MAX = 1.0
"""The most processor time that one request may cost, on a slow machine."""
TEXT = "x" * 64
PARTITIONS = 50


def largest(kind: inspect.Type, place: int | None = None) -> Any:
    """A value of a type that is as large as it may be, within reason. `place` is where it stands in
    a list or map."""
    number = place or 0
    match kind:
        case inspect.UnionType(types=types):
            of = {
                type(option): option for option in types if not isinstance(option, inspect.NoneType)
            }
            return largest(of.get(inspect.ListType) or next(iter(of.values())), place)
        case inspect.ListType(item_type=item, max_length=length):
            bytes_of_item = len(ENCODER.encode(largest(item, 0)))
            room = CLIENT_HEADER_BYTES_MAX * 8 // 10 // bytes_of_item if place is None else 3
            return [largest(item, index) for index in range(min(length or 0, room))]
        case inspect.DictType(key_type=key, value_type=value, max_length=length):
            return {largest(key, index): largest(value, index) for index in range(length or 0)}
        case inspect.TupleType(item_types=types):
            return tuple(largest(option, place) for option in types)
        case inspect.StructType(fields=fields, cls=cls) | inspect.NamedTupleType(
            fields=fields, cls=cls
        ):
            return cls(**{field.name: largest(field.type, place) for field in fields})
        case inspect.IntType(ge=least, le=most):
            lowest = max(number, int(least or 0))
            return lowest if most is None else min(lowest, int(most))
        case inspect.FloatType():
            return 0.5
        case inspect.BoolType():
            return True
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.StrType():
            return f"{number}{TEXT}"[:64]
        case inspect.BytesType(max_length=length):
            return bytes(length or 0)
    raise AssertionError(kind)


class Attacked:
    """A cluster of one broker, with a topic, a queue, a group and a transaction."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        cluster.create_topic("t", partitions=PARTITIONS)
        cluster.create_topic("spare")
        cluster.admin.create_queue("q", topic="t")
        with cluster.producer(transactional_id="id") as producer, producer.transaction():
            for number in range(PARTITIONS):
                producer.send("t", b"x" * 100, partition=number)
        with cluster.consumer("t", group="g", auto_offset_reset="earliest") as consumer:
            consumer.poll(30.0)
            consumer.commit()
        self.leaders = {
            name: self._leader(name, key)
            for name, key in (("t", None), (OFFSETS_TOPIC, "g"), (TRANSACTIONS_TOPIC, "id"))
        }
        host, _, port = cluster.addresses[0].rpartition(":")
        self.broker = host, int(port)
        answer: Any = self.ask(messages.DescribeQueues(["q"]))
        self.queue_id = answer.queues[0].queue_id

    def _leader(self, name: str, key: str | None) -> Leader:
        info = self.cluster.admin.describe_topic(name)
        number = 0 if key is None else partition_of_group(key, len(info.partitions))
        return Leader(
            leader_endpoint(self.cluster, name, number),
            (info.topic_id, number, info.partitions[number].leader_epoch),
        )

    def ask(self, request: AnyRequest, at: tuple[str, int] | None = None) -> Any:
        return ask(at or self.broker, client_identity(self.cluster), request, timeout_s=60)

    def connect(self, at: tuple[str, int]) -> RawSocket:
        client = RawSocket(at, timeout_s=60)
        client.authenticate(key_of_token(self.cluster.token))
        return client

    def leader_for(self, kind: type[AnyRequest]) -> Leader:
        if issubclass(kind, messages.ToCoordinator):
            if kind.__module__ == messages.InitProducer.__module__:
                return self.leaders[TRANSACTIONS_TOPIC]
            return self.leaders[OFFSETS_TOPIC]
        return self.leaders["t"]

    def build(self, kind: type[AnyRequest]) -> tuple[tuple[str, int], AnyRequest]:
        """The largest request of its kind, and where it is answered."""
        struct = inspect.type_info(kind)
        assert isinstance(struct, inspect.StructType)
        fields = {field.name: largest(field.type) for field in struct.fields}
        leader, at = self.leader_for(kind), self.broker
        topic_id, partition, leader_epoch = leader.place
        t_id = self.leaders["t"].place[0]
        if issubclass(kind, messages.ToPartition):
            at = leader.endpoint
        known: dict[str, Any] = KNOWN | {
            "topic_id": topic_id,
            "partition": partition,
            "leader_epoch": leader_epoch,
            "queue_id": self.queue_id,
        }
        if kind in DESTRUCTIVE:
            known["name"] = "spare"
        elif kind is messages.CommitOffsets:
            known |= {"member": "", "group": "h"}
        elif kind is messages.ElectLeaders:
            known["partitions"] = list(range(PARTITIONS)) * 200
        elif kind in (messages.CreateTopic, messages.CreateQueue):
            known |= {"name": "new", "topic": "t", "partitions": 1}
        for name, value in fields.items():
            is_of_partitions = isinstance(value, list) and isinstance(value[0], tuple)
            if is_of_partitions and isinstance(value[0][0], str):
                    fields[name] = [(t_id, place, *entry[2:]) for place, entry in enumerate(value)]
        fields |= {name: value for name, value in known.items() if name in fields}
        return at, kind(**fields)


class Leader(NamedTuple):
    endpoint: tuple[str, int]
    place: tuple[str, int, int]
    """Topic id, partition and leader epoch."""


KNOWN: dict[str, Any] = {
    "group": "g",
    "member": "member",
    "member_epoch": 0,
    "topic": "t",
    "name": "t",
    "request_id": None,
    "transactional_id": "id",
    "transaction_timeout_ms": 60_000,
    "instance": None,
    "topics": [f"t{number}" for number in range(group_changes.TOPICS_MAX)],
    "pattern": "(.?){249}",
    "assignor": "range",
    "session_timeout_ms": 60_000,
    "wait_ms": 0,
    "timeout_ms": 1000,
    "version_min": 0,
    "isolation": messages.READ_COMMITTED,
    "last_epoch": None,
    "cordoned": False,
    "after": "",
    "transaction": None,
    "to_topic": None,
    "states": [],
    "replication_factor": 1,
    "config": {},
    "topic_config": {},
    "throttle_bytes_per_s": None,
    "max_poll_interval_ms": 60_000,
    "total": PARTITIONS + 10,
    "changes": {"retention_ms": 1_000_000_000},
    "moves": [("t", number, [0]) for number in range(PARTITIONS)],
    "starts": dict.fromkeys(range(PARTITIONS), 0),
}
"""Values that requests are not refused for before they have cost anything."""
DESTRUCTIVE = (messages.DeleteTopic, messages.EndRemoteStorage, messages.RemoveBroker)
CLIENT_REQUESTS = [kind for _, kind in sorted(REQUESTS.items()) if kind.sent_by_clients]


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    with LocalCluster(brokers=1, data_dir=tmp_path_factory.mktemp("attacked")) as cluster:
        yield Attacked(cluster)


def cost_s(client: RawSocket, request: AnyRequest) -> tuple[float, str]:
    began_s = time.process_time()
    client.ask([request])
    try:
        answer = f"{len(client.read_header())} bytes"
    except RayqError as error:
        answer = f"{type(error).__name__}: {error}"
    return time.process_time() - began_s, answer


@pytest.mark.slow
def test_the_largest_request_of_each_kind_costs_little(attacked: Attacked) -> None:
    too_costly = []
    for kind in CLIENT_REQUESTS:
        at, request = attacked.build(kind)
        client = attacked.connect(at)
        took_s, answer = cost_s(client, request)
        client.close()
        told = f"{kind.__name__:28} {took_s * 1000:8.1f} ms  {answer[:100]}"
        print(told)  # noqa: T201 - for whoever runs it with -s
        if took_s > COST_S_MAX:
            too_costly.append(told)
    assert not too_costly


def requests_of_old(attacked: Attacked) -> dict[str, tuple[Leader | None, AnyRequest]]:
    """Requests of some KB that cost seconds once."""
    queue, group = attacked.leaders["t"], attacked.leaders[OFFSETS_TOPIC]
    settle = messages.Settle(*queue.place, attacked.queue_id, "holder", 0)
    ranges = {"acks": (0, 255, 1), "extends": (0, 255, 1, 1000), "nacks": (0, 255, 1, None)}
    costly: dict[str, tuple[Leader | None, AnyRequest]] = {
        f"10,000 {name} of one block": (
            queue, msgspec.structs.replace(settle, **{name: [places] * 10_000})
        )
        for name, places in ranges.items()
    }
    keys: dict[str, Any] = {f"k{number}": number for number in range(200_000)}
    lists: dict[str, Any] = {"a": [[]] * 1_000_000}
    positions: list[Any] = [("x" * 32, number, 1, 0, "") for number in range(60_000)]
    return costly | {
        "700,000 elections": (None, messages.ElectLeaders("t", [0] * 700_000, False)),
        "200,000 keys": (None, messages.AlterTopicConfig("t", keys)),
        "a million lists": (None, messages.CreateTopic("u", 1, 1, lists)),
        "100,000 moves": (None, messages.AlterReassignments([("t", 0, [0])] * 100_000)),
        "60,000 positions": (
            group, messages.CommitOffsets(*group.place, "g", "", 0, 1, positions)
        ),
        "a million states": (
            queue,
            messages.ListQueueRecords(*queue.place, attacked.queue_id, 0, [""] * 1_000_000, 1),
        ),
    }


def test_what_cost_seconds_is_refused_at_once_and_says_why(attacked: Attacked) -> None:
    for what, (leader, request) in requests_of_old(attacked).items():
        client = attacked.connect(attacked.broker if leader is None else leader.endpoint)
        took_s, answer = cost_s(client, request)
        client.close()
        assert took_s < COST_S_MAX, what
        assert "length <=" in answer or "go into one" in answer or "Expected" in answer, what


def _read(client: RawSocket, count: int) -> None:
    for _ in range(count):
        client.read_header()


@pytest.mark.slow
def test_a_row_of_costly_requests_keeps_no_other_client_waiting(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts is how many of them a server has answered before it answers another client."""
    answered: list[int] = []
    took = Server.took

    def noted(self: Server, api: int, seconds: float) -> None:
        answered.append(api)
        took(self, api, seconds)

    monkeypatch.setattr(Server, "took", noted)
    group, queue = attacked.leaders[OFFSETS_TOPIC], attacked.leaders["t"]
    with attacked.cluster.producer() as producer:
        for _ in range(4_000):
            producer.send("t", b"x", partition=0)
    costly = messages.ListQueueRecords(*queue.place, attacked.queue_id, 0, [], 4_000)
    assert len(attacked.ask(costly, queue.endpoint).records) == 4_000
    heartbeat = messages.GroupHeartbeat(
        *group.place, "other", "m", 0, None, "", ["t"], None, "range", 60_000, 60_000, [], 0
    )
    offset = messages.ListOffsets(*queue.place, messages.LATEST, messages.READ_COMMITTED)
    attacker = attacked.connect(queue.endpoint)
    for request, leader in ((offset, queue), (heartbeat, group)):
        other = attacked.connect(leader.endpoint)
        cost_s(other, request)
        answered.clear()
        reading = threading.Thread(target=_read, args=(attacker, REQUESTS_PER_TURN))
        attacker.ask([costly] * REQUESTS_PER_TURN)
        reading.start()
        while costly.api not in answered:
            time.sleep(0.001)
        other.ask([request])
        before = len(answered)
        other.read_header()
        between = answered[before : answered.index(request.api)].count(costly.api)
        print(f"{type(request).__name__}: {between} others first")  # noqa: T201
        reading.join(60)
        other.close()
        assert between < REQUESTS_PER_TURN // 3, request
    attacker.close()


def test_the_controller_decides_one_change_in_a_turn_of_its_loop(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes come over the connections of brokers, whose heartbeats must not wait for them."""
    turn, decided = 0, []
    decide = Controller._decide

    def noted(self: Controller, request: AnyRequest) -> Any:
        if isinstance(request, messages.Change):
            decided.append(turn)
        return decide(self, request)

    def tick() -> None:
        nonlocal turn
        turn += 1
        if len(decided) < 20:
            asyncio.get_running_loop().call_soon(tick)

    monkeypatch.setattr(Controller, "_decide", noted)
    client = attacked.connect(attacked.broker)
    client.ask([messages.AlterTopicConfig("t", {"retention_ms": 1_000_000})])
    client.read_header()
    begun = Controller._turn_of_a_change
    is_begun = False

    async def begin(self: Controller) -> None:
        nonlocal is_begun
        if not is_begun:
            is_begun = True
            tick()
        await begun(self)

    monkeypatch.setattr(Controller, "_turn_of_a_change", begin)
    decided.clear()
    client.ask(
        [
            messages.AlterTopicConfig("t", {"retention_ms": 1_000_000 + number})
            for number in range(20)
        ]
    )
    for _ in range(20):
        client.read_header()
    client.close()
    assert len(set(decided)) == 20


def test_clients_with_more_positions_than_one_request_names_send_several(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (group_offsets, transaction_core, groups):
        monkeypatch.setattr(module, "POSITIONS_MAX", 3)
    cluster, places = attacked.cluster, [TopicPartition("t", number) for number in range(10)]
    sent: list[int] = []
    commit = GroupCoordinator.commit

    async def noted(
        self: GroupCoordinator, peer: Any, request: messages.CommitOffsets, payload: memoryview
    ) -> Any:
        sent.append(len(request.offsets))
        return await commit(self, peer, request, payload)

    monkeypatch.setattr(GroupCoordinator, "commit", noted)
    with cluster.consumer(group="many") as consumer:
        consumer.assign(places)
        consumer.commit({place: place.partition + 1 for place in places})
        assert consumer.committed(places) == {place: place.partition + 1 for place in places}
    assert sent == [3, 3, 3, 1]
    sent.clear()
    with cluster.producer(transactional_id="many") as producer, producer.transaction() as begun:
        begun.send_offsets(dict.fromkeys(places, 7), group="many")
    assert sent == [3, 3, 3, 1]
    offsets = cluster.admin.set_group_offsets("many", to=dict.fromkeys(places, 1))
    assert offsets == dict.fromkeys(places, 1)
    with cluster.consumer(group="many") as consumer:
        consumer.assign(places)
        assert consumer.committed(places) == dict.fromkeys(places, 1)
