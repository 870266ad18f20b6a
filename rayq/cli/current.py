"""The cluster that a command talks to: an address, or the one that `rayq start` left in
current.json.

`$RAYQ_HOME/start.lock` keeps two starts from writing it at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import rayq
from rayq import Cluster
from rayq.cli import output
from rayq.cli.values import did_you_mean
from rayq.client.addresses import parse_addresses
from rayq.errors import (
    ControllerUnavailableError,
    DisconnectedError,
    NoClusterError,
    RayqError,
    TimeoutError,
    UnknownGroupError,
    UnknownQueueError,
    UnknownTopicError,
)
from rayq.records import ClusterInfo
from rayq.runtime.current_cluster import cluster_of, home, key_given, read_current

CONNECT_TIMEOUT_S = 5.0
"""The time without an answer from any broker after which a cluster counts as down."""
TLS_FIELDS = ("tls_certificate", "tls_key", "tls_ca", "tls_check_hostname")
NO_CLUSTER = (
    "There is no current cluster: start one with `rayq start DIR --brokers 3`, or name a broker "
    "with --cluster HOST:PORT (or RAYQ_CLUSTER)."
)


@contextlib.contextmanager
def start_lock(*, wait: bool = False) -> Iterator[None]:
    """Waits while another `rayq start` or `stop` is under way; without `wait` it raises RayqError
    then."""
    home().mkdir(parents=True, exist_ok=True)
    with open(home() / "start.lock", "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise RayqError(
                f"Another `rayq start` or `rayq stop` is under way in {home()}: wait for it, or "
                "set RAYQ_HOME to another directory for a second cluster."
            ) from None
        yield


# --- connecting -----------------------------------------------------------------------------------


@contextlib.contextmanager
def connected(
    address: str | None,
    timeout_s: float | None = None,
    *,
    topics: Iterable[str] = (),
    groups: Iterable[str] = (),
    queues: Iterable[str] = (),
) -> Iterator[Cluster]:
    """The cluster at `address`, else the current one, else that of the Ray that RAY_ADDRESS names.
    `topics`, `groups` and `queues` are the names that the verb still has to find: the error for one
    that does not exist suggests the nearest name that does. Where the verb takes long, it
    says so on stderr, unless `output.hush` is called. Raises NoClusterError when there is no
    cluster, or when no broker answers."""
    with _cluster(address) as cluster, output.patience(_waits_for_answer):
        check_answers(cluster, timeout_s)
        try:
            yield cluster
        except UnknownTopicError as error:
            raise _with_nearest(error, "topic", topics, lambda: _topics(cluster)) from error
        except UnknownGroupError as error:
            raise _with_nearest(error, "group", groups, lambda: _groups(cluster)) from error
        except UnknownQueueError as error:
            raise _with_nearest(error, "queue", queues, lambda: _queues(cluster)) from error
        except TimeoutError as error:
            hint = "`rayq cluster health` says what is wrong."
            raise error.with_message(f"{error} {hint}") from error


def _waits_for_answer() -> str:
    return "Waiting for the cluster. `rayq cluster health` says whether anything is wrong."


def _with_nearest(
    error: RayqError, kind: str, asked: Iterable[str], existing: Callable[[], list[str]]
) -> RayqError:
    """The error, with the existing name that is nearest to the first of those asked for that does
    not exist."""
    try:
        names = existing()
    except RayqError:
        return error
    missing = next((name for name in asked if name not in names), None)
    if missing is None:
        return error
    hint = did_you_mean(missing, names, f"`rayq {kind} list` shows those there are.")
    return error.with_message(f"There is no {kind} {missing!r}. {hint}")


def _topics(cluster: Cluster) -> list[str]:
    return cluster.admin.list_topics(internal=True, timeout_s=CONNECT_TIMEOUT_S)


def _groups(cluster: Cluster) -> list[str]:
    return [info.group for info in cluster.admin.list_groups(timeout_s=CONNECT_TIMEOUT_S)]


def _queues(cluster: Cluster) -> list[str]:
    return cluster.admin.list_queues(timeout_s=CONNECT_TIMEOUT_S)


@contextlib.contextmanager
def operated(ray_address: str | None) -> Iterator[Cluster]:
    """The cluster as its Ray knows it, which can also start and stop brokers: the current one, else
    that of `ray_address`. Raises NoClusterError."""
    from rayq.cli.local_ray import connected_to_ray

    current = read_current()
    if current is None and ray_address is None:
        raise NoClusterError(
            "Brokers are started through Ray: run this where `rayq start` was run, or set "
            "RAY_ADDRESS."
        )
    address = ray_address if current is None else current.ray_address
    name = "default" if current is None else current.name
    assert address is not None
    # Not as the `inside_ray_principal`: whoever has started the cluster operates it.
    token = None if current is None else current.token
    with connected_to_ray(address), rayq.connect(name=name, token=token) as cluster:
        yield cluster


def check_answers(cluster: Cluster, timeout_s: float | None = None) -> ClusterInfo:
    """The cluster's description of itself. Raises NoClusterError where no broker answers."""
    try:
        return cluster.admin.describe_cluster(timeout_s=timeout_s or CONNECT_TIMEOUT_S)
    except (TimeoutError, DisconnectedError, ControllerUnavailableError) as error:
        raise NoClusterError(
            f"No broker answers at {', '.join(cluster.addresses)}. {error} Where the cluster is "
            "down, `rayq start DIR` starts it again."
        ) from error


def _cluster(address: str | None) -> Cluster:
    if address is not None:
        # A typo in the address is reported before a missing token.
        parse_addresses(address)
        return rayq.connect(address, **tls_of_environment())
    current = read_current()
    if current is not None:
        return cluster_of(current, key=key_given(None))
    if os.environ.get("RAY_ADDRESS"):
        from rayq.cli.local_ray import connected_to_ray

        with connected_to_ray(os.environ["RAY_ADDRESS"]):
            return rayq.connect()
    raise NoClusterError(NO_CLUSTER)


def tls_of_environment(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """RAYQ_TLS_CA, RAYQ_TLS_CERTIFICATE and RAYQ_TLS_KEY, for `--cluster` over TLS."""
    names = ("tls_ca", "tls_certificate", "tls_key")
    found = {name: environment.get(f"RAYQ_{name.upper()}") for name in names}
    return {name: value for name, value in found.items() if value}
