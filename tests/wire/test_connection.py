"""A client's connection against a real server on the loopback address."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rayq.errors import (
    DisconnectedError,
    InvalidRequestError,
    NotLeaderError,
    OverloadedError,
    ProtocolError,
    RayqError,
    TimeoutError,
    UnknownServerError,
    UnsupportedVersionError,
    WrongClusterError,
)
from rayq.messages import (
    AllocateProducerId,
    AllocateProducerIdResponse,
    ProduceResponse,
)
from rayq.wire import connection, network, stream
from rayq.wire.authentication import Challenge, Hello
from rayq.wire.codec import ENCODER, decode_error
from rayq.wire.connection import Connection
from rayq.wire.frames import FLAG_ERROR


def test_payloads_of_all_sizes_come_back(run: Any, wire: Any, make_produce: Any) -> None:
    async def scenario() -> None:
        client = await wire.connect(await wire.serve())
        for size in (0, 1, 1000, 16_384, 65_536, 70_000, 1024**2, 5 * 1024**2 + 7):
            payload = bytes(range(256)) * (size // 256) + bytes(size % 256)
            response, answer = await client.request(make_produce(3), payload, timeout_s=60)
            assert response == ProduceResponse(3, 0, size)
            assert answer == payload

    run(scenario)


def test_a_connection_that_breaks_as_it_begins_is_told_as_one(
    run: Any, wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(_socket: Any) -> None:
        raise ValueError("negative file descriptor")  # As uvloop says it.

    async def scenario() -> None:
        server = await wire.serve()
        monkeypatch.setattr(network, "_set_options", ended)
        with pytest.raises(DisconnectedError, match="ended as it began"):
            await wire.connect(server)

    run(scenario)


def test_a_payload_may_come_in_parts(run: Any, wire: Any, make_produce: Any) -> None:
    async def scenario() -> None:
        client = await wire.connect(await wire.serve())
        parts = [b"ab", bytearray(b"cd"), memoryview(b"x" * 100_000), b"", b"ef"]
        _, answer = await client.request(make_produce(), parts, timeout_s=60)
        assert answer == b"abcd" + b"x" * 100_000 + b"ef"

    run(scenario)


def test_the_handler_may_write_into_the_payload(run: Any, wire: Any, make_produce: Any) -> None:
    def stamp(peer: Any, request: Any, payload: memoryview) -> Any:
        payload[:2] = b"OK"
        return ProduceResponse(0, 0, 0), payload

    async def scenario() -> None:
        client = await wire.connect(await wire.serve(stamp))
        for size in (10, 100_000):
            _, answer = await client.request(make_produce(), b"." * size, timeout_s=60)
            assert answer == b"OK" + b"." * (size - 2)

    run(scenario)


def test_answers_may_come_in_any_order(
    run: Any, wire: Any, make_produce: Any, eventually: Any
) -> None:
    async def scenario() -> None:
        waiting: dict[int, asyncio.Future[Any]] = {}

        def hold(peer: Any, request: Any, payload: memoryview) -> Any:
            waiting[request.partition] = asyncio.get_running_loop().create_future()
            return waiting[request.partition]

        client = await wire.connect(await wire.serve(hold))
        futures = [client.request(make_produce(n), timeout_s=60) for n in range(50)]
        await eventually(lambda: len(waiting) == 50)
        finished = []
        for number in reversed(range(50)):
            futures[number].add_done_callback(lambda _, number=number: finished.append(number))
            waiting[number].set_result(ProduceResponse(number * 10, 0, 0))
        answers = await asyncio.gather(*futures)
        assert [response.base_offset for response, _ in answers] == [n * 10 for n in range(50)]
        assert finished == list(reversed(range(50)))

    run(scenario)


def test_frames_arrive_in_the_order_of_the_calls(run: Any, wire: Any, make_produce: Any) -> None:
    async def scenario() -> None:
        seen: list[int] = []

        async def note(peer: Any, request: Any, payload: memoryview) -> Any:
            await asyncio.sleep(0)
            return ProduceResponse(0, 0, 0)

        def handler(peer: Any, request: Any, payload: memoryview) -> Any:
            seen.append(request.partition)
            return note(peer, request, payload)

        client = await wire.connect(await wire.serve(handler))
        futures = []
        for number in range(300):
            size = 200_000 if number % 37 == 0 else number
            if number % 5 == 0:
                client.send(make_produce(number), bytes(size))
            else:
                futures.append(client.request(make_produce(number), bytes(size), timeout_s=60))
        await asyncio.gather(*futures)
        assert seen == list(range(300))

    run(scenario)


def test_errors_come_as_their_class_and_the_connection_goes_on(
    run: Any, wire: Any, make_produce: Any
) -> None:
    async def later(error: Exception) -> Any:
        await asyncio.sleep(0)
        raise error

    def handler(peer: Any, request: Any, payload: memoryview) -> Any:
        if request.partition == 0:
            raise NotLeaderError("Ask broker 2.")
        if request.partition == 1:
            return later(NotLeaderError("Ask broker 3."))
        if request.partition == 2:
            raise ZeroDivisionError("a bug")
        if request.partition == 3:
            return later(ZeroDivisionError("a late bug"))
        if request.partition == 4:
            return None
        return ProduceResponse(1, 2, 3)

    async def scenario() -> None:
        client = await wire.connect(await wire.serve(handler))
        for number, error, text in (
            (0, NotLeaderError, "Ask broker 2."),
            (1, NotLeaderError, "Ask broker 3."),
            (2, UnknownServerError, "a bug"),
            (3, UnknownServerError, "a late bug"),
            (4, UnknownServerError, "no answer"),
        ):
            with pytest.raises(error, match=text):
                await client.request(make_produce(number), timeout_s=60)
        assert (await client.request(make_produce(5), timeout_s=60))[0] == ProduceResponse(1, 2, 3)

    run(scenario)


def test_a_one_way_request_is_carried_out_and_answered_only_by_an_error(
    run: Any, wire: Any, make_produce: Any
) -> None:
    async def scenario() -> None:
        seen: list[bytes] = []

        def handler(peer: Any, request: Any, payload: memoryview) -> Any:
            seen.append(bytes(payload))
            if request.partition == 1:
                raise NotLeaderError("moved")
            return None if request.partition == 0 else ProduceResponse(0, 0, 0)

        client = await wire.connect(await wire.serve(handler))
        refused: list[RayqError] = []
        client.send(make_produce(1), b"zero")  # no caller waits for it
        await client.request(make_produce(2), b"one", timeout_s=60)
        client.on_refused = lambda _connection, error: refused.append(error)
        client.send(make_produce(0), b"two")
        client.send(make_produce(1), b"three")
        await client.request(make_produce(2), b"four", timeout_s=60)
        assert seen == [b"zero", b"one", b"two", b"three", b"four"]
        assert [(type(error), error.message) for error in refused] == [(NotLeaderError, "moved")]

    run(scenario)


def test_a_lost_connection_fails_all_that_is_pending(
    run: Any, wire: Any, make_produce: Any
) -> None:
    async def scenario() -> None:
        never = asyncio.get_running_loop().create_future()
        server = await wire.serve(lambda peer, request, payload: never)
        client = await wire.connect(server)
        called: list[str] = []
        client.on_close(lambda: called.append("closed"))
        futures = [client.request(make_produce(n), timeout_s=60) for n in range(20)]
        client.flush()
        server.close()
        for future in futures:
            with pytest.raises(DisconnectedError):
                await future
        assert client.closed
        assert called == ["closed"]
        with pytest.raises(DisconnectedError):
            await client.request(make_produce(), timeout_s=60)
        with pytest.raises(DisconnectedError):
            client.send(make_produce())
        client.on_close(lambda: called.append("late"))
        await asyncio.sleep(0)
        assert called == ["closed", "late"]

    run(scenario)


def test_closing_sends_what_was_written_and_fails_what_is_pending(
    run: Any, wire: Any, make_produce: Any, eventually: Any
) -> None:
    async def scenario() -> None:
        seen: list[int] = []

        def handler(peer: Any, request: Any, payload: memoryview) -> Any:
            seen.append(len(payload))
            return ProduceResponse(0, 0, 0)

        client = await wire.connect(await wire.serve(handler))
        client.send(make_produce(), bytes(3_000_000))
        future = client.request(make_produce(), b"x", timeout_s=60)
        client.close()
        client.close()
        with pytest.raises(DisconnectedError, match="on this side"):
            await future
        await eventually(lambda: seen == [3_000_000, 1])

    run(scenario)


def test_time_in_which_this_process_could_hear_nobody_counts_for_no_time_out(
    run: Any, wire: Any, make_produce: Any
) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        held: asyncio.Future[Any] = loop.create_future()
        server = await wire.serve(lambda peer, request, payload: held)
        unheard_s = 5.0
        client = wire.keep(
            await Connection.open(
                wire.environment(), server.host, server.port, wire.client_identity(),
                unheard_s=lambda: unheard_s,
            )
        )
        began_s = loop.time()
        answer = client.request(make_produce(), timeout_s=0.2)
        unheard_s += 0.3
        with pytest.raises(TimeoutError):
            await answer
        assert 0.49 < loop.time() - began_s < 5

    run(scenario)


def test_requests_time_out_each_at_its_own_deadline(
    run: Any, wire: Any, make_produce: Any, eventually: Any
) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        answers: dict[int, asyncio.Future[Any]] = {}

        def hold(peer: Any, request: Any, payload: memoryview) -> Any:
            answers[request.partition] = loop.create_future()
            return answers[request.partition]

        client = await wire.connect(await wire.serve(hold))
        began = loop.time()
        ended: dict[int, float] = {}
        waits_ms = {0: 900, 1: 300, 2: 600, 3: 60_000}
        futures = {
            n: client.request(make_produce(n), timeout_s=ms / 1000) for n, ms in waits_ms.items()
        }
        order: list[int] = []
        for number in (0, 1, 2):
            futures[number].add_done_callback(lambda _, number=number: order.append(number))
        for number in (1, 2, 0):
            with pytest.raises(TimeoutError, match="Produce"):
                await futures[number]
            ended[number] = loop.time() - began
        assert order == [1, 2, 0]
        assert all(ended[n] >= waits_ms[n] / 1000 - 0.005 for n in ended)
        await eventually(lambda: len(answers) == 4)
        answers[1].set_result(ProduceResponse(1, 0, 0))  # a late answer does no harm
        answers[3].set_result(ProduceResponse(3, 0, 0))
        assert (await futures[3])[0].base_offset == 3
        assert not client.closed

    run(scenario)


def test_a_patient_request_waits_on_while_bytes_come(
    run: Any, wire: Any, make_produce: Any
) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        held: dict[int, asyncio.Future[Any]] = {}

        def answer(peer: Any, request: Any, payload: memoryview) -> Any:
            if request.partition == 0:
                return ProduceResponse(0, 0, 0)
            held[request.partition] = loop.create_future()
            return held[request.partition]

        client = await wire.connect(await wire.serve(answer))
        patient = client.request(make_produce(1), timeout_s=1.0, patience_s=60)
        bounded = client.request(make_produce(2), timeout_s=1.0, patience_s=1.2)
        began_s = loop.time()
        while loop.time() < began_s + 1.6:
            await client.request(make_produce(0), timeout_s=60)
            await asyncio.sleep(0.01)
        with pytest.raises(TimeoutError):
            await bounded
        held[1].set_result(ProduceResponse(1, 0, 0))
        assert (await patient)[0].base_offset == 1
        silent = client.request(make_produce(3), timeout_s=0.1, patience_s=60)
        with pytest.raises(TimeoutError):
            await silent

    run(scenario)


def test_a_peer_that_says_nothing_at_all_while_requests_time_out_is_given_up(
    run: Any, wire: Any, make_produce: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SILENT_PEER_S", 0.02)

    async def scenario() -> None:
        never = asyncio.get_running_loop().create_future()
        client = await wire.connect(await wire.serve(lambda peer, request, payload: never))
        first = client.request(make_produce(), timeout_s=0.05)
        second = client.request(make_produce(), timeout_s=60)
        with pytest.raises(TimeoutError):
            await first
        with pytest.raises(DisconnectedError, match="nothing came"):
            await second

    run(scenario)


def test_a_cancelled_request_leaves_the_connection_whole(
    run: Any, wire: Any, make_produce: Any
) -> None:
    async def scenario() -> None:
        client = await wire.connect(await wire.serve())
        client.request(make_produce(1), timeout_s=60).cancel()
        response, _ = await client.request(make_produce(2), timeout_s=60)
        assert response.base_offset == 2

    run(scenario)


def test_correlations_wrap_around_and_skip_those_in_use(
    run: Any, wire: Any, make_produce: Any
) -> None:
    async def scenario() -> None:
        release = asyncio.get_running_loop().create_future()

        def handler(peer: Any, request: Any, payload: memoryview) -> Any:
            return release if request.partition == 0 else ProduceResponse(request.partition, 0, 0)

        client = await wire.connect(await wire.serve(handler))
        held = client.request(make_produce(0), timeout_s=60)
        client._correlation = 2**32 - 3
        for number in range(1, 6):
            response, _ = await client.request(make_produce(number), timeout_s=60)
            assert response.base_offset == number
        release.set_result(ProduceResponse(77, 0, 0))
        assert (await held)[0].base_offset == 77

    run(scenario)


def test_a_request_above_the_frame_limit_is_refused_before_it_is_sent(
    run: Any, wire: Any, make_produce: Any
) -> None:
    async def scenario() -> None:
        client = await wire.connect(await wire.serve())
        too_large = [bytes(1024**2)] * 81
        with pytest.raises(InvalidRequestError, match="max_frame_bytes"):
            await client.request(make_produce(), too_large, timeout_s=60)
        await client.request(make_produce(), timeout_s=60)

    run(scenario)


def test_an_answer_above_the_frame_limit_becomes_an_error(
    run: Any, wire: Any, make_produce: Any
) -> None:
    async def scenario() -> None:
        large = [bytes(1024**2)] * 81
        server = await wire.serve(lambda peer, request, payload: (ProduceResponse(0, 0, 0), large))
        client = await wire.connect(server)
        with pytest.raises(InvalidRequestError, match="max_frame_bytes"):
            await client.request(make_produce(), timeout_s=60)

    run(scenario)


def test_too_many_unanswered_requests_are_refused(
    run: Any, wire: Any, make_produce: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PENDING_REQUESTS_MAX", 3)

    async def scenario() -> None:
        client = await wire.connect(await wire.serve())
        futures = [client.request(make_produce(n), timeout_s=60) for n in range(4)]
        with pytest.raises(OverloadedError):
            await futures[3]
        await asyncio.gather(*futures[:3])

    run(scenario)


def test_drain_waits_until_a_slow_peer_has_taken_the_bytes(
    run: Any, wire: Any, make_produce: Any
) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()

        async def slow(peer: Any, request: Any, payload: memoryview) -> Any:
            await gate.wait()
            return ProduceResponse(0, 0, 0)

        config = wire.config(max_requests_in_flight=1)
        client = await wire.connect(await wire.serve(slow, config))
        futures = [client.request(make_produce(), bytes(4 * 1024**2), timeout_s=60) for _ in "12345"]
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.drain(), 0.05)
        gate.set()
        await client.drain()
        await asyncio.gather(*futures)

    run(scenario)


def test_an_answer_of_another_type_fails_its_request_only(
    run: Any, wire: Any, make_produce: Any
) -> None:
    async def scenario() -> None:
        server = await wire.serve(
            lambda peer, request, payload: AllocateProducerIdResponse("?", 0)  # type: ignore[arg-type]
        )
        client = await wire.connect(server)
        with pytest.raises(ProtocolError, match="AllocateProducerIdResponse"):
            await client.request(AllocateProducerId(), timeout_s=60)
        assert not client.closed

    run(scenario)


def test_who_the_server_is_is_known_after_opening(run: Any, wire: Any) -> None:
    async def scenario() -> None:
        server = await wire.serve()
        client = await wire.connect(server, expect_broker=1)
        assert (client.peer_cluster_id, client.peer_broker) == ("cluster", 1)
        with pytest.raises(WrongClusterError, match="broker 2"):
            await wire.connect(server, expect_broker=2)
        with pytest.raises(WrongClusterError, match="elsewhere"):
            await wire.connect(server, wire.client_identity("elsewhere"))

    run(scenario)


def test_versions_without_overlap_are_told_to_both_sides(run: Any, wire: Any) -> None:
    async def scenario() -> None:
        server = await wire.serve()
        newer = await wire.raw(server)
        newer.write_handshake(ENCODER.encode(Hello(2, 3, "client", bytes(32), None, None, None)))
        frame = await newer.read_frame()
        assert frame.flags == FLAG_ERROR
        assert isinstance(decode_error(frame.header), UnsupportedVersionError)
        assert await newer.read_to_end() == b""

        old_server = await asyncio.start_server(answer_with_version_9, "127.0.0.1", 0)
        host, port = old_server.sockets[0].getsockname()
        with pytest.raises(UnsupportedVersionError, match="version 9"):
            await Connection.open(wire.environment(), host, port, wire.client_identity())
        old_server.close()

    async def answer_with_version_9(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        peer = wire.raw_over(reader, writer)
        await peer.read_frame()
        peer.write_handshake(ENCODER.encode(Challenge(9, bytes(32))))
        await reader.read()
        writer.close()

    run(scenario)


def test_nobody_there_is_a_disconnected_error(run: Any, wire: Any) -> None:
    async def scenario() -> None:
        server = await wire.serve()
        server.close()
        with pytest.raises(DisconnectedError, match=f"{server.port}"):
            await wire.connect(server)

    run(scenario)


def test_a_server_that_never_answers_is_given_up(
    run: Any, wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "OPEN_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        closed = asyncio.Event()

        async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            closed.set()
            writer.close()

        silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
        host, port = silent.sockets[0].getsockname()
        with pytest.raises(DisconnectedError, match=r"0.05 s"):
            await Connection.open(wire.environment(), host, port, wire.client_identity())
        await closed.wait()  # and the half-made connection is not left behind
        silent.close()

    run(scenario)


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 64])
def test_a_server_that_is_no_rayq_is_a_protocol_error(run: Any, wire: Any, greeting: bytes) -> None:
    async def scenario() -> None:
        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(100)
            writer.write(greeting)
            await writer.drain()
            writer.close()

        other = await asyncio.start_server(greet, "127.0.0.1", 0)
        host, port = other.sockets[0].getsockname()
        with pytest.raises(ProtocolError):
            await Connection.open(wire.environment(), host, port, wire.client_identity())
        other.close()

    run(scenario)


def test_opening_can_be_cancelled(run: Any, wire: Any) -> None:
    async def scenario() -> None:
        server = await wire.serve()
        for turns in range(12):
            opening = asyncio.ensure_future(wire.connect(server))
            for _ in range(turns):
                await asyncio.sleep(0)
            opening.cancel()
            await asyncio.wait([opening])
        await wire.connect(server)

    run(scenario)


@pytest.mark.parametrize(
    ("peername", "address"),
    [
        (("10.0.0.1", 9092), "10.0.0.1:9092"),
        (("::ffff:10.0.0.1", 9092, 0, 0), "10.0.0.1:9092"),
        (("::1", 9092, 0, 0), "::1:9092"),
        (("fe80::1%eth0", 9092, 0, 2), "fe80::1%eth0:9092"),
        ("", ""),
        (None, "None"),
    ],
)
def test_an_ipv4_client_has_an_ipv4_address_on_any_socket(
    peername: object, address: str
) -> None:
    assert stream._address(peername) == address
