"""The interface that actors need from their runtime: replica processes, and helper processes for
those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from rayq.storage.cleaner import CleaningJob, CleaningResult


class ReplicaHostSpec(msgspec.Struct, frozen=True):
    """All that a new replica process needs to know; the rest is in its data directory and comes
    from its broker."""

    cluster_name: str
    broker: int
    incarnation: str
    data_path: str
    names: tuple[str, ...]
    """The partitions it starts with, `topic-partition`: for the process's name only."""


class ObjectServerSpec(msgspec.Struct, frozen=True):
    """All that a new object server needs to know: it serves the replicas of one broker."""

    cluster_name: str
    broker: int
    incarnation: str
    data_path: str


class HostProcess(Protocol):
    """A replica process, or the object server, as its broker sees it."""

    async def wait_dead(self) -> str:
        """Returns when the process is gone, with what is known of why."""
        ...

    def kill(self) -> None:
        """SIGKILL; does nothing when it is gone."""
        ...


class Runtime(Protocol):
    """Starts and finds replica processes on this node."""

    processes_max: int
    """How many replica processes a broker starts, where `replicas_per_process` is not given."""

    async def start_replica_host(self, spec: ReplicaHostSpec) -> HostProcess:
        """Returns once the process is on its way; it presents itself to its broker. Raises
        RayqError when it could not be started."""
        ...

    async def start_object_server(self, spec: ObjectServerSpec) -> HostProcess:
        """As `start_replica_host`, for the process that alone talks to the object store."""
        ...

    def adopt(self, pid: int, pid_start_time: int) -> HostProcess | None:
        """A process that an earlier broker process started; None when that process is gone."""
        ...


class RunCleaner(Protocol):
    """Runs one pass of `storage.cleaner` at low priority, so that neither the caller's event loop
    nor anybody's writes wait for it. Cancelling it stops the pass."""

    async def __call__(self, job: CleaningJob) -> CleaningResult:
        """Raises DirectoryInUseError when another pass runs on that disk, CorruptBatchError,
        DiskFullError, and RayqError when the helper could not be started or was killed."""
        ...


def host_name(spec: ReplicaHostSpec) -> str:
    """The process's name: readable, unique for each start."""
    return f"rayq:{spec.cluster_name}:{spec.broker}:{_shown(spec.names)}:{spec.incarnation[:8]}"


def object_server_name(spec: ObjectServerSpec) -> str:
    """As `host_name`."""
    return f"rayq:{spec.cluster_name}:objects-{spec.broker}:{spec.incarnation[:8]}"


def _shown(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}+{len(names) - 1}"
