"""A simulated process: an `Environment` that dies with it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from proving.simulation.disk import ProcessDisk, SimulatedDisk
from proving.simulation.link import NetworkHost
from proving.simulation.loop import SimulationLoop
from proving.simulation.network import ProcessNetwork, SimulatedNetwork
from proving.simulation.owner import DEAD, Owner
from rayq.environment import Environment

T = TypeVar("T")

THREAD_S = (0.00002, 0.0005)
"""Time that a thread of an idle host takes to start a job, and the loop to hear of the job's end;
one time in 100 it takes up to 50 times as long."""


class _World(Protocol):
    @property
    def loop(self) -> SimulationLoop: ...
    @property
    def network(self) -> SimulatedNetwork: ...


class ProcessHost(NetworkHost, Protocol):
    """A process's view of its host."""

    thread_s: tuple[float, float]
    slowness: float
    disk: SimulatedDisk
    processes: list[Process]

    @property
    def world(self) -> _World: ...
    @property
    def boot_id(self) -> str: ...
    def wall_ms(self) -> int: ...
    def power_loss(self) -> None: ...


class Process(Owner):
    """A process on a host. `environment` is its world; `start`, `run` and `call` put code into it.

    All that its code schedules (callbacks, timers, tasks, jobs, connections) belongs to the process
    and ends at `kill` without another word: tasks are closed where they stand, and any use of disk
    or network in their `finally` blocks raises `ProcessDied`.
    """

    def __init__(self, host: ProcessHost, name: str, pid: int, rng: random.Random) -> None:
        super().__init__(name, pid)
        self.host = host
        self.pid = pid
        self.exited: asyncio.Future[None] = host.world.loop.create_future()
        self._loop = host.world.loop
        self._rng = rng
        self._disk = ProcessDisk(host.disk, self)
        self._watchers: list[Callable[[], None]] = []
        self._job_s: float | None = None
        self._operations_left: int | None = None
        self._operations_to_pause: int | None = None
        self._only_names = False
        self._power_loss_too = False
        self.environment = Environment(
            clock=ProcessClock(self, host),
            random=random.Random(rng.getrandbits(64)),
            disk=self._disk,
            network=ProcessNetwork(host.world.network, host, self),
            threads=ProcessThreads(self, self._loop, rng),
            tasks=ProcessTasks(self, self._loop),
            pid=pid,
            boot_id=host.boot_id,
        )

    # --- code -------------------------------------------------------------------------------------

    def start(self, work: Coroutine[Any, Any, T], name: str = "main") -> asyncio.Task[T]:
        """Starts a task of the process. Await it with `run` if the process may die."""
        return self.environment.tasks.spawn(work, name)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` in the process and returns its result. Raises `ProcessDied` when it dies."""
        task: asyncio.Task[T] = self._loop.create_task(
            work, name="run", context=self.copy_context()
        )
        await asyncio.wait((task, self.exited), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            self.check_alive()
        return task.result()

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a plain function as code of the process."""
        self.check_alive()
        return self.context.copy().run(function, *arguments)

    # --- its end ----------------------------------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL: the page cache stays, and so do the bytes that the kernel holds of
        connections."""
        self._end("killed", power_loss=False)

    def kill_at_disk_operation(
        self, count: int, *, power_loss: bool = False, only_names: bool = False
    ) -> None:
        """Kills the process in its `count`-th change of the disk from now (1 is the next): before
        or after it, or with a part of a write done. With `power_loss` the whole host loses its
        power. With `only_names` writes and their syncs do not count, but what changes names and
        lengths does: it is seldom, and a file is renamed where a file must be there as a whole."""
        self._operations_left = count
        self._only_names = only_names
        self._power_loss_too = power_loss

    def spare_disk_operations(self) -> None:
        """Takes `kill_at_disk_operation` back."""
        self._operations_left = None

    def pause_at_disk_operation(self, count: int) -> None:
        """Pauses the process after its `count`-th change of the disk from now (1 is the next)."""
        self._operations_to_pause = count

    def pause(self) -> None:
        """SIGSTOP: no code of the process runs, while time passes and bytes arrive."""
        if self.alive:
            self._loop.trace.note(f"{self.name} pauses")
            self._loop.pause(self)

    def resume(self) -> None:
        """SIGCONT: the code of the process runs again."""
        self._operations_to_pause = None
        if self.alive:
            self._loop.trace.note(f"{self.name} resumes")
            self._loop.resume(self)

    def lose_power(self) -> None:
        """Ends the process as a part of `Host.power_loss`."""
        self._end("has no power", power_loss=True)

    def _end(self, how: str, *, power_loss: bool) -> None:
        if not self.alive:
            return
        self._loop.trace.note(f"{self.name} {how}")
        self.host.processes.remove(self)
        self._loop.bury(self)
        self._disk.release()
        self.host.world.network.process_died(self, power_loss=power_loss)
        self.exited.set_result(None)

    # --- for the disk -----------------------------------------------------------------------------

    def enter_disk(self, *, changes: bool, of_names: bool = False) -> bool:
        self.check_alive()
        if changes and self._operations_to_pause is not None:
            self._operations_to_pause -= 1
            if self._operations_to_pause == 0:
                self.pause()
        if not changes or self._operations_left is None or (self._only_names and not of_names):
            return False
        self._operations_left -= 1
        return self._operations_left == 0

    def die_on_disk(self) -> None:
        if self._power_loss_too:
            self.host.power_loss()
        else:
            self.kill()
        self.check_alive()

    def spend(self, seconds: float) -> None:
        if self._job_s is not None:
            self._job_s += seconds
        else:
            self._loop.block(self, seconds)

    def ahead_s(self) -> float:
        if self._job_s is not None:
            return self._job_s
        return max(0.0, self.blocked_until - self._loop.time())

    def run_job(self, job: Callable[..., T], *arguments: Any) -> tuple[T, float]:
        """Calls a thread's job. Returns the result and the seconds that the job waited for the
        disk."""
        self._job_s = 0.0
        try:
            return job(*arguments), self._job_s
        finally:
            self._job_s = None


class ProcessClock:
    """`environment.Clock`: the loop's time, and the wall clock of the host."""

    def __init__(self, process: Process, host: ProcessHost) -> None:
        self._process = process
        self._host = host
        self._loop = host.world.loop

    def monotonic(self) -> float:
        if self._process.gate == DEAD:
            self._process.check_alive()
        return self._loop.time()

    def wall_ms(self) -> int:
        self._process.check_alive()
        return self._host.wall_ms()


class ProcessTasks:
    """`environment.Tasks` of one process."""

    def __init__(self, process: Process, loop: SimulationLoop) -> None:
        self._process = process
        self._loop = loop

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        context = self._process.copy_context()
        task = self._loop.create_task(work, name=name, context=context)
        task.add_done_callback(self._ended, context=context)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._loop.call_exception_handler(
                {"message": f"task {task.get_name()} failed", "exception": error}
            )

    def cancel_all(self) -> None:
        self._process.check_alive()
        for task in self._process.tasks():
            task.cancel()


class ProcessThreads:
    """`environment.Threads` of one process: a job runs at once, but some time after the call, and
    some time passes before the loop hears of its end."""

    def __init__(self, process: Process, loop: SimulationLoop, rng: random.Random) -> None:
        self._process = process
        self._loop = loop
        self._rng = rng

    async def run(self, job: Callable[..., T], *arguments: Any) -> T:
        self._process.check_alive()
        future: asyncio.Future[T] = self._loop.create_future()
        self._later(0.0, self._execute, future, job, arguments)
        return await future

    def _execute(
        self, future: asyncio.Future[T], job: Callable[..., T], arguments: tuple[Any, ...]
    ) -> None:
        if future.done():
            return  # The job was cancelled before a thread took it.
        asyncio._set_running_loop(None)  # A thread has no loop.
        waited_s = 0.0
        try:
            result, waited_s = self._process.run_job(job, *arguments)
        except Exception as error:  # noqa: BLE001 - raised where the job is awaited
            self._later(0.0, self._finish, future, None, error)
        else:
            self._later(waited_s, self._finish, future, result, None)
        finally:
            asyncio._set_running_loop(self._loop)

    def _finish(self, future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def _later(self, seconds: float, callback: Callable[..., None], *arguments: Any) -> None:
        least, usual = self._process.host.thread_s
        delay = least + (usual - least) * self._rng.random()
        if self._rng.random() < 0.01:
            delay *= self._rng.uniform(1, 50)
        context = self._process.copy_context()
        self._loop.call_later(seconds + delay, callback, *arguments, context=context)
