"""The README's example and those of examples/ that need Ray, run as a reader would run them."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

import rayq

ROOT = Path(__file__).resolve().parents[2]


README_EXAMPLE = re.findall(
    r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
)[0]


def run(working_dir: Path, ray_address: str, *arguments: str) -> str:
    ran = subprocess.run(
        [sys.executable, *arguments],
        cwd=working_dir,
        env=os.environ | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": ray_address},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture
def running_ray(ray_here: None) -> Iterator[str]:
    """The address of this process's Ray, so that not each example has to start one."""
    yield str(ray.get_runtime_context().gcs_address)
    with contextlib.suppress(rayq.RayqError):  # An example that failed leaves its cluster.
        rayq.connect().stop()


@pytest.mark.thorough
@pytest.mark.slow
def test_the_example_of_the_readme_runs_as_it_stands_and_again(
    tmp_path: Path, running_ray: str
) -> None:
    printed = run(tmp_path, running_ray, "-c", README_EXAMPLE * 2)
    assert printed.count("RecordMetadata(topic='flights'") == 2
    assert "b'N14228' b'{\"dest\": \"IAH\"}'" in printed


@pytest.mark.thorough
@pytest.mark.slow
def test_quickstart_finds_its_records_again_after_a_full_stop(
    tmp_path: Path, running_ray: str
) -> None:
    example, data_dir = str(ROOT / "examples" / "quickstart.py"), str(tmp_path / "data")
    for times in (1, 2):
        assert run(tmp_path, running_ray, example, data_dir).count("read:") == times


@pytest.mark.thorough
@pytest.mark.slow
def test_ray_tasks_write_and_an_actor_reads_all_of_it(tmp_path: Path, running_ray: str) -> None:
    example = ROOT / "examples" / "produce_and_consume_in_ray_tasks.py"
    printed = run(tmp_path, running_ray, str(example), str(tmp_path / "data"))
    assert "written by task: [1000, 1000, 1000, 1000]" in printed
    assert printed.count("1000") == 8


@pytest.mark.thorough
@pytest.mark.slow
def test_orders_have_their_effects_once_while_consumers_are_killed(
    tmp_path: Path, running_ray: str
) -> None:
    example = ROOT / "examples" / "orders_exactly_once.py"
    printed = run(tmp_path, running_ray, str(example), str(tmp_path / "data"))
    assert "consumers killed: 0" not in printed
    assert "2000 orders, 2000 invoices: 0 missing, 0 twice" in printed
    assert printed.count(": True") == 2
