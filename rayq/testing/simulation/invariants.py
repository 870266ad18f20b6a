"""What must hold of a cluster after every event: checked from outside, by whoever's event it was.

- one leader for each (partition, leader epoch), one controller for each controller epoch;
- committed metadata is the same record at the same index everywhere, and valid after each record;
- leader and partition epochs of the metadata never go back, nor does the high watermark of a
  replica within a role;
- replicas agree byte for byte below the lower high watermark, and never cut what they know to be
  committed;
- a new leader holds, byte for byte, all that leaders of earlier epochs had committed.

Each check reads only what has changed since the last one. The bytes are read from the simulated
disks directly, so that looking changes nothing.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from dataclasses import dataclass, field

from rayq.actors.broker import Broker
from rayq.actors.controller_server import ControllerServer
from rayq.actors.leader import Leader
from rayq.actors.replica import Replica
from rayq.actors.replica_host import ReplicaHost
from rayq.core.cluster_state import ClusterState
from rayq.core.metadata_records import PartitionChanged, decode_record
from rayq.core.partition_state import PartitionState
from rayq.storage.batch import read_header
from rayq.testing.simulation.cluster import SimulatedCluster
from rayq.testing.simulation.disk import SimulatedDisk
from rayq.testing.simulation.owner import Owner
from rayq.testing.simulation.process import Process

Key = tuple[str, int]
"""`(topic id, partition)`"""


class InvariantError(AssertionError):
    """The simulated cluster broke one of the rules above."""


@dataclass(slots=True)
class _Committed:
    """What the leaders of one partition have committed: each batch once, and how far each epoch
    got."""

    starts: list[int] = field(default_factory=list)
    batches: list[tuple[int, int]] = field(default_factory=list)
    """`(next offset, CRC of all its bytes)`"""
    end_by_epoch: dict[int, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.batches[-1][0] if self.batches else 0


@dataclass(slots=True)
class _Seen:
    """A replica as it was when last looked at. Below `checked` its log was compared."""

    leader: PartitionState | None = None
    high_watermark: int = 0
    generation: int = -1
    checked: int = 0
    segment: int = 0
    position: int = 0
    """Where the batch at `checked` begins: in the segment of this base offset, at this byte."""


class Invariants:
    """See the module. Set `observe` as the observer of the world's loop."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._replicas: dict[Replica, _Seen] = {}
        self._committed: dict[Key, _Committed] = {}
        self._leaders: dict[tuple[str, int, int], tuple[int, str]] = {}
        self._controllers: dict[int, object] = {}
        self._metadata: dict[int, bytes] = {}
        self._state = ClusterState()
        self._state_version = 0
        self._versions: dict[Broker, int] = {}
        self._latest_controller: dict[object, object] = {}
        self.elections = 0

    def observe(self, owner: Owner) -> None:
        """Raises `InvariantError`."""
        if not isinstance(owner, Process):
            return
        host = self._cluster.replica_hosts.get(owner)
        if host is not None:
            self._check_replicas(owner, host)
            return
        broker = self._cluster.broker_of.get(owner)
        if broker is not None:
            self._check_controller(broker)
            if self._versions.get(broker, 0) != broker.metadata.version:
                self._check_metadata(broker)
        elif self._cluster.controller is not None and owner is self._cluster.controller_process:
            self._check_controller(self._cluster.controller)

    def check_ends(self) -> None:
        """At the end: every live replica has all that was committed, byte for byte."""
        for process, host in self._cluster.replica_hosts.items():
            if not process.alive:
                continue
            for replica in host._replicas.values():
                committed = self._committed.get(_key(replica))
                if committed is not None and replica._replica_log.is_open:
                    self._compare(
                        process.host.disk, replica, self._replicas[replica], committed.end
                    )

    # --- the metadata -----------------------------------------------------------------------------

    def _check_controller(self, host: Broker | ControllerServer) -> None:
        controller = getattr(getattr(host, "controller_host", None), "controller", None)
        if controller is None or self._latest_controller.get(host) is controller:
            return
        self._latest_controller[host] = controller
        holder = self._controllers.setdefault(controller.epoch, controller)
        if holder is not controller:
            raise InvariantError(f"two controllers started epoch {controller.epoch}")

    def _check_metadata(self, broker: Broker) -> None:
        """Looks at the records that this broker has applied since."""
        log = broker.metadata._log
        known = self._versions.get(broker, 0)
        version = self._versions[broker] = broker.metadata.version
        first = max(known + 1, log.first_index)
        if first > version:
            return
        for index, epoch, data in log.read(first, 1 << 30):
            if index > version:
                break
            encoded = epoch.to_bytes(8, "big") + data
            if self._metadata.setdefault(index, encoded) != encoded:
                raise InvariantError(
                    f"record {index} of the metadata differs: {decode_record(data)} of epoch "
                    f"{epoch} here, {decode_record(self._metadata[index][8:])} of epoch "
                    f"{int.from_bytes(self._metadata[index][:8], 'big')} elsewhere"
                )
            if index == self._state_version + 1:
                self._apply(index, data)

    def _apply(self, index: int, data: bytes) -> None:
        record = decode_record(data)
        if isinstance(record, PartitionChanged):
            before = self._state.partition(record.topic_id, record.partition)
            if before is not None and (
                record.value.leader_epoch < before.value.leader_epoch
                or record.value.partition_epoch <= before.value.partition_epoch
            ):
                raise InvariantError(f"epochs go back: {before.value} to {record.value}")
            if before is not None and record.value.leader_epoch > before.value.leader_epoch:
                self.elections += 1
        self._state.replay(record)
        self._state_version = index
        if isinstance(record, PartitionChanged):
            try:
                self._state.validate()
            except AssertionError as error:
                raise InvariantError(f"after {record}: {error}") from error

    # --- replicas ---------------------------------------------------------------------------------

    def _check_replicas(self, process: Process, host: ReplicaHost) -> None:
        for replica in host._replicas.values():
            log = replica._replica_log._log
            if log is None:
                continue
            seen = self._replicas.get(replica)
            if seen is None:
                seen = self._replicas[replica] = _Seen()
            role = replica._role
            leader = role.state if isinstance(role, Leader) else None
            if (
                seen.leader is leader
                and seen.high_watermark == replica._replica_log.high_watermark
                and seen.generation == log.generation
            ):
                continue
            self._check_replica(process.host.disk, replica, seen, leader)

    def _check_replica(
        self,
        disk: SimulatedDisk,
        replica: Replica,
        seen: _Seen,
        leader: PartitionState | None,
    ) -> None:
        log = replica._replica_log._log
        assert log is not None
        where = _where(replica)
        high_watermark = replica._replica_log.high_watermark
        committed = self._committed.setdefault(_key(replica), _Committed())
        if log.generation != seen.generation:
            if log.end_offset < seen.checked:
                raise InvariantError(
                    f"{where} cut its log to {log.end_offset}; {seen.checked} was committed"
                )
            seen.generation = log.generation
        if seen.leader is not None and leader is not seen.leader:
            # Its last event as leader may have committed something before it ended the role.
            self._take_over(disk, replica, seen, seen.leader, committed)
        if leader is not None and leader is not seen.leader:
            self._check_new_leader(disk, replica, seen, leader, committed)
        elif leader is not None and high_watermark < seen.high_watermark:
            raise InvariantError(
                f"the high watermark of {where} goes back from {seen.high_watermark} to "
                f"{high_watermark} in leader epoch {leader.leader_epoch}"
            )
        seen.leader = leader
        seen.high_watermark = high_watermark
        if high_watermark > log.end_offset:
            raise InvariantError(f"{where}: high watermark {high_watermark}, end {log.end_offset}")
        if leader is not None:
            leader.validate()
            self._take_over(disk, replica, seen, leader, committed)
        elif high_watermark > committed.end:
            raise InvariantError(
                f"{where} follows with high watermark {high_watermark}; leaders have "
                f"committed up to {committed.end}"
            )
        else:
            self._compare(disk, replica, seen, high_watermark)

    def _check_new_leader(
        self,
        disk: SimulatedDisk,
        replica: Replica,
        seen: _Seen,
        leader: PartitionState,
        committed: _Committed,
    ) -> None:
        topic_id, number = _key(replica)
        epoch = leader.leader_epoch
        who = (replica._replica_log.broker, replica._replica_log.incarnation)
        holder = self._leaders.setdefault((topic_id, number, epoch), who)
        if holder != who:
            raise InvariantError(
                f"two leaders of {replica.where} in epoch {epoch}: {holder}, {who}"
            )
        earlier = [end for before, end in committed.end_by_epoch.items() if before < epoch]
        needed = max(earlier, default=0)
        log = replica._replica_log._log
        assert log is not None
        if log.end_offset < needed:
            raise InvariantError(
                f"{_where(replica)} leads in epoch {epoch} and its log ends at {log.end_offset}; "
                f"{needed} was committed before"
            )
        self._compare(disk, replica, seen, needed)

    def _take_over(
        self,
        disk: SimulatedDisk,
        replica: Replica,
        seen: _Seen,
        leader: PartitionState,
        committed: _Committed,
    ) -> None:
        """Compares a leader's log up to its high watermark, and takes over what is new."""
        end = min(leader.high_watermark, replica._replica_log.high_watermark)
        self._compare(disk, replica, seen, min(end, committed.end))
        for start, after, crc in _batches(disk, replica, seen, end):
            committed.starts.append(start)
            committed.batches.append((after, crc))
        epoch = leader.leader_epoch
        committed.end_by_epoch[epoch] = max(committed.end_by_epoch.get(epoch, 0), end)

    def _compare(self, disk: SimulatedDisk, replica: Replica, seen: _Seen, limit: int) -> None:
        if seen.checked >= limit:
            return
        committed = self._committed[_key(replica)]
        number = bisect_right(committed.starts, seen.checked) - 1
        for start, after, crc in _batches(disk, replica, seen, limit):
            expected = (committed.starts[number], *committed.batches[number])
            if (start, after, crc) != expected:
                raise InvariantError(
                    f"{_where(replica)} differs below the high watermark: batch {start} to "
                    f"{after} (CRC {crc:08x}), committed was {expected[0]} to {expected[1]} (CRC "
                    f"{expected[2]:08x})"
                )
            number += 1
        if seen.checked < limit:
            raise InvariantError(f"{_where(replica)} ends at {seen.checked}; {limit} was committed")


def _where(replica: Replica) -> str:
    return f"{replica.where} on broker {replica._replica_log.broker}"


def _key(replica: Replica) -> Key:
    return replica.assignment.topic_id, replica.assignment.partition


def _batches(
    disk: SimulatedDisk, replica: Replica, seen: _Seen, end: int
) -> list[tuple[int, int, int]]:
    """`(base offset, next offset, CRC)` of the batches of a log between what was looked at before
    and `end`; moves `seen` on."""
    found: list[tuple[int, int, int]] = []
    log = replica._replica_log._log
    assert log is not None
    segments = log._segments
    number = max(bisect_right(segments, seen.segment, key=lambda one: one.base_offset) - 1, 0)
    for segment in segments[number:]:
        if segment.base_offset != seen.segment:
            seen.segment, seen.position = segment.base_offset, 0
        view = memoryview(disk.find_file(segment.path).current)
        while seen.checked < end and seen.position < segment.size:
            header = read_header(view, seen.position)
            stop = seen.position + header.length
            if header.next_offset > seen.checked:
                crc = zlib.crc32(view[seen.position : stop])
                found.append((header.base_offset, header.next_offset, crc))
                seen.checked = header.next_offset
            seen.position = stop
        view.release()
        if seen.checked >= end:
            break
    return found
