"""Crashes at every disk operation of a pass of the cleaner and of the swap: nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from proving.simulation import ProcessDied, World
from rayq.config import MIB, TopicConfig
from rayq.environment import Disk
from rayq.errors import StorageError
from rayq.messages.transaction_ids import make_family
from rayq.storage.batch import Marker, decode_columns, encode_batch, read_header, split_batches
from rayq.storage.checked_file import make_directory
from rayq.storage.clean_state import CLEANED
from rayq.storage.cleaner import BYTES_PER_KEY, CLEANING, clean, cleaner_turn
from rayq.storage.log import Log
from rayq.storage.swap import SWAP
from rayq.storage.verify import verify

DIRECTORY = "/data/topic-0"
NOW_MS = 1_000_000
CONFIG = TopicConfig(
    cleanup_policy="compact",
    segment_bytes=1024,
    index_interval_bytes=200,
    min_cleanable_dirty_ratio=0.0,
    delete_retention_ms=10,
    max_compaction_lag_ms=1,
)
Record = tuple[int, bytes | None, bytes | None]


def open_log(disk: Disk) -> Log:
    return Log.open(disk, DIRECTORY, CONFIG, checkpoint_bytes=MIB, now_ms=NOW_MS)


def commit(log: Log) -> None:
    plan = log.plan_flush(log.end_offset, checkpoint=True)
    assert plan is not None
    plan.run()
    assert log.apply_flush(plan)


def fill(log: Log, first: int = 0) -> None:
    """Makes segments of all kinds: some are merged, one is emptied, one stays as it is."""
    for number in range(first, first + 45):
        if number % 15 < 5:
            records = [(b"a", b"%d" % number), (b"k%d" % (number % 4), b"x" * 30)]
        elif number % 15 < 10:
            records = [(b"unique %d" % number, b"y" * 60)]
        else:
            records = [(b"k%d" % (number % 4), None)]
        batch = encode_batch([value for _, value in records], [key for key, _ in records], None, 7)
        header = read_header(batch)
        log.append_as_leader(batch, header, leader_epoch=number // 12, now_ms=NOW_MS)
    log.roll_to_clean(NOW_MS + 1)
    commit(log)


def run_pass(log: Log, disk: Disk, now_ms: int, memory_bytes: int = MIB) -> None:
    cleaning = log.plan_cleaning(
        now_ms, memory_bytes=memory_bytes, bytes_per_s=MIB, at_once=True
    )
    assert cleaning is not None
    with cleaner_turn(disk, DIRECTORY):
        steps = clean(disk, cleaning.job)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                result = end.value
                break
    plan = log.plan_swap(cleaning, result, now_ms)
    assert plan is not None
    log.apply_swap(plan, plan.prepare())
    plan.finish()


def records(log: Log) -> list[Record]:
    """What a reader of committed records gets, where all is below the high watermark."""
    found: list[Record] = []
    offset, end = log.start_offset, log.stable_offset(log.end_offset)
    while offset < end:
        first = offset
        data, offset = log.plan_read(first, end, 500).run()
        aborted = log.aborted_between(first, offset)
        for position, header in split_batches(data):
            key = (header.producer_id, header.producer_epoch)
            if header.is_control or (header.is_transactional and key in aborted):
                continue
            columns = decode_columns(data, position, header)
            keys = columns.keys or [None] * len(columns.values)
            found += zip(columns.offsets, keys, columns.values, strict=True)
    return found


def latest(found: list[Record]) -> dict[bytes | None, Record]:
    return {record[1]: record for record in found}


def crash_everywhere(
    prepare: Callable[[Log, Disk], None],
    work: Callable[[Log, Disk], None],
    check: Callable[[list[Record], Log], None],
) -> int:
    """Runs `work` on a prepared log with a crash at its first disk operation, then at its second,
    and so on until it gets through: once as a kill of the process, once as a loss of power. `check`
    gets the earlier records and the log opened again. Returns how many operations there are."""
    count = 0
    is_through = False
    while not is_through:
        count += 1
        for power_loss in (False, True):
            world = World(1000 * count + power_loss)
            with world:
                host = world.host()
                process = host.process("replica")
                disk = process.environment.disk
                make_directory(disk, os.path.dirname(DIRECTORY))
                log = open_log(disk)
                prepare(log, disk)
                before = records(log)
                process.kill_at_disk_operation(count, power_loss=power_loss)
                try:
                    work(log, disk)
                    is_through = True
                except ProcessDied:
                    pass
                if process.alive:
                    process.kill()
                for report in verify(host.process("verify").environment.disk, DIRECTORY):
                    assert report.is_sound, report.damage
                # The start that follows may die as well.
                starting = host.process("replica")
                starting.kill_at_disk_operation(1 + count % 9, power_loss=count % 2 == 0)
                try:
                    open_log(starting.environment.disk)
                except ProcessDied:
                    pass
                if starting.alive:
                    starting.kill()
                disk = host.process("replica").environment.disk
                log = open_log(disk)
                check(before, log)
                assert not disk.exists(f"{DIRECTORY}/{SWAP}")
                assert disk.list(f"{DIRECTORY}/{CLEANING}") == []
                run_pass_if_dirty(log, disk)
                check(before, log)
                for report in verify(disk, DIRECTORY):
                    assert report.is_sound, report.damage
    return count


def run_pass_if_dirty(log: Log, disk: Disk) -> None:
    if log.cleaned_offset < log.end_offset:
        run_pass(log, disk, NOW_MS + 2)


@pytest.mark.slow
def test_a_crash_anywhere_in_a_pass_or_its_swap_loses_nothing() -> None:
    def check(before: list[Record], log: Log) -> None:
        found = records(log)
        assert latest(found) == latest(before)
        assert set(found) <= set(before)
        assert log.end_offset == before[-1][0] + 1
        if log.cleaned_offset:
            assert sorted(latest(before).values()) == found

    operations = crash_everywhere(
        lambda log, _: fill(log), lambda log, disk: run_pass(log, disk, NOW_MS + 1), check
    )
    assert operations > 50, "the test crashed in each of them"


@pytest.mark.slow
def test_a_crash_while_tombstones_go_resurrects_nothing() -> None:
    def prepare(log: Log, disk: Disk) -> None:
        fill(log)
        run_pass(log, disk, NOW_MS + 1)
        fill(log, 45)

    def check(before: list[Record], log: Log) -> None:
        found, last = latest(records(log)), latest(before)
        for key in last.keys() - found.keys():
            offset, _, value = last[key]
            assert value is None and offset < log.tombstone_horizon
        assert found.items() <= last.items()

    crash_everywhere(prepare, lambda log, disk: run_pass(log, disk, NOW_MS + 20), check)


def fill_with_transactions(log: Log, first: int = 0) -> None:
    """Transactions of two families, half of them aborted, that interleave and span segments."""
    families = [make_family(0, 0), make_family(0, 1)]
    for number in range(first, first + 36):
        turn = number % 12
        family, epoch = families[number % 2], number // 12
        if turn in (10, 11):
            marker = Marker(family, epoch, is_commit=turn == 10, **COORDINATOR)
            log.append_marker(marker, leader_epoch=0, now_ms=NOW_MS)
            continue
        is_transactional = turn in (1, 2, 5, 6, 9)
        batch = encode_batch(
            [b"%d" % number, b"x" * 30],
            [b"k%d" % (number % 5), b"unique %d" % number],
            producer_id=family if is_transactional else None,
            producer_epoch=epoch if is_transactional else 0,
            base_sequence=2 * turn if is_transactional else None,
            is_transactional=is_transactional,
        )
        log.append_as_leader(batch, read_header(batch), leader_epoch=0, now_ms=NOW_MS)
    log.roll_to_clean(NOW_MS + 1)
    commit(log)


COORDINATOR = {"coordinator_partition": 0, "coordinator_epoch": 1}


@pytest.mark.slow
@pytest.mark.parametrize("keys", [12, 10_000])
def test_a_crash_anywhere_in_a_pass_over_transactions_shows_nothing_aborted(
    keys: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the pass ends in the middle of a segment and of a transaction."""

    def check(before: list[Record], log: Log) -> None:
        found = records(log)
        assert latest(found) == latest(before)
        assert set(found) <= set(before)
        assert log.producers.transactions.undecided(log.end_offset) == []

    operations = crash_everywhere(
        lambda log, _: fill_with_transactions(log),
        lambda log, disk: run_pass(log, disk, NOW_MS + 1, memory_bytes=keys * BYTES_PER_KEY),
        check,
    )
    assert operations > 30, "the test crashed in each of them"
    assert "rebuilt" not in caplog.text, "no crash damages an index below the recovery point"


@pytest.mark.thorough
def test_a_crash_while_markers_go_leaves_no_transaction_open() -> None:
    def prepare(log: Log, disk: Disk) -> None:
        fill_with_transactions(log)
        run_pass(log, disk, NOW_MS + 1)
        fill_with_transactions(log, 36)

    def check(before: list[Record], log: Log) -> None:
        assert latest(records(log)) == latest(before)
        assert log.producers.transactions.undecided(log.end_offset) == []

    crash_everywhere(prepare, lambda log, disk: run_pass(log, disk, NOW_MS + 20), check)


def test_a_swap_that_lost_its_segment_is_damage_and_deletes_nothing() -> None:
    with World(1) as world:
        host = world.host()
        disk = host.process("replica").environment.disk
        log = open_log(disk)
        fill(log)
        cleaning = log.plan_cleaning(NOW_MS + 1, memory_bytes=MIB, bytes_per_s=MIB)
        assert cleaning is not None
        steps = clean(disk, cleaning.job)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                plan = log.plan_swap(cleaning, end.value, NOW_MS + 1)
                break
        assert plan is not None
        plan.prepare()
        for name in disk.list(f"{DIRECTORY}/{CLEANING}"):
            disk.remove(f"{DIRECTORY}/{CLEANING}/{name}")
        names = disk.list(DIRECTORY)
        with pytest.raises(StorageError, match="Nothing was deleted"):
            open_log(disk)
        assert disk.list(DIRECTORY) == names
        assert not disk.exists(f"{DIRECTORY}/{CLEANED}")
