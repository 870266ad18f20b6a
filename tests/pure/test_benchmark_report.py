"""The benchmark's table: when a target counts as met."""

from __future__ import annotations

from benchmarks.profiles import top_functions
from benchmarks.report import Row


def test_the_figure_is_the_median() -> None:
    assert Row(name="", unit="s", samples=[9.0, 1.0, 2.0]).figure == 2.0


def test_a_target_is_met_from_the_better_side() -> None:
    assert Row(name="", unit="s", samples=[0.9], target=1.0, better="lower").met
    assert not Row(name="", unit="s", samples=[1.1], target=1.0, better="lower").met
    assert Row(name="", unit="1/s", samples=[1.1], target=1.0).met
    assert Row(name="", unit="1/s", samples=[1.1]).met is None


def test_a_target_ratio_judges_the_ratio() -> None:
    assert not Row(name="", unit="MB/s", samples=[900.0], ratio=0.7, target_ratio=0.8).met
    assert Row(name="", unit="MB/s", samples=[1.0], ratio=0.8, target_ratio=0.8).met


def test_a_profile_names_the_functions_on_top_and_leaves_out_who_waits() -> None:
    folded = "main (a/run.py:3);read (a/io.py:7) 150\nmain (a/run.py:4) 50\n"
    waiting = "run (a/threading.py:3);Condition.wait (threading.py:9) 400\n"
    assert top_functions(folded + waiting) == "read (io.py) 75 %, main (run.py) 25 %"
