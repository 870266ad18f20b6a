"""Charged time: computing takes virtual time, and what a busy process hears waits."""

from __future__ import annotations

import asyncio

import pytest

from proving.simulation.charged import BYTE_S, EVENT_S, ChargedTime, is_charged
from proving.simulation.process import Process
from proving.simulation.world import Host, World

EVENTS = 1000


def charged(world: World, hosts: list[Host], *, cores: int = 8) -> float:
    """Charges the time of the hosts. Returns the cost of an event."""
    prices = ChargedTime(world, hosts)
    prices.cores = cores
    world.loop.observer = prices.observer(lambda _: None)
    return EVENT_S * prices.scale


async def compute(events: int = EVENTS) -> None:
    for _ in range(events):
        await asyncio.sleep(0)


def seconds_of(world: World, *processes: Process) -> float:
    """The virtual time in which all these processes compute at once."""

    async def script() -> None:
        tasks = [process.start(compute()) for process in processes]
        await asyncio.gather(*tasks)

    began_s = world.now_s
    world.run(script())
    return world.now_s - began_s


def test_computing_takes_no_time_unless_it_is_charged() -> None:
    with World(1) as world:
        host, other = world.host(), world.host()
        cost_s = charged(world, [host])
        assert seconds_of(world, other.process("client")) == 0
        assert seconds_of(world, host.process("server")) == pytest.approx(EVENTS * cost_s, rel=0.1)


def test_a_slow_machine_takes_longer_by_its_slowness() -> None:
    with World(1) as world:
        host = world.host()
        cost_s = charged(world, [host])
        host.slowness = 10.0
        taken_s = seconds_of(world, host.process("server"))
        assert taken_s == pytest.approx(EVENTS * cost_s * 10, rel=0.1)


def test_busy_processes_of_a_machine_share_its_cores() -> None:
    with World(1) as world:
        host = world.host()
        cost_s = charged(world, [host], cores=1)
        processes = [host.process(f"server-{number}") for number in range(3)]
        taken_s = seconds_of(world, *processes)
        assert taken_s == pytest.approx(3 * EVENTS * cost_s, rel=0.2)


def test_a_timer_of_a_busy_process_fires_late_and_one_of_another_process_does_not() -> None:
    with World(1) as world:
        host, other = world.host(), world.host()
        charged(world, [host, other])
        host.slowness = 1000.0
        fired_s: dict[str, float] = {}

        async def note_time(name: str) -> None:
            await asyncio.sleep(0.01)
            fired_s[name] = world.now_s

        async def script() -> None:
            busy, idle = host.process("busy"), other.process("idle")
            busy.start(note_time("busy"))
            idle.start(note_time("idle"))
            busy.start(compute())
            await asyncio.sleep(60.0)

        world.run(script())
        assert fired_s["idle"] < 0.02  # It pays for its own two steps.
        assert fired_s["busy"] > 0.1


def test_bytes_are_charged_to_the_process_that_writes_them() -> None:
    with World(1) as world:
        host = world.host()
        cost_s = charged(world, [host])
        process = host.process("server")

        async def write() -> None:
            disk = process.environment.disk
            disk.open("/file", create=True).pwrite(bytes(10_000_000), 0)
            await asyncio.sleep(0)

        world.run(process.run(write()))
        bytes_s = 10_000_000 * BYTE_S * cost_s / EVENT_S
        assert world.now_s == pytest.approx(bytes_s, rel=0.1)


def test_a_process_that_dies_while_it_pays_is_gone() -> None:
    with World(1) as world:
        host = world.host()
        charged(world, [host])
        process = host.process("server")

        async def script() -> None:
            process.start(compute())
            await asyncio.sleep(0.01)
            process.kill()
            await asyncio.sleep(1.0)

        world.run(script())
        assert not process.alive


def test_the_same_seed_is_charged_in_the_same_way() -> None:
    traces = set()
    for _ in range(2):
        with World(7) as world:
            host = world.host()
            charged(world, [host], cores=1)
            seconds_of(world, *(host.process(f"server-{number}") for number in range(3)))
            traces.add(world.trace.digest())
    assert len(traces) == 1


def test_a_third_of_the_seeds_is_charged_and_chosen_features_say_so_themselves() -> None:
    count = sum(is_charged(seed, None) for seed in range(3000))
    assert 900 < count < 1100
    assert is_charged(1, frozenset(["charged-time"]))
    assert not is_charged(1, frozenset(["group"]))
