"""What a SIGKILL of a leader's process costs at load: three brokers on a local Ray, six partitions,
one producer that sends as many records a second as it is told.

    python -m benchmarks.failover [60000]

For each kill: when the controller knew of it, when it had elected, when the next leader led (by the
logs of the servers), and when a record that was sent after the kill was acknowledged.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path

import ray

import rayq
from benchmarks.density import BROKERS, local_ray
from benchmarks.machine import describe

SENDS_PER_S = 60_000
PARTITIONS = 6
RECORD_BYTES = 300
KILLS = 5
SETTLE_S = 8.0
EVENTS = ("replicas_gone", "leader_elected", "leads")
_LINE = re.compile(r"(\S+Z) \S+ \S+ (\w+) (.*)")


class Load:
    """A producer that sends at a pace, and now and then notes a record for partition 0."""

    def __init__(self, cluster: rayq.Cluster, topic: str, sends_per_s: int) -> None:
        self._cluster = cluster
        self._topic = topic
        self._sends_per_s = sends_per_s
        self._stop = threading.Event()
        self._noted: deque[tuple[float, rayq.DeliveryFuture]] = deque()
        self.acknowledged: list[tuple[float, float]] = []
        """When a noted record was sent, and when it was acknowledged."""
        self.sent = 0
        self._threads = [threading.Thread(target=one) for one in (self._send, self._wait)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        value = os.urandom(RECORD_BYTES)
        batch = self._sends_per_s // 100
        with self._cluster.producer() as producer:
            start_s = time.time()
            while not self._stop.is_set():
                for number in range(batch):
                    future = producer.send(self._topic, value, partition=number % PARTITIONS)
                    if number == 0:
                        self._noted.append((time.time(), future))
                self.sent += batch
                ahead_s = self.sent / self._sends_per_s - (time.time() - start_s)
                if ahead_s > 0:
                    time.sleep(ahead_s)

    def _wait(self) -> None:
        while self._noted or not self._stop.is_set():
            if not self._noted:
                time.sleep(0.001)
                continue
            sent_s, future = self._noted.popleft()
            future.result(60)
            self.acknowledged.append((sent_s, time.time()))


def events_since(logs: Path, topic: str, since_s: float) -> dict[str, float]:
    """The first of each event of partition 0 since then, in seconds after it."""
    found: dict[str, float] = {}
    for path in logs.rglob("*"):
        if "rayq" not in path.name or not path.is_file():
            continue
        for line in path.read_text(errors="replace").splitlines():
            match = _LINE.match(line)
            if match is None or match[2] not in EVENTS:
                continue
            if match[2] != "replicas_gone" and f"topic={topic} partition=0 " not in f"{match[3]} ":
                continue
            at_s = datetime.fromisoformat(match[1]).astimezone(UTC).timestamp() - since_s
            if at_s >= -0.002:
                found[match[2]] = min(at_s, found.get(match[2], at_s))
    return found


def main() -> None:
    sends_per_s = int(sys.argv[1]) if len(sys.argv) > 1 else SENDS_PER_S
    print(describe())
    with tempfile.TemporaryDirectory(prefix="rayq-failover-") as directory:
        with local_ray(), rayq.start(directory, brokers=BROKERS) as cluster:
            cluster.create_topic("t", PARTITIONS, BROKERS)
            context = ray.get_runtime_context()
            logs = Path(context.get_temp_dir()) / context.get_session_name() / "logs"
            with Load(cluster, "t", sends_per_s) as load:
                time.sleep(SETTLE_S)
                for _ in range(KILLS):
                    partition = cluster.admin.describe_topic("t").partitions[0]
                    pids = {one.broker: one.pid for one in partition.replicas}
                    victim = None if partition.leader is None else pids[partition.leader]
                    assert victim is not None
                    before, began_s = load.sent, time.time()
                    time.sleep(1)
                    rate = (load.sent - before) / (time.time() - began_s)
                    killed_s = time.time()
                    os.kill(victim, signal.SIGKILL)
                    time.sleep(SETTLE_S)
                    acknowledged_s = next(
                        done for sent, done in load.acknowledged if sent >= killed_s
                    )
                    events = events_since(logs, "t", killed_s)
                    told = ", ".join(f"{one} {events[one]:.3f}" for one in EVENTS if one in events)
                    print(
                        f"{rate:.0f} sends/s; SIGKILL: {told}, "
                        f"acknowledged {acknowledged_s - killed_s:.3f} s",
                        flush=True,
                    )
            cluster.stop()


if __name__ == "__main__":
    main()
