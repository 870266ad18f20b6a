"""Runs the `rayq` command: in this process for speed, or as a program in pipes and terminals."""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from rayq import Cluster
from rayq.cli import output
from rayq.cli.main import run
from rayq.client.admin import health

ROOT = Path(__file__).resolve().parents[2]
_built = functools.cache(typer.main.get_command)
"""To put the verbs together takes longer than most of them do."""


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Command:
    """The `rayq` command against one cluster."""

    def __init__(
        self,
        cluster: Cluster,
        home: Path,
        capfd: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.cluster = cluster
        self._home = home
        self._capfd = capfd
        self._monkeypatch = monkeypatch
        for name, value in self._variables().items():
            monkeypatch.setenv(name, value)
        # How full this machine's disk is says nothing about the cluster.
        monkeypatch.setattr(health, "DISK_LOW_BYTES", 0)
        # Nor does how busy it is.
        monkeypatch.setattr(output, "PATIENCE_S", 1_000.0)

    def _variables(self) -> dict[str, str]:
        return {
            "RAYQ_HOME": str(self._home),
            "RAYQ_CLUSTER": ",".join(self.cluster.addresses),
            "RAYQ_TOKEN": self.cluster.token,
        }

    def __call__(self, *arguments: str, stdin: bytes = b"") -> Ran:
        """Runs the command in this process."""
        given = self._home / "stdin"
        given.parent.mkdir(parents=True, exist_ok=True)
        given.write_bytes(stdin)
        self._capfd.readouterr()
        logger = logging.getLogger("rayq")
        handlers, propagate = list(logger.handlers), logger.propagate
        try:
            with given.open() as file, self._monkeypatch.context() as patch:
                patch.setattr(sys, "stdin", file)
                patch.setattr(typer.main, "get_command", _built)
                try:
                    code = run(arguments)
                except SystemExit as end:  # a completion
                    code = int(end.code or 0)
            sys.stdout.flush()
        finally:
            logger.handlers[:], logger.propagate = handlers, propagate
            self.cluster.make_current()
        return Ran(code, *self._capfd.readouterr())

    def well(self, *arguments: str, stdin: bytes = b"") -> Ran:
        ran = self(*arguments, stdin=stdin)
        assert ran.code == 0, ran
        return ran

    # --- as a program ---------------------------------------------------------------------------

    @property
    def environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**os.environ, **self._variables(), "PATH": path, "PYTHONPATH": str(ROOT)}

    def shell(self, script: str, timeout_s: float = 60.0) -> Ran:
        """Runs a script in a shell, where `rayq` is this checkout's command."""
        ran = subprocess.run(
            ["bash", "-c", f"rayq() {{ {program()} \"$@\"; }}\n{script}"],
            env=self.environment,
            capture_output=True,
            timeout=timeout_s,
        )
        return Ran(ran.returncode, ran.stdout.decode(), ran.stderr.decode())

    def popen(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        command: Sequence[str] = [sys.executable, "-m", "rayq.cli", *arguments]
        return subprocess.Popen(command, env=self.environment, **options)


def program() -> str:
    return f"{sys.executable} -m rayq.cli"
