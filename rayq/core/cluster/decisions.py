"""The table of the controller's decisions, and those that concern two subjects.

A request whose decision needs the controller itself (sessions, the quorum, a second append) is
decided by one of its methods.
"""

from __future__ import annotations

from rayq import messages
from rayq.core.cluster import (
    access_changes,
    broker_changes,
    queue_changes,
    quota_changes,
    reassignment,
    remote_changes,
    topic_changes,
)
from rayq.core.cluster.facts import ClusterDecision, Facts
from rayq.core.cluster.records import MetadataRecord
from rayq.core.cluster.state import ClusterState
from rayq.core.decision import DecisionTable

DECISIONS: DecisionTable[ClusterState, Facts, MetadataRecord] = DecisionTable()
decides = DECISIONS.decides


@decides(messages.DeleteTopic)
def _delete_topic(
    state: ClusterState, request: messages.DeleteTopic, facts: Facts
) -> ClusterDecision:
    queue_changes.check_deleted_topic(state, request.name)
    return topic_changes.delete_topic(state, request, facts)


@decides(messages.CreatePartitions)
def _create_partitions(
    state: ClusterState, request: messages.CreatePartitions, facts: Facts
) -> ClusterDecision:
    queue_changes.check_new_partitions(state, request.name, force=request.force)
    return topic_changes.create_partitions(state, request, facts)


decides(messages.CreateTopic)(topic_changes.create_topic)
decides(messages.RestoreTopic)(topic_changes.create_topic)
decides(messages.ElectLeaders)(topic_changes.elect_leaders)
decides(messages.EndRemoteStorage)(topic_changes.end_remote_storage)
decides(messages.EnsureOffsetsTopic)(topic_changes.ensure_offsets_topic)
decides(messages.EnsureTransactionsTopic)(topic_changes.ensure_transactions_topic)

decides(messages.CreateQueue)(queue_changes.create_queue)
decides(messages.AlterQueue)(queue_changes.alter_queue)
decides(messages.DeleteQueue)(queue_changes.delete_queue)

decides(messages.MoveRemote)(remote_changes.move_remote)
decides(messages.PinSnapshot)(remote_changes.pin_snapshot)
decides(messages.UnpinSnapshot)(remote_changes.unpin_snapshot)
decides(messages.BeginRemoval)(remote_changes.begin_removal)
decides(messages.RemoveGarbage)(remote_changes.remove_garbage)

decides(messages.ConfirmMetadata)(broker_changes.confirm_metadata)
decides(messages.AllocateProducerIds)(broker_changes.allocate_producer_ids)

decides(messages.AlterReassignments)(reassignment.alter_reassignments)
decides(messages.SetReplicationFactor)(reassignment.set_replication_factor)
decides(messages.CordonBroker)(reassignment.cordon_broker)

decides(messages.CreatePrincipal)(access_changes.create_principal)
decides(messages.DeletePrincipal)(access_changes.delete_principal)
decides(messages.CreateToken)(access_changes.create_token)
decides(messages.RevokeToken)(access_changes.revoke_token)
decides(messages.CreateAcls)(access_changes.create_acls)
decides(messages.DeleteAcls)(access_changes.delete_acls)

decides(messages.SetQuota)(quota_changes.set_quota)
decides(messages.RemoveQuota)(quota_changes.remove_quota)
