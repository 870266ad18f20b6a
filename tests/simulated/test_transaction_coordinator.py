"""What a coordinator of transactions decides, when, and what it tells: alone, by its messages."""

from __future__ import annotations

import asyncio
import logging

import pytest

from proving.simulation.world import START_WALL_MS
from rayq import messages
from rayq.actors.transactions.transaction_coordinator import (
    MARKER_RETRY_MAX_S,
    TICK_S,
    UNUSED_CHECK_INTERVAL_S,
)
from rayq.core.transactions.changes import (
    FAILOVER_TIMEOUT_MS,
    TOUCHED_MS_MAX,
    UNFINISHED_MAX,
    UNUSED_ID_MS,
)
from rayq.core.transactions.records import (
    IdRecord,
    IdValue,
    TransactionKey,
)
from rayq.errors import (
    AlreadyCommittedError,
    CoordinatorLoadingError,
    InvalidRequestError,
    NotEnoughReplicasError,
    NotLeaderError,
    ProducerFencedError,
    TransactionEndedError,
    TransactionLimitError,
    TransactionOrderError,
    UnknownTopicError,
)
from rayq.messages.transaction_ids import EPOCH_MAX, FAMILIES_MAX, coordinator_partition
from tests.simulated.coordinator_stage import EPOCH, now_s
from tests.simulated.transaction_coordinator_stage import (
    NAME,
    OTHER,
    PARTITIONS,
    TIMEOUT_MS,
    WHERE,
    Coordinating,
    coordinating,
    key_of,
    named,
)

# --- producers ------------------------------------------------------------------------------------


def test_an_owner_gets_a_family_of_its_own_and_the_next_epoch_after_each_end() -> None:
    async def work(of: Coordinating) -> None:
        init = messages.InitProducer(*WHERE, NAME, "a", TIMEOUT_MS)
        answer = await of.ask(init)
        assert answer == messages.InitProducerResponse(*key_of(1), None)
        assert await of.ask(init) == answer
        assert await of.init(OTHER) == key_of(2)
        ended = await of.end(key_of(1), name="n")
        assert ended == messages.EndTransactionResponse(True, *key_of(1, 1), True)
        assert await of.end(key_of(1), False) == ended, "it was decided"
        assert await of.end(key_of(1, 1), False) == messages.EndTransactionResponse(
            False, *key_of(1, 2), True
        )
        answer = await of.ask(init)
        assert answer == messages.InitProducerResponse(*key_of(1, 2), "n")
        assert await of.init(owner="b") == key_of(1, 3)
        with pytest.raises(ProducerFencedError):
            await of.init()
        assert len(of.asked) == 2
        of.begin_again()
        assert await of.init(owner="b") == key_of(1, 3)
        assert await of.init(OTHER) == key_of(2)
        assert len(of.asked) == 2, "families are remembered"

    coordinating(work)


def test_a_family_whose_epochs_are_used_up_is_followed_by_another() -> None:
    async def work(of: Coordinating) -> None:
        last = key_of(7, EPOCH_MAX)
        await of.stored(
            IdRecord(NAME, IdValue("a", TIMEOUT_MS, key_of(7, EPOCH_MAX - 1), START_WALL_MS)),
        )
        of.begin_again()
        assert await of.init() == key_of(7, EPOCH_MAX - 1)
        answer = await of.end(key_of(7, EPOCH_MAX - 1))
        assert ((answer.family, answer.epoch), of.asked) == (last, [])
        await of.join(last, ("T", 0))
        answer = await of.end(last)
        assert (answer.family, answer.epoch) == key_of(1)
        assert of.marked(last) == [("T", 0, True)] and len(of.asked) == 1

    coordinating(work)


def test_a_family_that_a_refused_producer_has_drawn_is_for_the_next_one() -> None:
    async def work(of: Coordinating) -> None:
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="transaction_timeout_ms"):
                await of.init(timeout_ms=1)
        assert await of.init() == key_of(1)
        assert of.asked == [messages.DrawFamily()]

    coordinating(work)


def test_an_id_of_another_coordinator_is_refused() -> None:
    async def work(of: Coordinating) -> None:
        name = named("x-", here=False)
        with pytest.raises(InvalidRequestError) as told:
            await of.init(name)
        assert told.value.message == (
            f"Transactional id {name!r} belongs to partition "
            f"{coordinator_partition(name, PARTITIONS)} of __transaction_state, not to 2."
        )
        assert (await of.listed(idle=True)).transactions == []

    coordinating(work)


def test_a_coordinator_that_cannot_ask_its_broker_says_so() -> None:
    async def work(of: Coordinating) -> None:
        of.leaders.failure = UnknownTopicError("no topic")
        with pytest.raises(CoordinatorLoadingError) as told:
            await of.init()
        assert told.value.message == (
            "The coordinator of __transaction_state-2 waits for its broker: no topic"
        )
        of.leaders.failure, of.failure = None, NotLeaderError("no controller")
        with pytest.raises(CoordinatorLoadingError, match="waits for its broker: no controller"):
            await of.init()
        of.failure, of.numbers = None, FAMILIES_MAX - 1
        with pytest.raises(TransactionLimitError) as limited:
            await of.init()
        assert "given out all families" in limited.value.message
        of.numbers = FAMILIES_MAX - 2
        assert await of.init() == key_of(FAMILIES_MAX - 1), "this is the last one"
        of.leaders.failure = of.failure = NotLeaderError("no broker")
        assert await of.init() == key_of(FAMILIES_MAX - 1), "nothing is asked twice"

    coordinating(work)


def test_a_family_that_was_drawn_for_a_state_which_is_gone_is_not_used() -> None:
    async def work(of: Coordinating) -> None:
        await of.init(OTHER)
        waiting = asyncio.ensure_future(of.init())
        await asyncio.sleep(0)
        of.coordinator._reset(NotEnoughReplicasError("a test"))
        with pytest.raises(CoordinatorLoadingError, match="starts over"):
            await waiting
        assert await of.init() == key_of(3)

    coordinating(work)


def test_a_request_that_waited_is_not_decided_by_a_state_that_is_gone() -> None:
    async def work(of: Coordinating) -> None:
        await of.init()
        of.begin_again()
        assert of.measured() == [("2", 0)], "before it knows more"
        of.leaders.answering.clear()
        waiting = asyncio.ensure_future(of.end(key_of(1)))
        await asyncio.sleep(0.1)
        end_offset = of.end_offset
        of.coordinator._reset(NotEnoughReplicasError("a test"))
        of.leaders.answering.set()
        with pytest.raises(CoordinatorLoadingError, match="starts over"):
            await waiting
        assert await of.init() == key_of(1) and of.end_offset == end_offset

    coordinating(work)


def test_several_producers_that_begin_together_get_families_of_their_own() -> None:
    async def work(of: Coordinating) -> None:
        names = [named(f"p{number}-") for number in range(5)]
        keys = await asyncio.gather(*(of.init(name) for name in names))
        assert len(set(keys)) == 5
        assert [await of.init(name) for name in names] == keys

    coordinating(work)


def test_an_end_tells_each_participant_and_no_other_partition() -> None:
    async def work(of: Coordinating) -> None:
        for is_commit in (True, False):
            key = await of.init()
            await of.join(key, ("T", 0), ("U", 3), ("T", 0))
            assert await of.outcome(key) == "open"
            answer = await of.end(key, is_commit)
            following = TransactionKey(key.family, key.epoch + 1)
            assert answer == messages.EndTransactionResponse(is_commit, *following, True)
            assert of.marked(key) == [("T", 0, is_commit), ("U", 3, is_commit)]
            assert await of.outcome(key) == ("committed" if is_commit else "aborted")
            with pytest.raises(TransactionEndedError):
                await of.join(key, ("T", 1))
        assert of.leaders.markers[0] == messages.WriteMarker(
            "T", 0, 5, *key_of(1), True, EPOCH
        ) or of.leaders.markers[0] == messages.WriteMarker("U", 3, 5, *key_of(1), True, EPOCH)
        samples = {one.name: one for one in of.environment.metrics.collect()}
        assert samples["rayq_transaction_end_seconds"].count == 2
        assert 0 < samples["rayq_transaction_end_seconds"].value < 1
        assert of.coordinator._markers == {}, "nothing is left of them"

    coordinating(work)


def test_an_end_answers_in_time_where_a_marker_is_late() -> None:
    async def work(of: Coordinating) -> None:
        of.leaders.held.add(("T", 1))
        first = await of.init()
        await of.join(first, ("T", 0), ("T", 1))
        began_s = now_s()
        answer = await of.end(first, wait_ms=700)
        assert answer == messages.EndTransactionResponse(True, *key_of(1, 1), False)
        assert now_s() - began_s == pytest.approx(0.7, abs=0.05)
        assert of.marked(first) == [("T", 0, True)]
        waiting = asyncio.ensure_future(of.end(first, wait_ms=60_000))
        second = key_of(1, 1)
        await of.join(second, ("T", 0))
        began_s = now_s()
        assert not (await of.end(second, wait_ms=5_000)).is_complete
        assert now_s() - began_s < 0.1, "behind one that is not complete nobody waits"
        await asyncio.sleep(0.5)
        described = await of.describe()
        assert [(one.epoch, one.state, one.partitions) for one in described.transactions] == [
            (0, "committing", 2)
        ]
        assert described.participants == [(*first, "T", 0, True), (*first, "T", 1, False)]
        await asyncio.sleep(3)
        assert not waiting.done()
        of.leaders.held.clear()
        assert (await waiting).is_complete
        assert await of.outcome(first) == "unknown", "of an id only the last one is known"
        assert await of.outcome(second) == "committed"
        assert of.measured() == [("2", 0)]

    coordinating(work)


def test_a_marker_is_tried_again_less_and_less_often_and_forever() -> None:
    async def work(of: Coordinating) -> None:
        of.leaders.held.add(("T", 0))
        key = await of.init()
        await of.join(key, ("T", 0))
        began_s = now_s()
        await of.end(key, wait_ms=0)
        assert now_s() - began_s < 0.1
        assert of.measured() == [("2", 1)]
        counts = []
        for _ in range(3):
            before = len(of.leaders.tries)
            await asyncio.sleep(2)
            counts.append(len(of.leaders.tries) - before)
        assert 3 <= counts[0] <= 7
        assert counts[1:] == pytest.approx([2 / MARKER_RETRY_MAX_S] * 2, abs=1)
        of.leaders.gone.add("U")
        await asyncio.sleep(3)
        assert await of.outcome(key) == "committing"
        of.leaders.gone.add("T")  # A topic that is deleted needs no marker.
        await asyncio.sleep(1.5)
        assert await of.outcome(key) == "committed" and of.leaders.markers == []

    coordinating(work)


def test_only_so_many_transactions_of_an_id_lack_markers() -> None:
    async def work(of: Coordinating) -> None:
        of.leaders.held.add(("T", 0))
        key = await of.init()
        for _ in range(UNFINISHED_MAX):
            await of.join(key, ("T", 0))
            key = TransactionKey(key.family, (await of.end(key, wait_ms=0)).epoch)
        with pytest.raises(TransactionOrderError):
            await of.join(key, ("T", 0))
        of.leaders.held.clear()
        await asyncio.sleep(2)
        await of.join(key, ("T", 0))

    coordinating(work)


def test_owners_and_names_decide_who_may_end_what() -> None:
    async def work(of: Coordinating) -> None:
        key = await of.init()
        with pytest.raises(TransactionEndedError):
            await of.end(TransactionKey(key.family, 5))
        await of.end(key, name="n")
        second = key_of(1, 1)
        with pytest.raises(AlreadyCommittedError, match="'n'"):
            await of.end(second, name="n")
        third = key_of(1, 2)
        await of.join(third, ("T", 0))
        assert await of.init(owner="b") == key_of(1, 3)
        assert await of.outcome(third) in ("aborting", "aborted")
        # The owner before hears how its transaction ended, and cannot go on.
        assert await of.end(third) == messages.EndTransactionResponse(False, *third, True)
        for refused in of.end(key_of(1, 3)), of.seal(key_of(1, 3)), of.touch(key_of(1, 3)):
            with pytest.raises(ProducerFencedError):
                await refused

    coordinating(work)


def test_a_sealed_transaction_has_the_partitions_that_it_has() -> None:
    async def work(of: Coordinating) -> None:
        key = await of.init()
        await of.join(key, ("U", 1), ("T", 2), ("T", 0))
        for _ in range(2):
            assert await of.seal(key) == [("T", 0), ("T", 2), ("U", 1)]
        assert await of.outcome(key) == "sealed"
        with pytest.raises(TransactionEndedError):
            await of.join(key, ("T", 3))
        assert (await of.end(key)).is_committed
        with pytest.raises(TransactionEndedError):
            await of.seal(key)
        assert await of.seal(key_of(1, 1)) == [], "also where nothing was written"

    coordinating(work)


# --- time -----------------------------------------------------------------------------------------


def test_a_transaction_that_has_had_its_time_is_aborted(caplog: pytest.LogCaptureFixture) -> None:
    async def work(of: Coordinating) -> None:
        key = await of.init(timeout_ms=2_000)
        await of.join(key, ("T", 0))
        await asyncio.sleep(1.5)
        await of.join(key, ("T", 1))  # Its time began with its first partition.
        await asyncio.sleep(0.4)
        assert await of.outcome(key) == "open"
        await asyncio.sleep(0.1 + 2 * TICK_S)
        assert await of.outcome(key) == "aborted"
        assert of.marked(key) == [("T", 0, False), ("T", 1, False)]
        assert await of.end(key) == messages.EndTransactionResponse(False, *key_of(1, 1), True)

    with caplog.at_level(logging.WARNING):
        coordinating(work)
    (told,) = (one.getMessage() for one in caplog.records)
    assert "transaction_timed_out" in told and NAME in told and "2000" in told


def test_who_touches_a_transaction_keeps_it_for_an_hour_at_most() -> None:
    async def work(of: Coordinating) -> None:
        key = await of.init(timeout_ms=10_000)
        await of.touch(key)  # Nothing is open.
        await of.join(key, ("T", 0))
        (summary,) = (await of.describe()).transactions
        assert (summary.age_ms, summary.transaction_timeout_ms) == (
            pytest.approx(5, abs=10),
            10_000,
        )
        for _ in range(3):
            await asyncio.sleep(8)
            await of.touch(key)
        (summary,) = (await of.describe()).transactions
        assert summary == messages.TransactionSummary(
            NAME, *key, "open", summary.age_ms, 1, TOUCHED_MS_MAX
        )
        assert summary.age_ms == pytest.approx(24_000, abs=100)
        await asyncio.sleep(9.5)
        assert await of.outcome(key) == "open"
        await asyncio.sleep(1)
        assert await of.outcome(key) == "aborted"
        with pytest.raises(TransactionEndedError):
            await of.touch(key)

    coordinating(work)


def test_time_in_which_nobody_could_be_heard_counts_for_no_transaction() -> None:
    async def work(of: Coordinating) -> None:
        key = await of.init(timeout_ms=5_000)
        await of.join(key, ("T", 0))
        await asyncio.sleep(2)
        for begin, end in ((of.is_starved, of.commits), (of.lose, of.regain)):
            begin()
            await asyncio.sleep(20)
            end()
            await asyncio.sleep(TICK_S)
        assert await of.outcome(key) == "open"
        of.pause(20)
        await asyncio.sleep(1)  # It takes as long as the pause.
        await asyncio.sleep(2)
        assert await of.outcome(key) == "open"
        await asyncio.sleep(1.2)
        assert await of.outcome(key) == "aborted"

    coordinating(work)


def test_a_busy_process_gives_no_transaction_more_time() -> None:
    async def work(of: Coordinating) -> None:
        key = await of.init(timeout_ms=5_000)
        await of.join(key, ("T", 0))
        await of.is_busy(4.8)
        assert await of.outcome(key) == "open"
        await of.is_busy(0.5)
        assert await of.outcome(key) == "aborted"

    coordinating(work)


def test_a_new_coordinator_leaves_each_transaction_a_little_time() -> None:
    async def work(of: Coordinating) -> None:
        key = await of.init(timeout_ms=3_000)
        await of.join(key, ("T", 0))
        of.coordinator.end("a test")
        await asyncio.sleep(60)
        assert of.leaders.markers == []
        of.begin()
        await asyncio.sleep(FAILOVER_TIMEOUT_MS / 1000 - 0.1)
        assert await of.outcome(key) == "open"
        await asyncio.sleep(0.5)
        assert await of.outcome(key) == "aborted"

    coordinating(work)


def test_what_has_had_its_time_waits_for_the_family_that_it_needs() -> None:
    async def work(of: Coordinating) -> None:
        key = key_of(7, EPOCH_MAX)
        await of.stored(IdRecord(NAME, IdValue("a", 1_000, key, START_WALL_MS)))
        of.begin_again()
        await of.join(key, ("T", 0))
        of.failure = NotLeaderError("no controller")
        await asyncio.sleep(5)
        assert await of.outcome(key) == "open" and len(of.asked) > 1
        of.failure = None
        await asyncio.sleep(1)
        assert of.marked(key) == [("T", 0, False)]
        assert await of.outcome(key) == "unknown"
        assert await of.init() == key_of(of.numbers)

    coordinating(work)


@pytest.mark.parametrize("epoch", [3, EPOCH_MAX])
def test_what_has_had_its_time_waits_for_no_broker_without_need(epoch: int) -> None:
    """Its epochs go on, or a family is there that a refused producer has drawn."""

    async def work(of: Coordinating) -> None:
        key = key_of(7, epoch)
        await of.stored(IdRecord(NAME, IdValue("a", 1_000, key, START_WALL_MS)))
        of.begin_again()
        with pytest.raises(InvalidRequestError, match="transaction_timeout_ms"):
            await of.init(OTHER, timeout_ms=1)
        if epoch != EPOCH_MAX:
            assert await of.init(OTHER) == key_of(1)
        of.failure = NotLeaderError("no controller")
        await of.join(key, ("T", 0))
        await asyncio.sleep(3)
        assert of.marked(key) == [("T", 0, False)]
        assert await of.init() == (key_of(7, epoch + 1) if epoch != EPOCH_MAX else key_of(1))
        assert of.asked == [messages.DrawFamily()]

    coordinating(work)


def test_what_has_had_its_time_is_not_aborted_by_a_state_that_is_gone() -> None:
    """The first of two waits for its family, while the state of both is dropped."""

    async def work(of: Coordinating) -> None:
        first, second = key_of(7, EPOCH_MAX), key_of(8)
        await of.stored(
            IdRecord(NAME, IdValue("a", 1_000, first, START_WALL_MS)),
            IdRecord(OTHER, IdValue("a", 1_000, second, START_WALL_MS)),
        )
        of.begin_again()
        await asyncio.gather(*(of.join(one, ("T", 0)) for one in (first, second)))
        of.answering.clear()
        await asyncio.sleep(2)
        of.coordinator._reset(NotEnoughReplicasError("a test"))
        of.answering.set()
        await asyncio.sleep(1)
        assert [await of.outcome(key) for key in (first, second)] == ["open", "open"]
        await asyncio.sleep(FAILOVER_TIMEOUT_MS / 1000)
        assert of.marked(first) == of.marked(second) == [("T", 0, False)]

    coordinating(work)


@pytest.mark.parametrize("is_complete", [True, False])
def test_what_ends_while_another_one_waits_for_its_family_needs_no_abort(
    is_complete: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(of: Coordinating) -> None:
        first, second = key_of(7, EPOCH_MAX), key_of(8)
        await of.stored(
            IdRecord(NAME, IdValue("a", 1_000, first, START_WALL_MS)),
            IdRecord(OTHER, IdValue("a", 1_000, second, START_WALL_MS)),
        )
        of.begin_again()
        await asyncio.gather(*(of.join(one, ("T", 0)) for one in (first, second)))
        of.answering.clear()
        await asyncio.sleep(2)
        if not is_complete:
            of.leaders.held.add(("T", 0))
        answer = await of.end(second, of=OTHER, wait_ms=100)
        assert answer.is_complete is is_complete
        of.answering.set()
        await asyncio.sleep(1)
        of.leaders.held.clear()
        await asyncio.sleep(2)
        assert (of.marked(first), of.marked(second)) == ([("T", 0, False)], [("T", 0, True)])
        assert of.log.failure is None and await of.outcome(second) == "committed"

    with caplog.at_level(logging.WARNING):
        coordinating(work)
    assert len(caplog.records) == 1 and NAME in caplog.records[0].getMessage()


def test_ids_that_nobody_uses_are_forgotten_unless_they_name_their_transactions() -> None:
    async def work(of: Coordinating) -> None:
        at = START_WALL_MS
        unused, used, keeps = (named(f"{prefix}-") for prefix in ("unused", "used", "keeps"))
        of.clock_watch._now_ms = of.clock_watch._wall_ms = at
        await of.stored(
            IdRecord(unused, IdValue("a", TIMEOUT_MS, key_of(4), at - UNUSED_ID_MS)),
            IdRecord(used, IdValue("a", TIMEOUT_MS, key_of(5), at - UNUSED_ID_MS + 330_000)),
            IdRecord(keeps, IdValue("a", TIMEOUT_MS, key_of(6), at - UNUSED_ID_MS, last_name="n")),
        )
        of.begin_again()
        await asyncio.sleep(UNUSED_CHECK_INTERVAL_S - 1)
        listed = await of.listed(idle=True)
        assert [one.transactional_id for one in listed.transactions] == sorted(
            [unused, used, keeps]
        )
        await asyncio.sleep(2)
        listed = await of.listed(idle=True)
        assert [one.transactional_id for one in listed.transactions] == sorted([used, keeps])
        await asyncio.sleep(345 - (of.environment.clock.wall_ms() - at) / 1000)
        listed = await of.listed(idle=True)
        assert len(listed.transactions) == 2, "it is looked for them once a minute"
        await asyncio.sleep(30)
        of.begin_again()
        listed = await of.listed(idle=True)
        assert [one.transactional_id for one in listed.transactions] == [keeps]

    coordinating(work)


# --- operators and servers ------------------------------------------------------------------------


def test_an_abort_ends_exactly_what_is_open() -> None:
    async def work(of: Coordinating) -> None:
        key = await of.init()
        await of.abort(key)
        assert await of.init() == key, "nothing was open"
        await of.join(key, ("T", 0))
        for _ in range(2):
            await of.abort(key)
        await asyncio.sleep(0.1)
        assert of.marked(key) == [("T", 0, False)]
        assert await of.init() == key_of(1, 1)
        await of.join(key_of(1, 1), ("T", 0))
        of.leaders.held.add(("T", 0))
        await of.end(key_of(1, 1), wait_ms=0)
        await of.abort(key_of(1, 1))
        assert await of.outcome(key_of(1, 1)) == "committing"

    coordinating(work)


def test_ids_are_listed_in_pages_and_described(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(of: Coordinating) -> None:
        names = sorted(named(f"{prefix}-") for prefix in "abcde")
        for name in names:
            await of.init(name)
        assert await of.listed() == messages.ListTransactionsResponse([], None)
        ready = [
            messages.TransactionSummary(name, *key_of(number), "ready", None, 0, TIMEOUT_MS)
            for number, name in enumerate(names, start=1)
        ]
        assert await of.listed(idle=True) == messages.ListTransactionsResponse(ready, None)
        monkeypatch.setattr(messages, "LISTED_IDS_MAX", 2)
        pages = [await of.listed(after, idle=True) for after in ("", names[1], names[3])]
        assert pages == [
            messages.ListTransactionsResponse(ready[:2], names[1]),
            messages.ListTransactionsResponse(ready[2:4], names[3]),
            messages.ListTransactionsResponse(ready[4:], None),
        ]
        monkeypatch.setattr(messages, "LISTED_IDS_MAX", 5)
        assert (await of.listed(idle=True)).next_after is None
        await of.join(key_of(2), ("T", 0), ("T", 1))
        await asyncio.sleep(0.5)
        listed = await of.listed()
        (summary,) = listed.transactions
        assert listed.next_after is None and 499 < (summary.age_ms or 0) < 600
        assert summary == messages.TransactionSummary(
            names[1], *key_of(2), "open", summary.age_ms, 2, TIMEOUT_MS
        )
        assert len((await of.listed(idle=True)).transactions) == 5
        with pytest.raises(InvalidRequestError, match="There is no transactional id 'unknown'"):
            await of.describe("unknown")
        assert await of.describe(names[0]) == messages.DescribeTransactionResponse(
            names[0], "a", *key_of(1), TIMEOUT_MS, None, ready[:1], []
        )
        owner = "0123456789abcdef"
        await of.init(names[0], owner)
        await of.end(key_of(1, 1), owner=owner, name="n", of=names[0])
        assert await of.describe(names[0]) == messages.DescribeTransactionResponse(
            names[0],
            "01234567",
            *key_of(1, 2),
            TIMEOUT_MS,
            "n",
            [messages.TransactionSummary(names[0], *key_of(1, 2), "ready", None, 0, TIMEOUT_MS)],
            [],
        )

    coordinating(work)


def test_a_wall_clock_that_goes_back_makes_no_age_negative() -> None:
    async def work(of: Coordinating) -> None:
        await of.join(await of.init(), ("T", 0))
        of.process.host.jump_clock(-3_600_000)  # type: ignore[attr-defined]
        (summary,) = (await of.listed()).transactions
        assert summary.age_ms == 0

    coordinating(work)
