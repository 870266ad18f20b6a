"""The follower role: fetch from the leader, truncate where the logs diverge, flush, acknowledge.

One object follows one leader in one epoch; newer metadata replaces it. It acknowledges only what is
on its disk (docs/protocol.md, rule 7).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from rayq import messages
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.actors.signal import Signal
from rayq.backoff import Backoff
from rayq.config import KIB
from rayq.core.partition.fetch_size import FetchSize
from rayq.errors import (
    CorruptBatchError,
    DisconnectedError,
    DivergedLogError,
    ProtocolError,
    RayqError,
    StorageError,
    TimeoutError,
)
from rayq.logs import log_event
from rayq.metrics import Sample
from rayq.storage.batch import parts_of
from rayq.wire.connection import Connection
from rayq.wire.pool import ConnectionPool

logger = logging.getLogger(__name__)

FETCH_WAIT_MS = 500
"""Maximum time that the leader may hold a fetch after one that brought news. A moving high
watermark does not end a fetch: the next one brings it."""
IDLE_FETCH_WAIT_MS = 30_000
"""Maximum time that it may hold a fetch of a replica in sync after one that brought no news. A
partition to which nobody writes costs next to nothing, and since its fetch is held, a new record is
sent at once."""
FETCH_TIMEOUT_S = 3.0
"""Maximum further time without any bytes from the leader."""
FETCH_PATIENCE_S = 300.0
"""Maximum time of an answer while bytes arrive: many partitions may share a slow link."""
BATCHES_AT_ONCE = 500
"""Maximum number of batches that are checked and appended at once; small ones take some 10 ms. A
fetch may bring 30,000."""
RETRY_S = 0.02
RETRY_MAX_S = 0.5
EMPTY_ANSWERS_MAX = 10
"""A leader that has nothing holds a fetch. So many answers in a row that bring nothing and come at
once are followed by pauses."""
THROTTLE_PERIOD_S = 0.5
"""A throttled follower fetches as much as it may copy in about this time, then waits."""
THROTTLED_FETCH_BYTES_MIN = 16 * KIB
THROTTLE_PAUSE_MAX_S = 5.0
"""Maximum wait, however large a batch is: a longer silence would count as lagging."""


class Follower:
    """See the module. `start` once, `end` once."""

    def __init__(
        self,
        replica_log: ReplicaLog,
        pool: ConnectionPool,
        assignment: messages.PartitionAssignment,
    ) -> None:
        self._replica_log = replica_log
        self._pool = pool
        self._assignment = assignment
        self._bytes_in = replica_log.environment.metrics.counter(
            "rayq_replication_bytes_in_total",
            **assignment.labels,
        )
        self._leader_high_watermark = 0
        self._fetch_size = FetchSize()
        self._idle_fetch: asyncio.Future[Any] | None = None
        self._news = Signal()
        """Notified when newer metadata arrived."""
        self._connection: Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = False
        self._is_known_whole = False
        self._is_idle = False
        """True if the last fetch brought no news to a replica in sync."""
        self._copied_horizon = 0
        """See `messages.ReplicaFetch`. Not kept over a restart, or a change of leader: then a log
        that was half copied is copied from its start again."""
        self._agrees = False
        """True once the leader found no divergence: from then on, what is flushed here is flushed
        of the leader's log. An earlier notice could arrive late, over an abandoned connection, and
        would count for records that were truncated meanwhile."""

    def is_for(self, assignment: messages.PartitionAssignment) -> bool:
        """Returns whether this already follows the leader of that assignment."""
        mine = self._assignment
        return (mine.leader_epoch, mine.leader_incarnation, mine.leader_host, mine.leader_port) == (
            assignment.leader_epoch,
            assignment.leader_incarnation,
            assignment.leader_host,
            assignment.leader_port,
        )

    def committed(self, assignment: messages.PartitionAssignment) -> None:
        """Takes newer metadata of the partition, under the same leader."""
        self._assignment = assignment
        self._news.notify()
        held = self._idle_fetch
        if held is not None and not held.done() and not self._is_in_sync:
            # The leader must hear now that this replica is alive, so that it comes back into sync.
            held.set_exception(
                DisconnectedError("The fetch was given up: this replica left the in-sync set.")
            )

    def start(self) -> None:
        self._task = self._replica_log.environment.tasks.spawn(
            self._replica_log.guard(self._follow_forever),
            f"follow {self._replica_log.where}",
        )

    def end(self, reason: str) -> None:
        """Ends this role, as another replica leads or this process stops."""
        self._is_stopped = True
        if self._task is not None:
            self._task.cancel()

    def measure(self) -> list[Sample]:
        """Returns the number of records that were committed at the last fetch and are missing
        here."""
        replica, assignment = self._replica_log, self._assignment
        lag = max(self._leader_high_watermark - replica.log.end_offset, 0)
        at = assignment.labels
        return [replica.environment.metrics.sample("rayq_replica_lag", lag, **at)]

    def flushed(self, flushed_offset: int) -> None:
        """Tells the leader at once that this disk holds everything below the offset."""
        if self._connection is None or self._connection.closed or self._is_stopped:
            return
        if not self._agrees:
            return  # Some of it may still have to be truncated.
        replica, assignment = self._replica_log, self._assignment
        self._connection.send(
            messages.ReplicaFlushed(
                topic_id=assignment.topic_id,
                partition=assignment.partition,
                broker=replica.broker,
                incarnation=replica.incarnation,
                leader_epoch=assignment.leader_epoch,
                flushed=flushed_offset,
            )
        )

    async def _follow_forever(self) -> None:
        environment, empty_answers = self._replica_log.environment, 0
        clock, backoff = environment.clock, Backoff(environment, RETRY_S, RETRY_MAX_S)
        while True:
            try:
                asked_s = clock.monotonic()
                copied = await self._fetch()
                is_empty = not copied and clock.monotonic() - asked_s < RETRY_S
                empty_answers = empty_answers + 1 if is_empty else 0
                if empty_answers > EMPTY_ANSWERS_MAX:
                    raise ProtocolError(
                        f"The leader of {self._replica_log.where} has answered {empty_answers} "
                        "times in a row at once, and has sent no records."
                    )
                self._replica_log.trouble = None
                backoff.reset()
                await self._pause_after(copied)
            except DivergedLogError as error:
                self._replica_log.fail(error)
                return
            except StorageError as error:
                # A full disk heals, and an error of the leader's disk is the leader's; an error of
                # this replica's disk ends the replica.
                log_failure = self._replica_log.log.failure
                if log_failure is not None:
                    self._replica_log.fail(error)
                    return
                logger.warning("follower of %s: %s", self._replica_log.where, error)
                self._replica_log.trouble = str(error)
                await asyncio.sleep(RETRY_MAX_S)
            except RayqError as error:
                logger.debug("follower of %s: %s", self._replica_log.where, error)
                await asyncio.sleep(backoff.next_s())

    async def _pause_after(self, copied_bytes: int) -> None:
        """Waits as the throttle demands. Once this replica is in sync, writers wait for it, so the
        metadata that says so ends the pause."""
        throttle = self._throttle
        if copied_bytes and throttle is not None:
            pause_s = min(copied_bytes / throttle, THROTTLE_PAUSE_MAX_S)
            await self._news.wait_until(lambda: self._throttle != throttle, pause_s)

    @property
    def _throttle(self) -> int | None:
        """Bytes per second while a move has this replica copy the log; None: no limit."""
        return None if self._is_in_sync else self._assignment.throttle_bytes_per_s

    @property
    def _is_in_sync(self) -> bool:
        replica = self._replica_log
        return (replica.broker, replica.incarnation) in self._assignment.isr

    @property
    def _fetch_bytes_max(self) -> int:
        throttle, bytes_max = self._throttle, self._fetch_size.bytes_max
        if throttle is None:
            return bytes_max
        at_once = max(THROTTLED_FETCH_BYTES_MIN, int(throttle * THROTTLE_PERIOD_S))
        return min(bytes_max, at_once)

    async def _fetch(self) -> int:
        """Does one fetch, and what follows from it. Returns the number of log bytes received."""
        replica, assignment = self._replica_log, self._assignment
        assert assignment.leader_host is not None and assignment.leader_port is not None
        log = replica.log
        # The leader takes the reported log start for durable: a full disk may have kept it back.
        await replica.advance_log_start(log.start_offset)
        connection = await self._pool.get(assignment.leader_host, assignment.leader_port)
        self._connection = connection
        if not self._is_known_whole:
            await self._restart_unless_whole()
            self._is_known_whole = True
        was_empty = log.end_offset == log.local_start_offset
        wait_ms = IDLE_FETCH_WAIT_MS if self._is_idle else FETCH_WAIT_MS
        if not self._agrees:
            wait_ms = 0  # A flush that ends before the answer is not told, and writers wait for it.
        self._is_idle = False
        request = messages.ReplicaFetch(
            topic_id=assignment.topic_id,
            partition=assignment.partition,
            broker=replica.broker,
            incarnation=replica.incarnation,
            leader_epoch=assignment.leader_epoch,
            offset=log.end_offset,
            flushed=log.flushed_offset,
            log_start_offset=log.start_offset,
            last_epoch=log.last_epoch,
            bytes_max=self._fetch_bytes_max,
            wait_ms=wait_ms,
            copied_horizon=0 if was_empty else self._copied_horizon,
            local_start_offset=log.local_start_offset,
        )
        clock = replica.environment.clock
        sent_s = clock.monotonic()
        held = connection.request(
            request, timeout_s=wait_ms / 1000 + FETCH_TIMEOUT_S, patience_s=FETCH_PATIENCE_S
        )
        self._idle_fetch = held if wait_ms == IDLE_FETCH_WAIT_MS else None
        try:
            answer, payload = await held
        except TimeoutError:
            self._fetch_size.timed_out()
            raise
        if len(payload):
            self._fetch_size.answered(len(payload), clock.monotonic() - sent_s)
        if answer.diverging_end is not None:
            await self._truncate(answer.diverging_epoch, answer.diverging_end)
            return 0
        if answer.reset_to is not None:
            await self._reset()
            return 0
        self._agrees = True
        self._leader_high_watermark = answer.high_watermark
        self._is_idle = (
            self._is_in_sync
            and not len(payload)
            and answer.high_watermark == replica.high_watermark == log.end_offset
            and answer.log_start_offset == log.start_offset
        )
        if len(payload):
            if was_empty:
                self._copied_horizon = answer.tombstone_horizon
            if request.offset < max(answer.cleaned_offset, answer.tombstone_horizon):
                await replica.learn(
                    request.offset, answer.cleaned_offset, answer.tombstone_horizon
                )
            try:
                await self._append(payload)
            except CorruptBatchError as error:
                logger.error("leader of %s sent a damaged batch: %s", replica.where, error)
                await connection.request(
                    messages.CheckRange(
                        assignment.topic_id, assignment.partition, request.offset
                    ),
                    timeout_s=FETCH_TIMEOUT_S,
                )
                raise
        replica.advance_high_watermark(answer.high_watermark)
        if answer.log_start_offset > log.start_offset:
            await replica.advance_log_start(answer.log_start_offset)
        return len(payload)

    async def _append(self, payload: memoryview) -> None:
        """Appends batches, few at once, since the process may lead other partitions meanwhile. An
        empty log may restart at the first batch: then no flush or swap is in progress whose
        checkpoint would be about the earlier log."""
        replica = self._replica_log
        for number, part in enumerate(parts_of(payload, BATCHES_AT_ONCE)):
            if number:
                await asyncio.sleep(0)
            if replica.log.size_bytes:
                replica.log.append_as_follower(part)
            else:
                async with replica.files_lock, replica.flush_lock:
                    replica.log.append_as_follower(part)
            self._bytes_in.value += len(part)
            replica.flusher.wake()

    @property
    def _may_lose(self) -> bool:
        """Returns whether an unclean election since the log's last record may have removed records
        that it knew to be committed."""
        unclean, last_epoch = self._assignment.last_unclean_epoch, self._replica_log.log.last_epoch
        return unclean is not None and (last_epoch is None or last_epoch < unclean)

    async def _restart_unless_whole(self) -> None:
        """Restarts a log that was being copied from a compacted one and is incomplete. Up to its
        leader's cleaned offset, it lacks records that had a later one there. Every leader that was
        elected cleanly has that later record; after an unclean election it may be gone, and only
        the new leader's log is whole."""
        log = self._replica_log.log
        if log.end_offset < log.cleaned_offset and self._may_lose:
            await self._reset()

    async def _truncate(self, epoch: int | None, end_offset: int) -> None:
        """Truncates what the leader does not have: down to the end of the last common epoch, here
        or there (KIP-279)."""
        replica, assignment = self._replica_log, self._assignment
        log = replica.log
        mine = log.end_offset
        cut = end_offset
        if epoch is None:
            cut = min(end_offset, mine)
        else:
            own_epoch, own_end = log.epochs.end_for(epoch, mine)
            cut = min(end_offset, own_end if own_epoch is not None else log.start_offset)
        # The log start moves only over committed records.
        committed = max(
            replica.high_watermark, log.persisted_high_watermark, log.start_offset
        )
        if cut < committed and not self._may_lose:
            raise DivergedLogError(
                f"{replica.where} on broker {replica.broker} holds committed records up to "
                f"{committed}, its leader (broker {assignment.leader}, epoch "
                f"{assignment.leader_epoch}) agrees only up to {cut}, and was elected cleanly. "
                "Nothing was cut. A disk was changed from outside or this is a bug: keep both "
                "data directories and report it."
            )
        async with replica.files_lock, replica.flush_lock:
            # A swap of compacted segments that held the lock may have moved the cleaned offset.
            may_be_cut = log.may_truncate(cut)
            if may_be_cut:
                replica.truncate(cut)
        if not may_be_cut:
            if self._is_in_sync and not self._may_lose:
                raise DivergedLogError(
                    f"{replica.where} on broker {replica.broker} is in sync, and its leader "
                    f"(broker {assignment.leader}, epoch {assignment.leader_epoch}) agrees only up "
                    f"to {cut}, below what is in the object store or was compacted here. Nothing "
                    "was cut. This is a bug: keep both data directories and report it."
                )
            # Only after an unclean election. Records that the truncated ones had superseded are
            # gone here and are the latest again there; or the leader ends below everything that is
            # left here, or below the part of it that is not only in the object store.
            await self._reset()
            return
        log_event(
            logger,
            logging.INFO,
            "log_truncated",
            **assignment.labels,
            epoch=assignment.leader_epoch,
            broker=replica.broker,
            from_offset=mine,
            to_offset=cut,
        )

    async def _reset(self) -> None:
        """Restarts a log that is below the leader's local start or its tombstone horizon at that
        start, with the leader's producer state and epochs below it. Records between the leader's
        log start and its local start are in the object store, and stay there.

        No acknowledged record is lost by that. Acknowledged records are on the disks of at least
        min_insync members of the ISR and the ELR, and of all that were in the ISR then; each of
        them reaches the high watermark, and both the log start and the horizon are below that. So a
        replica that ends below either is none of them, and no acknowledgement ever relied on it.
        (The leader refuses to say so to a member of its ISR.)

        After an unclean election it is also the way out for a log that has nothing in common with
        the new leader's, because it begins above the end of that log.
        """
        replica, assignment = self._replica_log, self._assignment
        assert self._connection is not None
        answer, payload = await self._connection.request(
            messages.ReplicaSnapshot(
                assignment.topic_id, assignment.partition, assignment.leader_epoch
            ),
            timeout_s=FETCH_TIMEOUT_S,
            patience_s=FETCH_PATIENCE_S,
        )
        start = answer.local_start_offset
        if start is None:
            start = answer.log_start_offset
        log_event(
            logger,
            logging.INFO,
            "log_restarted",
            **assignment.labels,
            epoch=assignment.leader_epoch,
            broker=replica.broker,
            offset=start,
        )
        self._copied_horizon = 0
        async with replica.files_lock, replica.flush_lock:
            replica.restart(
                start, answer.epochs, bytes(payload), log_start=answer.log_start_offset
            )
