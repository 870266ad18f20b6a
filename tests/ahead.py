"""Long commands that only need CPU, run beside the tests that come before them.

A test with `@pytest.mark.ahead(ARGUMENT, ...)` is about what `python ARGUMENT ...` prints and returns,
and gets that from the fixture `ahead`. All such commands begin when the tests begin, one after the
other and at idle priority: they take what other tests leave of the cores. Each runs in an empty
directory, or in `cwd=...`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Command = tuple[str, ...]


@dataclass(frozen=True)
class Done:
    """What became of a command."""

    returncode: int
    stdout: str
    stderr: str
    left: list[str]
    """The names of the files that it left in its directory."""


class Ahead:
    """The commands of one run of pytest."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, "ahead")
        self._outcomes: dict[Command, Future[Done]] = {}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._is_over = False

    def begin(self, command: Command, cwd: Path | None = None) -> Future[Done]:
        """What it printed, to be waited for; it is run once, however many tests ask for it."""
        if command not in self._outcomes:
            self._outcomes[command] = self._threads.submit(self._run, command, cwd)
        return self._outcomes[command]

    def end(self) -> None:
        """Kills what still runs; the rest is not begun."""
        with self._lock:
            self._is_over = True
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
        self._threads.shutdown(cancel_futures=True)

    def _run(self, command: Command, cwd: Path | None) -> Done:
        if cwd is not None:
            return self._run_in(cwd, command)
        with tempfile.TemporaryDirectory() as empty:
            return self._run_in(Path(empty), command)

    def _run_in(self, directory: Path, command: Command) -> Done:
        with self._lock:
            if self._is_over:
                raise RuntimeError("the tests are over")
            self._process = process = subprocess.Popen(
                # SCHED_IDLE: at any nice value other tests would wait for it now and then.
                ["chrt", "--idle", "0", sys.executable, *command],
                cwd=directory,
                # Under one hash seed, as `make sim` does, so that what fails here replays there.
                env={
                    **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
                    "PYTHONPATH": str(ROOT),
                    "PYTHONHASHSEED": "0",
                    "COLUMNS": "120",
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        printed, said = process.communicate()
        return Done(process.returncode, printed, said, sorted(os.listdir(directory)))
