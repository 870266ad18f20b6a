"""Starts, joins and stops a Ray on this machine, for `rayq start` and `rayq stop`.

A Ray is known by its session. The name is on the command line of most of its processes, what those
have started are their children, and all are in one session of the kernel's, that of the `ray start`
which began them. So `stop` ends that one Ray, whatever else runs here; Ray's own `ray stop` would
end all.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from rayq.errors import NoClusterError, RayqError
from rayq.runtime.ray.token import ensure_ray_token, use_ray_token

START_TIMEOUT_S = 120.0
ATTEMPTS_MAX = 3
"""The maximum number of attempts: another program may take a port that was free a moment ago."""
RAYLET_PATIENCE_S = 1.0
KILL_PATIENCE_S = 10.0
_SESSION = re.compile(r"[/=](session_[^/\s]+)")
_NAMELESS = re.compile(r"ray::|\S+ -m ray\.util\.client\.server ")
"""The commands of Ray that do not name their session: workers, agents, and the client server, which
would stay for a minute and a half after its Ray."""


def start_ray(node_ip: str | None, num_cpus: int | None = None) -> tuple[str, str]:
    """Starts a Ray of one node and returns its address and its session. It outlives this process.
    `num_cpus`: how many Ray counts for tasks and actors; None: those of the machine. Raises
    RayqError."""
    failure = RayqError("Ray was not started.")
    for _ in range(ATTEMPTS_MAX):
        port, dashboard, client = _free_ports(3)
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head"),
            f"--port={port}",
            f"--dashboard-port={dashboard}",
            "--include-dashboard=false",
            "--disable-usage-stats",
            "--log-style=record",
            # A Ray without grpc, as our extra `cli` brings it, has no such server and refuses this.
            *((f"--ray-client-server-port={client}",) if importlib.util.find_spec("grpc") else ()),
            *(() if node_ip is None else (f"--node-ip-address={node_ip}",)),
            *(() if num_cpus is None else (f"--num-cpus={num_cpus}",)),
        ]
        try:
            ran = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=START_TIMEOUT_S,
                env=_ray_environment(),
                # A Ctrl+C must reach this process only, which then ends what it started.
                start_new_session=True,
            )
            said = ran.stdout + ran.stderr
            session = _session_at(port)
            if ran.returncode == 0 and session is not None:
                return _address_in(said), session
            raise RayqError(f"Ray could not be started: {_last_line(said)}")
        except RayqError as error:
            _clean_up(port)
            failure = error
        except subprocess.TimeoutExpired as error:
            _clean_up(port)
            raise RayqError(f"Ray did not start within {START_TIMEOUT_S:g} s.") from error
        except BaseException:
            _clean_up(port)
            raise
    raise failure


def _address_in(said: str) -> str:
    for line in said.splitlines():
        _, found, rest = line.partition("ray start --address='")
        if found:
            return rest.partition("'")[0]
    raise RayqError(f"Ray started and did not say where: {_last_line(said)}")


def _session_at(port: int) -> str | None:
    """The session of the Ray on this machine whose head listens at an address."""
    for process in _processes().values():
        found = _SESSION.search(process.command)
        if found and f" --gcs_server_port={port} " in f"{process.command} ":
            return found[1]
    return None


def _clean_up(port: int) -> None:
    """Ends the processes that a failed attempt left behind."""
    session = _session_at(port)
    if session is not None:
        stop_ray(session)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("", 0))
        return [int(free.getsockname()[1]) for free in sockets]


def _ray_environment() -> dict[str, str]:
    """The environment for Ray's token authentication, which needs a token."""
    environment = dict(os.environ)
    if "RAY_AUTH_MODE" not in environment:
        ensure_ray_token()
        environment["RAY_AUTH_MODE"] = "token"
    return environment


# --- joining --------------------------------------------------------------------------------------


@contextlib.contextmanager
def connected_to_ray(address: str) -> Iterator[None]:
    """Makes this process a driver of the Ray at `address` for the `with` block. Raises
    NoClusterError, and RayqError for what Ray raises within the block."""
    use_ray_token()
    import ray
    from ray._private import worker
    from ray.exceptions import RayError

    # Ray prints the warnings of raylets on stdout, between the lines of the verb; no option of Ray
    # prevents that.
    worker._worker_logs_enabled = False
    # Ray takes SIGTERM over as it comes, and gives it back to no handler as it goes.
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with _silent_stderr():
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
        signal.signal(signal.SIGTERM, on_sigterm)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise NoClusterError(f"No Ray can be reached at {address}: {error}") from error
    try:
        yield
    except RayError as error:
        # The text of Ray's error has the traceback of the remote function; its cause is the error
        # that the function raised.
        cause = getattr(error, "cause", None)
        if isinstance(cause, RayqError):
            raise cause from error
        raise RayqError(f"Ray at {address} failed: {_last_line(str(error))}") from error
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, on_sigterm)


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Hides what Ray's C++ part prints on stderr at each attempt to connect: the error says
    enough."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


# --- ending ---------------------------------------------------------------------------------------


class _Process(NamedTuple):
    """A running process, as /proc describes it."""

    command: str
    parent: int
    leader: int
    """The process that began the kernel's session that this process is in."""


def _processes() -> dict[int, _Process]:
    """All processes of this machine, by pid."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ")
            status = Path(f"/proc/{name}/stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        state, parent, _, leader = status.rpartition(")")[2].split()[:4]
        if state != "Z":
            found[int(name)] = _Process(command.decode(errors="replace"), int(parent), int(leader))
    return found


def processes_of(session: str) -> dict[int, str]:
    """The processes of a Ray session on this machine and those that they started: pid and
    command."""
    processes = _processes()
    number = session.rpartition("_")[2]  # The pid of the `ray start` that began it.
    leader = int(number) if number.isdecimal() else None
    found = {
        pid
        for pid, process in processes.items()
        if ("/ray/" in process.command and session in _SESSION.findall(process.command))
        or (process.leader == leader and _NAMELESS.match(process.command))
    }
    # While a process of Ray is in the kernel's session, no other session gets its number.
    if any(processes[pid].leader == leader for pid in found):
        found |= {pid for pid, process in processes.items() if process.leader == leader}
    while more := {pid for pid, process in processes.items() if process.parent in found} - found:
        found |= more
    return {pid: processes[pid].command for pid in found - {os.getpid()}}


def raylets_of(session: str) -> list[int]:
    """The pid of the session's raylet, which runs all other processes; empty where it has ended."""
    return _raylets(processes_of(session))


def _raylets(processes: Mapping[int, str]) -> list[int]:
    return [pid for pid, command in processes.items() if "/raylet/raylet " in command]


def stop_ray(session: str, address: str | None = None) -> int:
    """Ends the processes of that session and nothing else. Returns how many there were. The raylet
    ends first, since its workers end with it."""
    found = processes_of(session)
    raylets = _raylets(found)
    _signal(raylets, signal.SIGTERM)
    _wait_gone(session, set(raylets), RAYLET_PATIENCE_S)
    deadline_s = time.monotonic() + KILL_PATIENCE_S
    while left := processes_of(session):
        _signal(left, signal.SIGKILL)
        _wait_gone(session, set(left), 0.2)
        if time.monotonic() > deadline_s:
            raise RayqError(f"Processes of Ray's {session} do not end: {sorted(left)}.")
    if address is not None:
        _forget_address(address)
    return len(found)


def _signal(pids: Mapping[int, str] | list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _wait_gone(session: str, pids: set[int], patience_s: float) -> None:
    deadline_s = time.monotonic() + patience_s
    while pids & processes_of(session).keys() and time.monotonic() < deadline_s:
        time.sleep(0.05)


def _forget_address(address: str) -> None:
    """Removes Ray's note of where the last Ray of this machine is, for `ray.init("auto")`."""
    root = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"
    for path in {root, Path("/tmp/ray/ray_current_cluster")}:
        with contextlib.suppress(OSError):
            if path.read_text().strip() == address:
                path.unlink()
