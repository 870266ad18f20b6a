"""Consumer pools on Ray."""

from __future__ import annotations

from rayq.client.cluster import Cluster
from rayq.client.consumer_pool import PoolControl, PoolSpec
from rayq.errors import RayqError


def start_pool(cluster: Cluster, spec: PoolSpec) -> PoolControl:
    raise RayqError("Pools on Ray are on their way.")


def pools(cluster_name: str) -> dict[str, PoolControl]:
    return {}


def stop_pools(cluster_name: str) -> None:
    return None
