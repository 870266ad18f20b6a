"""When a replica's log is compacted, and what becomes of a pass; how a pass in steps is paced."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from proving.simulation import World
from proving.simulation.process import Process
from proving.simulation.server_view import clean_state_of
from proving.simulation.world import Host
from rayq.actors.clock_watch import ClockWatch
from rayq.actors.replica.compactor import BUSY_RETRY_S, Compactor, cleaner_in_steps
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.config import ClusterConfig
from rayq.errors import CorruptBatchError, DirectoryInUseError, RayqError
from rayq.storage.batch import decode_columns, encode_batch, read_header, split_batches
from rayq.storage.cleaner import CleaningJob, CleaningResult, cleaner_turn
from rayq.storage.data_directory import PartitionDirectory
from tests.simulated.followed import assignment

INTERVAL_S = 15.0
COMPACTED: dict[str, Any] = {
    "cleanup_policy": "compact", "segment_bytes": 1024, "min_cleanable_dirty_ratio": 0.0,
}
"""A segment has five records of the tests."""


class Compacted:
    """A log of keyed records and its compactor; the passes that it has run."""

    def __init__(
        self, process: Process, host: Host, config: ClusterConfig, topic_config: dict[str, Any]
    ) -> None:
        self.environment, self.host = process.environment, host
        self.environment.random.random = lambda: 0.5  # type: ignore[method-assign]
        self.failures = 0
        self.log = ReplicaLog(
            self.environment,
            config,
            assignment(config=topic_config),
            broker=0,
            incarnation="ours",
            on_flushed=lambda _: None,
            on_failure=self._failed,
        )
        self.watch = ClockWatch(self.environment.clock)
        self.compactor = Compactor(self.log, self._run, self.watch)
        self.jobs: list[CleaningJob] = []
        self.times_s: list[float] = []
        self.errors: list[Exception] = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.changes: dict[str, Any] = {}
        """What is different in the results of passes."""
        self._cleaner = cleaner_in_steps(self.environment)

    async def open(self) -> None:
        await self.log.open(
            PartitionDirectory.open(
                self.environment, "/data/t-0", topic="t", topic_id="id", partition=0,
                incarnation="ours", pid_start_time=1,
            )
        )

    def write(self, count: int, keys: int = 1, *, is_committed: bool = True) -> None:
        """Appends records of so many keys."""
        log = self.log.log
        for _ in range(count):
            key = b"key %d" % (log.end_offset % keys)
            batch = encode_batch([b"v" * 120], [key], None, 1000, compression="none")
            now_ms = self.environment.clock.wall_ms()
            log.append_as_leader(batch, read_header(batch), leader_epoch=1, now_ms=now_ms)
        if is_committed:
            self.log.advance_high_watermark(log.end_offset)

    async def offsets(self) -> list[int]:
        """Of the records that are left."""
        log, found, offset = self.log.log, list[int](), 0
        while offset < log.end_offset:
            data, offset = await self.log.read(offset, log.end_offset, 1 << 20)
            for position, header in split_batches(data):
                found += decode_columns(data, position, header).offsets
        return found

    async def tick(self, seconds: float) -> None:
        """Time passes; then it looks, and has time for a pass."""
        await asyncio.sleep(seconds)
        self.compactor.tick(self.now_s)
        await asyncio.sleep(0.5)

    @property
    def now_s(self) -> float:
        return self.environment.clock.monotonic()

    async def _run(self, job: CleaningJob) -> CleaningResult:
        assert self.log.is_compacted_now
        self.jobs.append(job)
        self.times_s.append(self.now_s)
        await self.may_go_on.wait()
        if self.errors:
            raise self.errors.pop(0)
        return msgspec.structs.replace(await self._cleaner(job), **self.changes)

    def _failed(self) -> None:
        self.failures += 1


def compacting(
    work: Callable[[Compacted], Awaitable[None]],
    *,
    config: ClusterConfig | None = None,
    **topic_config: Any,
) -> None:
    async def script(process: Process, host: Host) -> None:
        compacted = Compacted(process, host, config or ClusterConfig(), COMPACTED | topic_config)
        await compacted.open()
        await work(compacted)

    with World(seed=1) as world:
        host = world.host("broker")
        process = host.process("replica")
        world.run(process.run(script(process, host)))
        assert world.errors == []


# --- when -----------------------------------------------------------------------------------------


def test_the_first_look_comes_at_a_random_time_and_the_others_at_intervals() -> None:
    async def work(compacted: Compacted) -> None:
        compacted.write(12)
        tick = compacted.compactor.tick
        for now_s, passes in [
            (0.0, 0), (7.4, 0), (7.5, 1), (22.4, 1), (22.5, 2), (60.0, 3), (74.9, 3), (75.0, 4)
        ]:
            tick(now_s)
            await asyncio.sleep(0.5)
            assert len(compacted.jobs) == passes, f"at {now_s} s"
            if passes:
                compacted.write(12)

    compacting(work)


@pytest.mark.parametrize("policy, passes", [("delete", 0), ("compact", 1), ("compact,delete", 1)])
def test_only_topics_of_that_policy_are_compacted(policy: str, passes: int) -> None:
    async def work(compacted: Compacted) -> None:
        compacted.write(12)
        for _ in range(2):
            await compacted.tick(INTERVAL_S)
        assert len(compacted.jobs) == passes
        starts = [one.base_offset for one in compacted.log.log.local_segments()]
        active = starts[-1]
        expected = [active - 1, *range(active, 12)] if passes else [*range(12)]
        assert await compacted.offsets() == expected
        assert not compacted.log.is_compacted_now

    compacting(work, cleanup_policy=policy)


def test_one_pass_runs_at_a_time_and_none_once_the_log_is_closed() -> None:
    async def work(compacted: Compacted) -> None:
        compacted.compactor.stop()  # There is nothing to stop.
        compacted.write(12)
        compacted.may_go_on.clear()
        for _ in range(4):
            await compacted.tick(INTERVAL_S)
        assert len(compacted.jobs) == 1
        assert compacted.log.is_compacted_now
        compacted.may_go_on.set()
        await asyncio.sleep(0.5)
        assert not compacted.log.is_compacted_now
        compacted.write(12)
        await compacted.log.close()
        for _ in range(2):
            await compacted.tick(INTERVAL_S)
        assert (len(compacted.jobs), compacted.failures) == (1, 0)

    compacting(work)


def test_a_pass_that_is_stopped_changes_nothing() -> None:
    async def work(compacted: Compacted) -> None:
        compacted.write(12)
        compacted.may_go_on.clear()
        for _ in range(2):
            await compacted.tick(INTERVAL_S)
        compacted.compactor.stop()
        await asyncio.sleep(0.1)
        assert not compacted.log.is_compacted_now
        compacted.may_go_on.set()
        await asyncio.sleep(1.0)
        assert await compacted.offsets() == [*range(12)]
        assert compacted.failures == 0

    compacting(work)


def test_what_is_too_old_is_closed_to_be_compacted() -> None:
    async def work(compacted: Compacted) -> None:
        compacted.write(3)
        await compacted.tick(0)
        await compacted.tick(8)
        assert compacted.jobs == [], "the segment is open"
        await compacted.tick(INTERVAL_S)
        assert await compacted.offsets() == [2]
        assert compacted.log.log.flushed_offset == 3

    compacting(work, max_compaction_lag_ms=20_000)


def test_a_segment_that_was_closed_for_its_age_is_flushed_before_it_is_committed() -> None:
    async def work(compacted: Compacted) -> None:
        compacted.write(3, is_committed=False)
        await compacted.tick(0)
        await compacted.tick(2 * INTERVAL_S)
        assert compacted.jobs == []
        assert [one.base_offset for one in compacted.log.log.local_segments()] == [0, 3]
        assert compacted.log.log.flushed_offset == 3

    compacting(work, max_compaction_lag_ms=20_000)


def test_segments_of_other_topics_are_not_closed_for_compaction() -> None:
    async def work(compacted: Compacted) -> None:
        compacted.write(3)
        for _ in range(3):
            await compacted.tick(2 * INTERVAL_S)
        assert [one.base_offset for one in compacted.log.log.local_segments()] == [0]

    compacting(work, cleanup_policy="delete", max_compaction_lag_ms=20_000)


def test_what_comes_during_a_pass_waits_until_enough_is_dirty() -> None:
    async def work(compacted: Compacted) -> None:
        compacted.write(12)
        compacted.may_go_on.clear()
        for _ in range(2):
            await compacted.tick(INTERVAL_S)
        compacted.write(12)
        compacted.may_go_on.set()
        await asyncio.sleep(1.0)
        assert len(compacted.jobs) == 1
        assert compacted.log.log.cleaned_offset > 0

    compacting(work, min_cleanable_dirty_ratio=0.99)


def test_what_is_not_committed_is_left_alone_and_what_is_gets_a_checkpoint_first() -> None:
    async def work(compacted: Compacted) -> None:
        compacted.write(12, is_committed=False)
        for _ in range(2):
            await compacted.tick(INTERVAL_S)
        assert compacted.jobs == []
        compacted.log.advance_high_watermark(12)
        await compacted.tick(INTERVAL_S)
        (job,) = compacted.jobs
        assert job.groups[-1][-1].next_offset == compacted.log.log.local_segments()[-1].base_offset
        assert compacted.log.log.persisted_high_watermark == 12

    compacting(work)


def test_segments_that_the_log_start_has_passed_go_first() -> None:
    async def work(compacted: Compacted) -> None:
        compacted.write(12)
        await compacted.log.flusher.checkpoint()
        compacted.log.is_compacted_now = True  # A pass before reads them.
        second = compacted.log.log.local_segments()[1].base_offset
        await compacted.log.advance_log_start(second)
        assert compacted.log.log.local_segments()[0].base_offset == 0
        for _ in range(2):
            await compacted.tick(INTERVAL_S)
        assert compacted.jobs[0].groups[0][0].base_offset == second

    compacting(work)


@pytest.mark.parametrize("dirty_ratio", [0.0, 0.9])
def test_passes_follow_until_all_keys_are_done_where_the_memory_is_small(
    dirty_ratio: float,
) -> None:
    """Also where too little is dirty after the first of them to begin one."""

    async def work(compacted: Compacted) -> None:
        compacted.write(60, keys=10)
        for _ in range(2):
            await compacted.tick(INTERVAL_S)
            await asyncio.sleep(5)
        assert len(compacted.jobs) > 2, "the map has room for three keys"
        log = compacted.log.log
        active = log.local_segments()[-1].base_offset
        assert await compacted.offsets() == [*range(active - 10, 60)]
        assert compacted.jobs[1].dirty_offset > 0
        count = len(compacted.jobs)
        await compacted.tick(INTERVAL_S)
        assert len(compacted.jobs) == count, "nothing is dirty"

    config = ClusterConfig(compaction_memory_bytes=3 * 256)
    compacting(work, config=config, min_cleanable_dirty_ratio=dirty_ratio)


def test_a_job_has_the_limits_of_the_cluster() -> None:
    async def work(compacted: Compacted) -> None:
        compacted.write(12)
        for _ in range(2):
            await compacted.tick(INTERVAL_S)
        (job,) = compacted.jobs
        assert (job.memory_bytes, job.bytes_per_s) == (4096, 1_000_000)

    config = ClusterConfig(compaction_memory_bytes=4096, compaction_bytes_per_s=1_000_000)
    compacting(work, config=config)


# --- what becomes of a pass -----------------------------------------------------------------------


def test_while_another_log_is_compacted_it_tries_again_soon() -> None:
    async def work(compacted: Compacted) -> None:
        compacted.errors = [DirectoryInUseError("another log")]
        compacted.write(12)
        await compacted.tick(0)
        await compacted.tick(INTERVAL_S)
        assert len(compacted.jobs) == 1
        (failed_s,) = compacted.times_s
        compacted.compactor.tick(failed_s + BUSY_RETRY_S - 0.1)
        await asyncio.sleep(0.5)
        assert len(compacted.jobs) == 1
        compacted.compactor.tick(failed_s + BUSY_RETRY_S + 0.1)
        await asyncio.sleep(0.5)
        assert len(compacted.jobs) == 2
        assert compacted.log.log.cleaned_offset > 0

    compacting(work)


@pytest.mark.parametrize(
    "error", [RayqError("the helper died"), OSError(errno.ENOSPC, "no space")]
)
def test_a_pass_that_fails_leaves_the_log_as_it_was_and_is_tried_again(error: Exception) -> None:
    async def work(compacted: Compacted) -> None:
        compacted.errors = [error]
        compacted.write(12)
        await compacted.tick(0)
        await compacted.tick(INTERVAL_S)
        assert await compacted.offsets() == [*range(12)]
        assert (compacted.failures, compacted.log.is_compacted_now) == (0, False)
        await compacted.tick(2)
        assert len(compacted.jobs) == 1
        await compacted.tick(INTERVAL_S)
        assert len(compacted.jobs) == 2
        assert compacted.log.log.cleaned_offset > 0

    compacting(work)


def test_a_bug_in_a_pass_ends_the_replica() -> None:
    async def work(compacted: Compacted) -> None:
        compacted.errors = [KeyError("a bug")]
        compacted.write(12)
        await compacted.tick(0)
        await compacted.tick(INTERVAL_S)
        assert (compacted.failures, compacted.log.failure) == (1, "'a bug'")

    compacting(work)


@pytest.mark.parametrize("is_cut", [False, True])
def test_damage_ends_the_replica_unless_the_log_is_another_by_now(is_cut: bool) -> None:
    async def work(compacted: Compacted) -> None:
        compacted.write(12)
        for _ in range(2):
            await compacted.tick(INTERVAL_S)
        compacted.errors = [CorruptBatchError("a bit flipped")]
        compacted.write(12)
        compacted.may_go_on.clear()
        await compacted.tick(INTERVAL_S)
        offset = compacted.jobs[1].dirty_offset
        assert offset > 2
        if is_cut:
            compacted.log.log.truncate(12)
        compacted.may_go_on.set()
        await asyncio.sleep(0.5)
        assert not compacted.log.is_compacted_now
        if is_cut:
            assert (compacted.failures, compacted.log.failure) == (0, None)
        else:
            expected = f"Reading t-0 at offset {offset}: a bit flipped"
            assert (compacted.log.failure, compacted.log.is_damaged) == (expected, True)

    compacting(work)


@pytest.mark.parametrize("is_cut", [False, True])
def test_batches_that_nobody_can_read_are_told_of(
    is_cut: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rayq.actors.replica.compactor")

    async def work(compacted: Compacted) -> None:
        compacted.changes = {"unreadable_batches": 2, "unreadable_offset": 3}
        compacted.write(12)
        compacted.may_go_on.clear()
        await compacted.tick(0)
        await compacted.tick(INTERVAL_S)
        if is_cut:
            compacted.log.log.truncate(11)
        compacted.may_go_on.set()
        await asyncio.sleep(0.5)
        assert compacted.compactor.unreadable_batches == (0 if is_cut else 2)
        if not is_cut:
            compacted.changes = {}
            compacted.write(12)
            await compacted.tick(INTERVAL_S)
            assert compacted.compactor.unreadable_batches == 0

    compacting(work)
    told = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert len(told) == (0 if is_cut else 1)
    assert is_cut or told[0].startswith("t-0 has 2 batches that no reader can read")


def test_tombstones_are_dated_by_the_latest_time_that_it_may_be() -> None:
    async def work(compacted: Compacted) -> None:
        compacted.watch.doubt(1000)  # The clock is not believed yet.
        compacted.write(12)
        await compacted.tick(0)
        await compacted.tick(INTERVAL_S)
        (mark,) = clean_state_of(compacted.log.log).marks
        assert abs(mark.time_ms - compacted.environment.clock.wall_ms()) < 1000

    compacting(work)


# --- a pass in steps ------------------------------------------------------------------------------


def test_a_pass_in_steps_keeps_to_its_pace() -> None:
    async def work(compacted: Compacted) -> None:
        compacted.write(60, keys=3)
        await compacted.tick(0)
        await compacted.tick(INTERVAL_S)
        began_s, log = compacted.times_s[0], compacted.log
        size_bytes = sum(segment.size_bytes for segment in log.log.local_segments()[:-1])
        while log.is_compacted_now:
            assert compacted.now_s - began_s < 60
            await asyncio.sleep(0.1)
        # It reads the log twice, and writes what is left.
        assert 2 * size_bytes / 1000 <= compacted.now_s - began_s <= 3 * size_bytes / 1000
        assert log.log.cleaned_offset > 0

    compacting(work, config=ClusterConfig(compaction_bytes_per_s=1000))


def test_one_pass_in_steps_runs_at_a_time_on_a_disk() -> None:
    async def work(compacted: Compacted) -> None:
        environment = compacted.environment
        compacted.write(12)
        with cleaner_turn(environment.disk, "/data/t-0"):
            await compacted.tick(0)
            await compacted.tick(INTERVAL_S)
            assert len(compacted.jobs) == 1
            assert compacted.log.log.cleaned_offset == 0
        await compacted.tick(BUSY_RETRY_S)
        assert compacted.log.log.cleaned_offset > 0
        with cleaner_turn(environment.disk, "/data/t-0"):
            pass  # It has let go of it.

    compacting(work)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_the_next_pass_in_steps_may_begin_as_soon_as_one_has_ended(is_damaged: bool) -> None:
    async def work(compacted: Compacted) -> None:
        compacted.write(12)
        compacted.may_go_on.clear()
        await compacted.tick(0)
        await compacted.tick(INTERVAL_S)
        (job,) = compacted.jobs
        if is_damaged:
            compacted.host.disk.fail("read", path_part=".log")
            compacted.host.disk.cold_reads = 1.0
        run = cleaner_in_steps(compacted.environment)
        for _ in range(2):
            if is_damaged:
                with pytest.raises(OSError):
                    await run(job)
            else:
                assert (await run(job)).records_read > 0
        compacted.compactor.stop()

    compacting(work)


def test_a_pass_in_steps_that_is_cancelled_holds_its_turn_until_its_thread_is_done() -> None:
    async def work(compacted: Compacted) -> None:
        environment = compacted.environment
        compacted.write(12)
        compacted.may_go_on.clear()
        await compacted.tick(0)
        await compacted.tick(INTERVAL_S)
        (job,) = compacted.jobs
        go_on: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        run = environment.threads.run

        async def slow(*arguments: Any) -> Any:
            await go_on
            return await run(*arguments)

        environment.threads.run = slow  # type: ignore[method-assign]
        running = asyncio.ensure_future(cleaner_in_steps(environment)(job))
        await asyncio.sleep(0.1)
        running.cancel()
        await asyncio.wait((running,))
        with pytest.raises(DirectoryInUseError), cleaner_turn(environment.disk, "/data/t-0"):
            pass
        go_on.set_result(None)
        await asyncio.sleep(0.1)
        with cleaner_turn(environment.disk, "/data/t-0"):
            pass
        compacted.compactor.stop()

    compacting(work)
