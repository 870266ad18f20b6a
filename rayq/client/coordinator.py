"""Access to a coordinator: the leader of one partition of one of rayq's own topics.

The coordinator of a group leads the group's partition of `__consumer_offsets`, that of a
transactional id the id's partition of `__transaction_state`. The topic is created at its first use.
From then on a coordinator is found, and found again after it moved, like every partition's leader:
by the cluster's metadata.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rayq.client.client import Client
from rayq.client.leader_requests import LEADER_PATIENCE_S
from rayq.config import ConsumerConfig, ProducerConfig
from rayq.core.cluster.topic_changes import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from rayq.core.groups.records import partition_of_group
from rayq.messages import AnyRequest, EnsureOffsetsTopic, EnsureTransactionsTopic
from rayq.messages.transaction_ids import coordinator_partition

Build = Callable[[str, int, int], AnyRequest]
"""Makes a request from the topic id, partition and leader epoch of the coordinator."""

_ENSURES: dict[str, Callable[[], AnyRequest]] = {
    OFFSETS_TOPIC: EnsureOffsetsTopic,
    TRANSACTIONS_TOPIC: EnsureTransactionsTopic,
}
"""The request that creates each topic unless it exists."""


async def coordinator_partitions(
    client: Client, topic: str, *, create: bool, timeout_s: float
) -> int:
    """The number of partitions of a coordinators' topic; 0 if the topic does not exist, and
    `create` is not set."""
    deadline = client.now + timeout_s
    if topic not in client.metadata.topics:
        await client.fetch_with_others(topic, deadline)
    if topic not in client.metadata.topics:
        if not create:
            return 0
        left_s = max(deadline - client.now, 0.001)
        await client.change(_ENSURES[topic](), timeout_s=left_s)
        await client.topic(topic, timeout_s=max(deadline - client.now, 0.001))
    return len(client.metadata.topics[topic].partitions)


async def offsets_partitions(client: Client, *, create: bool, timeout_s: float) -> int:
    """The number of coordinators of groups, as `coordinator_partitions` returns it."""
    return await coordinator_partitions(client, OFFSETS_TOPIC, create=create, timeout_s=timeout_s)


class _Coordinator:
    """Access to one coordinator, wherever it is."""

    def __init__(
        self,
        client: Client,
        topic: str,
        partition_of: Callable[[int], int],
        *,
        timeout_ms: int,
        config: ConsumerConfig | ProducerConfig,
    ) -> None:
        """`partition_of` returns the coordinator's partition, given the number of partitions of the
        topic."""
        self.client = client
        self._topic = topic
        self._partition_of = partition_of
        self._timeout_s = timeout_ms / 1000
        self._attempt_timeout_s = config.request_timeout_ms / 1000
        self._retry_backoff_s = config.retry_backoff_ms / 1000

    async def ask(
        self, build: Build, *, timeout_s: float | None = None, hold_s: float = 0.0
    ) -> Any:
        """Returns the answer to a request. Retries while coordinators load, move or cannot be
        reached, for at most `timeout_s` (default: `default_api_timeout_ms` of a consumer,
        `max_block_ms` of a producer). The coordinator may hold the request for `hold_s` longer than
        others. Raises TimeoutError, and the error that the coordinator answers."""
        client = self.client
        if timeout_s is None:
            timeout_s = self._timeout_s
        deadline = client.now + timeout_s
        count = await coordinator_partitions(client, self._topic, create=True, timeout_s=timeout_s)
        partition = self._partition_of(count)
        return await client.ask_leader(
            self._topic,
            partition,
            lambda topic_id, leader: build(topic_id, partition, leader.epoch),
            timeout_s=max(deadline - client.now, 0.001),
            attempt_timeout_s=hold_s + self._attempt_timeout_s,
            patience_s=hold_s + LEADER_PATIENCE_S,
            retry_backoff_s=self._retry_backoff_s,
        )


class GroupCoordinator(_Coordinator):
    """Access to the coordinator of one group: for a consumer, or for the producer whose
    transactions commit the group's positions."""

    def __init__(
        self, client: Client, group: str, config: ConsumerConfig | ProducerConfig
    ) -> None:
        if isinstance(config, ProducerConfig):
            timeout_ms = config.max_block_ms
        else:
            timeout_ms = config.default_api_timeout_ms
        super().__init__(
            client,
            OFFSETS_TOPIC,
            lambda count: partition_of_group(group, count),
            timeout_ms=timeout_ms,
            config=config,
        )
        self.group = group


class TransactionsCoordinator(_Coordinator):
    """Access to the coordinator of one transactional id."""

    def __init__(self, client: Client, transactional_id: str, config: ProducerConfig) -> None:
        super().__init__(
            client,
            TRANSACTIONS_TOPIC,
            lambda count: coordinator_partition(transactional_id, count),
            timeout_ms=config.max_block_ms,
            config=config,
        )
