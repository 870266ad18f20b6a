"""The table: how many mutants of each module were killed, by which checks, and which survived."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from proving.mutants.catalogue import Mutant
from proving.mutants.state import Verdict


@dataclass
class Row:
    """The counts of one module. A mutant that hangs or crashes also counts for the floor that
    killed it."""

    name: str
    mutants: int = 0
    judged: int = 0
    tests: int = 0
    simulation: int = 0
    hung: int = 0
    survived: int = 0
    never_run: int = 0
    equivalent: int = 0

    def add(self, other: Row) -> None:
        for field in Row.__dataclass_fields__:
            if field != "name":
                setattr(self, field, getattr(self, field) + getattr(other, field))


def rows(
    mutants: Iterable[Mutant], verdicts: Mapping[str, Verdict], equivalents: Mapping[str, str]
) -> list[Row]:
    """One row for each module with a verdict, and one for their sum."""
    found: dict[str, Row] = {}
    for mutant in mutants:
        row = found.setdefault(mutant.path, Row(mutant.path))
        row.mutants += 1
        verdict = verdicts.get(mutant.key)
        if mutant.key in equivalents:
            row.equivalent += 1
        elif verdict is not None:
            row.judged += 1
            row.tests += verdict.floor == "tests"
            row.simulation += verdict.floor == "simulation"
            row.hung += verdict.how == "hang"
            row.survived += verdict.floor is None
            row.never_run += verdict.floor is None and verdict.tests + verdict.seeds == 0
    total = Row("all")
    for row in found.values():
        total.add(row)
    return [*(row for row in found.values() if row.judged), total]


def table(found: Iterable[Row]) -> str:
    lines = [
        "| module | mutants | judged | tests | simulation | (hung) | survived | (never run) "
        "| equivalent | killed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        lines.append(
            f"| {row.name} | {row.mutants} | {row.judged} | {row.tests} | {row.simulation} "
            f"| {row.hung} | {row.survived} | {row.never_run} | {row.equivalent} "
            f"| {_share(row.judged - row.survived, row.judged)} |"
        )
    return "\n".join(lines)


def survivors(mutants: Iterable[Mutant], verdicts: Mapping[str, Verdict]) -> list[str]:
    """A line for each mutant that survived, sorted by file and line."""
    lines = []
    for mutant in sorted(mutants, key=lambda mutant: (mutant.path, mutant.line)):
        verdict = verdicts.get(mutant.key)
        if verdict is not None and verdict.floor is None:
            run = f"{verdict.tests} tests, {verdict.seeds} seeds"
            lines.append(
                f"{mutant.path}:{mutant.line} {mutant.function}: {mutant.operator}: "
                f"{mutant.before} => {mutant.after} ({run})"
            )
    return lines


def _share(part: int, whole: int) -> str:
    """A percentage and its interval of 95 % certainty (Wilson's interval)."""
    if whole == 0:
        return "-"
    z = 1.96
    share = part / whole
    middle = (share + z * z / (2 * whole)) / (1 + z * z / whole)
    spread = z / (1 + z * z / whole)
    spread *= math.sqrt(share * (1 - share) / whole + z * z / (4 * whole * whole))
    low, high = max(0.0, middle - spread), min(1.0, middle + spread)
    return f"{share:.0%} ({low:.0%} to {high:.0%})"
