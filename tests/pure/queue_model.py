"""A queue's partition as its rules say it, offset by offset: slow, and easy to believe."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from rayq.config import QueueConfig
from rayq.messages.secret_names import shown_part


@dataclass
class Record:
    key: bytes | None
    state: str = "free"
    count: int = 0
    excused: int = 0
    is_unbegun: bool = False
    holder: str | None = None
    end_tick: int = 0
    taken_tick: int = 0
    due_ms: int | None = None
    wait: tuple[int, float] | None = None
    """`(how long in ms, its end by the monotonic clock)`, where it was given back."""


@dataclass
class QueueModel:
    config: QueueConfig
    first: int
    learned: int
    state_epoch: int = 0
    dead: int = 0
    records: dict[int, Record] = field(default_factory=dict)
    failed: dict[int, tuple[int, str, str]] = field(default_factory=dict)
    """`(count, reason, error)`"""

    # --- what follows from the records ---

    @property
    def start(self) -> int:
        undone = [one for one, record in self.records.items() if record.state != "done"]
        return min(undone, default=self.learned)

    def unsettled(self) -> Iterator[tuple[int, Record]]:
        for offset in sorted(self.records):
            if self.records[offset].state != "done":
                yield offset, self.records[offset]

    def in_line(self) -> Iterator[tuple[int, Record, int | None]]:
        """The unsettled records, each with the one before it that has its key."""
        last: dict[bytes, int] = {}
        for offset, record in self.unsettled():
            if record.key is None:
                yield offset, record, None
            else:
                yield offset, record, last.get(record.key)
                last[record.key] = offset

    def states(self) -> list[tuple[int, str, int]]:
        return [(offset, record.state, record.count) for offset, record in self.records.items()]

    def who_has(self, offset: int) -> str:
        record = self.records.get(offset)
        if record is not None and record.state == "locked":
            return f"consumer {shown_part(record.holder or '')} has it"
        if record is not None and record.state == "moving":
            return "it is on its way to the dead letters"
        return "no consumer has it"

    # --- learning ---

    def learn(self, last: int, keys: Iterable[bytes | None]) -> None:
        for offset, key in zip(range(self.learned, last + 1), keys, strict=True):
            self.records[offset] = Record(key)
        self.learned = last + 1

    def learn_gap(self, last: int) -> None:
        for offset in range(self.learned, last + 1):
            self.records[offset] = Record(None, "done")
        self.learned = max(self.learned, last + 1)

    def delay(self, offset: int, due_ms: int, wait: tuple[int, float] | None = None) -> None:
        self.records[offset].state = "delayed"
        self.records[offset].due_ms = due_ms
        self.records[offset].wait = wait

    # --- taking and settling ---

    def take(
        self,
        holder: str,
        count_max: int,
        from_offset: int,
        below_offset: int,
        now_s: float,
        *,
        tells_begins: bool = False,
    ) -> list[tuple[int, int]]:
        taken: list[int] = []
        for offset, record, before in self.in_line():
            if len(taken) == count_max:
                break
            is_free = record.state == "free" and from_offset <= offset < below_offset
            if is_free and (before is None or before in taken):
                taken.append(offset)
                record.state, record.holder = "locked", holder
                record.count += 1
                has_failed = record.count - record.excused > 1 or self.config.max_deliveries == 1
                record.is_unbegun = tells_begins and has_failed
                self.set_times(record, now_s)
        return [(offset, self.records[offset].count) for offset in taken]

    def set_times(self, record: Record, now_s: float) -> None:
        record.taken_tick = math.floor(now_s * 10)
        record.end_tick = record.taken_tick + math.ceil(self.config.visibility_timeout_s * 10) + 1

    def _named(self, holder: str, offset: int, state_epoch: int, count: int) -> bool:
        record = self.records.get(offset)
        if record is None or (record.state == "locked" and record.holder != holder):
            return False
        return (state_epoch, count) == (self.state_epoch, record.count)

    def is_settled(self, offset: int) -> bool:
        return offset < self.first or (
            offset in self.records and self.records[offset].state == "done"
        )

    def ack(self, holder: str, state_epoch: int, offset: int, count: int) -> bool:
        if self.is_settled(offset):
            return True
        if self._named(holder, offset, state_epoch, count) and self.records[offset].state == "locked":
            self.records[offset].state = "done"
            return True
        return False

    def nack(
        self,
        holder: str,
        state_epoch: int,
        offset: int,
        count: int,
        delay_ms: int,
        now_ms: int,
        now_s: float,
    ) -> bool:
        if self.is_settled(offset):
            return True
        if not self._named(holder, offset, state_epoch, count):
            return False
        if self.records[offset].state == "locked":
            record = self.records[offset]
            failures = record.count - record.excused
            self.fail(offset, f"It was released after delivery {failures}, the last one.")
        if self.records[offset].state == "free" and delay_ms:
            self.delay(offset, now_ms + delay_ms, (delay_ms, now_s + delay_ms / 1000))
        return True

    def release(self, holder: str, state_epoch: int, offset: int, count: int) -> bool:
        if self.is_settled(offset):
            return True
        if not self._named(holder, offset, state_epoch, count):
            return False
        if self.records[offset].state == "locked":
            self.records[offset].excused += 1
            self.free(offset)
        return True

    def begin(self, holder: str, state_epoch: int, offset: int, count: int) -> bool:
        if not self._named(holder, offset, state_epoch, count) or self.is_settled(offset):
            return False
        if self.records[offset].state == "locked":
            self.records[offset].is_unbegun = False
        return self.records[offset].state == "locked"

    def reject(self, holder: str, state_epoch: int, offset: int, count: int) -> bool:
        if self.is_settled(offset):
            return True
        if not self._named(holder, offset, state_epoch, count):
            return False
        if self.records[offset].state == "locked":
            self.die(offset, "rejected", "why")
        return self.records[offset].state in ("moving", "done")

    def extend(
        self,
        holder: str,
        state_epoch: int,
        offset: int,
        count: int,
        timeout_s: float,
        now_s: float,
    ) -> bool:
        if self.is_settled(offset):
            return True
        if not self._named(holder, offset, state_epoch, count):
            return False
        record = self.records[offset]
        longest = record.taken_tick + math.ceil(self.config.max_handling_s * 10)
        wanted = min(math.ceil((now_s + timeout_s) * 10), longest)
        record.end_tick = max(record.end_tick, wanted)
        return record.state == "locked"

    def free_all(self, offsets: Iterable[int]) -> int:
        before = self.locked()
        for offset in sorted(offsets):
            record = self.records[offset]
            if record.state != "locked":
                continue
            if record.is_unbegun:
                record.excused += 1
                self.free(offset)
                continue
            failures = record.count - record.excused
            error = f"Delivery {failures}, the last one, was not settled in time."
            self.fail(offset, error)
        return before - self.locked()

    def locked(self) -> int:
        return sum(record.state == "locked" for record in self.records.values())

    def fail(self, offset: int, error: str) -> None:
        record = self.records[offset]
        if record.count - record.excused >= self.config.max_deliveries:
            self.die(offset, "deliveries", error)
            self.free_later(offset)
        else:
            self.free(offset)

    def die(self, offset: int, reason: str, error: str) -> None:
        record = self.records[offset]
        if self.config.dead_letters == "discard":
            record.state = "done"
            self.dead += 1
        else:
            record.state = "moving"
            self.failed[offset] = (record.count - record.excused, reason, error)

    def free(self, offset: int) -> None:
        record = self.records[offset]
        record.state, record.holder = "free", None
        self.free_later(offset)

    def free_later(self, offset: int) -> None:
        record = self.records[offset]
        if record.key is None:
            return
        for later, other in self.unsettled():
            if later <= offset or other.key != record.key:
                continue
            if other.state == "locked":
                other.state, other.holder = "free", None
                other.excused += 1
            elif other.state != "moving":
                return

    def expire(self, now_s: float) -> int:
        return self.free_all(
            offset
            for offset, record in self.unsettled()
            if record.state == "locked" and record.end_tick <= math.floor(now_s * 10)
        )

    def due(self, now_ms: int, now_s: float) -> int:
        many = 0
        for _offset, record in self.unsettled():
            if record.state == "delayed" and record.due_ms is not None:
                is_over = record.due_ms <= now_ms if record.wait is None else record.wait[1] <= now_s
                if is_over:
                    record.state, record.due_ms, record.wait = "free", None, None
                    many += 1
        return many

    # --- opening ---

    def reopen(self, now_ms: int, now_s: float) -> None:
        for offset, record in self.unsettled():
            if record.due_ms is not None and record.wait is not None:
                length_ms = record.wait[0]
                left_ms = min(length_ms, max(0, record.due_ms - now_ms))
                record.wait = length_ms, now_s + left_ms / 1000
            if record.state == "claimed":
                self.unclaim(offset)
            if record.state == "locked":
                self.set_times(record, now_s)

    def unclaim(self, offset: int) -> None:
        record = self.records[offset]
        record.state = "free" if record.due_ms is None else "delayed"

    def cut(self, offset: int) -> None:
        self.state_epoch += 1
        self.records = {one: replace(of) for one, of in self.records.items() if one < offset}
        self.failed = {at: of for at, of in self.failed.items() if at < offset}
        self.learned = offset
        self.first = min(self.first, offset)
        for _offset, record in self.unsettled():
            if record.state == "locked":
                record.state, record.holder = "free", None
                record.excused += 1

    def advance_start(self, offset: int) -> int:
        gone = [one for one, _record in self.unsettled() if one < offset]
        self.records = {one: of for one, of in self.records.items() if one >= offset}
        self.failed = {at: of for at, of in self.failed.items() if at >= offset}
        self.first = max(self.first, offset)
        self.learned = max(self.learned, offset)
        return len(gone)
