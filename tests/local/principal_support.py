"""Helpers for tests of principals: who is created, by the messages that change metadata."""

from __future__ import annotations

import itertools
import os

from rayq import Cluster, messages
from rayq.client.addresses import parse_address
from rayq.messages.acls import Acl, Operation, PatternType, ResourceType
from rayq.wire.scram import SALT_BYTES
from rayq.wire.tokens import PrincipalToken, draw_token, verifiers_of

CHANGE_TIMEOUT_S = 60.0
_numbers = itertools.count(1)


def change(cluster: Cluster, request: messages.Request[messages.ChangeResponse]) -> None:
    """Has the controller make a change, and waits until each broker knows it. Raises RayqError."""
    client, background = cluster.shared_client()

    async def done_everywhere() -> None:
        await client.change(request, timeout_s=CHANGE_TIMEOUT_S)
        question = messages.Metadata([], client.metadata.oldest_acceptable, 10_000)
        for address in map(parse_address, cluster.addresses):
            await client.ask(address, question, timeout_s=CHANGE_TIMEOUT_S)

    background.run(done_everywhere())


class Named:
    """A principal that a superuser creates, and that may connect."""

    def __init__(self, cluster: Cluster, *allowed: tuple[Operation, ResourceType, str]) -> None:
        self._cluster = cluster
        self.name = f"anna-{next(_numbers)}"
        self._salt = os.urandom(SALT_BYTES)
        change(cluster, messages.CreatePrincipal(self.name, self._salt))
        self.token_id, self.token = self.create_token()
        if allowed:
            self.allow(*allowed)

    def create_token(self, expires_ms: int | None = None) -> tuple[str, PrincipalToken]:
        """A further token, and its id."""
        token_id, token = os.urandom(8).hex(), draw_token(self.name, os.urandom)
        verifiers = verifiers_of(token, self._salt)
        change(
            self._cluster, messages.CreateToken(self.name, token_id, verifiers, expires_ms)
        )
        return token_id, token

    def revoke(self, token_id: str | None = None) -> None:
        change(self._cluster, messages.RevokeToken(self.name, token_id or self.token_id))

    def acl(
        self,
        operation: Operation,
        resource_type: ResourceType,
        name: str,
        pattern: PatternType = "literal",
    ) -> Acl:
        return Acl(self.name, "allow", operation, resource_type, name, pattern)

    def allow(self, *allowed: tuple[Operation, ResourceType, str]) -> None:
        change(self._cluster, messages.CreateAcls([self.acl(*what) for what in allowed]))

    def forbid(self, *allowed: tuple[Operation, ResourceType, str]) -> None:
        """Takes back what was allowed."""
        change(self._cluster, messages.DeleteAcls([self.acl(*what) for what in allowed]))

    def connect(self, token: PrincipalToken | None = None) -> Cluster:
        """Another cluster object, with this principal's rights."""
        return Cluster(self._cluster.addresses, token or self.token)
