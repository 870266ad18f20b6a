"""A server's gate: who may connect as a principal, and what it may ask for, also later."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any

import pytest

from rayq.errors import (
    AuthenticationError,
    AuthorizationError,
    ControllerUnavailableError,
    DisconnectedError,
    InvalidRequestError,
    OverloadedError,
)
from rayq.messages import (
    REQUESTS,
    AnyRequest,
    DescribePrincipals,
    DescribeQueues,
    EndTransaction,
    Fetch,
    GroupHeartbeat,
    Produce,
    Take,
)
from rayq.wire.authentication import Credentials, Identity, ValidToken
from rayq.wire.descriptors import Descriptors
from rayq.wire.peer import Peer
from rayq.wire.scram import client_keys
from rayq.wire.tokens import PrincipalToken, draw_token
from tests.wire.recorded_messages import example_of

SALT = b"0123456789abcdef"
ANNA, BEN = draw_token("anna", os.urandom), draw_token("ben", os.urandom)


@dataclass
class Door:
    """A gate that a test opens and closes."""

    tokens: dict[str, str] = field(default_factory=lambda: {"anna": ANNA.text, "ben": BEN.text})
    may: set[tuple[str, type[AnyRequest]]] = field(default_factory=set)
    asked: list[tuple[str | None, type[AnyRequest]]] = field(default_factory=list)

    def credentials_of(self, principal: str) -> Credentials | None:
        tokens = self.valid_tokens_of(principal)
        return None if tokens is None else Credentials(SALT, tokens)

    def valid_tokens_of(self, principal: str) -> list[ValidToken] | None:
        token = self.tokens.get(principal)
        if token is None:
            return None
        # Whoever creates a token chooses its id: all have the same.
        return [ValidToken("01", client_keys(token, SALT).verifier)]

    def check(self, peer: Peer, request: AnyRequest, now_s: float | None = None) -> None:
        self.asked.append((peer.principal, type(request)))
        if (peer.principal, type(request)) not in self.may:
            raise AuthorizationError(f"{peer.principal} may not.")


def holder_of(token: PrincipalToken) -> Identity:
    return Identity(role="client", key=b"", cluster_id=None, broker=None, token=token)


PRODUCE = Produce("topic", 7, 0, -1, 1000)
FETCH = Fetch("topic", 7, 0, 0, None, 1, 60_000)


def test_a_principal_may_what_the_gate_says(run: Any, wire: Any) -> None:
    async def scenario() -> None:
        door = Door(may={("anna", Produce)})
        server = await wire.serve(gate=door)
        anna = await wire.connect(server, holder_of(ANNA))
        ben = await wire.connect(server, holder_of(BEN))
        assert (await anna.request(PRODUCE, b"v", timeout_s=60))[0].base_offset == 7
        with pytest.raises(AuthorizationError, match="ben may not"):
            await ben.request(PRODUCE, b"v", timeout_s=60)
        # A connection that was refused something goes on.
        door.may.add(("ben", Produce))
        assert (await ben.request(PRODUCE, b"v", timeout_s=60))[0].base_offset == 7
        assert {principal for principal, _ in door.asked} == {"anna", "ben"}

    run(scenario)


def test_nobody_asks_about_a_superuser_or_a_server(run: Any, wire: Any) -> None:
    async def scenario() -> None:
        door = Door()
        server = await wire.serve(gate=door)
        for identity in (wire.client_identity(), wire.server_identity(broker=2)):
            client = await wire.connect(server, identity)
            await client.request(PRODUCE, b"v", timeout_s=60)
        assert door.asked == []

    run(scenario)


def test_who_acts_for_a_principal_has_its_rights_and_is_no_server(run: Any, wire: Any) -> None:
    async def scenario() -> None:
        peers: list[Peer] = []

        def handler(peer: Peer, request: AnyRequest, payload: memoryview) -> Any:
            peers.append(peer)
            return wire.echo(peer, request, payload)

        server = await wire.serve(handler, gate=Door(may={("anna", Produce)}))
        gateway = dataclasses.replace(wire.server_identity(broker=2), acts_for="anna")
        client = await wire.connect(server, gateway)
        await client.request(PRODUCE, b"v", timeout_s=60)
        assert [(peer.role, peer.principal) for peer in peers] == [("client", "anna")]
        with pytest.raises(AuthorizationError):
            await client.request(FETCH, timeout_s=60)

    run(scenario)


def test_a_server_without_a_gate_lets_no_principal_in(run: Any, wire: Any) -> None:
    async def scenario() -> None:
        server = await wire.serve()
        with pytest.raises(AuthenticationError, match="'anna'"):
            await wire.connect(server, holder_of(ANNA))
        gateway = dataclasses.replace(wire.server_identity(broker=2), acts_for="anna")
        with pytest.raises(AuthenticationError, match="no principal 'anna' to act for"):
            await wire.connect(server, gateway)

    run(scenario)


def test_acting_for_a_principal_needs_the_secret_and_ends_with_the_principal(
    run: Any, wire: Any, eventually: Any
) -> None:
    async def scenario() -> None:
        door = Door(may={("anna", Produce)})
        server = await wire.serve(gate=door)
        gateway = dataclasses.replace(wire.server_identity(broker=2), acts_for="anna")
        client = await wire.connect(server, gateway)
        # Its tokens are not asked for, only whether it is there.
        door.tokens["anna"] = draw_token("anna", os.urandom).text
        server.end_revoked()
        await client.request(PRODUCE, b"v", timeout_s=60)
        for pretender, error in (
            (dataclasses.replace(wire.client_identity(), acts_for="anna"), AuthenticationError),
            (dataclasses.replace(gateway, key=b"x" * 32), AuthenticationError),
            (dataclasses.replace(gateway, acts_for="nobody"), AuthenticationError),
            (dataclasses.replace(gateway, acts_for=""), DisconnectedError),
            (dataclasses.replace(gateway, acts_for="x" * 250), DisconnectedError),
            (dataclasses.replace(gateway, acts_for="an\nna"), DisconnectedError),
        ):
            with pytest.raises(error):
                await wire.connect(server, pretender)
        assert wire.connections(server) == 1
        del door.tokens["anna"]
        server.end_revoked()
        await eventually(lambda: wire.connections(server) == 0)
        with pytest.raises(AuthenticationError, match="no principal 'anna' to act for"):
            await wire.connect(server, gateway)

    run(scenario)


def test_a_revocation_ends_the_connections_of_that_token_only(
    run: Any, wire: Any, eventually: Any
) -> None:
    async def scenario() -> None:
        door = Door(may={("anna", Produce), ("ben", Produce)})
        server = await wire.serve(gate=door)
        anna = await wire.connect(server, holder_of(ANNA))
        ben = await wire.connect(server, holder_of(BEN))
        superuser = await wire.connect(server)
        server.end_revoked()
        assert wire.connections(server) == 3
        door.tokens["anna"] = draw_token("anna", os.urandom).text
        server.end_revoked()
        await eventually(lambda: wire.connections(server) == 2)
        with pytest.raises(DisconnectedError):
            await anna.request(PRODUCE, b"v", timeout_s=60)
        with pytest.raises(AuthenticationError):
            await wire.connect(server, holder_of(ANNA))
        for client in (ben, superuser):
            await client.request(PRODUCE, b"v", timeout_s=60)
        del door.tokens["ben"]
        server.end_revoked()
        await eventually(lambda: wire.connections(server) == 1)

    run(scenario)


def test_a_server_that_cannot_know_who_is_valid_ends_who_is_not(
    run: Any, wire: Any, eventually: Any
) -> None:
    async def scenario() -> None:
        door = Door()
        server = await wire.serve(gate=door)
        for token in (ANNA, BEN):
            await wire.connect(server, holder_of(token))

        def unknown(principal: str) -> None:
            raise ControllerUnavailableError("Nobody can say now.")

        door.credentials_of = unknown  # type: ignore[method-assign]
        del door.tokens["anna"]
        server.end_revoked()
        await eventually(lambda: wire.connections(server) == 1)

    run(scenario)


def test_a_token_that_expires_ends_its_connections_by_itself(
    run: Any, wire: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayq.wire.server.EXPIRY_INTERVAL_S", 0.05)

    async def scenario() -> None:
        door = Door()
        server = await wire.serve(gate=door)
        await wire.connect(server, holder_of(ANNA))
        await wire.connect(server, holder_of(BEN))
        await wire.connect(server)
        del door.tokens["anna"]  # Nobody says so.
        await eventually(lambda: wire.connections(server) == 2)
        await asyncio.sleep(0.2)
        assert wire.connections(server) == 2
        door.tokens.clear()
        await eventually(lambda: wire.connections(server) == 1)

    run(scenario)


def test_a_principal_that_takes_all_connections_does_not_keep_superusers_out(
    run: Any, wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        server = await wire.serve(gate=Door(), config=wire.config(max_connections=16))
        for _ in range(14):
            await wire.connect(server, holder_of(ANNA))
        with pytest.raises(OverloadedError, match="14 connections, and keeps the rest for super"):
            await wire.connect(server, holder_of(ANNA))
        superuser = await wire.connect(server)
        limit = await wire.connect(server)
        with pytest.raises(OverloadedError, match="its limit"):
            await wire.connect(server)
        limit.close()
        superuser.close()
        # The same holds for the files that the process may open.
        few = Descriptors(limit=1000, for_connections=950, for_clients=900, for_replicas=800)
        monkeypatch.setattr("rayq.wire.server.shares", lambda: few)
        monkeypatch.setattr("rayq.wire.accepted_connection.AcceptedConnection.descriptor", 860)
        server = await wire.serve(gate=Door())
        with pytest.raises(OverloadedError, match="836 are open.*servers and superusers"):
            await wire.connect(server, holder_of(ANNA))
        await wire.connect(server)

    run(scenario)


OF_CLIENTS = [kind for kind in REQUESTS.values() if kind.sent_by_clients]


def test_all_that_a_server_may_hold_until_there_is_news_is_checked_when_it_is_answered() -> None:
    held = {kind for kind in OF_CLIENTS if "wait_ms" in kind.__struct_fields__}
    assert held >= {Fetch, Take, GroupHeartbeat, DescribeQueues, DescribePrincipals}
    # The end of a transaction is a change, and its producer has to know what became of it.
    assert {kind for kind in held if not kind.checked_when_answered} == {EndTransaction}


@pytest.mark.parametrize("answers_by", ["a result", "an error"])
def test_what_was_held_is_not_given_to_who_may_not_have_it_any_more(
    run: Any, wire: Any, answers_by: str
) -> None:
    """Of all kinds of requests: whether a server holds it for news, a quota, a disk or others."""

    async def scenario() -> None:
        held: dict[type[AnyRequest], asyncio.Future[Any]] = {}
        arrived = asyncio.Event()

        def handler(peer: Peer, request: AnyRequest, payload: memoryview) -> Any:
            held[type(request)] = asyncio.get_running_loop().create_future()
            arrived.set()
            return held[type(request)]

        door = Door()
        server = await wire.serve(handler, gate=door)
        anna = await wire.connect(server, holder_of(ANNA))
        ends: set[type[AnyRequest]] = set()
        for kind in OF_CLIENTS:
            door.may.add(("anna", kind))
            asking = asyncio.ensure_future(anna.request(example_of(kind), timeout_s=60))
            await arrived.wait()
            arrived.clear()
            door.may.clear()
            if answers_by == "a result":
                held[kind].set_result(example_of(kind.response))
            else:
                held[kind].set_exception(InvalidRequestError("secret"))
            try:
                await asking
            except AuthorizationError as error:
                assert "anna may not" in str(error) and "secret" not in str(error)
                ends.add(kind)
            except InvalidRequestError:
                assert answers_by == "an error"
        assert ends == {kind for kind in OF_CLIENTS if kind.checked_when_answered}

    run(scenario)
