"""A server holds a bounded amount for its clients, whatever they ask for and do not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rayq.errors import InvalidRequestError
from rayq.messages import Fetch, FetchResponse, Produce, ProduceResponse
from rayq.wire import accepted_connection
from rayq.wire import held_bytes as held_bytes_module
from rayq.wire.codec import ENCODER, decode_error
from rayq.wire.frames import FLAG_ERROR, PREFIX
from rayq.wire.server import Server

MIB = 1024**2


def fetch(number: int = 0) -> bytes:
    return ENCODER.encode(Fetch("t", number, 0, 0, None, MIB, 0))


def held_bytes(server: Server) -> int:
    return sum(stream.held_bytes for stream in server._authenticated)


async def assert_served(wire: Any, server: Server) -> None:
    client = await wire.connect(server)
    await client.request(Produce("topic", 1, 0, 1, 10), timeout_s=60)
    client.close()


class Leader:
    """Answers each fetch with a mebibyte, once it may; other requests at once."""

    def __init__(self, *, takes_room: bool = True) -> None:
        self.asked = 0
        self.made = 0
        self.cancelled = 0
        self.may_answer = asyncio.Event()
        self._takes_room = takes_room

    def __call__(self, peer: Any, request: Any, payload: memoryview) -> Any:
        return self.fetch(peer) if isinstance(request, Fetch) else ProduceResponse(1, 0, 0)

    async def fetch(self, peer: Any) -> Any:
        self.asked += 1
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if not self._takes_room:
            return self.answer()
        async with peer.room.take(MIB):
            return self.answer()

    def answer(self) -> Any:
        self.made += 1
        return FetchResponse(1, 0, 0, 1), bytes(MIB)


def test_held_requests_of_a_client_that_does_not_read_are_answered_no_faster_than_it_reads(
    run: Any, wire: Any, eventually: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        leader = Leader()
        server = await wire.serve(leader)
        peer = await wire.raw_authenticated(server)
        for number in range(1, 301):
            peer.write_request(21, number, fetch())
        await eventually(lambda: leader.asked == 300)
        leader.may_answer.set()
        await eventually(lambda: leader.made > 0)
        for _ in range(50):
            await assert_served(wire, server)
        assert leader.made < 50
        assert held_bytes(server) < 40 * MIB
        answered = {(await peer.read_frame()).correlation for _ in range(300)}
        assert answered == set(range(1, 301)), "nothing is lost when it reads after all"

    run(scenario)


def test_work_for_a_client_that_is_gone_ends_with_its_connection(
    run: Any, wire: Any, eventually: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        leader = Leader()
        server = await wire.serve(leader)
        peer = await wire.raw_authenticated(server)
        for number in range(1, 101):
            peer.write_request(21, number, fetch())
        await eventually(lambda: leader.asked == 100)
        peer.close()
        await eventually(lambda: leader.cancelled == 100)
        await assert_served(wire, server)

    run(scenario)


def test_a_client_that_takes_nothing_for_long_is_disconnected(
    run: Any, wire: Any, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., Any], caplog: Any
) -> None:
    monkeypatch.setattr(accepted_connection, "UNSENT_TIMEOUT_S", 0.2)

    async def scenario() -> None:
        leader = Leader()
        leader.may_answer.set()
        server = await wire.serve(leader)
        peer = await wire.raw_authenticated(server)
        for number in range(1, 101):
            peer.write_request(21, number, fetch())
        await eventually(lambda: leader.made > 0)
        await eventually(lambda: wire.connections(server) == 0)
        assert "has taken no answers for" in caplog.text
        await assert_served(wire, server)

    run(scenario)


def test_a_client_for_which_too_much_is_unsent_is_disconnected(
    run: Any, wire: Any, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., Any]
) -> None:
    """Here handlers do not ask for room: there are many answers of middling size."""
    monkeypatch.setattr(accepted_connection, "UNSENT_BYTES_MAX", 20 * MIB)

    async def scenario() -> None:
        leader = Leader(takes_room=False)
        server = await wire.serve(leader)
        peer = await wire.raw_authenticated(server)
        for number in range(1, 101):
            peer.write_request(21, number, fetch())
        await eventually(lambda: leader.asked == 100)
        leader.may_answer.set()
        await eventually(lambda: wire.connections(server) == 0)
        await assert_served(wire, server)

    run(scenario)


def test_all_clients_together_hold_so_much_and_those_go_that_stand_still(
    run: Any, wire: Any, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., Any]
) -> None:
    monkeypatch.setattr(held_bytes_module, "CLIENT_BYTES_HELD_MAX", 64 * MIB)
    monkeypatch.setattr(held_bytes_module, "STANDSTILL_S", 0.5)

    async def scenario() -> None:
        leader = Leader()
        leader.may_answer.set()
        server = await wire.serve(leader)
        reader = await wire.connect(server)
        silent = []
        for _ in range(12):
            peer = await wire.raw_authenticated(server)
            silent.append(peer)
            for number in range(1, 40):
                peer.write_request(21, number, fetch())
            await asyncio.sleep(0)
            await reader.request(Fetch("t", 1, 0, 0, None, MIB, 0), timeout_s=60)
            assert held_bytes(server) < 80 * MIB
        await asyncio.sleep(0.6)
        await reader.request(Fetch("t", 1, 0, 0, None, MIB, 0), timeout_s=60)
        assert not reader.closed
        assert held_bytes(server) < 80 * MIB

    run(scenario)


def test_frames_that_never_arrive_whole_count_as_well(
    run: Any, wire: Any, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., Any]
) -> None:
    monkeypatch.setattr(held_bytes_module, "CLIENT_BYTES_HELD_MAX", 8 * MIB)
    monkeypatch.setattr(held_bytes_module, "STANDSTILL_S", 0.5)

    async def scenario() -> None:
        server = await wire.serve()
        honest = await wire.connect(server)
        for _ in range(6):
            peer = await wire.raw_authenticated(server)
            peer.write(PREFIX.pack(20 * MIB, 1, 0, 20, 1, 60) + bytes(3 * MIB))
            await eventually(
                lambda: any(
                    one.held_bytes > 2.9 * MIB and one.received_at for one in server._authenticated
                )
            )
            await honest.request(Produce("topic", 1, 0, 1, 10), timeout_s=60)
            assert held_bytes(server) < 12 * MIB
        await asyncio.sleep(0.6)
        await honest.request(Produce("topic", 1, 0, 1, 10), bytes(5 * MIB), timeout_s=60)
        assert held_bytes(server) < 9 * MIB

    run(scenario)


def test_a_clients_request_with_an_enormous_header_is_refused(run: Any, wire: Any) -> None:
    async def scenario() -> None:
        server = await wire.serve()
        peer = await wire.raw_authenticated(server)
        peer.write_request(20, 1, bytes(5 * MIB))
        frame = await peer.read_frame()
        assert frame.flags == FLAG_ERROR
        error = decode_error(frame.header)
        assert isinstance(error, InvalidRequestError)
        assert "ask for less" in str(error)

    run(scenario)


def test_the_requests_of_one_client_do_not_keep_others_waiting(run: Any, wire: Any) -> None:
    async def scenario() -> None:
        served: list[int] = []

        def handler(peer: Any, request: Any, payload: memoryview) -> Any:
            served.append(request.partition)
            return ProduceResponse(1, 0, 0)

        server = await wire.serve(handler)
        busy, client = await wire.raw_authenticated(server), await wire.connect(server)
        frames = b"".join(
            PREFIX.pack(12 + len(one), 1, 0, 20, 7, len(one)) + one
            for one in [ENCODER.encode(Produce("t", 1, 0, 1, 10))] * 1500
        )
        busy.write(frames)  # all frames arrive at once
        await client.request(Produce("t", 2, 0, 1, 10), timeout_s=60)
        assert served.index(2) < 1400
        for _ in range(1500):
            await busy.read_frame()

    run(scenario)
