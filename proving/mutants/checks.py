"""The checks of the code: tests of the cheap floors and seeds of the simulation, and which
functions each of them runs.

Tests and seeds run in the calling process, which must not have imported rayq.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from proving.mutants.catalogue import ROOT

FLOORS = ("pure", "storage", "wire", "simulated")
MARKS = "not slow and not thorough and not hunt"
SCENARIOS = ("ordinary", "groups", "moves", "group-moves")


@dataclass(frozen=True)
class Check:
    """A test by its node id, or a seed as `SCENARIO:SEED`. `functions` are those of rayq that it
    runs, as `path:function`. The seconds (of CPU, and by the wall clock) are those that it took
    while the functions were recorded."""

    name: str
    cpu_s: float
    wall_s: float
    functions: frozenset[str]

    @property
    def is_seed(self) -> bool:
        return not self.name.startswith("tests/")


class Tracer:
    """Notes which functions of rayq run, in all threads."""

    def __init__(self, root: Path = ROOT) -> None:
        self._codes: set[CodeType] = set()
        self._began_s = 0.0, 0.0
        self._under = f"{root}/"
        self._rayq = f"{root}/rayq/"

    def start(self) -> None:
        self._codes = set()
        self._began_s = time.process_time(), time.monotonic()
        threading.settrace(self._called)
        sys.settrace(self._called)

    def stop(self, name: str) -> dict[str, Any]:
        """The functions that ran since the start, as the fields of a Check."""
        sys.settrace(None)
        threading.settrace(None)
        found = {
            f"{code.co_filename.removeprefix(self._under)}:{name_of(code)}"
            for code in self._codes.copy()
            if code.co_filename.startswith(self._rayq)
        }
        cpu_s, wall_s = self._began_s
        return {
            "name": name,
            "cpu_s": time.process_time() - cpu_s,
            "wall_s": time.monotonic() - wall_s,
            "functions": sorted(found),
        }

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        self._codes.add(frame.f_code)


def name_of(code: CodeType) -> str:
    """The function as the catalogue names it: a comprehension belongs to the function around it."""
    name = code.co_qualname.replace(".<locals>", "")
    while name.rpartition(".")[2].startswith("<") and "." in name:
        name = name.rpartition(".")[0]
    return "<module>" if name.startswith("<") else name


def watch_tests(floor: str, directory: Path) -> list[dict[str, Any]]:
    """Runs the tests of a floor, and returns for each test what it runs. A test that fails here is
    of no use: it has no functions. Raises RuntimeError when the tests cannot be run."""
    watcher = _Watcher()
    if _pytest(directory, [f"tests/{floor}"], watcher) not in (0, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError("The tests cannot be run.")
    return watcher.found


def watch_seed(name: str, directory: Path) -> list[dict[str, Any]]:
    """Runs one seed, and returns what it runs. Raises RuntimeError when the seed fails."""
    tracer = Tracer()
    tracer.start()
    problem = _run_seed(name)
    if problem is not None:
        raise RuntimeError(f"Without a mutant: {name}: {problem}")
    return [tracer.stop(name)]


def run_tests(directory: Path, names: Sequence[str]) -> str:
    """Runs these tests in their order until one fails. Returns the failure, or an empty text."""
    watcher = _Chooser(names)
    paths = sorted({name.partition("::")[0] for name in names})
    if _pytest(directory, paths, watcher, "-x") != 0 and not watcher.failed:
        return "the tests cannot be imported"
    return watcher.failed


def run_seeds(names: Sequence[str]) -> str:
    """Runs these seeds until one fails. Returns the seed and the failure, or an empty text."""
    for name in names:
        problem = _run_seed(name)
        if problem is not None:
            return f"{name}: {problem}"
    return ""


def digest(*folders: str, root: Path = ROOT) -> str:
    """A digest of all Python files in the folders: while it is the same, checks run the functions
    that they ran before."""
    total = hashlib.sha256()
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            total.update(path.read_bytes())
    return total.hexdigest()[:16]


def _run_seed(name: str) -> str | None:
    from proving.simulation.run import quiet, run_seed

    scenario, _, seed = name.partition(":")
    quiet()
    outcome = run_seed(int(seed), scenario)
    if not outcome.problems:
        return None
    lines = outcome.problems[0].strip().splitlines()
    return next((line for line in lines if "Error: " in line), lines[-1])[:200]


def _pytest(directory: Path, paths: Sequence[str], plugin: object, *options: str) -> int:
    arguments = [
        *("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header"),
        *("--hypothesis-seed=0", "-m", MARKS, "-o", "timeout=0", "--tb=line"),
        "--assert=plain",  # Or pytest imports rayq in its own way, from its files.
        *("--basetemp", str(directory / "pytest"), "--rootdir", str(ROOT)),
        *options,
    ]
    return int(pytest.main([*arguments, *(str(ROOT / path) for path in paths)], [plugin]))


class _Failures:
    def __init__(self) -> None:
        self.failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


class _Watcher(_Failures):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, Any]] = []
        self._tracer = Tracer()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._tracer.start()
        try:
            return (yield)
        finally:
            found = self._tracer.stop(item.nodeid)
            if self.failed:
                found["functions"], self.failed = [], ""
                self.found.append(found)
            elif found["functions"]:
                self.found.append(found)


class _Chooser(_Failures):
    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._order = {name: place for place, name in enumerate(names)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._order),
            key=lambda item: self._order[item.nodeid],
        )
