"""Read-only view of servers and clients: the only place of the simulation that reads private names.

The invariants look at a server from outside, between two events, and at more than it tells anybody.
Whoever renames an attribute of a server mends it here. Planted bugs (`mutations*`) and probes
(`situations`) stand for the code that they replace, and name what it names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

from rayq.actors.broker.broker import Broker
from rayq.actors.broker.metadata_answers import MetadataAnswers
from rayq.actors.controller.controller import Controller
from rayq.actors.coordinator import Coordinator
from rayq.actors.hosting import ReplicaHostSpec
from rayq.actors.metadata.metadata_keeper import MetadataKeeper
from rayq.actors.metadata.quorum import Entry, Quorum
from rayq.actors.queues.leader import QueueLeader
from rayq.actors.queues.open_queue import OpenQueue
from rayq.actors.queues.persister import GroupCommit
from rayq.actors.queues.waiting import LockOwners
from rayq.actors.remote.leader_remote import LeaderRemote
from rayq.actors.replica.replica import Replica, Role
from rayq.actors.replica.replica_host import ReplicaHost
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.client.consuming.group_member import GroupMember
from rayq.client.queues.acquired import AcquiredBatch
from rayq.client.queues.task import QueueTask
from rayq.core.queues.queue_states import Opening, QueueStates, StateKey
from rayq.records import TopicIdPartition
from rayq.storage.clean_state import CleanState
from rayq.storage.data_directory import DataDirectory
from rayq.storage.log import Log
from rayq.storage.metadata_log import MetadataLog
from rayq.storage.open_transactions import OpenTransactions
from rayq.storage.producer_state import ProducerState
from rayq.storage.remote.manifest import Manifest
from rayq.storage.segment import Segment
from rayq.wire.accepted_connection import AcceptedConnection
from rayq.wire.peer import Peer
from rayq.wire.server import Server

# --- replicas -------------------------------------------------------------------------------------


def spec_of(host: ReplicaHost) -> ReplicaHostSpec:
    return host._spec


def replicas_of(host: ReplicaHost) -> Mapping[TopicIdPartition, Replica]:
    """The replicas that a process hosts, in the order in which it got them."""
    return host._replicas


def replica_log_of(replica: Replica) -> ReplicaLog:
    return replica._replica_log


def log_of(replica: Replica) -> Log | None:
    """The log of a replica, also one that has failed or is closed. None: it was never open."""
    return replica._replica_log._log


def open_log_of(replica: Replica) -> Log | None:
    """The log of a replica, if it can be used."""
    held = replica._replica_log
    return held._log if held.is_open else None


def has_directory(replica: Replica) -> bool:
    """True while the replica holds its partition's directory."""
    return replica._replica_log._jobs.directory is not None


def role_of(replica: Replica) -> Role | None:
    return replica._role


def coordinator_of(replica: Replica) -> Coordinator[Any, Any] | None:
    """The coordinator that the leader of an internal topic's partition has beside it."""
    return replica._coordinator


def queue_leaders_of(replica: Replica) -> Collection[QueueLeader]:
    """The leaders of the queues of a replica that leads."""
    return () if replica._queues is None else replica._queues._queues.values()


# --- logs -----------------------------------------------------------------------------------------


def segments_of(log: Log) -> Sequence[Segment]:
    return log._segments


def clean_state_of(log: Log) -> CleanState:
    """The state in which compaction has left the log."""
    return log._clean


class ProducerBatches(NamedTuple):
    """The remembered batches of a producer: `(first sequence, last sequence, first offset, last
    offset)`."""

    epoch: int
    batches: list[tuple[int, int, int, int]]


def producers_of(state: ProducerState) -> dict[int, ProducerBatches]:
    """All producers that a log remembers, by id."""
    return {
        producer_id: ProducerBatches(
            producer.epoch,
            [
                (batch.base_sequence, batch.last_sequence, batch.base_offset, batch.last_offset)
                for batch in producer.batches
            ],
        )
        for producer_id, producer in state._producers.items()
    }


def open_transactions_of(transactions: OpenTransactions) -> dict[int, tuple[int, int]]:
    """By family: epoch and first offset of the transaction that is open."""
    return {
        opened.family: (opened.epoch, opened.first_offset)
        for opened in transactions._open.values()
    }


def ended_epochs_of(transactions: OpenTransactions) -> dict[int, int]:
    """By family: the epoch that a marker ended last."""
    return {family: ended.epoch for family, ended in transactions._ended_epochs.items()}


# --- remote storage -------------------------------------------------------------------------------


def is_loading_list(remote: LeaderRemote) -> bool:
    """True while a leader loads the list of its partition's objects."""
    return remote.log._loading.locked()


def loaded_list(remote: LeaderRemote) -> Manifest | None:
    """The list of the partition's objects, if the leader has loaded it."""
    loaded = remote.log._loaded
    return None if loaded is None else loaded[1]


# --- brokers and the controller -------------------------------------------------------------------


def incarnation_of(broker: Broker) -> str:
    return broker._incarnation


def directory_of(broker: Broker) -> DataDirectory:
    return broker._directory


def failed_count(broker: Broker) -> int:
    """Number of replicas that stopped on a disk error, and that the broker does not start again."""
    return broker._replicas.failed_count


def quorum_of(controller: Controller) -> Quorum:
    return controller._quorum


def first_index_of(quorum: Quorum) -> int:
    """The first index whose record, and not only a snapshot, is in the controller's memory."""
    return 1 if quorum._snapshot is None else quorum._snapshot[0] + 1


def epoch_at(quorum: Quorum, index: int) -> int:
    """The controller epoch of the record at this index, as the controller has it."""
    return quorum._epoch_at(index)


def entries_from(quorum: Quorum, index: int) -> list[Entry]:
    """The records from this index on, as the controller has them."""
    return quorum._entries_from(index)


def metadata_log_of(keeper: MetadataKeeper) -> MetadataLog:
    return keeper._log


def directory_of_metadata(keeper: MetadataKeeper) -> DataDirectory:
    return keeper._directory


def disk_of_metadata(keeper: MetadataKeeper) -> Any:
    """The `ProcessDisk` on which a broker keeps the metadata."""
    return keeper._environment.disk


def metadata_of(answers: MetadataAnswers) -> MetadataKeeper:
    """The metadata from which a broker answers."""
    return answers._metadata


def fresh_answers(answers: MetadataAnswers) -> MetadataAnswers:
    """Answers from the same metadata that remember nothing of earlier ones."""
    return MetadataAnswers(
        answers._metadata, answers._cluster_id, is_registered=answers._is_registered
    )


# --- coordinators ---------------------------------------------------------------------------------


def leader_epoch_of(coordinator: Coordinator[Any, Any]) -> int:
    return coordinator._leader.leader_epoch


def is_loaded(coordinator: Coordinator[Any, Any]) -> bool:
    """True once the coordinator has replayed its log."""
    return coordinator._is_loaded


def is_settled(coordinator: Coordinator[Any, Any]) -> bool:
    """True if the coordinator serves, and all that it has decided is committed."""
    log = coordinator._log
    return log.committed >= log.decided and coordinator._ended is None


def decided_of(coordinator: Coordinator[Any, Any]) -> tuple[int, int]:
    """Number of the replay, and how many records were decided since: it changes with the state."""
    return coordinator._log.generation, coordinator._log.decided


# --- queues ---------------------------------------------------------------------------------------


def partition_of(leader: QueueLeader) -> int:
    return leader._data.partition


def can_hear(leader: QueueLeader) -> bool:
    """False while it has no lease, in which time it takes nobody for gone."""
    return leader._can_hear()


def holders_of(opened: OpenQueue) -> LockOwners:
    return opened._owners


def has_holders_away(holders: LockOwners) -> bool:
    """True if a consumer has lost its connection, and its locks have a moment left."""
    return bool(holders._timers)


def is_all_kept(commits: GroupCommit) -> bool:
    """True if no write to the keeper is under way or wanted."""
    return commits._current is None and commits._next is None


def fence_of(commits: GroupCommit) -> int:
    """The fence under which a leader writes to the keeper."""
    return commits._persister.fence


def opening_of(kept: QueueStates, state_key: StateKey) -> Opening | None:
    """The leader that has opened a queue in a partition last, as the keeper knows it."""
    return kept._opening_of(state_key)


# --- connections of servers -----------------------------------------------------------------------


def server_of_broker(broker: Broker) -> Server:
    return broker._server


def server_of_host(host: ReplicaHost) -> Server:
    return host._server


def server_of(connection: AcceptedConnection) -> Server:
    return cast(Server, connection._owner)


def peers_of(server: Server) -> list[Peer]:
    """The other sides of a server's connections that are authenticated."""
    return [
        connection.peer for connection in server._authenticated if connection.peer is not None
    ]


# --- clients --------------------------------------------------------------------------------------


def member_of(consumer: AsyncConsumer) -> GroupMember | None:
    """The place of a consumer in its group, until it has left."""
    group = consumer._core.group
    return None if group is None else group.member


def is_stopped(member: GroupMember) -> bool:
    return member._is_stopped


def group_of(member: GroupMember) -> str:
    return member._coordinator.group


def batch_of(task: QueueTask) -> AcquiredBatch:
    """The records that came with this one in the answer to a take."""
    return task._delivery.batch
