"""Three Kafka brokers on the loopback address, each a JVM that is a controller, too (KRaft)."""

from __future__ import annotations

import base64
import os
import random
import socket
import subprocess
from pathlib import Path

from benchmarks.peers.side import BROKERS

# What Kafka's own start script gives a broker.
JVM = (
    *("java", "-server", "-Xms1G", "-Xmx1G", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20"),
    *("-XX:InitiatingHeapOccupancyPercent=35", "-XX:+ExplicitGCInvokesConcurrent"),
    "-Djava.awt.headless=true",
)


class KafkaCluster:
    """See the module. `close` kills what runs."""

    def __init__(self, root: Path, jars: Path) -> None:
        """Formats the directories and starts the brokers."""
        self._root = root
        self._java = (*JVM, "-cp", str(jars / "*"))
        self._brokers: dict[int, subprocess.Popen[bytes]] = {}
        ports = _free_ports(2 * BROKERS)
        self._ports, controller_ports = ports[:BROKERS], ports[BROKERS:]
        voters = ",".join(f"{n}@127.0.0.1:{port}" for n, port in enumerate(controller_ports))
        cluster_id = base64.urlsafe_b64encode(os.urandom(16)).decode().rstrip("=")
        for number in range(BROKERS):
            self._settings(number).write_text(
                f"process.roles=broker,controller\n"
                f"node.id={number}\n"
                f"controller.quorum.voters={voters}\n"
                f"controller.listener.names=CONTROLLER\n"
                f"listeners=PLAINTEXT://127.0.0.1:{self._ports[number]},"
                f"CONTROLLER://127.0.0.1:{controller_ports[number]}\n"
                f"log.dirs={root / f'kafka-{number}'}\n"
                f"min.insync.replicas=2\n"
                f"auto.create.topics.enable=false\n"
            )
            subprocess.run(
                [
                    *(*self._java, "kafka.tools.StorageTool", "format"),
                    *("-t", cluster_id, "-c", str(self._settings(number))),
                ],
                check=True,
                stdout=subprocess.DEVNULL,
            )
        self.start_missing()

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self._ports)

    def pid(self, broker: int) -> int:
        return self._brokers[broker].pid

    def pids(self) -> list[int]:
        return [broker.pid for broker in self._brokers.values()]

    def start_missing(self) -> None:
        """Starts the brokers that do not run."""
        for number in range(BROKERS):
            running = self._brokers.get(number)
            if running is None or running.poll() is not None:
                with open(self._root / f"kafka-{number}.log", "ab") as log:
                    self._brokers[number] = subprocess.Popen(
                        [*self._java, "kafka.Kafka", str(self._settings(number))],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )

    def check_running(self) -> None:
        """Raises RuntimeError where a broker has ended by itself."""
        for number, broker in self._brokers.items():
            if (code := broker.poll()) is not None:
                raise RuntimeError(f"Kafka's broker {number} ended with exit code {code}.")

    def close(self) -> None:
        for broker in self._brokers.values():
            broker.kill()
            broker.wait()

    def _settings(self, broker: int) -> Path:
        return self._root / f"kafka-{broker}.properties"


def _free_ports(count: int) -> list[int]:
    """Ports that no outgoing connection is given: one could take a port before its broker does."""
    found: list[int] = []
    for port in random.sample(range(20_000, 32_000), 100):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        found.append(port)
    return found[:count]
