"""Metrics of a partition's leader. They are made once, so that counting is an addition and no
lookup."""

from __future__ import annotations

from rayq.environment import Environment
from rayq.storage.batch import BatchHeader, append_time_of


class LeaderMetrics:
    """Bytes and records of one partition, as its leader sees them. They continue from those of an
    earlier leader in the same process."""

    def __init__(self, environment: Environment, topic: str, partition: int) -> None:
        self._clock = environment.clock
        counter, at = environment.metrics.counter, {"topic": topic, "partition": partition}
        self._bytes_in = counter("rayq_bytes_in_total", **at)
        self._records_in = counter("rayq_records_in_total", **at)
        self._bytes_out = counter("rayq_bytes_out_total", **at)
        self._records_out = counter("rayq_records_out_total", **at)
        self._replication_bytes_out = counter("rayq_replication_bytes_out_total", **at)
        self._end_to_end = environment.metrics.histogram("rayq_end_to_end_seconds", **at)

    def appended(self, header: BatchHeader) -> None:
        self._bytes_in.value += header.length
        self._records_in.value += header.record_count

    def sent(self, data: bytes, records: int, *, is_at_end: bool) -> None:
        """Counts bytes that went to a consumer. One that is now at the end was waiting for them, or
        nearly."""
        self._bytes_out.value += len(data)
        self._records_out.value += records
        if is_at_end and data:
            age_ms = self._clock.wall_ms() - append_time_of(data)
            self._end_to_end.observe(max(age_ms, 0) / 1000)

    def replicated(self, data: bytes) -> None:
        """Counts bytes that went to a follower."""
        self._replication_bytes_out.value += len(data)
