"""When a log that is damaged is copied anew from the others (docs/protocol.md, rule 11)."""

from __future__ import annotations

from rayq.core.cluster_state import Partition, Topic

COPIES_MIN = 2
"""In-sync replicas elsewhere, before a log that is damaged is given up for a new copy."""


def have_others_all(topic: Topic, partition: Partition, broker: int) -> bool:
    """Whether enough replicas of other brokers are in sync for that of `broker` to be copied
    anew."""
    value = partition.value
    others = sum(member.broker != broker for member in value.isr)
    return value.leader is not None and others >= max(topic.min_insync(value), COPIES_MIN)


def may_copy_anew(topic: Topic, partition: Partition, broker: int) -> bool:
    """Whether the log of `broker` may go: it counts for nothing in metadata from after the
    controller was told that its replica is gone, and two others at least have all that was
    acknowledged. (What one of these has damaged, the other has.)"""
    value = partition.value
    return (
        have_others_all(topic, partition, broker)
        and broker not in partition.processes
        and all(one.broker != broker for one in (*value.isr, *value.elr))
    )
