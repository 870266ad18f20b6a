"""One replica's log: how it begins and ends, and what it says is durable is."""

from __future__ import annotations

import asyncio
import errno

import pytest

from rayq.actors.replica.flusher import CHECKPOINT_RETRY_S
from rayq.errors import (
    CorruptBatchError,
    DiskFullError,
    NotLeaderError,
    RayqError,
    StorageError,
)
from tests.simulated.log_stage import (
    AT_ONCE_S,
    PATH,
    SLOW_S,
    Held,
    holding,
    raised,
)

# --- life -----------------------------------------------------------------------------------------


def test_what_a_log_says_before_it_is_open() -> None:
    async def work(held: Held) -> None:
        log = held.log
        assert (log.is_open, log.ends(), log.where) == (False, (None, -1), "t-0")
        with pytest.raises(NotLeaderError, match=r"replica of t-0 is not open\.$"):
            _ = log.log
        log.trouble = "the disk is full"
        with pytest.raises(NotLeaderError, match="not open: the disk is full"):
            _ = log.log
        log.configure({"segment_bytes": 2048})
        assert (log.topic_config.segment_bytes, held.flushed) == (2048, [])
        opening = asyncio.ensure_future(held.open())
        await asyncio.sleep(0)
        log.configure({"segment_bytes": 4096})
        await opening
        assert (log.is_open, log.ends()) == (True, (None, 0))
        assert log.log.config.segment_bytes == 4096

    holding(work, records=None)


@pytest.mark.parametrize("ending", ["close", "abandon"])
def test_who_ends_a_log_while_it_opens_leaves_a_directory_that_is_free(ending: str) -> None:
    async def work(held: Held) -> None:
        opening = asyncio.ensure_future(held.open())
        await asyncio.sleep(0)
        if ending == "close":
            await held.log.close()
        else:
            held.log.abandon()
            assert not held.is_free(), "a thread works in it"
        await opening
        assert held.is_free() and not held.log.is_open
        assert held.log.ends() == (None, -1)

    holding(work, records=None)


def test_a_directory_is_free_once_nobody_opens_its_log_any_more() -> None:
    async def work(held: Held) -> None:
        opening = asyncio.ensure_future(held.open())
        await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait([opening])
        assert not held.is_free(), "a thread works in it"
        await asyncio.sleep(SLOW_S)
        assert held.is_free()
        again = Held(held.process, held.host, {})
        fault = held.disk.fail("read", "open", path_part="checkpoint")
        await raised(StorageError, again.open())
        fault.heal()
        await asyncio.sleep(SLOW_S)
        assert held.is_free()

    holding(work, records=None)


@pytest.mark.parametrize("seed", range(3))
def test_a_log_that_was_closed_ends_where_it_said(seed: int) -> None:
    async def work(held: Held) -> None:
        held.fill(5)
        held.log.advance_high_watermark(33)
        assert held.log.ends() == (3, 30)
        await held.log.close()
        assert held.log.ends() == (3, 35) and held.is_free()
        with pytest.raises(NotLeaderError, match="not open"):
            _ = held.log.log

    async def then(held: Held) -> None:
        assert (held.log.ends(), held.log.high_watermark) == ((3, 35), 33)

    holding(work, seed=seed, after_power_loss=then)


def test_a_close_waits_for_what_is_under_way_in_the_directory() -> None:
    async def work(held: Held) -> None:
        log = held.log
        held.disk.sync_s = (SLOW_S, SLOW_S)
        held.fill(1)
        log.flusher.wake()  # A flush is under way,
        await asyncio.sleep(SLOW_S / 2)
        closing = asyncio.ensure_future(log.close())
        await asyncio.sleep(SLOW_S / 4)
        assert not closing.done() and not log.is_open
        await closing
        assert log.ends() == (3, 31)
        again = Held(held.process, held.host, {})
        await again.open()
        await again.log.files_lock.acquire()  # or a swap.
        closing = asyncio.ensure_future(again.log.close())
        await asyncio.sleep(10 * SLOW_S)
        assert not closing.done()
        again.log.files_lock.release()
        await closing
        assert held.is_free()

    holding(work)


def test_the_end_of_a_log_whose_last_flush_failed_is_as_after_a_crash() -> None:
    async def work(held: Held) -> None:
        held.fill(1)
        held.disk.fail("sync")
        await held.log.close()
        assert held.log.failure is not None and held.failures == 1
        assert held.log.ends() == (3, 30) and held.is_free()

    holding(work)


@pytest.mark.parametrize("ending", ["close", "abandon"])
def test_a_log_that_failed_is_left_as_it_is(ending: str) -> None:
    async def work(held: Held) -> None:
        held.fill(1)
        held.log.fail(StorageError("diverged"))
        if ending == "close":
            await held.log.close()
        else:
            held.log.abandon()
        await asyncio.sleep(SLOW_S)
        assert held.log.ends() == (3, 30) and held.is_free()

    holding(work)


@pytest.mark.parametrize("ending", ["abandon", "fail"])
def test_who_waits_for_a_checkpoint_of_a_log_that_ends_is_told(ending: str) -> None:
    async def work(held: Held) -> None:
        held.disk.sync_s = (5 * SLOW_S, 5 * SLOW_S)
        held.fill(1)
        waiting = asyncio.ensure_future(held.log.flusher.checkpoint())
        await asyncio.sleep(SLOW_S / 2)
        if ending == "abandon":
            held.log.abandon()
        else:
            held.log.fail(StorageError("its disk failed"))
        await raised(StorageError, waiting, "t-0 stopped before its flush")

    holding(work)


def test_a_log_that_was_abandoned_during_a_flush_tells_nobody_and_keeps_its_directory_until_then(
) -> None:
    async def work(held: Held) -> None:
        held.disk.sync_s = (SLOW_S, SLOW_S)
        told = [*held.flushed]
        held.fill(1)
        held.log.flusher.wake()
        await asyncio.sleep(SLOW_S / 2)
        held.log.abandon()
        assert not held.is_free()
        await asyncio.sleep(SLOW_S)
        assert held.is_free()
        assert held.flushed == told and held.failures == 0
        assert not held.log.flush_lock.locked()

    holding(work)


def test_the_first_failure_counts_and_is_told_once() -> None:
    async def work(held: Held) -> None:
        log = held.log
        damage = StorageError("second")
        damage.__cause__ = CorruptBatchError("a bit flipped")
        log.fail(StorageError("first"))
        log.fail(damage)
        log.fail(damage, is_damage=True)
        assert (log.failure, log.is_damaged, held.failures) == ("first", False, 1)
        assert not log.is_open
        with pytest.raises(StorageError, match="Replica of t-0 on broker 1: first"):
            _ = log.log

    holding(work)


@pytest.mark.parametrize("is_cause", [True, False])
@pytest.mark.parametrize("is_damage", [None, False, True])
def test_a_failure_is_damage_where_a_batch_is_damaged_unless_it_is_said(
    is_cause: bool, is_damage: bool | None
) -> None:
    async def work(held: Held) -> None:
        error: RayqError = CorruptBatchError("a bit flipped")
        if is_cause:
            outer = StorageError("reading")
            outer.__cause__ = error
            error = outer
        held.log.fail(error, is_damage=is_damage)
        assert held.log.is_damaged is (is_damage is not False)

    holding(work)


def test_a_background_task_that_fails_ends_the_replica() -> None:
    async def fine() -> None:
        done.append(1)

    async def wrong() -> None:
        raise ValueError("a mistake")

    done: list[int] = []

    async def work(held: Held) -> None:
        await held.log.guard(fine)
        assert done == [1] and held.log.failure is None
        await held.log.guard(wrong)
        assert (held.log.failure, held.failures) == ("a mistake", 1)

    holding(work)


def test_a_config_that_counts_more_as_flushed_says_so() -> None:
    async def work(held: Held) -> None:
        held.fill(1)
        held.flushed.clear()
        held.log.configure({"flush": "os"})
        assert held.log.log.config.flush == "os" and held.flushed == [31]

    holding(work)


# --- flushes and checkpoints ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_checkpoint_is_durable_with_all_that_is_there(seed: int) -> None:
    async def work(held: Held) -> None:
        held.fill(5)
        held.log.advance_high_watermark(32)
        await held.log.advance_log_start(7)
        await held.log.flusher.checkpoint()

    async def then(held: Held) -> None:
        assert (held.log.ends(), held.log.high_watermark) == ((3, 35), 32)
        assert held.log.log.start_offset == 7

    holding(work, seed=seed, after_power_loss=then)


def test_a_checkpoint_that_is_asked_for_in_the_first_flush_waits_for_the_next() -> None:
    """The first flush tries the checkpoint that the log found no room for as it was opened; what
    came since it began is not in it."""

    async def work(held: Held) -> None:
        held.fill(5)
        held.log.abandon()
        fault = held.disk.fail("write", path_part="checkpoint", error=errno.ENOSPC)
        again = Held(held.process, held.host, {})
        await again.open()
        fault.heal()
        held.disk.sync_s = (SLOW_S, SLOW_S)
        assert again.log.flush_lock.locked(), "a flush is under way"
        again.fill(1)
        again.log.advance_high_watermark(33)
        await again.log.flusher.checkpoint()
        assert again.flushed[-1] == 36
        assert again.log.log.persisted_recovery_point == 36
        assert again.log.log.persisted_high_watermark == 33

    holding(work)


def test_flushes_follow_each_other_and_each_covers_all_until_it_began() -> None:
    async def work(held: Held) -> None:
        held.disk.sync_s = (SLOW_S, SLOW_S)
        held.flushed.clear()
        began_s = held.clock.monotonic()
        held.fill(2)
        held.log.flusher.wake()
        await asyncio.sleep(SLOW_S / 2)
        for _ in range(3):
            held.fill(1)
            held.log.flusher.wake()
        await asyncio.sleep(SLOW_S)
        assert held.flushed == [32]
        await asyncio.sleep(SLOW_S)
        assert held.flushed == [32, 35]
        held.log.flusher.wake()
        await asyncio.sleep(3 * SLOW_S)
        assert held.flushed == [32, 35], "there was nothing to do"
        (seconds,) = (
            one for one in held.environment.metrics.collect() if one.name == "rayq_log_flush_seconds"
        )
        assert seconds.value == pytest.approx(2 * SLOW_S, abs=AT_ONCE_S)
        assert held.clock.monotonic() - began_s > 4 * SLOW_S

    holding(work)


def test_checkpoints_that_are_asked_for_together_wait_for_one_that_covers_them() -> None:
    async def work(held: Held) -> None:
        held.disk.sync_s = (SLOW_S, SLOW_S)
        held.fill(1)
        first = asyncio.ensure_future(held.log.flusher.checkpoint())
        await asyncio.sleep(SLOW_S / 2)
        held.fill(1)
        others = [asyncio.ensure_future(held.log.flusher.checkpoint()) for _ in range(2)]
        await first
        assert held.log.log.persisted_recovery_point == 31
        assert not any(one.done() for one in others)
        await asyncio.gather(*others)
        assert held.log.log.persisted_recovery_point == 32

    holding(work)


def test_a_flush_waits_for_whoever_holds_the_lock() -> None:
    async def work(held: Held) -> None:
        held.flushed.clear()
        async with held.log.flush_lock:
            held.fill(1)
            held.log.flusher.wake()
            await asyncio.sleep(SLOW_S)
            assert held.flushed == []
        await asyncio.sleep(SLOW_S)
        assert held.flushed == [31]

    holding(work)


def test_a_flush_that_fails_ends_the_replica_and_counts_for_nothing() -> None:
    async def work(held: Held) -> None:
        held.fill(1)
        held.flushed.clear()
        held.disk.fail("sync", path_part=".log")
        await raised(StorageError, held.log.flusher.checkpoint(), "stopped before its flush")
        assert held.log.failure is not None
        assert held.log.failure.startswith("Flushing the log of t-0 failed: ")
        assert (held.failures, held.flushed, held.log.is_damaged) == (1, [], False)
        assert held.log.ends() == (3, 30)
        assert not held.log.flush_lock.locked()

    holding(work)


def test_a_log_that_cannot_be_flushed_ends_its_replica_but_not_in_the_middle_of_an_append() -> None:
    async def work(held: Held) -> None:
        held.disk.fail("write", "truncate", path_part=".log")
        with pytest.raises(StorageError):
            held.fill(1)
        held.log.flusher.wake()
        assert held.log.failure is None
        await asyncio.sleep(0)
        assert held.log.failure is not None and held.failures == 1
        assert not held.log.flush_lock.locked()

    holding(work)


def test_a_full_disk_refuses_a_checkpoint_which_is_tried_again_by_itself() -> None:
    async def work(held: Held) -> None:
        log = held.log
        fault = held.disk.fail("write", path_part="checkpoint", error=errno.ENOSPC)
        held.fill(1)
        held.flushed.clear()
        await raised(DiskFullError, log.flusher.checkpoint(), f"{PATH}: no room for a checkpoint")
        assert (held.flushed, log.log.persisted_recovery_point) == ([31], 30)
        # Until it is tried again records are flushed without it.
        for _ in range(3):
            held.fill(1)
            log.flusher.wake()
            await asyncio.sleep(AT_ONCE_S)
        assert held.flushed == [31, 32, 33, 34] and log.failure is None
        await raised(DiskFullError, log.flusher.checkpoint())
        await asyncio.sleep(3 * CHECKPOINT_RETRY_S)
        assert log.log.persisted_recovery_point == 30
        fault.heal()
        await asyncio.sleep(CHECKPOINT_RETRY_S + AT_ONCE_S)
        assert log.log.persisted_recovery_point == 34
        held.fill(1)
        await asyncio.wait_for(log.flusher.checkpoint(), AT_ONCE_S)
        assert log.log.persisted_recovery_point == 35

    holding(work)


def test_a_log_that_ends_while_its_disk_is_full_tries_nothing_more() -> None:
    async def work(held: Held) -> None:
        fault = held.disk.fail("write", path_part="checkpoint", error=errno.ENOSPC)
        await raised(DiskFullError, held.log.flusher.checkpoint())
        held.log.abandon()
        fault.heal()
        held.flushed.clear()
        await asyncio.sleep(3 * CHECKPOINT_RETRY_S)
        assert held.is_free() and held.flushed == []

    holding(work)
