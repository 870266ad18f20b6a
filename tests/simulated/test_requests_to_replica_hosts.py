"""Which part of a replica process answers a request, and which requests none answers."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from rayq import messages
from rayq.actors.groups.group_coordinator import GroupCoordinator
from rayq.config import QueueConfig, as_dict
from rayq.core.cluster.topic_changes import OFFSETS_TOPIC, QUEUES_TOPIC, TRANSACTIONS_TOPIC
from rayq.errors import InvalidTopicError, NotLeaderError, ProtocolError, RayqError
from tests.simulated.followed import LEADER_EPOCH
from tests.simulated.played_broker import IDS, INCARNATION, Broker, assigned, playing
from tests.storage.support import make_batch

FAMILY = 1 << 61
"""The first producer id of transactions."""
QUEUE = messages.QueueMetadata("9" * 32, "q", IDS["t"], "t", as_dict(QueueConfig()), 1)


def requests_to(topic: str, leader_epoch: int = LEADER_EPOCH) -> list[tuple[Any, str]]:
    """What may be asked of the leader of this topic's partition, and the answer or the error. The
    broker tells its coordinators and queues nothing of other partitions."""
    at = (IDS[topic], 0, leader_epoch)
    transaction, owner = (FAMILY, 1), ("id", "7" * 32)
    queue = QUEUE.queue_id
    of_any_topic: list[tuple[Any, str]] = [
        (messages.Fetch(*at, 0, None, 1000, 0), "FetchResponse"),
        (messages.ListOffsets(*at, messages.LATEST), "ListOffsetsResponse"),
        (messages.DescribeOffset(*at, 0), "DescribeOffsetResponse"),
        (messages.DescribeRemote(*at, 0, 1), "DescribeRemoteResponse"),
        (messages.DescribeRemoteStorage(*at), "DescribeRemoteStorageResponse"),
        (messages.VerifyRemote(*at, 0, False, False), "VerifyRemoteResponse"),
        (messages.ReplicaSnapshot(*at), "ReplicaSnapshotResponse"),
        (messages.DescribeProducers(*at, 0, 10), "DescribeProducersResponse"),
        (messages.DescribeOpenTransactions(*at, None), "DescribeOpenTransactionsResponse"),
        (messages.SealPartition(*at, *transaction), "SealPartitionResponse"),
        (messages.WriteMarker(*at, *transaction, True, 1), "Done"),
        (messages.AbortUnknownTransaction(*at, *transaction), "Done"),
        (messages.ReplicaFetch(*at[:2], 4, "4" * 32, leader_epoch, 0, 0, 0, None, 1000, 0),
         "FencedEpochError"),  # There is no such replica.
    ]
    of_this_topic: dict[str, list[tuple[Any, str]]] = {
        "t": [
            (messages.Produce(*at, -1, 1000), "ProduceResponse"),
            (messages.DeleteRecords(*at, 0, 1000), "DeleteRecordsResponse"),
            (messages.Take(*at, queue, "h", 1, 1000, 0), "QueueLoadingError"),
            (messages.Settle(*at, queue, "h", 1), "QueueLoadingError"),
            (messages.DescribeQueue(*at, queue), "QueueLoadingError"),
            (messages.ListQueueRecords(*at, queue, 0, [], 10), "QueueLoadingError"),
            (messages.MoveQueueRecords(*at, queue, [], None), "QueueLoadingError"),
            (messages.PurgeQueue(*at, queue), "QueueLoadingError"),
        ],
        OFFSETS_TOPIC: [
            (messages.GroupHeartbeat(
                *at, "g", "5" * 32, 0, None, "c", ["t"], None, "uniform", 10_000, 1000, [], 0
            ), "CoordinatorLoadingError"),
            (messages.CommitOffsets(*at, "g", "", 0, 1, [(IDS["t"], 0, 1, None, "")]),
             "CommitOffsetsResponse"),
            (messages.FetchCommitted(*at, "g", None), "FetchCommittedResponse"),
            (messages.ListGroups(*at), "ListGroupsResponse"),
            (messages.DescribeGroup(*at, "g"), "CoordinatorLoadingError"),
            (messages.SetGroupOffsets(*at, "g", [(IDS["t"], 0, 0)]), "Done"),
            (messages.DeleteGroup(*at, "g"), "Done"),
        ],
        TRANSACTIONS_TOPIC: [
            (messages.InitProducer(*at, *owner, 10_000), "CoordinatorLoadingError"),
            (messages.EndTransaction(*at, *owner, *transaction, True, None, 0),
             "CoordinatorLoadingError"),
            (messages.TouchTransaction(*at, *owner, *transaction), "CoordinatorLoadingError"),
            (messages.SealTransaction(*at, *owner, *transaction), "CoordinatorLoadingError"),
            (messages.JoinTransaction(*at, *transaction, IDS["t"], 0), "TransactionEndedError"),
            (messages.DescribeOutcome(*at, *transaction), "DescribeOutcomeResponse"),
            (messages.ListTransactions(*at), "ListTransactionsResponse"),
            (messages.DescribeTransaction(*at, "id"), "InvalidRequestError"),
            (messages.AbortTransaction(*at, *transaction), "Done"),
        ],
        QUEUES_TOPIC: [
            (messages.OpenQueueState(*at, queue, 0, 1, "8" * 32), "OpenQueueStateResponse"),
            (messages.WriteQueueState(*at, queue, 0, 1, 1), "InvalidRequestError"),
        ],
    }
    return of_any_topic + of_this_topic[topic]


TOPICS = ["t", OFFSETS_TOPIC, TRANSACTIONS_TOPIC, QUEUES_TOPIC]


async def answers_to(
    broker: Broker, requests: list[Any], *, is_client: bool = False
) -> dict[str, str]:
    """The kind of each answer or error, by the kind of the request."""
    found = {}
    ask = broker.ask_as_client if is_client else broker.ask
    for request in requests:
        payload = make_batch(0) if isinstance(request, messages.Produce) else b""
        try:
            answer = await ask(request, payload)
        except RayqError as error:
            answer = error
        found[type(request).__name__] = type(answer).__name__
    return found


def names(requests: list[tuple[Any, str]], answer: str | None = None) -> dict[str, str]:
    return {type(request).__name__: answer or told for request, told in requests}


@pytest.mark.parametrize("topic", TOPICS)
def test_each_request_reaches_the_part_of_the_leader_that_it_is_for(topic: str) -> None:
    async def script(broker: Broker) -> None:
        await broker.tell(assigned(topic, queues=[QUEUE] if topic == "t" else []))
        await asyncio.sleep(1.0)
        requests = requests_to(topic)
        found = await answers_to(broker, [request for request, _ in requests])
        assert found == names(requests)
        at = (IDS[topic], 0)
        others = [messages.CheckRange(*at, 0), messages.DescribeReplica(*at)]
        assert [*(await answers_to(broker, others)).values()] == ["Done", "DescribeReplicaResponse"]

    playing(script)


def test_nobody_is_answered_in_another_epoch_or_about_partitions_that_are_not_here() -> None:
    async def script(broker: Broker) -> None:
        await broker.tell(*map(assigned, TOPICS[:-1]))
        for topic in TOPICS:
            requests = requests_to(topic, LEADER_EPOCH - 1)
            error = "FencedEpochError" if topic != TOPICS[-1] else "UnknownTopicError"
            found = await answers_to(broker, [request for request, _ in requests])
            assert found == names(requests, error)

    playing(script)


def test_coordinators_are_asked_for_in_their_own_topics_only() -> None:
    async def script(broker: Broker) -> None:
        await broker.tell(*map(assigned, TOPICS))
        common = len(requests_to("t")) - 8
        for asked_of, about in (("t", 1), ("t", 2), ("t", 3), (OFFSETS_TOPIC, 3), (QUEUES_TOPIC, 1)):
            requests = requests_to(TOPICS[about])[common:]
            moved = [
                msgspec.structs.replace(request, topic_id=IDS[asked_of]) for request, _ in requests
            ]
            assert await answers_to(broker, moved) == names(requests, "InvalidRequestError")

    playing(script)


@pytest.mark.parametrize("topic", TOPICS[1:])
def test_what_rayq_keeps_for_itself_is_written_by_nobody_else(topic: str) -> None:
    async def script(broker: Broker) -> None:
        await broker.tell(assigned(topic))
        at = (IDS[topic], 0, LEADER_EPOCH)
        asked = [messages.Produce(*at, 1, 1000), messages.DeleteRecords(*at, 0, 1000)]
        assert {*(await answers_to(broker, asked)).values()} == {"InvalidTopicError"}
        assert (await broker.describe(topic)).log_end_offset == 0

    playing(script)


CALLS = {OFFSETS_TOPIC: "group", TRANSACTIONS_TOPIC: "transaction", QUEUES_TOPIC: "queue"}


@pytest.mark.parametrize("topic", TOPICS[1:])
def test_what_rayq_keeps_for_itself_is_read_by_no_client(topic: str) -> None:
    """Its records name owners, members and holders whole. So whatever any client may ask about a
    partition is refused here, but for what is for coordinators and operators."""
    at = {"topic_id": IDS[topic], "partition": 0, "leader_epoch": LEADER_EPOCH}
    about_data = [
        request
        for topic_asked in TOPICS
        for request, _ in requests_to(topic_asked)
        if request.sent_by_clients
        and not isinstance(request, messages.ToCoordinator)
        and not isinstance(
            request, messages.DescribeOpenTransactions | messages.AbortUnknownTransaction
        )
    ]
    asked = [msgspec.structs.replace(request, **at) for request in about_data]
    asked.append(messages.CheckRange(IDS[topic], 0, 0))
    of_partitions = {
        kind
        for kind in messages.REQUESTS.values()
        if issubclass(kind, messages.ToPartition) and kind.sent_by_clients
    }
    for_clients = {kind for kind in of_partitions if kind.reads_internal_topics}
    assert of_partitions - for_clients == {type(one) for one in asked}

    async def script(broker: Broker) -> None:
        await broker.tell(assigned(topic))
        await asyncio.sleep(1.0)
        found = await answers_to(broker, asked, is_client=True)
        assert {*found.values()} == {"InvalidTopicError"}, found
        with pytest.raises(InvalidTopicError, match=rf"Use the {CALLS[topic]} calls of the admin"):
            await broker.ask_as_client(messages.Fetch(**at, offset=0, last_epoch=None,
                                                      bytes_max=1000, wait_ms=0))
        about = await broker.ask_as_client(messages.DescribeReplica(IDS[topic], 0))
        assert isinstance(about, messages.DescribeReplicaResponse)

    playing(script)


def test_numbers_that_no_server_could_store_are_refused_and_the_connection_goes_on() -> None:
    async def script(broker: Broker) -> None:
        await broker.tell(assigned())
        at = (IDS["t"], 0)
        server = broker.host._server
        connection = await broker.client_pool.get(server.host, server.port)
        for epoch in (2**31, 2**32 - 1, 2**64 - 1, -1):
            for request in (
                messages.Produce(*at, epoch, -1, 1000),
                messages.Fetch(*at, epoch, 0, None, 1000, 0),
            ):
                with pytest.raises(ProtocolError, match=f"valid {type(request).__name__} message"):
                    await connection.request(request, make_batch(0), timeout_s=5)
        # What a damaged disk may have held is told, and answered.
        with pytest.raises(NotLeaderError, match="there are records of epoch 4294967295"):
            await connection.request(
                messages.Fetch(*at, LEADER_EPOCH, 0, 2**32 - 1, 1000, 0), timeout_s=5
            )
        answer, _ = await connection.request(
            messages.Produce(*at, LEADER_EPOCH, -1, 1000), make_batch(0), timeout_s=5
        )
        assert answer.base_offset == 0

    playing(script)


@pytest.mark.parametrize("topic", TOPICS)
def test_transactions_in_the_topic_of_positions_are_those_of_its_groups(
    topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(broker: Broker) -> None:
        await broker.tell(assigned(topic))
        await asyncio.sleep(1.0)
        asked: list[str] = []

        async def noted(self: GroupCoordinator, peer: Any, request: Any, payload: Any) -> Any:
            asked.append(type(request).__name__)
            return messages.Done()

        monkeypatch.setattr(GroupCoordinator, "handle", noted)
        at, transaction = (IDS[topic], 0, LEADER_EPOCH), (FAMILY, 1)
        requests = [
            messages.DescribeOpenTransactions(*at, None),
            messages.WriteMarker(*at, *transaction, True, 1),
            messages.AbortUnknownTransaction(*at, *transaction),
        ]
        await answers_to(broker, requests)
        expected = [type(one).__name__ for one in requests] if topic == OFFSETS_TOPIC else []
        assert asked == expected

    playing(script)


def test_a_followers_notice_is_taken_and_not_answered() -> None:
    async def script(broker: Broker) -> None:
        others = [(3, INCARNATION), (4, "4" * 32)]
        await broker.tell(assigned(isr=others, replicas=others))
        await broker.produce(acks=1)
        at = (IDS["t"], 0, 4, "4" * 32, LEADER_EPOCH)
        await broker.ask(messages.ReplicaFetch(*at, 0, 0, 0, None, 1000, 0))
        await asyncio.sleep(0.2)  # The leader flushes.
        assert (await broker.describe()).high_watermark == 0
        server = broker.host._server
        connection = await broker.pool.get(server.host, server.port)
        connection.send(messages.ReplicaFlushed(*at, 1))
        assert (await broker.describe()).high_watermark == 1
        assert not connection.closed

    playing(script)


def test_it_tells_its_figures_and_refuses_what_is_not_for_it() -> None:
    async def script(broker: Broker) -> None:
        await broker.tell(assigned())
        told = await broker.ask(messages.DescribeMetrics())
        assert "rayq_log_end_offset" in {one.name for one in told.samples}
        (one, *_) = (one for one in told.samples if one.name == "rayq_log_end_offset")
        assert (one.labels["broker"], one.labels["cluster"]) == ("3", "cluster")
        with pytest.raises(ProtocolError, match="does not answer AlterPartition"):
            await broker.ask(messages.AlterPartition(IDS["t"], 0, 3, INCARNATION, 1, 1, []))

    playing(script)
