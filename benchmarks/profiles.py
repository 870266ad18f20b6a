"""Where processes spend their time, by py-spy: shown where a figure is bound by the cores."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

SAMPLES_PER_S = 100
TOP = 6
WAITS = {
    "Condition.wait",
    "Worker.main_loop",
    "Worker.print_logs",
    "_worker",
    "listen_error_messages",
}
"""Threads that wait in C code: py-spy takes them for busy on a crowded machine."""
EVENT_LOOP = "Thread.run"
"""On Ray an actor's event loop runs in a thread of its own, and uvloop has no Python frames."""


def while_running(
    work: Callable[[], None], pids: Mapping[str, int], directory: Path, seconds: int
) -> list[str]:
    """Samples the processes for so long, beside `work`. Returns a line for each process with the
    functions that took the most time.

    The whole profiles, one stack a line with its count, stay in `directory` as `<name>.folded`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    py_spy = Path(sys.executable).with_name("py-spy")
    recorders = {}
    for name, pid in pids.items():
        # Nonblocking: to stop 30 threads for each sample would slow down the measured processes.
        options = [f"--pid={pid}", f"--duration={seconds}", f"--rate={SAMPLES_PER_S}"]
        options.append("--nonblocking")
        output = ["--format=raw", f"--output={directory / name}.folded"]
        recorders[name] = subprocess.Popen(
            [py_spy, "record", *options, *output],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    before_s = {name: cpu_s(pid) for name, pid in pids.items()}
    started_s = time.monotonic()
    work()
    took_s = time.monotonic() - started_s
    busy = {name: (cpu_s(pid) - before_s[name]) / took_s for name, pid in pids.items()}
    lines = []
    for name, recorder in recorders.items():
        _, complaint = recorder.communicate(timeout=seconds + 30)
        profile = directory / f"{name}.folded"
        line = f"{name}: {100 * busy[name]:.0f} % of a core; "
        if recorder.returncode != 0 or not profile.exists():
            lines.append(f"{line}no profile: {complaint.strip()}")
        else:
            lines.append(line + top_functions(profile.read_text()))
    return lines


def top_functions(folded: str) -> str:
    """`function (file) share, ...` of the samples in which a thread did something."""
    by_function: Counter[str] = Counter()
    for line in folded.splitlines():
        stack, count = line.rsplit(" ", 1)
        function, _, place = stack.split(";")[-1].rstrip(")").partition(" (")
        if function in WAITS:
            continue
        file = Path(place.rsplit(":", 1)[0]).name
        name = "uvloop and sockets" if function == EVENT_LOOP else f"{function} ({file})"
        by_function[name] += int(count)
    total = by_function.total()
    top = by_function.most_common(TOP)
    return ", ".join(f"{name} {100 * count / total:.0f} %" for name, count in top)


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
