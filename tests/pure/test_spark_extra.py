"""`rayq.spark` where the extra is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("use", ["import rayq.spark", "runpy.run_module('rayq.spark')"])
def test_without_pyspark_the_error_names_the_pip_command(use: str) -> None:
    program = f"import runpy, sys; sys.modules['pyspark'] = None; {use}"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 1
    assert "MissingExtraError: rayq.spark needs pyspark" in ran.stderr.splitlines()[-1]
    assert "pip install 'rayq[spark]'" in ran.stderr
