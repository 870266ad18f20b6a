"""Reports of the processes of a run on event loops that stood still: how long code takes is what
the simulation cannot see."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r'loop_stood_still still_s=([0-9.]+) cpu_s=([0-9.]+) where="(.*)"')


class Stall(NamedTuple):
    process: str
    still_s: float
    cpu_s: float
    """The part of it that was work; the rest is waiting, also for other processes of the machine.
    """
    where: str


def stalls_in(process: str, lines: Iterable[str]) -> Iterator[Stall]:
    for line in lines:
        matched = _LINE.search(line)
        if matched is not None:
            yield Stall(process, float(matched[1]), float(matched[2]), matched[3])


def stalls_of(logs: Path) -> list[Stall]:
    """All that the log files of rayq in Ray's directory of logs tell, the longest first."""
    found: list[Stall] = []
    for path in sorted(logs.glob("rayq-*.log*")):
        with path.open(errors="replace") as lines:
            found += stalls_in(path.name.partition(".log")[0], lines)
    return sorted(found, key=lambda stall: -stall.still_s)
