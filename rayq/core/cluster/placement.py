"""Placement of the replicas of new partitions: spread over nodes, then balanced over brokers,
within the maximum of each broker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rayq.core.cluster.state import ClusterState
from rayq.errors import ReplicaLimitError


def place(
    nodes: Mapping[int, str],
    existing: Sequence[Sequence[int]],
    *,
    partitions: int,
    replication_factor: int,
) -> list[tuple[int, ...]]:
    """Replica lists (preferred leader first) for `partitions` new partitions.

    `nodes` maps each live broker to its node; `existing` are the replica lists that the cluster has
    already. Leaders go to the broker that is preferred leader least often, followers to brokers on
    nodes not used yet, with the fewest replicas. Needs `replication_factor` <= brokers.
    """
    assert 1 <= replication_factor <= len(nodes)
    leads = Counter(replicas[0] for replicas in existing)
    carries = Counter(broker for replicas in existing for broker in replicas)
    # Which broker follows which: a broker's loss should spread its leadership over all others.
    follows = Counter((replicas[0], broker) for replicas in existing for broker in replicas[1:])
    placed = []
    for _ in range(partitions):
        leader = min(nodes, key=lambda broker: (leads[broker], carries[broker], broker))
        chosen = [leader]
        while len(chosen) < replication_factor:
            used = {nodes[broker] for broker in chosen}
            follower = min(
                (broker for broker in nodes if broker not in chosen),
                key=lambda broker: (
                    nodes[broker] in used,
                    carries[broker],
                    follows[leader, broker],
                    broker,
                ),
            )
            follows[leader, follower] += 1
            chosen.append(follower)
        leads[leader] += 1
        carries.update(chosen)
        placed.append(tuple(chosen))
    return placed


def check_replica_limits(state: ClusterState, added: Mapping[int, int], what: str) -> None:
    """Raises ReplicaLimitError if `what` would give a broker more replicas than its maximum;
    `added` is the number that each gets."""
    carried = Counter(
        broker for _, _, partition in state.all_partitions() for broker in partition.value.replicas
    )
    for broker in sorted(added):
        limit = state.brokers[broker].registration.replicas_max
        count = carried[broker] + added[broker]
        if count > limit:
            raise ReplicaLimitError(
                f"{what} would give broker {broker} {carried[broker]} + {added[broker]} = {count} "
                f"replicas, above max_replicas_per_broker = {limit} (where it is not set: what the "
                "memory of the node, or the files that its processes may open, ulimit -n, allow, "
                "with replicas_per_process). Add brokers, or raise the limit."
            )
