"""What the admin says when a wait ends in vain."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rayq.client.admin.admin import AsyncAdmin
from rayq.client.admin.topics import until_ready
from rayq.errors import TimeoutError, UnknownTopicError
from rayq.records import TopicPartition


def test_a_topic_that_is_not_ready_in_time_is_told_by_what_it_lacks() -> None:
    """The error does not name the last question, for which next to no time was left."""
    client: Any = SimpleNamespace(now=0.0, metadata=SimpleNamespace(version=1, topics={}, denied={}))

    async def refresh(_topics: object, *, timeout_s: float, **_: object) -> None:
        client.now += min(timeout_s, 4.0)
        if client.now >= 10.0:
            raise TimeoutError("No broker answered Metadata within 0.1 s.")
        client.metadata.version += 1

    client.refresh = refresh
    with pytest.raises(TimeoutError, match="'t' exists, but for 10 s .* no broker knows it yet"):
        asyncio.run(until_ready(client, "t", 1, timeout_s=10.0))


def test_a_move_whose_topic_is_created_again_on_its_target_is_not_done() -> None:
    moving = SimpleNamespace(target=[1], replicas=[SimpleNamespace(broker=0)])
    created_again = SimpleNamespace(target=[], replicas=[SimpleNamespace(broker=1)])
    seen = iter([("old id", moving), ("new id", created_again)])
    client: Any = SimpleNamespace(now=0.0, metadata=SimpleNamespace(version=0, topics={}, denied={}))

    async def refresh(_topics: object, **_: object) -> None:
        topic_id, partition = next(seen)
        client.metadata.version += 1
        client.metadata.topics = {"t": SimpleNamespace(topic_id=topic_id, partitions=[partition])}

    async def change(_request: object, **_: object) -> None:
        pass

    client.refresh, client.change = refresh, change
    with pytest.raises(UnknownTopicError, match="'t' was deleted while it was moved"):
        asyncio.run(
            AsyncAdmin(client).reassign_partitions({TopicPartition("t", 0): [1]}, timeout_s=10.0)
        )
