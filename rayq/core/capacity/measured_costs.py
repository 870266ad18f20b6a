"""Costs of a byte as one partition of a running cluster shows them. Pure.

A measurement has three phases: the cluster as it is, one partition that is written at full speed,
one consumer that reads it at full speed. What the servers took in the first is taken off the
others. The result is what `rayq plan --profile` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rayq.core.capacity.measured_load import Growth
from rayq.core.capacity.plan import RANGES
from rayq.metrics import Sample, merged

COUNTED_ON = 0.6
"""The share of what one partition took, or one consumer read, at full speed that a plan counts on:
as much as of network and cores."""
CPU_METRIC = "rayq_process_cpu_seconds_total"
FLUSH_METRIC = "rayq_log_flush_seconds"
DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """The result of a measurement. None: it could not be measured."""

    acknowledged_bytes_per_s: float
    """Compressed bytes of the partition that were acknowledged."""
    read_bytes_per_s: float
    """Compressed bytes that the consumer read."""
    write_cpu_s_per_byte: float | None
    """Processor time of all servers for a byte that is written, on each replica."""
    read_cpu_s_per_byte: float | None
    fdatasync_p50_s: float | None
    fdatasync_p99_s: float | None
    replication_bytes_per_s: float
    """Bytes that went from the leader to followers: the network between brokers takes at least
    that. Its limit is not measured."""
    others_bytes_per_s: float
    """Bytes that others wrote and read meanwhile: above 0 the costs are less exact."""

    @property
    def costs(self) -> dict[str, float]:
        """The costs that were measured and make sense, by the names of `Costs`."""
        found = {
            "partition_write_bytes_per_s": COUNTED_ON * self.acknowledged_bytes_per_s,
            "consumer_read_bytes_per_s": COUNTED_ON * self.read_bytes_per_s,
            "write_cpu_s_per_byte": self.write_cpu_s_per_byte,
            "read_cpu_s_per_byte": self.read_cpu_s_per_byte,
        }
        return {
            name: float(f"{value:.{DIGITS}g}")
            for name, value in found.items()
            if value is not None and RANGES[name][0] <= value <= RANGES[name][1]
        }


def measured_costs(
    topic: str, replicas: int, *, idle: Growth, writing: Growth, reading: Growth
) -> MeasuredCosts:
    """The costs by what the metrics grew in each phase."""
    written = writing.total("rayq_bytes_in_total", topic=topic)
    read = reading.total("rayq_bytes_out_total", topic=topic)
    flushes = _quantiles(writing)
    return MeasuredCosts(
        acknowledged_bytes_per_s=written / writing.seconds,
        read_bytes_per_s=read / reading.seconds,
        write_cpu_s_per_byte=_cpu_s_per_byte(written * replicas, writing, idle),
        read_cpu_s_per_byte=_cpu_s_per_byte(read, reading, idle),
        fdatasync_p50_s=flushes.get(0.5),
        fdatasync_p99_s=flushes.get(0.99),
        replication_bytes_per_s=writing.rate("rayq_replication_bytes_out_total", topic=topic),
        others_bytes_per_s=max(_others(writing, topic), _others(reading, topic)),
    )


def _cpu_s_per_byte(size_bytes: float, busy: Growth, idle: Growth) -> float | None:
    """None where servers do not tell their processor time, or nothing was transferred."""
    if not (size_bytes and busy.has(CPU_METRIC)):
        return None
    at_rest_s = idle.rate(CPU_METRIC) * busy.seconds
    return (busy.total(CPU_METRIC) - at_rest_s) / size_bytes


def _others(growth: Growth, topic: str) -> float:
    names = ("rayq_bytes_in_total", "rayq_bytes_out_total")
    return growth.rate(*names) - growth.rate(*names, topic=topic)


def _quantiles(growth: Growth) -> Mapping[float, float | None]:
    """The quantiles of all flushes of all brokers."""
    flushes = merged(
        Sample(sample.name, {}, sample.value, sample.count, sample.buckets)
        for sample in growth.samples(FLUSH_METRIC)
    )
    return {share: flush.quantile(share) for flush in flushes for share in (0.5, 0.99)}
