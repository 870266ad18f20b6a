"""Clients with transactions beside the load of a chaos run: starts their processes, kills them and
lets them hang, and judges what they saw.

A process that is killed, or that hangs, gets a successor with its transactional id at once. One
that hung continues later, and must not write any more.
"""

from __future__ import annotations

import glob
import json
import multiprocessing
import random
import signal
import threading
from collections import Counter
from typing import Any

from proving.chaos import transaction_clients
from proving.chaos.cluster import REPLICAS, wait_until
from proving.chaos.load import LoadSpec, read_to_end
from proving.chaos.processes import hold
from proving.chaos.transaction_clients import (
    COPIES,
    GROUP,
    OUTPUT_PARTITIONS,
    OUTPUTS,
    PAIRS,
    place,
)
from rayq.client.cluster import Cluster
from rayq.core.cluster.topic_changes import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from rayq.testing.checker.transactions import TransactionHistory

TRANSACTION_TOPICS = [PAIRS, COPIES, TRANSACTIONS_TOPIC, OFFSETS_TOPIC]
SLOTS = {
    "copier-0": transaction_clients.copy,
    "copier-1": transaction_clients.copy,
    "writer-0": transaction_clients.write,
    "writer-1": transaction_clients.write,
    "reader": transaction_clients.read,
    "cutter": transaction_clients.cut,
}
DISTURBED = [slot for slot in SLOTS if slot.startswith(("copier", "writer"))]
PAUSE_S = (1.0, 6.0)
KILL_SHARE = 0.6
"""The share of the disturbed processes that are killed. The others hang."""
WAKE_SHARE = 0.3
"""Probability, each time, that processes that hang resume."""
CATCH_UP_TIMEOUT_S = 120.0
END_TIMEOUT_S = 60.0


class TransactionLoad:
    """See the module. Call `start`, then `finish`; `abort` in any case."""

    def __init__(self, spec: LoadSpec) -> None:
        self._spec = spec
        self._rng = random.Random(f"{spec.seed}/slots")
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self._current: dict[str, Any] = {}
        """The newest process of each slot."""
        self._hanging: list[Any] = []
        self._is_calm = threading.Event()
        self._disturber = threading.Thread(target=self._disturb, daemon=True)
        self.counts: Counter[str] = Counter()
        """The events of the run, for people."""

    def start(self, cluster: Cluster) -> None:
        for topic in (PAIRS, COPIES):
            cluster.create_topic(topic, OUTPUT_PARTITIONS, REPLICAS)
        with cluster.producer(transactional_id="first") as producer, producer.transaction():
            pass  # Makes the topic of the coordinators.
        for slot in SLOTS:
            self._begin(slot)
        self._disturber.start()

    def finish(self, cluster: Cluster) -> list[str]:
        """Ends the clients once all is copied, reads everything, and tells what is wrong. Raises
        TimeoutError."""
        self._is_calm.set()
        self._disturber.join()
        self._wake()
        problems = self._end("writer")
        wait_until(
            lambda: self._is_all_copied(cluster),
            CATCH_UP_TIMEOUT_S,
            lambda: f"not all is copied: {cluster.admin.describe_group(GROUP)}",
        )
        problems += self._end("copier")
        with (
            cluster.consumer() as committed,
            cluster.consumer(isolation_level="read_uncommitted") as everything,
        ):
            wait_until(
                lambda: committed.end_offsets(OUTPUTS) == everything.end_offsets(OUTPUTS),
                CATCH_UP_TIMEOUT_S,
                lambda: f"transactions are not decided: {cluster.admin.list_transactions()}",
            )
        problems += self._end("reader") + self._end("cutter")
        return problems + self._judge(cluster).faults()

    def _is_all_copied(self, cluster: Cluster) -> bool:
        """The lag of the whole group is not enough: a partition of which no copier has committed
        anything yet has none that is known."""
        partitions = cluster.admin.describe_group(GROUP).partitions
        return all(
            place in partitions and partitions[place].lag == 0 for place in self._spec.places
        )

    def abort(self) -> None:
        self._is_calm.set()
        for process in self._processes:
            process.kill()
            process.join()

    # --- the processes ----------------------------------------------------------------------------

    def _begin(self, slot: str) -> None:
        self.counts["lives"] += 1
        name = f"{slot}.{self.counts['lives']}"
        process: Any = self._context.Process(
            target=transaction_clients.live,
            args=(SLOTS[slot], self._spec, name),
            name=name,
            daemon=True,
        )
        process.start()
        self._processes.append(process)
        self._current[slot] = process

    def _disturb(self) -> None:
        while not self._is_calm.wait(self._rng.uniform(*PAUSE_S)):
            if self._rng.random() < WAKE_SHARE:
                self._wake()
            slot = self._rng.choice(DISTURBED)
            process = self._current[slot]
            if self._rng.random() < KILL_SHARE:
                self.counts["killed"] += 1
                process.kill()
                process.join()
            else:
                self.counts["hung"] += 1
                self._hanging.append(process)
                _signal(process, signal.SIGSTOP)
            self._begin(slot)

    def _wake(self) -> None:
        for process in self._hanging:
            _signal(process, signal.SIGCONT)
        self._hanging.clear()

    def _end(self, kind: str) -> list[str]:
        problems = []
        for process in self._processes:
            if not process.name.startswith(kind):
                continue
            process.terminate()
            process.join(END_TIMEOUT_S)
            if process.exitcode not in (0, -signal.SIGTERM, -signal.SIGKILL):  # None: still there
                problems.append(f"{process.name} ended with {process.exitcode}.")
        return problems

    # --- the judgement ----------------------------------------------------------------------------

    def _judge(self, cluster: Cluster) -> TransactionHistory:
        history = TransactionHistory()
        for path in sorted(glob.glob(f"{glob.escape(self._spec.history)}.*")):
            with open(path, "rb") as file:
                for line in file:
                    if line.endswith(b"\n"):  # The process was killed while it wrote the last one.
                        self._take(history, json.loads(line))
        for records in read_to_end(cluster, OUTPUTS):
            history.read_in_the_end(record.value for record in records if record.value)
        for records in read_to_end(cluster, self._spec.places):
            for record in records:
                history.input(place(record).encode())
        for transaction in history.transactions.values():
            if transaction.values:
                self.counts[transaction.outcome] += 1
        self.counts["copied"] = len(history.inputs)
        self.counts["snapshots"] = len(history.cuts)
        return history

    def _take(self, history: TransactionHistory, event: list[Any]) -> None:
        match event:
            case "begun", name:
                history.begun(name)
            case "sending", name, values:
                for value, made_of in values:
                    history.sending(name, value.encode(), made_of and made_of.encode())
            case "ended", name, outcome:
                history.ended(name, outcome)
            case "read", values:
                history.read(value.encode() for value in values)
            case "cut", values:
                history.cut(value.encode() for value in values)
            case "failed", what:
                self.counts[what.partition(":")[0]] += 1


def _signal(process: Any, number: signal.Signals) -> None:
    for victim in hold([process.pid]):
        with victim:
            victim.send(number)
