"""How a server best sends ranges of a warm log file: os.sendfile, or pread and transport.write?

A server process on uvloop sends ranges of a file in the page cache to a client process over
loopback. uvloop has no `sendfile` of its own and refuses `add_writer` on a transport's descriptor,
so the sendfile server works on a dup of it, next to the transport. The pread server asks for cached
pages only (RWF_NOWAIT), as rayq's storage does.

Run: python -m benchmarks.sendfile_against_pread
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import struct
import tempfile
import time
from multiprocessing.connection import Connection as Pipe
from typing import Any, cast

import uvloop

KIB, MIB = 1024, 1024**2
FILE_BYTES = 256 * MIB
RANGES_BYTES = (64 * KIB, MIB)
BYTES_PER_RUN = 2 * 1024 * MIB
LATENCY_ROUNDS = 1500
RUNS = 5
IN_FLIGHT = 8

REQUEST = struct.Struct("<QI")  # position, length; a length of 0 asks for the CPU seconds so far
HEAD = struct.Struct("<Qd")  # bytes that follow, CPU seconds


class Sender(asyncio.Protocol):
    """Answers requests one after the other."""

    def __init__(self, file: int, mode: str) -> None:
        self._file = file
        self._mode = mode
        self._requests: asyncio.Queue[tuple[int, int]] = asyncio.Queue()
        self._received = b""
        self._resumed = asyncio.Event()
        self._resumed.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        self._socket.setblocking(False)
        self._work = asyncio.get_running_loop().create_task(self._serve())

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= REQUEST.size:
            self._requests.put_nowait(REQUEST.unpack_from(self._received))
            self._received = self._received[REQUEST.size :]

    def pause_writing(self) -> None:
        self._resumed.clear()

    def resume_writing(self) -> None:
        self._resumed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._work.cancel()
        self._socket.close()

    async def _serve(self) -> None:
        while True:
            position, length = await self._requests.get()
            head = HEAD.pack(length, time.process_time())
            if length == 0:
                self._transport.write(head)
            elif self._mode == "sendfile":
                await self._send_file(head, position, length)
            else:
                await self._send_read(head, position, length)

    async def _send_file(self, head: bytes, position: int, length: int) -> None:
        while True:
            try:
                self._socket.send(head, socket.MSG_MORE)
                break
            except BlockingIOError:
                await self._writable()
        while length:
            try:
                sent = os.sendfile(self._socket.fileno(), self._file, position, length)
            except BlockingIOError:
                await self._writable()
                continue
            position, length = position + sent, length - sent

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        writable = loop.create_future()
        loop.add_writer(self._socket.fileno(), writable.set_result, None)
        try:
            await writable
        finally:
            loop.remove_writer(self._socket.fileno())

    async def _send_read(self, head: bytes, position: int, length: int) -> None:
        data = bytearray(length)
        read = os.preadv(self._file, [data], position, os.RWF_NOWAIT)
        assert read == length, "the file is not warm"
        self._transport.writelines([head, data])
        await self._resumed.wait()


class Receiver(asyncio.BufferedProtocol):
    """Takes answers and drops them."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(MIB))
        self._head = bytearray()
        self._left = 0
        self._answers: asyncio.Queue[float] = asyncio.Queue()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[: self._left or HEAD.size - len(self._head)]

    def buffer_updated(self, nbytes: int) -> None:
        if self._left:
            self._left -= nbytes
        else:
            self._head += self._buffer[:nbytes]
            if len(self._head) < HEAD.size:
                return
            self._left, self._cpu_s = HEAD.unpack(self._head)
            self._head.clear()
        if self._left == 0:
            self._answers.put_nowait(self._cpu_s)

    def ask(self, position: int, length: int) -> None:
        self._transport.write(REQUEST.pack(position, length))

    async def answer(self) -> float:
        return await self._answers.get()


async def serve(path: str, mode: str, pipe: Pipe) -> None:
    file = os.open(path, os.O_RDONLY)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Sender(file, mode), "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def server_process(path: str, mode: str, pipe: Pipe) -> None:
    uvloop.run(serve(path, mode, pipe))


async def measure_one(port: int, length: int) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    _, peer = await loop.create_connection(Receiver, "127.0.0.1", port)
    peer.ask(0, 0)
    cpu_before = await peer.answer()
    count = BYTES_PER_RUN // length
    began = time.perf_counter()
    for number in range(count + IN_FLIGHT):
        if number < count:
            peer.ask(number * length % FILE_BYTES, length)
        if number >= IN_FLIGHT:
            await peer.answer()
    seconds = time.perf_counter() - began
    peer.ask(0, 0)
    cpu_s = await peer.answer() - cpu_before
    waits = []
    for number in range(LATENCY_ROUNDS):
        asked = time.perf_counter()
        peer.ask(number * length % FILE_BYTES, length)
        await peer.answer()
        waits.append(time.perf_counter() - asked)
    waits.sort()
    return {
        "mb_per_s": count * length / seconds / 1e6,
        "server_cpu_s_per_gb": cpu_s / (count * length / 1e9),
        "p50_us": waits[len(waits) // 2] * 1e6,
        "p99_us": waits[len(waits) * 99 // 100] * 1e6,
    }


def measure(path: str, mode: str, length: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=server_process, args=(path, mode, theirs), daemon=True)
    server.start()
    try:
        return uvloop.run(measure_one(ours.recv(), length))
    finally:
        server.terminate()
        server.join()


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "segment.log")
        with open(path, "wb") as file:
            for _ in range(FILE_BYTES // MIB):
                file.write(os.urandom(MIB))
        runs: dict[tuple[int, str], list[dict[str, float]]] = {}
        for _ in range(RUNS):  # by turns, so that a noisy minute hits both
            for length in RANGES_BYTES:
                for mode in ("sendfile", "pread"):
                    runs.setdefault((length, mode), []).append(measure(path, mode, length))
    results: list[dict[str, Any]] = [
        {"range_bytes": length, "mode": mode}
        | {name: round(statistics.median(run[name] for run in found), 3) for name in found[0]}
        for (length, mode), found in runs.items()
    ]
    print(f"median of {RUNS} runs, {IN_FLIGHT} requests in flight (latencies: one)")
    print(
        f"{'range':>9} {'mode':>9} {'MB/s':>7} {'server CPU s/GB':>16} {'p50 us':>8} {'p99 us':>8}"
    )
    for one in results:
        print(
            f"{one['range_bytes'] // KIB:>5} KiB {one['mode']:>9} {one['mb_per_s']:>7.0f} "
            f"{one['server_cpu_s_per_gb']:>16.3f} {one['p50_us']:>8.0f} {one['p99_us']:>8.0f}"
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
