"""`rayq bench`: measures throughput and latency of the cluster, as seen from this machine."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Unpack

import typer

from rayq.cli import output
from rayq.cli.current import connected
from rayq.cli.options import ClusterAddress, Json, complete_topic
from rayq.cli.values import WrongUseError, config_values, size_bytes
from rayq.client.cluster import Cluster
from rayq.config import MIB, ProducerConfig
from rayq.config.keywords import TopicKeywords
from rayq.errors import InvalidRequestError, TimeoutError, TopicExistsError, UnknownTopicError

BENCH_TOPIC = "rayq-bench"
CHUNK = 500
DISTINCT_VALUES = 1000
VALUES_BYTES_MAX = 16 * MIB
"""The total size of the distinct values, and the size that one call sends."""
TIMEOUT_S = 60.0
SECONDS = 5.0
"""The default duration of a latency measurement."""
PACE_S = 0.01
"""The interval at which a limited rate is caught up with."""

Topic = Annotated[
    str | None,
    typer.Option(
        "-t",
        "--topic",
        help=f"Default: {BENCH_TOPIC}, created for the measurement and deleted after it.",
        autocompletion=complete_topic,
    ),
]
Partitions = Annotated[
    int, typer.Option("-p", "--partitions", help="Partitions of a new topic.", min=1)
]
Replicas = Annotated[
    int | None,
    typer.Option(
        "-r",
        "--replicas",
        "--replication-factor",
        help="Replicas of each partition of a new topic.",
        min=1,
        show_default="3, or as many as there are brokers",
    ),
]
Size = Annotated[
    str, typer.Option("-s", "--record-size", help="Size of a value, e.g. 100 or 1KiB.")
]


@contextlib.contextmanager
def _on_topic(
    address: str | None, name: str | None, partitions: int, replicas: int | None
) -> Iterator[tuple[Cluster, str]]:
    """The cluster, and the topic to measure on: the named one, or one that is created for it."""
    with connected(address, topics=[] if name is None else [name]) as cluster:
        if name is not None:
            cluster.admin.describe_topic(name)
            output.hush()
            yield cluster, name
            return
        with bench_topic(cluster, partitions, replicas):
            output.hush()
            yield cluster, BENCH_TOPIC


@contextlib.contextmanager
def bench_topic(
    cluster: Cluster, partitions: int, replicas: int | None, **config: Unpack[TopicKeywords]
) -> Iterator[None]:
    """Creates BENCH_TOPIC, and deletes it at the end, also where its creation is interrupted.
    Raises TopicExistsError, and leaves what it finds."""
    exists = (
        f"Topic {BENCH_TOPIC} is there: another measurement is under way, or was killed. "
        f"Then: rayq topic delete {BENCH_TOPIC}"
    )
    if BENCH_TOPIC in cluster.admin.list_topics():
        raise TopicExistsError(exists)
    try:
        cluster.create_topic(BENCH_TOPIC, partitions, replicas, **config)
    except TopicExistsError as error:
        raise TopicExistsError(exists) from error
    except (KeyboardInterrupt, TimeoutError):
        with contextlib.suppress(UnknownTopicError):
            cluster.admin.delete_topic(BENCH_TOPIC)
        raise
    try:
        yield
    finally:
        cluster.admin.delete_topic(BENCH_TOPIC)


def _values(record_bytes: int) -> list[bytes]:
    """Values that are half random and half repetitive, so that compression has something to do."""
    if not 1 <= record_bytes <= VALUES_BYTES_MAX:
        raise WrongUseError(
            f"A record of a measurement has 1 to {VALUES_BYTES_MAX} bytes, not {record_bytes}."
        )
    random = record_bytes // 2
    count = min(DISTINCT_VALUES, VALUES_BYTES_MAX // record_bytes)
    return [os.urandom(random) + b"x" * (record_bytes - random) for _ in range(count)]


def produce(
    topic: Topic = None,
    count: Annotated[
        int, typer.Option("-n", "--num-records", help="Number of records.", min=1)
    ] = 1_000_000,
    record_size: Size = "100",
    rate: Annotated[
        int | None,
        typer.Option("--throughput", "--rate", help="Maximum records per second.", min=1),
    ] = None,
    acks: Annotated[str, typer.Option("--acks", help="all, 1 or 0.")] = "all",
    compression: Annotated[str, typer.Option("-z", "--compression", help="lz4 or none.")] = "lz4",
    partitions: Partitions = 3,
    replicas: Replicas = None,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Write records as fast as the cluster accepts them, or at a rate."""
    size = size_bytes(record_size)
    values = _values(size)
    options = config_values(ProducerConfig, [f"acks={acks}", f"compression_type={compression}"])
    with _on_topic(cluster, topic, partitions, replicas) as (connection, name):
        took_s, latencies = _produce(connection, name, values, count, rate, options)
    _report(count, size, took_s, latencies, json, "produced")


def _produce(
    cluster: Cluster,
    topic: str,
    values: list[bytes],
    count: int,
    rate: int | None,
    options: Mapping[str, Any],
) -> tuple[float, list[float]]:
    """Returns the duration in seconds, and for each call the seconds until its records were
    acknowledged."""
    latencies: list[float] = []
    chunk = min(CHUNK, len(values))
    if rate is not None:
        chunk = min(chunk, max(1, int(rate * PACE_S)))
    with (
        cluster.producer(**options) as producer,
        output.progress("producing", count) as advance,
    ):
        producer.send_many(topic, values[:1]).result(timeout=TIMEOUT_S)
        began_s = time.perf_counter()
        sent = 0
        pending: list[Any] = []
        while sent < count:
            if rate is not None and (early_s := sent / rate - (time.perf_counter() - began_s)) > 0:
                time.sleep(early_s)
            start = sent % (len(values) - chunk + 1)
            some = values[start : start + min(chunk, count - sent)]
            called_s = time.perf_counter()
            future = producer.send_many(topic, some)
            future.add_done_callback(functools.partial(_note, latencies, called_s))
            pending.append(future)
            sent += len(some)
            if len(pending) >= CHUNK:
                for delivery in pending[: CHUNK // 2]:
                    delivery.result(timeout=TIMEOUT_S)
                del pending[: CHUNK // 2]
            advance(sent)
        for delivery in pending:
            delivery.result(timeout=TIMEOUT_S)
        took_s = time.perf_counter() - began_s
    return took_s, latencies


def _note(latencies: list[float], began_s: float, *_: object) -> None:
    latencies.append(time.perf_counter() - began_s)


def consume(
    topic: Topic = None,
    count: Annotated[
        int, typer.Option("-n", "--num-records", min=1, help="Maximum number of records.")
    ] = 1_000_000,
    record_size: Size = "100",
    partitions: Partitions = 3,
    replicas: Replicas = None,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Read from the beginning; without --topic, records that the command writes first."""
    size = size_bytes(record_size)
    with _on_topic(cluster, topic, partitions, replicas) as (connection, name):
        if topic is None:
            _produce(connection, name, _values(size), count, None, {})
        with connection.consumer(name, auto_offset_reset="earliest") as consumer:
            places = consumer.assignment()
            there = sum(consumer.end_offsets(places).values()) - sum(
                consumer.beginning_offsets(places).values()
            )
            goal = min(count, there)
            read = read_bytes = 0
            until = consumer.begin_until_end(TIMEOUT_S)
            began_s = time.perf_counter()
            with output.progress("consuming", goal) as advance:
                while read < goal and (records := consumer.poll_until(until, 10_000)):
                    read += len(records)
                    read_bytes += sum(len(record.value or b"") for record in records)
                    advance(read)
            took_s = time.perf_counter() - began_s
            if read == 0:
                raise InvalidRequestError(f"Topic {name!r} is empty: there is nothing to read.")
    _report(read, read_bytes // max(1, read), took_s, [], json, "consumed")


def latency(
    topic: Topic = None,
    rate: Annotated[
        int, typer.Option("--throughput", "--rate", help="Records per second.", min=1, max=5000)
    ] = 200,
    count: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--num-records",
            help="Number of records.",
            min=1,
            show_default="as many as take --seconds",
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", help="Duration, e.g. 10s.", min=0.1, show_default="5"),
    ] = None,
    record_size: Size = "100",
    partitions: Partitions = 1,
    replicas: Replicas = None,
    json: Json = False,
    cluster: ClusterAddress = None,
) -> None:
    """Measure the time from `send` to the acknowledgement, and to `poll`, one record at a time."""
    size = size_bytes(record_size)
    if count is not None and seconds is not None:
        raise typer.BadParameter("give one of --num-records and --seconds")
    if count is None:
        count = max(1, int(rate * (SECONDS if seconds is None else seconds)))
    with _on_topic(cluster, topic, partitions, replicas) as (connection, name):
        acknowledged, received = _latencies(connection, name, size, count, rate)
    if json:
        output.print_json(
            {
                "records": count,
                "rate": rate,
                "record_bytes": size,
                "acknowledged_ms": _quantiles_ms(acknowledged),
                "end_to_end_ms": _quantiles_ms(received),
            }
        )
        return
    rows = [
        (what, *(f"{value:.2f}" for value in _quantiles_ms(values).values()))
        for what, values in (("acknowledged", acknowledged), ("end to end", received))
    ]
    output.table(("milliseconds", *_quantiles_ms(received)), rows)


def _latencies(
    cluster: Cluster, topic: str, size: int, count: int, rate: int
) -> tuple[list[float], list[float]]:
    marker = os.urandom(8)
    sent_s: list[float] = []
    acknowledged: list[float] = []
    received: list[float] = []
    filling = b"x" * max(0, size - 16)
    with (
        cluster.consumer(topic, auto_offset_reset="latest") as consumer,
        cluster.producer() as producer,
        output.progress("measuring", count) as advance,
    ):
        for place in consumer.assignment():
            consumer.position(place)  # it begins at the end as of now
        producer.send(topic, b"warm").result(timeout=TIMEOUT_S)
        failed = threading.Event()

        def delivered(at_s: float, _: object, error: BaseException | None) -> None:
            if error is None:
                _note(acknowledged, at_s)
            else:
                failed.set()

        def send() -> None:
            began_s = time.perf_counter()
            for number in range(count):
                early_s = number / rate - (time.perf_counter() - began_s)
                if early_s > 0:
                    time.sleep(early_s)
                at_s = time.perf_counter()
                sent_s.append(at_s)
                producer.send(
                    topic,
                    marker + number.to_bytes(8, "big") + filling,
                    on_delivery=functools.partial(delivered, at_s),
                )

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        moved_s = time.perf_counter()
        while len(received) < count:
            for record in consumer.poll(0.5):
                moved_s = time.perf_counter()
                value = record.value or b""
                if value.startswith(marker):
                    number = int.from_bytes(value[8:16], "big")
                    received.append(moved_s - sent_s[number])
            advance(len(received))
            if failed.is_set() or time.perf_counter() - moved_s > TIMEOUT_S:
                raise TimeoutError(
                    f"Records do not come through, after {len(received)} of {count}: see `rayq "
                    "cluster health`."
                )
        sender.join()
        producer.flush()
    return acknowledged, received


# --- figures --------------------------------------------------------------------------------------


def _quantiles_ms(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
    found = {
        name: 1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]
        for name, share in shares.items()
    }
    return {name: round(value, 3) for name, value in {**found, "max": 1000 * ordered[-1]}.items()}


def _report(
    count: int, record_bytes: int, took_s: float, latencies: list[float], json: bool, what: str
) -> None:
    figures: dict[str, Any] = {
        "records": count,
        "record_bytes": record_bytes,
        "seconds": round(took_s, 3),
        "records_per_s": round(count / took_s),
        "mb_per_s": round(count * record_bytes / took_s / 1e6, 2),
    }
    if latencies:
        figures["latency_ms"] = _quantiles_ms(latencies)
    if json:
        output.print_json(figures)
        return
    output.say(
        f"{count:,} records of {record_bytes} bytes {what} in {took_s:.2f} s: "
        f"{figures['records_per_s']:,}/s, {figures['mb_per_s']} MB/s"
    )
    if latencies:
        quantiles = ", ".join(f"{name} {value}" for name, value in _quantiles_ms(latencies).items())
        output.say(f"Until acknowledged, milliseconds: {quantiles}")
