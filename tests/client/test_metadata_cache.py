"""What a client remembers of a cluster has a bound, whatever its servers say."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest

from rayq.client import broker_client, client, metadata
from rayq.client.client import Client
from rayq.client.environment import system_environment
from rayq.client.metadata import MetadataCache
from rayq.config import ClusterConfig
from rayq.errors import AuthorizationError, DisconnectedError, UnknownTopicError
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


def test_a_topic_is_denied_until_it_is_told_of_or_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "DENIED_MAX", 2)
    cache = MetadataCache()
    cache.apply(msgspec.structs.replace(told("a"), denied={"b": "why"}), ["a", "b"])
    assert cache.denied == {"b": "why"} and list(cache.topics) == ["a"]
    cache.apply(msgspec.structs.replace(told(), denied={"a": "why not"}), ["a", "b"])
    assert cache.denied == {"a": "why not"} and not cache.topics
    cache.apply(told("a"), ["a"])
    assert not cache.denied and list(cache.topics) == ["a"]
    many = {str(number): "why" for number in range(5)}
    cache.apply(msgspec.structs.replace(told(), denied=many), list(many))
    assert list(cache.denied) == ["3", "4"]


def test_a_hidden_topic_is_not_reported_as_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "UNKNOWN_TOPIC_PATIENCE_S", 0.01)

    async def script() -> None:
        client = made()

        async def ask(request: Metadata, **options: Any) -> MetadataResponse:
            return msgspec.structs.replace(told(), denied={"secret": "anna may not"})

        client._ask_for_metadata = ask  # type: ignore[method-assign]
        with pytest.raises(AuthorizationError, match="anna may not"):
            await client.topic("secret", timeout_s=1)
        assert isinstance(client.no_leader_error("secret", "", 0), AuthorizationError)
        with pytest.raises(UnknownTopicError, match="no topic 'other'"):
            await client.topic("other", timeout_s=1)
        client.close()

    asyncio.run(script())


def test_topics_that_nobody_keeps_fresh_are_known_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "TOPICS_KNOWN_MAX", 10)

    async def script() -> None:
        client = made()

        async def ask(request: Metadata, **options: Any) -> MetadataResponse:
            return told(*(name for name in request.topics or () if name != "never"))

        client._ask_for_metadata = ask  # type: ignore[method-assign]
        client.add_interest("kept")
        for number in range(50):
            assert (await client.topic(f"t{number}", timeout_s=1)).name == f"t{number}"
        await client.refresh(["never"], timeout_s=1)
        assert len(client.metadata.topics) == len(client._topic_seen_at) == 10
        assert {"kept", "t49", "t48"} < client.metadata.topics.keys()
        assert "never" not in client._topic_seen_at
        assert (await client.topic("t0", timeout_s=1)).name == "t0"
        client.close()

    asyncio.run(script())


def test_addresses_that_did_not_answer_are_remembered_up_to_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker_client, "FAILED_MAX", 10)

    async def script() -> None:
        client = made()

        async def request(*arguments: Any, **options: Any) -> Any:
            raise DisconnectedError("gone")

        client.pool.request = request  # type: ignore[method-assign]
        for port in [*range(1, 40), 31]:
            with pytest.raises(DisconnectedError):
                await client.ask(("127.0.0.1", port), cast(Any, Metadata(None)), timeout_s=1)
        assert [port for _, port in client._failed_at] == [30, *range(32, 40), 31]
        client.close()

    asyncio.run(script())
