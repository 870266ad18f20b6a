"""Administration of topics and their records, and the description of the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Unpack

from rayq.client.admin.base import ADMIN_TIMEOUT_S, AdminMethods, Call
from rayq.client.arguments import by_partition, partition_numbers, topic_name, whole_number
from rayq.client.client import Client, check_partition
from rayq.client.metadata import leader_of
from rayq.client.timeouts import takes_timeout
from rayq.config import TopicConfig, given_values
from rayq.config.keywords import TopicKeywords
from rayq.core.cluster.topic_changes import INTERNAL_PREFIX
from rayq.errors import (
    InvalidRequestError,
    RayqError,
    TimeoutError,
    TopicExistsError,
    UnknownTopicError,
    counted,
)
from rayq.messages import (
    MILLISECONDS_MAX,
    AlterTopicConfig,
    Change,
    CreatePartitions,
    CreateTopic,
    DeleteRecords,
    DeleteTopic,
    DescribeReplica,
    ElectLeaders,
    EndRemoteStorage,
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


class TopicAdmin(AdminMethods):
    """Methods of `AsyncAdmin` about topics and the cluster."""

    @takes_timeout
    async def create_topic(
        self,
        name: str,
        partitions: int = 1,
        replication_factor: int | None = None,
        *,
        exist_ok: bool = False,
        timeout_s: float = ADMIN_TIMEOUT_S,
        **config: Unpack[TopicKeywords],
    ) -> None:
        """Creates a topic; returns when every partition has a leader and a full in-sync set.
        `timeout_s` starts over whenever a replica has started or come in sync, because many of them
        may take long on a slow machine.

        `replication_factor` None means min(3, brokers). `config` is as in `TopicConfig`. With
        `exist_ok` an existing topic is left as it is, and not waited for; if it has a different
        number of partitions, or differs in a value given here, TopicExistsError says so.

        Raises TopicExistsError, InvalidTopicError, InvalidPartitionsError,
        InvalidReplicationFactorError, ReplicaLimitError, ConfigError.
        """
        request = CreateTopic(
            name=topic_name(name),
            partitions=whole_number("partitions", partitions),
            replication_factor=None
            if replication_factor is None
            else whole_number("replication_factor", replication_factor),
            config=given_values(TopicConfig, config),
        )
        client = self._client
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
                found = await client.topic(name, timeout_s=left_s, age_max_s=0.0)
            except UnknownTopicError:  # It was deleted meanwhile.
                continue
            _check_as_asked(found, request)
            return
        await until_ready(client, name, partitions, timeout_s=timeout_s)

    @takes_timeout
    async def delete_topic(self, name: str, *, timeout_s: float = ADMIN_TIMEOUT_S) -> None:
        """Deletes a topic and its records. Raises UnknownTopicError."""
        await self._client.change(DeleteTopic(name=topic_name(name)), timeout_s=timeout_s)
        await self._client.refresh([name], timeout_s=timeout_s)

    @takes_timeout
    async def create_partitions(
        self,
        name: str,
        total: int,
        *,
        force: bool = False,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> None:
        """Increases the partitions of a topic to `total`, and waits as `create_topic` does. Records
        with a key may go to other partitions from then on. Raises InvalidPartitionsError, also if a
        queue handles the records of each key in order, unless `force` is True."""
        total = whole_number("total", total)
        request = CreatePartitions(name=topic_name(name), total=total, force=force)
        await self._client.change(request, timeout_s=timeout_s)
        await until_ready(self._client, name, total, timeout_s=timeout_s)

    @takes_timeout
    async def alter_topic_config(
        self,
        name: str,
        *,
        delete_remote: bool = False,
        timeout_s: float = ADMIN_TIMEOUT_S,
        **changes: Unpack[TopicKeywords],
    ) -> None:
        """Changes the given keys of a topic's config. Raises ConfigError, UnknownTopicError.

        `remote_storage=False` can be given with `delete_remote=True`, and then no other key: the
        topic's objects in the object store are removed, and records that are no longer on any
        broker's disk are gone at once.
        """
        if not changes:
            raise InvalidRequestError("alter_topic_config needs at least one key to change.")
        config = given_values(TopicConfig, changes)
        request: Change = AlterTopicConfig(name=topic_name(name), changes=config)
        if delete_remote:
            if config != {"remote_storage": False}:
                raise InvalidRequestError(
                    "delete_remote=True is for remote_storage=False alone: change other keys by a "
                    "call of their own."
                )
            request = EndRemoteStorage(name=topic_name(name))
        await self._client.change(request, timeout_s=timeout_s)
        await self._client.refresh([name], timeout_s=timeout_s)

    @takes_timeout
    async def elect_leaders(
        self,
        name: str,
        partitions: list[int] | None = None,
        *,
        unclean: bool = False,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> None:
        """Makes the first replica of each partition the leader if it is in sync. With `unclean`, a
        partition without a leader takes any live replica, which may lose acknowledged records."""
        request = ElectLeaders(
            name=topic_name(name), partitions=partition_numbers(partitions), unclean=unclean
        )
        await self._client.change(request, timeout_s=timeout_s)
        await self._client.refresh([name], timeout_s=timeout_s)

    @takes_timeout
    async def list_topics(
        self, *, internal: bool = False, timeout_s: float = ADMIN_TIMEOUT_S
    ) -> list[str]:
        """The names of all topics, sorted. With `internal`, rayq's own topics (`__...`) too."""
        response = await self._client.fetch_all(timeout_s=timeout_s)
        names = (topic.name for topic in response.topics)
        return sorted(name for name in names if internal or not name.startswith(INTERNAL_PREFIX))

    @takes_timeout
    async def describe_topic(self, name: str, *, timeout_s: float = ADMIN_TIMEOUT_S) -> TopicInfo:
        """Describes a topic and its partitions. Each replica is asked for its offsets, which are
        None if it does not answer. Raises UnknownTopicError."""
        topic = await self._client.topic(topic_name(name), timeout_s=timeout_s, age_max_s=0.0)
        partitions = await asyncio.gather(
            *(_describe_partition(self._client, topic, partition) for partition in topic.partitions)
        )
        return TopicInfo(
            name=topic.name,
            topic_id=topic.topic_id,
            partitions=partitions,
            config=dict(topic.config),
        )

    @takes_timeout
    async def describe_cluster(self, *, timeout_s: float = ADMIN_TIMEOUT_S) -> ClusterInfo:
        """Describes the cluster: its brokers, its controller and the voters."""
        response = await self._client.fetch_all(timeout_s=timeout_s)
        return ClusterInfo(
            cluster_id=response.cluster_id,
            brokers=[
                BrokerInfo(
                    broker=broker.broker,
                    host=broker.host,
                    port=broker.port,
                    node_id=broker.node_id,
                    live=broker.live,
                    cordoned=broker.cordoned,
                )
                for broker in sorted(response.brokers, key=lambda broker: broker.broker)
            ],
            controller=response.controller,
            controller_epoch=response.controller_epoch,
            voters=list(response.voters),
        )

    @takes_timeout
    async def delete_records(
        self,
        before: Mapping[TopicPartition, int | None],
        *,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> dict[TopicPartition, int]:
        """Deletes the records below an offset (None: all that are committed) of each partition, for
        good. Returns the new log start of each, once no replica that may lead starts below it.
        Waits for transactions with records there to end. Raises OffsetOutOfRangeError beyond the
        committed records; TimeoutError, which says whether nothing was deleted (too few replicas
        were in sync, a transaction is open), or the deletion may or may not last."""
        limits = by_partition(before, "the offset that records are deleted before")
        for (topic, partition), offset in limits.items():
            check_partition(await self._client.topic(topic, timeout_s=timeout_s), partition)
            if offset is not None and (type(offset) is not int or offset < 0):
                raise InvalidRequestError(
                    f"delete_records of {topic}-{partition} needs an offset from 0, or None for "
                    f"all that is committed, not {offset!r}."
                )
        answers = await asyncio.gather(
            *(
                Call(self._client, timeout_s).ask_leader(
                    *partition,
                    DeleteRecords,
                    offset,
                    # Before we give up, so that its reason arrives.
                    min(int(timeout_s * 900), MILLISECONDS_MAX),
                    timeout_s=timeout_s,
                    attempt_timeout_s=timeout_s,
                )
                for partition, offset in limits.items()
            )
        )
        return {
            partition: answer.log_start_offset
            for partition, answer in zip(limits, answers, strict=True)
        }


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
    progress at least every `timeout_s`. A client that may create the topic but not describe it does
    not wait."""
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
        if not missing or name in client.metadata.denied:
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
