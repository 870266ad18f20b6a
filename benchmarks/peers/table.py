"""The figures of both sides as one table, in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from benchmarks.peers.loads import Figure
from benchmarks.report import show

SIDES = ("kafka", "rayq")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of each side (None: it has none), or why a section failed on one side."""

    name: str
    unit: str = ""
    better: str = ""
    kafka: Figure | None = None
    rayq: Figure | None = None
    ratio: float | None = None
    """rayq's median by Kafka's. None where that is not positive: two figures that are about equal
    were subtracted."""
    failure: str | None = None


def rows_of(figures: Mapping[str, Sequence[Figure]], failures: Mapping[str, str]) -> list[Row]:
    """The rows of one section. Both arguments have the side as key."""
    by_name = {side: {one.name: one for one in figures.get(side, ())} for side in SIDES}
    rows = []
    for name in dict.fromkeys(one.name for side in SIDES for one in figures.get(side, ())):
        kafka, rayq = by_name["kafka"].get(name), by_name["rayq"].get(name)
        some = kafka or rayq
        assert some is not None
        kafka = kafka or by_name["kafka"].get(some.beside or "")
        ratio = None
        if rayq is not None and kafka is not None and _median(kafka) > 0:
            ratio = _median(rayq) / _median(kafka)
        rows.append(
            Row(
                name=name,
                unit=some.unit,
                better=some.better,
                kafka=kafka,
                rayq=rayq,
                ratio=ratio,
            )
        )
    return rows + [Row(name=side, failure=why) for side, why in failures.items()]


def markdown(rows: Sequence[Row]) -> str:
    lines = [
        "| what | unit | Kafka | rayq | rayq / Kafka | better |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            *(row.name, row.unit, _cell(row.kafka), _cell(row.rayq)),
            *("" if row.ratio is None else show(row.ratio), row.better),
        ]
        if row.failure is not None:
            why = row.failure.replace("|", "/").replace("\n", " ")
            cells = [f"{row.name} failed: {why}", "", "", "", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _median(figure: Figure) -> float:
    return statistics.median(figure.samples)


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    if len(figure.samples) == 1:
        return show(figure.samples[0])
    return f"{show(_median(figure))} ({show(min(figure.samples))} - {show(max(figure.samples))})"
