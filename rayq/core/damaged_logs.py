"""Decision to replace a damaged log by a new copy of the others (docs/protocol.md, rule 11)."""

from __future__ import annotations

from rayq.core.cluster_state import Partition, Topic

COPIES_MIN = 2
"""How many replicas elsewhere must be in sync before a damaged log is given up for a new copy."""


def have_others_all(topic: Topic, partition: Partition, broker: int) -> bool:
    """Whether enough replicas of other brokers are in sync for the replica of `broker` to be copied
    anew."""
    value = partition.value
    others = sum(member.broker != broker for member in value.isr)
    return value.leader is not None and others >= max(topic.min_insync(value), COPIES_MIN)


def may_copy_anew(topic: Topic, partition: Partition, broker: int) -> bool:
    """Whether the log of `broker` may go. In metadata from after the controller was told that its
    replica is gone, the log counts for nothing, and at least two other replicas have all that was
    acknowledged. (What is damaged in one of them, the other has.)"""
    value = partition.value
    return (
        have_others_all(topic, partition, broker)
        and broker not in partition.processes
        and all(one.broker != broker for one in (*value.isr, *value.elr))
    )
