"""The nodes of a Ray cluster: which are live, how an actor is pinned to one, small jobs on one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray import ObjectRef
from ray._private import worker
from ray.exceptions import RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayq.client.environment import system_environment
from rayq.config import ClusterConfig
from rayq.environment import Environment
from rayq.errors import RayqError
from rayq.runtime.ray.lookup import NAMESPACE

NODES_TIMEOUT_S = 600.0
NODES_POLL_S = 0.5

P = ParamSpec("P")
Result = TypeVar("Result")


def live_nodes(resource: str | None = None) -> dict[str, str]:
    """Node ids and addresses, in a stable order; only of those that offer `resource`."""
    listed: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    nodes = [
        node
        for node in listed
        if node["Alive"] and (resource is None or node["Resources"].get(resource, 0) > 0)
    ]
    nodes.sort(key=lambda node: (str(node["NodeManagerAddress"]), str(node["NodeID"])))
    return {str(node["NodeID"]): str(node["NodeManagerAddress"]) for node in nodes}


def wait_for_nodes(count: int | None, resource: str | None) -> dict[str, str]:
    """At least `count` nodes that may have brokers; None: those there are, at once. Raises
    RayqError where they do not come within `NODES_TIMEOUT_S`."""
    patience_s = 0.0 if count is None else NODES_TIMEOUT_S
    deadline_s = time.monotonic() + patience_s
    while True:
        nodes = live_nodes(resource)
        if len(nodes) >= (count or 1):
            return nodes
        if time.monotonic() >= deadline_s:
            offering = f" that offer the resource {resource!r}" if resource else ""
            raise RayqError(
                f"A start on {count or 1} nodes was asked for; after {patience_s:.0f} s Ray has "
                f"{len(nodes)}{offering} ({', '.join(nodes.values()) or 'none'}). See `ray status` "
                "for those that do not come, or start with fewer."
            )
        time.sleep(NODES_POLL_S)


def own_node() -> str | None:
    """The node on which this process runs, as the same user as the node's actors: what this process
    does to files there, they could do. None where it is another user, or not on a node."""
    node = worker.global_worker.node
    if node is None or os.stat(node.raylet_socket_name).st_uid != os.geteuid():
        return None
    return str(ray.get_runtime_context().get_node_id())


def is_rays_only_machine() -> bool:
    """Returns whether this process has started its Ray itself, which then plays all hosts on one
    machine and ends with this process."""
    node = worker.global_worker.node
    return node is not None and bool(node.is_head())


def on_nodes(
    nodes: Iterable[str],
    job: Callable[Concatenate[Environment, P], Result],
    *args: P.args,
    **kwargs: P.kwargs,
) -> dict[str, Result]:
    """The result of a small job on each node. This process does what is to be done on its own node:
    Ray would start a process for it, which takes half a second of a core. Raises as `result_of`."""
    own, nodes = own_node(), list(nodes)
    started = {node: run_on_node(node, job, *args, **kwargs) for node in nodes if node != own}
    return {
        node: result_of(started[node])
        if node in started
        else job(system_environment(None), *args, **kwargs)
        for node in nodes
    }


def on_node(
    node_id: str,
    job: Callable[Concatenate[Environment, P], Result],
    *args: P.args,
    **kwargs: P.kwargs,
) -> Result:
    """See `on_nodes`."""
    return on_nodes([node_id], job, *args, **kwargs)[node_id]


def run_on_node(
    node_id: str,
    job: Callable[Concatenate[Environment, P], Result],
    *args: P.args,
    **kwargs: P.kwargs,
) -> ObjectRef[Result]:
    """Starts a small job on a node, with an environment of that node."""
    task: Any = ray.remote(_run).options(**_on_node(node_id), name=job.__name__)
    started: ObjectRef[Result] = task.remote(job, args, kwargs)
    return started


def result_of(started: ObjectRef[Result], timeout_s: float | None = None) -> Result:
    """The result of a job on a node. Raises what the job raised, not the error in which Ray wraps
    that; RayError where the node fails, GetTimeoutError."""
    try:
        return ray.get(started, timeout=timeout_s)
    except RayTaskError as error:
        raise error.cause from error


def _run(job: Callable[..., Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    return job(system_environment(None), *args, **kwargs)


def pinned(node_id: str) -> dict[str, Any]:
    """The options of an actor that lives on this node only, and outlives the driver."""
    return {**_on_node(node_id), "namespace": NAMESPACE, "lifetime": "detached"}


def _on_node(node_id: str) -> dict[str, Any]:
    return {
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
    }


def broker_share(config: ClusterConfig) -> dict[str, float]:
    """A token amount of the resource that only nodes for brokers offer: it keeps the controller off
    the other nodes, and Ray's autoscaler from taking a node with a broker for idle."""
    return {} if config.broker_resource is None else {config.broker_resource: 0.001}
