"""State machine of a transactional producer: it decides what the producer asks its coordinator, and
the outcome of each transaction.

Pure: calls of the user and answers of the coordinator go in; questions, refusals and outcomes come
out, and `transaction_core.py` carries them out. A `TransactionState`
guarantees:

- An epoch is used for one transaction. It is spent once its end is requested, whatever the answer.
- After a commit was requested, an abort of the same transaction never is, unless the commit was
  refused. Without an answer the next transaction does not begin: it requests the commit again.
- A transaction is not committed if any part of it failed, or may not have been written.
- The numbers of the next transaction are taken from the answer to a commit that took effect,
  because no other owner of the transactional id can have them. After any other end the coordinator
  is asked again, and says so if another owner has taken over.
- After that the producer writes nothing more.
- A transaction is called aborted only if its coordinator says so, or is about to: another process
  that knows the owner's name may have committed the part of it that existed.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from rayq.errors import (
    AlreadyCommittedError,
    InvalidRequestError,
    ProducerFencedError,
    RayqError,
    TransactionAbortedError,
    TransactionCommittedError,
    TransactionEndedError,
    TransactionOutcomeUnknownError,
)


class TransactionNumbers(NamedTuple):
    """The producer id and epoch that all batches of a transaction carry."""

    family: int
    epoch: int


class Init(NamedTuple):
    """Request for numbers, as the owner of the transactional id."""


class End(NamedTuple):
    """Request for the end of a transaction."""

    family: int
    epoch: int
    is_commit: bool
    name: str | None


Question = Init | End


class TransactionState:
    """The transactions of one producer, which has at most one at a time."""

    def __init__(self, transactional_id: str) -> None:
        self.phase: Literal["idle", "beginning", "open", "ending"] = "idle"
        self.token: object | None = None
        """Identifies the transaction that is begun, open or ending."""
        self.numbers: TransactionNumbers | None = None
        """The numbers of the open transaction, or of the next one. None: they must be requested."""
        self.unsettled: End | None = None
        """The end that was requested, until it is known how the transaction ended."""
        self.fenced: ProducerFencedError | None = None
        """Set when another owner took over the transactional id: this is the end of the
        producer."""
        self._id = transactional_id
        self._name: str | None = None
        self._last_name: str | None = None
        """The name of the last named transaction of the transactional id that committed."""
        self._failure: BaseException | None = None
        """The reason why the transaction can no longer be committed."""
        self._wants_commit = False
        self._attempts = 0
        """The number of times `unsettled` was requested."""
        self._verdict: RayqError | None = None
        """The error that the call that ends the transaction raises, once the coordinator has
        answered."""

    # --- the beginning --------------------------------------------------------------------------

    def begin(self, token: object, name: str | None) -> None:
        """Begins a transaction. Once `question` is None, `open` it. Raises InvalidRequestError,
        ProducerFencedError."""
        self.check_not_fenced()
        if self.phase != "idle":
            raise InvalidRequestError(
                f"A transaction of {self._id!r} has begun and not ended, and a producer has one at "
                "a time: leave its block, or end it with commit_transaction() or "
                "abort_transaction(). What is to be independent needs a producer with a "
                "transactional_id of its own."
            )
        self.phase = "beginning"
        self.token = token
        self._name = name

    @property
    def question(self) -> Question | None:
        """The request to send before a transaction may begin; None: it may."""
        if self.unsettled is not None:
            return self.unsettled
        return Init() if self.numbers is None else None

    def initialised(self, numbers: TransactionNumbers, last_name: str | None) -> None:
        """Handles the coordinator's answer to `Init`."""
        self.numbers = numbers
        self._last_name = last_name

    def open(self) -> TransactionNumbers:
        """Opens the transaction, and returns its numbers. Raises AlreadyCommittedError."""
        assert self.phase == "beginning" and self.numbers is not None
        if self._name is not None and self._name == self._last_name:
            raise self._already_committed("nothing was begun")
        self.phase = "open"
        self._failure = None
        return self.numbers

    def begin_failed(self) -> None:
        """Handles a transaction that did not begin."""
        self.phase = "idle"
        self.token = None

    # --- while it is open -----------------------------------------------------------------------

    @property
    def refusal(self) -> RayqError | None:
        """The reason why a record is refused now; None: it is accepted."""
        if self.fenced is not None:
            return self.fenced
        if self.phase == "ending":
            return self.ending_refusal()
        if self.phase != "open":
            return InvalidRequestError(
                f"send() outside of a transaction: this producer has the transactional_id "
                f"{self._id!r}, so each record belongs to one. Send within `with "
                "producer.transaction():`, or by a producer without a transactional_id."
            )
        return None if self._failure is None else self._aborted(self._failure)

    def ending_refusal(self) -> RayqError:
        """The reason why a record is refused once the transaction ends."""
        return InvalidRequestError(
            f"send() while a transaction of {self._id!r} ends: what it contains is decided. Wait "
            "for the threads or tasks that send before the end of the block."
        )

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def failed(self, error: BaseException) -> None:
        """Marks the open transaction as failed: a part of it was not written, or may not be, so it
        cannot be committed. The first reason counts."""
        if self._failure is None:
            self._failure = error

    # --- the end --------------------------------------------------------------------------------

    def end(self, *, is_commit: bool) -> None:
        """Starts the end of the open transaction; no record is accepted from here on. Raises
        InvalidRequestError, ProducerFencedError."""
        if self.phase != "open":
            self.check_not_fenced()
            raise InvalidRequestError(
                f"No transaction of {self._id!r} is open: it ended before, or none began."
            )
        self.phase = "ending"
        self._wants_commit = is_commit
        self._verdict = None

    def interrupted(self) -> bool:
        """Handles a caller that no longer waits for the end. A commit that was not requested yet
        never will be: then this returns True."""
        if self.phase != "ending" or not self._wants_commit or self.unsettled is not None:
            return False
        self.failed(InvalidRequestError("the commit was interrupted before it was asked for"))
        return True

    def decide(self, *, is_used: bool) -> None:
        """Decides the end, once every batch sent has its outcome, or no longer matters: from here
        on `unsettled` says what to request, if anything. `is_used`: records may have been written
        under the transaction's numbers."""
        assert self.phase == "ending" and self.numbers is not None
        is_commit = self._wants_commit and self._failure is None
        if self._wants_commit and self._failure is not None:
            self._verdict = self._aborted(self._failure)
        if not is_used and (self._name is None or not is_commit):
            return  # The coordinator has not heard of it: the next transaction gets its numbers.
        self.unsettled = End(*self.numbers, is_commit, self._name if is_commit else None)
        self.numbers = None
        self._attempts = 0

    def asked(self) -> None:
        """Counts another request for `unsettled`."""
        self._attempts += 1

    @property
    def was_asked(self) -> bool:
        return self._attempts > 0

    def ended(self, is_committed: bool, next_numbers: TransactionNumbers) -> None:
        """Handles the coordinator's answer: how the transaction ended, whatever was requested.
        Raises TransactionCommittedError if an abort was requested, and nobody waits for its end."""
        end = self.unsettled
        assert end is not None
        self.unsettled = None
        if not end.is_commit:
            if is_committed:
                self._verdict = self.how_it_ended(is_committed=True)
                if self.phase == "beginning":
                    raise self._verdict
            elif isinstance(self._verdict, TransactionOutcomeUnknownError):
                self._verdict = self.how_it_ended(is_committed=False)
            return
        if not is_committed:
            self._verdict = self.how_it_ended(is_committed=False)
            return
        if end.name is not None:
            self._last_name = end.name
        if next_numbers == (end.family, end.epoch + 1):
            self.numbers = next_numbers

    def refused(self, error: RayqError) -> None:
        """Handles an error that the coordinator answered to `question`, or a missing answer. Raises
        it if the question stays open, and if the producer is fenced."""
        end = self.unsettled
        if isinstance(error, ProducerFencedError):
            self.fenced = error
            self.unsettled = self.numbers = None
            if end is not None and end.is_commit and self._attempts > 1:
                # The earlier attempt, which has no answer, may have taken effect.
                self._verdict = self._unknown(error)
            elif self._wants_commit:
                self._verdict = error.with_message(error.message)
        elif end is not None and isinstance(error, AlreadyCommittedError):
            self._last_name = end.name
            self._verdict = self._already_committed("this one was aborted")
            self.unsettled = End(end.family, end.epoch, False, None)
            return
        elif end is not None and isinstance(error, TransactionEndedError):
            self.unsettled = None
            self._verdict = self._unknown(error) if end.is_commit else self.ended_unknown(error)
            return
        elif end is not None and end.is_commit:
            self._verdict = self._unknown(error)
        raise error

    def finish(self, error: RayqError | None) -> RayqError | None:
        """Finishes the end, settled or not; returns the error for the call that asked for it.
        `error` is the one that `refused` has raised."""
        self.phase = "idle"
        self.token = None
        if self._wants_commit:
            return self._verdict
        return error or self._verdict

    # --- errors ---------------------------------------------------------------------------------

    def check_not_fenced(self) -> None:
        """Raises ProducerFencedError if another owner took over."""
        if self.fenced is not None:
            raise self.fenced.with_message(self.fenced.message)

    def how_it_ended(self, *, is_committed: bool) -> RayqError:
        """The error of a transaction that ended before its producer asked for that."""
        if is_committed:
            return TransactionCommittedError(
                f"The transaction of {self._id!r} was committed before its producer asked for "
                "that: what was acknowledged by then is visible, and the rest was not written. "
                "Another process knows its owner. Read what is there before you run it again."
            )
        return TransactionAbortedError(
            f"The transaction of {self._id!r} was aborted before its commit was asked for: it was "
            "open for longer than transaction_timeout_ms, or an operator aborted it, or another "
            "producer has the transactional_id by now, as the next transaction will say. Run it "
            "again."
        )

    def ended_unknown(self, cause: RayqError) -> TransactionOutcomeUnknownError:
        """The same error if nobody says how it ended."""
        error = TransactionOutcomeUnknownError(
            f"The transaction of {self._id!r} ended before its producer asked for that, and its "
            f"coordinator does not say how: {cause} It is aborted, unless another process that "
            "knows its owner has committed what there was of it. Read what is there before you run "
            "it again."
        )
        error.__cause__ = cause
        return error

    def _aborted(self, cause: BaseException) -> RayqError:
        if isinstance(cause, TransactionCommittedError | TransactionOutcomeUnknownError):
            return cause.with_message(cause.message)
        error = TransactionAbortedError(
            f"The transaction of {self._id!r} is aborted, since something of it was not written. "
            "Nothing of it is visible to whoever reads what is committed: run it again. "
            f"The reason: {cause}"
        )
        error.__cause__ = cause
        return error

    def _already_committed(self, what: str) -> AlreadyCommittedError:
        return AlreadyCommittedError(
            f"A transaction of {self._id!r} with the name {self._name!r} is committed, and a name "
            f"commits once: {what}. Continue with what comes after it."
        )

    def _unknown(self, cause: RayqError) -> TransactionOutcomeUnknownError:
        error = TransactionOutcomeUnknownError(
            f"The commit of a transaction of {self._id!r} was asked for, and no answer says what "
            f"became of it: {cause} It is committed whole or not at all. The next transaction of "
            "this producer finds it out first; with a name it can be run again, and commits once."
        )
        error.__cause__ = cause
        return error
