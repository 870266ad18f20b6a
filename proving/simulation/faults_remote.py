"""The faults of remote storage: object servers that die or hang, and a store that fails."""

from __future__ import annotations

import asyncio

from proving.simulation.faults import Faults, Injection
from proving.simulation.faults_processes import kill_a_leader
from proving.simulation.object_store import LATENCY_S


async def kill_an_object_server(faults: Faults) -> None:
    servers = faults.cluster.object_servers()
    if servers:
        victim = faults.rng.choice(servers)
        faults.begin(f"kill {victim.name}")
        victim.kill()


async def kill_all_object_servers(faults: Faults) -> None:
    faults.begin("kill all object servers")
    for victim in faults.cluster.object_servers():
        victim.kill()


async def pause_an_object_server(faults: Faults) -> None:
    servers = faults.cluster.object_servers()
    if servers:
        victim = faults.rng.choice(servers)
        faults.begin(f"pause {victim.name}")
        victim.pause()
        await faults.last(0.5, 9.0)
        victim.resume()


async def store_is_away(faults: Faults) -> None:
    """Cuts all hosts, or some, off from the store."""
    hosts = faults.cluster.hosts
    chosen = {host.name for host in faults.rng.sample(hosts, faults.rng.randint(1, len(hosts)))}
    if faults.rng.random() < 0.5:
        chosen = {host.name for host in hosts}
    faults.begin(f"the store is away for {sorted(chosen)}")
    store = faults.cluster.objects
    store.faults.away |= chosen
    await faults.last(0.5, 12.0)
    store.faults.away -= chosen


async def store_denies_a_host(faults: Faults) -> None:
    host = faults.rng.choice(faults.cluster.hosts)
    faults.begin(f"the store refuses the credentials of {host.name}")
    store = faults.cluster.objects
    store.faults.denied.add(host.name)
    await faults.last(0.5, 8.0)
    store.faults.denied.discard(host.name)


async def store_is_slow(faults: Faults) -> None:
    store = faults.cluster.objects
    store.latency_s = faults.rng.choice(((0.05, 0.5), (0.5, 3.0), (1.0, 8.0)))
    faults.begin(f"requests to the store take {store.latency_s} s")
    await faults.last(0.5, 8.0)
    store.latency_s = LATENCY_S


async def store_fails(faults: Faults) -> None:
    """Many requests fail or have no answer, and bodies are wrong."""
    store, rng = faults.cluster.objects, faults.rng
    what = rng.choice(("refused", "unanswered", "short_bodies", "flipped_bodies"))
    # Three wrong bodies of one range count as damage for good.
    share = 0.02 if what == "flipped_bodies" else rng.choice((0.1, 0.4, 0.8))
    faults.begin(f"{what} of the store: {share}")
    setattr(store.faults, what, share)
    await faults.last(1.0, 10.0)
    setattr(store.faults, what, 0.0)


async def lists_are_stale(faults: Faults) -> None:
    store = faults.cluster.objects
    stale_s = faults.rng.choice((2.0, 10.0, 60.0))
    faults.begin(f"lists of the store are up to {stale_s} s old")
    store.faults.stale_lists_s = stale_s
    await faults.last(2.0, 15.0)
    store.faults.stale_lists_s = 0.0


async def kill_an_object_server_and_a_leader(faults: Faults) -> None:
    """An upload is under way, and its leader is gone."""
    await kill_an_object_server(faults)
    await asyncio.sleep(faults.rng.random() * 0.1)
    await kill_a_leader(faults)


WITH_REMOTE_STORAGE: list[Injection] = [
    kill_an_object_server,
    kill_an_object_server,
    kill_all_object_servers,
    kill_an_object_server_and_a_leader,
    pause_an_object_server,
    store_is_away,
    store_is_away,
    store_denies_a_host,
    store_is_slow,
    store_fails,
    store_fails,
    store_fails,
    lists_are_stale,
]
"""The faults beside the ordinary ones, where topics have remote storage."""
