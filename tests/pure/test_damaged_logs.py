"""When a damaged log is copied again: only if no other replica needs it, and two others have all
records."""

from __future__ import annotations

import pytest

from rayq.config import TopicConfig
from rayq.core.cluster.damaged_logs import have_others_all, may_copy_again
from rayq.core.cluster.records import Member, PartitionValue, ReplicaRegistered
from rayq.core.cluster.state import Partition, Topic

DAMAGED = 1


def members(*brokers: int) -> tuple[Member, ...]:
    return tuple(Member(broker, f"d{broker}", f"i{broker}") for broker in brokers)


def process(broker: int) -> ReplicaRegistered:
    return ReplicaRegistered("T", 0, broker, f"d{broker}", f"i{broker}", "host", 1, 0, 0)


def topic(min_insync: int | None = None) -> Topic:
    return Topic("T", "t", TopicConfig(min_insync_replicas=min_insync), {}, 4)


@pytest.mark.parametrize(
    "isr, leader, min_insync, enough",
    [
        ((2, 3), 2, None, False),  # Of four replicas three have to be in sync.
        ((2, 3), 2, 1, True),
        ((2, 3), None, 1, False),
        ((2,), 2, 1, False),  # One copy beside the damaged one is not enough.
        ((1, 2), 2, 1, False),
        ((1, 2, 3), 2, 2, True),
        ((2, 3, 4), 2, 3, True),
        ((2, 3), 2, 3, False),
    ],
)
def test_two_others_at_least_have_all_of_it(
    isr: tuple[int, ...], leader: int | None, min_insync: int | None, enough: bool
) -> None:
    value = PartitionValue((1, 2, 3, 4), isr=members(*isr), leader=leader)
    assert have_others_all(topic(min_insync), Partition(value), DAMAGED) is enough


@pytest.mark.parametrize(
    "isr, elr, processes, may",
    [
        ((2, 3), (), (2, 3), True),
        ((2, 3), (4,), (2, 3), True),
        ((2, 3), (), (1, 2, 3), False),  # its replica is still registered
        ((1, 2, 3), (), (2, 3), False),
        ((2, 3), (1,), (2, 3), False),
        ((2,), (), (2, 3), False),
    ],
)
def test_a_log_goes_only_once_nothing_counts_on_it(
    isr: tuple[int, ...], elr: tuple[int, ...], processes: tuple[int, ...], may: bool
) -> None:
    value = PartitionValue((1, 2, 3, 4), isr=members(*isr), elr=members(*elr), leader=2)
    partition = Partition(value, {broker: process(broker) for broker in processes})
    assert may_copy_again(topic(2), partition, DAMAGED) is may
