"""The Spark example, on the session that the tests share: Spark's figures are those of pandas.

`make demo` runs it as a reader would, in a process of its own.
"""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from rayq import Cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java, and there is none"),
]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "flight_delays_spark.py"


@pytest.mark.thorough
def test_spark_finds_the_delays_that_pandas_finds(
    spark: Any, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runpy.run_path(str(EXAMPLE))["run"](spark, cluster)
    printed = capsys.readouterr().out
    assert "336,776 flights" in printed
    assert "185 means written" in printed
    assert "the same as pandas finds, to the last digit: True" in printed
