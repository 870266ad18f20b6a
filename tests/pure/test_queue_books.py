"""A queue's books at the edges of blocks, moves and the start: what is told, kept and forgotten."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from rayq.core.large.holds import LargeHolds
from rayq.core.queues import offset_states
from rayq.core.queues.block import ALL, Block
from rayq.core.queues.moves import FailedRecord, Move, Outcome
from rayq.core.queues.queue_states import KeptRecord
from rayq.core.queues.records import block_record, failed_record, head_record, move_record
from rayq.core.queues.state import Counts, QueueState
from rayq.core.queues.unsettled import Unsettled
from rayq.errors import CorruptBatchError
from tests.pure.test_queue_state import Keeper, again, opened, opened_at

LEARNED = 1301
EDGES = (
    *(0, 5, 6, 11, 12, 20, 21, 255, 256, 257, 400, 511, 512, 513, 530, 531, 600, 701, 703, 768),
    *(900, 1024, 1279, 1280, 1281, 1290, 1301),
)
BEYOND = (1302, 1536, 5000)


def move_of(
    move_id: int, records: Iterable[FailedRecord], outcome: Outcome = "done"
) -> Move:
    return Move(move_id, outcome, "T", 0, 7, move_id, 50, 3, 99, tuple(records))


def busy() -> tuple[QueueState, Keeper]:
    """A queue with offsets in every state, in six blocks: the second one is done, the fifth one a
    gap, and the last one goes on."""
    state, keeper = opened(ready=900, visibility_timeout_s=10)
    state.learn_gap(1279)
    state.learn(1300)
    state.learn_due(1290, 50_000)
    assert state.take("a", 300, now_s=0) == [(0, 299, 1)]
    assert state.take("b", 300, now_s=0) == [(300, 599, 1)]
    assert not state.ack("a", 0, [(0, 4, 1), (256, 299, 1)])
    assert not state.ack("b", 0, [(300, 511, 1)])
    assert not state.nack("a", 0, [(10, 12, 1, 5_000)], now_ms=0, now_s=0)
    assert not state.nack("b", 0, [(520, 520, 1, 9_000)], now_ms=0, now_s=0)
    assert not state.reject("a", 0, [(20, 1, "bad"), (21, 1, "worse")], now_ms=0, now_s=0)
    state.moves.begin(move_of(1, [FailedRecord(20, 1, "rejected", "bad")], "dead"))
    assert not state.reject("b", 0, [(530, 1, "bad")], now_ms=0, now_s=0)
    assert state.moves.claim([11, 700, 701, 702]) == ([11, 700, 701, 702], [], [])
    state.moves.begin(move_of(2, [FailedRecord(702, 0, "", "")]))
    return state, keeper


def listed(state: QueueState) -> list[Unsettled]:
    page, following = state.unsettled(0, [], 10_000, now_ms=0, now_s=0)
    assert following is None
    return page


def check(state: QueueState, expected: list[Unsettled], start: int, learned: int) -> None:
    """That the state has these unsettled records and no other ones."""
    assert listed(state) == expected
    assert (state.start_offset, state.learned) == (start, learned)
    of = [one.state for one in expected]
    counts = {name: of.count(name) for name in ("ready", "locked", "delayed", "moving")}
    done = learned - start - len(expected)
    assert state.counts() == Counts(**counts, blocked=0, done=done)
    assert (state.ready, state.blocked) == (counts["ready"], 0)
    ready = [one.offset for one in expected if one.state == "ready"]
    assert state.first_unsettled_ready() == state.first_ready() == (ready[0] if ready else None)


def unclaimed(page: list[Unsettled]) -> list[Unsettled]:
    """What they are under the next leader: a claim is not kept."""
    due = {11: Unsettled(11, "delayed", 1, None, 5_000)}
    due |= {one: Unsettled(one, "ready", 0, None, None) for one in (700, 701)}
    return [due.get(one.offset, one) for one in page]


def drain(state: QueueState, keeper: Keeper) -> None:
    """Settles all there is. Nothing is left then, also of what was kept."""
    for move in state.moves.all():
        state.moves.end(move.move_id)
    state.moves.discard([one.offset for one in state.moves.to_move(10_000)])
    state.moves.unclaim([one.offset for one in listed(state) if one.state == "moving"])
    state.free_holders({"a", "b"})
    state.due(now_ms=60_000, now_s=60)
    locks = state.take("c", 10_000, now_s=60)
    assert not state.ack("c", state.state_epoch, locks)
    check(state, [], state.learned, state.learned)
    assert state.next_expiry_s is None and state.due_in_ms(now_ms=0, now_s=0) is None
    keeper.write(state.changes())
    number = state.learned // 256
    blocks = {b"block" + number.to_bytes(8)} if state.learned % 256 else set()
    assert keeper.records.keys() - blocks == {b"head"}
    check(opened_at(state, keeper), [], state.learned, state.learned)


def numbers(keeper: Keeper, kind: bytes) -> set[int]:
    """Of which blocks, failed records or moves something is kept."""
    return {int.from_bytes(key[-8:]) for key in keeper.records if key[:-8] == kind}


def check_kept(state: QueueState, keeper: Keeper) -> None:
    """That nothing is kept of what is over."""
    keeper.write(state.changes())
    assert numbers(keeper, b"dying") == {one.offset for one in state.moves.to_move(9)}
    assert numbers(keeper, b"move") == {one.move_id for one in state.moves.all()}
    undone = {one.offset // 256 for one in listed(state)}
    blocks = numbers(keeper, b"block")
    assert blocks <= undone | {state.start_offset // 256, state.learned // 256}


def test_every_state_is_listed_counted_and_taken_over() -> None:
    state, keeper = busy()
    page = listed(state)
    runs = [
        *[(one, "locked") for one in range(5, 10)],
        *[(one, "delayed") for one in (10, 12)],
        *[(one, "locked") for one in (*range(13, 20), *range(22, 256))],
        *[(one, "locked") for one in range(512, 600) if one not in (520, 530)],
        (520, "delayed"),
        *[(one, "ready") for one in (*range(600, 700), *range(703, 900))],
        *[(one, "ready") for one in range(1280, 1301) if one != 1290],
        (1290, "delayed"),
        *[(one, "moving") for one in (11, 20, 21, 530, 700, 701, 702)],
    ]
    assert [(one.offset, one.state) for one in page] == sorted(runs)
    assert [one.count for one in page] == [int(one.offset < 600) for one in page]
    holders = {one.offset: one.holder for one in page if one.state == "locked"}
    assert holders == {one: "a" if one < 300 else "b" for one in holders}
    due_ms = {one.offset: one.due_ms for one in page if one.due_ms is not None}
    assert {one: due_ms.pop(one) for one in (10, 12, 520, 1290)} == {
        10: 5_000, 12: 5_000, 520: 9_000, 1290: 50_000
    }
    assert due_ms == dict.fromkeys(holders, 10_100), "a lock runs for its timeout and a tick"
    check(state, page, 5, LEARNED)
    assert [one.offset for one in state.moves.to_move(9)] == [21, 530]
    assert [one.offset for one in state.moves.to_move(1)] == [21] and state.moves.to_move(0) == []
    later = again(state, keeper)
    check(later, unclaimed(page), 5, LEARNED)
    assert later.moves.to_move(9) == state.moves.to_move(9) and later.moves.all() == state.moves.all()
    for one in (state, later):
        drain(one, keeper)


@pytest.mark.parametrize("states", [(), *[(one,) for one in ("ready", "locked", "delayed", "moving")],
                                    ("ready", "moving"), ("other",)])
def test_a_listing_has_the_states_that_were_asked_for_page_by_page(states: tuple[str, ...]) -> None:
    state, _keeper = busy()
    page = [one for one in listed(state) if not states or one.state in states]
    for first in (0, 6, 11, 255, 257, 400, 512, 703, 1280, 1301, 5000):
        expected = [one for one in page if one.offset >= first]
        for many in (1, 150, len(expected), len(expected) + 1):
            found, following = state.unsettled(first, states, many, now_ms=0, now_s=0)
            assert found == expected[:many]
            assert following == next((one.offset for one in expected[many:]), None)


@pytest.mark.parametrize("edge", [*EDGES, *BEYOND])
def test_retention_takes_what_is_below_and_nothing_else(edge: int) -> None:
    state, keeper = busy()
    keeper.write(state.changes())
    page, failed, moves = listed(state), state.moves.to_move(9), state.moves.all()
    left = [one for one in page if one.offset >= edge]
    gone = len(page) - len(left)
    assert state.advance_start(edge) == state.expired == gone
    # It may pass what is settled behind the edge.
    learned = max(LEARNED, edge)
    start = min((one.offset for one in left), default=learned)
    check(state, left, start, learned)
    assert state.is_changed == (edge > 5) and state.dead == 0
    assert state.moves.to_move(9) == [one for one in failed if one.offset >= edge]
    assert state.moves.all() == moves, "their batches may be in the target already"
    assert state.advance_start(edge) == 0 and state.expired == gone
    check_kept(state, keeper)
    later = again(state, keeper)
    check(later, unclaimed(left), start, learned)
    assert later.moves.to_move(9) == state.moves.to_move(9) and later.moves.all() == moves
    for one in (later, state):
        one.learn(learned)
        drain(one, keeper)


@pytest.mark.parametrize("learned", [1, 255, 256, 257, 511, 512])
def test_only_what_was_learned_counts_as_lost_by_retention(learned: int) -> None:
    for edge in (1, 255, 256, 257, 511, 512, 513, 1024):
        state, keeper = opened(ready=learned)
        assert state.advance_start(edge) == state.expired == min(learned, edge)
        left = [Unsettled(one, "ready", 0, None, None) for one in range(edge, learned)]
        check(state, left, edge, max(learned, edge))
        check(again(state, keeper), left, edge, max(learned, edge))
        state.learn(1100)
        drain(state, keeper)


def test_far_ranges_are_settled_in_the_blocks_where_they_begin_and_end() -> None:
    far = 2**40
    for first, last in ((0, far), (1, far), (1, far + 1), (2, far - 1), (0, far + 300)):
        state, keeper = opened(ready=2)
        state.learn_gap(far - 1)
        state.learn(far + 600)
        state.take("a", 9999, now_s=0)
        page = listed(state)
        assert not state.ack("a", 0, [(first, last, 1)])
        left = [one for one in page if not first <= one.offset <= last]
        start = left[0].offset
        check(state, left, start, far + 601)
        check(again(state, keeper), left, start, far + 601)
        drain(state, keeper)


@pytest.mark.parametrize("edge", [*EDGES, *BEYOND])
def test_a_purge_settles_what_nobody_has_below_and_nothing_else(edge: int) -> None:
    state, keeper = busy()
    keeper.write(state.changes())
    page = listed(state)
    left = [
        one for one in page if one.offset >= edge or one.state in ("locked", "moving")
    ]
    learned = max(LEARNED, edge)
    assert state.purge(edge) == len(page) - len(left) + learned - LEARNED
    check(state, left, 5, learned)
    assert state.is_changed and (state.expired, state.dead) == (0, 0)
    check_kept(state, keeper)
    later = again(state, keeper)
    check(later, unclaimed(left), 5, learned)
    for one in (later, state):
        one.learn(learned)
        drain(one, keeper)


@pytest.mark.parametrize("edge", EDGES)
def test_what_a_log_lost_is_learned_again_from_there_on(edge: int) -> None:
    state, keeper = busy()
    state = again(state, keeper)
    page, failed = unclaimed(listed(state)), state.moves.to_move(9)
    state.cut(edge, 4)
    left = [
        Unsettled(one.offset, "ready", one.count, None, None) if one.state == "locked" else one
        for one in page
        if one.offset < edge
    ]
    start = min(edge, 5)
    check(state, left, start, edge)
    assert state.is_changed and state.state_epoch == 4 and (state.expired, state.dead) == (0, 0)
    assert state.moves.to_move(9) == [one for one in failed if one.offset < edge]
    moved = {one.move_id: [of.offset for of in one.records] for one in state.moves.all()}
    assert moved == {move_id: [at] for move_id, at in ((1, 20), (2, 702)) if at < edge}
    check_kept(state, keeper)
    later = again(state, keeper)
    check(later, left, start, edge)
    assert later.moves.to_move(9) == state.moves.to_move(9) and later.moves.all() == state.moves.all()
    for one in (later, state):
        kept = Keeper()
        kept.write(keeper.records.items())
        one.learn(1400)
        learned = [Unsettled(number, "ready", 0, None, None) for number in range(edge, 1401)]
        check(one, [*left, *learned], start, 1401)
        check(again(one, kept), [*left, *learned], start, 1401)
        drain(one, kept)


@pytest.mark.parametrize("first", [0, 1, 255, 256, 300])
@pytest.mark.parametrize("is_open", [False, True])
def test_a_gap_is_done_wherever_it_begins_and_ends(first: int, is_open: bool) -> None:
    """`is_open`: a record before it is unsettled."""
    for last in (first - 1, first, 254, 255, 256, 511, 512, 1023, 1024):
        if last < first - 1:
            continue
        state, keeper = opened(ready=first)
        state.take("a", first, now_s=0)
        locked = [one for one in listed(state) if is_open and one.offset == 0]
        state.ack("a", 0, [(len(locked), first - 1, 1)])
        state.learn_gap(last)
        start = 0 if locked else last + 1
        for one in (state, again(state, keeper)):
            check(one, locked, start, last + 1)
            one.learn_gap(last - 1)
            check(one, locked, start, last + 1)
            one.learn(last + 2)
            assert one.take("b", 9, now_s=0) == [(last + 1, last + 2, 1)]
            assert not one.ack("a", 0, [(0, first - 1, 1)]) and not one.ack(
                "b", 0, [(last + 1, last + 2, 1)]
            )
            drain(one, keeper)


# --- what is kept ------------------------------------------------------------------------------


def keys_of(records: list[KeptRecord]) -> list[str]:
    """Kind and number of each, with a minus for one that ends."""
    return [
        ("" if value is not None else "-")
        + (key if key == b"head" else key[:-8] + b" %d" % int.from_bytes(key[-8:])).decode()
        for key, value in records
    ]


def test_only_what_changed_is_kept_the_head_first() -> None:
    state = QueueState.begin(opened(ready=1)[0].config, 0, state_epoch=3)
    assert state.is_changed
    assert state.changes() == [head_record(3, 0, 0, [], [], None)]
    assert not state.is_changed and state.changes() == []
    state.learn_epoch(2, 0)
    state.learn(599)
    assert not state.is_changed, "the next leader learns it again"
    assert state.changes() == [head_record(3, 0, 600, [(2, 0)], [], None)]
    state.take("a", 300, now_s=0)
    assert state.is_changed
    assert keys_of(state.changes()) == ["block 0", "block 1"] and not state.is_changed
    state.reject("a", 3, [(299, 1, "bad"), (280, 1, "bad")], now_ms=0, now_s=0)
    assert keys_of(state.changes()) == ["dying 280", "dying 299", "block 1"]
    state.moves.claim([590, 591])
    assert not state.is_changed and state.changes() == []
    state.moves.begin(move_of(9, state.moves.to_move(1), "dead"))
    state.moves.begin(move_of(8, [FailedRecord(590, 0, "", "")]))
    assert state.is_changed
    changes = state.changes()
    assert keys_of(changes) == ["-dying 280", "move 8", "move 9", "block 2"]
    assert changes[1] == move_record(8, move_of(8, [FailedRecord(590, 0, "", "")]))
    state.moves.release(9)
    assert keys_of(state.changes()) == ["dying 280", "-move 9"]
    state.moves.release(8)
    assert keys_of(state.changes()) == ["-move 8", "block 2"]
    state.moves.discard([280, 299, 300, 591])
    assert keys_of(state.changes()) == ["-dying 280", "-dying 299", "block 1", "block 2"]
    # A block that is done is in the head; one that the start has passed nowhere.
    state.take("a", 300, now_s=0)
    state.ack("a", 3, [(256, 511, 1)])
    changes = state.changes()
    assert keys_of(changes) == ["head", "-block 1", "block 2"]
    assert changes[0] == head_record(3, 0, 600, [(2, 0)], [(1, 1)], None)
    state.ack("a", 3, [(0, 255, 1)])
    changes = state.changes()
    assert keys_of(changes) == ["head", "-block 0"]
    assert changes[0] == head_record(3, 512, 600, [(2, 0)], [], None)
    assert state.changes() == []
    # What was settled before it was ever kept needs no tombstone.
    state.learn(1023)
    state.purge(1024)
    assert keys_of(state.changes()) == ["head", "block 2"]


def test_what_holds_the_log_start_is_kept_in_the_head() -> None:
    state, keeper = opened(ready=3)
    assert again(state, keeper).holds is None
    state.holds = LargeHolds()
    later = again(state, keeper)
    assert later.holds is not None and later.holds.kept() == []
    state.holds.large(2, first_chunk=1)
    assert state.changes() == [head_record(0, 0, 3, [], [], [(1, 3, 0)])]
    keeper.write([head_record(0, 0, 3, [], [], [(1, 3, 0)])])
    later = opened_at(state, keeper)
    assert later.holds is not None and later.holds.kept() == [(1, 3, 0)]
    assert later.changes() == [], "the head is as it was kept"


def test_the_epochs_of_records_above_the_start_are_known() -> None:
    state, keeper = opened(ready=1)
    state.learn_epoch(3, 0)
    for epoch, first in ((5, 10), (6, 20), (8, 30)):
        state.learn(first - 1)
        state.learn_epoch(epoch, first)
    state.learn(39)
    state.take("a", 40, now_s=0)
    for last, expected in (
        (8, [(3, 0), (5, 10), (6, 20), (8, 30)]),
        (9, [(5, 10), (6, 20), (8, 30)]),
        (28, [(6, 20), (8, 30)]),
        (29, [(8, 30)]),
        (39, [(8, 30)]),
    ):
        state.ack("a", 0, [(0, last, 1)])
        assert state.epochs == again(state, keeper).epochs == expected
    # Also where it begins beyond all that was learned.
    state, _keeper = opened(ready=1)
    state.learn_epoch(3, 0)
    state.learn_epoch(5, 1)
    state.advance_start(2000)
    assert state.epochs == [(5, 1)]
    for edge, expected in ((11, [(3, 0), (5, 10)]), (10, [(3, 0)]), (1, [(3, 0)]), (0, [])):
        state, keeper = opened(ready=1)
        state.learn_epoch(3, 0)
        state.learn(9)
        state.learn_epoch(5, 10)
        state.learn(11)
        state = again(state, keeper)
        state.cut(edge, 1)
        assert state.epochs == again(state, keeper).epochs == expected


@pytest.mark.parametrize(
    ("learned", "done_blocks", "is_read"),
    [
        (1024, [], True),
        (1025, [], False),
        (1280, [], False),
        (1280, [(1, 1)], True),
        (1281, [(1, 1)], False),
        (2048, [(1, 4)], True),
        (2049, [(1, 4)], False),
    ],
)
@pytest.mark.parametrize("start", [0, 255, 512 * 256])
def test_a_head_that_would_cost_much_memory_is_damaged(
    monkeypatch: pytest.MonkeyPatch,
    start: int,
    learned: int,
    done_blocks: list[tuple[int, int]],
    is_read: bool,
) -> None:
    monkeypatch.setattr(offset_states, "_BLOCKS_READ_MAX", 4)
    state, base = opened(ready=1)[0], start // 256
    done_blocks = [(first + base, last + base) for first, last in done_blocks]
    head = head_record(0, start, learned + base * 256, [], done_blocks, None)
    keeper = Keeper()
    keeper.write([head])
    if is_read:
        later = opened_at(state, keeper)
        assert later.counts().ready == sum(later.counts()) - later.counts().done
        assert later.counts().done == 256 * sum(last + 1 - first for first, last in done_blocks)
    else:
        with pytest.raises(CorruptBatchError, match="more than 4 blocks"):
            opened_at(state, keeper)


def test_what_an_interrupted_write_left_outside_of_the_head_is_passed_over_and_ended() -> None:
    state, keeper = opened(ready=1)
    state.take("a", 1, now_s=0)
    [(_key, locked)] = [one for one in state.changes() if one[0] != b"head"]
    failed = FailedRecord(0, 1, "rejected", "bad")
    # The locked record is the first of its block: the start lies behind it.
    records = [head_record(0, 300, 1300, [], [(2, 2)], None)]
    records += [(block_record(number, None)[0], locked) for number in (0, 1, 2, 6, 900)]
    records += [failed_record(at, failed) for at in (299, 1300, 5000)]
    records += [failed_record(at, msgspec.structs.replace(failed, offset=at)) for at in (300, 1299)]
    keeper.write(records)
    later = opened_at(state, keeper)
    assert [one.offset for one in later.moves.to_move(9)] == [300, 1299]
    assert later.counts() == Counts(1000 - 256 - 2, 0, 0, 0, moving=2, done=256)
    changes = later.changes()
    assert keys_of(changes) == [
        "-dying 299", "-dying 1300", "-dying 5000", "-block 0", "-block 2", "-block 6", "-block 900"
    ]
    assert later.changes() == []
    # The start passes what is done, and nothing beyond what was learned is locked.
    ended = Block()
    ended.done, ended.counts = 0b1111, {1: ALL}
    ended.lock(1 << 5 | 1 << 200, "a", (1, 1))
    kept = [head_record(0, 2, 200, [], [], None), block_record(0, ended)]
    keeper = Keeper()
    keeper.write(kept)
    later = opened_at(state, keeper)
    locked_one = Unsettled(5, "locked", 2, "a", 30_100)
    ready = [Unsettled(one, "ready", 1, None, None) for one in (4, *range(6, 200))]
    check(later, sorted([locked_one, *ready], key=lambda one: one.offset), 4, 200)
    ended = Block()
    ended.done = ALL
    keeper.write([head_record(0, 0, 300, [], [], None), block_record(0, ended)])
    later = opened_at(state, keeper)
    check(later, [Unsettled(one, "ready", 0, None, None) for one in range(256, 300)], 256, 300)
    assert keys_of(later.changes()) == ["head", "-block 0"]


def test_a_keeper_tells_all_in_the_order_of_the_keys() -> None:
    state, keeper = busy()
    check_kept(state, keeper)
    later = QueueState.replay(
        state.config, sorted(keeper.records.items()), now_ms=0, now_s=0
    )
    assert later is not None and later.changes() == [], "all of it is known to the keeper"
    check(later, unclaimed(listed(state)), 5, LEARNED)


def test_the_oldest_record_that_nobody_has_may_wait_for_its_key() -> None:
    state, _keeper = opened(ready=3, ordered_by_key=True)
    state.take("a", 1, now_s=0)
    assert (state.ready, state.blocked) == (0, 2)
    assert (state.first_unsettled_ready(), state.first_ready()) == (1, None)
    state.ack("a", 0, [(0, 0, 1)])
    assert (state.ready, state.blocked) == (1, 1)
    assert (state.first_unsettled_ready(), state.first_ready()) == (1, 1)
    state.take("a", 2, now_s=0)
    assert state.first_unsettled_ready() is None


def test_a_block_is_listed_once_however_often_its_records_come_back() -> None:
    state, _keeper = opened(ready=600)
    for count in range(1, 30):
        locks = state.take("a", 600, now_s=0)
        assert not state.release("a", 0, locks)
        assert not state.release("a", 0, [(0, 599, count)])
    # A list that grows with each of them would never end.
    assert state.offsets._listed == [0, 1, 2]


# --- moves -------------------------------------------------------------------------------------


def test_who_cannot_be_claimed_hears_why() -> None:
    state, _keeper = busy()
    offsets = [4, 5, 10, 11, 20, 21, 300, 520, 530, 600, 700, 702, 1279, 1280, 1290, 1300, 1301]
    moving = "it is being moved already"
    claimed, settled, refused = state.moves.claim(offsets)
    assert claimed == [10, 520, 600, 1280, 1290, 1300]
    assert settled == [4, 300, 1279]
    assert refused == [
        (5, "consumer a has it"),
        *[(one, moving) for one in (11, 20, 21, 530, 700, 702)],
        (1301, "the queue has not read it yet"),
    ]
    assert state.moves.claim([513]) == ([], [], [(513, "consumer b has it")])
    assert state.moves.claim([3000]) == ([], [], [(3000, "the queue has not read it yet")])


def test_claimed_records_come_back_as_what_they_were() -> None:
    state, keeper = busy()
    keeper.write(state.changes())
    page = unclaimed(listed(state))
    # Neither who was not claimed nor who is not there comes back.
    state.moves.unclaim([0, 5, 11, 20, 21, 300, 600, 700, 701, 702, 5000])
    check(state, page, 5, LEARNED)
    assert not state.is_changed and state.changes() == []
    assert state.due(now_ms=0, now_s=5) == 3, "also at its time"
    drain(state, keeper)


def test_discarded_records_are_done_and_only_failed_ones_count_as_dead() -> None:
    state, keeper = busy()
    page = listed(state)
    for offsets, is_changed, dead in (
        ([0, 5, 10, 20, 600, 702, 5000], False, 0),
        ([11, 700], True, 0),
        ([21, 10], True, 1),
        ([11, 21, 700], False, 1),
    ):
        keeper.write(state.changes())
        state.moves.discard(offsets)
        assert (state.is_changed, state.dead) == (is_changed, dead)
    left = [one for one in page if one.offset not in (11, 21, 700)]
    check(state, left, 5, LEARNED)
    assert [one.offset for one in state.moves.to_move(9)] == [530]
    # A delay that it had makes nothing of it any more, nor of its successor.
    assert state.due(now_ms=0, now_s=6) == 2
    later = again(state, keeper)
    assert {one.offset for one in listed(later)} == {one.offset for one in left}
    drain(later, keeper)


@pytest.mark.parametrize("outcome", ["dead", "done"])
@pytest.mark.parametrize("ends", ["end", "release", "doubt"])
def test_a_move_ends_with_its_records_done_or_back(outcome: Outcome, ends: str) -> None:
    state, keeper = busy()
    failed = state.moves.to_move(9)
    records = failed if outcome == "dead" else [FailedRecord(one, 1, "", "") for one in (11, 700)]
    offsets = {record.offset for record in records}
    page = listed(state)
    move = move_of(5, records, outcome)
    state.moves.begin(move)
    check(state, page, 5, LEARNED)
    assert state.moves.all()[-1] == move
    assert state.moves.to_move(9) == ([] if outcome == "dead" else failed)
    state.moves.discard(offsets)
    check(state, page, 5, LEARNED)
    state.moves.unclaim(offsets)
    check(state, page, 5, LEARNED)
    state = again(state, keeper)
    page = unclaimed(page) if outcome == "dead" else [
        one if one.offset in (11, 700) else after
        for one, after in zip(page, unclaimed(page), strict=True)
    ]
    check(state, page, 5, LEARNED)
    assert state.moves.all()[-1] == move and not state.is_changed
    if ends == "end":
        state.moves.end(5)
        expected = [one for one in page if one.offset not in offsets]
        assert state.dead == (2 if outcome == "dead" else 0)
    else:
        state.moves.release(5, is_in_doubt=ends == "doubt")
        freed = offsets if outcome == "done" else set()
        expected = [
            Unsettled(one.offset, "ready", one.count, None, None) if one.offset in freed else one
            for one in page
        ]
        assert state.dead == 0
    assert state.is_changed
    waiting = failed
    if outcome == "dead" and ends != "release":
        waiting = [msgspec.structs.replace(one, is_in_doubt=True) for one in failed]
        waiting = waiting if ends == "doubt" else []
    for one in (state, again(state, keeper)):
        check(one, expected, 5, LEARNED)
        assert one.moves.to_move(9) == waiting
        assert [of.move_id for of in one.moves.all()] == [1, 2]
    drain(state, keeper)


def test_a_move_of_records_that_left_meanwhile_takes_nothing_back() -> None:
    for outcome in ("dead", "done"):
        for ends in ("end", "release"):
            state, keeper = opened(ready=600)
            if outcome == "dead":
                state.take("a", 600, now_s=0)
                state.reject("a", 0, [(one, 1, "bad") for one in (3, 300)], now_ms=0, now_s=0)
                records = state.moves.to_move(9)
            else:
                state.moves.claim([3, 300])
                records = [FailedRecord(one, 0, "", "") for one in (3, 300)]
            state.moves.begin(move_of(1, records, outcome))  # type: ignore[arg-type]
            state.advance_start(301)
            page = listed(state)
            (state.moves.end if ends == "end" else state.moves.release)(1)
            check(state, page, 301, 600)
            assert state.moves.to_move(9) == [] and state.moves.all() == []
            drain(state, keeper)


@pytest.mark.parametrize("outcome", ["dead", "done"])
@pytest.mark.parametrize("ends", ["end", "release"])
def test_a_move_takes_nothing_that_was_neither_claimed_nor_failed(
    outcome: Outcome, ends: str
) -> None:
    state, keeper = busy()
    page, failed = listed(state), state.moves.to_move(9)
    state.moves.begin(move_of(5, [FailedRecord(one, 1, "", "") for one in (4, 5, 10, 600)], outcome))
    check(state, page, 5, LEARNED)
    (state.moves.end if ends == "end" else state.moves.release)(5)
    check(state, page, 5, LEARNED)
    assert state.moves.to_move(9) == failed
    drain(state, keeper)
    # Nor under the next leader.
    state, keeper = busy()
    state.moves.begin(move_of(5, [FailedRecord(one, 1, "", "") for one in (4, 5, 10)], outcome))
    state = again(state, keeper)
    check(state, unclaimed(page), 5, LEARNED)
    (state.moves.end if ends == "end" else state.moves.release)(5)
    check(state, unclaimed(page), 5, LEARNED)
    assert state.moves.to_move(9) == failed


def test_a_cut_leaves_a_move_those_records_that_are_what_they_were() -> None:
    for edge, left in ((3, None), (4, [3]), (300, [3]), (301, [3, 300]), (302, [3, 300, 301])):
        state, keeper = opened(ready=600)
        state.moves.claim([3, 300, 301])
        records = [FailedRecord(one, 0, "", "") for one in (3, 300, 301)]
        state.moves.begin(move_of(1, records))
        state = again(state, keeper)
        state.cut(edge, 1)
        kept = [one for one in records if one.offset in (left or ())]
        expected = [] if left is None else [move_of(1, kept)]
        assert state.moves.all() == expected
        assert again(state, keeper).moves.all() == expected
