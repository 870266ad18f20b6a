"""`rayq.start`: the way to start a cluster on Ray, beside `rayq.connect`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, Unpack

from rayq.client.cluster import Cluster
from rayq.config.keywords import ClusterKeywords
from rayq.errors import DirectoryInUseError, RayqError
from rayq.runtime import current_cluster
from rayq.runtime.kept_settings import DEFAULT_NAME, LOOPBACK, given_config, settings_for
from rayq.runtime.layout import kept_here
from rayq.runtime.ray.connecting import cluster_of_spec, connect, has_ray, join_ray
from rayq.runtime.ray.specs import ClusterSpec
from rayq.runtime.start_checks import check_start

__all__ = ["connect", "start"]

logger = logging.getLogger(__name__)


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
    their number, spread over the nodes; None means those found in `path`, else one for each live
    node. A path that holds more than asked for starts all of them. `nodes`: waits until Ray has
    this many nodes (that may have brokers: see `broker_resource`), at most 10 minutes. `name`: the
    cluster's, "default" by default. Each broker listens on the first free port from `port`, 9392 by
    default. `config` are fields of `rayq.config.ClusterConfig`.

    `name`, `port` and `config` are kept with the data: a later start of the same `path` uses those
    that it is not given, TLS for example, and logs a warning for each that it changes. None resets
    one to its default. A Ray that this process has started itself plays all hosts on one machine,
    and its brokers listen on 127.0.0.1 only, unless `bind_host` says otherwise.

    `exist_ok`: where a cluster of that name runs in this Ray already, or `rayq start` has started
    it on that path of this machine, connects to it. One of
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
    """Does the work of `start`. Also returns, in words, what differs from the last start.
    `defaults` are the configs of a cluster for which nothing is given or kept; None: by who started
    this Ray."""
    given = given_config(config)
    root = os.path.abspath(os.path.expanduser(path))
    if not has_ray():
        settings = settings_for(kept_here(root), name=name, port=port, given=given)
        try:
            check_start(root, brokers, settings.parsed())
        except DirectoryInUseError:
            there = current_cluster.read_current() if exist_ok else None
            if there is None or there.path != root:
                raise
            join_ray(there.ray_address)  # That of `rayq start`.
    join_ray(may_start=True)
    from rayq.runtime.ray import cluster as ray_cluster
    from rayq.runtime.ray import lookup as ray_lookup
    from rayq.runtime.ray import nodes as ray_nodes

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
        wanted_config = settings_for(running.settings, name=None, port=None, given=given).parsed()
        asked = {key: getattr(wanted_config, key) for key in given}
        _check_as_asked(running, root, brokers, asked)
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
