"""Judges one mutant: first by the tests that run its function, then by the seeds that do."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from proving.mutants import checks, child
from proving.mutants.catalogue import ROOT, Mutant, mutated
from proving.mutants.checks import Check
from proving.mutants.planting import plant
from proving.mutants.state import State, Verdict

FOR_EVER_S = 1e6
TESTS_CPU_S_MAX = 30.0
"""The CPU time of the tests that judge a mutant: the cheapest ones that run its function. The seeds
follow anyway."""


def known_checks(
    state: State, scratch: Path, floors: Sequence[str], seeds: int
) -> list[Check]:
    """The tests of these floors, and the first seeds of each scenario. Those that are not known yet
    are run now. A test that fails on the unchanged code is left out. Raises RuntimeError when a
    seed fails on it."""
    found: list[dict[str, Any]] = []

    def watched(what: str, function: Callable[[Path], object]) -> list[dict[str, Any]]:
        print(f"Watching what {what} runs.", flush=True)
        ended = child.run(function, scratch=scratch, cpu_limit_s=1800, limit_s=3600)
        if ended.returned is None:
            raise RuntimeError(f"The code as it stands does not pass: {ended.why}")
        return list(ended.returned)

    def watch_tests(paths: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
        what = paths[0] if len(paths) == 1 else f"each of {len(paths)} files of tests"
        of_file: dict[str, list[dict[str, Any]]] = {}
        for message in watched(what, partial(checks.watch_tests, paths)):
            of_file.setdefault(message["name"].partition("::")[0], []).append(message)
        return of_file

    def watch_seeds(names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
        return {name: watched(name, partial(checks.watch_seed, name)) for name in names}

    code = checks.digest("rayq")
    for floor in floors:
        found.extend(state.checks(checks.digests_of_tests(floor, code), watch_tests))
    seeds_of_all = [f"{scenario}:{seed}" for scenario in checks.SCENARIOS for seed in range(seeds)]
    found.extend(state.checks(dict.fromkeys(seeds_of_all, code), watch_seeds))
    for check in found:
        if not check["functions"]:
            print(f"Left out, since it fails without a mutant: {check['name']}", flush=True)
    return [
        Check(check["name"], check["cpu_s"], check["wall_s"], frozenset(check["functions"]))
        for check in found
    ]


def reaching(mutant: Mutant, known: Iterable[Check]) -> list[Check]:
    """The checks that run a mutant: the cheapest tests first, then seeds in their order. Code that
    runs at the import of a module counts as run by all checks that run any function of the module,
    or by all checks where there are none."""
    known = list(known)
    if mutant.is_in_function:
        found = [check for check in known if f"{mutant.path}:{mutant.function}" in check.functions]
    else:
        found = [
            check
            for check in known
            if any(f.startswith(f"{mutant.path}:") for f in check.functions)
        ]
        found = found or known
    tests: list[Check] = []
    cpu_s = 0.0
    for test in sorted(
        (check for check in found if not check.is_seed), key=lambda check: check.cpu_s
    ):
        cpu_s += test.cpu_s
        if tests and cpu_s > TESTS_CPU_S_MAX:
            break
        tests.append(test)
    return tests + [check for check in found if check.is_seed]


def judge_by_tests_at_hand(
    mutants: Iterable[Mutant],
    known: Sequence[Check],
    scratch: Path,
    tell: Callable[[Mutant, Verdict], None],
) -> None:
    """Judges the mutants whose function can be exchanged, each by its tests, and tells those that
    the tests kill or that no seed runs. All tests are imported once for all of them. Raises
    RuntimeError when the tests cannot be imported."""
    due = [mutant for mutant in mutants if mutant.is_in_function]
    reach = {mutant: reaching(mutant, known) for mutant in due}
    paths = sorted({check.file for found in reach.values() for check in found if not check.is_seed})

    def judge_all(ready: checks.Ready) -> None:
        for mutant, found in reach.items():
            tests = [check for check in found if not check.is_seed]
            seeds = len(found) - len(tests)
            try:
                tree = mutated(mutant, (ROOT / mutant.path).read_text())
            except LookupError:
                continue
            work = partial(_with_planted, mutant, tree, ready, [test.name for test in tests])
            ended = child.run(work, scratch=scratch, **_limits(tests)) if tests else None
            if ended is not None and ended.returned is None:
                how = ended.why
            elif ended is not None:
                how, is_planted = ended.returned
                if not is_planted:
                    continue
            else:
                how = ""
            if how or not seeds:
                floor = "tests" if how else None
                cpu_s = 0.0 if ended is None else round(ended.cpu_s, 2)
                tell(mutant, Verdict(mutant.key, floor, how, len(tests), seeds, cpu_s))

    if not due:
        return
    ended = child.run(
        lambda _directory: checks.with_tests_ready(paths, judge_all),
        scratch=scratch,
        cpu_limit_s=FOR_EVER_S,
        limit_s=FOR_EVER_S,
    )
    if not ended.returned:
        raise RuntimeError(f"The tests cannot be imported: {ended.why}")


def _limits(some: Sequence[Check]) -> dict[str, float]:
    # Mutants that hang take most of the time: 5 s are many times what the cheap tests need.
    limit_s = 5 + 4 * sum(check.cpu_s for check in some)
    # Other processes may use the CPU meanwhile, and some tests wait for real clocks.
    wall_s = 60 + 10 * limit_s + 3 * sum(check.wall_s for check in some)
    return {"cpu_limit_s": limit_s, "limit_s": wall_s}


def _with_planted(
    mutant: Mutant, tree: ast.Module, ready: checks.Ready, names: Sequence[str], _directory: Path
) -> tuple[str, bool]:
    """The failure, or an empty text, and whether the mutant was in place."""
    return (ready.run(names), True) if plant(mutant, tree) else ("", False)


def judge(mutant: Mutant, known: Iterable[Check], scratch: Path) -> Verdict:
    """Judges one mutant. Raises LookupError when the mutant's code has changed, RuntimeError when
    the checks run the code of the file instead."""
    tree = mutated(mutant, (ROOT / mutant.path).read_text())
    found = reaching(mutant, known)
    tests = [check for check in found if not check.is_seed]
    seeds = [check for check in found if check.is_seed]
    cpu_s = 0.0
    for floor, some in (("tests", tests), ("simulation", seeds)):
        if not some:
            continue
        names = [check.name for check in some]
        work = partial(_with_mutant, mutant.module, tree, floor, names)
        ended = child.run(work, scratch=scratch, **_limits(some))
        cpu_s += ended.cpu_s
        if ended.returned is None:
            how = ended.why
        else:
            how, is_planted = ended.returned
            if not is_planted:
                raise RuntimeError(f"{names[0]} imports {mutant.module} in a way of its own.")
        if how:
            return Verdict(mutant.key, floor, how, len(tests), len(seeds), round(cpu_s, 2))
    return Verdict(mutant.key, None, "", len(tests), len(seeds), round(cpu_s, 2))


def _with_mutant(
    module: str, tree: ast.Module, floor: str, names: Sequence[str], _directory: Path
) -> tuple[str, bool]:
    """The failure, or an empty text, and whether the mutant was in place."""
    child.import_instead(module, tree)
    run = checks.run_tests if floor == "tests" else checks.run_seeds
    return run(names), child.is_imported_instead(module)
