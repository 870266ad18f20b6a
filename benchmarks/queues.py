"""What a queue takes and settles, beside an acknowledged write, and beside Celery with Redis.

    python -m benchmarks.queues [0.1] [--only put_to_handler celery]

Three brokers on a local Ray, replication factor 3, fdatasync, values of 100 bytes; consumers are
processes of their own. The argument is the share of the load to run, 1 by default. Celery and Redis
are installed into .bench/peers/celery, and run by `benchmarks.celery_side` while rayq's cluster is
down.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

import rayq
from benchmarks import celery_side, machine
from benchmarks.density import local_ray
from benchmarks.report import Row, table, wide_console

BROKERS = 3
VALUE = b"v" * 100
AT_ONCE = 500
ROUNDS = 3
RECORDS = 150_000
SINGLE_RECORDS = 40_000
ONE_BY_ONE = 300
PUTS_PER_S = 1_000
PUTS = 10_000
WARM_PUTS = 500
"""The first ones, which do not count: connections are opened, and a consumer finds its pace."""
TASKS = 10_000
KILLS = 3
WORKERS = 2
"""As many as Celery starts by default on two cores."""
IDLE_S = 0.1
TIMEOUT_S = 300.0
SPAWN: SpawnContext = multiprocessing.get_context("spawn")


# --- consumers ------------------------------------------------------------------------------------


def drain(cluster: rayq.Cluster, queue: str, at_once: int, pipe: Connection, done: Any) -> None:
    """A consumer's process. For each number that comes through the pipe it takes and acknowledges,
    until all consumers together have had so many records; answers when its last acknowledgement was
    durable, and None at first."""
    with cluster.queue(queue, prefetch=2 * AT_ONCE) as q:
        pipe.send(None)
        while (wanted := pipe.recv()) is not None:
            acked_s = time.monotonic()
            while done.value < wanted:
                had = 0
                while had < AT_ONCE and (tasks := q.take(at_once, timeout_s=IDLE_S)):
                    for task in tasks:
                        task.ack()
                    had += len(tasks)
                    acked_s = time.monotonic()
                with done.get_lock():
                    done.value += had
            began_s = time.monotonic()
            q.flush()
            # An empty take may have waited meanwhile: that is no work.
            pipe.send(acked_s + time.monotonic() - began_s)


@contextmanager
def started(
    work: Callable[..., None], count: int, *arguments: Any, last: tuple[Any, ...] = ()
) -> Iterator[list[Connection]]:
    """Processes that run `work(*arguments, pipe, *last)`, and have said that they are ready. At the
    end of the block they get None."""
    pipes, processes = [], list[SpawnProcess]()
    try:
        for _ in range(count):
            ours, theirs = SPAWN.Pipe()
            process = SPAWN.Process(target=work, args=(*arguments, theirs, *last))
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        for pipe in pipes:
            pipe.recv()
        yield pipes
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in processes:
            process.join(20)
            if process.is_alive():
                process.kill()


def fill(cluster: rayq.Cluster, topic: str, records: int) -> None:
    with cluster.producer() as producer:
        for _ in range(0, records, AT_ONCE):
            producer.send_many(topic, [VALUE] * AT_ONCE)
        producer.flush(TIMEOUT_S)


def rates(
    cluster: rayq.Cluster,
    queue: str,
    *,
    partitions: int,
    consumers: int,
    at_once: int,
    records: int,
) -> list[float]:
    """Records a second, taken and durably acknowledged, of each round but the first."""
    cluster.admin.create_queue(queue, partitions=partitions, replication_factor=BROKERS)
    records -= records % AT_ONCE
    done = SPAWN.Value("q", 0)
    found = []
    with started(drain, consumers, cluster, queue, at_once, last=(done,)) as pipes:
        for number in range(1, ROUNDS + 2):
            fill(cluster, queue, records)
            began_s = time.monotonic()
            for pipe in pipes:
                pipe.send(number * records)
            found.append(records / (max(pipe.recv() for pipe in pipes) - began_s))
    return found[1:]


def throughput(cluster: rayq.Cluster, share: float) -> list[Row]:
    rows = []
    for at_once, name, records, of_partition, of_consumer in (
        (AT_ONCE, f"takes of {AT_ONCE}, acknowledged", RECORDS, 60_000, 40_000),
        (1, "single acknowledgements, pipelined", SINGLE_RECORDS, 15_000, 8_000),
    ):
        for where, partitions, consumers, target in (
            ("one partition, 3 consumers", 1, 3, of_partition),
            ("6 partitions, one consumer", 6, 1, of_consumer),
        ):
            samples = rates(
                cluster,
                f"drained-{at_once}-{partitions}",
                partitions=partitions,
                consumers=consumers,
                at_once=at_once,
                records=max(int(records * share), AT_ONCE),
            )
            rows.append(
                Row(name=f"{name}: {where}", unit="records/s", samples=samples, target=target)
            )
    return rows


# --- latency --------------------------------------------------------------------------------------


def one_by_one(cluster: rayq.Cluster, share: float) -> list[Row]:
    """A write, then a take and an acknowledgement, each waited for, in turn."""
    count = max(int(ONE_BY_ONE * share), 30)
    write_ms, take_ms, both_s = list[float](), list[float](), list[float]()
    cluster.create_topic("written", replication_factor=BROKERS)
    cluster.admin.create_queue("one", partitions=1, replication_factor=BROKERS)
    fill(cluster, "one", max(count, AT_ONCE))
    with cluster.producer() as producer, cluster.queue("one", prefetch=0) as q:
        for _ in range(count):
            began_s = time.perf_counter()
            producer.send_and_wait("written", VALUE)
            write_ms.append((time.perf_counter() - began_s) * 1000)
            began_s = time.perf_counter()
            (task,) = q.take(1, timeout_s=TIMEOUT_S)
            take_ms.append((time.perf_counter() - began_s) * 1000)
            task.ack()
            q.flush()
            both_s.append(time.perf_counter() - began_s)
    write = statistics.median(write_ms)
    return [
        Row(
            name="take one, acknowledge it, wait",
            unit="records/s",
            samples=[1 / statistics.mean(both_s)],
            target=200,
        ),
        Row(name='one write, acks="all", p50', unit="ms", samples=[write], better="lower"),
        Row(
            name="take of one, p50",
            unit="ms",
            samples=[statistics.median(take_ms)],
            target=1.5 * write,
            better="lower",
            note="the target is 1.5 times one write of this run",
        ),
    ]


def handle(cluster: rayq.Cluster, queue: str, pipe: Connection) -> None:
    """A consumer's process that tells how old each task was, by the time in its value."""
    stop = threading.Event()
    with cluster.queue(queue) as q:
        pipe.send(None)

        def wait_for_the_end() -> None:
            pipe.recv()
            stop.set()

        threading.Thread(target=wait_for_the_end, daemon=True).start()
        while not stop.is_set():
            for task in q.take(100, timeout_s=IDLE_S):
                (put_s,) = struct.unpack_from("d", task.value or b"")
                pipe.send((put_s, time.monotonic() - put_s))
                task.ack()


def stamped() -> bytes:
    return struct.pack("d", time.monotonic()) + VALUE[8:]


def put_to_handler(cluster: rayq.Cluster, share: float) -> list[Row]:
    cluster.admin.create_queue("paced", partitions=6, replication_factor=BROKERS)
    count = WARM_PUTS + max(int(PUTS * share), 500)
    ages_ms: list[float] = []
    with (
        started(handle, 1, cluster, "paced") as (pipe,),
        cluster.producer() as producer,
    ):
        reader = threading.Thread(
            target=lambda: ages_ms.extend(pipe.recv()[1] * 1000 for _ in range(count))
        )
        reader.start()
        began_s = time.monotonic()
        for number in range(count):
            ahead_s = began_s + number / PUTS_PER_S - time.monotonic()
            if ahead_s > 0:
                time.sleep(ahead_s)
            producer.send("paced", stamped())
        reader.join(TIMEOUT_S)
    cuts = statistics.quantiles(ages_ms[WARM_PUTS:], n=100)
    name = f"put to handler at {PUTS_PER_S}/s"
    return [
        Row(name=f"{name}, p50", unit="ms", samples=[cuts[49]], better="lower"),
        Row(name=f"{name}, p99", unit="ms", samples=[cuts[98]], target=25, better="lower"),
    ]


# --- failover -------------------------------------------------------------------------------------


def failover(cluster: rayq.Cluster, share: float) -> list[Row]:
    """From the SIGKILL of the process that leads the partition to the first task that was put after
    it and is handled; beside it the same for the acknowledgement of that put."""
    del share
    cluster.admin.create_queue("killed", partitions=1, replication_factor=BROKERS)
    writes_s, takes_s = list[float](), list[float]()
    with (
        started(handle, 1, cluster, "killed") as (pipe,),
        cluster.queue("killed") as q,
    ):
        for _ in range(KILLS):
            q.put(stamped())
            pipe.recv()
            partition = cluster.admin.describe_topic("killed").partitions[0]
            pids = {one.broker: one.pid for one in partition.replicas}
            victim = None if partition.leader is None else pids[partition.leader]
            assert victim is not None
            killed_s = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            q.put(stamped())
            writes_s.append(time.monotonic() - killed_s)
            put_s, age_s = pipe.recv()
            takes_s.append(put_s + age_s - killed_s)
            time.sleep(8)  # the replica that was killed is in sync again
    return [
        Row(
            name="SIGKILL of the leader's process until a put is acknowledged",
            unit="s",
            samples=writes_s,
            better="lower",
        ),
        Row(
            name="until that task is handled",
            unit="s",
            samples=takes_s,
            target=statistics.median(writes_s) + 0.5,
            better="lower",
            note="the target is half a second after the acknowledgement",
        ),
    ]


# --- beside Celery --------------------------------------------------------------------------------


def work(cluster: rayq.Cluster, queue: str, pipe: Connection) -> None:
    """A worker's process, with a task that does next to nothing."""
    with cluster.queue(queue) as q:

        @q.task(name="add")
        def add(x: int, y: int) -> int:
            return x + y

        def stop() -> None:
            pipe.recv()
            os.kill(os.getpid(), signal.SIGTERM)

        pipe.send(None)
        pipe.recv()
        threading.Thread(target=stop, daemon=True).start()
        q.work()


def tasks_of_rayq(cluster: rayq.Cluster, tasks: int) -> tuple[float, float]:
    """Calls of `delay` a second, and tasks handled a second, as `celery_side` counts them."""
    with cluster.create_queue("calls", partitions=6, replication_factor=BROKERS) as q:

        @q.task(name="add")
        def add(x: int, y: int) -> int:
            return x + y

        began_s = time.perf_counter()
        for number in range(tasks):
            add.delay(number, 1)
        q.flush()
        put_s = time.perf_counter() - began_s
    with started(work, WORKERS, cluster, "calls") as pipes:
        began_s = time.perf_counter()
        for pipe in pipes:
            pipe.send(True)
        while any(
            one.start_offset != one.end_offset
            for one in cluster.admin.describe_queue("calls").partitions
        ):
            time.sleep(0.01)
        handled_s = time.perf_counter() - began_s
    return tasks / put_s, tasks / handled_s


def beside_celery(ours: tuple[float, float], theirs: celery_side.Figures) -> list[Row]:
    return [
        Row(
            name=name,
            unit="tasks/s",
            samples=[figure],
            ratio=figure / other,
            target_ratio=target,
            note=f"of Celery with Redis: {other:,.0f}/s",
        )
        for name, figure, other, target in (
            ("delay(), one call after the other", ours[0], theirs.put_per_s, None),
            (f"small tasks by {WORKERS} worker processes", ours[1], theirs.handled_per_s, 5.0),
        )
    ]


SECTIONS = (throughput, one_by_one, put_to_handler, failover)
CELERY = "celery"
"""What `--only` calls the tasks of both sides."""


def queues(cluster: rayq.Cluster, directory: Path) -> list[Row]:
    """For `benchmarks.run`: all but Celery."""
    del directory
    return [row for section in SECTIONS for row in section(cluster, 1.0)]


def main() -> None:
    sections = {section.__name__: section for section in SECTIONS}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("share", nargs="?", type=float, default=1.0)
    parser.add_argument("--only", nargs="+", choices=[*sections, CELERY])
    options = parser.parse_args()
    chosen = options.only or [*sections, CELERY]
    tasks = max(int(TASKS * options.share), 500)
    ours = (0.0, 0.0)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="rayq-queues-") as directory:
        with local_ray(), rayq.start(directory, brokers=BROKERS) as cluster:
            for name, section in sections.items():
                if name in chosen:
                    print(f"measuring {name} ...", flush=True)
                    rows += section(cluster, options.share)
            if CELERY in chosen:
                ours = tasks_of_rayq(cluster, tasks)
            cluster.stop()
    if CELERY in chosen:
        celery_side.install()
        rows += beside_celery(ours, celery_side.measure(tasks))
    wide_console().print(table(rows, machine.describe()))


if __name__ == "__main__":
    main()
