"""Invariants of principals: who is served, who is refused, and what each is told.

The judge replays principals, tokens and ACLs from the committed metadata, and decides by rules of
its own, which ask each ACL in turn. Nothing of `AclTable` is used. A server may be behind, so an
answer is right if any state since the last change that it must know allows it:

- no request is served to a principal that had no right to it: when it was let in, or, of a request
  that is held, when its answer leaves. Each server has to know a change a second after it was
  acknowledged; while faults last, after `access_patience_ms`;
- a server that knows a change acts by it at once;
- a revoked token opens no connection, and none is left a second later;
- a change that a principal asked for is committed only where the state just before has the token of
  whoever asked, and allows it, whichever broker has forwarded it;
- nobody is refused who had the right all the time, and a principal whose rights never change is
  refused by no server at all, by no error that ends what a client does;
- lists name nothing that the principal may not describe.

The judge wraps methods of the servers while a seed runs, as `metadata_answers` does.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from proving.simulation.owner import OWNER
from proving.simulation.patches import applied
from proving.simulation.server_view import peers_of, server_of
from rayq import messages
from rayq.actors.access import Access
from rayq.core.access.rights import Names, Needed, needed_by
from rayq.core.cluster.records import (
    AclCreated,
    AclDeleted,
    MetadataRecord,
    PrincipalCreated,
    PrincipalDeleted,
    RequestDone,
    TokenCreated,
    TokenRevoked,
)
from rayq.core.cluster.state import ClusterState
from rayq.errors import (
    AuthenticationError,
    AuthorizationError,
    RayqError,
)
from rayq.messages.acls import ANY, CLUSTER, Acl
from rayq.wire.accepted_connection import AcceptedConnection
from rayq.wire.authentication import ServerHandshake
from rayq.wire.codec import DECODERS, decode
from rayq.wire.peer import Peer
from rayq.wire.server import Server

KNOWN_AFTER_S = 1.0
"""Time after which each server knows a change that was acknowledged, where nothing is broken."""
INTERNAL = "__"
"""Prefix of rayq's own topics. Everybody may look them up, to find coordinators; what else one may
do with them is a right on the cluster."""
_IMPLIED = {
    "describe": {"read", "write", "delete", "alter"},
    "describe_configs": {"alter_configs"},
}


class AccessState(NamedTuple):
    """All that decides about principals, as of one version of the metadata."""

    version: int
    principals: frozenset[str]
    tokens: frozenset[tuple[str, str]]
    """`(principal, token id)`"""
    acls: frozenset[Acl]

    def allows(self, principal: str, host: str, needed: Needed) -> bool:
        """Returns whether the principal may do this, by asking each ACL."""
        if principal not in self.principals:
            return False
        operation, resource_type, name = needed
        if resource_type == "topic" and name.startswith(INTERNAL):
            if operation in ("create", "write", "delete"):
                return False
            is_look = operation in ("read", "describe", "describe_configs")
            return self.allows(
                principal, host, Needed("describe" if is_look else "alter", "cluster", CLUSTER)
            )
        matching = [
            acl
            for acl in self.acls
            if acl.principal in (principal, ANY)
            and acl.resource_type == resource_type
            and acl.host in (ANY, host)
            and (
                name.startswith(acl.name)
                if acl.pattern == "prefixed"
                else acl.name in (name, ANY)
            )
        ]
        allowing = {operation, "all", *_IMPLIED.get(operation, ())}
        return any(
            acl.operation in allowing for acl in matching if acl.permission == "allow"
        ) and not any(
            acl.operation in (operation, "all") for acl in matching if acl.permission == "deny"
        )


class _Admitted(NamedTuple):
    """A request of a principal that a server has let in."""

    request: messages.AnyRequest
    at_s: float
    states: Sequence[AccessState]
    """The states that may have allowed it."""


class _Asked(NamedTuple):
    """A change that a principal has asked for."""

    peer: Peer
    request: messages.AnyRequest


class AccessJudge:
    """See the module. `judging` wraps the servers' methods; `fault` is what was found first."""

    def __init__(self, now_s: Callable[[], float], patience_s: float) -> None:
        self.fault: str | None = None
        self.known_after_s = patience_s
        """Time after which each server has to know an acknowledged change."""
        self.steady: set[str] = set()
        """The principals whose rights never change, and suffice for all that they do."""
        self.counts: Counter[str] = Counter()
        """The number of answers and refusals, by what they were."""
        self._now_s = now_s
        self._states = [AccessState(0, frozenset(), frozenset(), frozenset())]
        self._acknowledged: list[tuple[float, int]] = []
        """Time and version of each change that was acknowledged to whoever made it."""
        self._names = ClusterState()
        self._known: dict[object, AccessState] = {}
        """The last state that each gate was told."""
        self.asked_at: dict[str, tuple[Server, float]] = {}
        """The server that let the last change of each principal in, and the time."""
        self._asked: dict[str, _Asked] = {}
        """The changes that are not committed yet, by their ids."""
        self._admitted: dict[int, _Admitted] = {}
        self._handled: messages.AnyRequest | None = None
        """The request whose answer is being sent."""
        self._decisions: dict[tuple[int, str, str, Needed], bool] = {}

    # --- what the invariants and operators tell ---------------------------------------------------

    def note_entry(
        self, version: int, state: ClusterState, records: Sequence[MetadataRecord]
    ) -> None:
        """Takes note of an entry of the metadata that is committed, and the state before it."""
        self._names = state
        before = self._states[-1]
        for record in records:
            if isinstance(record, RequestDone):
                # It is remembered under the name of the principal, a space, and the client's id.
                who, _, request_id = record.request_id.rpartition(" ")
                if request_id in self._asked:
                    self._judge_change(before, who, *self._asked.pop(request_id))
        after = before
        for record in records:
            after = _replayed(after, record)
        if after != before:
            self._states.append(after._replace(version=version))

    def acknowledged(self, version: int) -> None:
        """Takes note that a change, which the metadata of this version has, was acknowledged."""
        self._acknowledged.append((self._now_s(), version))

    # --- the servers' methods ---------------------------------------------------------------------

    @contextlib.contextmanager
    def judging(self) -> Iterator[None]:
        """Wraps the methods that are judged, for the length of a `with` block."""
        wrappers: tuple[tuple[type, str, Callable[[Any], Any]], ...] = (
            (AcceptedConnection, "_read_request", self._around_read_request),
            (AcceptedConnection, "_answer", self._around_answer),
            (AcceptedConnection, "_answer_awaited", self._around_answer_awaited),
            (AcceptedConnection, "_answer_error", self._around_answer_error),
            (ServerHandshake, "accept", self._around_accept),
            (Access, "update", self._around_update),
        )
        with applied(
            (owner, method, around(getattr(owner, method))) for owner, method, around in wrappers
        ):
            yield

    def _around_update(self, update: Any) -> Any:
        def judged(gate: Access, state: ClusterState, names: Names) -> None:
            update(gate, state, names)
            known = AccessState(0, frozenset(), frozenset(), frozenset())
            for record in state.access_records():
                known = _replayed(known, record)
            self._known[gate] = known

        return judged

    def _around_read_request(self, read_request: Any) -> Any:
        def judged(
            stream: Any, peer: Peer, api: int, header: memoryview, now_s: float
        ) -> messages.AnyRequest:
            self._handled = None
            if peer.principal is None:
                return read_request(stream, peer, api, header, now_s)  # type: ignore[no-any-return]
            try:
                request: messages.AnyRequest = read_request(stream, peer, api, header, now_s)
            except AuthorizationError:
                kind = messages.REQUESTS[api]
                self._judge_refused(peer, decode(DECODERS[kind], header, kind.__name__))
                raise
            server = server_of(stream)
            states = self._possible(server)
            self._admitted[id(request)] = _Admitted(request, self._now_s(), states)
            self._handled = request
            if isinstance(request, messages.Change) and request.request_id is not None:
                self._asked.setdefault(request.request_id, _Asked(peer, request))
                self.asked_at[peer.principal] = server, self._now_s()
            return request

        return judged

    def _around_answer_awaited(self, answer_awaited: Any) -> Any:
        def judged(stream: Any, request: messages.AnyRequest, *arguments: Any) -> None:
            self._handled = request
            try:
                answer_awaited(stream, request, *arguments)
            finally:
                self._handled = None

        return judged

    def _around_answer(self, answer: Any) -> Any:
        def judged(stream: Any, api: int, correlation: int, one_way: bool, result: Any) -> None:
            peer, request = stream.peer, self._handled
            if peer is not None and peer.principal is not None and request is not None:
                response = result[0] if isinstance(result, tuple) else result
                self._judge_served(server_of(stream), peer, request, response)
            answer(stream, api, correlation, one_way, result)

        return judged

    def _around_answer_error(self, answer_error: Any) -> Any:
        def judged(
            stream: Any, api: int, correlation: int, one_way: bool, error: BaseException
        ) -> None:
            peer = stream.peer
            is_final = isinstance(error, (AuthorizationError, AuthenticationError))
            if is_final and peer is not None and peer.principal in self.steady:
                self._found(f"{peer.principal}, who may, is told: {error}")
            if self._handled is not None:
                self._admitted.pop(id(self._handled), None)
            answer_error(stream, api, correlation, one_way, error)

        return judged

    def _around_accept(self, accept: Any) -> Any:
        def judged(handshake: ServerHandshake, header: bytes) -> bytes:
            principal = None if handshake.hello is None else handshake.hello.principal
            try:
                accepted: bytes = accept(handshake, header)
            except RayqError as error:
                if principal in self.steady and not error.retriable:
                    self._found(f"{principal} has a valid token and is told: {error}")
                raise
            if principal is not None:
                self.counts["login"] += 1
                assert handshake.token is not None
                token = (principal, handshake.token.token_id)
                if not any(token in state.tokens for state in self._possible(None)):
                    self._found(f"{principal} logged in by a token that is revoked")
            return accepted

        return judged

    # --- judging ----------------------------------------------------------------------------------

    def _possible(self, server: Server | None) -> Sequence[AccessState]:
        """The states by one of which a server may act now: that which it knows, or, where it does
        not say, all since the last change that it must know."""
        until_s = self._now_s() - self.known_after_s
        must_know = max(
            (version for at_s, version in self._acknowledged if at_s <= until_s), default=0
        )
        possible = self._states[self._at(must_know) :]
        known = None if server is None else self._known.get(server.gate)
        if known is not None:
            found = [state for state in possible if state[1:] == known[1:]]
            if not found and any(state[1:] == known[1:] for state in self._states):
                self._found(
                    f"{_where()} acts by what was so before version {must_know} of the metadata, "
                    f"which was acknowledged {self.known_after_s:g} s ago"
                )
            return found or possible
        return possible

    def _at(self, version: int) -> int:
        """The index of the state that a version of the metadata has."""
        found = bisect_left(self._states, version + 1, key=lambda state: state.version)
        return max(found - 1, 0)

    def _may_send(self, state: AccessState, peer: Peer, request: messages.AnyRequest) -> bool:
        """Returns whether a state has the token of a principal and allows it the request."""
        assert peer.principal is not None
        is_valid = peer.token_id is None or (peer.principal, peer.token_id) in state.tokens
        return is_valid and self._is_allowed(state, peer.principal, peer.address, request)

    def _is_allowed(
        self, state: AccessState, principal: str, host: str, request: messages.AnyRequest
    ) -> bool:
        return not any(
            not self._decide(state, principal, host, needed)
            for needed in needed_by(request, self._names)
        )

    def _decide(self, state: AccessState, principal: str, host: str, needed: Needed) -> bool:
        key = (state.version, principal, host, needed)
        known = self._decisions.get(key)
        if known is None:
            known = self._decisions[key] = state.allows(principal, host, needed)
        return known

    def _judge_served(
        self, server: Server, peer: Peer, request: messages.AnyRequest, response: Any
    ) -> None:
        assert peer.principal is not None
        admitted = self._admitted.pop(id(request), None)
        if admitted is not None and not request.checked_when_answered:
            states = admitted.states
        else:
            states = self._possible(server)
        name = type(request).__name__
        self.counts[f"served {peer.principal.split('-')[0]}"] += 1
        if not any(self._may_send(state, peer, request) for state in states):
            self._found(
                f"{_where()} served {name} to {peer.principal}, who may not: "
                f"{[*needed_by(request, self._names)]}"
            )
        for needed in _named(response):
            if not any(
                self._decide(state, peer.principal, peer.address, needed) for state in states
            ):
                self._found(f"{_where()} names {needed[1:]} to {peer.principal}, in {name}")

    def _judge_refused(self, peer: Peer, request: messages.AnyRequest) -> None:
        assert peer.principal is not None
        self.counts[f"refused {peer.principal.split('-')[0]}"] += 1
        if all(self._may_send(state, peer, request) for state in self._possible(None)):
            self._found(
                f"{_where()} refused {type(request).__name__} to {peer.principal}, who may do it"
            )

    def _judge_change(
        self, state: AccessState, who: str, peer: Peer, request: messages.AnyRequest
    ) -> None:
        self.counts["change"] += 1
        if who != peer.principal:
            self._found(f"{type(request).__name__} of {peer.principal} is remembered as {who!r}'s")
        if not self._may_send(state, peer, request):
            self._found(
                f"{type(request).__name__} of {peer.principal} was committed after version "
                f"{state.version}, which does not allow it"
            )

    def judge_connections(self, server: Server) -> None:
        """Judges who is connected to a server that knows of the revocations."""
        known = self._known.get(server.gate)
        for peer in peers_of(server):
            token = (peer.principal, peer.token_id)
            if peer.principal is not None and known is not None and token not in known.tokens:
                self._found(f"{peer.principal} stays connected by a token that is revoked")

    def _found(self, fault: str) -> None:
        if self.fault is None:
            self.fault = f"{fault} (at {self._now_s():.3f} s)"


def _replayed(state: AccessState, record: MetadataRecord) -> AccessState:
    version, principals, tokens, acls = state
    if isinstance(record, PrincipalCreated):
        principals |= {record.name}
    elif isinstance(record, PrincipalDeleted):
        principals -= {record.name}
        tokens = frozenset(token for token in tokens if token[0] != record.name)
        acls = frozenset(acl for acl in acls if acl.principal != record.name)
    elif isinstance(record, TokenCreated):
        tokens |= {(record.principal, record.token_id)}
    elif isinstance(record, TokenRevoked):
        tokens -= {(record.principal, record.token_id)}
    elif isinstance(record, AclCreated):
        acls |= {record.acl}
    elif isinstance(record, AclDeleted):
        acls -= {record.acl}
    else:
        return state
    return AccessState(version, principals, tokens, acls)


def _named(response: Any) -> Iterator[Needed]:
    """The resources that an answer names, as what describes them."""
    if isinstance(response, messages.MetadataResponse):
        for topic in response.topics:
            # A broker keeps them as bytes, whose first field is the name.
            name = msgspec.msgpack.decode(topic)[0]  # type: ignore[call-overload]
            if not name.startswith(INTERNAL):
                yield Needed("describe", "topic", name)
    elif isinstance(response, messages.DescribeQueuesResponse):
        for queue in response.queues:
            yield Needed("describe", "queue", queue.name)
    elif isinstance(response, messages.ListGroupsResponse):
        for group in response.groups:
            yield Needed("describe", "group", group.group)
    elif isinstance(response, messages.ListTransactionsResponse):
        for transaction in response.transactions:
            yield Needed("describe", "transactional_id", transaction.transactional_id)


def _where() -> str:
    owner = OWNER.get(None)
    return "a server" if owner is None else owner.name
