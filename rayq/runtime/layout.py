"""Layout of a cluster's data directories, and formatting of a new cluster in empty ones.

`<root>/broker-<id>/` each hold one broker's data. A cluster is formatted once: every directory gets
the cluster's id and secret, then the voters' metadata logs get their first record, the same
`VotersChanged`; only then do brokers start. One such record is enough for a cluster to start. Until
there is one all directories are blank (`is_blank`). So a crash on the way leaves a cluster that can
start, or blank directories, and the next start formats these again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from rayq.client.environment import system_environment
from rayq.core.cluster.broker_changes import VOTERS_MAX
from rayq.core.cluster.records import Voter, VotersChanged, encode_record
from rayq.environment import Disk, Environment
from rayq.errors import InvalidRequestError, RayqError, StorageError, WrongClusterError
from rayq.runtime.kept_settings import (
    SETTINGS,
    KeptSettings,
    newest,
    read_settings,
    write_settings,
)
from rayq.storage.checked_file import TEMPORARY_SUFFIX, make_directory
from rayq.storage.data_directory import META, SECRET, find_brokers, format_directory, read_meta
from rayq.storage.metadata_log import MetadataLog

BROKERS_PER_NODE_MAX = 100
LOST_AND_FOUND = "lost+found"
"""A directory that every new file system holds."""
METADATA = "metadata"


class Directory(NamedTuple):
    """One broker's data directory."""

    broker: int
    path: str
    cluster_id: str
    directory_id: str
    is_blank: bool = False
    """See `is_blank`."""


def directory_path(root: str, broker: int) -> str:
    return f"{root}/broker-{broker}"


def metadata_path(path: str) -> str:
    return f"{path}/{METADATA}"


def is_blank(disk: Disk, path: str) -> bool:
    """Returns whether a directory, formatted or not, holds at most what formatting leaves there
    before a cluster can start: no metadata record or promise, no partition, no lock of a broker.
    Raises UnsupportedFormatError, StorageError."""
    try:
        names = {name.removesuffix(TEMPORARY_SUFFIX) for name in disk.list(path)}
        if not names <= {META, SECRET, SETTINGS, METADATA, LOST_AND_FOUND}:
            return False
        log = MetadataLog.inspect(disk, metadata_path(path))
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    return log.last_index == 0 and log.promised_epoch == 0


def find_directories(environment: Environment, root: str) -> list[Directory]:
    """The formatted directories below `root`, by broker id. Raises UnsupportedFormatError,
    StorageError."""
    found = []
    for broker, path in find_brokers(environment.disk, root):
        meta = read_meta(environment.disk, path)
        assert meta is not None
        is_empty = is_blank(environment.disk, path)
        found.append(Directory(broker, path, meta.cluster_id, meta.directory_id, is_empty))
    return found


def find_kept(
    environment: Environment, root: str
) -> list[tuple[Directory, KeptSettings | None]]:
    """Like `find_directories`, with the settings that each directory keeps of earlier starts."""
    return [
        (directory, read_settings(environment.disk, directory.path))
        for directory in find_directories(environment, root)
    ]


def kept_of(
    found: Sequence[tuple[Directory, KeptSettings | None]],
) -> KeptSettings | None:
    """The settings of the cluster that these directories hold; where a first start died, those of
    that start."""
    held = [settings for directory, settings in found if not directory.is_blank]
    return newest(held or [settings for _, settings in found])


def kept_here(root: str) -> KeptSettings | None:
    """The settings that the directories below `root` on this machine keep of earlier starts. Raises
    like `find_kept`."""
    if not os.path.isdir(root):
        return None
    return kept_of(find_kept(system_environment(None), root))


def directories_to_serve(
    found: Sequence[Directory],
    *,
    cluster_id: str,
    node_id: str,
    placed: Mapping[int, str],
    live: Collection[str],
    idle: Collection[Directory],
) -> list[Directory] | None:
    """The directories, of those `found` on a node that joined, whose brokers are to start there;
    None while that cannot be told.

    `placed` says on which node each broker is, `live` which nodes Ray takes for live, `idle` which
    directories no broker holds. A broker that serves on a live node stays there: the path may be
    one that nodes share, and a controller that was restarted takes nodes for new that joined long
    ago. Where the path is shared, one that has a broker leaves the lost ones to the nodes that
    join: else a node that returns would find its broker taken, and get a new one. But a node may
    also return before Ray has noticed its loss (12 s): then the directory of its broker is idle,
    and waits for Ray.
    """
    known = [directory for directory in found if directory.cluster_id == cluster_id]
    lost = [directory for directory in known if placed.get(directory.broker) not in live]
    if node_id in placed.values():
        elsewhere = {placed.get(directory.broker) for directory in known} & set(live) - {node_id}
        return [] if elsewhere else lost
    if lost:
        return lost
    return None if any(directory in idle for directory in known) else []


def placed_now(
    known: Mapping[int, str], told: Mapping[int, str], live: Collection[str]
) -> dict[int, str]:
    """On which node each broker is. `told` says where each registered last; `known` is what was
    known before, and holds for a broker that was just started on a live node: until it registers,
    `told` names the node that it had before."""
    return {
        **told,
        **{
            broker: node
            for broker, node in known.items()
            if broker not in told or (node in live and told[broker] not in live)
        },
    }


def of_one_cluster(found: Sequence[Directory], root: str) -> list[Directory]:
    """The directories of the cluster that was formatted below `root`; [] where none was. Blank
    directories of other clusters are left out: their first start died. Raises WrongClusterError
    where there are two clusters."""
    clusters = {directory.cluster_id for directory in found if not directory.is_blank}
    ours = [directory for directory in found if directory.cluster_id in clusters]
    if len(clusters) > 1:
        named = ", ".join(f"{directory.path} ({directory.cluster_id[:8]})" for directory in ours)
        raise WrongClusterError(
            f"The directories below {root} belong to {len(clusters)} clusters: {named}. Move those "
            "of other clusters away."
        )
    return ours


def check_broker_count(brokers: int) -> None:
    if not 1 <= brokers <= BROKERS_PER_NODE_MAX:
        raise InvalidRequestError(
            f"brokers must be from 1 to {BROKERS_PER_NODE_MAX}, not {brokers}."
        )


def check_all_found(found: Sequence[Directory], root: str, brokers: int | None) -> None:
    """A broker is added to a cluster by its node, not by a count: raises RayqError where there are
    directories below `root` and they are fewer than `brokers`."""
    if found and brokers is not None and len(found) < brokers:
        missing = sorted(set(range(brokers)) - {directory.broker for directory in found})
        raise RayqError(
            f"{root} holds {len(found)} brokers, {brokers} were asked for: the directories of "
            f"{', '.join(f'broker-{number}' for number in missing)} are missing. Mount them, wait "
            f"for their nodes, or start the {len(found)} there are (brokers={len(found)}): a "
            "cluster grows by nodes that join it."
        )


def voter_count(brokers: int) -> int:
    """Three voters; one where there are fewer than three brokers, because two voters stop as soon
    as one of them does."""
    return VOTERS_MAX if brokers >= VOTERS_MAX else 1


def format_cluster(
    environment: Environment,
    root: str,
    brokers: int,
    run: Callable[..., Any],
    settings: KeptSettings | None = None,
) -> list[Directory]:
    """A new cluster of `brokers` blank directories, each below `root` on the node of its broker,
    that keep these settings. `run(broker, job, *args, **kwargs)` runs `job(environment, *args,
    **kwargs)` on that node, and returns its result. Raises as `format_broker`."""
    check_broker_count(brokers)
    cluster_id, secret = environment.new_id(), environment.token_bytes(32)
    made: list[Directory] = [
        run(
            broker,
            format_broker,
            root,
            broker,
            cluster_id=cluster_id,
            secret=secret,
            settings=settings,
        )
        for broker in range(brokers)
    ]
    voters = tuple(
        Voter(directory.broker, directory.directory_id)
        for directory in made[: voter_count(brokers)]
    )
    for directory in made[: len(voters)]:
        run(directory.broker, write_first_record, directory.path, voters)
    return made


def format_broker(
    environment: Environment,
    root: str,
    broker: int,
    *,
    cluster_id: str,
    secret: bytes,
    settings: KeptSettings | None = None,
) -> Directory:
    """Makes the directory of one broker of the cluster; also of one whose own is lost: what that
    held is copied from the other replicas when the broker starts. Raises InvalidRequestError where
    something is there already (nothing is ever written over), UnsupportedFormatError, StorageError.
    """
    path = directory_path(root, broker)
    if not is_blank(environment.disk, path):
        held = [name for name in environment.disk.list(path) if name != LOST_AND_FOUND]
        raise InvalidRequestError(
            f"{path} is not empty ({', '.join(sorted(held)[:5])}): where its data is really to be "
            "given up, move it away first."
        )
    if settings is not None:  # Before the directory counts as formatted.
        try:
            make_directory(environment.disk, path)
        except OSError as error:
            raise StorageError(f"{path} cannot be made a data directory: {error}") from error
        write_settings(environment.disk, path, settings)
    meta = format_directory(environment, path, cluster_id=cluster_id, broker=broker, secret=secret)
    return Directory(broker, path, cluster_id, meta.directory_id, is_blank=True)


def write_first_record(environment: Environment, path: str, voters: tuple[Voter, ...]) -> None:
    """Makes a directory a voter of a new cluster."""
    with closing(MetadataLog.open(environment.disk, metadata_path(path))) as log:
        log.append([(1, 0, encode_record(VotersChanged(voters)))])
