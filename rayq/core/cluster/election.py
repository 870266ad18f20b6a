"""Leader election: from a partition's value and its live replicas to its next value.

It follows rules 1 and 2 of docs/protocol.md. A live leader stays. Else a live member of the ISR
leads, else one of the ELR (KIP-966), if it is the very process that was in sync. Else, once
`min_insync` members have come back and reported what their disks hold, the member that holds the
most leads. Else, if the topic allows it, any live replica leads, with a warning. Else no replica
leads, and `missing` names the brokers that the partition waits for.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rayq.core.cluster.records import Member, PartitionValue, ReplicaRegistered

Processes = Mapping[int, ReplicaRegistered]
HELD_EPOCH_MAX = 1 << 30
"""Maximum plausible epoch of a log's batches. A log that reports a later one is damaged, or another
cluster's. The next epoch would have to be above it, and has 31 bits."""


def settle(
    value: PartitionValue, live: Processes, *, min_insync: int, unclean: bool
) -> PartitionValue | None:
    """The next value of a partition whose live replica processes are `live`; None: no change.

    A member of the ISR that no longer runs leaves it when a leader continues without it. It stays
    eligible (ELR) unless enough others are in sync: with too few of them, nothing is committed that
    it lacks. While no replica leads, all members stay.
    """
    if value.leader_epoch == 0:
        return _found(value, live)
    isr = tuple(member for member in value.isr if is_same_process(member, live))
    departed = tuple(member for member in value.isr if member not in isr)
    eligible = (*departed, *value.elr)

    if value.leader is not None and any(
        member.broker == value.leader and member.incarnation == value.leader_incarnation
        for member in isr
    ):
        return _next(value, live, isr=isr, elr=eligible, min_insync=min_insync)

    if isr:
        leader = _preferred(value, isr)
        return _next(value, live, isr=isr, elr=eligible, leader=leader, min_insync=min_insync)

    untouched = [member for member in value.elr if is_same_process(member, live)]
    if untouched:
        leader = _preferred(value, untouched)
        others = tuple(member for member in eligible if member != leader)
        return _next(value, live, isr=(leader,), elr=others, leader=leader, min_insync=min_insync)

    reported = [member for member in eligible if is_same_disk(member, live)]
    if reported and len(reported) >= min(min_insync, len(eligible)):
        best = max(
            reported,
            key=lambda member: (
                _holdings(live[member.broker]),
                -value.replicas.index(member.broker),
            ),
        )
        leader = as_member(live[best.broker])
        others = tuple(member for member in eligible if member.broker != leader.broker)
        return _next(value, live, isr=(leader,), elr=others, leader=leader, min_insync=min_insync)

    if unclean and live:
        return elect_unclean(value, live)
    # No replica leads: the members stay as they are, and are waited for.
    return _next(value, live, isr=value.isr, elr=value.elr, leader=None, min_insync=min_insync)


def elect_unclean(value: PartitionValue, live: Processes) -> PartitionValue:
    """Elects the live replica that holds the most, whatever it lacks. A replica that a move has
    added and that is only copying the log leads if there is no other. Needs one live replica."""
    candidates = [broker for broker in value.replicas if broker in live]
    best = max(
        candidates,
        key=lambda broker: (
            broker not in value.adding,
            _holdings(live[broker]),
            -value.replicas.index(broker),
        ),
    )
    leader = as_member(live[best])
    return msgspec.structs.replace(
        value,
        isr=(leader,),
        elr=(),
        leader=leader.broker,
        leader_incarnation=leader.incarnation,
        leader_epoch=next_epoch(value, live),
        partition_epoch=value.partition_epoch + 1,
        last_unclean_epoch=next_epoch(value, live),
    )


def elect_preferred(value: PartitionValue, live: Processes) -> PartitionValue | None:
    """Moves the leadership to the first replica, if it is in sync and does not lead already."""
    preferred = value.replicas[0]
    if value.leader is None or value.leader == preferred:
        return None
    for member in value.isr:
        if member.broker == preferred:
            return msgspec.structs.replace(
                value,
                leader=member.broker,
                leader_incarnation=member.incarnation,
                leader_epoch=next_epoch(value, live),
                partition_epoch=value.partition_epoch + 1,
            )
    return None


def next_epoch(value: PartitionValue, live: Processes) -> int:
    """The leader epoch to grant: above all epochs that the metadata knows, and above every epoch of
    which a live replica holds batches. Metadata that came back from an older copy does not know the
    newest epochs, and one epoch must never have two leaders."""
    held = (process.last_epoch or 0 for process in live.values())
    plausible = (epoch for epoch in held if epoch <= HELD_EPOCH_MAX)
    return max(value.leader_epoch, value.restored_epoch, *plausible) + 1


def with_isr(
    value: PartitionValue, isr: tuple[Member, ...], *, min_insync: int
) -> PartitionValue:
    """The value after the leader's proposal of a new in-sync set was accepted."""
    brokers = {member.broker for member in isr}
    left = tuple(
        member for member in (*value.isr, *value.elr) if member.broker not in brokers
    )
    return msgspec.structs.replace(
        value,
        isr=isr,
        elr=() if len(isr) >= min_insync else left,
        partition_epoch=value.partition_epoch + 1,
    )


def readmit(value: PartitionValue, process: ReplicaRegistered) -> PartitionValue:
    """Readmits a member that returns with exactly the log it was stopped with: it is the same
    member. A member that led before does not lead until it is elected again, in a new epoch."""

    def renewed(member: Member) -> Member:
        returned = (
            member.broker == process.broker
            and member.directory_id == process.directory_id
            and member.stopped_at == (process.last_epoch, process.flushed)
        )
        return as_member(process) if returned else member

    isr = tuple(renewed(member) for member in value.isr)
    elr = tuple(renewed(member) for member in value.elr)
    renews_leader = value.leader == process.broker and isr != value.isr
    return msgspec.structs.replace(
        value,
        isr=isr,
        elr=elr,
        leader=None if renews_leader else value.leader,
        leader_incarnation=None if renews_leader else value.leader_incarnation,
        leader_epoch=value.leader_epoch + renews_leader,
    )


def as_member(process: ReplicaRegistered) -> Member:
    return Member(process.broker, process.directory_id, process.incarnation)


def is_same_process(member: Member, live: Processes) -> bool:
    """Returns whether the very process that was in sync runs now: it has not restarted."""
    process = live.get(member.broker)
    return process is not None and process.incarnation == member.incarnation


def is_same_disk(member: Member, live: Processes) -> bool:
    process = live.get(member.broker)
    return process is not None and process.directory_id == member.directory_id


def missing(value: PartitionValue, live: Processes) -> list[Member]:
    """The members whose return an offline partition waits for, by broker."""
    lost = [member for member in (*value.isr, *value.elr) if not is_same_disk(member, live)]
    return sorted(lost, key=lambda member: member.broker)


def _found(value: PartitionValue, live: Processes) -> PartitionValue | None:
    """The first leader of a new partition: all logs are empty, so any live replica founds it."""
    members = tuple(as_member(live[broker]) for broker in value.replicas if broker in live)
    if not members:
        return None
    if any(process.last_epoch is not None for process in live.values()):
        # The partition is not new: the metadata came back from before its first election.
        return elect_unclean(value, live)
    return msgspec.structs.replace(
        value,
        isr=members,
        leader=members[0].broker,
        leader_incarnation=members[0].incarnation,
        leader_epoch=next_epoch(value, live),
        partition_epoch=value.partition_epoch + 1,
    )


_KEEP = Member(-1, "", "")


def _next(
    value: PartitionValue,
    live: Processes,
    *,
    isr: tuple[Member, ...],
    elr: tuple[Member, ...],
    min_insync: int,
    leader: Member | None = _KEEP,
) -> PartitionValue | None:
    if leader is _KEEP:
        changed = value
    else:
        changes_leader = (value.leader, value.leader_incarnation) != (
            (None, None) if leader is None else (leader.broker, leader.incarnation)
        )
        changed = msgspec.structs.replace(
            value,
            leader=None if leader is None else leader.broker,
            leader_incarnation=None if leader is None else leader.incarnation,
            leader_epoch=next_epoch(value, live) if changes_leader else value.leader_epoch,
        )
    is_safe = changed.leader is not None and len(isr) >= min_insync
    changed = msgspec.structs.replace(changed, isr=isr, elr=() if is_safe else elr)
    if changed == value:
        return None
    return msgspec.structs.replace(changed, partition_epoch=value.partition_epoch + 1)


def _preferred(value: PartitionValue, members: tuple[Member, ...] | list[Member]) -> Member:
    return min(members, key=lambda member: value.replicas.index(member.broker))


def _holdings(process: ReplicaRegistered) -> tuple[int, int]:
    return (-1 if process.last_epoch is None else process.last_epoch, process.flushed)
