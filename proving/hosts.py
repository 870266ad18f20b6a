"""Several hosts on one machine: each has a network, processes, home and /tmp of its own, and sshd.

A host is a network namespace with an address in 10.77.0.0/24, joined to the others by a bridge, and
an sshd that is the first process of a PID namespace. A host has what `ray up` needs of a machine,
and can fail as machines do: `cut` takes it off the network while all its processes keep running,
`kill` ends every process at once while its disk stays. Root only.

    with Hosts(directory, 3) as hosts:
        hosts[1].run("hostname")
        hosts[1].cut()

The machine's file system is shared read-write except /root, /tmp, /mnt and /dev/shm, which each
host has for itself. The interpreter that runs this module has the same path on every host.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

NETWORK = "10.77.0"
MACHINE = f"{NETWORK}.254"
"""The machine's own address on the bridge."""
KNOWN_ELSEWHERE = "8.8.8.8"
"""The address that programs, Ray among them, use as an example of the world outside."""
HOSTS_MAX = 20
BRIDGE = "rayq-hosts"
PREFIX = "rayq-h"
LOCK = "/run/rayq-hosts.lock"
TOOLS = ("ip", "sshd", "ssh", "ssh-keygen", "rsync", "unshare", "nsenter", "setpriv", "mount")
OWN = ("/root", "/tmp", "/mnt")
"""Directories that a host does not share with the machine."""
CHECKOUT = Path(__file__).resolve().parents[1]
BOOT_TIMEOUT_S = 20.0
LOCK_TIMEOUT_S = 600.0


class HostError(Exception):
    """A command failed on a host, or on the machine while it prepared a host."""


def why_not() -> str | None:
    """The reason why this machine cannot run several hosts; None when it can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    missing = [tool for tool in TOOLS if _which(tool) is None]
    if missing:
        names = ", ".join(missing)
        return f"there is no {names} here (apt-get install iproute2 openssh-server rsync)"
    try:
        _call("ip", "netns", "list")
    except HostError as error:
        return f"network namespaces are not allowed here: {error}"
    return None


class Host:
    """One host. `boot` starts it, `kill` is a loss of power: the disk (`root`) stays."""

    def __init__(self, number: int, directory: Path, key: Path) -> None:
        self.number = number
        self.name = f"{PREFIX}{number}"
        self.address = f"{NETWORK}.{number}"
        self.root = directory / f"h{number}"
        """`root/mnt` is the host's /mnt, `root/root` its /root, `root/tmp` its /tmp."""
        self.key = key
        self._process: subprocess.Popen[bytes] | None = None
        self._init: int | None = None

    # --- coming and going -------------------------------------------------------------------------

    def connect(self) -> None:
        """Makes the host's network: a namespace and a cable to the bridge."""
        inside, outside = "eth0", self.name
        _call("ip", "netns", "add", self.name)
        _call(
            "ip", "link", "add", outside, "type", "veth",
            "peer", "name", inside, "netns", self.name,
        )  # fmt: skip
        _call("ip", "link", "set", outside, "master", BRIDGE, "up")
        for arguments in (
            ("addr", "add", f"{self.address}/24", "dev", inside),
            ("link", "set", "lo", "up"),
            ("link", "set", inside, "up"),
            # This route leads nowhere, but programs that ask for it learn their own address. There
            # is no default route: programs that look for a name server or a cloud have to fail at
            # once.
            ("route", "add", KNOWN_ELSEWHERE, "via", MACHINE),
        ):
            _call("ip", "-n", self.name, *arguments)

    def boot(self) -> None:
        """Starts sshd, the host's first process, and waits until it listens. Raises HostError."""
        self._prepare_disk()
        script = "\n".join(
            [
                "set -e",
                f"hostname {self.name}",
                *self._mounts(),
                "mount -t tmpfs tmpfs /dev/shm",
                "mkdir -p /run/sshd",
                f"exec {_which('sshd')} -D -e -f /root/.sshd/config",
            ]
        )
        log = (self.root / "sshd.log").open("ab")
        with log:
            self._process = subprocess.Popen(
                [
                    # The host ends with this process, however the process ends.
                    *("setpriv", "--pdeathsig", "KILL"),
                    *("ip", "netns", "exec", self.name),
                    *("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc"),
                    *("--kill-child", "sh", "-c", script),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
            )
        unshare = self._process.pid
        deadline_s = time.monotonic() + BOOT_TIMEOUT_S
        while True:
            children = _read(f"/proc/{unshare}/task/{unshare}/children").split()
            if children and _read(f"/proc/{children[0]}/comm").strip() == "sshd":
                self._init = int(children[0])
                if self._answers():
                    return
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise HostError(f"{self.name} does not boot: {_read(self.root / 'sshd.log')}")
            time.sleep(0.02)

    def kill(self) -> None:
        """Ends all processes of the host at once. Its files stay: `boot` brings the host back."""
        if self._process is None:
            return
        if self._init is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._init, signal.SIGKILL)  # All others end with the first process.
        self._process.kill()
        self._process.wait(BOOT_TIMEOUT_S)
        self._process = self._init = None

    def cut(self) -> None:
        """Pulls the cable: the host keeps running and reaches only itself."""
        _call("ip", "link", "set", self.name, "down")

    def mend(self) -> None:
        """Plugs the cable in again."""
        _call("ip", "link", "set", self.name, "up")

    # --- using it ---------------------------------------------------------------------------------

    def start(
        self,
        *command: str,
        environment: Mapping[str, str] | None = None,
        stdout: int | IO[bytes] | None = subprocess.PIPE,
        stderr: int | IO[bytes] | None = subprocess.STDOUT,
    ) -> subprocess.Popen[str]:
        """Starts a command on the host, as root in /root, with a plain environment. This also works
        while the host is cut off."""
        assert self._init is not None, f"{self.name} is not up"
        shown = {
            "HOME": "/root",
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
            **(environment or {}),
        }
        return subprocess.Popen(
            [
                *("nsenter", "--target", str(self._init)),
                *("--mount", "--uts", "--ipc", "--net", "--pid", "--"),
                *("env", "--chdir=/root", "-i"),
                *(f"{name}={value}" for name, value in shown.items()),
                *command,
            ],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
        )

    def run(
        self,
        *command: str,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> str:
        """Runs a command on the host and returns what it printed. Raises HostError."""
        process = self.start(*command, environment=environment)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            raise HostError(
                f"{self.name}: {shlex.join(command)} took more than {timeout_s:.0f} s:\n{output}"
            ) from None
        if process.returncode != 0:
            raise HostError(
                f"{self.name}: {shlex.join(command)} ended with {process.returncode}:\n{output}"
            )
        return output

    def _prepare_disk(self) -> None:
        config = self.root / "root/.sshd"
        config.mkdir(parents=True, exist_ok=True)
        for own in OWN:
            self._on_disk(own).mkdir(exist_ok=True)
        self._on_disk("/tmp").chmod(0o1777)
        host_key = config / "host_key"
        if not host_key.exists():
            _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(host_key))
        (self.root / "root/.bashrc").touch()
        (config / "authorized_keys").write_bytes(self.key.with_suffix(".pub").read_bytes())
        (config / "config").write_text(
            "ListenAddress 0.0.0.0\n"
            "HostKey /root/.sshd/host_key\n"
            "AuthorizedKeysFile /root/.sshd/authorized_keys\n"
            "PidFile none\nStrictModes no\nUsePAM no\nPermitRootLogin yes\n"
            "PasswordAuthentication no\nUseDNS no\nPrintMotd no\nMaxStartups 100\n"
        )

    def _mounts(self) -> Iterator[str]:
        """Commands that give the host directories of its own. The directories of the program that
        runs the tests stay visible below them."""
        for needed in (CHECKOUT, Path(sys.prefix), Path(sys.base_prefix)):
            if any(needed.is_relative_to(own) for own in OWN):
                place = shlex.quote(str(self._on_disk(str(needed))))
                yield f"mkdir -p {place}"
                yield f"mount --bind {shlex.quote(str(needed))} {place}"
        # The directory that holds the hosts' disks is mounted over last: then they are out of
        # sight.
        for own in sorted(OWN, key=self.root.is_relative_to):
            yield f"mount --rbind {shlex.quote(str(self._on_disk(own)))} {own}"

    def _on_disk(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def _answers(self) -> bool:
        probe = "import socket; socket.create_connection(('127.0.0.1', 22), 2).close()"
        try:
            self.run("/usr/bin/env", sys.executable, "-S", "-c", probe)
        except HostError:
            return False
        return True


class Hosts:
    """Hosts 1 to `count` on one bridge, all up; see the module. There is one such network at a
    time: another process that wants one waits. `add` makes one more host."""

    def __init__(self, directory: Path, count: int) -> None:
        self._directory = directory
        self._count = count
        self._hosts: dict[int, Host] = {}
        self._lock: IO[bytes] | None = None
        self.key = directory / "key"
        """The private key that logs in to every host as root."""

    def __enter__(self) -> Self:
        self._lock = _wait_for_lock()
        try:
            _remove_leftovers()
            self._directory.mkdir(parents=True, exist_ok=True)
            _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key))
            _call("ip", "link", "add", BRIDGE, "type", "bridge")
            _call("ip", "addr", "add", f"{MACHINE}/24", "dev", BRIDGE)
            _call("ip", "link", "set", BRIDGE, "up")
            for _ in range(self._count):
                self.add()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    def add(self) -> Host:
        """Adds one more host. Raises HostError."""
        number = len(self._hosts) + 1
        assert number <= HOSTS_MAX
        host = Host(number, self._directory, self.key)
        self._hosts[number] = host
        host.connect()
        host.boot()
        return host

    def close(self) -> None:
        """Ends every process of the hosts and removes the network; the disks stay."""
        for host in self._hosts.values():
            host.kill()
        _remove_leftovers()
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _wait_for_lock() -> IO[bytes]:
    lock = open(LOCK, "wb")  # noqa: SIM115  It is held for as long as the network stands.
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                lock.close()
                raise HostError(f"another process holds {LOCK}: one such network at a time") from (
                    None
                )
            time.sleep(0.2)
        else:
            return lock


def _remove_leftovers() -> None:
    """Removes the network of this run, or of an earlier run that was killed."""
    names = [path.name for path in Path("/run/netns").glob(f"{PREFIX}*")]
    links = [path.name for path in Path("/sys/class/net").glob(f"{PREFIX}[0-9]*")]
    for command in (
        *(("link", "delete", name) for name in links),
        *(("netns", "delete", name) for name in names),
        ("link", "delete", BRIDGE),
    ):
        subprocess.run(["ip", *command], stderr=subprocess.DEVNULL, check=False)


def _which(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _call(*command: str) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise HostError(f"{shlex.join(command)}: {done.stderr.strip()}")


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
