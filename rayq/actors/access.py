"""The gate of a server: the principals, tokens and ACLs that it knows, and what they decide.

A broker's gate stands over its copy of the metadata, that of a replica process over what its broker
sends. A check of the same right on the same connection is a look into `Peer.grants`: a grant counts
for one version of the access, and each change of principals, tokens or ACLs makes another. Refusals
are not kept: a server may hear of a topic, or of an ACL, a moment later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Any

from rayq.core.access.quotas import QuotaTable
from rayq.core.access.rights import (
    NEEDED_BY_CONTENT,
    Names,
    Needed,
    View,
    check_needed,
    check_rights,
    decide,
    no_longer_valid,
    view_of,
)
from rayq.core.cluster.records import decode_records, encode_records
from rayq.core.cluster.state import ClusterState
from rayq.environment import Clock
from rayq.errors import ControllerUnavailableError
from rayq.messages import REQUESTS, AccessNews, AnyRequest
from rayq.messages.acls import Operation, ResourceType
from rayq.wire.authentication import Credentials, ValidToken
from rayq.wire.peer import Gate, Peer
from rayq.wire.scram import Verifier

GRANTS_MAX = 10_000
"""Maximum number of grants that are kept for a connection."""

DIGEST_BYTES = 16

QUESTIONS_MAX = 64
"""Maximum number of answered questions that wait for the metadata to catch up, the last ones."""

_IDS = ("topic_id", "queue_id")


class Freshness:
    """The time until which a process may act on what it knows of principals, tokens and ACLs.

    Everything that says so is noted here, and each note counts from a moment at which the knowledge
    was current for certain: a controller's process has the controller itself, a broker has asked
    it, other processes have asked their broker. What arrives unasked does not say: it may have been
    on its way for long.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        """`now_s` is the monotonic clock."""
        self._now_s = now_s
        self._until_s = 0.0
        self._questions: list[tuple[int, float]] = []
        """Answered questions: the metadata's version, and until when the knowledge is good enough
        once it is applied here."""

    def note(self, current_s: float, duration_s: float) -> None:
        """Notes that the knowledge was current at a time on the monotonic clock, and is good enough
        for this long from then on."""
        self._until_s = max(self._until_s, current_s + duration_s)

    def note_question(self, asked_s: float, duration_s: float, version: int) -> None:
        """Notes that a controller, asked at that time, had this version of the metadata. It counts
        as `note` does once `note_applied` has said that it is here."""
        self._questions.append((version, asked_s + duration_s))
        del self._questions[:-QUESTIONS_MAX]

    def note_applied(self, version: int) -> None:
        """Notes that all metadata up to this version are applied here."""
        if self._questions:
            for asked_for, until_s in self._questions:
                if asked_for <= version:
                    self._until_s = max(self._until_s, until_s)
            self._questions = [asked for asked in self._questions if asked[0] > version]

    @property
    def left_s(self) -> float:
        """The time for which the knowledge is still good enough. 0: it is not."""
        return max(self._until_s - self._now_s(), 0.0)

    def check(self, now_s: float | None = None) -> None:
        """Raises ControllerUnavailableError once the knowledge is too old."""
        if (self._now_s() if now_s is None else now_s) > self._until_s:
            raise ControllerUnavailableError(
                "This server has not heard from a controller lately, so it cannot know which "
                "principals and ACLs are still valid, and serves superusers only. Try again, or "
                "another broker."
            )


class Access(Gate):
    """See the module. It knows nobody before the first `update`, and refuses all named principals,
    by a retriable error, while its `freshness` says that what it knows is too old."""

    def __init__(self, clock: Clock) -> None:
        """Tokens expire by the wall clock."""
        self._wall_ms = clock.wall_ms
        self._state = ClusterState()
        self._names: Names = self._state
        self._version = object()
        """Another object after each change, so that no earlier grant counts."""
        self.freshness = Freshness(clock.monotonic)
        self._told: tuple[bytes, bytes] | None = None
        """The digest and the records that others are told. None: to be encoded."""

    def update(self, state: ClusterState, names: Names) -> None:
        """Takes the principals, tokens and ACLs of a state, and where ids have their names. Call it
        after each change of them: what was granted before counts no more."""
        self._state, self._names = state, names
        self._version, self._told = object(), None

    @property
    def principals(self) -> Collection[str]:
        """Names of the principals beside the superuser."""
        return self._state.principals

    @property
    def version(self) -> object:
        """Another object after each change of principals, tokens and ACLs."""
        return self._version

    # --- from a broker to the processes of its node ---------------------------------------------

    @property
    def digest(self) -> bytes:
        """Digest of all principals, tokens and ACLs. Empty: there are none."""
        return self._encoded()[0]

    def _encoded(self) -> tuple[bytes, bytes]:
        if self._told is None:
            found = self._state.access_records()
            records = encode_records(found)
            digest = hashlib.sha256(records).digest()[:DIGEST_BYTES] if found else b""
            self._told = digest, records
        return self._told

    def news(self, known_digest: bytes) -> AccessNews | None:
        """The news for a process that knows the access of this digest. None: there is nobody, and
        it knows that."""
        digest, records = self._encoded()
        if not digest and not known_digest:
            return None
        known_for_ms = int(self.freshness.left_s * 1000)
        return AccessNews(digest, known_for_ms, None if digest == known_digest else records)

    def take(
        self, news: AccessNews | None, asked_s: float, names: Names | None = None
    ) -> bool:
        """Takes what the broker has answered to a question of that time. Returns whether the access
        changed: then connections may have to end."""
        if news is None:
            return False
        # The broker has counted from a moment after the question.
        self.freshness.note(asked_s, news.known_for_ms / 1000)
        if news.records is None:
            return False
        state = ClusterState()
        for record in decode_records(news.records):
            state.replay(record)
        self.update(state, names or state)
        self._told = news.digest, news.records
        return True

    @property
    def quotas(self) -> QuotaTable:
        """The quotas of the principals."""
        return self._state.quotas

    # --- of a server's gate ---------------------------------------------------------------------

    def credentials_of(self, principal: str) -> Credentials | None:
        """The salt and the tokens that are valid now, by the wall clock: a clock that is set back
        makes an expired token valid again, and never one that was revoked. None: there is no such
        principal. Raises ControllerUnavailableError while this server cannot know."""
        self.freshness.check()
        tokens = self.valid_tokens_of(principal)
        if tokens is None:
            return None
        return Credentials(self._state.principals[principal].created.salt, tokens)

    def valid_tokens_of(self, principal: str) -> list[ValidToken] | None:
        """The tokens that are valid now, as far as this server knows. None: there is no such
        principal."""
        known, now_ms = self._state.principals.get(principal), self._wall_ms()
        if known is None:
            return None
        return [
            ValidToken(
                token.token_id,
                Verifier(token.verifiers.stored_key_sha256, token.verifiers.server_key_sha256),
                token.expires_ms,
            )
            for token in known.tokens.values()
            if token.expires_ms is None or now_ms < token.expires_ms
        ]

    def check(self, peer: Peer, request: AnyRequest, now_s: float | None = None) -> None:
        """Raises AuthorizationError unless the peer's principal may send the request now, and
        ControllerUnavailableError while this server cannot know."""
        self.freshness.check(now_s)
        kind = type(request)
        try:
            if peer.grants[kind][_GRANTED_BY_IDS[kind](request)] is self._version:
                return
        except KeyError:
            pass  # It was not asked for yet, or its rights follow from more than ids.
        self._check(peer, request)

    def _check(self, peer: Peer, request: AnyRequest) -> None:
        """Decides by the ACLs, and keeps the grant."""
        if peer.principal is not None:
            self._check_exists(peer, peer.principal)
            check_rights(
                self._state.acls, peer.principal, peer.host, request, self._names
            )
        ids_of = _GRANTED_BY_IDS.get(type(request))
        if ids_of is not None:
            if sum(map(len, peer.grants.values())) >= GRANTS_MAX:
                peer.grants.clear()
            peer.grants.setdefault(type(request), {})[ids_of(request)] = self._version

    def _check_exists(self, peer: Peer, principal: str) -> None:
        """Raises AuthorizationError if the peer's principal is gone, or its token was revoked: then
        the connection is about to end."""
        known = self._state.principals.get(principal)
        if known is None or not known.has(peer.token_id, peer.token_key):
            raise no_longer_valid(principal)

    # --- for handlers ---------------------------------------------------------------------------

    def may(
        self, peer: Peer, operation: Operation, resource_type: ResourceType, name: str
    ) -> bool:
        """Returns whether the ACLs let the peer do an operation on a resource: a superuser, and a
        server, may do everything."""
        return peer.principal is None or self.may_named(
            peer.principal, peer.host, operation, resource_type, name
        )

    def may_named(
        self,
        principal: str,
        host: str,
        operation: Operation,
        resource_type: ResourceType,
        name: str,
    ) -> bool:
        """Returns whether a named principal may do the operation from that address."""
        needed = Needed(operation, resource_type, name)
        return decide(self._state.acls, principal, host, needed).is_allowed

    def view(self, peer: Peer) -> View | None:
        """Returns the resources that the peer sees. None: all of them."""
        return view_of(self._state.acls, peer.principal, peer.host, self._names)

    def require(
        self, peer: Peer, operation: Operation, resource_type: ResourceType, name: str
    ) -> None:
        """Raises AuthorizationError unless the peer `may`."""
        if peer.principal is not None:
            needed = Needed(operation, resource_type, name)
            check_needed(self._state.acls, peer.principal, peer.host, [needed])


def _granted_by_ids() -> dict[type[AnyRequest], Callable[[Any], Any]]:
    """The classes of requests whose rights follow from ids alone, with a function that gets these
    ids. An id stands for one name forever."""
    found: dict[type[AnyRequest], Callable[[Any], Any]] = {}
    for kind in REQUESTS.values():
        fields = dict.fromkeys(right.field for right in kind.rights or ())
        if fields and kind not in NEEDED_BY_CONTENT and all(field in _IDS for field in fields):
            found[kind] = attrgetter(*fields)
    return found


_GRANTED_BY_IDS = _granted_by_ids()
