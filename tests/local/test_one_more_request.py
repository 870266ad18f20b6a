"""A new request takes one declaration, and one handler where it is answered. The rest (numbers,
decoding, forwarding to the controller, the type of the answer) follows."""

from __future__ import annotations

from typing import ClassVar

import pytest

from rayq.actors.controller.controller import Controller
from rayq.messages import REQUESTS, AnyRequest, Response, ToController
from rayq.testing import LocalCluster


class Echo(Response, frozen=True):
    said: str


class Shout(ToController[Echo], frozen=True):
    api: ClassVar[int] = 39  # Of those that clients may send.
    what: str


def test_a_request_to_the_controller_is_declared_and_handled_and_nothing_else(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled = Controller.handle

    async def handle(controller: Controller, request: AnyRequest) -> Response:
        if isinstance(request, Shout):
            return Echo(request.what.upper())
        return await handled(controller, request)

    monkeypatch.setattr(Controller, "handle", handle)
    client, background = cluster.shared_client()
    addresses = client.addresses()
    assert len(addresses) == 3, "each of them forwards it, or hosts the controller"
    for address in addresses:
        echo, _ = background.run(client.ask(address, Shout("hello"), timeout_s=10))
        assert echo == Echo("HELLO")
    assert REQUESTS[Shout.api] is Shout and Shout.response is Echo
