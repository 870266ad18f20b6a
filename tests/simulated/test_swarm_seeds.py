"""Seeds that draw a small selection of clients, faults and sizes, and how they describe it."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from proving.simulation import World, buggify, situations
from proving.simulation.situations import SITUATIONS
from proving.simulation.steering import Steering
from rayq.actors.replica import leader_followers
from tests.simulated.support import found_by, passing

SWARM = ("--scenario", "swarm")
QUICK_HUNTS = {"deletion_answered_at_once": "40:80", "retention_where_none_is_set": "2:20"}
"""Planted bugs, and seeds of which an early one finds them; `make hunt` plants the others."""


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_small_selections_lose_nothing_and_recover() -> None:
    # In 125 a compaction goes on when its partition has been moved away, and removed.
    assert " passed" in passing(*SWARM, "0:6,125")


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", QUICK_HUNTS)
def test_a_bug_planted_into_what_removes_records_is_found(name: str) -> None:
    assert found_by(name, QUICK_HUNTS[name])


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_a_seed_that_is_watched_is_the_same_run_and_says_what_it_met() -> None:
    # Both lines name the trace: so this is also the test that one seed gives one trace.
    alone, watched = (passing("6", *options) for options in ((), ("--situations",)))
    assert alone.splitlines()[0] == watched.splitlines()[0]
    met = {
        line.split()[1].rstrip(":"): int(line.split()[0])
        for line in watched.splitlines()[1:-1]
    }
    assert met.keys() == SITUATIONS.keys()
    assert met["recovery-of-a-tail"] == 1 and met["start-moved"] == 0


def test_each_probe_takes_what_its_method_takes() -> None:
    # One that does not would raise its error within the code that it watches.
    for owner, name, probe in situations._probes:
        method = inspect.getattr_static(owner, name)
        parameters = inspect.signature(getattr(method, "__func__", method)).parameters.values()
        by_name = {one.name: None for one in parameters if one.kind is one.KEYWORD_ONLY}
        by_place = [one for one in parameters if one.name not in by_name]
        required = [one for one in by_place if one.default is one.empty]
        for given in (by_place, required):
            inspect.signature(probe).bind(*given, **by_name)


def test_a_constant_is_another_one_only_while_the_seed_runs() -> None:
    before = leader_followers.REPLICA_FETCH_BYTES_MAX
    with buggify.patched(frozenset({"one-batch-reads"})):
        assert leader_followers.REPLICA_FETCH_BYTES_MAX == 1 != before
    assert before == leader_followers.REPLICA_FETCH_BYTES_MAX


def test_each_point_is_drawn_by_some_seed_and_some_seeds_draw_none() -> None:
    drawn = [buggify.drawn(seed) for seed in range(100)]
    assert frozenset().union(*drawn) == buggify.POINTS.keys()
    assert frozenset() in drawn


def test_a_connection_that_breaks_ends_on_both_sides() -> None:
    class Protocol(asyncio.Protocol):
        def __init__(self) -> None:
            self.lost: asyncio.Future[Exception | None] = world.loop.create_future()

        def connection_lost(self, exc: Exception | None) -> None:
            self.lost.set_result(exc)

    async def script() -> None:
        server, client = (world.host().process(name) for name in ("server", "client"))
        there = Protocol()
        address = server.host.address  # type: ignore[attr-defined]
        await server.run(server.environment.network.listen(address, 7000, lambda *_: there))
        here = Protocol()
        await client.run(client.environment.network.connect(address, 7000, lambda: here))
        world.network.disturb(break_share=1.0)
        (transport,) = [one for one in world.network._transports if one.owner is client]
        client.call(transport.write, b"a request")
        assert isinstance(await there.lost, ConnectionResetError)
        assert isinstance(await here.lost, ConnectionResetError)

    with World(1) as world:
        world.run(script(), limit_s=5.0)


def test_steering_prefers_what_was_there_when_something_rare_was_met() -> None:
    steering = Steering()
    common, rare = "recovery-of-a-tail", "recovery-of-a-reset"
    for seed in range(40):
        steering.heard(["group", "stutters"], [common, rare] if seed == 7 else [common])
        steering.heard(["table", "late-bytes"], [common])
    for _ in range(3):
        steering.heard(["moves", "cold-reads"], [common, rare])
    assert steering.weight("cold-reads") > 2 * steering.weight("late-bytes")
    assert steering.weight("stutters") > steering.weight("late-bytes")
    assert steering.weight("never tried") > steering.weight("late-bytes")
    assert steering.choose(3) == steering.choose(3)
