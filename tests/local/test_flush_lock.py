"""What keeps the flushes of a log apart from a cut of it."""

from __future__ import annotations

import asyncio

from rayq.actors.replica.flush_lock import FlushLock


def test_no_flush_begins_beside_another_or_while_the_log_is_cut() -> None:
    async def main() -> None:
        freed: list[None] = []
        lock = FlushLock(lambda: freed.append(None))
        assert lock.begin_flush()
        assert lock.locked()
        assert not lock.begin_flush()
        lock.end_flush()
        assert len(freed) == 1
        async with lock:
            assert lock.locked()
            assert not lock.begin_flush()
            assert len(freed) == 1
        assert len(freed) == 2
        assert not lock.locked()
        assert lock.begin_flush()

    asyncio.run(main())


def test_a_cut_waits_for_the_flush_and_comes_before_the_next_one() -> None:
    async def main() -> None:
        has_begun: list[bool] = []
        lock = FlushLock(lambda: has_begun.append(lock.begin_flush()))
        assert lock.begin_flush()
        has_cut = asyncio.Event()

        async def cut() -> None:
            async with lock:
                has_cut.set()

        task = asyncio.create_task(cut())
        await asyncio.sleep(0)
        assert not has_cut.is_set()
        lock.end_flush()  # The log tries to begin the next one at once.
        assert has_begun == [False]
        await task
        assert has_cut.is_set()
        assert has_begun == [False, True]

    asyncio.run(main())


def test_flushes_go_on_when_a_cut_that_waited_is_cancelled() -> None:
    async def main() -> None:
        lock = FlushLock(lambda: None)
        assert lock.begin_flush()

        async def cut() -> None:
            async with lock:
                raise AssertionError("the flush is under way")

        task = asyncio.create_task(cut())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert not lock.begin_flush()
        lock.end_flush()
        assert lock.begin_flush()

    asyncio.run(main())
