"""`rayq status`: an overview of the cluster."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from rayq.cli import output
from rayq.cli.cluster_snapshot import ClusterSnapshot, snapshot_of
from rayq.cli.current import connected
from rayq.cli.options import ClusterAddress, Internal, Json
from rayq.client.admin.health import (
    disk_free,
    disk_used,
    is_healthy,
    min_insync_of,
    partition_state,
)
from rayq.records import TopicInfo


def status(internal: Internal = False, json: Json = False, cluster: ClusterAddress = None) -> None:
    """Show an overview of the cluster: brokers, controller, partitions, lag, disk."""
    with connected(cluster) as connection:
        found = snapshot_of(connection)
        name = connection.name
    problems = found.problems()
    topics = found.topics if internal else found.users_topics
    rows, states = _broker_rows(found, topics), _states(topics)
    if json:
        output.print_json(
            {
                "name": name,
                "cluster": msgspec.to_builtins(found.cluster),
                "brokers": rows,
                "topics": len(topics),
                "partitions": states,
                "moving": len(found.moves),
                "groups": {group.group: group.lag for group in found.groups},
                "healthy": is_healthy(problems),
                "problems": msgspec.to_builtins(problems),
            }
        )
        return
    info = found.cluster
    unwell = found.silent | found.troubles.keys()
    live = sum(broker.live and broker.broker not in unwell for broker in info.brokers)
    output.heading(
        f"Cluster {name} ({info.cluster_id[:12]}): {live} of {len(info.brokers)} brokers live"
    )
    output.say(
        f"Controller {info.controller or 'none'}, epoch {info.controller_epoch}, voters "
        f"{output.numbers(info.voters)}"
    )
    output.table(
        ("broker", "address", "state", "leads", "replicas", "logs", "disk free"),
        [
            (
                *(row[key] for key in ("broker", "address", "state", "leads", "replicas")),
                output.human_size(row["logs_bytes"]),
                output.human_size(row["disk_free_bytes"]),
            )
            for row in rows
        ],
        styles=["ok" if row["state"] == "live" else "warning" for row in rows],
        optional=("logs", "replicas"),
    )
    output.say(
        f"{output.counted(len(topics), 'topic')}, "
        f"{output.counted(sum(states.values()), 'partition')}"
        + "".join(f", {count} {state}" for state, count in states.items())
        + (f", {len(found.moves)} moving" if found.moves else "")
    )
    lag = sum(group.lag for group in found.groups)
    output.say(
        f"{output.counted(len(found.groups), 'group')}, lag {output.counted(lag, 'record')}"
    )
    if is_healthy(problems):
        output.verdict("Healthy.", "ok")
    else:
        for problem in problems:
            output.verdict(f"{problem.severity}: {problem.what}", problem.severity)
        output.say("More: rayq cluster health")


def _broker_rows(found: ClusterSnapshot, topics: list[TopicInfo]) -> list[dict[str, Any]]:
    """The leaders and replicas of these topics on each broker. The bytes are those of all topics.
    """
    leads: Counter[int] = Counter()
    replicas: Counter[int] = Counter()
    for topic in topics:
        for partition in topic.partitions:
            if partition.leader is not None:
                leads[partition.leader] += 1
            replicas.update(replica.broker for replica in partition.replicas)
    free, used = disk_free(found.topics), disk_used(found.topics)
    return [
        {
            "broker": broker.broker,
            "address": f"{broker.host}:{broker.port}",
            "state": (
                (
                    "no disk"
                    if broker.broker in found.troubles
                    else "silent"
                    if broker.broker in found.silent
                    else "live"
                    if broker.live
                    else "down"
                )
                + (", cordoned" if broker.cordoned else "")
            ),
            "leads": leads[broker.broker],
            "replicas": replicas[broker.broker],
            "logs_bytes": used.get(broker.broker, 0),
            "disk_free_bytes": free.get(broker.broker),
        }
        for broker in found.cluster.brokers
    ]


def _states(topics: list[TopicInfo]) -> dict[str, int]:
    """The number of partitions in each state."""
    return dict(
        Counter(
            str(partition_state(partition, min_insync_of(topic, partition)))
            for topic in topics
            for partition in topic.partitions
        )
    )
