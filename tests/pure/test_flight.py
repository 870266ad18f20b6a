"""The batches of a partition on their way: each event, in each state that matters."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rayq.client.leader_requests import LEADER_PATIENCE_S
from rayq.client.metadata import LeaderAndEpoch
from rayq.client.producing.accumulator import PartitionQueue, ProducerBatch
from rayq.client.producing.flight import (
    HOW_TRANSACTIONS_END,
    PRODUCER_EPOCH_MAX,
    Fail,
    Flight,
    InFlightBatch,
    Numbers,
    SuspectLeader,
    TakeBatch,
    TakeProducerId,
    WaitUntil,
)
from rayq.config import ProducerConfig
from rayq.errors import (
    DeliveryTimeoutError,
    DisconnectedError,
    DiskFullError,
    FencedEpochError,
    LeadershipEndedError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderError,
    OutcomeUnknownError,
    OutOfOrderSequenceError,
    OverloadedError,
    PartitionOfflineError,
    ProducerFencedError,
    ProtocolError,
    RayqError,
    RecordTooLargeError,
    StorageError,
    TimeoutError,
    TransactionAbortedError,
    TransactionOrderError,
    UnknownEpochError,
    UnknownProducerError,
    UnknownServerError,
    UnknownTopicError,
)

NOW = 100.0
DELIVERY_TIMEOUT_S = 120.0
LINGER_S = 0.005
OLD, NEW = LeaderAndEpoch(1, "a", 1, 7), LeaderAndEpoch(2, "b", 1, 8)
QUEUE = PartitionQueue("t", "id", 0, 1000, False)


class CountedBackoff:
    """A backoff of 20 ms, doubled by each call."""

    def __init__(self) -> None:
        self.calls = 0

    def reset(self) -> None:
        self.calls = 0

    def next_s(self) -> float:
        self.calls += 1
        return 0.01 * 2**self.calls


def a_flight(**config: Any) -> Flight:
    backoff: Any = CountedBackoff()
    flight = Flight("t-0", ProducerConfig(linger_ms=5, **config), backoff)
    if flight.next_step(NOW, NOW, is_hurried=True) == TakeProducerId(None):
        flight.producer_id = 40
    flight.led_by(OLD)
    return flight


def a_batch(count: int = 10, opened_at: float = NOW) -> ProducerBatch:
    batch = ProducerBatch(QUEUE, 0, opened_at, 0)
    batch.count = count
    return batch


def step(flight: Flight, now: float = NOW, opened_at: float | None = None) -> Any:
    return flight.next_step(now, opened_at, is_hurried=False)


def send_next(flight: Flight, now: float = NOW) -> tuple[InFlightBatch, int]:
    """Sends the first batch that waits."""
    found = step(flight, now)
    assert isinstance(found, InFlightBatch)
    if found.payload is None:
        flight.packed(found, bytearray(1), flight.next_numbers())
    return found, flight.sent(found, now)


def send_new(flight: Flight, number: int = 1) -> list[tuple[InFlightBatch, int]]:
    sent = []
    for _ in range(number):
        flight.add(a_batch())
        sent.append(send_next(flight))
    return sent


def put_in_doubt(flight: Flight, inflight: InFlightBatch, attempt: int) -> None:
    """The batch's answer is lost, and the wait after that is over."""
    flight.failed(inflight, attempt, DisconnectedError("lost"), NOW)
    assert inflight.in_doubt
    flight.resume_at = 0.0


# --- what is sent next ----------------------------------------------------------------------------


def test_without_batches_nothing_is_next() -> None:
    assert step(a_flight()) is None


def test_numbered_batches_wait_for_a_producer_id_and_others_do_not() -> None:
    backoff: Any = CountedBackoff()
    assert step(Flight("t-0", ProducerConfig(), backoff), opened_at=NOW) == TakeProducerId(None)
    for acks in (0, 1):
        flight = Flight("t-0", ProducerConfig(acks=acks), backoff)
        assert isinstance(step(flight, opened_at=NOW), TakeBatch)
        assert flight.next_numbers() is None


@pytest.mark.parametrize(
    "in_flight, waited_s, is_hurried, is_due",
    [
        (0, 0.0, False, True),
        (1, 0.0, False, False),
        (1, LINGER_S - 0.001, False, False),
        (1, LINGER_S, False, True),
        (1, 0.0, True, True),
    ],
)
def test_an_open_batch_lingers_behind_one_in_flight(
    in_flight: int, waited_s: float, is_hurried: bool, is_due: bool
) -> None:
    flight = a_flight()
    send_new(flight, in_flight)
    found = flight.next_step(NOW + waited_s, NOW, is_hurried=is_hurried)
    assert found == TakeBatch(is_due, NOW + LINGER_S)


@pytest.mark.parametrize("in_flight_max", [1, 3, 5])
def test_at_most_so_many_are_in_flight(in_flight_max: int) -> None:
    flight = a_flight(max_in_flight_requests_per_connection=in_flight_max)
    send_new(flight, in_flight_max - 1)
    assert isinstance(step(flight, opened_at=NOW), TakeBatch)
    (last,) = send_new(flight)
    assert step(flight, opened_at=NOW) is None
    flight.acknowledged(*last)
    assert len(flight.in_flight) == in_flight_max - 1


def test_none_is_sent_five_or_more_behind_an_unresolved_one() -> None:
    flight = a_flight()
    sent = send_new(flight, 5)
    for inflight, attempt in sent[1:]:
        assert flight.acknowledged(inflight, attempt)
    assert step(flight, opened_at=NOW) is None
    assert flight.acknowledged(*sent[0])
    assert isinstance(step(flight, opened_at=NOW), TakeBatch)


def test_without_numbers_nothing_is_to_be_recognised() -> None:
    flight = a_flight(acks=1)
    for inflight, attempt in send_new(flight, 5)[1:]:
        flight.acknowledged(inflight, attempt)
    assert isinstance(step(flight, opened_at=NOW), TakeBatch)


def test_numbers_go_on_by_records_and_wrap() -> None:
    flight = a_flight()
    assert [one.numbers for one, _ in send_new(flight, 2)] == [
        Numbers(40, 0, 0), Numbers(40, 0, 10),
    ]
    flight.next_sequence = 2**31 - 4
    ((inflight, _),) = send_new(flight)
    assert inflight.numbers == Numbers(40, 0, 2**31 - 4)
    assert flight.next_numbers() == Numbers(40, 0, 6)


def test_a_batch_that_cannot_be_packed_takes_no_number() -> None:
    flight = a_flight()
    error = RecordTooLargeError("too large")
    fail = flight.give_up(flight.add(a_batch()), error)
    assert fail.error is error
    assert flight.next_numbers() == Numbers(40, 0, 0) and not flight.needs_new_epoch
    assert step(flight) is None


def test_what_is_sent_without_acknowledgements_is_done_with() -> None:
    flight = a_flight(acks=0)
    ((inflight, _),) = send_new(flight)
    flight.let_go(inflight)
    assert step(flight) is None and flight.tick(NOW + 1000) == []


# --- errors ---------------------------------------------------------------------------------------

AGAIN, FAILS, UNKNOWN = "sent again", "fails", "fails, the outcome is unknown"


@pytest.mark.parametrize(
    "kind, when_sure, when_in_doubt, leaves_doubt, suspects",
    [
        (NotLeaderError, AGAIN, AGAIN, False, True),
        (LeadershipEndedError, AGAIN, AGAIN, True, True),
        (DisconnectedError, AGAIN, AGAIN, True, True),
        (TimeoutError, AGAIN, AGAIN, True, True),
        (StorageError, AGAIN, AGAIN, True, True),
        (NotEnoughReplicasAfterAppendError, AGAIN, AGAIN, True, False),
        (NotEnoughReplicasError, AGAIN, AGAIN, False, False),
        (DiskFullError, AGAIN, AGAIN, False, True),
        (FencedEpochError, AGAIN, AGAIN, False, True),
        (UnknownEpochError, AGAIN, AGAIN, False, False),
        (OverloadedError, AGAIN, AGAIN, False, False),
        (PartitionOfflineError, AGAIN, AGAIN, False, True),
        (UnknownTopicError, AGAIN, AGAIN, False, True),
        (OutOfOrderSequenceError, AGAIN, UNKNOWN, False, False),
        (UnknownProducerError, AGAIN, UNKNOWN, False, False),
        (ProducerFencedError, FAILS, UNKNOWN, False, False),
        (RecordTooLargeError, FAILS, UNKNOWN, False, False),
        (UnknownServerError, UNKNOWN, UNKNOWN, True, False),
        (ProtocolError, UNKNOWN, UNKNOWN, True, False),
    ],
)
@pytest.mark.parametrize("in_doubt", [False, True])
def test_an_error_decides_by_what_it_says_and_by_what_was_sent_before(
    kind: type[RayqError],
    when_sure: str,
    when_in_doubt: str,
    leaves_doubt: bool,
    suspects: bool,
    in_doubt: bool,
) -> None:
    flight = a_flight()
    ((inflight, attempt),) = send_new(flight)
    if in_doubt:
        put_in_doubt(flight, inflight, attempt)
        inflight, attempt = send_next(flight)
    error = kind("why")
    actions = flight.failed(inflight, attempt, error, NOW)
    expected = when_in_doubt if in_doubt else when_sure
    assert flight.in_flight == []
    assert inflight.in_doubt == (in_doubt or leaves_doubt)
    if expected == AGAIN:
        assert flight.waiting == [inflight]
        assert flight.is_stalled and flight.resume_at > NOW
        assert actions == ([SuspectLeader(OLD)] if suspects else [])
        return
    ((batch, outcome),) = actions  # type: ignore[misc]
    assert batch is inflight.batch and flight.waiting == [] and flight.needs_new_epoch
    if expected == UNKNOWN:
        assert isinstance(outcome, OutcomeUnknownError) and "why" in str(outcome)
    else:
        assert outcome is error


def test_after_a_failure_the_answers_of_all_in_flight_are_waited_for_and_order_is_kept() -> None:
    flight = a_flight()
    (one, first), (two, second), (three, third) = send_new(flight, 3)
    flight.failed(two, second, NotLeaderError("moved"), NOW)
    assert step(flight, NOW + 10, opened_at=NOW) is None
    flight.failed(one, first, NotLeaderError("moved"), NOW)
    assert step(flight, NOW + 10, opened_at=NOW) is None
    flight.acknowledged(three, third)
    assert step(flight, NOW, opened_at=NOW) == WaitUntil(NOW + 0.02)
    again = [send_next(flight, NOW + 10)[0] for _ in range(2)]
    assert again == [one, two]
    assert isinstance(step(flight, NOW + 10, opened_at=NOW), TakeBatch)


def test_the_batches_of_one_window_that_fail_together_are_one_failure() -> None:
    # Five batches in flight to a leader that died once cost five doublings: writes to its
    # successor paused for up to a second where 20 ms were meant.
    flight = a_flight()
    for inflight, attempt in send_new(flight, 5):
        flight.failed(inflight, attempt, NotEnoughReplicasError("too few"), NOW)
    assert flight.resume_at == NOW + 0.02
    flight.stalled(NotEnoughReplicasError("too few, again"), NOW + 1)
    assert flight.resume_at == NOW + 1.04


def test_an_acknowledgement_ends_the_doubling() -> None:
    flight = a_flight()
    (one, first), (two, second) = send_new(flight, 2)
    flight.failed(one, first, NotEnoughReplicasError("too few"), NOW)
    flight.acknowledged(two, second)
    inflight, attempt = send_next(flight, NOW + 1)
    flight.failed(inflight, attempt, NotEnoughReplicasError("too few"), NOW + 1)
    assert flight.resume_at == NOW + 1.02


def test_where_nothing_is_numbered_errors_about_numbers_are_as_others() -> None:
    flight = a_flight(acks=1)
    (one, first), (two, second) = send_new(flight, 2)
    assert flight.failed(one, first, OutOfOrderSequenceError("why"), NOW) == []
    ((_, error),) = flight.failed(two, second, UnknownProducerError("why"), NOW)  # type: ignore[misc]
    assert isinstance(error, UnknownProducerError)
    assert not flight.needs_new_epoch and flight.waiting == [one]


# --- an attempt that was given up -----------------------------------------------------------------


def test_what_is_heard_of_an_attempt_that_was_given_up_counts_no_more() -> None:
    flight = a_flight()
    ((inflight, first),) = send_new(flight)
    assert flight.led_by(NEW)
    for _ in range(2):  # while the batch waits, and once it is in flight again
        assert not flight.acknowledged(inflight, first)
        assert flight.failed(inflight, first, RecordTooLargeError("too large"), NOW) == []
        if not flight.in_flight:
            _, second = send_next(flight)
    assert flight.in_flight == [inflight]
    assert flight.acknowledged(inflight, second)
    assert not flight.acknowledged(inflight, second)


def test_a_new_leader_gets_what_was_in_flight_under_the_same_numbers_and_at_once() -> None:
    flight = a_flight()
    sent = [inflight for inflight, _ in send_new(flight, 3)]
    numbers = [inflight.numbers for inflight in sent]
    flight.stalled(NotLeaderError("moved"), NOW)
    assert not flight.led_by(OLD)
    assert flight.led_by(NEW)
    assert flight.leader == NEW and all(inflight.in_doubt for inflight in sent)
    assert [send_next(flight)[0] for _ in sent] == sent
    assert [inflight.numbers for inflight in sent] == numbers


# --- a break in the sequence ----------------------------------------------------------------------


def test_a_batch_out_of_order_waits_for_those_before_it() -> None:
    flight = a_flight()
    (one, _), (two, second) = send_new(flight, 2)
    assert flight.failed(two, second, OutOfOrderSequenceError("expected 0"), NOW) == []
    assert flight.waiting == [two] and not flight.needs_new_epoch
    assert step(flight, NOW + 10, opened_at=NOW) is None
    assert flight.in_flight == [one]


def test_a_leader_that_lost_the_producers_state_is_not_waited_for() -> None:
    flight = a_flight()
    (one, first), (two, second) = send_new(flight, 2)
    flight.failed(two, second, UnknownProducerError("?"), NOW)
    assert flight.waiting == [two] and flight.needs_new_epoch
    flight.acknowledged(one, first)
    assert send_next(flight, NOW + 1)[0].numbers == Numbers(40, 1, 0)


def test_a_batch_that_fails_for_good_has_the_others_numbered_again() -> None:
    flight = a_flight()
    (one, first), (two, second) = send_new(flight, 2)
    flight.failed(one, first, RecordTooLargeError("too large"), NOW)
    assert step(flight, opened_at=NOW) is None  # no new batch before the other is resolved
    flight.failed(two, second, OutOfOrderSequenceError("expected 0"), NOW)
    inflight, _ = send_next(flight, NOW + 1)
    assert inflight is two and two.numbers == Numbers(40, 1, 0)
    assert flight.next_numbers() == Numbers(40, 1, 10)


def test_a_batch_in_doubt_is_never_sent_under_other_numbers() -> None:
    flight = a_flight()
    (one, first), (two, second), (three, third) = send_new(flight, 3)
    flight.failed(one, first, RecordTooLargeError("too large"), NOW)
    flight.failed(three, third, NotEnoughReplicasError("too few"), NOW)
    put_in_doubt(flight, two, second)
    assert flight.needs_new_epoch
    # Both batches are sent again as they were, and no new batch is taken.
    inflight, attempt = send_next(flight)
    assert inflight is two and two.numbers == Numbers(40, 0, 10)
    assert send_next(flight)[0] is three and three.numbers == Numbers(40, 0, 20)
    assert step(flight, opened_at=NOW) is None
    # Only the batch's own answer ends the doubt.
    ((batch, error),) = flight.failed(two, attempt, UnknownProducerError("?"), NOW)  # type: ignore[misc]
    assert batch is two.batch and isinstance(error, OutcomeUnknownError)
    assert flight.needs_new_epoch and flight.producer_epoch == 0


def test_a_batch_that_was_not_packed_yet_gets_its_number_in_the_new_epoch() -> None:
    flight = a_flight()
    ((inflight, attempt),) = send_new(flight)
    flight.add(a_batch())
    flight.needs_new_epoch = True
    assert step(flight) is None
    flight.acknowledged(inflight, attempt)
    assert send_next(flight)[0].numbers == Numbers(40, 1, 0)


@pytest.mark.parametrize("is_fenced", [True, False])
def test_whose_id_is_fenced_or_whose_epochs_are_spent_takes_another_id(is_fenced: bool) -> None:
    flight = a_flight()
    if not is_fenced:
        flight.producer_epoch = PRODUCER_EPOCH_MAX
    ((inflight, attempt),) = send_new(flight)
    error = ProducerFencedError("taken") if is_fenced else RecordTooLargeError("too large")
    flight.failed(inflight, attempt, error, NOW)
    assert step(flight, opened_at=NOW) == TakeProducerId(40)
    flight.producer_id = 41
    assert flight.next_numbers() == Numbers(41, 0, 0)
    assert isinstance(step(flight, opened_at=NOW), TakeBatch)


# --- time -----------------------------------------------------------------------------------------


def test_past_its_deadline_a_batch_fails_and_only_one_in_doubt_has_an_unknown_outcome() -> None:
    flight = a_flight()
    (one, first), (two, second), (three, _) = send_new(flight, 3)
    put_in_doubt(flight, two, second)
    flight.failed(one, first, NotEnoughReplicasError("too few"), NOW)
    assert not [one for one in flight.tick(NOW + 119) if isinstance(one, Fail)]
    failed = flight.tick(NOW + DELIVERY_TIMEOUT_S)
    assert [fail.batch for fail in failed if isinstance(fail, Fail)] == [
        one.batch, two.batch, three.batch,
    ]
    kinds = [type(fail.error) for fail in failed if isinstance(fail, Fail)]
    assert kinds == [DeliveryTimeoutError, OutcomeUnknownError, OutcomeUnknownError]
    assert all("120000 ms" in str(fail.error) for fail in failed if isinstance(fail, Fail))
    assert not flight.in_flight and not flight.waiting


@pytest.mark.parametrize(
    "waited_s, is_suspect", [(LEADER_PATIENCE_S, False), (LEADER_PATIENCE_S + 0.1, True)]
)
def test_a_leader_that_does_not_answer_is_suspect(waited_s: float, is_suspect: bool) -> None:
    flight = a_flight()
    send_new(flight)
    assert flight.tick(NOW + waited_s) == ([SuspectLeader(OLD)] if is_suspect else [])


def test_when_everything_fails_what_was_in_flight_has_an_unknown_outcome() -> None:
    flight = a_flight()
    (one, _), (two, second) = send_new(flight, 2)
    flight.failed(two, second, NotEnoughReplicasError("too few"), NOW)
    flight.add(a_batch())
    ((a, unknown), (b, refused), (_, never_sent)) = flight.fail_all(UnknownTopicError("deleted"))
    assert (a, b) == (one.batch, two.batch)
    assert isinstance(unknown, OutcomeUnknownError)
    assert isinstance(refused, UnknownTopicError) and isinstance(never_sent, UnknownTopicError)
    assert not flight.in_flight and not flight.waiting


# --- whatever happens -----------------------------------------------------------------------------

ERRORS = [
    NotLeaderError, LeadershipEndedError, NotEnoughReplicasError, OutOfOrderSequenceError,
    UnknownProducerError, ProducerFencedError, RecordTooLargeError, UnknownServerError,
    DisconnectedError,
]


@pytest.mark.parametrize("seed", range(50))
def test_no_number_is_used_twice_and_none_changes_while_a_batch_is_in_doubt(seed: int) -> None:
    source = random.Random(seed)
    flight = a_flight(max_in_flight_requests_per_connection=source.randint(1, 5))
    batch_of: dict[Numbers, ProducerBatch] = {}
    outcomes: dict[ProducerBatch, Any] = {}
    made: list[ProducerBatch] = []
    attempts: list[tuple[InFlightBatch, int]] = []
    now, ids, epoch = NOW, 40, 7

    def resolve(batch: ProducerBatch, outcome: Any) -> None:
        assert batch not in outcomes, "a batch has one outcome"
        outcomes[batch] = outcome

    for _ in range(400):
        now += source.random() * 0.05
        doubted = {
            one: one.numbers for one in (*flight.in_flight, *flight.waiting)
            if one.in_doubt or one.attempt is not None
        }
        actions: list[Any] = []
        event = source.random()
        if event < 0.6:
            match flight.next_step(now, now - 0.01, is_hurried=source.random() < 0.5):
                case TakeProducerId(spent=spent):
                    assert spent == ids
                    flight.producer_id = ids = ids + 1
                case TakeBatch():
                    made.append(a_batch(source.randint(1, 9), opened_at=now - 0.01))
                    flight.add(made[-1])
                case InFlightBatch() as inflight:
                    if inflight.payload is None:
                        flight.packed(inflight, bytearray(1), flight.next_numbers())
                    assert inflight.numbers is not None
                    assert batch_of.setdefault(inflight.numbers, inflight.batch) is inflight.batch
                    unresolved = [one.serial for one in (*flight.in_flight, *flight.waiting)]
                    assert inflight.serial - min(unresolved) < 5
                    attempts.append((inflight, flight.sent(inflight, now)))
        elif event < 0.93 and attempts:
            inflight, attempt = attempts.pop(source.randrange(len(attempts)))
            if source.random() < 0.6:
                if flight.acknowledged(inflight, attempt):
                    resolve(inflight.batch, None)
            else:
                error = source.choice(ERRORS)("why")
                actions = flight.failed(inflight, attempt, error, now)
        elif event < 0.97:
            epoch += 1
            flight.led_by(LeaderAndEpoch(1, "a", 1, epoch))
        else:
            now += source.choice([0.0, 1.0, 130.0])
            actions = flight.tick(now)
        for action in actions:
            if isinstance(action, Fail):
                resolve(action.batch, action.error)
        for one, numbers in doubted.items():
            assert one.batch in outcomes or one.numbers == numbers
            if isinstance(outcomes.get(one.batch), DeliveryTimeoutError):
                raise AssertionError("of a batch in doubt nobody knows that it was not written")
        assert len(flight.in_flight) <= flight._in_flight_max
        for some in (flight.waiting, flight.in_flight):
            assert some == sorted(some, key=lambda one: one.serial)
    for action in flight.fail_all(UnknownTopicError("deleted")):
        resolve(action.batch, action.error)
    assert set(outcomes) == set(made) and len(made) > 20


# --- in a transaction -----------------------------------------------------------------------------

FAMILY = 1 << 61


def in_transaction() -> Flight:
    backoff: Any = CountedBackoff()
    flight = Flight("t-0", ProducerConfig(linger_ms=5, transactional_id="billing"), backoff)
    flight.begin(FAMILY, 7)
    flight.led_by(OLD)
    return flight


def test_each_transaction_counts_from_0_under_the_numbers_given() -> None:
    flight = in_transaction()
    for (inflight, attempt), sequence in zip(send_new(flight, 2), (0, 10), strict=True):
        assert inflight.numbers == Numbers(FAMILY, 7, sequence)
        assert flight.acknowledged(inflight, attempt)
    flight.begin(FAMILY, 8)
    ((inflight, _),) = send_new(flight)
    assert inflight.numbers == Numbers(FAMILY, 8, 0)


@pytest.mark.parametrize(
    "error",
    [RecordTooLargeError("large"), UnknownProducerError("forgotten"), OutOfOrderSequenceError("gap")],
)
def test_after_a_failure_in_a_transaction_nothing_is_numbered_again(error: RayqError) -> None:
    flight = in_transaction()
    (inflight, attempt), _ = send_new(flight, 2)
    fails = flight.failed(inflight, attempt, error, NOW)
    assert fails == [Fail(inflight.batch, error)]
    flight.add(a_batch())
    assert step(flight, NOW + 9) is None
    assert flight.next_numbers() == Numbers(FAMILY, 7, 20)
    flight.fail_all(TransactionAbortedError("over"))
    flight.begin(FAMILY, 8)
    ((inflight, _),) = send_new(flight)
    assert inflight.numbers == Numbers(FAMILY, 8, 0)


def test_a_batch_in_doubt_goes_again_under_its_numbers_and_has_its_transaction_aborted() -> None:
    flight = in_transaction()
    ((inflight, attempt),) = send_new(flight)
    put_in_doubt(flight, inflight, attempt)
    again, _ = send_next(flight)
    assert again is inflight and inflight.numbers == Numbers(FAMILY, 7, 0)
    (fail,) = flight.tick(NOW + DELIVERY_TIMEOUT_S)
    assert isinstance(fail, Fail) and isinstance(fail.error, TransactionAbortedError)


@pytest.mark.parametrize("kind", HOW_TRANSACTIONS_END)
@pytest.mark.parametrize("in_doubt", [False, True])
def test_a_batch_of_a_transaction_that_has_ended_says_how(
    kind: type[RayqError], in_doubt: bool
) -> None:
    flight = in_transaction()
    ((inflight, attempt),) = send_new(flight)
    if in_doubt:
        put_in_doubt(flight, inflight, attempt)
        inflight, attempt = send_next(flight)
    (fail,) = flight.failed(inflight, attempt, kind("over"), NOW)
    assert isinstance(fail, Fail) and type(fail.error) is kind


def test_a_batch_waits_for_the_marker_of_the_transaction_before() -> None:
    flight = in_transaction()
    ((inflight, attempt),) = send_new(flight)
    assert flight.failed(inflight, attempt, TransactionOrderError("wait"), NOW) == []
    assert isinstance(step(flight), WaitUntil)
    again, _ = send_next(flight, NOW + 9)
    assert again is inflight and not inflight.in_doubt
