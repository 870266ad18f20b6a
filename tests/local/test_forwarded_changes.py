"""Changes that a broker forwards for a principal: the controller decides by what it knows itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rayq import messages
from rayq.actors.access import Access
from rayq.actors.controller.controller import Controller
from rayq.errors import AuthorizationError, TopicExistsError
from rayq.testing import LocalCluster
from tests.local.principal_support import Named, change


def test_the_controller_refuses_what_a_broker_lets_through_on_old_metadata(
    cluster: LocalCluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    anna = Named(cluster)
    monkeypatch.setattr(Access, "check", lambda *_: None)
    client, _ = cluster.shared_client()
    assert len(client.addresses()) == 3, "each of them forwards it, or hosts the controller"
    with anna.connect() as hers:
        client, background = hers.shared_client()
        for address in client.addresses():
            with pytest.raises(AuthorizationError, match=f"may not delete topic '{topic}'"):
                background.run(client.ask(address, messages.DeleteTopic(topic), timeout_s=60))
    assert topic in cluster.admin.list_topics()


@pytest.mark.parametrize("what", ["acl", "token", "principal"])
def test_a_change_that_waits_for_its_turn_while_the_right_goes_is_refused(
    cluster: LocalCluster, topic: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change is past the gate of its broker, and stands before the controller's lock."""
    right = ("delete", "topic", topic)
    anna = Named(cluster, right)  # type: ignore[arg-type]
    turn = Controller._turn_of_a_change
    waits, goes_on = asyncio.Event(), asyncio.Event()
    is_first = True

    async def turn_later(self: Controller) -> None:
        nonlocal is_first
        if is_first:
            is_first = False
            waits.set()
            await goes_on.wait()
        await turn(self)

    monkeypatch.setattr(Controller, "_turn_of_a_change", turn_later)
    # Its connection would end, and the answer with it.
    monkeypatch.setattr("rayq.wire.server.Server.end_revoked", lambda _: None)
    servers = cluster._servers_thread

    async def wait_for(event: asyncio.Event) -> None:
        await event.wait()

    async def let_go() -> None:
        goes_on.set()

    with anna.connect() as hers:
        client, background = hers.shared_client()
        address = client.addresses()[0]

        async def ask() -> Any:
            return await client.ask(address, messages.DeleteTopic(topic), timeout_s=60)

        asked = background.submit(ask())
        servers.run(wait_for(waits))
        match what:
            case "acl":
                anna.forbid(right)  # type: ignore[arg-type]
            case "token":
                anna.revoke()
            case _:
                change(cluster, messages.DeletePrincipal(anna.name))
        servers.run(let_go())
        with pytest.raises(AuthorizationError):
            asked.result(60)
    assert topic in cluster.admin.list_topics()


def test_nobody_gets_the_answer_to_the_request_of_another_by_its_id(
    cluster: LocalCluster, topic: str
) -> None:
    name = f"of-{topic}"
    anna, ben, carl = (
        Named(cluster, ("create", "topic", name)),
        Named(cluster, ("create", "topic", name)),
        Named(cluster),
    )
    request = messages.CreateTopic(name, 1, 1, {}, request_id="drawn-by-anna")

    def ask(principal: Named) -> Any:
        with principal.connect() as connection:
            client, background = connection.shared_client()
            address = client.addresses()[0]
            return background.run(client.ask(address, request, timeout_s=60))[0]

    first = ask(anna)
    assert ask(anna).version >= first.version, "a repetition of her own succeeds"
    with pytest.raises(TopicExistsError):
        ask(ben)
    with pytest.raises(AuthorizationError):
        ask(carl)
    client, background = cluster.shared_client()
    with pytest.raises(TopicExistsError):
        background.run(client.ask(client.addresses()[0], request, timeout_s=60))
