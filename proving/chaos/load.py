"""Clients at load, in processes of their own that never import Ray.

Three idempotent producers (acks="all", keyed records, delivery timeouts from short to the default)
and two consumers: one reads on and on, the other jumps back now and then and reads again. All write
down what they do and see in one history file.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from rayq.client.cluster import Cluster
from rayq.client.consuming.consumer import Consumer
from rayq.errors import DeliveryError, RayqError
from rayq.records import Record, RecordMetadata, TopicPartition
from rayq.testing.checker import Recorder
from rayq.wire.authentication import client_key_of

DELIVERY_TIMEOUTS_MS = (4_000, 15_000, 120_000)
"""The timeout of each producer. The shortest ends during some faults."""
KEYS_MIN = 20
"""Number of keys of a producer, if there are not more partitions."""
ROUND_S = 0.01
"""The pause of a producer after it has sent some records."""
VALUE_BYTES = (20, 120)
CONSUMERS = 2
AGAIN_S = (5.0, 15.0)
"""The second consumer jumps back after this time."""
AGAIN_RECORDS_MAX = 2000
CATCH_UP_TIMEOUT_S = 60.0
FINISH_TIMEOUT_S = 180.0
READ_TIMEOUT_S = 300.0
"""The limit for reading all records at the end."""


@dataclass(frozen=True)
class LoadSpec:
    """The arguments of the clients' processes."""

    addresses: str
    token: str = field(repr=False)
    topic: str
    partitions: int
    history: str
    records_per_s: int
    seed: int
    clients: str = ""
    """The prefix of the names of the clients, where a run has several loads."""

    @property
    def places(self) -> list[TopicPartition]:
        return [TopicPartition(self.topic, number) for number in range(self.partitions)]

    def connect(self) -> Cluster:
        return Cluster(self.addresses.split(","), key=client_key_of(self.token))

    def recorder(self) -> Recorder:
        """A recorder that appends to the history, with one write for each event, so that processes
        may share the file."""
        return Recorder(open(self.history, "ab", buffering=0))


@dataclass
class Acknowledged:
    """The times at which the records of one partition were sent and acknowledged (`time.monotonic`,
    which is one clock for all processes of a machine), in the order of the acknowledgements."""

    sent_s: array[float] = field(default_factory=lambda: array("d"))
    acknowledged_s: array[float] = field(default_factory=lambda: array("d"))


@dataclass
class Finished:
    """The answer of a process of clients at its end."""

    acknowledged: list[Acknowledged]
    problems: list[str]


class Load:
    """Starts the clients. `finish` stops them and returns their answers."""

    def __init__(self, spec: LoadSpec) -> None:
        self.spec = spec
        self._context = multiprocessing.get_context("spawn")
        self._started: list[tuple[str, Any, Connection]] = []

    def start(self) -> None:
        for name, work in (("producers", run_producers), ("consumers", run_consumers)):
            here, there = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(work, self.spec, there), name=name, daemon=True
            )
            process.start()
            there.close()
            self._started.append((name, process, here))

    def wait_until_writing(self, cluster: Cluster) -> None:
        """Waits until each partition has a record: the first fault is to meet clients that have
        begun, not their start. Raises TimeoutError."""
        deadline_s = time.monotonic() + CATCH_UP_TIMEOUT_S
        with cluster.consumer() as consumer:
            while not all(consumer.end_offsets(self.spec.places).values()):
                if time.monotonic() > deadline_s:
                    raise TimeoutError(
                        f"After {CATCH_UP_TIMEOUT_S:.0f} s {self.spec.topic} has no record yet."
                    )
                time.sleep(0.1)

    def finish(self) -> Finished:
        """Stops the producers first, so that every record gets its outcome. Then the consumers read
        up to the end."""
        result = Finished([Acknowledged() for _ in range(self.spec.partitions)], [])
        for name, process, pipe in self._started:
            try:
                pipe.send("stop")
                if not pipe.poll(FINISH_TIMEOUT_S):
                    result.problems.append(f"The {name} did not end in {FINISH_TIMEOUT_S:.0f} s.")
                    continue
                finished: Finished = pipe.recv()
            except (EOFError, BrokenPipeError):
                result.problems.append(f"The process of the {name} ended by itself.")
                continue
            result.problems += finished.problems
            if finished.acknowledged:
                result.acknowledged = finished.acknowledged
            process.join(10)
        return result

    def abort(self) -> None:
        for _, process, pipe in self._started:
            process.kill()
            process.join()
            pipe.close()
        self._started = []


def read_all(cluster: Cluster, spec: LoadSpec) -> int:
    """One more consumer reads every partition. Returns the number of records. Raises
    TimeoutError."""
    recorder = spec.recorder()
    for place in spec.places:
        recorder.assigned("final-reader", *place, reads_all=True)
    count = 0
    for records in read_to_end(cluster, spec.places):
        recorder.polled("final-reader", records)
        count += len(records)
    return count


def read_to_end(cluster: Cluster, places: Sequence[TopicPartition]) -> Iterator[list[Record]]:
    """Reads every partition from its start up to its end. Raises TimeoutError."""
    with cluster.consumer(auto_offset_reset="earliest") as consumer:
        consumer.assign(places)
        ends = consumer.end_offsets(places)
        deadline_s = time.monotonic() + READ_TIMEOUT_S
        while any(consumer.position(place) < ends[place] for place in places):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{places} were not read to {ends} in {READ_TIMEOUT_S:.0f} s.")
            yield consumer.poll(timeout_s=1.0, max_records=5000)


# --- inside the processes -------------------------------------------------------------------------

Work = Callable[[LoadSpec, threading.Event], Finished]


def _serve(work: Work, spec: LoadSpec, pipe: Connection) -> None:
    """Runs `work` until the process is told to stop, or until its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop = threading.Event()
    done: list[Finished] = []
    runner = threading.Thread(target=lambda: done.append(work(spec, stop)), daemon=True)
    runner.start()
    try:
        pipe.recv()
    except EOFError:
        return
    stop.set()
    runner.join()
    pipe.send(done[0] if done else Finished([], ["A process of clients failed: see its output."]))


def run_producers(spec: LoadSpec, stop: threading.Event) -> Finished:
    recorder = spec.recorder()
    acknowledged = [Acknowledged() for _ in range(spec.partitions)]
    problems: list[str] = []

    def note(
        name: str,
        number: int,
        sent_s: float,
        metadata: RecordMetadata | None,
        error: BaseException | None,
    ) -> None:
        recorder.outcome(name, number, metadata, error)
        if metadata is not None:
            times = acknowledged[metadata.partition]
            times.sent_s.append(sent_s)
            times.acknowledged_s.append(time.monotonic())

    def produce(cluster: Cluster, name: str, delivery_timeout_ms: int) -> None:
        rng = random.Random(f"{spec.seed}/{name}")
        recorder.opened(name)
        producer = cluster.producer(acks="all", delivery_timeout_ms=delivery_timeout_ms)
        per_round = spec.records_per_s * ROUND_S / len(DELIVERY_TIMEOUTS_MS)
        owed, count, next_s = 0.0, 0, time.monotonic()
        keys = max(KEYS_MIN, spec.partitions)
        while not stop.wait(max(next_s - time.monotonic(), 0)):
            next_s += ROUND_S
            owed += per_round
            while owed >= 1:
                owed -= 1
                count += 1
                key = b"%s-%d" % (name.encode(), rng.randrange(keys))
                value = b"%s/%d " % (name.encode(), count)
                value = value.ljust(rng.randint(*VALUE_BYTES), b".")
                number = recorder.sending(name, spec.topic, key, value)
                on_delivery = partial(note, name, number, time.monotonic())
                try:
                    producer.send(spec.topic, value, key=key, on_delivery=on_delivery)
                except RayqError as error:
                    recorder.not_delivered(name, number, error)
        try:
            producer.close()
        except DeliveryError:
            pass  # The record's own outcome has the error.

    with spec.connect() as cluster:
        threads = [
            threading.Thread(
                target=_guarded,
                args=(
                    problems,
                    produce,
                    cluster,
                    f"{spec.clients}producer-{number}",
                    delivery_timeout_ms,
                ),
            )
            for number, delivery_timeout_ms in enumerate(DELIVERY_TIMEOUTS_MS)
        ]
        _run(threads)
    return Finished(acknowledged, problems)


def run_consumers(spec: LoadSpec, stop: threading.Event) -> Finished:
    recorder, places = spec.recorder(), spec.places
    problems: list[str] = []

    def consume(cluster: Cluster, name: str, jumps: bool) -> None:
        rng = random.Random(f"{spec.seed}/{name}")
        next_offsets = dict.fromkeys(places, 0)

        def poll(consumer: Consumer) -> None:
            records: list[Record] = consumer.poll(timeout_s=0.5)
            recorder.polled(name, records)
            for record in records:
                next_offsets[TopicPartition(record.topic, record.partition)] = record.offset + 1

        with cluster.consumer(auto_offset_reset="earliest") as consumer:
            consumer.assign(places)
            for place in places:
                recorder.assigned(name, *place)
            again_s = time.monotonic() + rng.uniform(*AGAIN_S)
            while not stop.is_set():
                if jumps and time.monotonic() > again_s:
                    again_s = time.monotonic() + rng.uniform(*AGAIN_S)
                    for place in places:
                        offset = max(0, next_offsets[place] - rng.randint(0, AGAIN_RECORDS_MAX))
                        consumer.seek(place, offset)
                        recorder.assigned(name, *place)
                poll(consumer)
            ends = consumer.end_offsets(places)
            deadline_s = time.monotonic() + CATCH_UP_TIMEOUT_S
            while any(next_offsets[place] < ends[place] for place in places):
                if time.monotonic() > deadline_s:
                    problems.append(f"{name} did not catch up: at {next_offsets} of {ends}.")
                    return
                poll(consumer)

    with spec.connect() as cluster:
        threads = [
            threading.Thread(
                target=_guarded,
                args=(
                    problems,
                    consume,
                    cluster,
                    f"{spec.clients}consumer-{number}",
                    number == CONSUMERS - 1,
                ),
            )
            for number in range(CONSUMERS)
        ]
        _run(threads)
    return Finished([], problems)


def _guarded(problems: list[str], work: Callable[..., None], *arguments: Any) -> None:
    """Records an error of a client as a problem of the run."""
    try:
        work(*arguments)
    except RayqError as error:
        problems.append(f"{arguments[1]} failed with {type(error).__name__}: {error}")


def _run(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
