"""The envelope in which a request goes to the controller with the client that sent it."""

from __future__ import annotations

from rayq import messages
from rayq.core.cluster.state import ClusterState
from rayq.wire.codec import ENCODER
from rayq.wire.peer import Peer


def with_origin(
    peer: Peer, request: messages.AnyRequest, state: ClusterState
) -> messages.AnyRequest:
    """A client's request with whoever sent it; what a server asks for itself as it is. A cluster
    whose only client is the superuser knows no envelopes, up to its first principal."""
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
    )
