"""The machine's own figures: what it is, its disk without rayq, how busy its cores are."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

MIB = 1024**2


def describe() -> str:
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3
    return (
        f"{os.cpu_count()} cores ({model}), {memory_gib:.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}, Ray {ray.__version__}"
    )


def sequential_write_mb_s(path: Path, size_mib: int = 512) -> float:
    """The rate of 1 MiB writes into one file, with one fdatasync at the end. The file stays.

    On a virtual machine the rate of a fresh file is often that at which the hypervisor hands out
    memory for the page cache, not the disk's: writing the same file again at once tells the two
    apart. rayq's own writes pay for fresh pages too, so compare them with a fresh file. Keep the
    files until the comparison is over, or it runs on the pages that they gave back.
    """
    chunk = os.urandom(MIB)
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    try:
        started_s = time.perf_counter()
        for _ in range(size_mib):
            os.write(file, chunk)
        os.fdatasync(file)
        return size_mib * MIB / 1e6 / (time.perf_counter() - started_s)
    finally:
        os.close(file)


def write_and_sync_ms(directory: Path, size_bytes: int, count: int) -> list[float]:
    """The milliseconds of each append of `size_bytes` with its fdatasync."""
    chunk = os.urandom(size_bytes)
    path = directory / "raw-sync"
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    try:
        times_ms = []
        for _ in range(count):
            started_s = time.perf_counter()
            os.write(file, chunk)
            os.fdatasync(file)
            times_ms.append((time.perf_counter() - started_s) * 1000)
        return times_ms
    finally:
        os.close(file)
        path.unlink()


class CpuShare:
    """The share of all cores that was busy, 0 to 1; iowait counts as idle."""

    busy: float = 0.0


@contextmanager
def cpu_share() -> Iterator[CpuShare]:
    result = CpuShare()
    before = _cpu_ticks()
    yield result
    after = _cpu_ticks()
    total = sum(after) - sum(before)
    idle = after[3] + after[4] - before[3] - before[4]
    result.busy = 1 - idle / total if total else 0.0


def _cpu_ticks() -> list[int]:
    # user nice system idle iowait irq softirq steal; guest time is part of user already.
    return [int(tick) for tick in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]


def unique_memory_mb(pid: int) -> float:
    """USS: the memory that would be free again if the process ended."""
    private_kib = sum(
        int(line.split()[1])
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        if line.startswith(("Private_Clean:", "Private_Dirty:"))
    )
    return private_kib * 1024 / 1e6
