"""`rayq.start` and `rayq.connect`: the ways to a cluster on Ray."""

from __future__ import annotations

import os
import sys
from typing import Any

from rayq.client.cluster import Cluster
from rayq.client.consumer_pool import PoolControl, PoolSpec
from rayq.config import ClusterConfig, parse
from rayq.errors import AuthenticationError, NoClusterError, RayqError
from rayq.wire.authentication import client_key, key_of_token

DEFAULT_PORT = 9392
TOKEN_PATH = "~/.rayq/token"


class RayLifecycle:
    """Stops a cluster on Ray, restarts its brokers, and runs pools beside it, from any process that
    is connected to that Ray."""

    def __init__(self, cluster_name: str) -> None:
        self._cluster_name = cluster_name

    def stop(self) -> None:
        from rayq.runtime import ray_pool, ray_runtime

        _join_ray()
        ray_pool.stop_pools(self._cluster_name)
        ray_runtime.stop_cluster(self._cluster_name)

    def restart_broker(self, broker: int) -> None:
        from rayq.runtime import ray_operations

        _join_ray()
        ray_operations.restart_broker(self._cluster_name, broker)

    def restart_controller(self) -> None:
        from rayq.runtime import ray_operations

        _join_ray()
        ray_operations.restart_controller(self._cluster_name)

    def stop_broker(self, broker: int) -> None:
        from rayq.runtime import ray_operations

        _join_ray()
        ray_operations.stop_broker(self._cluster_name, broker)

    def replace_disk(self, broker: int, node: str | None, host: str | None) -> None:
        from rayq.runtime import ray_operations

        _join_ray()
        ray_operations.replace_disk(self._cluster_name, broker, node, host)

    def start_pool(self, cluster: Cluster, spec: PoolSpec) -> PoolControl:
        from rayq.runtime import ray_pool

        _join_ray()
        return ray_pool.start_pool(cluster, spec)

    def pools(self, cluster: Cluster) -> dict[str, PoolControl]:
        from rayq.runtime import ray_pool

        _join_ray()
        return ray_pool.pools(cluster.name)


def start(
    path: str,
    *,
    brokers: int | None = None,
    nodes: int | None = None,
    name: str = "default",
    port: int = DEFAULT_PORT,
    **config: Any,
) -> Cluster:
    """Starts a cluster on Ray: new in empty directories, or what the directories hold.

    `path` is a directory on each node; broker `i` keeps its data in `path/broker-<i>`. `brokers`:
    how many, spread over the nodes; None means those found in `path`, else one for each live node.
    A path that holds more than asked for starts all of them. `nodes`: waits until Ray has so many
    nodes (that may have brokers: see `broker_resource`), at most 10 minutes. Each broker listens on
    the first free port from `port`. `config` are fields of `rayq.config.ClusterConfig`.

    Ray: the one that is connected, else that of RAY_ADDRESS, else a local one of its own, which
    ends with this process. The actors are detached: they outlive the driver where Ray does. A node
    that joins later gets a broker.

    Returns when every broker has registered. Raises ConfigError; DirectoryInUseError (another
    process serves the directory); WrongClusterError (directories of several clusters);
    UnsupportedFormatError (written by a newer rayq); RayqError where a cluster of that name runs
    already, or directories or nodes are missing; ControllerUnavailableError where no majority of
    the voters' directories is there.
    """
    options = parse(ClusterConfig, config)
    _join_ray(may_start=True)
    from rayq.runtime import ray_runtime

    if ray_runtime.find_cluster(name) is not None:
        raise RayqError(
            f"A cluster named {name!r} runs in this Ray already: use rayq.connect(name={name!r}), "
            "stop that one first, or give this one another name."
        )
    info = ray_runtime.start_cluster(
        os.path.abspath(os.path.expanduser(path)),
        brokers=brokers,
        nodes_min=nodes,
        cluster_name=name,
        port=port,
        config=options,
    )
    return _cluster_of(info)


def connect(
    address: str | None = None,
    *,
    name: str = "default",
    token: str | None = None,
    **config: Any,
) -> Cluster:
    """A cluster that runs.

    Without `address`: the one called `name` in the Ray that this process is connected to (any
    driver, task or actor) or that RAY_ADDRESS names. With `address`, "host:port" of any of its
    brokers, several with commas: from outside Ray, with `token`, else RAYQ_TOKEN, else the file
    ~/.rayq/token. `config` are the TLS fields of `rayq.config.ClusterConfig`.

    Raises NoClusterError, ConfigError, AuthenticationError (no token).
    """
    options = parse(ClusterConfig, config)
    if address is not None:
        key = key_of_token(_token(token))
        return Cluster(address.split(","), key=key, name=name, config=options).make_current()
    from rayq.runtime import ray_runtime

    _join_ray()
    info = ray_runtime.find_cluster(name)
    if info is None:
        raise NoClusterError(
            f"No cluster named {name!r} runs in this Ray: start one with rayq.start(path), or give "
            "the address of a broker."
        )
    return _cluster_of(info)


def _cluster_of(info: Any) -> Cluster:
    cluster = Cluster(
        [f"{host}:{port}" for host, port in info.brokers],
        key=client_key(info.secret),
        cluster_id=info.cluster_id,
        name=info.cluster_name,
        config=info.config,
        lifecycle=RayLifecycle(info.cluster_name),
    )
    return cluster.make_current()


def _join_ray(*, may_start: bool = False) -> None:
    """Connects this process to Ray: see `start`. Never to one that merely happens to run here."""
    address = os.environ.get("RAY_ADDRESS")
    if may_start and address is None and "ray" not in sys.modules:
        # As Ray does for a Ray of its own where nothing is said; then it warns that it did.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    import ray

    if ray.is_initialized():
        return
    if address is None and not may_start:
        raise NoClusterError(
            "This process is not connected to Ray: call ray.init(address=...), set RAY_ADDRESS, "
            "start a cluster with rayq.start(path), or give the address of a broker."
        )
    ray.init(address=address or "local", include_dashboard=False if address is None else None)


def _token(token: str | None) -> str:
    found = token or os.environ.get("RAYQ_TOKEN")
    if found is None:
        try:
            with open(os.path.expanduser(TOKEN_PATH), encoding="utf-8") as file:
                found = file.read()
        except FileNotFoundError:
            raise AuthenticationError(
                "A token is needed to connect from outside Ray: pass token=, set RAYQ_TOKEN, or "
                f"put it into {TOKEN_PATH}. `cluster.token` of a connected process shows it."
            ) from None
    return found.strip()
