"""The controller's metrics of the cluster, and its log lines about each change of a partition's
leader, ISR or replicas."""

from __future__ import annotations

import logging
from collections.abc import Callable

from rayq import messages
from rayq.core.cluster.records import PartitionChanged, PartitionValue
from rayq.core.cluster.state import ClusterState
from rayq.core.cluster.topic_changes import offline_reason
from rayq.environment import Environment
from rayq.logs import log_event
from rayq.metrics import Sample

logger = logging.getLogger(__name__)


class ControllerMetrics:
    """Metrics of one controller epoch; call `end` when it ends. Counts continue from those of an
    earlier epoch in the same process, and start at 0 in another process, as Prometheus expects of
    counters."""

    def __init__(
        self,
        environment: Environment,
        state: ClusterState,
        *,
        silent_s: Callable[[int], float],
    ) -> None:
        """`silent_s(broker)` is the time since a broker was heard."""
        self._metrics = environment.metrics
        self._state = state
        self._silent_s = silent_s
        self._elections = self._metrics.counter("rayq_leader_elections_total")
        self._unclean = self._metrics.counter("rayq_unclean_leader_elections_total")
        self.end = self._metrics.add_source(self._measure)

    def changed(
        self,
        record: PartitionChanged,
        before: PartitionValue | None,
        reason: str,
        *,
        brokers_come_or_go: bool,
    ) -> None:
        """Counts and logs a partition's new value. `brokers_come_or_go` says that the whole cluster
        stops, or has just started: a partition without a leader is not a warning then."""
        if before is None:
            return  # It was created: no replica leads it yet.
        topic, partition = self._state.topics[record.topic_id], record.partition
        after = record.value
        where = {"topic": topic.name, "partition": partition, "epoch": after.leader_epoch}
        if after.replicas != before.replicas:
            log_event(
                logger, logging.INFO, "partition_moves", **where, what=_move_told(before, after)
            )
        old = {member.broker for member in before.isr}
        new = {member.broker for member in after.isr}
        left, joined = sorted(old - new), sorted(new - old)
        for broker in left:
            self._metrics.counter("rayq_isr_shrinks_total", replica=broker).value += 1
        for broker in joined if before.leader_epoch else ():  # A new partition's set is not news.
            self._metrics.counter("rayq_isr_expands_total", replica=broker).value += 1
        isr = sorted(new)
        if after.leader_epoch == before.leader_epoch:
            if left or joined:
                event = "isr_shrunk" if left else "isr_expanded"
                log_event(
                    logger, logging.INFO, event, **where, isr=isr, left=left, joined=joined,
                    reason=reason,
                )  # fmt: skip
        elif after.leader is None:
            waits = offline_reason(self._state, topic, partition)
            level = logging.INFO if brokers_come_or_go else logging.WARNING
            log_event(
                logger, level, "partition_offline", **where, was=before.leader, isr=isr,
                reason=reason, waits=waits,
            )  # fmt: skip
        else:
            self._elections.value += 1
            is_unclean = after.last_unclean_epoch == after.leader_epoch
            if is_unclean:
                self._unclean.value += 1
                reason += "; UNCLEAN: acknowledged records may be lost"
            log_event(
                logger,
                logging.ERROR if is_unclean else logging.INFO,
                "leader_elected", **where, leader=after.leader, was=before.leader, isr=isr,
                clean=not is_unclean, reason=reason,
            )  # fmt: skip

    def heard_late(self, broker: int) -> None:
        """Counts a heartbeat that came after more than half a session."""
        self._metrics.counter("rayq_late_heartbeats_total", replica=broker).value += 1

    def session_ended(self, broker: int, silent_s: float) -> None:
        """Counts and logs the end of a session by silence."""
        self._metrics.counter("rayq_sessions_ended_total", replica=broker).value += 1
        log_event(logger, logging.WARNING, "session_ended", broker=broker, silent_s=silent_s)

    def warn_of_offline(self, reason: str) -> None:
        """Logs a line for each partition that no replica leads."""
        for topic, number, partition in self._state.all_partitions():
            value = partition.value
            if value.leader is None and value.leader_epoch > 0:
                log_event(
                    logger,
                    logging.WARNING,
                    "partition_offline",
                    topic=topic.name,
                    partition=number,
                    epoch=value.leader_epoch,
                    was=None,
                    isr=sorted(member.broker for member in value.isr),
                    reason=reason,
                    waits=offline_reason(self._state, topic, number),
                )

    def _measure(self) -> list[Sample]:
        # Counted from the controller's state: sums over leaders would leave out partitions that
        # have none, and count some twice while leaders change.
        state, sample = self._state, self._metrics.sample
        partitions = offline = underreplicated = under_min_isr = 0
        for topic, _, partition in state.all_partitions():
            value = partition.value
            partitions += 1
            if value.leader is None:
                offline += 1
                continue
            underreplicated += len(value.isr) < value.replication_factor
            under_min_isr += len(value.isr) < topic.min_insync(value)
        for broker in state.brokers:  # Counts start at 0, or Prometheus misses the first change.
            self._metrics.counter("rayq_isr_shrinks_total", replica=broker)
            self._metrics.counter("rayq_isr_expands_total", replica=broker)
            self._metrics.counter("rayq_late_heartbeats_total", replica=broker)
            self._metrics.counter("rayq_sessions_ended_total", replica=broker)
        live = sum(broker.live for broker in state.brokers.values())
        return [
            sample("rayq_active_brokers", live),
            sample("rayq_fenced_brokers", len(state.brokers) - live),
            sample("rayq_topics", len(state.topics)),
            sample("rayq_partitions", partitions),
            sample("rayq_offline_partitions", offline),
            sample("rayq_underreplicated_partitions", underreplicated),
            sample("rayq_under_min_isr_partitions", under_min_isr),
            sample("rayq_reassigning_partitions", len(state.moving)),
            sample("rayq_remote_pins", len(state.pins)),
            sample("rayq_remote_garbage_topics", len(state.garbage)),
            *(
                sample("rayq_heartbeat_age_seconds", self._silent_s(number), replica=number)
                for number, broker in state.brokers.items()
                if broker.live
            ),
        ]


def _move_told(before: PartitionValue, after: PartitionValue) -> str:
    if after.target:
        return f"begins to move from {list(after.origin)} to {list(after.target)}"
    if before.target == after.replicas:
        return f"has moved from {list(before.origin)} to {list(after.replicas)}"
    if before.target:
        return f"no longer moves to {list(before.target)}, it stays on {list(after.replicas)}"
    return f"has its replicas in the order {list(after.replicas)}"


def reason_of(request: messages.AnyRequest) -> str:
    """The reason of a change of the metadata, for the log lines."""
    match request:
        case messages.RegisterBroker():
            return f"broker {request.broker} started"
        case messages.BrokerHeartbeat():
            return f"broker {request.broker} is heard again"
        case messages.RegisterReplicas():
            return f"replicas on broker {request.broker} started"
        case messages.ReplicasFailed():
            return f"replicas on broker {request.broker} are gone: {request.reason}"
        case messages.AlterPartition():
            return f"broker {request.broker}, which leads, asked for it"
        case messages.AlterPartitions():
            return f"broker {request.proposals[0].broker}, which leads, asked for it"
        case messages.BrokerStopped():
            return f"broker {request.broker} was stopped"
        case messages.ElectLeaders():
            return "an operator asked for an election"
        case messages.AlterReassignments():
            return "a move was asked for, or cancelled"
        case messages.SetReplicationFactor():
            return "another replication factor was asked for"
    return f"{type(request).__name__} was asked for"
