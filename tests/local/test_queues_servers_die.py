"""Consumers of a queue while the servers below them die: every record is handled, none is taken
after its acknowledgement was confirmed, and each key keeps its order."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from rayq.errors import LockLostError
from rayq.testing import LocalCluster
from tests.local.support import eventually, leader_of, wait_in_sync

PATIENCE_S = 60.0
COUNT = 400


class Workers:
    """Threads that take, handle and acknowledge, each with a consumer of its own."""

    def __init__(self, cluster: LocalCluster, name: str, count: int) -> None:
        self.confirmed: Counter[bytes] = Counter()
        self.after: list[bytes] = []
        """What was taken after its acknowledgement was confirmed."""
        self.out_of_order: list[bytes] = []
        self._last: dict[bytes, int] = {}
        self._lock = threading.Lock()
        self._cluster, self._name = cluster, name
        self._has_ended = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        with self._cluster.queue(self._name) as queue:
            while not self._has_ended.is_set():
                for task in queue.take(20, 0.3):
                    assert task.value is not None and task.key is not None
                    with self._lock:
                        if task.value in self.confirmed:
                            self.after.append(task.value)
                        if int(task.value) < self._last.get(task.key, -1):
                            self.out_of_order.append(task.value)
                    task.ack()
                    try:
                        queue.flush(PATIENCE_S)
                    except LockLostError:
                        continue
                    with self._lock:
                        self.confirmed[task.value] += 1
                        self._last[task.key] = max(
                            int(task.value), self._last.get(task.key, -1)
                        )

    def stop(self) -> None:
        self._has_ended.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)


@pytest.mark.thorough
def test_workers_go_on_while_leaders_and_keepers_die(fragile: LocalCluster) -> None:
    queue = fragile.create_queue(
        "q", partitions=2, ordered_by_key=True, visibility_timeout_s=3, max_deliveries=100
    )
    keys = [b"%d" % (number % 8) for number in range(COUNT)]
    queue.put_many([b"%d" % number for number in range(COUNT)], keys=keys)
    workers = Workers(fragile, "q", 3)
    try:
        eventually(lambda: len(workers.confirmed) > 20, "they began")
        fragile.kill_replica("q", 0, leader_of(fragile, "q"))
        seen = len(workers.confirmed)
        eventually(lambda: len(workers.confirmed) > seen + 20, "they went on")
        for partition in range(4):
            leader = leader_of(fragile, "__queue_state", partition)
            fragile.kill_replica("__queue_state", partition, leader)
        wait_in_sync(fragile, "q")
        eventually(lambda: len(workers.confirmed) == COUNT, "all was handled")
    finally:
        workers.stop()
        queue.close()
    assert not workers.after
    assert not workers.out_of_order
