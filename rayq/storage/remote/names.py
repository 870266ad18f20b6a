"""How objects are named: each name is written once, by one leader, and never again.

    <cluster id>/<topic id>/<partition>/<kind>/<number>-<leader epoch>-<random>

`number` is the first offset of a data object or of a manifest's page, or the version of a manifest
(20 digits); the epoch has 10 digits, the random number 16 hex digits. So objects of one kind are
listed in the order of their numbers.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from rayq.config import INT64_MAX
from rayq.environment import Environment

RANDOM_BITS = 64
_NAME = re.compile(
    r"(?P<prefix>[0-9a-f]{32}/[0-9a-f]{32}/[0-9]+/)(?P<kind>data|manifest|page)/"
    r"(?P<number>[0-9]{20})-(?P<epoch>[0-9]{10})-(?P<random>[0-9a-f]{16})"
)


class ObjectKind(StrEnum):
    DATA = "data"
    MANIFEST = "manifest"
    PAGE = "page"


class RemoteName(NamedTuple):
    """A name in its parts. `str` makes the name."""

    prefix: str
    """See `partition_prefix`."""
    kind: ObjectKind
    number: int
    leader_epoch: int
    """Of the leader that wrote the object."""
    random: int

    def __str__(self) -> str:
        return (
            f"{self.prefix}{self.kind}/{self.number:020d}-{self.leader_epoch:010d}-"
            f"{self.random:016x}"
        )

    @property
    def topic_id(self) -> str:
        return self.prefix.split("/")[1]

    @property
    def partition(self) -> int:
        return int(self.prefix.split("/")[2])


def new_name(
    environment: Environment, prefix: str, kind: ObjectKind, number: int, leader_epoch: int
) -> str:
    """A name that no object has."""
    random = environment.random.getrandbits(RANDOM_BITS)
    return str(RemoteName(prefix, kind, number, leader_epoch, random))


def parse_name(name: str) -> RemoteName | None:
    """The parts of a name; None where it is not that of a partition's object."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return RemoteName(
        match["prefix"],
        ObjectKind(match["kind"]),
        int(match["number"]),
        int(match["epoch"]),
        int(match["random"], 16),
    )


def topic_prefix(cluster_id: str, topic_id: str) -> str:
    """What the names of a topic's objects begin with."""
    return f"{cluster_id}/{topic_id}/"


def partition_prefix(cluster_id: str, topic_id: str, partition: int) -> str:
    """What the names of a partition's objects begin with."""
    return f"{cluster_id}/{topic_id}/{partition}/"


def owners_prefix(cluster_id: str) -> str:
    """What the names of the marks begin with by which a cloned cluster is noticed."""
    return f"{cluster_id}/owners/"


def owner_mark(cluster_id: str, controller_epoch: int, mark: str) -> str:
    """The mark of one controller epoch."""
    return f"{owners_prefix(cluster_id)}{controller_epoch:020d}-{mark}"


def parse_owner_mark(name: str) -> tuple[int, str]:
    """`(controller epoch, mark)`. What is no mark counts as one of the latest epoch: some stranger
    writes there."""
    number, _, mark = name.rpartition("/")[2].partition("-")
    return (int(number) if number.isdecimal() else INT64_MAX), mark


def probes_prefix(cluster_id: str, broker: int) -> str:
    """What the names of a broker's probes begin with."""
    return f"{cluster_id}/probes/{broker}/"


def probe_name(environment: Environment, cluster_id: str, broker: int) -> str:
    """A name for an object that is written, read and deleted only to see whether that works."""
    return f"{probes_prefix(cluster_id, broker)}{environment.new_id()}"
