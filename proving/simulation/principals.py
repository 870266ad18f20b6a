"""Principals: in a quarter of the seeds of every scenario clients log in by tokens of their own.

The seed draws which kinds of clients do (`Workload.rights` says what each kind needs), and by what
ACLs they may: of literal names, of prefixes, of everything. The rights of these never change, and
suffice. *Guests* (`guests`) have rights that are revoked and given back while the seed runs, which
is one more kind of fault (`faults_access`). *Strangers* may do nothing that matters.

A seed draws all this by random numbers of its own, so that others run as they would without it.
`invariants_access` judges who is served.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from proving.simulation.cluster import SimulatedCluster
from proving.simulation.guests import EAGER_BYTES
from proving.simulation.invariants_access import KNOWN_AFTER_S, AccessJudge
from proving.simulation.process import Process
from proving.simulation.server_view import server_of_broker, server_of_host
from rayq import messages
from rayq.client.client import Client
from rayq.core.access.rights import Needed
from rayq.messages.acls import ANY, Acl, Operation, QuotaName, ResourceType
from rayq.wire.authentication import Identity
from rayq.wire.scram import SALT_BYTES
from rayq.wire.tokens import PrincipalToken, draw_token, verifiers_of

PRINCIPALS = "principals"
PRINCIPALS_SHARE = 1 / 4
KIND_SHARE = 0.7
"""Share of the kinds of clients that log in as principals, in a seed that has any."""
GUESTS = 2
POISONER = "poisoner"
"""A client of some scenarios that is the first guest, too."""
VISITOR = "visitor"
"""A client of some scenarios that is the last guest, too."""
PATIENCES_MS = (4_000, 5_000, 8_000)
"""Choices of a seed for `access_patience_ms`: other faults seldom let a broker live for longer
while it is cut off."""
CHANGE_TIMEOUT_S = 120.0
CALM_REVOCATIONS = 2
QUOTA_SHARE = 0.5
RATE = 4_000.0
"""Bytes per second that a guest may write while its quota is judged."""
SHARED_AFTER_S = 3.0
"""Time until each process has its share of a rate."""
RATED_S = 8.0
RATED_SHARES = (0.1, 1.25)
"""The least and the greatest rate of the values that are acknowledged, as a multiple of the quota,
which counts the rest of the batches, too. Disks may be slow, or a guest begin again just then."""
LOOK_S = 0.5
SYNCS_MAX = 10
"""Number of syncs of a broker's disk by which a change is known later, where they are slow."""
Rights = Mapping[str, Sequence[Needed]]
"""The rights that kinds of clients need. A kind is the name of processes up to their numbers; kinds
with a | between them are one principal."""
_NUMBERS = re.compile(r"[-.]\d.*")


def may(operation: Operation, resource_type: ResourceType, *names: str) -> list[Needed]:
    """The right to do this on each of the resources. A name that ends with * is a prefix, and *
    alone each resource of the type."""
    return [Needed(operation, resource_type, name) for name in names]


GiveBack = Callable[[], Coroutine[Any, Any, None]]
Way = Callable[["Principals", "Login"], Coroutine[Any, Any, GiveBack]]
"""A way to take a right away. It returns how to give it back."""


def has_principals(seed: int, features: frozenset[str] | None) -> bool:
    """Returns whether a seed has principals: as `features` say, or by random numbers of their
    own."""
    if features is not None:
        return PRINCIPALS in features
    return random.Random(f"{seed}/has principals").random() < PRINCIPALS_SHARE


@dataclass
class Login:
    """A principal, and the token by which its clients log in now."""

    name: str
    token: PrincipalToken
    token_id: str
    acls: list[Acl] = field(default_factory=list)
    salt: bytes = b""
    is_revoked: bool = False
    """True while one of its rights is gone."""


class Principals:
    """The principals of a seed, and the operator who makes, revokes and gives back their rights."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        rights: Rights,
        rights_of_guests: Sequence[Needed],
    ) -> None:
        rng = self._rng = cluster.world.new_random(PRINCIPALS)
        self._cluster = cluster
        self.judge = AccessJudge(
            lambda: cluster.world.now_s, cluster.config.access_patience_ms / 1000
        )
        self._client: Client | None = None
        self.eager: set[str] = set()
        """The guests that write more than they may."""
        self._kinds: dict[str, Login] = {}
        for kinds, needs in rights.items():
            if rng.random() < KIND_SHARE:
                login = self._login(f"team/{kinds.replace('|', '+')}")
                login.acls = [self._allowing(login.name, needed) for needed in needs]
                self.judge.steady.add(login.name)
                self._kinds |= dict.fromkeys(kinds.split("|"), login)
        self.guests = [self._login(f"guest-{number}") for number in range(GUESTS)]
        for guest in self.guests:
            guest.acls = [Acl(guest.name, "allow", *needed) for needed in rights_of_guests]
        self.stranger = self._login("stranger")
        self.stranger.acls = self._useless(rights)
        self._kinds |= {login.name: login for login in (*self.guests, self.stranger)}
        self._kinds |= {POISONER: self.guests[0], VISITOR: self.guests[-1]}
        cluster.world.trace.note(f"PRINCIPALS {', '.join(self._kinds)}")

    def identity_of(self, process: Process) -> Identity:
        """The identity by which a client in this process logs in."""
        name = process.name.partition("#")[0]
        login = self._kinds.get(name) or self._kinds.get(_NUMBERS.sub("", name))
        if login is None:
            return self._cluster.client_identity
        return Identity(
            role="client",
            key=b"",
            cluster_id=self._cluster.cluster_id,
            broker=None,
            token=login.token,
        )

    # --- the draw ---------------------------------------------------------------------------------

    def _login(self, name: str) -> Login:
        return Login(name, draw_token(name, self._rng.randbytes), self._new_id())

    def _new_id(self) -> str:
        return self._rng.randbytes(8).hex()

    def _allowing(self, principal: str, needed: Needed) -> Acl:
        operation, resource_type, name = needed
        if self._rng.random() < 0.2 and resource_type != "cluster":
            operation = "all"
        style = self._rng.choice(("literal", "literal", "prefixed", "any"))
        if resource_type == "cluster" or name == ANY:
            style = "literal"
        elif name.endswith(ANY):
            style, name = "prefixed", name.removesuffix(ANY)
        if style == "prefixed":
            begin = name[: self._rng.randint(1, len(name))]
            return Acl(principal, "allow", operation, resource_type, begin, "prefixed")
        if style == "any":
            name = ANY
        return Acl(principal, "allow", operation, resource_type, name)

    def _useless(self, rights: Rights) -> list[Acl]:
        """ACLs that allow a stranger nothing that the scenario has."""
        who = self.stranger.name
        resources = sorted(
            {
                (resource_type, name.removesuffix(ANY))
                for needs in rights.values()
                for _, resource_type, name in needs
                if resource_type != "cluster" and name != ANY
            }
        )
        style = self._rng.choice(("none", "elsewhere", "denied"))
        if style == "elsewhere":
            return [
                Acl(who, "allow", "all", resource_type, name, host="10.255.0.1")
                for resource_type, name in resources
            ]
        if style == "denied":
            types = {resource_type for resource_type, _ in resources}
            return [
                *(Acl(who, "allow", "all", resource_type, ANY) for resource_type in sorted(types)),
                *(
                    Acl(who, "deny", "all", resource_type, name, "prefixed")
                    for resource_type, name in dict.fromkeys(
                        (resource_type, name[:1]) for resource_type, name in resources
                    )
                ),
            ]
        return []

    # --- the operator -----------------------------------------------------------------------------

    async def set_up(self, client: Client) -> None:
        """Makes all principals with their tokens and ACLs, by a superuser's client."""
        self._client = client
        for login in {login.name: login for login in self._kinds.values()}.values():
            await self._create(login)
        version = client.metadata.version_min
        await self._cluster.wait_until(
            lambda: all(
                broker.metadata.version >= version for broker in self._cluster.brokers.values()
            ),
            "every broker to know the principals",
        )

    async def _create(self, login: Login) -> None:
        login.salt = self._rng.randbytes(SALT_BYTES)
        await self._change(messages.CreatePrincipal(name=login.name, salt=login.salt))
        await self._create_token(login)
        if login.acls:
            await self._change(messages.CreateAcls(acls=login.acls))

    async def _create_token(self, login: Login) -> None:
        verifiers = verifiers_of(login.token, login.salt)
        await self._change(
            messages.CreateToken(
                principal=login.name, token_id=login.token_id, verifiers=verifiers
            )
        )

    async def _change(self, change: messages.Change) -> None:
        """Asks for a change under one id until it is done, so that no copy of it that is still on
        its way undoes what comes later."""
        assert self._client is not None
        await self._client.change(change, timeout_s=CHANGE_TIMEOUT_S)
        self.judge.acknowledged(self._client.metadata.version_min)

    async def revoke_in_calm(self, acknowledged: Mapping[str, int]) -> None:
        """Revokes rights once more while nothing is broken: a second later nobody is served, and
        after they are given back everything goes on. `acknowledged` is the number of records that
        each guest knows to be written."""
        await asyncio.sleep(self.judge.known_after_s)
        sync_s = max(host.disk.sync_s[1] for host in self._cluster.hosts)
        self.judge.known_after_s = KNOWN_AFTER_S + SYNCS_MAX * sync_s
        for way in self._rng.sample(WAYS, CALM_REVOCATIONS):
            gone_s = self.judge.known_after_s + LOOK_S
            guest = self._rng.choice(self.guests)
            await self.revoke(guest, way, gone=partial(asyncio.sleep, gone_s))
            before = acknowledged[guest.name]
            await self._cluster.wait_until(
                lambda: acknowledged[guest.name] > before,  # noqa: B023
                f"{guest.name} to make progress, once it may again",
            )
        assert self.judge.counts["change"] > 0, "No change of a principal was judged."
        if self._rng.random() < QUOTA_SHARE:
            await self._judge_quota(self._rng.choice(self.guests), acknowledged)

    async def _judge_quota(self, guest: Login, acknowledged: Mapping[str, int]) -> None:
        """Checks that a guest that wants nearly twice as much writes as much as its quota says,
        whatever number of processes serve it."""
        self.eager.add(guest.name)
        await self._set_quota(guest, {"producer_byte_rate": RATE})
        await asyncio.sleep(self.judge.known_after_s + SHARED_AFTER_S)
        before = acknowledged[guest.name]
        await asyncio.sleep(RATED_S)
        rate = (acknowledged[guest.name] - before) * EAGER_BYTES / RATED_S
        await self._remove_quota(guest)
        self.eager.discard(guest.name)
        least, most = RATED_SHARES
        assert least * RATE < rate < most * RATE, (
            f"{guest.name} has written {rate:.0f} bytes a second under a quota of {RATE:.0f}"
        )

    def _judge_connections(self) -> None:
        cluster = self._cluster
        servers = [
            server_of_broker(broker)
            for process, broker in cluster.broker_of.items()
            if process.alive
        ]
        servers += [
            server_of_host(host) for process, host in cluster.replica_hosts.items() if process.alive
        ]
        for server in servers:
            self.judge.judge_connections(server)

    async def revoke(
        self, guest: Login, way: Way, *, gone: Callable[[], Awaitable[None]]
    ) -> None:
        """Takes a right away in one of the ways, awaits `gone()`, and gives it back."""
        guest.is_revoked = True
        give_back = await way(self, guest)
        self._cluster.world.trace.note(f"REVOKED {guest.name}")
        await gone()
        self._judge_connections()
        await give_back()
        self._cluster.world.trace.note(f"GIVEN BACK {guest.name}")
        guest.is_revoked = False

    # --- ways to revoke ---------------------------------------------------------------------------

    async def throttle(self, guest: Login) -> GiveBack:
        """Sets a quota for a while. Nothing is refused: answers are late."""
        names: tuple[QuotaName, ...] = ("producer_byte_rate", "consumer_byte_rate")
        limits: dict[QuotaName, float] = {
            name: self._rng.choice((300.0, 3_000.0, 30_000.0)) for name in names
        }
        await self._set_quota(guest, limits)
        return partial(self._remove_quota, guest)

    async def _set_quota(self, guest: Login, limits: dict[QuotaName, float]) -> None:
        await self._change(
            messages.SetQuota(principal=guest.name, client_id=None, limits=limits)
        )

    async def _remove_quota(self, guest: Login) -> None:
        await self._change(messages.RemoveQuota(principal=guest.name, client_id=None))

    async def remove_acls(self, guest: Login) -> GiveBack:
        acls = self._rng.sample(guest.acls, self._rng.randint(1, len(guest.acls)))
        await self._change(messages.DeleteAcls(acls=acls))
        return partial(self._change, messages.CreateAcls(acls=acls))

    async def hide(self, topic: str, guest: Login) -> GiveBack:
        """Takes all ACLs of a topic away, which the guest then does not see."""
        acls = [acl for acl in guest.acls if (acl.resource_type, acl.name) == ("topic", topic)]
        await self._change(messages.DeleteAcls(acls=acls))
        return partial(self._change, messages.CreateAcls(acls=acls))

    async def hide_for_visitor(self, topic: str, gone: Callable[[], Awaitable[None]]) -> None:
        """Hides a topic from the visitor until `gone()` returns, unless another of its rights is
        gone just now."""
        guest = self._kinds[VISITOR]
        if not guest.is_revoked:
            await self.revoke(guest, lambda this, who: this.hide(topic, who), gone=gone)

    async def deny(self, guest: Login) -> GiveBack:
        """Denies by an ACL what another allows, to the guest or, sometimes, to all from its
        host."""
        acl = self._rng.choice(guest.acls)
        denial = msgspec.structs.replace(
            acl, permission="deny", operation=self._rng.choice((acl.operation, "all"))
        )
        await self._change(messages.CreateAcls(acls=[denial]))
        return partial(self._change, messages.DeleteAcls(acls=[denial]))

    async def revoke_token(self, guest: Login) -> GiveBack:
        await self._change(
            messages.RevokeToken(principal=guest.name, token_id=guest.token_id)
        )
        return partial(self._create_token, guest)

    async def rotate_token(self, guest: Login) -> GiveBack:
        """Gives a new token to clients that begin from now on; the others lose theirs."""
        old = guest.token_id
        guest.token, guest.token_id = draw_token(guest.name, self._rng.randbytes), self._new_id()
        await self._create_token(guest)
        await self._change(messages.RevokeToken(principal=guest.name, token_id=old))

        async def nothing() -> None:
            pass

        return nothing

    async def delete_principal(self, guest: Login) -> GiveBack:
        await self._change(messages.DeletePrincipal(name=guest.name))
        return partial(self._create, guest)


TAKING = (
    Principals.remove_acls,
    Principals.deny,
    Principals.revoke_token,
    Principals.rotate_token,
    Principals.delete_principal,
)
"""The ways in which a right is gone."""
WAYS = (Principals.throttle, *TAKING)
"""The same, and a right that is there, and used up."""
