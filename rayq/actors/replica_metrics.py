"""What one replica counts. Made once, so that counting is an addition and no look-up."""

from __future__ import annotations

from rayq.environment import Environment


class ReplicaMetrics:
    """The counters of one replica of one partition; `forget` drops them with it."""

    def __init__(self, environment: Environment, topic: str, partition: int) -> None:
        metrics = self._metrics = environment.metrics
        self._topic = topic
        self._partition = partition
        at = {"topic": topic, "partition": partition}
        self.bytes_in = metrics.counter("rayq_bytes_in_total", **at)
        self.records_in = metrics.counter("rayq_records_in_total", **at)
        self.bytes_out = metrics.counter("rayq_bytes_out_total", **at)
        self.records_out = metrics.counter("rayq_records_out_total", **at)
        self.replication_bytes_in = metrics.counter("rayq_replication_bytes_in_total", **at)
        self.replication_bytes_out = metrics.counter("rayq_replication_bytes_out_total", **at)
        self.flush = metrics.histogram("rayq_log_flush_seconds")
        self.end_to_end = metrics.histogram("rayq_end_to_end_seconds", topic=topic)

    def forget(self) -> None:
        self._metrics.forget(topic=self._topic, partition=self._partition)
