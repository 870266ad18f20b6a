"""Consumer of a group's pool: it polls, calls the user's handler, commits, and deals with failures.

Handled records are committed at most a fifth of a second later, so if a consumer dies, the records
of that time, and its current batch, are handled again. With exactly_once each batch is a
transaction that commits its positions, and the records that the handler returned, before the next
poll.

Partitions are assigned and revoked only between batches or while a failed batch waits to be tried
again. The consumer then polls with everything paused, which keeps it in its group, and drops
records from the batch whose partitions are no longer its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable

from rayq.client.cluster import Cluster
from rayq.client.consumer_pool import Handler, PoolSpec
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.environment import Environment
from rayq.errors import (
    CommitRefusedError,
    ProducerFencedError,
    RayqError,
    TransactionAbortedError,
    TransactionCommittedError,
    UnreadableRecordError,
    counted,
)
from rayq.pools.batch import PoolBatch, poll_batch
from rayq.pools.dead_letters import DeadLetters, dead_letter, not_written
from rayq.pools.handler import PoolHandler, described
from rayq.pools.member import ABORT_TIMEOUT_S, FAILED_POLL_PAUSE_S, POLL_S, Member, MemberReport
from rayq.pools.transactions import PoolTransactions, RefusedOutgoing
from rayq.records import Outgoing, Record, TopicPartition

logger = logging.getLogger(__name__)

COMMIT_INTERVAL_S = 0.2
KEEP_IN_GROUP = 3
"""Divisor of `max_poll_interval_ms`: a consumer at a long piece of work polls in its group once in
each such part."""


class PoolMember(Member):
    """See the module."""

    def __init__(
        self,
        environment: Environment,
        cluster: Cluster,
        spec: PoolSpec,
        name: str,
        load_handler: Callable[[], Handler],
    ) -> None:
        """`name` identifies it among the consumers of the pool, including past ones. For
        `environment.threads` and `load_handler` see `PoolHandler`."""
        exactly_once = spec.config.exactly_once
        handler = PoolHandler(environment.threads, load_handler, exactly_once=exactly_once)
        super().__init__(environment, spec, handler)
        self._cluster = cluster
        self._transactions = PoolTransactions(cluster, spec, name) if exactly_once else None
        self._consumer: AsyncConsumer | None = None
        self._dead_letters = DeadLetters(cluster, spec.config)
        self._done: dict[int, int] = {}
        """The offset after the handled records that are not committed yet, by partition. Empty with
        exactly_once: a transaction has committed them."""
        self._gone: set[int] = set()
        """Partitions that were revoked while a batch was in hand."""
        self._is_holding = False
        self._committed_at_s = self._polled_at_s = self._now_s

    # --- its life -------------------------------------------------------------------------------

    def report(self) -> MemberReport:
        """The report of this consumer, as `Member.report` returns it."""
        self._dead_letter_count = self._dead_letters.written
        return super().report()

    async def _consume(self) -> None:
        config = self._config
        consumer = self._consumer = self._cluster.async_consumer(
            self._spec.topic,
            group=self._spec.group,
            on_assigned=self._on_assigned,
            on_revoked=self._on_revoked,
            on_lost=self._on_lost,
            auto_offset_reset="earliest",
            max_poll_interval_ms=config.max_poll_interval_ms,
            group_session_timeout_ms=config.group_session_timeout_ms,
            group_heartbeat_interval_ms=min(3_000, config.group_session_timeout_ms // 3),
        )
        try:
            while self._is_going_on:
                try:
                    await self._turn(consumer)
                except TransactionAbortedError as error:
                    self._note(f"a batch is handled again: {error}")
                    await consumer.go_back({}, is_aborted=False)
                    await self._sleep(FAILED_POLL_PAUSE_S)
                await self._check_lease()
            await self._commit(consumer, self._done)
            await consumer.close(config.drain_timeout_s)
        except BaseException:
            await consumer.close(ABORT_TIMEOUT_S)
            raise
        finally:
            self._partitions.clear()
            self._dead_letters.close()
            if self._transactions is not None:
                self._transactions.close()

    @property
    def _poll_limit_s(self) -> float:
        return self._config.max_poll_interval_ms / 1000

    async def _turn(self, consumer: AsyncConsumer) -> None:
        """Polls once and handles the result. Raises TransactionAbortedError if reading has to
        continue at the committed positions."""
        try:
            batch = await self._poll(consumer)
        except UnreadableRecordError as error:
            is_buried = await self._bury_batch(consumer, error)
            await self._commit(consumer, self._done)
            if not is_buried:
                await self._sleep(FAILED_POLL_PAUSE_S)
            return
        except RayqError as error:
            self._failed_polls += 1
            self._note(f"polling failed: {type(error).__name__}: {error}")
            await self._sleep(FAILED_POLL_PAUSE_S)
            return
        self._failed_polls = 0
        ends = {
            partition: await consumer.position(TopicPartition(self._spec.topic, partition))
            for partition in batch.partitions()
        }
        if not await self._deal_with(consumer, batch, ends):
            return
        # The position of the poll may be further than the last record.
        self._finish(
            {partition: end for partition, end in ends.items() if partition not in self._gone}
        )
        if len(batch):
            self._problem = None
        if not len(batch) or self._now_s - self._committed_at_s >= COMMIT_INTERVAL_S:
            await self._commit_all(consumer)

    async def _poll(self, consumer: AsyncConsumer) -> PoolBatch:
        timeout_s = POLL_S
        if self._done:
            timeout_s = max(self._committed_at_s + COMMIT_INTERVAL_S - self._now_s, 0.0)
        self._polled_at_s = self._now_s
        batch = await poll_batch(
            consumer, self._config.batch, timeout_s, self._config.max_records
        )
        # The batch is its own, including partitions that were revoked and assigned again in this
        # poll.
        self._gone = set()
        return batch

    # --- partitions that come and go ------------------------------------------------------------

    async def _on_assigned(self, places: set[TopicPartition]) -> None:
        self._partitions |= _numbers(places)
        if self._is_holding and self._consumer is not None:
            await self._consumer.pause(*places)

    async def _on_revoked(self, places: set[TopicPartition]) -> None:
        numbers = _numbers(places)
        self._gone |= numbers
        self._partitions -= numbers
        if self._consumer is not None:
            await self._commit(self._consumer, numbers)
        self._forget(numbers)

    def _on_lost(self, places: set[TopicPartition]) -> None:
        numbers = _numbers(places)
        self._gone |= numbers
        self._partitions -= numbers
        self._forget(numbers)

    def _forget(self, partitions: Collection[int]) -> None:
        for partition in partitions:
            self._done.pop(partition, None)

    # --- commits --------------------------------------------------------------------------------

    def _finish(self, ends: dict[int, int]) -> None:
        if self._transactions is None:
            self._done.update(ends)

    async def _commit(self, consumer: AsyncConsumer, partitions: Iterable[int]) -> None:
        """Commits the handled records of these partitions. Offsets that cannot be committed are
        tried again later, unless another consumer has the partition by now."""
        self._committed_at_s = self._now_s
        offsets = {number: self._done[number] for number in partitions if number in self._done}
        places = {TopicPartition(self._spec.topic, number): end for number, end in offsets.items()}
        if not offsets or not await self._is_settled(consumer, places):
            return
        for partition, end in offsets.items():
            if self._done.get(partition) == end:
                del self._done[partition]

    async def _commit_all(self, consumer: AsyncConsumer) -> None:
        """Commits the positions of all partitions; only while there is no batch in hand. They may
        be further than the last record, where compaction removed the records that followed."""
        await self._commit(consumer, self._done)
        if self._transactions is not None:
            await consumer.mark_positions()  # The positions of the last transaction are committed.
        if not self._done and await self._is_settled(consumer, None):
            self._problem = None

    async def _is_settled(
        self, consumer: AsyncConsumer, offsets: dict[TopicPartition, int] | None
    ) -> bool:
        """Commits these, or all positions. Returns False if it is to be tried again."""
        try:
            await consumer.commit(offsets)
        except CommitRefusedError as error:
            logger.warning("a consumer of pool %r: %s", self._pool, error)
        except RayqError as error:
            self._note(f"committing failed: {type(error).__name__}: {error}")
            return False
        return True

    # --- a batch --------------------------------------------------------------------------------

    async def _deal_with(
        self, consumer: AsyncConsumer, batch: PoolBatch, ends: dict[int, int]
    ) -> bool:
        """Handles a batch. Returns once each of its records is handled, or is a dead letter, or is
        another consumer's; False if the batch was left because this consumer is drained. `ends` are
        the positions after the poll, by partition. Raises TransactionAbortedError if it is to be
        read again."""
        tries = 0
        while len(batch):
            error = await self._try(
                consumer, batch, {partition: ends[partition] for partition in batch.partitions()}
            )
            if error is None:
                return True
            tries += 1
            self._note(f"the handler raised {described(error)} ({counted(tries, 'time')})")
            if tries > self._config.retries and self._config.dead_letter_topic is not None:
                return await self._take_apart(consumer, batch, error)
            if self._draining.is_set():
                return False
            self._retries += 1
            await self._hold(consumer, self._backoff_s(tries))
            batch = batch.without(self._gone)
            if self._draining.is_set():
                return False
        return True

    async def _try(
        self, consumer: AsyncConsumer, batch: PoolBatch, ends: dict[int, int]
    ) -> BaseException | None:
        """Calls the handler, and sends the records that it returned. Returns the error that it
        raised, or that sending raised because of these records."""
        began_s = self._handling_since_s = self._now_s
        try:
            result = await self._handler.call(batch.given)
            self._handling_since_s = None
            if isinstance(result, BaseException):
                return result
            error = await self._transact(consumer, ends, result)
        finally:
            self._busy_s += self._now_s - began_s
            self._handling_since_s = None
        if error is None:
            self._records += len(batch)
        return error

    async def _transact(
        self, consumer: AsyncConsumer, ends: dict[int, int], outgoing: list[Outgoing]
    ) -> BaseException | None:
        """Commits the offsets that follow the handled records together with the records to send for
        them. Returns the error of a record that cannot be sent. Nobody polls before the outcome of
        the transaction is known, so partitions are given up only afterwards. Raises
        TransactionAbortedError if the batch is to be read again, and TransactionCommittedError if
        somebody else committed a part of it."""
        if self._transactions is None:
            return None
        places = {
            TopicPartition(self._spec.topic, partition): end for partition, end in ends.items()
        }
        error = await self._transactions.write(consumer, places, outgoing)
        if error is None:
            return None
        while not self._draining.is_set():
            try:
                await self._transactions.settle()
                break
            except ProducerFencedError:
                raise
            except RayqError as unsettled:
                self._note(f"what became of a transaction is not known yet: {unsettled}")
                await self._sleep(FAILED_POLL_PAUSE_S)
                await self._check_lease()
        if isinstance(error, RefusedOutgoing):
            return error.cause
        if isinstance(error, TransactionCommittedError):
            raise error  # Its positions took effect: nobody would handle the batch again.
        raise TransactionAbortedError(str(error)) from error

    def _backoff_s(self, tries: int) -> float:
        config = self._config
        doubled_ms: int = config.retry_backoff_ms * 2 ** min(tries - 1, 30)
        most_s = min(doubled_ms, config.retry_backoff_max_ms) / 1000
        return most_s * self._environment.random.uniform(0.5, 1.0)

    async def _take_apart(
        self, consumer: AsyncConsumer, batch: PoolBatch, error: BaseException
    ) -> bool:
        """Tries the halves of a batch that keeps failing, and their halves, down to single records;
        records that fail by themselves go to the dead letters. Order is kept within each
        partition."""
        pieces: list[tuple[PoolBatch, BaseException | None]] = [(batch, error)]
        """The pieces left, the next one last; with the error that it raised, if it was tried."""
        tries = 0
        while pieces:
            if self._draining.is_set():
                return False
            if self._now_s - self._polled_at_s > self._poll_limit_s / KEEP_IN_GROUP:
                await self._hold(consumer, 0.0)
            piece, failed = pieces.pop()
            piece = piece.without(self._gone) if self._gone else piece
            if len(piece) and failed is None:
                failed = await self._try(consumer, piece, piece.ends())
            if failed is None:
                self._finish(piece.ends())
            elif len(piece) > 1:
                earlier, later = piece.halves()
                pieces += [(later, None), (earlier, None)]
            elif len(piece) == 1 and not await self._write_dead_letter(
                consumer, piece.record(), failed, piece.ends()
            ):
                tries += 1
                pieces.append((piece, failed))
                await self._hold(consumer, self._backoff_s(tries))
            else:
                self._records += len(piece)
                self._finish(piece.ends())
        return True

    async def _bury_batch(
        self, consumer: AsyncConsumer, error: UnreadableRecordError
    ) -> bool:
        """Writes a dead letter without key and value in place of records that nobody can read;
        reading continues after them. Returns False if it was not written, or there is no topic for
        it."""
        place, offset, next_offset = error.topic_partition, error.offset, error.next_offset
        if error.never_skipped and place is not None and offset is not None:
            self._note(str(error))
            await consumer.seek(place, offset)  # It is tried again.
            return False
        if self._config.dead_letter_topic is None or place is None:
            self._note(f"{error} (With a dead_letter_topic the pool continues without it.)")
            return False
        assert offset is not None and next_offset is not None
        stand_in = Record(
            topic=place.topic,
            partition=place.partition,
            offset=offset,
            timestamp_ms=self._environment.clock.wall_ms(),
            key=None,
            value=None,
            headers=[],
        )
        ends = {place.partition: next_offset}
        if not await self._write_dead_letter(consumer, stand_in, error, ends):
            return False
        await consumer.seek(place, next_offset)
        self._finish(ends)
        return True

    async def _write_dead_letter(
        self, consumer: AsyncConsumer, record: Record, error: BaseException, ends: dict[int, int]
    ) -> bool:
        """Writes a dead letter. Returns False if it could not be written, or not for certain."""
        topic = self._config.dead_letter_topic
        assert topic is not None
        if self._transactions is None:
            problem = await self._dead_letters.write(record, error)
        else:
            letter = dead_letter(topic, record, error)
            refused = await self._transact(consumer, ends, [letter])
            problem = None if refused is None else not_written(topic, record, refused)
            if refused is None:
                self._dead_letters.note(record, error)
        if problem is not None:
            self._note(problem)
        return problem is None

    async def _hold(self, consumer: AsyncConsumer, pause_s: float) -> None:
        """Waits with a batch in hand, and stays in the group: polls, with everything paused."""
        until_s = self._now_s + pause_s
        await self._commit(consumer, self._done)
        self._is_holding = True
        try:
            while True:
                left_s = max(until_s - self._now_s, 0.0)
                try:
                    await consumer.pause(*await consumer.assignment())
                    self._polled_at_s = self._now_s
                    unasked = await consumer.poll(min(left_s, POLL_S))
                    assert not unasked, "everything is paused"
                except RayqError as error:
                    self._note(f"polling failed: {type(error).__name__}: {error}")
                    await self._sleep(min(left_s, FAILED_POLL_PAUSE_S))
                await self._check_lease()
                if self._now_s >= until_s or self._draining.is_set():
                    return
        finally:
            self._is_holding = False
            await consumer.resume(*await consumer.assignment())


def _numbers(places: Iterable[TopicPartition]) -> set[int]:
    return {place.partition for place in places}
