"""Queues beside the load of a chaos run: two read its topic, one of them in the order of keys.

Their workers are processes that are killed, or hang and continue later (each gets a successor at
once), or whose connections break for a while. In the end every record has to be settled, and the
checker judges what the workers saw.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import threading
from collections import Counter
from typing import Any

from proving.chaos import queue_workers
from proving.chaos.cluster import wait_until
from proving.chaos.load import LoadSpec, read_to_end
from proving.chaos.processes import hold
from rayq.client.cluster import Cluster
from rayq.core.cluster.topic_changes import QUEUES_TOPIC
from rayq.records import QueueInfo, TopicPartition

QUEUES = {"plain": False, "by-key": True}
"""True if the records of one key are handled in order."""
QUEUE_TOPICS = [QUEUES_TOPIC, *(f"{name}.dead" for name in QUEUES)]
WORKERS = 2
"""For each queue."""
TIMEOUT_S = 3.0
PAUSE_S = (2.0, 7.0)
KILL_SHARE, HANG_SHARE = 0.4, 0.35
"""The shares of the disturbed workers that are killed, and that hang. The others are cut off."""
WAKE_SHARE = 0.4
"""Probability, each time, that workers that hang resume."""
SETTLED_TIMEOUT_S = 180.0
END_TIMEOUT_S = 60.0


class QueueLoad:
    """See the module. Call `start`, then `finish`; `abort` in any case."""

    def __init__(self, spec: LoadSpec) -> None:
        self._spec = spec
        self._recorder = spec.recorder()
        self._rng = random.Random(f"{spec.seed}/queues")
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self._current: dict[tuple[str, int], Any] = {}
        """The newest process of each slot: a queue, and a number."""
        self._hanging: list[Any] = []
        self._woken: list[Any] = []
        """Stopped workers run on beside their successors, until others are woken."""
        self._is_calm = threading.Event()
        self._disturber = threading.Thread(target=self._disturb, daemon=True)
        self.counts: Counter[str] = Counter()
        """The events of the run, for people."""

    def start(self, cluster: Cluster) -> None:
        # A process that begins ignores it, too, until it listens.
        signal.signal(queue_workers.CUT_OFF, signal.SIG_IGN)
        for name, is_ordered in QUEUES.items():
            cluster.admin.create_queue(
                name,
                topic=self._spec.topic,
                visibility_timeout_s=TIMEOUT_S,
                max_deliveries=10,
                backoff_s=0.2,
                ordered_by_key=is_ordered,
            )
            # In the end the dead letters are counted.
            cluster.admin.alter_queue(f"{name}.dead", retention="topic")
            # Connections break all the time here, so no lock is sure to last.
            self._recorder.queue_opened(
                name,
                self._spec.topic,
                dead_letters=f"{name}.dead",
                timeout_s=0.0,
                ordered_by_key=is_ordered,
            )
            for number in range(WORKERS):
                self._begin((name, number))
        self._disturber.start()

    def finish(self, cluster: Cluster) -> list[str]:
        """Ends the workers once all is settled, and reads the dead letters. Raises TimeoutError."""
        self._is_calm.set()
        self._disturber.join()
        self._wake()
        wait_until(
            lambda: all(_is_settled(cluster.admin.describe_queue(name)) for name in QUEUES),
            SETTLED_TIMEOUT_S,
            lambda: f"not all is settled: {cluster.admin.describe_queues()}",
        )
        problems = self._end()
        for name in QUEUES:
            for records in read_to_end(cluster, [TopicPartition(f"{name}.dead", 0)]):
                self.counts["dead letters"] += len(records)
                self._recorder.found(records)
        return problems

    def abort(self) -> None:
        self._is_calm.set()
        for process in self._processes:
            process.kill()
            process.join()

    # --- the processes ----------------------------------------------------------------------------

    def _begin(self, slot: tuple[str, int]) -> None:
        self.counts["lives"] += 1
        queue, number = slot
        name = f"worker-{queue}-{number}.{self.counts['lives']}"
        process: Any = self._context.Process(
            target=queue_workers.live, args=(self._spec, queue, name), name=name, daemon=True
        )
        process.start()
        self._processes.append(process)
        self._current[slot] = process

    def _disturb(self) -> None:
        while not self._is_calm.wait(self._rng.uniform(*PAUSE_S)):
            if self._rng.random() < WAKE_SHARE:
                self._wake()
            slot = self._rng.choice([*self._current])
            process = self._current[slot]
            drawn = self._rng.random()
            if drawn >= KILL_SHARE + HANG_SHARE:
                self.counts["cut off"] += 1
                _signal(process, queue_workers.CUT_OFF)
                continue
            if drawn < KILL_SHARE:
                self.counts["killed"] += 1
                self._recorder.killed(process.name)
                process.kill()
                process.join()
            else:
                self.counts["hung"] += 1
                self._hanging.append(process)
                _signal(process, signal.SIGSTOP)
            self._begin(slot)

    def _wake(self) -> None:
        for process in self._woken:
            process.terminate()
        self._woken, self._hanging = self._hanging, []
        for process in self._woken:
            _signal(process, signal.SIGCONT)

    def _end(self) -> list[str]:
        problems = []
        for process in self._processes:
            if process.is_alive():
                process.terminate()
            process.join(END_TIMEOUT_S)
            if process.exitcode not in (0, -signal.SIGTERM, -signal.SIGKILL):  # None: still there
                problems.append(f"{process.name} ended with {process.exitcode}.")
        return problems


def _is_settled(queue: QueueInfo) -> bool:
    return all(
        partition.start_offset is not None and partition.start_offset == partition.end_offset
        for partition in queue.partitions
    )


def _signal(process: Any, number: signal.Signals) -> None:
    for victim in hold([process.pid]):
        with victim:
            victim.send(number)
