"""`rayq.start` and `rayq.connect`: the ways to a cluster on Ray."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, Unpack

from rayq.client.cluster import Cluster
from rayq.client.consumer_pool import Handler, PoolControl, PoolSpec
from rayq.client.timeouts import takes_timeout
from rayq.config import ClusterConfig, only_known, parse
from rayq.config_keywords import ClusterKeywords
from rayq.errors import NoClusterError, RayqError
from rayq.runtime import current_cluster
from rayq.runtime.kept_settings import DEFAULT_NAME, LOOPBACK, given_config, settings_for
from rayq.runtime.layout import kept_here
from rayq.runtime.ray_specs import ClusterSpec
from rayq.runtime.ray_token import has_ray_token
from rayq.runtime.start_checks import check_start
from rayq.wire.authentication import client_key, key_of_token

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 60.0
"""Default of how long `connect` waits for a controller's process that is being started again."""
RAY_TOKEN_HINT = (
    " A Ray that asks for a token (as the one of `rayq start` does) needs RAY_AUTH_MODE=token in "
    "the environment before ray is imported."
)


class RayLifecycle:
    """Stops a cluster on Ray, restarts its brokers, and runs pools beside it, from any process that
    is connected to that Ray."""

    def __init__(self, cluster_name: str, ray_address: str | None = None) -> None:
        """`ray_address`: of the Ray that runs the cluster, where this process may not be connected
        to it yet."""
        self._cluster_name = cluster_name
        self._ray_address = ray_address

    def stop(self) -> None:
        _join_ray(self._ray_address)
        from rayq.runtime import ray_cluster, ray_pool

        ray_pool.stop_pools(self._cluster_name)
        ray_cluster.stop_cluster(self._cluster_name)

    def restart_broker(self, broker: int) -> None:
        _join_ray(self._ray_address)
        from rayq.runtime import ray_operations

        ray_operations.restart_broker(self._cluster_name, broker)

    def restart_controller(self) -> None:
        _join_ray(self._ray_address)
        from rayq.runtime import ray_operations

        ray_operations.restart_controller(self._cluster_name)

    def stop_broker(self, broker: int) -> None:
        _join_ray(self._ray_address)
        from rayq.runtime import ray_operations

        ray_operations.stop_broker(self._cluster_name, broker)

    def replace_disk(self, broker: int, node: str | None, host: str | None) -> None:
        _join_ray(self._ray_address)
        from rayq.runtime import ray_operations

        ray_operations.replace_disk(self._cluster_name, broker, node, host)

    def start_pool(self, cluster: Cluster, spec: PoolSpec, handler: Handler) -> PoolControl:
        _join_ray(self._ray_address)
        from rayq.runtime import ray_pool

        return ray_pool.start_pool(cluster, spec, handler)

    def pools(self, cluster: Cluster) -> dict[str, PoolControl]:
        _join_ray(self._ray_address)
        from rayq.runtime import ray_pool

        return ray_pool.pools(cluster.name)


def start(
    path: str,
    *,
    brokers: int | None = None,
    nodes: int | None = None,
    name: str | None = None,
    port: int | None = None,
    exist_ok: bool = False,
    **config: Unpack[ClusterKeywords],
) -> Cluster:
    """Starts a cluster on Ray: new in empty directories, or what the directories hold.

    `path` is a directory on each node; broker `i` keeps its data in `path/broker-<i>`. `brokers`:
    how many, spread over the nodes; None means those found in `path`, else one for each live node.
    A path that holds more than asked for starts all of them. `nodes`: waits until Ray has so many
    nodes (that may have brokers: see `broker_resource`), at most 10 minutes. `name`: the cluster's,
    "default" by default. Each broker listens on the first free port from `port`, 9392 by default.
    `config` are fields of `rayq.config.ClusterConfig`.

    `name`, `port` and `config` are kept with the data: a later start of the same `path` goes on
    with those that it is not given, TLS for example, and logs a warning of each that it changes.
    None as a value takes one back. A Ray that this process has started itself plays all hosts on
    one machine, and its brokers listen on 127.0.0.1 only, unless `bind_host` says otherwise.

    `exist_ok`: where a cluster of that name runs in this Ray already, connects to it. One of
    another path, with fewer brokers or another value of a given config field is an error.

    Ray: the one that is connected, else that of RAY_ADDRESS, else a local one of its own, which
    ends with this process. The actors are detached: they outlive the driver where Ray does. A node
    that joins later gets a broker.

    Returns when every broker has registered. Raises ConfigError; DirectoryInUseError (another
    process serves the directory); WrongClusterError (directories of several clusters);
    UnsupportedFormatError (written by a newer rayq); RayqError where a cluster of that name runs
    already, or directories or nodes are missing; ControllerUnavailableError where no majority of
    the voters' directories is there. On one machine most of these come before anything is started.
    """
    started, changes = start_or_find(
        path,
        brokers=brokers,
        nodes=nodes,
        name=name,
        port=port,
        exist_ok=exist_ok,
        config=config,
    )
    for change in changes:
        logger.warning("Not as at the last start of %s: %s", started.root, change)
    return cluster_of_spec(started)


def start_or_find(
    path: str,
    *,
    brokers: int | None,
    nodes: int | None,
    name: str | None,
    port: int | None,
    exist_ok: bool,
    config: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> tuple[ClusterSpec, list[str]]:
    """What `start` does; and what is not as it was at the last start, for people. `defaults` are
    the configs of a cluster for which nothing is given or kept; None: by who started this Ray."""
    given = given_config(config)
    root = os.path.abspath(os.path.expanduser(path))
    if not _has_ray():
        settings = settings_for(kept_here(root), name=name, port=port, given=given)
        check_start(root, brokers, settings.parsed())
    _join_ray(may_start=True)
    from rayq.runtime import ray_cluster, ray_lookup, ray_nodes

    kept = None
    if name is None:
        kept = ray_cluster.kept_settings(root, given.get("broker_resource"))
    wanted = name or (DEFAULT_NAME if kept is None else kept.cluster_name)
    running = ray_lookup.find_cluster(wanted)
    if running is not None:
        if not exist_ok:
            raise RayqError(
                f"A cluster named {wanted!r} runs in this Ray already: use exist_ok=True or "
                f"rayq.connect(name={wanted!r}), stop that one first, or give this one another "
                "name."
            )
        settings_for(running.settings, name=None, port=None, given=given)  # Checks the values.
        _check_as_asked(running, root, brokers, given)
        return running, []
    if defaults is None:
        defaults = {"bind_host": LOOPBACK} if ray_nodes.is_rays_only_machine() else {}
    return ray_cluster.start_cluster(
        root,
        brokers=brokers,
        nodes_min=nodes,
        cluster_name=name,
        port=port,
        given=given,
        defaults=defaults,
    )


@takes_timeout
def connect(
    address: str | None = None,
    *,
    name: str | None = None,
    token: str | None = None,
    timeout_s: float = CONNECT_TIMEOUT_S,
    **config: Unpack[ClusterKeywords],
) -> Cluster:
    """A cluster that runs.

    Without `address`: the `rayq.testing.LocalCluster` that this process has running (the last one
    started; of a `name`, where one is given); else the one called `name` ("default") in the Ray
    that this process is connected to (any driver, task or actor) or that RAY_ADDRESS names; else
    the one that `rayq start` has started on this machine. With `address`, "host:port" of any of
    its brokers, several with commas: from outside Ray, with `token`, else RAYQ_TOKEN, else that of
    the cluster that `rayq start` has started here, else the file ~/.rayq/token. `config` are the
    TLS fields of `rayq.config.ClusterConfig`.

    While Ray starts the controller's process again, this waits, for `timeout_s` at most.

    Raises NoClusterError, ConfigError, AuthenticationError (no token), TimeoutError.
    """
    options = parse(ClusterConfig, config)
    if address is not None:
        if token is None:
            token, known = current_cluster.saved_access(address)
            options = parse(ClusterConfig, {**only_known(ClusterConfig, known), **config})
        key = key_of_token(token.strip())
        return Cluster(
            address, key=key, name=name or DEFAULT_NAME, config=options
        ).make_current()
    local = Cluster.running_here(name)
    if local is not None:
        return local.connection().make_current()
    if not _has_ray():
        current = current_cluster.read_current()
        if current is None or name not in (None, current.name):
            raise _no_cluster_error(name)
        lifecycle = RayLifecycle(current.name, current.ray_address)
        return current_cluster.cluster_of(current, lifecycle).make_current()
    _join_ray()
    from rayq.runtime import ray_lookup

    spec = ray_lookup.find_cluster(name or DEFAULT_NAME, timeout_s=timeout_s)
    if spec is None:
        raise NoClusterError(
            f"No cluster named {name or DEFAULT_NAME!r} runs in this Ray: start one with "
            "rayq.start(path), or give the address of a broker."
        )
    return cluster_of_spec(spec)


def _check_as_asked(
    running: ClusterSpec, root: str, brokers: int | None, config: Mapping[str, Any]
) -> None:
    """Raises RayqError where a cluster that runs is not what `start` was to start."""
    differences = []
    if running.root != root:
        differences.append(f"the path {running.root}, not {root}")
    if brokers is not None and len(running.brokers) < brokers:
        differences.append(f"{len(running.brokers)} brokers, not {brokers}")
    differences += [
        f"{key} {getattr(running.config, key)!r}, not {value!r}"
        for key, value in config.items()
        if getattr(running.config, key) != value
    ]
    if differences:
        raise RayqError(
            f"A cluster named {running.cluster_name!r} runs in this Ray already, and is not as it "
            f"was asked for. It has {'; '.join(differences)}. Ask for what it has, stop it first, "
            "or give this one another name."
        )


def cluster_of_spec(spec: ClusterSpec) -> Cluster:
    """A cluster on the Ray of this process, which becomes the current one."""
    cluster = Cluster(
        [f"{host}:{port}" for host, port in spec.brokers],
        key=client_key(spec.secret),
        cluster_id=spec.cluster_id,
        name=spec.cluster_name,
        config=spec.config,
        lifecycle=RayLifecycle(spec.cluster_name),
    )
    return cluster.make_current()


def _has_ray() -> bool:
    """Whether this process is connected to a Ray, or told of one."""
    ray = sys.modules.get("ray")
    return "RAY_ADDRESS" in os.environ or (ray is not None and ray.is_initialized())


def _no_cluster_error(name: str | None) -> NoClusterError:
    which = "No cluster" if name is None else f"No cluster named {name!r}"
    return NoClusterError(
        f"{which} was started by `rayq start` on this machine, and this process is not connected "
        "to Ray: give the address of a broker, call ray.init(address=...), set RAY_ADDRESS, or "
        "start a cluster with rayq.start(path)."
    )


def _join_ray(known: str | None = None, *, may_start: bool = False) -> None:
    """Connects this process to Ray: see `start`. Never to one that merely happens to run here.
    `known` is the address of the Ray that is wanted. Raises NoClusterError."""
    address = known or os.environ.get("RAY_ADDRESS")
    if "ray" not in sys.modules and address and has_ray_token():
        # As Ray does for a Ray of its own where nothing is said.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    import ray

    from rayq.runtime.ray_noise import leave_out_noise, without_token_warning

    leave_out_noise()
    if ray.is_initialized():
        joined = ray.get_runtime_context().gcs_address
        if known is not None and joined != known:
            raise NoClusterError(
                f"The cluster runs in the Ray at {known}, and this process is connected to the one "
                f"at {joined}: call this in a process that is not."
            )
        return
    if address is None and not may_start:
        raise _no_cluster_error(None)
    try:
        with without_token_warning():
            ray.init(
                address=address or "local", include_dashboard=False if address is None else None
            )
    except ConnectionError as error:
        hint = "" if "RAY_AUTH_MODE" in os.environ else RAY_TOKEN_HINT
        raise NoClusterError(f"No Ray can be reached at {address}: {error}.{hint}") from error
