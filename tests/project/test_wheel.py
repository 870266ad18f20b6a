"""The result of `pip install`: the wheel, built here and installed into an empty environment."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

UV = Path(sys.executable).with_name("uv")
NOT_SHIPPED = ("tests/", "examples/", "benchmarks/", "proving/")
EXTRAS = {
    "arrow": "import pyarrow, rayq.client.consuming.arrow",
    "data": "import rayq.data; rayq.data.read_topic",
    "spark": "import raydp, pyspark.sql, rayq.spark; rayq.spark.session",
    "cli": "from rayq.cli.main import main; import sys; sys.argv = ['rayq', '--help']; main()",
    "remote": (
        "from rayq.runtime.object_store import open_store; "
        "import obstore; open_store"
    ),
    "registry": "import fastavro, rayq.registry.checks",
    "metrics": "import prometheus_client, ray.dashboard.modules.reporter.reporter_agent",
    "demo": "from rayq.demo import load_flights; assert len(load_flights()) == 336_776",
}
"""Each extra: a package that it brings, and a first use of it."""

START = """
import os, subprocess, sys, tempfile

with tempfile.TemporaryDirectory(prefix="rq", ignore_cleanup_errors=True) as home:
    os.environ |= {"RAYQ_HOME": home, "RAY_TMPDIR": home}
    os.environ.pop("RAY_ADDRESS", None)
    rayq = [sys.executable, "-m", "rayq.cli"]
    subprocess.run([*rayq, "start", home, "-b", "1", "-c", "bind_host=127.0.0.1"], check=True)
    subprocess.run([*rayq, "stop"], check=True)
"""

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
        producer.send("greetings", b"hello").result(timeout=60)
    with cluster.consumer("greetings", auto_offset_reset="earliest") as consumer:
        (record,) = consumer.poll(timeout_s=60.0)
        assert record.value == b"hello"
        try:
            consumer.poll_arrow(timeout_s=0.1)
        except rayq.errors.MissingExtraError as error:
            print(error)
"""


def run(*command: str | Path, cwd: Path) -> str:
    ran = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=580)
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
    assert not [name for name in names if name.startswith(NOT_SHIPPED)]


def environment(path: Path, requirement: str) -> Path:
    """The Python of a new environment with nothing but the requirement."""
    python = path / "venv" / "bin" / "python"
    run(UV, "venv", "--python", sys.executable, path / "venv", cwd=path)
    run(
        *(UV, "pip", "install", "--quiet", "--python", python),
        *("--constraint", ROOT / "requirements.lock", requirement),
        cwd=path,
    )
    return python


@pytest.mark.thorough
def test_the_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    python = environment(tmp_path, str(wheel))
    printed = run(python, "-c", ROUND_TRIP, cwd=tmp_path)
    assert "pip install 'rayq[arrow]'" in printed
    # That works although no package index has rayq: pip takes the installed version.
    run(
        *(UV, "pip", "install", "--quiet", "--python", python),
        *("--constraint", ROOT / "requirements.lock", "rayq[arrow]"),
        cwd=tmp_path,
    )
    run(python, "-c", EXTRAS["arrow"], cwd=tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("extra", EXTRAS)
def test_the_wheel_installs_with_each_extra(wheel: Path, tmp_path: Path, extra: str) -> None:
    python = environment(tmp_path, f"{wheel}[{extra}]")
    run(python, "-c", EXTRAS[extra], cwd=tmp_path)


@pytest.mark.thorough
def test_the_command_starts_a_cluster_with_the_extra_cli_alone(wheel: Path, tmp_path: Path) -> None:
    """The packages that Ray's own extras bring are not installed."""
    assert "is up: 1 broker" in run(environment(tmp_path, f"{wheel}[cli]"), "-c", START, cwd=tmp_path)


def test_no_extra_is_forgotten() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*EXTRAS, "dev", "docs"} == set(extras)
