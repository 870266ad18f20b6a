"""Administration of transactions: list, describe, abort, and find those that nobody ends."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

from rayq.client.admin.base import ADMIN_TIMEOUT_S, AdminMethods, Call
from rayq.client.arguments import shown, topic_names
from rayq.client.coordinator import TransactionsCoordinator, coordinator_partitions
from rayq.client.timeouts import takes_timeout
from rayq.config import ProducerConfig, is_unicode
from rayq.core.cluster.topic_changes import TRANSACTIONS_TOPIC
from rayq.errors import InvalidRequestError
from rayq.messages import (
    AbortTransaction,
    AbortUnknownTransaction,
    DescribeOpenTransactions,
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
from rayq.wire.paging import check_advances

ID_CHARACTERS_MAX = 256


class TransactionAdmin(AdminMethods):
    """Methods of `AsyncAdmin` about transactions: those that their coordinators know, and those
    that no coordinator knows."""

    @takes_timeout
    async def list_transactions(
        self, *, idle: bool = False, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> list[TransactionListing]:
        """The transactions that are open, or decided while some partitions lack their markers,
        oldest first. With `idle`, also the transactional ids without a transaction in progress."""
        return await _list_transactions(Call(self._client, timeout_s), idle=idle)

    @takes_timeout
    async def describe_transaction(
        self, transactional_id: str, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> TransactionInfo:
        """Describes a transactional id: its transactions in progress, and the partitions that take
        part in them; those of deleted topics are left out. Raises InvalidRequestError for an id
        that nobody uses."""
        return await _describe(Call(self._client, timeout_s), transactional_id)

    @takes_timeout
    async def abort_transaction(
        self, transactional_id: str, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> None:
        """Aborts the open transaction of a transactional id; its producer gets
        TransactionAbortedError. Returns once that is decided, or once the producer has ended it at
        the same moment. Raises InvalidRequestError if the id is unknown or has nothing open."""
        call = Call(self._client, timeout_s)
        info = await _describe(call, transactional_id)
        found = next(
            (listing for listing in info.transactions if listing.state in ("open", "sealed")), None
        )
        if found is None:
            states = ", ".join(listing.state for listing in info.transactions)
            raise InvalidRequestError(
                f"{transactional_id!r} has no open transaction to abort (it is {states}). What is "
                "decided ends as it was decided."
            )
        await _coordinator(call, transactional_id).ask(
            lambda topic, number, epoch: AbortTransaction(
                topic, number, epoch, found.producer_id, found.epoch, transactional_id
            ),
            timeout_s=call.left_s,
        )

    @takes_timeout
    async def find_hanging_transactions(
        self, topics: str | Iterable[str] | None = None, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> list[HangingTransaction]:
        """Finds transactions in all partitions of these topics (None: of all topics) that their
        coordinators do not know, as after the loss of `__transaction_state`. It asks the leader of
        each partition; a partition without a leader is an error, as in every call."""
        # A coordinator hears of a transaction before a partition does, and forgets it after all
        # partitions have its marker. So a transaction hangs if it is open in a partition before and
        # after the coordinators were asked, and unknown to them.
        names = None if topics is None else topic_names(topics)
        call = Call(self._client, timeout_s)
        if names is None:
            response = await self._client.fetch_all(timeout_s=call.left_s)
            names = tuple(t.name for t in response.topics if t.name != TRANSACTIONS_TOPIC)
        places = [
            TopicPartition(name, number)
            for name in names
            for number in range(
                len((await self._client.topic(name, timeout_s=call.left_s)).partitions)
            )
        ]
        found = await _open_in(call, places)
        if found:
            listed = await _list_transactions(call, idle=False)
            known = {(listing.producer_id, listing.epoch) for listing in listed}
            found = {t for t in found if (t.producer_id, t.epoch) not in known}
            found &= await _open_in(call, {t.topic_partition for t in found})
        return sorted(found, key=lambda t: (t.topic_partition, t.first_offset))

    @takes_timeout
    async def abort_hanging_transaction(
        self, hanging: HangingTransaction, *, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> None:
        """Aborts a transaction that `find_hanging_transactions` has found, in its partition only;
        does nothing if it is no longer open there. If the same transaction was committed, its
        records in this partition are lost to readers of committed records. Raises
        InvalidRequestError if its coordinator knows it."""
        call = Call(self._client, timeout_s)
        await call.ask_leader(
            *hanging.topic_partition,
            AbortUnknownTransaction,
            hanging.producer_id,
            hanging.epoch,
            attempt_timeout_s=call.left_s,
        )


def _coordinator(call: Call, transactional_id: str) -> TransactionsCoordinator:
    return TransactionsCoordinator(call.client, transactional_id, ProducerConfig())


async def _coordinators(call: Call) -> int:
    """The number of partitions of `__transaction_state`; 0 before the first transaction."""
    return await coordinator_partitions(
        call.client, TRANSACTIONS_TOPIC, create=False, timeout_s=call.left_s
    )


async def _list_transactions(call: Call, *, idle: bool) -> list[TransactionListing]:
    pages = await asyncio.gather(
        *(_list(call, partition, idle=idle) for partition in range(await _coordinators(call)))
    )
    listed = [_listing(summary) for page in pages for summary in page]
    return sorted(listed, key=lambda listing: (-(listing.age_ms or 0), listing.transactional_id))


async def _list(call: Call, partition: int, *, idle: bool) -> list[TransactionSummary]:
    """The transactions that one coordinator lists, page by page."""
    found: list[TransactionSummary] = []
    after: str | None = ""
    while after is not None:
        answer: ListTransactionsResponse = await call.ask_leader(
            TRANSACTIONS_TOPIC, partition, ListTransactions, after, idle
        )
        found += answer.transactions
        check_advances(after, answer.next_after, f"transactions of coordinator {partition}")
        after = answer.next_after
    return found


async def _describe(call: Call, transactional_id: str) -> TransactionInfo:
    check_transactional_id(transactional_id)
    if await _coordinators(call) == 0:
        raise InvalidRequestError(
            f"There is no transactional id {transactional_id!r}: no transaction was begun so far."
        )
    answer: DescribeTransactionResponse = await _coordinator(call, transactional_id).ask(
        lambda topic, number, epoch: DescribeTransaction(topic, number, epoch, transactional_id),
        timeout_s=call.left_s,
    )
    response = await call.client.fetch_all(timeout_s=call.left_s)
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


async def _open_in(call: Call, places: Collection[TopicPartition]) -> set[HangingTransaction]:
    """The transactions that are open in these partitions, whether they hang or not."""
    answers = await asyncio.gather(
        *(call.ask_leader(*place, DescribeOpenTransactions, None) for place in places)
    )
    return {
        HangingTransaction(place, *fields)
        for place, answer in zip(places, answers, strict=True)
        for fields in answer.open
    }


def check_transactional_id(given: object) -> None:
    """Checks a transactional id. Raises TypeError, InvalidRequestError."""
    if not isinstance(given, str):
        raise TypeError(f"A transactional id must be a str, not {type(given).__name__}.")
    if not 1 <= len(given) <= ID_CHARACTERS_MAX or not is_unicode(given):
        raise InvalidRequestError(
            f"A transactional id has 1 to {ID_CHARACTERS_MAX} characters of Unicode, not "
            f"{shown(given)}."
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
