"""Requests of the controller to the brokers that keep the metadata log, above all the voters."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from rayq.messages.base import (
    Bytes,
    CheckedName,
    Counter,
    Epoch,
    HostName,
    Port,
    Response,
    ToBroker,
)

SNAPSHOT_BYTES_MAX = 1 << 30
"""Maximum size of a snapshot of the metadata: what a small file on a disk may have."""


class PrepareResponse(Response, frozen=True):
    """A promise: this voter accepts nothing from a lower epoch. `directory_id` names its log."""

    broker: int
    directory_id: str
    start_counter: int
    incarnation: str
    promised_epoch: int
    last_epoch: int
    last_index: int
    voters: list[tuple[int, str]]
    """`(broker, directory id)` pairs of the last voter set in this log, committed or not."""
    heard_ms_ago: int | None
    """Time since this broker heard from a controller. None: not since its start."""


class Prepare(ToBroker[PrepareResponse], frozen=True):
    """Asks a voter to promise `epoch`. The promise is on its disk before it answers. Raises
    FencedEpochError when it promised a higher epoch; the error's message ends with that epoch."""

    api: ClassVar[int] = 80
    cluster_id: CheckedName
    epoch: Epoch
    host: HostName
    port: Port
    is_probe: bool = False
    """True: the voter only reports, and promises nothing."""


class ReadMetadataLogResponse(Response, frozen=True):
    """The payload is a msgpack list of `(index, epoch, record)` entries, in order."""

    snapshot_index: int | None
    snapshot_epoch: int | None
    """Not None: the record of the first entry is the snapshot of all records up to this index."""
    is_last: bool
    snapshot_bytes: int | None = None
    """Size of the snapshot of which that record is a part; there are no other entries then. None:
    it is not part of a snapshot."""


class ReadMetadataLog(ToBroker[ReadMetadataLogResponse], frozen=True):
    """Reads a voter's log from `first_index` on, or from its snapshot where that entry is gone."""

    api: ClassVar[int] = 81
    epoch: Epoch
    first_index: Counter
    bytes_max: Bytes
    snapshot_position: Counter | None = None
    """The snapshot is wanted in parts, as KRaft's FetchSnapshot has it, and from this byte on.
    None: as a whole."""


class AppendMetadataResponse(Response, frozen=True):
    directory_id: str
    """The directory that holds the entries: only a directory that is named as voter counts."""
    last_index: int
    """Up to here this log agrees with the controller's, on disk."""


class AppendMetadata(ToBroker[AppendMetadataResponse], frozen=True):
    """Appends the payload's entries after (`previous_index`, `previous_epoch`), and cuts entries
    that conflict; all is synced before the answer. Every broker keeps the log, and the voters count
    for the majority. Raises FencedEpochError (a higher epoch was promised) or StalePartitionError
    (the previous record is missing: start further back). Without entries it only tells the commit
    index, and that the controller lives."""

    api: ClassVar[int] = 82
    epoch: Epoch
    host: HostName
    port: Port
    previous_index: Counter
    previous_epoch: Epoch
    commit_index: Counter


class InstallMetadataSnapshot(ToBroker[AppendMetadataResponse], frozen=True):
    """Replaces a broker's log up to `last_index` by the snapshot in the payload."""

    api: ClassVar[int] = 83
    epoch: Epoch
    last_index: Counter
    last_epoch: Epoch


class InstallMetadataSnapshotPartResponse(Response, frozen=True):
    directory_id: str
    received_bytes: int
    """Number of bytes that the broker has of this snapshot: the next part begins there. If that is
    the whole size, the snapshot has replaced its log, on disk."""
    last_index: int
    """Index up to which this log agrees with the controller's, on disk. 0 while parts are
    missing."""


class InstallMetadataSnapshotPart(
    ToBroker[InstallMetadataSnapshotPartResponse], frozen=True
):
    """Brings a part of a snapshot that is too large for one message, as Raft's InstallSnapshot
    does. The broker collects the parts in memory, and replaces its log once it has all of them. It
    has none after its start, nor once another controller, or another snapshot, has come."""

    api: ClassVar[int] = 103
    epoch: Epoch
    host: HostName
    port: Port
    last_index: Counter
    last_epoch: Epoch
    snapshot_bytes: Annotated[int, msgspec.Meta(ge=1, le=SNAPSHOT_BYTES_MAX)]
    position: Counter
    """The place of the payload in the snapshot."""
