"""What the admin does with transactions: list, describe, abort, and find those that nobody ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from rayq.client.arguments import shown
from rayq.client.client import Client
from rayq.client.coordinator import TransactionsCoordinator, coordinator_partitions
from rayq.config import ProducerConfig, is_unicode
from rayq.core.topic_changes import TRANSACTIONS_TOPIC
from rayq.errors import InvalidRequestError
from rayq.messages import (
    AbortTransaction,
    AbortUnknownTransaction,
    DescribeOpenTransactions,
    DescribeOpenTransactionsResponse,
    DescribeTransaction,
    DescribeTransactionResponse,
    ListTransactions,
    ListTransactionsResponse,
    TransactionSummary,
)
from rayq.records import (
    HangingTransaction,
    TopicPartition,
    TransactionInfo,
    TransactionListing,
    TransactionParticipant,
)
from rayq.wire.paging import check_goes_on

ATTEMPT_TIMEOUT_S = 10.0
ID_CHARACTERS_MAX = 256


class TransactionAdmin:
    """Serves one call of the admin, which may take `timeout_s`."""

    def __init__(self, client: Client, timeout_s: float) -> None:
        self._client = client
        self._deadline = client.now + timeout_s

    @property
    def _left_s(self) -> float:
        return max(self._deadline - self._client.now, 0.001)

    async def _coordinators(self) -> int:
        """How many partitions `__transaction_state` has; 0 before the first transaction."""
        return await coordinator_partitions(
            self._client, TRANSACTIONS_TOPIC, create=False, timeout_s=self._left_s
        )

    # --- by their coordinators ------------------------------------------------------------------

    async def list_transactions(self, *, idle: bool) -> list[TransactionListing]:
        pages = await asyncio.gather(
            *(self._list(partition, idle=idle) for partition in range(await self._coordinators()))
        )
        listed = [_listing(one) for page in pages for one in page]
        return sorted(listed, key=lambda one: (-(one.age_ms or 0), one.transactional_id))

    async def _list(self, partition: int, *, idle: bool) -> list[TransactionSummary]:
        """What one coordinator lists, page by page."""
        found: list[TransactionSummary] = []
        after: str | None = ""
        while after is not None:
            answer: ListTransactionsResponse = await self._client.ask_leader(
                TRANSACTIONS_TOPIC,
                partition,
                lambda topic_id, leader, after=after: ListTransactions(  # type: ignore[misc]
                    topic_id, partition, leader.epoch, after, idle
                ),
                timeout_s=self._left_s,
                attempt_timeout_s=ATTEMPT_TIMEOUT_S,
            )
            found += answer.transactions
            check_goes_on(after, answer.next_after, f"transactions of coordinator {partition}")
            after = answer.next_after
        return found

    async def describe_transaction(self, transactional_id: str) -> TransactionInfo:
        check_transactional_id(transactional_id)
        if await self._coordinators() == 0:
            raise InvalidRequestError(
                f"There is no transactional id {transactional_id!r}: no transaction was begun so "
                "far."
            )
        answer: DescribeTransactionResponse = await self._coordinator(transactional_id).ask(
            lambda topic, number, epoch: DescribeTransaction(
                topic, number, epoch, transactional_id
            ),
            timeout_s=self._left_s,
        )
        response = await self._client.fetch_all(timeout_s=self._left_s)
        names = {topic.topic_id: topic.name for topic in response.topics}
        return TransactionInfo(
            transactional_id=answer.transactional_id,
            owner=answer.owner,
            transaction_timeout_ms=answer.transaction_timeout_ms,
            last_name=answer.last_name,
            transactions=[_listing(one) for one in answer.transactions],
            participants=[
                TransactionParticipant(
                    family, epoch, TopicPartition(names[topic_id], number), is_written
                )
                for family, epoch, topic_id, number, is_written in answer.participants
                if topic_id in names
            ],
        )

    async def abort_transaction(self, transactional_id: str) -> None:
        info = await self.describe_transaction(transactional_id)
        found = next(
            (one for one in info.transactions if one.state in ("open", "sealed")), None
        )
        if found is None:
            states = ", ".join(one.state for one in info.transactions)
            raise InvalidRequestError(
                f"{transactional_id!r} has no open transaction to abort (it is {states}). What is "
                "decided ends as it was decided."
            )
        await self._coordinator(transactional_id).ask(
            lambda topic, number, epoch: AbortTransaction(
                topic, number, epoch, found.producer_id, found.epoch
            ),
            timeout_s=self._left_s,
        )

    def _coordinator(self, transactional_id: str) -> TransactionsCoordinator:
        return TransactionsCoordinator(self._client, transactional_id, ProducerConfig())

    # --- that no coordinator knows --------------------------------------------------------------

    async def find_hanging(self, topics: Iterable[str] | None) -> list[HangingTransaction]:
        """A coordinator hears of a transaction before a partition does, and forgets it after all
        partitions have its marker. So what is open in a partition before and after coordinators
        were asked, and unknown to them, hangs."""
        if topics is None:
            response = await self._client.fetch_all(timeout_s=self._left_s)
            topics = [one.name for one in response.topics if one.name != TRANSACTIONS_TOPIC]
        places = [
            TopicPartition(name, number)
            for name in topics
            for number in range(
                len((await self._client.topic(name, timeout_s=self._left_s)).partitions)
            )
        ]
        found = await self._open_in(places)
        if found:
            listed = await self.list_transactions(idle=False)
            known = {(one.producer_id, one.epoch) for one in listed}
            found = {one for one in found if (one.producer_id, one.epoch) not in known}
            found &= await self._open_in({one.topic_partition for one in found})
        return sorted(found, key=lambda one: (one.topic_partition, one.first_offset))

    async def _open_in(self, places: Iterable[TopicPartition]) -> set[HangingTransaction]:
        """What is open in these partitions, whether it hangs or not."""
        places = list(places)
        answers: list[DescribeOpenTransactionsResponse] = await asyncio.gather(
            *(
                self._client.ask_leader(
                    place.topic,
                    place.partition,
                    lambda topic_id, leader, place=place: DescribeOpenTransactions(  # type: ignore[misc]
                        topic_id, place.partition, leader.epoch, None
                    ),
                    timeout_s=self._left_s,
                    attempt_timeout_s=ATTEMPT_TIMEOUT_S,
                )
                for place in places
            )
        )
        return {
            HangingTransaction(place, *one)
            for place, answer in zip(places, answers, strict=True)
            for one in answer.open
        }

    async def abort_hanging(self, hanging: HangingTransaction) -> None:
        place = hanging.topic_partition
        await self._client.ask_leader(
            place.topic,
            place.partition,
            lambda topic_id, leader: AbortUnknownTransaction(
                topic_id, place.partition, leader.epoch, hanging.producer_id, hanging.epoch
            ),
            timeout_s=self._left_s,
            attempt_timeout_s=self._left_s,
        )


def check_transactional_id(given: object) -> None:
    """Raises TypeError, InvalidRequestError."""
    if not isinstance(given, str):
        raise TypeError(f"A transactional id is a str, not {type(given).__name__}.")
    if not 1 <= len(given) <= ID_CHARACTERS_MAX or not is_unicode(given):
        raise InvalidRequestError(
            f"A transactional id has 1 to {ID_CHARACTERS_MAX} characters of Unicode: "
            f"{shown(given)} is none."
        )


def _listing(one: TransactionSummary) -> TransactionListing:
    return TransactionListing(
        transactional_id=one.transactional_id,
        state=one.state,
        producer_id=one.family,
        epoch=one.epoch,
        age_ms=one.age_ms,
        transaction_timeout_ms=one.transaction_timeout_ms,
        partitions=one.partitions,
    )
