"""Operations on the brokers of a running cluster on Ray, one at a time."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from rayq.errors import RayqError, UnknownBrokerError
from rayq.runtime.layout import format_broker
from rayq.runtime.ray.actors import start_broker_actor
from rayq.runtime.ray.lookup import (
    NAMESPACE,
    START_TIMEOUT_S,
    actors_with,
    ask_controller,
    broker_name,
    controller_actor,
    controller_name,
)
from rayq.runtime.ray.nodes import live_nodes, result_of, run_on_node
from rayq.runtime.ray.specs import ClusterSpec

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 30.0
RESTART_TIMEOUT_S = 120.0
POLL_S = 0.1


def restart_broker(cluster_name: str, broker: int) -> None:
    """Stops a broker and its replica processes in a controlled way and has Ray start it again where
    it was, with the software that is installed there now. Returns once the new process has its
    session; the replicas catch up after that.

    A broker that does not stop by itself is killed: its replica processes then continue, and the
    new process takes them over.

    Raises UnknownBrokerError (no such broker in this Ray), RayqError (it does not come back).
    """
    actor = _broker_actor(cluster_name, broker)
    before = _pid(actor)
    try:
        ray.get(actor.stop.remote(), timeout=STOP_TIMEOUT_S)
    except RayError as error:
        logger.warning("broker %d did not stop by itself, it is killed: %s", broker, error)
    ray.kill(actor, no_restart=False)
    _wait_back(actor, broker, cluster_name, before=before)


def restart_controller(cluster_name: str) -> None:
    """Has Ray start the controller's process again, with the software that is installed there now;
    returns once it answers. It has no data, so it is killed: that is like any loss of it. Raises
    NoClusterError, RayqError (it does not come back)."""
    actor = controller_actor(cluster_name)
    before = _pid(actor)
    ray.kill(actor, no_restart=False)
    deadline_s = time.monotonic() + RESTART_TIMEOUT_S
    while _pid(actor) in (None, before):
        if time.monotonic() > deadline_s:
            raise RayqError(
                f"The controller's process does not start again within {RESTART_TIMEOUT_S:.0f} s: "
                f"see `ray list actors` for {controller_name(cluster_name)}."
            )
        time.sleep(POLL_S)


def stop_broker(cluster_name: str, broker: int) -> None:
    """Stops a broker and its replica processes in a controlled way, for good: Ray does not start it
    again. Raises UnknownBrokerError."""
    actor = _broker_actor(cluster_name, broker)
    try:
        ray.get(actor.stop.remote(), timeout=STOP_TIMEOUT_S)
    except RayError as error:
        logger.warning("broker %d did not stop by itself, it is killed: %s", broker, error)
    ray.kill(actor)


def replace_disk(
    cluster_name: str, broker: int, node: str | None = None, host: str | None = None
) -> None:
    """Gives a broker a new, empty directory where its own is lost, on its node or on `node` (an
    address or a node id of Ray), and starts it there; returns once it has a session. Its replicas
    then copy everything from the others. `host` is the address of the machine that it was on: by it
    that machine is recognised although Ray has given it another node id since.

    Raises NoClusterError, UnknownBrokerError, InvalidRequestError (there is something in the
    directory still: nothing was done), RayqError (the node is gone, or the broker does not start).
    """
    spec: ClusterSpec = ask_controller(cluster_name, "spec")
    placed: dict[int, str] = ask_controller(cluster_name, "broker_nodes")
    if broker not in placed:
        raise UnknownBrokerError(f"There is no broker {broker}: the brokers are {sorted(placed)}.")
    node_id = _live_node([placed[broker], host or ""] if node is None else [node], broker)
    making = run_on_node(
        node_id,
        format_broker,
        spec.root,
        broker,
        cluster_id=spec.cluster_id,
        secret=spec.secret,
        settings=spec.settings,
    )
    try:
        result_of(making, START_TIMEOUT_S)
    except RayError as error:
        raise RayqError(
            f"Node {node_id} did not make broker {broker} a directory below {spec.root}, and may "
            f"do so yet: {error} See `ray status` for whether the node is well, then try again."
        ) from error
    _end_processes(cluster_name, broker)
    brokers_on_node = 1 + sum(at == node_id for other, at in placed.items() if other != broker)
    actor = start_broker_actor(spec.broker_spec(broker, node_id, brokers_on_node))
    _wait_back(actor, broker, cluster_name, before=None)


def _end_processes(cluster_name: str, broker: int) -> None:
    """Ends what still serves the lost directory, perhaps on a disk that is no longer mounted."""
    started = (f"rayq:{cluster_name}:{broker}:", f"rayq:{cluster_name}:objects-{broker}:")
    for name, actor in actors_with(f"rayq:{cluster_name}:"):
        if name == broker_name(cluster_name, broker) or name.startswith(started):
            ray.kill(actor)


def _live_node(names: Sequence[str], broker: int) -> str:
    """The node that the first of these ids and addresses means. Raises RayqError."""
    nodes = live_nodes()
    for name in names:
        found = [node_id for node_id, address in nodes.items() if name in (node_id, address)]
        if len(found) == 1:
            return found[0]
    raise RayqError(
        f"Node {names[0]} of broker {broker} is not there; Ray has {', '.join(nodes.values())}. "
        "Start it again, or name another that has an empty disk: --node ADDRESS."
    )


def _broker_actor(cluster_name: str, broker: int) -> Any:
    try:
        return ray.get_actor(broker_name(cluster_name, broker), namespace=NAMESPACE)
    except ValueError:
        raise UnknownBrokerError(
            f"No broker {broker} of cluster {cluster_name!r} runs in this Ray; see "
            "`rayq cluster info`."
        ) from None


def _wait_back(actor: Any, broker: int, cluster_name: str, *, before: int | None) -> None:
    """Waits until another process than `before` has a session. Raises RayqError."""
    deadline_s = time.monotonic() + RESTART_TIMEOUT_S
    while not _is_back(actor, before):
        if time.monotonic() > deadline_s:
            raise RayqError(
                f"Broker {broker} was started and has no session after {RESTART_TIMEOUT_S:.0f} s: "
                f"see `ray list actors` for {broker_name(cluster_name, broker)}, and its log below "
                "the Ray session's directory on its node."
            )
        time.sleep(POLL_S)


def _pid(actor: Any) -> int | None:
    """The process of an actor; None while it has none that answers."""
    try:
        pid: int = ray.get(actor.__ray_call__.remote(_own_pid), timeout=START_TIMEOUT_S)
    except (RayActorError, GetTimeoutError):
        return None
    return pid


def _own_pid(_actor: object) -> int:
    return os.getpid()


def _is_back(actor: Any, before: int | None) -> bool:
    """Returns whether another process than `before` runs and is registered with the controller."""
    try:
        if _pid(actor) in (None, before):
            return False
        return bool(ray.get(actor.is_registered.remote(), timeout=START_TIMEOUT_S))
    except RayError:  # Also what its own code raises before it is ready.
        return False
