"""How chaos measures the effect of a fault on writes."""

from __future__ import annotations

from array import array

import pytest

from proving.chaos.faults import Injected, Kind, Target
from proving.chaos.load import Acknowledged
from proving.chaos.measure import (
    Times,
    by_kind,
    longest_pause_s,
    measure,
    next_write_s,
    times_of,
    violations,
)
from proving.chaos.standstill import Standstill


def acknowledged(*times_s: tuple[float, float]) -> Acknowledged:
    return Acknowledged(
        array("d", [sent for sent, _ in times_s]), array("d", [at for _, at in times_s])
    )


def injected(kind: Kind, partitions: list[int], *phases_s: float) -> Injected:
    return Injected(Target(kind, [1], partitions, None, "somebody", 3.0), *phases_s)


def test_an_answer_that_was_under_way_does_not_end_the_wait_for_the_next_write() -> None:
    times = acknowledged((0.0, 0.5), (0.9, 1.1), (1.2, 3.0), (1.3, 3.1))
    assert next_write_s(times, 1.0) == 2.0
    assert next_write_s(times, 4.0) == float("inf")


def test_a_pause_reaches_to_the_ends_of_the_phase() -> None:
    at_s = array("d", [1.0, 2.0, 2.5, 9.0])
    assert longest_pause_s(at_s, 1.5, 4.0) == 1.5
    assert longest_pause_s(at_s, 3.0, 5.0) == 2.0
    assert longest_pause_s(at_s, 1.5, 2.6) == 0.5


def test_no_progress_within_the_limit_is_a_violation_on_any_partition() -> None:
    steady = acknowledged(*((at, at) for at in [0.1 * tick for tick in range(100)]))
    stuck = acknowledged((0.0, 0.5), (3.0, 3.1))
    fault = injected(Kind.KILL_LEADER, [0], 1.0, 4.0, 5.0)
    measured = measure([fault], [steady, stuck])
    assert [one.is_affected for one in measured] == [True, False]
    (violation,) = violations(measured)
    assert "partition 1 made no progress for 2.10 s, more than 1 s" in violation
    assert not violations(measured, leniency=3)
    fault.stood_still_s = 1.05
    assert len(violations(measured)) == 1
    fault.stood_still_s = 1.15  # That comes on top of the limit.
    assert not violations(measured)
    longer = injected(Kind.STOP_LEADER, [1], 1.0, 4.0, 5.0)
    assert not violations(measure([longer], [steady, stuck]))


def test_writes_may_pause_for_longer_where_a_killed_broker_is_not_back_within_its_leases() -> None:
    stuck = acknowledged((0.0, 0.5), (5.0, 5.1), (8.0, 8.1))
    fault = injected(Kind.KILL_BROKER, [0], 1.0, 8.0, 9.0)
    assert (fault.limit_s, fault.lasts_s) == (1.0, 3.0)
    fault.broker_away_s = 2.4
    (violation,) = violations(measure([fault], [stuck]))
    assert "made no progress for 4.10 s, more than 1 s" in violation
    fault.broker_away_s = 2.6
    assert (fault.limit_s, fault.lasts_s) == (5.0, 7.0)
    assert not violations(measure([fault], [stuck]))


def test_the_distribution_counts_affected_partitions_only() -> None:
    times = acknowledged((1.0, 1.5), (1.6, 1.7))
    faults = [injected(Kind.KILL_NODE, [0, 1], 1.0, 2.0, 3.0)]
    kinds = by_kind(measure(faults, [times, times, times]))
    assert {kind: [one.partition for one in found] for kind, found in kinds.items()} == {
        Kind.KILL_NODE: [0, 1]
    }


def test_percentiles_are_values_that_occurred() -> None:
    assert times_of([]) is None
    assert times_of([3.0, 1.0, 2.0]) == Times(3, 2.0, 3.0, 3.0)
    many = times_of(float(number) for number in range(1, 201))
    assert many == Times(200, 100.0, 198.0, 200.0)


@pytest.mark.parametrize("kind", list(Kind))
def test_a_fault_lasts_longer_than_its_limit(kind: Kind) -> None:
    assert kind.lasts_s > kind.limit_s


def test_the_machine_stood_still_while_no_thread_woke_up() -> None:
    standstill = Standstill()
    standstill._late = [(5.0, 2.0), (9.0, 1.0)]
    assert standstill.between_s(0.0, 10.0) == 3.0
    assert standstill.between_s(4.0, 8.5) == 1.5
    assert standstill.between_s(5.0, 8.0) == 0.0
