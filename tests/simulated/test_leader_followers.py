"""A leader alone: what a follower gets, how long it waits, and which followers begin again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rayq import messages
from rayq.actors.replica import leader_followers
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.errors import (
    DivergedLogError,
    FencedEpochError,
    NotLeaderError,
    RayqError,
    RemoteStorageError,
)
from rayq.storage.batch import split_batches
from tests.simulated.leader_stage import (
    ALL,
    BATCH_BYTES,
    END,
    EPOCHS,
    LEADER_EPOCH,
    Led,
    assignment,
    leading,
)

CLEANED, HORIZON = 24, 20
AT_ONCE_S = 0.05


async def compacted(log: ReplicaLog) -> None:
    """As after a pass of the cleaner that took tombstones below the horizon."""
    await log.learn(0, CLEANED, HORIZON)


async def shortened(log: ReplicaLog) -> None:
    log.advance_high_watermark(END)
    await log.advance_log_start(12)


def offsets(data: bytes) -> list[int]:
    return [header.base_offset for _, header in split_batches(data)]


# --- what it gets ---------------------------------------------------------------------------------


def test_a_follower_gets_the_records_from_its_end_on_and_all_that_it_must_know() -> None:
    async def before(log: ReplicaLog) -> None:
        await compacted(log)
        await log.advance_log_start(5)

    async def work(led: Led) -> None:
        await led.fetched(3, END, 6)
        answer, data = await led.copying(2, 21, 6)
        assert answer == messages.ReplicaFetchResponse(
            high_watermark=21, log_start_offset=5, epoch_start_offset=END, diverging_epoch=None,
            diverging_end=None, reset_to=None, cleaned_offset=CLEANED, tombstone_horizon=HORIZON,
        )
        assert offsets(data) == [*range(21, END)]

    leading(work, before=before)


def test_a_follower_that_diverges_or_begins_again_gets_no_records_and_knows_as_much() -> None:
    async def work(led: Led) -> None:
        told = messages.ReplicaFetchResponse(END, 12, END, 4, 20, None, 0, 0)
        assert await led.copying(2, 21, 5) == (told, b"")
        led.leader.committed(assignment(2, ALL[:1]))
        told = messages.ReplicaFetchResponse(END, 12, END, None, None, 12, 0, 0)
        assert await led.copying(2, 11, 4) == (told, b"")

    leading(work, before=shortened)


def test_an_answer_has_as_many_bytes_as_the_follower_asks_for() -> None:
    async def work(led: Led) -> None:
        for bytes_max, records in ((1, 1), (BATCH_BYTES, 1), (2 * BATCH_BYTES, 2), (1 << 20, 9)):
            _, data = await led.copying(2, 21, 6, bytes_max=bytes_max)
            assert offsets(data) == [*range(21, 21 + records)]

    leading(work)


def test_an_answer_has_no_more_bytes_than_the_leader_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leader_followers, "REPLICA_FETCH_BYTES_MAX", 2 * BATCH_BYTES)

    async def work(led: Led) -> None:
        assert offsets((await led.copying(2, 21, 6))[1]) == [21, 22]

    leading(work)


def test_a_follower_gets_what_is_not_committed_yet() -> None:
    async def work(led: Led) -> None:
        led.produce(0, acks=1)
        answer, data = await led.copying(2, END, 6)
        assert (answer.high_watermark, offsets(data)) == (0, [END])

    leading(work)


# --- how long it waits ----------------------------------------------------------------------------


def test_a_follower_at_the_end_waits_for_as_long_as_it_says() -> None:
    async def work(led: Led) -> None:
        began_s = led.clock.monotonic()
        answer, data = await led.copying(2, END, 6, wait_ms=3_000)
        assert led.clock.monotonic() - began_s == pytest.approx(3.0, abs=AT_ONCE_S)
        assert (answer.reset_to, answer.diverging_end, data) == (None, None, b"")
        began_s = led.clock.monotonic()
        await led.copying(2, END, 6, wait_ms=0)
        assert led.clock.monotonic() - began_s < AT_ONCE_S

    leading(work)


def test_a_follower_that_waits_gets_the_next_record_at_once() -> None:
    async def work(led: Led) -> None:
        copying = asyncio.ensure_future(led.copying(2, END, 6, wait_ms=60_000))
        await asyncio.sleep(1)
        assert not copying.done()
        led.produce(0)
        _, data = await asyncio.wait_for(copying, AT_ONCE_S)
        assert offsets(data) == [END]

    leading(work)


def test_a_follower_that_waits_hears_at_once_that_records_were_deleted() -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        copying = asyncio.ensure_future(led.copying(2, END, 6, wait_ms=60_000))
        await asyncio.sleep(1)
        deleting = asyncio.ensure_future(led.deleting(7, timeout_ms=60_000))
        answer, data = await asyncio.wait_for(copying, AT_ONCE_S)
        assert (answer.log_start_offset, data) == (7, b"")
        # It is told each time until its own log starts there.
        began_s = led.clock.monotonic()
        assert (await led.copying(2, END, 6, log_start=6, wait_ms=60_000))[1] == b""
        assert led.clock.monotonic() - began_s < AT_ONCE_S
        began_s = led.clock.monotonic()
        await led.copying(2, END, 6, log_start=7, wait_ms=3_000)
        assert led.clock.monotonic() - began_s >= 3.0
        deleting.cancel()

    leading(work)


def test_a_follower_that_waits_hears_at_once_that_another_leads() -> None:
    async def work(led: Led) -> None:
        copying = asyncio.ensure_future(led.copying(2, END, 6, wait_ms=60_000))
        await asyncio.sleep(1)
        led.leader.end("another leads")
        with pytest.raises(NotLeaderError, match="another leads"):
            await asyncio.wait_for(copying, AT_ONCE_S)

    leading(work)


@pytest.mark.parametrize("is_ended", [True, False])
def test_what_is_read_while_the_leader_is_deposed_goes_to_no_follower(
    monkeypatch: pytest.MonkeyPatch, is_ended: bool
) -> None:
    async def work(led: Led) -> None:
        read = led.log.read

        async def slow(offset: int, limit: int, bytes_max: int) -> tuple[bytes, int]:
            found = await read(offset, limit, bytes_max)
            if is_ended:
                led.leader.end("another leads")
            led.has_lease = False
            return found

        monkeypatch.setattr(led.log, "read", slow)
        with pytest.raises(
            NotLeaderError, match="another leads" if is_ended else "it lost its broker"
        ):
            await led.fetched(2, 21, 6)

    leading(work)


def test_a_fetch_that_waits_is_counted_once_and_its_process_checked_once() -> None:
    """Whoever registers meanwhile is another process, which asks for itself."""

    async def work(led: Led) -> None:
        copying = asyncio.ensure_future(led.copying(2, END, 6, wait_ms=60_000))
        await asyncio.sleep(1)
        given = assignment(2)
        given.replicas[1] = (2, "2b")
        led.leader.committed(given)
        led.produce(0)
        assert offsets((await copying)[1]) == [END]
        with pytest.raises(FencedEpochError):
            await led.fetched(2, END, 6)
        assert (await led.fetched(2, END, 6, incarnation="2b")).reset_to is None

    leading(work)


# --- who begins again -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "offset, log_start, copied, begins_again",
    [
        (HORIZON - 1, 0, 0, True),  # It may hold a record whose tombstone is gone here.
        (1, 0, 0, True),
        (HORIZON, 0, 0, False),
        (0, 0, 0, False),  # An empty log holds none,
        (9, 9, 0, False),  # wherever it begins.
        (10, 9, 0, True),
        (HORIZON - 1, 0, HORIZON, False),  # It was copied from here since.
        (HORIZON - 1, 0, HORIZON + 1, False),
        (HORIZON - 1, 0, HORIZON - 1, True),
    ],
)
def test_a_follower_below_the_tombstone_horizon_begins_again(
    offset: int, log_start: int, copied: int, begins_again: bool
) -> None:
    async def work(led: Led) -> None:
        last_epoch = None if offset == log_start else 2 if offset <= 10 else 4
        fields: Any = {"log_start": log_start, "copied_horizon": copied}
        if begins_again:
            with pytest.raises(DivergedLogError, match=f"ends at {offset}, below the tombstone"):
                await led.copying(2, offset, last_epoch, **fields)
        led.leader.committed(assignment(2, ALL[:1]))
        answer, data = await led.copying(2, offset, last_epoch, **fields)
        assert answer.reset_to == (0 if begins_again else None)
        assert offsets(data) == ([] if begins_again else [*range(offset, END)])

    leading(work, before=compacted)


@pytest.mark.parametrize("is_in_sync", [True, False])
def test_tombstones_that_go_while_a_follower_is_read_for_are_missed_by_nobody(
    monkeypatch: pytest.MonkeyPatch, is_in_sync: bool
) -> None:
    async def work(led: Led) -> None:
        led.leader.committed(assignment(2, ALL if is_in_sync else ALL[:1]))
        read, reads = led.log.read, list[int]()

        async def slow(offset: int, limit: int, bytes_max: int) -> tuple[bytes, int]:
            found = await read(offset, limit, bytes_max)
            reads.append(offset)
            if len(reads) == 1:
                await led.log.learn(0, CLEANED, HORIZON)
            return found

        monkeypatch.setattr(led.log, "read", slow)
        if is_in_sync:
            with pytest.raises(DivergedLogError):
                await led.copying(2, 15, 4)
        else:
            answer, data = await led.copying(2, 15, 4)
            assert (answer.reset_to, data) == (0, b"")
        assert reads == [15]

    leading(work)


def test_records_are_read_again_where_tombstones_went_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer names the new horizon, so its records are from after the pass."""

    async def work(led: Led) -> None:
        read, reads = led.log.read, list[int]()

        async def slow(offset: int, limit: int, bytes_max: int) -> tuple[bytes, int]:
            found = await read(offset, limit, bytes_max)
            reads.append(offset)
            if len(reads) == 1:
                await led.log.learn(0, CLEANED, HORIZON)
            return found

        monkeypatch.setattr(led.log, "read", slow)
        answer, data = await led.copying(2, HORIZON, 4)
        assert (answer.tombstone_horizon, offsets(data)) == (HORIZON, [*range(HORIZON, END)])
        assert reads == [HORIZON, HORIZON]

    leading(work)


def test_what_leaves_the_leaders_disk_while_it_is_read_again_is_not_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(led: Led) -> None:
        await led.all_agree()
        led.leader.committed(assignment(2, ALL[:1]))
        read = led.log.read

        async def slow(offset: int, limit: int, bytes_max: int) -> tuple[bytes, int]:
            found = await read(offset, limit, bytes_max)
            await led.log.learn(0, 5, 5)
            await led.log.advance_log_start(16)
            return found

        monkeypatch.setattr(led.log, "read", slow)
        answer, data = await led.copying(2, 15, 4)
        assert (answer.reset_to, data) == (16, b"")

    leading(work)


@pytest.mark.parametrize(
    "offset, restarted_at, error",
    [(11, None, DivergedLogError), (11, 11, DivergedLogError), (11, 12, None), (12, None, None)],
)
def test_who_is_in_sync_ends_below_the_local_start_only_of_a_log_that_was_restarted(
    offset: int, restarted_at: int | None, error: type[RayqError] | None
) -> None:
    async def work(led: Led) -> None:
        led.log.restarted_at = restarted_at
        if error is not None:
            with pytest.raises(error, match=f"ends at {offset}, below the local start 12"):
                await led.fetched(2, offset, 4)
            return
        answer = await led.fetched(2, offset, 4)
        assert answer.reset_to == (12 if offset < 12 else None)

    leading(work, before=shortened)


@pytest.mark.parametrize(
    "local_start, log_start, remote_end, has_hole",
    [
        (12, 12, None, False),
        (13, 13, None, False),  # It lacks nothing above its own log start,
        (13, 12, None, True),
        (15, 12, 15, False),  # or what the object store has.
        (16, 12, 15, True),
        (12, 0, None, False),  # What this log does not have either is no hole.
        (13, 0, 12, True),
        (16, 16, 15, False),
    ],
)
def test_a_follower_whose_log_has_a_hole_begins_again_once_it_is_out_of_sync(
    local_start: int, log_start: int, remote_end: int | None, has_hole: bool
) -> None:
    async def work(led: Led) -> None:
        led.leader.committed(assignment(2, ALL[:2]))
        if remote_end is not None:
            led.leader.remote = cast(
                Any, SimpleNamespace(log=SimpleNamespace(end_offset=remote_end))
            )
        fields = {"local_start": local_start, "log_start": log_start}
        if has_hole:
            with pytest.raises(RemoteStorageError, match=f"begins at {local_start}, and what"):
                await led.fetched(2, END, 6, **fields)
        else:
            assert (await led.fetched(2, END, 6, **fields)).reset_to is None
        answer = await led.fetched(3, END, 6, **fields)
        assert answer.reset_to == (12 if has_hole else None)

    leading(work, before=shortened)


def test_a_follower_that_is_refused_counts_for_nothing() -> None:
    async def work(led: Led) -> None:
        await led.fetched(3, END, 6)
        led.log.restarted_at = 12
        for request in (
            led.fetched(2, 11, 4, END),
            led.fetched(2, 25, 5, END),
            led.fetched(2, END + 1, None, END),
        ):
            await request
            assert led.log.high_watermark == 12
        led.leader.followers.flushed(messages.ReplicaFlushed("id", 0, 2, "2a", LEADER_EPOCH, END))
        assert led.log.high_watermark == 12, "it has not fetched in this epoch"
        await led.fetched(2, 29, 6, END)
        assert led.log.high_watermark == 29

    async def before(log: ReplicaLog) -> None:
        await log.advance_log_start(12)
        log.advance_high_watermark(12)

    leading(work, before=before)


def test_a_notice_of_a_flush_counts_as_far_as_it_goes() -> None:
    async def work(led: Led) -> None:
        await led.fetched(3, END, 6)
        await led.fetched(2, END, 6, 20)
        for flushed, counted in ((25, 25), (22, 25), (END, END)):
            led.leader.followers.flushed(
                messages.ReplicaFlushed("id", 0, 2, "2a", LEADER_EPOCH, flushed)
            )
            assert led.log.high_watermark == counted

    leading(work)


def test_only_the_registered_process_of_a_replica_counts() -> None:
    async def work(led: Led) -> None:
        for broker, incarnation in ((2, "2b"), (9, "9a"), (3, "2a")):
            with pytest.raises(FencedEpochError):
                await led.fetched(broker, END, 6, incarnation=incarnation)
            # Also where its log would have to be cut.
            with pytest.raises(FencedEpochError):
                await led.fetched(broker, 21, 4, incarnation=incarnation)
            with pytest.raises(FencedEpochError):
                led.leader.followers.flushed(
                    messages.ReplicaFlushed("id", 0, broker, incarnation, LEADER_EPOCH, END)
                )

    leading(work)


@pytest.mark.parametrize("start, epochs", [(10, EPOCHS[:1]), (11, EPOCHS[:2])])
def test_who_begins_again_hears_the_epochs_that_begin_below(
    start: int, epochs: list[tuple[int, int]]
) -> None:
    async def work(led: Led) -> None:
        await led.log.drop_local(start)
        answer, _ = led.leader.followers.snapshot(messages.ReplicaSnapshot("id", 0, LEADER_EPOCH))
        assert answer == messages.ReplicaSnapshotResponse(0, epochs, start)

    leading(work)
