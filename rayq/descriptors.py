"""File descriptors of this process, and who may take how many of them.

A new descriptor gets the lowest free number. So where a connection is refused whose number is too
high, connections never reach the numbers above, and those stay free for what must not fail: the
files of a replica that is open, then connections of servers. Replicas are opened only while half of
the numbers are free, or clients could not reach them.
"""

from __future__ import annotations

import os
import resource
from typing import NamedTuple

RESERVE_MAX = 512
"""The most that is reserved for files, and again for servers; an eighth of a low limit."""

PER_REPLICA = 8
"""A replica holds about so many: its lock, the log of its active segment and of one that is read,
their indexes."""


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
    def reserve(self) -> int:
        return self.limit - self.for_connections


def shares() -> Descriptors:
    """As the process's limit is now."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = 2**31
    reserve = min(limit // 8, RESERVE_MAX)
    return Descriptors(limit, limit - reserve, limit - 2 * reserve, limit // 2)


def raise_limit() -> None:
    """Raises this process's limit as far as it may by itself."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def lowest_free() -> int:
    """The number that the next descriptor gets; the limit where none is free."""
    try:
        probe = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return shares().limit
    os.close(probe)
    return probe
