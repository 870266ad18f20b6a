"""A simulated world: hosts with a disk each, processes on them, a network, one seed.

world = World(seed=7)
host = world.host()
process = host.process("broker-1")
world.run(script(world), limit_s=60)
"""

from __future__ import annotations

import random
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from proving.simulation.disk import SimulatedDisk
from proving.simulation.loop import START_S, ReportedError, SimulationLoop
from proving.simulation.network import SimulatedNetwork
from proving.simulation.process import THREAD_S, Process

T = TypeVar("T")

START_WALL_MS = 1_900_000_000_000
"""The first value of a correct wall clock."""

FIRST_PID = 100


class World:
    """The hosts, the network and the loop, all from one seed. `run` runs the script of a test, as
    often as wanted; `close` (or a `with` block) ends everything.

    `keeps_log` keeps a line for every event in `loop.event_log`: where two runs of one seed part,
    the first line that differs names the code that parted them."""

    def __init__(self, seed: int, *, keeps_log: bool = False) -> None:
        self.seed = seed
        self.loop = SimulationLoop(keeps_log=keeps_log)
        self.trace = self.loop.trace
        self.random = self.new_random("script")
        self.network = SimulatedNetwork(self.loop, self.new_random("network"))
        self.hosts: list[Host] = []
        self._pids = FIRST_PID

    @property
    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self.loop.time() - START_S

    @property
    def errors(self) -> list[ReportedError]:
        """Errors that no code handled: of tasks that nobody awaited, of callbacks, of protocols."""
        return self.loop.errors

    def host(self, name: str | None = None) -> Host:
        """A new host, with power and an empty disk."""
        host = Host(self, name or f"host-{len(self.hosts) + 1}", f"10.0.0.{len(self.hosts) + 1}")
        self.hosts.append(host)
        self.network.add_host(host)
        return host

    def new_disk(self, name: str) -> SimulatedDisk:
        """A new empty disk, for a host."""
        return SimulatedDisk(name, self.new_random(f"disk {name}"), self.trace, self.loop.time)

    def new_random(self, purpose: str) -> random.Random:
        """A stream of random numbers of its own: more use of one does not shift the others."""
        return random.Random(f"{self.seed}/{purpose}")

    def next_pid(self) -> int:
        self._pids += 1
        return self._pids

    def run(self, script: Coroutine[Any, Any, T], *, limit_s: float = 600.0) -> T:
        """Runs a coroutine outside of all processes. Raises the errors of the coroutine,
        `DeadlockError`, or `LimitError` after `limit_s` virtual seconds; the error has the seed and
        the last events as a note."""
        try:
            return self.loop.run(script, limit_s=limit_s)
        except Exception as error:
            error.add_note(f"Simulation seed {self.seed}, trace {self.trace.digest()}. Last:")
            for line in self.trace.tail()[-40:]:
                error.add_note(f"  {line}")
            raise

    def close(self) -> None:
        for host in self.hosts:
            for process in list(host.processes):
                process.kill()
        self.loop.close()

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Host:
    """A machine: an address, a disk, a clock, processes.

    Knobs: `thread_s`, how long a job waits for a thread, and its result for the loop, at least and
    usually at most (more on a busy machine); `clock_offset_ms`, how far off the wall clock is;
    `slowness`, how many times as long computing takes as usual, where time is charged.
    """

    def __init__(self, world: World, name: str, address: str) -> None:
        self.world = world
        self.name = name
        self.address = address
        self.up = True
        self.disk = world.new_disk(f"{name}.disk")
        self.processes: list[Process] = []
        self.clock_offset_ms = 0
        self.clock_changes: list[tuple[float, int]] = []
        """The times at which the wall clock jumped, in virtual seconds, and how far off it was from
        then on."""
        self.began_ahead_s: list[float] = []
        """Times at which processes began while it was ahead, which they cannot know."""
        self.thread_s = THREAD_S
        self.slowness = 1.0
        self._boots = 0

    @property
    def boot_id(self) -> str:
        return f"{self.name}-boot-{self._boots}"

    def process(self, name: str) -> Process:
        """Starts a process, after turning the host on if it has no power."""
        self.boot()
        pid = self.world.next_pid()
        rng = self.world.new_random(f"process {pid}")
        process = Process(self, f"{name}#{pid}", pid, rng)
        if self.clock_offset_ms > 0:
            self.began_ahead_s.append(self.world.now_s)
        self.processes.append(process)
        self.world.loop.new_owner(process)
        self.world.trace.note(f"{self.name} starts {process.name}")
        return process

    def find_process(self, pid: int) -> Process | None:
        """The live process of that pid."""
        return next((process for process in self.processes if process.pid == pid), None)

    def power_loss(self) -> None:
        """Ends all processes without a word to their peers. The disk keeps what was synced, and
        some of the rest. The host is dark until `boot`."""
        self.up = False
        for process in list(self.processes):
            process.lose_power()
        self.disk.power_loss()
        self.world.network.host_went_down()

    def boot(self) -> None:
        """Gives the host power again. It answers the network, and has no process yet."""
        if not self.up:
            self.up = True
            self._boots += 1
            self.world.trace.note(f"{self.name} boots")
            self.world.network.links_are_back()

    def swap_disk(self, disk: SimulatedDisk) -> SimulatedDisk:
        """Puts another disk in. Returns the old one. No process may be running."""
        assert not self.processes, f"{self.name} is in use"
        old, self.disk = self.disk, disk
        return old

    def wall_ms(self) -> int:
        """The wall clock of this host, off by `clock_offset_ms`."""
        return START_WALL_MS + int(self.world.now_s * 1000) + self.clock_offset_ms

    def jump_clock(self, milliseconds: int) -> None:
        """Moves the wall clock forward, or back by a negative number."""
        self.clock_offset_ms += milliseconds
        self.clock_changes.append((self.world.now_s, self.clock_offset_ms))
        self.world.trace.note(f"{self.name}: the wall clock jumps by {milliseconds} ms")
