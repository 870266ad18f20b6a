"""What the leader does about its partition's records in the object store: it stores closed
segments, keeps retention over what is there and on the disk, and sweeps what nothing refers to."""

from __future__ import annotations

from rayq.actors.clock_watch import ClockWatch
from rayq.actors.remote.remote_log import RemoteLog
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.core.partition_state import PartitionState
from rayq.metrics import Sample
from rayq.wire import messages


class LeaderRemote:
    """See the module. `log` is what is known of the remote log. Call `tick` every now and then, and
    `end` once."""

    def __init__(
        self,
        replica_log: ReplicaLog,
        remote_log: RemoteLog,
        state: PartitionState,
        assignment: messages.PartitionAssignment,
    ) -> None:
        self._replica_log = replica_log
        self._state = state
        self._assignment = assignment
        self.log = remote_log

    def committed(self, assignment: messages.PartitionAssignment) -> None:
        """The partition's committed metadata, in this epoch."""
        self._assignment = assignment
        self.log.committed(assignment)

    def end(self, reason: str) -> None:
        self.log.end(reason)

    def tick(self, now_s: float, clock_watch: ClockWatch) -> None:
        """Does what is due by time."""

    def measure(self, at: dict[str, object]) -> list[Sample]:
        return []
