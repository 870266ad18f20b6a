"""Real processes, held by pidfd: noticed at once when they end, never mistaken for another."""

from __future__ import annotations

import asyncio
import os
import signal

INIT = "1"
"""The pid of the process that becomes the parent of a process whose own parent has ended."""


class Process:
    """A process on this machine. Closes its pidfd when it is gone."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._descriptor: int | None = descriptor
        loop = asyncio.get_running_loop()
        self._dead: asyncio.Future[str] = loop.create_future()
        loop.add_reader(descriptor, self._ended, loop)

    def _ended(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._descriptor is not None
        loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = None
        if not self._dead.done():
            self._dead.set_result(f"process {self.pid} ended")

    async def wait_dead(self) -> str:
        return await asyncio.shield(self._dead)

    def kill(self) -> None:
        if self._descriptor is not None:
            try:
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
            except ProcessLookupError:
                pass


def adopt_process(pid: int, start_time: int) -> Process | None:
    """The process with that pid that started then; None when it is gone (the pid may be another's).

    The pidfd is opened first and the start time compared after: from then on it cannot change.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    if process_start_time(pid) != start_time:
        os.close(descriptor)
        return None
    return Process(pid, descriptor)


def process_start_time(pid: int) -> int | None:
    """The start time of a process, in clock ticks since boot (field 22 of /proc/<pid>/stat); None
    when there is none."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def is_orphan(pid: int) -> bool:
    """Returns whether a process is gone, or the process that started it is gone."""
    fields = _stat(pid)
    return fields is None or fields[1] == INIT


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat from the state on, which is the third; None where there is no
    such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            stat = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name, in parentheses, may hold spaces and parentheses itself.
    return stat.rpartition(")")[2].split()
