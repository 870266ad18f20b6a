"""Starts and stops a whole cluster on the nodes of a Ray.

`actors` has the processes that are started here.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from rayq.client.environment import system_environment
from rayq.environment import Environment
from rayq.errors import ConfigError, ControllerUnavailableError, NoClusterError, RayqError
from rayq.runtime.kept_settings import KeptSettings, changes, settings_for
from rayq.runtime.layout import (
    Directory,
    check_all_found,
    find_kept,
    format_cluster,
    kept_of,
    of_one_cluster,
)
from rayq.runtime.ray.actors import (
    LOCK_PATIENCE_S,
    start_broker_actor,
    start_controller_actor,
)
from rayq.runtime.ray.lookup import (
    NAMESPACE,
    START_TIMEOUT_S,
    ask_controller,
    broker_name,
    checked_endpoint,
    controller_actor,
)
from rayq.runtime.ray.nodes import live_nodes, on_node, on_nodes, own_node, wait_for_nodes
from rayq.runtime.ray.specs import ClusterSpec
from rayq.runtime.recover_quorum import lost_voters, survivors
from rayq.runtime.start_checks import check_start, tell_recovering
from rayq.storage.data_directory import read_secret

logger = logging.getLogger(__name__)

RECOVERY_TIMEOUT_S = 30.0
"""The maximum time that a start waits for partitions that were there before to be in sync."""


def kept_settings(root: str, broker_resource: str | None = None) -> KeptSettings | None:
    """The settings that the directories below `root` on the nodes that are live now keep of earlier
    starts."""
    return kept_of(_flat(on_nodes(live_nodes(broker_resource), find_kept, root)))


def start_cluster(
    root: str,
    *,
    brokers: int | None,
    cluster_name: str | None,
    port: int | None,
    given: Mapping[str, Any],
    defaults: Mapping[str, Any] = {},
    nodes_min: int | None = None,
) -> tuple[ClusterSpec, list[str]]:
    """Formats or reopens the directories and starts the actors; returns when every broker has
    registered. Name, port and configs that are not given are those of the last start (see
    `kept_settings`); returned besides: what differs from it, for people. Raises the errors that
    `rayq.start` documents."""
    kept = kept_settings(root, given.get("broker_resource"))
    while True:
        settings = settings_for(
            kept, name=cluster_name, port=port, given=given, defaults=defaults
        )
        config = settings.parsed()
        nodes = wait_for_nodes(nodes_min, config.broker_resource)
        found_kept = on_nodes(nodes, find_kept, root)
        known = kept_of(_flat(found_kept))
        if known is None or (kept is not None and known.revision <= kept.revision):
            break
        kept = known  # A node that came meanwhile knows of a later start.
    if list(nodes) == [own_node()]:
        check_start(root, brokers, config, patience_s=LOCK_PATIENCE_S)
    found = {node: [directory for directory, _ in some] for node, some in found_kept.items()}
    placed, cluster_id, secret = _open_or_format(nodes, found, root, brokers, settings)
    _check_reachable(config.bind_host, {nodes[node] for node in placed.values()})
    spec = ClusterSpec(
        cluster_name=settings.cluster_name,
        cluster_id=cluster_id,
        secret=secret,
        brokers=(),
        config=config,
        root=root,
        port=settings.port,
        placed=placed,
        nodes=tuple(nodes),
        settings=settings,
    )
    actors: list[Any] = []
    try:
        for broker, node in sorted(placed.items()):
            brokers_on_node = sum(at == node for at in placed.values())
            actors.append(start_broker_actor(spec.broker_spec(broker, node, brokers_on_node)))
        answers = [actor.endpoint.remote() for actor in actors]
        endpoints = [
            checked_endpoint(_started(answer, f"broker {broker}"))
            for broker, answer in zip(sorted(placed), answers, strict=True)
        ]
        spec = msgspec.structs.replace(spec, brokers=tuple(endpoints))
        controller = start_controller_actor(spec)
        actors.append(controller)
        _started(controller.spec.remote(), "the controller")
        _wait_registered(actors[:-1], root, found)
        _wait_recovered(actors[0])
        return spec, changes(kept, settings)
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        raise


def stop_cluster(cluster_name: str) -> None:
    """A controlled stop of all actors of the cluster; does nothing when it does not run. Raises
    TimeoutError where the controller's process has not answered in time: nothing was stopped."""
    try:
        controller = controller_actor(cluster_name)
        numbers: list[int] = ask_controller(cluster_name, "prepare_stop")
    except NoClusterError:
        return
    brokers: list[Any] = []
    for number in numbers:
        try:
            brokers.append(ray.get_actor(broker_name(cluster_name, number), namespace=NAMESPACE))
        except ValueError:
            continue
    stopping = [broker.stop.remote() for broker in brokers]
    for done in stopping:
        try:
            ray.get(done, timeout=START_TIMEOUT_S)
        except RayError as error:
            logger.warning("a broker did not stop by itself: %s", error)
    for actor in (controller, *brokers):
        ray.kill(actor)


def _flat(
    found: Mapping[str, Sequence[tuple[Directory, KeptSettings | None]]],
) -> list[tuple[Directory, KeptSettings | None]]:
    return [kept for some in found.values() for kept in some]


def _check_reachable(bind_host: str | None, addresses: set[str]) -> None:
    """Raises ConfigError where brokers of several machines would be unable to reach each other."""
    try:
        is_loopback = bind_host == "localhost" or ipaddress.ip_address(bind_host or "").is_loopback
    except ValueError:
        return
    if is_loopback and len(addresses) > 1:
        raise ConfigError(
            f"bind_host is {bind_host}, which only its own machine reaches, and the brokers are on "
            f"{', '.join(sorted(addresses))}: give bind_host=None (of the command: -c "
            "bind_host=none), and each listens on the address of its node."
        )


def _open_or_format(
    nodes: dict[str, str],
    found: dict[str, list[Directory]],
    root: str,
    brokers: int | None,
    settings: KeptSettings | None = None,
) -> tuple[dict[int, str], str, bytes]:
    """`(broker -> node, cluster id, secret)`."""
    placed: dict[int, str] = {}
    directories = of_one_cluster([directory for some in found.values() for directory in some], root)
    for node, some in found.items():
        for directory in sorted({*some} & {*directories}):
            if directory.broker in placed:
                raise RayqError(
                    f"Broker {directory.broker} has a directory below {root} on two nodes "
                    f"({nodes[placed[directory.broker]]} and {nodes[node]}): one is a copy, or "
                    "the nodes share the path. Move the copy away, or "
                    "give each node a disk of its own."
                )
            placed[directory.broker] = node
    check_all_found(directories, root, brokers)
    if not directories:
        names = list(nodes)
        directories = format_cluster(
            system_environment(None),
            root,
            len(nodes) if brokers is None else brokers,
            lambda broker, job, *args, **kwargs: on_node(
                names[broker % len(names)], job, *args, **kwargs
            ),
            settings,
        )
        placed = {
            directory.broker: names[directory.broker % len(names)] for directory in directories
        }
    first = min(directories)
    secret = on_node(placed[first.broker], _read_secret, first.path)
    return placed, first.cluster_id, secret


def _read_secret(environment: Environment, path: str) -> bytes:
    return read_secret(environment.disk, path)


def _started(answer: Any, title: str) -> Any:
    """The answer of an actor that was just created. Raises RayqError."""
    try:
        return ray.get(answer, timeout=START_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError as error:
        raise RayqError(
            f"The process of {title} did not start within {START_TIMEOUT_S:.0f} s. See `ray status`"
            " for whether its node has room, and the logs below the Ray session's directory."
        ) from error


def _wait_registered(
    brokers: Sequence[Any], root: str, found: dict[str, list[Directory]]
) -> None:
    """Raises ControllerUnavailableError once no other broker has registered for
    `START_TIMEOUT_S`."""
    most, deadline_s = 0, time.monotonic() + START_TIMEOUT_S
    while True:
        registered = sum(ray.get([broker.is_registered.remote() for broker in brokers]))
        if registered == len(brokers):
            return
        if registered > most:
            most, deadline_s = registered, time.monotonic() + START_TIMEOUT_S
        if time.monotonic() > deadline_s:
            raise ControllerUnavailableError(
                f"Only {registered} of {len(brokers)} brokers are registered with a controller, "
                f"and no other came within {START_TIMEOUT_S:.0f} s: "
                + (
                    _why_no_quorum(root, found)
                    or "see the actors' logs below the Ray session's directory."
                )
            )
        time.sleep(0.02)


def _why_no_quorum(root: str, found: dict[str, list[Directory]]) -> str | None:
    """The advice to give where a majority of the voters' directories was not found on the nodes."""
    left = [
        survivor
        for node, directories in found.items()
        if any(not directory.is_blank for directory in directories)
        for survivor in on_node(node, survivors, root)
    ]
    if not left:
        return None
    best = max(left, key=lambda survivor: (survivor.epoch, survivor.last_index))
    if not best.voters:
        return (
            f"none of the directories below {root} holds metadata. Start the nodes of the others; "
            "where there never were others, the first start died: move these directories away."
        )
    lost = lost_voters([survivor.directory for survivor in left], best.voters)
    if 2 * len(lost) < len(best.voters):
        return None
    return (
        f"of its voters, brokers {', '.join(str(voter.broker) for voter in best.voters)}, the "
        f"directories of {', '.join(map(str, lost))} are not there. Start their nodes; where they "
        f"are lost for good: rayq cluster recover-quorum --from {root}, on each node that is left."
    )


def _wait_recovered(broker: Any) -> None:
    """Waits until the partitions that were there before are in sync; after `RECOVERY_TIMEOUT_S` it
    logs those that are not."""
    deadline_s = time.monotonic() + RECOVERY_TIMEOUT_S
    while ray.get(broker.is_recovering.remote()):
        if time.monotonic() > deadline_s:
            tell_recovering(ray.get(broker.recovering_partitions.remote()))
            return
        time.sleep(0.05)
