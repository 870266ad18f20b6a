"""The virtual-time loop: time, order, limits, and its message when it is stuck."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from proving.simulation import DeadlockError, LimitError, SimulationLoop, World
from proving.simulation import loop as loop_module


def run(work: Coroutine[Any, Any, Any], limit_s: float = 1e6) -> Any:
    loop = SimulationLoop()
    try:
        return loop.run(work, limit_s=limit_s)
    finally:
        loop.close()


def test_an_hour_of_sleep_takes_no_time() -> None:
    async def script() -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()
        await asyncio.sleep(3600)
        return loop.time() - start

    start = time.perf_counter()
    assert run(script()) == pytest.approx(3600)
    assert time.perf_counter() - start < 100


def test_timers_fire_by_time_then_in_the_order_they_were_set() -> None:
    fired: list[str] = []

    async def script() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(2, fired.append, "late")
        for name in "abc":
            loop.call_later(1, fired.append, name)
        cancelled = loop.call_later(1, fired.append, "cancelled")
        loop.call_soon(fired.append, "soon")
        cancelled.cancel()
        await asyncio.sleep(3)

    run(script())
    assert fired == ["soon", "a", "b", "c", "late"]


def test_asyncio_timeouts_queues_groups_and_generators_work() -> None:
    async def numbers() -> Any:
        for number in range(3):
            await asyncio.sleep(1)
            yield number

    async def script() -> list[int]:
        queue: asyncio.Queue[int] = asyncio.Queue()

        async def produce() -> None:
            async for number in numbers():
                await queue.put(number)

        async with asyncio.TaskGroup() as group:
            group.create_task(produce())
            got = [await queue.get() for _ in range(3)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await queue.get()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.get(), 5)
        return got

    assert run(script()) == [0, 1, 2]


def test_a_deadlock_names_the_tasks_and_what_they_wait_for() -> None:
    async def stuck() -> None:
        await asyncio.get_running_loop().create_future()

    async def script() -> None:
        await asyncio.create_task(stuck(), name="the stuck one")

    with pytest.raises(DeadlockError, match=r"(?s)the stuck one at .*in .*stuck, waits for <Fut"):
        run(script())


def test_the_time_limit_ends_a_script_that_goes_on_forever() -> None:
    async def script() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    with pytest.raises(LimitError, match="time limit"):
        run(script(), limit_s=60)


def test_a_livelock_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "EVENTS_PER_INSTANT_MAX", 1000)

    async def script() -> None:
        await asyncio.sleep(1)
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(LimitError, match="without a step of time"):
        run(script())


def test_real_io_and_threads_are_refused() -> None:
    async def script() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(RuntimeError, match="Environment"):
            await asyncio.to_thread(print)
        with pytest.raises(RuntimeError, match="Environment"):
            await asyncio.open_connection("localhost", 1)
        with pytest.raises(RuntimeError, match="Environment"):
            loop.add_reader(0, print)

    run(script())


def test_many_cancelled_timers_do_not_pile_up() -> None:
    async def script() -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulationLoop)
        for _ in range(20_000):
            loop.call_later(1000, print).cancel()
        return len(loop._timers)

    assert run(script()) < 5000


def test_an_error_that_nobody_takes_is_reported() -> None:
    world = World(seed=1)

    async def script() -> None:
        process = world.host().process("p")
        process.call(world.loop.call_soon, lambda: 1 / 0)
        process.start(fail())
        await asyncio.sleep(1)

    async def fail() -> None:
        raise ValueError("unheard")

    with world:
        world.run(script())
        kinds = [type(error.exception) for error in world.errors]
        assert kinds == [ZeroDivisionError, ValueError]
        assert {error.owner for error in world.errors} == {"p#101"}


BUSY = """
import asyncio
from proving.simulation import SimulationLoop, World

async def script(world):
    host = world.host()
    names = {f"name-{i}" for i in range(9)}
    async def work(name):
        for _ in range(20):
            await asyncio.sleep(world.random.random())
            await process.environment.threads.run(len, name)
    process = host.process("p")
    await asyncio.gather(*(process.run(work(name)) for name in sorted(names)))

import sys
with World(int(sys.argv[1])) as world:
    world.run(script(world))
    print(world.trace.digest(), world.loop.events)
"""


def digest_in_a_fresh_interpreter(seed: int, hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", BUSY, str(seed)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_one_seed_gives_one_trace_in_any_interpreter() -> None:
    first = digest_in_a_fresh_interpreter(1, "1")
    assert first == digest_in_a_fresh_interpreter(1, "2")
    assert first != digest_in_a_fresh_interpreter(2, "1")


@pytest.mark.slow
def test_the_loop_runs_100_000_events_a_second() -> None:
    async def ticker() -> None:
        for _ in range(5000):
            await asyncio.sleep(0.001)

    async def script() -> None:
        await asyncio.gather(*(ticker() for _ in range(10)))

    rates = []
    for _ in range(3):  # Other work on the machine slows down one or two of them.
        loop = SimulationLoop()
        start = time.process_time()
        loop.run(script(), limit_s=1e6)
        rates.append(loop.events / (time.process_time() - start))
    assert max(rates) > 100_000
