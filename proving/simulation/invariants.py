"""The invariants of a cluster, checked from outside after every event.

- one leader for each (partition, leader epoch), one controller for each controller epoch, one
  process that has a partition's directory open;
- committed metadata is the same record at the same index everywhere, and valid after each record;
  what servers answer about it is judged by `metadata_answers`;
- leader and partition epochs of the metadata never go back, nor does the high watermark of a
  replica within a role;
- replicas agree byte for byte below the lower high watermark, and never cut what they know to be
  committed; where compaction has passed, see `compacted_history`;
- what a replica remembers of producers and epochs, after a recovery, after a truncation and at the
  end, agrees with its batches;
- what a replica calls flushed would survive a power loss now, as the simulated disk knows;
- when the high watermark moves, enough replicas are in sync; each of them that lives has flushed
  the very bytes below it, also when the in-sync set changes;
- a new leader holds, byte for byte, all that leaders of earlier epochs had committed.

Each check reads only what has changed since the last one. The bytes are read from the simulated
disks directly, so that looking changes nothing.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from proving.simulation.cluster import SimulatedCluster
from proving.simulation.compacted_history import CompactedHistory
from proving.simulation.derived_state import fault_of
from proving.simulation.disk import SimulatedDisk
from proving.simulation.invariants_access import AccessJudge
from proving.simulation.invariants_audit import AuditJudge
from proving.simulation.log_batches import LogBatch, LogBatches, first_offset_of
from proving.simulation.metadata_answers import MetadataJudge
from proving.simulation.owner import Owner
from proving.simulation.process import Process
from proving.simulation.replica_changes import ReplicaChanges
from proving.simulation.server_view import (
    clean_state_of,
    has_directory,
    log_of,
    metadata_log_of,
    open_log_of,
    replica_log_of,
    replicas_of,
    role_of,
)
from rayq.actors.broker.broker import Broker
from rayq.actors.controller.server import ControllerServer
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica import Replica, Role
from rayq.actors.replica.replica_host import ReplicaHost
from rayq.core.cluster.records import (
    MetadataRecord,
    PartitionChanged,
    RequestDone,
    decode_entry,
)
from rayq.core.cluster.state import ClusterState
from rayq.core.cluster.topic_changes import AUDIT_TOPIC
from rayq.core.partition.state import PartitionState
from rayq.records import TopicIdPartition
from rayq.storage.batch import read_header
from rayq.storage.clean_state import CleanState
from rayq.storage.log import Log


class InvariantError(AssertionError):
    """The simulated cluster broke one of the rules above."""


@dataclass(slots=True)
class _Committed:
    """The batches that the leaders of one partition have committed, and the end of each epoch."""

    starts: list[int] = field(default_factory=list)
    batches: list[tuple[int, int]] = field(default_factory=list)
    """`(next offset, CRC of all bytes of the batch)`"""
    end_by_epoch: dict[int, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.batches[-1][0] if self.batches else 0


@dataclass(slots=True)
class _Seen:
    """A replica as it was at the last check."""

    role: Role | None = None
    leader: PartitionState | None = None
    high_watermark: int = 0
    generation: int = -1
    flushed_offset: int = -1
    flushed_generation: int = -1
    compared: int = 0
    """The offset below which the log was compared with the committed batches."""
    durable: int = 0
    """The offset below which the log was found on disk."""
    batches: LogBatches = field(default_factory=lambda: LogBatches(-1))
    clean: CleanState | None = None
    """The state that compaction had left the log in."""


class Invariants:
    """See the module. Set `observe` as the observer of the world's loop."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._changes = ReplicaChanges(cluster)
        self._replicas: dict[Replica, _Seen] = {}
        self._hosts: dict[str, tuple[Process, ReplicaHost]] = {}
        """The replicas, by incarnation."""
        self._holders: dict[tuple[int, TopicIdPartition], tuple[Process, Replica]] = {}
        """The process that opened a partition's directory on a broker last."""
        self._committed: dict[TopicIdPartition, _Committed] = {}
        self.histories: dict[TopicIdPartition, CompactedHistory] = {}
        """The histories of the partitions of compacted topics."""
        self._leaders: dict[tuple[str, int, int], tuple[int, str]] = {}
        self._controllers: dict[int, object] = {}
        self.judge = MetadataJudge()
        self.audit = AuditJudge()
        self.access: AccessJudge | None = None
        """The judge of principals, in a seed that has any."""
        self.state = ClusterState()
        """The newest committed metadata that any broker has applied."""
        self._state_version = 0
        self._versions: dict[Broker, int] = {}
        self._latest_controller: dict[object, object] = {}
        self.unclean_topics: frozenset[str] = frozenset()
        """The topics that may lose what is committed: their logs are not compared here."""
        self.elections = 0
        self.on_committed: Callable[[Replica, int, bytes], None] | None = None
        """Called with each batch that a leader commits, once, in order, with its leader epoch."""
        self.on_record: Callable[[ClusterState, MetadataRecord], None] | None = None
        """Called with each committed record of the metadata, and the state before it."""

    @contextlib.contextmanager
    def judging(self) -> Iterator[None]:
        """Lets the judges hear the servers, for the length of a `with` block."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.judge.judging())
            if self.access is not None:
                stack.enter_context(self.access.judging())
            yield

    def observe(self, owner: Owner) -> None:
        """Checks what the event of this owner may have changed. Raises `InvariantError`."""
        if self.judge.fault is not None:
            raise InvariantError(self.judge.fault)
        if self.access is not None and self.access.fault is not None:
            raise InvariantError(self.access.fault)
        host = self._changes.host(owner)
        if not isinstance(owner, Process):
            return
        if host is not None:
            self._check_replicas(owner, host)
            return
        broker = self._cluster.broker_of.get(owner)
        if broker is not None:
            self._check_controller(broker)
            if self._versions.get(broker, 0) != broker.metadata.version:
                self._check_metadata(broker)
        elif owner is self._cluster.controller_process:
            server = self._cluster.controller
            if server is not None:
                self._check_controller(server)

    def check_ends(self) -> None:
        """At the end: every live replica has all that was committed, byte for byte."""
        self.audit.check_ends()
        for process, replica in self._cluster.live_replicas():
            committed, log = self._committed.get(_key(replica)), open_log_of(replica)
            if committed is None or log is None:
                continue
            disk, seen = process.host.disk, self._replicas[replica]
            self._compare(disk, replica, seen, committed.end)
            self._check_nothing_is_back(disk, replica, seen, log)
            self._check_derived(disk, replica, seen, log)

    def committed_end(self, key: TopicIdPartition) -> int:
        """The offset up to which the leaders of a partition have committed."""
        committed = self._committed.get(key)
        return 0 if committed is None else committed.end

    def flushed_of(self, incarnation: str, key: TopicIdPartition) -> int | None:
        """The flushed offset of a replica, or None while it does not run."""
        process, host = self._hosts.get(incarnation, (None, None))
        replica = None if host is None else replicas_of(host).get(key)
        if process is None or not process.alive or replica is None:
            return None
        log = open_log_of(replica)
        return None if log is None else log.flushed_offset

    # --- the metadata -----------------------------------------------------------------------------

    def _check_controller(self, host: Broker | ControllerServer) -> None:
        controller = host.controller_host.controller
        if controller is None:
            return
        self.judge.note_controller(controller)
        if self._latest_controller.get(host) is controller:
            return
        self._latest_controller[host] = controller
        holder = self._controllers.setdefault(controller.epoch, controller)
        if holder is not controller:
            raise InvariantError(f"two controllers started epoch {controller.epoch}")

    def _check_metadata(self, broker: Broker) -> None:
        """Checks the records that this broker has applied since the last check."""
        log = metadata_log_of(broker.metadata)
        known = self._versions.get(broker, 0)
        version = self._versions[broker] = broker.metadata.version
        first = max(known + 1, log.first_index)
        if first > version:
            return
        for index, epoch, data in log.read(first, 1 << 30):
            if index > version:
                break
            self.judge.note_committed(index, epoch.to_bytes(8, "big") + data)
            if index == self._state_version + 1:
                self._apply(index, data)

    def _apply(self, index: int, data: bytes) -> None:
        records = decode_entry(data)
        if self.access is not None:
            self.access.note_entry(index, self.state, records)
        for record in records:
            self._replay(record)
            if isinstance(record, RequestDone):
                self.judge.note_done(index, record)
                self.audit.note_done(record)
        self._state_version = index
        self.judge.note_state(index, self.state)

    def _replay(self, record: MetadataRecord) -> None:
        if isinstance(record, PartitionChanged):
            before = self.state.partition(record.topic_id, record.partition)
            if before is not None and (
                record.value.leader_epoch < before.value.leader_epoch
                or record.value.partition_epoch <= before.value.partition_epoch
            ):
                raise InvariantError(f"epochs go back: {before.value} to {record.value}")
            if before is not None and record.value.leader_epoch > before.value.leader_epoch:
                self.elections += 1
        if self.on_record is not None:
            self.on_record(self.state, record)
        self.state.replay(record)
        if isinstance(record, PartitionChanged):
            try:
                self.state.validate()
            except AssertionError as error:
                raise InvariantError(f"after {record}: {error}") from error
            self._check_new_members(record)

    def _check_new_members(self, record: PartitionChanged) -> None:
        """Each new member of the in-sync set has the bytes that its leader has taken for
        committed."""
        incarnation = record.value.leader_incarnation
        if incarnation is None or incarnation not in self._hosts:
            return
        process, host = self._hosts[incarnation]
        leader = replicas_of(host).get((record.topic_id, record.partition))
        role = None if leader is None else role_of(leader)
        if leader is None or leader.assignment.topic in self.unclean_topics:
            return
        if process.alive and isinstance(role, Leader):
            self._check_in_sync(leader, role.state, replica_log_of(leader).high_watermark)

    # --- replicas ---------------------------------------------------------------------------------

    def _check_replicas(self, process: Process, host: ReplicaHost) -> None:
        for replica in replicas_of(host).values():
            held, log = replica_log_of(replica), log_of(replica)
            if log is None or replica.assignment.topic in self.unclean_topics:
                continue
            seen, role = self._replicas.get(replica), role_of(replica)
            if (
                seen is not None
                and seen.role is role
                and seen.high_watermark == held.high_watermark
                and seen.flushed_offset == log.flushed_offset
                and seen.generation == seen.flushed_generation == log.generation
                and seen.clean is clean_state_of(log)
            ):
                continue  # As after most events.
            if seen is None:
                seen = self._replicas[replica] = _Seen()
                self._hosts[held.incarnation] = (process, host)
                self._check_holder(process, replica)
            if (
                seen.flushed_offset != log.flushed_offset
                or seen.flushed_generation != log.generation
            ):
                self._check_flushed(process, replica, seen, log)
            leader = role.state if isinstance(role, Leader) else None
            if seen.clean is not clean_state_of(log):
                self._check_compacted(process.host.disk, replica, seen, log)
            if (
                seen.leader is not leader
                or seen.high_watermark != held.high_watermark
                or seen.generation != log.generation
            ):
                self._check_replica(process.host.disk, replica, seen, leader)
            seen.role = role

    def _check_holder(self, process: Process, replica: Replica) -> None:
        place = (replica_log_of(replica).broker, _key(replica))
        before, other = self._holders.get(place, (None, replica))
        self._holders[place] = (process, replica)
        if before is not None and before.alive and has_directory(other):
            raise InvariantError(
                f"{process.name} opened the directory of {_where(replica)}, which {before.name} "
                "has open"
            )

    def _check_flushed(self, process: Process, replica: Replica, seen: _Seen, log: Log) -> None:
        """Compares the offsets that count as flushed since the last check with the bytes that the
        disk holds for certain."""
        if not process.alive or open_log_of(replica) is None or log.config.flush == "os":
            return
        if log.failure is not None:
            return  # It has stopped: no other process learns its offsets.
        if seen.flushed_generation != log.generation:
            seen.durable = 0
        seen.durable = max(seen.durable, first_offset_of(log))
        seen.flushed_offset, seen.flushed_generation = log.flushed_offset, log.generation
        if log.flushed_offset > log.end_offset:
            raise InvariantError(
                f"{_where(replica)} has flushed up to {log.flushed_offset}, says its log, which "
                f"ends at {log.end_offset}"
            )
        disk = process.host.disk
        for batch in _batches(disk, log, seen, seen.durable, log.flushed_offset):
            if not disk.is_durable(batch.path, batch.start, batch.stop):
                raise InvariantError(
                    f"{_where(replica)} has flushed up to {log.flushed_offset}, says its log; a "
                    f"power loss now could cost the batch {batch.base_offset} to "
                    f"{batch.next_offset}"
                )
            seen.durable = batch.next_offset

    def _check_compacted(
        self, disk: SimulatedDisk, replica: Replica, seen: _Seen, log: Log
    ) -> None:
        """Compares the log again from its start, and forgets where its batches were."""
        self._check_generation(disk, replica, seen, log)
        seen.clean, seen.batches = clean_state_of(log), LogBatches(-1)
        limit, seen.compared = seen.compared, 0
        self._compare(disk, replica, seen, limit)
        self._check_nothing_is_back(disk, replica, seen, log)

    def _check_nothing_is_back(
        self, disk: SimulatedDisk, replica: Replica, seen: _Seen, log: Log
    ) -> None:
        history = self.histories.get(_key(replica))
        if history is None:
            return
        limit = min(log.end_offset, self._committed[_key(replica)].end, seen.compared)
        found = _batches(disk, log, seen, 0, limit)
        fault = history.fault_of_all((batch.read(disk) for batch in found), limit)
        if fault is not None:
            raise InvariantError(f"{_where(replica)}: {fault}")

    def _check_derived(
        self, disk: SimulatedDisk, replica: Replica, seen: _Seen, log: Log
    ) -> None:
        """Compares what the replica remembers of its batches with the batches."""
        if log.failure is not None or open_log_of(replica) is None:
            return
        if log.start_offset > 0 or log.cleaned_offset > 0 or first_offset_of(log) > 0:
            return  # Some of the state comes from batches that are gone, or not on this disk.
        found = _batches(disk, log, seen, 0, log.end_offset)
        fault = fault_of(log, (read_header(batch.read(disk)) for batch in found))
        if fault is not None:
            raise InvariantError(f"{_where(replica)} {fault}")

    def _check_generation(
        self, disk: SimulatedDisk, replica: Replica, seen: _Seen, log: Log
    ) -> None:
        if log.generation == seen.generation:
            return
        self._check_derived(disk, replica, seen, log)
        if log.end_offset < seen.compared:
            where = _where(replica)
            starts_over = log.end_offset == log.start_offset and _key(replica) in self.histories
            partition = self.state.partition(*_key(replica))
            who = replica_log_of(replica).incarnation
            is_in_sync = partition is None or any(
                member.incarnation == who for member in partition.value.isr
            )
            if not starts_over or is_in_sync:
                raise InvariantError(
                    f"{where} cut its log to {log.end_offset}; {seen.compared} was committed"
                )
            seen.compared = 0
        seen.generation = log.generation

    def _check_replica(
        self,
        disk: SimulatedDisk,
        replica: Replica,
        seen: _Seen,
        leader: PartitionState | None,
    ) -> None:
        log = log_of(replica)
        assert log is not None
        where = _where(replica)
        high_watermark = replica_log_of(replica).high_watermark
        committed = self._committed.setdefault(_key(replica), _Committed())
        self._check_generation(disk, replica, seen, log)
        if seen.leader is not None and leader is not seen.leader:
            # In its last event as leader it may have committed a batch before it ended the role.
            self._take_over(disk, replica, seen, seen.leader, committed)
        if leader is not None and leader is not seen.leader:
            self._check_new_leader(disk, replica, seen, leader, committed)
        elif leader is not None and high_watermark < seen.high_watermark:
            raise InvariantError(
                f"the high watermark of {where} goes back from {seen.high_watermark} to "
                f"{high_watermark} in leader epoch {leader.leader_epoch}"
            )
        elif (
            leader is not None
            and high_watermark > seen.high_watermark
            and len(leader.isr) < leader.min_insync
        ):
            raise InvariantError(
                f"the high watermark of {where} moves from {seen.high_watermark} to "
                f"{high_watermark}; {len(leader.isr)} are in sync, {leader.min_insync} have to be"
            )
        seen.leader = leader
        seen.high_watermark = high_watermark
        if high_watermark > log.end_offset:
            raise InvariantError(f"{where}: high watermark {high_watermark}, end {log.end_offset}")
        if log.start_offset > max(committed.end, high_watermark):
            raise InvariantError(
                f"{where} starts at {log.start_offset}; only {committed.end} is committed"
            )
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
        who = (replica_log_of(replica).broker, replica_log_of(replica).incarnation)
        holder = self._leaders.setdefault((topic_id, number, epoch), who)
        if holder != who:
            raise InvariantError(
                f"two leaders of {replica.where} in epoch {epoch}: {holder}, {who}"
            )
        earlier = [end for before, end in committed.end_by_epoch.items() if before < epoch]
        needed = max(earlier, default=0)
        log = log_of(replica)
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
        """Compares a leader's log up to its high watermark, and adds new batches to the committed
        ones."""
        end = min(leader.high_watermark, replica_log_of(replica).high_watermark)
        self._compare(disk, replica, seen, min(end, committed.end))
        log = log_of(replica)
        assert log is not None
        for batch in _batches(disk, log, seen, seen.compared, end):
            crc = disk.checksum(batch.path, batch.start, batch.stop)
            committed.starts.append(batch.base_offset)
            committed.batches.append((batch.next_offset, crc))
            seen.compared = batch.next_offset
            if replica_log_of(replica).topic_config.is_compacted:
                history = self.histories.setdefault(_key(replica), CompactedHistory())
                history.add(batch.read(disk), self._cluster.world.now_s)
            if replica.assignment.topic == AUDIT_TOPIC:
                self.audit.committed(batch.read(disk))
            if self.on_committed is not None:
                self.on_committed(replica, leader.leader_epoch, batch.read(disk))
        epoch = leader.leader_epoch
        before = committed.end_by_epoch.get(epoch, 0)
        committed.end_by_epoch[epoch] = max(before, end)
        if end > before:
            self._check_in_sync(replica, leader, end)

    def _check_in_sync(self, replica: Replica, leader: PartitionState, end: int) -> None:
        """Every member of the in-sync set, as the metadata has it, has flushed what a leader takes
        for committed. Only members that live are looked at: a disk may be lost with its broker."""
        partition = self.state.partition(*_key(replica))
        if partition is None or partition.value.leader_epoch != leader.leader_epoch:
            return  # It is deposed: what it knows of its followers may be old.
        if partition.value.partition_epoch < leader.partition_epoch:
            return
        for member in partition.value.isr:
            process, host = self._hosts.get(member.incarnation, (None, None))
            other = None if host is None else replicas_of(host).get(_key(replica))
            if process is None or other is None or not process.alive:
                continue
            log = open_log_of(other)
            if log is None:
                continue
            if log.flushed_offset < end:
                raise InvariantError(
                    f"{_where(replica)} takes {end} for committed in epoch {leader.leader_epoch}; "
                    f"broker {member.broker} is in sync and has flushed {log.flushed_offset}"
                )
            self._compare(process.host.disk, other, self._replicas[other], end)

    def _compare(self, disk: SimulatedDisk, replica: Replica, seen: _Seen, limit: int) -> None:
        if seen.compared >= limit:
            return
        committed = self._committed[_key(replica)]
        log = log_of(replica)
        assert log is not None
        if seen.compared < log.cleaned_offset and _key(replica) in self.histories:
            self._compare_compacted(disk, replica, seen, log, limit)
        seen.compared = max(seen.compared, first_offset_of(log))
        number = bisect_right(committed.starts, seen.compared) - 1
        for batch in _batches(disk, log, seen, seen.compared, limit):
            start, after = batch.base_offset, batch.next_offset
            crc = disk.checksum(batch.path, batch.start, batch.stop)
            expected = (committed.starts[number], *committed.batches[number])
            if (start, after, crc) != expected:
                raise InvariantError(
                    f"{_where(replica)} differs below the high watermark: batch {start} to "
                    f"{after} (CRC {crc:08x}), committed was {expected[0]} to {expected[1]} (CRC "
                    f"{expected[2]:08x})"
                )
            number += 1
            seen.compared = after
        if seen.compared < limit:
            raise InvariantError(
                f"{_where(replica)} ends at {seen.compared}; {limit} was committed"
            )


    def _compare_compacted(
        self, disk: SimulatedDisk, replica: Replica, seen: _Seen, log: Log, limit: int
    ) -> None:
        """Compares the compacted part of a log by its records."""
        history, config = self.histories[_key(replica)], log.config
        limit = min(limit, log.cleaned_offset, log.end_offset)
        until_s = self._cluster.world.now_s - config.delete_retention_ms / 1000
        if any(host.clock_changes for host in self._cluster.world.hosts):
            until_s = self._cluster.world.now_s  # Wall clocks give the age of tombstones.
        for batch in _batches(disk, log, seen, seen.compared, limit):
            if batch.base_offset >= limit:
                break
            fault = history.fault_of(
                seen.compared,
                batch.read(disk),
                horizon=log.tombstone_horizon,
                deleted_before_s=until_s,
            )
            if fault is not None:
                raise InvariantError(f"{_where(replica)}: {fault}")
            seen.compared = batch.next_offset
        for offset in range(seen.compared, limit):
            fault = history.fault_of_missing(
                offset, horizon=log.tombstone_horizon, deleted_before_s=until_s
            )
            if fault is not None:
                raise InvariantError(f"{_where(replica)}: {fault}")
        seen.compared = max(seen.compared, limit)


def _where(replica: Replica) -> str:
    return f"{replica.where} on broker {replica_log_of(replica).broker}"


def _key(replica: Replica) -> TopicIdPartition:
    return replica.assignment.topic_id, replica.assignment.partition


def _batches(disk: SimulatedDisk, log: Log, seen: _Seen, start: int, end: int) -> list[LogBatch]:
    """The batches of a log from the one that ends above `start` to the one that reaches `end`."""
    if seen.batches.generation != log.generation:
        seen.batches = LogBatches(log.generation)
    return seen.batches.between(disk, log, start, end)
