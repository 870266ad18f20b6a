"""`python -m proving.chaos`: breaks a real cluster for minutes; exit code 1 unless all holds.

`--kinds` restricts the faults, `--json` writes the figures to a file as well. The seed chooses
kinds and victims; real processes behave differently each time.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import signal
import sys
from pathlib import Path
from types import FrameType

from rich.console import Console

from proving.chaos import hostile
from proving.chaos.faults import DRAWN
from proving.chaos.report import as_json, show
from proving.chaos.run import RECORDS_PER_S, Plan, run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m proving.chaos", description="Break a real cluster on this machine."
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rate", type=int, default=RECORDS_PER_S, help="records per second")
    parser.add_argument(
        "--kinds", default=",".join(DRAWN), help="of faults, with commas; default: all"
    )
    parser.add_argument(
        "--leniency",
        type=float,
        default=1.0,
        help="multiplies how long writes may pause, for machines that others use as well",
    )
    parser.add_argument(
        "--transactions",
        action="store_true",
        help="clients with transactions beside the load, which are killed and hang as well",
    )
    parser.add_argument(
        "--queues",
        action="store_true",
        help="queues beside the load, whose workers are killed and hang as well",
    )
    parser.add_argument(
        "--principals",
        action="store_true",
        help="clients log in as principals; beside them some whose rights are revoked and given "
        "back",
    )
    parser.add_argument(
        "--partitions-beside",
        type=int,
        default=0,
        help="number of further partitions, which are written to now and then",
    )
    parser.add_argument(
        "--hostile",
        action="store_true",
        help="no faults: hostile clients beside honest ones, every other minute",
    )
    options = parser.parse_args(arguments)
    names = options.kinds.split(",")
    if unknown := set(names).difference(DRAWN):
        parser.error(f"no kinds: {', '.join(unknown)}; there are {', '.join(DRAWN)}")
    kinds = [kind for kind in DRAWN if kind in names]
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console(file=sys.stdout)
    console.print(f"seed {options.seed}", highlight=False)
    if options.hostile:
        return _run_hostile(options.minutes, options.seed, options.leniency, console)
    plan = Plan(
        options.minutes,
        options.seed,
        kinds,
        options.rate,
        options.leniency,
        options.transactions,
        options.queues,
        options.principals,
        options.partitions_beside,
    )
    try:
        # Ray prints much on stdout about each process that dies.
        with contextlib.redirect_stdout(io.StringIO()):
            result = run(plan, lambda line: console.print(line, highlight=False, markup=False))
    except KeyboardInterrupt:
        console.print("Interrupted.")
        return 130
    show(result, console)
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(result), indent=2) + "\n")
    return 0 if result.holds else 1


def _run_hostile(minutes: float, seed: int, leniency: float, console: Console) -> int:
    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            outcome = hostile.run(minutes, seed, say, leniency)
    except KeyboardInterrupt:
        say("Interrupted.")
        return 130
    for line in hostile.lines(outcome):
        say(line)
    return 0 if outcome.holds else 1


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """SIGTERM tidies up as Ctrl-C does."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
