"""`python -m proving.simulation SEEDS` runs seeds on all cores: `7`, `0:200` (half open), or
several of these with commas.

Each failing seed is printed with the command that replays it. The last line is the summary; the
exit code is 1 when a seed failed. `--verbose` prints rayq's own log as well, for one seed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

from proving.simulation import steering
from proving.simulation.mutations import MUTATIONS
from proving.simulation.planted import plant
from proving.simulation.run import SCENARIOS, Outcome, quiet, run_seed, run_watched
from proving.simulation.situations import SITUATIONS
from proving.simulation.workload_swarm import FEATURES


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m proving.simulation", description="Run seeds of the simulation."
    )
    parser.add_argument(
        "seeds", help="one seed, FIRST:END (END is not run), or several of such with commas"
    )
    parser.add_argument("--scenario", choices=SCENARIOS, default="ordinary")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--mutation", help="plant this bug, and stop at the first seed to find it")
    parser.add_argument(
        "--situations", action="store_true", help="print how many seeds met which situation"
    )
    parser.add_argument(
        "--steer", action="store_true", help="prefer what few seeds of swarm have met (watches)"
    )
    parser.add_argument(
        "--with", dest="features", help="clients, faults and points of swarm, with commas"
    )
    parser.add_argument("--verbose", action="store_true", help="print rayq's log too")
    options = parser.parse_args(arguments)
    seeds = _seeds(options.seeds)
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Sets of strings have the same order in every run only under one hash seed.
        command = [sys.executable, "-m", "proving.simulation", *(arguments or sys.argv[1:])]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})
    if options.mutation is not None:
        return _hunt(options.mutation, seeds, options.processes)
    features = None
    if options.features is not None:
        features = frozenset(options.features.split(","))
        if features - FEATURES:
            parser.error(f"{sorted(features - FEATURES)} are none of {sorted(FEATURES)}.")
    if (options.steer or features) and options.scenario != "swarm":
        parser.error("--steer and --with are for --scenario swarm.")
    run = partial(
        run_watched if options.situations else run_seed,
        scenario=options.scenario,
        features=features,
    )
    met: Counter[str] = Counter()
    started_s = time.monotonic()
    failed: list[int] = []
    records = faults = events = 0
    cpu_s = 0.0
    runs = _runs(len(seeds), options.processes, options.verbose)
    for outcome in steering.outcomes(seeds, runs) if options.steer else runs(run, seeds):
        records += outcome.acknowledged
        faults += len(outcome.faults)
        events += outcome.events
        cpu_s += outcome.cpu_s
        met.update(outcome.situations.keys())
        if outcome.problems:
            failed.append(outcome.seed)
            _print_failure(outcome)
        elif len(seeds) <= 20:
            print(_line(outcome), flush=True)
    taken_s = time.monotonic() - started_s
    if options.situations or options.steer:
        _print_situations(met)
    result = f"FAILED {sorted(failed)}" if failed else "all passed"
    print(
        f"{len(seeds)} seeds ({options.seeds}) in {taken_s:.0f} s: {records} records acknowledged, "
        f"{faults} faults; {events} events in {cpu_s:.1f} CPU seconds, {events / cpu_s:.0f} "
        f"in one; {result}"
    )
    return 1 if failed else 0


def _hunt(mutation: str, seeds: list[int], processes: int) -> int:
    """Looks for a planted bug in its scenario; exit code 1 when it was found, as for any
    failure."""
    run = partial(run_seed, scenario=MUTATIONS[mutation].scenario)
    pool = None
    if len(seeds) == 1 or processes == 1:
        plant(mutation)
        outcomes: Iterable[Outcome] = map(run, seeds)
    else:
        context = multiprocessing.get_context("forkserver")
        pool = concurrent.futures.ProcessPoolExecutor(
            processes, mp_context=context, initializer=plant, initargs=(mutation,)
        )
        outcomes = pool.map(run, seeds)
    try:
        for count, outcome in enumerate(outcomes, 1):
            if outcome.problems:
                lines = outcome.problems[0].strip().splitlines()
                found = next((line for line in lines if "Error: " in line), lines[-1])
                print(f"{mutation}: found by seed {outcome.seed}, after {count} seeds: {found}")
                return 1
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
    print(f"{mutation}: not found by {len(seeds)} seeds")
    return 0


def _seeds(text: str) -> list[int]:
    seeds: list[int] = []
    for part in text.split(","):
        first, _, end = part.partition(":")
        seeds += range(int(first), int(end) if end else int(first) + 1)
    return seeds


def _runs(count: int, processes: int, verbose: bool) -> Callable[..., Iterable[Outcome]]:
    """`map`, here or on all cores."""
    if count == 1 or processes == 1:
        if verbose:
            logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
        else:
            quiet()
        return map
    context = multiprocessing.get_context("forkserver")
    pool = concurrent.futures.ProcessPoolExecutor(processes, mp_context=context, initializer=quiet)
    return pool.map


def _print_situations(met: Counter[str]) -> None:
    """Prints the situations. Those that few seeds met come last."""
    for name in sorted(SITUATIONS, key=lambda name: -met[name]):
        print(f"{met[name]:6} {name}: {SITUATIONS[name]}")


def _line(outcome: Outcome) -> str:
    moved = ""
    if outcome.moves or outcome.cancels:
        moved = f"{outcome.moves} moves, {outcome.cancels} cancelled, "
    return (
        f"seed {outcome.seed}: {outcome.acknowledged} acknowledged, {outcome.unknown} unknown, "
        f"{outcome.failed} failed, {outcome.polled} polled, {len(outcome.faults)} faults, "
        f"{outcome.elections} elections, {moved}{outcome.virtual_s:.0f} virtual s, "
        f"{outcome.events} events, trace {outcome.trace}"
    )


def _print_failure(outcome: Outcome) -> None:
    print(f"\n{_line(outcome)}\nFAILED. Its faults:")
    for fault in outcome.faults:
        print(f"  {fault}")
    for problem in outcome.problems:
        print(problem)
    option = "" if outcome.scenario == "ordinary" else f"--scenario {outcome.scenario} "
    if outcome.features is not None:
        option += f"--with {','.join(sorted(outcome.features))} "
    print(f"Replay: python -m proving.simulation {option}{outcome.seed}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
