"""The capacity planner: its examples, what it refuses, and what never decreases."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayq.client.admin.admin import AsyncAdmin
from rayq.core.capacity.plan import BROKERS_MIN, RANGES, CapacityPlan, Costs, Load, Machine, plan
from rayq.errors import InvalidRequestError

WEEK_S = 7 * 86_400
MILLION = Load(records_per_s=1e6, record_bytes=1000, retention_s=WEEK_S, peak=1, skew=1)


def with_(load: Load, **changes: Any) -> Load:
    return dataclasses.replace(load, **changes)


def test_a_million_records_a_second_for_a_week() -> None:
    planned = plan(MILLION)
    assert planned.retained_bytes == pytest.approx(1.8144e15)
    assert planned.partitions_for_rate == 20
    assert planned.partitions % planned.brokers == 0
    assert planned.binds is not None and planned.binds.resource == "disk"
    assert "--local" in planned.binds.halves


@pytest.mark.parametrize(
    ("local_h", "disks_tb"), [(24, 259), (6, 65), (1, 11)], ids=["a day", "six hours", "an hour"]
)
def test_hours_on_disks_and_the_rest_in_the_store(local_h: int, disks_tb: int) -> None:
    # The table of docs/tiered-storage.md: bytes alone, nothing for outages.
    load = with_(MILLION, local_s=local_h * 3600, upload_lag_s=0, outage_s=0)
    planned = plan(load, costs=Costs(index_factor=1, segment_bytes=1))
    assert round(planned.disk_bytes / 1e12) == disks_tb
    assert round(planned.store_bytes / 1e12) == 605


def test_replication_counts_once() -> None:
    once, thrice = (plan(with_(MILLION, replication_factor=copies)) for copies in (1, 3))
    assert thrice.retained_bytes == 3 * once.retained_bytes
    sent = {use.resource: use for use in thrice.uses}["network out"].used * (thrice.brokers - 1)
    assert sent == pytest.approx(1e9 * (2 + MILLION.fan_out))


def test_the_peak_sizes_network_and_cores_and_the_average_disks() -> None:
    tiered = with_(MILLION, local_s=3600, outage_s=0)
    calm, peaky = plan(tiered), plan(with_(tiered, peak=10))
    assert peaky.retained_bytes == calm.retained_bytes
    assert peaky.peak_bytes_per_s == 10 * calm.peak_bytes_per_s
    assert peaky.brokers > calm.brokers


def test_a_small_load_has_three_brokers_and_nothing_binds() -> None:
    planned = plan(Load(records_per_s=100, record_bytes=100, retention_s=86_400, replication_factor=2))
    assert (planned.brokers, planned.binds) == (BROKERS_MIN, None)
    assert plan(Load(records_per_s=100, record_bytes=100, retention_s=86_400)).brokers == 4


def test_one_broker_fewer_would_not_do() -> None:
    planned = plan(MILLION)
    binding = planned.binds
    assert binding is not None and binding.share <= 1
    rest, fewer = planned.brokers - 1, planned.brokers - 2
    assert binding.share * rest / fewer > 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"records_per_s": 0}, "records_per_s must be from"),
        ({"record_bytes": float("nan")}, "record_bytes must be from 1 to .* not nan"),
        ({"retention_s": float("inf")}, "not inf"),
        ({"consumers": 10**400}, "consumers must be from"),
        ({"consumers": 1.5}, "consumers must be a whole number"),
        ({"replication_factor": True}, "must be a number, not True"),
        ({"records_per_s": "1M/s"}, "must be a number, not '1M/s'"),
        ({"compression": 0.5}, "compression must be from 1 "),
        ({"peak": 0.1}, "peak must be from 1 "),
        ({"fan_out": -1}, "fan_out must be from 0 "),
        ({"hottest_key_share": 1.5}, "from 0 to 1, not 1.5"),
        ({"hottest_key_share": 0.1}, "split the key"),
        ({"records_per_s": 1e15}, "Check the units"),
    ],
)
def test_a_load_that_cannot_be_is_refused_with_the_reason(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        plan(with_(MILLION, **changes))


ABSURD = (0, -1, 1e400, -1e400, float("nan"), 5e-324, 1e300, 10**400, True, "1", None)


@pytest.mark.parametrize("kind", [Load, Machine, Costs])
@pytest.mark.parametrize("number", ABSURD, ids=lambda number: repr(number)[:8])
def test_an_absurd_number_is_refused_or_planned_and_nothing_else(kind: Any, number: Any) -> None:
    for field in dataclasses.fields(kind):
        given = {Load: MILLION, Machine: Machine(), Costs: Costs()}
        given[kind] = dataclasses.replace(given[kind], **{field.name: number})
        try:
            planned = plan(given[Load], given[Machine], given[Costs])
        except InvalidRequestError as error:
            assert str(error).endswith(".")
        else:
            is_in_range = number is not None and RANGES[field.name][0] <= number < 1
            assert is_in_range or (field.name == "local_s" and number is None), field.name
            assert all(map(math.isfinite, (planned.disk_bytes, planned.recovery_s)))


def test_costs_in_another_unit_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="write_cpu_s_per_byte must be .* Check its unit"):
        plan(MILLION, costs=Costs(write_cpu_s_per_byte=1.5))  # milliseconds for each MB
    with pytest.raises(InvalidRequestError, match="disk_bytes must be"):
        plan(MILLION, Machine(disk_bytes=30))  # terabytes


def test_every_number_has_its_range() -> None:
    fields = [field for kind in (Load, Machine, Costs) for field in dataclasses.fields(kind)]
    assert [field.name for field in fields] == list(RANGES)


def test_a_machine_that_is_too_small_for_one_broker_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="memory is used"):
        plan(MILLION, Machine(memory_bytes=1e9))


LOADS = st.builds(
    Load,
    records_per_s=st.floats(1, 3e6),
    record_bytes=st.floats(10, 3000),
    retention_s=st.floats(60, 30 * 86_400),
    replication_factor=st.integers(1, 5),
    peak=st.floats(1, 5),
    fan_out=st.floats(0, 20),
    compression=st.floats(1, 10),
    skew=st.floats(1, 3),
    growth=st.floats(0.5, 3),
    consumers=st.integers(0, 2000),
    local_s=st.none() | st.floats(60, 86_400),
)
GROWS = (
    *("records_per_s", "record_bytes", "retention_s", "replication_factor", "peak", "fan_out"),
    *("skew", "growth", "consumers", "local_s", "upload_lag_s", "outage_s"),
)
SHARES = ("disk_full", "network_busy", "cores_busy")
HELPS = ("partition_write_bytes_per_s", "consumer_read_bytes_per_s", "replicas_max", *SHARES)
"""The costs of which more is better."""
OTHERS = ("object_bytes", "puts_per_object", "start_s_per_partition", "index_factor")
"""The costs that decide nothing, and one that has another test."""
COSTS = [field.name for field in dataclasses.fields(Costs) if field.name not in OTHERS]


def tried(load: Load, machine: Machine, costs: Costs | None = None) -> CapacityPlan | None:
    try:
        return plan(load, machine, costs)
    except InvalidRequestError:
        return None


def is_no_easier(before: CapacityPlan | None, after: CapacityPlan | None) -> bool:
    """Returns whether a load that did not fit still does not, and one that fits has no fewer brokers."""
    return after is None or (before is not None and before.brokers <= after.brokers)


@given(load=LOADS, name=st.sampled_from(GROWS), factor=st.integers(2, 4))
def test_more_load_never_needs_fewer_brokers(load: Load, name: str, factor: int) -> None:
    value = getattr(load, name)
    more = load if value is None else with_(load, **{name: value * factor})
    assert is_no_easier(tried(load, Machine()), tried(more, Machine()))


@given(load=LOADS, factor=st.floats(1, 10))
def test_less_compression_never_needs_fewer_brokers(load: Load, factor: float) -> None:
    packed = with_(load, compression=load.compression * factor)
    assert is_no_easier(tried(packed, Machine()), tried(load, Machine()))


@given(load=LOADS, shares=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_a_hotter_key_is_never_carried_more_easily(
    load: Load, shares: tuple[float, float]
) -> None:
    cool, hot = (with_(load, hottest_key_share=share) for share in sorted(shares))
    assert is_no_easier(tried(cool, Machine()), tried(hot, Machine()))


@given(load=LOADS, name=st.sampled_from([field.name for field in dataclasses.fields(Machine)]))
def test_a_smaller_machine_never_does_with_fewer(load: Load, name: str) -> None:
    smaller = dataclasses.replace(Machine(), **{name: getattr(Machine(), name) / 2})
    assert is_no_easier(tried(load, Machine()), tried(load, smaller))


@given(load=LOADS, name=st.sampled_from(COSTS), factor=st.floats(1.01, 4))
def test_a_higher_cost_never_does_with_fewer(load: Load, name: str, factor: float) -> None:
    value = getattr(Costs(), name)
    costs = dataclasses.replace(
        Costs(), **{name: value / factor if name in HELPS else value * factor}
    )
    assert is_no_easier(tried(load, Machine()), tried(load, Machine(), costs))


@given(load=LOADS)
def test_nothing_is_used_beyond_what_is_allowed(load: Load) -> None:
    planned = tried(load, Machine())
    if planned is not None:
        assert all(use.share <= 1 for use in planned.uses)
        assert planned.brokers >= max(BROKERS_MIN, load.replication_factor + 1)


# --- in Python ------------------------------------------------------------------------------------


def test_the_admin_takes_every_number_of_a_load_and_a_machine_with_its_default() -> None:
    parameters = inspect.signature(AsyncAdmin.plan).parameters
    taken = {
        name: parameter.default
        for name, parameter in parameters.items()
        if name not in ("self", "profile")
    }
    assert taken == {
        field.name: inspect.Parameter.empty
        if field.default is dataclasses.MISSING
        else field.default
        for kind in (Load, Machine)
        for field in dataclasses.fields(kind)
    }


def test_a_plan_tells_by_what_it_was_made() -> None:
    costs = Costs.measured({"partition_write_bytes_per_s": 100e6})
    planned = plan(MILLION, Machine(cores=8), costs)
    assert (planned.load, planned.machine.cores, planned.costs) == (MILLION, 8, costs)
    assert planned.partitions_for_rate == 20  # One consumer still reads no more.


def test_a_profile_with_an_unknown_cost_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no 'cpu'. It may have: partition_write"):
        Costs.measured({"cpu": 1})
