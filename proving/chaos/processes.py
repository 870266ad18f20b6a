"""Finds and signals processes of this machine, and never hits another process by mistake."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Self

MARK = "RAYQ_CHAOS_RUN"
"""The environment variable that every process of a run inherits, also when its parent is gone."""
SWEEP_PAUSE_S = 0.05
SWEEPS_MAX = 200


class Victim:
    """One process, held by pidfd: no signal reaches another process that was given the same pid."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError."""
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def send(self, number: signal.Signals) -> bool:
        """Sends the signal. Returns whether the process was still there."""
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def hold(pids: list[int]) -> list[Victim]:
    """The processes of `pids` that still run."""
    held = []
    for pid in pids:
        try:
            held.append(Victim(pid))
        except ProcessLookupError:
            continue
    return held


def with_descendants(pid: int) -> list[int]:
    """`pid` and all that descends from it, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            parent = int(stat.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for process in found:
        found += children.get(process, [])
    return found


def is_marked(pid: int, run_id: str) -> bool:
    """Returns whether a process belongs to a run. False for a zombie."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    return f"{MARK}={run_id}".encode() in environment.split(b"\0")


def marked(run_id: str) -> list[int]:
    """The processes of a run."""
    found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [pid for pid in found if is_marked(pid, run_id)]


def sweep(run_id: str) -> bool:
    """Sends SIGKILL to all processes of a run, stopped ones included, until none is left. False
    when some do not end."""
    for _ in range(SWEEPS_MAX):
        pids = marked(run_id)
        if not pids:
            return True
        for victim in hold(pids):
            with victim:
                if is_marked(victim.pid, run_id):
                    victim.send(signal.SIGKILL)
        time.sleep(SWEEP_PAUSE_S)
    return False
