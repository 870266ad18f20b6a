"""A Ray whose autoscaler adds nodes and takes them away, on this machine.

It is `ray.cluster_utils.AutoscalingCluster` without `ray stop --force` at its begin and end, which
would end every other Ray of the machine too, and it takes any free port.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from ray._private import services
from ray.cluster_utils import AutoscalingCluster

from tests.local.support import eventually
from tests.real.support import kill_all_below


class AutoscaledRay(AutoscalingCluster):
    """Use in a `with` block; `address` is for `ray.init`."""

    def __init__(
        self,
        directory: Path,
        *,
        head: dict[str, float],
        workers: dict[str, Any],
        idle_timeout_s: float,
    ) -> None:
        self._directory = directory
        # Not the loopback address: a driver would look for the cluster under this one instead.
        self._host: str = services.get_node_ip_address()
        with socket.socket() as free:
            free.bind((self._host, 0))
            self._port = free.getsockname()[1]
        self.address = f"{self._host}:{self._port}"
        super().__init__(head, workers, idle_timeout_minutes=idle_timeout_s / 60)

    def _generate_config(
        self,
        head_resources: dict[str, float],
        worker_node_types: dict[str, Any],
        autoscaler_v2: bool = False,
        **config: Any,
    ) -> dict[str, Any]:
        """The configuration, without the example file of Ray's repository, which Ray does not
        install."""
        return {
            "cluster_name": "autoscaled",
            "max_workers": sum(one["max_workers"] for one in worker_node_types.values()),
            "provider": {
                "type": "fake_multinode",
                "gcs_address": self.address,
                # All nodes have this machine's address, and nothing has to be installed on them.
                "use_node_id_as_ip": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
            },
            "auth": {},
            "available_node_types": {
                **worker_node_types,
                "ray.head.default": {
                    "resources": dict(head_resources),
                    "node_config": {},
                    "max_workers": 0,
                },
            },
            "head_node_type": "ray.head.default",
            "upscaling_speed": 10.0,
            "file_mounts": {},
            "cluster_synced_files": [],
            "initialization_commands": [],
            "setup_commands": [],
            "head_setup_commands": [],
            "worker_setup_commands": [],
            "head_start_ray_commands": [],
            "worker_start_ray_commands": [],
            **config,
        }

    def __enter__(self) -> AutoscaledRay:
        path = self._directory / "autoscaling.json"
        path.write_text(json.dumps(self._config))
        resources = dict(self._head_resources)
        log = (self._directory / "ray-start.log").open("w")
        self._process = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("ray")),
                "start",
                "--head",
                "--block",
                f"--port={self._port}",
                f"--node-ip-address={self._host}",
                f"--num-cpus={resources.pop('CPU', 0):.0f}",
                f"--resources={json.dumps(resources)}",
                f"--autoscaling-config={path}",
                "--include-dashboard=false",
                "--disable-usage-stats",
            ],
            env=os.environ
            | {
                "AUTOSCALER_UPDATE_INTERVAL_S": "1",
                "RAY_FAKE_CLUSTER": "1",
                "RAY_AUTH_MODE": "disabled",
            },
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        log.close()
        started = self._directory / "ray-start.log"
        try:
            eventually(
                lambda: "Ray runtime started" in started.read_text()
                or self._process.poll() is not None,
                "Ray has started",
                60,
            )
            assert self._process.poll() is None, started.read_text()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        kill_all_below(self._process.pid)
        self._process.wait()
