"""`QueueTask`, one record handed out by a queue, and the decisions of its consumer."""

from __future__ import annotations

from types import TracebackType
from typing import Any, NoReturn, Protocol, Self

from rayq.client.queues.arguments import DELAY_S_MAX, seconds_between
from rayq.client.queues.taken import Row, Taken
from rayq.client.user_objects import no_pickle_error
from rayq.errors import InvalidRequestError, LockLostError
from rayq.records import Headers
from rayq.user_functions import told

ACK, NACK, REJECT, EXTEND = "ack", "nack", "reject", "extend"

REASON_CHARACTERS_MAX = 1_000
"""Maximum length of a reason that is kept with a dead letter."""


class Decisions(Protocol):
    """Receiver of users' decisions. Its methods may be called from any thread."""

    def decide(self, taken: Taken, offset: int, what: str, argument: Any) -> None:
        """Records a decision. Raises ClosedError."""
        ...

    def dropped(self, taken: Taken, offsets: list[int], is_seen: bool) -> None:
        """Reports offsets that nobody can settle any longer."""
        ...


class Lease:
    """A hold on the records that one call of `take` handed out. When the last of its tasks is gone,
    unsettled ones are given back: a record that its consumer forgot would otherwise stay locked up
    to `max_handling_s`."""

    __slots__ = ("taken", "offsets", "is_seen", "decisions")

    def __init__(self, taken: Taken, offsets: list[int], decisions: Decisions) -> None:
        self.taken = taken
        self.offsets = offsets
        self.is_seen = False
        """True if the user got the records. A Ctrl+C may come in between."""
        self.decisions = decisions

    def end(self) -> None:
        """Ends the lease: nothing is to be given back any longer."""
        self.offsets = []

    def __del__(self) -> None:
        # The collector calls this, at any moment and in any thread: it must not wait.
        if self.offsets:
            self.decisions.dropped(self.taken, self.offsets, self.is_seen)


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
        "_lease",
        "_outcome",
    )

    def __init__(self, row: Row, lease: Lease) -> None:
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
        ) = row
        self.delivery_count -= lease.taken.excused.get(self.offset, 0)
        self._lease = lease
        self._outcome: str | None = None

    @property
    def headers(self) -> Headers:
        """The headers in the order in which they were put; [] if there are none."""
        return self._headers or []

    @property
    def queue(self) -> str:
        """The name of the queue that the record was taken from."""
        return self._lease.taken.lane.source.name

    @property
    def topic(self) -> str:
        return self._lease.taken.lane.source.topic

    @property
    def partition(self) -> int:
        return self._lease.taken.lane.partition

    @property
    def is_settled(self) -> bool:
        """True if it was acknowledged, given back or rejected here."""
        return self._outcome is not None

    @property
    def is_open(self) -> bool:
        """True if it is this consumer's, as far as is known here, and unsettled."""
        return self.offset in self._lease.taken.open

    @property
    def was_rejected(self) -> bool:
        """True if it was sent to the dead letters here."""
        return self._outcome == REJECT

    @property
    def lost(self) -> LockLostError | None:
        """The reason why the record is no longer this consumer's, as far as is known here. It may
        become known after `ack`: `queue.flush()` then raises it."""
        return self._lease.taken.lost.get(self.offset)

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
        self._settle(ACK, None)

    def nack(self, delay_s: float | None = None) -> None:
        """Gives the record back, to be tried again after `delay_s` seconds (None: by the queue's
        back-off, which doubles). After the last of `max_deliveries` it goes to the dead letters
        instead. Raises as `ack` does."""
        if delay_s is not None:
            delay_s = seconds_between("delay_s", delay_s, DELAY_S_MAX)
        self._settle(NACK, None if delay_s is None else round(delay_s * 1000))

    def reject(self, reason: str) -> None:
        """Sends the record to the dead letters at once, with this reason (its first 1,000 bytes).
        Raises as `ack` does."""
        if not isinstance(reason, str):
            raise TypeError(f"A reason is a str, not {type(reason).__name__}.")
        self._reject(reason, is_failure=False)

    def extend(self, seconds: float) -> None:
        """Keeps the record for `seconds` from now, if that is longer than the client's own
        extension. A leader that takes over meanwhile does not know of it: it keeps the record while
        this process continues to extend it, and for `visibility_timeout_s` after that. Raises
        InvalidRequestError beyond `max_handling_s` since it was taken, and as `ack` does."""
        wanted_s = seconds_between("An extension", seconds, DELAY_S_MAX)
        taken = self._lease.taken
        left_s = taken.lane.handling_left_s(taken)
        if self._outcome is not None:
            self._refuse(EXTEND)
        self._check_kept()
        if wanted_s > left_s:
            raise InvalidRequestError(
                f"A record of queue {self.queue!r} is handled for at most "
                f"{taken.lane.source.config.max_handling_s:g} s (max_handling_s), of which "
                f"{max(left_s, 0.0):.1f} s are left: it cannot be extended by {wanted_s:g} s. "
                "Alter the queue, or divide the work."
            )
        self._lease.decisions.decide(taken, self.offset, EXTEND, wanted_s)

    def fail(self, error: BaseException, retries: int | None = None) -> None:
        """Fails the record like a `with` block that raised: `nack`, or to the dead letters with the
        error once it was delivered `max_deliveries` times (or `retries` + 1 times, if that is
        less). Raises as `ack` does."""
        taken = self._lease.taken
        most = taken.lane.source.config.max_deliveries
        if retries is not None:
            most = min(most, retries + 1)
        if self.delivery_count >= most:
            self._reject(told(error), is_failure=True)
        else:
            self.nack()

    def _reject(self, reason: str, *, is_failure: bool) -> None:
        reason = reason[:REASON_CHARACTERS_MAX].encode(errors="replace").decode()
        self._settle(REJECT, (reason, is_failure))

    def _settle(self, outcome: str, argument: Any) -> None:
        if self._outcome is not None:
            if self._outcome == outcome:
                return
            self._refuse(outcome)
        self._check_kept()
        lease = self._lease
        lease.decisions.decide(lease.taken, self.offset, outcome, argument)
        self._outcome = outcome
        if len(lease.offsets) == 1:
            lease.end()

    def _check_kept(self) -> None:
        lost = self.lost
        if lost is not None:
            raise LockLostError(lost.message)

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
    return task.delivery_count + task._lease.taken.excused.get(task.offset, 0)
