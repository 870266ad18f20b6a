"""Connections from a replica process to the leaders of other partitions, the coordinators of
transactions and the coordinators of queues. A process has one `Peers`, which its replicas share.

It finds leaders by the metadata of this node's broker, and asks for them again after a leader
refused or did not answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, NamedTuple, TypeVar, cast

from rayq import messages
from rayq.backoff import Backoff
from rayq.core.cluster.topic_changes import AUDIT_TOPIC, QUEUES_TOPIC, TRANSACTIONS_TOPIC
from rayq.core.queues.queue_states import queue_state_partition
from rayq.environment import Environment
from rayq.errors import (
    ClosedError,
    ControllerUnavailableError,
    NotLeaderError,
    RayqError,
    TimeoutError,
    UnknownTopicError,
)
from rayq.messages.transaction_ids import coordinator_of
from rayq.wire.pool import ConnectionPool

T = TypeVar("T")

ATTEMPT_TIMEOUT_S = 5.0
RETRY_S = 0.05
RETRY_MAX_S = 1.0
PATIENCE_S = 30.0
"""Maximum time that a request to a coordinator is retried: long enough for a coordinator to move
and load."""
TOPIC_GONE_S = 10.0
"""Time after which a topic whose id is missing in the metadata counts as deleted."""
TOPICS_MAX = 10_000
"""Maximum number of topics whose leaders a process remembers, and of those that were missing: the
ones that it asked for last."""


Build = Callable[[str, int, int], messages.ToLeader[messages.ResponseT]]
"""Function that makes a request from topic id, partition and leader epoch."""


class _Leader(NamedTuple):
    epoch: int
    host: str
    port: int


class Peers:
    """See the module. Errors are those of the request and of the connection."""

    def __init__(
        self, environment: Environment, pool: ConnectionPool, *, ask_broker: messages.Ask
    ) -> None:
        """`ask_broker` sends a request to this node's broker."""
        self._environment = environment
        self._pool = pool
        self._ask_broker = ask_broker
        self._leaders: dict[str, list[_Leader | None]] = {}
        """Leaders by topic id, then by partition; None if a partition has no leader."""
        self._own_topic_ids: dict[str, str] = {}
        """Ids of rayq's internal topics that were requested, by name."""
        self._missing_since_s: dict[str, float] = {}
        self._questions: dict[Hashable, asyncio.Future[Any]] = {}

    # --- coordinators -----------------------------------------------------------------------

    async def join(
        self,
        family: int,
        epoch: int,
        topic_id: str,
        partition: int,
        *,
        principal: str | None,
    ) -> None:
        """Returns once the partition is a participant of the transaction, durably, in which the
        principal may write. Raises TransactionEndedError, TransactionLimitError,
        AuthorizationError, and TimeoutError if no coordinator answers within `PATIENCE_S`."""

        def build(where: str, number: int, leader_epoch: int) -> messages.JoinTransaction:
            return messages.JoinTransaction(
                where, number, leader_epoch, family, epoch, topic_id, partition, principal
            )

        await self._once(
            ("join", family, epoch, topic_id, partition, principal),
            lambda: self._ask_coordinator(family, build),
        )

    async def prolong(
        self, family: int, epoch: int, throttle_ms: int, *, principal: str | None
    ) -> None:
        """Prolongs the principal's transaction by a time for which its producer has to wait. Raises
        AuthorizationError, and TimeoutError if no coordinator answers within `PATIENCE_S`."""

        def build(where: str, number: int, leader_epoch: int) -> messages.ProlongTransaction:
            return messages.ProlongTransaction(
                where, number, leader_epoch, family, epoch, throttle_ms, principal
            )

        await self._ask_coordinator(family, build)

    async def abort(self, family: int, epoch: int) -> None:
        """Aborts the transaction if it is open. Raises TimeoutError if no coordinator answers
        within `PATIENCE_S`."""

        def build(topic_id: str, partition: int, leader_epoch: int) -> messages.AbortTransaction:
            return messages.AbortTransaction(topic_id, partition, leader_epoch, family, epoch)

        await self._once(
            ("abort", family, epoch), lambda: self._ask_coordinator(family, build)
        )

    async def outcome(self, family: int, epoch: int) -> str:
        """Returns `messages.DescribeOutcomeResponse.state` of the transaction. Raises TimeoutError
        if no coordinator answers within `PATIENCE_S`."""

        def build(where: str, number: int, leader_epoch: int) -> messages.DescribeOutcome:
            return messages.DescribeOutcome(where, number, leader_epoch, family, epoch)

        answer = await self._once(
            ("outcome", family, epoch), lambda: self._ask_coordinator(family, build)
        )
        return answer.state

    async def coordinators(self) -> int:
        """Returns the number of partitions of `__transaction_state`. Raises UnknownTopicError."""
        return len(self._leaders[await self.find_own(TRANSACTIONS_TOPIC)])

    async def _ask_coordinator(
        self, family: int, build: Build[messages.ResponseT]
    ) -> messages.ResponseT:
        partition = coordinator_of(family)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + PATIENCE_S
        backoff = Backoff(self._environment, RETRY_S, RETRY_MAX_S)
        while True:
            try:
                topic_id = await self.find_own(TRANSACTIONS_TOPIC)
                return await self.ask_leader(topic_id, partition, build)
            except RayqError as error:
                if not (error.retriable or isinstance(error, UnknownTopicError)):
                    raise
                retry_s = backoff.next_s()
                if loop.time() + retry_s >= deadline_s:
                    raise TimeoutError(
                        f"The coordinator of transactions in {TRANSACTIONS_TOPIC}-{partition} did "
                        f"not answer for {PATIENCE_S:g} s: {error}"
                    ) from error
            await asyncio.sleep(retry_s)

    async def find_own(self, name: str) -> str:
        """Returns the topic id of one of rayq's internal topics, whose leaders are then known.
        Raises UnknownTopicError."""
        topic_id = self._own_topic_ids.get(name)
        if topic_id is None or topic_id not in self._leaders:
            await self._once(name, lambda: self._look_up([name], []))
            topic_id = self._own_topic_ids.get(name)
        if topic_id is None or topic_id not in self._leaders:
            raise UnknownTopicError(f"There is no topic {name} (yet).")
        return topic_id

    # --- the coordinator of the audit -------------------------------------------------------

    async def append_audit(self, lines: list[bytes]) -> None:
        """Sends lines once to the coordinator of the audit."""
        topic_id = await self.find_own(AUDIT_TOPIC)
        await self.ask_leader(
            topic_id,
            0,
            lambda topic_id, partition, epoch: messages.AppendAudit(
                topic_id, partition, epoch, lines
            ),
        )

    # --- coordinators of queues ------------------------------------------------------------------

    async def ask_queue_state(
        self, queue_id: str, build: Build[messages.ResponseT], payload: bytes = b""
    ) -> tuple[messages.ResponseT, memoryview]:
        """Sends a request once to the coordinator of a queue, as `exchange`, and returns the
        answer. Raises UnknownTopicError, too, while the metadata here are older than the queue."""
        topic_id = await self.find_own(QUEUES_TOPIC)
        # The number of partitions is final: the queue's record was committed after those of all
        # partitions.
        partition = queue_state_partition(queue_id, len(self._leaders[topic_id]))
        return await self.exchange(topic_id, partition, build, payload)

    # --- leaders ----------------------------------------------------------------------------

    async def ask_leader(
        self, topic_id: str, partition: int, build: Build[messages.ResponseT]
    ) -> messages.ResponseT:
        """Sends a request once to a partition's leader, and returns the answer. After an error that
        another leader may not give, the next attempt asks for new metadata first."""
        answer, _ = await self.exchange(topic_id, partition, build)
        return answer

    async def exchange(
        self,
        topic_id: str,
        partition: int,
        build: Build[messages.ResponseT],
        payload: bytes = b"",
    ) -> tuple[messages.ResponseT, memoryview]:
        """Does `ask_leader` with a payload in both directions."""
        if topic_id not in self._leaders:
            await self._once(topic_id, lambda: self._look_up([], [topic_id]))
        leaders = self._leaders.get(topic_id)
        leader = leaders[partition] if leaders and partition < len(leaders) else None
        if leaders is None or leader is None:
            self._leaders.pop(topic_id, None)
            raise NotLeaderError(f"Partition {partition} of topic {topic_id} has no leader now.")
        try:
            request = build(topic_id, partition, leader.epoch)
            return await self._pool.request(
                leader.host, leader.port, request, payload, timeout_s=ATTEMPT_TIMEOUT_S
            )
        except RayqError as error:
            if error.stale_metadata and self._leaders.get(topic_id) is leaders:
                del self._leaders[topic_id]
            raise

    async def find_topic(self, name: str) -> tuple[str, int]:
        """Returns the id of a topic, and its number of partitions. Raises UnknownTopicError."""
        answer = await self._once(
            ("topic", name), lambda: self._ask_broker(messages.Metadata([name]))
        )
        if answer.controller is None:
            raise ControllerUnavailableError("The broker's metadata may be old: it has just begun.")
        for topic in answer.topics:
            if topic.partitions:
                return topic.topic_id, len(topic.partitions)
        raise UnknownTopicError(f"There is no topic {name!r}.")

    async def new_producer_id(self) -> int:
        """Returns a producer id that nobody had before, and nobody else gets."""
        return (await self._ask_broker(messages.AllocateProducerId())).producer_id

    def is_gone(self, topic_id: str) -> bool:
        """Returns whether the topic was deleted: it was missing in the metadata at each request
        within the last `TOPIC_GONE_S`."""
        since_s = self._missing_since_s.get(topic_id)
        now_s = self._environment.clock.monotonic()
        return since_s is not None and now_s - since_s > TOPIC_GONE_S

    async def _look_up(self, names: list[str], topic_ids: list[str]) -> None:
        answer = await self._ask_broker(messages.Metadata(names, topic_ids=topic_ids))
        if answer.controller is None:
            raise ControllerUnavailableError("The broker's metadata may be old: it has just begun.")
        known_ids = {topic.topic_id for topic in answer.topics}
        now_s = self._environment.clock.monotonic()
        for topic_id in topic_ids:
            if topic_id in known_ids:
                self._missing_since_s.pop(topic_id, None)
            else:
                self._missing_since_s.setdefault(topic_id, now_s)
                self._leaders.pop(topic_id, None)
        for topic in answer.topics:
            if topic.name in names:
                self._own_topic_ids[topic.name] = topic.topic_id
            self._leaders[topic.topic_id] = [_leader(partition) for partition in topic.partitions]
        # They are looked up again where they are asked for.
        for known in (self._leaders, self._missing_since_s):
            while len(known) > TOPICS_MAX:
                del known[next(iter(known))]

    async def _once(self, question: Hashable, ask: Callable[[], Awaitable[T]]) -> T:
        """Returns the answer to a question. Only one request for it is in flight at a time: others
        wait for that."""
        answer = self._questions.get(question)
        if answer is None:
            answer = self._questions[question] = asyncio.get_running_loop().create_future()
            self._environment.tasks.spawn(self._answer(question, ask, answer), f"ask {question}")
        outcome = await asyncio.shield(answer)
        if isinstance(outcome, RayqError):
            raise outcome.with_message(outcome.message)
        return cast(T, outcome)

    async def _answer(
        self, question: Hashable, ask: Callable[[], Awaitable[T]], answer: asyncio.Future[Any]
    ) -> None:
        # An error is returned as a value: asyncio logs exceptions that nobody fetches.
        outcome: T | RayqError = ClosedError("The question was cancelled: the process ends.")
        try:
            outcome = await ask()
        except RayqError as error:
            outcome = error
        finally:
            del self._questions[question]
            answer.set_result(outcome)


def _leader(partition: messages.PartitionMetadata) -> _Leader | None:
    for replica in partition.replicas:
        if replica.broker == partition.leader and replica.host and replica.port:
            return _Leader(partition.leader_epoch, replica.host, replica.port)
    return None
