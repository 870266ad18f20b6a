"""Where processes spend their time, by py-spy: shown where a figure is bound by the cores."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

SAMPLES_PER_S = 200
TOP = 5


def while_running(
    work: Callable[[], None], pids: Mapping[str, int], directory: Path, seconds: int
) -> list[str]:
    """Samples the processes for so long, beside `work`; a line for each: the functions on top.

    The whole profiles, one stack a line with its count, stay in `directory` as `<name>.folded`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    py_spy = Path(sys.executable).with_name("py-spy")
    recorders = {}
    for name, pid in pids.items():
        options = [f"--pid={pid}", f"--duration={seconds}", f"--rate={SAMPLES_PER_S}"]
        output = ["--format=raw", f"--output={directory / name}.folded"]
        recorders[name] = subprocess.Popen(
            [py_spy, "record", *options, *output],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    work()
    lines = []
    for name, recorder in recorders.items():
        _, complaint = recorder.communicate(timeout=seconds + 30)
        profile = directory / f"{name}.folded"
        if recorder.returncode != 0 or not profile.exists():
            lines.append(f"{name}: no profile: {complaint.strip().splitlines()[-1:]}")
        else:
            lines.append(f"{name}: {top_functions(profile.read_text(), seconds)}")
    return lines


def top_functions(folded: str, seconds: int) -> str:
    """`function (file) share of the time, ...`; a process waiting counts for nothing."""
    by_function: Counter[str] = Counter()
    for line in folded.splitlines():
        stack, count = line.rsplit(" ", 1)
        by_function[_without_line(stack.split(";")[-1])] += int(count)
    total = SAMPLES_PER_S * seconds
    busy = sum(by_function.values()) / total
    top = [f"{name} {100 * count / total:.0f} %" for name, count in by_function.most_common(TOP)]
    return f"busy {100 * busy:.0f} % of a core: {', '.join(top)}"


def _without_line(frame: str) -> str:
    """`append (rayq/storage/log.py:120)` without the line number, its path shortened."""
    function, _, place = frame.rstrip(")").partition(" (")
    path = Path(place.rsplit(":", 1)[0])
    return f"{function} ({path.name})" if place else function
