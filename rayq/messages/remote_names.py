"""The names of objects in the object store: the one place that makes them and reads them.

    <cluster id>/<topic id>/<partition>/<kind>/<number>-<leader epoch>-<random>

`number` is the first offset of a data object or of a manifest's page, or the version of a manifest
(20 digits); the epoch has 10 digits, the random number 16 hex digits. So objects of one kind are
listed in the order of their numbers. Each name is written once, by one leader, and never again.

Besides them a cluster has marks, by which a second cluster in its folder is noticed, and probes::

    <cluster id>/owners/<controller epoch>-<mark>
    <cluster id>/probes/<broker>/<random>

Names come from the wire, from manifests and from listings, too. Each of them is used only as far as
it parses here: then it has no empty part, no `..`, and no second spelling, and the folders of two
partitions are the same or have nothing in common.
"""

from __future__ import annotations

import re
from enum import StrEnum
from random import Random
from typing import NamedTuple

NUMBER_MAX = 2**63 - 1
EPOCH_MAX = 2**32 - 1
"""The maximum epoch that a batch and a manifest can hold."""
RANDOM_BITS = 64
TAKEOVER_EPOCH = 2**31 - 1
"""The controller epoch of a mark that takes a folder over: above any of the cluster's own."""
_ID = r"[0-9a-f]{32}"
_PARTITION = r"0|[1-9][0-9]{0,5}"
_NAME = re.compile(
    rf"(?P<cluster>{_ID})/(?P<topic>{_ID})/(?P<partition>{_PARTITION})/"
    r"(?P<kind>data|manifest|page)/"
    r"(?P<number>[0-9]{20})-(?P<epoch>[0-9]{10})-(?P<random>[0-9a-f]{16})"
)
_FOLDER = re.compile(rf"(?P<cluster>{_ID})/(?P<topic>{_ID})/((?P<partition>{_PARTITION})/)?")
_LISTED = re.compile(
    rf"{_ID}/(owners/|probes/[0-9]+/|{_ID}/(({_PARTITION})/((data|manifest|page)/)?)?)"
)
_PROBE = re.compile(rf"{_ID}/probes/[0-9]+/{_ID}")
_MARK = re.compile(rf"(?P<cluster>{_ID})/owners/[0-9]{{20}}-[0-9a-zA-Z-]{{1,64}}")


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
    """The epoch of the leader that wrote the object."""
    random: int

    def __str__(self) -> str:
        return (
            f"{self.prefix}{self.kind}/{self.number:020d}-{self.leader_epoch:010d}-"
            f"{self.random:016x}"
        )

    @property
    def cluster_id(self) -> str:
        return self.prefix.split("/")[0]

    @property
    def topic_id(self) -> str:
        return self.prefix.split("/")[1]

    @property
    def partition(self) -> int:
        return int(self.prefix.split("/")[2])


class Folder(NamedTuple):
    """The place of a partition's objects, or of a whole topic's: then `partition` is None."""

    cluster_id: str
    topic_id: str
    partition: int | None


def new_name(random: Random, prefix: str, kind: ObjectKind, number: int, leader_epoch: int) -> str:
    """A name that no object has."""
    return str(RemoteName(prefix, kind, number, leader_epoch, random.getrandbits(RANDOM_BITS)))


def parse_name(name: str) -> RemoteName | None:
    """The parts of a name; None where it is not that of a partition's object."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    number, epoch = int(match["number"]), int(match["epoch"])
    if number > NUMBER_MAX or epoch > EPOCH_MAX:
        return None
    prefix = f"{match['cluster']}/{match['topic']}/{match['partition']}/"
    return RemoteName(prefix, ObjectKind(match["kind"]), number, epoch, int(match["random"], 16))


def parse_folder(prefix: str) -> Folder | None:
    """Parses the result of `topic_prefix` or `partition_prefix`; None for anything else."""
    match = _FOLDER.fullmatch(prefix)
    if match is None:
        return None
    partition = match["partition"]
    return Folder(
        match["cluster"], match["topic"], None if partition is None else int(partition)
    )


def is_listed(prefix: str) -> bool:
    """Returns whether servers have a reason to list objects below this prefix."""
    return _LISTED.fullmatch(prefix) is not None


def topic_prefix(cluster_id: str, topic_id: str) -> str:
    """The prefix of the names of a topic's objects."""
    return f"{cluster_id}/{topic_id}/"


def partition_prefix(cluster_id: str, topic_id: str, partition: int) -> str:
    """The prefix of the names of a partition's objects."""
    return f"{cluster_id}/{topic_id}/{partition}/"


# --- marks and probes -----------------------------------------------------------------------------


def owners_prefix(cluster_id: str) -> str:
    """The prefix of the names of the marks by which a cloned cluster is noticed."""
    return f"{cluster_id}/owners/"


def owner_mark(cluster_id: str, controller_epoch: int, mark: str) -> str:
    """The mark of one controller epoch."""
    return f"{owners_prefix(cluster_id)}{controller_epoch:020d}-{mark}"


def takeover_mark(cluster_id: str, by: str) -> str:
    """The mark in the folder of one cluster that the cluster `by` leaves there, which has taken
    objects over: the one stores and deletes nothing from then on, and the other may."""
    return owner_mark(cluster_id, TAKEOVER_EPOCH, by)


def parse_owner_mark(name: str) -> tuple[int, str]:
    """`(controller epoch, mark)`. A name that is not a mark counts as one of the latest epoch: a
    stranger writes there."""
    number, _, mark = name.rpartition("/")[2].partition("-")
    is_number = number.isascii() and number.isdecimal() and len(number) <= 20
    return (int(number) if is_number else NUMBER_MAX), mark


def is_owner_mark_of(cluster_id: str, name: str) -> bool:
    """Returns whether this is the name of a mark of that cluster."""
    match = _MARK.fullmatch(name)
    return match is not None and match["cluster"] == cluster_id


def probes_prefix(cluster_id: str, broker: int) -> str:
    """The prefix of the names of a broker's probes."""
    return f"{cluster_id}/probes/{broker}/"


def probe_name(cluster_id: str, broker: int, probe_id: str) -> str:
    """A name for an object that is written, read and deleted only to see whether that works."""
    return f"{probes_prefix(cluster_id, broker)}{probe_id}"


def is_probe(name: str) -> bool:
    """Returns whether this is a name that `probe_name` makes."""
    return _PROBE.fullmatch(name) is not None
