"""Administration of topics: create one and wait until it is ready, describe one, delete its
records."""

from __future__ import annotations

import asyncio

from rayq.client.client import Client
from rayq.client.metadata import leader_of
from rayq.errors import RayqError, TimeoutError, TopicExistsError, UnknownTopicError, counted
from rayq.messages import (
    MILLISECONDS_MAX,
    CreateTopic,
    DeleteRecords,
    DescribeReplica,
    MetadataResponse,
    PartitionMetadata,
    ReplicaEndpoint,
    TopicMetadata,
)
from rayq.records import (
    BrokerInfo,
    ClusterInfo,
    PartitionInfo,
    ReplicaInfo,
    TopicInfo,
    TopicPartition,
)

DESCRIBE_TIMEOUT_S = 2.0
"""Timeout for a replica's description; without it the replica is shown without offsets."""
READY_POLL_MS = 500
"""Maximum time a broker holds a request for newer metadata while a topic gets ready."""
NOT_READY_PAUSE_S = 0.02


async def create_topic(
    client: Client, request: CreateTopic, *, exist_ok: bool, timeout_s: float
) -> None:
    """Creates a topic: see `AsyncAdmin.create_topic`."""
    deadline = client.now + timeout_s
    while True:
        try:
            await client.change(request, timeout_s=max(deadline - client.now, 0.0))
            break
        except TopicExistsError:
            if not exist_ok:
                raise
        left_s = max(deadline - client.now, 0.0)
        try:
            found = await client.topic(request.name, timeout_s=left_s, age_max_s=0.0)
        except UnknownTopicError:  # It was deleted meanwhile.
            continue
        _check_as_asked(found, request)
        return
    await until_ready(client, request.name, request.partitions, timeout_s=timeout_s)


async def delete_records(
    client: Client, place: TopicPartition, before: int | None, *, timeout_s: float
) -> int:
    """Deletes the records of one partition below an offset (None: all that are committed). Returns
    the new log start."""
    response = await client.ask_leader(
        *place,
        lambda topic_id, leader: DeleteRecords(
            topic_id=topic_id,
            partition=place.partition,
            leader_epoch=leader.epoch,
            before_offset=before,
            # Before we give up, so that its reason arrives.
            timeout_ms=min(int(timeout_s * 900), MILLISECONDS_MAX),
        ),
        timeout_s=timeout_s,
        attempt_timeout_s=timeout_s,
    )
    return response.log_start_offset


def cluster_info(metadata: MetadataResponse) -> ClusterInfo:
    brokers = [
        BrokerInfo(
            broker=broker.broker,
            host=broker.host,
            port=broker.port,
            node_id=broker.node_id,
            live=broker.live,
            cordoned=broker.cordoned,
        )
        for broker in sorted(metadata.brokers, key=lambda broker: broker.broker)
    ]
    return ClusterInfo(
        cluster_id=metadata.cluster_id,
        brokers=brokers,
        controller=metadata.controller,
        controller_epoch=metadata.controller_epoch,
        voters=list(metadata.voters),
    )


async def describe_topic(client: Client, name: str, *, timeout_s: float) -> TopicInfo:
    topic = await client.topic(name, timeout_s=timeout_s, age_max_s=0.0)
    partitions = await asyncio.gather(
        *(_describe_partition(client, topic, partition) for partition in topic.partitions)
    )
    return TopicInfo(
        name=topic.name,
        topic_id=topic.topic_id,
        partitions=list(partitions),
        config=dict(topic.config),
    )


async def _describe_partition(
    client: Client, topic: TopicMetadata, partition: PartitionMetadata
) -> PartitionInfo:
    replicas = await asyncio.gather(
        *(
            _describe_replica(client, topic.topic_id, partition.partition, replica)
            for replica in partition.replicas
        )
    )
    return PartitionInfo(
        partition=partition.partition,
        leader=partition.leader,
        leader_epoch=partition.leader_epoch,
        isr=list(partition.isr),
        replicas=list(replicas),
        offline_reason=partition.offline_reason,
        target=list(partition.target),
        origin=list(partition.origin),
        remote_end_offset=None if partition.remote is None else partition.remote.end,
        remote_bytes=0 if partition.remote is None else partition.remote.data_bytes,
    )


async def _describe_replica(
    client: Client, topic_id: str, partition: int, replica: ReplicaEndpoint
) -> ReplicaInfo:
    answer = None
    if replica.host is not None and replica.port is not None:
        request = DescribeReplica(topic_id=topic_id, partition=partition)
        try:
            answer, _ = await client.ask(
                (replica.host, replica.port), request, timeout_s=DESCRIBE_TIMEOUT_S
            )
        except RayqError as error:
            if not (error.retriable or isinstance(error, UnknownTopicError)):
                raise
    return ReplicaInfo(
        broker=replica.broker,
        host=replica.host,
        port=replica.port,
        pid=None if answer is None else answer.pid,
        log_start_offset=None if answer is None else answer.log_start_offset,
        high_watermark=None if answer is None else answer.high_watermark,
        log_end_offset=None if answer is None else answer.log_end_offset,
        size_bytes=None if answer is None else answer.size_bytes,
        disk_free_bytes=None if answer is None else answer.disk_free_bytes,
        trouble=None if answer is None else answer.trouble,
    )


async def until_ready(
    client: Client, name: str, partitions: int, *, timeout_s: float
) -> None:
    """Waits until every partition has a running leader and a full in-sync set, as long as there is
    progress at least every `timeout_s`."""
    deadline = client.now + timeout_s
    version_min = progress = 0
    missing = ["no broker has told of it"]
    silence: TimeoutError | None = None
    while True:
        left_s = deadline - client.now
        if left_s <= NOT_READY_PAUSE_S:
            unheard = "" if silence is None else f" No broker answered at last: {silence}"
            raise TimeoutError(
                f"Topic {name!r} exists, but for {timeout_s:g} s it has come no nearer to "
                f"being ready: {'; '.join(missing)}. It may still become so: see "
                f"describe_topic.{unheard}"
            )
        version = client.metadata.version
        silence = None
        try:
            await client.refresh(
                [name],
                timeout_s=left_s,
                version_min=version_min,
                wait_ms=min(READY_POLL_MS, int(left_s * 500)),
            )
        except TimeoutError as error:  # The time has passed then: see above.
            silence = error
            continue
        topic = client.metadata.topics.get(name)
        missing = _missing(topic, partitions)
        if not missing:
            return
        if _progress(topic) > progress:
            progress = _progress(topic)
            deadline = client.now + timeout_s
        version_min = client.metadata.version + 1
        if client.metadata.version == version:
            await asyncio.sleep(NOT_READY_PAUSE_S)


def _missing(topic: TopicMetadata | None, partitions: int) -> list[str]:
    """A list of what a topic still lacks."""
    if topic is None:
        return ["no broker knows it yet"]
    missing = []
    if len(topic.partitions) < partitions:
        missing.append(f"it has {len(topic.partitions)} of {partitions} partitions")
    for partition in topic.partitions:
        replicas = partition.origin or [replica.broker for replica in partition.replicas]
        absent = set(replicas) - set(partition.isr)
        if leader_of(partition) is None:
            reason = partition.offline_reason or "its process is not running yet"
            missing.append(f"partition {partition.partition} has no leader ({reason})")
        elif absent:
            names = ", ".join(map(str, sorted(absent)))
            missing.append(f"partition {partition.partition} lacks the replicas of brokers {names}")
    return missing


def _progress(topic: TopicMetadata | None) -> int:
    """A number that grows while a topic gets ready: processes that run, replicas in sync,
    leaders."""
    return sum(
        sum(replica.host is not None for replica in partition.replicas)
        + len(partition.isr)
        + (leader_of(partition) is not None)
        for partition in ([] if topic is None else topic.partitions)
    )


def _check_as_asked(found: TopicMetadata, asked: CreateTopic) -> None:
    """Raises TopicExistsError if a topic differs from what a `create_topic` asked for."""
    differences = []
    if len(found.partitions) != asked.partitions:
        differences.append(f"{counted(len(found.partitions), 'partition')}, not {asked.partitions}")
    first = found.partitions[0]
    factor = len(first.origin or first.replicas)
    if asked.replication_factor not in (None, factor):
        differences.append(f"replication_factor {factor}, not {asked.replication_factor}")
    differences += [
        f"{key} {found.config[key]!r}, not {value!r}"
        for key, value in asked.config.items()
        if found.config[key] != value
    ]
    if differences:
        raise TopicExistsError(
            f"Topic {found.name!r} exists already, and is not as it was asked for. It has "
            f"{'; '.join(differences)}. Ask for what it has, or change it by create_partitions, "
            "set_replication_factor or alter_topic_config."
        )
