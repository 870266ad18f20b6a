"""Helpers of the tests on Ray: the processes behind a cluster's actors."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from ray._private import state


def actors_of(cluster_name: str) -> list[dict[str, Any]]:
    """The running actors of a cluster, as Ray describes them."""
    return [
        one
        for one in state.actors().values()
        if one["Name"].startswith(f"rayq:{cluster_name}:") and one["State"] == "ALIVE"
    ]


def actor_pid(name: str) -> int | None:
    """The pid of a running named actor; None while it does not run."""
    cluster_name = name.split(":")[1]
    pids: list[int] = [one["Pid"] for one in actors_of(cluster_name) if one["Name"] == name]
    return pids[0] if pids else None


def is_gone(pid: int) -> bool:
    try:
        return ") Z" in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def kill_all_below(pid: int) -> None:
    """Sends SIGKILL to a process and all its descendants, the process itself first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parent = int(stat.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    doomed = [pid]
    for one in doomed:
        doomed += children.get(one, [])
    for one in doomed:
        try:
            os.kill(one, signal.SIGKILL)
        except ProcessLookupError:
            continue
