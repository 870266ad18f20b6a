"""What a replica does by time, and how a leader begins where records are in the object store."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proving.simulation.server_view import role_of
from rayq import messages
from rayq.actors.clock_watch import ClockWatch, DelayClock
from rayq.actors.remote.leader_remote import LeaderRemote
from rayq.actors.replica.leader import Leader
from rayq.config import ClusterConfig
from rayq.errors import NotLeaderError, RayqError, TimeoutError
from rayq.messages.remote_pointer import RemotePointer
from rayq.storage.batch import encode_batch
from rayq.storage.cleaner import CleaningJob, CleaningResult
from tests.simulated.followed import LEADER_EPOCH, THEM, US, answer, batch
from tests.simulated.hosted import LEADS, QUEUE, RECORD_BYTES, SEGMENT_BYTES, Hosted, hosting
from tests.simulated.remote_store import TOPIC_ID

SMALL: dict[str, Any] = {"segment_bytes": SEGMENT_BYTES}
OLD_GO: dict[str, Any] = {**SMALL, "retention_ms": 10_000}
ALL_STORED = RemotePointer(1, 3, "manifest", 0, 10, 3, 1000)
STORED: dict[str, Any] = {"config": {**SMALL, "remote_storage": True, "local_retention_bytes": 0}}


def jobs_of(hosted: Hosted) -> list[str]:
    """What is done beside its role."""
    names = [task.get_name() for task in asyncio.all_tasks()]
    return sorted(name for name in names if name.endswith("t-0") and "follow" not in name)


def segment_starts(hosted: Hosted) -> list[int]:
    return [segment.base_offset for segment in hosted.log.log.local_segments()]


# --- ticks ----------------------------------------------------------------------------------------


def test_who_waits_for_others_in_sync_is_told_in_time() -> None:
    async def work(hosted: Hosted) -> None:
        (waits,) = hosted.produce(timeout_ms=3000)
        now_s = hosted.now_s
        hosted.replica.tick(now_s + 2.9)
        await asyncio.sleep(0)
        assert not waits.done()
        hosted.replica.tick(now_s + 3.1)
        with pytest.raises(TimeoutError):
            await waits

    hosting(work, **LEADS | {"isr": [US, THEM]})


def test_a_leader_looks_for_those_that_lag_at_intervals() -> None:
    async def work(hosted: Hosted) -> None:
        hosted.produce()
        began_s = hosted.now_s
        hosted.replica.tick(began_s)
        await asyncio.sleep(11)  # Longer than a follower may lag.
        hosted.replica.tick(began_s + 0.49)
        await asyncio.sleep(0.1)
        assert hosted.proposals == []
        hosted.replica.tick(began_s + 0.5)
        await asyncio.sleep(0.1)
        assert hosted.proposals == [
            messages.AlterPartition(TOPIC_ID, 0, 0, "ours", LEADER_EPOCH, 1, [US])
        ]

    hosting(work, **LEADS | {"isr": [US, THEM]})


def test_its_first_look_is_due_at_once() -> None:
    async def work(hosted: Hosted) -> None:
        hosted.produce()
        hosted.replica.tick(1000.0)  # When the simulation began.
        await asyncio.sleep(11)
        hosted.replica.tick(1000.4)
        await asyncio.sleep(0.1)
        assert hosted.proposals == []

    hosting(work, **LEADS | {"isr": [US, THEM]})


def test_each_look_serves_queues_transactions_clocks_and_the_object_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(hosted: Hosted) -> None:
        leader, replica = hosted.replica.leader(LEADER_EPOCH), hosted.replica
        looks: list[str] = []
        assert leader.remote is not None
        monkeypatch.setattr(leader.transactions, "tick", lambda s: looks.append(f"open {s}"))
        monkeypatch.setattr(
            leader.remote, "tick", lambda s, watch: looks.append(f"store {s} {watch.now_ms()}")
        )
        monkeypatch.setattr(ClockWatch, "look", lambda watch: looks.append("age"))
        monkeypatch.setattr(DelayClock, "look", lambda clock: looks.append("delays"))
        monkeypatch.setattr(replica.queues(LEADER_EPOCH), "tick", lambda: looks.append("queues"))
        monkeypatch.setattr(ClockWatch, "now_ms", lambda watch: 7)
        replica.tick(2000.0)
        seen = ["age", "delays", "open 2000.0", "store 2000.0 7"]
        assert looks == ["queues", *seen]
        replica.tick(2000.4)
        assert looks == ["queues", *seen, "queues"], "queues are looked at more often"

    hosting(work, config={"remote_storage": True}, **LEADS)


@pytest.mark.parametrize("changes", [LEADS, {}, {"leader_host": None}])
def test_ticks_harm_no_role(changes: dict[str, Any]) -> None:
    async def work(hosted: Hosted) -> None:
        for _ in range(3):
            await hosted.tick()
        assert (hosted.failures, hosted.log.failure, jobs_of(hosted)) == (0, None, [])
        hosted.replica.abandon()
        await hosted.tick()
        assert (hosted.failures, jobs_of(hosted)) == (0, [])

    hosting(work, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {"cleanup_policy": "compact"}},
        {**STORED, "remote": ALL_STORED},
        {"queues": [QUEUE], **LEADS},
    ],
)
def test_a_replica_that_is_not_open_has_nothing_due(changes: dict[str, Any]) -> None:
    async def work(hosted: Hosted) -> None:
        await hosted.tick()  # It is not open yet.
        assert hosted.failures == 0
        await hosted.open()
        await hosted.tick()
        await hosted.replica.close()
        await hosted.tick()
        assert (hosted.failures, hosted.log.failure) == (0, None)

    hosting(work, is_open=False, **changes)


def test_an_error_in_what_is_due_ends_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(hosted: Hosted) -> None:
        def fail() -> None:
            raise KeyError("a bug")

        monkeypatch.setattr(ClockWatch, "look", lambda watch: fail())
        await hosted.tick()
        assert (hosted.failures, hosted.log.failure) == (1, "'a bug'")

    hosting(work)


# --- retention ------------------------------------------------------------------------------------


def test_what_is_too_old_goes_at_each_interval_and_followers_hear_of_it() -> None:
    async def work(hosted: Hosted) -> None:
        async def is_told_at(now_s: float) -> bool:
            """Whether followers hear of something new that comes with this tick."""
            told = asyncio.ensure_future(hosted.log.appended.wait(1.0))
            await asyncio.sleep(0)
            hosted.replica.tick(now_s)
            return await told

        log = hosted.log.log
        await hosted.write(12)
        first = segment_starts(hosted)[-1]
        assert not await is_told_at(2000.0), "nothing is too old"
        await asyncio.sleep(11)
        assert not await is_told_at(2029.9), "it was looked at less than 30 s before"
        assert log.start_offset == 0
        assert await is_told_at(2030.0) is False, "the last look at anything was just before"
        assert await is_told_at(2030.5)
        assert (log.start_offset, log.persisted_log_start) == (first, first)
        await hosted.write(12)
        second = segment_starts(hosted)[-1]
        await asyncio.sleep(11)
        assert not await is_told_at(2060.0)
        assert log.start_offset == first
        assert await is_told_at(2060.5)
        assert log.start_offset == second
        assert not await is_told_at(2091.0), "nothing more is too old"

    hosting(work, config=OLD_GO, **LEADS)


def test_what_is_too_old_goes_exactly_when_it_is_looked_at_again() -> None:
    async def work(hosted: Hosted) -> None:
        await hosted.write(12)
        hosted.replica.tick(2000.0)
        await asyncio.sleep(11)
        hosted.replica.tick(2030.0)
        await asyncio.sleep(0.2)
        assert hosted.log.log.start_offset == segment_starts(hosted)[-1]

    hosting(work, config=OLD_GO, **LEADS)


@pytest.mark.parametrize(
    "held, follows, expected",
    [
        (None, False, "active"),
        (6, False, 6),  # A queue needs the rest.
        (99, False, "active"),
        (3, True, 3),  # What the queue is done with goes at any age.
        (11, True, 11),
    ],
)
def test_retention_goes_as_far_as_a_queue_lets_it(
    held: int | None, follows: bool, expected: Any
) -> None:
    async def work(hosted: Hosted) -> None:
        await hosted.write(12)
        await asyncio.sleep(11)
        hosted.log.hold_log_start(held, deletes_what_is_done=follows)
        await hosted.tick(0)
        active = segment_starts(hosted)[-1]
        assert hosted.log.log.start_offset == (active if expected == "active" else expected)

    hosting(work, config=OLD_GO, **LEADS)


def test_only_what_is_committed_is_too_old_and_only_for_the_leader() -> None:
    async def work(hosted: Hosted) -> None:
        hosted.produce(12)
        await asyncio.sleep(11)
        await hosted.tick(0)
        assert hosted.log.log.start_offset == 0

    hosting(work, config=OLD_GO, **LEADS | {"isr": [US, THEM]})

    async def work_of_follower(hosted: Hosted) -> None:
        hosted.leader.answers = copied()
        hosted.told()
        await asyncio.sleep(11)
        await hosted.tick(0)
        assert hosted.log.log.end_offset == 12
        assert hosted.log.log.start_offset == 0

    hosting(work_of_follower, config=OLD_GO, leader_epoch=9)


def test_one_move_of_the_log_start_is_under_way_at_a_time_and_ends_with_the_replica() -> None:
    async def work(hosted: Hosted) -> None:
        await hosted.write(12)
        await asyncio.sleep(11)
        async with hosted.log.files_lock:
            await hosted.tick(0)
            assert jobs_of(hosted) == ["retention of t-0"]
            await hosted.tick(31)
            assert jobs_of(hosted) == ["retention of t-0"]
            hosted.replica.abandon()
            await asyncio.sleep(0.1)
            assert jobs_of(hosted) == []
        assert hosted.failures == 0

    hosting(work, config=OLD_GO, **LEADS)


@pytest.mark.parametrize("is_doubted, expected", [(True, 0), (False, 5)])
def test_a_topic_that_gave_up_its_objects_begins_with_what_is_here(
    is_doubted: bool, expected: int
) -> None:
    async def work(hosted: Hosted) -> None:
        await hosted.write(12)
        await hosted.log.drop_local(5)
        hosted.told(is_remote_doubted=is_doubted)
        await hosted.tick()
        assert hosted.log.log.start_offset == expected

    hosting(work, config=SMALL, **LEADS)


def test_age_is_not_believed_to_a_clock_that_was_not_watched() -> None:
    async def work(hosted: Hosted) -> None:
        await hosted.write(12)
        await hosted.replica.close()
        await asyncio.sleep(300)  # As far as the clock of this host can tell.
        again = Hosted(hosted.process, hosted.host, ClusterConfig(), dict(hosted.changes))
        await again.open()
        await again.tick(0)
        assert again.log.log.start_offset == 0
        for _ in range(4):
            await again.tick(31)
        assert again.log.log.start_offset > 0, "it has gone on for long enough"

    hosting(work, config=OLD_GO, **LEADS)


# --- what else goes by time -----------------------------------------------------------------------


def copied() -> list[Any]:
    """Twelve records that a leader sends."""
    return [answer(12, batch(number, size=RECORD_BYTES)) for number in range(12)]


@pytest.mark.parametrize(
    "changes, starts_at",
    [
        ({"remote": ALL_STORED}, "segment"),
        ({"remote": ALL_STORED, "is_remote_doubted": True}, 0),
        ({}, 0),
    ],
)
def test_what_is_stored_leaves_the_disk_of_a_follower_too(
    changes: dict[str, Any], starts_at: Any
) -> None:
    async def work(hosted: Hosted) -> None:
        hosted.leader.answers = copied()
        hosted.told(leader_epoch=9)
        await asyncio.sleep(1.0)
        await hosted.log.flusher.checkpoint()
        starts = segment_starts(hosted)
        await hosted.tick()
        log = hosted.log.log
        expected = max(start for start in starts if start <= 10) if starts_at == "segment" else 0
        assert (log.local_start_offset, log.start_offset) == (expected, 0)
        assert hosted.failures == 0

    hosting(work, **STORED, **changes)


COMPACTED: dict[str, Any] = {
    **SMALL, "cleanup_policy": "compact", "min_cleanable_dirty_ratio": 0.0,
}


async def write_dirty(hosted: Hosted) -> None:
    """Records of one key, and time for more than one look of the compactor."""
    leader = hosted.replica.leader(LEADER_EPOCH)
    request = messages.Produce(TOPIC_ID, 0, LEADER_EPOCH, 1, 1000)
    for _ in range(12):
        made = encode_batch([b"v" * RECORD_BYTES], [b"key"], None, 1000, compression="none")
        leader.produce(request, memoryview(made), principal=None)
    for _ in range(4):
        await hosted.tick(15.1)


def test_a_log_is_compacted_by_the_helper_that_its_process_has() -> None:
    jobs: list[str] = []

    async def killed(job: CleaningJob) -> CleaningResult:
        jobs.append(job.directory)
        raise RayqError("the helper was killed")

    async def work(hosted: Hosted) -> None:
        await write_dirty(hosted)
        assert {*jobs} == {"/data/t-0"} and len(jobs) > 1
        assert (hosted.log.log.cleaned_offset, hosted.failures) == (0, 0), "nobody else does it"

    hosting(work, run_cleaner=killed, config=COMPACTED, **LEADS)


def test_a_compacted_log_is_compacted_until_the_replica_is_gone() -> None:
    async def work(hosted: Hosted) -> None:
        await write_dirty(hosted)
        assert hosted.log.log.cleaned_offset > 0
        size_bytes = hosted.log.log.size_bytes
        assert size_bytes < 2 * SEGMENT_BYTES
        async with hosted.log.files_lock:
            await hosted.tick(15.1)
            assert jobs_of(hosted) == ["compact t-0"]
            hosted.replica.abandon()
            await asyncio.sleep(0.1)
            assert jobs_of(hosted) == []

    hosting(work, config=COMPACTED, **LEADS)


def test_dropping_what_is_stored_ends_with_the_replica() -> None:
    async def work(hosted: Hosted) -> None:
        hosted.leader.answers = copied()
        hosted.told(leader_epoch=9)
        await asyncio.sleep(1.0)
        await hosted.log.flusher.checkpoint()
        async with hosted.log.files_lock:
            await hosted.tick()
            assert jobs_of(hosted) == ["local retention of t-0"]
            await hosted.tick(31)
            assert jobs_of(hosted) == ["local retention of t-0"], "one at a time"
            hosted.replica.abandon()
            await asyncio.sleep(0.1)
            assert jobs_of(hosted) == []
        assert (hosted.failures, hosted.log.failure) == (0, None)

    hosting(work, **STORED, remote=ALL_STORED)


# --- the object store -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, has_remote",
    [
        ({}, False),
        ({"config": {"remote_storage": True}}, True),
        ({"config": {"remote_storage": False}}, False),
        # The topic has given it up, and objects are left.
        ({"remote": RemotePointer(1, 3, "manifest", 0, 0, None, 0)}, True),
    ],
)
def test_a_leader_has_a_remote_part_where_records_are_or_get_stored(
    changes: dict[str, Any], has_remote: bool
) -> None:
    async def work(hosted: Hosted) -> None:
        leader = hosted.replica.leader(LEADER_EPOCH)
        assert isinstance(leader.remote, LeaderRemote) is has_remote
        hosted.told(config={"remote_storage": True})
        assert hosted.replica.leader(LEADER_EPOCH) is leader
        remote = leader.remote
        assert isinstance(remote, LeaderRemote)
        hosted.told()
        assert leader.remote is remote, "it is not begun again"
        await hosted.tick()
        assert hosted.failures == 0

    hosting(work, **LEADS, **changes)


def test_a_replica_that_lacks_what_is_stored_leads_only_once_it_has_found_it() -> None:
    async def work(hosted: Hosted) -> None:
        replica = hosted.replica
        with pytest.raises(NotLeaderError, match="yet .its log is being adopted"):
            replica.leader(LEADER_EPOCH)
        await asyncio.sleep(2.0)
        with pytest.raises(NotLeaderError, match="yet .t-0 is offline until this broker"):
            replica.leader(LEADER_EPOCH)
        assert not replica.describe(messages.DescribeReplica("T", 0)).is_leader
        await hosted.tick()
        role = role_of(replica)
        hosted.told()
        assert role_of(replica) is role, "it continues"
        hosted.told(leader_epoch=9)
        assert role_of(replica) is not role
        with pytest.raises(NotLeaderError, match="being adopted|offline"):
            replica.leader(9)
        hosted.told(remote=None, config={})
        assert replica.leader(9).remote is None, "there is nothing to find any more"
        await asyncio.sleep(2.0)
        assert isinstance(role_of(replica), Leader)
        replica.queues(9)
        await hosted.write(1)

    hosting(work, **LEADS, remote=ALL_STORED, config={"remote_storage": True})


def test_a_log_that_was_adopted_is_led_with_all_that_belongs_to_it() -> None:
    async def work(hosted: Hosted) -> None:
        replica = hosted.replica
        await asyncio.sleep(30)
        with pytest.raises(NotLeaderError):
            replica.leader(LEADER_EPOCH)
        hosted.told(isr=[THEM, US])
        await asyncio.sleep(40)
        assert isinstance(hosted.asked[0], messages.MoveRemote)
        pointer = hosted.controller.pointer
        leader = replica.leader(LEADER_EPOCH)
        assert leader.state.isr == (US, THEM)
        assert leader.remote is not None and leader.remote.log.pointer == pointer
        assert hosted.log.trouble is None
        replica.queues(LEADER_EPOCH)  # Raises where they are not led.
        hosted.told(remote=pointer, is_remote_doubted=False, isr=[US])
        assert replica.leader(LEADER_EPOCH) is leader
        await hosted.write(1)
        for _ in range(3):
            await hosted.tick()
        assert any(name.startswith("rayq_queue") for name in hosted.samples())

    stored = {"remote_storage": True}
    hosting(work, **LEADS, is_remote_doubted=True, config=stored, queues=[QUEUE])


def test_a_log_without_an_object_store_is_led_at_once_whatever_metadata_were_lost() -> None:
    async def work(hosted: Hosted) -> None:
        assert hosted.replica.leader(LEADER_EPOCH).remote is None
        hosted.told(leader_epoch=9)
        assert hosted.replica.leader(9).remote is None

    hosting(work, **LEADS, is_remote_doubted=True)
