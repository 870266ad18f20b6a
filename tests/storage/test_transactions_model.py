"""Random lives of logs with transactions, against a model that knows every batch ever appended."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from rayq.config import MIB, TopicConfig
from rayq.messages.transaction_ids import family_of, make_family
from rayq.storage import recent_producers
from rayq.storage.batch import (
    BatchHeader,
    Marker,
    decode_columns,
    encode_batch,
    read_header,
    read_marker,
    split_batches,
)
from rayq.storage.cleaner import BYTES_PER_KEY, clean
from rayq.storage.disk import LocalDisk
from rayq.storage.log import Log
from rayq.storage.open_transactions import OpenTransaction
from rayq.storage.producer_state import ProducerState
from rayq.storage.verify import verify
from tests.storage.support import NOW_MS, Place, flush, learn, read_bytes

FAMILIES = [make_family(0, number) for number in range(3)]
KEYS = [b"a", b"b", b"c"]
Key = tuple[int, int]
Row = tuple[int, bytes, bytes]


class Entry(NamedTuple):
    """A batch of one record, or a marker."""

    offset: int
    key: bytes | None
    value: bytes | None
    transaction: Key | None
    is_commit: bool | None
    """None for records."""


class Model:
    """Every batch that was ever appended and not truncated."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def cut(self, offset: int) -> None:
        self.entries = [one for one in self.entries if one.offset < offset]

    def markers(self, upto: int) -> dict[Key, Entry]:
        """By transaction: its first marker."""
        found: dict[Key, Entry] = {}
        for one in self.entries:
            if one.is_commit is not None and one.transaction is not None and one.offset < upto:
                found.setdefault(one.transaction, one)
        return found

    def firsts(self) -> dict[Key, int]:
        found: dict[Key, int] = {}
        for one in self.entries:
            if one.is_commit is None and one.transaction is not None:
                found.setdefault(one.transaction, one.offset)
        return found

    def undecided(self, high_watermark: int) -> list[OpenTransaction]:
        done = self.markers(high_watermark)
        found = [
            OpenTransaction(*key, first) for key, first in self.firsts().items() if key not in done
        ]
        return sorted(found, key=lambda one: one.first_offset)

    def stable_offset(self, high_watermark: int) -> int:
        return min(
            [high_watermark, *(one.first_offset for one in self.undecided(high_watermark))]
        )

    def aborted_between(self, start: int, end: int) -> set[Key]:
        firsts = self.firsts()
        return {
            key
            for key, marker in self.markers(1 << 60).items()
            if not marker.is_commit and marker.offset >= start and firsts.get(key, end) < end
        }

    def committed(self, start: int, end: int) -> list[Row]:
        done = self.markers(1 << 60)
        return [
            (one.offset, one.key, one.value)
            for one in self.entries
            if start <= one.offset < end and one.key is not None and one.value is not None
            if one.transaction is None or done[one.transaction].is_commit
        ]


def committed_rows(log: Log, start: int, end: int, bytes_max: int) -> list[Row]:
    """What a reader of committed records gets from `start` to `end`, by reads of `bytes_max`."""
    rows: list[Row] = []
    offset = start
    while offset < end:
        plan = log.plan_read(offset, end, bytes_max)
        result = plan.run()
        if result.next_offset == offset:
            break  # Compaction took the rest.
        aborted = set(log.aborted_between(offset, result.next_offset))
        for position, header in split_batches(result.data):
            if header.is_control:
                read_marker(result.data, position, header)
                continue
            if header.is_transactional and key_of(header) in aborted:
                continue
            columns = decode_columns(result.data, position, header)
            for at, key, value in zip(
                columns.offsets, columns.keys or (), columns.values, strict=False
            ):
                if at >= offset and key is not None and value is not None:
                    rows.append((at, key, value))
        offset = result.next_offset
    return rows


def key_of(header: BatchHeader) -> Key:
    assert header.producer_id is not None
    return family_of(header.producer_id), header.producer_epoch


class Life:
    """One log, its model, and what may happen to them."""

    def __init__(self, path: Path, rng: Random, config: TopicConfig) -> None:
        self.rng = rng
        self.root = path
        self.copies = 0
        self.place = Place(path / "copy-0", config=config)
        self.log = self.place.open()
        self.model = Model()
        self.high_watermark = 0
        self.now_ms = NOW_MS
        self.leader_epoch = 0
        self.next_epoch = dict.fromkeys(FAMILIES, 0)
        self.sequences: dict[Key, int] = {}
        self.follower: Log | None = None
        """Another replica, which copies the log at its own pace."""
        self.follower_place = self.place
        self.follower_high_watermark = self.copied_horizon = 0

    # --- appends ------------------------------------------------------------------------------

    def record(self) -> None:
        self._record(None)

    def transaction_record(self) -> None:
        family = self.rng.choice(FAMILIES)
        epoch = self.log.producers.transactions.open_epoch(family)
        if epoch is None:
            epoch = self._new_epoch(family)
        self._record((family, epoch))

    def _new_epoch(self, family: int) -> int:
        self.next_epoch[family] += 1
        return self.next_epoch[family]

    def _record(self, transaction: Key | None) -> None:
        key, value = self.rng.choice(KEYS), b"%d" % self.log.end_offset
        sequence = None
        if transaction is not None:
            sequence = self.sequences.get(transaction, 0)
            self.sequences[transaction] = sequence + 1
        batch = encode_batch(
            [value],
            [key],
            producer_id=None if transaction is None else transaction[0] + self.rng.randrange(2),
            producer_epoch=0 if transaction is None else transaction[1],
            base_sequence=sequence,
            is_transactional=transaction is not None,
        )
        stamped = self.log.append_as_leader(
            batch, read_header(batch), leader_epoch=self.leader_epoch, now_ms=self.now_ms
        )
        self.model.entries.append(Entry(stamped.base_offset, key, value, transaction, None))

    def marker(self) -> None:
        family = self.rng.choice(FAMILIES)
        epoch = self.log.producers.transactions.open_epoch(family)
        if epoch is None:  # The fence of a transaction that has no batches here.
            if self.rng.random() < 0.8:
                return
            epoch = self._new_epoch(family)
        marker = Marker(family, epoch, self.rng.random() < 0.5, 0, 1)
        stamped = self.log.append_marker(
            marker, leader_epoch=self.leader_epoch, now_ms=self.now_ms
        )
        self.model.entries.append(
            Entry(stamped.base_offset, None, None, (family, epoch), marker.is_commit)
        )

    # --- what a disk and a cluster do ---------------------------------------------------------

    def commit(self) -> None:
        self.high_watermark = self.rng.randint(self.high_watermark, self.log.end_offset)
        flush(
            self.log,
            checkpoint=self.rng.random() < 0.5,
            high_watermark=self.high_watermark,
        )

    def reopen(self) -> None:
        """A process dies and starts again. The newest snapshots, or an index, may be lost."""
        self.log = self._reopened(self.log, self.place, self.high_watermark)

    def reopen_follower(self) -> None:
        if self.follower is not None:
            self.follower = self._reopened(
                self.follower, self.follower_place, self.follower_high_watermark
            )

    def _reopened(self, log: Log, place: Place, high_watermark: int) -> Log:
        if self.rng.random() < 0.3:
            log.close(high_watermark)
        snapshots = place.files(".snapshot")
        if self.rng.random() < 0.3:
            for path in snapshots[self.rng.randint(0, len(snapshots)) :]:
                path.unlink()
        for path in place.files(".aborted"):
            if self.rng.random() < 0.05:
                path.unlink()
            elif self.rng.random() < 0.05:
                path.write_bytes(path.read_bytes()[:-1])
        return place.open()

    def truncate(self) -> None:
        """A follower drops what its new leader does not have."""
        floor = max(self.high_watermark, self.log.cleaned_offset)
        is_whole = self.log.start_offset == self.log.cleaned_offset == 0
        if is_whole and not self.place.config.is_compacted and self.rng.random() < 0.1:
            floor = 0  # After an unclean election.
        offset = max(floor, self.log.end_offset - self.rng.randint(0, 12), self.log.start_offset)
        self.log.truncate(offset)
        self.model.cut(self.log.end_offset)
        self.high_watermark = min(self.high_watermark, self.log.end_offset)
        self.leader_epoch += 1

    def copy(self) -> None:
        """A new replica copies the log, and leads."""
        self.place = self._new_place()
        follower = self.place.open()
        self._begin_again(follower)
        learn(follower, self.log.cleaned_offset, self.log.tombstone_horizon)
        data = read_bytes(self.log)
        positions = [position for position, _ in split_batches(data)]
        while positions:  # By fetches of several batches each.
            count = self.rng.randint(1, 9)
            end = positions[count] if count < len(positions) else len(data)
            follower.append_as_follower(data[positions[0] : end])
            del positions[:count]
            if self.rng.random() < 0.05:
                flush(follower, checkpoint=True, high_watermark=self.high_watermark)
        assert follower.end_offset == self.log.end_offset
        self.log = follower

    def _new_place(self) -> Place:
        self.copies += 1
        return Place(self.root / f"copy-{self.copies}", config=self.place.config)

    def _begin_again(self, follower: Log) -> None:
        start = self.log.start_offset
        producers = ProducerState()
        producers.load(self.log.producers.snapshot())
        producers.forget_from(start)
        epochs = [(epoch, min(at, start)) for epoch, at in self.log.epochs.entries()]
        kept = [entry for entry in epochs if entry[1] <= start]
        follower.reset(start, kept, producers.snapshot())

    def follow(self) -> None:
        """The follower fetches some batches, as soon as nothing keeps it from it."""
        log = self.log
        if self.follower is None:
            self.follower_place = self._new_place()
            self.follower = self.follower_place.open()
            self.copied_horizon = log.tombstone_horizon
        follower = self.follower
        is_below = follower.start_offset < follower.end_offset < log.tombstone_horizon
        if is_below and self.copied_horizon < log.tombstone_horizon:
            self._begin_again(follower)
            self.copied_horizon = log.tombstone_horizon
            return
        while follower.last_epoch is not None:
            epoch, end = log.epochs.end_for(follower.last_epoch, log.end_offset)
            if epoch == follower.last_epoch and end >= follower.end_offset:
                break
            follower.truncate(min(end, follower.end_offset - 1))
        if follower.end_offset < log.end_offset:
            learn(follower, log.cleaned_offset, log.tombstone_horizon)
            data = read_bytes(log, follower.end_offset)
            positions = [position for position, _ in split_batches(data)]
            count = self.rng.randint(1, 30)
            follower.append_as_follower(
                data[: positions[count] if count < len(positions) else len(data)]
            )
        self.follower_high_watermark = min(self.high_watermark, follower.end_offset)

    def clean_follower(self) -> None:
        if self.follower is not None:
            self._clean(self.follower, self.follower_high_watermark)

    def elect_follower(self) -> None:
        """A follower that has the whole log leads; the leader follows it."""
        if self.follower is None or self.follower.end_offset != self.log.end_offset:
            return
        if self.follower.last_epoch != self.log.last_epoch:
            return
        self.log, self.follower = self.follower, self.log
        self.place, self.follower_place = self.follower_place, self.place
        self.follower_high_watermark, self.copied_horizon = self.high_watermark, 0
        self.leader_epoch += 1

    def retain(self) -> None:
        stable_offset = self.log.stable_offset(self.high_watermark)
        start = self.rng.randint(self.log.start_offset, max(stable_offset, self.log.start_offset))
        Log.remove_files(self.place.disk, self.log.advance_start(start))

    def clean(self) -> None:
        self._clean(self.log, self.high_watermark)

    def _clean(self, log: Log, high_watermark: int) -> None:
        flush(log, checkpoint=True, high_watermark=high_watermark)
        memory_bytes = self.rng.choice([1, 2, 100]) * BYTES_PER_KEY
        cleaning = log.plan_cleaning(
            self.now_ms, memory_bytes=memory_bytes, bytes_per_s=MIB, at_once=True
        )
        if cleaning is None:
            return
        steps = clean(LocalDisk(), cleaning.job)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result = end.value
                break
        plan = log.plan_swap(cleaning, result, self.now_ms)
        assert plan is not None
        log.apply_swap(plan, plan.prepare())
        plan.finish()

    def wait(self) -> None:
        self.now_ms += self.rng.choice([100, 3000])

    # --- checks -------------------------------------------------------------------------------

    def check(self) -> None:
        log, model, high_watermark = self.log, self.model, self.high_watermark
        transactions = log.producers.transactions
        stable_offset = log.stable_offset(high_watermark)
        start = log.start_offset
        is_changed = log.cleaned_offset > 0 or start > 0
        assert stable_offset == max(model.stable_offset(high_watermark), min(start, high_watermark))
        undecided = model.undecided(high_watermark)
        assert transactions.undecided(high_watermark) == undecided
        without_marker = {one.family: one.epoch for one in model.undecided(1 << 60)}
        for family in FAMILIES:
            assert transactions.open_epoch(family) == without_marker.get(family)
            ended = [key[1] for key in model.markers(1 << 60) if key[0] == family]
            if is_changed:
                assert transactions.ended_epoch(family) in [-1, *ended]
            else:
                assert transactions.ended_epoch(family) == max(ended, default=-1)
        assert transactions.is_used or is_changed or not (model.firsts() or model.markers(1 << 60))
        since = self.rng.randint(0, log.end_offset)
        expected = [
            one.transaction
            for one in model.entries
            if one.is_commit is not None and one.offset >= since
        ]
        assert log.ended_between(since, log.end_offset) in (None, expected)
        if stable_offset > start:
            first = self.rng.randint(start, stable_offset)
            found = committed_rows(log, first, stable_offset, self.rng.choice([100, 300, 5000]))
            committed = model.committed(first, stable_offset)
            if not self.place.config.is_compacted:
                assert found == committed
                aborted = log.aborted_between(first, stable_offset)
                assert len(aborted) == len(set(aborted))
                if start == 0:
                    assert set(aborted) == model.aborted_between(first, stable_offset)
            else:
                assert set(found) <= set(committed)
                latest = {key: (offset, value) for offset, key, value in found}
                assert latest == {key: (offset, value) for offset, key, value in committed}


STEPS = {
    "record": 6,
    "transaction_record": 8,
    "marker": 5,
    "commit": 5,
    "reopen": 1,
    "truncate": 1,
    "copy": 1,
    "wait": 1,
}


def live(life: Life, steps: dict[str, int], count: int) -> None:
    for step in life.rng.choices(list(steps), list(steps.values()), k=count):
        getattr(life, step)()
        life.check()
    life.log.close(life.high_watermark)
    for report in verify(LocalDisk(), str(life.place.path)):
        assert report.is_sound, report.damage
        assert not [note for note in report.notes if "no disk damaged it" in note]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_log_knows_of_its_transactions_what_its_bytes_say(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed >= 2:  # Truncations begin at states in memory, not at snapshot files.
        monkeypatch.setattr(recent_producers, "STEP_BATCHES", 2)
    config = TopicConfig(segment_bytes=1024, index_interval_bytes=200)
    life = Life(tmp_path, Random(seed), config)
    live(life, {**STEPS, "retain": 1 if seed % 2 else 0}, 300)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_compaction_shows_the_latest_committed_records(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed >= 2:
        monkeypatch.setattr(recent_producers, "STEP_BATCHES", 2)
    config = TopicConfig(
        cleanup_policy="compact",
        segment_bytes=1024,
        index_interval_bytes=200,
        delete_retention_ms=1000,
    )
    life = Life(tmp_path, Random(seed), config)
    steps = {
        **STEPS,
        "clean": 3,
        "follow": 5,
        "clean_follower": 2,
        "reopen_follower": 1,
        "elect_follower": 2,
    }
    live(life, steps, 300)
