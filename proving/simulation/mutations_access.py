"""Bugs planted into access control (docs/security.md): see `mutations`."""

from __future__ import annotations

from typing import Any

from proving.simulation.patches import Patch
from proving.simulation.planting import plants
from rayq.actors.access import Access, Freshness
from rayq.actors.audit.coordinator import NEVER, AuditCoordinator
from rayq.actors.quotas import Quotas
from rayq.client.producing.producer_core import ProducerCore
from rayq.core.access.acls import AclTable, AclVerdict
from rayq.core.cluster import access_changes
from rayq.core.transactions import changes as transaction_changes
from rayq.messages import REQUESTS
from rayq.wire.server import Server


@plants("access", "connections outlive the token that opened them")
def revoked_stays_connected() -> list[Patch]:
    return [(Server, "end_revoked", lambda self: None)]


@plants("access", "a server that hears of no controller serves principals as before")
def patience_without_end() -> list[Patch]:
    note, note_question = Freshness.note, Freshness.note_question

    def later(self: Any, current_s: float, duration_s: float) -> None:
        note(self, current_s, 1000 * duration_s)

    def later_answer(self: Any, asked_s: float, duration_s: float, version: int) -> None:
        note_question(self, asked_s, 1000 * duration_s, version)

    return [(Freshness, "note", later), (Freshness, "note_question", later_answer)]


@plants("access", "an ACL that denies does not win over one that allows")
def deny_ignored() -> list[Patch]:
    decide = AclTable.decide

    def mutated(
        self: Any, principal: Any, operation: Any, resource_type: Any, name: str, host: str
    ) -> AclVerdict:
        allowing = AclTable(acl for acl in self if acl.permission == "allow")
        return decide(allowing, principal, operation, resource_type, name, host)

    return [(AclTable, "decide", mutated)]


@plants("access", "a grant counts for as long as its connection lasts")
def cache_outlives_change() -> list[Patch]:
    update = Access.update

    def mutated(self: Any, state: Any, names: Any) -> None:
        version = self._version
        update(self, state, names)
        self._version = version

    return [(Access, "update", mutated)]


@plants("access", "a request that was held is answered without another check")
def held_fetch_unchecked() -> list[Patch]:
    return [(kind, "checked_when_answered", False) for kind in REQUESTS.values()]


@plants("access", "a new leader of the audit writes all changes once more", "metadata")
def audit_starts_over() -> list[Patch]:
    load = AuditCoordinator._load

    async def mutated(self: Any) -> None:
        await load(self)
        self.state = NEVER

    return [(AuditCoordinator, "_load", mutated)]


@plants("access", "each process gives a principal the whole rate of its quota")
def quota_per_process() -> list[Patch]:
    return [(Quotas, "_rate", lambda self, key, value: value)]


@plants("access", "a change that a broker forwards is decided as the superuser's")
def forwarded_as_superuser() -> list[Patch]:
    return [(access_changes, "check_forwarded", lambda state, forward, request, now_ms: None)]


@plants("access", "who may write to a topic may write in another's transaction", "transactions")
def family_of_another() -> list[Patch]:
    return [(transaction_changes, "_check_principal", lambda state, key, principal: None)]


@plants("access", "a topic that comes back in a transaction is numbered from 0", "transactions")
def numbers_begin_again() -> list[Patch]:
    metadata_changed = ProducerCore._metadata_changed

    def mutated(self: Any) -> None:
        metadata_changed(self)
        self._hidden.clear()

    return [(ProducerCore, "_metadata_changed", mutated)]
