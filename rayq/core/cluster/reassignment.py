"""Partition reassignment (KIP-455): the controller's decisions about the brokers of replicas.

A move adds the target's replicas to those that are there; they copy the log and join the in-sync
set by the ordinary rules. Once *every* replica of the target is in sync, by the very process that
runs now, one record makes the target the whole replica list: the other replicas leave the replica
list, the ISR and, if they lead, the leadership. Until then nothing is removed, so there are never
fewer in-sync copies than before.

Each function reads the state and returns a decision, or its records; it changes nothing. Errors are
those of `rayq.errors`. `heard` are the brokers that the controller has heard from in its epoch: the
metadata of other brokers may be outdated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import msgspec

from rayq import messages
from rayq.core.cluster import election, move_plans
from rayq.core.cluster.election import Processes
from rayq.core.cluster.facts import ClusterDecision, Facts, changed
from rayq.core.cluster.placement import check_replica_limits
from rayq.core.cluster.records import (
    BrokerCordoned,
    BrokerRemoved,
    MetadataRecord,
    PartitionChanged,
    PartitionValue,
    VotersChanged,
)
from rayq.core.cluster.state import ClusterState, Partition, RegisteredBroker, Topic, find_topic
from rayq.errors import (
    BrokerInUseError,
    InvalidReassignmentError,
    InvalidReplicationFactorError,
    NoReassignmentError,
    ReassignmentInProgressError,
    ReplicaLimitError,
    UnknownBrokerError,
    UnknownTopicError,
)

REBUILDS_MAX = 16
"""Maximum number of moves in progress for further replicas of dead brokers to be rebuilt."""


# --- a partition's value --------------------------------------------------------------------------


def begun(
    value: PartitionValue, target: Sequence[int], throttle_bytes_per_s: int | None
) -> PartitionValue:
    """The value with a move in progress; if only the order changes, the value with that order."""
    if set(target) == set(value.replicas):
        return msgspec.structs.replace(
            value, replicas=tuple(target), partition_epoch=value.partition_epoch + 1
        )
    removing = tuple(broker for broker in value.replicas if broker not in target)
    return msgspec.structs.replace(
        value,
        replicas=(*target, *removing),
        target=tuple(target),
        origin=value.replicas,
        throttle_bytes_per_s=throttle_bytes_per_s,
        partition_epoch=value.partition_epoch + 1,
        placed_epoch=value.partition_epoch + 1,
    )


def completed(value: PartitionValue, live: Processes) -> PartitionValue | None:
    """The value after its move; None while one of its target is not in sync by its live process.

    A replica in sync holds all committed records, so the ISR may shrink to the target: records that
    the leader takes for committed meanwhile are on the target too. A leader that leaves is replaced
    in the same record.
    """
    in_sync = {
        member.broker: member for member in value.isr if election.is_same_process(member, live)
    }
    if value.leader is None or any(broker not in in_sync for broker in value.target):
        return None
    isr = tuple(in_sync[broker] for broker in value.target)
    return _with_leader(
        msgspec.structs.replace(_settled(value, value.target), isr=isr, elr=()),
        isr[0].broker,
        live,
    )


def cancelled(
    value: PartitionValue, live: Processes, *, min_insync: int
) -> PartitionValue | None:
    """The value as before its move; None if that is not safe now.

    Added replicas that are in sync hold committed records. They may be removed only while enough of
    the others are in sync too, by live processes; else acknowledged records could be left on fewer
    than `min_insync` disks, or on none.
    """
    adding = set(value.adding)
    changed = _settled(value, value.origin)
    if not any(member.broker in adding for member in (*value.isr, *value.elr)):
        return changed
    isr = tuple(member for member in value.isr if member.broker not in adding)
    running = {member.broker for member in isr if election.is_same_process(member, live)}
    if value.leader is None or len(running) < min_insync:
        return None
    successor = next(broker for broker in value.origin if broker in running)
    return _with_leader(msgspec.structs.replace(changed, isr=isr, elr=()), successor, live)


def retargeted(value: PartitionValue, target: Sequence[int]) -> PartitionValue | None:
    """The value with another target for the current move. The move ends if the new target is the
    replica list from before. None if the new target would drop an added replica that holds
    committed records."""
    kept = {*target, *value.origin}
    if any(member.broker not in kept for member in (*value.isr, *value.elr)):
        return None
    if set(target) == set(value.origin):
        return _settled(value, tuple(target))
    removing = tuple(broker for broker in value.origin if broker not in target)
    return msgspec.structs.replace(
        value,
        replicas=(*target, *removing),
        target=tuple(target),
        partition_epoch=value.partition_epoch + 1,
        placed_epoch=value.partition_epoch + 1,
    )


def _settled(value: PartitionValue, replicas: tuple[int, ...]) -> PartitionValue:
    return msgspec.structs.replace(
        value,
        replicas=replicas,
        target=(),
        origin=(),
        throttle_bytes_per_s=None,
        partition_epoch=value.partition_epoch + 1,
    )


def _with_leader(
    value: PartitionValue, successor: int, live: Processes
) -> PartitionValue:
    """The value with the leader if it keeps its replica, else with the successor in a new epoch."""
    if value.leader in value.replicas:
        return value
    member = next(member for member in value.isr if member.broker == successor)
    return msgspec.structs.replace(
        value,
        leader=member.broker,
        leader_incarnation=member.incarnation,
        leader_epoch=election.next_epoch(value, live),
    )


# --- what operators ask for -----------------------------------------------------------------------


def alter_reassignments(
    state: ClusterState, request: messages.AlterReassignments, facts: Facts
) -> ClusterDecision:
    """Begins or cancels moves, all of them or none. The target of a current move, given again,
    changes its throttle; another target is for moves that wait for a broker that is down.

    Raises UnknownTopicError, InvalidReassignmentError, ReassignmentInProgressError,
    NoReassignmentError, ReplicaLimitError.
    """
    throttle_bytes_per_s = request.throttle_bytes_per_s
    _check_throttle(throttle_bytes_per_s)
    records: list[MetadataRecord] = []
    seen: set[tuple[str, int]] = set()
    added: Counter[int] = Counter()
    for name, number, target in request.moves:
        topic, partition = _find(state, name, number)
        if (name, number) in seen:
            raise InvalidReassignmentError(f"{name}-{number} is named twice.")
        seen.add((name, number))
        value = partition.value
        if target is None:
            after = _cancel(state, topic, number, partition, facts.heard())
        else:
            if not value.target or value.target != tuple(target):
                _check_target(state, topic, number, value, target)
            after = _begin(state, f"{name}-{number}", value, target, throttle_bytes_per_s)
            added.update(broker for broker in target if broker not in value.replicas)
        if after != value:
            records.append(PartitionChanged(topic.topic_id, number, after))
    check_replica_limits(state, added, "The moves")
    return changed(records)


def set_replication_factor(
    state: ClusterState, request: messages.SetReplicationFactor, _: Facts
) -> ClusterDecision:
    """Begins the moves after which every partition of a topic has that many replicas, all of them
    or none. Leaders and, as far as possible, replicas in sync stay. A partition on its way to that
    factor takes the throttle.

    Raises UnknownTopicError, InvalidReplicationFactorError, InvalidReassignmentError,
    ReassignmentInProgressError, ReplicaLimitError.
    """
    name, factor = request.name, request.replication_factor
    throttle_bytes_per_s = request.throttle_bytes_per_s
    _check_throttle(throttle_bytes_per_s)
    topic = find_topic(state, name)
    what = f"replication_factor {factor} of topic {name!r} is not possible"
    if factor < 1:
        raise InvalidReplicationFactorError(f"{what}: a partition has one replica at least.")
    if factor < (topic.config.min_insync_replicas or 1):
        raise InvalidReplicationFactorError(
            f"{what}: its min_insync_replicas is {topic.config.min_insync_replicas}, so no write "
            "with acks='all' would ever succeed. Lower that first, or set it to None: the majority."
        )
    in_sync: dict[tuple[str, int], list[int]] = {}
    records: list[MetadataRecord] = []
    for number in sorted(topic.partitions):
        value, where = topic.partitions[number].value, f"{name}-{number}"
        if len(value.target or value.replicas) == factor:
            if value.target and value.replication_factor != factor:
                after = _begin(state, where, value, value.target, throttle_bytes_per_s)
                if after != value:
                    records.append(PartitionChanged(topic.topic_id, number, after))
        elif value.target:
            raise ReassignmentInProgressError(
                f"{what} now: {where} is being moved to {list(value.target)}. Wait until that is "
                "done, or cancel it."
            )
        elif value.leader is None:
            raise InvalidReplicationFactorError(
                f"{what} now: {where} has no leader, so nobody can tell what its replicas hold."
            )
        else:
            followers = [member.broker for member in value.isr if member.broker != value.leader]
            in_sync[topic.topic_id, number] = [value.leader, *followers]
    plan, impossible = move_plans.with_factor(
        state.takers(), _placements(state), in_sync, factor
    )
    if impossible:
        takers = sorted(state.takers())
        raise InvalidReplicationFactorError(
            f"{what}: {name}-{impossible[0][1]} would need {factor} brokers. There are "
            f"{len(state.brokers)}, of which {takers} run and take replicas. Add brokers, or wait "
            "for the others."
        )
    added: Counter[int] = Counter()
    for (_topic_id, number), target in plan.items():
        value = topic.partitions[number].value
        minimum = topic.config.min_insync(factor)
        running = [broker for broker in target if state.is_live(broker)]
        if len(running) < minimum:
            raise InvalidReplicationFactorError(
                f"{what} now: {name}-{number} would be on {target}, of which only {running} are "
                f"running, and min_insync_replicas is {minimum} then: it would take no writes. "
                "Start the others first."
            )
        added.update(broker for broker in target if broker not in value.replicas)
        after = begun(value, target, throttle_bytes_per_s)
        records.append(PartitionChanged(topic.topic_id, number, after))
    check_replica_limits(state, added, "The moves")
    return changed(records)


def complete_moves(state: ClusterState, heard_lately: Collection[int]) -> list[MetadataRecord]:
    """Completes the moves that can be completed, while all brokers of the target are in
    `heard_lately`: the others may be gone, and their replicas would not hear of a new leader."""
    records: list[MetadataRecord] = []
    for topic_id, number in sorted(state.moving):
        partition = state.topics[topic_id].partitions[number]
        if not set(partition.value.target) <= set(heard_lately):
            continue
        after = completed(partition.value, state.live_processes(partition))
        if after is not None:
            records.append(PartitionChanged(topic_id, number, after))
    return records


def cordon_broker(
    state: ClusterState, request: messages.CordonBroker, _: Facts
) -> ClusterDecision:
    """Cordons a broker, or ends that. Raises UnknownBrokerError, InvalidReassignmentError (no other
    broker would take replicas)."""
    broker, cordoned = request.broker, request.cordoned
    known = _known_broker(state, broker)
    if known.cordoned == cordoned:
        return changed(())
    if cordoned and not any(number != broker for number in state.takers()):
        raise InvalidReassignmentError(
            f"Broker {broker} cannot be cordoned: it is the last one that runs and takes replicas. "
            "Add another broker first."
        )
    return changed([BrokerCordoned(broker, cordoned)])


def remove_broker(state: ClusterState, broker: int) -> list[MetadataRecord]:
    """Forgets a broker; its vote goes first. Raises UnknownBrokerError, BrokerInUseError."""
    known = _known_broker(state, broker)
    if len(state.brokers) == 1:
        raise BrokerInUseError(f"Broker {broker} is the last one of its cluster.")
    held = [f"'{topic.name}-{number}'" for topic, number, _ in state.replicas_on(broker)]
    if held:
        more = f" and {len(held) - 3} more" if len(held) > 3 else ""
        raise BrokerInUseError(
            f"Broker {broker} holds replicas of {', '.join(held[:3])}{more}: drain it first."
        )
    if known.live:
        raise BrokerInUseError(
            f"Broker {broker} is running: stop it first, or it would only register again."
        )
    voters = tuple(voter for voter in state.voters if voter.broker != broker)
    if not voters:
        raise BrokerInUseError(
            f"Broker {broker} is the only voter of the metadata log: start it, so that another can "
            "take its vote."
        )
    records: list[MetadataRecord] = [BrokerRemoved(broker)]
    return records if voters == state.voters else [VotersChanged(voters), *records]


# --- dead brokers ---------------------------------------------------------------------------------


def rebuild(state: ClusterState, gone: Collection[int]) -> list[MetadataRecord]:
    """Moves the replicas of brokers that are gone to other brokers, as far as there are any. A move
    that adds a broker which is gone gets another target. A partition without a leader stays as it
    is: there is no replica to copy from, and it waits for the replicas that may hold acknowledged
    records."""
    room = REBUILDS_MAX - len(state.moving)
    moving = (partition.value for _, _, partition in state.found(state.moving))
    if not any(broker in state.index.by_broker for broker in gone) or (
        room <= 0 and all(set(gone).isdisjoint(value.target) for value in moving)
    ):
        return []  # Nothing can begin now: no plan of all partitions is needed.
    plan, _ = move_plans.replace(state.takers(), _placements(state), gone)
    records: list[MetadataRecord] = []
    added: Counter[int] = Counter()
    for (topic_id, number), target in plan.items():
        value = state.topics[topic_id].partitions[number].value
        if value.leader is None or (room <= 0 and not value.target):
            continue
        after = retargeted(value, target) if value.target else begun(value, target, None)
        if after is None:
            continue
        room -= not value.target
        added.update(broker for broker in target if broker not in value.replicas)
        try:
            check_replica_limits(state, added, "The moves")
        except ReplicaLimitError:
            return records  # No room is left there, and there is no caller to tell: the rest waits.
        records.append(PartitionChanged(topic_id, number, after))
    return records


# --- inside ---------------------------------------------------------------------------------------


def _placements(state: ClusterState) -> dict[tuple[str, int], Sequence[int]]:
    """The replicas of each partition, or those after its move, by topic id and partition."""
    return {
        (topic.topic_id, number): partition.value.target or partition.value.replicas
        for topic, number, partition in state.all_partitions()
    }


def _check_throttle(throttle_bytes_per_s: int | None) -> None:
    if throttle_bytes_per_s is not None and throttle_bytes_per_s <= 0:
        raise InvalidReassignmentError(
            f"throttle_bytes_per_s is positive, or None for no limit, not {throttle_bytes_per_s}."
        )


def _find(state: ClusterState, name: str, number: int) -> tuple[Topic, Partition]:
    topic = find_topic(state, name)
    partition = topic.partitions.get(number)
    if partition is None:
        raise UnknownTopicError(f"Topic {name!r} has no partition {number}.")
    return topic, partition


def _known_broker(state: ClusterState, broker: int) -> RegisteredBroker:
    known = state.brokers.get(broker)
    if known is None:
        raise UnknownBrokerError(
            f"There is no broker {broker}; the cluster has {sorted(state.brokers)}."
        )
    return known


def _check_target(
    state: ClusterState,
    topic: Topic,
    number: int,
    value: PartitionValue,
    target: Sequence[int],
) -> None:
    where = f"{topic.name}-{number} cannot be moved to {list(target)}"
    unknown = [broker for broker in target if broker not in state.brokers]
    if unknown:
        raise InvalidReassignmentError(
            f"{where}: there is no broker {unknown[0]}, the cluster has {sorted(state.brokers)}."
        )
    if len(set(target)) != len(target):
        raise InvalidReassignmentError(f"{where}: a broker is named twice.")
    factor = len(value.target or value.replicas)
    if len(target) != factor:
        raise InvalidReassignmentError(
            f"{where}: its replication factor is {factor}, so name {factor} brokers. "
            "set_replication_factor changes that of the topic."
        )
    for broker in target:
        if broker in value.replicas:
            continue
        if not state.brokers[broker].live:
            raise InvalidReassignmentError(
                f"{where}: broker {broker} is not running. Start it, or name another."
            )
        if state.brokers[broker].cordoned:
            raise InvalidReassignmentError(
                f"{where}: broker {broker} is cordoned and takes no replicas. Undrain it, or name "
                "another."
            )
    running = [broker for broker in target if state.is_live(broker)]
    minimum = topic.config.min_insync(factor)
    if set(target) != set(value.replicas) and len(running) < minimum:
        raise InvalidReassignmentError(
            f"{where}: only {running} of these are running, and min_insync_replicas is "
            f"{minimum}: the partition would take no writes. Start the others first."
        )


def _begin(
    state: ClusterState,
    where: str,
    value: PartitionValue,
    target: Sequence[int],
    throttle_bytes_per_s: int | None,
) -> PartitionValue:
    if not value.target:
        if value.replicas == tuple(target):
            return value
        return begun(value, target, throttle_bytes_per_s)
    if value.target != tuple(target):
        changed = None
        if not all(state.is_live(broker) for broker in value.target):
            changed = retargeted(value, target)
        if changed is None:
            raise ReassignmentInProgressError(
                f"{where} is being moved to {list(value.target)}: wait until that is done, or "
                "cancel it. It takes another target only while one of these brokers is down, and "
                "only with all added ones that are in sync."
            )
        if changed.target:
            changed = msgspec.structs.replace(changed, throttle_bytes_per_s=throttle_bytes_per_s)
        return changed
    if value.throttle_bytes_per_s == throttle_bytes_per_s:
        return value
    return msgspec.structs.replace(
        value,
        throttle_bytes_per_s=throttle_bytes_per_s,
        partition_epoch=value.partition_epoch + 1,
    )


def _cancel(
    state: ClusterState, topic: Topic, number: int, partition: Partition, heard: Collection[int]
) -> PartitionValue:
    value = partition.value
    if not value.target:
        raise NoReassignmentError(f"{topic.name}-{number} is not being moved.")
    processes = state.live_processes(partition)
    live = {broker: process for broker, process in processes.items() if broker in heard}
    minimum = topic.min_insync(value)
    changed = cancelled(value, live, min_insync=minimum)
    if changed is None:
        in_sync = [member.broker for member in value.isr if member.broker in value.origin]
        raise InvalidReassignmentError(
            f"The move of {topic.name}-{number} cannot be cancelled now: of its replicas of "
            f"before, {list(value.origin)}, only {in_sync} are in sync, and min_insync_replicas is "
            f"{minimum}; the added ones hold acknowledged records. Bring the brokers of "
            "before back, or let the move finish; where one of its target is down, give it another."
        )
    return changed
