"""Bugs planted into the moving of partitions: see `mutations`."""

from __future__ import annotations

from typing import Any

import msgspec

from proving.simulation.patches import Patch
from proving.simulation.planting import plants
from rayq.actors.broker.placed_replicas import PlacedReplicas
from rayq.core.cluster import election, reassignment
from rayq.core.partition.state import PartitionState

MOVES = "moves"
GROUP_MOVES = "group-moves"


@plants("23", "a move is over when a majority of its target is in sync", MOVES)
def completed_by_a_majority() -> list[Patch]:
    def completed(value: Any, live: Any) -> Any:
        in_sync = [broker for broker in value.isr if election.is_same_process(broker, live)]
        isr = tuple(broker for broker in in_sync if broker.broker in value.target)
        if value.leader is None or len(isr) <= len(value.target) // 2:
            return None
        settled = reassignment._settled(value, value.target)
        changed = msgspec.structs.replace(settled, isr=isr, elr=())
        return reassignment._with_leader(changed, isr[0].broker, live)

    return [(reassignment, "completed", completed)]


@plants("23", "whoever was in sync stays so when its replica has left", MOVES)
def in_sync_outside_of_the_target() -> list[Patch]:
    completed = reassignment.completed

    def mutated(value: Any, live: Any) -> Any:
        changed = completed(value, live)
        if changed is None:
            return None
        return msgspec.structs.replace(
            changed,
            isr=value.isr,
            leader=value.leader,
            leader_incarnation=value.leader_incarnation,
            leader_epoch=value.leader_epoch,
        )

    return [(reassignment, "completed", mutated)]


@plants("23", "a broker lets go of a replica as soon as its move away begins", MOVES)
def directory_removed_before_the_commit() -> list[Patch]:
    find = PlacedReplicas.find

    def mutated(self: Any, key: Any) -> Any:
        found = find(self, key)
        if found is not None and self._broker in found[1].value.removing:
            return None
        return found

    return [
        (PlacedReplicas, "find", mutated),
        (PlacedReplicas, "may_remove", lambda self, key: True),
    ]


@plants("23", "a move is cancelled whoever holds what was acknowledged meanwhile", MOVES)
def cancelled_whatever_is_in_sync() -> list[Patch]:
    def cancelled(value: Any, live: Any, *, min_insync: int) -> Any:
        changed = reassignment._settled(value, value.origin)
        isr = tuple(broker for broker in value.isr if broker.broker in value.origin)
        elr = tuple(broker for broker in value.elr if broker.broker in value.origin)
        changed = msgspec.structs.replace(changed, isr=isr, elr=elr)
        if value.leader in value.origin:
            return changed
        return msgspec.structs.replace(
            changed, leader=None, leader_incarnation=None, leader_epoch=value.leader_epoch + 1
        )

    return [(reassignment, "cancelled", cancelled)]


@plants("23", "metadata of long ago decides which directories are removed", MOVES)
def directory_removed_by_old_metadata() -> list[Patch]:
    return [
        (PlacedReplicas, "is_current", property(lambda self: True)),
        (PlacedReplicas, "may_remove", lambda self, key: True),
    ]


@plants("6", "the refusal of an older proposal decides the same one made again", GROUP_MOVES)
def refusal_of_an_older_proposal_believed() -> list[Patch]:
    refused = PartitionState.proposal_refused

    def mutated(self: Any, proposed: Any, partition_epoch: int) -> None:
        refused(self, proposed, self.partition_epoch)

    return [(PartitionState, "proposal_refused", mutated)]
