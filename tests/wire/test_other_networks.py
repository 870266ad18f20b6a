"""The wire asks of a network only what `environment.Network` and the ten methods below give it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from rayq.errors import DisconnectedError
from rayq.wire.connection import Connection
from rayq.wire.server import Server


class MemoryTransport:
    """The sender of one direction: it hands bytes to the peer's protocol on later turns, in odd
    pieces."""

    def __init__(self, protocol: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._protocol = protocol
        self._waiting = bytearray()
        self._paused = False
        self._closing = False
        self.peer: MemoryTransport

    def write(self, data: Any) -> None:
        assert not self._closing
        assert len(data)
        self.peer._take(bytes(data))

    def writelines(self, parts: Iterable[Any]) -> None:
        for part in parts:
            self.write(part)

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self._protocol.connection_lost, None)
            self._loop.call_soon(self.peer._end)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        assert not self._paused
        self._paused = True

    def resume_reading(self) -> None:
        assert self._paused
        self._paused = False
        self._loop.call_soon(self._deliver)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("memory", 1) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high is not None
        assert low is not None

    def get_write_buffer_size(self) -> int:
        return 0

    def _take(self, data: bytes) -> None:
        self._waiting += data
        self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        while self._waiting and not self._paused and not self._closing:
            buffer = self._protocol.get_buffer(-1)
            size = min(len(buffer), 777, len(self._waiting))
            buffer[:size] = self._waiting[:size]
            del self._waiting[:size]
            self._protocol.buffer_updated(size)

    def _end(self) -> None:
        if not self._closing:
            self._protocol.eof_received()
            self.close()


@dataclasses.dataclass
class MemoryListener:
    host: str
    port: int

    def close(self) -> None:
        pass


class MemoryNetwork:
    """One listener, reached under any address."""

    async def connect(self, host: str, port: int, protocol_factory: Callable[[], Any]) -> Any:
        ours, theirs = protocol_factory(), self._accept("memory", lambda: None)
        transport, opposite = MemoryTransport(ours), MemoryTransport(theirs)
        transport.peer, opposite.peer = opposite, transport
        theirs.connection_made(opposite)
        ours.connection_made(transport)
        return ours

    async def listen(self, host: str, port: int, accept: Callable[..., Any]) -> Any:
        self._accept = accept
        return MemoryListener(host, port or 1)


def test_a_network_in_memory_carries_the_protocol(run: Any, wire: Any, make_produce: Any) -> None:
    async def echo_later(peer: Any, request: Any, payload: memoryview) -> Any:
        await asyncio.sleep(0)
        return wire.echo(peer, request, payload)

    async def scenario() -> None:
        environment = dataclasses.replace(wire.environment(), network=MemoryNetwork())
        config = wire.config(max_requests_in_flight=3)
        server = Server(environment, wire.server_identity(), echo_later, config)
        await server.start("any", 0)
        client = await Connection.open(environment, "any", 1, wire.client_identity())
        futures = [
            client.request(make_produce(n), bytes(n % 9 * 5000), timeout_s=60) for n in range(100)
        ]
        for number, future in enumerate(futures):
            response, payload = await future
            assert (response.base_offset, len(payload)) == (number, number % 9 * 5000)
        pending = client.request(make_produce(), timeout_s=60)
        server.close()
        with pytest.raises(DisconnectedError):
            await pending

    run(scenario)
