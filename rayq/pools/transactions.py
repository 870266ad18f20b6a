"""Transactions of one consumer of a pool with exactly_once: positions, and the records sent for
them.

The positions go first: from then on the coordinator of the group knows the transaction, and aborts
it at once when the consumer dies. The handler is called before, so that a transaction is open only
while records are written, and readers of the topics do not wait for handlers.
"""

from __future__ import annotations

from typing import NamedTuple

from rayq.client.cluster import Cluster
from rayq.client.consumer_pool import PoolSpec
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.client.group_positions import GroupPositions
from rayq.client.producing.producer import AsyncProducer
from rayq.errors import (
    InvalidRequestError,
    InvalidTimestampError,
    NullKeyError,
    ProducerFencedError,
    RayqError,
    RecordTooLargeError,
    TransactionAbortedError,
    TransactionCommittedError,
    UnknownTopicError,
)
from rayq.records import Outgoing, TopicPartition

TIMEOUT_MS = 30_000
"""Timeout of each step of a transaction, or a part of `max_poll_interval_ms` if that is less: the
consumer does not poll in its group meanwhile."""
POOL_NAME_CHARACTERS = 200
"""Maximum length of a pool's name in transactional ids, which are shorter than two names may be."""
_FAULTS_OF_RECORDS = (
    InvalidRequestError,
    InvalidTimestampError,
    NullKeyError,
    RecordTooLargeError,
    UnknownTopicError,
)


class RefusedOutgoing(NamedTuple):
    """A record that cannot be sent, no matter how often it is tried."""

    cause: BaseException


class PoolTransactions:
    """The transactions of one consumer, one after the other."""

    def __init__(self, cluster: Cluster, spec: PoolSpec, member: str) -> None:
        self._cluster = cluster
        self._id = f"pool:{spec.name[:POOL_NAME_CHARACTERS]}:{member}"
        self._timeout_ms = min(TIMEOUT_MS, spec.config.max_poll_interval_ms // 6 + 1)
        self._opened: AsyncProducer | None = None

    async def write(
        self,
        consumer: AsyncConsumer,
        ends: dict[TopicPartition, int],
        outgoing: list[Outgoing],
    ) -> RefusedOutgoing | RayqError | None:
        """Commits these offsets of the consumer's group, and these records. Returns None if it is
        done; otherwise `settle` comes next. Raises ProducerFencedError."""
        await consumer.mark_positions()
        refused: BaseException | None = None
        try:
            async with self._producer().transaction() as tx:
                await tx.send_offsets(_Offsets(consumer, ends))
                try:
                    for record in outgoing:
                        await tx.send(
                            record.topic,
                            record.value,
                            key=record.key,
                            headers=record.headers,
                            partition=record.partition,
                            timestamp_ms=record.timestamp_ms,
                        )
                except Exception as error:
                    if isinstance(error, _FAULTS_OF_RECORDS) or not isinstance(error, RayqError):
                        refused = error
                    raise
        except ProducerFencedError:
            raise
        except TransactionCommittedError as error:
            return error
        except TransactionAbortedError as error:
            cause = error.__cause__
            return RefusedOutgoing(cause) if isinstance(cause, _FAULTS_OF_RECORDS) else error
        except Exception as error:
            if refused is not None:
                return RefusedOutgoing(refused)
            if isinstance(error, RayqError):
                return error
            raise
        return None

    async def settle(self) -> None:
        """Waits until the outcome of the last transaction is known. Raises ProducerFencedError, and
        other RayqErrors if it is not known yet."""
        await self._producer().begin_transaction()
        await self._producer().abort_transaction()

    def close(self) -> None:
        if self._opened is not None:
            self._opened.abandon()

    def _producer(self) -> AsyncProducer:
        if self._opened is None:
            self._opened = self._cluster.async_producer(
                transactional_id=self._id,
                max_block_ms=self._timeout_ms,
                delivery_timeout_ms=self._timeout_ms,
                large_values="chunks",
            )
        return self._opened


class _Offsets(NamedTuple):
    """Offsets of a consumer's partitions, in the form that a transaction takes."""

    consumer: AsyncConsumer
    ends: dict[TopicPartition, int]

    async def positions_to_send(self) -> GroupPositions:
        return await self.consumer.positions_to_send(self.ends)

    async def mark_positions(self) -> object:
        return await self.consumer.mark_positions()

    async def go_back(self, mark: object, *, is_aborted: bool) -> None:
        await self.consumer.go_back(mark, is_aborted=is_aborted)
