"""The loop that takes batches from the accumulator and gets each of them appended once, in order.

What a partition's `Flight` guarantees:

- At most `max_in_flight_requests_per_connection` batches of a partition are under way, and none is
  sent that is five or more after one that is unresolved: the leader recognises only the last five.
- After a failure nothing of the partition is sent until every batch under way has its answer; then
  the failed ones go again, in order, before any other. Batches keep their numbers over retries, so
  one that was appended, and whose answer was lost, is recognised by the leader.
- A batch that fails for good leaves a gap in the sequence. The flight then sends nothing new, lets
  the batches that were sent before resolve under their old numbers, and goes on under the next
  producer epoch from sequence 0 (docs/protocol.md, rule 19). Epochs are per partition: only the
  partition's leader compares them, and the producer id is ours alone.

Errors decide by three questions: may the batch have been written (`_REFUSED`), may it be sent again
(`retriable`), is the metadata out of date (`stale_metadata`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from rayq.client.backoff import Backoff
from rayq.client.client import LEADER_PATIENCE_S, Client, epoch_of, may_retry
from rayq.client.metadata import LeaderAndEpoch
from rayq.client.producing.accumulator import Accumulator, PartitionQueue, ProducerBatch
from rayq.client.producing.flight import Flight, Shipment
from rayq.config import ProducerConfig
from rayq.errors import (
    ClosedError,
    DeliveryTimeoutError,
    DisconnectedError,
    DiskFullError,
    FencedEpochError,
    InvalidRequestError,
    NotEnoughReplicasError,
    NotLeaderError,
    OutcomeUnknownError,
    OutOfOrderSequenceError,
    OverloadedError,
    PartitionOfflineError,
    ProducerFencedError,
    RayqError,
    StorageError,
    UnknownEpochError,
    UnknownProducerError,
    UnknownServerError,
    UnknownTopicError,
)
from rayq.logs import Seldom
from rayq.storage.batch import encode_batch
from rayq.wire.connection import Connection
from rayq.wire.messages import AllocateProducerId, Produce

logger = logging.getLogger(__name__)

SEQUENCE_END = 2**31
"""Sequences wrap to 0 here."""
PRODUCER_EPOCH_MAX = 2**16 - 1
RETRY_BACKOFF_MAX_S = 1.0
TICK_S = 0.1
"""How often deadlines are looked at while anything is under way."""
ANSWER_SLACK_S = 0.5
"""How much longer than the leader itself the client waits for the leader's answer."""
HELD_UP_PAUSE_S = 0.02
"""How long until an open batch is looked at again which a thread that stands still holds up."""
CONNECT_TIMEOUT_S = 3.0

_ACKS = {"all": -1, 1: 1, 0: 0}

_REFUSED = (
    NotEnoughReplicasError,
    DiskFullError,
    FencedEpochError,
    UnknownEpochError,
    OutOfOrderSequenceError,
    OverloadedError,
    PartitionOfflineError,
    UnknownTopicError,
)
"""Errors that say that this attempt wrote nothing."""


class Sender:
    """Runs on the client's event loop, by callbacks: each leaves a consistent state behind."""

    def __init__(
        self,
        client: Client,
        config: ProducerConfig,
        accumulator: Accumulator,
        on_failure: Callable[[ProducerBatch, RayqError], None],
    ) -> None:
        """`on_failure(batch, error)` hears of each batch that was not delivered."""
        self._client = client
        self._config = config
        self._accumulator = accumulator
        self._on_failure = on_failure
        self._flights: dict[PartitionQueue, Flight] = {}
        self._producer_id: int | None = None
        self._allocation: asyncio.Task[None] | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._closed = False
        self._refusals = Seldom(logger, logging.WARNING, client.environment.clock.monotonic)
        client.metadata.add_listener(self._metadata_changed)
        if config.acks == 0:
            client.refusal_listeners[self._refused] = None

    def close(self) -> None:
        """Gives up what is still under way. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._client.metadata.remove_listener(self._metadata_changed)
        self._client.refusal_listeners.pop(self._refused, None)
        if self._allocation is not None:
            self._allocation.cancel()
        if self._ticker is not None:
            self._ticker.cancel()
        error = ClosedError("The producer was closed before this was sent. It was not written.")
        for flight in list(self._flights.values()):
            self._fail_all(flight, error)
        self._flights.clear()
        for batch in self._accumulator.incomplete():  # not even announced yet
            self._fail_batch(batch, error)

    def work(self, queues: list[PartitionQueue]) -> None:
        """These queues have batches to look at, or their open ones became due by a flush."""
        for queue in queues:
            self._pump(self._flight(queue))

    def _flight(self, queue: PartitionQueue) -> Flight:
        flight = self._flights.get(queue)
        if flight is None:
            backoff = Backoff(
                self._client.environment, self._config.retry_backoff_ms / 1000, RETRY_BACKOFF_MAX_S
            )
            flight = self._flights[queue] = Flight(queue, backoff)
        return flight

    # --- sending --------------------------------------------------------------------------------

    def _pump(self, flight: Flight) -> None:
        """Sends whatever of the partition may be sent now. A bug of ours in here fails everything
        that waits, rather than leaving it waiting."""
        try:
            self._send_due(flight)
        except Exception as error:
            logger.exception("sending to %s failed", flight.name)
            self._fail_all(flight, UnknownServerError(f"The sender failed: {error!r}."))

    def _send_due(self, flight: Flight) -> None:
        if self._closed or not self._may_send(flight):
            return
        connection = self._connection(flight)
        if connection is None:
            return
        config = self._config
        while (
            not flight.is_stalled
            and len(flight.in_flight) < config.max_in_flight_requests_per_connection
        ):
            if config.acks == 0 and connection.is_write_paused:
                self._wait_for_room(flight, connection)
                return
            shipment = self._next(flight)
            if shipment is None:
                return
            if shipment.payload is not None or self._pack(flight, shipment):
                self._ship(flight, shipment, connection)

    def _may_send(self, flight: Flight) -> bool:
        if flight.is_stalled:
            if flight.in_flight:
                return False
            if self._client.now < flight.resume_at:
                self._pump_at(flight, flight.resume_at)
                return False
            flight.is_stalled = False
        if not flight.retries and self._accumulator.oldest_opened_at(flight.queue) is None:
            return False
        self._tick_later()
        if not self._config.idempotent:
            return True
        if flight.needs_new_epoch:
            self._start_new_epoch(flight)
        if flight.producer_id is None:
            flight.producer_id = self._producer_id
        if flight.producer_id is None:
            self._allocate_producer_id()
            return False
        return True

    def _start_new_epoch(self, flight: Flight) -> None:
        """Once everything in doubt has resolved, numbers start from 0 under a new epoch."""
        if flight.in_flight or any(shipment.in_doubt for shipment in flight.retries):
            return
        if flight.producer_epoch == PRODUCER_EPOCH_MAX:
            self._producer_id = flight.producer_id = None  # a new id, for want of epochs
            flight.producer_epoch = -1
        flight.producer_epoch += 1
        flight.next_sequence = 0
        flight.needs_new_epoch = False
        for shipment in flight.retries:
            shipment.forget_number()
        logger.info(
            "%s goes on under producer %s epoch %d",
            flight.name,
            flight.producer_id,
            flight.producer_epoch,
        )

    def _next(self, flight: Flight) -> Shipment | None:
        """The next batch that is due; arms the linger timer where one is not due yet."""
        for index, shipment in enumerate(flight.retries):
            if shipment.payload is not None or not flight.needs_new_epoch:
                return flight.retries.pop(index)
        if flight.needs_new_epoch or flight.is_window_full:
            return None
        accumulator, queue = self._accumulator, flight.queue
        opened_at = accumulator.oldest_opened_at(queue)
        if opened_at is None:
            return None
        now = self._client.now
        due_at = opened_at + self._config.linger_ms / 1000
        is_open_due = (
            not flight.in_flight
            or now >= due_at
            or accumulator.is_flushing > 0
            or accumulator.is_exhausted
            or accumulator.is_urgent(queue)
        )
        batch = accumulator.take(queue, is_open_due=is_open_due)
        if batch is None:
            self._pump_at(flight, now + HELD_UP_PAUSE_S if is_open_due else due_at)
            return None
        deadline = batch.opened_at + self._config.delivery_timeout_ms / 1000
        shipment = Shipment(batch, deadline, flight.next_serial)
        flight.next_serial += 1
        return shipment

    def _pump_at(self, flight: Flight, at: float) -> None:
        flight.stop_timer()

        def fire() -> None:
            flight.timer = None
            self._pump(flight)

        delay_s = max(at - self._client.now, 0.0)
        flight.timer = asyncio.get_running_loop().call_later(delay_s, fire)

    def _connection(self, flight: Flight) -> Connection | None:
        """The open connection to the leader, or None while it is being made or looked for."""
        queue = flight.queue
        leader = self._client.metadata.leader(queue.topic, queue.topic_id, queue.partition)
        if leader is None:
            self._no_leader(flight)
            return None
        if flight.in_flight and leader != flight.leader:
            return None  # `_metadata_changed` takes them back first
        if leader != flight.leader:
            flight.leader = leader
            flight.connection = None
        if flight.connection is not None and not flight.connection.closed:
            return flight.connection
        if flight.connecting is None or flight.connecting.done():
            flight.connecting = self._client.environment.tasks.spawn(
                self._connect(flight, leader), f"connect to the leader of {flight.name}"
            )
        return None

    async def _connect(self, flight: Flight, leader: LeaderAndEpoch) -> None:
        failure: RayqError | None = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = await self._client.pool.get(leader.host, leader.port)
        except TimeoutError:
            failure = DisconnectedError(
                f"No connection to {leader.host}:{leader.port}, the leader of {flight.name}, "
                f"within {CONNECT_TIMEOUT_S:g} s."
            )
        except RayqError as error:
            failure = error
        finally:
            flight.connecting = None
        if self._closed:
            return
        if failure is None:
            if flight.leader == leader:
                flight.connection = connection
        elif failure.retriable:
            self._stall(flight, failure)
        else:
            self._fail_all(flight, failure)
            return
        self._pump(flight)

    def _no_leader(self, flight: Flight) -> None:
        queue = flight.queue
        metadata = self._client.metadata
        error = self._client.no_leader_error(queue.topic, queue.topic_id, queue.partition)
        flight.last_error = error
        if metadata.partition(queue.topic, queue.topic_id, queue.partition) is None:
            self._fail_all(flight, error)
        else:
            self._stall(flight, error)

    def _ship(self, flight: Flight, shipment: Shipment, connection: Connection) -> None:
        batch, queue, config = shipment.batch, flight.queue, self._config
        assert shipment.payload is not None and flight.leader is not None
        request = Produce(
            topic_id=queue.topic_id,
            partition=queue.partition,
            leader_epoch=flight.leader.epoch,
            acks=_ACKS[config.acks],
            timeout_ms=config.request_timeout_ms,
        )
        if config.acks == 0:
            try:
                connection.send(request, shipment.payload)
            except RayqError as error:
                self._attempt_failed(flight, shipment, error)
                return
            self._accumulator.release(batch)
            batch.succeed(None, None)
            return
        timeout_s = config.request_timeout_ms / 1000 + ANSWER_SLACK_S
        attempt = connection.request(request, shipment.payload, timeout_s=timeout_s)
        shipment.attempt = attempt
        shipment.sent_at = self._client.now
        flight.in_flight.append(shipment)
        attempt.add_done_callback(partial(self._answered, flight, shipment))

    def _pack(self, flight: Flight, shipment: Shipment) -> bool:
        """Numbers and encodes a batch. One that cannot be encoded fails, and takes no number."""
        batch = shipment.batch
        is_idempotent = self._config.idempotent
        producer_id = flight.producer_id if is_idempotent else None
        producer_epoch = flight.producer_epoch if is_idempotent else 0
        base_sequence = flight.next_sequence if is_idempotent else None
        try:
            batch.seal()
            payload = encode_batch(
                batch.values,
                batch.keys,
                batch.headers,
                batch.timestamps_ms,
                compression=self._config.compression_type,
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                base_sequence=base_sequence,
                append_time=flight.queue.append_time,
            )
        except RayqError as error:
            self._fail(flight, shipment, error)
            return False
        except Exception as error:
            logger.exception("a batch for %s could not be packed", flight.name)
            self._fail(
                flight,
                shipment,
                InvalidRequestError(
                    f"{batch.count} records for {flight.name} could not be packed, and were not "
                    f"sent: {error!r}."
                ),
            )
            return False
        except BaseException:  # an interrupt, of a producer on the main thread
            self._retry(flight, shipment)
            raise
        shipment.payload = payload
        shipment.producer_id = producer_id
        shipment.producer_epoch = producer_epoch
        shipment.base_sequence = base_sequence
        if is_idempotent:
            flight.next_sequence = (flight.next_sequence + batch.count) % SEQUENCE_END
        return True

    def _wait_for_room(self, flight: Flight, connection: Connection) -> None:
        """Without acknowledgements nothing but the network holds back: what it does not take stays
        in the buffer, which is bounded."""
        if flight.full_connection is connection:
            return
        flight.full_connection = connection
        flight.full_since = self._client.now
        flight.last_error = OverloadedError("The connection to the leader takes no more bytes.")

        async def wait() -> None:
            await connection.drain()
            if flight.full_connection is connection:
                flight.full_connection = None
            self._pump(flight)

        tasks = self._client.environment.tasks
        tasks.spawn(wait(), f"wait for room to the leader of {flight.name}")

    def _refused(self, connection: Connection, error: RayqError) -> None:
        """Without acknowledgements: something that was sent there was not written. What follows
        waits for newer metadata, lest all of it goes where nobody takes it."""
        flights = [one for one in self._flights.values() if one.connection is connection]
        if flights:
            self._refusals.say("records sent with acks=0 were refused, and are lost: %s", error)
        if error.stale_metadata:
            for flight in flights:
                self._stall(flight, error)

    def _allocate_producer_id(self) -> None:
        if self._closed or (self._allocation is not None and not self._allocation.done()):
            return

        async def allocate() -> None:
            failure: RayqError | None = None
            try:
                response = await self._client.ask_any(
                    AllocateProducerId(), timeout_s=self._config.request_timeout_ms / 1000
                )
                self._producer_id = response.producer_id
            except RayqError as error:
                failure = error
            finally:
                self._allocation = None
            for flight in list(self._flights.values()):
                flight.last_error = failure or flight.last_error
                if failure is not None and not failure.retriable:
                    self._fail_all(flight, failure)
                else:
                    self._pump(flight)

        tasks = self._client.environment.tasks
        self._allocation = tasks.spawn(allocate(), "allocate a producer id")

    # --- answers --------------------------------------------------------------------------------

    def _answered(self, flight: Flight, shipment: Shipment, attempt: asyncio.Future[Any]) -> None:
        error: BaseException | None
        if attempt.cancelled():
            error = NotLeaderError("The attempt was given up.")
        else:
            error = attempt.exception()
        if shipment.attempt is not attempt or self._closed:
            return  # an attempt that was given up before
        shipment.attempt = None
        flight.in_flight.remove(shipment)
        if error is None:
            response, _ = attempt.result()
            flight.backoff.reset()
            self._accumulator.release(shipment.batch)
            append_time_ms = response.append_time_ms if flight.queue.append_time else None
            shipment.batch.succeed(response.base_offset, append_time_ms)
        elif isinstance(error, RayqError):
            self._attempt_failed(flight, shipment, error)
        else:
            self._fail(flight, shipment, UnknownServerError(f"The request failed: {error!r}."))
        self._pump(flight)

    def _attempt_failed(self, flight: Flight, shipment: Shipment, error: RayqError) -> None:
        flight.last_error = error
        idempotent = self._config.idempotent
        if isinstance(error, OutOfOrderSequenceError) and idempotent:
            # The leader lacks a predecessor. Where an earlier attempt is unanswered, both may still
            # be under way to it, on a connection that was given up: only its number tells a batch
            # that is in doubt from its own repetition.
            if not flight.is_first(shipment):
                self._retry(flight, shipment)
                flight.is_stalled = True
                return
            # What the leader lacks was acknowledged once, or has failed for good.
            flight.needs_new_epoch = True
            if shipment.in_doubt:
                self._fail(flight, shipment, _unknown(flight, error))
            else:
                self._retry(flight, shipment)
                self._stall(flight, error)
        elif isinstance(error, UnknownProducerError) and idempotent:
            flight.needs_new_epoch = True
            if shipment.in_doubt:
                self._fail(flight, shipment, _unknown(flight, error))
            else:
                self._retry(flight, shipment)
                self._stall(flight, error)
        elif isinstance(error, ProducerFencedError) and idempotent:
            flight.producer_epoch = PRODUCER_EPOCH_MAX  # somebody has our id: take another one
            self._fail(flight, shipment, error)
        elif may_retry(error):
            shipment.in_doubt = shipment.in_doubt or not isinstance(error, _REFUSED)
            self._retry(flight, shipment)
            self._stall(flight, error)
        elif shipment.in_doubt or isinstance(error, UnknownServerError):
            self._fail(flight, shipment, _unknown(flight, error))
        else:
            self._fail(flight, shipment, error)

    def _retry(self, flight: Flight, shipment: Shipment) -> None:
        flight.retries.append(shipment)
        flight.retries.sort(key=lambda other: other.serial)

    def _stall(self, flight: Flight, error: RayqError) -> None:
        """Waits before the partition is tried again; a new leader cuts the wait short."""
        flight.last_error = error
        now = self._client.now
        is_waiting = flight.is_stalled and flight.resume_at > now
        flight.is_stalled = True
        if error.stale_metadata or isinstance(error, StorageError):
            self._suspect_leader(flight)
        if not is_waiting:  # The batches of one window fail together: that is one failure.
            flight.resume_at = now + flight.backoff.next_s()
        self._pump_at(flight, flight.resume_at)

    def _suspect_leader(self, flight: Flight) -> None:
        queue = flight.queue
        epoch = epoch_of(flight.leader)
        self._client.suspect(queue.topic, queue.topic_id, queue.partition, epoch)

    def _fail(self, flight: Flight, shipment: Shipment, error: RayqError) -> None:
        """A batch that is in neither list any more is lost for good."""
        if shipment.base_sequence is not None:
            flight.needs_new_epoch = True
        self._fail_batch(shipment.batch, error)

    def _fail_batch(self, batch: ProducerBatch, error: RayqError) -> None:
        self._accumulator.release(batch)
        self._on_failure(batch, error)
        batch.fail(error)

    def _fail_all(self, flight: Flight, error: RayqError) -> None:
        """Everything of the partition fails, sent or not."""
        flight.stop_timer()
        shipments = [*flight.in_flight, *flight.retries]
        sent = {shipment.serial for shipment in flight.in_flight}
        flight.in_flight, flight.retries = [], []
        for shipment in sorted(shipments, key=lambda one: one.serial):
            shipment.attempt = None
            in_doubt = shipment.in_doubt or shipment.serial in sent
            self._fail(flight, shipment, _unknown(flight, error) if in_doubt else error)
        queue = flight.queue
        for batch in self._accumulator.take_all(queue):
            self._fail_batch(batch, error)
        if self._accumulator.oldest_opened_at(queue) is not None and not self._closed:
            # A thread that stands still holds it up, and nobody else would come back for it.
            asyncio.get_running_loop().call_later(HELD_UP_PAUSE_S, self.work, [queue])

    # --- time and metadata ----------------------------------------------------------------------

    def _metadata_changed(self) -> None:
        """Batches under way to a former leader are taken back, and sent to the new one."""
        metadata = self._client.metadata
        for flight in list(self._flights.values()):
            queue = flight.queue
            if metadata.partition(queue.topic, queue.topic_id, queue.partition) is None:
                del self._flights[queue]
                self._no_leader(flight)
                continue
            leader = metadata.leader(queue.topic, queue.topic_id, queue.partition)
            if leader is None or leader == flight.leader:
                continue
            self._take_back(flight)
            flight.resume_at = 0.0
            flight.backoff.reset()
            self._pump(flight)

    def _take_back(self, flight: Flight) -> None:
        """Gives up the attempts under way: their outcome is unknown."""
        shipments, flight.in_flight = flight.in_flight, []
        for shipment in shipments:
            shipment.attempt = None
            shipment.in_doubt = True
            self._retry(flight, shipment)

    def _tick_later(self) -> None:
        if self._ticker is None and not self._closed:
            self._ticker = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        """Deadlines, and leaders that do not answer."""
        self._ticker = None
        now = self._client.now
        is_busy = False
        for flight in list(self._flights.values()):
            self._expire(flight, now)
            if flight.in_flight and now - flight.in_flight[0].sent_at > LEADER_PATIENCE_S:
                self._suspect_leader(flight)
            if flight.full_connection is not None and now - flight.full_since > LEADER_PATIENCE_S:
                self._suspect_leader(flight)
            is_busy = is_busy or bool(flight.in_flight or flight.retries)
            is_busy = is_busy or self._accumulator.oldest_opened_at(flight.queue) is not None
        if is_busy:
            self._tick_later()

    def _expire(self, flight: Flight, now: float) -> None:
        expired = [one for one in flight.in_flight if one.deadline <= now]
        for shipment in expired:
            flight.in_flight.remove(shipment)
            shipment.attempt = None
            self._fail(flight, shipment, _unknown(flight, self._timeout_error(flight)))
        stale = [one for one in flight.retries if one.deadline <= now]
        for shipment in stale:
            flight.retries.remove(shipment)
            error = self._timeout_error(flight)
            self._fail(flight, shipment, _unknown(flight, error) if shipment.in_doubt else error)
        timeout_s = self._config.delivery_timeout_ms / 1000
        unsent = 0
        while True:
            opened_at = self._accumulator.oldest_opened_at(flight.queue)
            if opened_at is None or opened_at + timeout_s > now:
                break
            batch = self._accumulator.take(flight.queue, is_open_due=True)
            if batch is None:
                break
            unsent += 1
            self._fail_batch(batch, self._timeout_error(flight))
        if expired or stale or unsent:
            self._pump(flight)

    def _timeout_error(self, flight: Flight) -> RayqError:
        reason = flight.last_error or "its turn did not come"
        return DeliveryTimeoutError(
            f"A batch for {flight.name} could not be delivered within delivery_timeout_ms "
            f"({self._config.delivery_timeout_ms} ms): {reason}"
        )


def _unknown(flight: Flight, error: RayqError) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        f"A batch was sent to {flight.name} and may or may not be written: no answer said. {error} "
        "Read the end of the partition before you send it again."
    )
