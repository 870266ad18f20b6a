"""The report of a run: a table, and JSON."""

from __future__ import annotations

from typing import Any

from proving.chaos.measure import by_kind, times_of
from proving.chaos.run import Result
from rayq.errors import MissingExtraError

try:
    from rich.console import Console
    from rich.table import Table
except ImportError as error:
    raise MissingExtraError(
        f"Chaos needs {error.name}, which is not installed: pip install 'rayq[cli]'."
    ) from error


def as_json(result: Result) -> dict[str, Any]:
    verdict = result.verdict
    return {
        "seed": result.seed,
        "holds": result.holds,
        "load_s": round(result.load_s, 1),
        "sent": verdict and verdict.sent,
        "acknowledged": verdict and verdict.acknowledged,
        "failed": verdict and verdict.failed,
        "unknown": verdict and verdict.unknown,
        "polled": verdict and verdict.polled,
        "lost": result.lost,
        "duplicated": result.duplicated,
        "checker_faults": verdict
        and [f"{fault.kind}: {fault.what}" for fault in verdict.faults[:100]],
        "problems": result.problems,
        "injected": dict(result.injected),
        "transactions": dict(result.transactions),
        "queues": dict(result.queues),
        "principals": dict(result.principals),
        "stalls": [stall._asdict() for stall in result.stalls],
        "history": None if result.history is None else str(result.history),
        "kinds": {
            str(kind): {
                "faults": result.injected[kind],
                "limit_s": max(measurement.fault.limit_s for measurement in measured),
                "next_write": _times(measurement.next_write_s for measurement in measured),
                "pause": _times(measurement.pause_s for measurement in measured),
                "recovery_pause": _times(measurement.recovery_pause_s for measurement in measured),
            }
            for kind, measured in by_kind(result.measured).items()
        },
        "faults": [
            {
                "kind": str(measurement.fault.target.kind),
                "what": measurement.fault.target.what,
                "partition": measurement.partition,
                "is_affected": measurement.is_affected,
                "next_write_s": round(measurement.next_write_s, 4),
                "pause_s": round(measurement.pause_s, 4),
                "recovery_pause_s": round(measurement.recovery_pause_s, 4),
                "recovery_s": round(measurement.fault.settled_s - measurement.fault.healed_s, 1),
                "stood_still_s": round(measurement.fault.stood_still_s, 2),
                "broker_away_s": round(measurement.fault.broker_away_s, 2),
                "limit_s": measurement.fault.limit_s,
            }
            for measurement in result.measured
        ],
    }


def _times(values: Any) -> dict[str, float] | None:
    times = times_of(values)
    return (
        None
        if times is None
        else {name: round(value, 4) for name, value in times._asdict().items()}
    )


def show(result: Result, console: Console) -> None:
    table = Table(title="After each kind of fault, per affected partition (seconds)")
    table.add_column("fault", no_wrap=True)
    columns = ("times", "n", "next write p50", "p99", "max", "longest pause", "limit")
    for column in (*columns, "pause in recovery"):
        table.add_column(column, justify="right")
    for kind, measured in by_kind(result.measured).items():
        next_write = times_of(measurement.next_write_s for measurement in measured)
        assert next_write is not None
        table.add_row(
            str(kind),
            str(result.injected[kind]),
            str(next_write.n),
            *(f"{value:.2f}" for value in next_write[1:]),
            f"{max(measurement.pause_s for measurement in measured):.2f}",
            f"{max(measurement.fault.limit_s for measurement in measured):g}",
            f"{max(measurement.recovery_pause_s for measurement in measured):.2f}",
        )
    console.print(table)
    for problem in result.problems:
        console.print(f"[red]{problem}", highlight=False)
    if result.verdict is not None:
        console.print(str(result.verdict), highlight=False, markup=False)
        console.print(
            f"seed {result.seed}: {result.verdict.acknowledged:,} records acknowledged in "
            f"{result.load_s:.0f} s, {len(result.faults)} faults, {result.lost} lost, "
            f"{result.duplicated} duplicated, {result.verdict.unknown} of unknown outcome",
            highlight=False,
        )
    if result.transactions:
        counts = ", ".join(f"{count} {what}" for what, count in result.transactions.items())
        console.print(f"clients with transactions: {counts}", highlight=False)
    if result.principals:
        counts = ", ".join(f"{count} {what}" for what, count in result.principals.items())
        console.print(f"principals: {counts}", highlight=False)
    if result.queues:
        counts = ", ".join(f"{count} {what}" for what, count in result.queues.items())
        console.print(f"workers of queues: {counts}", highlight=False)
    if result.stalls:
        longest = result.stalls[0]
        console.print(
            f"event loops stood still {len(result.stalls)} times; the longest: {longest.process} "
            f"for {longest.still_s:.2f} s ({longest.cpu_s:.2f} s of CPU), in {longest.where}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    if result.history is not None:
        console.print(
            f"The history is kept: python -m rayq.testing.checker {result.history}",
            highlight=False,
            soft_wrap=True,
        )
    console.print("[green]All of it held." if result.holds else "[red]Not all of it held.")
