"""The file descriptors of this process, and how clients, servers and replicas share them.

A new descriptor gets the lowest free number. A connection is refused when its number is too high.
So the numbers above stay free for the files of open replicas, and below these for the connections
of servers: both must not fail. A process opens another replica only while more than a quarter of
all numbers is left for clients, since a replica that no client can reach is of no use.
"""

from __future__ import annotations

import os
import resource
from typing import NamedTuple

RESERVE_MAX = 512
"""The maximum number of descriptors reserved for files, and the same number again for servers.
Under a low limit each reserve is an eighth of it."""

PER_REPLICA = 8
"""A replica in a process of several holds about this many descriptors: for its lock, its active
segment, a segment that is read, and its connections."""


class Descriptors(NamedTuple):
    """Each field is the first number that is too high."""

    limit: int
    """The limit of the process (`ulimit -n`)."""
    for_connections: int
    """The limit for any connection. From here on there are only files."""
    for_clients: int
    """The limit for a client's connection. From here on there are only connections of servers."""
    for_replicas: int
    """The limit for opening another replica."""

    @property
    def replicas_max(self) -> int:
        """The maximum number of replicas of one process."""
        return max(1, self.for_replicas // PER_REPLICA)

    @property
    def reserve(self) -> int:
        return self.limit - self.for_connections


def shares() -> Descriptors:
    """The shares under the present limit of the process."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = 2**31
    reserve = min(limit // 8, RESERVE_MAX)
    for_clients = limit - 2 * reserve
    return Descriptors(limit, limit - reserve, for_clients, for_clients - limit // 4)


def raise_limit() -> None:
    """Raises the limit of this process as far as the process may."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def has_room_for_replica() -> bool:
    """Returns whether this process may open another replica."""
    try:
        probe = os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return False
    os.close(probe)
    return probe < shares().for_replicas
