"""Capacity planning: the brokers, disks and partitions that a load needs.

Everything here is arithmetic on three values: the load (`Load`), one broker's machine (`Machine`)
and what a byte and a replica cost (`Costs`). `plan` finds the least number of brokers that carry
the load while one of them is away, and says what decides that number.

The rate that matters is that of compressed bytes:

    W = records per second x bytes of a record / compression         on average
    P = W x peak x growth                                             what network and cores bear

Disks are filled by the average, network and cores are used by the peak. Replication counts once in
each resource: RF copies are received and written, RF - 1 of them are sent on by leaders.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

from rayq.errors import InvalidRequestError

DAY_S = 86_400
BROKERS_MIN = 3
"""Minimum number of brokers: the metadata has three voters, of which one may be away."""
BROKERS_MAX = 100_000
"""Maximum number of brokers that are tried: what needs more is a mistake in a unit."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load to plan for. `RANGES` has the values that make sense."""

    records_per_s: float
    """Records that all producers write per second, on average."""
    record_bytes: float
    """Bytes of a record (key, value and headers) before compression."""
    retention_s: float
    """The time for which records are kept."""
    replication_factor: int = 3
    peak: float = 2
    """The busiest hour's rate as a multiple of the average."""
    fan_out: float = 2
    """The number of times that each record is read, which is the number of groups that read all."""
    compression: float = 1
    """The factor by which compression makes records smaller."""
    skew: float = 1.3
    """The busiest partition's rate as a multiple of the average partition's."""
    growth: float = 1
    """The rate at the end of the planned time as a multiple of today's."""
    consumers: int = 0
    """The number of consumers that one group needs, such as for slow handlers."""
    hottest_key_share: float = 0
    """The share of all bytes that have the most frequent key. They all go to one partition."""
    local_s: float | None = None
    """The time for which records stay on the brokers' disks where they are also in the object
    store. None: there is no object store."""
    upload_lag_s: float = 3600
    """The age at which a record is in the object store at the latest."""
    outage_s: float = 6 * 3600
    """The time for which the object store may be away while the disks do not fill up."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine of one broker."""

    disk_bytes: float = 30e12
    network_bytes_per_s: float = 25e9 / 8
    """The bandwidth in each direction."""
    cores: float = 16
    memory_bytes: float = 64e9


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of a byte and of a replica as measured (docs/performance.md), and how full machines may
    be."""

    partition_write_bytes_per_s: float = 50e6
    """Compressed bytes that one partition takes."""
    consumer_read_bytes_per_s: float = 50e6
    """Compressed bytes that one consumer reads."""
    write_cpu_s_per_byte: float = 1.5e-9
    """Processor time of servers for a byte that is written, on each replica."""
    read_cpu_s_per_byte: float = 1.7e-9
    """Processor time of servers for a byte that is fetched."""
    replica_cores: float = 0.000083
    """Share of a core that an idle replica takes."""
    replica_memory_bytes: float = 0.35e6
    broker_memory_bytes: float = 2e9
    """Memory of a broker without replicas, and of Ray."""
    page_cache_s: float = 60
    """The time for which what is written should stay in memory, so that followers and consumers who
    keep up never read a disk."""
    segment_bytes: float = 1024**3
    """Bytes that a replica keeps beyond its retention: the newest segment is never deleted."""
    index_factor: float = 1.004
    object_bytes: float = 64 * 1024**2
    puts_per_object: float = 2
    """Requests to the object store for each object: itself, and its share of a list."""
    replicas_max: float = 3000
    """Maximum number of replicas of a broker."""
    start_s_per_partition: float = 0.012
    """The time that a restarted cluster takes for each partition until it leads again."""
    disk_full: float = 0.7
    """The share of a disk that may be used. The rest is for a broker that must copy another's."""
    network_busy: float = 0.6
    cores_busy: float = 0.6

    @classmethod
    def measured(cls, profile: Mapping[str, float]) -> Self:
        """The costs that were measured, and the defaults of others. Raises InvalidRequestError."""
        names = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(map(str, set(profile).difference(names))):
            raise InvalidRequestError(
                f"A profile has no {unknown[0]!r}. It may have: {', '.join(names)}."
            )
        return cls(**profile)


RANGES: Mapping[str, tuple[float, float]] = {
    "records_per_s": (1e-6, 1e15),
    "record_bytes": (1, 1e10),
    "retention_s": (0.001, 1e10),
    "replication_factor": (1, 1000),
    "peak": (1, 1e6),
    "fan_out": (0, 1e6),
    "compression": (1, 1e4),
    "skew": (1, 1e6),
    "growth": (0.001, 1e6),
    "consumers": (0, 1e9),
    "hottest_key_share": (0, 1),
    "local_s": (0.001, 1e10),
    "upload_lag_s": (0, 1e10),
    "outage_s": (0, 1e10),
    "disk_bytes": (1e6, 1e17),
    "network_bytes_per_s": (1e3, 1e13),
    "cores": (0.01, 1e5),
    "memory_bytes": (1e6, 1e15),
    "partition_write_bytes_per_s": (1e3, 1e11),
    "consumer_read_bytes_per_s": (1e3, 1e11),
    "write_cpu_s_per_byte": (1e-12, 1e-5),
    "read_cpu_s_per_byte": (1e-12, 1e-5),
    "replica_cores": (1e-9, 1),
    "replica_memory_bytes": (1e3, 1e9),
    "broker_memory_bytes": (1e6, 1e12),
    "page_cache_s": (0.001, 1e5),
    "segment_bytes": (1, 1e12),
    "index_factor": (1, 2),
    "object_bytes": (1e3, 1e12),
    "puts_per_object": (0.01, 100),
    "replicas_max": (1, 1e6),
    "start_s_per_partition": (1e-6, 60),
    "disk_full": (0.01, 1),
    "network_busy": (0.01, 1),
    "cores_busy": (0.01, 1),
}
"""The least and the greatest value of each number, both included. They are wide: what lies outside
is a mistake in a unit, such as bits for bytes or milliseconds for each MB for seconds for each
byte."""
WHOLE = ("replication_factor", "consumers")


class ResourceUse(NamedTuple):
    """One resource of a broker, as used by the load when one other broker is away."""

    resource: str
    used: float
    allowed: float
    halves: str
    """The change of the load that would about halve the use."""

    @property
    def share(self) -> float:
        """The use as a share of what is allowed: above 1 it does not fit."""
        return self.used / self.allowed


@dataclass(frozen=True, kw_only=True)
class CapacityPlan:
    """The answer of `plan`."""

    load: Load
    machine: Machine
    costs: Costs
    brokers: int
    brokers_least: int
    """The number of brokers that replication alone asks for."""
    partitions: int
    """A multiple of the number of brokers, so that each leads as many."""
    partitions_for_rate: int
    """The partitions that the rate, the readers and the consumers need."""
    average_bytes_per_s: float
    peak_bytes_per_s: float
    retained_bytes: float
    """Bytes of all copies that retention keeps, in the store or on disks, without indexes."""
    disk_bytes: float
    """Bytes on the disks of all brokers."""
    store_bytes: float
    """Bytes in the object store; 0 without one."""
    puts_per_s: float
    uses: tuple[ResourceUse, ...]
    """The uses of a broker while another is away, the one that binds first."""
    recovery_s: float
    """The time to copy a lost broker's disks over the network that is spare at the peak."""
    start_s: float
    """The time until all partitions lead after all brokers were stopped."""

    @property
    def binds(self) -> ResourceUse | None:
        """The resource for which one broker fewer would not do; None if the least number of
        brokers carries the load anyway."""
        return self.uses[0] if self.brokers > self.brokers_least else None


def plan(load: Load, machine: Machine | None = None, costs: Costs | None = None) -> CapacityPlan:
    """The least number of brokers that carry a load while one of them is away.

    Raises InvalidRequestError where a number is out of range, where one key has more than a
    partition takes, or where no number of such machines will do."""
    machine, costs = machine or Machine(), costs or Costs()
    _check(load, machine, costs)
    least = max(BROKERS_MIN, load.replication_factor + 1)
    if not _fits(BROKERS_MAX, load, machine, costs):
        worst = _uses(BROKERS_MAX, load, machine, costs)[0]
        raise InvalidRequestError(
            f"{BROKERS_MAX:,} brokers of this kind do not carry the load: "
            f"{worst.resource} is used {worst.share:.3g} times over. Check the units, or "
            f"{worst.halves}."
        )
    low, high = least - 1, least
    while not _fits(high, load, machine, costs):
        low, high = high, min(2 * high, BROKERS_MAX)
    while high - low > 1:  # More brokers never carry less, so the least one can be searched for.
        middle = (low + high) // 2
        if _fits(middle, load, machine, costs):
            high = middle
        else:
            low = middle
    return _planned(high, least, load, machine, costs)


def _planned(brokers: int, least: int, load: Load, machine: Machine, costs: Costs) -> CapacityPlan:
    average, peak = _average(load), _peak(load)
    partitions = _partitions(brokers, load, costs)
    retained = average * load.growth * load.retention_s
    disks = _disk_bytes(partitions, load, costs)
    # What binds is what one broker fewer would not bear.
    fewer = brokers - 1 if brokers > least else brokers
    order = {use.resource: -use.share for use in _uses(fewer, load, machine, costs)}
    uses = sorted(_uses(brokers, load, machine, costs), key=lambda use: order[use.resource])
    incoming = peak * load.replication_factor / brokers
    spare = max(machine.network_bytes_per_s - incoming, 0.05 * machine.network_bytes_per_s)
    tiered = load.local_s is not None
    return CapacityPlan(
        load=load,
        machine=machine,
        costs=costs,
        brokers=brokers,
        brokers_least=least,
        partitions=partitions,
        partitions_for_rate=_partitions_for_rate(load, costs),
        average_bytes_per_s=average,
        peak_bytes_per_s=peak,
        retained_bytes=retained * (1 if tiered else load.replication_factor),
        disk_bytes=disks,
        store_bytes=retained if tiered else 0,
        puts_per_s=(
            average * load.growth / costs.object_bytes * costs.puts_per_object if tiered else 0
        ),
        uses=tuple(uses),
        recovery_s=disks / brokers / spare,
        start_s=partitions * costs.start_s_per_partition,
    )


def _average(load: Load) -> float:
    return load.records_per_s * load.record_bytes / load.compression


def _peak(load: Load) -> float:
    return _average(load) * load.peak * load.growth


def _partitions_for_rate(load: Load, costs: Costs) -> int:
    busiest = _peak(load) * load.skew
    return max(
        1,
        math.ceil(busiest / costs.partition_write_bytes_per_s),
        math.ceil(busiest / costs.consumer_read_bytes_per_s),
        load.consumers,
    )


def _partitions(brokers: int, load: Load, costs: Costs) -> int:
    return math.ceil(_partitions_for_rate(load, costs) / brokers) * brokers


def _disk_bytes(partitions: int, load: Load, costs: Costs) -> float:
    kept_s = load.retention_s
    if load.local_s is not None:
        kept_s = min(kept_s, load.local_s + load.upload_lag_s + load.outage_s)
    kept = _average(load) * load.growth * kept_s * costs.index_factor
    return load.replication_factor * (kept + partitions * costs.segment_bytes)


def _fits(brokers: int, load: Load, machine: Machine, costs: Costs) -> bool:
    return all(use.share <= 1 for use in _uses(brokers, load, machine, costs))


def _uses(brokers: int, load: Load, machine: Machine, costs: Costs) -> list[ResourceUse]:
    """The uses of each broker while one is away, the largest share first."""
    rest = brokers - 1
    copies, peak = load.replication_factor, _peak(load)
    partitions = _partitions(brokers, load, costs)
    replicas = partitions * copies / rest
    uploads = 1 if load.local_s is not None else 0
    sent = peak * (copies - 1 + load.fan_out + uploads) / rest
    received = peak * copies / rest
    cores = (
        peak * (costs.write_cpu_s_per_byte * copies + costs.read_cpu_s_per_byte * load.fan_out)
    ) / rest + replicas * costs.replica_cores
    memory = (
        costs.broker_memory_bytes
        + replicas * costs.replica_memory_bytes
        + received * costs.page_cache_s
    )
    less_disk = (
        "halve the retention, or keep hours on disks and the rest in an object store (--local 6h)"
        if load.local_s is None
        else "halve the time on the brokers' disks (--local)"
    )
    uses = [
        ResourceUse(
            "disk",
            _disk_bytes(partitions, load, costs) / rest,
            machine.disk_bytes * costs.disk_full,
            less_disk,
        ),
        ResourceUse(
            "network out",
            sent,
            machine.network_bytes_per_s * costs.network_busy,
            "compress, or let fewer groups read everything",
        ),
        ResourceUse(
            "network in",
            received,
            machine.network_bytes_per_s * costs.network_busy,
            "compress, or flatten the peak",
        ),
        ResourceUse(
            "cores",
            cores,
            machine.cores * costs.cores_busy,
            "compress, or flatten the peak",
        ),
        ResourceUse("memory", memory, machine.memory_bytes, "take machines with twice the memory"),
        ResourceUse("replicas", replicas, costs.replicas_max, "halve the number of partitions"),
    ]
    return sorted(uses, key=lambda use: -use.share)


def _check(load: Load, machine: Machine, costs: Costs) -> None:
    for values in (load, machine, costs):
        for field in dataclasses.fields(values):
            number = getattr(values, field.name)
            if number is not None or field.name != "local_s":
                _check_number(field.name, number)
    one_key = _peak(load) * load.hottest_key_share
    if one_key > costs.partition_write_bytes_per_s:
        raise InvalidRequestError(
            f"One key has {one_key / 1e6:,.0f} MB/s at the peak. All of it goes to one partition, "
            f"which takes {costs.partition_write_bytes_per_s / 1e6:,.0f} MB/s. No number of "
            "brokers helps: split the key."
        )


def _check_number(name: str, number: object) -> None:
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise InvalidRequestError(f"{name} must be a number, not {number!r}.")
    low, high = RANGES[name]
    if not low <= number <= high:  # NaN is in no range.
        raise InvalidRequestError(
            f"{name} must be from {low:g} to {high:g}, not {number!r:.20}. Check its unit."
        )
    if name in WHOLE and number != int(number):
        raise InvalidRequestError(f"{name} must be a whole number, not {number!r}.")
