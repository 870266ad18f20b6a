"""The Spark example, run as a reader would run it: Spark's figures are those of pandas."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.real.test_examples_on_ray import ROOT, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java, and there is none"),
]


def test_spark_finds_the_delays_that_pandas_finds(tmp_path: Path) -> None:
    printed = run(tmp_path, str(ROOT / "examples" / "flight_delays_spark.py"), timeout_s=300)
    assert "336,776 flights" in printed
    assert "185 means written" in printed
    assert "the same as pandas finds, to the last digit: True" in printed
