"""What a set of processes uses: CPU time, unique memory, descriptors."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from benchmarks.machine import unique_memory_mb

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What the processes use together."""

    processes: int
    cpu_percent: float
    """Of one core, over the time that was watched."""
    unique_mb: float
    descriptors: int
    threads: int


def watch(groups: Mapping[str, Collection[int]], seconds: float) -> dict[str, Usage]:
    """Watches groups of processes, all of them for so long, and tells what each group uses. A
    process that starts or ends meanwhile is left out."""
    before_s = {name: _cpu_s(pids) for name, pids in groups.items()}
    started_s = time.monotonic()
    time.sleep(seconds)
    after_s = {name: _cpu_s(pids) for name, pids in groups.items()}
    took_s = time.monotonic() - started_s
    return {name: _usage(before_s[name], after_s[name], took_s) for name in groups}


def _usage(before_s: dict[int, float], after_s: dict[int, float], took_s: float) -> Usage:
    used_s = sum(after_s[pid] - before_s[pid] for pid in after_s)
    return Usage(
        processes=len(after_s),
        cpu_percent=100 * used_s / took_s,
        unique_mb=sum(unique_memory_mb(pid) for pid in after_s),
        descriptors=sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in after_s),
        threads=sum(len(os.listdir(f"/proc/{pid}/task")) for pid in after_s),
    )


def _cpu_s(pids: Collection[int]) -> dict[int, float]:
    """The CPU time of each process so far, without that of its children."""
    found = {}
    for pid in pids:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        fields = stat.rpartition(")")[2].split()
        found[pid] = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return found
