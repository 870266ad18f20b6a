"""A broker's answers from the committed metadata: principals and ACLs."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import msgspec

from rayq import messages
from rayq.actors.handlers import answers_peer
from rayq.actors.metadata.metadata_keeper import MetadataKeeper
from rayq.core.access.acls import AclVerdict, passes
from rayq.core.access.rights import Needed, decide, may_describe
from rayq.core.cluster.access_changes import check_operation, find_principal
from rayq.core.cluster.state import Principal
from rayq.errors import InvalidRequestError
from rayq.messages.acls import SUPERUSER, Acl
from rayq.wire.answer_room import ANSWER_BYTES_MAX
from rayq.wire.peer import Peer

ACLS_PER_TURN = 10_000
"""Maximum number of ACLs that are looked at before other requests have their turn."""


class AccessAnswers:
    """Answers clients from this broker's copy of the metadata. Lists leave out what the peer may
    not describe."""

    def __init__(self, metadata: MetadataKeeper) -> None:
        self._metadata = metadata

    @answers_peer(messages.DescribePrincipals)
    async def principals(
        self, peer: Peer, request: messages.DescribePrincipals, _: memoryview
    ) -> messages.DescribePrincipalsResponse:
        await self._metadata.wait_for_version(request.version_min, request.wait_ms)
        async with peer.room.take(ANSWER_BYTES_MAX):
            state = self._metadata.state
            names = set(state.principals)
            if request.names is not None:
                names.intersection_update(request.names)
            left = sorted(
                name for name in names if name > request.after and self._may_see(peer, name)
            )
            page = left[: messages.PRINCIPALS_PAGE]
            return messages.DescribePrincipalsResponse(
                self._metadata.version,
                [_described(state.principals[name]) for name in page],
                page[-1] if len(page) < len(left) else None,
            )

    @answers_peer(messages.DescribeAcls)
    async def acls(
        self, peer: Peer, request: messages.DescribeAcls, _: memoryview
    ) -> messages.DescribeAclsResponse:
        await self._metadata.wait_for_version(request.version_min, request.wait_ms)
        async with peer.room.take(ANSWER_BYTES_MAX):
            version, acls = self._metadata.version, list(self._metadata.state.acls)
            after = () if request.after is None else msgspec.structs.astuple(request.after)
            by_principal: dict[str, list[Acl]] = defaultdict(list)
            for first in range(0, len(acls), ACLS_PER_TURN):
                for acl in acls[first : first + ACLS_PER_TURN]:
                    if (acl.principal,) >= after[:1]:
                        by_principal[acl.principal].append(acl)
                await asyncio.sleep(0)
            page: list[Acl] = []
            for principal in sorted(by_principal):
                if not self._may_see(peer, principal):
                    continue
                found = (acl for acl in by_principal[principal] if passes(acl, request.filter))
                keyed = sorted((msgspec.structs.astuple(acl), acl) for acl in found)
                page += [acl for key, acl in keyed if key > after]
                if len(page) > messages.ACLS_PAGE:
                    page = page[: messages.ACLS_PAGE]
                    return messages.DescribeAclsResponse(version, page, page[-1])
            return messages.DescribeAclsResponse(version, page)

    @answers_peer(messages.CheckAcl)
    async def check(
        self, _: Peer, request: messages.CheckAcl, __: memoryview
    ) -> messages.CheckAclResponse:
        """Raises UnknownPrincipalError, InvalidRequestError."""
        await self._metadata.wait_for_version(request.version_min, request.wait_ms)
        if request.operation == "all":
            raise InvalidRequestError(
                "'all' is not a single operation: name the operation to check."
            )
        asked = request.operation, request.resource_type
        check_operation(*asked)
        state, principal = self._metadata.state, request.principal
        if principal == SUPERUSER:
            verdict = AclVerdict(True, None)
        else:
            find_principal(state, principal)
            needed = Needed(*asked, request.name)
            verdict = decide(state.acls, principal, request.host, needed)
        return messages.CheckAclResponse(self._metadata.version, *verdict)

    def _may_see(self, peer: Peer, principal: str) -> bool:
        acls = self._metadata.state.acls
        return may_describe(acls, peer.principal, peer.host, "principal", principal)


def _described(principal: Principal) -> messages.PrincipalMetadata:
    created = principal.created
    return messages.PrincipalMetadata(
        created.name,
        created.salt,
        created.created_ms,
        [
            messages.TokenMetadata(token.token_id, token.created_ms, token.expires_ms)
            for token in principal.tokens.values()
        ],
    )
