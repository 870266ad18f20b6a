"""The faults of the network: cuts, slow links, resets."""

from __future__ import annotations

import asyncio

from proving.simulation.faults import Faults
from proving.simulation.link import NetworkHost


async def isolate_a_broker(faults: Faults) -> None:
    """Cuts a host off from the other servers, perhaps also from clients."""
    number = faults.any_broker()
    host = faults.cluster.hosts[number]
    others: list[NetworkHost] = [
        other
        for other in [*faults.cluster.hosts, faults.cluster.controller_host]
        if other is not host
    ]
    if faults.rng.random() < 0.5:
        others += faults.clients
    both_ways = faults.rng.random() < 0.7
    way = "both ways" if both_ways else "one way"
    faults.begin(f"cut broker {number} off from {len(others)} hosts, {way}")
    await faults.cut([host], others, both_ways)


async def leave_a_broker_behind(faults: Faults) -> None:
    """Cuts a host off from the other servers for so long that logs have moved on when it is
    back."""
    host = faults.rng.choice(faults.cluster.hosts)
    servers = [*faults.cluster.hosts, faults.cluster.controller_host]
    faults.begin(f"leave {host.name} behind")
    faults.world.network.cut([host], [server for server in servers if server is not host])
    await asyncio.sleep(faults.rng.uniform(8.0, 20.0))
    faults.world.network.heal([host], servers)


async def split(faults: Faults) -> None:
    """Cuts any set of hosts off from any other set."""
    hosts = faults.hosts()
    faults.rng.shuffle(hosts)
    size = faults.rng.randint(1, len(hosts) - 1)
    side, other = hosts[:size], hosts[size:]
    both_ways = faults.rng.random() < 0.8
    faults.begin(f"split {', '.join(host.name for host in side)} from the rest")
    await faults.cut(side, other, both_ways)


async def slow_links(faults: Faults) -> None:
    pair = faults.rng.sample(faults.hosts(), 2)
    faults.begin(f"slow links of {pair[0].name} and {pair[1].name}")
    delay_s = faults.rng.choice(((0.01, 0.2), (0.2, 1.0)))
    faults.world.network.slow(pair, faults.hosts(), delay_s=delay_s)
    await faults.last(0.5, 8.0)
    faults.world.network.heal(pair, faults.hosts())


async def reset_connections(faults: Faults) -> None:
    hosts = faults.hosts()
    chosen = faults.rng.sample(hosts, faults.rng.randint(1, len(hosts)))
    faults.begin(f"reset connections of {len(chosen)} hosts")
    faults.world.network.reset(chosen, hosts)
