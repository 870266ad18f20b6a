"""The changes of a partition's files, for `test_crash_points`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from rayq.config import MIB, TopicConfig
from rayq.messages.transaction_ids import make_family
from rayq.storage import checked_file
from rayq.storage.batch import (
    Marker,
    decode_columns,
    encode_batch,
    read_header,
    split_batches,
    stamp,
)
from rayq.storage.checked_file import make_directory
from rayq.storage.clean_state import write_clean_state
from rayq.storage.cleaner import CLEANING, clean
from rayq.storage.log import Log
from rayq.storage.producer_state import ProducerState, snapshot_path
from rayq.storage.recovery import RESET
from rayq.storage.segment import DELETED_SUFFIX, LOG_SUFFIX, segment_path
from rayq.storage.swap import SWAP, SwapPlan
from tests.storage.crash_disk import CrashDisk
from tests.storage.crash_points import Change, Step
from tests.storage.support import NOW_MS, append, flush, make_batch, read_bytes

DATA = "/data"
DIRECTORY = f"{DATA}/topic-0"
PLAIN = TopicConfig(segment_bytes=1024, index_interval_bytes=200)
TIERED = replace(PLAIN, remote_storage=True, local_retention_ms=1000)
COMPACTED = replace(
    PLAIN,
    cleanup_policy="compact",
    min_cleanable_dirty_ratio=0.0,
    delete_retention_ms=10,
    max_compaction_lag_ms=1,
)
PRODUCER = 7


Epochs = tuple[tuple[int, int], ...]


class LogState(NamedTuple):
    """All that a start finds of a log."""

    start: int
    local_start: int
    end: int
    records: tuple[tuple[int, bytes | None, bytes | None], ...]
    epochs: Epochs
    producers: bytes
    aborted: tuple[tuple[int, int], ...]
    cleaned_offset: int
    tombstone_horizon: int


def open_log(disk: CrashDisk, config: TopicConfig = PLAIN) -> Log:
    return Log.open(disk, DIRECTORY, config, checkpoint_bytes=MIB, now_ms=NOW_MS)


def look_at_log(disk: CrashDisk, config: TopicConfig = PLAIN) -> LogState:
    """Opens the log. No start leaves anything of a change that was under way."""
    log = open_log(disk, config)
    left = (checked_file.TEMPORARY_SUFFIX, DELETED_SUFFIX, SWAP, RESET)
    assert not [name for name in disk.list(DIRECTORY) if name.endswith(left)]
    assert disk.list(f"{DIRECTORY}/{CLEANING}") == []
    if log.local_start_offset > log.start_offset:
        # The batches below are not here, and a cut of the log may begin with them.
        path = snapshot_path(DIRECTORY, log.local_start_offset)
        ProducerState().load(checked_file.read_whole(disk, path) or b"", path)
    return state_of(log)


def state_of(log: Log) -> LogState:
    data = read_bytes(log, log.local_start_offset)
    records: list[tuple[int, bytes | None, bytes | None]] = []
    for position, header in split_batches(data):
        if not header.is_control:
            columns = decode_columns(data, position, header)
            keys = columns.keys or [None] * len(columns.values)
            records += zip(columns.offsets, keys, columns.values, strict=True)
    return LogState(
        start=log.start_offset,
        local_start=log.local_start_offset,
        end=log.end_offset,
        records=tuple(records),
        epochs=epochs_from(tuple(log.epochs.entries()), log.start_offset),
        producers=log.producers.snapshot(log.end_offset),
        aborted=tuple(log.aborted_between(log.start_offset, log.end_offset)),
        cleaned_offset=log.cleaned_offset,
        tombstone_horizon=log.tombstone_horizon,
    )


def begun(disk: CrashDisk, config: TopicConfig = PLAIN, records: int = 12) -> Log:
    """A log of several segments and epochs, with a checkpoint after each segment."""
    make_directory(disk, DATA)
    log = open_log(disk, config)
    extend(log, records)
    checkpoint(log)
    return log


def extend(log: Log, count: int) -> None:
    """Appends batches of one record each, four of them to a segment. Each fifth begins an epoch."""
    for _ in range(count):
        epoch, end = log.end_offset // 5, log.end_offset
        append(log, epoch=epoch, size=150, producer_id=PRODUCER, base_sequence=end)
        flush(log, high_watermark=log.end_offset)


def checkpoint(log: Log) -> None:
    flush(log, checkpoint=True, high_watermark=log.end_offset)


def go_on(log: Log, count: int = 2, *, may_checkpoint: bool = True) -> None:
    """Appends records in an epoch of their own, and flushes them at once."""
    for _ in range(count):
        append(log, epoch=90, size=140)
    plan = log.plan_flush(log.end_offset, may_checkpoint=may_checkpoint)
    assert plan is not None
    assert log.apply_flush(plan, has_checkpoint=plan.run())


def epochs_from(epochs: Epochs, start: int) -> Epochs:
    """The epochs of the records from `start` on: those before it may be forgotten at any time."""
    first = sum(begin <= start for _, begin in epochs)
    return epochs[max(0, first - 1) :]


def between(before: LogState, after: LogState, found: LogState) -> bool:
    """One of the two is a beginning of the other, and what is found lies between them."""
    short, long = sorted((before, after), key=lambda state: state.end)
    epochs = tuple(entry for entry in long.epochs if entry[1] < found.end) or short.epochs
    return (
        short.end <= found.end <= long.end
        and found.records == tuple(record for record in long.records if record[0] < found.end)
        and found.epochs == epochs
        and (found.start, found.local_start) == (long.start, long.local_start)
    )


def only_start_moves(before: LogState, after: LogState, found: LogState) -> bool:
    """What is found begins where one of the two does, or between, and has all from there on."""
    first = found.local_start
    return (
        (found.end, found.producers) == (after.end, after.producers)
        and found.epochs == epochs_from(before.epochs, found.start)
        and before.start <= found.start <= after.start
        and before.local_start <= first <= after.local_start
        and found.records == tuple(record for record in before.records if record[0] >= first)
    )


GO_ON = Step(go_on, between)


# --- retention ------------------------------------------------------------------------------------


def remove_below(log: Log, offset: int) -> None:
    Log.remove_files(log._disk, log.advance_start(offset))
    checkpoint(log)


def drop_local(log: Log) -> None:
    """All closed segments are in the object store, and leave the disk."""
    start = log.local_retention_start(NOW_MS + 5000, log.end_offset)
    assert start is not None
    log.drop_local(start)
    assert log.advance_start(0) == []
    checkpoint(log)
    Log.remove_files(log._disk, log.advance_start(0))


def with_local_start(disk: CrashDisk) -> Log:
    log = begun(disk, TIERED)
    drop_local(log)
    extend(log, 6)
    checkpoint(log)
    return log


# --- cuts -----------------------------------------------------------------------------------------


def with_tail(disk: CrashDisk, config: TopicConfig = PLAIN) -> Log:
    """The last records are on disk, and above the recovery point."""
    log = begun(disk, config)
    extend(log, 3)
    return log


def torn(disk: CrashDisk) -> CrashDisk:
    """What a loss of power may leave: half a batch, and the segment that follows it."""
    log = begun(disk)
    for _ in range(6):
        append(log, epoch=90, size=140)
    closed = log.local_segments()[-2]
    path = segment_path(log.directory, closed.base_offset, LOG_SUFFIX)
    with contextlib.closing(disk.open(path)) as file:
        file.truncate(file.size() - 50)
    return disk


def without_beginning(disk: CrashDisk) -> Log:
    log = begun(disk)
    remove_below(log, 8)
    return log


def reset(log: Log, log_start: int | None) -> None:
    producers = log.producer_snapshot_at(log.end_offset)
    log.reset(100, [(1, 90), (2, 95)], producers, log_start=log_start)


def leaders_bytes(start: int, count: int) -> bytearray:
    batch = make_batch(start, count)
    stamp(batch, 0, base_offset=start, leader_epoch=3, append_time_ms=NOW_MS)
    return batch


def follow(log: Log, start: int, count: int) -> None:
    log.append_as_follower(leaders_bytes(start, count))
    flush(log, high_watermark=log.end_offset)


def emptied(disk: CrashDisk) -> Log:
    log = begun(disk)
    reset(log, None)
    return log


# --- transactions and compaction ------------------------------------------------------------------


def extend_with_transactions(log: Log, first: int = 0) -> None:
    """Two families, one of which aborts. They share a few keys, and delete one of them."""
    families = [make_family(0, 0), make_family(0, 1)]
    for number in range(first, first + 12):
        turn, side = number % 6, number % 2
        if turn >= 4:
            marker = Marker(
                families[side], number // 6, side == 0, coordinator_partition=0, coordinator_epoch=1
            )
            log.append_marker(marker, leader_epoch=number // 6, now_ms=NOW_MS)
            continue
        batch = encode_batch(
            [b"%d" % number + b"x" * 80, None],
            [b"a%d" % (number % 3), b"b%d" % turn],
            producer_id=families[side],
            producer_epoch=number // 6,
            base_sequence=turn - side,
            is_transactional=True,
        )
        log.append_as_leader(batch, read_header(batch), leader_epoch=number // 6, now_ms=NOW_MS)
        flush(log, high_watermark=log.end_offset)
    checkpoint(log)


def extend_with_keys(log: Log) -> None:
    """Records that supersede one another, in segments of which most are merged."""
    for number in range(14):
        keys = [b"a", b"k%d" % (number % 4)] if number < 10 else [b"unique %d" % number]
        values = [None if number % 5 == 4 else b"%d" % number + b"x" * 90 for _ in keys]
        batch = encode_batch(values, keys, None, 7)
        log.append_as_leader(batch, read_header(batch), leader_epoch=number // 4, now_ms=NOW_MS)
    checkpoint(log)


def compacted(disk: CrashDisk, fill: Callable[[Log], None]) -> Log:
    make_directory(disk, DATA)
    log = open_log(disk, COMPACTED)
    fill(log)
    log.roll_to_clean(NOW_MS + 1)
    checkpoint(log)
    return log


def compacted_before(disk: CrashDisk) -> Log:
    """A log that was compacted once: the next pass takes tombstones and markers."""
    log = compacted(disk, extend_with_transactions)
    compact(log, NOW_MS + 1)
    extend_with_transactions(log, 12)
    log.roll_to_clean(NOW_MS + 2)
    checkpoint(log)
    return log


def plan_swap(log: Log, now_ms: int) -> SwapPlan:
    cleaning = log.plan_cleaning(now_ms, memory_bytes=MIB, bytes_per_s=MIB)
    assert cleaning is not None
    steps = clean(log._disk, cleaning.job)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            plan = log.plan_swap(cleaning, end.value, now_ms)
            assert plan is not None
            return plan


def compact(log: Log, now_ms: int) -> None:
    """As `ReplicaLog.swap` does it."""
    plan = plan_swap(log, now_ms)
    log.apply_swap(plan, plan.prepare())
    plan.finish()


def compact_and_cancel(log: Log) -> None:
    plan = plan_swap(log, NOW_MS + 1)
    plan.prepare()
    plan.cancel()


def perhaps_compacted(before: LogState, after: LogState, found: LogState) -> bool:
    """A swap that is given up is done by a start that comes before its file is gone."""

    def latest(state: LogState) -> dict[bytes | None, bytes | None]:
        return {key: value for _, key, value in state.records}

    return latest(found) == latest(before) and found.end == before.end


def go_on_with_keys(log: Log) -> None:
    batch = encode_batch([b"new"], [b"a"])
    log.append_as_leader(batch, read_header(batch), leader_epoch=90, now_ms=NOW_MS)
    flush(log, high_watermark=log.end_offset)


def learn(log: Log) -> None:
    state = log.plan_learning(log.end_offset, log.end_offset + 20, log.end_offset + 20)
    assert state is not None
    write_clean_state(log._disk, log.directory, state)
    log.learned(state)


def resume(disk: CrashDisk, config: TopicConfig) -> None:
    """The next process opens the log, and goes on with it."""
    log = open_log(disk, config)
    batch = encode_batch([b"resumed"], [b"a"])
    log.append_as_leader(batch, read_header(batch), leader_epoch=95, now_ms=NOW_MS)
    flush(log, high_watermark=log.end_offset)


def log_of(config: TopicConfig) -> Any:
    return {
        "look": partial(look_at_log, config=config),
        "resume": partial(resume, config=config),
    }


PLAIN_LOG, TIERED_LOG, COMPACTED_LOG = log_of(PLAIN), log_of(TIERED), log_of(COMPACTED)
LOG_CHANGES: dict[str, Change] = {
    "a flush": Change(prepare=begun, steps=[GO_ON, GO_ON], **PLAIN_LOG),
    "a flush after a roll": Change(
        prepare=begun, steps=[Step(partial(go_on, count=5), between), GO_ON], **PLAIN_LOG
    ),
    "a flush after a roll, without room for a checkpoint": Change(
        prepare=begun,
        steps=[Step(partial(go_on, count=5, may_checkpoint=False), between), GO_ON],
        **PLAIN_LOG,
    ),
    "a checkpoint": Change(prepare=with_tail, steps=[Step(checkpoint), GO_ON], **PLAIN_LOG),
    "a checkpoint of transactions": Change(
        prepare=partial(compacted, fill=extend_with_transactions),
        steps=[Step(lambda log: extend_with_transactions(log, 12), between), Step(go_on_with_keys)],
        **COMPACTED_LOG,
    ),
    "a controlled stop": Change(
        prepare=with_tail, steps=[Step(lambda log: log.close(15))], **PLAIN_LOG
    ),
    "the recovery of a torn tail": Change(
        prepare=torn,
        steps=[Step(lambda disk: go_on(open_log(disk)), between)],
        **PLAIN_LOG,
    ),
    "a truncation above the recovery point": Change(
        prepare=with_tail,
        steps=[Step(partial(Log.truncate, offset=13), between), GO_ON],
        **PLAIN_LOG,
    ),
    "a truncation over segments": Change(
        prepare=with_tail,
        steps=[Step(partial(Log.truncate, offset=6), between), GO_ON],
        **PLAIN_LOG,
    ),
    "a truncation between segments": Change(
        prepare=with_tail,
        steps=[Step(partial(Log.truncate, offset=8), between), GO_ON],
        **PLAIN_LOG,
    ),
    "a truncation to nothing": Change(
        prepare=without_beginning,
        steps=[Step(partial(Log.truncate, offset=5)), GO_ON],
        **PLAIN_LOG,
    ),
    "a reset": Change(
        prepare=with_tail,
        steps=[Step(partial(reset, log_start=None)), GO_ON],
        **PLAIN_LOG,
    ),
    "a reset to a part that is in the object store": Change(
        prepare=partial(with_tail, config=TIERED),
        steps=[Step(partial(reset, log_start=90)), GO_ON],
        **TIERED_LOG,
    ),
    "a follower that begins within a batch": Change(
        prepare=emptied,
        steps=[
            Step(partial(follow, start=98, count=4)),
            Step(partial(follow, start=102, count=1)),
        ],
        **PLAIN_LOG,
    ),
    "retention": Change(
        prepare=with_tail,
        steps=[Step(partial(remove_below, offset=8), only_start_moves), GO_ON],
        **PLAIN_LOG,
    ),
    "deleted records": Change(
        prepare=with_tail,
        steps=[Step(partial(remove_below, offset=10), only_start_moves), GO_ON],
        **PLAIN_LOG,
    ),
    "local retention": Change(
        prepare=partial(with_tail, config=TIERED),
        steps=[Step(drop_local, only_start_moves), GO_ON],
        **TIERED_LOG,
    ),
    "more local retention": Change(
        prepare=with_local_start,
        steps=[Step(drop_local, only_start_moves), GO_ON],
        **TIERED_LOG,
    ),
    "retention above a local start": Change(
        prepare=with_local_start,
        steps=[Step(partial(remove_below, offset=13), only_start_moves), GO_ON],
        **TIERED_LOG,
    ),
    "a truncation above a local start": Change(
        prepare=with_local_start,
        steps=[Step(partial(Log.truncate, offset=13), between), GO_ON],
        **TIERED_LOG,
    ),
    "a compaction": Change(
        prepare=partial(compacted, fill=extend_with_keys),
        steps=[Step(partial(compact, now_ms=NOW_MS + 1)), Step(go_on_with_keys)],
        **COMPACTED_LOG,
    ),
    "a compaction of transactions": Change(
        prepare=partial(compacted, fill=extend_with_transactions),
        steps=[Step(partial(compact, now_ms=NOW_MS + 1)), Step(go_on_with_keys)],
        **COMPACTED_LOG,
    ),
    "a compaction that removes tombstones and markers": Change(
        prepare=compacted_before,
        steps=[Step(partial(compact, now_ms=NOW_MS + 50)), Step(go_on_with_keys)],
        **COMPACTED_LOG,
    ),
    "a compaction that is given up": Change(
        prepare=partial(compacted, fill=extend_with_keys),
        steps=[Step(compact_and_cancel, perhaps_compacted), Step(go_on_with_keys)],
        **COMPACTED_LOG,
    ),
    "a copy of a compacted log": Change(
        prepare=partial(compacted, fill=extend_with_keys),
        steps=[Step(learn), Step(lambda log: follow(log, log.end_offset + 10, 1))],
        **COMPACTED_LOG,
    ),
}
