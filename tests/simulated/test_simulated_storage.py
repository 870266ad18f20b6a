"""The real log on the simulated disk: crashes at any disk operation, power losses, faults.

A model remembers what was appended, what `flushed_offset` promised, and what was cut. After each
crash the log is opened again and compared with the model, byte for byte.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict

import pytest

from proving.simulation import ProcessDied, World
from rayq.config import TopicConfig
from rayq.errors import DiskFullError, StorageError
from rayq.storage import checked_file
from rayq.storage.batch import BatchHeader, check_body, encode_batch, read_header, split_batches
from rayq.storage.log import Log
from rayq.storage.producer_state import DuplicateBatch

DIRECTORY = "/data/topic-0"
STEPS = 120
PRODUCERS = 3


class Model:
    """The expected state of the log: `batches` from the first ever appended, by base offset."""

    def __init__(self) -> None:
        self.batches: list[tuple[BatchHeader, bytes]] = []
        self.start = 0
        self.start_asked = 0
        """The furthest offset that the log start was ever moved to; a crash may take that back."""
        self.start_min = 0
        """No crash brings the log start below this."""
        self.sure = 0
        """The offset below which no record may be lost to a power loss."""
        self.origin = 0
        """The offset where the log began, or was reset to."""
        self.high_watermark = 0
        self.in_doubt: tuple[BatchHeader, bytes] | None = None
        """The batch in whose append the process died."""
        self.reset_in_doubt: int | None = None

    @property
    def end(self) -> int:
        return self.batches[-1][0].next_offset if self.batches else self.origin

    @property
    def epoch(self) -> int:
        return self.batches[-1][0].leader_epoch if self.batches else 0

    def boundaries(self) -> list[int]:
        return [self.origin, *(header.next_offset for header, _ in self.batches)]

    def cut(self, end: int) -> None:
        self.batches = [batch for batch in self.batches if batch[0].next_offset <= end]
        self.sure = min(self.sure, end)
        self.high_watermark = min(self.high_watermark, end)

    def reset(self, offset: int) -> None:
        self.batches.clear()
        self.origin = self.start = self.start_asked = self.start_min = offset
        self.sure = self.high_watermark = offset

    def content(self, start: int, end: int) -> bytes:
        return b"".join(
            data
            for header, data in self.batches
            if header.next_offset > start and header.base_offset < end
        )


class Workload:
    """Random use of one log, through crashes, on one host."""

    def __init__(self, seed: int, flush: str = "disk", traps: bool = False) -> None:
        """With `traps` the process crashes at any disk operation."""
        self.world = World(seed)
        self.traps = traps
        self.rng = self.world.random
        self.host = self.world.host()
        self.host.disk.cold_reads = 0.2
        self.host.disk.writebacks = self.rng.choice((0.0, 0.05, 0.5))
        self.model = Model()
        self.now_ms = 1_000_000
        self.config = TopicConfig(
            flush=flush,  # type: ignore[arg-type]
            segment_bytes=self.rng.choice((1024, 4000, 20_000)),
            segment_ms=self.rng.choice((50, 7 * 86_400_000)),
            index_interval_bytes=self.rng.choice((100, 500, 4096)),
        )
        self.crashes = 0
        broker = self.host.process("broker")  # A log is made where a directory is on disk already.
        broker.call(checked_file.make_directory, broker.environment.disk, os.path.dirname(DIRECTORY))
        self.open()

    # --- life and death ---------------------------------------------------------------------------

    def open(self) -> None:
        """Opens the log. A crash may interrupt that."""
        while True:
            self.process = self.host.process("storage")
            self.disk = self.process.environment.disk
            if self.traps and self.rng.random() < 0.3:
                self.set_trap(self.rng.choice((3, 10, 30)))
            try:
                self.log = Log.open(
                    self.disk,
                    DIRECTORY,
                    self.config,
                    checkpoint_bytes=self.rng.choice((500, 5000, 100_000)),
                    now_ms=self.now_ms,
                )
            except ProcessDied:
                self.died()
            else:
                break
        self.verify_after_crash()
        self.model.sure = max(self.model.sure, self.log.flushed_offset)

    def set_trap(self, operations: int) -> None:
        self.process.kill_at_disk_operation(
            self.rng.randint(1, operations), power_loss=self.rng.random() < 0.6
        )

    def died(self) -> None:
        assert not self.process.alive
        self.crashes += 1

    def crash(self) -> None:
        if self.rng.random() < 0.6:
            self.host.power_loss()
        else:
            self.process.kill()
        self.died()
        self.open()

    def run(self) -> None:
        with self.world:
            for _ in range(STEPS):
                if self.traps and self.rng.random() < 0.1:
                    self.set_trap(20)
                try:
                    self.step()
                except ProcessDied:
                    self.died()
                    if self.rng.random() < 0.2:
                        self.host.power_loss()
                    self.open()

    def step(self) -> None:
        self.now_ms += self.rng.randint(0, 20)
        act = self.rng.choices(
            (
                self.append,
                self.append_as_follower,
                self.flush,
                self.read,
                self.truncate,
                self.advance_start,
                self.reset,
                self.reopen,
                self.crash,
            ),
            (30, 8, 12, 8, 3, 3, 0.5, 2, 3),
        )[0]
        act()
        self.verify_quick()

    # --- steps ------------------------------------------------------------------------------------

    def new_batch(self) -> bytearray:
        """The next batch of some producer. A producer that retention made the log forget takes a
        new epoch, as a client does."""
        producer = self.rng.randrange(PRODUCERS)
        last = self.last_of_producers().get(producer)
        count = self.rng.randint(1, 5)
        values = [self.rng.randbytes(self.rng.choice((0, 10, 300))) for _ in range(count)]
        epoch = sequence = 0
        if last is not None and last.last_sequence is not None:
            epoch, sequence = last.producer_epoch, last.last_sequence + 1
        if last is not None and last.base_offset < self.model.start:
            epoch, sequence = epoch + 1, 0
        return encode_batch(
            values,
            timestamps_ms=self.now_ms,
            producer_id=producer,
            producer_epoch=epoch,
            base_sequence=sequence,
        )

    def last_of_producers(self) -> dict[int, BatchHeader]:
        found: dict[int, BatchHeader] = {}
        for header, _ in self.model.batches:
            assert header.producer_id is not None
            found[header.producer_id] = header
        return found

    def append(self) -> None:
        data = self.new_batch()
        header = read_header(data)
        assert self.log.producers.check(header) is None
        epoch = max(1, self.model.epoch + (self.rng.random() < 0.1))
        try:
            stamped = self.log.append_as_leader(
                data, header, leader_epoch=epoch, now_ms=self.now_ms
            )
        except ProcessDied:
            # The log stamps in place before it writes; unstamped, nothing was written.
            stamped = read_header(data)
            if stamped.leader_epoch == epoch:
                self.model.in_doubt = stamped, bytes(data)
            raise
        assert stamped.base_offset == self.model.end
        assert self.log.end_offset == stamped.next_offset
        self.model.batches.append((stamped, bytes(data)))

    def append_as_follower(self) -> None:
        """Appends several batches at once, as another log stamped them."""
        other_world = World(self.rng.getrandbits(32))
        disk = other_world.host().process("leader").environment.disk
        leader = Log.open(disk, "/l", TopicConfig(), checkpoint_bytes=1 << 30, now_ms=self.now_ms)
        leader.reset(self.model.end, [], b"")
        payload = bytearray()
        batches = []
        before = list(self.model.batches)
        for _ in range(self.rng.randint(1, 4)):
            data = self.new_batch()
            epoch = max(1, self.model.epoch)
            stamped = leader.append_as_leader(
                data, read_header(data), leader_epoch=epoch, now_ms=self.now_ms
            )
            payload += data
            batches.append((stamped, bytes(data)))
            self.model.batches.append(batches[-1])
        other_world.close()
        self.model.batches = before
        try:
            end = self.log.append_as_follower(payload)
        except ProcessDied:
            # Any number of the batches may be there: each is "in doubt" like the batch of an
            # append.
            self.model.batches += batches
            self.model.in_doubt = batches[0]
            raise
        self.model.batches += batches
        assert end == self.model.end

    def flush(self) -> None:
        high_watermark = self.rng.randint(0, self.model.sure)
        high_watermark = max(high_watermark, self.model.high_watermark)
        plan = self.log.plan_flush(high_watermark, checkpoint=self.rng.random() < 0.3)
        if plan is None:
            return
        self.model.high_watermark = high_watermark
        while self.rng.random() < 0.4:
            self.append()
        end = plan.end_offset
        assert self.log.apply_flush(plan, has_checkpoint=plan.run())
        self.model.sure = max(self.model.sure, end)
        assert self.log.flushed_offset >= end

    def read(self) -> None:
        log, model = self.log, self.model
        if log.start_offset == log.end_offset:
            return
        offset = self.rng.randrange(log.start_offset, log.end_offset)
        boundaries = [edge for edge in model.boundaries() if edge > offset]
        limit = self.rng.choice(boundaries)
        plan = log.plan_read(offset, limit, self.rng.choice((1, 500, 5000, 1 << 20)))
        result = plan.run_cached() or plan.run()
        assert offset < result.next_offset <= limit
        assert result.data == model.content(offset, result.next_offset)
        timestamp_ms = self.rng.randint(1_000_000, self.now_ms + 10)
        found = log.plan_offset_for_time(timestamp_ms, log.end_offset).run()
        expected = next(
            (
                header
                for header, _ in model.batches
                if header.max_timestamp_ms >= timestamp_ms and header.next_offset > log.start_offset
            ),
            None,
        )
        if expected is None:
            assert found is None
        else:
            assert found is not None
            assert found == (
                max(expected.base_offset, log.start_offset),
                expected.max_timestamp_ms,
            )

    def truncate(self) -> None:
        """Cuts the log at any offset: the batch that holds the offset goes too."""
        if not self.model.batches:
            return
        recent = [
            header for header, _ in self.model.batches if header.next_offset > self.model.start
        ]
        if not recent:
            return
        header = self.rng.choice(recent[-8:])
        if header.base_offset < self.model.start:
            return
        offset = self.rng.randint(header.base_offset, header.last_offset)
        self.model.sure = min(self.model.sure, header.base_offset)
        self.log.truncate(offset)
        self.model.cut(header.base_offset)
        self.model.sure = self.model.end
        assert self.log.end_offset == self.model.end

    def advance_start(self) -> None:
        if self.log.end_offset == self.log.start_offset:
            return
        offset = self.rng.randint(
            self.log.start_offset, max(self.log.start_offset, self.model.sure)
        )
        self.model.start = max(self.model.start, offset)
        self.model.start_asked = max(self.model.start_asked, offset)
        paths = self.log.advance_start(offset)
        Log.remove_files(self.disk, paths)
        assert self.log.start_offset == offset

    def reset(self) -> None:
        offset = self.model.end + self.rng.randint(1, 50)
        self.model.reset_in_doubt = offset
        self.log.reset(offset, [], b"")
        self.model.reset_in_doubt = None
        self.model.reset(offset)

    def reopen(self) -> None:
        """Stops cleanly and starts again."""
        high_watermark = self.model.high_watermark
        self.log.close(high_watermark)
        self.model.sure = self.model.end
        self.model.start_min = self.model.start
        self.process.kill()
        self.open()
        assert self.log.end_offset == self.model.end

    # --- checks -----------------------------------------------------------------------------------

    def verify_quick(self) -> None:
        log, model = self.log, self.model
        assert log.end_offset == model.end
        assert log.start_offset == model.start
        assert log.flushed_offset <= log.end_offset
        assert log.persisted_high_watermark <= max(model.high_watermark, 0)

    def verify_after_crash(self) -> None:
        log, model = self.log, self.model
        if model.reset_in_doubt is not None and log.end_offset == model.reset_in_doubt:
            model.reset(model.reset_in_doubt)
        model.reset_in_doubt = None
        floor = model.sure
        if model.in_doubt is not None and model.in_doubt not in model.batches:
            model.batches.append(model.in_doubt)
        model.in_doubt = None
        edges = model.boundaries()
        assert log.end_offset in edges, f"the log ends at {log.end_offset}, not at one of {edges}"
        assert log.end_offset >= floor, f"lost {log.end_offset} to {floor}, which was flushed"
        model.cut(log.end_offset)
        assert model.start_min <= log.start_offset <= model.start
        model.start = log.start_offset
        self.verify_quick()
        self.verify_content()
        self.verify_epochs()
        self.verify_producers()

    def verify_content(self) -> None:
        log = self.log
        offset, data = log.start_offset, b""
        while offset < log.end_offset:
            result = log.plan_read(offset, log.end_offset, 10_000).run()
            assert result.next_offset > offset
            offset, data = result.next_offset, data + result.data
        assert data == self.model.content(log.start_offset, log.end_offset)
        for position, header in split_batches(data):
            check_body(data, position, header)

    def verify_epochs(self) -> None:
        log = self.log
        first: dict[int, int] = {}
        for header, _ in self.model.batches:
            first.setdefault(header.leader_epoch, header.base_offset)
        for epoch, start in first.items():
            if start >= self.model.start_asked:
                assert log.epochs.start_of(epoch) == start
        if self.model.batches:
            assert log.last_epoch == self.model.epoch

    def verify_producers(self) -> None:
        """Each batch that a producer may still send again is known as a duplicate."""
        by_producer: dict[int | None, list[BatchHeader]] = defaultdict(list)
        for header, _ in self.model.batches:
            known = by_producer[header.producer_id]
            if known and known[-1].producer_epoch != header.producer_epoch:
                known.clear()
            if header.base_offset >= self.log.start_offset:
                known.append(header)
        for headers in by_producer.values():
            for header in headers[-5:]:
                assert self.log.producers.check(header) == DuplicateBatch(
                    header.base_offset, header.last_offset, header.append_time_ms
                )


SEEDS = range(int(os.environ.get("STORAGE_SEEDS", "60")))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_log_keeps_its_word_through_crashes(seed: int) -> None:
    workload = Workload(seed, traps=True)
    workload.run()
    assert workload.crashes > 0


@pytest.mark.parametrize("seed", range(5))
def test_a_process_crash_alone_loses_nothing_that_was_appended(seed: int) -> None:
    workload = Workload(seed, flush="os")
    with workload.world:
        for _ in range(60):
            workload.append()
            if workload.rng.random() < 0.2:
                workload.flush()
            if workload.rng.random() < 0.1:
                workload.process.kill()
                workload.model.sure = workload.model.end
                workload.died()
                workload.open()


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("operation", ["write", "sync", "sync_dir", "truncate", "rename", "create"])
def test_a_log_whose_disk_fails_stops_and_keeps_what_was_flushed(operation: str, seed: int) -> None:
    workload = Workload(seed)
    with workload.world:
        for _ in range(30):
            workload.step()
        sure = workload.model.sure
        fault = workload.host.disk.fail(operation, times=1)
        failed = False
        for _ in range(200):
            workload.model.sure = sure = max(sure, workload.log.flushed_offset)
            try:
                workload.rng.choice((workload.append, workload.flush, workload.flush))()
            except (StorageError, OSError):
                failed = True
                break
        assert failed or fault.times_left
        if workload.log.failure is not None:
            with pytest.raises(StorageError):
                workload.append()
        workload.host.power_loss()
        workload.died()
        workload.model.sure = min(sure, workload.model.sure)
        workload.open()


@pytest.mark.parametrize("seed", range(10))
def test_a_full_disk_refuses_appends_and_heals(seed: int) -> None:
    workload = Workload(seed)
    with workload.world:
        for _ in range(20):
            workload.append()
        workload.host.disk.short_writes = 0.5
        full = 0
        for _ in range(40):
            try:
                workload.append()
            except DiskFullError:
                full += 1
            workload.verify_quick()
        workload.host.disk.short_writes = 0.0
        fault = workload.host.disk.fail("write", path_part=".log", error=errno.ENOSPC, times=3)
        while fault.times_left:
            with pytest.raises(DiskFullError):
                workload.append()
        workload.append()
        workload.flush()
        assert full > 0
        workload.verify_after_crash()
        workload.crash()
