"""A leader alone, with transactions: which batches wait, which markers it writes, what it shows."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from rayq import messages
from rayq.actors.replica.leader_reads import LeaderReads
from rayq.actors.replica.leader_transactions import MARKER_WAIT_S, OPEN_MAX_S
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.errors import (
    AuthorizationError,
    CoordinatorLoadingError,
    FencedEpochError,
    InvalidRecordError,
    InvalidRequestError,
    NotLeaderError,
    OffsetOutOfRangeError,
    OpenTransactionError,
    ProducerFencedError,
    RayqError,
    TimeoutError,
    TransactionEndedError,
    TransactionOrderError,
    UnsupportedVersionError,
)
from rayq.messages.transaction_ids import make_family
from rayq.storage.batch import read_header, split_batches
from tests.simulated.transaction_stage import (
    FAMILY,
    LEADER_EPOCH,
    OTHER,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    Led,
    assignment,
    batch_of,
    leading,
)

# --- batches --------------------------------------------------------------------------------------


def test_the_first_batch_joins_and_those_behind_it_keep_their_order() -> None:
    async def work(led: Led) -> None:
        led.coordinators.answers_at_once = False
        answers = [led.waiting(sequence=number) for number in range(3)]
        other = led.waiting(OTHER)
        await led.settle()
        assert led.end == 0
        assert led.coordinators.asked == [(FAMILY, 0, "id", 0), (OTHER, 0, "id", 0)]
        led.coordinators.answer()
        await led.settle()
        answers.append(led.waiting(sequence=3))
        await led.copied()
        assert [answer.result().base_offset for answer in answers] == [0, 1, 2, 3]
        assert not other.done() and len(led.coordinators.asked) == 2

    leading(work)


def test_a_batch_that_was_sent_twice_while_it_waited_is_appended_once() -> None:
    async def work(led: Led) -> None:
        led.coordinators.answers_at_once = False
        answers = [led.waiting(), led.waiting()]
        await led.settle()
        led.coordinators.answer()
        await led.settle()
        await led.copied()
        assert [answer.result().base_offset for answer in answers] == [0, 0]
        assert led.end == 1

    leading(work)


def test_all_that_wait_for_a_refused_transaction_fail_with_it() -> None:
    async def work(led: Led) -> None:
        led.coordinators.answers_at_once = False
        answers = [led.waiting(sequence=number) for number in range(2)]
        await led.settle()
        led.coordinators.refusal = TransactionEndedError("over")
        led.coordinators.answer()
        await led.settle()
        for answer in answers:
            with pytest.raises(TransactionEndedError):
                answer.result()
        assert led.end == 0

    leading(work)


def test_a_refusal_is_of_one_transaction_and_what_waits_behind_goes_on() -> None:
    async def work(led: Led) -> None:
        led.coordinators.answers_at_once = False
        refused, behind = led.waiting(), led.waiting(epoch=1)
        await led.settle()
        led.coordinators.refusal = TransactionEndedError("over")
        led.coordinators.answer()
        await led.settle()
        led.coordinators.refusal = None
        led.coordinators.answer()
        await led.settle()
        await led.copied()
        assert isinstance(refused.exception(), TransactionEndedError)
        assert behind.result().base_offset == 0

    leading(work)


def test_a_coordinator_that_does_not_answer_makes_the_client_try_again() -> None:
    async def work(led: Led) -> None:
        led.coordinators.refusal = CoordinatorLoadingError("not yet")
        answer = led.waiting()
        await led.settle()
        error = answer.exception()
        assert isinstance(error, TransactionOrderError) and error.retriable and error.not_written
        led.coordinators.refusal = None
        assert await led.written() == 0

    leading(work)


def test_a_batch_that_waits_for_longer_than_its_request_is_refused_and_nothing_is_written() -> None:
    async def work(led: Led) -> None:
        led.coordinators.answers_at_once = False
        hasty, patient = led.waiting(timeout_ms=1_000), led.waiting(sequence=1)
        await asyncio.sleep(2)
        led.leader.expire_waiters(led.clock.monotonic())
        with pytest.raises(TransactionOrderError, match="nothing was written"):
            hasty.result()
        assert not patient.done()
        again = led.waiting()
        led.coordinators.answer()
        await led.settle()
        await led.copied()
        assert again.result().base_offset == 0
        error = patient.exception()
        assert error is not None, "its predecessor was not there when its turn came"
        assert len(led.coordinators.asked) == 1
        assert await led.written(sequence=1) == 1

    leading(work)


def test_the_next_transaction_waits_for_the_marker_of_the_one_before() -> None:
    async def work(led: Led) -> None:
        await led.written()
        answers = [led.waiting(epoch=1), led.waiting(epoch=1, sequence=1)]
        await led.settle()
        assert led.end == 1 and len(led.coordinators.asked) == 1
        await led.ended()
        await led.settle()
        await led.copied()
        assert [answer.result().base_offset for answer in answers] == [2, 3]
        assert led.coordinators.asked[1:] == [(FAMILY, 1, "id", 0)]

    leading(work)


def test_nothing_is_appended_to_a_transaction_that_has_ended() -> None:
    async def work(led: Led) -> None:
        await led.written()
        await led.ended()
        with pytest.raises(TransactionEndedError):
            led.produce(sequence=1)
        led.coordinators.answers_at_once = False
        late = led.waiting(OTHER, epoch=4)
        await led.settle()
        await led.ended(4, family=OTHER, is_commit=False)
        led.coordinators.answer(OTHER)
        await led.settle()
        with pytest.raises(TransactionEndedError):
            late.result()
        with pytest.raises(TransactionEndedError):
            led.produce(OTHER, 4)
        assert led.end == 3

    leading(work)


def test_a_new_leader_asks_again() -> None:
    async def work(led: Led) -> None:
        await led.written()
        again = Led(led.log, assignment())
        await again.copied()
        assert await again.written(sequence=1) == 1
        assert again.coordinators.asked == [(FAMILY, 0, "id", 0)]

    leading(work)


def test_a_leader_that_is_deposed_takes_nothing_of_what_waits() -> None:
    async def work(led: Led) -> None:
        led.coordinators.answers_at_once = False
        waiting = led.waiting()
        marker = led.mark(1, family=OTHER)
        assert isinstance(marker, asyncio.Future)
        await led.settle()
        led.leader.end("another leads")
        await led.settle()
        assert led.coordinators.answers[FAMILY].cancelled()
        for answer in (waiting, marker):
            with pytest.raises(NotLeaderError):
                answer.result()
        assert led.end == 1

    leading(work)


@pytest.mark.parametrize(
    "family, options, error",
    [
        (FAMILY, {"is_transactional": False}, InvalidRecordError),
        (7, {"is_transactional": True}, InvalidRecordError),
        (None, {"is_transactional": True}, InvalidRecordError),
        (FAMILY, {"is_numbered": False}, InvalidRequestError),
        (FAMILY, {"acks": 1}, InvalidRequestError),
        (FAMILY, {"acks": 0}, InvalidRequestError),
    ],
)
def test_a_batch_is_of_a_transaction_by_its_id_and_its_bit_or_not_at_all(
    family: int | None, options: dict[str, Any], error: type[RayqError]
) -> None:
    async def work(led: Led) -> None:
        with pytest.raises(error):
            led.produce(family, **options)
        assert led.end == 0 and led.coordinators.asked == []

    leading(work)


def test_a_topic_that_does_not_wait_for_its_disk_takes_no_transactions() -> None:
    async def work(led: Led) -> None:
        with pytest.raises(InvalidRequestError, match="flush"):
            led.produce()
        assert await led.written(7) == 0

    leading(work, config={"flush": "os"})


# --- principals -----------------------------------------------------------------------------------


def test_a_stranger_does_not_write_in_a_transaction_that_has_joined() -> None:
    async def work(led: Led) -> None:
        led.coordinators.principal = "orders"
        written = led.waiting(principal="orders")
        await led.settle()
        forged = led.waiting(sequence=1, principal="billing")
        await led.settle()
        with pytest.raises(AuthorizationError):
            forged.result()
        assert led.end == 1
        own = led.produce(sequence=1, principal="orders")
        assert isinstance(own, asyncio.Future), "it waits for the copy alone"
        await led.copied()
        assert [written.result().base_offset, own.result().base_offset] == [0, 1]
        assert len(led.coordinators.asked) == 2
        assert await led.written(sequence=2) == 2, "a superuser may"

    leading(work)


def test_what_a_stranger_sends_holds_up_nobody() -> None:
    """A stranger's batch waits for the end of the open transaction; others do not wait behind
    it."""

    async def work(led: Led) -> None:
        led.coordinators.principal = "orders"
        first = led.waiting(principal="orders")
        await led.settle()
        later = led.waiting(epoch=7, principal="billing")
        own = led.produce(sequence=1, principal="orders")
        await led.copied()
        assert isinstance(own, asyncio.Future)
        assert first.result().base_offset == 0 and own.result().base_offset == 1
        assert not later.done()
        await led.ended()
        await led.settle()
        with pytest.raises(AuthorizationError):
            later.result()
        assert led.end == 3, "two records and their marker"

    leading(work)


def test_a_stranger_does_not_seal_a_transaction() -> None:
    """If it did, the partition would ask the coordinator again before each batch, as often as the
    stranger wants."""

    async def work(led: Led) -> None:
        led.coordinators.principal = "orders"
        led.produce(principal="orders")
        await led.settle()
        await led.copied()
        request = messages.SealPartition("id", 0, LEADER_EPOCH, FAMILY, 0)
        with pytest.raises(AuthorizationError):
            await led.leader.transactions.seal_as("billing", request)
        asked = len(led.coordinators.asked)
        led.produce(sequence=1, principal="orders")
        assert led.end == 2 and len(led.coordinators.asked) == asked
        await led.copied()
        led.coordinators.refusal = TransactionEndedError("sealed")
        answer = await led.leader.transactions.seal_as("orders", request)
        assert answer.written == [(FAMILY, 2)]
        refused = led.waiting(sequence=2, principal="orders")
        await led.settle()
        with pytest.raises(TransactionEndedError):
            refused.result()

    leading(work)


def test_a_stranger_neither_fences_a_producer_nor_takes_its_sequences() -> None:
    """Ids without transactions are drawn in turn, so anybody guesses them."""

    async def work(led: Led) -> None:
        producer = 17
        own = led.produce(producer, principal="orders")
        for epoch, sequence in ((0, 1), (9, 0)):
            with pytest.raises(ProducerFencedError):
                led.produce(producer, epoch, sequence, principal="billing")
        later = led.produce(producer, sequence=1, principal="orders")
        assert isinstance(own, asyncio.Future) and isinstance(later, asyncio.Future)
        await led.copied()
        assert [own.result().base_offset, later.result().base_offset] == [0, 1]
        assert not later.result().is_repeat
        assert await led.written(producer, sequence=2) == 2, "a superuser may"

    leading(work)


def test_a_join_that_a_seal_overtakes_counts_for_no_principal() -> None:
    async def work(led: Led) -> None:
        led.coordinators.principal = "orders"
        led.coordinators.answers_at_once = False
        waiting = led.waiting(principal="orders")
        await led.settle()
        led.seal()
        led.coordinators.answer()
        await led.settle()
        assert not waiting.done() and led.end == 0
        assert len(led.coordinators.asked) == 2, "it asks again"

    leading(work)


# --- markers --------------------------------------------------------------------------------------


def test_a_marker_is_acknowledged_when_it_is_committed_and_so_is_its_repetition() -> None:
    async def work(led: Led) -> None:
        await led.written()
        answers = [led.mark(), led.mark()]
        await led.settle()
        assert led.end == 2
        assert not any(isinstance(found, asyncio.Future) and found.done() for found in answers)
        await led.copied()
        for answer in answers:
            assert isinstance(answer, asyncio.Future) and answer.result() == messages.Done()
        assert led.mark() == messages.Done()
        assert led.end == 2

    leading(work)


def test_a_marker_is_written_where_nothing_is_open() -> None:
    async def work(led: Led) -> None:
        await led.ended(4)
        assert led.end == 1
        with pytest.raises(TransactionEndedError):
            led.produce(epoch=4)
        assert led.mark(3) == messages.Done() and led.end == 1, "a later one has ended"

    leading(work)


def test_a_marker_does_not_overtake_the_one_before() -> None:
    async def work(led: Led) -> None:
        await led.written()
        with pytest.raises(TransactionOrderError):
            led.mark(1)
        assert led.end == 1
        await led.ended(0)
        await led.ended(1)
        assert led.end == 3

    leading(work)


def test_a_coordinator_that_was_replaced_is_refused() -> None:
    async def work(led: Led) -> None:
        await led.ended(0)
        with pytest.raises(FencedEpochError):
            led.mark(1, coordinator=2)
        assert led.end == 1

    leading(work)


def test_a_marker_needs_no_min_insync_to_be_written_but_is_not_acknowledged() -> None:
    async def work(led: Led) -> None:
        await led.written()
        alone = messages.PartitionAssignment(
            "t", "id", 0, {"min_insync_replicas": 2}, 1, "1a", "h", 1, LEADER_EPOCH, 2, None,
            [(1, "1a")], [(1, "1a"), (2, "2a")],
        )
        led.log.configure(alone.config)
        led.leader.committed(alone)
        answer = led.mark()
        led.leader.flushed(led.end)
        assert led.end == 2
        await asyncio.sleep(MARKER_WAIT_S + 1)
        led.leader.expire_waiters(led.clock.monotonic())
        assert isinstance(answer, asyncio.Future)
        with pytest.raises(TimeoutError):
            answer.result()
        assert led.log.last_stable_offset == 0

    leading(work)


# --- seals ----------------------------------------------------------------------------------------


def test_a_seal_says_what_each_writer_has_once_that_is_committed() -> None:
    async def work(led: Led) -> None:
        await led.written(FAMILY)
        await led.written(FAMILY + 7)
        await led.written(OTHER)
        answers = [led.waiting(FAMILY + 7, sequence=1), led.waiting(FAMILY + 2)]
        sealed = led.seal()
        assert isinstance(sealed, asyncio.Future) and not sealed.done()
        await led.copied()
        assert sealed.result().written == [(FAMILY, 1), (FAMILY + 2, 1), (FAMILY + 7, 2)]
        assert [answer.result().base_offset for answer in answers] == [3, 4]
        assert led.seal() == sealed.result(), "a repetition"

    leading(work)


def test_what_comes_behind_a_seal_is_refused_also_where_it_waits_for_its_join() -> None:
    async def work(led: Led) -> None:
        led.coordinators.answers_at_once = False
        waiting = led.waiting(FAMILY + 1)
        await led.settle()
        assert led.seal() == messages.SealPartitionResponse([], LEADER_EPOCH)
        led.coordinators.answer()  # From before the coordinator sealed it.
        await led.settle()
        assert not waiting.done() and len(led.coordinators.asked) == 2
        led.coordinators.refusal = TransactionEndedError("It is sealed.")
        led.coordinators.answer()
        await led.settle()
        with pytest.raises(TransactionEndedError):
            waiting.result()
        led.coordinators.answers_at_once = True
        late = led.waiting(FAMILY + 1)
        await led.settle()
        with pytest.raises(TransactionEndedError):
            late.result()
        await led.ended()
        with pytest.raises(TransactionEndedError):
            led.seal()
        assert led.end == 1, "its marker"

    leading(work)


def test_a_seal_from_somebody_else_stops_no_writer() -> None:
    """Family and epoch are no secrets. The coordinator, which did not seal it, lets all go on."""

    async def work(led: Led) -> None:
        await led.written()
        led.seal()
        assert await led.written(sequence=1) == 1
        led.coordinators.answers_at_once = False
        waiting = led.waiting(OTHER)
        await led.settle()
        led.leader.transactions.seal(messages.SealPartition("id", 0, LEADER_EPOCH, OTHER, 0))
        led.coordinators.answers_at_once = True
        led.coordinators.answer(OTHER)
        await led.settle()
        await led.copied()
        assert waiting.result().base_offset == 2

    leading(work)


def test_a_seal_ends_with_its_leader() -> None:
    async def work(led: Led) -> None:
        waiting = led.waiting()
        await led.settle()
        sealed = led.seal()
        assert isinstance(sealed, asyncio.Future)
        led.leader.end("another leads")
        await led.settle()
        for answer in (waiting, sealed):
            with pytest.raises(NotLeaderError):
                answer.result()

    leading(work)


# --- readers --------------------------------------------------------------------------------------


def test_readers_of_what_is_committed_stop_at_the_first_undecided_record() -> None:
    async def work(led: Led) -> None:
        await led.written(None)
        await led.written()
        await led.written(None)
        answer, data = await led.fetching(0)
        assert (answer.high_watermark, answer.last_stable_offset, answer.next_offset) == (3, 1, 1)
        assert len(list(split_batches(data))) == 1
        answer, data = await led.fetching(1)
        assert (answer.next_offset, data) == (1, b"")
        answer, data = await led.fetching(0, READ_UNCOMMITTED)
        assert (answer.last_stable_offset, answer.next_offset) == (1, 3)
        assert (await led.listed(messages.LATEST), await led.listed(-1, READ_UNCOMMITTED)) == (1, 3)
        assert (await led.listed(0), await led.listed(0, READ_UNCOMMITTED)) == (0, 0)
        led.mark()
        assert led.log.last_stable_offset == 1, "its marker may yet be cut off"
        await led.copied()
        assert led.log.last_stable_offset == 4

    leading(work)


def test_a_reader_that_waits_is_woken_when_the_transaction_has_ended() -> None:
    async def work(led: Led) -> None:
        await led.written()
        reading = asyncio.ensure_future(led.fetching(0, wait_ms=20_000))
        await led.written(None)
        await led.settle()
        assert not reading.done()
        await led.ended()
        answer, data = await reading
        assert (answer.next_offset, answer.aborted) == (3, [])
        assert [header.is_control for _, header in split_batches(data)] == [False, False, True]

    leading(work)


def test_readers_that_wait_for_the_end_of_a_transaction_are_not_woken_by_each_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """20,000 of them made each write to the partition take seconds."""
    looks = 0
    limit = LeaderReads._fetch_limit

    def noted(self: LeaderReads, request: messages.Fetch) -> int:
        nonlocal looks
        looks += 1
        return limit(self, request)

    async def work(led: Led) -> None:
        await led.written()
        reading = [asyncio.ensure_future(led.fetching(0, wait_ms=20_000)) for _ in range(20)]
        await asyncio.sleep(0.1)
        assert looks == 20
        for _ in range(5):
            await led.written(None)
            await led.settle()
        assert looks == 20
        await led.ended()
        assert {answer.next_offset for answer, _ in await asyncio.gather(*reading)} == {7}
        assert looks == 40

    monkeypatch.setattr(LeaderReads, "_fetch_limit", noted)
    leading(work)


def test_a_reader_that_waits_for_the_end_of_a_transaction_hears_that_the_log_is_gone() -> None:
    async def work(led: Led) -> None:
        await led.written()
        reading = asyncio.ensure_future(led.fetching(0, wait_ms=20_000))
        await asyncio.sleep(0.1)
        led.log.failure = "its disk broke"
        led.leader.end("its disk broke")
        with pytest.raises(RayqError, match="its disk broke"):
            await asyncio.wait_for(reading, 1.0)

    leading(work)


@pytest.mark.parametrize("isolation", [READ_COMMITTED, READ_UNCOMMITTED])
def test_an_answer_names_what_was_aborted_among_its_batches(isolation: int) -> None:
    async def work(led: Led) -> None:
        await led.written()
        await led.written(OTHER)
        await led.ended(is_commit=False)
        await led.ended(family=OTHER)
        assert (await led.fetching(0, isolation))[0].aborted == [(FAMILY, 0)]
        assert (await led.fetching(3, isolation))[0].aborted == []

    leading(work)


def test_records_that_are_deleted_while_they_are_read_are_not_shown_without_the_keys_of_the_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(led: Led) -> None:
        await led.written()
        await led.ended(is_commit=False)
        await led.written(None)
        read = led.log.read

        async def slow(offset: int, limit: int, bytes_max: int) -> tuple[bytes, int]:
            found = await read(offset, limit, bytes_max)
            await led.log.advance_log_start(2)
            return found

        monkeypatch.setattr(led.log, "read", slow)
        with pytest.raises(OffsetOutOfRangeError):
            await led.fetching(0)
        assert (await led.fetching(2))[0].next_offset == 3

    leading(work)


def test_what_compaction_forgets_while_it_is_read_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(led: Led) -> None:
        await led.written()
        await led.ended(is_commit=False)
        await led.written(OTHER)
        await led.ended(family=OTHER)
        read, compacted = led.log.read, []

        async def slow(offset: int, limit: int, bytes_max: int) -> tuple[bytes, int]:
            found = await read(offset, limit, bytes_max)
            if not compacted:
                await led.compact()
                compacted.append(found)
            return found

        monkeypatch.setattr(led.log, "read", slow)
        answer, data = await led.fetching(0)
        shown = [header for _, header in split_batches(data)]
        assert compacted[0][0] != data and answer.aborted == []
        assert [header.record_count for header in shown if header.producer_id == FAMILY] in (
            [], [0], [0, 0],
        )
        assert sum(header.record_count for header in shown) == 1

    leading(work, config={"cleanup_policy": "compact", "max_compaction_lag_ms": 1})


def test_a_client_without_transactions_is_refused_where_there_are_any() -> None:
    async def work(led: Led) -> None:
        await led.written(None)
        answer, _ = await led.fetching(0, messages.ISOLATION_NONE)
        assert answer.next_offset == 1
        reading = asyncio.ensure_future(
            led.fetching(1, messages.ISOLATION_NONE, wait_ms=20_000)
        )
        await led.settle()
        await led.written()
        with pytest.raises(UnsupportedVersionError):
            await reading
        with pytest.raises(UnsupportedVersionError):
            await led.listed(messages.LATEST, messages.ISOLATION_NONE)

    leading(work)


def test_nothing_undecided_is_deleted() -> None:
    async def work(led: Led) -> None:
        await led.written(None)
        await led.written()
        await led.written(None)
        with pytest.raises(OpenTransactionError, match=f"Transaction {FAMILY}:0"):
            await led.deleted(2)
        assert await led.deleted(None) == 1
        await led.ended()
        assert await led.deleted(2) == 2

    leading(work)


def test_what_is_open_and_what_ended_is_told_as_of_one_moment() -> None:
    async def work(led: Led) -> None:
        await led.written(None)
        assert led.described(0).is_used is False
        await led.written()
        await led.written(OTHER)
        await led.ended()
        await led.written(epoch=1)
        assert led.described() == messages.DescribeOpenTransactionsResponse(
            5, 2, [(OTHER, 0, 2), (FAMILY, 1, 4)], [], True, LEADER_EPOCH
        )
        assert led.described(3).ended == [(FAMILY, 0)] and led.described(4).ended == []
        led.mark(family=OTHER)
        assert led.described().open[0] == (OTHER, 0, 2), "its marker may yet be cut off"

    leading(work)


# --- what stays open ------------------------------------------------------------------------------


def test_a_transaction_that_is_open_for_too_long_is_asked_about_and_raises_an_alarm(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work(led: Led) -> None:
        assert led.measured() == {}
        await led.written()
        await led.look(1)
        await led.look(60)
        assert led.coordinators.asked_outcomes == []
        assert led.measured() == {
            "last_stable_offset_lag": 1, "open_transactions": 1,
            "oldest_transaction_seconds": pytest.approx(60, abs=1), "unknown_transactions": 0,
        }
        await led.look(OPEN_MAX_S)
        assert led.coordinators.asked_outcomes == [(FAMILY, 0)]
        led.coordinators.outcomes[FAMILY, 0] = "open"
        await led.look(61)
        assert led.measured()["unknown_transactions"] == 0
        await led.look(30)
        assert len(led.coordinators.asked_outcomes) == 2, "not so soon again"
        led.coordinators.outcomes[FAMILY, 0] = "unknown"
        await led.look(61)
        assert led.measured()["unknown_transactions"] == 1 and led.end == 1
        assert "transaction_unknown" in caplog.text and "aborted=False" in caplog.text
        await led.ended()
        figures = led.measured()
        assert figures["unknown_transactions"] == figures["open_transactions"] == 0
        assert figures["oldest_transaction_seconds"] == 0, "at once, not after the next look"

    with caplog.at_level(logging.ERROR):
        leading(work)


@pytest.mark.parametrize("state", ["unknown", "aborted", "committed", "open", "sealed"])
def test_after_an_unclean_election_a_leader_asks_at_once_and_aborts_what_is_unknown(
    state: str,
) -> None:
    is_ended = state not in ("open", "sealed")

    def before(log: ReplicaLog) -> None:
        for family, leader_epoch in ((FAMILY, 3), (OTHER, 5)):
            batch = batch_of(family)
            log.log.append_as_leader(
                batch, read_header(batch), leader_epoch=leader_epoch, now_ms=1_000
            )

    async def work(led: Led) -> None:
        led.coordinators.outcomes = {(FAMILY, 0): state, (OTHER, 0): "unknown"}
        await led.look(1)
        assert led.coordinators.asked_outcomes == [(FAMILY, 0)], "the other came after it"
        await led.copied()
        assert led.end == (3 if is_ended else 2)
        assert led.log.last_stable_offset == (1 if is_ended else 0)
        if is_ended:
            answer, _ = await led.fetching(0)
            assert answer.aborted == ([] if state == "committed" else [(FAMILY, 0)])
            await led.ended(0, is_commit=True)
            assert led.end == 3, "a marker that comes after all is a repetition"

    leading(work, before=before, last_unclean_epoch=5)


def test_a_coordinator_that_does_not_answer_holds_up_no_question_to_another() -> None:
    of_another = make_family(1, 1)

    def before(log: ReplicaLog) -> None:
        for family in (FAMILY, of_another):
            batch = batch_of(family, is_transactional=True)
            log.log.append_as_leader(batch, read_header(batch), leader_epoch=3, now_ms=1_000)

    async def work(led: Led) -> None:
        led.coordinators.outcomes = {(of_another, 0): "committed"}
        await led.look(1)
        assert led.coordinators.asked_outcomes == [(FAMILY, 0), (of_another, 0)]
        assert led.measured()["open_transactions"] == 1

    leading(work, before=before, last_unclean_epoch=5)
