"""What a benchmark yields: rows with a figure, a target and, where one applies, a ratio."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table

TABLE_WIDTH = 110


def wide_console() -> Console:
    """A console as wide as the terminal, but not so narrow that the table folds up."""
    return Console(width=max(Console().width, TABLE_WIDTH), file=sys.stdout)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measured figure: the median of `samples`, whose unit is `unit`."""

    name: str
    unit: str
    samples: list[float]
    target: float | None = None
    better: Literal["higher", "lower"] = "higher"
    ratio: float | None = None
    """The ratio of the figure to the baseline that `note` names."""
    target_ratio: float | None = None
    note: str = ""
    details: list[str] = []
    """Lines that are printed below the table, such as the profile behind a figure."""

    @property
    def figure(self) -> float:
        return statistics.median(self.samples)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        if self.target_ratio is not None and self.ratio is not None:
            return self.ratio >= self.target_ratio
        if self.target is None:
            return None
        return self.figure >= self.target if self.better == "higher" else self.figure <= self.target


def show(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.4f}"


def table(rows: Sequence[Row], machine: str) -> Table:
    result = Table(title="rayq beside this machine's own figures", caption=machine)
    result.add_column("what", overflow="fold")
    for column in ("median", "lowest - highest", "target", "ratio"):
        result.add_column(column, justify="right", no_wrap=True)
    result.add_column("met", no_wrap=True)
    note_above = ""
    for row in rows:
        note, note_above = "" if row.note == note_above else row.note, row.note
        target = ""
        if row.target_ratio is not None:
            target = f"ratio >= {row.target_ratio}"
        elif row.target is not None:
            target = f"{'>=' if row.better == 'higher' else '<='} {show(row.target)}"
        result.add_row(
            f"{row.name}\n  [dim]{note}[/dim]" if note else row.name,
            f"{show(row.figure)} {row.unit}",
            f"{show(min(row.samples))} - {show(max(row.samples))}" if len(row.samples) > 1 else "",
            target,
            "" if row.ratio is None else f"{row.ratio:.2f}",
            {None: "", True: "[green]yes", False: "[red]no"}[row.met],
        )
    return result


def write_json(path: Path, rows: Sequence[Row], machine: str, failures: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    described = [
        msgspec.to_builtins(row) | {"median": row.figure, "target_met": row.met} for row in rows
    ]
    content = {"machine": machine, "rows": described, "failures": list(failures)}
    path.write_text(json.dumps(content, indent=2) + "\n")


def print_all(
    console: Console, path: Path, rows: Sequence[Row], machine: str, failures: Sequence[str]
) -> None:
    console.print(table(rows, machine))
    for row in rows:
        for detail in row.details:
            console.print(f"{row.name.strip()}: {detail}", highlight=False)
    for failure in failures:
        console.print(f"[red]{failure}")
    write_json(path, rows, machine, failures)
    console.print(f"The same as JSON: {path}")
