"""A voter's copy of the metadata log: durable, and cut only where no answer was based on it."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from proving.simulation import ProcessDied, World
from rayq.errors import (
    DiskFullError,
    FencedEpochError,
    InvalidRequestError,
    StorageError,
    UnsupportedFormatError,
)
from rayq.storage.metadata_log import Entry, MetadataLog
from tests.storage.support import CountingDisk, FaultyDisk


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "metadata")


def entries(first: int, last: int, epoch: int = 1) -> list[Entry]:
    return [(index, epoch, b"record %d.%d" % (index, epoch)) for index in range(first, last + 1)]


def open_log(path: str) -> MetadataLog:
    return MetadataLog.open(CountingDisk(), path)


State = tuple[int, int | None, int | None, bytes | None, list[Entry]]


def state_of(log: MetadataLog) -> State:
    return (
        log.promised_epoch,
        log.snapshot_index,
        log.snapshot_epoch,
        log.snapshot_data,
        log.read(log.first_index, 1 << 30),
    )


def test_a_new_log_holds_nothing(path: str) -> None:
    log = open_log(path)
    assert state_of(log) == (0, None, None, None, [])
    assert (log.first_index, log.last_index, log.last_epoch) == (1, 0, 0)
    assert (log.epoch_at(0), log.epoch_at(1)) == (0, None)


def test_entries_and_promises_are_there_after_a_reopen(path: str) -> None:
    log = open_log(path)
    log.promise(4)
    log.append(entries(1, 3))
    log.append(entries(4, 5, epoch=4))
    for one in (log, open_log(path)):
        assert state_of(one) == (4, None, None, None, entries(1, 3) + entries(4, 5, epoch=4))
        assert (one.first_index, one.last_index, one.last_epoch) == (1, 5, 4)
        assert [one.epoch_at(index) for index in range(7)] == [0, 1, 1, 1, 4, 4, None]


def test_a_promise_is_never_taken_back(path: str) -> None:
    log = open_log(path)
    log.promise(4)
    log.promise(4)
    with pytest.raises(FencedEpochError, match=r"4$"):
        log.promise(3)
    assert open_log(path).promised_epoch == 4


def test_every_change_is_synced_before_it_returns(path: str) -> None:
    disk = CountingDisk()
    log = MetadataLog.open(disk, path)
    for change in (
        lambda: log.promise(2),
        lambda: log.append(entries(1, 3)),
        lambda: log.append(entries(3, 3, epoch=2)),
        lambda: log.compact(2, 1, b"snapshot"),
        lambda: log.install_snapshot(9, 3, b"snapshot"),
    ):
        before = disk.syncs
        change()
        assert disk.syncs > before


def test_reads_are_bounded_but_give_at_least_one_entry(path: str) -> None:
    log = open_log(path)
    log.append(entries(1, 9))
    size = len(entries(1, 1)[0][2])
    assert log.read(3, 1) == entries(3, 3)
    assert log.read(3, 2 * size) == entries(3, 4)
    assert log.read(3, 1 << 20) == entries(3, 9)
    assert log.read(10, 1) == []


def test_what_is_held_already_is_skipped(path: str) -> None:
    log = open_log(path)
    log.append(entries(1, 5))
    log.append(entries(3, 7))
    log.append(entries(2, 4))
    log.append([])
    assert state_of(log)[4] == state_of(open_log(path))[4] == entries(1, 7)


def test_a_conflicting_tail_is_cut(path: str) -> None:
    log = open_log(path)
    log.append(entries(1, 9))
    log.append(entries(3, 4) + entries(5, 6, epoch=2))
    expected = entries(1, 4) + entries(5, 6, epoch=2)
    assert state_of(log)[4] == state_of(open_log(path))[4] == expected
    assert (log.last_index, log.last_epoch) == (6, 2)
    log.append(entries(7, 8, epoch=3))
    assert state_of(open_log(path))[4] == expected + entries(7, 8, epoch=3)


def test_entries_that_do_not_follow_on_are_refused(path: str) -> None:
    log = open_log(path)
    log.append(entries(1, 2))
    for wrong in (entries(4, 5), entries(3, 3) + entries(5, 5), entries(3, 3) + entries(3, 3)):
        with pytest.raises(InvalidRequestError):
            log.append(wrong)
    assert state_of(open_log(path))[4] == entries(1, 2)


def test_a_snapshot_takes_the_place_of_the_entries_it_stands_for(path: str) -> None:
    log = open_log(path)
    log.append(entries(1, 9))
    log.compact(6, 1, b"all up to 6")
    for one in (log, open_log(path)):
        assert state_of(one) == (0, 6, 1, b"all up to 6", entries(7, 9))
        assert (one.first_index, one.last_index, one.epoch_at(6), one.epoch_at(5)) == (
            7,
            9,
            1,
            None,
        )
        with pytest.raises(InvalidRequestError, match="snapshot"):
            one.read(6, 1)
    log.append(entries(5, 10))
    log.compact(10, 1, b"all up to 10")
    log.compact(3, 1, b"older")
    for one in (log, open_log(path)):
        assert state_of(one) == (0, 10, 1, b"all up to 10", [])
        assert (one.last_index, one.last_epoch) == (10, 1)
    with pytest.raises(InvalidRequestError):
        log.compact(11, 1, b"not held")


def test_a_snapshot_of_another_voter_keeps_only_what_agrees_with_it(path: str) -> None:
    log = open_log(path)
    log.append(entries(1, 9))
    log.install_snapshot(5, 1, b"agrees")
    assert state_of(open_log(path)) == (0, 5, 1, b"agrees", entries(6, 9))
    log.install_snapshot(4, 1, b"older")
    assert log.snapshot_data == b"agrees"
    log.install_snapshot(7, 2, b"another epoch")
    assert state_of(open_log(path)) == (0, 7, 2, b"another epoch", [])
    log.install_snapshot(90, 3, b"far ahead")
    log.append(entries(91, 92, epoch=3))
    assert state_of(open_log(path)) == (0, 90, 3, b"far ahead", entries(91, 92, epoch=3))


def test_a_torn_last_append_is_cut_wherever_it_was_torn(path: str) -> None:
    log = open_log(path)
    log.append(entries(1, 3))
    file = Path(path) / "metadata.log"
    size = file.stat().st_size
    log.append(entries(4, 6))
    data = file.read_bytes()
    for cut in range(size, len(data)):
        for rest in (b"", bytes(len(data) - cut)):
            if data[cut:] == rest:
                continue
            file.write_bytes(data[:cut] + rest)
            again = open_log(path)
            assert state_of(again)[4] == entries(1, 3)
            assert file.stat().st_size == size
    again.append(entries(4, 4, epoch=2))
    assert state_of(open_log(path))[4] == entries(1, 3) + entries(4, 4, epoch=2)


def test_a_torn_append_is_cut_although_its_record_looks_like_appends(path: str) -> None:
    log = open_log(path)
    log.append(entries(1, 3))
    file = Path(path) / "metadata.log"
    size, magic = file.stat().st_size, file.read_bytes()[:4]
    log.append([(4, 1, magic * 10)])
    file.write_bytes(file.read_bytes()[:-1])
    assert state_of(open_log(path))[4] == entries(1, 3)
    assert file.stat().st_size == size


def test_damage_before_intact_entries_is_refused_and_nothing_deleted(path: str) -> None:
    log = open_log(path)
    ends = [0]
    file = Path(path) / "metadata.log"
    for index in range(1, 5):
        log.append(entries(index, index))
        ends.append(file.stat().st_size)
    data = file.read_bytes()
    for position in range(ends[3]):
        damaged = bytearray(data)
        damaged[position] ^= 16
        file.write_bytes(damaged)
        with pytest.raises(
            StorageError, match=rf"metadata\.log, position {max(e for e in ends if e <= position)}"
        ):
            open_log(path)
        assert file.read_bytes() == damaged


def test_a_lost_or_damaged_snapshot_is_refused(path: str) -> None:
    log = open_log(path)
    log.append(entries(1, 9))
    log.compact(6, 1, b"all up to 6")
    file = Path(path) / "metadata.snapshot"
    good = file.read_bytes()
    file.write_bytes(good[:-1])
    with pytest.raises(StorageError, match="damaged"):
        open_log(path)
    file.unlink()
    with pytest.raises(StorageError, match="missing"):
        open_log(path)
    file.write_bytes(good.replace(b" 1 ", b" 2 ", 1))
    with pytest.raises(UnsupportedFormatError):
        open_log(path)


def test_a_full_disk_leaves_the_log_as_it_was(path: str) -> None:
    disk = FaultyDisk()
    log = MetadataLog.open(disk, path)
    log.append(entries(1, 3))
    disk.faults["write"] = errno.ENOSPC
    with pytest.raises(DiskFullError):
        log.append(entries(4, 6))
    disk.faults.clear()
    log.append(entries(4, 4))
    assert state_of(log)[4] == state_of(open_log(path))[4] == entries(1, 4)


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_a_disk_that_fails_ends_the_voter(path: str, operation: str) -> None:
    disk = FaultyDisk()
    log = MetadataLog.open(disk, path)
    log.append(entries(1, 3))
    disk.faults[operation] = errno.EIO
    with pytest.raises(StorageError, match="could not be written"):
        log.append(entries(4, 6))
    disk.faults.clear()
    with pytest.raises(StorageError):
        log.append(entries(4, 4))
    log.close()
    with pytest.raises(StorageError, match="could not be written"):
        log.promise(7)


def random_change(
    state: State, log: MetadataLog, rng: random.Random
) -> tuple[State, Callable[[], None]]:
    """The state after a change, and the change."""
    promised, index, epoch, data, held = state
    first = 1 if index is None else index + 1
    last = held[-1][0] if held else first - 1
    last_epoch = held[-1][1] if held else epoch or 0
    kind = rng.choice(("promise", "append", "append", "append", "cut", "compact", "install"))
    if kind == "promise":
        higher = promised + rng.randint(0, 2)
        return (higher, index, epoch, data, held), lambda: log.promise(higher)
    if kind == "cut" and held:
        place = rng.randrange(len(held))
        new = entries(held[place][0], held[place][0] + rng.randint(0, 5), last_epoch + 1)
        return (promised, index, epoch, data, held[:place] + new), lambda: log.append(new)
    if kind == "compact" and held:
        place = rng.randrange(len(held))
        up_to, of, snapshot = held[place][0], held[place][1], rng.randbytes(rng.randint(0, 9000))
        after = (promised, up_to, of, snapshot, held[place + 1 :])
        return after, lambda: log.compact(up_to, of, snapshot)
    if kind == "install":
        up_to, of = rng.randint(first, last + 5), rng.randint(1, last_epoch + 1)
        agrees = any(one[:2] == (up_to, of) for one in held)
        kept = [one for one in held if one[0] > up_to] if agrees else []
        after = (promised, up_to, of, b"theirs", kept)
        return after, lambda: log.install_snapshot(up_to, of, b"theirs")
    new = entries(last + 1, last + rng.randint(1, 4), last_epoch + rng.randint(0, 1))
    return (promised, index, epoch, data, held + new), lambda: log.append(new)


@pytest.mark.parametrize("seed", range(100))
def test_a_crash_leaves_the_state_before_or_after_the_change(seed: int) -> None:
    with World(seed) as world:
        rng, host = world.random, world.host()
        possible: list[State] = [(0, None, None, None, [])]

        def use_until_it_dies(log: MetadataLog) -> None:
            assert state_of(log) in possible
            possible[:] = [state_of(log)]
            for _ in range(30):
                after, change = random_change(possible[0], log, rng)
                possible.append(after)
                change()
                assert state_of(log) == after
                possible[:] = [after]

        for _ in range(12):
            process = host.process("voter")
            process.kill_at_disk_operation(rng.randint(1, 60), power_loss=rng.random() < 0.7)
            try:
                use_until_it_dies(MetadataLog.open(process.environment.disk, "/data/metadata"))
                host.power_loss()
            except ProcessDied:
                pass
            if not host.up:
                host.boot()
        log = MetadataLog.open(host.process("last").environment.disk, "/data/metadata")
        assert state_of(log) in possible
