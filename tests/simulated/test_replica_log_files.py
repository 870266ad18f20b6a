"""One replica's log: reads, damage, the log start, and segments that others take the place of."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rayq.actors.replica.compactor import cleaner_in_steps
from rayq.actors.replica.flusher import CHECKPOINT_RETRY_S
from rayq.errors import (
    CorruptBatchError,
    DiskFullError,
    NotLeaderError,
    OpenFilesLimitError,
    StorageError,
)
from rayq.storage.batch import check_body, is_stand_in, read_header, split_batches
from rayq.storage.cleaner import CleaningResult
from rayq.storage.swap import Cleaning
from tests.simulated.log_stage import (
    AT_ONCE_S,
    BATCH_BYTES,
    COMPACTED,
    PATH,
    SLOW_S,
    SMALL,
    Held,
    holding,
    raised,
)
from tests.storage.support import values_in

# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cold", [0.0, 1.0])
def test_batches_are_read_from_the_page_cache_or_from_the_disk(cold: float) -> None:
    async def work(held: Held) -> None:
        held.disk.cold_reads = cold
        for offset, limit, bytes_max, end in (
            (0, 30, 1 << 20, 10), (29, 30, 1, 30), (3, 6, 1 << 20, 6), (3, 30, 1, 4), (5, 5, 9, 5),
        ):
            data, next_offset = await held.log.read(offset, limit, bytes_max)
            assert [one.base_offset for _, one in split_batches(data)] == [*range(offset, end)]
            assert next_offset == end
            found = await held.log.read_with_aborted(offset, limit, bytes_max)
            assert found == (data, end, [])

    holding(work, SMALL)


def damage(held: Held, segment: int, number: int) -> None:
    """Flips a bit in the header of the n-th batch of a segment; each has ten."""
    position = number * BATCH_BYTES + 9
    held.disk.flip_bit(f"{PATH}/{segment:020d}.log", position)


Read = Callable[[Held], Awaitable[object]]


def leftovers(held: Held) -> list[str]:
    """Old segments that were taken out of the log and are on disk still."""
    return [path for path in held.disk.paths() if path.endswith(".deleted")]


def test_damage_that_is_read_ends_a_replica_that_is_not_alone() -> None:
    reads: list[tuple[Read, str]] = [
        (lambda held: held.log.read(13, 30, 1 << 20), "t-0 at offset 13"),
        (lambda held: held.log.verify(10), "t-0 at offset 10"),
    ]
    for read, what in reads:

        async def work(held: Held, read: Read = read, what: str = what) -> None:
            damage(held, 10, 2)
            await raised(StorageError, read(held), f"Reading {what}")
            assert (held.log.is_damaged, held.failures) == (True, 1)
            assert not held.log.serves_around_damage and held.log.trouble is None

        holding(work, SMALL)


def test_a_disk_that_cannot_be_read_ends_a_replica_that_is_not_alone_without_damage() -> None:
    reads: list[tuple[Read, str]] = [
        (lambda held: held.log.read(10, 30, 1 << 20), "t-0 at offset 10"),
        (lambda held: held.log.verify(10), "t-0 at offset 10"),
        (lambda held: held.log.offset_for_time(1, 30), "t-0 at offset 0"),
    ]
    for read, what in reads:

        async def work(held: Held, read: Read = read, what: str = what) -> None:
            held.disk.cold_reads = 1.0
            held.disk.fail("read", path_part=".log")
            await raised(StorageError, read(held), f"Reading {what}")
            assert (held.log.is_damaged, held.failures) == (False, 1)

        holding(work, SMALL)


def test_who_is_alone_with_a_disk_that_cannot_be_read_goes_on() -> None:
    async def work(held: Held) -> None:
        held.lead_alone()
        held.disk.cold_reads = 1.0
        fault = held.disk.fail("read", path_part=".log")
        for read in (
            held.log.read(10, 30, 1 << 20), held.log.verify(10), held.log.offset_for_time(1, 30)
        ):
            await raised(StorageError, read, "No other replica is in sync")
        assert held.log.failure is None and not held.log.serves_around_damage
        assert held.log.trouble is not None and "t-0 at offset" in held.log.trouble
        fault.heal()
        assert (await held.log.read(10, 30, 1))[1] == 11

    holding(work, SMALL)


@pytest.mark.parametrize("ending", ["fail", "abandon"])
def test_who_is_alone_but_ends_while_it_reads_says_nothing_of_going_on(ending: str) -> None:
    reads: list[Read] = [
        lambda held: held.log.read(12, 30, 1 << 20),
        lambda held: held.log.offset_for_time(1, 30),
        lambda held: held.log.verify(10),
    ]
    for read in reads:

        async def work(held: Held, read: Read = read) -> None:
            held.lead_alone()
            held.disk.cold_reads = 1.0
            held.disk.fail("read", path_part=".log")
            reading = asyncio.ensure_future(read(held))
            await asyncio.sleep(0)
            if ending == "fail":
                held.log.fail(StorageError("another error"))
            else:
                held.log.abandon()
            await raised(StorageError, reading, r"^Reading t-0 at offset \d+: ")
            assert held.log.trouble is None and not held.log.serves_around_damage
            assert (held.failures, held.log.is_damaged) == (1, False)
            assert held.log.failure is not None
            assert (held.log.failure == "another error") is (ending == "fail")

        holding(work, SMALL)


def test_the_same_trouble_is_said_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def work(held: Held) -> None:
        held.lead_alone()
        held.disk.cold_reads = 1.0
        held.disk.fail("read", path_part=".log")
        for offset, said in ((10, 1), (10, 1), (20, 2)):
            await raised(StorageError, held.log.read(offset, 30, 1), "No other replica")
            lines = [one for one in caplog.messages if "No other replica is in sync" in one]
            assert len(lines) == said

    holding(work, SMALL)


def test_who_is_alone_with_damage_reads_around_it_until_another_is_in_sync() -> None:
    async def work(held: Held) -> None:
        log = held.log
        damage(held, 10, 2)
        held.lead_alone()
        await log.verify(10)  # A reader has found it.
        sound: list[int] = []
        offset = 0
        while offset < 30:
            data, offset = await log.read(offset, 30, 1 << 20)
            for at, header in split_batches(data):
                try:
                    check_body(data, at, header)
                except CorruptBatchError:
                    continue
                sound.append(header.base_offset)
        assert sound == [one for one in range(30) if one != 12]
        assert log.failure is None and log.serves_around_damage
        assert log.trouble is not None and "t-0 at offset 10: " in log.trouble
        assert await log.read(30, 30, 1) == (b"", 30)
        await log.verify(10)
        assert log.failure is None
        held.log.stop_leading()
        assert not log.serves_around_damage
        # Ordinary reads find the damage again, and another takes over.
        assert (await log.read(0, 10, 1))[1] == 1
        assert log.trouble is None
        await raised(StorageError, log.read(13, 30, 1 << 20))
        assert log.is_damaged

    holding(work, SMALL)


def test_who_is_alone_with_damage_waits_for_others_before_it_says_what_is_missing() -> None:
    async def work(held: Held) -> None:
        log = held.log
        damage(held, 10, 2)
        held.lead_alone(other_replicas=2)
        await log.verify(10)
        assert (await log.read(10, 30, 1 << 20))[1] == 12, "what is sound is served at once"
        assert (await log.read(13, 30, 1 << 20))[1] == 20
        for _ in range(3):
            await raised(StorageError, log.read(12, 30, 1 << 20), "Another may come into sync")
            await asyncio.sleep(3)
        assert log.failure is None
        await asyncio.sleep(2)
        data, end = await log.read(12, 30, 1 << 20)
        assert end == 13 and is_stand_in(data, 0, read_header(data))
        held.lead_alone(other_replicas=2)  # In a new epoch others may come again.
        await log.verify(10)
        await raised(StorageError, log.read(12, 30, 1 << 20), "Another may come into sync")

    holding(work, SMALL)


def test_damage_is_forgotten_once_it_is_deleted() -> None:
    async def work(held: Held) -> None:
        log = held.log
        held.lead_alone()
        damage(held, 10, 2)
        await log.read(12, 30, 1 << 20)
        await log.advance_log_start(12)
        assert log.serves_around_damage, "it is there still"
        await log.advance_log_start(13)
        assert not log.serves_around_damage and log.trouble is None
        assert (await log.read(13, 20, 1 << 20))[1] == 20
        assert log.failure is None

    holding(work, SMALL)


def test_an_error_of_a_read_of_what_was_cut_off_meanwhile_ends_nothing() -> None:
    async def work(held: Held) -> None:
        log = held.log.log
        error = CorruptBatchError("cut")
        told = held.log.unreadable(log, log.generation - 1, 9, error)
        assert isinstance(told, NotLeaderError) and "The log was cut back meanwhile" in str(told)
        assert (held.failures, held.log.failure, held.log.trouble) == (0, None, None)

    holding(work)


def test_where_no_file_can_be_opened_reads_are_refused_and_the_replica_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(held: Held) -> None:
        log = held.log

        async def full(*_: object) -> Any:
            raise OpenFilesLimitError("too many open files")

        with monkeypatch.context() as patch:
            held.disk.cold_reads = 1.0
            patch.setattr(type(held.environment.threads), "run", full)
            for read in (log.read(10, 30, 1), log.verify(10), log.offset_for_time(1, 30)):
                await raised(OpenFilesLimitError, read)
        assert (log.failure, log.trouble) == (None, None)
        held.lead_alone()
        damage(held, 10, 2)
        await log.read(12, 30, 1)
        trouble = log.trouble
        with monkeypatch.context() as patch:
            patch.setattr(type(held.environment.threads), "run", full)
            await raised(OpenFilesLimitError, log.read(12, 30, 1))
        assert (log.failure, log.trouble) == (None, trouble)
        held.disk.fail("read", path_part=".log")
        await raised(StorageError, log.read(12, 30, 1), "Reading t-0 at offset 12")

    holding(work, SMALL)


def test_only_what_is_on_this_disk_is_verified() -> None:
    async def work(held: Held) -> None:
        await held.log.drop_local(10)
        damage(held, 10, 0)
        damage(held, 20, 9)
        for offset in (0, 9, 30, 99):
            await held.log.verify(offset)
        assert held.log.failure is None
        held.lead_alone()
        await held.log.verify(10)
        assert held.log.trouble is not None and "at offset 10" in held.log.trouble
        held.log.trouble = None
        await held.log.verify(29)
        assert held.log.trouble is not None and "at offset 29" in held.log.trouble

    holding(work, SMALL)


# --- the log start --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_log_start_is_durable_and_old_segments_are_gone(is_remote: bool) -> None:
    async def work(held: Held) -> None:
        assert held.segments() == [0, 10, 20]
        await held.log.advance_log_start(20)
        assert (held.segments(), leftovers(held)) == ([20], [])
        await held.log.advance_log_start(99)
        assert (held.log.log.start_offset, held.segments()) == (30, [20])

    async def then(held: Held) -> None:
        assert (held.log.log.start_offset, held.log.log.end_offset) == (30, 30)

    config = SMALL | {"remote_storage": is_remote}
    holding(work, config, after_power_loss=then)


def test_segments_of_a_pass_of_the_cleaner_stay_until_it_has_ended() -> None:
    async def work(held: Held) -> None:
        held.log.is_compacted_now = True
        await held.log.advance_log_start(20)
        assert (held.log.log.persisted_log_start, held.segments()) == (20, [0, 10, 20])
        held.log.is_compacted_now = False
        await held.log.remove_below_start()
        assert (held.segments(), leftovers(held)) == ([20], [])

    holding(work, SMALL)


def test_a_log_start_waits_for_a_swap_and_what_is_done_waits_for_nothing() -> None:
    async def work(held: Held) -> None:
        log = held.log
        await log.advance_log_start(9)
        await log.files_lock.acquire()
        waiting = [
            asyncio.ensure_future(one)
            for one in (
                log.advance_log_start(11), log.remove_below_start(), log.drop_local(20),
                log.learn(0, 5, 5),
            )
        ]
        await asyncio.wait_for(log.advance_log_start(9), AT_ONCE_S)
        await asyncio.sleep(SLOW_S)
        assert not any(one.done() for one in waiting)
        assert (log.log.start_offset, log.log.local_start_offset) == (9, 9)
        assert log.log.cleaned_offset == 0
        log.files_lock.release()
        await asyncio.gather(*waiting)
        assert (log.log.start_offset, log.log.local_start_offset) == (11, 20)

    holding(work, SMALL)


def test_a_full_disk_keeps_no_old_segment() -> None:
    async def work(held: Held) -> None:
        fault = held.disk.fail("write", path_part="checkpoint", error=errno.ENOSPC)
        await raised(DiskFullError, held.log.advance_log_start(20))
        assert held.segments() == [20]
        assert not leftovers(held)
        fault.heal()
        await asyncio.sleep(CHECKPOINT_RETRY_S + AT_ONCE_S)
        assert held.log.log.persisted_log_start == 20

    holding(work, SMALL)


@pytest.mark.parametrize("is_advance", [True, False])
def test_segments_that_cannot_be_renamed_end_the_replica(is_advance: bool) -> None:
    async def work(held: Held) -> None:
        if not is_advance:
            held.log.is_compacted_now = True
            await held.log.advance_log_start(20)
        held.disk.fail("rename", path_part=f"{0:020d}.log")
        if is_advance:
            await raised(StorageError, held.log.advance_log_start(20))
        else:
            await held.log.remove_below_start()
        assert held.log.failure is not None and held.failures == 1

    holding(work, SMALL)


def test_old_segments_that_cannot_be_removed_stay_until_the_next_start() -> None:
    async def work(held: Held) -> None:
        fault = held.disk.fail("remove")
        await held.log.advance_log_start(20)
        assert held.log.failure is None
        fault.heal()
        assert leftovers(held)
        await held.log.close()
        again = Held(held.process, held.host, SMALL)
        await again.open()
        assert not leftovers(held)

    holding(work, SMALL)


def test_segments_that_are_in_the_object_store_leave_the_disk() -> None:
    async def work(held: Held) -> None:
        held.fill(1)
        await held.log.drop_local(31)  # A crash may yet cut it off.
        assert (held.log.log.local_start_offset, held.segments()) == (0, [0, 10, 20, 30])
        await held.log.drop_local(20)
        assert (held.log.log.start_offset, held.log.log.local_start_offset) == (0, 20)
        assert (held.segments(), leftovers(held)) == ([20, 30], [])
        await held.log.drop_local(31)
        assert held.log.log.local_start_offset == 31, "its checkpoint covered the last record"

    async def then(held: Held) -> None:
        assert (held.log.log.start_offset, held.log.log.local_start_offset) == (0, 31)

    holding(work, SMALL | {"remote_storage": True}, after_power_loss=then)


@pytest.mark.parametrize("ending", ["close", "fail"])
def test_nothing_is_removed_from_a_log_that_has_ended(ending: str) -> None:
    async def work(held: Held) -> None:
        held.log.is_compacted_now = True
        await held.log.advance_log_start(20)
        if ending == "close":
            await held.log.close()
        else:
            held.log.fail(StorageError("diverged"))
        await held.log.remove_below_start()
        assert held.segments() == [0, 10, 20]

    holding(work, SMALL)


# --- what a leader says ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_what_a_leader_says_is_durable_before_records_are_appended(seed: int) -> None:
    async def work(held: Held) -> None:
        await held.log.learn(20, 25, 22)
        await held.log.learn(24, 26, 24)  # It has nothing that such tombstones were of.

    async def then(held: Held) -> None:
        log = held.log.log
        assert (log.cleaned_offset, log.tombstone_horizon) == (26, 22)

    holding(work, seed=seed, after_power_loss=then)


def test_what_a_leader_says_again_is_not_written_and_what_cannot_be_is_not_believed() -> None:
    async def work(held: Held) -> None:
        await held.log.learn(20, 25, 22)
        held.disk.fail("write", "sync", "rename", "open")
        await held.log.learn(20, 25, 22)
        await raised(StorageError, held.log.learn(20, 27, 22))
        assert (held.log.log.cleaned_offset, held.log.failure) == (25, None)

    holding(work)


def test_who_is_cancelled_waits_for_the_thread_that_writes_and_keeps_the_lock_until_then() -> None:
    async def work(held: Held) -> None:
        held.disk.sync_s = (SLOW_S, SLOW_S)
        learning = asyncio.ensure_future(held.log.learn(20, 25, 22))
        await asyncio.sleep(SLOW_S / 2)
        learning.cancel()
        await asyncio.sleep(SLOW_S / 4)
        assert not learning.done() and held.log.files_lock.locked()
        await asyncio.wait([learning], timeout=5 * SLOW_S)
        assert learning.cancelled() and not held.log.files_lock.locked()
        assert held.log.log.cleaned_offset == 0, "its role has ended"

    holding(work)


# --- compaction -----------------------------------------------------------------------------------


async def cleaned(held: Held) -> tuple[Cleaning, CleaningResult, int]:
    """A pass of the cleaner over all 30 records, which have one key."""
    log, now_ms = held.log.log, held.clock.wall_ms() + 1_000
    held.log.advance_high_watermark(log.end_offset)
    assert log.roll_to_clean(now_ms)
    await held.log.flusher.checkpoint()
    cleaning = log.plan_cleaning(now_ms, memory_bytes=1 << 20, bytes_per_s=1 << 30, at_once=True)
    assert cleaning is not None
    return cleaning, await cleaner_in_steps(held.environment)(cleaning.job), now_ms


async def records(held: Held) -> int:
    data, offset = b"", 0
    while offset < 30:
        more, offset = await held.log.read(offset, 30, 1 << 20)
        data += more
    return len(values_in(data))


def test_compacted_segments_take_the_place_of_the_old_ones_for_good() -> None:
    async def work(held: Held) -> None:
        cleaning, result, now_ms = await cleaned(held)
        assert await held.log.swap(cleaning, result, now_ms)
        await then(held)

    async def then(held: Held) -> None:
        assert (await records(held), held.log.log.cleaned_offset) == (1, 30)

    holding(work, COMPACTED, after_power_loss=then)


@pytest.mark.parametrize("ending", ["close", "fail"])
def test_a_log_that_has_ended_or_is_another_by_now_takes_no_compacted_segments(
    ending: str,
) -> None:
    async def work(held: Held) -> None:
        pass_of = await cleaned(held)
        await held.log.advance_log_start(30)
        assert not await held.log.swap(*pass_of)
        assert held.log.failure is None
        if ending == "close":
            await held.log.close()
        else:
            held.log.fail(StorageError("diverged"))
        assert not await held.log.swap(*pass_of)

    holding(work, COMPACTED)


@pytest.mark.parametrize(
    "operations, path_part, is_used, fails",
    [
        (("write",), "swap", False, False),  # The old segments stay.
        (("sync",), "swap", False, False),
        (("sync_dir", "remove"), "t-0", False, True),  # It may be there at the next start.
        (("rename",), "cleaning/0", False, True),  # The next start finishes it.
    ],
)
def test_what_a_disk_error_does_to_compacted_segments(
    operations: tuple[str, ...], path_part: str, is_used: bool, fails: bool
) -> None:
    async def work(held: Held) -> None:
        pass_of = await cleaned(held)
        held.disk.fail(*operations, path_part=path_part)
        assert await held.log.swap(*pass_of) is is_used
        assert (held.log.failure is not None, held.failures) == (fails, int(fails))
        if not fails:
            assert (await records(held), held.log.log.cleaned_offset) == (30, 0)

    holding(work, COMPACTED)


@pytest.mark.parametrize("ending", ["close", "fail"])
def test_a_swap_of_a_log_that_ends_meanwhile_is_finished_by_the_next_start(ending: str) -> None:
    async def work(held: Held) -> None:
        pass_of = await cleaned(held)
        held.disk.sync_s = (SLOW_S, SLOW_S)
        swapping = asyncio.ensure_future(held.log.swap(*pass_of))
        await asyncio.sleep(SLOW_S / 2)
        if ending == "close":
            closing = asyncio.ensure_future(held.log.close())
            assert not await swapping
            await closing
        else:
            held.log.fail(StorageError("diverged"))
            assert not await swapping
            held.log.abandon()

    async def then(held: Held) -> None:
        assert await records(held) == 1

    holding(work, COMPACTED, after_power_loss=then)
