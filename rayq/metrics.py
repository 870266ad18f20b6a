"""The metrics of the servers: names, meanings, and instruments that cost one addition.

A process has one `Metrics`, in its `Environment`. Frequent events are counted as they happen
(`Counter`, `Histogram`: plain integers, no lock, one event loop). Figures that can be looked up,
such as the size of a log, are looked up when a request asks for metrics (`add_source`). Names are
those of Kafka or of its lag exporter where these have one, with the suffixes of Prometheus.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import msgspec

Kind = Literal["counter", "gauge", "histogram"]

SECONDS_BOUNDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0,
)  # fmt: skip
"""The upper bounds of the buckets of every histogram. One more bucket takes the values above."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name with the unit, its kind, its labels and its meaning."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


_PROCESS = ("cluster", "broker")
_PARTITION = ("cluster", "topic", "partition")
_REPLICA = ("cluster", "broker", "topic", "partition")
_GROUP = ("cluster", "group")
_POOL = ("cluster", "pool", "group")
_QUEUE = ("cluster", "queue", "topic", "partition")
_GROUP_PARTITION = ("cluster", "group", "topic", "partition")

_METRICS = (
    # Every server process. `broker` is "controller" in the controller's own process.
    Metric(
        "rayq_request_seconds",
        "histogram",
        (*_PROCESS, "request"),
        "From a request's arrival to its answer, be it an error; of long polls that includes the "
        "time they are held.",
    ),
    Metric(
        "rayq_failed_requests_total",
        "counter",
        (*_PROCESS, "request", "error"),
        "Requests that were answered by an error, by its class; clients repeat most of them.",
    ),
    Metric(
        "rayq_audited_events_total",
        "counter",
        (*_PROCESS, "kind"),
        "Denials, logins, failed logins, signed URLs and redrives that were told to the audit, "
        "those that share a line included.",
    ),
    Metric(
        "rayq_audit_events_dropped_total",
        "counter",
        (*_PROCESS, "kind"),
        "Events that the audit lacks: __audit could not be written for too long.",
    ),
    Metric(
        "rayq_token_expires_seconds",
        "gauge",
        ("cluster", "principal"),
        "Time until the last of a principal's tokens expires; negative where it has. Missing where "
        "one does not expire.",
    ),
    Metric("rayq_connections", "gauge", _PROCESS, "Connections that are open now."),
    Metric(
        "rayq_throttled_seconds_total",
        "counter",
        (*_PROCESS, "principal", "quota"),
        "Time in which a principal had used up one of its quotas in this process, so that its "
        "requests waited.",
    ),
    # Of processes on Ray. Where all servers share one process with their clients, nobody can say
    # what is whose.
    Metric(
        "rayq_process_cpu_seconds_total",
        "counter",
        _PROCESS,
        "Processor time of the broker's processes since each of them started.",
    ),
    Metric(
        "rayq_process_resident_memory_bytes",
        "gauge",
        _PROCESS,
        "Resident memory of the broker's processes; what they share counts in each.",
    ),
    Metric(
        "rayq_requests_in_flight",
        "gauge",
        _PROCESS,
        "Requests that have no answer yet, long polls included.",
    ),
    Metric(
        "rayq_connections_waiting",
        "gauge",
        _PROCESS,
        "Connections of clients that wait for their turn: the event loop has no time for them.",
    ),
    Metric(
        "rayq_loop_lag_seconds",
        "histogram",
        _PROCESS,
        "How late the event loop came to a timer, measured twice in each heartbeat interval.",
    ),
    Metric(
        "rayq_unheard_seconds_total",
        "counter",
        _PROCESS,
        "Time in which the process was so far behind that it judged nobody's silence.",
    ),
    # Of replicas. Bytes count the batches as they are stored, compressed.
    Metric("rayq_bytes_in_total", "counter", _REPLICA, "Bytes appended for producers."),
    Metric("rayq_records_in_total", "counter", _REPLICA, "Records appended for producers."),
    Metric("rayq_bytes_out_total", "counter", _REPLICA, "Bytes sent to consumers."),
    Metric(
        "rayq_records_out_total",
        "counter",
        _REPLICA,
        "Records sent to consumers, counted by their offsets: in a compacted topic the gaps count "
        "too.",
    ),
    Metric(
        "rayq_replication_bytes_in_total", "counter", _REPLICA, "Bytes copied from the leader."
    ),
    Metric("rayq_replication_bytes_out_total", "counter", _REPLICA, "Bytes sent to followers."),
    Metric(
        "rayq_end_to_end_seconds",
        "histogram",
        _REPLICA,
        "From a batch's append to its way to a consumer, of consumers that keep up: each answer "
        "that brings one to the end of the log, by its oldest batch.",
    ),
    Metric(
        "rayq_log_flush_seconds", "histogram", _PROCESS, "How long one fdatasync of a log took."
    ),
    Metric("rayq_log_size_bytes", "gauge", _REPLICA, "The size of a replica's log."),
    Metric("rayq_log_end_offset", "gauge", _REPLICA, "Where a replica's log ends."),
    Metric(
        "rayq_log_unreadable_batches",
        "gauge",
        _REPLICA,
        "Batches of a compacted topic that the replica's last compaction could not read, although "
        "their CRC is right, and kept as they are.",
    ),
    Metric(
        "rayq_replica_lag",
        "gauge",
        _REPLICA,
        "Committed records that a follower has yet to copy, as of its last fetch.",
    ),
    Metric(
        "rayq_partition_latest_offset",
        "gauge",
        _PARTITION,
        "The high watermark, where consumers find nothing more; from the leader.",
    ),
    Metric(
        "rayq_partition_earliest_offset", "gauge", _PARTITION, "The log start; from the leader."
    ),
    Metric(
        "rayq_partition_in_sync_replicas",
        "gauge",
        _PARTITION,
        "The size of the in-sync set; from the leader.",
    ),
    Metric("rayq_partition_replicas", "gauge", _PARTITION, "The replicas; from the leader."),
    # Where a partition holds anything of transactions.
    Metric(
        "rayq_partition_last_stable_offset_lag",
        "gauge",
        _PARTITION,
        "From the last stable offset, where readers of what is committed find nothing more, to the "
        "high watermark; from the leader.",
    ),
    Metric(
        "rayq_partition_open_transactions",
        "gauge",
        _PARTITION,
        "Transactions with records in the partition that have no marker yet; from the leader.",
    ),
    Metric(
        "rayq_partition_oldest_transaction_seconds",
        "gauge",
        _PARTITION,
        "For how long the leader has known the oldest open transaction; a new leader begins at 0.",
    ),
    Metric(
        "rayq_partition_unknown_transactions",
        "gauge",
        _PARTITION,
        "Open transactions of which their coordinator knows nothing, so that nobody ends them; "
        "from the leader.",
    ),
    # Brokers.
    Metric("rayq_disk_free_bytes", "gauge", _PROCESS, "Free bytes where the broker's data is."),
    Metric(
        "rayq_failed_replicas",
        "gauge",
        _PROCESS,
        "Replicas that stopped for good, on a disk error, since the broker's process started.",
    ),
    Metric(
        "rayq_metadata_version",
        "gauge",
        _PROCESS,
        "The newest committed metadata that a broker has; one that stays behind is cut off.",
    ),
    # Of the controller, from the process that hosts it now.
    Metric(
        "rayq_active_controller",
        "gauge",
        _PROCESS,
        "1 in the process that hosts the controller, 0 in those that could: the sum is 1.",
    ),
    Metric("rayq_active_brokers", "gauge", ("cluster",), "Brokers that hold a session."),
    Metric(
        "rayq_fenced_brokers", "gauge", ("cluster",), "Known brokers whose session is over."
    ),
    Metric("rayq_topics", "gauge", ("cluster",), "Topics, rayq's own included."),
    Metric("rayq_partitions", "gauge", ("cluster",), "Partitions of all topics."),
    Metric("rayq_offline_partitions", "gauge", ("cluster",), "Partitions without a leader."),
    Metric(
        "rayq_underreplicated_partitions",
        "gauge",
        ("cluster",),
        "Partitions with fewer in-sync replicas than replicas.",
    ),
    Metric(
        "rayq_under_min_isr_partitions",
        "gauge",
        ("cluster",),
        "Partitions with fewer in-sync replicas than min_insync_replicas: acks=all is refused.",
    ),
    Metric(
        "rayq_reassigning_partitions", "gauge", ("cluster",), "Partitions that are being moved."
    ),
    Metric(
        "rayq_leader_elections_total",
        "counter",
        ("cluster",),
        "Partitions that were given a leader, in a new leader epoch.",
    ),
    Metric(
        "rayq_unclean_leader_elections_total",
        "counter",
        ("cluster",),
        "Leaders that may lack acknowledged records.",
    ),
    Metric(
        "rayq_isr_shrinks_total",
        "counter",
        ("cluster", "replica"),
        "Times that the replica of a broker (`replica`) left an in-sync set.",
    ),
    Metric(
        "rayq_isr_expands_total",
        "counter",
        ("cluster", "replica"),
        "Times that the replica of a broker (`replica`) joined an in-sync set.",
    ),
    Metric(
        "rayq_heartbeat_age_seconds",
        "gauge",
        ("cluster", "replica"),
        "Time since the last heartbeat of a broker (`replica`), as the controller counts it.",
    ),
    Metric(
        "rayq_late_heartbeats_total",
        "counter",
        ("cluster", "replica"),
        "Heartbeats of a broker (`replica`) that came after more than half a session: it nearly "
        "ended.",
    ),
    Metric(
        "rayq_sessions_ended_total",
        "counter",
        ("cluster", "replica"),
        "Sessions of a broker (`replica`) that ended because it was silent.",
    ),
    # Groups.
    Metric(
        "rayq_consumergroup_rebalances_total",
        "counter",
        _GROUP,
        "Rebalances since this coordinator began; the log has the reason of each.",
    ),
    Metric("rayq_consumergroup_members", "gauge", _GROUP, "Members of a group."),
    Metric(
        "rayq_consumergroup_group_offset",
        "gauge",
        _GROUP_PARTITION,
        "The committed offset: the next record that the group will handle.",
    ),
    Metric(
        "rayq_consumergroup_group_lag",
        "gauge",
        _GROUP_PARTITION,
        "Records from the committed offset to the end.",
    ),
    Metric(
        "rayq_consumergroup_group_lag_seconds",
        "gauge",
        _GROUP_PARTITION,
        "How long ago the record at the committed offset was appended; 0 at the end.",
    ),
    Metric("rayq_consumergroup_group_max_lag", "gauge", _GROUP, "Of the worst partition."),
    Metric(
        "rayq_consumergroup_group_max_lag_seconds", "gauge", _GROUP, "Of the worst partition."
    ),
    Metric("rayq_consumergroup_group_sum_lag", "gauge", _GROUP, "Over all partitions."),
    # Transactions, from their coordinators.
    Metric(
        "rayq_open_transactions",
        "gauge",
        ("cluster", "partition"),
        "Transactions that are open, or whose markers are not all written; of the coordinator that "
        "leads this partition of __transaction_state.",
    ),
    Metric(
        "rayq_transaction_end_seconds",
        "histogram",
        _PROCESS,
        "From the decision of a transaction (commit, abort or time-out) to its last marker: from "
        "then on all readers see how it ended.",
    ),
    # Queues, from the coordinators of their state.
    Metric(
        "rayq_queue_state_bytes",
        "gauge",
        ("cluster", "partition"),
        "What the coordinator that leads this partition of __queue_state holds of its queues; "
        "above 64 MiB they give out no more records until some are settled.",
    ),
    # From the leader of the data partition.
    Metric("rayq_queue_ready", "gauge", _QUEUE, "Records that could be taken now."),
    Metric("rayq_queue_locked", "gauge", _QUEUE, "Records that consumers hold: in flight."),
    Metric("rayq_queue_delayed", "gauge", _QUEUE, "Records that wait until they are due."),
    Metric(
        "rayq_queue_moving",
        "gauge",
        _QUEUE,
        "Records on their way to the dead letters, or back.",
    ),
    Metric(
        "rayq_queue_oldest_ready_seconds",
        "gauge",
        _QUEUE,
        "How long the oldest record that could be taken has waited.",
    ),
    Metric(
        "rayq_queue_trouble",
        "gauge",
        _QUEUE,
        "1: the partition is at a limit, or its dead letters cannot be written; `rayq queue "
        "describe` says why.",
    ),
    Metric(
        "rayq_queue_dead_total",
        "counter",
        _QUEUE,
        "Records that failed for good, since this leader began.",
    ),
    Metric(
        "rayq_queue_expired_total",
        "counter",
        _QUEUE,
        "Records that the topic's retention took before they were settled, since this leader "
        "began.",
    ),
    # Remote storage. Of a partition with any of it, from the leader.
    Metric(
        "rayq_remote_size_bytes",
        "gauge",
        _PARTITION,
        "Bytes of the partition's records in the object store; from the leader.",
    ),
    Metric(
        "rayq_remote_upload_lag_bytes",
        "gauge",
        _PARTITION,
        "Bytes of closed segments that are not in the object store yet; from the leader.",
    ),
    Metric(
        "rayq_remote_upload_lag_seconds",
        "gauge",
        _PARTITION,
        "How long ago the oldest of them could have been stored; from the leader.",
    ),
    Metric(
        "rayq_remote_read_seconds",
        "histogram",
        _PROCESS,
        "From a read of records that are only in the object store to its answer.",
    ),
    # Of each broker's object server.
    Metric(
        "rayq_remote_uploaded_bytes_total", "counter", _PROCESS, "Bytes put into the object store."
    ),
    Metric(
        "rayq_remote_downloaded_bytes_total",
        "counter",
        _PROCESS,
        "Bytes read from the object store; what batch jobs read from it themselves does not count.",
    ),
    Metric(
        "rayq_remote_request_seconds",
        "histogram",
        (*_PROCESS, "operation"),
        "How long a request to the object store took: put, get, head, list or delete.",
    ),
    Metric(
        "rayq_remote_errors_total",
        "counter",
        (*_PROCESS, "error"),
        "Requests to the object store that failed, by the class of the error; most are repeated.",
    ),
    Metric(
        "rayq_remote_cache_hits_total",
        "counter",
        _PROCESS,
        "Reads that the cache of the object store answered, or that it was already filled for.",
    ),
    Metric(
        "rayq_remote_cache_misses_total",
        "counter",
        _PROCESS,
        "Reads that had to wait for the object store.",
    ),
    Metric(
        "rayq_remote_cache_bytes", "gauge", _PROCESS, "What the cache of the object store holds."
    ),
    # And of the controller.
    Metric(
        "rayq_remote_pins",
        "gauge",
        ("cluster",),
        "Pins of batch jobs and restored topics, at which retention stops.",
    ),
    Metric(
        "rayq_remote_garbage_topics",
        "gauge",
        ("cluster",),
        "Deleted topics that still have objects in the object store.",
    ),
    # Consumer pools, from the pool's own process: on Ray only.
    Metric("rayq_pool_wanted_consumers", "gauge", _POOL, "Consumers that there should be now."),
    Metric("rayq_pool_running_consumers", "gauge", _POOL, "Consumers that run."),
    Metric(
        "rayq_pool_pending_consumers",
        "gauge",
        _POOL,
        "Consumers that start, or wait for room on a node.",
    ),
    Metric("rayq_pool_lag_seconds", "gauge", _POOL, "The lag by which the pool is sized."),
    Metric("rayq_pool_target_lag_seconds", "gauge", _POOL, "The lag that is to be kept below."),
    Metric("rayq_pool_records_total", "counter", _POOL, "Records that were handled."),
    Metric("rayq_pool_retries_total", "counter", _POOL, "Batches that were handled again."),
    Metric(
        "rayq_pool_dead_letters_total",
        "counter",
        _POOL,
        "Records that went to the dead-letter topic.",
    ),
    # From the client that asks all servers.
    Metric(
        "rayq_process_up",
        "gauge",
        ("cluster", "process"),
        "1: the server at this address told its figures; 0: it did not answer.",
    ),
)

CATALOGUE: Mapping[str, Metric] = {metric.name: metric for metric in _METRICS}
"""Every metric by its name."""


class Sample(msgspec.Struct, array_like=True, frozen=True):
    """One metric under one set of labels, at one moment.

    `value` is the number. For a histogram `value` is the sum of all observations, `count` is their
    number, and `buckets` has how many of them lie at or below each of `SECONDS_BOUNDS`.
    """

    name: str
    labels: dict[str, str]
    value: float
    count: int | None = None
    buckets: list[int] | None = None

    @property
    def mean(self) -> float | None:
        """The mean of a histogram; None before the first observation."""
        return self.value / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """The value below which this share of a histogram's observations lies, interpolated inside
        a bucket by a straight line; None before the first observation. In the bucket above the last
        bound it is that bound."""
        if not self.count or self.buckets is None:
            return None
        wanted, below, lower = share * self.count, 0, 0.0
        for bound, up_to in zip(SECONDS_BOUNDS, self.buckets, strict=True):
            if up_to >= wanted and up_to > below:
                return lower + (bound - lower) * (wanted - below) / (up_to - below)
            below, lower = up_to, bound
        return SECONDS_BOUNDS[-1]


class Counter:
    """A number that only grows: add to `value` in place."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class Histogram:
    """Observations in seconds, by `SECONDS_BOUNDS`."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS_BOUNDS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS_BOUNDS, seconds)] += 1
        self.sum += seconds


Source = Callable[[], Iterable[Sample]]
"""Looks figures up. It is called on the event loop: it must be quick, and must not raise."""

_Key = tuple[str, tuple[tuple[str, str], ...]]


class Metrics:
    """The figures of one process.

    `label` sets the labels that all figures share (cluster, broker). A metric gets only those that
    the catalogue lists for it.
    """

    def __init__(self) -> None:
        self._common: dict[str, str] = {}
        self._instruments: dict[_Key, Counter | Histogram] = {}
        self._by_label: dict[tuple[str, str], dict[_Key, None]] = {}
        """The keys of `_instruments` that have a label with a value: a process that stops forgets
        those of each of its replicas."""
        self._sources: dict[object, Source] = {}

    def label(self, **labels: object) -> None:
        self._common.update((key, str(value)) for key, value in labels.items())

    def counter(self, name: str, **labels: object) -> Counter:
        """The counter with these labels, always the same object. Keep it where you use it often."""
        found = self._instrument(name, labels)
        assert isinstance(found, Counter), name
        return found

    def histogram(self, name: str, **labels: object) -> Histogram:
        """The histogram with these labels, as `counter`."""
        found = self._instrument(name, labels)
        assert isinstance(found, Histogram), name
        return found

    def _instrument(self, name: str, labels: dict[str, object]) -> Counter | Histogram:
        key = (name, tuple((label, str(value)) for label, value in labels.items()))
        found = self._instruments.get(key)
        if found is None:
            metric = CATALOGUE[name]
            assert set(labels) <= set(metric.labels), f"{name} has no labels {sorted(labels)}"
            found = Histogram() if metric.kind == "histogram" else Counter()
            self._instruments[key] = found
            for pair in key[1]:
                self._by_label.setdefault(pair, {})[key] = None
        return found

    def forget(self, **labels: object) -> None:
        """Drops the counters and histograms that carry all of these labels."""
        gone = {(label, str(value)) for label, value in labels.items()}
        fewest = min((self._by_label.get(pair, {}) for pair in gone), key=len)
        for key in [key for key in fewest if gone <= set(key[1])]:
            del self._instruments[key]
            for pair in key[1]:
                keys = self._by_label[pair]
                del keys[key]
                if not keys:
                    del self._by_label[pair]

    def add_source(self, source: Source) -> Callable[[], None]:
        """Makes `collect` call `source` from now on. Call the result to end that."""
        token = object()
        self._sources[token] = source

        def remove() -> None:
            self._sources.pop(token, None)

        return remove

    def sample(self, name: str, value: float, **labels: object) -> Sample:
        """A sample with all its labels, for sources."""
        return Sample(name, self._labels(name, labels), value)

    def _labels(self, name: str, labels: Mapping[str, object]) -> dict[str, str]:
        common = self._common
        return {
            label: str(labels[label]) if label in labels else common.get(label, "")
            for label in CATALOGUE[name].labels
        }

    def collect(self) -> list[Sample]:
        """All figures of this process, as they are now."""
        samples = []
        for (name, own), instrument in self._instruments.items():
            labels = self._labels(name, dict(own))
            if isinstance(instrument, Counter):
                samples.append(Sample(name, labels, instrument.value))
            else:
                counts = instrument.counts
                buckets = list(accumulate(counts[:-1]))
                samples.append(Sample(name, labels, instrument.sum, sum(counts), buckets))
        for source in list(self._sources.values()):
            samples.extend(source())
        return samples


def merged(samples: Iterable[Sample]) -> list[Sample]:
    """The samples of several processes, sorted by name and labels. Samples with the same name and
    labels are added up, since the processes of a broker's replicas answer its requests together.
    But a gauge without the label `broker` is about a partition, a group or the cluster: while a
    leader or the controller changes, two processes may have it, and the greater value counts."""
    found: dict[_Key, Sample] = {}
    for sample in samples:
        key = (sample.name, tuple(sorted(sample.labels.items())))
        before = found.get(key)
        if before is None:
            found[key] = sample
        elif _is_of_one_process(sample.name):
            found[key] = max(before, sample, key=lambda candidate: candidate.value)
        else:
            found[key] = _sum(before, sample)
    return [found[key] for key in sorted(found)]


def _is_of_one_process(name: str) -> bool:
    metric = CATALOGUE.get(name)  # None: the server is newer than this process.
    return metric is not None and metric.kind == "gauge" and "broker" not in metric.labels


def _sum(first: Sample, other: Sample) -> Sample:
    count = buckets = None
    if first.count is not None and other.count is not None:
        count = first.count + other.count
    if first.buckets is not None and other.buckets is not None:
        buckets = [a + b for a, b in zip(first.buckets, other.buckets, strict=True)]
    return Sample(first.name, first.labels, first.value + other.value, count, buckets)
