"""Clusters that take over the objects of another one at the same time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rayq.client.environment import system_environment
from rayq.errors import InvalidRequestError
from rayq.messages import MetadataResponse
from rayq.messages.remote_names import owner_mark, owners_prefix
from rayq.runtime import restore_topic
from rayq.runtime.file_store import FileStore

OLD, ONE, OTHER = "0" * 32, "1" * 32, "2" * 32
TOPIC = restore_topic.StoredTopic(OLD, "a" * 32, "t", 1, {}, 1, {})


class PlayedCluster:
    """The client of a cluster that makes each topic that it is asked for."""

    def __init__(self, cluster_id: str) -> None:
        self.environment = system_environment()
        self.cluster_id = cluster_id
        self.made: list[Any] = []

    async def fetch_all(self, **options: Any) -> MetadataResponse:
        return MetadataResponse(self.cluster_id, 1, 1, "h:1", [], [], [])

    async def change(self, request: Any, **options: Any) -> None:
        self.made.append(request)


async def restore(client: Any, store: Any) -> None:
    await restore_topic.restore_topic(
        client, store, TOPIC, "t", config={}, replication_factor=None
    )


@pytest.fixture(autouse=True)
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    async def until_ready(*arguments: Any, **options: Any) -> None:
        return

    monkeypatch.setattr(restore_topic, "until_ready", until_ready)


def test_what_one_cluster_has_taken_over_is_not_taken_over_by_another(tmp_path: Path) -> None:
    async def script() -> None:
        store = FileStore(system_environment(), str(tmp_path))
        await store.put(owner_mark(OLD, 7, "m"), b"of an epoch of the old cluster")
        one, other = PlayedCluster(ONE), PlayedCluster(OTHER)
        await restore(one, store)
        with pytest.raises(InvalidRequestError, match=f"about to, by the mark .*{ONE}"):
            await restore(other, store)
        assert (len(one.made), other.made) == (1, [])
        await restore(one, store)  # Another topic: the mark of the one that was refused is gone.
        assert len(await store.list(owners_prefix(OLD))) == 2

    asyncio.run(script())


def test_of_two_clusters_that_take_over_at_the_same_time_one_at_most_makes_a_topic(
    tmp_path: Path,
) -> None:
    async def script() -> None:
        store = FileStore(system_environment(), str(tmp_path))
        clients = [PlayedCluster(ONE), PlayedCluster(OTHER)]
        both = asyncio.Barrier(2)

        class Slow:
            """Its lists come once both marks are there."""

            async def list(self, prefix: str, after: str = "") -> Any:
                if prefix == owners_prefix(OLD) and not after:
                    await both.wait()
                return await store.list(prefix, after)

            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

        outcomes = await asyncio.gather(
            *(restore(client, Slow()) for client in clients), return_exceptions=True
        )
        # The one that looks once the other has taken its mark back may go on.
        makers = [client for client in clients if client.made]
        refused = [outcome for outcome in outcomes if isinstance(outcome, InvalidRequestError)]
        assert len(makers) <= 1 and len(makers) + len(refused) == 2
        assert len(await store.list(owners_prefix(OLD))) == len(makers)

    asyncio.run(script())
