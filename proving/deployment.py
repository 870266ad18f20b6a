"""`deploy/local.yaml` run on the hosts of `proving.hosts`, as an operator would."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from proving.hosts import CHECKOUT, Host
from rayq.client.cluster import Cluster
from rayq.wire.authentication import client_key

TEMPLATE = CHECKOUT / "deploy/local.yaml"
VENV = "~/rayq-venv"
DATA = "/mnt/rayq"
PORT = 9392
UP_TIMEOUT_S = 120.0
ENVIRONMENT = {"RAY_ADDRESS": "auto", "RAY_AUTH_MODE": "token"}
"""The environment of drivers on the machines of the cluster."""


class Deployment:
    """A cluster on `machines`, of which the first is the head. The operator works on `desk`."""

    def __init__(self, desk: Host, machines: Sequence[Host], key: Path) -> None:
        self.desk = desk
        self.machines = list(machines)
        home = desk.root / "root"
        (home / ".ssh").mkdir(exist_ok=True)
        shutil.copy(key, home / ".ssh/id_ed25519")
        self._config = home / "cluster.yaml"
        desk.run("ray", "get-auth-token", "--generate")
        (home / "dist").mkdir(exist_ok=True)  # The operator's wheel is here.

    def up(self, *options: str) -> str:
        """Runs `ray up` and returns its output. Raises HostError."""
        config: dict[str, Any] = yaml.safe_load(TEMPLATE.read_text())
        head, *workers = (machine.address for machine in self.machines)
        config["provider"].update(head_ip=head, worker_ips=workers)
        config["auth"]["ssh_user"] = "root"
        # The packages are installed already, and the hosts do not reach a package index.
        config["setup_commands"] = [f"ln -sfn {shlex.quote(sys.prefix)} {VENV}"]
        self._config.write_text(yaml.safe_dump(config))
        command = ("ray", "up", "--yes", "--no-config-cache", *options, "cluster.yaml")
        return self.desk.run(*command, timeout_s=UP_TIMEOUT_S)

    def connect(self) -> Cluster:
        """Connects from outside, as a client on the machine that runs the hosts."""
        head = self.machines[0]
        (secret,) = (head.root / DATA.lstrip("/")).glob("broker-*/secret")
        addresses = [(machine.address, PORT) for machine in self.machines]
        return Cluster(addresses, key=client_key(secret.read_bytes()))
