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
    """The partitions that it starts with, as `topic-partition`: only for the process's name."""


class ObjectServerSpec(msgspec.Struct, frozen=True):
    """All that a new object server needs to know: it serves the replicas of one broker."""

    cluster_name: str
    broker: int
    incarnation: str
    data_path: str


class HostProcess(Protocol):
    """A replica process, or the object server, as its broker sees it."""

    async def wait_dead(self) -> str:
        """Returns when the process is gone, with the reason if known."""
        ...

    def kill(self) -> None:
        """Sends SIGKILL; does nothing if the process is gone."""
        ...


class Runtime(Protocol):
    """Starts and finds replica processes on this node."""

    processes_max: int
    """Maximum number of replica processes of a broker, unless `replicas_per_process` is given."""

    async def start_replica_host(self, spec: ReplicaHostSpec) -> HostProcess:
        """Returns once the process is being started; it presents itself to its broker. Raises
        RayqError when it could not be started."""
        ...

    async def start_object_server(self, spec: ObjectServerSpec) -> HostProcess:
        """Starts the object server, the only process that talks to the object store, as
        `start_replica_host` does."""
        ...

    def adopt(self, pid: int, pid_start_time: int) -> HostProcess | None:
        """Returns a process that an earlier broker process started; None if that process is
        gone."""
        ...


class RunCleaner(Protocol):
    """Runs one pass of `storage.cleaner` at low priority, so that neither the caller's event loop
    nor any write waits for it. Cancelling it stops the pass."""

    async def __call__(self, job: CleaningJob) -> CleaningResult:
        """Raises DirectoryInUseError when another pass runs on that disk, CorruptBatchError,
        DiskFullError, and RayqError when the helper could not be started or was killed."""
        ...


def host_name(spec: ReplicaHostSpec) -> str:
    """The process's name: readable, unique for each start."""
    return f"rayq:{spec.cluster_name}:{spec.broker}:{_shown(spec.names)}:{spec.incarnation[:8]}"


def object_server_name(spec: ObjectServerSpec) -> str:
    """The object server's name, as `host_name`."""
    return f"rayq:{spec.cluster_name}:objects-{spec.broker}:{spec.incarnation[:8]}"


def _shown(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}+{len(names) - 1}"
