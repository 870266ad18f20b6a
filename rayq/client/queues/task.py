"""`QueueTask`, one record handed out by a queue, and the decisions of its consumer."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, Self

from rayq.client.queues.acknowledger import Acknowledger, shortened
from rayq.client.queues.acquired import AcquiredBatch, AcquiredRecord
from rayq.client.queues.arguments import DELAY_S_MAX, seconds_between
from rayq.client.queues.inbox import Inbox
from rayq.client.user_objects import no_pickle_error
from rayq.errors import InvalidRequestError, LockLostError
from rayq.records import Headers
from rayq.user_functions import told

ACK, NACK, REJECT, EXTEND = "ack", "nack", "reject", "extend"


class Delivery:
    """Records of one batch that were handed out together. When the last of its tasks is gone,
    unsettled ones are given back: a record that its consumer forgot would otherwise stay locked up
    to `max_handling_s`."""

    __slots__ = ("batch", "offsets", "is_seen", "acknowledger", "inbox")

    def __init__(
        self, batch: AcquiredBatch, offsets: list[int], acknowledger: Acknowledger, inbox: Inbox
    ) -> None:
        self.batch = batch
        self.offsets = offsets
        self.is_seen = False
        """True if the user got the records. A Ctrl+C may come in between."""
        self.acknowledger = acknowledger
        self.inbox = inbox

    def end(self) -> None:
        """Ends the delivery: nothing is to be given back any longer."""
        self.offsets = []

    def __del__(self) -> None:
        # The collector calls this, at any moment and in any thread: it must not wait.
        if self.offsets:
            dropped = self.acknowledger.dropped
            self.inbox.add_dropped(dropped, self.batch, self.offsets, self.is_seen)


HandedOut = list[tuple[Delivery, list[AcquiredRecord]]]
"""Records on their way to a user."""


def tasks_of(handed_out: HandedOut) -> list[QueueTask]:
    """The tasks of the records, in the user's thread: from now on the user has them."""
    tasks: list[QueueTask] = []
    for delivery, records in handed_out:
        tasks += [QueueTask(record, delivery) for record in records]
        delivery.is_seen = True
    return tasks


class QueueTask:
    """A record of a queue that belongs to this consumer until it is settled, once.

    `ack` settles it, `nack` gives it back for another try, `reject` sends it to the dead letters.
    All three return at once; decisions travel together with others, and `queue.flush()` waits until
    they are durable. As a context manager the task is acknowledged if the block ends well, and
    given back if it raises (the error propagates); at the last of `max_deliveries` it is rejected,
    with the error as its reason. The client extends the lock by itself while the task is in use, up
    to `max_handling_s`.
    """

    __slots__ = (
        "offset",
        "delivery_count",
        "key",
        "value",
        "_headers",
        "timestamp_ms",
        "_delivery",
        "_outcome",
    )

    def __init__(self, record: AcquiredRecord, delivery: Delivery) -> None:
        self.offset: int
        self.delivery_count: int
        """The number of times the record was given to a user, including this time."""
        self.key: bytes | None
        self.value: bytes | None
        (
            self.offset,
            self.delivery_count,
            self.key,
            self.value,
            self._headers,
            self.timestamp_ms,
            _,
        ) = record
        self.delivery_count -= delivery.batch.excused.get(self.offset, 0)
        self._delivery = delivery
        self._outcome: str | None = None

    @property
    def headers(self) -> Headers:
        """The headers in the order in which they were put; [] if there are none."""
        return self._headers or []

    @property
    def queue(self) -> str:
        """The name of the queue that the record was taken from."""
        return self._delivery.batch.partition.queue.name

    @property
    def topic(self) -> str:
        return self._delivery.batch.partition.queue.topic

    @property
    def partition(self) -> int:
        return self._delivery.batch.partition.number

    @property
    def is_settled(self) -> bool:
        """True if it was acknowledged, given back or rejected here."""
        return self._outcome is not None

    @property
    def is_open(self) -> bool:
        """True if it is this consumer's, as far as is known here, and unsettled."""
        return self.offset in self._delivery.batch.open

    @property
    def was_rejected(self) -> bool:
        """True if it was sent to the dead letters here."""
        return self._outcome == REJECT

    @property
    def lost(self) -> LockLostError | None:
        """The reason why the record is no longer this consumer's, as far as is known here. It may
        become known after `ack`: `queue.flush()` then raises it."""
        return self._delivery.batch.lost.get(self.offset)

    def __repr__(self) -> str:
        state = self._outcome or ("lost" if self.lost is not None else "open")
        return (
            f"<QueueTask {self.topic}-{self.partition} offset {self.offset}, "
            f"delivery {self.delivery_count}, {state}>"
        )

    # --- what becomes of it ---------------------------------------------------------------------

    def ack(self) -> None:
        """Acknowledges the record: it is done, and is not delivered again. A second call does
        nothing. Raises LockLostError if another consumer has it by now, InvalidRequestError after
        `nack` or `reject`, ClosedError."""
        self._settle(ACK, self._delivery.acknowledger.ack)

    def nack(self, delay_s: float | None = None) -> None:
        """Gives the record back, to be tried again after `delay_s` seconds (None: by the queue's
        back-off, which doubles). After the last of `max_deliveries` it goes to the dead letters
        instead. Raises as `ack` does."""
        delay_ms = None
        if delay_s is not None:
            delay_ms = round(seconds_between("delay_s", delay_s, DELAY_S_MAX) * 1000)
        self._settle(NACK, self._delivery.acknowledger.nack, delay_ms)

    def reject(self, reason: str) -> None:
        """Sends the record to the dead letters at once, with this reason (its first 1,000 bytes).
        Raises as `ack` does."""
        if not isinstance(reason, str):
            raise TypeError(f"A reason must be a str, not {type(reason).__name__}.")
        self._settle(REJECT, self._delivery.acknowledger.reject, shortened(reason), False)

    def extend(self, seconds: float) -> None:
        """Keeps the record for `seconds` from now, if that is longer than the client's own
        extension. A leader that takes over meanwhile does not know of it: it keeps the record while
        this process continues to extend it, and for `visibility_timeout_s` after that. Raises
        InvalidRequestError beyond `max_handling_s` since it was taken, and as `ack` does."""
        wanted_s = seconds_between("An extension", seconds, DELAY_S_MAX)
        delivery = self._delivery
        left_s = delivery.batch.handling_left_s()
        if self._outcome is not None:
            self._refuse(EXTEND)
        self._check_kept()
        if wanted_s > left_s:
            limit_s = delivery.batch.partition.queue.config.max_handling_s
            raise InvalidRequestError(
                f"A record of queue {self.queue!r} is handled for at most "
                f"{limit_s:g} s (max_handling_s), of which "
                f"{max(left_s, 0.0):.1f} s are left: it cannot be extended by {wanted_s:g} s. "
                "Alter the queue, or divide the work."
            )
        delivery.inbox.add(delivery.acknowledger.extend, delivery.batch, self.offset, wanted_s)

    def fail(self, error: BaseException, retries: int | None = None) -> None:
        """Fails the record like a `with` block that raised: `nack`, or to the dead letters with the
        error once it was delivered `max_deliveries` times (or `retries` + 1 times, if that is
        less). Raises as `ack` does."""
        most = self._delivery.batch.partition.queue.config.max_deliveries
        if retries is not None:
            most = min(most, retries + 1)
        if self.delivery_count >= most:
            reason = shortened(told(error))
            self._settle(REJECT, self._delivery.acknowledger.reject, reason, True)
        else:
            self.nack()

    def _settle(self, outcome: str, settle: Callable[..., int], *arguments: Any) -> None:
        if self._outcome is not None:
            if self._outcome == outcome:
                return
            self._refuse(outcome)
        self._check_kept()
        delivery = self._delivery
        delivery.inbox.add(settle, delivery.batch, self.offset, *arguments)
        self._outcome = outcome
        if len(delivery.offsets) == 1:
            delivery.end()

    def _check_kept(self) -> None:
        lost = self._delivery.batch.lost
        if lost and self.offset in lost:
            raise LockLostError(lost[self.offset].message)

    def _refuse(self, what: str) -> NoReturn:
        raise InvalidRequestError(
            f"Offset {self.offset} of {self.topic}-{self.partition} was settled before, by "
            f"{self._outcome}(): {what}() comes too late."
        )

    # --- as a context manager -------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self._outcome is not None:
            return
        if error is None:
            self.ack()
        elif self.lost is None:
            self.fail(error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.__exit__(kind, error, traceback)

    def __reduce__(self) -> str:
        raise no_pickle_error(self, "a queue")


def lock_count(task: QueueTask) -> int:
    """The count that names its lock, including deliveries that do not count as failures."""
    return task.delivery_count + task._delivery.batch.excused.get(task.offset, 0)
