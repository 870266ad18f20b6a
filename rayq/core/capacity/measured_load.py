"""The load of a running cluster, from its metrics at two moments. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayq.core.cluster.topic_changes import INTERNAL_PREFIX
from rayq.errors import DisconnectedError, counted
from rayq.metrics import Sample
from rayq.records import TopicPartition

CONTROLLER = "controller"
"""The label `broker` of the controller's own process."""
_ByName = Mapping[str, Sequence[Sample]]


@dataclass(frozen=True, kw_only=True)
class BrokerLoad:
    """The load of one broker. None: its servers do not tell."""

    broker: str
    received_bytes_per_s: float
    """Bytes from producers and from leaders."""
    sent_bytes_per_s: float
    """Bytes to consumers, to followers and to the object store."""
    cores: float | None
    """Processor time for each second."""
    memory_bytes: float | None
    log_bytes: float
    free_bytes: float | None
    replicas: int


@dataclass(frozen=True, kw_only=True)
class MeasuredLoad:
    """The load of a cluster over some time. Bytes are those of compressed batches."""

    seconds: float
    written_bytes_per_s: float
    """Bytes that leaders have appended for producers: one copy."""
    read_bytes_per_s: float
    """Bytes that consumers have read."""
    busiest_partition: TopicPartition | None
    """The partition that was written most; None where nothing was written."""
    busiest_bytes_per_s: float
    partitions: int
    """Partitions of users' topics."""
    brokers: tuple[BrokerLoad, ...]
    brokers_away: int
    """Known brokers whose session is over."""


class Growth:
    """The growth of counters and histograms between two collections of metrics.

    Raises DisconnectedError where a process ended meanwhile or did not answer: what it counted is
    missing from the sums of its broker."""

    def __init__(self, before: Sequence[Sample], after: Sequence[Sample], seconds: float) -> None:
        _check_same_processes(before, after)
        self.seconds = seconds
        self._before = {_key(sample): sample for sample in before}
        self._after = _by_name(after)

    def samples(self, name: str, **labels: str) -> list[Sample]:
        """The growth of each series of a metric that has these labels."""
        wanted = labels.items()
        return [
            _grown(self._before.get(_key(sample)), sample)
            for sample in self._after.get(name, ())
            if wanted <= sample.labels.items()
        ]

    def total(self, *names: str, **labels: str) -> float:
        return sum(sample.value for name in names for sample in self.samples(name, **labels))

    def rate(self, *names: str, **labels: str) -> float:
        """The growth for each second."""
        return self.total(*names, **labels) / self.seconds

    def has(self, name: str) -> bool:
        return name in self._after


def measured_load(
    before: Sequence[Sample], after: Sequence[Sample], seconds: float
) -> MeasuredLoad:
    """The load between two collections of metrics that are so many seconds apart. Raises
    DisconnectedError where servers ended meanwhile or did not answer."""
    growth, now = Growth(before, after, seconds), _by_name(after)
    written: dict[TopicPartition, float] = defaultdict(float)
    for sample in growth.samples("rayq_bytes_in_total"):
        written[_partition(sample)] += sample.value / seconds
    busiest = max(written, key=written.__getitem__, default=None)
    if busiest is not None and not written[busiest]:
        busiest = None
    users = {
        _partition(sample)
        for sample in now.get("rayq_partition_replicas", ())
        if not sample.labels["topic"].startswith(INTERNAL_PREFIX)
    }
    names = {
        sample.labels["broker"]
        for sample in now.get("rayq_metadata_version", ())
        if sample.labels["broker"] != CONTROLLER
    }
    return MeasuredLoad(
        seconds=seconds,
        written_bytes_per_s=sum(written.values()),
        read_bytes_per_s=growth.rate("rayq_bytes_out_total"),
        busiest_partition=busiest,
        busiest_bytes_per_s=0.0 if busiest is None else written[busiest],
        partitions=len(users),
        brokers=tuple(_of_broker(name, growth, now) for name in sorted(names, key=_number)),
        brokers_away=int(_sum(now, "rayq_fenced_brokers") or 0),
    )


def _of_broker(broker: str, growth: Growth, now: _ByName) -> BrokerLoad:
    cpu = "rayq_process_cpu_seconds_total"
    return BrokerLoad(
        broker=broker,
        received_bytes_per_s=growth.rate(
            "rayq_bytes_in_total", "rayq_replication_bytes_in_total", broker=broker
        ),
        sent_bytes_per_s=growth.rate(
            "rayq_bytes_out_total",
            "rayq_replication_bytes_out_total",
            "rayq_remote_uploaded_bytes_total",
            broker=broker,
        ),
        cores=growth.rate(cpu, broker=broker) if growth.has(cpu) else None,
        memory_bytes=_sum(now, "rayq_process_resident_memory_bytes", broker=broker),
        log_bytes=_sum(now, "rayq_log_size_bytes", broker=broker) or 0.0,
        free_bytes=_sum(now, "rayq_disk_free_bytes", broker=broker),
        replicas=len(_named(now, "rayq_log_end_offset", broker=broker)),
    )


def _by_name(samples: Sequence[Sample]) -> _ByName:
    found: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        found[sample.name].append(sample)
    return dict(found)


def _named(samples: _ByName, name: str, **labels: str) -> list[Sample]:
    wanted = labels.items()
    return [sample for sample in samples.get(name, ()) if wanted <= sample.labels.items()]


def _sum(samples: _ByName, name: str, **labels: str) -> float | None:
    values = [sample.value for sample in _named(samples, name, **labels)]
    return sum(values) if values else None


def _partition(sample: Sample) -> TopicPartition:
    return TopicPartition(sample.labels["topic"], int(sample.labels["partition"]))


def _number(broker: str) -> tuple[int, str]:
    return (int(broker), "") if broker.isdigit() else (0, broker)


def _key(sample: Sample) -> tuple[str, tuple[tuple[str, str], ...]]:
    return sample.name, tuple(sorted(sample.labels.items()))


def _grown(before: Sample | None, after: Sample) -> Sample:
    """The growth of one series. One that became less began again at 0."""
    if before is None or after.value < before.value:
        return after
    count = buckets = None
    if before.count is not None and after.count is not None:
        count = after.count - before.count
    if before.buckets is not None and after.buckets is not None:
        buckets = [now - then for now, then in zip(after.buckets, before.buckets, strict=True)]
    return Sample(after.name, after.labels, after.value - before.value, count, buckets)


def _check_same_processes(before: Sequence[Sample], after: Sequence[Sample]) -> None:
    answered, answers = _processes(before), _processes(after)
    missing = sorted(
        process
        for process in answered | answers
        if not (answered.get(process, True) and answers.get(process, False))
    )
    if missing:
        raise DisconnectedError(
            f"{counted(len(missing), 'server')} ended while the load was measured, or did not "
            f"answer: {', '.join(missing[:5])}. Look at `rayq cluster health`, and measure again."
        )


def _processes(samples: Sequence[Sample]) -> dict[str, bool]:
    """The addresses of the servers, and whether each of them answered."""
    found = (sample for sample in samples if sample.name == "rayq_process_up")
    return {sample.labels["process"]: bool(sample.value) for sample in found}
