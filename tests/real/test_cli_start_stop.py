"""`rayq start` and `rayq stop` as a user types them: a Ray of their own, in the background."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import trustme

from rayq.cli.local_ray import processes_of, raylets_of, stop_ray
from rayq.cli.main import run
from tests.local.test_tls import certificates

OTHERS = ("RAY_ADDRESS", "RAYQ_CLUSTER", "RAYQ_TOKEN")
"""The environment variables that could name another cluster."""
ROOT = Path(__file__).resolve().parents[2]


class Rayq:
    """The command as a program, with a home of its own."""

    def __init__(self, home: Path, temporary: str) -> None:
        self.home = home
        rest = {name: value for name, value in os.environ.items() if name not in OTHERS}
        self.environment = {
            **rest,
            "RAYQ_HOME": str(home),
            "PYTHONPATH": str(ROOT),
            # Its path is short, since the paths of Ray's sockets are limited, and apart from other
            # Rays.
            "RAY_TMPDIR": temporary,
        }

    def __call__(
        self, *arguments: str, stdin: bytes = b"", **variables: str
    ) -> subprocess.CompletedProcess[str]:
        ran = subprocess.run(
            [sys.executable, "-m", "rayq.cli", *arguments],
            env={**self.environment, **variables},
            input=stdin,
            capture_output=True,
            timeout=170,
        )
        return subprocess.CompletedProcess(
            arguments, ran.returncode, ran.stdout.decode(), ran.stderr.decode()
        )

    def python(self, line: str, **variables: str) -> str:
        """The topics that a script lists which begins with this line."""
        program = f"{line}; print(cluster.admin.list_topics())"
        ran = subprocess.run(
            [sys.executable, "-c", program],
            env={**self.environment, **variables},
            capture_output=True,
            timeout=60,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def here(self, *arguments: str) -> str:
        """Runs in this process the verbs that need no Ray, to save the second that a program
        needs."""
        with (
            pytest.MonkeyPatch.context() as patch,
            unittest.mock.patch.dict(os.environ),  # A verb that joins a Ray sets its token mode.
            contextlib.redirect_stdout(StringIO()) as out,
        ):
            logger = logging.getLogger("rayq")  # which the command makes quiet
            patch.setattr(logger, "propagate", logger.propagate)
            patch.setattr(logger, "handlers", list(logger.handlers))
            patch.setenv("RAYQ_HOME", str(self.home))
            for name in OTHERS:
                patch.delenv(name, raising=False)
            assert run(arguments) == 0
        return out.getvalue()

    def popen(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "rayq.cli", *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def processes_of_ray(self) -> list[str]:
        """The processes that keep their files in the temporary directory of this test."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if f"{self.environment['RAY_TMPDIR']}/" in command:
                    found.append(command)
        return found

    @staticmethod
    def in_kernel_session(ray_session: str) -> list[str]:
        """The processes in the kernel's session that `ray start` began, which Ray's session is
        named after."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                state, _, _, leader = (path / "stat").read_text().rpartition(")")[2].split()[:4]
                if state != "Z" and leader == ray_session.rpartition("_")[2]:
                    found.append((path / "cmdline").read_text().replace("\0", " "))
        return found

    def well(self, *arguments: str, stdin: bytes = b"") -> str:
        ran = self(*arguments, stdin=stdin)
        assert ran.returncode == 0, (ran.stdout, ran.stderr)
        assert ran.stderr == ""
        return ran.stdout

    @property
    def current(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.home / "current.json").read_text())
        return found


@pytest.fixture
def rayq(tmp_path: Path) -> Iterator[Rayq]:
    with tempfile.TemporaryDirectory(prefix="rq", ignore_cleanup_errors=True) as temporary:
        command = Rayq(tmp_path / "home", temporary)
        yield command
        if (tmp_path / "home" / "current.json").exists():
            stop_ray(command.current["ray_session"])


@pytest.mark.thorough
@pytest.mark.slow
def test_a_cluster_from_start_to_stop_and_back(rayq: Rayq, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    # The cluster listens where only this machine reaches it, unless it is told otherwise.
    tls = certificates(tmp_path / "tls", trustme.CA())
    start = ("start", data, "--port", "23392")
    options = [part for key, path in tls.items() for part in ("-c", f"{key}={path}")]
    said = rayq.well(*start, "--brokers", "3", "--num-cpus", "3", *options)
    assert "Other machines do not reach 127.0.0.1" in said
    # The brokers start at the same time: any of them may have the first port.
    assert "3 brokers at " in said and "127.0.0.1:23392, " in said
    first = rayq.current
    assert (first["path"], first["started_ray"], first["name"]) == (data, True, "default")
    before = rayq.in_kernel_session(first["ray_session"])
    assert any("ray.util.client.server" in command for command in before)
    assert len(before) == len(processes_of(first["ray_session"]))

    rayq.here("topic", "create", "flights", "-p", "2", "-r", "3")
    # The printed lines work when pasted into another shell; so do an address, and Ray.
    assert "import rayq; cluster = rayq.connect()" in said
    for connect, variables in (
        ("rayq.connect()", {}),
        ('rayq.connect("127.0.0.1:23392")', {}),
        ("rayq.connect()", {"RAY_ADDRESS": first["ray_address"]}),
    ):
        assert rayq.python(f"import rayq; cluster = {connect}", **variables) == "['flights']\n"
    rayq.well("topic", "produce", "flights", stdin=b"one\ntwo\nthree\n")
    assert "Healthy." in rayq.here("status")

    # Another home gets no second cluster on the directory either.
    other = rayq(*start, RAYQ_HOME=str(tmp_path / "other"))
    assert other.returncode == 1
    assert "in use by process" in other.stderr and other.stderr.count("\n") == 1

    assert "Broker 1 was restarted" in rayq.well("cluster", "restart-broker", "1")
    assert "its data stays" in rayq.well("stop")
    assert rayq.in_kernel_session(first["ray_session"]) == []
    assert not (rayq.home / "current.json").exists()
    assert "0 damaged" in rayq.here("log", "verify", data)

    # What it was started with is kept, and a change is said.
    said = rayq.well("start", data, "-c", "session_timeout_ms=4s")
    assert "127.0.0.1:23392" in said and tls["tls_key"] in said
    assert said.count("Not as at the last start: ") == 1
    assert "session_timeout_ms is 4000; it was 3000." in said
    assert tls.items() <= rayq.current["config"].items()
    assert sorted(rayq.well("topic", "consume", "flights", "-e").split()) == [
        *("one", "three", "two")
    ]
    # A stop that was interrupted is repeated.
    session = rayq.current["ray_session"]
    running = len(rayq.in_kernel_session(session))
    stopping = rayq.popen("stop")
    deadline_s = time.monotonic() + 60
    while len(rayq.in_kernel_session(session)) == running:
        assert time.monotonic() < deadline_s and stopping.poll() is None
        time.sleep(0.02)
    stopping.send_signal(signal.SIGINT)
    _, said = stopping.communicate(timeout=60)
    assert (stopping.returncode, said) in ((130, b""), (0, b""))
    if stopping.returncode:
        rayq.well("stop")
    assert rayq.in_kernel_session(session) == []
    assert not (rayq.home / "current.json").exists()


IN_RAY = """
import os, ray, rayq

def tried():
    cluster = rayq.connect()
    try:
        cluster.create_topic("forbidden")
        return "superuser"
    except rayq.errors.AuthorizationError as error:
        return str(error).split("'")[1]

task = ray.remote(tried)
print(tried())
print(ray.get(task.remote()))
named = {"env_vars": {"RAYQ_TOKEN": os.environ["TOKEN"]}}
print(ray.get(task.options(runtime_env=named).remote()))
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_programs_in_ray_are_the_configured_principal_and_operators_stay_superuser(
    rayq: Rayq, tmp_path: Path
) -> None:
    started = ("start", str(tmp_path / "data"), "-b", "1", "-c", "inside_ray_principal=analytics")
    rayq.well(*started)
    for line in (
        ("principal", "create", "analytics", "anna"),
        ("topic", "create", "flights", "-r", "1"),
        ("acl", "add", "analytics", "read", "topic", "*"),
    ):
        rayq.here(*line)
    token = json.loads(rayq.here("token", "create", "anna", "--json"))["token"]
    address = rayq.current["ray_address"]
    ran = subprocess.run(
        [sys.executable, "-c", IN_RAY],
        env={**rayq.environment, "RAY_ADDRESS": address, "TOKEN": token},
        capture_output=True,
        timeout=170,
        text=True,
    )
    assert ran.stdout.split() == ["analytics", "analytics", "anna"], ran.stderr
    line = "import rayq; cluster = rayq.connect()"
    assert rayq.python(line, RAY_ADDRESS=address) == "['flights']\n"
    assert rayq.python(line, RAY_ADDRESS=address, RAYQ_TOKEN=token) == "[]\n"
    assert "Broker 0 was restarted" in rayq.well("cluster", "restart-broker", "0")
    rayq.here("topic", "create", "by-an-operator", "-r", "1")


@pytest.mark.thorough
@pytest.mark.slow
def test_a_start_that_blocks_ends_with_the_cluster_and_the_cluster_with_it(
    rayq: Rayq, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def start() -> subprocess.Popen[bytes]:
        blocked = rayq.popen(
            *("start", str(tmp_path / "data"), "-b", "1", "-c", "bind_host=127.0.0.1", "--block")
        )
        request.addfinalizer(blocked.kill)
        assert blocked.stdout is not None
        assert b"is up: 1 broker" in blocked.stdout.readline()
        return blocked

    blocked = start()
    rayq.here("topic", "create", "flights", "-r", "1")
    blocked.send_signal(signal.SIGTERM)
    said, complaint = blocked.communicate(timeout=60)
    assert (blocked.returncode, complaint) == (143, b"")
    assert said.endswith(b"is stopped; its data stays in %s.\n" % bytes(tmp_path / "data"))
    assert rayq.processes_of_ray() == []

    blocked = start()
    assert "flights" in rayq.here("topic", "list")
    rayq.well("stop")
    assert blocked.wait(timeout=60) == 0

    blocked = start()
    for raylet in raylets_of(rayq.current["ray_session"]):
        os.kill(raylet, signal.SIGKILL)
    _, complaint = blocked.communicate(timeout=60)
    assert blocked.returncode == 1
    assert b"has ended by itself" in complaint and b"`rayq stop` ends what is left" in complaint
    rayq.well("stop")
    assert rayq.processes_of_ray() == []


def test_ctrl_c_while_ray_starts_leaves_nothing_running(
    rayq: Rayq, tmp_path: Path
) -> None:
    starting = rayq.popen("start", str(tmp_path / "data"), "-b", "1", "-c", "bind_host=127.0.0.1")
    try:
        deadline_s = time.monotonic() + 60
        while not (left := rayq.processes_of_ray()):
            assert time.monotonic() < deadline_s and starting.poll() is None
            time.sleep(0.02)
        starting.send_signal(signal.SIGINT)
        _, said = starting.communicate(timeout=60)
        assert (starting.returncode, said) == (130, b"")
        left = rayq.processes_of_ray()
        assert left == []
    finally:
        starting.kill()


def test_a_ray_that_cannot_be_reached_is_one_line(rayq: Rayq, tmp_path: Path) -> None:
    ran = rayq("start", str(tmp_path / "data"), "--ray-address", "no address")
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
    assert ran.stderr.startswith("Error: No Ray can be reached at no address")
