"""The envelope in which a request goes to the controller with the client that sent it."""

from __future__ import annotations

from rayq import messages
from rayq.core.cluster.state import ClusterState
from rayq.wire.codec import ENCODER
from rayq.wire.peer import Peer


def with_origin(
    peer: Peer, request: messages.AnyRequest, state: ClusterState
) -> messages.AnyRequest:
    """Wraps a client's request with the client that sent it. A request of a server itself stays as
    it is, and so does every request until the cluster has its first principal."""
    if peer.role != "client":
        return request
    if peer.principal is None:
        is_first = isinstance(request, messages.CreatePrincipal)
        if not isinstance(request, messages.Change) or not (state.principals or is_first):
            return request
    return messages.Forward(
        by=peer.principal,
        address=peer.host,
        client_id=peer.client_id,
        token_id=peer.token_id,
        kind=request.api,
        request=ENCODER.encode(request),
        token_key=peer.token_key,
    )
