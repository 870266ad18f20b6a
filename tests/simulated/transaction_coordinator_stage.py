"""A coordinator of transactions alone: leaders of participants, and the broker, are played."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

from proving.simulation.process import Process
from rayq import messages
from rayq.actors.access import Access
from rayq.actors.clock_watch import ClockWatch
from rayq.actors.peers import Build, Peers
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.actors.transactions.transaction_coordinator import (
    TransactionCoordinator,
)
from rayq.core.cluster.topic_changes import TRANSACTIONS_TOPIC
from rayq.core.transactions.records import (
    Record,
    TransactionKey,
    encode,
)
from rayq.errors import (
    NotLeaderError,
    RayqError,
)
from rayq.messages.transaction_ids import coordinator_partition, make_family
from tests.simulated.coordinator_stage import EPOCH, Led, leading

PARTITION, PARTITIONS = 2, 4
WHERE = ("S", PARTITION, EPOCH)
TIMEOUT_MS = 60_000


def named(prefix: str, *, here: bool = True) -> str:
    """A transactional id of this coordinator, or of another one."""
    return next(
        name
        for name in (f"{prefix}{number}" for number in range(100))
        if (coordinator_partition(name, PARTITIONS) == PARTITION) is here
    )


NAME, OTHER = named("id-"), named("other-")


class Leaders(Peers):
    """Writes markers, unless the partition is held back, and knows which topics are gone."""

    def __init__(self) -> None:  # It has no network.
        self.markers: list[messages.WriteMarker] = []
        self.tries: list[tuple[str, int]] = []
        self.held: set[tuple[str, int]] = set()
        self.gone: set[str] = set()
        self.failure: RayqError | None = None
        self.answering = asyncio.Event()
        """Cleared while it is not known how many coordinators there are."""
        self.answering.set()

    async def coordinators(self) -> int:
        await self.answering.wait()
        if self.failure is not None:
            raise self.failure
        return PARTITIONS

    async def ask_leader(
        self, topic_id: str, partition: int, build: Build[messages.ResponseT]
    ) -> messages.ResponseT:
        self.tries.append((topic_id, partition))
        await asyncio.sleep(0.001)
        if (topic_id, partition) in self.held:
            raise NotLeaderError("held back")
        self.markers.append(cast(Any, build(topic_id, partition, 5)))
        return cast(messages.ResponseT, messages.Done())

    def is_gone(self, topic_id: str) -> bool:
        return topic_id in self.gone


class Coordinating(Led):
    topic, topic_id, partition = TRANSACTIONS_TOPIC, WHERE[0], PARTITION

    def __init__(
        self, process: Process, log: ReplicaLog, given: messages.PartitionAssignment
    ) -> None:
        self.leaders = Leaders()
        super().__init__(process, log, given)
        self.numbers = 0
        self.asked: list[Any] = []
        self.answering = asyncio.Event()
        """Cleared while the broker holds its answers back."""
        self.answering.set()
        self.failure: RayqError | None = None
        self.clock_watch = ClockWatch(self.environment.clock)
        self.begin()

    def peers(self) -> Peers:
        return self.leaders

    def begin(self) -> None:
        self.coordinator = TransactionCoordinator(
            self.log,
            self.leader,
            self.given,
            access=Access(self.log.environment.clock),
            ask_broker=self._broker,
            peers=self.leaders,
            clock_watch=self.clock_watch,
        )

    def begin_again(self) -> None:
        self.coordinator.end("a test")
        self.begin()

    async def _broker(self, request: messages.Request[Any]) -> Any:
        self.asked.append(request)
        await self.answering.wait()
        await asyncio.sleep(0.001)
        if self.failure is not None:
            raise self.failure
        assert isinstance(request, messages.DrawFamily)
        self.numbers += 1
        return messages.DrawFamilyResponse(self.numbers)

    # --- requests, as producers, leaders and operators send them ----------------------------

    async def ask(self, request: messages.Request[messages.ResponseT]) -> messages.ResponseT:
        return cast(Any, await self.coordinator.handle(self.connection(), request))

    async def init(
        self, name: str = NAME, owner: str = "a", timeout_ms: int = TIMEOUT_MS
    ) -> TransactionKey:
        answer = await self.ask(
            messages.InitProducer(*WHERE, name, owner, timeout_ms)
        )
        return TransactionKey(answer.family, answer.epoch)

    async def join(self, key: TransactionKey, *participants: tuple[str, int]) -> None:
        for participant in participants:
            await self.ask(messages.JoinTransaction(*WHERE, *key, *participant))

    async def end(
        self,
        key: TransactionKey,
        is_commit: bool = True,
        *,
        owner: str = "a",
        name: str | None = None,
        of: str = NAME,
        wait_ms: int = 10_000,
    ) -> messages.EndTransactionResponse:
        return await self.ask(
            messages.EndTransaction(*WHERE, of, owner, *key, is_commit, name, wait_ms)
        )

    async def touch(self, key: TransactionKey, owner: str = "a") -> None:
        await self.ask(messages.TouchTransaction(*WHERE, NAME, owner, *key))

    async def seal(self, key: TransactionKey, owner: str = "a") -> list[tuple[str, int]]:
        answer = await self.ask(messages.SealTransaction(*WHERE, NAME, owner, *key))
        return answer.participants

    async def abort(self, key: TransactionKey) -> None:
        await self.ask(messages.AbortTransaction(*WHERE, *key))

    async def outcome(self, key: TransactionKey) -> str:
        answer = await self.ask(messages.DescribeOutcome(*WHERE, *key))
        return answer.state

    async def describe(self, name: str = NAME) -> messages.DescribeTransactionResponse:
        return await self.ask(messages.DescribeTransaction(*WHERE, name))

    async def listed(
        self, after: str = "", *, idle: bool = False
    ) -> messages.ListTransactionsResponse:
        return await self.ask(
            messages.ListTransactions(*WHERE, after, idle)
        )

    async def stored(self, *records: Record) -> None:
        await self.store(*(encode(record) for record in records))

    def marked(self, key: TransactionKey) -> list[tuple[str, int, bool]]:
        return sorted(
            (marker.topic_id, marker.partition, marker.is_commit)
            for marker in self.leaders.markers
            if (marker.family, marker.epoch) == key
        )

    def measured(self) -> list[tuple[str, float]]:
        return [
            (sample.labels["partition"], sample.value)
            for sample in self.environment.metrics.collect()
            if sample.name == "rayq_open_transactions"
        ]


def coordinating(work: Callable[[Coordinating], Awaitable[None]]) -> None:
    leading(Coordinating, work)


def key_of(number: int, epoch: int = 0) -> TransactionKey:
    """Of the family that the broker's number stands for."""
    return TransactionKey(make_family(PARTITION, number), epoch)
