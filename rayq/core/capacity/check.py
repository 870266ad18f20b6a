"""A running cluster beside its plan: what is over, and what comes next. Pure.

Resources are compared as the plan has them, while one broker is away: what the most used broker
takes now, and its share of what another one would leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from rayq.core.capacity.measured_load import BrokerLoad, MeasuredLoad
from rayq.core.capacity.plan import CapacityPlan, ResourceUse

LEAST = ("brokers", "partitions", "disk size")
"""The figures of which the plan needs at least so much. Of others it allows at most so much."""


class CheckedFigure(NamedTuple):
    """One figure of a cluster beside the plan's."""

    what: str
    where: str
    """The broker or partition with the largest share; empty where it is about the cluster."""
    measured: float
    planned: float
    allowed: float
    """The most that the plan allows; of what is in LEAST, the least that it needs."""
    share: float
    """The share of what is allowed: above 1 it is over. Infinite where nothing is allowed."""
    remedy: str

    @property
    def is_least(self) -> bool:
        """True if the plan needs at least so much."""
        return self.what in LEAST


@dataclass(frozen=True, kw_only=True)
class CapacityCheck:
    """The answer of `check_plan`."""

    plan: CapacityPlan
    measured: MeasuredLoad
    figures: tuple[CheckedFigure, ...]
    """The largest share first."""
    unknown: tuple[str, ...]
    """Resources that the servers do not tell."""

    @property
    def over(self) -> tuple[CheckedFigure, ...]:
        """The figures that are beyond the plan."""
        return tuple(figure for figure in self.figures if figure.share > 1)

    @property
    def next(self) -> CheckedFigure | None:
        """The figure that will be over first as the load grows, by its share."""
        growing = (figure for figure in self.figures if not figure.is_least)
        return next((figure for figure in growing if figure.share <= 1), None)

    @property
    def is_within(self) -> bool:
        """True if nothing is beyond the plan."""
        return not self.over


def check(plan: CapacityPlan, measured: MeasuredLoad) -> CapacityCheck:
    """Compares a cluster with its plan."""
    figures, unknown = _of_load(plan, measured), []
    for use in plan.uses:
        figure = _of_resource(use, plan, measured)
        if figure is None:
            unknown.append(use.resource)
        else:
            figures.append(figure)
            if use.resource == "disk":
                figures.append(_disk_size(use, plan, measured))
    return CapacityCheck(
        plan=plan,
        measured=measured,
        figures=tuple(sorted(figures, key=lambda figure: -figure.share)),
        unknown=tuple(unknown),
    )


def _of_load(plan: CapacityPlan, measured: MeasuredLoad) -> list[CheckedFigure]:
    load, busiest = plan.load, measured.busiest_partition
    average = plan.average_bytes_per_s * load.growth
    partition_limit = plan.costs.partition_write_bytes_per_s
    place = "" if busiest is None else f"{busiest.topic}-{busiest.partition}"
    brokers = len(measured.brokers)
    return [
        _figure(
            "written",
            measured.written_bytes_per_s,
            average,
            plan.peak_bytes_per_s,
            "plan again with this rate, and add what it needs",
        ),
        _figure(
            "read",
            measured.read_bytes_per_s,
            average * load.fan_out,
            plan.peak_bytes_per_s * load.fan_out,
            "let fewer groups read everything, or plan again with more --fan-out",
        ),
        _figure(
            "busiest partition",
            measured.busiest_bytes_per_s,
            average * load.skew / plan.partitions,
            partition_limit,
            "give its topic more partitions (rayq topic add-partitions), or split its hottest key",
            where=place,
        ),
        CheckedFigure(
            "partitions",
            "",
            measured.partitions,
            plan.partitions,
            plan.partitions_for_rate,
            _share(plan.partitions_for_rate, measured.partitions),
            "add partitions (rayq topic add-partitions)",
        ),
        CheckedFigure(
            "brokers",
            "",
            brokers,
            plan.brokers,
            plan.brokers,
            _share(plan.brokers, brokers),
            "see whether brokers are away (rayq cluster health), else add some and spread the load "
            "(rayq cluster reassign --spread)",
        ),
    ]


def _figure(
    what: str, measured: float, planned: float, allowed: float, remedy: str, *, where: str = ""
) -> CheckedFigure:
    share = _share(measured, allowed)
    return CheckedFigure(what, where, measured, planned, allowed, share, remedy)


def _share(used: float, allowed: float) -> float:
    if allowed:
        return used / allowed
    return math.inf if used else 0.0


# --- resources ------------------------------------------------------------------------------------

_USED: dict[str, Callable[[BrokerLoad, CapacityPlan], float | None]] = {
    "disk": lambda broker, _: None if broker.free_bytes is None else broker.log_bytes,
    "network out": lambda broker, _: broker.sent_bytes_per_s,
    "network in": lambda broker, _: broker.received_bytes_per_s,
    "cores": lambda broker, _: broker.cores,
    "memory": lambda broker, plan: (
        None
        if broker.memory_bytes is None
        else broker.memory_bytes + broker.received_bytes_per_s * plan.costs.page_cache_s
    ),
    "replicas": lambda broker, _: broker.replicas,
}
"""The use of each resource by one broker, as the plan reckons it."""


def _of_resource(
    use: ResourceUse, plan: CapacityPlan, measured: MeasuredLoad
) -> CheckedFigure | None:
    """The broker that uses most of it; None where a broker does not tell."""
    count = len(measured.brokers)
    # A broker that is away has left its work to the others already.
    factor = 1.0 if measured.brokers_away or count < 2 else count / (count - 1)
    found = []
    for broker in measured.brokers:
        used = _USED[use.resource](broker, plan)
        if used is None:
            return None
        allowed = use.allowed
        if use.resource == "disk":
            allowed = min(allowed, _disk_bytes(broker) * plan.costs.disk_full)
        where = f"broker {broker.broker}"
        remedy = f"{use.halves}; or add a broker"
        found.append(
            _figure(use.resource, used * factor, use.used, allowed, remedy, where=where)
        )
    return max(found, key=lambda figure: figure.share, default=None)


def _disk_bytes(broker: BrokerLoad) -> float:
    return broker.log_bytes + (broker.free_bytes or 0.0)


def _disk_size(use: ResourceUse, plan: CapacityPlan, measured: MeasuredLoad) -> CheckedFigure:
    """The smallest disk beside what the plan will put on it."""
    smallest = min(measured.brokers, key=_disk_bytes)
    size_bytes, needed_bytes = _disk_bytes(smallest), use.used / plan.costs.disk_full
    return CheckedFigure(
        "disk size",
        f"broker {smallest.broker}",
        size_bytes,
        plan.machine.disk_bytes,
        needed_bytes,
        _share(needed_bytes, size_bytes),
        "it will fill up: take larger disks, plan with the disks that there are (--disk), or keep "
        "records for a shorter time",
    )
