"""Connections that a process shares."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rayq.errors import ClosedError, DisconnectedError, TimeoutError
from rayq.wire import connection
from rayq.wire.pool import ConnectionPool


def test_concurrent_callers_share_one_connection(run: Any, wire: Any, make_produce: Any) -> None:
    async def scenario() -> None:
        server = await wire.serve()
        pool = wire.keep(ConnectionPool(wire.environment(), wire.client_identity()))
        found = await asyncio.gather(*(pool.get(server.host, server.port) for _ in range(20)))
        assert len({id(connection) for connection in found}) == 1
        assert wire.connections(server) == 1
        response, payload = await pool.request(
            server.host, server.port, make_produce(5), b"x", timeout_s=60
        )
        assert (response.base_offset, bytes(payload)) == (5, b"x")
        assert wire.connections(server) == 1

    run(scenario)


def test_a_closed_connection_is_opened_again(
    run: Any, wire: Any, make_produce: Any, eventually: Any
) -> None:
    async def scenario() -> None:
        server = await wire.serve()
        pool = wire.keep(ConnectionPool(wire.environment(), wire.client_identity()))
        first = await pool.get(server.host, server.port)
        for stream in list(server._authenticated):
            stream.end(None)
        await eventually(lambda: first.closed)
        await pool.request(server.host, server.port, make_produce(), timeout_s=60)
        assert await pool.get(server.host, server.port) is not first

    run(scenario)


def test_a_failed_attempt_fails_all_who_waited_and_the_next_tries_again(
    run: Any, wire: Any
) -> None:
    async def scenario() -> None:
        server = await wire.serve()
        port = server.port
        server.close()
        pool = wire.keep(ConnectionPool(wire.environment(), wire.client_identity()))
        outcomes = await asyncio.gather(
            *(pool.get("127.0.0.1", port) for _ in range(5)), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [DisconnectedError] * 5
        causes = [
            type(outcome.__cause__) for outcome in outcomes
        ]  # a probe learns from the cause that the server is dead
        assert causes == [ConnectionRefusedError] * 5
        await server.start("127.0.0.1", port)
        assert not (await pool.get("127.0.0.1", port)).closed

    run(scenario)


def test_one_caller_who_gives_up_does_not_end_the_attempt_for_others(run: Any, wire: Any) -> None:
    async def scenario() -> None:
        server = await wire.serve()
        pool = wire.keep(ConnectionPool(wire.environment(), wire.client_identity()))
        impatient = asyncio.ensure_future(pool.get(server.host, server.port))
        patient = asyncio.ensure_future(pool.get(server.host, server.port))
        await asyncio.sleep(0)
        impatient.cancel()
        assert not (await patient).closed
        assert impatient.cancelled()

    run(scenario)


def test_the_timeout_of_a_request_covers_connecting(
    run: Any, wire: Any, make_produce: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "OPEN_TIMEOUT_S", 60.0)

    async def scenario() -> None:
        async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
        host, port = silent.sockets[0].getsockname()
        pool = wire.keep(ConnectionPool(wire.environment(), wire.client_identity()))
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(TimeoutError, match="connected"):
            await pool.request(host, port, make_produce(), timeout_s=0.05)
        assert loop.time() - began < 30
        silent.close()

    run(scenario)


def test_a_closed_pool_ends_its_connections_and_attempts(run: Any, wire: Any) -> None:
    async def scenario() -> None:
        server, other = await wire.serve(), await wire.serve()
        pool = wire.keep(ConnectionPool(wire.environment(), wire.client_identity()))
        connection = await pool.get(server.host, server.port)
        attempt = asyncio.ensure_future(pool.get(other.host, other.port))
        await asyncio.sleep(0)
        pool.close()
        assert connection.closed
        with pytest.raises(ClosedError):
            await attempt
        with pytest.raises(ClosedError):
            await pool.get(server.host, server.port)

    run(scenario)
