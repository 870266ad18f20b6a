"""What the client alone can do: 100-byte records, lz4, default settings, one topic of 6 partitions.

    python -m benchmarks.client_speed [--profile NAME]

The other side answers at once and stores nothing. It is either a part of the client's own
connection ("in process": only the client's work is measured) or a process of its own behind a real
socket. Prints a table, then one JSON object a line.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import multiprocessing
import os
import pstats
import random
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from typing import Any

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.report import Row, show
from rayq.client.client import Client
from rayq.client.cluster import Cluster
from rayq.client.cluster_access import ClusterAccess
from rayq.client.environment import system_environment
from rayq.config import ClusterConfig, TopicConfig, as_dict
from rayq.environment import Buffer
from rayq.messages import (
    EARLIEST,
    AllocateProducerId,
    AllocateProducerIdResponse,
    AnyRequest,
    BrokerEndpoint,
    Fetch,
    FetchResponse,
    ListOffsets,
    ListOffsetsResponse,
    Metadata,
    MetadataResponse,
    PartitionMetadata,
    Produce,
    ProduceResponse,
    ReplicaEndpoint,
    TopicMetadata,
)
from rayq.storage.batch import encode_batch, stamp
from rayq.wire.authentication import Identity, client_key
from rayq.wire.peer import Peer
from rayq.wire.server import Server

SECRET = b"only for this benchmark, 32 bytes"
TOPIC = "speed"
PARTITIONS = 6
RECORDS = 500_000
SOURCE_RECORDS = 1_000_000
BATCH_RECORDS = 528
REPETITIONS = 3
CHUNK = 10_000
POLL_TIMEOUT_S = 60.0
"""The other side answers at once: only where it is gone does an answer take so long."""
RECORD_BYTES = 100


def record_values(count: int) -> list[bytes]:
    """Values of 100 bytes of JSON each, as a small service would log them."""
    source = random.Random(7)
    values = []
    for number in range(count):
        text = (
            f'{{"order":{number:08d},"customer":"C{source.randrange(10_000):05d}",'
            f'"cents":{source.randrange(100_000):06d},"paid":true,"shop":"berlin"'
        )
        values.append(text.encode().ljust(RECORD_BYTES - 1, b" ") + b"}")
    return values


class Far:
    """The other side: it knows one topic, takes every batch, and serves a log that it made
    before."""

    def __init__(self) -> None:
        self.port = 1
        self._ends = [0] * PARTITIONS
        self._source: list[bytes] = []
        self._source_ends: list[int] = []

    def make_source(self) -> None:
        """Makes the same log, which stays in memory, for every partition."""
        per_partition = SOURCE_RECORDS // PARTITIONS
        values = record_values(per_partition)
        for first in range(0, per_partition, BATCH_RECORDS):
            some = values[first : first + BATCH_RECORDS]
            keys: list[bytes | None] = [value[9:17] for value in some]
            times = [1_700_000_000_000 + first + number // 10 for number in range(len(some))]
            batch = encode_batch(some, keys, timestamps_ms=times)
            stamp(batch, 0, base_offset=first, leader_epoch=1, append_time_ms=times[-1])
            self._source.append(bytes(batch))
            self._source_ends.append(first + len(some))

    def answer(self, request: AnyRequest, payload: Buffer) -> Any:
        match request:
            case Produce(partition=partition):
                # record_count stands at byte 35 of a batch.
                count = int.from_bytes(payload[35:39], "little")
                base_offset = self._ends[partition]
                self._ends[partition] += count
                return ProduceResponse(base_offset, 1, 0)
            case Fetch(offset=offset, bytes_max=bytes_max):
                return self._fetch(offset, bytes_max)
            case Metadata():
                return self._metadata()
            case AllocateProducerId():
                return AllocateProducerIdResponse(1, 0)
            case ListOffsets(timestamp_ms=timestamp_ms):
                end = self._source_ends[-1] if self._source_ends else 0
                return ListOffsetsResponse(0 if timestamp_ms == EARLIEST else end, None)
        raise AssertionError(f"unexpected {request}")

    def _fetch(self, offset: int, bytes_max: int) -> Any:
        index = bisect_right(self._source_ends, offset)
        found: list[bytes] = []
        size_bytes = 0
        end = self._source_ends[-1] if self._source_ends else 0
        next_offset = offset
        while index < len(self._source):
            batch = self._source[index]
            if found and size_bytes + len(batch) > bytes_max:
                break
            found.append(batch)
            size_bytes += len(batch)
            next_offset = self._source_ends[index]
            index += 1
        return FetchResponse(end, 0, 0, next_offset), b"".join(found)

    def _metadata(self) -> MetadataResponse:
        replica = ReplicaEndpoint(1, "127.0.0.1", self.port)
        partitions = [
            PartitionMetadata(number, 1, 1, 1, [1], [replica], None) for number in range(PARTITIONS)
        ]
        topic = TopicMetadata(TOPIC, "0" * 32, as_dict(TopicConfig()), partitions)
        broker = BrokerEndpoint(1, "127.0.0.1", self.port, "node", True)
        return MetadataResponse("speed", 1, 1, None, [1], [broker], [topic])


# --- in process: instead of connections ---------------------------------------------------------


class PlayedConnection:
    """Answers each request in the next turn of the loop."""

    closed = False

    def __init__(self, far: Far) -> None:
        self._far = far
        self._loop = asyncio.get_running_loop()

    def request(
        self, request: AnyRequest, payload: Buffer = b"", *, timeout_s: float
    ) -> asyncio.Future[Any]:
        future = self._loop.create_future()
        if isinstance(request, Fetch):
            response, data = self._far.answer(request, payload)
            if not data:
                self._loop.call_later(0.5, _set, future, (response, memoryview(b"")))
                return future
            answer = (response, memoryview(bytearray(data)))
        else:
            answer = (self._far.answer(request, payload), memoryview(b""))
        self._loop.call_soon(_set, future, answer)
        return future


def _set(future: asyncio.Future[Any], answer: Any) -> None:
    if not future.done():
        future.set_result(answer)


class PlayedPool:
    def __init__(self, far: Far) -> None:
        self._far = far
        self._connection: PlayedConnection | None = None

    async def get(self, host: str, port: int) -> PlayedConnection:
        if self._connection is None:
            self._connection = PlayedConnection(self._far)
        return self._connection

    async def request(
        self, host: str, port: int, request: AnyRequest, payload: Buffer = b"", *, timeout_s: float
    ) -> Any:
        connection = await self.get(host, port)
        return await connection.request(request, payload, timeout_s=timeout_s)

    def close(self) -> None:
        pass


class PlayedAccess(ClusterAccess):
    def __init__(self, far: Far) -> None:
        super().__init__([("127.0.0.1", 1)], client_key(SECRET), None, ClusterConfig())
        self._far = far

    def new_client(self) -> Client:
        client = super().new_client()
        client.pool = PlayedPool(self._far)  # type: ignore[assignment]
        return client


class PlayedCluster(Cluster):
    def __init__(self, far: Far) -> None:
        super().__init__([("127.0.0.1", 1)], client_key(SECRET))
        self._access = PlayedAccess(far)


# --- a process of its own -----------------------------------------------------------------------


def serve(pipe: Pipe) -> None:
    far = Far()
    far.make_source()

    def handle(_peer: Peer, request: AnyRequest, payload: memoryview) -> Any:
        answer = far.answer(request, payload)
        if isinstance(answer, tuple) and not answer[1]:
            return _late(answer)
        return answer

    async def run() -> None:
        identity = Identity(role="server", key=SECRET, cluster_id="speed", broker=1)
        server = Server(system_environment(), identity, handle)
        await server.start("127.0.0.1", 0)
        far.port = server.port
        pipe.send(server.port)
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        server.close()

    uvloop.run(run())


async def _late(answer: Any) -> Any:
    await asyncio.sleep(0.5)
    return answer


@contextmanager
def server_process() -> Iterator[Cluster]:
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=serve, args=(far,), daemon=True)
    process.start()
    far.close()  # so that `recv` ends if the process dies
    port = near.recv()
    with Cluster([("127.0.0.1", port)], client_key(SECRET)) as cluster:
        yield cluster
    near.send("stop")
    process.join()


@contextmanager
def played() -> Iterator[Cluster]:
    far = Far()
    far.make_source()
    with PlayedCluster(far) as cluster:
        yield cluster


# --- what is measured ---------------------------------------------------------------------------

Measure = Callable[[Cluster, Sequence[bytes]], tuple[int, float]]
"""Returns how many records it took, and how many seconds."""


def send(cluster: Cluster, values: Sequence[bytes]) -> tuple[int, float]:
    with cluster.producer() as producer:
        producer.send(TOPIC, b"warm").result(timeout=10)
        started = time.perf_counter()
        futures = [producer.send(TOPIC, value) for value in values]
        producer.flush()
        seconds = time.perf_counter() - started
        assert futures[-1].result().offset is not None
        return len(values), seconds


def send_with_keys(cluster: Cluster, values: Sequence[bytes]) -> tuple[int, float]:
    keys = [value[9:17] for value in values]
    with cluster.producer() as producer:
        producer.send(TOPIC, b"warm").result(timeout=10)
        started = time.perf_counter()
        for key, value in zip(keys, values, strict=True):
            producer.send(TOPIC, value, key=key)
        producer.flush()
        return len(values), time.perf_counter() - started


def send_many(cluster: Cluster, values: Sequence[bytes]) -> tuple[int, float]:
    chunks = [list(values[first : first + CHUNK]) for first in range(0, len(values), CHUNK)]
    with cluster.producer() as producer:
        producer.send(TOPIC, b"warm").result(timeout=10)
        started = time.perf_counter()
        futures = [producer.send_many(TOPIC, chunk) for chunk in chunks]
        producer.flush()
        seconds = time.perf_counter() - started
        assert sum(one.end - one.start for future in futures for one in future.result()) == len(
            values
        )
        return len(values), seconds


def send_many_with_keys(cluster: Cluster, values: Sequence[bytes]) -> tuple[int, float]:
    keys: list[bytes | None] = [value[9:17] for value in values]
    with cluster.producer() as producer:
        producer.send(TOPIC, b"warm").result(timeout=10)
        started = time.perf_counter()
        for first in range(0, len(values), CHUNK):
            stop = first + CHUNK
            producer.send_many(TOPIC, list(values[first:stop]), keys=keys[first:stop])
        producer.flush()
        return len(values), time.perf_counter() - started


def poll(cluster: Cluster, _values: Sequence[bytes]) -> tuple[int, float]:
    count = 0
    with cluster.consumer(TOPIC, auto_offset_reset="earliest") as consumer:
        started = time.perf_counter()
        while count < SOURCE_RECORDS - BATCH_RECORDS * PARTITIONS:
            records = consumer.poll(timeout_s=POLL_TIMEOUT_S)
            _check_polled(len(records), count)
            count += len(records)
        return count, time.perf_counter() - started


def poll_arrow(cluster: Cluster, _values: Sequence[bytes]) -> tuple[int, float]:
    count = 0
    with cluster.consumer(TOPIC, auto_offset_reset="earliest") as consumer:
        started = time.perf_counter()
        while count < SOURCE_RECORDS - BATCH_RECORDS * PARTITIONS:
            table = consumer.poll_arrow(timeout_s=POLL_TIMEOUT_S)
            _check_polled(table.num_rows, count)
            count += table.num_rows
        return count, time.perf_counter() - started


def _check_polled(polled: int, before: int) -> None:
    if not polled:
        raise TimeoutError(f"Nothing came in {POLL_TIMEOUT_S:.0f} s, after {before} records.")


MEASURES: dict[str, tuple[Measure, float | None]] = {
    "send": (send, 400_000),
    "send with keys": (send_with_keys, None),
    "send_many": (send_many, 1_500_000),
    "send_many with keys": (send_many_with_keys, None),
    "poll": (poll, 800_000),
    "poll_arrow": (poll_arrow, 3_000_000),
}


def measure(place: str, cluster: Cluster, values: Sequence[bytes], names: list[str]) -> list[Row]:
    rows = []
    for name in names:
        function, target = MEASURES[name]
        samples = []
        for _ in range(REPETITIONS + 1):
            gc.collect()
            count, seconds = function(cluster, values)
            samples.append(count / seconds)
        rows.append(
            Row(
                name=f"client: {name}, {place}",
                unit="records/s",
                samples=samples[1:],  # the first run warms up
                target=target,
                note="100-byte records, lz4, the other side answers at once",
            )
        )
    return rows


def profile(name: str, values: Sequence[bytes]) -> None:
    """Profiles the caller's thread and the loop's thread, by cumulative time."""
    function, _ = MEASURES[name]
    with played() as cluster:
        function(cluster, values)
        profiler = cProfile.Profile()
        profiler.enable()
        function(cluster, values)
        profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", choices=list(MEASURES))
    parser.add_argument("--only", choices=list(MEASURES))
    arguments = parser.parse_args()
    values = record_values(RECORDS)
    if arguments.profile:
        profile(arguments.profile, values)
        return
    names = [arguments.only] if arguments.only else list(MEASURES)
    rows: list[Row] = []
    with played() as cluster:
        rows += measure("in process", cluster, values, names)
    with server_process() as cluster:
        rows += measure("over a socket", cluster, values, names)
    table = Table(title=f"the client alone, {os.cpu_count()} cores")
    for column in ("what", "records/s", "lowest - highest", "target"):
        table.add_column(column)
    for row in rows:
        spread = f"{show(min(row.samples))} - {show(max(row.samples))}"
        target = "" if row.target is None else show(row.target)
        table.add_row(row.name, show(row.figure), spread, target)
    Console(width=110).print(table)
    for row in rows:
        print(json.dumps(msgspec.to_builtins(row)))


if __name__ == "__main__":
    main()
