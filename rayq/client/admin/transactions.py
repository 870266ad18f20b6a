"""Administration of transactions: list, describe, abort, and find those that nobody ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from rayq.client.arguments import shown
from rayq.client.client import Client
from rayq.client.coordinator import TransactionsCoordinator, coordinator_partitions
from rayq.client.deadlines import time_left_s
from rayq.config import ProducerConfig, is_unicode
from rayq.core.cluster.topic_changes import TRANSACTIONS_TOPIC
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
    """One call of the admin on transactions, which may take `timeout_s`."""

    def __init__(self, client: Client, timeout_s: float) -> None:
        self._client = client
        self._deadline = client.now + timeout_s

    @property
    def _left_s(self) -> float:
        return time_left_s(self._client.now, self._deadline)

    async def _coordinators(self) -> int:
        """The number of partitions of `__transaction_state`; 0 before the first transaction."""
        return await coordinator_partitions(
            self._client, TRANSACTIONS_TOPIC, create=False, timeout_s=self._left_s
        )

    # --- by their coordinators ------------------------------------------------------------------

    async def list_transactions(self, *, idle: bool) -> list[TransactionListing]:
        pages = await asyncio.gather(
            *(self._list(partition, idle=idle) for partition in range(await self._coordinators()))
        )
        listed = [_listing(summary) for page in pages for summary in page]
        return sorted(
            listed, key=lambda listing: (-(listing.age_ms or 0), listing.transactional_id)
        )

    async def _list(self, partition: int, *, idle: bool) -> list[TransactionSummary]:
        """The transactions that one coordinator lists, page by page."""
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
            transactions=[_listing(summary) for summary in answer.transactions],
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
            (listing for listing in info.transactions if listing.state in ("open", "sealed")), None
        )
        if found is None:
            states = ", ".join(listing.state for listing in info.transactions)
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
        """Finds transactions that hang. A coordinator hears of a transaction before a partition
        does, and forgets it after all partitions have its marker. So a transaction hangs if it is
        open in a partition before and after the coordinators were asked, and unknown to them."""
        if topics is None:
            response = await self._client.fetch_all(timeout_s=self._left_s)
            topics = [topic.name for topic in response.topics if topic.name != TRANSACTIONS_TOPIC]
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
            known = {(listing.producer_id, listing.epoch) for listing in listed}
            found = {t for t in found if (t.producer_id, t.epoch) not in known}
            found &= await self._open_in({t.topic_partition for t in found})
        return sorted(found, key=lambda t: (t.topic_partition, t.first_offset))

    async def _open_in(self, places: Iterable[TopicPartition]) -> set[HangingTransaction]:
        """The transactions that are open in these partitions, whether they hang or not."""
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
            HangingTransaction(place, *fields)
            for place, answer in zip(places, answers, strict=True)
            for fields in answer.open
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
    """Checks a transactional id. Raises TypeError, InvalidRequestError."""
    if not isinstance(given, str):
        raise TypeError(f"A transactional id is a str, not {type(given).__name__}.")
    if not 1 <= len(given) <= ID_CHARACTERS_MAX or not is_unicode(given):
        raise InvalidRequestError(
            f"A transactional id has 1 to {ID_CHARACTERS_MAX} characters of Unicode: "
            f"{shown(given)} is none."
        )


def _listing(summary: TransactionSummary) -> TransactionListing:
    return TransactionListing(
        transactional_id=summary.transactional_id,
        state=summary.state,
        producer_id=summary.family,
        epoch=summary.epoch,
        age_ms=summary.age_ms,
        transaction_timeout_ms=summary.transaction_timeout_ms,
        partitions=summary.partitions,
    )
