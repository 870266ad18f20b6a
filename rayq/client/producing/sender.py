"""Sender of a producer: takes batches from the accumulator and makes the leaders append each of
them once, in order.

It carries out the decisions of each partition's `Flight`, and owns the timers, the connections and
the outcomes of batches.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rayq.client.client import Client
from rayq.client.leader_requests import LEADER_PATIENCE_S, epoch_of
from rayq.client.metadata import LeaderAndEpoch
from rayq.client.producing.accumulator import Accumulator, PartitionQueue, ProducerBatch
from rayq.client.producing.flight import (
    Action,
    Fail,
    Flight,
    InFlightBatch,
    SuspectLeader,
    TakeBatch,
    TakeProducerId,
    WaitUntil,
)
from rayq.config import ProducerConfig
from rayq.errors import (
    AuthorizationError,
    ClosedError,
    DisconnectedError,
    InvalidRequestError,
    OverloadedError,
    RayqError,
    TransactionEndedError,
    UnknownServerError,
    counted,
)
from rayq.logs import RateLimitedLogger
from rayq.messages import AllocateProducerId, Produce
from rayq.storage.batch import encode_batch
from rayq.wire.connection import Connection

logger = logging.getLogger(__name__)

RETRY_BACKOFF_MAX_S = 1.0
TICK_S = 0.1
"""Interval at which deadlines are checked while anything is in flight."""
ANSWER_SLACK_S = 0.5
"""Time that the client waits for the leader's answer beyond the leader's own timeout."""
HELD_UP_PAUSE_S = 0.02
"""Time after which an open batch is checked again if a stalled thread holds it up."""
CONNECT_TIMEOUT_S = 3.0

_ACKS = {"all": -1, 1: 1, 0: 0}


@dataclass(slots=True, eq=False)
class _Channel:
    """The connection, timers and flight of one partition."""

    queue: PartitionQueue
    flight: Flight
    timer: asyncio.TimerHandle | None = None
    connection: Connection | None = None
    """The connection to the leader that the flight knows."""
    connecting: asyncio.Task[None] | None = None
    """The task that connects to the same leader. It sets this to None when it ends, unless it is
    cancelled."""
    connecting_since: float = 0.0
    full_connection: Connection | None = None
    """The connection that has taken no more bytes since `full_since`; only used without
    acknowledgements."""
    full_since: float = 0.0
    throttled_connection: Connection | None = None
    """The connection that tells it when it is throttled for a shorter time."""

    @property
    def is_throttled(self) -> bool:
        """True while the leader takes no more, since a quota is used up: nobody is suspect then."""
        return self.connection is not None and self.connection.throttled_s(Produce) > 0

    def leave(self) -> None:
        """Drops the connection, because another replica leads. The former leader may be dead:
        connecting to it takes long."""
        self.connection = None
        if self.connecting is not None:
            self.connecting.cancel()
            self.connecting = None

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


HowItEnded = Callable[[RayqError, int, int], Awaitable[RayqError]]
"""Asks how the transaction with this producer id and epoch ended, after a leader reports that it
has. The result is the error of its batches."""


class Sender:
    """The sender of a producer. It runs on the client's event loop, by callbacks: each leaves a
    consistent state behind."""

    def __init__(
        self,
        client: Client,
        config: ProducerConfig,
        accumulator: Accumulator,
        on_failure: Callable[[ProducerBatch, RayqError], None],
        how_it_ended: HowItEnded,
    ) -> None:
        """`on_failure(batch, error)` is called for each batch that was not delivered."""
        self._client = client
        self._config = config
        self._accumulator = accumulator
        self._on_failure = on_failure
        self._channels: dict[PartitionQueue, _Channel] = {}
        self._producer_id: int | None = None
        self._transaction: tuple[int, int] | None = None
        """Producer id and epoch of the open transaction, or of the last one."""
        self._failure: RayqError | None = None
        """The error because of which nothing more of the transaction is sent."""
        self.has_numbered = False
        """True if a batch of the transaction was numbered, and so perhaps written."""
        self._how_it_ended = how_it_ended
        self._allocation: asyncio.Task[None] | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._closed = False
        self._refusals = RateLimitedLogger(
            logger, logging.WARNING, client.environment.clock.monotonic
        )
        client.metadata.add_listener(self._metadata_changed)
        if config.acks == 0:
            client.refusal_listeners[self._refused] = None

    def trouble(self) -> RayqError | None:
        """The reason why a partition's batches are not written yet, by its last attempt; None if no
        attempt has failed. May be called from any thread."""
        for channel in list(self._channels.values()):
            flight = channel.flight
            if flight.last_error is not None and (flight.in_flight or flight.waiting):
                return flight.last_error
        return None

    def close(self) -> None:
        """Gives up everything in flight. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._client.metadata.remove_listener(self._metadata_changed)
        self._client.refusal_listeners.pop(self._refused, None)
        if self._allocation is not None:
            self._allocation.cancel()
        if self._ticker is not None:
            self._ticker.cancel()
        error = ClosedError("The producer was closed before an answer came.")
        unwritten = ClosedError(
            "The producer was closed before this was delivered. It was not written."
        )
        for channel in list(self._channels.values()):
            self._fail_all(channel, error, unwritten)
        self._channels.clear()
        # Batches that were not even announced yet.
        self._fail([Fail(batch, unwritten) for batch in self._accumulator.incomplete()])

    def in_doubt(self) -> set[ProducerBatch]:
        """The batches that were sent and have no outcome yet: they may or may not be written."""
        channels = list(self._channels.values())
        return {batch for channel in channels for batch in channel.flight.in_doubt()}

    def begin(self, producer_id: int, producer_epoch: int) -> None:
        """Begins a transaction: every batch taken from here on is sent under these numbers.
        Everything sent before has its outcome."""
        self._transaction = (producer_id, producer_epoch)
        self._failure = None
        self.has_numbered = False
        partition = self._client.metadata.partition
        for queue, channel in list(self._channels.items()):
            if partition(queue.topic, queue.topic_id, queue.partition) is None:
                del self._channels[queue]
            else:
                channel.flight.begin(producer_id, producer_epoch)

    def fail(self, error: RayqError) -> None:
        """Fails all accepted and undelivered batches, sent or not, until the next `begin`."""
        self._failure = error
        batches = self._accumulator.incomplete()
        for queue in dict.fromkeys(batch.queue for batch in batches):
            self._fail_all(self._channel(queue), error)

    def work(self, queues: list[PartitionQueue]) -> None:
        """Sends from queues that have new batches, or batches that became due."""
        for queue in queues:
            self._pump(self._channel(queue))

    def _channel(self, queue: PartitionQueue) -> _Channel:
        channel = self._channels.get(queue)
        if channel is None:
            backoff = self._client.backoff(
                self._config.retry_backoff_ms / 1000, RETRY_BACKOFF_MAX_S
            )
            flight = Flight(f"{queue.topic}-{queue.partition}", self._config, backoff)
            if self._transaction is not None:
                flight.begin(*self._transaction)
            channel = self._channels[queue] = _Channel(queue, flight)
        return channel

    # --- sending --------------------------------------------------------------------------------

    def _pump(self, channel: _Channel) -> None:
        """Sends everything of the partition that may be sent now. After a bug of rayq in here all
        waiting batches fail, instead of waiting forever."""
        if self._failure is not None:
            self._fail_all(channel, self._failure)
            return
        try:
            self._send_due(channel)
        except Exception as error:
            logger.exception("sending to %s failed", channel.flight.name)
            self._fail_all(channel, UnknownServerError(f"The sender failed: {error!r}."))

    def _send_due(self, channel: _Channel) -> None:
        flight, queue, accumulator = channel.flight, channel.queue, self._accumulator
        connection: Connection | None = None
        while not self._closed:
            now = self._client.now
            opened_at = accumulator.oldest_opened_at(queue)
            step = flight.next_step(now, opened_at, is_hurried=accumulator.is_hurried(queue))
            if step is None:
                return
            if isinstance(step, WaitUntil):
                self._pump_at(channel, step.time)
                return
            self._tick_later()
            if isinstance(step, TakeProducerId):
                if self._producer_id is None or self._producer_id == step.spent:
                    self._producer_id = None
                    self._allocate_producer_id(queue.topic)
                    return
                flight.producer_id = self._producer_id
                continue
            if connection is None:
                connection = self._connection(channel)
                if connection is None:
                    return
            if self._config.acks == 0 and connection.is_write_paused:
                self._wait_for_room(channel, connection)
                return
            if connection.throttled_s(Produce) > 0:
                self._wait_for_quota(channel, connection)
                return
            if isinstance(step, TakeBatch):
                if flight.in_flight and accumulator.has_barrier(queue):
                    return  # The last answer comes back here.
                batch = accumulator.take(queue, is_open_due=step.is_open_due)
                if batch is None:
                    is_held_up = step.is_open_due
                    self._pump_at(channel, now + HELD_UP_PAUSE_S if is_held_up else step.due_at)
                    return
                inflight = flight.add(batch)
            else:
                inflight = step
            if inflight.payload is not None or self._pack(channel, inflight):
                self._send_batch(channel, inflight, connection, now)

    def _pump_at(self, channel: _Channel, at: float) -> None:
        channel.stop_timer()

        def fire() -> None:
            channel.timer = None
            self._pump(channel)

        delay_s = max(at - self._client.now, 0.0)
        channel.timer = asyncio.get_running_loop().call_later(delay_s, fire)

    def _connection(self, channel: _Channel) -> Connection | None:
        """The open connection to the leader, or None while it is being made or the leader is
        unknown."""
        queue = channel.queue
        leader = self._client.metadata.leader(queue.topic, queue.topic_id, queue.partition)
        if leader is None:
            self._no_leader(channel)
            return None
        if channel.flight.led_by(leader):
            channel.leave()
        if channel.connection is not None and not channel.connection.closed:
            return channel.connection
        if channel.connecting is None or channel.connecting.done():
            channel.connecting_since = self._client.now
            channel.connecting = self._client.environment.tasks.spawn(
                self._connect(channel, leader), f"connect to the leader of {channel.flight.name}"
            )
        return None

    async def _connect(self, channel: _Channel, leader: LeaderAndEpoch) -> None:
        failure: RayqError | None = None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = await self._client.pool.get(leader.host, leader.port)
        except TimeoutError:
            failure = DisconnectedError(
                f"No connection to {leader.host}:{leader.port}, the leader of "
                f"{channel.flight.name}, within {CONNECT_TIMEOUT_S:g} s."
            )
        except RayqError as error:
            failure = error
        channel.connecting = None
        if self._closed:
            return
        if failure is None:
            channel.connection = connection
        elif failure.retriable:
            self._stall(channel, failure)
        else:
            self._fail_all(channel, failure)
            return
        self._pump(channel)

    def _no_leader(self, channel: _Channel) -> None:
        queue = channel.queue
        metadata = self._client.metadata
        error = self._client.no_leader_error(queue.topic, queue.topic_id, queue.partition)
        if metadata.partition(queue.topic, queue.topic_id, queue.partition) is None:
            self._fail_all(channel, error)
        else:
            self._stall(channel, error)

    def _send_batch(
        self, channel: _Channel, inflight: InFlightBatch, connection: Connection, now: float
    ) -> None:
        flight, queue, config = channel.flight, channel.queue, self._config
        assert inflight.payload is not None and flight.leader is not None
        request = Produce(
            topic_id=queue.topic_id,
            partition=queue.partition,
            leader_epoch=flight.leader.epoch,
            acks=_ACKS[config.acks],
            timeout_ms=config.request_timeout_ms,
        )
        attempt = flight.sent(inflight, now)
        if config.acks == 0:
            try:
                connection.send(request, inflight.payload)
            except RayqError as error:
                self._carry_out(channel, flight.failed(inflight, attempt, error, now))
            else:
                flight.let_go(inflight)
                self._succeed(inflight.batch, None, None)
            return
        timeout_s = config.request_timeout_ms / 1000 + ANSWER_SLACK_S
        answer = connection.request(request, inflight.payload, timeout_s=timeout_s)
        answer.add_done_callback(partial(self._answered, channel, inflight, attempt))

    def _pack(self, channel: _Channel, inflight: InFlightBatch) -> bool:
        """Numbers and encodes a batch. Returns False if it cannot be encoded, and has failed."""
        flight, batch = channel.flight, inflight.batch
        numbers = flight.next_numbers()
        try:
            batch.seal()
            payload = encode_batch(
                batch.values,
                batch.keys,
                batch.headers,
                batch.timestamps_ms,
                compression=self._config.compression_type,
                producer_id=None if numbers is None else numbers.producer_id,
                producer_epoch=0 if numbers is None else numbers.producer_epoch,
                base_sequence=None if numbers is None else numbers.base_sequence,
                append_time=channel.queue.append_time,
                is_transactional=self._transaction is not None,
                is_large=batch.is_large,
                is_chunk=batch.is_chunk,
            )
        except Exception as error:
            if not isinstance(error, RayqError):
                logger.exception("a batch for %s could not be packed", flight.name)
                error = InvalidRequestError(
                    f"{counted(batch.count, 'record')} for {flight.name} could not be packed, and "
                    f"will not be sent: {error!r}."
                )
            self._carry_out(channel, [flight.give_up(inflight, error)])
            return False
        flight.packed(inflight, payload, numbers)
        self.has_numbered = True
        if self._transaction is not None:
            return True
        if numbers is not None and numbers.base_sequence == 0 and numbers.producer_epoch > 0:
            logger.info("%s continues under producer %s epoch %d", flight.name, *numbers[:2])
        return True

    def _wait_for_room(self, channel: _Channel, connection: Connection) -> None:
        """Waits until the connection takes bytes again. Without acknowledgements only the network
        limits sending: the rest stays in the buffer, which is bounded."""
        if channel.full_connection is connection:
            return
        channel.full_connection = connection
        channel.full_since = self._client.now
        flight = channel.flight
        flight.last_error = OverloadedError("The connection to the leader takes no more bytes.")

        async def wait() -> None:
            await connection.drain()
            if channel.full_connection is connection:
                channel.full_connection = None
            self._pump(channel)

        tasks = self._client.environment.tasks
        tasks.spawn(wait(), f"wait for room to the leader of {flight.name}")

    def _wait_for_quota(self, channel: _Channel, connection: Connection) -> None:
        """Waits as long as the server says. Batches grow meanwhile."""
        throttled_s = connection.throttled_s(Produce)
        flight = channel.flight
        flight.last_error = OverloadedError(
            f"A quota of this client is used up: the leader takes more in {throttled_s:.1f} s."
        )
        self._pump_at(channel, self._client.now + throttled_s)
        if channel.throttled_connection is connection:
            return
        channel.throttled_connection = connection

        def go_on() -> None:
            if channel.throttled_connection is connection:
                channel.throttled_connection = None
            if not self._closed:
                self._pump(channel)

        connection.on_throttled_less(go_on)

    def _refused(self, connection: Connection, error: RayqError) -> None:
        """Handles a refusal of the server without acknowledgements: the refused records are lost.
        The next ones wait for newer metadata, or they might be refused as well."""
        channels = [
            channel for channel in self._channels.values() if channel.connection is connection
        ]
        if channels:
            self._refusals.say("records sent with acks=0 were refused, and are lost: %s", error)
        if error.stale_metadata:
            for channel in channels:
                self._stall(channel, error)

    def _allocate_producer_id(self, topic: str) -> None:
        """Asks for a producer id because of a batch for this topic. If this producer may not write
        there, other topics ask for themselves."""
        if self._closed or (self._allocation is not None and not self._allocation.done()):
            return

        async def allocate() -> None:
            failure: RayqError | None = None
            try:
                response = await self._client.ask_any(
                    AllocateProducerId(topic), timeout_s=self._config.request_timeout_ms / 1000
                )
                self._producer_id = response.producer_id
            except RayqError as error:
                failure = error
            finally:
                self._allocation = None
            for channel in list(self._channels.values()):
                failure_here = failure
                if isinstance(failure, AuthorizationError) and channel.queue.topic != topic:
                    failure_here = None
                channel.flight.last_error = failure_here or channel.flight.last_error
                if failure_here is not None and not failure_here.retriable:
                    self._fail_all(channel, failure_here)
                else:
                    self._pump(channel)

        tasks = self._client.environment.tasks
        self._allocation = tasks.spawn(allocate(), "allocate a producer id")

    # --- answers --------------------------------------------------------------------------------

    def _answered(
        self, channel: _Channel, inflight: InFlightBatch, attempt: int, answer: asyncio.Future[Any]
    ) -> None:
        flight = channel.flight
        if answer.cancelled():
            error: BaseException | None = DisconnectedError("The attempt was given up.")
        else:
            error = answer.exception()
        if error is None:
            if flight.acknowledged(inflight, attempt):
                response, _ = answer.result()
                append_time_ms = response.append_time_ms if channel.queue.append_time else None
                self._succeed(inflight.batch, response.base_offset, append_time_ms)
        else:
            if not isinstance(error, RayqError):
                error = UnknownServerError(f"The request failed: {error!r}.")
            # The error of an older attempt may belong to the previous transaction.
            is_current = inflight.attempt == attempt
            if is_current and self._transaction and isinstance(error, TransactionEndedError):
                # The batch stays in flight until the outcome is known.
                how = self._how_it_ended(error, *self._transaction)
                self._client.environment.tasks.spawn(
                    self._ended(channel, inflight, attempt, how),
                    f"a batch of {flight.name} whose transaction has ended",
                )
                return
            self._carry_out(channel, flight.failed(inflight, attempt, error, self._client.now))
        self._pump(channel)

    async def _ended(
        self, channel: _Channel, inflight: InFlightBatch, attempt: int, how: Awaitable[RayqError]
    ) -> None:
        error = await how
        self._carry_out(channel, channel.flight.failed(inflight, attempt, error, self._client.now))
        self._pump(channel)

    def _carry_out(self, channel: _Channel, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, SuspectLeader) and not channel.is_throttled:
                self._suspect(channel.queue, action.leader)
        self._fail([action for action in actions if isinstance(action, Fail)])

    def _succeed(
        self, batch: ProducerBatch, base_offset: int | None, append_time_ms: int | None
    ) -> None:
        self._accumulator.release(batch)
        batch.succeed(base_offset, append_time_ms)

    def _fail(self, fails: Sequence[Fail]) -> None:
        for batch, error in fails:
            self._accumulator.release(batch)
            self._on_failure(batch, error)
        for batch, error in fails:  # last, because a callback may close the producer
            batch.fail(error)

    def _fail_all(
        self, channel: _Channel, error: RayqError, unwritten: RayqError | None = None
    ) -> None:
        """Fails everything of the partition, sent or not. See `Flight.fail_all` for `unwritten`."""
        channel.stop_timer()
        queue = channel.queue
        self._carry_out(channel, channel.flight.fail_all(error, unwritten))
        while (batch := self._accumulator.take(queue, is_open_due=True)) is not None:
            self._fail([Fail(batch, unwritten or error)])
        if self._accumulator.oldest_opened_at(queue) is not None and not self._closed:
            # A stalled thread holds it up, and nobody else would come back for it.
            asyncio.get_running_loop().call_later(HELD_UP_PAUSE_S, self.work, [queue])

    def _stall(self, channel: _Channel, error: RayqError) -> None:
        """Pauses before the partition is tried again; a new leader cuts the pause short."""
        self._carry_out(channel, channel.flight.stalled(error, self._client.now))
        self._pump_at(channel, channel.flight.resume_at)

    def _suspect(self, queue: PartitionQueue, leader: LeaderAndEpoch | None) -> None:
        self._client.suspect(queue.topic, queue.topic_id, queue.partition, epoch_of(leader))

    # --- time and metadata ----------------------------------------------------------------------

    def _metadata_changed(self) -> None:
        """Takes back batches in flight to a former leader, and sends them to the new one."""
        metadata = self._client.metadata
        for channel in list(self._channels.values()):
            queue = channel.queue
            if metadata.partition(queue.topic, queue.topic_id, queue.partition) is None:
                self._gone(channel)
                continue
            leader = metadata.leader(queue.topic, queue.topic_id, queue.partition)
            if leader is not None and channel.flight.led_by(leader):
                channel.leave()
                self._pump(channel)

    def _gone(self, channel: _Channel) -> None:
        """Forgets a partition that is not in the metadata. It may come back, if the principal may
        not describe the topic for a while: then no batch may have the numbers of an earlier one,
        since the leader would take it for a repetition. So it gets another producer id, and in a
        transaction, whose id is given, the numbers continue until the next one begins."""
        if self._transaction is None:
            del self._channels[channel.queue]
            self._producer_id = None
        self._no_leader(channel)

    def _tick_later(self) -> None:
        if self._ticker is None and not self._closed:
            self._ticker = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        """Checks deadlines, and leaders that do not answer."""
        self._ticker = None
        now = self._client.now
        is_busy = False
        for channel in list(self._channels.values()):
            flight = channel.flight
            actions = flight.tick(now)
            self._carry_out(channel, actions)
            if self._fail_unsent(channel, now) or actions:
                self._pump(channel)
            is_silent = channel.connecting and now - channel.connecting_since > LEADER_PATIENCE_S
            is_full = channel.full_connection and now - channel.full_since > LEADER_PATIENCE_S
            if is_silent or (is_full and not channel.is_throttled):
                self._suspect(channel.queue, flight.leader)
            is_busy = is_busy or bool(flight.in_flight or flight.waiting)
            is_busy = is_busy or self._accumulator.oldest_opened_at(channel.queue) is not None
        if is_busy:
            self._tick_later()

    def _fail_unsent(self, channel: _Channel, now: float) -> bool:
        """Fails the batches of the accumulator that are past their deadlines. Returns whether there
        were any."""
        timeout_s = self._config.delivery_timeout_ms / 1000
        has_failed = False
        while True:
            opened_at = self._accumulator.oldest_opened_at(channel.queue)
            if opened_at is None or opened_at + timeout_s > now:
                return has_failed
            batch = self._accumulator.take(channel.queue, is_open_due=True)
            if batch is None:
                return has_failed
            self._fail([Fail(batch, channel.flight.timeout_error())])
            has_failed = True
