"""The processes of clients with transactions, which never import Ray.

*Copiers* are the members of a group: each copies the records of the topic under load to `copies`,
its positions in the same transaction. *Writers* write `pairs`: a transaction has some records in
several partitions; some abort. The *reader* reads what is committed; the *cutter* takes snapshots
over all partitions, and reads them.

Each process has a file of its own, and writes there what it will do before it does it: what became
of a transaction whose process was killed is known by the last line that is whole.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from proving.chaos.load import LoadSpec
from rayq.batch.offset_ranges import snapshot
from rayq.batch.range_reader import read_range
from rayq.client.cluster import Cluster
from rayq.client.producing.producer import Producer
from rayq.client.producing.transaction import Transaction
from rayq.errors import (
    MaxPollIntervalError,
    PartitionOfflineError,
    ProducerFencedError,
    TimeoutError,
    TransactionAbortedError,
    TransactionOutcomeUnknownError,
)
from rayq.records import Record, TopicPartition

GROUP = "copiers"
PAIRS, COPIES = "pairs", "copies"
OUTPUT_PARTITIONS = 3
OUTPUTS = [
    TopicPartition(topic, number)
    for topic in (PAIRS, COPIES)
    for number in range(OUTPUT_PARTITIONS)
]
TRANSACTION_TIMEOUTS_MS = (4_000, 15_000)
WANTED_ABORT_SHARE = 0.1
CUT_RECORDS_PER_S = 2000
"""The longer a snapshot is, the longer the pause after it: histories have to fit in memory."""


class Life:
    """One process: its name is the slot, which is its transactional id, and a number."""

    def __init__(self, spec: LoadSpec, name: str) -> None:
        self.spec = spec
        self.name = name
        self.rng = random.Random(f"{spec.seed}/{name}")
        self.is_ending = False
        self._count = 0
        self._history = f"{spec.history}.{name}"

    def note(self, *event: Any) -> None:
        with open(self._history, "ab") as file:
            file.write(json.dumps(event).encode() + b"\n")

    def producer(self, cluster: Cluster) -> Producer:
        return cluster.producer(
            transactional_id=self.name.partition(".")[0],
            transaction_timeout_ms=self.rng.choice(TRANSACTION_TIMEOUTS_MS),
        )

    def run(self, block: Transaction, work: Callable[[Transaction, str], None]) -> None:
        """Runs one transaction. `work` notes and sends its records. Raises ProducerFencedError."""
        self._count += 1
        name = f"{self.name}/{self._count}"
        self.note("begun", name)
        try:
            with block as transaction:
                work(transaction, name)
                if self.rng.random() < WANTED_ABORT_SHARE:
                    raise _WantedAbortError
                self.note("ended", name, "unknown")
        except (TransactionAbortedError, _WantedAbortError):
            self.note("ended", name, "aborted")
        except ProducerFencedError:
            self.note("ended", name, "aborted")
            raise
        except (TransactionOutcomeUnknownError, TimeoutError) as error:
            self.note("failed", f"{type(error).__name__}: {error}")
        else:
            self.note("ended", name, "committed")


class _WantedAbortError(Exception):
    """Ends a block without a commit."""


def live(work: Callable[[Life, Cluster], None], spec: LoadSpec, name: str) -> None:
    """The work of a process, until SIGTERM, or until its transactional id is another's."""
    life = Life(spec, name)

    def end(_number: int, _frame: FrameType | None) -> None:
        life.is_ending = True

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end)
    try:
        with spec.connect() as cluster:
            work(life, cluster)
    except ProducerFencedError as error:
        life.note("failed", f"{type(error).__name__}: {error}")


def write(life: Life, cluster: Cluster) -> None:
    def send(transaction: Transaction, name: str) -> None:
        values = [f"{name} {number}" for number in range(life.rng.randint(1, 8))]
        life.note("sending", name, [(value, None) for value in values])
        for value in values:
            partition = life.rng.randrange(OUTPUT_PARTITIONS)
            transaction.send(PAIRS, value.encode(), partition=partition)
        time.sleep(life.rng.uniform(0, 0.1))

    with life.producer(cluster) as producer:
        while not life.is_ending:
            life.run(producer.transaction(), send)
            time.sleep(life.rng.uniform(0, 0.1))


def copy(life: Life, cluster: Cluster) -> None:
    def send(transaction: Transaction, name: str) -> None:
        try:
            records = consumer.poll(timeout_s=0.5)
        except MaxPollIntervalError:  # The process was stopped for long.
            raise _WantedAbortError from None
        copies = [(f"{name} of {place(record)}", place(record)) for record in records]
        life.note("sending", name, copies)
        for record, (value, _) in zip(records, copies, strict=True):
            transaction.send(COPIES, value.encode(), key=record.key)

    consumer = cluster.consumer(life.spec.topic, group=GROUP, auto_offset_reset="earliest")
    with consumer, life.producer(cluster) as producer:
        while not life.is_ending:
            life.run(producer.transaction(reads=consumer), send)


def place(record: Record) -> str:
    return f"{record.topic}-{record.partition}@{record.offset}"


def read(life: Life, cluster: Cluster) -> None:
    with cluster.consumer(auto_offset_reset="earliest") as consumer:
        consumer.assign(OUTPUTS)
        while not life.is_ending:
            records = consumer.poll(timeout_s=0.5)
            life.note("read", [record.value.decode() for record in records if record.value])


def cut(life: Life, cluster: Cluster) -> None:
    while not life.is_ending:
        try:
            values = [
                value.decode()
                for split in snapshot(cluster, [PAIRS, COPIES])
                for batch in read_range(cluster, split, columns=["value"])
                for value in batch.column("value").to_pylist()
            ]
        except (PartitionOfflineError, TimeoutError) as error:
            life.note("failed", f"{type(error).__name__}: {error}")
            continue
        life.note("cut", values)
        next_s = time.monotonic() + 1.0 + len(values) / CUT_RECORDS_PER_S
        while not life.is_ending and time.monotonic() < next_s:
            time.sleep(0.1)
