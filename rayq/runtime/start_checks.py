"""Checks that refuse a start on this machine before anything is started.

The brokers check it all again, on whichever node they are. But it takes Ray several seconds to
start them, half a minute on a busy machine, and a typing error should be reported sooner. Besides,
what every start tells of partitions that it leaves behind.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from rayq.client.environment import system_environment
from rayq.config import ClusterConfig
from rayq.errors import ConfigError, DirectoryInUseError, InvalidRequestError
from rayq.runtime.layout import (
    check_all_found,
    check_broker_count,
    find_directories,
    of_one_cluster,
)
from rayq.runtime.processes import is_orphan
from rayq.storage.data_directory import BROKER_LOCK, lock_holder

LOCK_RETRY_S = 0.05
RECOVERING_TOLD_MAX = 10

logger = logging.getLogger(__name__)


def check_start(
    root: str, brokers: int | None, config: ClusterConfig, *, patience_s: float = 0.0
) -> None:
    """Checks the start of a cluster all of whose brokers are, or are to be, on this machine, below
    `root`. `patience_s`: for how long processes that are ending may hold a directory.

    Raises ConfigError (TLS files that cannot be used, a bind_host of another machine),
    InvalidRequestError, WrongClusterError,
    UnsupportedFormatError, StorageError, DirectoryInUseError, RayqError (directories are missing).
    """
    environment = system_environment(config)
    _check_bind_host(config.bind_host)
    if os.path.exists(root) and not os.path.isdir(root):
        raise InvalidRequestError(f"{root} is a file: name a directory for the data.")
    found = of_one_cluster(find_directories(environment, root), root)
    if not found and brokers is not None:
        check_broker_count(brokers)
    check_all_found(found, root, brokers)
    deadline_s = time.monotonic() + patience_s
    for directory in found:
        while (
            holder := lock_holder(environment.disk, f"{directory.path}/{BROKER_LOCK}")
        ) is not None:
            if _is_ending(holder.pid):
                break
            if time.monotonic() >= deadline_s:
                raise DirectoryInUseError(
                    f"{directory.path} is in use by process {holder.pid}: broker "
                    f"{directory.broker} runs on it. Stop that cluster first, or use "
                    "another directory."
                )
            time.sleep(LOCK_RETRY_S)


def _check_bind_host(host: str | None) -> None:
    """Raises ConfigError where nothing can listen on that address of this machine."""
    if host is None:
        return
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as tried:
                tried.bind(address)
    except OSError as error:
        raise ConfigError(
            f"Nothing can listen on bind_host={host} here: {error}. Give an address that this "
            "machine has, or None for the one that Ray has for it (of the command: -c "
            "bind_host=none)."
        ) from error


def _is_ending(pid: int) -> bool:
    """Returns whether a process is gone, or is a worker, soon to end, of a Ray whose raylet is
    gone."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return command.startswith(b"ray::") and is_orphan(pid)


def tell_recovering(recovering: Mapping[str, str]) -> None:
    """Logs which partitions a start leaves behind that are not in sync yet, and why: the first few
    of them, and how many more there are."""
    for where, reason in islice(recovering.items(), RECOVERING_TOLD_MAX):
        logger.warning("%s %s", where, reason)
    if len(recovering) > RECOVERING_TOLD_MAX:
        logger.warning(
            "%d more partitions are not in sync yet: `rayq cluster health` tells what is wrong",
            len(recovering) - RECOVERING_TOLD_MAX,
        )
