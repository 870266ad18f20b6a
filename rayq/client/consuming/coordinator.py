"""The way to a group's coordinator: the leader of the group's partition of `__consumer_offsets`.

The topic is created at the first use of a group. From then on a coordinator is found, and found
again after it moved, as every partition's leader is: by the cluster's metadata.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rayq.client.client import LEADER_PATIENCE_S, Client
from rayq.config import ConsumerConfig
from rayq.core.group_records import partition_of_group
from rayq.core.topic_changes import OFFSETS_TOPIC
from rayq.wire.messages import AnyRequest, EnsureOffsetsTopic

Build = Callable[[str, int, int], AnyRequest]
"""Makes a request from the topic id, partition and leader epoch of the coordinator."""


async def offsets_partitions(client: Client, *, create: bool, timeout_s: float) -> int:
    """How many partitions `__consumer_offsets` has; 0 when there is none, and `create` is not
    set."""
    deadline = client.now + timeout_s
    if OFFSETS_TOPIC not in client.metadata.topics:
        await client.fetch_with_others(OFFSETS_TOPIC, deadline)
    if OFFSETS_TOPIC not in client.metadata.topics:
        if not create:
            return 0
        left_s = max(deadline - client.now, 0.001)
        await client.change(EnsureOffsetsTopic(), timeout_s=left_s)
        await client.topic(OFFSETS_TOPIC, timeout_s=max(deadline - client.now, 0.001))
    return len(client.metadata.topics[OFFSETS_TOPIC].partitions)


class Coordinator:
    """Asks the coordinator of one group, wherever it is."""

    def __init__(self, client: Client, group: str, config: ConsumerConfig) -> None:
        self.client = client
        self.group = group
        self._config = config

    async def ask(
        self, build: Build, *, timeout_s: float | None = None, hold_s: float = 0.0
    ) -> Any:
        """The answer to a request. Retries while coordinators load, move or cannot be reached, for
        at most `timeout_s` (default: `default_api_timeout_ms`). The coordinator may hold the
        request for `hold_s` longer than others. Raises TimeoutError, and the error that the
        coordinator answers."""
        client = self.client
        if timeout_s is None:
            timeout_s = self._config.default_api_timeout_ms / 1000
        deadline = client.now + timeout_s
        count = await offsets_partitions(client, create=True, timeout_s=timeout_s)
        partition = partition_of_group(self.group, count)
        return await client.ask_leader(
            OFFSETS_TOPIC,
            partition,
            lambda topic_id, leader: build(topic_id, partition, leader.epoch),
            timeout_s=max(deadline - client.now, 0.001),
            attempt_timeout_s=hold_s + self._config.request_timeout_ms / 1000,
            patience_s=hold_s + LEADER_PATIENCE_S,
            retry_backoff_s=self._config.retry_backoff_ms / 1000,
        )
