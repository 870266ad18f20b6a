"""The invariants of partitions that move, beside the ordinary invariants.

- A partition has at least as many replicas as its replication factor, also while that changes.
- Replicas leave only for a target that is in sync as a whole, where each of its processes that
  still lives has flushed all that leaders have committed; or because the move was cancelled, and
  then at least min_insync stay in sync.
- A broker puts no directory aside that a member of the in-sync set, or of the eligible replicas,
  relies on.
"""

from __future__ import annotations

import msgspec

from proving.simulation.cluster import ROOT, SimulatedCluster
from proving.simulation.files import Directory
from proving.simulation.invariants import InvariantError, Invariants
from rayq.core.cluster.records import MetadataRecord, PartitionChanged, PartitionValue
from rayq.core.cluster.state import ClusterState
from rayq.storage.cleaner import CLEANING
from rayq.storage.data_directory import (
    META,
    PARTITION_LOCK,
    PARTITION_META,
    Meta,
    PartitionMeta,
)


class MoveInvariants:
    """See the module. `watch` are the ordinary invariants, which follow the metadata."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._invariants: Invariants | None = None
        self._violation: str | None = None
        self.completed = 0
        self.cancelled = 0
        cluster.on_put_aside = self._directory_goes

    @property
    def state(self) -> ClusterState:
        """The newest committed metadata that any broker has."""
        assert self._invariants is not None
        return self._invariants.state

    def watch(self, invariants: Invariants) -> None:
        self._invariants = invariants
        before = invariants.on_record

        def check(state: ClusterState, record: MetadataRecord) -> None:
            if before is not None:
                before(state, record)
            self._check_record(state, record)

        invariants.on_record = check

    def observe(self) -> None:
        """Raises `InvariantError` for a violation that was found."""
        if self._violation is not None:
            raise InvariantError(self._violation)

    def _check_record(self, state: ClusterState, record: MetadataRecord) -> None:
        """Checks a record. `state` is the state before it."""
        if not isinstance(record, PartitionChanged):
            return
        topic = state.topics[record.topic_id]
        known = topic.partitions.get(record.partition)
        if known is None:
            return
        before, after = known.value, record.value
        where = f"{topic.name}-{record.partition}"
        stay = min(before.replication_factor, len(before.target or before.replicas))
        if len(set(after.replicas)) < stay:
            raise InvariantError(f"{where} has replicas on {after.replicas} only")
        if set(before.replicas) <= set(after.replicas):
            return
        if before.target and after.replicas == before.target:
            self.completed += 1
            self._check_completed(where, (record.topic_id, record.partition), before, after)
        elif before.target and set(after.replicas) >= set(before.origin):
            self.cancelled += 1
            gone = {broker.broker for broker in (*before.isr, *before.elr)} - set(after.replicas)
            if gone and len(after.isr) < topic.min_insync(before):
                raise InvariantError(
                    f"{where}: cancelled with {after.isr} in sync; before it was {before.isr}"
                )
        else:
            raise InvariantError(f"{where}: replicas are lost from {before} to {after}")

    def _check_completed(
        self, where: str, key: tuple[str, int], before: PartitionValue, after: PartitionValue
    ) -> None:
        assert self._invariants is not None
        in_sync = {member.broker for member in after.isr}
        if in_sync != set(after.replicas):
            raise InvariantError(
                f"{where} has moved to {after.replicas}; only {in_sync} are in sync (before that "
                f"{before.isr})"
            )
        committed = self._invariants.committed_end(key)
        for member in after.isr:
            flushed = self._invariants.flushed_of(member.incarnation, key)
            if flushed is not None and flushed < committed:
                raise InvariantError(
                    f"{where} has moved to {after.replicas}; {committed} was committed, and broker "
                    f"{member.broker} has flushed {flushed}"
                )

    def _directory_goes(self, broker: int, path: str) -> None:
        disk = self._cluster.hosts[broker].disk
        meta = msgspec.json.decode(disk.read(f"{ROOT}/broker-{broker}/{META}"), type=Meta)
        try:
            held = msgspec.json.decode(disk.read(f"{path}/{PARTITION_META}"), type=PartitionMeta)
        except (OSError, msgspec.DecodeError):
            found = disk.find(path)
            assert isinstance(found, Directory)
            if found.entries.keys() - {PARTITION_LOCK, PARTITION_META, CLEANING}:
                self._violation = f"broker {broker} puts {path} away, which holds a log of no name"
            return
        partition = self.state.partition(held.topic_id, held.partition)
        if partition is None:
            return
        for member in (*partition.value.isr, *partition.value.elr):
            if (member.broker, member.directory_id) == (broker, meta.directory_id):
                self._violation = (
                    f"broker {broker} puts {path} away, and is a member of {partition.value}"
                )
