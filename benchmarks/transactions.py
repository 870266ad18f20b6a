"""What transactions cost, beside the same load without them, on one cluster in one run.

    python -m benchmarks.transactions

Three brokers in this process, replication factor 3, acks="all". Loads alternate, so that whatever
else the machine does meets both. The shares of processor time say more than those of wall clock
where the machine has other work: they are in the notes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import machine
from benchmarks.report import Row, table, wide_console
from rayq import Cluster, Consumer, ManyDeliveryFuture, Producer, TopicPartition, Transaction
from rayq.testing import LocalCluster

PARTITIONS = 6
RECORDS = 400_000
CHUNK = 2_000
VALUE = b"v" * 100
COMMIT_INTERVAL_S = 0.1
ROUNDS = 5
COMMITS = 100
PRODUCERS = 8
SMALL = 50
RECORDS_OF_A_COMMIT = 100
TIMEOUT_S = 120


def transactions(directory: Path) -> list[Row]:
    with LocalCluster(brokers=3, data_dir=str(directory / "transactions")) as cluster:
        for topic in ("plain", "committed", "small"):
            cluster.create_topic(topic, partitions=PARTITIONS, replication_factor=3)
        return [*writing(cluster), *reading(cluster), *latency(cluster), small(cluster)]


class Timed:
    """Wall clock and processor time of this process, all servers included, of several rounds."""

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.processor_s: list[float] = []

    def run(self, work: Callable[[], object]) -> None:
        began, processor = time.perf_counter(), time.process_time()
        work()
        self.wall_s.append(time.perf_counter() - began)
        self.processor_s.append(time.process_time() - processor)

    def rates(self, records: int) -> list[float]:
        return [records / each for each in self.wall_s]


def ratio_row(name: str, of: Timed, beside: Timed, baseline: str, target: float) -> Row:
    """How fast `of` was; its ratio to `beside` is the median over the rounds."""
    wall = [b / a for a, b in zip(of.wall_s, beside.wall_s, strict=True)]
    processor = [b / a for a, b in zip(of.processor_s, beside.processor_s, strict=True)]
    return Row(
        name=name,
        unit="records/s",
        samples=of.rates(RECORDS),
        ratio=statistics.median(wall),
        target_ratio=target,
        note=f"of {baseline}; by processor time {statistics.median(processor):.2f}",
    )


# --- throughput -----------------------------------------------------------------------------------


def send_plain(producer: Producer) -> None:
    for _ in range(RECORDS // CHUNK):
        producer.send_many("plain", [VALUE] * CHUNK)
    producer.flush(TIMEOUT_S)


def send_committed(producer: Producer) -> None:
    """A commit each 100 ms, while one thread sends."""
    left = RECORDS // CHUNK
    while left:
        until = time.perf_counter() + COMMIT_INTERVAL_S
        with producer.transaction() as tx:
            while left and time.perf_counter() < until:
                tx.send_many("committed", [VALUE] * CHUNK)
                left -= 1


def writing(cluster: Cluster) -> list[Row]:
    plain, committed = Timed(), Timed()
    with cluster.producer() as one, cluster.producer(transactional_id="bench") as other:
        for number in range(ROUNDS + 1):
            for timed, work in (
                (plain, lambda: send_plain(one)),
                (committed, lambda: send_committed(other)),
            ):
                (Timed() if number == 0 else timed).run(work)  # the first round warms up
    return [
        Row(name="idempotent sends, 6 partitions", unit="records/s", samples=plain.rates(RECORDS)),
        ratio_row("with a commit each 100 ms", committed, plain, "idempotent sends", 0.9),
    ]


# --- reading --------------------------------------------------------------------------------------


def read(cluster: Cluster, isolation_level: str) -> None:
    """Raw tables, so that the client's decoding of records does not hide the difference."""
    places = [TopicPartition("committed", one) for one in range(PARTITIONS)]
    consumer: Consumer = cluster.consumer(
        auto_offset_reset="earliest",
        isolation_level=isolation_level,  # type: ignore[arg-type]
    )
    with consumer:
        consumer.assign(places)
        consumer.seek_to_beginning(*places)
        left = RECORDS
        while left > 0:
            left -= consumer.poll_arrow(TIMEOUT_S, 50_000).num_rows


def reading(cluster: Cluster) -> list[Row]:
    everything, committed = Timed(), Timed()
    for number in range(ROUNDS + 1):
        for timed, level in ((everything, "read_uncommitted"), (committed, "read_committed")):
            kept = Timed() if number == 0 else timed
            kept.run(lambda level=level: read(cluster, level))  # type: ignore[misc]
    return [
        Row(name="reading all, as Arrow", unit="records/s", samples=everything.rates(RECORDS)),
        ratio_row("reading committed, as Arrow", committed, everything, "reading all", 0.95),
    ]


# --- latency --------------------------------------------------------------------------------------


def latency(cluster: Cluster) -> list[Row]:
    """Transactions of 100 records in each of the partitions beside one record with acks="all". The
    end of a block, with its last records still to be delivered; and all of a short one, whose
    partitions have to join it first."""
    single_ms: list[float] = []
    six_ms: list[float] = []
    commit_ms: list[float] = []
    decided_ms: list[float] = []
    whole_ms: list[float] = []
    with (
        cluster.producer() as one,
        cluster.producer(transactional_id="latency") as other,
        cluster.producer(transactional_id="decided", commit_wait_ms=0) as hasty,
    ):
        for number in range(COMMITS):
            began = time.perf_counter()
            one.send_and_wait("plain", VALUE, partition=number % PARTITIONS)
            single_ms.append((time.perf_counter() - began) * 1000)
            began = time.perf_counter()
            for sent in send_to_all(one, 10, "plain"):
                sent.result(TIMEOUT_S)
            six_ms.append((time.perf_counter() - began) * 1000)
            for producer, taken_ms in ((other, commit_ms), (hasty, decided_ms)):
                with producer.transaction() as tx:
                    for sent in send_to_all(tx, RECORDS_OF_A_COMMIT - 10):
                        sent.result(TIMEOUT_S)
                    send_to_all(tx, 10)
                    began = time.perf_counter()
                taken_ms.append((time.perf_counter() - began) * 1000)
            began = time.perf_counter()
            with other.transaction() as tx:
                send_to_all(tx, RECORDS_OF_A_COMMIT)
            whole_ms.append((time.perf_counter() - began) * 1000)
    write_ms = statistics.median(single_ms)
    return [
        Row(name='one write, acks="all", p50', unit="ms", samples=[write_ms], better="lower"),
        Row(
            name="one write to each of 6 partitions, p50",
            unit="ms",
            samples=[statistics.median(six_ms)],
            better="lower",
        ),
        Row(
            name="commit of 6 x 100 records, of which 10 are under way, p50",
            unit="ms",
            samples=[statistics.median(commit_ms)],
            target=4 * write_ms,
            better="lower",
            note="the target is four times one write of this run",
        ),
        Row(
            name="the same with commit_wait_ms=0, p50",
            unit="ms",
            samples=[statistics.median(decided_ms)],
            target=4 * write_ms,
            better="lower",
        ),
        Row(
            name="all of a transaction of 6 x 100 records, p50",
            unit="ms",
            samples=[statistics.median(whole_ms)],
            target=5 * write_ms,
            better="lower",
            note="the target is five times one write of this run",
        ),
    ]


def send_to_all(
    sender: Transaction | Producer, each: int, topic: str = "small"
) -> list[ManyDeliveryFuture]:
    return [
        sender.send_many(topic, [VALUE] * each, partition=partition)
        for partition in range(PARTITIONS)
    ]


def small(cluster: Cluster) -> Row:
    def commit_each(number: int) -> None:
        with cluster.producer(transactional_id=f"small-{number}") as producer:
            for _ in range(SMALL):
                with producer.transaction() as tx:
                    tx.send("small", VALUE)

    began = time.perf_counter()
    with ThreadPoolExecutor(PRODUCERS) as pool:
        list(pool.map(commit_each, range(PRODUCERS)))
    took_s = time.perf_counter() - began
    return Row(
        name=f"transactions of one record, {PRODUCERS} producers in all",
        unit="transactions/s",
        samples=[PRODUCERS * SMALL / took_s],
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        rows = transactions(Path(directory))
    wide_console().print(table(rows, machine.describe()))


if __name__ == "__main__":
    main()
