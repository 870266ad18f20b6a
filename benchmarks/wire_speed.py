"""The wire alone: a server process and this one, on uvloop, over loopback.

Prints one `benchmarks.report.Row` as JSON per line. Run: python -m benchmarks.wire_speed
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import random
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection as Pipe
from typing import Literal, cast

import msgspec
import uvloop

from benchmarks.report import Row
from rayq.environment import Disk, Environment, LoopTasks, SystemClock, ThreadPool
from rayq.messages import (
    AllocateProducerId,
    AllocateProducerIdResponse,
    AnyRequest,
    Fetch,
    FetchResponse,
    Produce,
    ProduceResponse,
)
from rayq.wire.authentication import Identity, client_key
from rayq.wire.connection import Connection
from rayq.wire.handler import Result
from rayq.wire.network import AsyncioNetwork
from rayq.wire.peer import Peer
from rayq.wire.server import Server

KIB, MIB = 1024, 1024**2
SECRET = bytes(32)
ROUNDS = 20_000
PIPELINED = 200_000
PIPELINED_IN_FLIGHT = 256
BULK_BYTES = 2048 * MIB
BULK_IN_FLIGHT = 8
RUNS = 3
TIMEOUT_S = 30.0


def environment() -> Environment:
    return Environment(
        clock=SystemClock(),
        random=random.SystemRandom(),
        disk=cast(Disk, None),
        network=AsyncioNetwork(),
        threads=ThreadPool(1),
        tasks=LoopTasks(),
        pid=0,
        boot_id="",
    )


async def in_task(response: ProduceResponse) -> Result:
    return response


ANSWERS = {size: bytes(size) for size in (64 * KIB, MIB)}


def handler(peer: Peer, request: AnyRequest, payload: memoryview) -> Result | Awaitable[Result]:
    match request:
        case AllocateProducerId():
            return AllocateProducerIdResponse(1, 0)
        case Fetch():
            return FetchResponse(0, 0, 0, 0), ANSWERS[request.bytes_max]
        case Produce(partition=1):
            return in_task(ProduceResponse(0, 0, 0))
        case _:
            return ProduceResponse(0, 0, 0)


async def serve(pipe: Pipe) -> None:
    identity = Identity(role="server", key=SECRET, cluster_id="speed", broker=1)
    server = Server(environment(), identity, handler)
    await server.start("127.0.0.1", 0)
    pipe.send(server.port)
    await asyncio.Event().wait()


def server_process(pipe: Pipe) -> None:
    uvloop.run(serve(pipe))


async def round_trips_us(
    connection: Connection, request: AnyRequest, payload: bytes
) -> list[float]:
    waits = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        await connection.request(request, payload, timeout_s=TIMEOUT_S)
        waits.append((time.perf_counter() - began) * 1e6)
    return sorted(waits)


async def per_second(
    connection: Connection, request: AnyRequest, payload: bytes, count: int, in_flight: int
) -> float:
    """Requests answered per second with so many under way at once."""
    numbers = itertools.count()

    async def work() -> None:
        while next(numbers) < count:
            await connection.request(request, payload, timeout_s=TIMEOUT_S)

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(in_flight)))
    return count / (time.perf_counter() - began)


async def measure(port: int) -> list[Row]:
    identity = Identity(role="client", key=client_key(SECRET), cluster_id=None, broker=None)
    connection = await Connection.open(environment(), "127.0.0.1", port, identity)
    small, in_task = Produce("t", 0, 0, 1, 1000), Produce("t", 1, 0, 1, 1000)
    rows = []

    async def add(
        name: str, unit: str, figure: Callable[[], Awaitable[float]], target: float | None
    ) -> None:
        samples = [await figure() for _ in range(RUNS)]
        better: Literal["higher", "lower"] = "lower" if unit == "us" else "higher"
        rows.append(Row(name=name, unit=unit, samples=samples, target=target, better=better))

    for where, request in (("at once", small), ("in a task", in_task)):
        for percent in (50, 99):

            async def round_trip(request: AnyRequest = request, percent: int = percent) -> float:
                waits = await round_trips_us(connection, request, bytes(KIB))
                return waits[len(waits) * percent // 100]

            name = f"1 KB round trip, answered {where}, p{percent}"
            await add(name, "us", round_trip, 120 if percent == 50 else None)

        async def pipelined(request: AnyRequest = request) -> float:
            return await per_second(connection, request, b"", PIPELINED, PIPELINED_IN_FLIGHT)

        name = f"small requests on one connection, answered {where}"
        await add(name, "1/s", pipelined, 25_000)
    for size in (64 * KIB, MIB):
        fetch = Fetch("t", 0, 0, 0, None, size, 0)
        both: list[tuple[str, AnyRequest, bytes]] = [
            ("to the server", small, bytes(size)),
            ("to the client", fetch, b""),
        ]
        for name, ask, payload in both:

            async def bulk(
                request: AnyRequest = ask, payload: bytes = payload, size: int = size
            ) -> float:
                count = BULK_BYTES // size
                each = await per_second(connection, request, payload, count, BULK_IN_FLIGHT)
                return each * size / 1e6

            target = 800 if size == MIB else None
            await add(f"payloads of {size // KIB} KiB {name}", "MB/s", bulk, target)
    connection.close()
    return rows


def main() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=server_process, args=(theirs,), daemon=True)
    server.start()
    try:
        for row in uvloop.run(measure(ours.recv())):
            print(msgspec.json.encode(row).decode())
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
