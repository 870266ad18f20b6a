"""Runs the fences `On Ray` of the README and the pages as a reader does: after `rayq start`, in a
program of its own that knows of nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local.test_pages import PAGES, ROOT, Fence, fences
from tests.real.test_cli_start_stop import Rayq, rayq  # noqa: F401 - a fixture

ON_RAY, WITH_SPARK, WITH_RESTART = "On Ray", "On Ray, with Spark", "On Ray, with a restart"
TIMEOUT_S = 500.0  # Spark alone takes a minute and a half where others keep the cores busy.
README = ROOT / "README.md"
FLIGHTS = b'N1\t{"carrier": "UA", "dest": "SFO", "month": 1, "dep_delay": 2.5}\nN2\tno JSON\n'


def titled(page: Path, *titles: str) -> list[Fence]:
    return [fence for fence in fences(page) if fence.title in titles]


class Reader:
    """Somebody who types what the pages say, in a directory of their own."""

    def __init__(self, command: Rayq, directory: Path) -> None:
        self.command = command
        self._directory = directory
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**command.environment, "PATH": path}

    def types(self, fence: Fence) -> str:
        words = (
            ["bash", "-euo", "pipefail", "-c", fence.text]
            if fence.language == "bash"
            else [sys.executable, "-c", "\n" * fence.line + fence.text]
        )
        ran = subprocess.run(
            words,
            cwd=self._directory,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert ran.returncode == 0, f"{fence}\n{ran.stdout}{ran.stderr}"
        return ran.stdout


@pytest.fixture
def reader(rayq: Rayq, tmp_path: Path) -> Iterator[Reader]:  # noqa: F811
    """Has typed the commands of the README that start a cluster."""
    directory = tmp_path / "reader"
    directory.mkdir()
    reader = Reader(rayq, directory)
    (shell,) = (fence for fence in titled(README, ON_RAY) if fence.language == "bash")
    said = reader.types(shell)
    assert "is up: 3 brokers at 127.0.0.1:" in said and "Healthy." in said
    rayq.well("topic", "produce", "flights", "-K", "\\t", stdin=FLIGHTS)
    yield reader
    rayq.well("stop")


@pytest.mark.thorough
@pytest.mark.slow
def test_what_the_readme_says_of_ray_data_and_prometheus_runs_after_rayq_start(reader: Reader) -> None:
    (fence,) = (fence for fence in titled(README, ON_RAY) if fence.language != "bash")
    reader.types(fence)
    assert "SFO" in reader.command.well("topic", "consume", "west", "-o", "beginning", "-e")
    # docs/metrics.md: Prometheus.
    serving = reader.command.popen("cluster", "metrics", "--serve", "0")
    try:
        assert serving.stdout is not None
        url = serving.stdout.readline().decode().split()[1]
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert "ray_rayq_active_brokers" in answer.read().decode()
        serving.terminate()
        assert serving.wait(timeout=60) == 143
    finally:
        serving.kill()


@pytest.mark.thorough
@pytest.mark.slow
def test_what_the_pages_say_of_ray_data_runs_after_rayq_start(reader: Reader) -> None:
    for fence in (fence for page in PAGES for fence in titled(page, ON_RAY)):
        if fence.language != "bash":
            reader.types(fence)
    assert "SFO" in reader.command.well("topic", "consume", "west", "-o", "beginning", "-e")
    assert "UA" in reader.command.well("topic", "consume", "delays", "-o", "beginning", "-e", "-f", "%k\n")
    assert "no JSON" in reader.command.well("topic", "consume", "flights-dead", "-o", "beginning", "-e")


@pytest.mark.thorough
@pytest.mark.slow
def test_what_the_pages_say_of_restarts_runs_after_rayq_start(reader: Reader) -> None:
    (fence,) = (fence for page in PAGES for fence in titled(page, WITH_RESTART))
    lines = reader.types(fence).splitlines()
    assert lines[0].startswith("rayq-") and lines[-1].startswith("rayq-") and lines[0] != lines[-1]
    assert "SFO" in reader.command.well("topic", "consume", "flights", "-o", "beginning", "-e")
    address = reader.command.current["brokers"][0]
    old = reader.command("topic", "list", RAYQ_CLUSTER=address, RAYQ_TOKEN=lines[0])
    assert old.returncode == 1 and "token" in old.stderr


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_what_the_pages_say_of_spark_runs_after_rayq_start(reader: Reader) -> None:
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java, and there is none")
    for page in PAGES:
        for fence in titled(page, WITH_SPARK):
            reader.types(fence)
            reader.command.well("topic", "delete", "delays", "-y")
