"""Charged time: in a third of the seeds computing costs virtual time, so that servers can be
overloaded.

Without it an event takes no time, whatever it does. With it each event of a server costs what was
measured, times the seed's scale and the slowness of its machine. While a process pays, it is
blocked: its later callbacks wait, its timers fire late, and what arrives stays unread.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

from proving.simulation.faults import Faults
from proving.simulation.owner import Owner
from proving.simulation.process import Process, ProcessHost
from proving.simulation.world import Host, World

CHARGED_TIME = "charged-time"
CHARGED_SHARE = 1 / 3
EVENT_S = 15e-6
BYTE_S = 1.5e-9
"""Cost of an event, and of each byte that it sends, receives, writes or reads: the mean of 130,000
events of servers in seeds with small values, and the medians of those with 60 to 700 KB, on a core
of its own (CPython 3.11, 28 November 2026)."""

SCALES = (5.0, 15.0, 40.0)
"""Choices of a seed for the cost of everything. A seed has few partitions and clients; it computes
as much as one with this many times more."""
CORES = (1, 2, 8)
"""Choices of a seed for the cores of a machine, which its processes share."""
SLICE_S = 0.001
"""A process pays once it owes this much, with one timer for several events."""
SLOWNESS = (3.0, 30.0)
"""The least and the greatest factor by which a machine is slow for a while."""


def is_charged(seed: int, features: frozenset[str] | None) -> bool:
    """Returns whether a seed has charged time: as `features` say, or by random numbers of their
    own."""
    if features is not None:
        return CHARGED_TIME in features
    return random.Random(f"{seed}/is charged").random() < CHARGED_SHARE


class ChargedTime:
    """The price of computing on the machines of servers."""

    def __init__(self, world: World, hosts: Collection[Host]) -> None:
        rng = world.new_random("charged time")
        self.prices_max: dict[ProcessHost, float] = {}
        """The highest price of computing that was paid on each machine, as a multiple of what was
        measured."""
        self.scale = rng.choice(SCALES)
        self.cores = rng.choice(CORES)
        world.trace.note(f"CHARGED at {self.scale:g} times the cost, {self.cores} cores")
        self._loop = world.loop
        self._hosts = frozenset(hosts)
        self._owed_s: dict[Process, float] = {}
        self._busy_until: dict[Process, float] = {}

    def observer(self, observe: Callable[[Owner], None]) -> Callable[[Owner], None]:
        """Returns an observer of the loop that charges each event once it was observed."""

        def charge(owner: Owner) -> None:
            observe(owner)
            if isinstance(owner, Process) and owner.host in self._hosts and owner.alive:
                self._charge(owner)

        return charge

    def _charge(self, process: Process) -> None:
        host = process.host
        price = self.scale * host.slowness
        cost_s = price * (EVENT_S + BYTE_S * process.handled_bytes)
        process.handled_bytes = 0
        owed_s = self._owed_s.pop(process, 0.0) + cost_s
        if owed_s < SLICE_S:
            self._owed_s[process] = owed_s
            return
        now_s, busy_until = self._loop.time(), self._busy_until
        busy = 1 + sum(busy_until.get(other, 0.0) > now_s for other in host.processes)
        shared = max(1.0, busy / self.cores)
        self.prices_max[host] = max(self.prices_max.get(host, 0.0), price * shared)
        busy_until[process] = now_s + owed_s * shared
        self._loop.block(process, owed_s * shared)


async def slow_machine(faults: Faults) -> None:
    """Makes a machine of servers slow for some seconds."""
    host = faults.rng.choice([*faults.cluster.hosts, faults.cluster.controller_host])
    host.slowness = drawn_slowness(faults.rng)
    faults.begin(f"{host.name} is {host.slowness:.0f} times as slow")
    await faults.last(1.0, 10.0)
    host.slowness = 1.0


def drawn_slowness(rng: random.Random) -> float:
    """A factor between the two of `SLOWNESS`, small ones as often as large ones."""
    least, most = SLOWNESS
    return float(least * (most / least) ** rng.random())
