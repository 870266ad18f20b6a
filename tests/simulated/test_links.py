"""The way of a replica process to leaders and coordinators, with a broker and servers played."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from proving.simulation import World
from proving.simulation.process import Process
from rayq.actors.transactions.links import PATIENCE_S, TOPIC_GONE_S, Links
from rayq.errors import (
    ControllerUnavailableError,
    CoordinatorLoadingError,
    DisconnectedError,
    NotLeaderError,
    RayqError,
    TimeoutError,
    TransactionEndedError,
    UnknownTopicError,
)
from rayq.transaction_ids import make_family
from rayq.wire import messages

FAMILY = make_family(1, 7)


def topic(name: str, topic_id: str, *leaders: int | None, epoch: int = 1) -> messages.TopicMetadata:
    """A topic whose partitions have these leaders, on hosts of the same number."""
    replicas = [messages.ReplicaEndpoint(number, f"host-{number}", 1) for number in range(3)]
    partitions = [
        messages.PartitionMetadata(number, leader, epoch, 1, [0, 1, 2], replicas, None)
        for number, leader in enumerate(leaders)
    ]
    return messages.TopicMetadata(name, topic_id, {}, partitions)


class Servers:
    """The broker of the node and the servers of all leaders. `answer` answers the requests."""

    def __init__(self, process: Process) -> None:
        self.topics = [topic("__transaction_state", "S", 0, 1), topic("t", "T", 2)]
        self.controller: str | None = "host:1"
        self.asked: list[tuple[str, Any]] = []
        self.looks = 0
        self.answer: Callable[[Any], Awaitable[Any]] = self.done
        self.links = Links(process.environment, cast(Any, self), ask_broker=cast(Any, self.broker))

    async def done(self, request: Any) -> Any:
        return messages.Done()

    async def broker(self, request: messages.Metadata) -> messages.MetadataResponse:
        self.looks += 1
        await asyncio.sleep(0.001)
        found = [
            one
            for one in self.topics
            if one.name in (request.topics or []) or one.topic_id in request.topic_ids
        ]
        return messages.MetadataResponse("c", 1, 1, self.controller, [], [], found)

    async def request(
        self, host: str, port: int, request: Any, payload: bytes = b"", *, timeout_s: float
    ) -> Any:
        self.asked.append((host, request))
        await asyncio.sleep(0.001)
        return await self.answer(request), b""

    def fails(self, *errors: RayqError) -> None:
        """The next answers are these errors."""
        left = list(errors)

        async def answer(request: Any) -> Any:
            if left:
                raise left.pop(0)
            return messages.Done()

        self.answer = answer

    async def mark(self, topic_id: str = "T", partition: int = 0) -> None:
        await self.links.ask_leader(
            topic_id,
            partition,
            lambda topic_id, partition, epoch: messages.WriteMarker(
                topic_id, partition, epoch, FAMILY, 0, True, 1
            ),
        )

    @property
    def hosts(self) -> list[str]:
        return [host for host, _ in self.asked]


def played(work: Callable[[Servers], Awaitable[None]]) -> None:
    async def script(process: Process) -> None:
        await work(Servers(process))

    with World(seed=1) as world:
        process = world.host("broker").process("replica")
        world.run(process.run(script(process)), limit_s=3_600)


def test_a_leader_is_asked_in_its_epoch_and_looked_up_once() -> None:
    async def work(of: Servers) -> None:
        await asyncio.gather(*(of.mark() for _ in range(5)))
        await of.mark()
        assert of.hosts == ["host-2"] * 6 and of.looks == 1
        assert of.asked[0][1].leader_epoch == 1

    played(work)


@pytest.mark.parametrize("error", [NotLeaderError("moved"), DisconnectedError("gone")])
def test_after_a_refusal_the_next_attempt_finds_the_next_leader(error: RayqError) -> None:
    async def work(of: Servers) -> None:
        await of.mark()
        of.fails(error)
        of.topics[1] = topic("t", "T", 0, epoch=2)
        with pytest.raises(type(error)):
            await of.mark()
        await of.mark()
        assert of.hosts == ["host-2", "host-2", "host-0"] and of.looks == 2
        assert of.asked[-1][1].leader_epoch == 2

    played(work)


def test_an_error_that_any_leader_gives_costs_no_look() -> None:
    async def work(of: Servers) -> None:
        of.fails(TransactionEndedError("late"))
        with pytest.raises(TransactionEndedError):
            await of.mark()
        await of.mark()
        assert of.looks == 1

    played(work)


def test_a_partition_without_a_leader_is_looked_up_again() -> None:
    async def work(of: Servers) -> None:
        of.topics[1] = topic("t", "T", None)
        for partition in (0, 5):
            with pytest.raises(NotLeaderError):
                await of.mark(partition=partition)
        of.topics[1] = topic("t", "T", 1)
        await of.mark()
        assert of.hosts == ["host-1"]

    played(work)


def test_a_topic_is_gone_once_it_was_missing_for_long() -> None:
    async def work(of: Servers) -> None:
        async def look(after_s: float) -> bool:
            await asyncio.sleep(after_s)
            with pytest.raises(RayqError):
                await of.mark()
            return of.links.is_gone("T")

        kept = of.topics.pop()
        assert not await look(0)
        assert not await look(TOPIC_GONE_S / 2)
        of.topics.append(kept)
        await of.mark()
        of.topics.pop()
        of.fails(NotLeaderError("gone"))
        assert not await look(TOPIC_GONE_S)
        assert not await look(0), "it was there a moment ago"
        of.controller = None
        with pytest.raises(ControllerUnavailableError):
            await of.mark()
        of.controller = "host:1"
        assert await look(TOPIC_GONE_S + 1)

    played(work)


def test_one_question_is_under_way_for_all_who_join_alike() -> None:
    async def work(of: Servers) -> None:
        await asyncio.gather(*(of.links.join(FAMILY, 3, "T", 0) for _ in range(5)))
        assert of.hosts == ["host-1"], "the family names the coordinator's partition"
        request = of.asked[0][1]
        assert (request.topic_id, request.partition, request.family) == ("S", 1, FAMILY)
        await asyncio.gather(of.links.join(FAMILY, 3, "T", 1), of.links.join(FAMILY, 4, "T", 1))
        assert len(of.asked) == 3

    played(work)


def test_questions_are_repeated_while_coordinators_move_and_begin() -> None:
    async def work(of: Servers) -> None:
        of.fails(CoordinatorLoadingError("."), NotLeaderError("."), UnknownTopicError("."))
        await of.links.join(FAMILY, 3, "T", 0)
        assert len(of.asked) == 4
        of.fails(TransactionEndedError("late"))
        with pytest.raises(TransactionEndedError):
            await of.links.join(FAMILY, 3, "T", 0)

    played(work)


def test_without_an_answer_a_question_ends_in_time() -> None:
    async def work(of: Servers) -> None:
        del of.topics[0]
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with pytest.raises(TimeoutError, match="__transaction_state"):
            await of.links.join(FAMILY, 3, "T", 0)
        assert PATIENCE_S - 2 < loop.time() - began_s <= PATIENCE_S
        with pytest.raises(UnknownTopicError):
            await of.links.coordinators()

    played(work)


def test_how_a_transaction_ended_and_how_many_coordinators_there_are() -> None:
    async def work(of: Servers) -> None:
        async def answer(request: Any) -> Any:
            return messages.DescribeOutcomeResponse("aborting")

        of.answer = answer
        assert await of.links.outcome(FAMILY, 0) == "aborting"
        assert await of.links.coordinators() == 2

    played(work)
