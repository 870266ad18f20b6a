"""Restart of one broker of a cluster that continues to serve.

It waits until everything the broker holds can be spared, stops the broker in a controlled way and
starts it again, and waits until its replicas are in sync: then the next one may be restarted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from rayq.client.admin.admin import Admin
from rayq.client.admin.health import min_insync_of
from rayq.client.arguments import whole_number
from rayq.errors import BrokerInUseError, NotEnoughReplicasError, RayqError, UnknownBrokerError
from rayq.records import ClusterInfo, PartitionInfo, TopicInfo

POLL_S = 0.1


def restart_broker(
    admin: Admin, broker: int, restart: Callable[[int], None], *, timeout_s: float
) -> None:
    """Restarts a broker. `restart` stops the broker's processes and returns when the new one has a
    session. Raises UnknownBrokerError; NotEnoughReplicasError if writes would stop meanwhile
    (nothing was done then), or if replicas are not in sync in time afterwards; and the errors of
    `restart`."""
    deadline_s = time.monotonic() + timeout_s
    _known(admin, broker)
    _wait(
        lambda: _needing(admin, broker),
        deadline_s,
        f"Broker {broker} was not restarted: without it there would be too few in-sync replicas of",
    )
    restart(broker)
    _wait(
        lambda: _behind(admin, broker),
        deadline_s,
        f"Broker {broker} was restarted, and after {timeout_s:.0f} s it is not in sync yet for",
    )


def check_may_stop(admin: Admin, broker: int) -> None:
    """Raises UnknownBrokerError, or BrokerInUseError if the broker cannot be stopped for good: it
    holds replicas, or the cluster would lose the majority of its voters with it."""
    cluster = _known(admin, broker)
    held = next((partition for _, partition in _partitions_on(admin, broker)), None)
    if held is not None:
        raise BrokerInUseError(f"Broker {broker} holds replicas: drain it first.")
    others = _voters_without(cluster, broker)
    if len(others) <= len(cluster.voters) // 2:
        raise BrokerInUseError(
            f"Broker {broker} is not stopped: of the voters {cluster.voters} on the metadata only "
            f"{others} would be left. Start the others, or add a broker that takes its vote."
        )


def _known(admin: Admin, broker: int) -> ClusterInfo:
    whole_number("broker", broker)
    cluster = admin.describe_cluster()
    known = sorted(b.broker for b in cluster.brokers)
    if broker not in known:
        raise UnknownBrokerError(f"There is no broker {broker}: the brokers are {known}.")
    return cluster


def _voters_without(cluster: ClusterInfo, broker: int) -> list[int]:
    live = _live(cluster)
    return [voter for voter in cluster.voters if voter != broker and voter in live]


def _live(cluster: ClusterInfo) -> set[int]:
    return {broker.broker for broker in cluster.brokers if broker.live}


def _needing(admin: Admin, broker: int) -> list[str]:
    """The partitions that could not be written while the broker is away although they have enough
    replicas, because some of those have yet to catch up or to start; and the metadata, without
    which no leader is elected in the broker's place. (If a write always needs every replica,
    producers wait until the broker is back, and waiting here would not change that.)"""
    cluster = admin.describe_cluster()
    if broker not in _live(cluster):
        return []  # The broker is away already: starting it can only help.
    others, voters = _voters_without(cluster, broker), len(cluster.voters)
    is_needed = broker in cluster.voters and len(others) <= voters // 2 < voters - 1
    return ["the metadata"] * is_needed + [
        f"{topic.name}-{partition.partition}"
        for topic, partition in _partitions_on(admin, broker)
        if len(partition.replicas) > min_insync_of(topic, partition)
        and len(set(partition.isr) - {broker}) < min_insync_of(topic, partition)
    ]


def _behind(admin: Admin, broker: int) -> list[str]:
    return [
        f"{topic.name}-{partition.partition}"
        for topic, partition in _partitions_on(admin, broker)
        if broker not in partition.isr or partition.leader is None
    ]


def _partitions_on(admin: Admin, broker: int) -> Iterator[tuple[TopicInfo, PartitionInfo]]:
    for name in admin.list_topics(internal=True):
        topic = admin.describe_topic(name)
        for partition in topic.partitions:
            if any(replica.broker == broker for replica in partition.replicas):
                yield topic, partition


def _wait(holding_up: Callable[[], list[str]], deadline_s: float, problem: str) -> None:
    while True:
        try:
            names = holding_up()
        except RayqError:
            # Leaders and the controller change while brokers come and go.
            if time.monotonic() > deadline_s:
                raise
            names = []
        else:
            if not names:
                return
            if time.monotonic() > deadline_s:
                some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
                raise NotEnoughReplicasError(
                    f"{problem} {some}. `rayq cluster health` says what is missing."
                )
        time.sleep(POLL_S)
