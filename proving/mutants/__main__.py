"""`make mutants`: plants small mistakes in the servers' code, and lists those that go unnoticed.

    python -m proving.mutants --modules rayq/core rayq/storage/log.py --sample 50 --seed 1

A run that was interrupted resumes where it stopped; `--report` only prints the verdicts so far.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

# Imported once here, since otherwise each child would import them.
import hypothesis  # noqa: F401
import msgspec  # noqa: F401

from proving.mutants import child, report
from proving.mutants.catalogue import MODULES, ROOT, Mutant, files, mutants_of, sample
from proving.mutants.checks import FLOORS
from proving.mutants.judge import judge, judge_by_tests_at_hand, known_checks
from proving.mutants.operators import OPERATORS
from proving.mutants.state import State, Verdict, equivalents


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m proving.mutants", description=__doc__)
    parser.add_argument("--modules", nargs="+", default=MODULES, help="folders, files or modules")
    parser.add_argument("--sample", type=int, help="how many of their mutants; default: all")
    parser.add_argument("--seed", type=int, default=1, help="chooses the sample; default: 1")
    parser.add_argument(
        "--floors",
        nargs="*",
        default=FLOORS,
        help=f"of tests, or files as local/test_FILE.py; default: {' '.join(FLOORS)}",
    )
    parser.add_argument(
        "--operators", nargs="+", choices=[*OPERATORS], default=[*OPERATORS], help="default: all"
    )
    parser.add_argument("--seeds", type=int, default=2, help="of each scenario; default: 2")
    parser.add_argument("--again", action="store_true", help="judge what survived once more")
    parser.add_argument("--report", action="store_true", help="judge nothing")
    options = parser.parse_args(arguments)
    if os.environ.get("PYTHONHASHSEED") != "0":
        # A seed of the simulation repeats its run only under the same hash seed.
        command = [sys.executable, "-m", "proving.mutants", *(arguments or sys.argv[1:])]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        mutants = [
            mutant
            for path in files(options.modules)
            for mutant in mutants_of(path, (ROOT / path).read_text())
            if mutant.operator in options.operators
        ]
        chosen = sample(mutants, options.sample, options.seed)
        state = State()
        if not options.report:
            with state.held():
                _judge_all(chosen, state, options)
    except (RuntimeError, ValueError) as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nEnded; the same command resumes from here.")
    known = equivalents()
    verdicts = {
        key: verdict for key, verdict in state.verdicts().items() if key not in known
    }
    print("\n".join(report.survivors(chosen, verdicts)))
    print(report.table(report.rows(chosen, verdicts, known)))
    return 0


def _judge_all(chosen: list[Mutant], state: State, options: argparse.Namespace) -> None:
    known = state.verdicts()
    equal = equivalents()

    def is_due(mutant: Mutant) -> bool:
        verdict = known.get(mutant.key)
        return mutant.key not in equal and (
            verdict is None or (options.again and verdict.floor is None)
        )

    due = [mutant for mutant in chosen if is_due(mutant)]
    if not due:
        return
    with child.scratch_directory(state.directory) as scratch:
        checks = known_checks(state, scratch, options.floors, options.seeds)
        out = os.dup(1)  # What runs the tests has another one.

        def tell(mutant: Mutant, verdict: Verdict) -> None:
            state.add(verdict)
            line = f"{len(judged) + 1} of {len(due)}: {_line(mutant, verdict)}\n"
            judged.append(mutant)
            os.write(out, line.encode())

        judged: list[Mutant] = []
        judge_by_tests_at_hand(due, checks, scratch, tell)
        of_all = state.verdicts()
        judged.extend(mutant for mutant in due if of_all.get(mutant.key) != known.get(mutant.key))
        for mutant in due:
            if mutant in judged:
                continue
            try:
                tell(mutant, judge(mutant, checks, scratch))
            except LookupError as error:  # The code was edited meanwhile.
                print(error, flush=True)


def _line(mutant: Mutant, verdict: Verdict) -> str:
    if verdict.floor is not None:
        return f"killed by the {verdict.floor}: {mutant.key} ({verdict.how})"
    return f"SURVIVED {verdict.tests} tests and {verdict.seeds} seeds: {mutant.key}"


if __name__ == "__main__":
    sys.exit(main())
