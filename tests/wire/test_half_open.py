"""Clients that open sockets and say nothing: other clients are served all the while."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from rayq.config import ClusterConfig
from rayq.errors import OverloadedError
from rayq.messages import Produce
from rayq.wire import accepted_connection
from rayq.wire import server as server_module
from rayq.wire.handshakes import UnfinishedHandshakes
from rayq.wire.server import Server

HALF_OPEN = 200
HONEST = 20


async def open_silent(server: Server, count: int, source: str = "127.0.0.1") -> list[socket.socket]:
    """Opens sockets that connect and never send a byte."""
    loop = asyncio.get_running_loop()
    opened = []
    for _ in range(count):
        silent = socket.socket()
        silent.setblocking(False)
        silent.bind((source, 0))
        await loop.sock_connect(silent, (server.host, server.port))
        opened.append(silent)
    return opened


def count_open(sockets: list[socket.socket]) -> int:
    """How many of the sockets the server has not closed."""

    def is_open(one: socket.socket) -> bool:
        try:
            return one.recv(1) != b""
        except BlockingIOError:
            return True
        except ConnectionError:
            return False

    return sum(map(is_open, sockets))


def close(sockets: list[socket.socket]) -> None:
    for one in sockets:
        one.close()


async def ask(wire: Any, server: Server, config: ClusterConfig | None = None) -> None:
    client = await wire.connect(server, config=config)
    await client.request(Produce("topic", 1, 0, 1, 10), timeout_s=60)
    client.close()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "UNFINISHED_HANDSHAKES_MAX", 8)


@pytest.fixture
def tls(tmp_path: Path) -> ClusterConfig:
    ca = trustme.CA()
    certificate = ca.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "certificate.pem")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    return ClusterConfig(
        tls_certificate=str(tmp_path / "certificate.pem"),
        tls_key=str(tmp_path / "key.pem"),
        tls_ca=str(tmp_path / "ca.pem"),
    )


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "TLS"])
def test_every_honest_client_gets_in_while_others_open_sockets_and_say_nothing(
    run: Any, wire: Any, tls: ClusterConfig, is_encrypted: bool
) -> None:
    async def scenario() -> None:
        config = tls if is_encrypted else None
        server = await wire.serve(config=config)
        silent: list[socket.socket] = []

        async def attack() -> None:
            while len(silent) < HALF_OPEN:
                silent.extend(await open_silent(server, 2))
                await asyncio.sleep(0)

        attacking = asyncio.create_task(attack())
        for _ in range(HONEST):
            await ask(wire, server, config)
        await attacking
        await ask(wire, server, config)
        close(silent)

    run(scenario)


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "TLS"])
def test_unfinished_handshakes_are_bounded_and_the_oldest_goes_first(
    run: Any,
    wire: Any,
    tls: ClusterConfig,
    is_encrypted: bool,
    few: None,
    eventually: Callable[..., Any],
) -> None:
    """This holds also for sockets that never begin TLS."""

    async def scenario() -> None:
        server = await wire.serve(config=tls if is_encrypted else None)
        old = await open_silent(server, 8)
        await eventually(lambda: len(server._unauthenticated) == 8)
        new = await open_silent(server, 5)
        await eventually(lambda: count_open(old) <= 3)
        assert count_open(old[:5]) == 0
        assert count_open(new) == 5
        assert len(server._unauthenticated) == 8
        close(old + new)
        await eventually(lambda: len(server._unauthenticated) == 0)

    run(scenario)


def test_who_floods_the_port_takes_no_place_from_another_address(
    run: Any, wire: Any, few: None, eventually: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        server = await wire.serve()
        elsewhere = await open_silent(server, 2, "127.0.0.2")
        await eventually(lambda: len(server._unauthenticated) == 2)
        flood = await open_silent(server, 40)
        await eventually(lambda: count_open(flood) <= 6)
        assert count_open(elsewhere) == 2
        close(flood + elsewhere)

    run(scenario)


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "TLS"])
def test_a_socket_that_says_nothing_is_closed_in_time(
    run: Any,
    wire: Any,
    tls: ClusterConfig,
    is_encrypted: bool,
    monkeypatch: pytest.MonkeyPatch,
    eventually: Callable[..., Any],
) -> None:
    monkeypatch.setattr(accepted_connection, "HANDSHAKE_TIMEOUT_S", 1.0)

    async def scenario() -> None:
        server = await wire.serve(config=tls if is_encrypted else None)
        silent = await open_silent(server, 3)
        await eventually(lambda: len(server._unauthenticated) == 3)
        await eventually(lambda: len(server._unauthenticated) == 0)
        await eventually(lambda: count_open(silent) == 0)
        close(silent)

    run(scenario)


def test_a_full_house_is_shared_out_by_address() -> None:
    handshakes: UnfinishedHandshakes[str] = UnfinishedHandshakes(4)
    assert [handshakes.add(one, "A") for one in ("a1", "a2", "a3")] == [None] * 3
    assert handshakes.add("b1", "B") is None
    assert handshakes.add("c1", "C") == "a1"
    assert handshakes.add("d1", "D") == "a2"
    assert handshakes.add("e1", "E") == "a3"  # all addresses have one: the oldest of all goes
    assert handshakes.remove("b1")
    assert not handshakes.remove("b1")
    assert sorted(handshakes) == ["c1", "d1", "e1"]
    assert handshakes.add("b2", "B") is None
    assert len(handshakes) == 4


# --- descriptors ----------------------------------------------------------------------------------


@pytest.fixture
def low_limit() -> Any:
    """The process may have 160 more descriptors than it has."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as probe:
        limit = probe.fileno() + 160
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_clients_are_told_before_the_descriptors_of_files_and_servers_are_touched(
    run: Any, wire: Any, low_limit: int, eventually: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        server = await wire.serve()
        with pytest.raises(OverloadedError, match="ulimit"):
            for _ in range(100):  # each takes two descriptors, since both ends are here
                await wire.connect(server)
        broker = await wire.connect(server, wire.server_identity(broker=2))
        await broker.request(Produce("topic", 1, 0, 1, 10), timeout_s=60)
        with open(__file__):  # noqa: ASYNC230 - a file finds a descriptor
            pass
        for client in [*wire.opened]:
            if client is not server and client is not broker:
                client.close()
        await eventually(lambda: wire.connections(server) == 1)
        await ask(wire, server)

    run(scenario)


def test_a_flood_of_sockets_leaves_descriptors_for_files(
    run: Any, wire: Any, low_limit: int, eventually: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        server = await wire.serve()
        client = await wire.connect(server)
        silent: list[socket.socket] = []
        try:
            while True:
                silent += await open_silent(server, 1)
        except OSError:
            pass  # no descriptor is left here; the server runs in this process
        await client.request(Produce("topic", 1, 0, 1, 10), timeout_s=60)
        close(silent)
        await eventually(lambda: len(server._unauthenticated) == 0)
        await ask(wire, server)

    run(scenario)
