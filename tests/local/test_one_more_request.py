"""A new request takes one declaration, and one handler where it is answered. The rest (numbers,
decoding, who may send it, forwarding to the controller, the type of the answer) follows."""

from __future__ import annotations

from typing import ClassVar

from rayq.core.cluster.decisions import decides
from rayq.core.cluster.facts import ClusterDecision, Facts
from rayq.core.cluster.state import ClusterState
from rayq.core.decision import Decision
from rayq.messages import REQUESTS, Response, ToController
from rayq.messages.acls import Rights
from rayq.testing import LocalCluster


class Echo(Response, frozen=True):
    said: str


class Shout(ToController[Echo], frozen=True):
    api: ClassVar[int] = 39
    rights: ClassVar[Rights] = ()
    what: str


@decides(Shout)
def _shout(state: ClusterState, request: Shout, facts: Facts) -> ClusterDecision:
    return Decision((), lambda: Echo(request.what.upper()))


def test_a_request_to_the_controller_is_declared_and_decided_and_nothing_else(
    cluster: LocalCluster,
) -> None:
    client, background = cluster.shared_client()
    addresses = client.addresses()
    assert len(addresses) == 3, "each of them forwards it, or hosts the controller"
    for address in addresses:
        echo, _ = background.run(client.ask(address, Shout("hello"), timeout_s=10))
        assert echo == Echo("HELLO")
    assert REQUESTS[Shout.api] is Shout and Shout.response is Echo
