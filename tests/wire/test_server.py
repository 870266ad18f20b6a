"""Limits, roles and bad input at a server; a good client is served all the while."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayq.errors import (
    AuthenticationError,
    DisconnectedError,
    OverloadedError,
    ProtocolError,
)
from rayq.messages import (
    Fetch,
    PrepareStop,
    Produce,
    ProduceResponse,
    ReplicaFlushed,
)
from rayq.wire import accepted_connection
from rayq.wire.authentication import NONCE_BYTES, ClientHandshake
from rayq.wire.codec import ENCODER, decode_error
from rayq.wire.frames import FLAG_ERROR, FLAG_ONE_WAY, PREFIX, encode_head
from rayq.wire.server import Server


async def assert_served(wire: Any, server: Server) -> None:
    client = await wire.connect(server)
    response, answer = await client.request(Produce("topic", 7, 0, -1, 1000), b"good", timeout_s=60)
    assert (response.base_offset, bytes(answer)) == (7, b"good")
    client.close()


# --- who may do what ----------------------------------------------------------------------------


def test_a_wrong_secret_is_refused_and_a_good_client_still_served(run: Any, wire: Any) -> None:
    async def scenario() -> None:
        server = await wire.serve()
        for stranger in (
            wire.client_identity(secret=b"another secret"),
            wire.server_identity(secret=b"another secret"),
        ):
            with pytest.raises(AuthenticationError, match="token"):
                await wire.connect(server, stranger)
        await assert_served(wire, server)

    run(scenario)


def test_a_client_cannot_call_what_is_for_servers(run: Any, wire: Any) -> None:
    async def scenario() -> None:
        called: list[Any] = []

        def handler(peer: Any, request: Any, payload: memoryview) -> Any:
            called.append((peer.role, peer.broker, type(request)))
            return PrepareStop.response()

        server = await wire.serve(handler)
        client = await wire.connect(server)
        with pytest.raises(AuthenticationError, match="PrepareStop"):
            await client.request(PrepareStop(), timeout_s=60)
        client.send(ReplicaFlushed("t", 0, 1, "i", 0, 0))
        with pytest.raises(AuthenticationError):
            await client.request(PrepareStop(), timeout_s=60)
        assert called == []
        broker = await wire.connect(server, wire.server_identity(broker=4))
        await broker.request(PrepareStop(), timeout_s=60)
        assert called == [("server", 4, PrepareStop)]

    run(scenario)


def test_refused_requests_are_timed_as_answered_ones_are(run: Any, wire: Any) -> None:
    """Otherwise a cluster whose every write runs into a timeout would look fast."""

    async def scenario() -> None:
        def handler(peer: Any, request: Any, payload: memoryview) -> Any:
            if payload == b"at once":
                raise OverloadedError("no")

            async def later() -> Any:
                await asyncio.sleep(0.02)
                raise OverloadedError("no")

            return later()

        server = await wire.serve(handler)
        client = await wire.connect(server)
        for payload in (b"at once", b"later"):
            with pytest.raises(OverloadedError):
                await client.request(Produce("t", 0, 0, -1, 1000), payload, timeout_s=60)
        samples = {one.name: one for one in server.environment.metrics.collect()}
        assert samples["rayq_failed_requests_total"].value == 2
        assert samples["rayq_request_seconds"].count == 2
        assert samples["rayq_request_seconds"].value >= 0.015  # A loop's timers may be early.

    run(scenario)


def test_a_replayed_handshake_is_refused(run: Any, wire: Any) -> None:
    async def scenario() -> None:
        server = await wire.serve()
        handshake = ClientHandshake(wire.client_identity(), bytes(NONCE_BYTES), None)
        first = await wire.raw(server)
        first.write_handshake(handshake.hello())
        proof = handshake.answer(bytes((await first.read_frame()).header))
        first.write_handshake(proof)
        handshake.finish(bytes((await first.read_frame()).header))

        second = await wire.raw(server)
        second.write_handshake(handshake.hello())
        await second.read_frame()
        second.write_handshake(proof)
        frame = await second.read_frame()
        assert frame.flags == FLAG_ERROR
        assert isinstance(decode_error(frame.header), AuthenticationError)
        assert await second.read_to_end() == b""

    run(scenario)


@pytest.mark.parametrize("reflect_proof", [True, False])
def test_a_server_that_reflects_the_handshake_is_refused(
    run: Any, wire: Any, reflect_proof: bool
) -> None:
    async def scenario() -> None:
        async def reflect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = wire.raw_over(reader, writer)
            hello = bytes((await peer.read_frame()).header)
            if not reflect_proof:
                peer.write_handshake(hello)
            else:
                peer.write_handshake(ENCODER.encode([1, bytes(NONCE_BYTES)]))
                digest = bytes((await peer.read_frame()).header)[-32:]
                peer.write_handshake(ENCODER.encode(["cluster", 1, digest]))
            await peer.read_to_end()
            peer.close()

        listening = await asyncio.start_server(reflect, "127.0.0.1", 0)
        fake = Server(wire.environment(), wire.server_identity(), lambda *_: None)
        fake.host, fake.port = listening.sockets[0].getsockname()
        with pytest.raises(AuthenticationError if reflect_proof else ProtocolError):
            await wire.connect(fake)
        listening.close()

    run(scenario)


# --- garbage ------------------------------------------------------------------------------------

GARBAGE = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": bytes.fromhex("16030100f1010000ed0303") + bytes(60),
    "zeros": bytes(100),
    "oversized": PREFIX.pack(1025, 1, 0, 0, 0, 0) + bytes(100),
    "huge": PREFIX.pack(2**32 - 1, 1, 0, 0, 0, 0),
    "a request": encode_head(1, 0, 20, 1, b"\x90", 0),
    "not msgpack": encode_head(1, 0, 0, 0, b"\xc1\xc1", 0),
    "a payload": encode_head(1, 0, 0, 0, b"\x90", 3) + b"abc",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_garbage_before_authentication_is_closed_without_an_answer(
    run: Any, wire: Any, garbage: bytes
) -> None:
    async def scenario() -> None:
        server = await wire.serve()
        peer = await wire.raw(server)
        peer.write(garbage)
        assert await peer.read_to_end() == b""
        await assert_served(wire, server)

    run(scenario)


@pytest.mark.parametrize(
    "garbage",
    [
        PREFIX.pack(81 * 1024**2, 1, 0, 20, 1, 0),
        PREFIX.pack(12, 2, 0, 20, 1, 0),
        PREFIX.pack(12, 1, 128, 20, 1, 0),
        PREFIX.pack(12, 1, FLAG_ERROR, 20, 1, 0),
        PREFIX.pack(12, 1, 0, 20, 1, 5),
        b"\xff" * 200,
    ],
    ids=["oversized", "other version", "unknown flag", "an answer", "long header", "noise"],
)
def test_garbage_after_authentication_closes_the_connection(
    run: Any, wire: Any, garbage: bytes
) -> None:
    async def scenario() -> None:
        server = await wire.serve()
        peer = await wire.raw_authenticated(server)
        peer.write(garbage)
        assert await peer.read_to_end() == b""
        await assert_served(wire, server)

    run(scenario)


@pytest.mark.parametrize("after_authentication", [True, False])
def test_a_truncated_frame_harms_nobody(
    run: Any, wire: Any, eventually: Any, after_authentication: bool
) -> None:
    async def scenario() -> None:
        server = await wire.serve()
        count = len(server._authenticated) + len(server._unauthenticated)
        for cut in (1, 4, 15, 16, 30):
            peer = await (wire.raw_authenticated if after_authentication else wire.raw)(server)
            peer.write(encode_head(1, 0, 0, 0, bytes(100), 0)[:cut])
            await asyncio.sleep(0)
            peer.close()
        await eventually(lambda: len(server._authenticated) + len(server._unauthenticated) == count)
        await assert_served(wire, server)

    run(scenario)


def test_a_message_that_is_not_valid_is_answered_and_the_connection_goes_on(
    run: Any, wire: Any
) -> None:
    async def scenario() -> None:
        server = await wire.serve()
        peer = await wire.raw_authenticated(server)
        bad = [
            (20, b"\xc1"),
            (20, b""),
            (20, ENCODER.encode(["topic", -1, 0, -1, 1000])),
            (20, ENCODER.encode(["topic", 1, 0, 5, 1000])),
            (20, ENCODER.encode(["", 1, 0, 1, 1000])),
            (20, ENCODER.encode(["topic"])),
            (20, b"\x95\xa1\xff\x01\x00\x01\x01"),  # not UTF-8
            (3, b"\x94\xa1t\x01\x01\x81\xa1k" + b"\x91" * 100_000),  # nested deeply
            (3, b"\x94\xa1t\x01\x01\xdf\xff\xff\xff\xff"),  # claims four billion entries
            (20, ENCODER.encode({"topic_id": "t"})),
            (9999, b"\x90"),
            (0, b"\x90"),
        ]
        for number, (api, header) in enumerate(bad, 1):
            peer.write_request(api, number, header, b"payload")
            frame = await peer.read_frame()
            assert (frame.flags, frame.api, frame.correlation) == (FLAG_ERROR, api, number)
            assert isinstance(decode_error(frame.header), ProtocolError)
        peer.write_request(20, 0, b"\xc1", flags=FLAG_ONE_WAY)
        frame = await peer.read_frame()
        assert (frame.flags, frame.api, frame.correlation) == (FLAG_ERROR, 20, 0)
        peer.write_request(20, 99, ENCODER.encode(Produce("topic", 4, 0, 1, 10)), b"fine")
        frame = await peer.read_frame()
        assert (frame.flags, frame.correlation, bytes(frame.payload)) == (0, 99, b"fine")

    run(scenario)


@pytest.mark.slow
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), authenticated=st.booleans())
def test_random_bytes_never_stop_the_server(
    run: Any, wire: Any, seed: int, authenticated: bool
) -> None:
    source = random.Random(seed)

    def random_bytes() -> bytes:
        """Frames whose parts are damaged, or plain noise."""
        out = []
        for _ in range(source.randrange(1, 40)):
            header = source.choice(
                [
                    ENCODER.encode(Produce("topic", 1, 0, 1, 10)),
                    ENCODER.encode(Fetch("topic", 1, 0, 5, None, 10, 0)),
                    source.randbytes(source.randrange(60)),
                ]
            )
            frame = bytearray(
                encode_head(
                    1,
                    source.choice([0, 0, 2]),
                    source.choice([20, 21, 3, 60, 7777]),
                    source.randrange(2**32),
                    header,
                    5,
                )
                + b"12345"
            )
            for _ in range(source.choice([0, 0, 1, 3])):
                frame[source.randrange(len(frame))] = source.randrange(256)
            out.append(bytes(frame))
        return b"".join(out)

    async def scenario() -> None:
        server = await wire.serve(
            lambda peer, request, payload: (ProduceResponse(7, 0, 0), payload)
        )
        for _ in range(3):
            peer = await (wire.raw_authenticated if authenticated else wire.raw)(server)
            data = random_bytes()
            with contextlib.suppress(OSError, RuntimeError):  # the server has closed it already
                for start in range(0, len(data), 300):
                    peer.write(data[start : start + 300])
                    await asyncio.sleep(0)
                peer.writer.write_eof()
            await peer.read_to_end()
        await assert_served(wire, server)
        server.close()

    run(scenario)


# --- limits -------------------------------------------------------------------------------------


def test_a_peer_that_does_not_authenticate_is_closed_in_time(
    run: Any, wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepted_connection, "HANDSHAKE_TIMEOUT_S", 1.0)

    async def scenario() -> None:
        server = await wire.serve()
        loop = asyncio.get_running_loop()
        began = loop.time()
        silent, half_way = await wire.raw(server), await wire.raw(server)
        handshake = ClientHandshake(wire.client_identity(), bytes(NONCE_BYTES), None)
        half_way.write_handshake(handshake.hello())
        await half_way.read_frame()
        client = await wire.connect(server)
        assert await silent.read_to_end() == b""
        assert await half_way.read_to_end() == b""
        assert 0.99 <= loop.time() - began < 15
        await asyncio.sleep(max(began + 1.5 - loop.time(), 0))
        await client.request(Produce("topic", 1, 0, 1, 10), timeout_s=60)

    run(scenario)


def test_connections_above_the_limit_are_told_so(run: Any, wire: Any, eventually: Any) -> None:
    async def scenario() -> None:
        server = await wire.serve(config=wire.config(max_connections=2))
        first = await wire.connect(server)
        await wire.connect(server)
        with pytest.raises(OverloadedError, match="max_connections"):
            await wire.connect(server)
        broker = await wire.connect(server, wire.server_identity(broker=2))  # a broker is let in
        broker.close()
        first.close()
        await eventually(lambda: wire.connections(server) == 1)
        await wire.connect(server)

    run(scenario)


def test_idle_clients_are_closed_and_idle_servers_are_kept(
    run: Any, wire: Any, eventually: Any
) -> None:
    async def scenario() -> None:
        release = asyncio.get_running_loop().create_future()

        def handler(peer: Any, request: Any, payload: memoryview) -> Any:
            return release if request.partition == 9 else ProduceResponse(1, 0, 0)

        server = await wire.serve(handler, wire.config(idle_connection_ms=1500))
        idle = await wire.connect(server)
        waiting = await wire.connect(server)
        broker = await wire.connect(server, wire.server_identity(broker=2))
        busy = await wire.connect(server)
        held = waiting.request(Produce("topic", 9, 0, 1, 10), timeout_s=60)
        while not idle.closed:
            await busy.request(Produce("topic", 1, 0, 1, 10), timeout_s=60)
            await asyncio.sleep(0.01)
        assert not broker.closed
        assert not waiting.closed, "a held request is no idleness"
        release.set_result(ProduceResponse(5, 0, 0))
        assert (await held)[0].base_offset == 5
        await eventually(lambda: waiting.closed)
        assert not broker.closed

    run(scenario)


def test_the_limit_of_requests_in_flight_stops_reading_and_loses_nothing(
    run: Any, wire: Any, eventually: Any
) -> None:
    async def scenario() -> None:
        waiting: list[tuple[int, asyncio.Future[Any]]] = []
        most = 0

        def hold(peer: Any, request: Any, payload: memoryview) -> Any:
            nonlocal most
            future = asyncio.get_running_loop().create_future()
            waiting.append((request.partition, future))
            most = max(most, len(waiting))
            return future

        server = await wire.serve(hold, wire.config(max_requests_in_flight=10))
        client = await wire.connect(server)
        sizes = [number * 40 if number % 50 else 300_000 for number in range(400)]
        futures = [
            client.request(Produce("topic", number, 0, 1, 10), bytes(size), timeout_s=60)
            for number, size in enumerate(sizes)
        ]
        order: list[int] = []
        while len(order) < 400:
            await eventually(lambda: len(waiting) == min(10, 400 - len(order)))
            for _ in range(random.randrange(1, len(waiting) + 1)):
                number, future = waiting.pop(0)
                order.append(number)
                future.set_result(ProduceResponse(number, 0, 0))
        assert most == 10
        assert order == list(range(400))
        answers = await asyncio.gather(*futures)
        assert [response.base_offset for response, _ in answers] == list(range(400))

    run(scenario)


def test_unanswered_bytes_stop_reading_too(
    run: Any, wire: Any, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    monkeypatch.setattr(accepted_connection, "REQUEST_BYTES_IN_FLIGHT_MAX", 250_000)

    async def scenario() -> None:
        waiting: list[asyncio.Future[Any]] = []

        def hold(peer: Any, request: Any, payload: memoryview) -> Any:
            waiting.append(asyncio.get_running_loop().create_future())
            return waiting[-1]

        client = await wire.connect(await wire.serve(hold))
        futures = [
            client.request(Produce("topic", 1, 0, 1, 10), bytes(100_000), timeout_s=60)
            for _ in range(9)
        ]
        for _ in range(3):
            await eventually(lambda: len(waiting) == 3)
            while waiting:
                waiting.pop().set_result(ProduceResponse(0, 0, 0))
        await asyncio.gather(*futures)

    run(scenario)


def test_a_peer_that_does_not_take_its_answers_is_read_no_further(
    run: Any, wire: Any, eventually: Any
) -> None:
    async def scenario() -> None:
        served = 0

        def handler(peer: Any, request: Any, payload: memoryview) -> Any:
            nonlocal served
            served += 1
            return ProduceResponse(served, 0, 0), answer

        answer = bytes(1024**2)
        server = await wire.serve(handler)
        peer = await wire.raw_authenticated(server)
        for number in range(1, 201):
            peer.write_request(20, number, ENCODER.encode(Produce("topic", 1, 0, 1, 10)))
        await eventually(lambda: served > 0)
        before = 0
        while served != before:
            before = served
            await asyncio.sleep(0.05)
        assert 0 < served < 100
        for number in range(1, 201):
            frame = await peer.read_frame()
            assert (frame.correlation, len(frame.payload)) == (number, 1024**2)

    run(scenario)


def test_handlers_end_their_work_though_the_peer_is_gone(
    run: Any, wire: Any, eventually: Any
) -> None:
    async def scenario() -> None:
        release = asyncio.Event()
        begun: list[bool] = []
        ended: list[bool] = []

        async def work(peer: Any, request: Any, payload: memoryview) -> Any:
            begun.append(True)
            await release.wait()
            ended.append(True)
            return ProduceResponse(0, 0, 0)

        server = await wire.serve(work)
        client = await wire.connect(server)
        future = client.request(Produce("topic", 1, 0, 1, 10), timeout_s=60)
        await eventually(lambda: begun)
        client.close()
        with pytest.raises(DisconnectedError):
            await future
        await eventually(lambda: wire.connections(server) == 0)
        release.set()
        await eventually(lambda: ended == [True])

    run(scenario)


def test_requests_whose_task_is_cancelled_fail_as_disconnected(
    run: Any, wire: Any, eventually: Any
) -> None:
    async def scenario() -> None:
        begun: list[bool] = []

        async def never(peer: Any, request: Any, payload: memoryview) -> Any:
            begun.append(True)
            await asyncio.Event().wait()

        server = await wire.serve(never)
        client = await wire.connect(server)
        future = client.request(Produce("topic", 1, 0, 1, 10), timeout_s=60)
        await eventually(lambda: begun)
        server.environment.tasks.cancel_all()
        with pytest.raises(DisconnectedError, match="stopped"):
            await future

    run(scenario)


# --- ports --------------------------------------------------------------------------------------


def test_the_first_free_port_is_taken(run: Any, wire: Any) -> None:
    async def scenario() -> None:
        first = await wire.serve()
        second = Server(wire.environment(), wire.server_identity(), first.handler)
        with pytest.raises(OSError, match="in use"):
            await second.start("127.0.0.1", first.port)
        await second.start("127.0.0.1", first.port, first_free=True)
        wire.opened.append(second)
        assert first.port < second.port < first.port + 1000
        await assert_served(wire, second)

    run(scenario)


def test_of_two_that_bind_one_port_the_later_listener_takes_the_next(
    run: Any, wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brokers of one node start at the same time, and both may bind before either listens."""
    bind = socket.socket.bind
    rivals: list[socket.socket] = []

    def bind_beside_a_rival(to: socket.socket, address: Any) -> None:
        if rivals:
            bind(to, address)
            return
        rivals.append(socket.socket())
        rivals[0].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bind(rivals[0], address)
        bind(to, address)
        rivals[0].listen()

    async def scenario() -> None:
        free = await wire.serve()
        port = free.port
        free.close()
        server = Server(wire.environment(), wire.server_identity(), free.handler)
        with monkeypatch.context() as patched:
            patched.setattr(socket.socket, "bind", bind_beside_a_rival)
            await server.start("127.0.0.1", port, first_free=True)
        wire.opened.append(server)
        assert server.port > port
        await assert_served(wire, server)

    run(scenario)
    rivals[0].close()


def test_a_closed_server_frees_its_port_and_refuses_connections(run: Any, wire: Any) -> None:
    async def scenario() -> None:
        first = await wire.serve()
        await assert_served(wire, first)
        first.close()
        first.close()
        second = Server(wire.environment(), wire.server_identity(), first.handler)
        wire.opened.append(second)
        await second.start("127.0.0.1", first.port)
        await assert_served(wire, second)

    run(scenario)


def test_sockets_on_both_sides_notice_a_machine_that_vanished(run: Any, wire: Any) -> None:
    async def scenario() -> None:
        server = await wire.serve()
        client = await wire.connect(server)
        for stream in (client, *server._authenticated):
            used = stream._transport.get_extra_info("socket")
            assert used.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert used.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 5
            assert used.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
            assert used.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1

    run(scenario)


# --- the end of a connection ----------------------------------------------------------------------


def test_a_handler_learns_when_the_connection_of_a_peer_has_ended(run: Any, wire: Any) -> None:
    async def scenario() -> None:
        peers: list[Any] = []

        def handler(peer: Any, request: Any, payload: memoryview) -> Any:
            peers.append(peer)
            return ProduceResponse(0, 0, 0)

        server = await wire.serve(handler)
        first, second = await wire.connect(server), await wire.connect(server)
        for client in (first, first, second):
            await client.request(Produce("t", 0, 0, -1, 1000), b"", timeout_s=60)
        assert peers[0] is peers[1]
        assert peers[0].closed is not peers[2].closed
        first.close()
        await asyncio.wait_for(asyncio.shield(peers[0].closed), 60)
        assert not peers[2].closed.done()
        server.close()
        await asyncio.wait_for(asyncio.shield(peers[2].closed), 60)

    run(scenario)
