"""What a user gets from `pip install rayq`: built here, installed into an empty environment."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

ROUND_TRIP = """
import importlib.util, sys
from pathlib import Path

import rayq
from rayq.testing import LocalCluster

assert Path(rayq.__file__).is_relative_to(sys.prefix), rayq.__file__
for extra in ("pyarrow", "pandas", "rich", "typer", "pytest"):
    assert importlib.util.find_spec(extra) is None, f"{extra} is not a core dependency"

with LocalCluster(brokers=3) as cluster:
    cluster.create_topic("greetings", partitions=1, replication_factor=3)
    with cluster.producer() as producer:
        producer.send("greetings", b"hello").result(timeout=20)
    with cluster.consumer("greetings", auto_offset_reset="earliest") as consumer:
        (record,) = consumer.poll(timeout_s=20.0)
        assert record.value == b"hello"
        try:
            consumer.poll_arrow(timeout_s=0.1)
        except rayq.errors.MissingExtraError as error:
            print(error)
"""


def run(*command: str | Path, cwd: Path) -> str:
    ran = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    # With the pinned build backend of this environment: nothing is downloaded.
    run(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT),
        cwd=out,
    )
    (built,) = out.glob("rayq-*.whl")
    return built


def test_the_wheel_holds_the_package_its_types_and_its_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "rayq").rglob("*.py")}
    assert sources <= set(names)
    assert "rayq/py.typed" in names
    assert any(name.endswith("/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "examples/", "benchmarks/"))]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    constraints = ROOT / "requirements.lock"
    run(python, "-m", "pip", "install", "--quiet", "-c", constraints, wheel, cwd=tmp_path)
    printed = run(python, "-c", ROUND_TRIP, cwd=tmp_path)
    assert "pip install 'rayq[arrow]'" in printed
