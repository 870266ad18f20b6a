"""The life of a transactional producer: each event, in each state that matters."""

from __future__ import annotations

from typing import Any

import pytest

from rayq.client.producing.transaction_state import (
    End,
    Init,
    TransactionNumbers,
    TransactionState,
)
from rayq.errors import (
    AlreadyCommittedError,
    DeliveryTimeoutError,
    InvalidRequestError,
    ProducerFencedError,
    RayqError,
    TimeoutError,
    TransactionAbortedError,
    TransactionEndedError,
    TransactionOutcomeUnknownError,
    UnknownServerError,
)

FAMILY = 1 << 61
FIRST, SECOND = TransactionNumbers(FAMILY, 7), TransactionNumbers(FAMILY, 8)


def ready(last_name: str | None = None) -> TransactionState:
    """Its next transaction has the numbers FIRST."""
    state = TransactionState("billing")
    state.initialised(FIRST, last_name)
    return state


def opened(name: str | None = None) -> TransactionState:
    state = ready()
    state.begin(object(), name)
    assert state.question is None
    assert state.open() == FIRST
    return state


def asked(*, is_commit: bool = True, name: str | None = None, attempts: int = 1) -> TransactionState:
    """The end of the transaction was asked for."""
    state = opened(name)
    state.end(is_commit=is_commit)
    state.decide(is_used=True)
    for _ in range(attempts):
        state.asked()
    return state


def refuse(state: TransactionState, error: RayqError) -> RayqError | None:
    """Tells the refusal, and returns what the call raises."""
    try:
        state.refused(error)
    except RayqError as raised:
        return state.finish(raised)
    return state.finish(None)


# --- the beginning --------------------------------------------------------------------------------


def test_the_first_transaction_asks_for_numbers() -> None:
    state = TransactionState("billing")
    state.begin(object(), None)
    assert state.question == Init()
    state.initialised(FIRST, None)
    assert state.question is None
    assert state.open() == FIRST
    assert state.phase == "open"


@pytest.mark.parametrize("phase", ["beginning", "open", "ending"])
def test_transactions_do_not_nest(phase: str) -> None:
    state = ready()
    state.begin(object(), None)
    if phase != "beginning":
        state.open()
    if phase == "ending":
        state.end(is_commit=True)
    with pytest.raises(InvalidRequestError, match="one at a time"):
        state.begin(object(), None)
    assert state.phase == phase


def test_a_beginning_that_failed_can_be_tried_again() -> None:
    state = TransactionState("billing")
    state.begin(object(), None)
    with pytest.raises(TimeoutError):
        state.refused(TimeoutError("no answer"))
    state.begin_failed()
    state.begin(object(), None)
    assert state.question == Init()


def test_a_name_that_is_committed_does_not_begin_again() -> None:
    state = ready("batch-1")
    state.begin(object(), "batch-1")
    with pytest.raises(AlreadyCommittedError, match="nothing was begun"):
        state.open()
    state.begin_failed()
    state.begin(object(), "batch-2")
    assert state.open() == FIRST


# --- what is refused ------------------------------------------------------------------------------


def test_records_are_accepted_while_a_transaction_is_open_and_at_no_other_time() -> None:
    state = ready()
    assert isinstance(state.refusal, InvalidRequestError) and "outside" in str(state.refusal)
    state.begin(object(), None)
    assert isinstance(state.refusal, InvalidRequestError) and "outside" in str(state.refusal)
    state.open()
    assert state.refusal is None
    state.end(is_commit=True)
    assert isinstance(state.refusal, InvalidRequestError) and "ends" in str(state.refusal)
    state.decide(is_used=False)
    assert state.finish(None) is None
    assert isinstance(state.refusal, InvalidRequestError) and "outside" in str(state.refusal)


def test_after_a_failure_records_are_refused() -> None:
    state = opened()
    state.failed(DeliveryTimeoutError("late"))
    refusal = state.refusal
    assert isinstance(refusal, TransactionAbortedError)
    assert isinstance(refusal.__cause__, DeliveryTimeoutError)


@pytest.mark.parametrize("is_commit", [True, False])
def test_what_is_not_open_does_not_end(is_commit: bool) -> None:
    state = ready()
    with pytest.raises(InvalidRequestError, match="is open"):
        state.end(is_commit=is_commit)


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_commit", "is_used", "name", "fails", "question"),
    [
        (True, True, None, False, End(*FIRST, True, None)),
        (True, True, "n", False, End(*FIRST, True, "n")),
        (True, False, None, False, None),
        (True, False, "n", False, End(*FIRST, True, "n")),
        (True, True, "n", True, End(*FIRST, False, None)),
        (True, False, "n", True, None),
        (False, True, "n", False, End(*FIRST, False, None)),
        (False, False, "n", False, None),
    ],
)
def test_what_is_asked_for_at_the_end(
    is_commit: bool, is_used: bool, name: str | None, fails: bool, question: End | None
) -> None:
    state = opened(name)
    if fails:
        state.failed(DeliveryTimeoutError("late"))
    state.end(is_commit=is_commit)
    state.decide(is_used=is_used)
    assert state.unsettled == question
    if question is None:
        error = state.finish(None)
        assert isinstance(error, TransactionAbortedError) if fails else error is None
        assert state.numbers == FIRST, "nobody has seen them"
    else:
        assert state.numbers is None, "an epoch whose end was asked for is spent"


def test_a_commit_brings_the_numbers_of_the_next_transaction() -> None:
    state = asked(name="n")
    state.ended(True, SECOND)
    assert state.finish(None) is None
    assert state.numbers == SECOND
    state.begin(object(), "n")
    assert state.question is None
    with pytest.raises(AlreadyCommittedError):
        state.open()


@pytest.mark.parametrize(
    ("is_commit", "is_committed", "numbers"),
    [
        (False, False, SECOND),  # perhaps another owner had it aborted, and has these numbers
        (True, False, SECOND),
        (True, True, TransactionNumbers(FAMILY, 9)),
        (True, True, TransactionNumbers(FAMILY + (1 << 20), 0)),
    ],
)
def test_other_answers_have_the_producer_ask_whether_it_is_still_the_owner(
    is_commit: bool, is_committed: bool, numbers: TransactionNumbers
) -> None:
    state = asked(is_commit=is_commit)
    state.ended(is_committed, numbers)
    error = state.finish(None)
    is_surprise = is_commit and not is_committed
    assert isinstance(error, TransactionAbortedError) if is_surprise else error is None
    state.begin(object(), None)
    assert state.question == Init()


def test_what_failed_is_aborted_and_the_next_transaction_begins() -> None:
    state = opened()
    state.failed(DeliveryTimeoutError("late"))
    state.failed(UnknownServerError("later"))
    state.end(is_commit=True)
    state.decide(is_used=True)
    state.asked()
    state.ended(False, SECOND)
    error = state.finish(None)
    assert isinstance(error, TransactionAbortedError)
    assert isinstance(error.__cause__, DeliveryTimeoutError)
    state.begin(object(), None)
    assert state.question == Init()
    state.initialised(SECOND, None)
    assert state.open() == SECOND
    assert not state.has_failed


def test_an_abort_without_an_answer_does_not_hide_why() -> None:
    state = opened()
    state.failed(DeliveryTimeoutError("late"))
    state.end(is_commit=True)
    state.decide(is_used=True)
    state.asked()
    assert isinstance(refuse(state, TimeoutError("no answer")), TransactionAbortedError)
    assert state.question == End(*FIRST, False, None)


# --- without a plain answer -----------------------------------------------------------------------


@pytest.mark.parametrize("error", [TimeoutError("lost"), UnknownServerError("a bug")])
def test_a_commit_without_an_answer_is_unknown_and_settled_first(error: RayqError) -> None:
    state = asked(name="n", attempts=3)
    outcome = refuse(state, error)
    assert isinstance(outcome, TransactionOutcomeUnknownError) and outcome.__cause__ is error
    state.begin(object(), "n")
    assert state.question == End(*FIRST, True, "n"), "never an abort"
    state.asked()
    state.ended(True, SECOND)
    assert state.question is None
    with pytest.raises(AlreadyCommittedError):
        state.open()


def test_a_commit_in_doubt_that_turns_out_to_be_aborted_can_be_run_again() -> None:
    state = asked(name="n")
    refuse(state, TimeoutError("lost"))
    state.begin(object(), "n")
    state.asked()
    state.ended(False, SECOND)
    assert state.question == Init()
    state.initialised(SECOND, None)
    assert state.open() == SECOND


def test_an_abort_without_an_answer_raises_that_and_is_settled_first() -> None:
    state = asked(is_commit=False)
    error = TimeoutError("lost")
    assert refuse(state, error) is error
    state.begin(object(), None)
    assert state.question == End(*FIRST, False, None)


@pytest.mark.parametrize(
    ("is_commit", "attempts", "expected"),
    [
        (True, 1, ProducerFencedError),
        (True, 2, TransactionOutcomeUnknownError),
        (False, 2, ProducerFencedError),
    ],
)
def test_another_owner_is_the_end_of_the_producer(
    is_commit: bool, attempts: int, expected: type[RayqError]
) -> None:
    state = asked(is_commit=is_commit, attempts=attempts)
    assert type(refuse(state, ProducerFencedError("another"))) is expected
    assert isinstance(state.refusal, ProducerFencedError)
    calls: list[Any] = [
        lambda: state.begin(object(), None),
        lambda: state.end(is_commit=True),
        lambda: state.end(is_commit=False),
    ]
    for call in calls:
        with pytest.raises(ProducerFencedError):
            call()


def test_a_failed_transaction_of_a_producer_that_is_fenced_raises_that() -> None:
    state = opened()
    state.failed(TransactionAbortedError("ended"))
    state.end(is_commit=True)
    state.decide(is_used=True)
    state.asked()
    assert isinstance(refuse(state, ProducerFencedError("another")), ProducerFencedError)


def test_another_owner_may_show_up_at_the_beginning() -> None:
    state = TransactionState("billing")
    state.begin(object(), None)
    with pytest.raises(ProducerFencedError):
        state.refused(ProducerFencedError("another"))
    state.begin_failed()
    with pytest.raises(ProducerFencedError):
        state.begin(object(), None)


def test_a_name_that_another_attempt_committed_has_the_transaction_aborted() -> None:
    state = asked(name="n")
    state.refused(AlreadyCommittedError("n"))
    assert state.unsettled == End(*FIRST, False, None)
    state.asked()
    state.ended(False, SECOND)
    assert isinstance(state.finish(None), AlreadyCommittedError)
    assert state.question == Init()


@pytest.mark.parametrize("is_commit", [True, False])
def test_nobody_knows_how_ended_what_the_coordinator_has_forgotten(is_commit: bool) -> None:
    state = asked(is_commit=is_commit)
    outcome = refuse(state, TransactionEndedError("over"))
    assert isinstance(outcome, TransactionOutcomeUnknownError)
    assert state.question == Init()


# --- interrupted ----------------------------------------------------------------------------------


def test_an_interrupted_commit_is_aborted_unless_it_was_asked_for() -> None:
    state = opened()
    state.end(is_commit=True)
    assert state.interrupted()
    state.decide(is_used=True)
    assert state.unsettled == End(*FIRST, False, None)
    assert not asked().interrupted()
    assert not asked(is_commit=False).interrupted()
    assert not ready().interrupted()
