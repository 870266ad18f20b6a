"""The coordinator beside the leader of a partition of one of rayq's internal topics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rayq import messages
from rayq.actors.audit.coordinator import AuditCoordinator
from rayq.actors.clock_watch import ClockWatch
from rayq.actors.coordinator import Coordinator
from rayq.actors.groups.group_coordinator import GroupCoordinator
from rayq.actors.queues.state_coordinator import QueueStateCoordinator
from rayq.actors.replica.context import ReplicaContext
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.actors.transactions.transaction_coordinator import TransactionCoordinator

MakeCoordinator = Callable[
    [ReplicaContext, ReplicaLog, Leader, messages.PartitionAssignment, ClockWatch],
    Coordinator[Any, Any],
]

COORDINATORS = (
    GroupCoordinator, TransactionCoordinator, QueueStateCoordinator, AuditCoordinator
)
MAKE_COORDINATOR: Mapping[str, MakeCoordinator] = {
    GroupCoordinator.topic: lambda context, log, leader, assignment, clock_watch: GroupCoordinator(
        log,
        leader,
        assignment,
        access=context.access,
        ask_broker=context.ask_broker,
        metadata_version=context.metadata_version(),
        clock_watch=clock_watch,
        peers=context.peers,
    ),
    TransactionCoordinator.topic: (
        lambda context, log, leader, assignment, clock_watch: TransactionCoordinator(
            log,
            leader,
            assignment,
            access=context.access,
            ask_broker=context.ask_broker,
            peers=context.peers,
            clock_watch=clock_watch,
        )
    ),
    QueueStateCoordinator.topic: lambda context, log, leader, assignment, _: QueueStateCoordinator(
        log, leader, assignment, access=context.access, ask_broker=context.ask_broker
    ),
    AuditCoordinator.topic: lambda context, log, leader, assignment, _: AuditCoordinator(
        log, leader, assignment, access=context.access, ask_broker=context.ask_broker
    ),
}
"""Functions that make the coordinator, by its topic."""
