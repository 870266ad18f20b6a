"""A replica alone: which role it takes by the metadata, what it answers in it, and what it does by
time."""

from __future__ import annotations

import asyncio
import errno
import gc
import weakref
from typing import Any, cast

import pytest

from rayq import messages
from rayq.actors.groups.group_coordinator import GroupCoordinator
from rayq.actors.queues.state_coordinator import QueueStateCoordinator
from rayq.actors.transactions.transaction_coordinator import TransactionCoordinator
from rayq.config import ClusterConfig
from rayq.core.cluster.topic_changes import OFFSETS_TOPIC, QUEUES_TOPIC, TRANSACTIONS_TOPIC
from rayq.errors import (
    FencedEpochError,
    InvalidRequestError,
    NotLeaderError,
    RayqError,
    StorageError,
    UnknownEpochError,
)
from rayq.storage.segment import LOG_SUFFIX, segment_path
from tests.simulated.followed import IN_SYNC, LEADER_EPOCH, THEM, US
from tests.simulated.hosted import LEADS, QUEUE, SEGMENT_BYTES, Hosted, hosting
from tests.simulated.remote_store import TOPIC_ID

COORDINATORS = {
    OFFSETS_TOPIC: GroupCoordinator,
    TRANSACTIONS_TOPIC: TransactionCoordinator,
    QUEUES_TOPIC: QueueStateCoordinator,
}
PEER = cast(Any, None)
NOTHING = memoryview(b"")
HOUR_MS = 3_600_000
DESCRIBE = messages.DescribeReplica("T", 0)
SMALL: dict[str, Any] = {"segment_bytes": SEGMENT_BYTES}
OLD_GO: dict[str, Any] = {**SMALL, "retention_ms": 10_000}


def request_for(kind: Any, leader_epoch: int) -> messages.ToCoordinator[Any]:
    """A request that only this kind of coordinator answers."""
    if kind is GroupCoordinator:
        return messages.ListGroups(TOPIC_ID, 0, leader_epoch)
    if kind is TransactionCoordinator:
        return messages.DescribeOutcome(TOPIC_ID, 0, leader_epoch, 1, 1)
    return messages.OpenQueueState(TOPIC_ID, 0, leader_epoch, "q", 0, 1, "opener")


def epochs_asked_in(hosted: Hosted) -> set[int]:
    """The epochs of the fetches since the last call."""
    found = {one.leader_epoch for one in hosted.leader.fetches}
    hosted.leader.asked.clear()
    return found


def second_segment(hosted: Hosted) -> int:
    """The offset at which it starts."""
    return hosted.log.log.local_segments()[1].base_offset


def damage_second_segment(hosted: Hosted) -> None:
    directory = hosted.log.log.directory
    path = segment_path(directory, second_segment(hosted), LOG_SUFFIX)
    hosted.host.disk.flip_bit(path, 100)


# --- roles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, leads, asks",
    [
        (LEADS, True, False),
        ({}, False, True),
        ({**LEADS, "leader_incarnation": "ours before"}, False, True),
        ({**LEADS, "leader": 2}, False, True),
        ({"leader": None, "leader_incarnation": None, "leader_host": None}, False, False),
    ],
)
def test_a_replica_leads_follows_or_waits_as_the_metadata_say(
    changes: dict[str, Any], leads: bool, asks: bool
) -> None:
    async def work(hosted: Hosted) -> None:
        await asyncio.sleep(1.0)
        assert hosted.replica.describe(DESCRIBE).is_leader is leads
        assert epochs_asked_in(hosted) == ({LEADER_EPOCH} if asks else set())
        if not leads:
            with pytest.raises(NotLeaderError, match="does not lead t-0: ask"):
                hosted.replica.leader(LEADER_EPOCH)

    hosting(work, **changes)


def test_a_replica_takes_no_role_before_its_log_is_open() -> None:
    async def work(hosted: Hosted) -> None:
        hosted.told(config={"retention_ms": 5})
        await asyncio.sleep(1.0)
        with pytest.raises(NotLeaderError):
            hosted.replica.leader(LEADER_EPOCH)
        assert hosted.samples().keys() == set()
        await hosted.open()
        assert hosted.replica.describe(DESCRIBE).is_leader
        assert hosted.log.topic_config.retention_ms == 5

    hosting(work, is_open=False, **LEADS)


def test_older_metadata_are_passed_over_and_the_same_are_taken() -> None:
    async def work(hosted: Hosted) -> None:
        replica = hosted.replica
        hosted.told()
        replica.apply(hosted.given(**LEADS, leader_epoch=7, partition_epoch=1))
        assert not replica.describe(DESCRIBE).is_leader
        assert (replica.assignment.partition_epoch, replica.describe(DESCRIBE).leader_epoch) == (2, 8)
        replica.apply(hosted.given(**LEADS, leader_epoch=9))
        assert replica.describe(DESCRIBE).is_leader

    hosting(work)


def test_a_config_that_changes_counts_at_once() -> None:
    async def work(hosted: Hosted) -> None:
        hosted.told(config={"retention_ms": 5})
        assert hosted.log.log.config.retention_ms == 5
        assert hosted.log.topic_config.retention_ms == 5
        assert hosted.log.failure is None

    hosting(work, leader=None, leader_host=None)


def test_a_follower_goes_on_under_newer_metadata_and_ends_with_its_leader() -> None:
    async def work(hosted: Hosted) -> None:
        hosted.leader.answers = [NotLeaderError("not yet") for _ in range(1000)]
        hosted.told(throttle_bytes_per_s=1)
        await asyncio.sleep(0.6)
        assert hosted.leader.fetches[-1].bytes_max < 100_000, "the newer metadata count"
        count = len(hosted.leader.fetches)
        for _ in range(20):
            hosted.told()
        await asyncio.sleep(0.6)
        assert len(hosted.leader.fetches) <= count + 2, "it is the same follower"
        hosted.told(leader_epoch=9)
        epochs_asked_in(hosted)
        await asyncio.sleep(1.5)
        assert epochs_asked_in(hosted) == {9}
        hosted.told(leader=None, leader_incarnation=None, leader_host=None, leader_epoch=10)
        epochs_asked_in(hosted)
        await asyncio.sleep(1.5)
        assert epochs_asked_in(hosted) == set()
        hosted.told(leader=1, leader_incarnation="theirs", leader_host="there", leader_epoch=11)
        await asyncio.sleep(1.5)
        assert epochs_asked_in(hosted) == {11}
        hosted.told(**LEADS, leader_epoch=12)
        epochs_asked_in(hosted)
        await asyncio.sleep(1.5)
        assert epochs_asked_in(hosted) == set()
        assert hosted.replica.leader(12).leader_epoch == 12

    hosting(work)


def test_a_leader_goes_on_under_newer_metadata_and_ends_with_its_epoch() -> None:
    async def work(hosted: Hosted) -> None:
        replica = hosted.replica
        first = replica.leader(8)
        hosted.told(isr=[US, THEM])
        assert replica.leader(8) is first
        assert first.state.isr == (US, THEM)
        (waits,) = hosted.produce()
        hosted.told(leader_epoch=9)
        with pytest.raises(NotLeaderError, match="epoch 9 begins"):
            await waits
        second = replica.leader(9)
        assert second is not first and second.state.isr == (US, THEM)
        (waits,) = hosted.produce()
        hosted.told(
            leader=1, leader_incarnation="theirs", leader_host="there", leader_epoch=10
        )
        with pytest.raises(NotLeaderError, match="broker 1 leads t-0 in epoch 10"):
            await waits
        await asyncio.sleep(1.0)
        assert epochs_asked_in(hosted) == {10}

    hosting(work, **LEADS)


@pytest.mark.parametrize(
    "epoch, error", [(7, FencedEpochError), (8, None), (9, UnknownEpochError)]
)
def test_a_leader_answers_in_its_epoch_only(epoch: int, error: type[RayqError] | None) -> None:
    async def work(hosted: Hosted) -> None:
        replica = hosted.replica

        def ask_for_queues_and_leader() -> None:
            replica.leader(epoch)
            replica.queues(epoch)

        if error is None:
            ask_for_queues_and_leader()
            hosted.has_lease = False
            with pytest.raises(NotLeaderError, match="lost its broker"):
                replica.leader(epoch)
            with pytest.raises(NotLeaderError, match="lost its broker"):
                replica.queues(epoch)
            return
        for ask in (
            lambda: replica.leader(epoch),
            lambda: replica.queues(epoch),
            lambda: replica.handle(PEER, request_for(GroupCoordinator, epoch), NOTHING),
        ):
            with pytest.raises(error):
                ask()

    hosting(work, **LEADS)


# --- what stands beside a leader ------------------------------------------------------------------


@pytest.mark.parametrize("topic", [*COORDINATORS, "t"])
def test_each_topic_of_rayqs_own_has_its_coordinator_and_others_have_queues(topic: str) -> None:
    async def work(hosted: Hosted) -> None:
        replica = hosted.replica
        first: Any = replica._coordinator
        assert type(first) is COORDINATORS.get(topic, type(None))
        for kind in COORDINATORS.values():
            if kind is not type(first):
                with pytest.raises(InvalidRequestError, match="coordinates no"):
                    replica.handle(PEER, request_for(kind, LEADER_EPOCH), NOTHING)
        if topic == "t":
            queues = replica.queues(LEADER_EPOCH)
            hosted.told()
            assert replica.queues(LEADER_EPOCH) is queues
            return
        with pytest.raises(InvalidRequestError, match="rayq's own"):
            replica.queues(LEADER_EPOCH)
        hosted.told()
        assert replica._coordinator is first
        hosted.told(leader_epoch=9)
        second: Any = replica._coordinator
        assert second is not first and type(second) is type(first)
        hosted.told(
            leader=1, leader_incarnation="theirs", leader_host="there", leader_epoch=10
        )
        with pytest.raises(NotLeaderError):
            replica.handle(PEER, request_for(type(first), 10), NOTHING)
        assert first._ended is not None and second._ended is not None

    hosting(work, topic=topic, **LEADS)


def test_the_queues_of_a_topic_come_and_go_with_the_metadata_and_the_leader() -> None:
    async def work(hosted: Hosted) -> None:
        await hosted.write(3)
        for _ in range(3):
            await hosted.tick()
        names = hosted.samples().keys()
        assert any(name.startswith("rayq_queue") for name in names)
        queues = hosted.replica.queues(LEADER_EPOCH)
        hosted.told(queues=[])
        assert not any(name.startswith("rayq_queue") for name in hosted.samples())
        hosted.told(queues=[QUEUE])
        asked = messages.DescribeQueue(TOPIC_ID, 0, LEADER_EPOCH, "other" * 6 + "id")
        waits = asyncio.ensure_future(queues._handle_later(None, asked))  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        hosted.told(leader_epoch=9)
        with pytest.raises(NotLeaderError, match="epoch 9 begins"):
            await waits
        assert hosted.replica.queues(9) is not queues

    hosting(work, queues=[QUEUE], **LEADS)


# --- what any replica answers ---------------------------------------------------------------------


def test_a_leader_describes_itself() -> None:
    async def work(hosted: Hosted) -> None:
        await hosted.write(7)
        await hosted.log.advance_log_start(2)
        waits = hosted.produce()
        log = hosted.log.log
        assert hosted.replica.describe(DESCRIBE) == messages.DescribeReplicaResponse(
            broker=0,
            pid=hosted.environment.pid,
            leader_epoch=LEADER_EPOCH,
            is_leader=True,
            log_start_offset=2,
            high_watermark=7,
            log_end_offset=8,
            flushed_offset=7,
            size_bytes=log.size_bytes,
            trouble=None,
            disk_free_bytes=hosted.host.disk.free_bytes(),
        )
        assert hosted.replica.status() == messages.ReplicaStatus(TOPIC_ID, 0, 8, 7, None, False)
        await asyncio.gather(*waits)

    hosting(work, **LEADS)


def test_a_follower_describes_itself_and_its_trouble() -> None:
    async def work(hosted: Hosted) -> None:
        hosted.replica.note_trouble(StorageError("no room"))
        found = hosted.replica.describe(DESCRIBE)
        assert (found.is_leader, found.leader_epoch, found.trouble) == (False, 8, "no room")
        assert hosted.replica.status() == messages.ReplicaStatus(TOPIC_ID, 0, None, 0)

    hosting(work)


def test_a_disk_that_does_not_say_how_much_is_free_hides_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(hosted: Hosted) -> None:
        def fail(_path: str) -> int:
            raise OSError(errno.EIO, "no answer")

        monkeypatch.setattr(hosted.environment.disk, "free_bytes", fail)
        found = hosted.replica.describe(DESCRIBE)
        assert (found.disk_free_bytes, found.log_end_offset) == (None, 0)

    hosting(work)


def test_a_log_that_is_not_open_yet_ends_nowhere() -> None:
    async def work(hosted: Hosted) -> None:
        hosted.replica.note_trouble(StorageError("no room"))
        assert hosted.replica.status() == messages.ReplicaStatus(TOPIC_ID, 0, None, -1)
        assert hosted.replica.remote_backlog_bytes() == 0
        await hosted.open()
        assert hosted.replica.describe(DESCRIBE).trouble is None

    hosting(work, is_open=False, config={"remote_storage": True})


@pytest.mark.parametrize("is_damage", [False, True])
def test_a_replica_that_failed_tells_why_and_leads_no_more(is_damage: bool) -> None:
    async def work(hosted: Hosted) -> None:
        (waits,) = hosted.produce()
        hosted.replica.fail(StorageError("the disk is broken"), is_damage=is_damage)
        with pytest.raises(NotLeaderError, match="the disk is broken"):
            await waits
        with pytest.raises(NotLeaderError, match="it stopped: the disk is broken"):
            hosted.replica.leader(LEADER_EPOCH)
        assert hosted.failures == 1
        status = hosted.replica.status()
        assert (status.failure, status.is_damaged) == ("the disk is broken", is_damage)
        await hosted.tick()
        hosted.told(leader_epoch=9)
        with pytest.raises(NotLeaderError):
            hosted.replica.leader(9)
        assert hosted.failures == 1

    hosting(work, **LEADS)


@pytest.mark.parametrize("others_in_sync", [False, True])
def test_damage_that_a_reader_reports_ends_the_replica_where_others_can_answer(
    others_in_sync: bool,
) -> None:
    async def work(hosted: Hosted) -> None:
        await hosted.write(12)
        asked = messages.CheckRange(TOPIC_ID, 0, second_segment(hosted))
        assert await hosted.replica.check_range(asked) == messages.Done()
        assert hosted.failures == 0
        if others_in_sync:
            hosted.told(isr=[US, THEM])
        damage_second_segment(hosted)
        if others_in_sync:
            with pytest.raises(StorageError):
                await hosted.replica.check_range(asked)
            assert (hosted.failures, hosted.replica.status().is_damaged) == (1, True)
        else:
            await hosted.replica.check_range(asked)
            assert (hosted.failures, hosted.log.failure) == (0, None)
            assert hosted.log.trouble is not None

    hosting(work, config=SMALL, **LEADS)


@pytest.mark.parametrize("leader_host", ["leader", None])
def test_a_replica_that_leads_no_more_looks_at_its_disk_for_a_reader_too(
    leader_host: str | None,
) -> None:
    async def work(hosted: Hosted) -> None:
        await hosted.write(12)
        hosted.told(
            leader=1, leader_incarnation="theirs", leader_host=leader_host, leader_epoch=9,
            isr=[THEM],
        )
        asked = messages.CheckRange(TOPIC_ID, 0, second_segment(hosted))
        assert await hosted.replica.check_range(asked) == messages.Done()
        assert hosted.failures == 0
        damage_second_segment(hosted)
        with pytest.raises(StorageError):
            await hosted.replica.check_range(asked)
        assert (hosted.failures, hosted.replica.status().is_damaged) == (1, True)

    hosting(work, config=SMALL, **LEADS)


@pytest.mark.parametrize("is_stored_only", [True, False])
def test_what_is_only_in_the_object_store_is_brought_again_instead(
    is_stored_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(hosted: Hosted) -> None:
        asked: list[tuple[str, int]] = []

        async def check_range(offset: int) -> bool:
            asked.append(("store", offset))
            return is_stored_only

        async def verify(offset: int) -> None:
            asked.append(("disk", offset))

        reads = hosted.replica.leader(LEADER_EPOCH).reads
        monkeypatch.setattr(reads, "check_range", check_range)
        monkeypatch.setattr(hosted.log, "verify", verify)
        answer = await hosted.replica.check_range(messages.CheckRange(TOPIC_ID, 0, 7))
        assert answer == messages.Done()
        assert asked == [("store", 7)] if is_stored_only else [("store", 7), ("disk", 7)]

    hosting(work, **LEADS)


# --- what it measures -----------------------------------------------------------------------------

OF_ANY_LOG = {"rayq_log_size_bytes": 0, "rayq_log_end_offset": 0}
OF_A_LEADER = {
    "rayq_partition_latest_offset": 0,
    "rayq_partition_earliest_offset": 0,
    "rayq_partition_in_sync_replicas": 2,
    "rayq_partition_replicas": 2,
}


@pytest.mark.parametrize(
    "changes, has_lease, expected, absent",
    [
        ({}, True, {**OF_ANY_LOG, "rayq_replica_lag": 0}, [*OF_A_LEADER]),
        (LEADS | IN_SYNC, True, OF_ANY_LOG | OF_A_LEADER, ["rayq_replica_lag"]),
        (LEADS, True, OF_A_LEADER | {"rayq_partition_in_sync_replicas": 1}, []),
        (LEADS, False, OF_ANY_LOG, [*OF_A_LEADER]),
        ({"leader_host": None}, True, OF_ANY_LOG, [*OF_A_LEADER, "rayq_replica_lag"]),
        (
            {"config": {"cleanup_policy": "compact"}}, True,
            {"rayq_log_unreadable_batches": 0}, ["rayq_remote_size_bytes"],
        ),
        (
            {"config": {"remote_storage": True}, **LEADS}, True,
            {"rayq_remote_size_bytes": 0}, ["rayq_log_unreadable_batches"],
        ),
        (LEADS, True, {}, ["rayq_remote_size_bytes", "rayq_log_unreadable_batches"]),
        ({"topic": OFFSETS_TOPIC, **LEADS}, True, {"rayq_partition_replicas": 2}, []),
    ],
)
def test_what_is_measured_of_each_role(
    changes: dict[str, Any], has_lease: bool, expected: dict[str, int], absent: list[str]
) -> None:
    async def work(hosted: Hosted) -> None:
        hosted.has_lease = has_lease
        found = hosted.samples()
        assert {name: found.get(name) for name in expected} == expected
        assert not set(absent) & set(found)
        hosted.replica.abandon()
        assert hosted.samples() == {}, "of a replica that is gone nothing is told"

    hosting(work, **changes)


def test_the_figures_of_a_leader_that_was_written_to() -> None:
    async def work(hosted: Hosted) -> None:
        await hosted.write(7)
        await hosted.log.advance_log_start(2)
        hosted.produce()
        found = hosted.samples()
        expected = {
            "rayq_log_size_bytes": hosted.log.log.size_bytes,
            "rayq_log_end_offset": 8,
            "rayq_partition_latest_offset": 7,
            "rayq_partition_earliest_offset": 2,
        }
        assert {name: found[name] for name in expected} == expected

    hosting(work, **LEADS)


@pytest.mark.parametrize("is_stored, has_backlog", [(True, True), (False, False), (None, False)])
def test_closed_segments_wait_for_the_object_store_where_the_topic_has_one(
    is_stored: bool | None, has_backlog: bool
) -> None:
    async def work(hosted: Hosted) -> None:
        await hosted.write(12)
        closed = hosted.log.log.local_segments()[:-1]
        closed_bytes = sum(segment.size_bytes for segment in closed)
        assert closed_bytes > SEGMENT_BYTES
        assert hosted.replica.remote_backlog_bytes() == (closed_bytes if has_backlog else 0)
        hosted.replica.abandon()
        assert hosted.replica.remote_backlog_bytes() == 0

    config = SMALL if is_stored is None else {**SMALL, "remote_storage": is_stored}
    hosting(work, config=config, **LEADS)


# --- its end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_replica_that_stops_serves_no_more(is_closed: bool) -> None:
    async def work(hosted: Hosted) -> None:
        await hosted.write(3)
        waits = hosted.produce(2)
        if is_closed:
            status = await hosted.replica.close()
            assert status == messages.ReplicaStatus(TOPIC_ID, 0, LEADER_EPOCH, 5)
        else:
            hosted.replica.abandon()
        for one in waits:
            with pytest.raises(NotLeaderError, match="stopping" if is_closed else "gone"):
                await one
        with pytest.raises(NotLeaderError):
            hosted.replica.leader(LEADER_EPOCH)
        assert hosted.samples() == {}
        assert (hosted.failures, hosted.log.failure) == (0, None)
        await asyncio.sleep(0.5)  # A flush may be under way.
        again = Hosted(hosted.process, hosted.host, ClusterConfig(), {})
        await again.open()
        assert again.log.log.end_offset == 5

    hosting(work, **LEADS)


def test_nothing_is_kept_of_a_replica_that_is_gone() -> None:
    async def work(hosted: Hosted) -> None:
        gone = weakref.ref(hosted.replica)
        hosted.replica.abandon()
        await asyncio.sleep(1.0)
        del hosted.replica
        gc.collect()
        assert gone() is None

    hosting(work, **LEADS)
