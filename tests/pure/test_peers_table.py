"""The table of `make bench-peers`: which figures are compared, and what a failure looks like."""

from __future__ import annotations

import sys

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers.loads import Figure
from benchmarks.peers.table import markdown, rows_of


def _figure(name: str, *samples: float, beside: str | None = None) -> Figure:
    return Figure(name=name, unit="ms", samples=list(samples), better="lower", beside=beside)


def test_a_ratio_is_rayqs_median_by_kafkas() -> None:
    both = {"kafka": [_figure("p99", 8.0, 1.0, 4.0)], "rayq": [_figure("p99", 2.0)]}
    (row,) = rows_of(both, {})
    assert row.ratio == 0.5
    assert markdown([row]).endswith("| p99 | ms | 4.00 (1.00 - 8.00) | 2.00 | 0.50 | lower |")


def test_what_one_side_alone_has_is_compared_with_what_it_names() -> None:
    both = {
        "kafka": [_figure("each", 4.0)],
        "rayq": [_figure("each", 2.0), _figure("many", 1.0, beside="each")],
    }
    assert [row.ratio for row in rows_of(both, {})] == [0.5, 0.25]


def test_a_section_that_failed_on_one_side_stands_in_the_table() -> None:
    rows = rows_of({"kafka": [], "rayq": [_figure("p99", 2.0)]}, {"latency of kafka": "a | b\nc"})
    assert [row.ratio for row in rows] == [None, None]
    last = markdown(rows).splitlines()[-1]
    assert last == "| latency of kafka failed: a / b c |  |  |  |  |  |"


def test_it_is_skipped_where_there_is_no_java(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", ["peers"])
    assert peers.main() == 0
    assert "skipped: there is no java and no mvn on the PATH" in capsys.readouterr().out
