"""Lookup of a cluster's actors by name, in a process that is connected to Ray.

Each server of a cluster is a named actor in the namespace `rayq`, so that every driver, task and
actor of the same Ray finds it. The controller's actor then tells its `ClusterSpec`.
"""

from __future__ import annotations

import builtins
import time
from typing import Any

import ray
from ray.exceptions import RayError

from rayq.environment import Address
from rayq.errors import NoClusterError, RayqError, TimeoutError, from_wire
from rayq.runtime.ray.specs import ClusterSpec

NAMESPACE = "rayq"
START_TIMEOUT_S = 60.0
"""For one process, or one broker's registration. A start takes as long as it makes progress: on a
crowded machine each of its processes may need half a minute."""
CONNECT_PAUSE_S = 0.2


def controller_name(cluster_name: str) -> str:
    return f"rayq:{cluster_name}:controller"


def broker_name(cluster_name: str, broker: int) -> str:
    return f"rayq:{cluster_name}:broker-{broker}"


def likely_name(default: str) -> str:
    """The name of the only cluster in the connected Ray; where there are others too, or none, the
    default one."""
    prefix, suffix = controller_name("|").split("|")
    found = [name for name in names_with(prefix) if name.endswith(suffix)]
    return found[0].removeprefix(prefix).removesuffix(suffix) if len(found) == 1 else default


def find_cluster(
    cluster_name: str, *, timeout_s: float = START_TIMEOUT_S
) -> ClusterSpec | None:
    """The cluster of that name in the connected Ray; None when there is none. Raises TimeoutError
    where its controller's process has not answered in time."""
    try:
        spec: ClusterSpec = ask_controller(cluster_name, "spec", timeout_s=timeout_s)
    except NoClusterError:
        return None
    return spec


def ask_controller(
    cluster_name: str, method: str, *, timeout_s: float = START_TIMEOUT_S
) -> Any:
    """Calls a method of `ControllerActor` without arguments, also while Ray starts its process
    again: the method may be called more than once. Raises NoClusterError, TimeoutError, and the
    RayqError that the method raises."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            actor: Any = controller_actor(cluster_name)
            # Not ray.get: Ray warns of it in actors with coroutines, as a pool's consumers are.
            answer = getattr(actor, method).remote().future()
            return answer.result(max(deadline_s - time.monotonic(), 0.0))
        except (RayError, builtins.TimeoutError) as error:  # Ray may be starting it again.
            cause = getattr(error, "cause", None)
            if isinstance(cause, RayqError):
                raise cause from error
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                why = " ".join(f"{type(error).__name__} {error}".split())
                raise TimeoutError(
                    f"The cluster {cluster_name!r} is in this Ray, but its controller's process "
                    f"has not answered for {timeout_s:g} s ({why}). Ray starts it again where it "
                    "has ended: see `ray list actors`. Try again, or give the address of a broker: "
                    "brokers serve without that process."
                ) from error
            time.sleep(min(CONNECT_PAUSE_S, left_s))


def controller_actor(cluster_name: str) -> Any:
    """Raises NoClusterError."""
    try:
        return ray.get_actor(controller_name(cluster_name), namespace=NAMESPACE)
    except ValueError:
        raise NoClusterError(f"No cluster named {cluster_name!r} runs in this Ray.") from None


def names_with(prefix: str) -> list[str]:
    """The names of rayq's actors that begin with `prefix`, sorted; also of those for which Ray has
    no room yet."""
    listed: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
    return sorted(
        actor["name"]
        for actor in listed
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix)
    )


def actors_with(prefix: str) -> list[tuple[str, Any]]:
    """The actors whose names begin with `prefix`, each with its name."""
    found: list[tuple[str, Any]] = []
    for name in names_with(prefix):
        try:
            found.append((name, ray.get_actor(name, namespace=NAMESPACE)))
        except ValueError:
            continue  # It has ended meanwhile.
    return found


def checked_endpoint(answer: tuple[str, int | str, str]) -> Address:
    """The address on which a broker listens, by the answer of `BrokerActor.endpoint`. Raises the
    RayqError that its start failed with."""
    kind, first, second = answer
    if kind == "error":
        raise from_wire(str(first), second)
    return second, int(first)
