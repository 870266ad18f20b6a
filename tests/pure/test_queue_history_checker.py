"""The checker of queues finds each kind of fault, and nothing in a sound history."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rayq.records import Record, RecordMetadata
from rayq.testing.checker import Recorder, check
from rayq.testing.checker import queues as kinds

A, B, C = "a", "b", "c"
Change = Callable[[Recorder], object]


def put(recorder: Recorder, offset: int, value: bytes, key: bytes | None = b"k") -> None:
    number = recorder.sending("p", "t", key, value)
    recorder.delivered("p", number, RecordMetadata("t", 0, offset, 0))


def take(
    recorder: Recorder,
    consumer: str,
    *locks: tuple[int, int],
    at_s: float,
    queue: str = "q",
    state_epoch: int = 1,
) -> None:
    found = [(offset, count, b"v%d" % offset, b"k") for offset, count in locks]
    recorder.took(
        queue, consumer, 0, found, asked_s=at_s, at_s=at_s + 0.1, state_epoch=state_epoch
    )


def settle(
    recorder: Recorder,
    consumer: str,
    *locks: tuple[int, int],
    at_s: float,
    what: str = "ack",
    queue: str = "q",
    lost: tuple[int, ...] = (),
) -> None:
    number = recorder.settling(
        queue, consumer, 0, what, locks, at_s=at_s, state_epoch=1, seconds=2.0  # type: ignore[arg-type]
    )
    recorder.settled(consumer, number, at_s=at_s + 0.1, lost=lost)


def dead(recorder: Recorder, value: bytes, offset: int = 0) -> None:
    recorder.found([record("q.dead", offset, value)])


def record(topic: str, offset: int, value: bytes) -> Record:
    return Record(topic, 0, offset, 0, None, value, [])


def sound(*, ordered: bool = False) -> Recorder:
    """Five records: 0 to 3 are settled, the last is dead."""
    recorder = Recorder()
    recorder.queue_opened(
        "q", "t", dead_letters="q.dead", timeout_s=2.0, ordered_by_key=ordered, is_own=True
    )
    for offset in range(5):
        put(recorder, offset, b"v%d" % offset)
    take(recorder, A, (0, 1), (1, 1), at_s=1)
    settle(recorder, A, (0, 1), at_s=2, what="extend")
    settle(recorder, A, (0, 1), (1, 1), at_s=3)
    take(recorder, A, (2, 1), at_s=4)
    take(recorder, B, (2, 2), at_s=6.5)
    settle(recorder, A, (2, 1), at_s=6.7, lost=(2,))
    settle(recorder, B, (2, 2), at_s=7)
    take(recorder, A, (3, 1), at_s=8)
    settle(recorder, A, (3, 1), at_s=9)
    take(recorder, A, (4, 1), at_s=10)
    settle(recorder, A, (4, 1), at_s=10.2, what="reject")
    dead(recorder, b"v4")
    recorder.found([record("t", offset, b"v%d" % offset) for offset in range(5)])
    return recorder


def kinds_of(recorder: Recorder) -> set[str]:
    return {fault.kind for fault in check(recorder.events).faults}


@pytest.mark.parametrize("ordered", [False, True])
def test_a_sound_history_has_no_fault(ordered: bool) -> None:
    verdict = check(sound(ordered=ordered).events)
    assert verdict.is_clean, str(verdict)
    assert verdict.acknowledged == 5


def _unseen(one: Recorder) -> None:
    put(one, 5, b"v5")
    one.found([record("t", 5, b"v5")])
    headers = [("rayq.reason", b"deliveries")]
    one.found([Record("q.dead", 0, 1, 0, None, b"v5", headers)])


def test_what_was_begun_may_become_a_dead_letter() -> None:
    recorder = sound()
    _unseen(recorder)
    recorder.begun("q", [b"v5"])
    assert kinds_of(recorder) == set()


def _not_acknowledged(one: Recorder) -> None:
    put(one, 5, b"v5")
    one.found([record("t", 5, b"v5")])


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (_not_acknowledged, kinds.LEFT_OUT),
        (_unseen, kinds.UNSEEN),
        (lambda one: put(one, 5, b"v5"), kinds.LEFT_OUT),
        (lambda one: take(one, B, (1, 2), at_s=5), kinds.AGAIN),
        (lambda one: take(one, B, (1, 1), at_s=5), kinds.TWICE),
        (lambda one: take(one, B, (1, 1), at_s=5, state_epoch=2), kinds.AGAIN),
        (lambda one: dead(one, b"v3", 1), kinds.DEAD_TWICE),
        (lambda one: dead(one, b"v4", 1), kinds.DEAD_TWICE),
        (
            lambda one: one.found([record("t", 5, b"v3")]),
            kinds.REDRIVEN_TWICE,
        ),
        (lambda one: take(one, B, (7, 1), at_s=5), kinds.FOREIGN),
    ],
)
def test_each_kind_of_fault_is_found(change: Change, kind: str) -> None:
    recorder = sound()
    change(recorder)
    assert kind in kinds_of(recorder)


def opened(*, ordered: bool = False) -> Recorder:
    recorder = Recorder()
    recorder.queue_opened(
        "q", "t", dead_letters="q.dead", timeout_s=2.0, ordered_by_key=ordered, is_own=True
    )
    for offset in range(2):
        put(recorder, offset, b"v%d" % offset)
    recorder.found([record("t", offset, b"v%d" % offset) for offset in range(2)])
    return recorder


def test_a_lock_lasts_as_long_as_it_was_promised() -> None:
    recorder = opened()
    take(recorder, A, (0, 1), at_s=1)
    settle(recorder, A, (0, 1), at_s=2, what="extend")
    take(recorder, B, (0, 2), at_s=3.5)
    assert kinds.STOLEN in kinds_of(recorder)


def test_who_holds_a_lock_may_settle_it() -> None:
    recorder = opened()
    take(recorder, A, (0, 1), (1, 1), at_s=1)
    settle(recorder, A, (0, 1), at_s=3.5, lost=(0,))
    assert kinds.LOST_EARLY not in kinds_of(recorder)
    settle(recorder, A, (1, 1), at_s=2, lost=(1,), what="nack")
    assert kinds.LOST_EARLY not in kinds_of(recorder)  # Its first answer may have been lost.
    settle(recorder, A, (1, 1), at_s=2, lost=(1,))
    assert kinds.LOST_EARLY in kinds_of(recorder)


@pytest.mark.parametrize(
    "between",
    [
        lambda one: one.killed(A),
        lambda one: one.disturbed(),
        lambda one: one.disturbed(A),
        lambda one: settle(one, A, (0, 1), at_s=1.2, what="nack"),
    ],
)
def test_a_lock_may_end_with_its_holder(between: Change) -> None:
    recorder = opened()
    take(recorder, A, (0, 1), at_s=1)
    between(recorder)
    take(recorder, B, (0, 2), at_s=2)
    assert kinds.STOLEN not in kinds_of(recorder)


@pytest.mark.parametrize(("disturbed_s", "is_sure"), [(0.0, True), (0.9, True), (1.1, False)])
def test_a_lock_may_end_that_was_asked_for_before_a_connection_broke(
    disturbed_s: float, is_sure: bool
) -> None:
    recorder = opened()
    recorder.disturbed(A, at_s=disturbed_s)
    take(recorder, A, (0, 1), at_s=1)
    settle(recorder, A, (0, 1), at_s=2, lost=(0,))
    assert (kinds.LOST_EARLY in kinds_of(recorder)) == is_sure


def test_a_delayed_record_is_not_given_out_early() -> None:
    recorder = opened()
    recorder.delayed(b"v0", 1.6)
    take(recorder, A, (0, 1), at_s=1)
    assert kinds.EARLY in kinds_of(recorder)


def test_the_delay_of_a_nack_is_kept() -> None:
    recorder = opened()
    take(recorder, A, (0, 1), at_s=1)
    settle(recorder, A, (0, 1), at_s=1.2, what="nack")
    take(recorder, A, (0, 2), at_s=2.5)
    assert kinds.EARLY in kinds_of(recorder)


@pytest.mark.parametrize("is_over", [True, False])
def test_a_delay_is_not_sure_by_a_clock_that_began_wrong(is_over: bool) -> None:
    recorder = opened()
    recorder.clock_in_doubt()
    recorder.clock_in_doubt(is_over=True)
    if not is_over:
        recorder.clock_in_doubt()
    take(recorder, A, (0, 1), at_s=1)
    settle(recorder, A, (0, 1), at_s=1.2, what="nack")
    take(recorder, A, (0, 2), at_s=2.5)
    assert (kinds.EARLY in kinds_of(recorder)) is is_over


def test_a_later_record_of_a_key_waits_for_the_first_one() -> None:
    recorder = opened(ordered=True)
    take(recorder, A, (0, 1), at_s=1)
    take(recorder, B, (1, 1), at_s=2)
    assert kinds.OUT_OF_ORDER in kinds_of(recorder)


def test_who_gave_the_first_record_of_a_key_back_may_not_settle_a_later_one() -> None:
    recorder = opened(ordered=True)
    take(recorder, A, (0, 1), (1, 1), at_s=1)
    settle(recorder, A, (0, 1), at_s=1.2, what="nack")
    assert kinds.OUT_OF_ORDER not in kinds_of(recorder)
    settle(recorder, A, (1, 1), at_s=1.5)
    assert kinds.OUT_OF_ORDER in kinds_of(recorder)


def test_a_doubtful_acknowledgement_is_settled_or_not() -> None:
    for again in (False, True):
        recorder = opened()
        take(recorder, A, (0, 1), (1, 1), at_s=1)
        settle(recorder, A, (1, 1), at_s=1.2)
        number = recorder.settling("q", A, 0, "ack", [(0, 1)], at_s=1.5, state_epoch=1)
        recorder.not_settled(A, number, TimeoutError("no answer"), at_s=5.0)
        if again:
            take(recorder, B, (0, 2), at_s=5)
            settle(recorder, B, (0, 2), at_s=5.5)
        assert kinds_of(recorder) == set()


def test_who_acknowledges_too_late_is_told_so_where_the_record_is_done() -> None:
    """The answer to a take that began before may come later than that."""
    recorder = opened()
    take(recorder, A, (0, 1), (1, 1), at_s=1)
    settle(recorder, A, (1, 1), at_s=1.1)
    settle(recorder, A, (0, 1), at_s=5)
    recorder.took("q", B, 0, [(0, 2, b"v0", b"k")], asked_s=4.9, at_s=5.5, state_epoch=1)
    assert kinds_of(recorder) == set()
    recorder.took("q", B, 0, [(0, 3, b"v0", b"k")], asked_s=5.2, at_s=5.5, state_epoch=1)
    assert kinds.AGAIN in kinds_of(recorder)


# --- what operators and unclean elections take away -----------------------------------------------


def loose() -> Recorder:
    """Two records, of which one was acknowledged; the other one is purged."""
    recorder = Recorder()
    recorder.queue_opened(
        "q", "t", dead_letters="q.dead", timeout_s=2.0, is_own=True, is_loose=True
    )
    for offset in range(2):
        put(recorder, offset, b"v%d" % offset)
    take(recorder, A, (0, 1), at_s=1)
    settle(recorder, A, (0, 1), at_s=1.5)
    recorder.purged("q", 0, 2, at_s=3.0)
    recorder.found([record("t", offset, b"v%d" % offset) for offset in range(2)])
    return recorder


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda one: None, set()),
        # It is cut off, and another one stands there.
        (lambda one: (put(one, 2, b"v2"), put(one, 2, b"v3")), set()),
        (lambda one: one.found([record("t", 2, b"v2")]), {kinds.LEFT_OUT}),
        (
            lambda one: (one.queue_closed("q"), one.found([record("t", 2, b"v2")])),
            set(),
        ),
        (lambda one: take(one, B, (1, 2), at_s=4), set()),  # It was locked when all was purged.
        (lambda one: take(one, B, (1, 1), at_s=4), {kinds.PURGED}),
        (lambda one: take(one, B, (0, 2), at_s=4), {kinds.AGAIN}),
        (lambda one: take(one, B, (0, 2), at_s=4, state_epoch=2), set()),
        (
            lambda one: (one.cut("t", 0, 1), take(one, B, (0, 2), at_s=4, state_epoch=2)),
            {kinds.AGAIN},
        ),
    ],
)
def test_from_a_loose_queue_something_may_be_taken_away(
    change: Change, expected: set[str]
) -> None:
    recorder = loose()
    change(recorder)
    assert kinds_of(recorder) == expected


def test_a_record_that_left_the_topic_of_a_queue_that_holds_it_was_settled() -> None:
    for is_handled in (True, False):
        recorder = Recorder()
        recorder.queue_opened(
            "q", "t", dead_letters=None, timeout_s=2.0, is_own=True, is_loose=True, holds=True
        )
        put(recorder, 0, b"v0")
        if is_handled:
            take(recorder, A, (0, 1), at_s=1)
            settle(recorder, A, (0, 1), at_s=1.5)
        assert kinds_of(recorder) == (set() if is_handled else {kinds.LEFT_OUT})


def test_what_a_keeper_has_lost_may_come_again_and_is_never_left_out() -> None:
    for is_handled in (True, False):
        recorder = opened()
        take(recorder, A, (0, 1), (1, 1), at_s=1)
        settle(recorder, A, (0, 1), at_s=1.2)
        recorder.keeper_in_doubt()
        take(recorder, B, (0, 1), at_s=2)
        settle(recorder, B, (0, 1), at_s=2.5)
        if is_handled:
            take(recorder, B, (1, 1), at_s=3)
            settle(recorder, B, (1, 1), at_s=3.5)
        assert kinds_of(recorder) == (set() if is_handled else {kinds.LEFT_OUT})
