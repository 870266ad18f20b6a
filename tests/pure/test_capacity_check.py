"""A running cluster beside its plan."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from rayq.core.capacity.check import CheckedFigure, check
from rayq.core.capacity.measured_load import BrokerLoad, MeasuredLoad
from rayq.core.capacity.plan import CapacityPlan, Load, Machine, plan
from rayq.records import TopicPartition

LOAD = Load(records_per_s=10_000, record_bytes=1000, retention_s=86_400, skew=1)
"""10 MB/s on average, 20 at the peak."""
PLAN = plan(LOAD, Machine(disk_bytes=10e12))


def broker(number: int, **changes: Any) -> BrokerLoad:
    given: dict[str, Any] = {
        "received_bytes_per_s": 7e6,
        "sent_bytes_per_s": 10e6,
        "cores": 0.1,
        "memory_bytes": 1e9,
        "log_bytes": 1e12,
        "free_bytes": 9e12,
        "replicas": 3,
    }
    return BrokerLoad(broker=str(number), **{**given, **changes})


def cluster(*brokers: BrokerLoad, **changes: Any) -> MeasuredLoad:
    given: dict[str, Any] = {
        "seconds": 10,
        "written_bytes_per_s": 9e6,
        "read_bytes_per_s": 18e6,
        "busiest_partition": TopicPartition("orders", 3),
        "busiest_bytes_per_s": 4e6,
        "partitions": 4,
        "brokers_away": 0,
    }
    return MeasuredLoad(brokers=brokers or tuple(map(broker, range(4))), **{**given, **changes})


def figure(what: str, measured: MeasuredLoad, planned: CapacityPlan = PLAN) -> CheckedFigure:
    figures = {checked.what: checked for checked in check(planned, measured).figures}
    return figures[what]


def over(measured: MeasuredLoad, planned: CapacityPlan = PLAN) -> list[str]:
    return [checked.what for checked in check(planned, measured).over]


def test_a_cluster_as_it_was_planned_is_within_its_plan() -> None:
    found = check(PLAN, cluster())
    assert found.is_within and found.over == () and found.unknown == ()
    assert [checked.share for checked in found.figures] == sorted(
        (checked.share for checked in found.figures), reverse=True
    )
    assert found.next is not None and found.next.what == "written"
    assert found.next.share == pytest.approx(9 / 20)


@pytest.mark.parametrize(
    ("changes", "what", "where", "remedy"),
    [
        ({"written_bytes_per_s": 21e6}, "written", "", "plan again"),
        ({"read_bytes_per_s": 41e6}, "read", "", "--fan-out"),
        ({"busiest_bytes_per_s": 51e6}, "busiest partition", "orders-3", "add-partitions"),
        ({"partitions": 0}, "partitions", "", "add-partitions"),
    ],
)
def test_a_load_beyond_the_plan_is_named_with_what_to_do(
    changes: dict[str, Any], what: str, where: str, remedy: str
) -> None:
    found = check(PLAN, cluster(**changes))
    (beyond,) = found.over
    assert (beyond.what, beyond.where) == (what, where)
    assert remedy in beyond.remedy
    assert not found.is_within


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"log_bytes": 5.4e12, "free_bytes": 4.6e12}, "disk"),
        ({"sent_bytes_per_s": 1.5e9}, "network out"),
        ({"received_bytes_per_s": 0.8e9}, "memory"),  # whose page cache it takes
        ({"cores": 7.5}, "cores"),
        ({"memory_bytes": 50e9}, "memory"),
        ({"replicas": 2500}, "replicas"),
    ],
)
def test_the_most_used_broker_must_bear_its_share_of_one_that_is_away(
    changes: dict[str, Any], what: str
) -> None:
    busy = cluster(broker(0), broker(1), broker(2, **changes), broker(3))
    found = figure(what, busy)
    assert (found.where, found.share > 1) == ("broker 2", True)
    assert over(busy) == [what]
    # Three of four are left, and already have what the fourth had.
    away = dataclasses.replace(busy, brokers_away=1)
    assert figure(what, away).share == pytest.approx(found.share * 3 / 4, rel=0.2)


def test_a_disk_that_is_smaller_than_planned_counts_as_it_is() -> None:
    small = cluster(*(broker(n, log_bytes=50e9, free_bytes=50e9) for n in range(4)))
    assert figure("disk", small).allowed == pytest.approx(0.7 * 100e9)
    found = figure("disk size", small)
    assert found.is_least and found.share > 1 and "fill up" in found.remedy
    assert over(cluster()) == []


def test_too_few_brokers_are_over_and_never_what_comes_next() -> None:
    few = cluster(broker(0), broker(1), broker(2))
    assert over(few) == ["brokers"]
    assert figure("brokers", few).share == pytest.approx(4 / 3)
    enough = check(PLAN, cluster())
    assert figure("brokers", cluster()).share == 1
    assert enough.next is not None and not enough.next.is_least


def test_no_broker_at_all_is_over_everything_that_it_needs() -> None:
    none = check(PLAN, dataclasses.replace(cluster(), brokers=()))
    assert "brokers" in [checked.what for checked in none.over]
    assert math.isinf(none.over[0].share)
    alone = cluster(broker(0))
    assert "brokers" in over(alone)


def test_reads_that_nobody_planned_are_over() -> None:
    unread = plan(dataclasses.replace(LOAD, fan_out=0), Machine(disk_bytes=10e12))
    assert over(cluster(), unread) == ["read"]
    assert over(cluster(read_bytes_per_s=0), unread) == []


def test_what_servers_do_not_tell_is_said_and_is_no_reason_to_be_within() -> None:
    silent = cluster(broker(0), broker(1), broker(2), broker(3, cores=None, memory_bytes=None))
    found = check(PLAN, silent)
    assert sorted(found.unknown) == ["cores", "memory"]
    assert {checked.what for checked in found.figures}.isdisjoint({"cores", "memory"})
