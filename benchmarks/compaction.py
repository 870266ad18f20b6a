"""Two million records over 100,000 keys, compacted while a producer goes on.

    python -m benchmarks.compaction [records]

One topic of one partition on three brokers of this machine: three logs are compacted, by three
helper processes. Before and during that, a producer sends 500 records a second, acks="all", and
notes the latency of each; the rows are the 99th percentiles of each second. At the end the topic is
read from the start and compared with a dict.
"""

from __future__ import annotations

import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks import machine
from benchmarks.report import Row, table, wide_console
from rayq import RecordMetadata, TopicPartition
from rayq.client.producing.producer import Producer
from rayq.testing import LocalCluster

RECORDS = 2_000_000
KEYS = 100_000
CHUNK = 20_000
VALUE_BYTES = 100
TOPIC = "state"
PROBES_PER_S = 500
BASELINE_S = 8
COMPACTION_TIMEOUT_S = 1800
"""Helpers have idle priority, so on a busy machine they take long."""
NO_COMPACTION_MS = 3_600_000
HELPER = b"rayq.runtime.cleaner_process"


class Probe:
    """A producer at a steady pace; latencies by the second in which they were sent."""

    def __init__(self, producer: Producer, state: dict[bytes, bytes | None]) -> None:
        self._producer = producer
        self._state = state
        self._latencies_ms: dict[int, list[float]] = {}
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._send, daemon=True)

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._producer.flush()
        if self._failures:
            raise self._failures[0]

    def _send(self) -> None:
        number, next_s = 0, time.perf_counter()
        while not self._stop.is_set():
            key, value = b"probe %d" % (number % 1000), b"%d" % number
            self._state[key] = value
            self._send_one(key, value)
            number += 1
            next_s += 1 / PROBES_PER_S
            time.sleep(max(0.0, next_s - time.perf_counter()))

    def _send_one(self, key: bytes, value: bytes) -> None:
        sent_s = time.perf_counter()
        latencies = self._latencies_ms.setdefault(int(sent_s), [])

        def delivered(_: RecordMetadata | None, error: BaseException | None) -> None:
            latencies.append((time.perf_counter() - sent_s) * 1000)
            if error is not None:
                self._failures.append(error)

        self._producer.send(TOPIC, value, key=key, on_delivery=delivered)

    def p99_ms(self, since_s: float, until_s: float) -> list[float]:
        """The 99th percentile for each whole second between two times of `perf_counter`."""
        return [
            sorted(latencies)[int(len(latencies) * 0.99)]
            for second, latencies in self._latencies_ms.items()
            if since_s < second and second + 1 < until_s and latencies
        ]


class Helpers(threading.Thread):
    """Measures the most memory that the helper processes take."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_mib = 0.0
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.1):
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    if HELPER not in (process / "cmdline").read_bytes():
                        continue
                    for line in (process / "status").read_text().splitlines():
                        if line.startswith("VmHWM"):
                            self.peak_mib = max(self.peak_mib, int(line.split()[1]) / 1024)
                except OSError:
                    continue


def compaction(directory: Path, records: int = RECORDS) -> list[Row]:
    rng = random.Random(1)
    state: dict[bytes, bytes | None] = {}
    data = directory / "compaction"
    with LocalCluster(brokers=3, data_dir=str(data), compaction_check_interval_ms=500) as cluster:
        cluster.create_topic(
            TOPIC,
            cleanup_policy="compact",
            segment_bytes=4 * 1024 * 1024,
            min_compaction_lag_ms=NO_COMPACTION_MS,
        )
        with cluster.producer() as producer:
            for first in range(0, records, CHUNK):
                keys = [b"key %07d" % rng.randrange(KEYS) for _ in range(CHUNK)]
                values = [_value(rng, first + number) for number in range(CHUNK)]
                state.update(zip(keys, values, strict=True))
                producer.send_many(TOPIC, values, keys=keys)
            producer.flush()
            logs = [data / f"broker-{broker}" / f"{TOPIC}-0" for broker in range(3)]
            bytes_before = [_log_bytes(log) for log in logs]
            helpers = Helpers()
            helpers.start()
            with Probe(producer, state) as probe:
                time.sleep(BASELINE_S)
                began_s = time.perf_counter()
                cluster.admin.alter_topic_config(TOPIC, min_compaction_lag_ms=0)
                deadline_s = began_s + COMPACTION_TIMEOUT_S
                while not all((log / "cleaned").exists() for log in logs):
                    if time.perf_counter() > deadline_s:
                        raise TimeoutError("the logs were not compacted in time")
                    time.sleep(0.1)
                ended_s = time.perf_counter()
            helpers.stop.set()
        share = sum(_log_bytes(log) for log in logs) / sum(bytes_before)
        found = _replay(cluster)
        if found != {key: value for key, value in state.items() if value is not None}:
            raise AssertionError("the compacted log is not what was written")
    shutil.rmtree(data)
    before = probe.p99_ms(began_s - BASELINE_S, began_s)
    during = probe.p99_ms(began_s, ended_s)
    ratio = statistics.median(before) / statistics.median(during)
    size_mib = bytes_before[0] / 2**20
    return [
        Row(name="producer's p99 before compaction", unit="ms", samples=before, better="lower"),
        Row(
            name="producer's p99 during compaction",
            unit="ms",
            samples=during,
            better="lower",
            ratio=ratio,
            target_ratio=0.5,
            note="p99 before / during; three logs on one disk and two cores",
        ),
        Row(
            name=f"compact {records:,} records of {KEYS:,} keys, three logs at once",
            unit="s",
            samples=[ended_s - began_s],
            better="lower",
            note=f"equal to the dict; {size_mib:.0f} MiB each, {share:.0%} of it stays",
        ),
        Row(
            name="memory of a helper, at most",
            unit="MiB",
            samples=[helpers.peak_mib],
            target=256,
            better="lower",
        ),
    ]


def _value(rng: random.Random, number: int) -> bytes | None:
    if rng.random() < 0.01:
        return None
    return (b'{"number": %d, "amount": %d}' % (number, rng.getrandbits(60))).ljust(VALUE_BYTES)


def _log_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.log"))


def _replay(cluster: LocalCluster) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    place = TopicPartition(TOPIC, 0)
    with cluster.consumer(TOPIC, auto_offset_reset="earliest") as consumer:
        end = consumer.end_offsets([place])[place]
        while consumer.position(place) < end:
            for record in consumer.poll(timeout_s=10, max_records=100_000):
                assert record.key is not None
                if record.value is None:
                    found.pop(record.key, None)
                else:
                    found[record.key] = record.value
    return found


if __name__ == "__main__":
    temporary = Path(tempfile.mkdtemp(prefix="rayq-bench-"))
    try:
        measured = compaction(temporary, *(int(argument) for argument in sys.argv[1:]))
        wide_console().print(table(measured, machine.describe()))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
