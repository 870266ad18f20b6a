"""The cluster that the faults break: a Ray head without brokers, and nodes with one broker each.

Each node has a loopback address of its own (127.0.0.11 and up). Brokers are pinned to nodes in the
order of the addresses, and the address of the head (127.0.0.2) comes last, so the head gets none.
No fault hits the head, since a Ray cluster without an external store ends with it.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray._private import state, worker
from ray.cluster_utils import Cluster as RayNodes
from ray.exceptions import RayError

from proving.chaos.processes import with_descendants
from proving.chaos.stalls import Stall, stalls_of
from rayq.client.cluster import Cluster
from rayq.errors import RayqError
from rayq.records import PartitionInfo
from rayq.runtime.ray import cluster as ray_cluster
from rayq.runtime.ray import lookup as ray_lookup
from rayq.wire.authentication import client_key

NAME = "chaos"
TOPIC = "chaos"
PARTITIONS = 3
REPLICAS = 3
PORT = 9392
HEAD_ADDRESS = "127.0.0.2"
SETTLE_TIMEOUT_S = 90.0
"""The run fails unless all replicas are in sync again this long after the end of a fault."""
SETTLE_POLL_S = 0.1
ASK_TIMEOUT_S = 5.0


class ControllerPlace(NamedTuple):
    """The controller's process, and the broker on its node (None where it is on the head)."""

    pid: int
    broker: int | None
    is_stand_in: bool
    """True if the broker's own process hosts the controller."""


class ChaosCluster:
    """See the module. Call `start`, and `close` in any case."""

    def __init__(self, root: Path, brokers: int = 3) -> None:
        self._root = root
        self._brokers = brokers
        self.topics = [TOPIC]
        """The topics that faults hit, and that have to be well again after each."""
        self._ray: RayNodes | None = None
        self._nodes: dict[int, Any] = {}
        self._cluster: Cluster | None = None
        self._addresses: dict[int, tuple[str, int]] = {}

    def start(self) -> None:
        # Ray gives the processes that it starts the niceness 15: the clients of a run, which share
        # the cores with them, would leave brokers and replicas next to no time.
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - so it is called
        self._ray = RayNodes(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "include_dashboard": False,
                "node_ip_address": HEAD_ADDRESS,
            },
        )
        for broker in range(self._brokers):
            self.add_node(broker)
        ray.init(
            address=self._ray.address,
            _node_ip_address=HEAD_ADDRESS,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        info, _ = ray_cluster.start_cluster(
            str(self._root),
            brokers=self._brokers,
            cluster_name=NAME,
            port=PORT,
            given={},
        )
        self._cluster = Cluster(
            [f"{host}:{port}" for host, port in info.brokers],
            key=client_key(info.secret),
            cluster_id=info.cluster_id,
        )
        self._addresses = dict(enumerate(info.brokers))
        self._cluster.create_topic(TOPIC, partitions=PARTITIONS, replication_factor=REPLICAS)
        self.wait_settled()

    @property
    def rayq(self) -> Cluster:
        assert self._cluster is not None
        return self._cluster

    @property
    def brokers(self) -> range:
        return range(self._brokers)

    def stop(self) -> None:
        """Stops the brokers in a controlled way. `close` ends the nodes."""
        self.rayq.close()
        ray_cluster.stop_cluster(NAME)

    def stalls(self) -> list[Stall]:
        """The event loops of servers that stood still."""
        node = worker.global_worker.node
        assert node is not None
        return stalls_of(Path(node.get_logs_dir_path()))

    def close(self) -> None:
        ray.shutdown()
        if self._ray is not None:
            self._ray.shutdown()  # type: ignore[no-untyped-call]

    # --- who is where -----------------------------------------------------------------------------

    def partitions(self, topic: str = TOPIC) -> list[PartitionInfo]:
        return self.rayq.admin.describe_topic(topic).partitions

    def replica_pid(self, partition: PartitionInfo, broker: int) -> int | None:
        return next(replica.pid for replica in partition.replicas if replica.broker == broker)

    def broker_pid(self, broker: int) -> int | None:
        found = _actor(f"rayq:{NAME}:broker-{broker}")
        return None if found is None else int(found["Pid"])

    def controller(self) -> ControllerPlace | None:
        """The controller's place. None while there is no controller, or it moves."""
        info = self.rayq.admin.describe_cluster()
        for broker in info.brokers:
            if info.controller == f"{broker.host}:{broker.port}":
                pid = self.broker_pid(broker.broker)
                return None if pid is None else ControllerPlace(pid, broker.broker, True)
        found = _actor(f"rayq:{NAME}:controller")
        if info.controller is None or found is None:
            return None
        node_id = found["Address"]["NodeID"]
        on_node = (broker.broker for broker in info.brokers if broker.node_id == node_id)
        return ControllerPlace(int(found["Pid"]), next(on_node, None), False)

    def node_pids(self, broker: int) -> list[int]:
        """The raylet of a broker's node, and all processes that it started."""
        raylet: int = self._nodes[broker].all_processes["raylet"][0].process.pid
        return with_descendants(raylet)

    def until_back_s(self, broker: int, killed_s: float) -> float:
        """Waits until a broker that was killed at that time takes connections again: how long it
        was away. Raises TimeoutError."""
        address = self._addresses[broker]
        # On a crowded machine the end of a killed process takes a moment.
        wait_until(lambda: not _takes(address), SETTLE_POLL_S * 50, lambda: f"{address} answers")
        wait_until(lambda: _takes(address), SETTLE_TIMEOUT_S, lambda: f"{address} is silent")
        return time.monotonic() - killed_s

    # --- nodes that come and go -------------------------------------------------------------------

    def add_node(self, broker: int) -> None:
        """Adds a node with the address of that broker, and so with its disk."""
        assert self._ray is not None
        self._nodes[broker] = self._ray.add_node(
            num_cpus=1, node_ip_address=f"127.0.0.{11 + broker}"
        )

    def forget_node(self, broker: int) -> None:
        """Removes a node whose processes were killed."""
        assert self._ray is not None
        self._ray.remove_node(self._nodes.pop(broker), allow_graceful=False)

    # --- health -----------------------------------------------------------------------------------

    def unsettled(self) -> str | None:
        """The reason why the cluster is not well yet. None when every replica is in sync and every
        broker lives.

        Each broker's process has to say so itself. In the metadata a broker that was killed lives
        until its session ends, and on a crowded machine Ray takes longer than that to start it
        again: the next fault would take a second broker of three.
        """
        registered = [broker for broker in self.brokers if _is_registered(broker)]
        if registered != list(self.brokers):
            return f"brokers {registered} are registered"
        try:
            info = self.rayq.admin.describe_cluster(timeout_s=ASK_TIMEOUT_S)
            live = sorted(broker.broker for broker in info.brokers if broker.live)
            if live != list(self.brokers):
                return f"brokers {live} live"
            for topic in self.topics:
                for partition in self.partitions(topic):
                    if len(partition.isr) < REPLICAS or partition.leader is None:
                        return f"{topic}-{partition.partition} has {partition.isr} in sync"
                    if any(replica.pid is None for replica in partition.replicas):
                        return f"{topic}-{partition.partition} has a silent replica"
        except RayqError as error:
            return f"{type(error).__name__}: {error}"
        return None

    def wait_settled(self, timeout_s: float = SETTLE_TIMEOUT_S) -> None:
        """Waits until the cluster is well. Raises TimeoutError."""
        wait_until(lambda: self.unsettled() is None, timeout_s, self.unsettled)


def wait_until(
    holds: Callable[[], bool], timeout_s: float, why_not: Callable[[], str | None]
) -> None:
    """Waits until `why_not()` is None. Raises TimeoutError with its last answer."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"After {timeout_s:.0f} s still: {why_not()}.")
        time.sleep(SETTLE_POLL_S)


def _is_registered(broker: int) -> bool:
    """Returns whether the broker's process runs and has a session with the controller."""
    name = ray_lookup.broker_name(NAME, broker)
    try:
        actor: Any = ray.get_actor(name, namespace=ray_lookup.NAMESPACE)
        return bool(ray.get(actor.is_registered.remote(), timeout=ASK_TIMEOUT_S))
    except (ValueError, RayError):  # The process is gone, or is being started again.
        return False


def _takes(address: tuple[str, int]) -> bool:
    """Returns whether a process takes connections there."""
    try:
        socket.create_connection(address, timeout=1.0).close()
    except OSError:
        return False
    return True


def _actor(name: str) -> dict[str, Any] | None:
    """A running actor, as Ray describes it."""
    listed: dict[str, dict[str, Any]] = state.actors()
    for info in listed.values():
        if info["Name"] == name and info["State"] == "ALIVE":
            return info
    return None
