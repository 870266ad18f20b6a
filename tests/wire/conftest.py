"""Servers and connections on the loopback address, on both event loops."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop

from rayq.config import ClusterConfig
from rayq.environment import Environment, LoopTasks, SystemClock
from rayq.messages import AnyRequest, Produce, ProduceResponse
from rayq.wire.authentication import (
    HANDSHAKE_VERSION,
    NONCE_BYTES,
    ClientHandshake,
    Identity,
    client_key,
)
from rayq.wire.codec import ENCODER
from rayq.wire.connection import Connection
from rayq.wire.frames import (
    HANDSHAKE_API,
    NO_PAYLOAD,
    PREFIX,
    PREFIX_BYTES,
    Frame,
    encode_head,
)
from rayq.wire.handler import Handler
from rayq.wire.network import AsyncioNetwork
from rayq.wire.peer import Gate, Peer
from rayq.wire.server import Server

SECRET = b"the cluster's own secret, 32 byte"
TEST_TIMEOUT_S = 120.0

Scenario = Callable[[], Coroutine[Any, Any, None]]


@dataclass
class Wire:
    """Makes both ends of the wire for a test, and closes them at the end of `run`."""

    secret: bytes = SECRET
    opened: list[Any] = field(default_factory=list)

    def config(self, **limits: Any) -> ClusterConfig:
        return ClusterConfig(**limits)

    def echo(self, peer: Peer, request: AnyRequest, payload: memoryview) -> Any:
        return echo(peer, request, payload)

    def keep(self, one: Any) -> Any:
        """Closes `one` at the end of the test."""
        self.opened.append(one)
        return one

    def raw_over(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> RawClient:
        return RawClient(reader, writer)

    def environment(self, config: ClusterConfig | None = None) -> Environment:
        return Environment(
            clock=SystemClock(),
            random=random.SystemRandom(),
            disk=None,  # type: ignore[arg-type]
            network=AsyncioNetwork(config),
            threads=None,  # type: ignore[arg-type]
            tasks=LoopTasks(),
            pid=1,
            boot_id="boot",
        )

    def server_identity(self, broker: int = 1, secret: bytes = SECRET) -> Identity:
        return Identity(role="server", key=secret, cluster_id="cluster", broker=broker)

    def client_identity(self, cluster_id: str | None = None, secret: bytes = SECRET) -> Identity:
        return Identity(role="client", key=client_key(secret), cluster_id=cluster_id, broker=None)

    async def serve(
        self,
        handler: Handler | None = None,
        config: ClusterConfig | None = None,
        gate: Gate | None = None,
    ) -> Server:
        server = Server(
            self.environment(config), self.server_identity(), handler or echo, config, gate
        )
        await server.start("127.0.0.1", 0)
        self.opened.append(server)
        return server

    def connections(self, server: Server) -> int:
        """The number of connections of a server that are authenticated, as its metrics say."""
        found = [
            sample.value
            for sample in server.environment.metrics.collect()
            if sample.name == "rayq_connections"
        ]
        return int(sum(found))

    async def connect(
        self,
        server: Server,
        identity: Identity | None = None,
        config: ClusterConfig | None = None,
        expect_broker: int | None = None,
    ) -> Connection:
        connection = await Connection.open(
            self.environment(config),
            server.host,
            server.port,
            identity or self.client_identity(),
            config=config,
            expect_broker=expect_broker,
        )
        self.opened.append(connection)
        return connection

    async def raw(self, server: Server) -> RawClient:
        client = RawClient(*await asyncio.open_connection(server.host, server.port))
        self.opened.append(client)
        return client

    async def raw_authenticated(self, server: Server) -> RawClient:
        client = await self.raw(server)
        handshake = ClientHandshake(self.client_identity(), bytes(NONCE_BYTES), None)
        client.write_handshake(handshake.hello())
        client.write_handshake(handshake.answer(bytes((await client.read_frame()).header)))
        handshake.finish(bytes((await client.read_frame()).header))
        return client


class RawClient:
    """A peer that may break every rule."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    def write_handshake(self, header: bytes) -> None:
        self.write(encode_head(HANDSHAKE_VERSION, 0, HANDSHAKE_API, 0, header, 0))

    def write_request(
        self, api: int, correlation: int, header: bytes, payload: bytes = b"", flags: int = 0
    ) -> None:
        self.write(encode_head(1, flags, api, correlation, header, len(payload)) + payload)

    async def read_frame(self) -> Frame:
        prefix = await self.reader.readexactly(PREFIX_BYTES)
        length, _, flags, api, correlation, header_bytes = PREFIX.unpack(prefix)
        body = memoryview(bytearray(await self.reader.readexactly(length + 4 - PREFIX_BYTES)))
        payload = body[header_bytes:] if len(body) > header_bytes else NO_PAYLOAD
        return Frame(flags, api, correlation, body[:header_bytes], payload)

    async def read_to_end(self) -> bytes:
        """The bytes that came until the server closed."""
        try:
            return await self.reader.read()
        except ConnectionError:
            return b""

    def close(self) -> None:
        self.writer.transport.abort()


def produce(number: int = 0, *, acks: int = -1) -> Produce:
    return Produce("topic", number, 0, acks, 1000)


def echo(peer: Peer, request: AnyRequest, payload: memoryview) -> Any:
    """Answers a Produce with its own partition and payload."""
    assert isinstance(request, Produce)
    return ProduceResponse(request.partition, 0, len(payload)), payload


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest, wire: Wire) -> Callable[[Scenario], None]:
    """Runs a coroutine function on a fresh loop; fails when it takes too long."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    async def limited(scenario: Scenario) -> None:
        broken: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, about: broken.append(about))
        try:
            async with asyncio.timeout(TEST_TIMEOUT_S):
                await scenario()
        finally:
            for one in wire.opened:
                one.close()
            await asyncio.sleep(0)
        gc.collect()  # futures whose exception nobody took say so when they go
        assert not broken, "an exception escaped into the event loop"

    def runner(scenario: Scenario) -> None:
        with asyncio.Runner(loop_factory=factory) as loop:
            loop.run(limited(scenario))

    return runner


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def make_produce() -> Callable[..., Produce]:
    return produce


@pytest.fixture
def encode() -> Callable[[Any], bytes]:
    return ENCODER.encode


async def _eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.002)


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    return _eventually
