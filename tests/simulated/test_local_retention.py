"""When segments that are in the object store leave a replica's disk."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rayq.actors.clock_watch import ClockWatch
from rayq.actors.replica.local_retention import LocalRetention
from rayq.errors import DiskFullError
from rayq.messages.remote_pointer import RemotePointer
from tests.simulated.followed import Followed, following
from tests.storage.support import append

CONFIG: dict[str, Any] = {
    "remote_storage": True, "segment_bytes": 1024, "local_retention_ms": None,
    "local_retention_bytes": 0,
}
INTERVAL_S = 30.0


def stored_up_to(end: int, start: int = 0) -> RemotePointer:
    return RemotePointer(1, 3, "manifest", start, end, 3, 1000)


async def prepared(followed: Followed, **config: Any) -> tuple[LocalRetention, list[int]]:
    """What decides over a log of 30 records, and where its segments begin."""
    followed.log.configure(CONFIG | config)
    for _ in range(30):
        now_ms = followed.log.environment.clock.wall_ms()
        append(followed.log.log, epoch=3, size=130, now_ms=now_ms)
    await followed.log.flusher.checkpoint()
    watch = ClockWatch(followed.log.environment.clock)
    starts = [one.base_offset for one in followed.log.log.local_segments()]
    assert len(starts) > 5
    return LocalRetention(followed.log, watch), starts


async def tick(
    retention: LocalRetention, now_s: float, pointer: RemotePointer | None
) -> None:
    retention.tick(now_s, pointer)
    await asyncio.sleep(0.3)


@pytest.mark.parametrize(
    "stored, place", [(0, 0), (None, 0), ("start of 2", 2), ("before 3", 2), (30, -1), (99, -1)]
)
def test_closed_segments_go_that_are_stored_as_a_whole(stored: Any, place: int) -> None:
    async def work(followed: Followed) -> None:
        retention, starts = await prepared(followed)
        end = {"start of 2": starts[2], "before 3": starts[3] - 1}.get(stored, stored)
        await tick(retention, 0.0, None if end is None else stored_up_to(end))
        log = followed.log.log
        assert (log.local_start_offset, log.start_offset) == (starts[place], 0)
        assert [one.base_offset for one in log.local_segments()] == starts[place:]
        assert (followed.log.failure, followed.is_over) == (None, False)

    following(work, is_empty=True)


@pytest.mark.parametrize("listed_from", [2, 3, 4])
def test_what_the_committed_list_lacks_is_not_offered_once_it_is_gone_from_the_disk(
    listed_from: int,
) -> None:
    async def work(followed: Followed) -> None:
        retention, starts = await prepared(followed)
        pointer = stored_up_to(starts[3], start=min(starts[listed_from], starts[3]))
        seen: list[tuple[int, int]] = []
        retention.tick(0.0, pointer)
        log = followed.log.log
        while log.local_start_offset < starts[3]:
            await asyncio.sleep(0.001)
            seen.append((log.start_offset, log.local_start_offset))
        assert log.start_offset == pointer.start
        for start, local_start in seen:
            assert start == local_start or start >= pointer.start, seen
        assert (followed.log.failure, followed.is_over) == (None, False)

    following(work, is_empty=True)


def test_it_looks_at_intervals() -> None:
    async def work(followed: Followed) -> None:
        retention, starts = await prepared(followed)
        retention.stop()  # There is nothing to stop.
        for now_s, stored, place in [
            (100.0, 1, 1), (129.9, 2, 1), (130.0, 2, 2), (159.9, 3, 2), (160.5, 3, 3),
        ]:
            await tick(retention, now_s, stored_up_to(starts[stored]))
            assert followed.log.log.local_start_offset == starts[place], f"at {now_s} s"
        retention.stop()

    following(work, is_empty=True)


def test_a_tick_before_anything_is_stored_costs_no_interval() -> None:
    async def work(followed: Followed) -> None:
        retention, starts = await prepared(followed)
        await tick(retention, 100.0, None)
        await tick(retention, 100.5, stored_up_to(30))
        assert followed.log.log.local_start_offset == starts[-1]

    following(work, is_empty=True)


def test_what_is_young_stays() -> None:
    async def work(followed: Followed) -> None:
        config = {"local_retention_ms": 60_000, "local_retention_bytes": None}
        retention, starts = await prepared(followed, **config)
        await tick(retention, 0.0, stored_up_to(30))
        assert followed.log.log.local_start_offset == 0
        await asyncio.sleep(61)
        await tick(retention, INTERVAL_S, stored_up_to(30))
        assert followed.log.log.local_start_offset == starts[-1]

    following(work, is_empty=True)


def test_a_full_disk_puts_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(followed: Followed) -> None:
        retention, starts = await prepared(followed)

        async def fail(_offset: int) -> None:
            raise DiskFullError("no room for a checkpoint")

        with monkeypatch.context() as patch:
            patch.setattr(followed.log, "drop_local", fail)
            await tick(retention, 0.0, stored_up_to(30))
        assert followed.log.failure is None
        await tick(retention, INTERVAL_S, stored_up_to(30))
        assert followed.log.log.local_start_offset == starts[-1]

    following(work, is_empty=True)


def test_one_drop_is_under_way_at_a_time_and_ends_when_it_is_stopped() -> None:
    async def work(followed: Followed) -> None:
        retention, starts = await prepared(followed)
        offsets: list[int] = []

        async def drop(offset: int) -> None:
            offsets.append(offset)
            await asyncio.get_running_loop().create_future()

        followed.log.drop_local = drop  # type: ignore[method-assign]
        await tick(retention, 0.0, stored_up_to(starts[2]))
        await tick(retention, INTERVAL_S, stored_up_to(starts[3]))
        assert offsets == [starts[2]]
        retention.stop()
        await asyncio.sleep(0)
        await tick(retention, 2 * INTERVAL_S, stored_up_to(starts[3]))
        assert offsets == [starts[2], starts[3]]
        retention.stop()

    following(work, is_empty=True)
