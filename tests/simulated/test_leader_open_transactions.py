"""A leader alone, with transactions that wait, stay open or are forgotten: whom it asks, when, and
what it does then."""

from __future__ import annotations

import asyncio
import logging

import pytest

from rayq import messages
from rayq.actors.replica.leader_transactions import (
    ASK_AGAIN_S,
    CHECK_INTERVAL_S,
    MARKER_WAIT_S,
    OPEN_MAX_S,
)
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.errors import (
    InvalidRequestError,
    NotEnoughReplicasAfterAppendError,
    NotLeaderError,
    OpenTransactionError,
    RayqError,
    TimeoutError,
    TransactionEndedError,
    TransactionLimitError,
    TransactionOrderError,
)
from rayq.messages.transaction_ids import make_family
from rayq.storage.batch import Marker, read_header, read_marker, split_batches
from tests.simulated.transaction_stage import (
    FAMILY,
    LEADER_EPOCH,
    OTHER,
    READ_UNCOMMITTED,
    Led,
    batch_of,
    leading,
)

ELSEWHERE = make_family(3, 1)
"""Its coordinator is another than that of the others."""
UNCLEAN_EPOCH = 5


async def markers(led: Led) -> list[Marker]:
    """Those in the log, in order."""
    led.leader.flushed(led.end)
    data, offset = b"", 0
    while offset < led.end:
        more, offset = await led.log.read(offset, led.end, 1 << 20)
        data += more
    return [
        read_marker(data, position, header)
        for position, header in split_batches(data)
        if header.is_control
    ]


def open_before(log: ReplicaLog, *families: int) -> None:
    """Transactions from before the unclean election."""
    for family in families:
        batch = batch_of(family, is_transactional=True)
        log.log.append_as_leader(batch, read_header(batch), leader_epoch=3, now_ms=1_000)


class Slow:
    """Holds up each question about an outcome, until the test answers it."""

    def __init__(self, led: Led) -> None:
        self.answers: list[asyncio.Future[str]] = []
        led.coordinators.outcome = self.outcome  # type: ignore[method-assign]

    async def outcome(self, family: int, epoch: int) -> str:
        self.answers.append(asyncio.get_running_loop().create_future())
        return await self.answers[-1]


# --- batches that wait ----------------------------------------------------------------------------


@pytest.mark.parametrize("refusal", [TransactionLimitError("many"), TransactionEndedError("over")])
def test_what_a_coordinator_refuses_for_certain_is_told_as_it_says(refusal: RayqError) -> None:
    async def work(led: Led) -> None:
        led.coordinators.refusal = refusal
        answer = led.waiting()
        await led.settle()
        assert answer.exception() is refusal

    leading(work)


def test_a_batch_whose_client_is_gone_is_not_appended_and_holds_up_nobody() -> None:
    async def work(led: Led) -> None:
        led.coordinators.answers_at_once = False
        gone, other = led.waiting(), led.waiting(OTHER)
        await led.settle()
        gone.cancel()
        led.coordinators.answer()
        led.coordinators.answer(OTHER)
        await led.settle()
        assert led.end == 1
        appended = led.waiting(OTHER, sequence=1)
        appended.cancel()
        await led.copied()
        assert (other.result().base_offset, led.end) == (0, 2)
        assert await led.written() == 2

    leading(work)


def test_what_waits_for_its_commit_hears_that_too_few_are_in_sync() -> None:
    async def work(led: Led) -> None:
        answer = led.waiting()  # It has waited for its join before.
        await led.settle()
        assert led.end == 1
        alone = messages.PartitionAssignment(
            "t", "id", 0, {"min_insync_replicas": 2}, 1, "1a", "h", 1, LEADER_EPOCH, 2, None,
            [(1, "1a")], [(1, "1a"), (2, "2a")],
        )
        led.log.configure(alone.config)
        led.leader.committed(alone)
        await led.settle()
        with pytest.raises(NotEnoughReplicasAfterAppendError):
            answer.result()

    leading(work)


def test_nothing_is_appended_by_a_leader_that_lost_its_broker_meanwhile() -> None:
    async def work(led: Led) -> None:
        led.coordinators.answers_at_once = False
        answers = [led.waiting(), led.waiting(sequence=1)]
        await led.settle()
        led.has_lease = False
        led.coordinators.answer()
        await led.settle()
        for answer in answers:
            with pytest.raises(NotLeaderError):
                answer.result()
        assert led.end == 0

    leading(work)


def test_each_batch_waits_exactly_as_long_as_its_request_says() -> None:
    async def work(led: Led) -> None:
        led.coordinators.answers_at_once = False
        now_s = led.clock.monotonic()
        hasty, patient = led.waiting(timeout_ms=1_000), led.waiting(OTHER, 4, timeout_ms=2_000)
        led.leader.expire_waiters(now_s + 0.999)
        assert not hasty.done()
        led.leader.expire_waiters(now_s + 1)
        with pytest.raises(TransactionOrderError, match=f"A batch of transaction {FAMILY}:0 "):
            hasty.result()
        assert not patient.done()
        led.leader.expire_waiters(now_s + 2.001)
        with pytest.raises(TransactionOrderError, match=f"A batch of transaction {OTHER}:4 "):
            patient.result()
        await led.settle()
        led.coordinators.answer()
        await led.settle()
        assert led.end == 0
        again = led.produce()
        assert led.end == 1 and len(led.coordinators.asked) == 2, "it has joined by now"
        await led.copied()
        assert isinstance(again, asyncio.Future) and again.result().base_offset == 0

    leading(work)


def test_what_waited_in_vain_for_the_next_transaction_holds_up_nothing_of_this_one() -> None:
    async def work(led: Led) -> None:
        await led.written()
        waiting = led.waiting(epoch=1, timeout_ms=1_000)
        led.leader.expire_waiters(led.clock.monotonic() + 1)
        assert isinstance(waiting.exception(), TransactionOrderError)
        assert await led.written(sequence=1) == 1

    leading(work)


@pytest.mark.parametrize("is_deposed", [True, False])
def test_who_did_not_wait_for_the_answer_is_told_nothing(is_deposed: bool) -> None:
    async def work(led: Led) -> None:
        led.coordinators.answers_at_once = False
        gone, patient = led.waiting(timeout_ms=1_000), led.waiting(sequence=1, timeout_ms=1_000)
        gone.cancel()
        if is_deposed:
            led.leader.end("another leads")
        else:
            led.leader.expire_waiters(led.clock.monotonic() + 1)
        assert gone.cancelled() and patient.exception() is not None

    leading(work)


# --- markers and seals ----------------------------------------------------------------------------


def test_a_marker_says_how_the_transaction_ended_and_who_said_so() -> None:
    async def work(led: Led) -> None:
        await led.written(ELSEWHERE)
        await led.written(FAMILY)
        await led.ended(0, family=ELSEWHERE, is_commit=False)
        led.mark(0, coordinator=9)
        assert await markers(led) == [
            Marker(ELSEWHERE, 0, False, coordinator_partition=3, coordinator_epoch=3),
            Marker(FAMILY, 0, True, coordinator_partition=0, coordinator_epoch=9),
        ]

    leading(work)


def test_who_waits_for_a_marker_or_a_seal_is_told_after_five_seconds() -> None:
    async def work(led: Led) -> None:
        await led.written()
        led.produce(None, acks=1)
        now_s = led.clock.monotonic()
        sealed, marked = led.seal(), led.mark(4, family=OTHER)
        for answer in (sealed, marked):
            assert isinstance(answer, asyncio.Future)
            led.leader.expire_waiters(now_s + MARKER_WAIT_S - 0.01)
            assert not answer.done()
        led.leader.expire_waiters(now_s + MARKER_WAIT_S + 0.01)
        for answer in (sealed, marked):
            assert isinstance(answer, asyncio.Future)
            with pytest.raises(TimeoutError, match="the end of a transaction"):
                answer.result()

    leading(work)


@pytest.mark.parametrize("is_seal", [True, False])
def test_a_seal_or_a_marker_expires_also_where_none_of_the_other_kind_waits(is_seal: bool) -> None:
    async def work(led: Led) -> None:
        await led.written()
        led.produce(None, acks=1)
        answer = led.seal() if is_seal else led.mark()
        assert isinstance(answer, asyncio.Future)
        led.leader.expire_waiters(led.clock.monotonic() + MARKER_WAIT_S + 0.01)
        with pytest.raises(TimeoutError):
            answer.result()

    leading(work)


def test_the_first_open_transaction_is_named_to_who_would_delete_it() -> None:
    async def work(led: Led) -> None:
        await led.written(None)
        await led.written(OTHER, 3)
        await led.written(FAMILY)
        with pytest.raises(
            OpenTransactionError,
            match=rf"{OTHER}:3 has records from offset 1 of t-0 .* up to 3 can",
        ):
            await led.deleted(3)
        assert await led.deleted(1) == 1

    leading(work)


# --- what is open for too long --------------------------------------------------------------------


def test_a_leader_looks_now_and_then_and_asks_about_each_transaction_in_its_own_time() -> None:
    async def work(led: Led) -> None:
        led.coordinators.outcomes = {(FAMILY, 0): "open", (OTHER, 0): "open"}
        transactions = led.leader.transactions
        began_s = led.clock.monotonic()

        def looked(after_s: float) -> None:
            transactions.tick(began_s + after_s)

        await led.written(FAMILY)
        looked(1)
        await led.written(OTHER)
        looked(CHECK_INTERVAL_S + 0.9)  # Too soon to see the other.
        looked(CHECK_INTERVAL_S + 1)
        assert [*transactions._watched] == [(FAMILY, 0), (OTHER, 0)]
        await asyncio.sleep(OPEN_MAX_S + 0.5)
        looked(OPEN_MAX_S + 0.9)
        await led.settle()
        assert led.coordinators.asked_outcomes == []
        await asyncio.sleep(CHECK_INTERVAL_S)
        looked(OPEN_MAX_S + CHECK_INTERVAL_S + 0.9)
        await led.settle()
        assert led.coordinators.asked_outcomes == [(FAMILY, 0)]
        await asyncio.sleep(CHECK_INTERVAL_S)
        looked(OPEN_MAX_S + 2 * CHECK_INTERVAL_S + 1)
        await led.settle()
        assert led.coordinators.asked_outcomes == [(FAMILY, 0), (OTHER, 0)]
        await asyncio.sleep(ASK_AGAIN_S)
        looked(OPEN_MAX_S + 2 * CHECK_INTERVAL_S + 1 + ASK_AGAIN_S)
        await led.settle()
        assert len(led.coordinators.asked_outcomes) >= 3

    leading(work)


def test_a_leader_asks_one_coordinator_at_a_time_and_nobody_after_its_end() -> None:
    async def work(led: Led) -> None:
        slow = Slow(led)
        await led.look(1)
        assert len(slow.answers) == 1
        await led.look(CHECK_INTERVAL_S + 1)
        assert len(slow.answers) == 1, "that question is under way"
        slow.answers[0].set_result("unknown")
        await led.settle()
        assert len(slow.answers) == 2
        led.leader.end("another leads")
        await led.settle()
        assert slow.answers[1].cancelled() and led.end == 3

    leading(
        work,
        before=lambda log: open_before(log, FAMILY, OTHER),
        last_unclean_epoch=UNCLEAN_EPOCH,
    )


@pytest.mark.parametrize("meanwhile", ["lease lost", "marker came", "nothing"])
def test_what_happens_while_a_coordinator_is_asked_counts(meanwhile: str) -> None:
    async def work(led: Led) -> None:
        slow = Slow(led)
        await led.look(1)
        if meanwhile == "lease lost":
            led.has_lease = False
        elif meanwhile == "marker came":
            led.mark(is_commit=True)
        slow.answers[0].set_result("aborted")
        await led.settle()
        assert [one.is_commit for one in await markers(led)] == {
            "lease lost": [], "marker came": [True], "nothing": [False]
        }[meanwhile]

    leading(
        work, before=lambda log: open_before(log, FAMILY), last_unclean_epoch=UNCLEAN_EPOCH
    )


def test_a_coordinator_that_is_silent_is_asked_once_in_a_round_and_again_in_the_next() -> None:
    async def work(led: Led) -> None:
        asked = led.coordinators.asked_outcomes
        led.coordinators.outcomes = {(ELSEWHERE, 0): "committed"}
        await led.look(1)
        assert asked == [(FAMILY, 0), (ELSEWHERE, 0)], "not about the second one"
        led.coordinators.outcomes |= {(FAMILY, 0): "open", (OTHER, 0): "aborted"}
        await led.look(CHECK_INTERVAL_S + 1)
        assert asked[2:] == [(FAMILY, 0), (OTHER, 0)]
        assert [(one.family, one.is_commit) for one in await markers(led)] == [
            (ELSEWHERE, True), (OTHER, False)
        ]

    leading(
        work,
        before=lambda log: open_before(log, FAMILY, OTHER, ELSEWHERE),
        last_unclean_epoch=UNCLEAN_EPOCH,
    )


def test_the_figures_are_of_what_is_open_now() -> None:
    async def work(led: Led) -> None:
        await led.written(FAMILY)
        await led.look(CHECK_INTERVAL_S + 1)
        await led.written(OTHER)
        await led.look(20)
        figures = led.measured()
        assert figures == {
            "last_stable_offset_lag": 2, "open_transactions": 2,
            "oldest_transaction_seconds": pytest.approx(20, abs=1), "unknown_transactions": 0,
        }
        await led.ended(family=FAMILY)
        assert led.measured() == {
            "last_stable_offset_lag": 2, "open_transactions": 1,
            "oldest_transaction_seconds": pytest.approx(0, abs=1), "unknown_transactions": 0,
        }
        await led.written(FAMILY, 1)
        assert led.measured()["oldest_transaction_seconds"] == pytest.approx(0, abs=1)
        (sample, *_) = led.leader.transactions.measure(led.clock.monotonic())
        assert (sample.labels["topic"], sample.labels["partition"]) == ("t", "0")

    leading(work)


# --- what an operator gives up --------------------------------------------------------------------


async def aborting(led: Led, epoch: int = 0, family: int = FAMILY) -> messages.Done:
    request = messages.AbortUnknownTransaction("id", 0, LEADER_EPOCH, family, epoch)
    return await led.leader.transactions.abort_unknown(request)


@pytest.mark.parametrize(
    "state, is_commit", [("unknown", False), ("aborted", False), ("committed", True)]
)
def test_a_transaction_that_its_coordinator_does_not_end_ends_as_that_says(
    state: str, is_commit: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(led: Led) -> None:
        await led.written(ELSEWHERE, 4)
        led.coordinators.outcomes = {(ELSEWHERE, 4): state}
        answer = asyncio.ensure_future(aborting(led, 4, ELSEWHERE))
        await led.settle()
        assert await markers(led) == [Marker(ELSEWHERE, 4, is_commit, 3, 0)]
        assert not answer.done(), "it is not committed"
        await led.copied()
        assert await answer == messages.Done()
        assert led.log.last_stable_offset == led.end == 2
        answer_of = await led.fetching(0, READ_UNCOMMITTED)
        assert answer_of[0].aborted == ([] if is_commit else [(ELSEWHERE, 4)])
        assert await aborting(led, 4, ELSEWHERE) == messages.Done(), "a repetition"
        assert len(led.coordinators.asked_outcomes) == 1 and led.end == 2
        assert f"aborted={not is_commit}" in caplog.text
        assert ("transaction_unknown" in caplog.text) == (state == "unknown")

    with caplog.at_level(logging.ERROR):
        leading(work)


@pytest.mark.parametrize("state", ["open", "sealed"])
def test_a_transaction_that_its_coordinator_knows_is_not_given_up(state: str) -> None:
    async def work(led: Led) -> None:
        await led.written()
        led.coordinators.outcomes = {(FAMILY, 0): state}
        with pytest.raises(InvalidRequestError, match=f"{FAMILY}:0 in t-0 is {state}: its"):
            await aborting(led)
        assert led.end == 1

    leading(work)


def test_where_another_transaction_or_none_is_open_nothing_is_given_up() -> None:
    async def work(led: Led) -> None:
        assert await aborting(led) == messages.Done()
        await led.written(epoch=2)
        for epoch in (1, 3):
            assert await aborting(led, epoch) == messages.Done()
        assert led.coordinators.asked_outcomes == [] and led.end == 1

    leading(work)


@pytest.mark.parametrize("meanwhile", ["lease lost", "marker came"])
def test_what_happens_while_an_operators_question_is_under_way_counts(meanwhile: str) -> None:
    async def work(led: Led) -> None:
        await led.written()
        slow = Slow(led)
        answer = asyncio.ensure_future(aborting(led))
        await led.settle()
        if meanwhile == "lease lost":
            led.has_lease = False
        else:
            led.mark()
        slow.answers[0].set_result("unknown")
        await led.settle()
        if meanwhile == "lease lost":
            with pytest.raises(NotLeaderError):
                await answer
            assert led.end == 1
        else:
            await led.copied()
            assert await answer == messages.Done()
            assert [one.is_commit for one in await markers(led)] == [True]

    leading(work)
