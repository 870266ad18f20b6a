"""`python -m proving.chaos --hostile`: ten honest clients, now alone, now beside ten hostile
ones; exit code 1 unless nothing was lost, writes took about as long in both, and the servers'
memory stayed flat.

Honest clients are eight producers (acks="all") and two consumers with connections of their own. The
run alternates: a calm minute, a hostile minute. `attacks.py` says what the hostile ones do.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from proving.chaos import attacks
from proving.chaos.cluster import PARTITIONS, REPLICAS, TOPIC, ChaosCluster
from proving.chaos.guard import Guard
from proving.chaos.load import LoadSpec, read_all
from proving.chaos.measure import Times, times_of
from proving.chaos.processes import MARK, marked
from rayq.client.cluster import Cluster
from rayq.errors import DeliveryError, RayqError
from rayq.records import RecordMetadata, TopicPartition
from rayq.testing.checker import Verdict, check, read_history

PRODUCERS = 8
CONSUMERS = 2
RECORDS_PER_S = 400
WARM_UP_S = 10.0
PHASE_S = 60.0
SAMPLE_S = 2.0
HOSTILE_TOPIC = "hostile"
P99_RATIO_MAX = 2.0
MEMORY_RATIO_MAX = 1.25
MEMORY_SLACK_BYTES = 100 * 1024**2
"""Besides the ratio, the servers may hold this many bytes more in the last calm phase than in the
calm phase after the first hostile one: a process keeps memory that it has once needed."""
HISTORY = "history.jsonl"
FINISH_TIMEOUT_S = 120.0
_SERVERS = ("ray::ReplicaHost", "ray::Broker", "ray::Controller")


@dataclass
class Phase:
    """One stretch of time, with hostile clients or without."""

    is_hostile: bool
    started_s: float
    ended_s: float = 0.0
    memory_bytes: list[int] = field(default_factory=list)
    """The memory of all server processes together, measured every two seconds."""


@dataclass
class Outcome:
    """The result of a run."""

    seed: int
    phases: list[Phase] = field(default_factory=list)
    latencies: list[tuple[float, float]] = field(default_factory=list)
    """The writes as `(sent, acknowledged)`, times of `time.monotonic`."""
    rounds: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    verdict: Verdict | None = None

    @property
    def holds(self) -> bool:
        return self.verdict is not None and self.verdict.is_clean and not self.problems

    def times(self, *phases: Phase) -> Times | None:
        """The latencies of the writes that were sent in these phases."""
        spans = [(phase.started_s, phase.ended_s) for phase in phases]
        return times_of(
            acknowledged - sent
            for sent, acknowledged in self.latencies
            if any(start <= sent < end for start, end in spans)
        )

    @property
    def p99_ratio(self) -> float | None:
        """The median, over the hostile phases, of the phase's p99 divided by that of the two calm
        phases beside it. Other work of the machine is in all three, or in few of the triples."""
        ratios = []
        for before, hostile, after in zip(
            self.phases[::2], self.phases[1::2], self.phases[2::2], strict=False
        ):
            calm, beside = self.times(before, after), self.times(hostile)
            if calm is not None and beside is not None:
                ratios.append(beside.p99_s / calm.p99_s)
        return statistics.median(ratios) if ratios else None


def run(minutes: float, seed: int, say: Callable[[str], None], leniency: float = 1.0) -> Outcome:
    """Runs the scenario. However the run ends, no process of it is left."""
    run_id = uuid.uuid4().hex
    os.environ[MARK] = run_id
    directory = Path(tempfile.mkdtemp(prefix="rayq-hostile-"))
    guard = Guard(run_id)
    outcome = Outcome(seed)
    try:
        _run(minutes, directory, run_id, outcome, say)
        outcome.problems += _judge(outcome, leniency)
    except (RayqError, TimeoutError) as error:
        outcome.problems.append(f"The run ended early: {type(error).__name__}: {error}")
    finally:
        if not guard.close():
            outcome.problems.append("Some processes of the run would not end.")
        del os.environ[MARK]
        shutil.rmtree(directory)
    return outcome


def _run(
    minutes: float, directory: Path, run_id: str, outcome: Outcome, say: Callable[[str], None]
) -> None:
    cluster = ChaosCluster(directory / "data")
    honest: _Clients | None = None
    try:
        say("starting a Ray head and three nodes with a broker each")
        cluster.start()
        cluster.rayq.create_topic(
            HOSTILE_TOPIC, partitions=1, replication_factor=REPLICAS, retention_bytes=64 * 1024**2
        )
        spec = LoadSpec(
            addresses=",".join(cluster.rayq.addresses),
            token=cluster.rayq.token,
            topic=TOPIC,
            partitions=PARTITIONS,
            history=str(directory / HISTORY),
            records_per_s=RECORDS_PER_S,
            seed=outcome.seed,
        )
        honest = _Clients(partial(_honest, spec))
        time.sleep(WARM_UP_S)
        end_s = time.monotonic() + minutes * 60
        while time.monotonic() < end_s:
            for is_hostile in (False, True):
                _phase(cluster, run_id, outcome, is_hostile, say)
        _phase(cluster, run_id, outcome, False, say)
        say("stopping the clients; reading everything")
        latencies, problems = honest.finish()
        outcome.latencies = latencies
        outcome.problems += problems
        read_all(cluster.rayq, spec)
        with open(spec.history, "rb") as file:
            outcome.verdict = check(read_history(file))
        cluster.stop()
    finally:
        if honest is not None:
            honest.abort()
        cluster.close()


def _phase(
    cluster: ChaosCluster,
    run_id: str,
    outcome: Outcome,
    is_hostile: bool,
    say: Callable[[str], None],
) -> None:
    hostile: _Clients | None = None
    if is_hostile:
        hostile = _Clients(partial(attacks.serve, _targets(cluster, outcome.seed)), is_idle=True)
    phase = Phase(is_hostile, time.monotonic())
    outcome.phases.append(phase)
    while time.monotonic() < phase.started_s + PHASE_S:
        time.sleep(SAMPLE_S)
        phase.memory_bytes.append(_memory_bytes(run_id))
    phase.ended_s = time.monotonic()
    mib = [size // 1024**2 for size in phase.memory_bytes]
    say(f"{'hostile' if is_hostile else 'calm'}: servers hold {min(mib)} to {max(mib)} MiB")
    if hostile is not None:
        outcome.rounds.update(hostile.finish())
        hostile.abort()


def _targets(cluster: ChaosCluster, seed: int) -> attacks.Targets:
    def leaders(topic: str) -> tuple[attacks.Leader, ...]:
        info = cluster.rayq.admin.describe_topic(topic)
        return tuple(
            attacks.Leader(
                replica.host,
                replica.port,
                info.topic_id,
                partition.partition,
                partition.leader_epoch,
            )
            for partition in info.partitions
            for replica in partition.replicas
            if replica.broker == partition.leader and replica.host and replica.port
        )

    brokers = tuple(
        (host, int(port)) for host, _, port in (at.rpartition(":") for at in cluster.rayq.addresses)
    )
    return attacks.Targets(
        cluster.rayq.token, brokers, leaders(TOPIC), leaders(HOSTILE_TOPIC), seed
    )


def _memory_bytes(run_id: str) -> int:
    """Resident bytes of the servers of this run."""
    total = 0
    for pid in marked(run_id):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            if title.startswith(_SERVERS):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total * os.sysconf("SC_PAGE_SIZE")


def _judge(outcome: Outcome, leniency: float) -> list[str]:
    problems = []
    ratio = outcome.p99_ratio
    if ratio is None:
        problems.append("There were no honest writes to compare.")
    elif ratio > P99_RATIO_MAX * leniency:
        problems.append(
            f"Honest writes took {ratio:.2f} times as long (p99) beside hostile clients, more than "
            f"{P99_RATIO_MAX:g} times."
        )
    calm = [phase.memory_bytes for phase in outcome.phases if not phase.is_hostile]
    first, last = (sum(sizes) / len(sizes) for sizes in (calm[1], calm[-1]))
    if last > first * MEMORY_RATIO_MAX + MEMORY_SLACK_BYTES:
        problems.append(
            f"The servers held {first / 1024**2:.0f} MiB after the first hostile phase and "
            f"{last / 1024**2:.0f} MiB in the end."
        )
    return problems


def lines(outcome: Outcome) -> list[str]:
    """The report of a run."""
    told = []
    for name, is_hostile in (("calm", False), ("hostile", True)):
        phases = [phase for phase in outcome.phases if phase.is_hostile == is_hostile]
        times = outcome.times(*phases)
        sizes = [size for phase in phases for size in phase.memory_bytes]
        if times is not None and sizes:
            told.append(
                f"{name}: {times.n} writes, p50 {times.p50_s * 1000:.1f} ms, p99 "
                f"{times.p99_s * 1000:.1f} ms, max {times.max_s * 1000:.0f} ms; servers held "
                f"{min(sizes) // 1024**2} to {max(sizes) // 1024**2} MiB"
            )
    if outcome.p99_ratio is not None:
        told.append(
            f"p99 beside hostile clients: {outcome.p99_ratio:.2f} times that of the calm minutes "
            "around them (median)"
        )
    told.append("rounds: " + ", ".join(f"{name} {n}" for name, n in outcome.rounds.items()))
    told += outcome.problems
    if outcome.verdict is not None:
        told.append(str(outcome.verdict))
    told.append("All of it held." if outcome.holds else "Not all of it held.")
    return told


# --- clients in processes of their own ------------------------------------------------------------


class _Clients:
    """One process of clients, which runs `work(pipe)`. It ends when it is told to, and then
    answers. The constructor returns once the work begins. With `is_idle` the process gets only the
    processor time that no other process wants."""

    def __init__(self, work: Callable[[Connection], None], *, is_idle: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_begin, args=(work, there), daemon=True)
        self._process.start()
        there.close()
        if is_idle:  # Before its first import, which alone would cost the others half a second.
            assert self._process.pid is not None
            os.sched_setscheduler(self._process.pid, os.SCHED_IDLE, os.sched_param(0))
        self._expect()

    def finish(self) -> Any:
        """Raises TimeoutError."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send("stop")
        return self._expect()

    def _expect(self) -> Any:
        with contextlib.suppress(EOFError):
            if self._pipe.poll(FINISH_TIMEOUT_S):
                return self._pipe.recv()
        raise TimeoutError("A process of clients did not begin or end as it should.")

    def abort(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _begin(work: Callable[[Connection], None], pipe: Connection) -> None:
    pipe.send("begins")
    work(pipe)


def _honest(spec: LoadSpec, pipe: Connection) -> None:
    stop = threading.Event()
    recorder = spec.recorder()
    latencies: list[tuple[float, float]] = []
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
            latencies.append((sent_s, time.monotonic()))
        else:
            problems.append(f"{name}: a record was not written: {error}")

    def produce(cluster: Cluster, name: str) -> None:
        rng = random.Random(f"{spec.seed}/{name}")
        recorder.opened(name)
        producer = cluster.producer(linger_ms=0)
        count = 0
        while not stop.wait(rng.expovariate(spec.records_per_s / PRODUCERS)):
            count += 1
            key, value = (
                b"%s-%d" % (name.encode(), rng.randrange(20)),
                b"%s/%d" % (name.encode(), count),
            )
            number = recorder.sending(name, spec.topic, key, value)
            on_delivery = partial(note, name, number, time.monotonic())
            producer.send(spec.topic, value, key=key, on_delivery=on_delivery)
        try:
            producer.close()
        except DeliveryError as error:
            problems.append(f"{name}: {error}")

    def consume(cluster: Cluster, name: str) -> None:
        with cluster.consumer(auto_offset_reset="earliest") as consumer:
            consumer.assign([TopicPartition(*place) for place in spec.places])
            for place in spec.places:
                recorder.assigned(name, *place)
            while not stop.is_set():
                recorder.polled(name, consumer.poll(timeout_s=0.5))

    def client(work: Callable[[Cluster, str], None], name: str) -> None:
        try:
            with spec.connect() as cluster:
                work(cluster, name)
        except RayqError as error:
            problems.append(f"{name} failed with {type(error).__name__}: {error}")

    works = [(produce, f"producer-{number}") for number in range(PRODUCERS)]
    works += [(consume, f"consumer-{number}") for number in range(CONSUMERS)]
    threads = [threading.Thread(target=client, args=arguments) for arguments in works]
    for thread in threads:
        thread.start()
    try:
        pipe.recv()
    except EOFError:
        os._exit(1)
    stop.set()
    for thread in threads:
        thread.join()
    pipe.send((latencies, problems[:20]))
