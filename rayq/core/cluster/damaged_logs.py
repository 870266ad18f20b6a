"""Decision to replace a damaged log by a new copy of the others (docs/protocol.md, rule 11)."""

from __future__ import annotations

from rayq.core.cluster.state import Partition, Topic

COPIES_MIN = 2
"""Minimum number of replicas elsewhere that must be in sync before a damaged log is given up for a
new copy."""


def have_others_all(topic: Topic, partition: Partition, broker: int) -> bool:
    """Returns whether enough replicas of other brokers are in sync to copy the replica of `broker`
    again."""
    value = partition.value
    in_sync_elsewhere = sum(member.broker != broker for member in value.isr)
    return value.leader is not None and in_sync_elsewhere >= max(
        topic.min_insync(value), COPIES_MIN
    )


def may_copy_again(topic: Topic, partition: Partition, broker: int) -> bool:
    """Returns whether the log of `broker` may be removed, by metadata that the controller wrote
    after it heard that the replica is gone: the log does not count any more, and at least two other
    replicas have all acknowledged records. (If one of them is damaged somewhere, the other has
    those records.)"""
    value = partition.value
    return (
        have_others_all(topic, partition, broker)
        and broker not in partition.processes
        and all(member.broker != broker for member in (*value.isr, *value.elr))
    )
