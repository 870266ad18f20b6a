"""The ways of a process to a cluster on Ray, and to the Ray that runs it.

`rayq.connect` is here, and `Cluster.current` of a process that has no cluster yet comes here.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Unpack

from rayq.client.cluster import Cluster
from rayq.client.consumer_pool import Handler, PoolControl, PoolSpec
from rayq.client.timeouts import takes_timeout
from rayq.config import ClusterConfig, only_known, parse
from rayq.config.keywords import ClusterKeywords
from rayq.errors import AuthenticationError, NoClusterError
from rayq.runtime import current_cluster
from rayq.runtime.current_cluster import Current
from rayq.runtime.kept_settings import DEFAULT_NAME
from rayq.runtime.ray.specs import ClusterSpec
from rayq.runtime.ray.token import use_ray_token
from rayq.wire.authentication import (
    CERTIFICATE_KEY,
    ClientKey,
    client_key,
    client_key_of,
    principal_key,
)

CONNECT_TIMEOUT_S = 60.0
"""Default of how long `connect` waits for a controller's process that is being started again."""
RAY_TOKEN_HINT = (
    " A Ray that asks for a token (as the one of `rayq start` does) needs that token in "
    "~/.ray/auth_token."
)


class RayLifecycle:
    """Stops a cluster on Ray, restarts its brokers, and runs pools beside it, from any process that
    is connected to that Ray."""

    def __init__(self, cluster_name: str, ray_address: str | None = None) -> None:
        """`ray_address`: of the Ray that runs the cluster, where this process may not be connected
        to it yet."""
        self._cluster_name = cluster_name
        self.ray_address = ray_address

    def stop(self) -> None:
        join_ray(self.ray_address)
        from rayq.runtime.ray import cluster as ray_cluster
        from rayq.runtime.ray import pool as ray_pool

        ray_pool.stop_pools(self._cluster_name)
        ray_cluster.stop_cluster(self._cluster_name)

    def restart_broker(self, broker: int) -> None:
        join_ray(self.ray_address)
        from rayq.runtime.ray import operations as ray_operations

        ray_operations.restart_broker(self._cluster_name, broker)

    def restart_controller(self) -> None:
        join_ray(self.ray_address)
        from rayq.runtime.ray import operations as ray_operations

        ray_operations.restart_controller(self._cluster_name)

    def stop_broker(self, broker: int) -> None:
        join_ray(self.ray_address)
        from rayq.runtime.ray import operations as ray_operations

        ray_operations.stop_broker(self._cluster_name, broker)

    def replace_disk(self, broker: int, node: str | None, host: str | None) -> None:
        join_ray(self.ray_address)
        from rayq.runtime.ray import operations as ray_operations

        ray_operations.replace_disk(self._cluster_name, broker, node, host)

    def start_pool(self, cluster: Cluster, spec: PoolSpec, handler: Handler) -> PoolControl:
        join_ray(self.ray_address)
        from rayq.runtime.ray import pool as ray_pool

        return ray_pool.start_pool(cluster, spec, handler)

    def pools(self, cluster: Cluster) -> dict[str, PoolControl]:
        join_ray(self.ray_address)
        from rayq.runtime.ray import pool as ray_pool

        return ray_pool.pools(cluster.name)


@takes_timeout
def connect(
    address: str | None = None,
    *,
    name: str | None = None,
    token: str | None = None,
    client_id: str = "",
    timeout_s: float = CONNECT_TIMEOUT_S,
    **config: Unpack[ClusterKeywords],
) -> Cluster:
    """A cluster that runs.

    Without `address`: the `rayq.testing.LocalCluster` that this process has running (the last one
    started; of a `name`, where one is given); else the one called `name` (without: the only one
    there is, or "default") in the Ray that this process is connected to (any driver, task or actor)
    or that RAY_ADDRESS names; else, unless that Ray may be one of others, the one that `rayq start`
    has started on this machine. With `address`, "host:port" of any of its brokers, several with
    commas: from outside Ray, with `token`, else RAYQ_TOKEN, else that of the cluster that `rayq
    start` has started here, else the file ~/.rayq/token, which may be a principal's (`rayq2-...`):
    the connection has the rights of the token's owner. Without any token it is the principal that
    `tls_certificate` names. Without `address` it is the superuser, unless `token` is given,
    RAYQ_TOKEN is that of a principal, or the cluster in Ray has an `inside_ray_principal`.
    `client_id` names this program to the servers, for quotas and for people. `config` are the TLS
    fields of `rayq.config.ClusterConfig`.

    While Ray starts the controller's process again, this waits, for `timeout_s` at most.

    Raises NoClusterError, ConfigError, AuthenticationError (no token), TimeoutError.
    """
    options = parse(ClusterConfig, config)
    if address is not None:
        key = None if token is None else client_key_of(token, "token=")
        if key is None:
            try:
                key, known = current_cluster.saved_access(address)
            except AuthenticationError:
                if options.tls_certificate is None:
                    raise
                key = CERTIFICATE_KEY
            else:
                options = parse(ClusterConfig, {**only_known(ClusterConfig, known), **config})
        return Cluster(
            address,
            key=key,
            name=name or DEFAULT_NAME,
            config=options,
            client_id=client_id,
        ).make_current()
    local, key = Cluster.running_here(name), current_cluster.key_given(token)
    if local is not None:
        return local.connection(key, client_id).make_current()
    if not has_ray():
        current = _started_here(name)
        if current is None:
            raise _no_cluster_error(name)
        return _cluster_started_here(current, key, client_id)
    join_ray()
    from rayq.runtime.ray import lookup as ray_lookup
    from rayq.runtime.ray.nodes import is_rays_only_machine

    wanted = name or ray_lookup.likely_name(DEFAULT_NAME)
    spec = ray_lookup.find_cluster(wanted, timeout_s=timeout_s)
    if spec is not None:
        return cluster_of_spec(spec, _key_inside_ray(spec) if key is None else key, client_id)
    current, there = _started_here(name), ""
    if current is not None:
        if is_rays_only_machine():  # Ray Data starts such a Ray by itself.
            return _cluster_started_here(current, key, client_id)
        there = (
            f" `rayq start` has started {current.name!r} on this machine, in another Ray: "
            f'rayq.connect("{current.brokers[0]}") is that one.'
        )
    raise NoClusterError(
        f"No cluster named {wanted!r} runs in this Ray: start one with "
        f"rayq.start(path), or give the address of a broker.{there}"
    )


def _started_here(name: str | None) -> Current | None:
    """The cluster that `rayq start` has started on this machine, if it has this name."""
    current = current_cluster.read_current()
    return current if current is not None and name in (None, current.name) else None


def _cluster_started_here(
    current: Current, key: ClientKey | None, client_id: str
) -> Cluster:
    lifecycle = RayLifecycle(current.name, current.ray_address)
    return current_cluster.cluster_of(current, lifecycle, key, client_id).make_current()


def _key_inside_ray(spec: ClusterSpec) -> ClientKey | None:
    """The key of a program inside Ray that gives no token of a principal. None: the superuser's."""
    principal = spec.config.inside_ray_principal
    if principal is None:
        return None
    token = os.environ.get("RAYQ_TOKEN")  # An operator may be the superuser by it.
    return client_key_of(token, "RAYQ_TOKEN") if token else principal_key(spec.secret, principal)


Cluster.find_others_by(connect)


def ray_for(cluster: Cluster | None) -> None:
    """Connects this process to a Ray for a job over a cluster: the one that is connected, else that
    of RAY_ADDRESS, else the cluster's, as far as this process knows it, else a local one of its
    own. `cluster`: None means the process's current one, if there is any. Raises NoClusterError
    where there should be a Ray and none answers."""
    if not has_ray() and cluster is None:
        with contextlib.suppress(NoClusterError):
            cluster = Cluster.current()
    lifecycle = None if cluster is None else cluster.lifecycle
    known = lifecycle.ray_address if isinstance(lifecycle, RayLifecycle) else None
    join_ray(None if has_ray() else known, may_start=True)


def cluster_of_spec(
    spec: ClusterSpec, key: ClientKey | None = None, client_id: str = ""
) -> Cluster:
    """A cluster on the Ray of this process, which becomes the current one. `key` None: the
    superuser's."""
    cluster = Cluster(
        [f"{host}:{port}" for host, port in spec.brokers],
        key=client_key(spec.secret) if key is None else key,
        cluster_id=spec.cluster_id,
        name=spec.cluster_name,
        config=spec.config,
        lifecycle=RayLifecycle(spec.cluster_name),
        client_id=client_id,
    )
    return cluster.make_current()


def has_ray() -> bool:
    """Returns whether this process is connected to a Ray, or was told of one."""
    ray = sys.modules.get("ray")
    return "RAY_ADDRESS" in os.environ or (ray is not None and ray.is_initialized())


def _no_cluster_error(name: str | None) -> NoClusterError:
    which = "No cluster" if name is None else f"No cluster named {name!r}"
    return NoClusterError(
        f"{which} was started by `rayq start` on this machine, and this process is not connected "
        "to Ray: give the address of a broker, call ray.init(address=...), set RAY_ADDRESS (`auto` "
        "finds the cluster of a program here that has called rayq.start), or start a cluster with "
        "rayq.start(path) or `rayq start DIR`."
    )


def join_ray(known: str | None = None, *, may_start: bool = False) -> None:
    """Connects this process to Ray: see `start`. Never to one that merely happens to run here.
    `known` is the address of the Ray that is wanted. Raises NoClusterError."""
    address = known or os.environ.get("RAY_ADDRESS")
    import ray

    from rayq.runtime.ray.noise import leave_out_noise, without_token_warning

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
    if address is not None:
        use_ray_token()
    try:
        with without_token_warning():
            ray.init(
                address=address or "local", include_dashboard=False if address is None else None
            )
    except ConnectionError as error:
        hint = "" if "RAY_AUTH_MODE" in os.environ else RAY_TOKEN_HINT
        raise NoClusterError(f"No Ray can be reached at {address}: {error}.{hint}") from error
