"""A leader alone, with its followers acted by the test: which requests it answers, when, and what
it tells a follower whose log differs."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import msgspec
import pytest

from rayq import messages
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.errors import (
    CorruptBatchError,
    DiskFullError,
    DivergedLogError,
    FencedEpochError,
    InvalidRecordError,
    InvalidRequestError,
    InvalidTimestampError,
    LeadershipEndedError,
    LogTruncatedError,
    NotEnoughReplicasAfterAppendError,
    NotEnoughReplicasError,
    NotLeaderError,
    OffsetNotAvailableError,
    OffsetOutOfRangeError,
    RayqError,
    StorageError,
    TimeoutError,
)
from rayq.wire.answer_room import AnswerRoom
from tests.simulated.leader_stage import ALL, END, LEADER_EPOCH, Led, assignment, leading
from tests.storage.support import append
from tests.wrong_batches import CONTROL, KEYED, WRONG_BODIES, pack, sealed

WAIT_S = 2.0
DESCRIBE = messages.DescribeRemoteStorage("id", 0, LEADER_EPOCH)
AT_ONCE_S = 0.05


# --- producing ------------------------------------------------------------------------------------


def test_a_record_is_acknowledged_when_all_in_sync_have_it_on_disk() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        answer = led.waiting(0)
        await asyncio.sleep(WAIT_S)
        led.flushed(31)
        await led.fetched(2, 31, LEADER_EPOCH, 31)
        await led.fetched(3, 31, LEADER_EPOCH, 30)
        assert not answer.done() and led.log.high_watermark == 30
        await led.fetched(3, 31, LEADER_EPOCH, 31)
        assert (answer.result().base_offset, led.log.high_watermark) == (30, 31)

    leading(work)


def test_a_record_is_acknowledged_as_soon_as_who_lacks_it_is_out_of_the_in_sync_set() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        answer = led.waiting(0)
        led.flushed(31)
        await led.fetched(2, 31, LEADER_EPOCH, 31)
        assert not answer.done()
        led.leader.committed(assignment(2, ALL[:2]))
        assert (answer.result().base_offset, led.log.high_watermark) == (30, 31)

    leading(work)


def test_a_duplicate_waits_as_its_original_does_and_each_is_answered_for_its_own_offset() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        first, second = led.waiting(0), led.waiting(1)
        again = led.waiting(0)
        led.flushed(32)
        await led.fetched(2, 32, LEADER_EPOCH)
        await led.fetched(3, 32, LEADER_EPOCH, 31)
        assert (first.done(), again.done(), second.done()) == (True, True, False)
        assert (again.result().base_offset, again.result().is_repeat) == (30, True)
        await led.fetched(3, 32, LEADER_EPOCH, 32)
        assert (second.result().base_offset, led.log.log.end_offset) == (31, 32)
        committed = led.produce(1)
        assert isinstance(committed, messages.ProduceResponse) and committed.base_offset == 31

    leading(work)


def test_nothing_is_taken_and_what_waits_fails_below_min_insync() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        waiting = led.waiting(0)
        led.leader.committed(assignment(2, [(1, "1a")]))
        with pytest.raises(NotEnoughReplicasAfterAppendError):
            waiting.result()
        with pytest.raises(NotEnoughReplicasError):
            led.produce(1)
        assert led.log.log.end_offset == 31
        assert isinstance(led.produce(1, acks=1), messages.ProduceResponse)

    leading(work)


@pytest.mark.parametrize(
    "fields, body, error",
    [
        ({"base_offset": 30}, KEYED, InvalidRequestError),
        ({"last_offset_delta": 1}, pack([0], None, [b"k"], [b"v"], None), InvalidRequestError),
        ({"max": 1 << 60}, KEYED, InvalidTimestampError),
        ({"first": -1}, KEYED, CorruptBatchError),
        ({"attributes": CONTROL}, KEYED, InvalidRecordError),
        ({}, WRONG_BODIES["other counts"], InvalidRecordError),
    ],
)
def test_a_batch_that_is_refused_leaves_no_trace(
    fields: dict[str, int], body: bytes, error: type[RayqError]
) -> None:
    async def work(led: Led) -> None:
        before = led.log.log.size_bytes
        for acks in (1, -1):
            request = messages.Produce("id", 0, LEADER_EPOCH, acks, 60_000)
            with pytest.raises(error):
                led.leader.produce(request, memoryview(sealed(fields, body)), principal=None)
        assert (led.log.log.end_offset, led.log.log.size_bytes) == (END, before)
        sound = led.produce(0, acks=1)
        assert isinstance(sound, messages.ProduceResponse) and sound.base_offset == END

    leading(work)


def test_metadata_that_leave_enough_in_sync_fail_nobody() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        waiting = led.waiting(0)
        led.leader.committed(assignment(1))
        led.leader.committed(assignment(2, ALL[:2]))
        assert not waiting.done()
        led.flushed(31)
        await led.fetched(2, 31)
        await led.fetched(3, 31)  # It is proposed again.
        assert waiting.result().base_offset == 30

    leading(work)


def test_a_leader_that_is_deposed_acknowledges_nothing_more() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        waiting = led.waiting(0)
        led.leader.end("another leads")
        with pytest.raises(LeadershipEndedError, match="may or may not be written"):
            waiting.result()
        led.flushed(31)
        for broker in (2, 3):
            led.leader.followers.flushed(
                messages.ReplicaFlushed("id", 0, broker, f"{broker}a", LEADER_EPOCH, 31)
            )
        assert led.log.high_watermark == 30, "the log is another's by now"
        with pytest.raises(NotLeaderError):
            await led.fetched(2, 31, LEADER_EPOCH)

    leading(work)


def test_who_waits_for_too_long_is_told_and_the_others_wait_on() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        now_s = led.log.environment.clock.monotonic()
        patient = led.waiting(0, timeout_ms=9_000)
        hasty = led.waiting(1, timeout_ms=3_000)
        led.leader.expire_waiters(now_s + 2.9)
        assert not hasty.done()
        led.leader.expire_waiters(now_s + 3.1)
        with pytest.raises(TimeoutError):
            hasty.result()
        assert not patient.done()
        led.flushed(32)
        await led.fetched(2, 32, LEADER_EPOCH)
        await led.fetched(3, 32, LEADER_EPOCH)
        assert patient.result().base_offset == 30
        alone = led.waiting(2, timeout_ms=3_000)
        led.leader.expire_waiters(led.log.environment.clock.monotonic() + 3.1)
        with pytest.raises(TimeoutError):
            alone.result()

    leading(work)


def test_a_new_leader_flushes_what_it_appended_as_a_follower() -> None:
    async def work(led: Led) -> None:
        append(led.log.log, epoch=6)
        again = Led(led.log, led.host)
        await asyncio.sleep(WAIT_S)
        assert led.log.log.flushed_offset == again.leader.state.end_offset == 31

    leading(work)


def test_each_answer_says_where_its_batch_is_and_when_it_was_appended() -> None:
    async def before(log: ReplicaLog) -> None:
        log.advance_high_watermark(END)
        await log.advance_log_start(5)

    async def work(led: Led) -> None:
        clock = led.log.environment.clock
        await led.all_agree()
        appended_ms = clock.wall_ms()
        first = led.produce(0, acks=1)
        assert first == messages.ProduceResponse(30, appended_ms, 5, False)
        await asyncio.sleep(WAIT_S)
        assert led.produce(0, acks=0) == messages.ProduceResponse(30, appended_ms, 5, True)
        later = led.waiting(1)
        later_ms = clock.wall_ms()
        led.flushed(32)
        await led.all_agree(32)
        assert await later == messages.ProduceResponse(31, later_ms, 5, False)
        assert led.produce(0) == messages.ProduceResponse(30, appended_ms, 5, True)

    leading(work, before=before)


def test_where_a_topic_does_not_wait_for_its_disk_the_followers_are_enough() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        answer = led.waiting(0)
        await led.fetched(2, 31, flushed=31)
        assert not answer.done()
        await led.fetched(3, 31, flushed=31)
        assert answer.result().base_offset == 30

    leading(work, config={"flush": "os"})


@pytest.mark.parametrize("flush", ["os", "disk"])
def test_a_leader_that_is_alone_waits_for_its_disk_only(flush: str) -> None:
    async def work(led: Led) -> None:
        led.leader.committed(assignment(2, ALL[:1]))
        answer = led.produce(0)
        if flush == "disk":
            assert isinstance(answer, asyncio.Future) and not answer.done()
            led.flushed(31)
            answer = answer.result()
        assert isinstance(answer, messages.ProduceResponse) and answer.base_offset == 30
        assert led.log.high_watermark == 31

    leading(work, config={"flush": flush, "min_insync_replicas": 1})


def test_the_leader_has_its_own_appends_flushed() -> None:
    async def work(led: Led) -> None:
        led.produce(0, acks=1)
        await asyncio.sleep(WAIT_S)
        assert led.log.log.flushed_offset == 31

    leading(work)


def test_a_disk_that_is_full_refuses_a_record_and_one_that_fails_ends_the_replica() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        full = led.host.disk.fail("write", path_part=".log", error=errno.ENOSPC)
        with pytest.raises(DiskFullError):
            led.produce(0)
        assert (led.log.failure, led.log.log.end_offset) == (None, END)
        full.heal()
        assert led.waiting(0).done() is False and led.log.log.end_offset == 31
        led.host.disk.fail("write", path_part=".log")
        led.host.disk.fail("truncate", path_part=".log")  # What was half written stays.
        with pytest.raises(StorageError):
            led.produce(1)
        assert led.log.failure is not None

    leading(work)


@pytest.mark.parametrize("config", [{}, {"min_insync_replicas": 3}, {"min_insync_replicas": 1}])
@pytest.mark.parametrize("in_sync", [1, 2, 3])
def test_how_many_must_be_in_sync_is_the_topics_to_say(
    config: dict[str, Any], in_sync: int
) -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        led.leader.committed(assignment(2, ALL[:in_sync]))
        least = config.get("min_insync_replicas", 2)
        if in_sync >= least:
            assert not led.waiting(0).done()
        else:
            with pytest.raises(
                NotEnoughReplicasError,
                match=f"t-0 has {in_sync} in-sync replicas, acks='all' needs.*= {least}",
            ):
                led.produce(0)

    leading(work, config=config)


def test_a_partition_that_moves_needs_no_more_in_sync_than_its_topic_says() -> None:
    async def work(led: Led) -> None:
        led.log.configure({})  # A majority of the topic's replicas.
        await led.all_agree()
        moving = assignment(2, ALL[:1], replication_factor=1)
        led.leader.committed(moving)
        assert led.leader.state.min_insync == 1
        led.leader.committed(assignment(3, ALL[:1], replication_factor=3))
        assert led.leader.state.min_insync == 2
        led.leader.committed(assignment(4, ALL[:1]))
        assert led.leader.state.min_insync == 2, "an older broker says nothing of a move"

    leading(work)


# --- the end of a role ----------------------------------------------------------------------------


def test_who_waits_for_a_deposed_leader_hears_it_at_once() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        waiting = [
            asyncio.ensure_future(call)
            for call in (
                led.reading(END, wait_ms=60_000),
                led.copying(2, END, 6, log_start=9, wait_ms=60_000),
                led.deleting(9, timeout_ms=60_000),
            )
        ]
        await asyncio.sleep(WAIT_S)
        assert not any(waiter.done() for waiter in waiting)
        led.leader.end("another leads")
        for waiter in waiting:
            with pytest.raises(NotLeaderError, match="does not lead t-0 .another leads."):
                await asyncio.wait_for(waiter, AT_ONCE_S)

    leading(work)


def test_a_leader_says_why_it_leads_no_more() -> None:
    async def work(led: Led) -> None:
        led.leader.check()
        led.has_lease = False
        with pytest.raises(NotLeaderError, match="it lost its broker"):
            led.leader.check()
        led.has_lease = True
        led.leader.check()
        led.leader.end("another leads")
        with pytest.raises(NotLeaderError, match="another leads"):
            led.leader.check()

    leading(work)


# --- reading --------------------------------------------------------------------------------------


def test_a_new_leader_says_nothing_of_its_end_until_its_followers_have_it() -> None:
    async def work(led: Led) -> None:
        asked = messages.ListOffsets("id", 0, LEADER_EPOCH, messages.LATEST)
        fetch = messages.Fetch("id", 0, LEADER_EPOCH, 0, None, 1 << 20, 0)
        room = AnswerRoom(lambda: True)
        await led.fetched(2, END, 6)
        for question in (led.leader.reads.list_offsets(asked), led.leader.reads.fetch(fetch, room)):
            with pytest.raises(OffsetNotAvailableError):
                await question
        await led.fetched(3, END, 6)
        assert (await led.leader.reads.list_offsets(asked)).offset == 30
        led.produce(0, acks=1)
        answer, _ = await led.leader.reads.fetch(msgspec.structs.replace(fetch, offset=30), room)
        assert (answer.high_watermark, answer.next_offset) == (30, 30), "30 is not committed"

    leading(work)


def test_a_reader_that_waits_gets_a_record_as_soon_as_it_is_committed() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        clock = led.log.environment.clock
        led.produce(0, acks=1)
        fetch = messages.Fetch("id", 0, LEADER_EPOCH, 30, 6, 1 << 20, 60_000)
        reading = asyncio.ensure_future(led.leader.reads.fetch(fetch, AnswerRoom(lambda: True)))
        await asyncio.sleep(WAIT_S)
        assert not reading.done()
        began_s = clock.monotonic()
        led.flushed(31)
        await led.all_agree(31)
        answer, data = await reading
        assert (answer.next_offset, bool(data)) == (31, True)
        assert clock.monotonic() - began_s < 1.0

    leading(work)


@pytest.mark.parametrize(
    "offset, last_epoch, error",
    [
        (25, 6, None),
        (20, 4, None),
        (21, 4, LogTruncatedError),
        (5, 3, LogTruncatedError),
        (25, 9, NotLeaderError),  # The position was read from a later leader.
        (37, 9, NotLeaderError),
        (30, None, None),
        (31, None, OffsetOutOfRangeError),
        (14, None, OffsetOutOfRangeError),
    ],
)
def test_a_reader_hears_when_what_it_has_read_is_not_in_the_leaders_log(
    offset: int, last_epoch: int | None, error: type[Exception] | None
) -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        if offset == 14:
            await led.log.advance_log_start(15)
        fetch = messages.Fetch("id", 0, LEADER_EPOCH, offset, last_epoch, 1 << 20, 0)
        if error is None:
            answer, _ = await led.leader.reads.fetch(fetch, AnswerRoom(lambda: True))
            assert answer.next_offset == END
        else:
            with pytest.raises(error):
                await led.leader.reads.fetch(fetch, AnswerRoom(lambda: True))

    leading(work)


def test_a_leader_that_lost_its_broker_answers_nobody() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        led.has_lease = False
        fetch = messages.Fetch("id", 0, LEADER_EPOCH, 0, None, 1 << 20, 0)
        with pytest.raises(NotLeaderError):
            await led.leader.reads.fetch(fetch, AnswerRoom(lambda: True))
        with pytest.raises(NotLeaderError):
            await led.fetched(2, END, 6)

    leading(work)


# --- followers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "offset, last_epoch, diverging",
    [
        (30, 6, None),
        (25, 6, None),
        (20, 4, None),
        (0, None, None),
        (30, None, None),
        (31, 6, (6, 30)),  # It has more of our last epoch than we,
        (30, 7, (6, 30)),  # or one that we lack,
        (15, 5, (4, 20)),
        (21, 4, (4, 20)),  # or more of an earlier one;
        (20, 3, (2, 10)),
        (9, 1, (None, 0)),  # nothing is common;
        (31, None, (None, 30)),  # or it has no batch to compare.
    ],
)
def test_a_follower_is_told_up_to_where_its_log_may_agree_and_counts_only_once_it_does(
    offset: int, last_epoch: int | None, diverging: tuple[int | None, int] | None
) -> None:
    async def work(led: Led) -> None:
        await led.fetched(3, END, 6)
        answer = await led.fetched(2, offset, last_epoch)
        if diverging is None:
            assert answer.diverging_end is None
            assert led.log.high_watermark == offset
        else:
            assert (answer.diverging_epoch, answer.diverging_end) == diverging
            assert led.log.high_watermark == 0

    leading(work)


def test_what_a_follower_has_flushed_counts_up_to_its_end_only() -> None:
    async def work(led: Led) -> None:
        await led.fetched(3, END, 6)
        await led.fetched(2, 20, 4, flushed=30)
        assert led.log.high_watermark == 20
        led.leader.followers.flushed(
            messages.ReplicaFlushed("id", 0, 2, "2a", LEADER_EPOCH, 99)
        )
        assert led.log.high_watermark == 30

    leading(work)


def test_a_follower_below_the_log_start_begins_again_unless_it_is_in_sync() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        await led.log.advance_log_start(15)
        with pytest.raises(DivergedLogError):
            await led.fetched(2, 14, 4)
        led.leader.committed(assignment(2, ALL[::2]))
        answer = await led.fetched(2, 14, 4)
        assert answer.reset_to == 15
        assert (await led.fetched(2, 15, 4)).reset_to is None
        with pytest.raises(FencedEpochError):
            await led.fetched(2, 30, 6, incarnation="2b")

    leading(work)


def test_who_begins_again_gets_the_producers_and_epochs_below_the_log_start_only() -> None:
    async def work(led: Led) -> None:
        led.produce(0, acks=1)
        await led.all_agree(31)
        led.flushed(31)
        led.produce(1, acks=1)
        await led.log.advance_log_start(31)
        request = messages.ReplicaSnapshot("id", 0, LEADER_EPOCH)
        answer, data = led.leader.followers.snapshot(request)
        assert answer.log_start_offset == 31
        assert answer.epochs == [(LEADER_EPOCH, 30)]
        told = type(led.log.log.producers)()
        told.load(data)
        assert told.batches_below(1 << 40) == (30,)
        assert led.log.log.producers.batches_below(1 << 40) == (30, 31), "its own stays whole"

    leading(work)


# --- without an object store ----------------------------------------------------------------------


def test_a_topic_that_has_nothing_in_the_object_store_says_so() -> None:
    async def work(led: Led) -> None:
        await led.fetched(2, END, 6)
        await led.fetched(3, 21, 6)
        await led.log.advance_log_start(12)
        assert led.leader.describe_remote_storage(DESCRIBE) == messages.DescribeRemoteStorageResponse(
            pointer=None, log_start_offset=12, local_start_offset=12, high_watermark=21,
            lag_bytes=0, lag_ms=0, trouble=None,
        )
        await led.log.drop_local(15)
        described = led.leader.describe_remote_storage(DESCRIBE)
        assert (described.log_start_offset, described.local_start_offset) == (12, 15)
        request = messages.VerifyRemote("id", 0, LEADER_EPOCH, 0, deep=True, repair=False)
        answer = await led.leader.verify_remote(request)
        assert answer == messages.VerifyRemoteResponse(0, None, [], [])

    leading(work)
