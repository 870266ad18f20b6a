"""State machine of one partition's batches on their way to its leader.

Pure: events and the time go in, actions come out, and `sender.py` carries them out. A `Flight`
guarantees:

- At most `max_in_flight_requests_per_connection` batches of a partition are in flight, and none is
  sent that is five or more after one that is unresolved: the leader recognises only the last five.
- After a failure nothing of the partition is sent until every batch in flight has its answer; then
  the failed ones are sent again, in order, before any other. Batches keep their numbers over
  retries, so the leader recognises a batch that was appended, and whose answer was lost.
- A batch that fails for good leaves a gap in the sequence. The flight then sends nothing new, lets
  the batches that were sent before resolve under their old numbers, and continues under the next
  producer epoch from sequence 0 (docs/protocol.md, rule 19). Epochs are per partition: only the
  partition's leader compares them, and no other producer has the producer id.
- In a transaction the numbers come from outside, by `begin`, and stay: a batch that fails for good
  makes the transaction fail, and nothing new is sent before the next one.

The flags of errors decide: the batch may be written (`not_written`, `outcome_unknown`), it may be
sent again (`retriable`), the metadata is out of date (`stale_metadata`), the producer has to
renumber its batches (`breaks_sequence`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rayq.backoff import Backoff
from rayq.client.leader_requests import LEADER_PATIENCE_S, may_retry
from rayq.client.metadata import LeaderAndEpoch
from rayq.client.producing.accumulator import ProducerBatch
from rayq.config import ProducerConfig
from rayq.errors import (
    DeliveryTimeoutError,
    OutcomeUnknownError,
    ProducerFencedError,
    RayqError,
    TransactionAbortedError,
    TransactionCommittedError,
    TransactionOutcomeUnknownError,
)
from rayq.storage.batch import SEQUENCE_COUNT
from rayq.storage.producer_state import BATCHES_REMEMBERED

PRODUCER_EPOCH_MAX = 2**16 - 1
HOW_TRANSACTIONS_END = (
    TransactionAbortedError,
    TransactionCommittedError,
    TransactionOutcomeUnknownError,
)


class Numbers(NamedTuple):
    """The identity of a batch, by which the leader appends each batch once."""

    producer_id: int
    producer_epoch: int
    base_sequence: int


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """A batch in flight, or about to be sent (again): its numbers, its attempts."""

    batch: ProducerBatch
    deadline: float
    serial: int
    """Place in the order of the partition."""
    payload: bytearray | None = None
    """The encoded batch; None until `Flight.packed`."""
    numbers: Numbers | None = None
    in_doubt: bool = False
    """True if an attempt may have been written, without an answer that says so."""
    attempt: int | None = None
    """The attempt that is in flight, if there is one."""
    sent_at: float = 0.0


# --- what comes out -------------------------------------------------------------------------------


class Fail(NamedTuple):
    """The batch is not sent again. Its outcome is `error`."""

    batch: ProducerBatch
    error: RayqError


class SuspectLeader(NamedTuple):
    """The leader failed, or the partition has none: newer metadata is needed."""

    leader: LeaderAndEpoch | None


class TakeBatch(NamedTuple):
    """The next batch of the accumulator may be sent."""

    is_open_due: bool
    """True if an open batch may be taken too; otherwise only a full one."""
    due_at: float
    """The time at which an open batch is due, in seconds of the monotonic clock."""


class WaitUntil(NamedTuple):
    """Nothing is sent before this time."""

    time: float


class TakeProducerId(NamedTuple):
    """The flight needs a producer id, any except `spent`."""

    spent: int | None


Action = Fail | SuspectLeader
"""An action that an event asks for."""
NextStep = InFlightBatch | TakeBatch | WaitUntil | TakeProducerId
"""The next step without an event. A batch is packed, if it has no payload yet, and sent."""


class Flight:
    """The batches of one partition on their way. Times are in seconds, of one monotonic clock."""

    def __init__(self, name: str, config: ProducerConfig, backoff: Backoff) -> None:
        """`name` is the partition's, for messages."""
        self.name = name
        self.producer_id: int | None = None
        self.producer_epoch = 0
        self.next_sequence = 0
        self.next_serial = 0
        self.in_flight: list[InFlightBatch] = []
        """The batches in flight, in the order in which they were sent."""
        self.waiting: list[InFlightBatch] = []
        """The batches to be sent, or sent again, in order."""
        self.is_stalled = False
        """True if a failure stalls the flight, until all answers are in and `resume_at` has
        come."""
        self.resume_at = 0.0
        self.needs_new_epoch = False
        self.leader: LeaderAndEpoch | None = None
        """The leader that batches are sent to. None until a leader is known."""
        self.last_error: RayqError | None = None
        self._spent_producer_id: int | None = None
        self._attempts = 0
        self._backoff = backoff
        self._is_idempotent = config.idempotent
        self._is_transactional = config.transactional_id is not None
        self._in_flight_max = config.max_in_flight_requests_per_connection
        self._linger_s = config.linger_ms / 1000
        self._delivery_timeout_s = config.delivery_timeout_ms / 1000

    def begin(self, producer_id: int, producer_epoch: int) -> None:
        """Begins a transaction: its batches carry this id and epoch, and count from 0."""
        assert not self.in_flight and not self.waiting, "the one before has ended"
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch
        self.next_sequence = 0
        self.needs_new_epoch = False

    # --- what is next ---------------------------------------------------------------------------

    def next_step(
        self, now: float, opened_at: float | None, *, is_hurried: bool
    ) -> NextStep | None:
        """The next step; None: nothing until the next event. `opened_at` is the time at which the
        oldest batch of the accumulator was opened, None if the accumulator has none. `is_hurried`:
        an open batch does not linger."""
        if self.is_stalled:
            if self.in_flight:
                return None
            if now < self.resume_at:
                return WaitUntil(self.resume_at)
            self.is_stalled = False
        if not self.waiting and opened_at is None:
            return None
        if self._is_idempotent:
            if self.needs_new_epoch and not self._is_transactional:
                self._start_new_epoch()
            if self.producer_id is None:
                return TakeProducerId(self._spent_producer_id)
        if len(self.in_flight) >= self._in_flight_max:
            return None
        for inflight in self.waiting:
            if inflight.payload is not None or not self.needs_new_epoch:
                return inflight
        if opened_at is None or self.needs_new_epoch:
            return None
        if self.in_flight and self._is_idempotent:
            unresolved = self.next_serial - self.in_flight[0].serial
            if unresolved >= BATCHES_REMEMBERED:
                # With one more, the leader might forget the oldest, and would no longer recognise
                # its retry.
                return None
        due_at = opened_at + self._linger_s
        return TakeBatch(not self.in_flight or is_hurried or now >= due_at, due_at)

    def _start_new_epoch(self) -> None:
        """Starts numbers from 0 under a new epoch, once everything in doubt has resolved."""
        if self.in_flight or any(inflight.in_doubt for inflight in self.waiting):
            return
        if self.producer_epoch == PRODUCER_EPOCH_MAX:
            # There are no epochs left, so a new id is needed.
            self._spent_producer_id, self.producer_id = self.producer_id, None
            self.producer_epoch = -1
        self.producer_epoch += 1
        self.next_sequence = 0
        self.needs_new_epoch = False
        for inflight in self.waiting:
            inflight.payload = inflight.numbers = None

    # --- on the way out -------------------------------------------------------------------------

    def add(self, batch: ProducerBatch) -> InFlightBatch:
        """Adds the batch that was taken after `TakeBatch`. It is next."""
        deadline = batch.opened_at + self._delivery_timeout_s
        inflight = InFlightBatch(batch, deadline, self.next_serial)
        self.next_serial += 1
        self.waiting.append(inflight)
        return inflight

    def next_numbers(self) -> Numbers | None:
        """The numbers of the batch that is packed next; None without idempotence."""
        if self.producer_id is None:
            return None
        return Numbers(self.producer_id, self.producer_epoch, self.next_sequence)

    def packed(self, inflight: InFlightBatch, payload: bytearray, numbers: Numbers | None) -> None:
        """Handles a batch that was encoded with `next_numbers`, which are its own from here on."""
        inflight.payload = payload
        inflight.numbers = numbers
        if numbers is not None:
            self.next_sequence = (self.next_sequence + inflight.batch.count) % SEQUENCE_COUNT

    def sent(self, inflight: InFlightBatch, now: float) -> int:
        """Handles a batch that is being sent. Returns the number of the attempt, for its
        outcome."""
        self.waiting.remove(inflight)
        self.in_flight.append(inflight)
        inflight.sent_at = now
        self._attempts = inflight.attempt = self._attempts + 1
        return inflight.attempt

    # --- what came of it ------------------------------------------------------------------------

    def acknowledged(self, inflight: InFlightBatch, attempt: int) -> bool:
        """Handles an acknowledgement of the leader: the batch succeeds. Returns False if the
        attempt was given up before, and its answer does not count."""
        if inflight.attempt != attempt:
            return False
        self.let_go(inflight)
        self._backoff.reset()
        return True

    def let_go(self, inflight: InFlightBatch) -> None:
        """Forgets a batch: nothing more is heard of it. Without acknowledgements, that is once it
        is sent."""
        inflight.attempt = None
        self.in_flight.remove(inflight)

    def failed(
        self, inflight: InFlightBatch, attempt: int, error: RayqError, now: float
    ) -> list[Action]:
        """Handles an attempt that ended with an error. The error of an attempt that was given up
        before does not count."""
        if inflight.attempt != attempt:
            return []
        self.last_error = error
        goes_again = may_retry(error)
        if inflight.numbers is not None and error.breaks_sequence:
            if error.retriable and not self._is_first(inflight):
                # The leader lacks a predecessor. If an earlier attempt is unanswered, both may
                # still be on their way to it, on a connection that was given up: only its number
                # tells a batch in doubt from its own repetition.
                self._wait_again(inflight)
                self.is_stalled = True
                return []
            # The missing predecessor was acknowledged once, or has failed for good.
            self.needs_new_epoch = True
            goes_again = not (inflight.in_doubt or self._is_transactional)
        elif error.outcome_unknown or (goes_again and not error.not_written):
            inflight.in_doubt = True
        if goes_again:
            self._wait_again(inflight)
            return self.stalled(error, now)
        if inflight.numbers is not None and isinstance(error, ProducerFencedError):
            self.producer_epoch = PRODUCER_EPOCH_MAX  # another producer has the id: take a new one
        return [self.give_up(inflight, error)]

    def _is_first(self, inflight: InFlightBatch) -> bool:
        """Returns whether nothing sent before it is unresolved."""
        return all(other.serial >= inflight.serial for other in (*self.in_flight, *self.waiting))

    def _wait_again(self, inflight: InFlightBatch) -> None:
        inflight.attempt = None
        self.in_flight.remove(inflight)
        self.waiting.append(inflight)
        self.waiting.sort(key=lambda other: other.serial)

    def stalled(self, error: RayqError, now: float) -> list[Action]:
        """Stalls the partition because of `error`: it waits until `resume_at`, or until another
        leader is known."""
        self.last_error = error
        # The batches of one window fail together: that is one failure.
        if not self.is_stalled or self.resume_at <= now:
            self.resume_at = now + self._backoff.next_s()
        self.is_stalled = True
        return [SuspectLeader(self.leader)] if error.stale_metadata else []

    def led_by(self, leader: LeaderAndEpoch) -> bool:
        """Notes the leader. Returns True if it is another one than before. Then the attempts in
        flight to the former leader are given up, and their batches are in doubt; waiting batches
        are sent at once."""
        if leader == self.leader:
            return False
        self.leader = leader
        for inflight in self.in_flight[:]:
            inflight.in_doubt = True
            self._wait_again(inflight)
        self.resume_at = 0.0
        self._backoff.reset()
        return True

    def tick(self, now: float) -> list[Action]:
        """Fails batches that are past their deadline, and suspects a leader that does not
        answer."""
        late = [
            inflight for inflight in (*self.in_flight, *self.waiting) if inflight.deadline <= now
        ]
        actions: list[Action] = []
        if late:
            error = self.timeout_error()
            actions += self._give_up_all(late, error, error)
        if self.in_flight and now - self.in_flight[0].sent_at > LEADER_PATIENCE_S:
            actions.append(SuspectLeader(self.leader))
        return actions

    def fail_all(self, error: RayqError, unwritten: RayqError | None = None) -> list[Fail]:
        """Fails everything, sent or not, in order. `unwritten` is the error of batches that are
        known not to be written, if it differs."""
        self.last_error = error
        return self._give_up_all([*self.in_flight, *self.waiting], error, unwritten or error)

    def in_doubt(self) -> list[ProducerBatch]:
        """The batches that were sent, and may or may not be written."""
        pending = (*self.in_flight, *self.waiting)
        return [
            inflight.batch
            for inflight in pending
            if inflight.in_doubt or inflight.attempt is not None
        ]

    def _give_up_all(
        self, pending: list[InFlightBatch], error: RayqError, unwritten: RayqError
    ) -> list[Fail]:
        for inflight in pending:
            inflight.in_doubt = inflight.in_doubt or inflight.attempt is not None
        pending.sort(key=lambda inflight: inflight.serial)
        return [
            self.give_up(inflight, error if inflight.in_doubt else unwritten)
            for inflight in pending
        ]

    def give_up(self, inflight: InFlightBatch, error: RayqError) -> Fail:
        """Fails a batch for good; its numbers, if it has any, are lost with it."""
        (self.waiting if inflight.attempt is None else self.in_flight).remove(inflight)
        inflight.attempt = None
        if inflight.numbers is not None:
            self.needs_new_epoch = True
        if self._is_transactional:
            error = _in_transaction(self.name, error, inflight.in_doubt)
        elif inflight.in_doubt:
            error = _unknown(self.name, error)
        return Fail(inflight.batch, error)

    def timeout_error(self) -> DeliveryTimeoutError:
        """The error of a batch whose deadline has passed."""
        reason = self.last_error or "its turn did not come"
        return DeliveryTimeoutError(
            f"A batch for {self.name} could not be delivered within delivery_timeout_ms "
            f"({self._delivery_timeout_s * 1000:.0f} ms): {reason}"
        )


def _unknown(name: str, error: RayqError) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        f"A batch was sent to {name} and may or may not be written: no answer said. {error} "
        "Read the end of the partition before you send it again."
    )


def _in_transaction(name: str, error: RayqError, in_doubt: bool) -> RayqError:
    """The error of a batch whose transaction is aborted because of it, unless it was aborted
    before."""
    if isinstance(error, HOW_TRANSACTIONS_END):
        return error
    if in_doubt:
        return TransactionAbortedError(
            f"A batch was sent to {name}, and no answer said whether it is written, so its "
            f"transaction cannot be committed. {error}"
        )
    return error
