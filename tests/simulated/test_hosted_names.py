"""The names of topics that a process of replicas does not host: asked of its broker, once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from proving.simulation import World
from rayq import messages
from rayq.actors.replica.hosted_names import MISSING_S, HostedNames
from rayq.errors import ControllerUnavailableError, CoordinatorLoadingError


class Broker:
    """A broker that knows topics by id."""

    def __init__(self, **topics: str) -> None:
        self.topics = topics
        self.asked: list[list[str]] = []
        self.is_there = True

    async def ask(self, request: messages.Metadata) -> messages.MetadataResponse:
        assert request.topics == []
        self.asked.append(request.topic_ids)
        await asyncio.sleep(0.1)
        if not self.is_there:
            raise ControllerUnavailableError("It is gone.")
        found = [
            messages.TopicMetadata(self.topics[topic_id], topic_id, {}, [])
            for topic_id in request.topic_ids
            if topic_id in self.topics
        ]
        return messages.MetadataResponse("c", 1, 1, None, [], [], found)


def played(broker: Broker, work: Callable[[HostedNames], Awaitable[None]]) -> None:
    with World(seed=1) as world:
        environment = world.host().process("replicas").environment
        names = HostedNames(environment, cast(Any, broker.ask))
        world.run(work(names), limit_s=3_600)  # type: ignore[arg-type]
        assert world.errors == []


def test_a_name_is_asked_for_once_and_then_known() -> None:
    broker = Broker(T="orders", U="bills")

    async def work(names: HostedNames) -> None:
        for topic_id in ("T", "T", "U"):
            with pytest.raises(CoordinatorLoadingError):
                names.other_topic_name(topic_id)
        await asyncio.sleep(1)
        assert [names.other_topic_name(topic_id) for topic_id in "TU"] == ["orders", "bills"]
        assert broker.asked == [["T", "U"]] or broker.asked == [["T"], ["U"]]
        # A request to a partition that is not hosted here is answered by its handler.
        assert names.topic_name("T") is None
        names.forget(["T"])
        with pytest.raises(CoordinatorLoadingError):
            names.other_topic_name("T")
        await asyncio.sleep(1)

    played(broker, work)


def test_a_missing_topic_is_remembered_for_a_moment_only() -> None:
    broker = Broker()

    async def work(names: HostedNames) -> None:
        with pytest.raises(CoordinatorLoadingError):
            names.other_topic_name("T")
        await asyncio.sleep(0.5)
        assert names.other_topic_name("T") is None
        broker.topics["T"] = "orders"
        await asyncio.sleep(MISSING_S)
        with pytest.raises(CoordinatorLoadingError):
            names.other_topic_name("T")
        await asyncio.sleep(0.5)
        assert names.other_topic_name("T") == "orders"

    played(broker, work)


def test_a_broker_that_does_not_answer_is_asked_again_with_the_next_request() -> None:
    broker = Broker(T="orders")

    async def work(names: HostedNames) -> None:
        broker.is_there = False
        for _ in range(2):
            with pytest.raises(CoordinatorLoadingError):
                names.other_topic_name("T")
            await asyncio.sleep(1)
        broker.is_there = True
        with pytest.raises(CoordinatorLoadingError):
            names.other_topic_name("T")
        await asyncio.sleep(1)
        assert names.other_topic_name("T") == "orders"
        assert len(broker.asked) == 3

    played(broker, work)
