"""What a client remembers of a cluster has a bound, whatever its servers say."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from rayq.client import broker_client, client
from rayq.client.client import Client
from rayq.client.environment import system_environment
from rayq.client.metadata import MetadataCache
from rayq.config import ClusterConfig
from rayq.errors import DisconnectedError
from rayq.messages import Metadata, MetadataResponse, TopicMetadata
from rayq.wire.authentication import Identity


def told(*names: str, version: int = 1) -> MetadataResponse:
    topics = [TopicMetadata(name, f"id of {name}", {}, []) for name in names]
    return MetadataResponse("c", version, 1, "h:1", [], [], topics)


def made() -> Client:
    identity = Identity(role="client", key=b"k" * 32, cluster_id=None, broker=None)
    return Client(system_environment(), identity, [("127.0.0.1", 1)], ClusterConfig())


def test_an_answer_is_taken_for_the_topics_that_were_asked_for() -> None:
    cache = MetadataCache()
    cache.apply(told("a", "b"), ["a", "c"])
    assert list(cache.topics) == ["a"]
    cache.apply(told("b", "c"), None)
    assert sorted(cache.topics) == ["b", "c"]


def test_topics_that_nobody_keeps_fresh_are_known_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "TOPICS_KNOWN_MAX", 10)

    async def script() -> None:
        one = made()

        async def ask(request: Metadata, **options: Any) -> MetadataResponse:
            return told(*(name for name in request.topics or () if name != "never"))

        one._ask_for_metadata = ask  # type: ignore[method-assign]
        one.add_interest("kept")
        for number in range(50):
            assert (await one.topic(f"t{number}", timeout_s=1)).name == f"t{number}"
        await one.refresh(["never"], timeout_s=1)
        assert len(one.metadata.topics) == len(one._topic_seen_at) == 10
        assert {"kept", "t49", "t48"} < one.metadata.topics.keys()
        assert "never" not in one._topic_seen_at
        assert (await one.topic("t0", timeout_s=1)).name == "t0"
        one.close()

    asyncio.run(script())


def test_addresses_that_did_not_answer_are_remembered_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_client, "FAILED_MAX", 10)

    async def script() -> None:
        one = made()

        async def request(*arguments: Any, **options: Any) -> Any:
            raise DisconnectedError("gone")

        one.pool.request = request  # type: ignore[method-assign]
        for port in [*range(1, 40), 31]:
            with pytest.raises(DisconnectedError):
                await one.ask(("127.0.0.1", port), cast(Any, Metadata(None)), timeout_s=1)
        assert [port for _, port in one._failed_at] == [30, *range(32, 40), 31]
        one.close()

    asyncio.run(script())
