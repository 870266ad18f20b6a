"""A leader alone, with an object store: what it stores, what counts, what it deletes and when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
import pytest

from proving.simulation import World
from proving.simulation.process import Process
from proving.simulation.world import Host
from rayq import messages
from rayq.actors.clock_watch import ClockWatch
from rayq.actors.remote import object_collector
from rayq.actors.remote.remote_log import RemoteLog
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.config import ClusterConfig
from rayq.errors import (
    CorruptBatchError,
    FencedEpochError,
    NotLeaderError,
    RemoteBacklogError,
    RemoteDeniedError,
    RemoteSlowError,
    RemoteStorageError,
)
from rayq.messages.remote_names import ObjectKind, RemoteName, parse_name, partition_prefix
from rayq.messages.remote_pointer import RemotePointer
from rayq.storage.data_directory import PartitionDirectory
from rayq.storage.remote import data_object
from rayq.storage.remote.manifest import Manifest
from rayq.storage.segment import LOG_SUFFIX, segment_path
from tests.simulated.remote_store import CLUSTER_ID, TOPIC_ID, PlayedController, PlayedObjects
from tests.storage.support import append, make_batch

LEADER_EPOCH = 8
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
DELAY_MS = HOUR_MS
DESCRIBE = messages.DescribeRemoteStorage(TOPIC_ID, 0, LEADER_EPOCH)
CONFIG: dict[str, Any] = {"remote_storage": True, "segment_bytes": 1024, "retention_ms": None}
"""A segment has five records of the tests."""
PREFIX = partition_prefix(CLUSTER_ID, TOPIC_ID, 0)


@pytest.fixture(autouse=True)
def small_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object for each segment."""
    monkeypatch.setattr(data_object, "OBJECT_DATA_BYTES_MAX", 1024)


class Led:
    """The only replica of a partition, which leads in epoch 8 and is looked after in time."""

    def __init__(
        self,
        log: ReplicaLog,
        objects: PlayedObjects,
        controller: PlayedController,
        host: Host,
        **config: Any,
    ) -> None:
        self.log, self.objects, self.controller = log, objects, controller
        self.environment = log.environment
        self.clock = log.environment.clock
        self.host = host
        self.watch = ClockWatch(self.clock)
        self.config = CONFIG | config
        self.pinned: int | None = None
        self.has_lease = True
        self.in_sync = [(1, "1a")]
        self.begin(LEADER_EPOCH)

    def begin(self, leader_epoch: int) -> None:
        """Leads in a new epoch."""
        self.epoch = leader_epoch
        given = self.given()
        self.log.configure(self.config)
        remote_log = RemoteLog(
            self.log,
            given,
            self.objects,
            ask_broker=cast(Any, self.controller.ask),
            has_lease=lambda: self.has_lease,
        )
        self.leader = Leader(
            self.log,
            given,
            propose=cast(Any, None),
            has_lease=lambda: True,
            now_s=self.log.environment.clock.monotonic,
            peers=cast(Any, None),
            remote_log=remote_log,
        )
        self.told()

    def given(self) -> messages.PartitionAssignment:
        return messages.PartitionAssignment(
            "t", TOPIC_ID, 0, self.config, 1, "1a", "h", 1, self.epoch, len(self.in_sync), None,
            self.in_sync, self.in_sync, partitions=1,
            remote=self.controller.pointer, pinned_offset=self.pinned,
        )  # fmt: skip

    def another_is_in_sync(self) -> None:
        self.in_sync = [*self.in_sync, (2, "2a")]
        self.told()

    def told(self) -> None:
        """The metadata arrive."""
        self.leader.committed(self.given())

    @property
    def remote(self) -> RemoteLog:
        assert self.leader.remote is not None
        return self.leader.remote.log

    async def write(self, records: int, *, checkpoint: bool = True) -> None:
        for _ in range(records):
            append(self.log.log, epoch=self.epoch, now_ms=self.clock.wall_ms(), size=130)
        self.log.flusher.wake()
        if checkpoint:
            await self.log.flusher.checkpoint()
        self.leader.state.appended(self.log.log.end_offset, now_s=self.clock.monotonic())
        self.leader.flushed(self.log.log.flushed_offset)

    async def look(self, seconds: float = 40.0) -> None:
        """Time passes, in which the leader is looked after as its process does it."""
        assert self.leader.remote is not None
        until_s = self.clock.monotonic() + seconds
        step_s = max(0.5, seconds / 1000)
        while self.clock.monotonic() < until_s:
            await asyncio.sleep(min(step_s, max(until_s - self.clock.monotonic(), 0.01)))
            self.leader.remote.tick(self.clock.monotonic(), self.watch)

    def describe(self) -> messages.DescribeRemoteStorageResponse:
        return self.leader.describe_remote_storage(DESCRIBE)

    async def manifest(self) -> Manifest:
        manifest = await self.remote.manifest()
        assert manifest is not None
        return manifest

    def check(self) -> None:
        """The committed list is in the store, without a hole."""
        pointer = self.controller.pointer
        assert pointer is not None and pointer.manifest in self.objects.store
        data = sorted(self.objects.names(ObjectKind.DATA))
        assert data


def leading(work: Callable[[Led], Awaitable[None]], **config: Any) -> None:
    async def script(process: Process) -> None:
        environment = process.environment
        objects, controller = PlayedObjects(environment), PlayedController()
        given = messages.PartitionAssignment(
            "t", TOPIC_ID, 0, CONFIG | config, 1, "1a", "h", 1, 1, 1, None,
            [(1, "1a")], [(1, "1a")],
        )  # fmt: skip
        log = ReplicaLog(
            environment,
            ClusterConfig(
                remote_storage_url="s3://bucket", remote_delete_delay_ms=DELAY_MS,
                remote_sweep_interval_ms=6 * HOUR_MS,
            ),
            given,
            broker=1,
            incarnation="1a",
            on_flushed=lambda _: None,
            on_failure=lambda: None,
        )
        await log.open(
            PartitionDirectory.open(
                environment, "/data/t-0", topic="t", topic_id=TOPIC_ID, partition=0,
                incarnation="1a", pid_start_time=1,
            )
        )
        assert isinstance(process.host, Host)
        await work(Led(log, objects, controller, process.host, **config))

    with World(seed=1) as world:
        process = world.host("broker").process("replica")
        world.run(process.run(script(process)), limit_s=10 * DAY_MS)
        assert world.errors == []


# --- what goes up ---------------------------------------------------------------------------------


def test_closed_segments_are_stored_and_listed_without_a_hole() -> None:
    async def work(led: Led) -> None:
        await led.write(23)
        assert led.describe().lag_bytes > 0
        await led.look()
        manifest, pointer = await led.manifest(), led.controller.pointer
        closed = [segment for segment in led.log.log.local_segments() if segment.is_closed]
        assert pointer is not None and pointer == led.remote.pointer
        assert (manifest.start, manifest.end) == (0, closed[-1].next_offset) == (0, pointer.end)
        assert manifest.data_bytes == sum(segment.size_bytes for segment in closed)
        assert manifest.epochs == [(LEADER_EPOCH, 0)] and manifest.end_epoch == LEADER_EPOCH
        assert (manifest.topic, manifest.partitions, manifest.config) == ("t", 1, led.config)
        assert {stored.name for stored in manifest.objects} == set(
            led.objects.names(ObjectKind.DATA)
        )
        assert (led.describe().lag_bytes, led.describe().trouble) == (0, None)
        versions = [move.version for move in led.controller.moves]
        await led.write(10)
        await led.look()
        assert (await led.manifest()).end > closed[-1].next_offset
        assert [move.version for move in led.controller.moves] == [*versions, versions[-1] + 1]

    leading(work)


def test_nothing_goes_up_that_a_crash_or_another_leader_could_take_back() -> None:
    async def work(led: Led) -> None:
        led.log.flush_lock.begin_flush()  # The disk hangs.
        await led.write(23, checkpoint=False)
        await led.look()
        assert led.objects.asked == []
        led.log.flush_lock.end_flush()
        await led.log.flusher.checkpoint()
        await led.look()
        assert led.objects.asked == [], "the leader does not count as flushed yet"
        led.leader.flushed(led.log.log.flushed_offset)
        await led.look()
        assert led.controller.pointer is not None

    leading(work)


def test_an_active_segment_is_closed_when_it_is_too_old() -> None:
    async def work(led: Led) -> None:
        await led.write(2)
        await led.look(HOUR_MS / 1000 - 10)
        assert led.controller.pointer is None
        await led.look(60)
        assert led.controller.pointer is not None and led.controller.pointer.end == 2

    leading(work)


def test_an_active_segment_is_closed_in_time_although_a_clock_was_ahead() -> None:
    async def work(led: Led) -> None:
        append(led.log.log, epoch=LEADER_EPOCH, now_ms=led.clock.wall_ms() + 30 * DAY_MS)
        await led.write(1)
        await led.look(HOUR_MS / 1000 + 60)
        assert led.controller.pointer is not None and led.controller.pointer.end == 2

    leading(work)


def test_a_topic_that_only_reads_gets_no_more_objects() -> None:
    async def work(led: Led) -> None:
        await led.write(23)
        await led.look(7200)
        assert led.objects.asked == []

    leading(work, remote_storage="read")


def test_what_lies_below_the_log_start_is_not_stored() -> None:
    async def work(led: Led) -> None:
        await led.write(23)
        await led.log.advance_log_start(7)
        await led.look()
        manifest = await led.manifest()
        assert (manifest.start, manifest.log_start) == (7, 7)

    leading(work)


# --- commits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["lost", "unanswered"])
def test_a_commit_whose_fate_is_unknown_is_asked_for_again_and_nothing_is_deleted(
    outcome: str,
) -> None:
    async def work(led: Led) -> None:
        await led.write(10)
        led.controller.outcomes = [outcome]
        await led.look(0.6)
        stored = set(led.objects.store)
        await asyncio.sleep(0.5)
        if outcome == "unanswered":
            assert led.remote.pointer is None, "no answer came, and no metadata"
            led.told()
        await led.look()
        assert [move.version for move in led.controller.moves] == [1]
        assert led.remote.pointer == led.controller.pointer
        assert stored <= set(led.objects.store)

    leading(work)


def test_a_commit_that_passes_while_the_lease_is_lost_lists_nothing_twice() -> None:
    async def work(led: Led) -> None:
        await led.write(10)
        led.controller.outcomes = ["lost"] * 9
        await led.look(3)
        led.has_lease = False
        await led.look(5)
        led.has_lease, led.controller.outcomes = True, ["unanswered"]
        await led.look(10)
        led.told()
        await led.write(10)
        await led.look(60)
        manifest = await led.manifest()
        assert [stored.start for stored in manifest.objects][1:] == [
            stored.end for stored in manifest.objects
        ][:-1]
        assert led.log.failure is None and led.describe().lag_bytes == 0

    leading(work)


def test_a_deposed_leader_commits_nothing_more_and_deletes_nothing() -> None:
    async def work(led: Led) -> None:
        await led.write(23)
        led.controller.refusal = FencedEpochError("Another leads.")
        await led.look(5)
        assert led.objects.names(ObjectKind.DATA) and led.controller.pointer is None
        led.leader.end("another leads")
        asked = len(led.objects.asked)
        with pytest.raises(NotLeaderError):
            await led.remote.change(lambda manifest: msgspec.structs.replace(manifest, log_start=1))
        assert len(led.objects.asked) == asked

    leading(work)


def test_objects_are_stored_once_although_the_commit_fails_for_long() -> None:
    async def work(led: Led) -> None:
        await led.write(23)
        led.objects.failure = RemoteStorageError("It is away.")
        led.objects.fails_for = (messages.PutBlob,)
        await led.look(300)
        stored = len(led.objects.names(ObjectKind.DATA))
        assert led.describe().trouble == "It is away." and stored > 0
        led.objects.failure = None
        await led.look(90)
        assert len(led.objects.names(ObjectKind.DATA)) == stored
        assert led.describe().trouble is None and led.describe().lag_bytes == 0

    leading(work)


def test_a_later_leader_goes_on_where_the_committed_list_ends() -> None:
    async def work(led: Led) -> None:
        await led.write(23)
        await led.look()
        before = led.controller.pointer
        assert before is not None
        led.leader.end("it is deposed")
        led.begin(LEADER_EPOCH + 1)
        await led.write(20)
        await led.look()
        manifest = await led.manifest()
        assert manifest.version > before.version and manifest.start == 0
        assert manifest.epochs == [(LEADER_EPOCH, 0), (LEADER_EPOCH + 1, 23)]
        epochs = {
            cast(RemoteName, parse_name(stored.name)).leader_epoch for stored in manifest.objects
        }
        assert epochs == {LEADER_EPOCH, LEADER_EPOCH + 1}

    leading(work)


# --- a store that fails ---------------------------------------------------------------------------


def test_a_store_that_is_away_is_tried_ever_more_slowly_and_then_all_goes_up() -> None:
    async def work(led: Led) -> None:
        await led.write(23)
        led.objects.failure = RemoteDeniedError("403.")
        await led.look(3600)
        tries = sum(isinstance(request, messages.StoreRecords) for request in led.objects.asked)
        assert 60 <= tries <= 4 * 150
        await led.write(200)  # Appends go on.
        assert led.describe().trouble == "403." and led.describe().lag_ms >= 3_500_000
        led.objects.failure = None
        await led.look(150)
        assert led.describe().lag_bytes == 0 and led.describe().trouble is None

    leading(work)


def test_what_was_stored_behind_an_upload_that_failed_is_not_stored_again() -> None:
    async def work(led: Led) -> None:
        await led.write(43)
        led.objects.failure, led.objects.failures_left = RemoteStorageError("503"), 1
        led.objects.fails_for = (messages.StoreRecords,)
        await led.look(60)
        manifest = await led.manifest()
        assert {stored.name for stored in manifest.objects} == set(
            led.objects.names(ObjectKind.DATA)
        )
        assert led.describe().lag_bytes == 0 and manifest.start == 0

    leading(work)


def test_an_object_server_that_is_busy_is_no_trouble_for_some_minutes() -> None:
    async def work(led: Led) -> None:
        await led.look(300)
        await led.write(23)
        led.objects.failure = RemoteSlowError("It is busy.")
        await led.look(250)
        assert led.describe().trouble is None
        await led.look(100)
        assert led.describe().trouble == "It is busy."
        led.objects.failure = None
        await led.look(90)
        assert led.describe().trouble is None and led.describe().lag_bytes == 0

    leading(work)


def test_an_object_whose_put_was_done_unanswered_is_stored_again_under_another_name() -> None:
    async def work(led: Led) -> None:
        await led.write(23)
        led.objects.failure = RemoteStorageError("No answer.")
        led.objects.fails_for = (messages.StoreRecords,)
        led.objects.is_done_all_the_same = True
        await led.look(2)
        led.objects.failure = None
        await led.look()
        manifest = await led.manifest()
        assert manifest.start == 0 and led.describe().lag_bytes == 0
        assert len(led.objects.names(ObjectKind.DATA)) > len(manifest.objects)

    leading(work)


def test_a_disk_full_of_what_waits_for_the_store_takes_no_more_until_the_store_is_back() -> None:
    async def work(led: Led) -> None:
        def produce() -> None:
            request = messages.Produce(TOPIC_ID, 0, LEADER_EPOCH, 1, 1000)
            led.leader.produce(request, memoryview(make_batch(0)), principal=None)

        await led.write(23)
        led.objects.backlog_bytes = 1 << 60
        led.objects.failure = RemoteStorageError("It is away.")
        await led.look(60)
        end = led.log.log.end_offset
        with pytest.raises(RemoteBacklogError, match="It is away"):
            produce()
        assert led.log.log.end_offset == end
        led.objects.failure, led.objects.backlog_bytes = None, 0
        await led.look(60)
        produce()
        assert led.log.log.end_offset == end + 1

    leading(work)


def test_sound_records_that_the_object_server_takes_for_damaged_end_no_replica() -> None:
    async def work(led: Led) -> None:
        await led.write(23)
        led.objects.failure = CorruptBatchError("A bit of its memory.")
        led.objects.fails_for = (messages.StoreRecords,)
        await led.look(60)
        assert led.log.failure is None and "A bit of its memory" in str(led.describe().trouble)
        led.objects.failure = None
        await led.look(90)
        assert led.describe().lag_bytes == 0

    leading(work)


@pytest.mark.parametrize("segment", [0, 2])
@pytest.mark.parametrize("is_alone", [False, True])
def test_damage_on_the_disk_is_not_stored_and_ends_a_replica_that_is_not_alone(
    segment: int, is_alone: bool
) -> None:
    async def work(led: Led) -> None:
        await led.write(23)
        base_offset = led.log.log.local_segments()[segment].base_offset
        path = segment_path(led.log.log.directory, base_offset, LOG_SUFFIX)
        file = led.environment.disk.open(path)
        file.pwrite(bytes([file.pread(1, 200)[0] ^ 1]), 200)
        if not is_alone:
            led.another_is_in_sync()
        await led.look(5)
        assert (led.log.failure is not None, led.log.is_damaged) == (not is_alone, not is_alone)
        if is_alone:
            assert "No other replica is in sync" in str(led.log.trouble)
        assert all(move.end <= base_offset for move in led.controller.moves)

    leading(work)


def test_a_log_with_gaps_is_not_stored() -> None:
    async def work(led: Led) -> None:
        await led.write(23)
        await led.log.learn(0, 10, 0)  # As from a leader that once compacted it.
        await led.look()
        assert led.objects.asked == [] and "was compacted once" in str(led.describe().trouble)

    leading(work)


# --- retention ------------------------------------------------------------------------------------


def test_retention_takes_the_oldest_objects_and_then_what_was_never_stored() -> None:
    async def work(led: Led) -> None:
        await led.write(23)
        await led.look()
        await led.write(20)
        led.objects.failure = RemoteStorageError("It is away.")
        await led.look(2 * DAY_MS / 1000)
        assert led.log.log.start_offset == 40, "the active segment stays"

    leading(work, retention_ms=DAY_MS, remote_max_lag_ms=10 * DAY_MS)


def test_retention_by_size_counts_objects_and_local_bytes_once() -> None:
    async def work(led: Led) -> None:
        await led.write(23)
        await led.look()
        assert led.log.log.start_offset == 0
        size = led.log.log.size_bytes  # Nothing has left the disk.
        led.config["retention_bytes"] = size
        led.log.configure(led.config)
        await led.look(60)
        assert led.log.log.start_offset == 0
        led.config["retention_bytes"] = size - 1
        led.log.configure(led.config)
        await led.look(60)
        first = led.controller.moves[0]
        manifest = await led.manifest()
        assert led.log.log.start_offset == manifest.start == manifest.log_start > first.start

    leading(work)


def test_retention_without_the_committed_list_moves_nothing() -> None:
    async def work(led: Led) -> None:
        await led.write(23)
        await led.look()
        led.leader.end("it is deposed")
        led.objects.failure = RemoteStorageError("It is away.")
        led.begin(LEADER_EPOCH + 1)
        await led.look(3 * DAY_MS / 1000)
        assert led.log.log.start_offset == 0
        led.objects.failure = None
        await led.look(120)
        assert led.log.log.start_offset > 0

    leading(work, retention_ms=DAY_MS)


def test_a_pin_holds_retention_and_not_delete_records() -> None:
    async def work(led: Led) -> None:
        await led.write(43)
        await led.look()
        led.pinned = 12
        led.told()
        await led.look(3 * DAY_MS / 1000)
        assert 0 < led.log.log.start_offset <= 12
        await led.log.advance_log_start(22)  # As delete_records does.
        await led.look(60)
        assert (await led.manifest()).log_start == 22
        led.pinned = None
        led.told()
        await led.look(60)
        assert led.log.log.start_offset > 22

    leading(work, retention_ms=DAY_MS)


def test_a_pin_that_comes_while_the_list_is_loaded_holds_retention() -> None:
    async def work(led: Led) -> None:
        await led.write(43)
        await led.look()
        led.leader.end("it is deposed")
        led.objects.failure = RemoteStorageError("It is away.")
        led.begin(LEADER_EPOCH + 1)
        await led.look(3 * DAY_MS / 1000)
        led.objects.failure = None
        looking = asyncio.ensure_future(led.look(120))
        while not led.remote._loading.locked():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        led.pinned = 12
        led.told()
        await looking
        assert 0 < led.log.log.start_offset <= 12

    leading(work, retention_ms=DAY_MS)


def test_what_a_queue_has_settled_leaves_disk_and_store_as_far_as_no_pin_holds_it() -> None:
    async def work(led: Led) -> None:
        await led.write(43)
        await led.look()
        led.pinned = 12
        led.told()
        led.log.hold_log_start(33)
        await led.look(60)
        assert led.log.log.start_offset == 0, "the queue only holds"
        led.log.hold_log_start(33, deletes_what_is_done=True)
        await led.look(60)
        assert led.log.log.start_offset == 12
        led.pinned = None
        led.told()
        await led.look(60)
        manifest = await led.manifest()
        assert led.log.log.start_offset == manifest.log_start == 33
        assert all(stored.end > 33 for stored in manifest.objects)

    leading(work)


def test_an_empty_list_keeps_its_end_and_goes_on_later() -> None:
    async def work(led: Led) -> None:
        await led.write(23)
        await led.look()
        end = led.controller.moves[-1].end
        await led.log.advance_log_start(23)
        await led.look(60)
        pointer = led.controller.pointer
        assert pointer is not None and (pointer.start, pointer.end) == (end, end)
        assert pointer.end_epoch == LEADER_EPOCH and pointer.data_bytes == 0
        await led.write(20)
        await led.look(60)
        assert (await led.manifest()).start == 23

    leading(work)


# --- deleting -------------------------------------------------------------------------------------


def test_an_object_is_deleted_only_after_its_delay_and_after_a_list_without_it_was_committed() -> (
    None
):
    async def work(led: Led) -> None:
        await led.write(23)
        await led.look()
        first = (await led.manifest()).objects[0]
        led.objects.failure = RemoteStorageError("It is away.")
        led.objects.fails_for = (messages.PutBlob,)
        await led.log.advance_log_start(first.end)
        await led.look(2 * DELAY_MS / 1000)
        assert first.name in led.objects.store, "no list without it is committed"
        led.objects.failure = None
        await led.look(90)
        assert [name for name, _ in (await led.manifest()).removed] == [first.name]
        await led.look(DELAY_MS / 1000 - 120)
        assert first.name in led.objects.store
        await led.look(180)
        assert first.name not in led.objects.store
        assert (await led.manifest()).removed == []

    leading(work)


def test_a_wall_clock_that_leaps_deletes_no_object_before_its_delay() -> None:
    async def work(led: Led) -> None:
        await led.write(23)
        await led.look()
        first = (await led.manifest()).objects[0]
        await led.log.advance_log_start(first.end)
        await led.look(90)
        assert [name for name, _ in (await led.manifest()).removed] == [first.name]
        led.host.jump_clock(10 * DAY_MS)
        await led.look(60)
        assert first.name in led.objects.store
        led.host.jump_clock(-10 * DAY_MS)
        await led.look(DELAY_MS / 1000 - 300)
        assert first.name in led.objects.store
        await led.look(300)
        assert first.name not in led.objects.store

    leading(work)


def test_what_leaves_the_list_while_the_clock_is_doubted_is_kept_for_its_whole_delay() -> None:
    async def work(led: Led) -> None:
        await led.write(23)
        await led.look()
        first = (await led.manifest()).objects[0]
        led.host.jump_clock(2 * DELAY_MS)  # It is right from now on, but nobody believes it yet.
        await led.log.advance_log_start(first.end)
        await led.look(60)
        assert [name for name, _ in (await led.manifest()).removed] == [first.name]
        await led.look(DELAY_MS / 1000 - 120)
        assert first.name in led.objects.store
        await led.look(300)
        assert first.name not in led.objects.store

    leading(work)


@pytest.mark.parametrize("who", ["the same leader", "a new leader"])
def test_a_clock_that_is_behind_for_a_moment_makes_nothing_older_that_left_the_list_before(
    who: str,
) -> None:
    async def work(led: Led) -> None:
        await led.write(23)
        await led.look()
        first = (await led.manifest()).objects[0]
        await led.log.advance_log_start(first.end)
        await led.look(90)
        assert [name for name, _ in (await led.manifest()).removed] == [first.name]
        led.host.jump_clock(-2 * DELAY_MS)
        if who == "a new leader":
            led.leader.end("it is deposed")
            led.watch = ClockWatch(led.clock)
            led.begin(LEADER_EPOCH + 1)
        await led.write(10)
        await led.look(120)
        led.host.jump_clock(2 * DELAY_MS)
        await led.look(DELAY_MS / 1000 - 300)
        assert first.name in led.objects.store
        await led.look(900)
        assert first.name not in led.objects.store

    leading(work)


def test_what_a_clock_that_was_ahead_has_dated_goes_when_its_leader_has_known_it_long_enough() -> (
    None
):
    async def work(led: Led) -> None:
        await led.write(23)
        await led.look()
        first = (await led.manifest()).objects[0]
        led.host.jump_clock(10 * DAY_MS)
        await led.log.advance_log_start(first.end)
        await led.look(90)
        assert [name for name, _ in (await led.manifest()).removed] == [first.name]
        led.host.jump_clock(-10 * DAY_MS)
        led.leader.end("it is deposed")
        led.watch = ClockWatch(led.clock)
        led.begin(LEADER_EPOCH + 1)
        await led.look(DELAY_MS / 1000 - 90)
        assert first.name in led.objects.store
        await led.look(300)
        assert first.name not in led.objects.store
        assert first.name not in (await led.manifest()).names()

    leading(work)


def test_manifests_that_were_replaced_are_deleted_soon() -> None:
    async def work(led: Led) -> None:
        for _ in range(4):
            await led.write(10)
            await led.look()
        assert len(led.controller.moves) == 4 == len(led.objects.names(ObjectKind.MANIFEST))
        await led.look(object_collector.SUPERSEDED_S)
        pointer = led.controller.pointer
        assert pointer is not None and led.objects.names(ObjectKind.MANIFEST) == [pointer.manifest]

    leading(work)


def test_a_sweep_takes_what_earlier_leaders_left_and_nothing_of_its_own_epoch() -> None:
    async def work(led: Led) -> None:
        await led.write(23)
        await led.look()
        kept = {cast(RemotePointer, led.remote.pointer).manifest, *(await led.manifest()).names()}
        left = {
            str(RemoteName(PREFIX, kind, number, epoch, number))
            for epoch in (LEADER_EPOCH, LEADER_EPOCH + 1)
            for number, kind in enumerate(ObjectKind)
        }
        for name in left:
            led.objects.put(name, b"left behind")
        led.leader.end("it is deposed")
        led.begin(LEADER_EPOCH + 1)
        await led.look(20 * HOUR_MS / 1000)
        own = {name for name in left if f"-{LEADER_EPOCH + 1:010d}-" in name}
        assert set(led.objects.store) == kept | own

    leading(work, remote_max_lag_ms=10 * DAY_MS)


def test_a_sweep_leaves_objects_alone_while_a_later_manifest_may_be_adopted() -> None:
    async def work(led: Led) -> None:
        await led.write(23)
        await led.look()
        data = str(RemoteName(PREFIX, ObjectKind.DATA, 99, LEADER_EPOCH, 1))
        later = str(RemoteName(PREFIX, ObjectKind.MANIFEST, 99, LEADER_EPOCH, 1))
        led.leader.end("it is deposed")
        led.objects.put(data, b"")
        led.begin(LEADER_EPOCH + 2)
        await led.look(HOUR_MS / 1000)
        led.objects.put(later, b"")
        remote = led.leader.remote
        assert remote is not None
        await remote._collector.sweep()
        assert data in led.objects.store
        await led.look(2 * HOUR_MS / 1000)
        await remote._collector.sweep()
        assert data in led.objects.store and later not in led.objects.store
        await remote._collector.sweep()
        assert data not in led.objects.store
        led.check()

    leading(work, retention_ms=None, remote_max_lag_ms=DAY_MS)


# --- verifying ------------------------------------------------------------------------------------


def test_objects_that_are_gone_or_changed_are_named_and_made_again_from_local_records() -> None:
    async def work(led: Led) -> None:
        await led.write(23)
        await led.look()
        store, before = led.objects.store, await led.manifest()
        gone, short, changed, sound = before.objects[:4]
        del store[gone.name]
        store[short.name] = (store[short.name][0][:-1], store[short.name][1])
        data = bytearray(store[changed.name][0])
        data[200] ^= 1
        store[changed.name] = (bytes(data), store[changed.name][1])

        async def verify(**options: bool) -> messages.VerifyRemoteResponse:
            wanted = {"deep": False, "repair": False} | options
            request = messages.VerifyRemote(TOPIC_ID, 0, LEADER_EPOCH, 0, **wanted)
            return await led.leader.verify_remote(request)

        quick = await verify()
        assert [problem[0] for problem in quick.problems] == [gone.name, short.name]
        assert (quick.checked_objects, quick.next_offset) == (len(before.objects), None)
        wrong = [gone.name, short.name, changed.name]
        deep = await verify(deep=True)
        assert [problem[0] for problem in deep.problems] == wrong and deep.repaired == []
        repaired = await verify(deep=True, repair=True)
        assert repaired.repaired == wrong
        after = await led.manifest()
        assert after.objects[3] == sound and after.data_bytes == before.data_bytes
        assert [name for name, _ in after.removed] == wrong
        assert (await verify(deep=True)).problems == []

    leading(work)


def test_what_no_local_record_covers_is_named_and_not_repaired() -> None:
    async def work(led: Led) -> None:
        await led.write(23)
        await led.look()
        gone, there = (await led.manifest()).objects[:2]
        for name in (gone, there):
            del led.objects.store[name.name]
        led.log.log.drop_local(gone.end)
        request = messages.VerifyRemote(TOPIC_ID, 0, LEADER_EPOCH, 0, False, True, objects_max=1)
        first = await led.leader.verify_remote(request)
        assert (len(first.problems), first.repaired, first.next_offset) == (1, [], gone.end)
        request = msgspec.structs.replace(request, start=gone.end)
        assert (await led.leader.verify_remote(request)).repaired == [there.name]

    leading(work)


# --- the log start of a new leader ----------------------------------------------------------------


def test_a_leader_offers_nothing_below_the_list_that_its_disk_does_not_have() -> None:
    async def work(led: Led) -> None:
        await led.write(23)
        await led.look()
        led.leader.end("it is deposed")
        log, pointer = led.log.log, cast(RemotePointer, led.controller.pointer)
        led.controller.pointer = msgspec.structs.replace(
            pointer, version=9, start=10, leader_epoch=LEADER_EPOCH + 1
        )
        led.begin(LEADER_EPOCH + 2)
        assert log.start_offset == 0, "the disk has it"
        led.leader.end("it is deposed")
        log.drop_local(15)
        led.begin(LEADER_EPOCH + 3)
        assert log.start_offset == 10

    leading(work)
