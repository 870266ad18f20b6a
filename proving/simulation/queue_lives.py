"""Processes that live one after the other, each disturbed now and then: the workers of queues."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from proving.simulation.cluster import SimulatedCluster
from proving.simulation.owner import Owner
from proving.simulation.process import Process
from proving.simulation.world import Host
from rayq.testing.checker import Recorder

LIFE_S = (1.0, 10.0)

Life = Callable[[str, Process, random.Random], Coroutine[Any, Any, None]]


class Lives:
    """See the module. Each slot has one process at a time, on a host of its own."""

    def __init__(self, cluster: SimulatedCluster, hosts: list[Host], recorder: Recorder) -> None:
        """The hosts are added to `hosts`."""
        self.is_wild = True
        """True if they are disturbed."""
        self._cluster = cluster
        self._hosts = hosts
        self._recorder = recorder
        self._slots: list[asyncio.Task[None]] = []
        self._names: dict[Owner, str] = {}
        cluster.world.network.on_lost = self._lost_connection

    async def end(self, limit_s: float) -> None:
        """Waits until no slot is running. Raises AssertionError after `limit_s`."""
        done, late = await asyncio.wait(self._slots, timeout=limit_s)
        assert not late, f"{len(late)} consumers of queues did not end"
        for slot in done:
            slot.result()

    def fill(self, slot: str, life: Life, goes_on: Callable[[], bool]) -> None:
        """Starts lives in a slot, for as long as it `goes_on`."""
        host = self._cluster.world.host(slot)
        self._hosts.append(host)
        self._slots.append(asyncio.create_task(self._live(slot, host, life, goes_on)))

    async def _live(
        self, slot: str, host: Host, life: Life, goes_on: Callable[[], bool]
    ) -> None:
        """One life after the other, each disturbed now and then."""
        world = self._cluster.world
        rng = world.new_random(slot)
        lives = 0
        while goes_on():
            lives += 1
            name = f"{slot}.{lives}"
            process = host.process(name)
            self._names[process] = name
            task = process.start(life(name, process, random.Random(rng.getrandbits(64))))
            while process.alive and not task.done():
                await asyncio.wait(
                    (task, process.exited),
                    timeout=rng.uniform(*LIFE_S) if self.is_wild else 1.0,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not self.is_wild or not process.alive or task.done():
                    continue
                await self._disturb(rng.choice(("kill", "pause", "cut", "nothing")), process, rng)
            if process.alive:
                task.result()
            self._recorder.killed(name)
            process.kill()
            del self._names[process]
            await asyncio.sleep(rng.uniform(0.05, 2.0))

    async def _disturb(self, what: str, process: Process, rng: random.Random) -> None:
        world = self._cluster.world
        world.trace.note(f"SLOT {process.name}: {what}")
        if what == "kill":
            process.kill()
        elif what == "pause":
            process.pause()
            await asyncio.sleep(rng.uniform(0.5, 8.0))
            process.resume()
        elif what == "cut":
            cut_off, others = [process.host], self._cluster.hosts
            world.network.cut(cut_off, others, both_ways=rng.random() < 0.7)
            await asyncio.sleep(rng.uniform(0.5, 8.0))
            world.network.heal(cut_off, others)

    def _lost_connection(self, owner: Owner) -> None:
        name = self._names.get(owner)
        if name is not None:
            self._recorder.disturbed(name, at_s=self._cluster.world.now_s)
