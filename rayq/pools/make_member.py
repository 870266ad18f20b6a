"""Choice of the kind of consumer that a pool has."""

from __future__ import annotations

from collections.abc import Callable

from rayq.client.cluster import Cluster
from rayq.client.consumer_pool import Handler, PoolSpec
from rayq.environment import Environment
from rayq.pools.member import Member
from rayq.pools.pool_member import PoolMember
from rayq.pools.queue_member import QueueMember


def make_member(
    environment: Environment,
    cluster: Cluster,
    spec: PoolSpec,
    name: str,
    load_handler: Callable[[], Handler],
) -> Member:
    """Makes a consumer for a pool. The arguments are those of `PoolMember`."""
    if spec.queue is not None:
        return QueueMember(environment, cluster, spec, load_handler)
    return PoolMember(environment, cluster, spec, name, load_handler)
