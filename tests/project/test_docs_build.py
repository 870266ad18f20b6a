"""`make docs` needs what builds a site, and nothing that only Spark, Ray or the tests need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("has_tests", [False, True])
def test_make_docs_asks_for_neither_spark_nor_java(tmp_path: Path, has_tests: bool) -> None:
    """Where an environment is there, and where there is none."""
    (tmp_path / "venv").mkdir()
    if has_tests:
        for name in (".demo-installed", ".dev-installed"):
            (tmp_path / "venv" / name).touch()
    ran = subprocess.run(
        ["make", "--dry-run", "docs", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert "mkdocs build" in ran.stdout and "'.[docs]'" in ran.stdout
    for name in ("spark", "java", ".[dev]"):
        assert name not in ran.stdout.lower(), name


def test_what_builds_the_site_imports_neither_spark_nor_ray() -> None:
    program = (
        "import sys, rayq, rayq.config.reference\n"
        "print(sorted({'pyspark', 'raydp', 'ray', 'pyarrow', 'pandas'} & sys.modules.keys()))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "[]\n", ran.stderr
