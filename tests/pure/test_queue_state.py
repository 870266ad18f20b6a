"""What a queue decides about its records, against a model that does it offset by offset."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from rayq.config import QueueConfig
from rayq.core.queues import move_state
from rayq.core.queues.lock_times import LockTimes
from rayq.core.queues.moves import FailedRecord, Move
from rayq.core.queues.queue_states import WRITE_BYTES_MAX, KeptRecord, pack
from rayq.core.queues.state import LOCKS_MAX, QueueState
from rayq.errors import CorruptBatchError, UnsupportedFormatError
from tests.pure.queue_model import QueueModel

HOLDERS = ("aa", "bb", "cc")
KEYS = (b"x", b"y", b"z", None)
NAMES = {"free": "ready", "claimed": "moving"}


class Keeper:
    """Has what was kept."""

    def __init__(self) -> None:
        self.records: dict[bytes, bytes] = {}

    def write(self, records: Iterable[KeptRecord]) -> None:
        for key, value in records:
            if value is None:
                self.records.pop(key, None)
            else:
                self.records[key] = value


class Pair:
    """The state and the model of one queue, which get the same to do."""

    def __init__(self, chosen: random.Random) -> None:
        self.chosen = chosen
        self.config = QueueConfig(
            visibility_timeout_s=10,
            max_handling_s=chosen.choice([10, 25]),
            max_deliveries=chosen.choice([1, 2, 4]),
            ordered_by_key=chosen.random() < 0.6,
            dead_letters=chosen.choice(["keep", "keep", "discard"]),
        )
        first = chosen.choice([0, 200, 250, 512])
        self.state = QueueState.begin(self.config, first, state_epoch=0)
        self.model = QueueModel(self.config, first, first)
        self.keeper = Keeper()
        self.now_s = 1000.0
        self.now_ms = 5_000_000
        self.state.learn_epoch(3, first)
        self.epochs = [(3, first)]
        self.moves = 0
        self.claimed: list[int] = []

    def run(self, steps: int, *, is_kept: bool) -> None:
        """`is_kept`: after each step."""
        doing = [
            (self.learn, 8),
            (self.take, 14),
            (self.ack, 14),
            (self.nack, 7),
            (self.reject, 3),
            (self.release, 3),
            (self.begin, 3),
            (self.extend, 3),
            (self.time, 5),
            (self.free_holder, 2),
            (self.move, 12),
            (self.end_claim, 8),
            (self.end_move, 6),
            (self.keep, 6),
            (self.reopen, 3),
            (self.leave, 2),
        ]
        decided_by = {self.begin, self.take, self.ack, self.nack, self.reject, self.release, self.free_holder}
        actions, weights = zip(*doing, strict=True)
        for action in self.chosen.choices(actions, weights, k=steps):
            before = self.model.states() if action in decided_by else None
            action()
            if before is not None and self.model.states() != before:
                assert self.state.is_changed
            self.compare()
            if is_kept:
                self.compare_kept()

    # --- what is done to both ---

    def learn(self) -> None:
        chosen, first = self.chosen, self.model.learned
        many = chosen.choices([0, 2, 5, 20, 60, 300], [2, 4, 4, 4, 2, 1])[0]
        last = first + many - chosen.choice([0, 1])
        if chosen.random() < 0.3:
            self.state.learn_gap(last)
            self.model.learn_gap(last)
            return
        self.state.learn_epoch(3, first)  # It is known already, mostly.
        self.epochs = self.epochs or [(3, first)]
        keys = [chosen.choice(KEYS) for _ in range(first, last + 1)]
        if not self.config.ordered_by_key:
            keys = [None for _ in keys]
        self.state.learn(last, keys if self.config.ordered_by_key else None)
        self.model.learn(last, keys)
        for offset in range(first, last + 1):
            if chosen.random() < 0.02:
                due_ms = self.now_ms + chosen.randint(0, 30_000)
                self.state.learn_due(offset, due_ms)
                self.model.delay(offset, due_ms)

    def take(self) -> None:
        chosen = self.chosen
        holder, count = chosen.choice(HOLDERS), chosen.choice([1, 2, 7, 40, 700])
        low, high = 0, self.model.learned
        if chosen.random() < 0.3:
            low = chosen.randint(self.model.start, high)
            high = chosen.randint(low, high)
        tells_begins = chosen.random() < 0.5
        given = self.state.take(
            holder,
            count,
            now_s=self.now_s,
            from_offset=low,
            below_offset=high,
            tells_begins=tells_begins,
        )
        assert given == sorted(given)
        expected = self.model.take(
            holder, count, low, high, self.now_s, tells_begins=tells_begins
        )
        unbegun = [
            one for first, last in self.state.unbegun(given) for one in range(first, last + 1)
        ]
        assert unbegun == [one for one, _ in expected if self.model.records[one].is_unbegun]
        assert [(one, n) for first, last, n in given for one in range(first, last + 1)] == expected
        told = self.state.excused(given)
        excused = {one: n for first, last, n in told for one in range(first, last + 1)}
        counts = {one: self.model.records[one].excused for one, _count in expected}
        assert excused == {one: n for one, n in counts.items() if n}

    def _lock(self) -> tuple[str, int, int, int, int]:
        """`(holder, state epoch, first, last, count)`: of locks mostly."""
        chosen, model = self.chosen, self.model
        locked = [one for one, record in model.unsettled() if record.state == "locked"]
        epoch = model.state_epoch - (chosen.random() < 0.05)
        if not locked or chosen.random() < 0.1:
            first = chosen.randint(max(0, model.start - 10), model.learned + 3)
            return HOLDERS[0], epoch, first, first + chosen.choice([0, 1, 5, 400]), chosen.randint(1, 3)
        first = chosen.choice(locked)
        record = model.records[first]
        last = first + chosen.choice([0, 0, 0, 1, 3, 30, 500])
        count = record.count + (chosen.random() < 0.1)
        holder = chosen.choice(HOLDERS) if chosen.random() < 0.1 else record.holder or ""
        return holder, epoch, first, last, count

    def ack(self) -> None:
        holder, epoch, first, last, count = self._lock()
        lost = self.state.ack(holder, epoch, [(first, last, count)])
        settled = {one: self.model.ack(holder, epoch, one, count) for one in range(first, last + 1)}
        self._compare_lost(lost, settled)

    def nack(self) -> None:
        holder, epoch, first, last, count = self._lock()
        delay_ms = self.chosen.choice([0, 0, 5_000])
        lost = self.state.nack(
            holder, epoch, [(first, last, count, delay_ms)], now_ms=self.now_ms, now_s=self.now_s
        )
        settled = {
            one: self.model.nack(holder, epoch, one, count, delay_ms, self.now_ms, self.now_s)
            for one in range(first, last + 1)
        }
        self._compare_lost(lost, settled)

    def release(self) -> None:
        holder, epoch, first, last, count = self._lock()
        lost = self.state.release(holder, epoch, [(first, last, count)])
        settled = {one: self.model.release(holder, epoch, one, count) for one in range(first, last + 1)}
        self._compare_lost(lost, settled)

    def reject(self) -> None:
        holder, epoch, first, _last, count = self._lock()
        lost = self.state.reject(
            holder, epoch, [(first, count, "why")], now_ms=self.now_ms, now_s=self.now_s
        )
        self._compare_lost(lost, {first: self.model.reject(holder, epoch, first, count)})

    def begin(self) -> None:
        holder, epoch, first, last, count = self._lock()
        lost = self.state.note_begun(holder, epoch, [(first, last, count)])
        told = [one for begin, end, _who in lost for one in range(begin, end + 1)]
        begun = {one: self.model.begin(holder, epoch, one, count) for one in range(first, last + 1)}
        assert sorted(told) == [one for one, is_begun in begun.items() if not is_begun]

    def extend(self) -> None:
        holder, epoch, first, last, count = self._lock()
        timeout_s = self.chosen.choice([5, 10, 60])
        lost = self.state.extend(
            holder, epoch, [(first, last, count, timeout_s * 1000)], now_s=self.now_s
        )
        settled = {
            one: self.model.extend(holder, epoch, one, count, timeout_s, self.now_s)
            for one in range(first, last + 1)
        }
        self._compare_lost(lost, settled)

    def _compare_lost(self, lost: list[tuple[int, int, str]], settled: dict[int, bool]) -> None:
        told = [one for first, last, _who in lost for one in range(first, last + 1)]
        assert sorted(told) == [one for one, is_settled in settled.items() if not is_settled]
        for first, last, who in lost:
            assert first <= last
            assert {who} == {self.model.who_has(one) for one in range(first, last + 1)}

    def time(self) -> None:
        self.now_s += self.chosen.choice([0.1, 0.5, 2, 7])
        self.now_ms += self.chosen.choice([500, 4_000])
        expired = self.model.expire(self.now_s)
        assert self.state.expire(self.now_s) == expired
        assert self.state.is_changed or not expired
        due = self.model.due(self.now_ms, self.now_s)
        assert self.state.due(now_ms=self.now_ms, now_s=self.now_s) == due

    def free_holder(self) -> None:
        holder = self.chosen.choice(HOLDERS)
        freed = self.model.free_all(
            one for one, record in self.model.unsettled() if record.holder == holder
        )
        assert self.state.free_holders({holder, "nobody"}) == freed

    def move(self) -> None:
        """Failed records begin to move, or some are claimed for a move."""
        model = self.model
        if self.chosen.random() < 0.5:
            failed = self.state.moves.to_move(3)
            for record in failed:
                del model.failed[record.offset]
            if failed:
                self._begin_move("dead", failed)
            return
        asked = sorted({self.chosen.randint(max(0, model.start - 2), model.learned) for _ in "12"})
        unsettled = [one for one, _record in model.unsettled() if one not in asked]
        asked = sorted([*asked, *self.chosen.sample(unsettled, min(3, len(unsettled)))])
        claimed, settled, refused = self.state.moves.claim(asked)
        states = {one: model.records[one].state for one in asked if one in model.records}
        assert claimed == [one for one in asked if states.get(one) in ("free", "delayed")]
        assert settled == [one for one in asked if model.is_settled(one)]
        assert len(claimed) + len(settled) + len(refused) == len(asked)
        for one in claimed:
            model.records[one].state = "claimed"
        self.claimed += claimed

    def end_claim(self) -> None:
        model = self.model
        claimed = [one for one in self.claimed if one in model.records]
        self.claimed = []
        outcome = self.chosen.choice(["move", "discard", "unclaim"])
        if outcome == "unclaim":
            self.state.moves.unclaim(claimed)
            for one in claimed:
                model.unclaim(one)
        elif outcome == "discard":
            self.state.moves.discard(claimed)
            for one in claimed:
                model.records[one].state = "done"
        elif claimed:
            counts = [model.records[one].count for one in claimed]
            records = [FailedRecord(*of, "", "") for of in sorted(zip(claimed, counts, strict=True))]
            self._begin_move("done", records)
            for one in claimed:
                model.records[one].state, model.records[one].due_ms = "moving", None

    def _begin_move(self, outcome: str, records: list[FailedRecord]) -> None:
        self.moves += 1
        self.state.moves.begin(
            Move(self.moves, outcome, "t", 0, 7, self.moves, 0, 0, 0, tuple(records))  # type: ignore[arg-type]
        )

    def end_move(self) -> None:
        moves = self.state.moves.all()
        if not moves:
            return
        move = self.chosen.choice(moves)
        known = [one for one in move.records if one.offset in self.model.records]
        if self.chosen.random() < 0.7:
            self.state.moves.end(move.move_id)
            self.model.dead += len(move.records) if move.outcome == "dead" else 0
            for record in known:
                self.model.records[record.offset].state = "done"
        else:
            self.state.moves.release(move.move_id)
            self._release(move)

    def _release(self, move: Move) -> None:
        for record in move.records:
            if record.offset in self.model.records:
                if move.outcome == "dead":
                    self.model.failed[record.offset] = (record.count, record.reason, record.error)
                else:
                    self.model.records[record.offset].state = "free"

    def leave(self) -> None:
        """Records leave by retention, or are purged."""
        model = self.model
        offset = model.start + self.chosen.choice([0, 1, 30, 300])
        if self.chosen.random() < 0.5:
            assert self.state.advance_start(offset) == model.advance_start(offset)
            return
        self.state.purge(offset)
        for one, record in list(model.unsettled()):
            if one < offset and record.state in ("free", "delayed"):
                record.state = "done"
        model.learn_gap(offset - 1)

    def keep(self) -> None:
        self.keeper.write(self.state.changes())
        assert not self.state.is_changed

    def reopen(self) -> None:
        """Another leader goes on, after a clean election mostly."""
        self.keep()
        if self.chosen.random() < 0.5:
            self.now_s = self.chosen.choice([0.0, 2000.0])
            self.now_ms += self.chosen.choice([-60_000, 0, 60_000])
        kept = list(self.keeper.records.items())
        replayed = QueueState.replay(self.config, kept, now_ms=self.now_ms, now_s=self.now_s)
        assert replayed is not None and replayed.epochs == self.state.epochs
        assert sorted(map(str, replayed.moves.all())) == sorted(map(str, self.state.moves.all()))
        self.state, model = replayed, self.model
        self.claimed = []
        model.reopen(self.now_ms, self.now_s)
        model.dead = 0  # That leader's.
        if self.chosen.random() < 0.2 and model.start < model.learned:
            offset = self.chosen.randint(model.start, model.learned - 1)
            before = {move.move_id: move for move in replayed.moves.all()}
            self.state.cut(offset, self.state.state_epoch + 1)
            after = {move.move_id for move in self.state.moves.all()}
            for move_id, move in before.items():
                if move_id not in after:
                    assert move.records[-1].offset >= offset
                    self._release(move)
            model.cut(offset)
            self.epochs = [one for one in self.epochs if one[1] < offset]
        if self.config.ordered_by_key:
            assert model.learned == model.start or self.state.keys_wanted()
            self._tell_keys()
        assert not self.state.keys_wanted()

    def _tell_keys(self) -> None:
        """In pieces, as they are read. Nothing is given out, nor learned, until all are told."""
        state, model = self.state, self.model
        wanted = {n for first, last in state.keys_wanted() for n in range(first, last + 1)}
        assert wanted == {one for one, _record in model.unsettled()}
        while wanted:
            assert state.first_ready() is None and state.room() == 0
            assert not state.take("a", 9, now_s=self.now_s)
            first = max(0, min(wanted) - self.chosen.choice([0, 0, 3]))
            end = min(model.learned, first + self.chosen.choice([4, 40, 400]))
            # Those of settled records count for nothing.
            keys = [model.records[one].key if one in wanted else b"x" for one in range(first, end)]
            state.tell_keys(first, keys)
            wanted = {one for one in wanted if one >= end}

    # --- what must be equal ---

    def compare_kept(self) -> None:
        """The next leader goes on with what is now."""
        self.keep()
        kept = list(self.keeper.records.items())
        replayed = QueueState.replay(self.config, kept, now_ms=self.now_ms, now_s=self.now_s)
        assert replayed is not None
        page, _ = replayed.unsettled(0, [], 100_000, now_ms=self.now_ms, now_s=self.now_s)
        records = list(self.model.unsettled())
        # Those that were claimed were claimed by the leader that has gone.
        states = {"free": "ready", "locked": "locked", "delayed": "delayed", "moving": "moving"}
        assert [(one.offset, one.state, one.count, one.holder) for one in page] == [
            (
                offset,
                states.get(record.state, "ready" if record.due_ms is None else "delayed"),
                record.count,
                record.holder if record.state == "locked" else None,
            )
            for offset, record in records
        ]
        told = replayed.excused([(0, self.model.learned, 0)])
        excused = {one: n for first, last, n in told for one in range(first, last + 1)}
        for offset, record in records:
            assert excused.get(offset, 0) == record.excused
        told_unbegun = replayed.unbegun([(0, self.model.learned, 0)])
        assert [one for first, last in told_unbegun for one in range(first, last + 1)] == [
            offset for offset, record in records if record.state == "locked" and record.is_unbegun
        ]
        assert replayed.moves.to_move(100_000) == self.state.moves.to_move(100_000)
        assert replayed.start_offset == self.state.start_offset
        assert (replayed.learned, replayed.epochs) == (self.state.learned, self.state.epochs)
        assert replayed.counts().done == self.state.counts().done

    def compare(self) -> None:
        state, model = self.state, self.model
        records = list(model.unsettled())
        page, following = state.unsettled(0, [], 100_000, now_ms=self.now_ms, now_s=self.now_s)
        assert following is None
        assert [(one.offset, one.state, one.count) for one in page] == [
            (offset, NAMES.get(record.state, record.state), record.count)
            for offset, record in records
        ]
        for one, (_offset, record) in zip(page, records, strict=True):
            if record.state == "locked":
                assert one.holder == record.holder
                left_ms = max(0, round((record.end_tick / 10 - self.now_s) * 1000))
                assert one.due_ms == left_ms
            elif record.state == "delayed" and record.wait is None:
                assert one.due_ms == record.due_ms
            elif record.state == "delayed" and record.wait is not None:
                left_ms = math.ceil((record.wait[1] - self.now_s) * 1000)
                assert one.due_ms == self.now_ms + left_ms
        assert state.start_offset == max(model.start, model.first)
        assert (state.learned, state.dead) == (model.learned, model.dead)
        assert state.epochs == self.epochs
        free = (offset for offset, record in records if record.state == "free")
        assert state.first_unsettled_ready() == next(free, None)
        failed = {one.offset: (one.count, one.reason, one.error) for one in state.moves.to_move(100_000)}
        assert failed == model.failed
        counts = state.counts()
        states = [record.state for _offset, record in records]
        assert counts.locked == states.count("locked")
        assert counts.delayed == states.count("delayed")
        assert counts.moving == states.count("moving") + states.count("claimed")
        assert counts.ready + counts.blocked == states.count("free")
        assert sum(counts) == model.learned - state.start_offset
        ready = [
            one
            for one, record, before in model.in_line()
            if record.state == "free" and before is None
        ]
        assert counts.ready == len(ready)
        assert state.first_ready() == (ready[0] if ready else None)
        edge = self.chosen.randint(state.start_offset, model.learned + 1)
        expected = next((one for one in ready if one >= edge), None)
        assert state.first_ready(edge) == expected
        told = state.excused([(0, model.learned, 0)])
        excused = {one: n for first, last, n in told for one in range(first, last + 1)}
        for offset, record in records:
            assert excused.get(offset, 0) == record.excused
        first_end = min((one.end_tick for _, one in records if one.state == "locked"), default=None)
        expiry_s = state.next_expiry_s
        assert (expiry_s is None) == (first_end is None)
        assert expiry_s is None or first_end is None or expiry_s <= first_end / 10
        due_in_ms = state.due_in_ms(now_ms=self.now_ms, now_s=self.now_s)
        first_due_ms = min((one.due_ms or 0 for one in page if one.state == "delayed"), default=None)
        if first_due_ms is None:
            assert due_in_ms is None
        else:
            assert due_in_ms is not None and due_in_ms <= max(0, first_due_ms - self.now_ms)


@pytest.mark.parametrize("seed", range(80))
def test_a_queue_does_what_the_model_does(seed: int) -> None:
    Pair(random.Random(seed)).run(60, is_kept=seed % 8 == 0)


# --- what chance rarely brings about -----------------------------------------------------------


def opened(*, ready: int, **config: Any) -> tuple[QueueState, Keeper]:
    """A queue with so many ready records, all of the key b"k" with `ordered_by_key`."""
    state, keeper = QueueState.begin(QueueConfig(**config), 0, state_epoch=0), Keeper()
    keys = [b"k"] * ready
    state.learn(ready - 1, keys if state.config.ordered_by_key else None)
    keeper.write(state.changes())
    return state, keeper


def again(state: QueueState, keeper: Keeper) -> QueueState:
    keeper.write(state.changes())
    return opened_at(state, keeper)


def opened_at(
    state: QueueState, keeper: Keeper, *, now_ms: int = 0, now_s: float = 0
) -> QueueState:
    """The next leader's, by its clocks, of what is kept."""
    kept = list(keeper.records.items())
    replayed = QueueState.replay(state.config, kept, now_ms=now_ms, now_s=now_s)
    assert replayed is not None
    return replayed


def test_one_open_record_costs_no_memory_for_the_settled_ones_behind_it() -> None:
    state, keeper = opened(ready=10_000)
    for _ in range(10):
        for first, last, count in state.take("a", 1000, now_s=0):
            assert not state.ack("a", 0, [(max(first, 1), last, count)])
        keeper.write(state.changes())
    assert state.start_offset == 0 and state.counts().done == 9999
    # The head, the first block, and the last one, which goes on.
    assert len(keeper.records) == 3
    assert sum(map(len, keeper.records.values())) < 200
    state = again(state, keeper)
    assert state.counts().done == 9999
    assert not state.ack("a", 0, [(0, 0, 1)])
    assert state.start_offset == 10_000
    keeper.write(state.changes())
    assert len(keeper.records) == 2, "only the head and the block that the start is in"


def test_far_settled_ranges_are_looked_at_quickly() -> None:
    state, _keeper = opened(ready=10)
    state.take("a", 1, now_s=0)
    state.purge(2**40)
    assert state.start_offset == 0 and state.learned == 2**40
    assert not state.ack("a", 0, [(1, 2**40 - 1, 1)])
    assert state.ack("a", 0, [(0, 2**62, 1)]) == [(2**40, 2**62, "no consumer has it")]
    assert state.start_offset == 2**40


def test_a_reject_that_comes_again_is_no_error_before_and_after_the_move() -> None:
    state, keeper = opened(ready=3)
    state.take("a", 3, now_s=0)
    for _ in range(2):
        assert not state.reject("a", 0, [(1, 1, "bad")], now_ms=0, now_s=0)
        assert state.moves.to_move(10) == [FailedRecord(1, 1, "rejected", "bad")]
        state = again(state, keeper)
    state.moves.begin(Move(4, "dead", "t", 0, 1, 0, 0, 0, 0, tuple(state.moves.to_move(10))))
    state = again(state, keeper)
    assert [move.move_id for move in state.moves.all()] == [4] and not state.moves.to_move(10)
    assert not state.reject("a", 0, [(1, 1, "bad")], now_ms=0, now_s=0)
    state.moves.end(4)
    state = again(state, keeper)
    assert not state.reject("a", 0, [(1, 1, "bad")], now_ms=0, now_s=0)
    assert state.counts().moving == 0 and state.counts().done == 1
    assert state.reject("a", 0, [(2, 7, "bad")], now_ms=0, now_s=0) == [(2, 2, "consumer a has it")]


def test_all_that_is_locked_can_be_rejected_in_one_write() -> None:
    state, keeper = opened(ready=LOCKS_MAX)
    locks = state.take("a", LOCKS_MAX, now_s=0)
    keeper.write(state.changes())
    reason = "x" + "\N{SNOWMAN}" * 1000
    state.reject("a", 0, [(n, 1, reason) for first, last, _ in locks for n in range(first, last + 1)], now_ms=0, now_s=0)
    changes = state.changes()
    assert len(pack(changes)) < WRITE_BYTES_MAX
    [failed] = state.moves.to_move(1)
    assert failed.error == reason[:334]
    # Its move has the errors once more.
    move = Move(4, "dead", "t", 0, 1, 0, 0, 0, 0, tuple(state.moves.to_move(LOCKS_MAX)))
    state.moves.begin(move)
    assert len(pack(state.changes())) < WRITE_BYTES_MAX


def test_tombstones_of_dead_letters_that_retention_took_go_a_few_with_each_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(move_state, "PASSED_AT_ONCE", 3)
    state, keeper = opened(ready=20)
    state.take("a", 20, now_s=0)
    state.reject("a", 0, [(offset, 1, "bad") for offset in range(20)], now_ms=0, now_s=0)
    keeper.write(state.changes())
    assert sum(key.startswith(b"dying") for key in keeper.records) == 20
    assert state.advance_start(15) == 15
    changes = state.changes()
    assert sum(value is None for _, value in changes) == 3
    keeper.write(changes)
    state.moves.discard([15])
    keeper.write(state.changes())
    assert sum(key.startswith(b"dying") for key in keeper.records) == 20 - 3 - 3
    state = opened_at(state, keeper)
    assert [one.offset for one in state.moves.to_move(20)] == [16, 17, 18, 19]
    assert state.counts().moving == 4
    for _ in range(4):
        keeper.write(state.changes())
    assert sum(key.startswith(b"dying") for key in keeper.records) == 4


def test_a_release_is_no_failure_also_under_the_next_leader() -> None:
    state, keeper = opened(ready=1, max_deliveries=2)
    for count in range(1, 8):
        assert state.take("a", 1, now_s=0) == [(0, 0, count)]
        assert not state.release("a", 0, [(0, 0, count)])
        state = again(state, keeper)
    assert state.excused(state.take("a", 1, now_s=0)) == [(0, 0, 7)]
    state.nack("a", 0, [(0, 0, 8, 0)], now_ms=0, now_s=0)
    assert state.counts().ready == 1
    state.take("a", 1, now_s=0)
    state.nack("a", 0, [(0, 0, 9, 0)], now_ms=0, now_s=0)
    assert [one.offset for one in state.moves.to_move(2)] == [0]


def test_a_rejected_record_keeps_the_line_of_its_key_but_frees_nothing_in_it() -> None:
    state, _keeper = opened(ready=4, ordered_by_key=True)
    assert state.take("a", 3, now_s=0) == [(0, 2, 1)]
    state.reject("a", 0, [(1, 1, "bad")], now_ms=0, now_s=0)
    assert state.counts().locked == 2
    state.nack("a", 0, [(0, 0, 1, 0)], now_ms=0, now_s=0)
    assert state.counts().locked == 0, "the third would be handled before the first"
    assert state.take("b", 4, now_s=0) == [(0, 0, 2)], "the second is not dead yet"
    state.ack("b", 0, [(0, 0, 2)])
    assert not state.take("b", 4, now_s=0)
    state.moves.discard([1])
    assert state.take("b", 4, now_s=0) == [(2, 2, 2), (3, 3, 1)]


@pytest.mark.parametrize("fails", ["nack", "expire"])
@pytest.mark.parametrize("dead_letters", ["keep", "discard"])
def test_a_record_that_fails_for_good_frees_the_later_ones_of_its_key(
    fails: str, dead_letters: str
) -> None:
    state, _keeper = opened(
        ready=3, ordered_by_key=True, max_deliveries=1, dead_letters=dead_letters
    )
    assert state.take("a", 3, now_s=0) == [(0, 2, 1)]
    if fails == "nack":
        state.nack("a", 0, [(0, 0, 1, None)], now_ms=0, now_s=0)
    else:
        state.expire(1000)
    counts = state.counts()
    assert counts.locked == 0 and counts.ready + counts.blocked == 2, "its consumer drops them"
    if dead_letters == "keep":
        state.moves.discard([0])
    assert state.dead == 1
    assert state.take("b", 3, now_s=0) == [(1, 2, 2)], "and it was no failure of theirs"


def test_records_that_left_meanwhile_have_no_key_to_tell() -> None:
    state, keeper = opened(ready=600, ordered_by_key=True)
    state.take("a", 2, now_s=0)
    state = again(state, keeper)
    assert state.keys_wanted() == [(0, 599)]
    assert state.advance_start(300) == 300
    assert state.keys_wanted() == [(300, 599)]
    assert state.room() == 0 and state.first_ready() is None
    state.tell_keys(302, [b"k"] * 100)
    state.tell_keys(600, [])
    assert not state.keys_wanted() and state.room()
    assert state.counts().blocked == 99
    assert state.take("b", 600, now_s=0, below_offset=304) == [(300, 303, 1)]


@pytest.mark.parametrize("learned, failed", [(270, 290), (270, 270), (256, 256)])
def test_a_write_that_was_cut_short_leaves_nothing_beyond_its_head(
    learned: int, failed: int
) -> None:
    state, keeper = opened(ready=300)
    state.take("a", 300, now_s=0)
    state.ack("a", 0, [(0, failed - 1, 1)])
    state.reject("a", 0, [(failed, 1, "bad")], now_ms=0, now_s=0)
    keeper.write(state.changes())
    head = opened_at(state, keeper)
    assert head is not None
    head.cut(learned, 1)
    keeper.write(head.changes()[:1])
    state = again(head, keeper)
    assert (state.start_offset, state.learned, state.state_epoch) == (learned, learned, 1)
    state.learn(299)
    assert sum(state.counts()) == state.counts().ready == 300 - learned and not state.moves.to_move(1)
    assert len(again(state, keeper).moves.to_move(1)) == 0
    assert len(keeper.records) == 2


def test_what_an_unclean_election_cut_off_is_no_longer_done() -> None:
    state, keeper = opened(ready=3000)
    state.take("a", 3000, now_s=0)
    state.ack("a", 0, [(1, 2999, 1)])
    state = again(state, keeper)
    state.cut(1500, 1)
    assert (state.start_offset, state.learned, state.state_epoch) == (0, 1500, 1)
    assert state.ack("a", 0, [(0, 0, 1)]) == [(0, 0, "no consumer has it")]
    assert not state.ack("a", 0, [(1, 1499, 1)])
    state = again(state, keeper)
    state.learn(2999)
    assert state.take("b", 3000, now_s=0) == [(0, 0, 2), (1500, 2999, 1)]
    assert not state.ack("b", 1, [(0, 0, 2)])
    assert state.start_offset == 1500


def test_a_move_keeps_its_records_below_a_cut() -> None:
    state, keeper = opened(ready=8)
    for move_id, offsets in ((1, [0, 1]), (2, [2, 5]), (3, [6, 7])):
        state.moves.claim(offsets)
        records = tuple(FailedRecord(one, 0, "", "") for one in offsets)
        state.moves.begin(Move(move_id, "done", "t", 0, 7, move_id, 0, 0, 0, records))
    state = again(state, keeper)
    state.cut(5, 1)
    for one in (state, again(state, keeper)):
        moving = {move.move_id: [record.offset for record in move.records] for move in one.moves.all()}
        assert moving == {1: [0, 1], 2: [2]}
    assert state.take("a", 9, now_s=0) == [(3, 4, 1)]


def test_a_claimed_record_waits_beyond_its_due_time() -> None:
    state, _keeper = opened(ready=2)
    state.take("a", 1, now_s=0)
    state.nack("a", 0, [(0, 0, 1, 5000)], now_ms=0, now_s=0)
    assert state.moves.claim([0, 1]) == ([0, 1], [], [])
    assert not state.due(now_ms=6000, now_s=6) and state.first_ready() is None
    state.moves.unclaim([0, 1])
    assert state.first_ready() == 1
    assert state.due(now_ms=6000, now_s=6) == 1 and state.first_ready() == 0


def test_takes_wait_at_the_bounds_and_settling_does_not() -> None:
    state, _keeper = opened(ready=20_000)
    assert state.room() == 0 and state.trouble is None
    assert state.take("a", 20_000, now_s=0) == [(0, 9999, 1)]
    assert state.room() == 10_000
    assert not state.take("b", 1, now_s=0) and state.first_ready() is None
    assert "locked" in (state.trouble or "")
    state.nack("a", 0, [(0, 9999, 1, None)], now_ms=0, now_s=0)
    assert state.counts().delayed == 10_000
    assert state.take("b", 1, now_s=0) == [(10_000, 10_000, 1)]


def test_time_in_which_nobody_is_heard_counts_for_no_lock() -> None:
    state, _keeper = opened(ready=1, visibility_timeout_s=10)
    state.take("a", 1, now_s=100)
    state.prolong(50)
    assert not state.expire(159.8)
    assert state.next_expiry_s == 160.1 and LockTimes().next_s is None
    assert state.expire(160.2) == 1
    assert state.take("b", 1, now_s=160) == [(0, 0, 2)]
    assert state.ack("a", 0, [(0, 0, 1)]) == [(0, 0, "consumer b has it")]


def test_the_back_off_doubles_up_to_the_longest_and_never_comes_early() -> None:
    state, _keeper = opened(ready=1, max_deliveries=100, backoff_s=2, backoff_max_s=60)
    now_s, waits = 0.0, []
    for count in range(1, 9):
        state.take("a", 1, now_s=0)
        state.nack("a", 0, [(0, 0, count, None)], now_ms=0, now_s=now_s)
        wait_ms = state.due_in_ms(now_ms=0, now_s=now_s)
        assert wait_ms is not None
        waits.append(wait_ms / 1000)
        assert not state.due(now_ms=0, now_s=now_s + (wait_ms - 2) / 1000)
        now_s += wait_ms / 1000
        assert state.due(now_ms=0, now_s=now_s) == 1
    for wait, expected in zip(waits, [2, 4, 8, 16, 32, 60, 60, 60], strict=True):
        assert expected * 0.8 <= wait <= min(60, expected * 1.2)


def test_a_take_of_one_key_over_blocks_is_one_holders() -> None:
    state, _keeper = opened(ready=600, ordered_by_key=True, visibility_timeout_s=10)
    assert state.take("a", 600, now_s=0) == [(0, 599, 1)]
    assert state.ack("b", 0, [(599, 599, 9)]) == [(599, 599, "consumer a has it")]
    assert not state.expire(9) and state.free_holders({"a"}) == 600


@pytest.mark.parametrize("ends", ["end", "release"])
def test_a_move_ends_though_retention_took_one_of_its_records_meanwhile(ends: str) -> None:
    state, keeper = opened(ready=4)
    state.moves.claim([0, 1])
    state.moves.begin(Move(4, "done", "t", 0, 7, 1, 0, 0, 0, (FailedRecord(0, 0, "", ""), FailedRecord(1, 0, "", ""))))
    assert state.advance_start(1) == 1
    (state.moves.end if ends == "end" else state.moves.release)(4)
    for one in (state, again(state, keeper)):
        assert one.counts().moving == 0 and not one.moves.all()
        assert one.start_offset == (2 if ends == "end" else 1)


def test_only_what_was_claimed_or_is_failed_is_discarded() -> None:
    state, keeper = opened(ready=4)
    state.take("a", 1, now_s=0)
    state.moves.claim([2])
    state.moves.begin(Move(4, "done", "t", 0, 7, 1, 0, 0, 0, (FailedRecord(2, 0, "", ""),)))
    before = state.counts()
    state.moves.discard([0, 1, 2])
    assert state.counts() == before
    keeper.write(state.changes())
    state.moves.claim([3])
    state.moves.discard([3])
    assert state.is_changed and again(state, keeper).counts().done == 1


def test_who_settles_late_hears_that_the_record_is_on_its_way() -> None:
    state, _keeper = opened(ready=1, max_deliveries=1, visibility_timeout_s=10)
    state.take("a", 1, now_s=0)
    assert state.expire(20) == 1 and [one.offset for one in state.moves.to_move(2)] == [0]
    why = "it is on its way to the dead letters"
    assert state.ack("a", 0, [(0, 0, 1)]) == [(0, 0, why)]
    assert state.nack("a", 0, [(0, 0, 2, None)], now_ms=0, now_s=0) == [(0, 0, why)]


def test_a_purge_reaches_what_was_not_learned_and_no_further() -> None:
    state, _keeper = opened(ready=3)
    state.take("a", 1, now_s=0)
    assert state.purge(3) == 2 and (state.learned, state.counts().done) == (3, 2)
    assert state.purge(10) == 7 and (state.learned, state.counts().done) == (10, 9)
    state.learn(10)
    assert state.take("b", 9, now_s=0) == [(10, 10, 1)]


def test_locks_that_may_be_lost_are_void_in_a_state_epoch_that_is_kept() -> None:
    state, keeper = opened(ready=1)
    state = again(state, keeper)
    state.void_locks(5)
    assert state.is_changed and again(state, keeper).state_epoch == 5


@pytest.mark.parametrize("wrong_ms", [1_200_000, -1_200_000], ids=["ahead", "behind"])
def test_a_wrong_clock_makes_no_record_that_was_given_back_wait_for_longer(wrong_ms: int) -> None:
    state, keeper = opened(ready=1)
    state.take("a", 1, now_s=0)
    state.nack("a", 0, [(0, 0, 1, 60_000)], now_ms=wrong_ms, now_s=0)
    keeper.write(state.changes())
    # Under the same leader it waits for as long as was asked, also once its clock is right again.
    assert state.due_in_ms(now_ms=30_000, now_s=30) == 30_000
    assert not state.due(now_ms=59_000, now_s=59) and state.due(now_ms=59_000, now_s=60) == 1
    # The next leaders have it wait no longer than was asked, and not beyond what the first one said.
    for _ in range(2):
        state = opened_at(state, keeper, now_ms=30_000, now_s=7)
        assert state.due_in_ms(now_ms=30_000, now_s=7) == (60_000 if wrong_ms > 0 else 0)
        assert [key for key, _ in state.changes()] == [], "a later leader's clock may be right"
    state = opened_at(state, keeper, now_ms=wrong_ms + 59_000, now_s=7)
    assert state.due_in_ms(now_ms=wrong_ms + 59_000, now_s=7) == 1_000


def test_a_record_that_waits_for_a_time_of_day_does_so_under_every_leader() -> None:
    state, keeper = opened(ready=1)
    state.learn_due(0, 90_000)
    keeper.write(state.changes())
    for now_ms in (1_000, 60_000):
        state = opened_at(state, keeper, now_ms=now_ms, now_s=7)
        assert state.due_in_ms(now_ms=now_ms, now_s=1e6) == 90_000 - now_ms
    assert not state.due(now_ms=89_999, now_s=1e6) and state.due(now_ms=90_000, now_s=7) == 1


def test_holders_that_go_together_are_freed_at_once() -> None:
    state, _keeper = opened(ready=10_000)
    names = [f"h{number}" for number in range(10_000)]
    for number, name in enumerate(names):
        assert state.take(name, 1, now_s=0) == [(number, number, 1)]
    assert state.free_holders({*names} - {"h7", "h9999"}) == 9_998
    assert state.counts().locked == 2 and state.first_ready() == 0
    assert not state.ack("h7", 0, [(7, 7, 1)])


def test_bytes_of_others_are_refused() -> None:
    state, keeper = opened(ready=600)
    state.take("a", 3, now_s=0)
    keeper.write(state.changes())
    for key in list(keeper.records):
        for value in (b"", b"x", b"\x91\x01", keeper.records[key][:-1]):
            broken = {**keeper.records, key: value}
            with pytest.raises(CorruptBatchError):
                QueueState.replay(state.config, list(broken.items()), now_ms=0, now_s=0)
        newer = {**keeper.records, key: b"\x91\x02"}
        with pytest.raises(UnsupportedFormatError):
            QueueState.replay(state.config, list(newer.items()), now_ms=0, now_s=0)
    block = b"block" + bytes(8)
    fields = msgspec.msgpack.decode(keeper.records[block])
    for index in (-1, 1, 256):  # The second one is locked.
        broken = {**keeper.records, block: msgspec.msgpack.encode([*fields[:5], [[index, 9]]])}
        with pytest.raises(CorruptBatchError):
            QueueState.replay(state.config, list(broken.items()), now_ms=0, now_s=0)
    assert QueueState.replay(state.config, [], now_ms=0, now_s=0) is None
