"""A queue's leader alone: what it gives out, when it answers, what survives it."""

from __future__ import annotations

import asyncio

import pytest

from rayq import messages
from rayq.actors.clock_watch import DelayClock
from rayq.actors.queues import reads, scanner, waiting
from rayq.config import DAY_MS
from rayq.core.large import holds as large_holds
from rayq.core.large.values import manifest_of_chunks, pinned
from rayq.core.queues import queue_states
from rayq.errors import (
    NotLeaderError,
    OffsetOutOfRangeError,
    QueueFencedError,
    QueueLoadingError,
    RayqError,
    StorageError,
    UnknownQueueError,
)
from rayq.messages.secret_names import shown_part
from rayq.storage.batch import BatchHeader, Columns, decode_columns
from tests.simulated.queue_stage import QueueStage, staged

# --- answers wait -------------------------------------------------------------------------------


def test_no_take_and_no_ack_is_answered_before_it_is_kept() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"a", b"b")
        await stage.describe()
        stage.keeper.open.clear()
        taking = asyncio.ensure_future(stage.take(wait_ms=60_000))
        await asyncio.sleep(30)
        assert not taking.done()
        stage.keeper.open.set()
        taken = await taking
        assert taken.locks == [(0, 1, 1)] and taken.values == [b"a", b"b"]
        stage.keeper.open.clear()
        acking = asyncio.ensure_future(stage.ack(taken))
        again = asyncio.ensure_future(stage.ack(taken))
        await asyncio.sleep(5)
        assert not acking.done()
        # Settled already, by what is not kept yet: that answer waits, too.
        assert not again.done()
        stage.keeper.open.set()
        assert await acking == await again == []

    staged(work)


def test_a_refusal_waits_for_what_it_rests_on() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"a")
        first = await stage.take()
        stage.keeper.open.clear()
        nacking = asyncio.ensure_future(stage.settle(first, nacks=[(0, 0, 1, 0)]))
        second = asyncio.ensure_future(stage.take(holder="two", wait_ms=60_000))
        await asyncio.sleep(1)
        late = asyncio.ensure_future(stage.ack(first))
        await asyncio.sleep(1)
        assert not (nacking.done() or second.done() or late.done())
        stage.keeper.open.set()
        assert await nacking == []
        assert (await second).locks == [(0, 0, 2)]
        assert await late == [(0, 0, "consumer t has it")]

    staged(work)


def test_many_acknowledgements_share_a_write() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(*[b"%d" % number for number in range(500)])
        taken = await stage.take(500)
        before = stage.keeper.writes
        parts = [stage.settle(taken, acks=[(number, number, 1)]) for number in range(500)]
        assert all(lost == [] for lost in await asyncio.gather(*parts))
        assert stage.keeper.writes - before <= 3
        assert (await stage.describe()).start_offset == 500

    staged(work)


def test_an_acknowledgement_goes_with_the_take_that_follows_it() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(*[b"%d" % number for number in range(10)])
        taken = await stage.take(1)
        before = stage.keeper.writes
        for _ in range(9):
            acking = asyncio.ensure_future(stage.ack(taken, may_linger=True))
            await asyncio.sleep(0.0005)
            taken = await stage.take(1)
            assert await acking == []
        assert stage.keeper.writes - before == 9
        assert await stage.ack(taken, may_linger=True) == []

    staged(work)


def test_no_take_waits_for_a_write_of_acknowledgements_that_nobody_waits_for() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(*[b"%d" % number for number in range(3)])
        first = await stage.take(1)
        before = stage.keeper.writes
        stage.keeper.open.clear()
        taking = asyncio.ensure_future(stage.take(1))
        await asyncio.sleep(0.001)
        acking = asyncio.ensure_future(stage.ack(first, may_linger=True))
        await asyncio.sleep(0.1)
        stage.keeper.open.set()
        await taking
        await asyncio.sleep(0.005)
        assert stage.keeper.writes - before == 1 and not acking.done()
        await stage.take(1)
        assert stage.keeper.writes - before == 2 and await acking == []

    staged(work)


def test_an_acknowledgement_that_somebody_waits_for_has_others_written_too() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"a", b"b")
        taken = await stage.take(2)
        lingering = asyncio.ensure_future(
            stage.settle(taken, acks=[(0, 0, 1)], may_linger=True)
        )
        await asyncio.sleep(0.001)
        began_s = asyncio.get_running_loop().time()
        assert await stage.settle(taken, acks=[(1, 1, 1)]) == []
        assert await lingering == []
        assert asyncio.get_running_loop().time() - began_s < 0.005

    staged(work)


# --- failover -----------------------------------------------------------------------------------


def test_locks_and_counts_outlive_a_leader() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"a", b"b", b"c")
        taken = await stage.take(2)
        await stage.settle(taken, acks=[(0, 0, 1)])
        await stage.lead()
        assert (await stage.take(holder="two")).values == [b"c"]
        assert await stage.settle(taken, acks=[(1, 1, 1)]) == []
        described = await stage.describe()
        assert (described.start_offset, described.locked) == (2, 1)

    staged(work)


def test_a_new_leader_gives_each_lock_a_full_timeout() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"a")
        await stage.take()
        await asyncio.sleep(8)
        await stage.lead()
        await asyncio.sleep(8)
        assert (await stage.take(holder="two")).locks == []
        await asyncio.sleep(3)
        assert (await stage.take(holder="two")).locks == [(0, 0, 2)]

    staged(work, visibility_timeout_s=10)


def test_what_an_unclean_election_put_in_place_of_settled_records_is_given_out() -> None:
    async def work(stage: QueueStage) -> None:
        for number in range(10):
            await stage.put(b"%d" % number)
        taken = await stage.take(8)
        await stage.settle(taken, acks=[(0, 5, 1)])
        stage.resign()
        stage.log.truncate(4)
        await stage.lead(resigned=True)
        for number in range(4, 9):
            await stage.put(b"new %d" % number)
        again = await stage.take(holder="two")
        assert again.values == [b"new %d" % number for number in range(4, 9)]
        assert again.epoch > taken.epoch
        lost = await stage.settle(taken, acks=[(6, 7, 1)])
        assert lost == [(6, 7, "consumer t has it")]
        assert await stage.ack(again) == []
        assert (await stage.describe()).start_offset == 9

    staged(work)


def test_an_older_leader_settles_nothing_any_more() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"a")
        old, epoch, leader = stage.served, stage.epoch, stage.leader
        taken = await stage.take()
        # The old one has not heard of it.
        old_end, leader_end = old.end, leader.end
        old.end = leader.end = lambda reason: None  # type: ignore[method-assign]
        await stage.lead()
        await stage.describe()
        request = messages.Settle("id", 0, epoch, "q-id", "one", taken.epoch, acks=taken.locks)
        answer = old.handle(stage.peer(), request)
        assert isinstance(answer, asyncio.Future)
        with pytest.raises(QueueLoadingError):
            await answer
        assert (await stage.describe()).locked == 1
        old_end("over")
        leader_end("over")

    staged(work)


def test_the_end_of_a_leader_is_told_to_all_that_wait() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.describe()
        taking = asyncio.ensure_future(stage.take(wait_ms=60_000))
        await asyncio.sleep(1)
        stage.resign()
        with pytest.raises(NotLeaderError):
            await taking
        with pytest.raises(NotLeaderError):
            await stage.take()

    staged(work)


# --- time and connections -----------------------------------------------------------------------


def test_a_lock_ends_after_its_timeout_unless_it_is_extended() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"a", b"b")
        taken = await stage.take()
        await asyncio.sleep(8)
        assert await stage.settle(taken, extends=[(0, 0, 1, 10_000)]) == []
        waiting = await stage.take(holder="two", wait_ms=5_000)
        assert waiting.locks == [(1, 1, 2)]
        assert await stage.settle(taken, acks=[(0, 1, 1)]) == [(1, 1, "consumer t has it")]

    staged(work, visibility_timeout_s=10)


def test_a_leap_of_the_wall_clock_frees_no_lock_and_makes_nothing_due() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"a")
        await stage.take()
        await stage.put_due(b"later", 3_600_000)
        assert (await stage.take()).locks == []
        stage.host.jump_clock(86_400_000)
        await asyncio.sleep(5)
        assert (await stage.take()).locks == []
        stage.host.jump_clock(-86_400_000)
        await asyncio.sleep(5)
        described = await stage.describe()
        assert (described.locked, described.delayed, described.ready) == (1, 1, 0)

    staged(work, visibility_timeout_s=60)


def test_a_pause_of_the_process_frees_no_lock() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"a")
        await stage.take()
        stage.has_lease = False
        await asyncio.sleep(60)
        stage.has_lease = True
        await asyncio.sleep(5)
        assert (await stage.take(holder="two")).locks == []
        await asyncio.sleep(6)
        assert (await stage.take(holder="two")).locks == [(0, 0, 2)]

    staged(work, visibility_timeout_s=10)


def test_what_is_due_is_given_at_once_and_never_before() -> None:
    async def work(stage: QueueStage) -> None:
        began_s = stage.clock.monotonic()
        await stage.put_due(b"later", 2_000)
        taken = await stage.take(wait_ms=10_000)
        assert taken.values == [b"later"]
        assert 1.99 <= stage.clock.monotonic() - began_s < 2.1
        await stage.settle(taken, nacks=[(0, 0, 1, 700)])
        began_s = stage.clock.monotonic()
        assert (await stage.take(wait_ms=10_000)).locks == [(0, 0, 2)]
        assert 0.69 <= stage.clock.monotonic() - began_s < 0.8

    staged(work)


def test_what_a_leader_with_a_clock_that_was_ahead_delays_is_not_late() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"v")
        stage.host.jump_clock(1_200_000)
        stage.clock_watch = DelayClock(stage.clock)
        await stage.lead()
        taken = await stage.take()
        await stage.settle(taken, nacks=[(0, 0, 1, 700)])
        stage.host.jump_clock(-1_200_000)
        stage.clock_watch = DelayClock(stage.clock)
        await stage.lead()
        began_s = stage.clock.monotonic()
        assert (await stage.take(wait_ms=10_000)).locks == [(0, 0, 2)]
        assert stage.clock.monotonic() - began_s < 0.8

    staged(work)


def test_a_delay_is_five_minutes_late_at_most_where_the_machine_slept() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put_due(b"later", 4 * 3_600_000)
        assert (await stage.take(wait_ms=100)).locks == []
        stage.host.jump_clock(8 * 3_600_000)  # The monotonic clock does not count the sleep.
        began_s = stage.clock.monotonic()
        while not (await stage.take(wait_ms=5_000)).locks:
            assert stage.clock.monotonic() - began_s < 310, "it waits for what the clock said before"
        assert stage.clock.monotonic() - began_s > 290, "a shorter leap is not believed"

    staged(work)


def test_a_delay_outlives_its_leader() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put_due(b"later", 10_000)
        assert (await stage.take(wait_ms=100)).locks == []
        assert (await stage.describe()).next_due_ms is not None
        await asyncio.sleep(5)
        await stage.lead()
        assert (await stage.take(wait_ms=2_000)).locks == []
        assert (await stage.take(wait_ms=5_000)).values == [b"later"]

    staged(work)


def test_a_connection_that_is_gone_for_a_second_frees_its_locks() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"a", b"b")
        peer = stage.peer()
        await stage.take(1, holder="gone", peer=peer)
        await stage.take(1, holder="back", peer=peer)
        peer.closed.set_result(None)
        await asyncio.sleep(0.5)
        taken = await stage.take(holder="two")
        assert taken.locks == []
        answer = await stage.ask(messages.Settle, "back", taken.epoch, extends=[(1, 1, 1, 30_000)])
        assert answer.lost == []
        taken = await stage.take(holder="two", wait_ms=1_000)
        assert taken.locks == [(0, 0, 2)]
        await asyncio.sleep(5)
        assert (await stage.describe()).locked == 2

    staged(work)


@pytest.mark.parametrize("away_s", [3.0, 0.2])
def test_a_queue_that_begins_again_keeps_no_locks_of_who_went_meanwhile(away_s: float) -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"a", b"b", b"c")
        gone, here = stage.peer(), stage.peer()
        await stage.take(1, holder="gone", peer=gone)
        await stage.take(1, holder="here", peer=here)
        stage.keeper.failure = QueueFencedError("A later opening has this state.")
        with pytest.raises(RayqError):  # This opening ends.
            await stage.take(1, holder="there", peer=here, wait_ms=500)
        gone.closed.set_result(None)
        await asyncio.sleep(away_s)
        stage.keeper.failure = None
        await asyncio.sleep(2)
        assert (await stage.describe()).locked == 1
        taken = await stage.take(holder="two", peer=here)
        assert taken.locks == [(0, 0, 2), (2, 2, 1)]

    staged(work)


def test_a_holder_is_there_as_long_as_one_of_its_connections() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"a")
        first, second = stage.peer(), stage.peer()
        taken = await stage.take(peer=first)
        await stage.settle(taken, peer=second)
        first.closed.set_result(None)
        await asyncio.sleep(5)
        assert (await stage.describe()).locked == 1
        second.closed.set_result(None)
        await asyncio.sleep(1.5)
        assert (await stage.describe()).locked == 0

    staged(work)


def test_a_connection_may_name_any_number_of_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "HOLDERS_MAX", 3)

    async def work(stage: QueueStage) -> None:
        await stage.put(*(b"%d" % number for number in range(5)))
        peer = stage.peer()
        for number in range(5):
            taken = await stage.take(1, holder=f"h{number}", peer=peer)
            assert taken.offsets == [number]
        assert taken.answer.sweep_ms == 100, "it is one consumer"
        peer.closed.set_result(None)
        await asyncio.sleep(2)
        assert (await stage.take()).offsets == [2, 3, 4]
        await asyncio.sleep(30)
        assert (await stage.take()).offsets == [0, 1], "these ran out by time"

    staged(work)


def test_a_take_whose_connection_ended_is_given_nothing() -> None:
    async def work(stage: QueueStage) -> None:
        peer = stage.peer()
        taking = asyncio.ensure_future(stage.take(wait_ms=60_000, peer=peer))
        await asyncio.sleep(0.1)
        peer.closed.set_result(None)
        await asyncio.sleep(0.1)
        assert taking.cancelled()
        await stage.put(b"a")
        assert (await stage.take(holder="two")).locks == [(0, 0, 1)]

    staged(work)


# --- what is given ------------------------------------------------------------------------------


def test_waiting_takes_are_served_in_turn_and_share_what_there_is() -> None:
    async def work(stage: QueueStage) -> None:
        takes = [
            asyncio.ensure_future(stage.take(100, holder=f"h{number}", wait_ms=60_000))
            for number in range(4)
        ]
        await asyncio.sleep(0.1)
        await stage.put(*[b"%d" % number for number in range(40)])
        found = [await take for take in takes]
        assert [len(taken.offsets) for taken in found] == [10, 10, 10, 10]
        assert [taken.offsets[0] for taken in found] == [0, 10, 20, 30]
        assert found[1].values == [b"%d" % number for number in range(10, 20)]

    staged(work)


@pytest.mark.parametrize("held_bytes_max", [0, 300, 3_000])
def test_a_queue_is_worked_through_whatever_its_keeper_may_hold(
    monkeypatch: pytest.MonkeyPatch, held_bytes_max: int
) -> None:
    """What was given out can be settled, and what failed is given out again."""
    monkeypatch.setattr(queue_states, "HELD_BYTES_MAX", held_bytes_max)
    monkeypatch.setattr(queue_states, "RESERVE_BYTES", 0)

    async def work(stage: QueueStage) -> None:
        peer = stage.peer()
        for number in range(4):
            await stage.put(*[b"%d" % (number * 300 + one) for one in range(300)])
        failed: set[int] = set()
        while (await stage.describe()).start_offset < 1200:
            try:
                taken = await stage.take(1000, peer=peer, wait_ms=500)
            except QueueLoadingError:
                continue
            for first, last, count in taken.locks:
                for offset in range(first, last + 1):
                    is_bad = offset % 7 == 0 and offset not in failed
                    failed |= {offset} if is_bad else set()
                    if is_bad:
                        lost = await stage.settle(
                            taken, peer=peer, nacks=[(offset, offset, count, 3_000)]
                        )
                    else:
                        lost = await stage.settle(taken, peer=peer, acks=[(offset, offset, count)])
                    assert lost == []

    staged(work, visibility_timeout_s=600)


def test_who_has_nothing_to_do_comes_before_who_takes_ahead() -> None:
    async def work(stage: QueueStage) -> None:
        ahead = asyncio.ensure_future(stage.take(holder="a", wait_ms=60_000, is_ahead=True))
        idle = asyncio.ensure_future(stage.take(holder="b", wait_ms=60_000))
        await asyncio.sleep(1)
        await stage.put(b"0")
        assert (await idle).offsets == [0]
        assert not ahead.done()
        await stage.put(b"1")
        assert (await ahead).offsets == [1]

    staged(work)


def test_a_consumer_hears_how_many_others_have_nothing_to_do() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(*[b"%d" % number for number in range(4)])
        taken = await stage.take(4, holder="a")
        assert taken.answer.wanted == 0
        takes = [
            asyncio.ensure_future(stage.take(1, holder=name, wait_ms=60_000, is_ahead=name == "d"))
            for name in "bcd"
        ]
        await asyncio.sleep(1)
        answer = await stage.ask(messages.Settle, "a", taken.epoch, acks=[(0, 0, 1)])
        assert (answer.lost, answer.wanted) == ([], 2)
        assert await stage.settle(taken, holder="a", releases=[(2, 3, 1)]) == []
        given = [await take for take in takes[:2]]
        assert [(one.offsets, one.locks[0][2]) for one in given] == [([2], 2), ([3], 2)]
        assert [one.answer.excused for one in given] == [[(2, 2, 1)], [(3, 3, 1)]]
        takes[2].cancel()

    staged(work)


def test_what_was_locked_and_not_begun_is_no_delivery_also_under_the_next_leader() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"poison", b"neighbour")
        for delivery in (1, 2, 3):
            peer = stage.peer()
            taken = await stage.take(holder=f"h{delivery}", peer=peer, tells_begins=True)
            assert taken.locks == [(0, 1, delivery)]
            assert taken.answer.unbegun == ([] if delivery == 1 else [(0, 1)])
            if delivery > 1:
                begins = [(0, 0, delivery)]
                assert not await stage.settle(taken, holder=f"h{delivery}", begins=begins)
            await stage.lead()
            peer = stage.peer()
            await stage.settle(taken, holder=f"h{delivery}", peer=peer, extends=[])
            peer.closed.set_result(None)
            await asyncio.sleep(2)
        found = await stage.describe()
        assert (found.start_offset, found.ready, found.dead) == (1, 1, 1)

    staged(work, max_deliveries=3, dead_letters="discard")


def test_a_take_is_woken_by_the_commit_of_a_record() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"a", is_committed=False)
        taking = asyncio.ensure_future(stage.take(wait_ms=60_000))
        await asyncio.sleep(5)
        assert not taking.done()
        began_s = stage.clock.monotonic()
        await stage.copied()
        assert (await taking).values == [b"a"]
        assert stage.clock.monotonic() - began_s < 0.1

    staged(work)


def test_a_large_batch_comes_cut_to_what_was_given_of_it() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(*[b"%d" % number * 1000 for number in range(100)])
        taken = await stage.take(1)
        assert taken.values == [b"0" * 1000] and len(taken.payload) < 2_000
        rest = await stage.take(3, holder="two")
        assert rest.values == [b"%d" % number * 1000 for number in (1, 2, 3)]
        assert len(rest.payload) < 5_000

    staged(work)


def test_the_bytes_of_a_take_are_limited() -> None:
    async def work(stage: QueueStage) -> None:
        for number in range(10):
            await stage.put(b"%d" % number * 1000)
        taken = await stage.take(100, bytes_max=300)
        assert taken.offsets == [0, 1, 2]
        assert (await stage.take(100, bytes_max=1)).offsets == [3]

    staged(work)


@pytest.mark.parametrize("error", [OffsetOutOfRangeError, StorageError])
def test_a_take_that_can_read_no_further_brings_what_it_has_locked(
    error: type[RayqError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "PIECE_BYTES", 1)
    piece = reads.QueueReads.piece

    async def fails_at_two(self: reads.QueueReads, offset: int) -> reads.Piece:
        if offset == 2:
            raise error("cannot be read")
        return await piece(self, offset)

    monkeypatch.setattr(reads.QueueReads, "piece", fails_at_two)

    async def work(stage: QueueStage) -> None:
        for number in range(3):
            await stage.put(b"%d" % number)
        assert (await stage.take()).offsets == [0, 1]
        with pytest.raises(error):
            await stage.take()

    staged(work)


def test_order_by_key_outlives_a_leader() -> None:
    async def work(stage: QueueStage) -> None:
        keys: list[bytes | None] = [b"x", b"y", b"x", None]
        await stage.put(b"x1", b"y1", b"x2", b"-", keys=keys)
        first = await stage.take(1)
        assert first.values == [b"x1"]
        await stage.lead()
        assert (await stage.take(holder="two")).values == [b"y1", b"-"]
        assert await stage.ack(first) == []
        assert (await stage.take(holder="two")).values == [b"x2"]

    staged(work, ordered_by_key=True)


def test_a_batch_without_keys_takes_no_key_from_those_behind_it() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"-")
        for value in (b"x1", b"x2"):
            await stage.put(value, keys=[b"x"])
        first = await stage.take()
        await stage.settle(first, releases=[(0, 2, 1)])
        await stage.lead()
        assert (await stage.take(2)).values == [b"-", b"x1"]
        assert (await stage.take(holder="two")).values == [], "x1 is not settled"

    staged(work, ordered_by_key=True)


def test_the_records_of_a_key_come_together_also_from_many_batches() -> None:
    async def work(stage: QueueStage) -> None:
        for number in range(60):
            await stage.put(b"%d" % number, keys=[b"%d" % (number % 3)])
        taken = await stage.take(50)
        assert taken.offsets == [*range(50)]
        assert (await stage.take(50, holder="two")).locks == []
        await stage.ack(taken)
        assert len((await stage.take(50, holder="two")).offsets) == 10

    staged(work, ordered_by_key=True)


# --- queues and errors --------------------------------------------------------------------------


def test_a_queue_that_is_deleted_ends_its_takes() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"a")
        taken = await stage.take()
        waiting = asyncio.ensure_future(stage.take(wait_ms=60_000))
        await asyncio.sleep(0.1)
        stage.queues = []
        stage.changed()
        with pytest.raises(UnknownQueueError):
            await waiting
        with pytest.raises(UnknownQueueError):
            await stage.ack(taken)

    staged(work)


def test_a_queue_that_cannot_be_opened_yet_says_so() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"a")
        stage.keeper.open.clear()
        await stage.lead()
        with pytest.raises(QueueLoadingError):
            await stage.take()
        with pytest.raises(QueueLoadingError):
            await asyncio.wait_for(stage.describe(), 5)
        stage.keeper.open.set()
        assert (await stage.take(wait_ms=1_000)).values == [b"a"]

    staged(work)


def test_a_new_queue_may_be_asked_for_before_its_metadata_are_there() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"a")
        asking = asyncio.ensure_future(
            stage.ask(messages.Take, "h", 10, 1000, 1000, queue_id="late-id")
        )
        await asyncio.sleep(0.2)
        stage.queues = [*stage.queues, stage.queue("late")]
        stage.changed()
        answer, _ = await asking
        assert answer.locks == [(0, 0, 1)]

    staged(work)


def test_a_queue_begins_where_it_was_told_to_and_stays_there() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"before")
        stage.queues = [stage.queue("new", start="latest")]
        stage.changed()
        await stage.ask(messages.DescribeQueue, queue_id="new-id")
        await stage.put(b"after")
        await stage.lead()
        answer, _ = await stage.ask(messages.Take, "h", 10, 1000, 1000, queue_id="new-id")
        assert answer.locks == [(1, 1, 1)]

    staged(work)


def test_a_queue_by_key_whose_records_lie_scattered_opens_by_reading_each_batch_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(stage: QueueStage) -> None:
        for _ in range(10):
            keys: list[bytes | None] = [b"%d" % number for number in range(100)]
            await stage.put(*[b"v"] * 100, keys=keys)
        taken = await stage.take(1000)
        assert await stage.settle(taken, acks=[(one, one, 1) for one in range(0, 1000, 2)]) == []
        decoded = []

        def counted(data: memoryview, position: int, header: BatchHeader) -> Columns:
            decoded.append(header.base_offset)
            return decode_columns(data, position, header)

        await asyncio.sleep(reads.KEPT_S + 1)
        monkeypatch.setattr(reads, "decode_columns", counted)
        await stage.lead()
        described = await stage.describe()
        assert (described.start_offset, described.locked) == (1, 500)
        assert decoded == [*range(0, 1000, 100)]

    staged(work, ordered_by_key=True, visibility_timeout_s=1_000)


def test_what_retention_took_is_counted() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"a", b"b", b"c")
        taken = await stage.take(1)
        await stage.log.advance_log_start(2)
        await asyncio.sleep(1)
        described = await stage.describe()
        assert (described.start_offset, described.expired, described.ready) == (2, 2, 1)
        assert await stage.ack(taken) == []
        assert (await stage.take()).values == [b"c"]

    staged(work)


@pytest.fixture
def short_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large value is open for a minute at most."""
    monkeypatch.setattr(scanner, "OPEN_VALUE_MS_MAX", 60_000)
    monkeypatch.setattr(large_holds, "OPEN_VALUE_MS_MAX", 60_000)


@pytest.mark.usefixtures("short_doubt")
def test_retention_waits_for_what_is_settled_durably() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"a", b"b", b"c")
        taken = await stage.take()
        assert stage.log.held_offset == 0
        stage.keeper.open.clear()
        acking = asyncio.ensure_future(stage.settle(taken, acks=[(0, 1, 1)]))
        await asyncio.sleep(1)
        assert stage.log.held_offset == 0
        stage.keeper.open.set()
        await acking
        await asyncio.sleep(1)
        assert stage.log.held_offset == 2
        # A new leader knows which chunks of large values were passed over: none.
        await stage.lead()
        await asyncio.sleep(1)
        assert stage.log.held_offset == 2
        await stage.ack(taken)
        await asyncio.sleep(1)
        assert stage.log.held_offset == 3

    staged(work, retention="hold")


@pytest.mark.usefixtures("short_doubt")
def test_the_chunks_of_an_unsettled_value_stay() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"a")
        await stage.put(b"chunk", is_chunk=True)
        manifest = manifest_of_chunks(5, 1, bytes(16), [1])
        await stage.put(b"b")
        await stage.put(manifest, is_large=True)
        taken = await stage.take()
        assert taken.offsets == [0, 2, 3]
        await stage.settle(taken, acks=[(0, 0, 1), (2, 2, 1)])
        await asyncio.sleep(100)
        assert stage.log.held_offset == 1
        await stage.lead()
        await asyncio.sleep(1)
        assert stage.log.held_offset == 1
        await stage.settle(taken, acks=[(3, 3, 1)])
        await asyncio.sleep(1)
        assert stage.log.held_offset == 4

    staged(work, retention="delete_done", visibility_timeout_s=1_000)


@pytest.mark.usefixtures("short_doubt")
@pytest.mark.parametrize("passed_by", ["taking", "purging"])
def test_the_chunks_of_a_value_that_is_being_written_stay_over_failovers(passed_by: str) -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"a")
        await stage.put(b"chunk", is_chunk=True)
        if passed_by == "taking":
            assert await stage.ack(await stage.take()) == []
        else:
            await stage.ask(messages.PurgeQueue)
        await asyncio.sleep(1)
        assert (await stage.describe()).start_offset == 2
        for _ in range(2):
            await stage.lead()
            await asyncio.sleep(1)
            assert stage.log.held_offset == (1 if passed_by == "taking" else 0)
        await stage.put(manifest_of_chunks(5, 1, bytes(16), [1]), is_large=True)
        taken = await stage.take()
        await asyncio.sleep(100)
        await stage.lead()
        await asyncio.sleep(1)
        assert stage.log.held_offset == 1
        assert await stage.settle(taken, acks=[(2, 2, 1)]) == []
        await asyncio.sleep(1)
        assert stage.log.held_offset == 3

    staged(work, retention="delete_done", visibility_timeout_s=1_000)


@pytest.mark.usefixtures("short_doubt")
def test_the_chunks_of_a_record_that_was_moved_stay_for_a_week() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"a")
        await stage.put(b"chunk", is_chunk=True)
        manifest = manifest_of_chunks(5, 1, bytes(16), [1])
        await stage.put(manifest, is_large=True)
        taken = await stage.take()
        opened = stage.served._queues["q-id"].open
        assert opened is not None
        opened.hold_moved(manifest)
        opened.hold_moved(pinned(manifest, "u", "elsewhere", 0))
        assert await stage.ack(taken) == []
        await asyncio.sleep(100)
        await stage.lead()
        await asyncio.sleep(1)
        assert (await stage.describe()).start_offset == 3
        assert stage.log.held_offset == 1

    staged(work, retention="delete_done", visibility_timeout_s=1_000)


def test_a_clock_that_is_days_ahead_for_some_minutes_takes_no_chunks_of_a_dead_letter() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"a")
        await stage.put(b"chunk", is_chunk=True)
        manifest = manifest_of_chunks(5, 1, bytes(16), [1])
        await stage.put(manifest, is_large=True)
        taken = await stage.take()
        opened = stage.served._queues["q-id"].open
        assert opened is not None
        opened.hold_moved(manifest)
        assert await stage.ack(taken) == []
        stage.host.jump_clock(10 * DAY_MS)
        await asyncio.sleep(360)
        assert stage.log.held_offset == 1
        stage.host.jump_clock(-10 * DAY_MS)
        await asyncio.sleep(60)
        assert stage.log.held_offset == 1

    staged(work, retention="delete_done", visibility_timeout_s=1_000)


@pytest.mark.usefixtures("short_doubt")
def test_a_queue_that_is_altered_to_hold_waits_for_chunks_that_it_has_not_noted() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"a", b"b")
        assert await stage.ack(await stage.take()) == []
        stage.queues[:] = [stage.queue(retention="hold")]
        stage.changed()
        await asyncio.sleep(1)
        await stage.lead()
        await asyncio.sleep(50)
        assert stage.log.held_offset == 0
        await asyncio.sleep(20)
        assert stage.log.held_offset == 2

    staged(work)


@pytest.mark.usefixtures("short_doubt")
def test_a_queue_that_begins_at_the_end_waits_for_values_that_are_being_written() -> None:
    async def work(stage: QueueStage) -> None:
        stage.queues.clear()
        stage.changed()
        await stage.put(b"a")
        await stage.put(b"chunk", is_chunk=True)
        stage.queues.append(stage.queue("late", start="latest", retention="hold"))
        stage.changed()
        await asyncio.sleep(1)
        assert stage.log.held_offset == 0
        await asyncio.sleep(100)
        assert stage.log.held_offset == 2

    staged(work)


def test_purge_settles_all_that_nobody_has() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(*[b"%d" % number for number in range(20)])
        taken = await stage.take(2)
        answer = await stage.ask(messages.PurgeQueue)
        assert answer.purged == 18
        assert (await stage.take()).locks == []
        await stage.lead()
        assert (await stage.describe()).locked == 2
        assert await stage.ack(taken) == []
        described = await stage.describe()
        assert (described.start_offset, described.ready) == (20, 0)

    staged(work)


def test_while_the_keeper_is_away_the_figures_say_so() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"a", b"b")
        taken = await stage.take()
        stage.keeper.failure = NotLeaderError("the keeper is away")
        acking = asyncio.ensure_future(stage.settle(taken, acks=[(0, 0, 1)]))
        await asyncio.sleep(1)
        described = await stage.describe()
        assert described.trouble == "the keeper is away"
        assert described.start_offset == 0, "what is not kept may go back"
        stage.keeper.failure = None
        assert await acking == []
        described = await stage.describe()
        assert (described.trouble, described.start_offset) == (None, 1)

    staged(work)


def test_the_metrics_of_a_queue_tell_the_age_of_its_oldest_record_until_it_is_taken() -> None:
    async def work(stage: QueueStage) -> None:
        def figures() -> dict[str, float]:
            return {one.name: one.value for one in stage.served.measure()}

        await stage.put(b"a")
        await stage.describe()
        await asyncio.sleep(60)
        shown = figures()
        assert 50 < shown["rayq_queue_oldest_ready_seconds"] < 70
        assert (shown["rayq_queue_ready"], shown["rayq_queue_locked"]) == (1, 0)
        taken = await stage.take()
        await asyncio.sleep(10)
        shown = figures()
        assert (shown["rayq_queue_ready"], shown["rayq_queue_locked"]) == (0, 1)
        assert shown["rayq_queue_oldest_ready_seconds"] == 0
        assert await stage.ack(taken) == []
        assert figures()["rayq_queue_locked"] == 0

    staged(work)


def test_the_unsettled_records_are_listed_by_pages() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(*[b"%d" % number for number in range(5)])
        taken = await stage.take(2)
        await stage.settle(taken, nacks=[(0, 0, 1, 60_000)])
        answer = await stage.ask(messages.ListQueueRecords, 0, [], 3)
        assert [(one.offset, one.state, one.count) for one in answer.records] == [
            (0, "delayed", 1), (1, "locked", 1), (2, "ready", 0),
        ]
        assert answer.records[1].holder == shown_part("one")
        rest = await stage.ask(messages.ListQueueRecords, answer.next_offset, ["ready"], 10)
        assert [one.offset for one in rest.records] == [3, 4] and rest.next_offset is None

    staged(work)


def test_requests_that_make_no_sense_harm_nobody() -> None:
    async def work(stage: QueueStage) -> None:
        await stage.put(b"a")
        taken = await stage.take()
        for parts in (
            {"acks": [(0, -1, 1)]},
            {"acks": [(7, 3, 1), (-5, 2**62, 9)]},
            {"acks": [(1000, 2000, 1)]},
            {"nacks": [(0, 2**62, 9, -5)]},
            {"extends": [(-1, 2**62, 77, -(2**62))]},
            {"rejects": [(-1, 1, "x"), (2**62, 1, "x")]},
            {"releases": [(5, 1, 0)]},
            {"acks": [(0, 0, 1)] * 10_001},
        ):
            try:
                await stage.settle(taken, **parts)
            except RayqError:
                continue
        assert (await stage.describe()).locked == 1
        assert await stage.ack(taken) == []

    staged(work)
