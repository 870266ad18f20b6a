"""Jobs in the threads of a process: results, errors, jobs that hang, pools that are dropped."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from rayq.environment import ThreadPool

PATIENCE_S = 10.0



def test_a_job_gives_its_result_and_runs_in_a_thread_of_the_pool() -> None:
    async def main() -> None:
        def job(number: int) -> tuple[int, int]:
            return 2 * number, threading.get_ident()

        doubled, thread = await ThreadPool(1).run(job, 21)
        assert doubled == 42
        assert thread != threading.get_ident()

    asyncio.run(main())


def test_the_error_of_a_job_is_raised_where_the_job_is_awaited() -> None:
    async def main() -> None:
        def job() -> None:
            raise OSError("the disk is gone")

        pool = ThreadPool(1)
        with pytest.raises(OSError, match="the disk is gone"):
            await pool.run(job)
        assert await pool.run(lambda: "the thread goes on") == "the thread goes on"

    asyncio.run(main())


def test_a_job_that_hangs_holds_one_thread_and_the_others_go_on() -> None:
    async def main() -> None:
        pool, goes_on = ThreadPool(2), threading.Event()
        hanging = pool.run(goes_on.wait, PATIENCE_S)
        for number in range(10):
            assert await pool.run(lambda value=number: value) == number
        hanging.cancel()  # Its thread hangs all the same.
        for number in range(10):
            assert await pool.run(lambda value=number: value) == number
        goes_on.set()

    asyncio.run(main())


def test_no_more_threads_run_than_the_pool_may_have() -> None:
    async def main() -> None:
        pool, together = ThreadPool(3), threading.Barrier(3)
        waits = [pool.run(together.wait, PATIENCE_S) for _ in range(6)]
        await asyncio.gather(*waits)  # Three at a time: fewer threads would break the barrier.
        seen = await asyncio.gather(*(pool.run(threading.get_ident) for _ in range(50)))
        assert len(set(seen)) <= 3

    asyncio.run(main())


def test_a_job_that_is_cancelled_before_a_thread_takes_it_does_not_run() -> None:
    async def main() -> None:
        pool, goes_on, ran = ThreadPool(1), threading.Event(), threading.Event()
        first = pool.run(goes_on.wait, PATIENCE_S)
        second = pool.run(ran.set)
        second.cancel()
        goes_on.set()
        await first
        await pool.run(int)
        assert not ran.is_set()

    asyncio.run(main())


def test_the_threads_of_a_pool_that_is_dropped_end() -> None:
    async def main() -> list[threading.Thread]:
        pool, together = ThreadPool(2), threading.Barrier(2)

        def job() -> threading.Thread:
            together.wait(PATIENCE_S)
            return threading.current_thread()

        return list(await asyncio.gather(pool.run(job), pool.run(job)))

    threads = asyncio.run(main())
    gc.collect()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_job_that_outlives_its_loop_ends_in_peace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    goes_on = threading.Event()

    async def main() -> threading.Thread:
        pool = ThreadPool(1)
        worker = await pool.run(threading.current_thread)
        pool.run(goes_on.wait, PATIENCE_S)
        return worker

    worker = asyncio.run(main())
    goes_on.set()
    gc.collect()
    worker.join(PATIENCE_S)
    assert not worker.is_alive()
    assert not failures


def test_a_job_that_raises_what_no_future_takes_does_not_hang() -> None:
    async def main() -> None:
        def job() -> None:
            raise StopIteration

        with pytest.raises(RuntimeError, match="StopIteration"):
            await asyncio.wait_for(ThreadPool(1).run(job), PATIENCE_S)

    asyncio.run(main())
