"""The remote pointer of a partition: metadata that servers keep and tell each other."""

from __future__ import annotations

import msgspec

from rayq.messages.remote_names import EPOCH_MAX, ObjectKind, RemoteName, parse_name

OFFSET_MAX = 2**62
"""The exclusive upper bound of offsets, sizes and versions, so that what servers compute of them
fits 64 bits."""
RESTORED_EPOCH_MAX = 2**30
"""The leader epochs of a restored topic begin above its pointer's. This leaves the greatest part of
them for its own leaders."""
RESTORED_OFFSET_MAX = 2**61
"""The offsets of a restored topic continue at its pointer's end. This leaves as many for its own.
"""


class RemotePointer(msgspec.Struct, array_like=True, frozen=True):
    """The place of a partition's list of remote objects: the only truth about what counts as
    stored.

    The manifest `manifest` (its name in the object store) lists objects that hold all records of
    the offsets from `start` up to `end` (exclusive) without hole or overlap, `data_bytes` in all.
    `end_epoch` is the leader epoch of the record at `end - 1`. `version` grows by one with each
    change; `leader_epoch` is that of the leader that committed it.
    """

    version: int
    leader_epoch: int
    manifest: str
    start: int
    end: int
    end_epoch: int | None
    data_bytes: int

    @property
    def name(self) -> RemoteName | None:
        """The manifest's name in its parts. None: it is not the name of a manifest."""
        name = parse_name(self.manifest)
        return None if name is None or name.kind is not ObjectKind.MANIFEST else name


def what_is_wrong(pointer: RemotePointer) -> str | None:
    """The reason why no pointer of rayq's can be like this; None where it can. Whatever came over
    the wire is checked so before it is committed: servers compute with these numbers, and read,
    write and delete below the manifest's folder."""
    numbers = (pointer.version, pointer.start, pointer.end, pointer.data_bytes)
    if not all(0 <= number < OFFSET_MAX for number in numbers):
        return f"{pointer} is of no range"
    if pointer.version < 1 or pointer.start > pointer.end:
        return f"{pointer} is of no range"
    if not all(0 <= epoch <= EPOCH_MAX for epoch in (pointer.leader_epoch, pointer.end_epoch or 0)):
        return f"its leader epochs {pointer.leader_epoch} and {pointer.end_epoch} cannot be"
    if (pointer.end_epoch is None) != (pointer.end == 0):
        return f"the epoch of the record before {pointer.end} is {pointer.end_epoch}"
    name = pointer.name
    if name is None:
        return f"{pointer.manifest!r} is not the name of a manifest"
    if name.number != pointer.version or name.leader_epoch > pointer.leader_epoch:
        return (
            f"{pointer.manifest!r} is version {name.number} of epoch {name.leader_epoch}, not "
            f"{pointer.version} of {pointer.leader_epoch}"
        )
    return None
