"""Lists that come in pages end, whatever a server says of where the next page begins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rayq import messages
from rayq.actors.queues.persister import QueueStatePersister
from rayq.batch.job_partition import JobPartition
from rayq.client.admin.base import Call
from rayq.client.admin.dead_letters import DeadLetters, _Place
from rayq.client.admin.queues import QueueAdmin, create_queue
from rayq.client.admin.remote import RemoteAdmin
from rayq.client.admin.transactions import TransactionAdmin
from rayq.client.client import Client
from rayq.client.environment import system_environment
from rayq.client.large.collect import _References
from rayq.client.leader_requests import known_end
from rayq.core.cluster.topic_changes import TRANSACTIONS_TOPIC
from rayq.errors import (
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    ProtocolError,
    QueueExistsError,
    TimeoutError,
    UnknownQueueError,
)
from rayq.records import TopicPartition
from rayq.wire.metadata_pages import all_pages
from rayq.wire.paging import check_advances

QUEUE = messages.QueueMetadata("id", "q", "tid", "t", {}, 1)
PLACE = TopicPartition("t", 0)
TOPIC = SimpleNamespace(partitions=[0], topic_id="tid")
ASKED_MAX = 10


class Told:
    """A client whose servers go on at these places, again and again."""

    now = 0.0

    def __init__(self, places: list[Any]) -> None:
        self.places = places
        self.asked = 0
        self.metadata = SimpleNamespace(
            oldest_acceptable=0, require=lambda version: None, topics={TRANSACTIONS_TOPIC: TOPIC}
        )

    def place(self) -> Any:
        self.asked += 1
        assert self.asked < ASKED_MAX, "it is asked forever"
        return self.places[(self.asked - 1) % len(self.places)]

    async def ask_any(self, request: messages.DescribeQueues, **options: Any) -> Any:
        after = None if request.names else self.place()
        return messages.DescribeQueuesResponse(1, [QUEUE], after)

    async def ask_leader(self, topic: str, number: int, build: Any, **options: Any) -> Any:
        request = build("tid", SimpleNamespace(epoch=1))
        match request:
            case messages.ListTransactions():
                return messages.ListTransactionsResponse([], self.place())
            case messages.VerifyRemote():
                return messages.VerifyRemoteResponse(1, self.place(), [], [])
            case messages.ListQueueRecords():
                return messages.ListQueueRecordsResponse([], self.place())
        raise AssertionError(request)

    async def topic(self, *names: Any, **options: Any) -> Any:
        return TOPIC


async def topics(told: Told) -> Any:
    async def ask(request: messages.Metadata) -> messages.MetadataResponse:
        return messages.MetadataResponse("c", 1, 1, None, [], [], [], told.place())

    return await all_pages(ask, messages.Metadata(None))


async def queues(told: Told) -> Any:
    return await QueueAdmin(cast(Any, told), awaits_callbacks=True).list_queues(timeout_s=60)


async def queue_records(told: Told) -> Any:
    admin = QueueAdmin(cast(Any, told), awaits_callbacks=True)
    return await admin.list_queue_records("q", limit=100, timeout_s=60)


async def transactions(told: Told) -> Any:
    admin = TransactionAdmin(cast(Any, told), awaits_callbacks=True)
    return await admin.list_transactions(idle=True, timeout_s=60)


async def objects(told: Told) -> Any:
    admin = RemoteAdmin(cast(Any, told), awaits_callbacks=True)
    return await admin.verify_remote("t", timeout_s=60)


async def kept_records(told: Told) -> Any:
    journal = QueueStatePersister(
        system_environment(), cast(Any, None), queue_id="q", data_partition=0, data_leader_epoch=1
    )

    async def ask(build: Any) -> Any:
        return messages.OpenQueueStateResponse(1, told.place(), 0), memoryview(b"\x90")

    journal._ask = ask  # type: ignore[assignment,method-assign]
    return await journal.open()


@pytest.mark.parametrize(
    ("walk", "places"),
    [
        *((walk, places) for walk in (topics, queues, transactions)
          for places in (["a"], ["b", "a"], ["b", "b"], [""])),
        *((walk, places) for walk in (queue_records, objects) for places in ([7], [9, 8], [0], [-1])),
        *((kept_records, places) for places in ([b"a"], [b"b", b"a"], [b""])),
    ],
)
def test_a_list_whose_next_page_goes_back_is_an_error_and_not_asked_for_again(
    walk: Callable[[Told], Awaitable[Any]], places: list[Any]
) -> None:
    with pytest.raises(ProtocolError, match="that never ends"):
        asyncio.run(cast(Any, walk(Told(places))))


@pytest.mark.parametrize("walk", [topics, queues, transactions])
def test_a_list_that_goes_on_is_walked_to_its_end(walk: Callable[[Told], Awaitable[Any]]) -> None:
    told = Told(["a", "b", None])
    asyncio.run(cast(Any, walk(told)))
    assert told.asked == 3


class Growing(Told):
    """Its servers answer at once, and always go on further behind. Each answer takes a while."""

    def __init__(self, grow: Callable[[int], Any]) -> None:
        super().__init__([])
        self.grow = grow

    def place(self) -> Any:
        self.asked += 1
        self.now += 1.0
        assert self.asked <= 60, "it is asked after its time is over"
        return self.grow(self.asked)


@pytest.mark.parametrize(
    ("walk", "grow"),
    [
        *((walk, lambda number: "a" * number) for walk in (queues, transactions)),
        *((walk, lambda number: number) for walk in (queue_records, objects)),
    ],
)
def test_a_list_without_an_end_ends_with_the_time_of_the_call(
    walk: Callable[[Told], Awaitable[Any]], grow: Callable[[int], Any]
) -> None:
    with pytest.raises(TimeoutError, match="before all of it was answered"):
        asyncio.run(cast(Any, walk(Growing(grow))))


def test_the_pages_of_metadata_end_with_the_time_of_the_call() -> None:
    client = Client.__new__(Client)
    told = Growing(lambda number: "a" * number)
    client.environment = cast(Any, SimpleNamespace(clock=SimpleNamespace(monotonic=lambda: told.now)))

    async def ask_any(request: messages.Metadata, **options: Any) -> Any:
        return messages.MetadataResponse("c", 1, 1, None, [], [], [], told.place())

    client.ask_any = ask_any  # type: ignore[method-assign]
    client._cluster_id = None
    with pytest.raises(TimeoutError, match="before all of it was answered"):
        asyncio.run(client._ask_for_metadata(messages.Metadata(None), timeout_s=60))


def test_a_queue_that_is_there_and_is_not_is_not_made_forever() -> None:
    class Undecided(Growing):
        async def change(self, request: Any, **options: Any) -> None:
            raise QueueExistsError("it is there")

        async def ask_any(self, request: Any, **options: Any) -> Any:
            self.place()
            raise UnknownQueueError("it is not")

    call = Call(cast(Any, Undecided(lambda number: None)), 60)
    request = messages.CreateQueue(name="q", topic="t", config={})
    with pytest.raises(TimeoutError, match="before all of it was answered"):
        asyncio.run(create_queue(call, request, exist_ok=True))


def test_where_a_log_begins_or_ends_has_to_be_said() -> None:
    assert known_end(messages.ListOffsetsResponse(7, None), "t-0") == 7
    with pytest.raises(ProtocolError, match="The leader of t-0 was asked where its log begins"):
        known_end(messages.ListOffsetsResponse(None, None), "t-0")


class Refusing:
    """The leader of a log that begins at 5, and has nothing there."""

    now = 0.0

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked = 0

    async def exchange_with_leader(self, topic: str, number: int, build: Any, **options: Any) -> Any:
        self.asked += 1
        assert self.asked < ASKED_MAX, "it is asked forever"
        if isinstance(build("tid", SimpleNamespace(epoch=1)), messages.ListOffsets):
            return messages.ListOffsetsResponse(5, None), memoryview(b"")
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer, memoryview(b"")

    async def ask_leader(self, *where: Any, **options: Any) -> Any:
        return (await self.exchange_with_leader(*where, **options))[0]


@pytest.mark.parametrize(
    "answer", [OffsetOutOfRangeError("out of range"), messages.FetchResponse(9, 5, 0, 5)]
)
def test_a_leader_that_has_nothing_where_its_log_begins_is_not_asked_forever(answer: Any) -> None:
    references = _References(cast(Any, Refusing(answer)), lambda *progress: None)
    with pytest.raises(OffsetNotAvailableError):
        asyncio.run(references._read(PLACE, "tid"))

    async def read_letters() -> None:
        letters = DeadLetters(cast(Any, Refusing(answer)), "t", timeout_s=1.0)
        async for _ in letters._letters(_Place("t", None), 0, 10_000):
            pass

    with pytest.raises(OffsetNotAvailableError):
        asyncio.run(read_letters())


def test_the_next_page_is_behind_this_one() -> None:
    check_advances(3, 4, "it")
    check_advances(b"", None, "it")
    with pytest.raises(ProtocolError, match="A page of it that begins at 3 is said to continue at 3"):
        check_advances(3, 3, "it")


@pytest.mark.parametrize(
    "ranges", [[(5, 5)], [(6, 9)], [(0, 5)], [(0, 9), (10, 12)], [(0, 9), (9, 9)], [(0, 9), (8, 12)]]
)
def test_objects_of_a_job_hold_what_was_asked_for_without_a_hole(
    ranges: list[tuple[int, int]]
) -> None:
    partition = JobPartition(cast(Any, None), PLACE, "tid", 1.0)

    async def exchange(build: Any) -> Any:
        found = [messages.RemoteRange("o", *one, 10, 12, None) for one in ranges]
        return messages.DescribeRemoteResponse(found, 0), memoryview(b"")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JobPartition, "exchange", lambda self, build: exchange(build))
        with pytest.raises(ProtocolError, match="asked for the objects from offset 5 on"):
            asyncio.run(partition.objects(5, 20, objects_max=9))
        ranges[:] = [(3, 9), (9, 12)]
        assert len(asyncio.run(partition.objects(5, 20, objects_max=9))) == 2
