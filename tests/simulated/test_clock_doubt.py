"""The judge of ages allows what rule 16 allows, and no more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from proving.simulation import World
from proving.simulation.clock_doubt import NOTICED_S, dated_s, most_aged_s
from proving.simulation.world import Host
from rayq.actors.clock_watch import ClockWatch


def play(work: Callable[[World, Host], Awaitable[None]]) -> None:
    with World(seed=1) as world:
        host = world.host("broker-0")
        process = host.process("replica")

        async def script() -> None:
            await work(world, host)

        world.run(process.run(script()), limit_s=10_000)


def test_a_leap_makes_things_older_by_so_much_as_the_clock_for_ages_follows() -> None:
    async def work(world: World, host: Host) -> None:
        watch = ClockWatch(host.processes[0].environment.clock)
        since_s, dated_ms = world.now_s, watch.latest_ms()
        for leap_ms, lasts_s in ((1_200_000, 3.0), (-60_000, 2.0), (1_000, 1.0)):
            host.jump_clock(leap_ms)
            for _ in range(int(lasts_s / NOTICED_S)):
                await asyncio.sleep(NOTICED_S)
                aged_s = (watch.now_ms() - dated_ms) / 1000
                most_s = most_aged_s([host], host, since_s, world.now_s)
                assert aged_s <= most_s + 0.001
            host.jump_clock(-leap_ms)
            await asyncio.sleep(10)
        passed_s = world.now_s - since_s
        assert passed_s < most_aged_s([host], host, since_s, world.now_s) < passed_s + 24 * 4
        # What came later has seen no leap.
        assert most_aged_s([host], host, since_s + passed_s - 1, world.now_s) == 1

    play(work)


def test_what_a_clock_that_was_behind_has_dated_may_look_old() -> None:
    async def work(world: World, host: Host) -> None:
        await asyncio.sleep(5)
        host.jump_clock(-60_000)
        await asyncio.sleep(1)
        wall_ms, at_s = host.wall_ms(), world.now_s
        await asyncio.sleep(0.5)
        host.jump_clock(60_000)
        await asyncio.sleep(0.5)
        assert abs(dated_s(host, wall_ms, world.now_s) - at_s) < 0.002
        assert most_aged_s([host], host, at_s, world.now_s) == 61

    play(work)


def test_who_began_in_a_leap_is_not_judged() -> None:
    async def work(world: World, host: Host) -> None:
        host.jump_clock(60_000)
        host.process("replica")
        host.jump_clock(-60_000)
        assert most_aged_s([host], host, world.now_s, world.now_s + 1) == float("inf")

    play(work)


def test_who_begins_after_a_clock_was_behind_follows_a_leap_as_anybody() -> None:
    async def work(world: World, host: Host) -> None:
        host.jump_clock(-1_200_000)
        await asyncio.sleep(0.5)
        host.jump_clock(1_200_000)
        await asyncio.sleep(8)
        watch = ClockWatch(host.processes[0].environment.clock)
        since_s, dated_ms = world.now_s, watch.latest_ms()
        await asyncio.sleep(NOTICED_S)
        watch.look()
        host.jump_clock(1_200_000)
        await asyncio.sleep(NOTICED_S)
        aged_s = (watch.now_ms() - dated_ms) / 1000
        assert 12 < aged_s <= most_aged_s([host], host, since_s, world.now_s) + 0.001

    play(work)
