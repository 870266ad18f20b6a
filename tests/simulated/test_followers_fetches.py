"""What a follower asks its leader for and when, what it takes from the answers, and what it tells
of its disk."""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import Any

import pytest

from rayq import messages
from rayq.actors.replica import follower
from rayq.config import KIB, MIB
from rayq.errors import DivergedLogError, NotLeaderError, StorageError, TimeoutError
from tests.simulated.followed import (
    END,
    IN_SYNC,
    LEADER_EPOCH,
    SNAPSHOT,
    THEM,
    US,
    Followed,
    Late,
    PlayedLeader,
    answer,
    assignment,
    batch,
    diverging,
    following,
)
from tests.storage.support import append, assert_holds

FIRST_MS, SHORT_MS, LONG_MS = 0, 500, 30_000


def waits_ms(leader: PlayedLeader) -> list[int]:
    return [one.wait_ms for one in leader.fetches]


# --- what it asks for -----------------------------------------------------------------------------


def test_a_fetch_says_who_asks_and_where_the_log_and_its_disk_are() -> None:
    async def work(followed: Followed) -> None:
        log = followed.log
        await log.drop_local(20)
        await log.advance_log_start(5)
        append(log.log, 3, epoch=6)
        leader = await followed.follow([])
        expected = messages.ReplicaFetch(
            "id", 0, 0, "ours", LEADER_EPOCH, 33, END, 5, 6, 4 * MIB, FIRST_MS, 0, 20
        )
        (asked,) = leader.asked
        assert asked.request == expected
        assert (asked.timeout_s, asked.patience_s) == (3, 300)
        assert leader.places == [("leader", 1)]

    following(work)


def test_a_fetch_of_an_empty_log_names_no_epoch() -> None:
    async def work(followed: Followed) -> None:
        leader = await followed.follow([])
        assert leader.requests == [
            messages.ReplicaFetch("id", 0, 0, "ours", LEADER_EPOCH, 0, 0, 0, None, 4 * MIB, FIRST_MS)
        ]

    following(work, is_empty=True)


def test_a_log_start_is_on_disk_before_the_leader_hears_of_it() -> None:
    async def work(followed: Followed) -> None:
        log = followed.log.log
        log.advance_start(5)
        assert log.persisted_log_start == 0
        heard: list[tuple[int, int]] = []
        leader = PlayedLeader([])
        leader.on_request = lambda asked: heard.append(
            (asked.log_start_offset, log.persisted_log_start)
        )
        followed.made(leader).start()
        await asyncio.sleep(1.0)
        assert heard == [(5, 5)]

    following(work)


@pytest.mark.parametrize(
    "changes, bytes_max",
    [
        ({}, 4 * MIB),
        ({"throttle_bytes_per_s": 1}, 16 * KIB),
        ({"throttle_bytes_per_s": 32 * KIB}, 16 * KIB),
        ({"throttle_bytes_per_s": 33 * KIB}, 16 * KIB + 512),
        ({"throttle_bytes_per_s": 8 * MIB - 2}, 4 * MIB - 1),
        ({"throttle_bytes_per_s": 99 * MIB}, 4 * MIB),
        ({"throttle_bytes_per_s": 1, **IN_SYNC}, 4 * MIB),  # Writers wait for it.
    ],
)
def test_a_follower_asks_for_what_it_may_copy_in_half_a_second(
    changes: dict[str, Any], bytes_max: int
) -> None:
    async def work(followed: Followed) -> None:
        leader = await followed.follow([], **changes)
        assert [one.bytes_max for one in leader.fetches] == [bytes_max]

    following(work)


@pytest.mark.parametrize(
    "answers, bytes_max",
    [
        ([answer(0, batch(30))], 4 * MIB),  # It was quick,
        ([Late(2.9, answer(0, batch(30)))], 4 * MIB),
        ([Late(3.1, answer(0, batch(30)))], 64 * KIB),  # or slow for its size.
        ([Late(3.1, answer(0))], 4 * MIB),  # The leader had nothing to send for long.
        ([TimeoutError("no answer")], 2 * MIB),
        ([TimeoutError("no answer")] * 2, MIB),
        ([TimeoutError("no answer")] * 2 + [answer(0, batch(30, size=600 * KIB))], 2 * MIB),
    ],
)
def test_how_much_it_asks_for_follows_the_pace_of_the_link(
    answers: list[Any], bytes_max: int
) -> None:
    async def work(followed: Followed) -> None:
        count = len(answers)
        leader = await followed.follow(answers)
        assert len(leader.fetches) == count + 1
        assert leader.fetches[-1].bytes_max == bytes_max
        assert followed.log.failure is None

    following(work)


def test_a_log_copied_from_its_start_says_what_the_leaders_horizon_was_then() -> None:
    async def work(followed: Followed) -> None:
        leader = await followed.follow(
            [
                answer(0, batch(0, 10), horizon=25),
                answer(0, batch(10, 10), horizon=28),
                answer(0),
                diverging(None, 0),  # It is copied again,
                answer(0),
                answer(0, batch(0, 10), horizon=27),
                (messages.ReplicaFetchResponse(0, 0, END, reset_to=0), b""),  # and once more.
                SNAPSHOT,
                answer(0, batch(0, 10), horizon=26),
            ]
        )
        found = [(one.offset, one.copied_horizon) for one in leader.fetches]
        assert found == [
            *((0, 0), (10, 25), (20, 25), (20, 25)),
            *((0, 0), (0, 0), (10, 27)),
            *((0, 0), (10, 26)),
        ]

    following(work, is_empty=True)


def test_a_log_that_had_records_before_says_nothing_of_the_horizon() -> None:
    async def work(followed: Followed) -> None:
        leader = await followed.follow([answer(0, batch(30), horizon=25), answer(0)])
        assert [one.copied_horizon for one in leader.fetches] == [0, 0, 0]

    following(work)


# --- how long its fetches are held ----------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, first, wait_ms",
    [
        (IN_SYNC, answer(END), LONG_MS),
        ({}, answer(END), SHORT_MS),  # It is not in sync.
        ({"isr": [THEM, (0, "ours before")]}, answer(END), SHORT_MS),
        ({"isr": [THEM, (2, "ours")]}, answer(END), SHORT_MS),
        (IN_SYNC, answer(END - 1), SHORT_MS),  # A record is not committed yet,
        (IN_SYNC, answer(END + 1), SHORT_MS),  # or one is committed that is not here.
        (IN_SYNC, answer(END, log_start=5), SHORT_MS),
        (IN_SYNC, answer(END + 1, batch(30)), SHORT_MS),
        (IN_SYNC, answer(END, batch(30)), SHORT_MS),  # It is to hear soon that it is committed.
    ],
)
def test_only_what_told_a_member_in_sync_nothing_new_is_followed_by_a_long_fetch(
    changes: dict[str, Any], first: Any, wait_ms: int
) -> None:
    async def work(followed: Followed) -> None:
        leader = await followed.follow([first], **changes)
        assert waits_ms(leader) == [FIRST_MS, wait_ms]
        assert leader.asked[1].timeout_s == wait_ms / 1000 + 3

    following(work, high_watermark=END)


def test_a_high_watermark_that_the_fetch_told_is_news() -> None:
    async def work(followed: Followed) -> None:
        leader = await followed.follow([answer(END), answer(END), answer(END)], **IN_SYNC)
        assert waits_ms(leader) == [FIRST_MS, SHORT_MS, LONG_MS, LONG_MS]

    following(work, high_watermark=END - 1)


@pytest.mark.parametrize(
    "second",
    [answer(END + 1, batch(30)), NotLeaderError("another leads"), diverging(None, END)],
)
def test_news_and_trouble_end_the_long_fetches(second: Any) -> None:
    async def work(followed: Followed) -> None:
        leader = await followed.follow([answer(END), second], **IN_SYNC)
        assert waits_ms(leader) == [FIRST_MS, LONG_MS, SHORT_MS]

    following(work, high_watermark=END)


def test_a_long_fetch_is_given_up_when_the_replica_leaves_the_in_sync_set() -> None:
    async def work(followed: Followed) -> None:
        leader = await followed.follow([answer(END)], **IN_SYNC)
        followed.committed(**IN_SYNC, partition_epoch=2)
        await asyncio.sleep(1.0)
        assert waits_ms(leader) == [FIRST_MS, LONG_MS]
        followed.committed(partition_epoch=3)
        await asyncio.sleep(1.0)
        assert waits_ms(leader) == [FIRST_MS, LONG_MS, SHORT_MS]
        followed.committed(partition_epoch=4)
        await asyncio.sleep(1.0)
        assert len(leader.fetches) == 3, "a short one is not given up"
        assert followed.log.failure is None

    following(work, high_watermark=END)


def test_a_long_fetch_that_ended_already_is_left_alone() -> None:
    async def work(followed: Followed) -> None:
        leader = await followed.follow(
            [answer(END), StorageError("a bad sector")], wait_s=0.2, **IN_SYNC
        )
        followed.committed(partition_epoch=2)  # It pauses after the error.
        await asyncio.sleep(1.0)
        assert waits_ms(leader) == [FIRST_MS, LONG_MS, SHORT_MS]
        assert followed.log.failure is None

    following(work, high_watermark=END)


# --- pauses ---------------------------------------------------------------------------------------


def test_it_asks_again_at_longer_and_longer_intervals_until_it_is_answered() -> None:
    async def work(followed: Followed) -> None:
        refusal = NotLeaderError("not yet")
        leader = await followed.follow([*[refusal] * 7, answer(0), refusal, answer(0)])
        expected_s = [0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.0, 0.02, 0.0]
        assert leader.pauses_s == pytest.approx(expected_s, rel=0.26)
        assert (followed.log.failure, followed.log.trouble) == (None, None)

    following(work)


@pytest.mark.parametrize("says", [diverging(None, END), answer(0)])
def test_a_leader_that_answers_at_once_and_sends_nothing_is_asked_less_and_less_often(
    says: Any,
) -> None:
    async def work(followed: Followed) -> None:
        leader = await followed.follow([says] * 1000)
        assert leader.pauses_s[-1] == pytest.approx(follower.RETRY_MAX_S, rel=0.26)
        leader.answers[:] = [answer(0, batch(END)), answer(0)]  # It works again.
        await asyncio.sleep(1.0)
        assert followed.log.log.end_offset == END + 1
        assert leader.pauses_s[-1] == 0.0

    following(work)


def test_an_error_of_the_leaders_disk_is_told_until_the_leader_answers_again() -> None:
    async def work(followed: Followed) -> None:
        leader = await followed.follow([StorageError("a bad sector")], wait_s=0.4)
        assert (followed.log.failure, followed.log.trouble) == (None, "a bad sector")
        leader.answers = [answer(0)]
        await asyncio.sleep(0.4)
        assert leader.pauses_s == [0.5, 0.0]
        assert (followed.log.failure, followed.log.trouble) == (None, None)

    following(work)


@pytest.mark.parametrize(
    "changes, size, pause_s",
    [
        ({}, 10_000, 0.0),
        ({"throttle_bytes_per_s": 10_000}, 10_000, 1.0),
        ({"throttle_bytes_per_s": 10_000}, 20_000, 2.0),
        ({"throttle_bytes_per_s": 10_000}, 90_000, 5.0),  # The longest.
        ({"throttle_bytes_per_s": 10_000}, 0, 0.0),
        ({"throttle_bytes_per_s": 10_000, **IN_SYNC}, 20_000, 0.0),
    ],
)
def test_a_throttled_follower_pauses_for_what_it_copied(
    changes: dict[str, Any], size: int, pause_s: float
) -> None:
    async def work(followed: Followed) -> None:
        payload = batch(30, size=size) if size else b""
        leader = await followed.follow([answer(0, payload)], wait_s=6, **changes)
        assert leader.pauses_s == [pytest.approx(pause_s, abs=0.05)]

    following(work)


def test_a_pause_ends_when_it_is_in_sync_or_the_throttle_changes() -> None:
    async def work(followed: Followed) -> None:
        slow = {"throttle_bytes_per_s": 1000}
        answers = [answer(0, batch(number, size=10_000)) for number in range(30, 33)]
        leader = await followed.follow(answers, wait_s=1, **slow)
        followed.committed(**slow, partition_epoch=2)
        await asyncio.sleep(1.0)
        assert len(leader.fetches) == 1, "the throttle is the same"
        followed.committed(throttle_bytes_per_s=2000, partition_epoch=3)
        await asyncio.sleep(1.0)
        assert len(leader.fetches) == 2
        followed.committed(throttle_bytes_per_s=2000, partition_epoch=4, **IN_SYNC)
        await asyncio.sleep(1.0)
        assert [one.offset for one in leader.fetches] == [30, 31, 32, 33]

    following(work)


# --- what it takes from an answer -----------------------------------------------------------------


def test_what_came_is_appended_flushed_and_counted() -> None:
    async def work(followed: Followed) -> None:
        first, second = batch(30, 3), batch(33, 2)
        leader = await followed.follow([answer(31, first), answer(35, second)])
        assert_holds(followed.log.log, 0, 35)
        assert (followed.log.log.flushed_offset, followed.log.high_watermark) == (35, 35)
        assert [(one.offset, one.last_epoch) for one in leader.fetches] == [
            *((30, 6), (33, LEADER_EPOCH), (35, LEADER_EPOCH))
        ]
        samples = followed.log.environment.metrics.collect()
        (copied,) = (
            one for one in samples if one.name == "rayq_replication_bytes_in_total"
        )
        assert (copied.labels["topic"], copied.labels["partition"]) == ("t", "0")
        assert copied.value == len(first) + len(second)

    following(work, high_watermark=20)


@pytest.mark.parametrize(
    "told, payload, expected", [(25, b"", 25), (15, b"", 20), (40, b"", 30), (40, batch(30), 31)]
)
def test_the_high_watermark_never_goes_back_nor_past_the_end(
    told: int, payload: bytes, expected: int
) -> None:
    async def work(followed: Followed) -> None:
        await followed.follow([answer(told, payload)])
        assert followed.log.high_watermark == expected

    following(work, high_watermark=20)


@pytest.mark.parametrize("told, expected", [(3, 5), (5, 5), (6, 6), (20, 20)])
def test_the_log_start_follows_the_leaders_and_never_goes_back(told: int, expected: int) -> None:
    async def work(followed: Followed) -> None:
        await followed.log.advance_log_start(5)
        leader = await followed.follow([answer(END, log_start=told)])
        log = followed.log.log
        assert (log.start_offset, log.persisted_log_start) == (expected, expected)
        assert leader.fetches[1].log_start_offset == expected

    following(work, high_watermark=END)


@pytest.mark.parametrize(
    "cleaned, horizon, expected",
    [
        (30, 30, (0, 0)),  # What comes lies above both.
        (31, 0, (31, 0)),
        (0, 31, (0, 31)),
        (40, 35, (40, 35)),
        (35, 20, (35, 0)),
    ],
)
def test_what_compaction_took_from_the_leaders_log_is_known_before_its_records_come(
    cleaned: int, horizon: int, expected: tuple[int, int]
) -> None:
    async def work(followed: Followed) -> None:
        # Below the cleaned offset there may be gaps.
        payload = batch(34 if cleaned > 34 else 30)
        await followed.follow([answer(0, payload, cleaned=cleaned, horizon=horizon)])
        log = followed.log.log
        assert log.end_offset == (35 if cleaned > 34 else 31)
        assert (log.cleaned_offset, log.tombstone_horizon) == expected

    following(work)


def test_answers_without_records_say_nothing_of_what_was_compacted() -> None:
    async def work(followed: Followed) -> None:
        await followed.follow([answer(0, cleaned=40, horizon=40)])
        assert (followed.log.log.cleaned_offset, followed.log.log.tombstone_horizon) == (0, 0)

    following(work)


def test_records_are_taken_while_compacted_segments_are_put_in_place() -> None:
    async def work(followed: Followed) -> None:
        async with followed.log.files_lock:
            # That lies above all that the leader has compacted.
            await followed.follow([answer(0, batch(30), cleaned=30, horizon=30)])
            assert followed.log.log.end_offset == 31

    following(work)


def test_a_damaged_batch_is_not_taken_and_the_leader_looks_at_its_disk() -> None:
    async def work(followed: Followed) -> None:
        damaged = batch(30)
        damaged[-1] ^= 1
        done = messages.Done(), b""
        leader = await followed.follow([answer(31, damaged), done, answer(31, batch(30))])
        assert leader.requests[1] == messages.CheckRange("id", 0, 30)
        assert [one.offset for one in leader.fetches] == [30, 30, 31]
        expected_s = pytest.approx([0.0, 0.02, 0.0], rel=0.26)
        assert leader.pauses_s == expected_s, "it does not ask at once"
        assert (followed.log.failure, followed.log.trouble) == (None, None)
        assert_holds(followed.log.log, 0, 31)

    following(work)


def test_others_of_the_process_go_on_while_many_batches_are_appended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(follower, "BATCHES_AT_ONCE", 10)

    async def work(followed: Followed) -> None:
        log, loop, seen = followed.log.log, asyncio.get_running_loop(), list[int]()
        append_part = log.append_as_follower

        def appending(part: memoryview) -> int:
            loop.call_soon(lambda: seen.append(log.end_offset))  # Somebody else's turn.
            return append_part(part)

        monkeypatch.setattr(log, "append_as_follower", appending)
        many = b"".join(batch(30 + number) for number in range(35))
        await followed.follow([answer(65, many)])
        assert seen == [40, 50, 60, 65]
        assert_holds(followed.log.log, 0, 65)
        assert followed.log.log.flushed_offset == 65

    following(work)


def test_what_came_before_a_damaged_batch_is_kept_and_flushed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(follower, "BATCHES_AT_ONCE", 2)

    async def work(followed: Followed) -> None:
        damaged = batch(34)
        damaged[-1] ^= 1
        done = messages.Done(), b""
        many = b"".join([*(batch(30 + number) for number in range(4)), damaged])
        leader = await followed.follow([answer(35, many), done, answer(35, batch(34))])
        assert [(one.offset, one.flushed) for one in leader.fetches][1] == (34, 34)
        assert_holds(followed.log.log, 0, 35)

    following(work)


@pytest.mark.parametrize("told, lag", [(25, 0), (30, 0), (34, 4)])
def test_it_lags_by_what_is_committed_and_not_here(told: int, lag: int) -> None:
    async def work(followed: Followed) -> None:
        follower = followed.made(PlayedLeader([answer(told)]))
        assert [sample.value for sample in follower.measure()] == [0], "nothing is known yet"
        follower.start()
        await asyncio.sleep(1.0)
        assert [sample.value for sample in follower.measure()] == [lag]

    following(work, high_watermark=20)


# --- what it tells of its disk --------------------------------------------------------------------


def test_the_leader_hears_of_each_flush_at_once() -> None:
    async def work(followed: Followed) -> None:
        leader = await followed.follow([answer(0, batch(30, 3)), Late(1.0, answer(0, batch(33)))])
        assert leader.sent == [
            messages.ReplicaFlushed("id", 0, 0, "ours", LEADER_EPOCH, flushed)
            for flushed in (33, 34)
        ]

    following(work)


def test_flushes_are_not_told_before_the_leader_agrees_with_the_log() -> None:
    async def work(followed: Followed) -> None:
        leader = PlayedLeader([diverging(4, 15), Late(1.0, answer(0))])
        follower = followed.made(leader)
        follower.start()
        await asyncio.sleep(0.5)
        follower.flushed(15)
        assert leader.sent == [], "there may be more to cut"
        await asyncio.sleep(1.0)
        follower.flushed(15)
        assert [one.flushed for one in leader.sent] == [15]

    following(work)


def test_flushes_are_told_to_nobody_without_a_connection_or_after_the_end() -> None:
    async def work(followed: Followed) -> None:
        leader = PlayedLeader([answer(0)])
        follower = followed.made(leader)
        follower.flushed(30)
        follower.start()
        await asyncio.sleep(1.0)
        leader.closed = True
        follower.flushed(30)
        assert leader.sent == []
        leader.closed = False
        follower.flushed(30)
        assert len(leader.sent) == 1
        follower.end("another leads")
        follower.flushed(30)
        assert len(leader.sent) == 1

    following(work)


# --- whom it follows, and its end -----------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, is_for",
    [
        ({}, True),
        ({"partition_epoch": 9, "isr": [US, THEM], "config": {"retention_ms": 1}}, True),
        ({"leader_epoch": LEADER_EPOCH + 1}, False),
        ({"leader_incarnation": "theirs again"}, False),
        ({"leader_host": "elsewhere"}, False),
        ({"leader_port": 2}, False),
    ],
)
def test_it_follows_one_process_in_one_epoch(changes: dict[str, Any], is_for: bool) -> None:
    async def work(followed: Followed) -> None:
        assert followed.made(PlayedLeader([])).is_for(assignment(**changes)) is is_for

    following(work)


def test_a_follower_that_is_ended_asks_no_more() -> None:
    async def work(followed: Followed) -> None:
        followed.made(PlayedLeader([])).end("it has not begun")
        leader = await followed.follow([NotLeaderError("not yet")] * 3, wait_s=0.07)
        assert len(leader.fetches) == 3
        assert followed.follower is not None
        followed.follower.end("another leads")
        await asyncio.sleep(2.0)
        assert len(leader.fetches) == 3
        assert (followed.log.failure, followed.is_over) == (None, False)

    following(work)


def test_an_error_of_its_own_disk_ends_the_replica() -> None:
    async def work(followed: Followed) -> None:
        followed.host.disk.fail("write", path_part=".log", error=errno.EIO)
        leader = await followed.follow([answer(0, batch(30)), answer(0)])
        assert followed.is_over
        assert followed.log.failure is not None and "error" in followed.log.failure
        assert followed.log.trouble is None, "this does not heal"
        assert len(leader.fetches) == 1

    following(work)


def test_a_full_disk_is_told_and_heals() -> None:
    async def work(followed: Followed) -> None:
        disk = followed.host.disk
        disk.capacity_bytes = 1
        leader = await followed.follow([answer(0, batch(30))] * 3, wait_s=1.2)
        assert (followed.log.failure, followed.is_over) == (None, False)
        assert followed.log.trouble is not None
        assert [one.offset for one in leader.fetches] == [30, 30, 30]
        disk.capacity_bytes = None
        leader.answers = [answer(0, batch(30))]
        await asyncio.sleep(1.0)
        assert followed.log.trouble is None
        assert_holds(followed.log.log, 0, 31)

    following(work)


def test_a_follower_that_stops_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    async def work(followed: Followed) -> None:
        leader = await followed.follow([DivergedLogError("they differ"), answer(0)])
        assert (followed.log.failure, followed.is_over) == ("they differ", True)
        assert len(leader.fetches) == 1

    following(work)
    errors = [one.message for one in caplog.records if one.levelno >= logging.ERROR]
    assert errors == ["replica of t-0 on broker 0 stops: they differ"]
