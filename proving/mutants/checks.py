"""The checks of the code: tests of the cheap floors and seeds of the simulation, and which
functions each of them runs.

Tests and seeds run in the calling process, which must not have imported rayq.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

from proving.mutants import child
from proving.mutants.catalogue import ROOT, name_inside

NOTE = "__ran__"
"""The name under which the code that is watched finds what to call."""
FLOORS = ("pure", "storage", "wire", "simulated")
MARKS = "not slow and not thorough and not hunt"
SCENARIOS = ("ordinary", "groups", "moves", "group-moves", "transactions", "tiered", "queues")


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
    def file(self) -> str:
        return self.name.partition("::")[0]

    @property
    def is_seed(self) -> bool:
        return not self.name.startswith("tests/")


class Watcher:
    """Notes which functions of rayq run, in all threads: each notes itself when it begins and in
    each pass of its loops, since a server's loop outlives the test that began it."""

    def __init__(self) -> None:
        self._ran: set[str] = set()
        self._began_s = 0.0, 0.0
        child.import_changed(_noting, {NOTE: self._note})

    def start(self) -> None:
        self._ran = set()
        self._began_s = time.process_time(), time.monotonic()

    def stop(self, name: str) -> dict[str, Any]:
        """The functions that ran since the start, as the fields of a Check."""
        cpu_s, wall_s = self._began_s
        return {
            "name": name,
            "cpu_s": time.process_time() - cpu_s,
            "wall_s": time.monotonic() - wall_s,
            "functions": sorted(self._ran.copy()),
        }

    def _note(self, function: str) -> None:
        self._ran.add(function)


def _noting(module: str, path: str) -> ast.Module | None:
    if module.partition(".")[0] != "rayq":
        return None
    file = Path(path)
    return noting(str(file.relative_to(ROOT)), ast.parse(file.read_text()))


def noting(path: str, tree: ast.Module) -> ast.Module:
    """The same code, whose functions call `NOTE` with `path:function`."""
    _note_below(path, tree, "<module>")
    return ast.fix_missing_locations(tree)


def _note_below(path: str, node: ast.AST, function: str) -> None:
    for child_node in ast.iter_child_nodes(node):
        inner = name_inside(function, child_node)
        _note_below(path, child_node, inner)
        match child_node:
            case ast.FunctionDef(body=body) | ast.AsyncFunctionDef(body=body):
                place = 0 if ast.get_docstring(child_node) is None else 1
            case ast.While(body=body) | ast.For(body=body) | ast.AsyncFor(body=body):
                place = 0
            case _:
                continue
        if not inner.endswith(">"):
            call = ast.Call(ast.Name(NOTE, ast.Load()), [ast.Constant(f"{path}:{inner}")], [])
            body.insert(place, ast.Expr(call))


def watch_tests(paths: Sequence[str], _directory: Path) -> list[dict[str, Any]]:
    """Runs the tests of these files, and returns for each test what it runs. A test that fails here
    is of no use: it has no functions. Raises RuntimeError when the tests cannot be run."""
    watcher = _TestWatcher()
    if _pytest(paths, watcher) not in (0, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError("The tests cannot be run.")
    return watcher.found


def watch_seed(name: str, directory: Path) -> list[dict[str, Any]]:
    """Runs one seed, and returns what it runs. Raises RuntimeError when the seed fails."""
    watcher = Watcher()
    watcher.start()
    problem = _run_seed(name)
    if problem is not None:
        raise RuntimeError(f"Without a mutant: {name}: {problem}")
    return [watcher.stop(name)]


def run_tests(names: Sequence[str]) -> str:
    """Runs these tests in their order until one fails. Returns the failure, or an empty text."""
    watcher = _Chooser(names)
    paths = sorted({name.partition("::")[0] for name in names})
    if _pytest(paths, watcher, "-x") != 0 and not watcher.failed:
        return "the tests cannot be imported"
    return watcher.failed


def with_tests_ready(paths: Sequence[str], work: Callable[[Ready], None]) -> bool:
    """Imports the tests of these files, and calls `work` once, with them. False where they cannot
    be imported."""
    return _pytest(paths, Ready(work), "-s") in (0, pytest.ExitCode.NO_TESTS_COLLECTED)


def run_seeds(names: Sequence[str]) -> str:
    """Runs these seeds until one fails. Returns the seed and the failure, or an empty text."""
    for name in names:
        problem = _run_seed(name)
        if problem is not None:
            return f"{name}: {problem}"
    return ""


def digest(folder: str, root: Path = ROOT) -> str:
    """A digest of all Python files in the folder: while it is the same, checks run the functions
    that they ran before."""
    return _digest(sorted((root / folder).rglob("*.py")))


def digests_of_tests(floor: str, code: str, root: Path = ROOT) -> dict[str, str]:
    """A digest for each file of tests of a floor, or for the one of `FLOOR/test_FILE.py`: of the
    code, of that file, and of what the tests of the floor share. Raises ValueError where there are
    no such tests."""
    folder, _, name = floor.partition("/")
    files = sorted((root / "tests" / folder).glob("*.py"))
    tests = [file for file in files if file.name.startswith("test_")]
    shared = _digest(file for file in files if file not in tests)
    found = {
        str(file.relative_to(root)): f"{code} {shared} {_digest([file])}"
        for file in tests
        if name in ("", file.name)
    }
    if not found:
        raise ValueError(f"There are no tests of {floor}.")
    return found


def _digest(paths: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for path in paths:
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


def _pytest(paths: Sequence[str], plugin: object, *options: str) -> int:
    arguments = [
        *("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header"),
        *("--hypothesis-seed=0", "-m", MARKS, "-o", "timeout=0", "--tb=line"),
        "--assert=plain",  # Or pytest imports rayq in its own way, from its files.
        *("--rootdir", str(ROOT)),
        *options,
    ]
    return int(pytest.main([*arguments, *(str(ROOT / path) for path in paths)], [plugin]))


class _Failures:
    def __init__(self) -> None:
        self.failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


class _TestWatcher(_Failures):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, Any]] = []
        self._watcher = Watcher()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._watcher.start()
        try:
            return (yield)
        finally:
            found = self._watcher.stop(item.nodeid)
            if self.failed:
                found["functions"], self.failed = [], ""
                self.found.append(found)
            elif found["functions"]:
                self.found.append(found)


class _Judging(_Failures):
    def pytest_sessionstart(self) -> None:
        # That an example fails is enough: a smaller one would take many more runs.
        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("judging", settings(), phases=phases)
        settings.load_profile("judging")


class _Chooser(_Judging):
    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._order = {name: place for place, name in enumerate(names)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._order),
            key=lambda item: self._order[item.nodeid],
        )


class Ready(_Judging):
    """Tests that were imported once, to be run in copies of this process."""

    def __init__(self, work: Callable[[Ready], None]) -> None:
        super().__init__()
        self._work = work
        self._items: dict[str, pytest.Item] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._items = {item.nodeid: item for item in session.items}
        self._work(self)
        return True

    def run(self, names: Sequence[str]) -> str:
        """Runs these tests until one fails, as `run_tests` does; only in a copy."""
        items = [self._items[name] for name in names if name in self._items]
        for item, following in itertools.zip_longest(items, items[1:]):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                break
        return self.failed
