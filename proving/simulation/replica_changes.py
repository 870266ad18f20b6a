"""The replica processes that an event may have changed, so that no others need to be checked.

All that invariants look at in a replica process, to see whether there is something to check, are
attributes of its replicas, of their logs, of the states of leaders and of coordinators: which role
one has, how far its log goes and is flushed, what is decided and committed. Code changes them by
assigning them. So once this module is imported, every such assignment is counted; where an event
made none, in whatever code it ran, each of them is what it was when it was looked at last.
"""

from __future__ import annotations

from proving.simulation.cluster import SimulatedCluster
from proving.simulation.owner import Owner
from proving.simulation.process import Process
from rayq.actors.coordinator import Coordinator
from rayq.actors.coordinator_log import CoordinatorLog
from rayq.actors.replica.replica import Replica
from rayq.actors.replica.replica_host import ReplicaHost
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.core.partition.state import PartitionState
from rayq.storage.log import Log

WATCHED: tuple[type, ...] = (
    Replica, ReplicaLog, PartitionState, Log, Coordinator, CoordinatorLog,
)

_assign = object.__setattr__


class _Count:
    assignments = 0
    """Number of assignments to attributes of `WATCHED` in this process."""


def _assign_and_count(self: object, name: str, value: object) -> None:
    _Count.assignments += 1
    _assign(self, name, value)


for _kind in WATCHED:
    _kind.__setattr__ = _assign_and_count  # type: ignore[assignment]


class ReplicaChanges:
    """Each observer of events has one."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._hosts = cluster.replica_hosts
        self._seen = -1
        self._due: dict[Process, None] = {}
        """The replica processes that an event of others may have changed."""

    def host(self, owner: Owner) -> ReplicaHost | None:
        """Call this after each event. The replicas of its owner, where the event, or one of others
        before it, may have changed them; None where it has not, or has no replicas."""
        host = self._hosts.get(owner) if isinstance(owner, Process) else None
        if self._seen != _Count.assignments:
            self._seen = _Count.assignments
            if host is None:  # What a fault ends runs its `finally` blocks in the fault's event.
                self._due = {process: None for process in self._hosts if process.alive}
        elif owner not in self._due:
            return None
        self._due.pop(owner, None)  # type: ignore[call-overload]
        return host
