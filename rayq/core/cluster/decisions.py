"""The controller's decisions on requests, from its state and a few facts besides.

Each decision is a function `(state, request, facts) -> ClusterDecision`. The controller replays the
records, appends them, and answers once they are committed. A request whose decision needs the
controller itself (sessions, the quorum, a second append) is decided by one of its methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rayq import messages
from rayq.config import ClusterConfig
from rayq.core.cluster import (
    broker_changes,
    queue_changes,
    reassignment,
    remote_changes,
    topic_changes,
)
from rayq.core.cluster.records import MetadataRecord
from rayq.core.cluster.remote_changes import ObjectStoreFacts
from rayq.core.cluster.state import ClusterState
from rayq.core.decision import Decision

RequestT = TypeVar("RequestT", bound=messages.AnyRequest)


ClusterDecision = Decision[MetadataRecord, messages.Response | None]
"""The answer None: the version of the metadata that has the records."""


def changed(records: Sequence[MetadataRecord]) -> ClusterDecision:
    """A decision that is answered with the version of the metadata that has its records."""
    return Decision(records, lambda: None)


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts besides the state that a decision depends on."""

    config: ClusterConfig
    new_id: Callable[[], str]
    now_ms: Callable[[], int]
    """Present time by the wall clock."""
    heard: Callable[[], set[int]]
    """The brokers that this controller has heard."""
    store: ObjectStoreFacts


Decide = Callable[[ClusterState, Any, Facts], ClusterDecision]
DECISIONS: dict[type[messages.AnyRequest], Decide] = {}
"""The decision function of each request that needs only the state and the facts."""


def decides(
    kind: type[RequestT],
) -> Callable[
    [Callable[[ClusterState, RequestT, Facts], ClusterDecision]],
    Callable[[ClusterState, RequestT, Facts], ClusterDecision],
]:
    """Adds a function to `DECISIONS`."""

    def add(
        decide: Callable[[ClusterState, RequestT, Facts], ClusterDecision],
    ) -> Callable[[ClusterState, RequestT, Facts], ClusterDecision]:
        assert kind not in DECISIONS, kind.__name__
        DECISIONS[kind] = decide
        return decide

    return add


# --- topics ---------------------------------------------------------------------------------------


def _create_topic(
    state: ClusterState, request: messages.CreateTopic | messages.RestoreTopic, facts: Facts
) -> ClusterDecision:
    return changed(
        topic_changes.create_topic(
            state,
            topic_id=facts.new_id(),
            name=request.name,
            partitions=request.partitions,
            replication_factor=request.replication_factor,
            options=request.config,
            store=facts.store,
            restored=request.pointers if isinstance(request, messages.RestoreTopic) else (),
        )
    )


decides(messages.CreateTopic)(_create_topic)
decides(messages.RestoreTopic)(_create_topic)


@decides(messages.DeleteTopic)
def _delete_topic(
    state: ClusterState, request: messages.DeleteTopic, facts: Facts
) -> ClusterDecision:
    queue_changes.check_deleted_topic(state, request.name)
    return changed(topic_changes.delete_topic(state, request.name, now_ms=facts.now_ms()))


@decides(messages.CreatePartitions)
def _create_partitions(
    state: ClusterState, request: messages.CreatePartitions, facts: Facts
) -> ClusterDecision:
    queue_changes.check_new_partitions(state, request.name, force=request.force)
    return changed(topic_changes.create_partitions(state, request.name, request.total))


@decides(messages.ElectLeaders)
def _elect_leaders(
    state: ClusterState, request: messages.ElectLeaders, facts: Facts
) -> ClusterDecision:
    return changed(
        topic_changes.elect_leaders(
            state, request.name, request.partitions, unclean=request.unclean
        )
    )


@decides(messages.EndRemoteStorage)
def _end_remote_storage(
    state: ClusterState, request: messages.EndRemoteStorage, facts: Facts
) -> ClusterDecision:
    return changed(topic_changes.end_remote_storage(state, request.name, now_ms=facts.now_ms()))


@decides(messages.EnsureOffsetsTopic)
def _ensure_offsets_topic(
    state: ClusterState, request: messages.EnsureOffsetsTopic, facts: Facts
) -> ClusterDecision:
    return changed(
        topic_changes.ensure_own_topic(
            state,
            topic_changes.OFFSETS_TOPIC,
            topic_id=facts.new_id(),
            partitions=facts.config.offsets_topic_partitions,
        )
    )


@decides(messages.EnsureTransactionsTopic)
def _ensure_transactions_topic(
    state: ClusterState, request: messages.EnsureTransactionsTopic, facts: Facts
) -> ClusterDecision:
    return changed(
        topic_changes.ensure_own_topic(
            state,
            topic_changes.TRANSACTIONS_TOPIC,
            topic_id=facts.new_id(),
            partitions=facts.config.transaction_state_partitions,
        )
    )


# --- queues ---------------------------------------------------------------------------------------


@decides(messages.CreateQueue)
def _create_queue(
    state: ClusterState, request: messages.CreateQueue, facts: Facts
) -> ClusterDecision:
    return changed(
        queue_changes.create_queue(
            state,
            new_id=facts.new_id,
            name=request.name,
            topic=request.topic,
            options=request.config,
            partitions=request.partitions,
            replication_factor=request.replication_factor,
            topic_options=request.topic_config,
            keeper_partitions=facts.config.queue_state_partitions,
            store=facts.store,
        )
    )


@decides(messages.AlterQueue)
def _alter_queue(
    state: ClusterState, request: messages.AlterQueue, facts: Facts
) -> ClusterDecision:
    return changed(
        queue_changes.alter_queue(state, request.name, request.config, new_id=facts.new_id)
    )


@decides(messages.DeleteQueue)
def _delete_queue(
    state: ClusterState, request: messages.DeleteQueue, facts: Facts
) -> ClusterDecision:
    return changed(queue_changes.delete_queue(state, request.name))


# --- the object store -----------------------------------------------------------------------------


@decides(messages.MoveRemote)
def _move_remote(
    state: ClusterState, request: messages.MoveRemote, facts: Facts
) -> ClusterDecision:
    return changed(
        remote_changes.move_remote(
            state,
            topic_id=request.topic_id,
            partition=request.partition,
            broker=request.broker,
            incarnation=request.incarnation,
            leader_epoch=request.leader_epoch,
            pointer=request.pointer,
            is_adopted=request.is_adopted,
        )
    )


@decides(messages.PinSnapshot)
def _pin_snapshot(
    state: ClusterState, request: messages.PinSnapshot, facts: Facts
) -> ClusterDecision:
    return changed(
        remote_changes.pin_snapshot(
            state,
            pin_id=request.pin_id,
            topic_id=request.topic_id,
            starts=request.starts,
            ttl_ms=request.ttl_ms,
        )
    )


@decides(messages.UnpinSnapshot)
def _unpin_snapshot(
    state: ClusterState, request: messages.UnpinSnapshot, facts: Facts
) -> ClusterDecision:
    return changed(remote_changes.unpin_snapshots(state, {request.pin_id}))


@decides(messages.BeginRemoval)
def _begin_removal(
    state: ClusterState, request: messages.BeginRemoval, facts: Facts
) -> ClusterDecision:
    return changed(
        remote_changes.begin_removal(state, request.topic_id, request.deleted_ms)
    )


@decides(messages.RemoveGarbage)
def _remove_garbage(
    state: ClusterState, request: messages.RemoveGarbage, facts: Facts
) -> ClusterDecision:
    return changed(
        remote_changes.remove_garbage(state, request.topic_id, request.deleted_ms)
    )


# --- brokers --------------------------------------------------------------------------------------


@decides(messages.ConfirmMetadata)
def _confirm_metadata(
    state: ClusterState, request: messages.ConfirmMetadata, facts: Facts
) -> ClusterDecision:
    return changed(broker_changes.change_nothing(state))


@decides(messages.AllocateProducerIds)
def _allocate_producer_ids(
    state: ClusterState, request: messages.AllocateProducerIds, facts: Facts
) -> ClusterDecision:
    broker_changes.check_broker(state, request.broker, request.incarnation)
    answer = messages.AllocateProducerIdsResponse(
        state.next_producer_id, broker_changes.PRODUCER_ID_BLOCK
    )
    return Decision(broker_changes.allocate_producer_ids(state), lambda: answer)


@decides(messages.AlterReassignments)
def _alter_reassignments(
    state: ClusterState, request: messages.AlterReassignments, facts: Facts
) -> ClusterDecision:
    return changed(
        reassignment.alter_reassignments(
            state, request.moves, request.throttle_bytes_per_s, facts.heard()
        )
    )


@decides(messages.SetReplicationFactor)
def _set_replication_factor(
    state: ClusterState, request: messages.SetReplicationFactor, facts: Facts
) -> ClusterDecision:
    return changed(
        reassignment.set_replication_factor(
            state, request.name, request.replication_factor, request.throttle_bytes_per_s
        )
    )


@decides(messages.CordonBroker)
def _cordon_broker(
    state: ClusterState, request: messages.CordonBroker, facts: Facts
) -> ClusterDecision:
    return changed(reassignment.cordon_broker(state, request.broker, request.cordoned))
