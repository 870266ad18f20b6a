"""The invariants of consumer groups, besides those of every partition.

The truth is what is committed in `__consumer_offsets`, read from the disk of the leader that
commits it:

- a partition is assigned to, or being given up by, one member of a group; an epoch of a member
  means one assignment; epochs of groups do not go back;
- a committed position does not go back, nor away;
- a member is taken out for its silence only after a whole session under that coordinator;
- a coordinator that answers knows exactly what is committed;
- partitions that a member of the group believes it owns belong to that member for the group too;
- positions of which a client was told that they are committed are committed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from proving.simulation.cluster import SimulatedCluster
from proving.simulation.invariants import InvariantError
from proving.simulation.owner import Owner
from proving.simulation.process import Process
from proving.simulation.replica_changes import ReplicaChanges
from proving.simulation.server_view import (
    coordinator_of,
    decided_of,
    group_of,
    is_loaded,
    is_settled,
    is_stopped,
    leader_epoch_of,
    member_of,
    replicas_of,
)
from rayq.actors.groups.group_coordinator import GroupCoordinator
from rayq.actors.replica.replica import Replica
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.core.cluster.topic_changes import OFFSETS_TOPIC
from rayq.core.groups.records import (
    EndedRecord,
    GroupRecord,
    GroupValue,
    MemberRecord,
    MemberValue,
    OffsetRecord,
    OffsetValue,
    Partitions,
    PendingRecord,
    decode,
)
from rayq.records import TopicIdPartition, TopicPartition
from rayq.storage.batch import decode_columns, read_header

_GroupRecord = GroupRecord | MemberRecord | OffsetRecord
SILENT = re.compile(r"member (\w+)[^;]* was silent for")


@dataclass(slots=True)
class _Group:
    """The committed state of a group."""

    value: GroupValue = field(default_factory=GroupValue)
    members: dict[str, MemberValue] = field(default_factory=dict)
    offsets: dict[TopicIdPartition, OffsetValue] = field(default_factory=dict)


class GroupInvariants:
    """See the module. `committed` takes the batches that leaders commit. `observe` checks the owner
    of each event."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._changes = ReplicaChanges(cluster)
        self._groups: dict[str, _Group] = {}
        self._version = 0
        """Grows with each committed batch of the groups' topic."""
        self._newest_epoch: dict[int, int] = {}
        """The last leader epoch that began, for each partition of the topic."""
        self._loaded_s: dict[GroupCoordinator, float] = {}
        self._checked: dict[GroupCoordinator, tuple[int, int]] = {}
        self._serving: dict[tuple[int, int], GroupCoordinator] = {}
        """The coordinators by partition and leader epoch."""
        self._highest: dict[tuple[str, int], int] = {}
        self._meanings: dict[tuple[str, str, int], Partitions] = {}
        self.consumers: dict[Process, AsyncConsumer] = {}
        """The members that live. The workload adds each member that it makes."""
        self._beliefs: dict[Process, tuple[object, ...]] = {}
        self.rebalances = 0

    # --- what is committed ------------------------------------------------------------------------

    def committed(self, replica: Replica, leader_epoch: int, batch: bytes) -> None:
        """Takes a committed batch of any topic. Batches of the groups' topic change the truth."""
        if replica.assignment.topic != OFFSETS_TOPIC:
            return
        columns = decode_columns(batch, 0, read_header(batch))
        decoded = [
            decode(key, value)
            for key, value in zip(columns.keys or (), columns.values, strict=True)
        ]
        records = [
            record for record in decoded if not isinstance(record, EndedRecord | PendingRecord)
        ]
        changed = dict.fromkeys(record.group for record in records)
        before = {name: self._group(name).value.epoch for name in changed}
        gone: dict[str, dict[str, MemberValue]] = {name: {} for name in changed}
        for record in records:
            self._replay(record, gone)
        self._version += 1
        for name in changed:
            self._check_group(name, before[name])
            self._check_sessions(name, gone[name], replica, leader_epoch)

    def _group(self, name: str) -> _Group:
        return self._groups.setdefault(name, _Group())

    def _replay(self, record: _GroupRecord, gone: dict[str, dict[str, MemberValue]]) -> None:
        group = self._group(record.group)
        if isinstance(record, OffsetRecord):
            self._replay_offset(group, record)
        elif isinstance(record, MemberRecord):
            if record.value is not None:
                group.members[record.member] = record.value
            elif (before := group.members.pop(record.member, None)) is not None:
                gone[record.group][record.member] = before
        else:
            assert isinstance(record, GroupRecord)
            group.value = record.value or GroupValue()

    def _replay_offset(self, group: _Group, record: OffsetRecord) -> None:
        at = (record.topic_id, record.partition)
        before, value = group.offsets.get(at), record.value
        if before is not None and (value is None or value.offset < before.offset):
            raise InvariantError(
                f"group {record.group}: the committed position of partition {at[1]} goes back "
                f"unasked, from {before} to {value}"
            )
        if value is not None:
            group.offsets[at] = value
            self._highest[record.group, at[1]] = value.offset

    def _check_group(self, name: str, epoch_before: int) -> None:
        group = self._groups[name]
        if group.value.epoch < epoch_before:
            raise InvariantError(
                f"the epoch of group {name} goes back from {epoch_before} to {group.value.epoch}"
            )
        self.rebalances += group.value.epoch > epoch_before
        owners: dict[TopicIdPartition, str] = {}
        for member, info in group.members.items():
            if not info.previous_epoch <= info.member_epoch <= group.value.epoch:
                raise InvariantError(
                    f"group {name} is in epoch {group.value.epoch}, member {member} is {info}"
                )
            for at in info.assigned | info.revoking:
                if owners.setdefault(at, member) != member:
                    raise InvariantError(
                        f"group {name}, epoch {group.value.epoch}: partition {at[1]} has two "
                        f"owners, {owners[at]} and {member}"
                    )
            meaning = self._meanings.setdefault((name, member, info.member_epoch), info.assigned)
            if meaning != info.assigned:
                raise InvariantError(
                    f"group {name}: epoch {info.member_epoch} of member {member} meant "
                    f"{sorted(meaning)}, now {sorted(info.assigned)}"
                )

    def _check_sessions(
        self, name: str, gone: dict[str, MemberValue], replica: Replica, leader_epoch: int
    ) -> None:
        """Members that were taken out for their silence had a whole session for a heartbeat."""
        silent = set(SILENT.findall(self._groups[name].value.reason))
        coordinator = self._serving.get((replica.assignment.partition, leader_epoch))
        loaded_s = None if coordinator is None else self._loaded_s.get(coordinator)
        for member, info in gone.items():
            if member[:8] not in silent or loaded_s is None:
                continue
            served_s = self._cluster.world.now_s - loaded_s
            if served_s < info.session_timeout_ms / 1000:
                raise InvariantError(
                    f"group {name}: member {member} was taken out for its silence, its session is "
                    f"{info.session_timeout_ms} ms; this coordinator began {served_s:.3f} s ago"
                )

    # --- what is known ----------------------------------------------------------------------------

    def observe(self, owner: Owner) -> None:
        """Checks what the event of this owner may have changed. Raises `InvariantError`."""
        host = self._changes.host(owner)
        if not isinstance(owner, Process):
            return
        consumer = self.consumers.get(owner)
        if consumer is not None:
            self._check_beliefs(owner, consumer)
            return
        for replica in () if host is None else replicas_of(host).values():
            if isinstance(coordinator := coordinator_of(replica), GroupCoordinator):
                self._check_coordinator(replica, coordinator)

    def _check_coordinator(self, replica: Replica, coordinator: GroupCoordinator) -> None:
        partition, epoch = replica.assignment.partition, leader_epoch_of(coordinator)
        if self._serving.setdefault((partition, epoch), coordinator) is not coordinator:
            raise InvariantError(f"two coordinators of {replica.where} in leader epoch {epoch}")
        if epoch > self._newest_epoch.get(partition, 0):
            self._newest_epoch[partition] = epoch
        if not is_loaded(coordinator):
            self._loaded_s.pop(coordinator, None)
            return
        self._loaded_s.setdefault(coordinator, self._cluster.world.now_s)
        if not is_settled(coordinator):
            return
        seen = decided_of(coordinator)
        if self._checked.get(coordinator) == seen or epoch < self._newest_epoch[partition]:
            return
        self._checked[coordinator] = seen
        for name, group in coordinator.state.groups.items():
            truth = self._group(name)
            for what, own, true in (
                ("value", group.value, truth.value),
                ("members", group.members, truth.members),
                ("positions", group.offsets, truth.offsets),
            ):
                if own != true:
                    raise InvariantError(
                        f"the coordinator of {replica.where} in epoch {epoch} does not know the "
                        f"{what} of group {name}: it has {own}, committed is {true}"
                    )
        missing = [
            name
            for name, truth in self._groups.items()
            if (truth.members or truth.offsets) and name not in coordinator.state.groups
        ]
        if missing:
            raise InvariantError(f"the coordinator of {replica.where} does not know {missing}")

    def _check_beliefs(self, process: Process, consumer: AsyncConsumer) -> None:
        member = member_of(consumer)
        if not process.alive or member is None or is_stopped(member):
            return
        seen = (self._version, member.state.epoch, member.state.grant, member.owned.held)
        if self._beliefs.get(process) == seen:
            return
        self._beliefs[process] = seen
        group = self._group(group_of(member))
        known = group.members.get(member.member_id)
        if known is None:
            return  # The member is out of the group, and will learn that.
        believed = {(of, place.partition) for place, of in member.owned.listed.items()}
        if not believed <= known.owned:
            others = {
                at: other
                for at in believed - known.owned
                for other, info in group.members.items()
                if at in info.owned
            }
            raise InvariantError(
                f"{process.name} believes that it owns {sorted(believed)} in epoch "
                f"{member.state.epoch}; committed is {known}; others have {others}"
            )

    # --- what clients were told -------------------------------------------------------------------

    def owns(self, consumer: AsyncConsumer, places: set[TopicPartition]) -> bool:
        """Returns whether these partitions belong to the consumer's member by what is committed."""
        member = member_of(consumer)
        if member is None:
            return False
        known = self._group(group_of(member)).members.get(member.member_id)
        owned = set() if known is None else {partition for _, partition in known.owned}
        return owned >= {place.partition for place in places}

    def highest(self, group: str, partition: int) -> int:
        """The committed position in the one topic that the group reads; 0 without any."""
        return self._highest.get((group, partition), 0)
