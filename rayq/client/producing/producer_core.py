"""The part that both producers share, on the client's loop. Users' threads call the intake and
little else.

Nothing here refers to the producer that the user holds, so a producer that the user drops is
garbage-collected.
"""

from __future__ import annotations

import asyncio
import builtins
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from rayq.client.callbacks import finish_callback
from rayq.client.client import Client
from rayq.client.large.objects import object_uri, write_object
from rayq.client.producing.accumulator import Accumulator, PartitionQueue, ProducerBatch
from rayq.client.producing.futures import BatchRange, ManyDeliveryFuture
from rayq.client.producing.intake import Intake, StoredValue, TopicQueues
from rayq.client.producing.sender import Sender
from rayq.client.producing.transaction_core import TransactionCore
from rayq.config import ProducerConfig
from rayq.core.large.values import VALUE_ID_BYTES, crc_of, manifest_of_object
from rayq.errors import (
    BufferFullError,
    ClosedError,
    DeliveryError,
    OutcomeUnknownError,
    RayqError,
    TimeoutError,
    counted,
)

logger = logging.getLogger(__name__)


class ProducerCore:
    """The core of a producer, made on the client's loop; methods under "any thread" may be called
    from others."""

    def __init__(
        self, client: Client, config: ProducerConfig, on_close: Callable[[], None]
    ) -> None:
        self.config = config
        self.client = client
        self.loop = asyncio.get_running_loop()
        self.is_closed = False
        self._on_close = on_close
        self._loop_thread = threading.get_ident()
        self._dirty: deque[PartitionQueue] = deque()
        self._is_work_announced = False
        self._undelivered = 0
        self._first_error: RayqError | None = None
        self._callbacks: set[asyncio.Task[None]] = set()
        """The delivery callbacks that are being awaited."""
        self._hidden: dict[str, TopicQueues] = {}
        """The topics that a producer with transactions sent to, and that are not in the metadata.
        One that comes back keeps its queues, and with them the numbers of the open transaction."""
        clock = client.environment.clock
        self.accumulator = Accumulator(config, clock.monotonic, self._announce)
        self.intake = Intake(config, self.accumulator, clock, client.environment.random)
        self._sender = Sender(
            client, config, self.accumulator, self._failed, self._how_it_ended
        )
        self.transactions: TransactionCore | None = None
        """None without a transactional id."""
        if config.transactional_id is not None:
            self.transactions = TransactionCore(
                client, config, self.accumulator, self._sender, self._drain
            )
        client.metadata.add_listener(self._metadata_changed)

    # --- any thread -----------------------------------------------------------------------------

    def forked(self) -> None:
        """Stops everything in a forked child, which sends nothing: every use raises ClosedError,
        and nobody waits for records sent. It takes no lock, because a thread of the parent may have
        held it."""
        self.is_closed = True
        self.intake.topics = {}
        error = ClosedError(
            "This was sent before a fork, in the parent process, which delivers it and knows the "
            "outcome."
        )
        self._give_up(error, error)

    def loop_has_ended(self) -> None:
        """Stops everything after the event loop has ended: nothing is sent any longer, and waiting
        threads get a ClosedError."""
        self.is_closed = True
        self.intake.topics = {}
        self._give_up(
            ClosedError("The event loop ended before this was delivered. It was not written."),
            OutcomeUnknownError(
                "This was sent, and may or may not be written: the event loop ended before an "
                "answer came. Read the end of the partition before you send it again."
            ),
        )
        self._on_close()

    def _give_up(self, error: RayqError, in_doubt: RayqError) -> None:
        """Gives up all batches; those that may or may not be written get `in_doubt`."""
        sent = self._sender.in_doubt()
        for batch in self.accumulator.incomplete():
            if not batch.is_done:
                batch.give_up(in_doubt if batch in sent else error)

    def write_object(self, topic: str, value: Any) -> StoredValue:
        """Writes a value that is too large for the log as an object; returns its stand-in for the
        log. Blocks meanwhile. Raises RemoteStorageError, RemoteDeniedError, MissingExtraError."""
        url, cluster_id = self.config.large_values, self.client.metadata.cluster_id
        assert url is not None and cluster_id is not None, "with metadata it is known"
        data = b"".join((value,))
        value_id = self.client.environment.random.randbytes(VALUE_ID_BYTES)
        uri = object_uri(url, cluster_id, topic, value_id)
        write_object(uri, data)
        return StoredValue(manifest_of_object(len(data), crc_of(data), value_id, uri))

    def work_soon(self) -> None:
        """Makes the sender look at everything that waits."""
        self.loop.call_soon_threadsafe(self._work_on_all)

    def unsent_count(self) -> int:
        """The number of records without an outcome."""
        return sum(batch.record_count for batch in self.accumulator.incomplete())

    @property
    def writes_objects(self) -> bool:
        """True if large values become objects."""
        return self.config.large_values not in (None, "chunks")

    @property
    def has_open_transaction(self) -> bool:
        return self.transactions is not None and self.transactions.state.phase == "open"

    def _announce(self, queue: PartitionQueue) -> None:
        """Passes a queue to the sender, on its loop."""
        self._dirty.append(queue)
        if self._is_work_announced:
            return
        if threading.get_ident() == self._loop_thread:
            self._is_work_announced = True
            self.loop.call_soon(self._work)
        else:
            # No call may stand in between: a signal handler could run there and wait for the
            # delivery.
            self._is_work_announced = True
            try:
                self.loop.call_soon_threadsafe(self._work)
            except BaseException:  # a Ctrl+C, before it began
                self._is_work_announced = False
                raise

    def describe(self) -> str:
        """The topics the producer sends to, for a repr. It takes no lock, because a debugger may
        ask at a breakpoint."""
        topics = ", ".join(map(repr, sorted(self.intake.topics))) or "no topic yet"
        return f"to {topics}, {'closed' if self.is_closed else 'open'}"

    def trouble(self) -> RayqError | None:
        """The same as `Sender.trouble`."""
        return self._sender.trouble()

    def check_open(self) -> None:
        if self.is_closed:
            raise ClosedError("The producer is closed: make a new one from the cluster.")

    def block_deadline(self, timeout_s: float | None = None) -> float:
        """The time until which a `send` that starts now may wait to be accepted, in seconds of the
        monotonic clock."""
        block_s = self.config.max_block_ms / 1000
        return self.client.now + (block_s if timeout_s is None else min(block_s, timeout_s))

    # --- the loop -------------------------------------------------------------------------------

    def _work(self) -> None:
        self._is_work_announced = False
        queues: dict[PartitionQueue, None] = {}
        while self._dirty:
            queues[self._dirty.popleft()] = None
        self._sender.work(list(queues))

    def _work_on_all(self) -> None:
        batches = self.accumulator.incomplete()
        self._sender.work(list(dict.fromkeys(batch.queue for batch in batches)))

    def _failed(self, batch: ProducerBatch, error: RayqError) -> None:
        self._undelivered += batch.record_count
        if self._first_error is None:
            self._first_error = error
        if self.transactions is not None:
            self.transactions.failed(error)

    async def _how_it_ended(self, error: RayqError, family: int, epoch: int) -> RayqError:
        assert self.transactions is not None
        return await self.transactions.how_it_ended(error, family, epoch)

    def _metadata_changed(self) -> None:
        topics = self.intake.topics
        for name, known in list(topics.items()):
            metadata = self.client.metadata.topics.get(name)
            if metadata is None:
                del topics[name]
                self.client.drop_interest(name)
                if self.transactions is not None:
                    self._hidden[name] = known
            elif metadata != known.metadata:
                topics[name] = TopicQueues(metadata, self.config, known)

    async def load_topic(self, topic: str, *, timeout_s: float) -> None:
        """Fetches the metadata that `send` needs. Raises UnknownTopicError."""
        self.check_open()
        metadata = await self.client.topic(topic, timeout_s=timeout_s)
        if topic not in self.intake.topics:
            known = self._hidden.pop(topic, None)
            self.intake.topics[topic] = TopicQueues(metadata, self.config, known)
            self.client.add_interest(topic)

    async def flush(self, timeout_s: float | None = None) -> None:
        """Waits until everything sent before has an outcome. Raises DeliveryError, TimeoutError."""
        self.accumulator.is_flushing += 1
        try:
            self._work_on_all()
            batches = self.accumulator.incomplete()
            future = ManyDeliveryFuture([BatchRange(batch, 0, 0) for batch in batches])
            try:
                async with asyncio.timeout(timeout_s):
                    await _settled(future)
                    await self._called_back()
            except builtins.TimeoutError:
                waiting = sum(not batch.is_done for batch in batches)
                if not waiting:
                    raise TimeoutError(
                        f"flush: all is delivered, and {len(self._callbacks)} calls of on_delivery "
                        f"have not ended after {timeout_s} s: flush again to wait for them."
                    ) from None
                raise TimeoutError(
                    f"flush: {waiting} batches are still under way after {timeout_s} s. They go "
                    "on until delivery_timeout_ms: flush again to wait for them."
                ) from None
        finally:
            self.accumulator.is_flushing -= 1
        count, error = self._undelivered, self._first_error
        self._undelivered, self._first_error = 0, None
        if error is not None:
            raise DeliveryError(
                f"{counted(count, 'record was', 'records were')} accepted since the last flush and "
                f"not delivered. The first failed with {type(error).__name__}: {error}"
            ) from error

    def finish_callback(self, result: object) -> None:
        """Awaits the result of a delivery callback, in its own task."""
        task = self.client.environment.tasks.spawn(_finished(result), "on_delivery")
        self._callbacks.add(task)
        task.add_done_callback(self._callbacks.discard)

    async def _called_back(self) -> None:
        """Waits for the delivery callbacks that are being awaited. A callback does not wait for
        others."""
        if self._callbacks and not _is_callback.get():
            await asyncio.wait(list(self._callbacks))

    async def _drain(self) -> None:
        """Waits until all records of a transaction have an outcome. Failures are reported by the
        end of the transaction."""
        self.accumulator.is_flushing += 1
        try:
            while batches := self.accumulator.incomplete():
                self._work_on_all()
                await _settled(ManyDeliveryFuture([BatchRange(batch, 0, 0) for batch in batches]))
        finally:
            self.accumulator.is_flushing -= 1
        self._undelivered, self._first_error = 0, None

    async def close(self, timeout_s: float | None = None) -> None:
        """Aborts an open transaction, flushes, then ends. Raises as `flush` does."""
        if self.is_closed:
            return
        self.is_closed = True
        self.accumulator.close()
        deadline = None if timeout_s is None else self.client.now + timeout_s
        try:
            if self.transactions is not None:
                await self._close_transactions(self.transactions, timeout_s)
            await self.flush(None if deadline is None else max(deadline - self.client.now, 0.0))
        except TimeoutError:
            raise self._undelivered_error(timeout_s) from None
        finally:
            self._release()

    def _undelivered_error(self, timeout_s: float | None) -> TimeoutError:
        """The error that describes the records that are given up now."""
        sent = self._sender.in_doubt()
        counts = {True: 0, False: 0}
        for batch in self.accumulator.incomplete():
            counts[batch in sent] += batch.record_count
        if not any(counts.values()):
            return TimeoutError(
                f"close: all is delivered, and {len(self._callbacks)} calls of on_delivery, which "
                f"continue, have not ended after {timeout_s:g} s."
            )
        return TimeoutError(
            f"close: {counted(sum(counts.values()), 'record was', 'records were')} not delivered "
            f"within {timeout_s:g} s; no more is tried. Not written: {counts[False]}. Sent: "
            f"{counts[True]}, which may or may not be written, because no answer came: read the "
            "ends of their partitions before you send them again. The future of each says which it "
            "is."
        )

    async def _close_transactions(
        self, transactions: TransactionCore, timeout_s: float | None
    ) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await transactions.close()
        except (RayqError, builtins.TimeoutError) as error:
            logger.warning(
                "the open transaction of %r could not be aborted; it ends by "
                "transaction_timeout_ms: %s",
                self.config.transactional_id,
                str(error) or f"no answer within {timeout_s:g} s",
            )

    async def leave(self, timeout_s: float | None) -> None:
        """Does the same as `close`, for a producer that its user dropped."""
        await self.close(timeout_s)

    def abandon(self) -> None:
        """Closes without waiting: undelivered records fail."""
        if not self.is_closed:
            self.is_closed = True
            self.accumulator.close()
            self._release()

    def _release(self) -> None:
        self._sender.close()
        self.client.metadata.remove_listener(self._metadata_changed)
        for topic in self.intake.topics:
            self.client.drop_interest(topic)
        self.intake.topics = {}
        self._on_close()


_is_callback: ContextVar[bool] = ContextVar("is_callback", default=False)
"""True if a delivery callback runs here, in a task."""


async def _finished(result: object) -> None:
    _is_callback.set(True)
    try:
        await finish_callback("on_delivery", result)
    except BaseException:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        logger.exception("a delivery callback failed")


async def _settled(future: ManyDeliveryFuture) -> None:
    """Waits until a future is done, whatever its outcome."""
    try:
        await future
    except RayqError:
        return


def buffer_full_error(config: ProducerConfig, timeout_s: float | None = None) -> BufferFullError:
    """The error after `max_block_ms`, or after a shorter `timeout_s` of the call."""
    waited = f"max_block_ms ({config.max_block_ms} ms)"
    if timeout_s is not None and timeout_s < config.max_block_ms / 1000:
        waited = f"timeout_s ({timeout_s:g} s)"
    return BufferFullError(
        f"The producer's buffer of {config.buffer_memory} bytes stayed full for {waited}: the "
        "cluster takes records more slowly than they are sent. Send more slowly, or raise "
        "buffer_memory."
    )


def no_result_error(timeout_s: float | None) -> TimeoutError:
    return TimeoutError(
        f"send_and_wait: no result of the delivery within {timeout_s:g} s. The record is on its "
        "way until delivery_timeout_ms, and may be written: flush() waits for it."
    )
