"""Hosts and processes: deaths, pauses, clocks, threads, traces."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from proving.simulation import LimitError, ProcessDied, World


def test_a_killed_process_runs_no_more_code() -> None:
    world = World(1)
    process = world.host().process("p")
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            ticks.append(process.environment.clock.monotonic())
            await asyncio.sleep(0.1)

    async def script() -> None:
        process.start(tick())
        process.call(world.loop.call_later, 1, ticks.append, 0.0)
        await asyncio.sleep(0.55)
        process.kill()
        await asyncio.sleep(5)

    with world:
        world.run(script())
    assert len(ticks) == 6 and not process.alive


@pytest.mark.parametrize("is_paused", [False, True])
def test_an_error_that_a_killed_process_would_have_taken_is_not_missed(is_paused: bool) -> None:
    async def script() -> None:
        process = world.host().process("p")

        def fail() -> None:
            answer = world.loop.create_future()
            answer.add_done_callback(lambda done: done.exception())
            answer.set_exception(ConnectionError("nobody answered"))

        process.call(fail)
        if is_paused:
            process.pause()
            await asyncio.sleep(1)
        process.kill()
        await asyncio.sleep(1)
        gc.collect()

    with World(1) as world:
        world.run(script())
        assert world.errors == []


def test_a_killed_tasks_finally_block_cannot_do_io() -> None:
    world = World(1)
    host = world.host()
    process = host.process("p")
    seen: list[str] = []

    async def work() -> None:
        environment = process.environment
        file = environment.disk.open("/f", create=True)
        try:
            await asyncio.sleep(100)
        except Exception:
            seen.append("an exception")
            raise
        finally:
            seen.append("finally")
            try:
                file.pwrite(b"last words", 0)
            except ProcessDied:
                seen.append("died")
                raise

    async def stubborn() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(100)
            seen.append("never")

    async def script() -> None:
        process.start(work())
        process.start(stubborn())
        await asyncio.sleep(1)
        process.kill()
        await asyncio.sleep(1)

    with world:
        world.run(script())
        assert host.disk.read("/f") == b""
    assert seen == ["finally", "died"]
    assert not world.errors


def test_everything_of_a_dead_process_raises() -> None:
    world = World(1)
    process = world.host().process("p")
    environment = process.environment

    async def nothing() -> None:
        pass

    async def script() -> None:
        process.kill()
        for act in (environment.clock.monotonic, environment.clock.wall_ms):
            with pytest.raises(ProcessDied):
                act()
        with pytest.raises(ProcessDied):
            environment.tasks.spawn(nothing(), "n")
        with pytest.raises(ProcessDied):
            await environment.threads.run(print)
        with pytest.raises(ProcessDied):
            await environment.network.connect("10.0.0.1", 1, asyncio.Protocol)
        with pytest.raises(ProcessDied):
            await process.run(nothing())
        with pytest.raises(ProcessDied):
            process.call(print)
        process.kill()

    with world:
        world.run(script())


def test_whoever_waits_for_a_process_hears_of_its_death() -> None:
    world = World(1)
    process = world.host().process("p")

    async def script() -> None:
        waiting = asyncio.ensure_future(process.run(asyncio.sleep(100)))
        watching = asyncio.ensure_future(asyncio.wait_for(process.exited, 100))
        await asyncio.sleep(1)
        process.kill()
        with pytest.raises(ProcessDied):
            await waiting
        await watching

    with world:
        world.run(script())
        assert world.now_s < 2


def test_a_process_may_kill_itself() -> None:
    world = World(1)
    process = world.host().process("p")
    seen: list[str] = []

    async def work() -> None:
        seen.append("before")
        process.kill()
        seen.append("the rest of the step")
        await asyncio.sleep(0)
        seen.append("never")

    async def script() -> None:
        process.start(work())
        await asyncio.sleep(1)

    with world:
        world.run(script())
    assert seen == ["before", "the rest of the step"]


def test_a_pause_holds_timers_and_the_clock_leaps() -> None:
    world = World(1)
    process = world.host().process("p")
    times: list[float] = []

    async def tick() -> None:
        for _ in range(5):
            await asyncio.sleep(1)
            times.append(process.environment.clock.monotonic() - start)

    async def script() -> None:
        process.start(tick())
        await asyncio.sleep(1.5)
        process.pause()
        await asyncio.sleep(10)
        assert len(times) == 1
        process.resume()
        await asyncio.sleep(10)

    with world:
        start = world.loop.time()
        world.run(script())
    assert times == pytest.approx([1, 11.5, 12.5, 13.5, 14.5])


def test_what_was_held_runs_in_its_order() -> None:
    world = World(1)
    process = world.host().process("p")
    seen: list[int] = []

    async def script() -> None:
        process.pause()
        for number in range(10):
            process.call(world.loop.call_later, 0.1 * number, seen.append, number)
        await asyncio.sleep(2)
        process.call(world.loop.call_soon, seen.append, 10)
        process.resume()
        await asyncio.sleep(1)

    with world:
        world.run(script())
    assert seen == list(range(11))


def test_a_paused_process_can_be_killed() -> None:
    world = World(1)
    process = world.host().process("p")

    async def script() -> None:
        waiting = asyncio.ensure_future(process.run(asyncio.sleep(1)))
        await asyncio.sleep(0)
        process.pause()
        process.kill()
        process.resume()
        with pytest.raises(ProcessDied):
            await waiting

    with world:
        world.run(script())


def test_a_job_runs_later_and_its_result_later_still() -> None:
    world = World(1)
    process = world.host().process("p")

    async def work() -> None:
        ran: list[float] = []
        start = world.now_s
        with pytest.raises(RuntimeError, match="no running event loop"):
            await process.environment.threads.run(asyncio.get_running_loop)
        await process.environment.threads.run(lambda: ran.append(world.now_s))
        assert start < ran[0] < world.now_s
        with pytest.raises(ZeroDivisionError):
            await process.environment.threads.run(lambda: 1 // 0)

    with world:
        world.run(process.run(work()))


def test_slow_disks_and_busy_hosts_take_their_time() -> None:
    world = World(1)
    host = world.host()
    host.disk.sync_s = 1.0, 1.0
    host.thread_s = 0.1, 0.1
    process = host.process("p")

    async def work() -> float:
        file = process.environment.disk.open("/f", create=True)
        start = world.now_s
        await process.environment.threads.run(file.sync_data)
        return world.now_s - start

    with world:
        assert world.run(process.run(work())) == pytest.approx(1.2)


def test_a_kill_falls_before_or_after_the_effect_of_a_job() -> None:
    found: set[tuple[bytes, bool]] = set()
    for seed in range(100):
        world = World(seed)
        host = world.host()
        process = host.process("p")
        known: list[int] = []

        async def work(process: Any = process, known: list[int] = known) -> None:
            file = process.environment.disk.open("/f", create=True)
            known.append(await process.environment.threads.run(file.pwrite, b"x", 0))

        async def script(process: Any = process, work: Any = work, world: World = world) -> None:
            process.start(work())
            await asyncio.sleep(world.random.random() * 0.0012)
            process.kill()
            await asyncio.sleep(1)

        with world:
            world.run(script())
            found.add((host.disk.read("/f"), bool(known)))
    assert found == {(b"", False), (b"x", False), (b"x", True)}


def test_a_kill_inside_a_job_ends_the_process_there() -> None:
    world = World(1)
    host = world.host()
    process = host.process("p")

    def job() -> None:
        disk = process.environment.disk
        for name in "abc":
            disk.open(f"/{name}", create=True)

    async def script() -> None:
        process.kill_at_disk_operation(2)
        with pytest.raises(ProcessDied):
            await process.run(process.environment.threads.run(job))

    with world:
        world.run(script())
        assert host.disk.paths() in (["/a"], ["/a", "/b"])
        assert not world.errors


def test_power_loss_takes_all_processes_of_the_host_and_boot_makes_new_ones() -> None:
    world = World(1)
    host, other = world.host(), world.host()
    first, second, spared = host.process("p"), host.process("q"), other.process("r")
    assert host.find_process(first.pid) is first
    boot_id = first.environment.boot_id
    host.power_loss()
    assert not first.alive and not second.alive and spared.alive
    assert host.find_process(first.pid) is None
    third = host.process("p")
    assert host.up and third.environment.boot_id != boot_id
    assert third.pid not in (first.pid, second.pid)
    world.close()


def test_wall_clocks_jump_by_host() -> None:
    world = World(1)
    one, two = world.host(), world.host()
    first, second = one.process("p").environment.clock, two.process("q").environment.clock

    async def script() -> None:
        assert first.wall_ms() == second.wall_ms()
        before, start = first.wall_ms(), first.monotonic()
        await asyncio.sleep(1.5)
        assert first.wall_ms() - before == 1500
        one.jump_clock(-3_600_000)
        assert first.wall_ms() - second.wall_ms() == -3_600_000
        assert first.monotonic() - start == pytest.approx(1.5)

    with world:
        world.run(script())


def test_processes_have_randomness_of_their_own() -> None:
    def ids(seed: int) -> list[str]:
        with World(seed) as world:
            host = world.host()
            return [host.process("p").environment.new_id() for _ in range(3)]

    assert ids(1) == ids(1)
    assert len({*ids(1), *ids(2)}) == 6


def test_the_event_log_shows_where_two_runs_part() -> None:
    def log(pause_s: float) -> list[str]:
        async def work() -> None:
            await asyncio.sleep(1)
            await asyncio.sleep(pause_s)

        with World(1, keeps_log=True) as world:
            process = world.host().process("p")
            world.run(process.run(work()))
            assert world.loop.event_log is not None
            return world.loop.event_log

    assert log(1) == log(1)
    same = [one == two for one, two in zip(log(1), log(2), strict=True)]
    assert same.index(False) > 2 and not any(same[same.index(False) :])


def test_a_failure_tells_its_seed_and_what_happened_last() -> None:
    world = World(77)

    async def script() -> None:
        world.host().process("p").kill()
        await asyncio.sleep(1000)

    with world, pytest.raises(LimitError) as caught:
        world.run(script(), limit_s=10)
    notes = "\n".join(caught.value.__notes__)
    assert "seed 77" in notes and "p#101 killed" in notes
