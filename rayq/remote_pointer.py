"""The remote pointer of a partition: metadata that servers keep and tell each other."""

from __future__ import annotations

import msgspec


class RemotePointer(msgspec.Struct, array_like=True, frozen=True):
    """Where a partition's list of remote objects is: the one truth about what counts as stored.

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
