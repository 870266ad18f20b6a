"""What the admin asks of the coordinators of transactions."""

from __future__ import annotations

import asyncio
from typing import Any

from rayq.client.client import Client
from rayq.client.coordinator import Build, TransactionsCoordinator, coordinator_partitions
from rayq.config import ProducerConfig
from rayq.core.topic_changes import TRANSACTIONS_TOPIC
from rayq.errors import InvalidRequestError
from rayq.records import TopicPartition, TransactionInfo, TransactionListing
from rayq.wire.messages import (
    AbortTransaction,
    DescribeTransaction,
    DescribeTransactionResponse,
    ListTransactions,
    TransactionSummary,
)

ATTEMPT_TIMEOUT_S = 10.0


class TransactionAdmin:
    """Serves one call of the admin, which may take `timeout_s`."""

    def __init__(self, client: Client, timeout_s: float) -> None:
        self._client = client
        self._deadline = client.now + timeout_s

    @property
    def _left_s(self) -> float:
        return max(self._deadline - self._client.now, 0.001)

    async def list_transactions(self) -> list[TransactionListing]:
        count = await coordinator_partitions(
            self._client, TRANSACTIONS_TOPIC, create=False, timeout_s=self._left_s
        )
        found = await asyncio.gather(*(self._listed(number) for number in range(count)))
        return sorted(
            (_listing(one) for listed in found for one in listed),
            key=lambda one: one.transactional_id,
        )

    async def _listed(self, partition: int) -> list[TransactionSummary]:
        found: list[TransactionSummary] = []
        after: str | None = ""
        while after is not None:
            page = await self._client.ask_leader(
                TRANSACTIONS_TOPIC,
                partition,
                lambda topic_id, leader, after=after: ListTransactions(  # type: ignore[misc]
                    topic_id, partition, leader.epoch, after
                ),
                timeout_s=self._left_s,
                attempt_timeout_s=ATTEMPT_TIMEOUT_S,
            )
            found += page.transactions
            after = page.next_after
        return found

    async def describe_transaction(self, transactional_id: str) -> TransactionInfo:
        response: DescribeTransactionResponse = await self._ask(
            transactional_id,
            lambda topic, number, epoch: DescribeTransaction(
                topic, number, epoch, transactional_id
            ),
        )
        topics = (await self._client.fetch_all(timeout_s=self._left_s)).topics
        names = {topic.topic_id: topic.name for topic in topics}
        unmarked: dict[tuple[int, int], list[TopicPartition]] = {}
        for family, epoch, topic_id, partition, is_marked in response.participants:
            if not is_marked:
                place = TopicPartition(names.get(topic_id, topic_id), partition)
                unmarked.setdefault((family, epoch), []).append(place)
        return TransactionInfo(
            transactional_id=response.transactional_id,
            owner=response.owner,
            transaction_timeout_ms=response.transaction_timeout_ms,
            last_name=response.last_name,
            transactions=[_listing(one) for one in response.transactions],
            unmarked=unmarked,
        )

    async def abort_transaction(self, transactional_id: str) -> None:
        attempts = 0

        def build(topic_id: str, partition: int, epoch: int) -> AbortTransaction:
            nonlocal attempts
            attempts += 1
            return AbortTransaction(topic_id, partition, epoch, transactional_id)

        try:
            await self._ask(transactional_id, build)
        except InvalidRequestError:
            if attempts < 2:  # Else an attempt whose answer was lost has aborted it.
                raise

    async def _ask(self, transactional_id: str, build: Build) -> Any:
        config = ProducerConfig(transactional_id=transactional_id)  # It checks the id.
        count = await coordinator_partitions(
            self._client, TRANSACTIONS_TOPIC, create=False, timeout_s=self._left_s
        )
        if count == 0:
            raise InvalidRequestError(
                f"There is no transactional id {transactional_id!r}: none was used so far."
            )
        coordinator = TransactionsCoordinator(self._client, transactional_id, config)
        return await coordinator.ask(build, timeout_s=self._left_s)


def _listing(one: TransactionSummary) -> TransactionListing:
    return TransactionListing(
        one.transactional_id, one.family, one.epoch, one.state, one.age_ms, one.partitions
    )
