"""A log whose older records are in the object store only: the local start, and what stays known of
the records below it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import pytest

from proving.simulation import ProcessDied, World
from rayq.config import MIB, TopicConfig
from rayq.environment import Disk
from rayq.errors import (
    CorruptBatchError,
    OffsetOutOfRangeError,
    RemoteStorageError,
    StorageError,
    UnknownProducerError,
    UnsupportedFormatError,
)
from rayq.storage import checked_file
from rayq.storage.batch import BatchHeader, read_header
from rayq.storage.checked_file import make_directory
from rayq.storage.checkpoint import CHECKPOINT, read_checkpoint
from rayq.storage.epochs import LEADER_EPOCHS
from rayq.storage.log import Log
from rayq.storage.verify import verify
from tests.storage.support import NOW_MS, Place, append, assert_holds, flush, make_batch, values_in

CONFIG = TopicConfig(
    remote_storage=True, segment_bytes=1024, local_retention_ms=1000, index_interval_bytes=200
)
LATER_MS = NOW_MS + 5000


@pytest.fixture(autouse=True)
def _tiered(place: Place) -> None:
    place.config = CONFIG


def fill(log: Log, records: int = 60) -> None:
    """Several segments of one-record batches, of which each tenth begins a leader epoch."""
    while log.end_offset < records:
        append(log, epoch=log.end_offset // 10)
        flush(log, high_watermark=log.end_offset)
    flush(log, checkpoint=True, high_watermark=log.end_offset)


def bases(log: Log) -> list[int]:
    return [segment.base_offset for segment in log.local_segments()]


def drop(log: Log, remote_end: int, disk: Disk | None = None) -> int:
    """What a replica does when its records up to `remote_end` are in the object store."""
    start = log.local_retention_start(LATER_MS, remote_end)
    assert start is not None
    log.drop_local(start)
    assert log.advance_start(0) == [], "no segment goes before the checkpoint"
    flush(log, checkpoint=True, high_watermark=log.end_offset)
    Log.remove_files(disk or log._disk, log.advance_start(0))
    return start


def check_lower_part(log: Log, start: int) -> None:
    assert (log.start_offset, log.local_start_offset) == (0, start)
    assert log.epochs.entries() == [(epoch, 10 * epoch) for epoch in range(6)]
    assert bases(log)[0] == start
    assert_holds(log, start, 60)


def test_what_is_in_the_object_store_leaves_the_disk_and_stays_known(place: Place) -> None:
    log = place.open()
    fill(log)
    closed = bases(log)[1:]
    assert len(closed) > 3
    assert log.local_retention_start(LATER_MS, 0) is None, "nothing is in the object store"
    assert log.local_retention_start(NOW_MS, 60) is None, "nothing is old enough"
    before = log.size_bytes
    start = drop(log, closed[2] + 1)
    assert start == closed[2], "whole segments below the remote end"
    assert log.size_bytes < before
    check_lower_part(log, start)
    with pytest.raises(RemoteStorageError, match="object store only"):
        log.plan_read(start - 1, 60, 100)
    with pytest.raises(RemoteStorageError):
        log.plan_verify(0)
    assert log.plan_offset_for_time(0, 60).run() == (start, NOW_MS)
    log.close(60)
    # KAFKA-15351: the next start knows the log start, and the one after it, too.
    for _ in range(2):
        log = place.open()
        check_lower_part(log, start)
        log.close(60)
    assert [report.damage for report in verify(place.disk, str(place.path))] == [[]]


def test_the_log_start_moves_over_records_that_are_not_here(place: Place) -> None:
    log = place.open()
    fill(log)
    start = drop(log, 60)
    assert log.advance_start(start - 5) == []
    flush(log, checkpoint=True, high_watermark=60)
    assert (log.start_offset, log.local_start_offset) == (start - 5, start)
    with pytest.raises(OffsetOutOfRangeError):
        log.plan_read(start - 6, 60, 100)
    assert log.epochs.epoch_of(start - 6) == (start - 6) // 10, "the record before the start"
    log.advance_start(start + 1)
    log.close(60)
    log = place.open()
    assert log.start_offset == log.local_start_offset == start + 1
    # From here on an older version of rayq can read it again.
    checked_file.read(place.disk, f"{place.path}/{CHECKPOINT}", "checkpoint", 1)
    append(log, epoch=9)
    assert values_in(log.plan_read(60, 61, 100).run().data) == [b"000000060 000000060 "[:20]]


def test_an_older_version_refuses_a_log_with_a_local_start(place: Place) -> None:
    log = place.open()
    fill(log)
    checkpoint = f"{place.path}/{CHECKPOINT}"
    checked_file.read(place.disk, checkpoint, "checkpoint", 1)
    drop(log, 60)
    with pytest.raises(UnsupportedFormatError):
        checked_file.read(place.disk, checkpoint, "checkpoint", 1)


def test_retention_leaves_nothing_that_looks_as_if_it_were_in_the_store(place: Place) -> None:
    """Where both starts move, a crash tells them apart."""
    log = place.open()
    fill(log)
    second, third = bases(log)[1:3]
    assert log.advance_start(second) == [], "the segments go after the checkpoint"
    log.drop_local(third)
    assert place.open().start_offset == 0, "nothing was written yet"
    flush(log, checkpoint=True, high_watermark=60)
    for _ in range(2):
        log = place.open()
        assert (log.start_offset, log.local_start_offset) == (second, third)
        assert bases(log)[0] == third


def test_a_missing_segment_is_no_local_start(place: Place) -> None:
    log = place.open()
    fill(log)
    start = drop(log, bases(log)[2])
    log.close(60)
    for suffix in (".log", ".index", ".timeindex"):
        (place.path / f"{start:020d}{suffix}").unlink()
    with pytest.raises(StorageError, match="is missing"):
        place.open()
    damage = [one for report in verify(place.disk, str(place.path)) for one in report.damage]
    assert any("are missing" in one for one in damage)


def test_epochs_that_were_lost_are_learned_again(place: Place) -> None:
    log = place.open()
    fill(log)
    known = log.epochs.entries()
    start = drop(log, 60)
    log.close(60)
    (place.path / LEADER_EPOCHS).unlink()
    log = place.open()
    assert log.epochs.entries()[0][1] == start
    log.learn_epochs([(0, 0), (7, 15)])
    assert log.epochs.entries()[0][1] == start, "another history tells nothing"
    log.learn_epochs([one for one in known if one[1] < start + 5])
    check_lower_part(log, start)
    log.close(60)
    check_lower_part(place.open(), start)


def test_a_cut_needs_the_producers_of_what_is_not_here(place: Place) -> None:
    log = place.open()
    batch = make_batch(0, producer_id=7, base_sequence=0)
    log.append_as_leader(batch, read_header(batch), leader_epoch=0, now_ms=NOW_MS)
    fill(log)
    start = drop(log, 45)
    for _ in range(5):  # More checkpoints than snapshots are kept of.
        append(log, 20, epoch=9)
        flush(log, checkpoint=True, high_watermark=60)
    assert not log.may_truncate(start - 1)
    for cut in (start + 12, start + 1, start):
        assert log.may_truncate(cut)
        log.truncate(cut)
        assert log.end_offset == cut
        check_duplicate(log)
    log.close(0)
    check_duplicate(place.open())


def check_duplicate(log: Log) -> None:
    again = make_batch(0, producer_id=7, base_sequence=0)
    duplicate = log.producers.check(read_header(again))
    assert duplicate is not None and duplicate.base_offset == 0
    with pytest.raises(UnknownProducerError):
        log.producers.check(header_of(producer_id=8, base_sequence=3))


def header_of(**numbers: int) -> BatchHeader:
    return read_header(make_batch(0, **numbers))  # type: ignore[arg-type]


def test_a_log_restarts_above_what_is_in_the_store(place: Place) -> None:
    leader = place.open()
    fill(leader)
    epochs, snapshot = leader.epochs.entries(), leader.producer_snapshot_at(45)
    log = replace(place, path=place.path.parent / "topic-1").open()
    log.reset(45, epochs, snapshot, log_start=3)
    for _ in range(2):
        assert (log.start_offset, log.local_start_offset, log.end_offset) == (3, 45, 45)
        assert log.persisted_high_watermark == 45
        assert log.last_epoch == 4
        assert log.epochs.entries() == epochs[:5]
        log = replace(place, path=place.path.parent / "topic-1").open()
    log.append_as_follower(leader.plan_read(45, 60, MIB).run().data)
    flush(log)
    log.truncate(50)
    log = replace(place, path=place.path.parent / "topic-1").open()
    assert (log.start_offset, log.local_start_offset) == (3, 45)
    assert_holds(log, 45, 50)
    # Below its local start it begins again.
    log.truncate(20)
    log = replace(place, path=place.path.parent / "topic-1").open()
    assert (log.start_offset, log.local_start_offset, log.end_offset) == (3, 20, 20)


def test_uploads_take_whole_batches_of_closed_segments(place: Place) -> None:
    log = place.open()
    fill(log)
    closed = bases(log)[-1]
    assert log.plan_upload(closed, 60, MIB) is None
    offset, data = 0, b""
    while (plan := log.plan_upload(offset, 60, 700)) is not None:
        found = plan.run()
        if found is None:
            break
        assert found.start == offset
        assert found.size_bytes <= 700
        for path, position, length in found.ranges:
            with closing(place.disk.open(path, writable=False)) as file:
                data += file.pread(length, position)
        offset = found.end
    assert offset == closed, "the active segment stays"
    assert values_in(data) == values_of(log, closed)
    offset = 0
    while (plan := log.plan_upload(offset, 5, MIB)) is not None:
        limited = plan.run()
        if limited is None:
            break
        offset = limited.end
    assert offset == 5, "the limit"
    plan = log.plan_upload(0, 60, 10)
    assert plan is not None
    least = plan.run()
    assert least is not None and least.end == 1, "one batch at least"
    drop(log, 20)
    with pytest.raises(RemoteStorageError):
        log.plan_upload(0, 60, MIB)
    append(log, epoch=7)
    assert not log.roll_to_upload(NOW_MS + CONFIG.remote_max_lag_ms - 1)
    assert log.roll_to_upload(NOW_MS + CONFIG.remote_max_lag_ms)
    plan = log.plan_upload(closed, 61, MIB)
    assert plan is None, "what was closed a moment ago is not on disk for sure"
    flush(log, checkpoint=True)
    plan = log.plan_upload(closed, 61, MIB)
    assert plan is not None
    last = plan.run()
    assert last is not None and (last.start, last.end) == (closed, 61)


def values_of(log: Log, end: int) -> list[bytes | None]:
    offset, found = log.local_start_offset, []
    while offset < end:
        data, offset = log.plan_read(offset, end, MIB).run()
        found += values_in(data)
    return found


def test_a_damaged_batch_is_not_taken_for_an_upload(place: Place) -> None:
    log = place.open()
    fill(log)

    def damage(data: bytearray) -> None:
        data[5] ^= 1

    place.edit(place.files(".log")[0], damage)
    plan = log.plan_upload(0, 60, MIB)
    assert plan is not None
    with pytest.raises(CorruptBatchError):
        plan.run()


# --- crashes --------------------------------------------------------------------------------------

DIRECTORY = "/data/topic-0"


def open_simulated(disk: Disk) -> Log:
    return Log.open(disk, DIRECTORY, CONFIG, checkpoint_bytes=MIB, now_ms=NOW_MS)


@pytest.mark.slow
def test_a_crash_at_any_step_of_a_drop_leaves_the_log_whole() -> None:
    """Each start knows the log start and all epochs, and has all records from its local start on,
    which lies below the remote end."""

    def work(log: Log, disk: Disk) -> None:
        drop(log, 50, disk)
        log.advance_start(3)
        flush(log, checkpoint=True, high_watermark=60)

    def check(log: Log) -> None:
        assert log.start_offset in (0, 3)
        assert log.local_start_offset <= 50
        kept = [(epoch, 10 * epoch) for epoch in range(6)]
        assert log.epochs.entries() == kept
        assert values_of(log, 60) == values_expected(log.local_start_offset)

    def cut(log: Log) -> None:
        log.truncate(max(log.local_start_offset, 1))
        check_duplicate(log)

    assert crash_everywhere(work, check, cut) > 20


@pytest.mark.slow
def test_a_crash_at_any_step_of_a_restart_leaves_one_log_or_the_other() -> None:
    epochs, restarted = [(0, 0), (3, 30), (8, 62)], 70

    def work(log: Log, disk: Disk) -> None:
        log.reset(restarted, epochs, b"", log_start=2)

    def check(log: Log) -> None:
        if log.end_offset == restarted:
            assert (log.start_offset, log.local_start_offset) == (2, restarted)
            assert log.epochs.entries() == epochs
            return
        assert (log.start_offset, log.local_start_offset, log.end_offset) == (0, 0, 60)
        assert values_of(log, 60) == values_expected(0)

    assert crash_everywhere(work, check) > 20


def values_expected(start: int) -> list[bytes]:
    return [(b"%09d " % number * 2)[:20] for number in range(start, 60)]


def crash_everywhere(
    work: Callable[[Log, Disk], None],
    check: Callable[[Log], None],
    at_last: Callable[[Log], None] = lambda _: None,
) -> int:
    """Runs `work` with a crash at its first disk operation, then at its second, and so on until it
    gets through: once as a kill of the process, once as a loss of power. The start that follows
    dies, too. Returns how many operations there are."""
    count, is_through = 0, False
    while not is_through:
        count += 1
        for power_loss in (False, True):
            with World(1000 * count + power_loss) as world:
                host = world.host()
                process = host.process("replica")
                disk = process.environment.disk
                make_directory(disk, os.path.dirname(DIRECTORY))
                log = open_simulated(disk)
                batch = make_batch(0, producer_id=7, base_sequence=0)
                log.append_as_leader(batch, read_header(batch), leader_epoch=0, now_ms=NOW_MS)
                fill(log)
                process.kill_at_disk_operation(count, power_loss=power_loss)
                try:
                    work(log, disk)
                    is_through = True
                except ProcessDied:
                    pass
                if process.alive:
                    process.kill()
                starting = host.process("replica")
                starting.kill_at_disk_operation(1 + count % 9, power_loss=count % 2 == 0)
                try:
                    check(open_simulated(starting.environment.disk))
                except ProcessDied:
                    pass
                if starting.alive:
                    starting.kill()
                disk = host.process("replica").environment.disk
                log = open_simulated(disk)
                check(log)
                for report in verify(disk, DIRECTORY):
                    assert report.is_sound, report.damage
                found = read_checkpoint(disk, DIRECTORY)
                assert found is not None
                assert found.local_start_offset == log.local_start_offset
                at_last(log)
    return count
