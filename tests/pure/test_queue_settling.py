"""How long locks and back-offs last, and what those hear who settle late: exact times and texts."""

from __future__ import annotations

from typing import Any

import pytest

from rayq.core.queues.moves import FailedRecord, Move
from rayq.core.queues.state import DELAY_MS_MAX, QueueState
from rayq.messages.secret_names import shown_part
from tests.pure.test_queue_state import again, opened, opened_at

BACK_OFF: dict[str, Any] = {"max_deliveries": 1000, "backoff_s": 2, "backoff_max_s": 60}


def left_ms(state: QueueState, now_s: float) -> dict[int, int | None]:
    """For how long each locked record is still locked."""
    page, _ = state.unsettled(0, ["locked"], 1000, now_ms=0, now_s=now_s)
    return {one.offset: one.due_ms for one in page}


def due_at_ms(state: QueueState, now_s: float = 0) -> dict[int, int | None]:
    page, _ = state.unsettled(0, ["delayed"], 1000, now_ms=0, now_s=now_s)
    return {one.offset: one.due_ms for one in page}


# --- locks ---------------------------------------------------------------------------------------


def test_a_lock_ends_at_its_tick_and_not_before() -> None:
    state, keeper = opened(ready=600, visibility_timeout_s=10)
    assert state.next_expiry_s is None
    state.take("a", 300, now_s=100)
    state.take("b", 1, now_s=100.5)
    assert state.next_expiry_s == 110.1
    assert left_ms(state, 109) == {**dict.fromkeys(range(300), 1100), 300: 1600}
    keeper.write(state.changes())
    assert state.expire(110) == 0 and not state.is_changed
    assert state.expire(110.1) == 300 and state.is_changed
    assert left_ms(state, 109) == {300: 1600}
    assert state.next_expiry_s == 110.6
    state = again(state, keeper)
    assert state.counts().locked == 1 and state.counts().ready == 599
    assert state.expire(10) == 0 and state.expire(10.1) == 1, "a full timeout under a new leader"
    assert state.next_expiry_s is None and state.expire(1000) == 0


def test_a_lock_is_extended_from_now_on_and_never_shortened() -> None:
    state, _keeper = opened(ready=300, visibility_timeout_s=10, max_handling_s=25)
    state.take("a", 2, now_s=100)
    state.take("a", 2, now_s=101)
    assert left_ms(state, 101) == {0: 9100, 1: 9100, 2: 10_100, 3: 10_100}
    assert not state.extend("a", 0, [(1, 2, 1, 9_500)], now_s=101)
    assert left_ms(state, 101) == {0: 9100, 1: 9500, 2: 10_100, 3: 10_100}
    assert not state.extend("a", 0, [(0, 3, 1, 1000)], now_s=101)
    assert left_ms(state, 101) == {0: 9100, 1: 9500, 2: 10_100, 3: 10_100}
    assert not state.extend("a", 0, [(0, 0, 1, 20_000), (2, 2, 1, 20_000)], now_s=104)
    assert left_ms(state, 104) == {0: 20_000, 1: 6500, 2: 20_000, 3: 7100}
    # No longer than may be, from when each was taken.
    assert not state.extend("a", 0, [(0, 3, 1, 3_600_000)], now_s=104)
    assert left_ms(state, 104) == {0: 21_000, 1: 21_000, 2: 22_000, 3: 22_000}
    assert state.expire(124.9) == 0
    assert state.expire(125) == 2 and state.expire(125.9) == 0 and state.expire(126) == 2


def test_who_extends_what_is_not_theirs_changes_nothing() -> None:
    state, keeper = opened(ready=5, visibility_timeout_s=10, max_handling_s=25)
    state.take("a", 3, now_s=100)
    state.release("a", 0, [(0, 0, 1)])
    state.ack("a", 0, [(1, 1, 1)])
    keeper.write(state.changes())
    lost = [(2, 2, "consumer a has it"), (0, 0, "no consumer has it"), (3, 4, "no consumer has it")]
    for epoch, count in ((1, 1), (0, 2), (0, 0)):
        told = state.extend("a", epoch, [(0, 4, count, 20_000)], now_s=105)
        assert sorted(told) == sorted(lost)
        assert left_ms(state, 105) == {2: 5100}
    told = state.extend("a", 0, [(0, 6, 1, 20_000)], now_s=105)
    assert sorted(told) == sorted([*lost[1:], (5, 6, "no consumer has it")])
    assert left_ms(state, 105) == {2: 20_000}
    assert not state.is_changed, "how long a lock lasts is not kept"


@pytest.mark.parametrize("call", ["ack", "release", "extend", "nack", "reject"])
@pytest.mark.parametrize("epoch, count", [(4, 1), (6, 1), (5, 2), (5, 0)])
def test_who_names_another_delivery_loses_it_and_nothing_changes(
    call: str, epoch: int, count: int
) -> None:
    state, keeper = opened(ready=4)
    state = again(state, keeper)
    state.void_locks(5)
    state.take("a", 3, now_s=0)
    state.release("a", 5, [(1, 1, 1)])
    state.reject("a", 5, [(2, 1, "bad")], now_ms=0, now_s=0)
    keeper.write(state.changes())
    before = state.unsettled(0, [], 9, now_ms=0, now_s=0), state.counts(), state.moves.to_move(9)
    if call == "reject":
        lost = state.reject("b", epoch, [(one, count, "") for one in range(4)], now_ms=0, now_s=0)
    elif call == "nack":
        lost = state.nack("b", epoch, [(0, 3, count, 1000)], now_ms=0, now_s=0)
    elif call == "extend":
        lost = state.extend("b", epoch, [(0, 3, count, 20_000)], now_s=9)
    else:
        lost = getattr(state, call)("b", epoch, [(0, 3, count)])
    told = {one: who for first, last, who in lost for one in range(first, last + 1)}
    assert told == {
        0: "consumer a has it", 1: "no consumer has it",
        2: "it is on its way to the dead letters", 3: "no consumer has it",
    }
    after = state.unsettled(0, [], 9, now_ms=0, now_s=0), state.counts(), state.moves.to_move(9)
    assert after == before
    assert not state.is_changed and not state.changes()


@pytest.mark.parametrize("call", ["ack", "release", "extend", "nack", "reject"])
def test_a_range_of_nothing_is_not_lost(call: str) -> None:
    state, _keeper = opened(ready=3)
    state.take("a", 3, now_s=0)
    if call == "reject":
        assert not state.reject("a", 0, [], now_ms=0, now_s=0)
        assert state.reject("a", 0, [(2, 2, ""), (3, 1, "")], now_ms=0, now_s=0) == [
            (2, 2, "consumer a has it"), (3, 3, "no consumer has it"),
        ]
        return
    more, times = {
        "ack": ((), {}), "release": ((), {}),
        "extend": ((1000,), {"now_s": 0}), "nack": ((0,), {"now_ms": 0, "now_s": 0}),
    }[call]
    settle = getattr(state, call)
    assert settle("a", 0, [], **times) == []
    assert settle("a", 0, [(9, 5, 1, *more)], **times) == []
    assert settle("a", 0, [(2, 3, 2, *more)], **times) == [
        (2, 2, "consumer a has it"), (3, 3, "no consumer has it"),
    ]
    assert state.counts().locked == 3


@pytest.mark.parametrize("call", ["ack", "release", "extend", "nack", "reject"])
def test_who_names_a_delivery_of_another_holder_loses_it_and_nothing_changes(call: str) -> None:
    """Offsets, counts and the state epoch are shown to everybody. The holder's name is not."""
    state, keeper = opened(ready=4)
    state.take("owner-1", 3, now_s=0)
    keeper.write(state.changes())
    before = state.unsettled(0, [], 9, now_ms=0, now_s=0), state.counts(), state.moves.to_move(9)
    more, times = {
        "nack": ([1000], {"now_ms": 0, "now_s": 9}),
        "extend": ([20_000], {"now_s": 9}),
        "reject": ([], {"now_ms": 0, "now_s": 9}),
    }.get(call, ([], {}))
    locks = [(0, 2, 1, *more)] if call != "reject" else [(one, 1, "bad") for one in range(3)]
    for stranger in ("stranger", "own", "", "owner-11"):
        lost = getattr(state, call)(stranger, 0, locks, **times)
        assert {one for first, last, _ in lost for one in range(first, last + 1)} == {0, 1, 2}
        assert {who for _, _, who in lost} == {"consumer own has it"}
        after = state.unsettled(0, [], 9, now_ms=0, now_s=0), state.counts(), state.moves.to_move(9)
        assert after == before
    assert getattr(state, call)("owner-1", 0, locks, **times) == []


# --- records that were given back ----------------------------------------------------------------


@pytest.mark.parametrize("is_late", [False, True])
def test_the_back_off_is_that_of_the_failures_however_late_they_are_told(is_late: bool) -> None:
    state, keeper = opened(ready=300, **BACK_OFF)
    waits: dict[int, dict[int, int]] = {}
    for count, expected_ms in enumerate((2000, 4000, 8000, 16_000, 32_000, 60_000), 1):
        assert state.take("a", 300, now_s=0) == [(0, 299, count)]
        keeper.write(state.changes())
        if is_late:
            state.free_holders({"a"})
            keeper.write(state.changes())
        lost = state.nack("a", 0, [(0, 299, count, None)], now_ms=0, now_s=0)
        assert not lost and state.is_changed
        waits[count] = {offset: due_ms or 0 for offset, due_ms in due_at_ms(state).items()}
        assert len(waits[count]) == 300
        low, high = expected_ms * 0.8, min(expected_ms * 1.2, 60_000)
        assert all(low <= wait <= high for wait in waits[count].values())
        assert min(waits[count].values()) < low * 1.02 and max(waits[count].values()) > high * 0.98
        assert len(set(waits[count].values())) > 100, "what failed at once does not come at once"
        state = again(state, keeper)
        assert due_at_ms(state) == waits[count]
        assert state.due(now_ms=0, now_s=60) == 300
    assert [round(waits[n][7] / waits[n][8], 6) for n in (1, 2)] != [1, 1]


def test_when_a_failure_is_told_makes_no_other_back_off() -> None:
    prompt, late = opened(ready=600, **BACK_OFF)[0], opened(ready=600, **BACK_OFF)[0]
    for state in (prompt, late):
        state.take("a", 600, now_s=0)
        if state is late:
            state.free_holders({"a"})
        state.nack("a", 0, [(0, 599, 1, None)], now_ms=0, now_s=0)
    assert due_at_ms(prompt) == due_at_ms(late) and len(due_at_ms(late)) == 600


@pytest.mark.parametrize("is_late", [False, True])
def test_a_delivery_that_was_no_failure_does_not_lengthen_the_back_off(is_late: bool) -> None:
    state, _keeper = opened(ready=2, **BACK_OFF)
    for count in (1, 2, 3):
        assert state.take("a", 2, now_s=0) == [(0, 1, count)]
        state.release("a", 0, [(0, 1, count)])
    state.take("a", 2, now_s=0)
    if is_late:
        state.free_holders({"a"})
    state.nack("a", 0, [(0, 1, 4, None)], now_ms=0, now_s=0)
    waits = due_at_ms(state)
    assert [*waits] == [0, 1] and all(1600 <= (wait or 0) <= 2400 for wait in waits.values())


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    "delay_ms, waits_ms",
    [(0, None), (1, 1), (5000, 5000), (DELAY_MS_MAX, DELAY_MS_MAX), (10**15, DELAY_MS_MAX)],
)
def test_a_record_that_is_given_back_waits_for_as_long_as_was_asked(
    delay_ms: int, waits_ms: int | None, is_late: bool
) -> None:
    state, keeper = opened(ready=4, **BACK_OFF)
    state.take("a", 3, now_s=0)
    keeper.write(state.changes())
    if is_late:
        state.free_holders({"a"})
        keeper.write(state.changes())
    assert not state.nack("a", 0, [(1, 1, 1, delay_ms)], now_ms=7000, now_s=0)
    assert state.is_changed == (not is_late or waits_ms is not None)
    counts = state.counts()
    assert (counts.ready, counts.locked) == (
        (4 if is_late else 2) - (waits_ms is not None), 0 if is_late else 2,
    )
    keeper.write(state.changes())
    for one in (state, opened_at(state, keeper, now_ms=7000)):
        assert one.due_in_ms(now_ms=7000, now_s=0) == waits_ms
    assert due_at_ms(state) == ({} if waits_ms is None else {1: waits_ms})


def test_a_delay_that_was_given_up_does_not_end_the_next_one() -> None:
    state, _keeper = opened(ready=600, **BACK_OFF)
    state.take("a", 600, now_s=0)
    state.ack("a", 0, [(0, 299, 1), (301, 599, 1)])
    state.nack("a", 0, [(300, 300, 1, 5000)], now_ms=0, now_s=0)
    state.moves.claim([300])
    state.moves.begin(Move(4, "done", "t", 0, 7, 1, 0, 0, 0, (FailedRecord(300, 1, "", ""),)))
    state.moves.release(4)
    assert state.take("a", 1, now_s=1) == [(300, 300, 2)]
    assert state.due(now_ms=6000, now_s=6) == 0 and state.counts().locked == 1
    state.nack("a", 0, [(300, 300, 2, 60_000)], now_ms=1000, now_s=1)
    # Twice the same delay, since it was claimed and came back, ends once.
    state.moves.claim([300])
    state.moves.unclaim([300])
    assert state.due(now_ms=60_000, now_s=60) == 0
    assert state.due(now_ms=0, now_s=61) == 1 and state.counts()[:4] == (1, 0, 0, 0)
    # What was settled meanwhile is not due any more, nor is its block.
    state.take("a", 1, now_s=61)
    state.nack("a", 0, [(300, 300, 3, 5000)], now_ms=0, now_s=61)
    state.purge(600)
    assert state.start_offset == 600 and state.due_in_ms(now_ms=0, now_s=61) is None
    assert state.due(now_ms=10**6, now_s=10**6) == 0 and sum(state.counts()) == 0


def test_what_failed_for_good_says_how_often_it_was_given_out() -> None:
    state, _keeper = opened(ready=4, max_deliveries=2)
    for count in (1, 2):
        state.take("a", 4, now_s=0)
        state.nack("a", 0, [(0, 1, count, 0)], now_ms=0, now_s=0)
        assert state.free_holders({"a", "b"}) == 2
    back = "It was released after delivery 2, the last one."
    silent = "Delivery 2, the last one, was not settled in time."
    assert state.moves.to_move(9) == [
        FailedRecord(0, 2, "deliveries", back), FailedRecord(1, 2, "deliveries", back),
        FailedRecord(2, 2, "deliveries", silent), FailedRecord(3, 2, "deliveries", silent),
    ]
    assert state.moves.to_move(1) == [FailedRecord(0, 2, "deliveries", back)] and state.dead == 0


@pytest.mark.parametrize("ends", ["expire", "free_holders"])
def test_each_record_fails_for_good_by_its_own_count(ends: str) -> None:
    state, _keeper = opened(ready=300, max_deliveries=2)
    # Others of its block were given out as often, were settled, or were given back unhandled.
    for first, last, times in ((0, 9, 3), (10, 19, 2), (30, 39, 1)):
        for count in range(1, times):
            state.take("a", last - first + 1, now_s=0, from_offset=first)
            state.release("a", 0, [(first, last, count)])
    for first, last, count in state.take("b", 25, now_s=0):
        state.ack("b", 0, [(first, min(last, 21), count)])
    assert state.take("c", 300, now_s=0, from_offset=25) == [(25, 299, 1)]
    state.nack("c", 0, [(25, 29, 1, 0), (260, 260, 1, 0)], now_ms=0, now_s=0)
    assert state.take("c", 300, now_s=0) == [(25, 29, 2), (260, 260, 2)]
    if ends == "expire":
        assert state.expire(1000) == 278
    else:
        assert state.free_holders({"b", "c"}) == 278
    assert [one.offset for one in state.moves.to_move(300)] == [*range(25, 30), 260]
    counts = state.counts()
    assert (counts.ready, counts.locked, counts.moving) == (272, 0, 6)


@pytest.mark.parametrize("ends", ["nack", "release", "expire", "free_holders"])
def test_later_locks_of_a_key_that_go_with_an_earlier_one_are_free_under_the_next_leader(
    ends: str,
) -> None:
    state, keeper = opened(ready=700, ordered_by_key=True, max_deliveries=9, backoff_s=0)
    assert state.take("a", 1, now_s=0) == [(0, 0, 1)]
    state.ack("a", 0, [(0, 0, 1)])
    assert state.take("a", 600, now_s=100) == [(1, 600, 1)]
    keeper.write(state.changes())
    if ends == "nack":
        assert not state.nack("a", 0, [(1, 1, 1, None)], now_ms=0, now_s=100)
    elif ends == "release":
        assert not state.release("a", 0, [(1, 1, 1)])
    elif ends == "expire":
        assert state.expire(1000) == 600
    else:
        assert state.free_holders({"a"}) == 600
    is_first_excused = ends == "release"
    for one in (state, again(state, keeper)):
        assert one.counts().locked == 0
        assert one.excused([(0, 699, 1)]) == [
            (1 if is_first_excused else 2, 255, 1), (256, 511, 1), (512, 600, 1),
        ]
    assert state.counts()[:3] == (1, 698, 0)
    assert state.take("b", 700, now_s=100) == [(1, 600, 2), (601, 699, 1)]


def test_an_epoch_of_the_log_begins_once() -> None:
    state, keeper = opened(ready=5)
    for epoch, first in ((3, 0), (3, 2), (2, 3), (5, 4), (4, 5), (5, 5)):
        state.learn_epoch(epoch, first)
    assert state.epochs == [(3, 0), (5, 4)]
    assert again(state, keeper).epochs == [(3, 0), (5, 4)]


def crowded() -> QueueState:
    """Every other record of a block is locked, each by another holder at another time."""
    state, _ = opened(ready=300, max_deliveries=1000)
    for number in range(0, 256, 2):
        assert state.take(f"c{number}", 1, now_s=number, from_offset=number)
    return state


@pytest.mark.parametrize("call", ["ack", "nack", "release", "extend", "reject"])
def test_what_is_lost_is_told_once_however_often_it_is_named(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of many ranges over one block told of all its records, and of each of its holders."""
    state, told = crowded(), 0
    tell_lost = QueueState._tell_lost

    def counted(self: QueueState, *arguments: Any) -> None:
        nonlocal told
        told += 1
        tell_lost(self, *arguments)

    monkeypatch.setattr(QueueState, "_tell_lost", counted)
    ranges = [(0, 255, 9)] * 40
    match call:
        case "nack":
            lost = state.nack("x", 0, [(*one, None) for one in ranges], now_ms=0, now_s=0)
        case "extend":
            lost = state.extend("x", 0, [(*one, 1000) for one in ranges], now_s=0)
        case "reject":
            lost = state.reject(
                "x", 0, [(one, 9, "") for one in [*range(256)] * 40], now_ms=0, now_s=0
            )
        case _:
            lost = getattr(state, call)("x", 0, ranges)
    assert told == 1
    assert sorted(one for first, last, _ in lost for one in range(first, last + 1)) == [*range(256)]
    whose = {first: who for first, last, who in lost if first == last}
    assert whose[6] == f"consumer {shown_part('c6')} has it" and whose[7] == "no consumer has it"


def test_a_page_of_a_crowded_block_says_of_each_record_what_is_true_of_it() -> None:
    state = crowded()
    page, behind = state.unsettled(3, ["locked"], 20, now_ms=0, now_s=0)
    assert [one.offset for one in page] == [*range(4, 44, 2)] and behind == 44
    assert [one.holder for one in page] == [f"c{one}" for one in range(4, 44, 2)]
    ends = [one.due_ms or 0 for one in page]
    assert ends == sorted(set(ends)) and all(one.count == 1 for one in page)
    assert state.extend("c6", 0, [(6, 6, 1, 500_000)], now_s=0) == []
    left = left_ms(state, 0)
    assert (left[6] or 0) > 400_000 > (left[8] or 0)


def test_what_is_freed_before_it_was_begun_counts_for_nothing() -> None:
    """A record that ends each of its consumers takes no other along that they had locked ahead."""
    state, _ = opened(ready=4, visibility_timeout_s=10, max_deliveries=3)
    for delivery in (1, 2, 3):
        holder = f"consumer {delivery}"
        locks = state.take(holder, 4, now_s=0, tells_begins=True)
        assert locks == [(0, 3, delivery)]
        assert state.unbegun(locks) == ([] if delivery == 1 else [(0, 3)])
        if delivery > 1:
            assert not state.note_begun(holder, 0, [(0, 0, delivery)])
        state.free_holders({holder})
    assert [one.offset for one in state.moves.to_move(10)] == [0]
    # They have had one delivery that counts, the first. Whoever begins them fails twice more.
    for delivery in (4, 5):
        locks = state.take("d", 4, now_s=0, tells_begins=True)
        assert not state.note_begun("d", 0, locks)
        assert not state.nack("d", 0, [(1, 3, delivery, 0)], now_ms=0, now_s=0)
    assert [one.offset for one in state.moves.to_move(10)] == [0, 1, 2, 3]


def test_where_the_first_delivery_is_the_last_it_counts_once_it_is_begun() -> None:
    state, _ = opened(ready=2, visibility_timeout_s=10, max_deliveries=1)
    locks = state.take("a", 2, now_s=0, tells_begins=True)
    assert state.unbegun(locks) == [(0, 1)]
    assert not state.note_begun("a", 0, [(0, 0, 1)])
    state.free_holders({"a"})
    assert [one.offset for one in state.moves.to_move(10)] == [0]
    assert state.take("b", 2, now_s=0) == [(1, 1, 2)]


def test_what_is_settled_or_lost_is_not_begun() -> None:
    state, _ = opened(ready=400, visibility_timeout_s=10)
    assert state.take("a", 400, now_s=0) == [(0, 399, 1)]
    assert not state.ack("a", 0, [(0, 2, 1), (300, 301, 1)])
    assert not state.release("a", 0, [(5, 5, 1)])
    lost = state.note_begun("a", 0, [(0, 5, 1), (299, 302, 1), (390, 405, 1)])
    assert [(first, last) for first, last, _ in lost] == [(0, 2), (5, 5), (300, 301), (400, 405)]
    assert [one[:2] for one in state.note_begun("a", 7, [(8, 9, 1)])] == [(8, 9)]


def test_where_dead_letters_stay_no_record_ever_leaves_but_by_an_acknowledgement() -> None:
    state, _ = opened(
        ready=3, visibility_timeout_s=10, dead_letters="stay", max_deliveries=1,
        backoff_s=1, backoff_max_s=60,
    )
    assert state.take("a", 3, now_s=0) == [(0, 2, 1)]
    assert not state.reject("a", 0, [(0, 1, "bad")], now_ms=0, now_s=0)
    assert not state.reject("a", 0, [(0, 1, "bad")], now_ms=0, now_s=0), "its answer was lost"
    assert not state.nack("a", 0, [(1, 1, 1, None)], now_ms=0, now_s=0)
    state.free_holders({"a"})
    assert not state.moves.to_move(10) and state.start_offset == 0
    assert state.take("b", 3, now_s=0) == [(2, 2, 2)]
    state.expire(11)
    state.due(now_ms=59_000, now_s=59)
    assert state.take("b", 3, now_s=59) == [(1, 1, 2), (2, 2, 3)]
    state.due(now_ms=60_000, now_s=60)
    assert state.take("b", 3, now_s=60) == [(0, 0, 2)]


def test_the_lock_that_was_taken_first_is_known_with_its_holder() -> None:
    state, _ = opened(ready=600, visibility_timeout_s=10)
    assert state.oldest_lock(0) is None
    state.take("a", 1, now_s=1)
    state.take("b", 400, now_s=2)
    state.extend("a", 0, [(0, 0, 1, 60_000)], now_s=9)
    assert state.oldest_lock(9.05) == (8050, "a")
    assert not state.ack("a", 0, [(0, 0, 1)])
    assert state.oldest_lock(9.05) == (7050, "b")
