"""A voter's metadata log on the simulated disk: the effect of a call is there after any crash."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest

from proving.simulation import ProcessDied, World
from rayq.errors import DiskFullError, StorageError
from rayq.storage.metadata_log import Entry, MetadataLog

DIRECTORY = "/data/metadata"
STEPS = 100
State = tuple[int, tuple[int | None, int | None, bytes | None], list[Entry]]


class Voter:
    """Random use of one metadata log through crashes. `state` is the content that it must hold;
    while a call is under way, it may hold `changed` instead."""

    def __init__(self, seed: int, traps: bool = False) -> None:
        """With `traps` the process crashes at any disk operation."""
        self.traps = traps
        self.world = World(seed)
        self.rng = self.world.random
        self.host = self.world.host()
        self.host.disk.writebacks = self.rng.choice((0.0, 0.05, 0.5))
        self.state: State = (0, (None, None, None), [])
        self.changed: State | None = None
        self.crashes = 0
        self.open()

    def open(self) -> None:
        while True:
            process = self.host.process("voter")
            if self.traps and self.rng.random() < 0.3:
                process.kill_at_disk_operation(
                    self.rng.randint(1, 10), power_loss=self.rng.random() < 0.5
                )
            try:
                self.log = MetadataLog.open(process.environment.disk, DIRECTORY)
                found = self.read_state()
            except ProcessDied:
                continue
            break
        self.process = process
        if found not in (self.state, self.changed):
            may_be = " or ".join(_shown(state) for state in (self.state, self.changed) if state)
            pytest.fail(f"The log holds {_shown(found)}, it may hold {may_be}.")
        self.state, self.changed = found, None

    def read_state(self) -> State:
        log = self.log
        snapshot = log.snapshot_index, log.snapshot_epoch, log.snapshot_data
        entries = log.read(log.first_index, 1 << 30) if log.last_index >= log.first_index else []
        return log.promised_epoch, snapshot, entries

    def run(self) -> None:
        with self.world:
            for _ in range(STEPS):
                if self.traps and self.rng.random() < 0.2:
                    self.process.kill_at_disk_operation(
                        self.rng.randint(1, 12), power_loss=self.rng.random() < 0.5
                    )
                try:
                    self.step()
                except ProcessDied:
                    self.crashes += 1
                    if self.rng.random() < 0.2:
                        self.host.power_loss()
                    self.open()

    def step(self) -> None:
        acts = (self.promise, self.append, self.compact, self.install, self.crash)
        self.rng.choices(acts, (5, 40, 3, 3, 4))[0]()
        assert self.read_state() == self.state

    def change(self, state: State, act: Callable[[], None]) -> None:
        self.changed = state
        act()
        self.state, self.changed = state, None

    def crash(self) -> None:
        if self.rng.random() < 0.7:
            self.host.power_loss()
        else:
            self.process.kill()
        self.crashes += 1
        self.open()

    def promise(self) -> None:
        promised, snapshot, entries = self.state
        epoch = promised + self.rng.randint(0, 2)
        self.change((epoch, snapshot, entries), lambda: self.log.promise(epoch))

    def append(self) -> None:
        """Appends some entries; now and then they have a new epoch and replace old ones."""
        promised, snapshot, entries = self.state
        first, last = self.log.first_index, self.log.last_index
        start, epoch = last + 1, max(self.log.last_epoch, 1)
        if self.rng.random() < 0.15:
            start, epoch = self.rng.randint(first, last + 1), epoch + 1
        new = [
            (start + number, epoch, self.rng.randbytes(self.rng.choice((5, 100, 3000))))
            for number in range(self.rng.randint(1, 4))
        ]
        kept = [entry for entry in entries if entry[0] < start]
        overlap = kept[len(kept) - self.rng.randint(0, len(kept)) :]
        self.change((promised, snapshot, kept + new), lambda: self.log.append(overlap + new))

    def compact(self) -> None:
        promised, _, entries = self.state
        if entries:
            index, epoch, _ = self.rng.choice(entries)
            data = self.rng.randbytes(self.rng.choice((10, 10_000)))
            rest = [entry for entry in entries if entry[0] > index]
            self.change(
                (promised, (index, epoch, data), rest), lambda: self.log.compact(index, epoch, data)
            )

    def install(self) -> None:
        """Installs another voter's snapshot: of records held here, of missing ones, or of other
        records."""
        promised, _, entries = self.state
        index = self.log.last_index + self.rng.randint(-3, 5)
        if index <= (self.log.snapshot_index or 0):
            return
        epoch = self.log.epoch_at(index)
        rest = [entry for entry in entries if entry[0] > index]
        if epoch is None or self.rng.random() < 0.3:
            epoch, rest = self.log.last_epoch + 1, []
        data = self.rng.randbytes(100)
        self.change(
            (promised, (index, epoch, data), rest),
            lambda: self.log.install_snapshot(index, epoch, data),
        )


def _shown(state: State) -> str:
    promised, (index, epoch, _), entries = state
    places = ", ".join(f"{entry[0]}@{entry[1]}" for entry in entries)
    return f"(promise {promised}, snapshot {index}@{epoch}, entries {places})"


SEEDS = range(int(os.environ.get("STORAGE_SEEDS", "60")))


@pytest.mark.parametrize("seed", SEEDS)
def test_what_the_metadata_log_did_is_there_after_any_crash(seed: int) -> None:
    voter = Voter(seed, traps=True)
    voter.run()
    assert voter.crashes > 0


@pytest.mark.parametrize("seed", range(10))
def test_short_writes_are_completed_and_a_full_disk_refuses_and_heals(seed: int) -> None:
    voter = Voter(seed)
    with voter.world:
        voter.host.disk.short_writes = 0.5
        for _ in range(20):
            voter.step()
        fault = voter.host.disk.fail("write", error=errno.ENOSPC, times=2)
        next_entry = (voter.log.last_index + 1, max(voter.log.last_epoch, 1), b"next")
        while fault.times_left:
            with pytest.raises(DiskFullError):
                voter.log.append([next_entry])
            assert voter.read_state() == voter.state
        promised, snapshot, entries = voter.state
        after = promised, snapshot, [*entries, next_entry]
        voter.change(after, lambda: voter.log.append([next_entry]))
        voter.crash()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("operation", ["write", "sync", "rename", "sync_dir"])
def test_a_failing_disk_stops_the_voter_and_takes_nothing_back(operation: str, seed: int) -> None:
    voter = Voter(seed)
    with voter.world:
        for _ in range(10):
            voter.append()
        fault = voter.host.disk.fail(operation, times=1)
        for _ in range(50):
            try:
                voter.rng.choice((voter.append, voter.compact, voter.promise))()
            except StorageError:
                break
        assert fault.times_left == 0
        with pytest.raises(StorageError):
            voter.log.promise(1000)
        voter.host.power_loss()
        voter.open()
