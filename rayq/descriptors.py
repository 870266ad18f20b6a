"""File descriptors of this process, and who may take how many of them.

A new descriptor gets the lowest free number. So where a connection is refused whose number is too
high, connections never reach the numbers above, and those stay free for what must not fail: the
files of a replica that is open, then connections of servers. Replicas are opened only while a good
quarter of the numbers is left for clients, or none could reach them.
"""

from __future__ import annotations

import os
import resource
from typing import NamedTuple

RESERVE_MAX = 512
"""The most that is reserved for files, and again for servers; an eighth of a low limit."""

PER_REPLICA = 8
"""A replica in a process of several holds about so many: its lock, its active segment and one that
is read, and its connections."""


class Descriptors(NamedTuple):
    """Each is the first number that is too high."""

    limit: int
    """Of the process (`ulimit -n`)."""
    for_connections: int
    """Any connection; above it are files only."""
    for_clients: int
    """A client's connection; above it are connections of servers only."""
    for_replicas: int
    """Opening another replica."""

    @property
    def replicas_max(self) -> int:
        """How many replicas one process may have."""
        return max(1, self.for_replicas // PER_REPLICA)

    @property
    def reserve(self) -> int:
        return self.limit - self.for_connections


def shares() -> Descriptors:
    """As the process's limit is now."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = 2**31
    reserve = min(limit // 8, RESERVE_MAX)
    for_clients = limit - 2 * reserve
    return Descriptors(limit, limit - reserve, for_clients, for_clients - limit // 4)


def raise_limit() -> None:
    """Raises this process's limit as far as it may by itself."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def has_room_for_replica() -> bool:
    """Whether another replica may be opened."""
    try:
        probe = os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return False
    os.close(probe)
    return probe < shares().for_replicas
