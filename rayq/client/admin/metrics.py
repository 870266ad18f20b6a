"""Metrics of a whole cluster: every server process is asked, and the lag of groups is computed.
`Cluster.metrics` returns them, and the controller's process hands them to Ray."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

from rayq.client.admin.access import principals_known
from rayq.client.client import Client
from rayq.client.coordinator import GroupCoordinator, offsets_partitions
from rayq.client.timeouts import time_left_s
from rayq.config import ConsumerConfig
from rayq.core.cluster.topic_changes import OFFSETS_TOPIC
from rayq.environment import Address
from rayq.errors import AuthorizationError, RayqError
from rayq.messages import (
    LATEST,
    READ_COMMITTED,
    AnyRequest,
    CommittedOffset,
    DescribeGroup,
    DescribeGroupResponse,
    DescribeMetrics,
    DescribeObjectStore,
    DescribeOffset,
    DescribeOffsetResponse,
    ListGroups,
    ListGroupsResponse,
    ListOffsets,
    ListOffsetsResponse,
    MetadataResponse,
)
from rayq.metrics import CATALOGUE, Sample, merged
from rayq.records import TopicPartition

PROCESS_TIMEOUT_S = 3.0
"""Timeout for the metrics of one process."""
ATTEMPT_TIMEOUT_S = 3.0
AT_ONCE_MAX = 64
"""Maximum number of requests in flight."""

T = TypeVar("T")
Position = tuple[str, TopicPartition]
"""`(group, partition)`"""


async def collect_metrics(client: Client, *, timeout_s: float) -> list[Sample]:
    """The metrics of every process of the cluster and of every group, sorted by name. A process
    that does not answer has `rayq_process_up` 0; a lag that cannot be determined now is missing.
    Raises TimeoutError if no broker answers,
    AuthorizationError."""
    deadline = client.now + timeout_s
    response = await client.fetch_all(timeout_s=timeout_s)
    limit = min(PROCESS_TIMEOUT_S, timeout_s)
    addresses = [
        *processes_of(response),
        *_controller_of(response),
        *await _object_servers(client, response, limit),
    ]
    addresses = list(dict.fromkeys(addresses))
    answers = await ask_all(_asking(client, address, limit) for address in addresses)
    samples = [sample for answer in answers for sample in answer or ()]
    name = next((s.labels["cluster"] for s in samples if s.labels.get("cluster")), "")
    for (host, port), answer in zip(addresses, answers, strict=True):
        labels = {"cluster": name, "process": f"{host}:{port}"}
        samples.append(Sample("rayq_process_up", labels, float(answer is not None)))
    with contextlib.suppress(RayqError):
        samples += await _token_expiries(client, name, timeout_s=limit)
    with contextlib.suppress(RayqError):  # One hung process may have taken all the time.
        lag = GroupLag(client, name)
        samples += await lag.collect(timeout_s=max(deadline - client.now, 0.001))
    return merged(samples)


async def _token_expiries(client: Client, cluster: str, *, timeout_s: float) -> list[Sample]:
    now_ms = client.environment.clock.wall_ms()
    return [
        Sample(
            "rayq_token_expires_seconds",
            {"cluster": cluster, "principal": principal.name},
            (principal.tokens_end_ms - now_ms) / 1000,
        )
        for principal in await principals_known(client, timeout_s=timeout_s)
        if principal.tokens_end_ms is not None
    ]


def processes_of(response: MetadataResponse) -> list[Address]:
    """The addresses of the cluster's processes of brokers and replicas."""
    found = [(broker.host, broker.port) for broker in response.brokers if broker.live]
    found += [
        (replica.host, replica.port)
        for topic in response.topics
        for partition in topic.partitions
        for replica in partition.replicas
        if replica.host is not None and replica.port is not None
    ]
    return list(dict.fromkeys(found))


def _controller_of(response: MetadataResponse) -> list[Address]:
    if response.controller is None:
        return []
    host, _, port = response.controller.rpartition(":")
    return [(host, int(port))]


async def _object_servers(
    client: Client, response: MetadataResponse, timeout_s: float
) -> list[Address]:
    """The addresses of the brokers' object servers: only each broker itself knows its own."""

    def asking(address: Address) -> Callable[[], Awaitable[Address | None]]:
        async def ask() -> Address | None:
            try:
                answer, _ = await client.ask(address, DescribeObjectStore(), timeout_s=timeout_s)
            except RayqError:
                return None
            return answer.object_server

        return ask

    brokers = ((broker.host, broker.port) for broker in response.brokers if broker.live)
    found = await ask_all(map(asking, brokers))
    return [address for address in found if address is not None]


def _asking(
    client: Client, address: Address, timeout_s: float
) -> Callable[[], Awaitable[list[Sample] | None]]:
    async def ask() -> list[Sample] | None:
        try:
            answer, _ = await client.ask(address, DescribeMetrics(), timeout_s=timeout_s)
        except AuthorizationError:
            raise  # It is up.
        except RayqError:
            return None
        return answer.samples

    return ask


async def ask_all(questions: Iterable[Callable[[], Awaitable[T]]]) -> list[T]:
    """The answers, in the order of the requests. At most AT_ONCE_MAX are in flight at a time."""
    free = asyncio.Semaphore(AT_ONCE_MAX)

    async def when_free(ask: Callable[[], Awaitable[T]]) -> T:
        async with free:
            return await ask()

    return await asyncio.gather(*(when_free(ask) for ask in questions))


class GroupLag:
    """The lag of the groups of a cluster, in records and in seconds.

    Seconds are the age of the record at the committed offset, as the leader appended it. This is
    exact, needs no history of offsets, and does not depend on the timestamps of producers.
    """

    def __init__(self, client: Client, cluster_name: str) -> None:
        self._client = client
        self._cluster_name = cluster_name
        self._deadline = 0.0

    async def collect(self, *, timeout_s: float) -> list[Sample]:
        """The lag of every group that has committed. A partition whose leader does not answer in
        time is left out, and so are the groups of a coordinator that does not. Raises RayqError if
        no broker answers."""
        client = self._client
        self._deadline = client.now + timeout_s
        count = await offsets_partitions(client, create=False, timeout_s=timeout_s)
        listed: Sequence[ListGroupsResponse | None] = await ask_all(
            self._to_leader(TopicPartition(OFFSETS_TOPIC, number), _list_groups(number))
            for number in range(count)
        )
        groups = [group.group for answer in listed if answer is not None for group in answer.groups]
        described = await ask_all(self._describing(group) for group in groups)
        names = {
            topic.topic_id: topic.name for topic in (await self._topics() if groups else ())
        }
        committed: dict[Position, CommittedOffset] = {
            (answer.group, TopicPartition(names[commit.topic_id], commit.partition)): commit
            for answer in described
            if answer is not None
            for commit in answer.offsets
            if commit.topic_id in names
        }
        places = sorted({partition for _, partition in committed})
        found = await ask_all(self._to_leader(place, _latest(place)) for place in places)
        ends = dict(zip(places, found, strict=True))
        return await self._samples(committed, ends)

    async def _samples(
        self,
        committed: dict[Position, CommittedOffset],
        ends: dict[TopicPartition, ListOffsetsResponse | None],
    ) -> list[Sample]:
        lags: dict[Position, int] = {}
        for (group, place), commit in committed.items():
            answer = ends[place]
            if answer is not None and answer.offset is not None:
                lags[group, place] = max(answer.offset - commit.offset, 0)
        behind = [at for at, lag in lags.items() if lag]
        found: Sequence[DescribeOffsetResponse | None] = await ask_all(
            self._to_leader(at[1], _age(at[1], committed[at].offset)) for at in behind
        )
        seconds = {at: 0.0 for at, lag in lags.items() if not lag}
        for at, age in zip(behind, found, strict=True):
            if age is not None:
                seconds[at] = (age.age_ms or 0) / 1000
        samples = [
            *(self._sample("offset", at, commit.offset) for at, commit in committed.items()),
            *(self._sample("lag", at, lag) for at, lag in lags.items()),
            *(self._sample("lag_seconds", at, age_s) for at, age_s in seconds.items()),
        ]
        for group in dict.fromkeys(group for group, _ in lags):
            own = [lag for at, lag in lags.items() if at[0] == group]
            own_seconds = [age_s for at, age_s in seconds.items() if at[0] == group]
            samples.append(self._sample("max_lag", (group, None), max(own)))
            samples.append(self._sample("sum_lag", (group, None), sum(own)))
            if own_seconds:
                worst = max(own_seconds)
                samples.append(self._sample("max_lag_seconds", (group, None), worst))
        return samples

    def _sample(
        self, name: str, at: tuple[str, TopicPartition | None], value: float
    ) -> Sample:
        group, place = at
        labels = {"cluster": self._cluster_name, "group": group}
        if place is not None:
            labels.update(topic=place.topic, partition=str(place.partition))
        metric = CATALOGUE[f"rayq_consumergroup_group_{name}"]
        assert set(labels) == set(metric.labels), metric.name
        return Sample(metric.name, labels, value)

    # --- asking ---------------------------------------------------------------------------------

    @property
    def _left_s(self) -> float:
        return time_left_s(self._client.now, self._deadline)

    async def _topics(self) -> Sequence[Any]:
        return (await self._client.fetch_all(timeout_s=self._left_s)).topics

    def _to_leader(
        self, place: TopicPartition, build: Callable[[str, int], AnyRequest]
    ) -> Callable[[], Awaitable[Any]]:
        """A request to the leader of a partition. Its answer is None if the leader does not answer,
        or the topic is gone."""

        async def ask() -> Any:
            timeout_s = min(ATTEMPT_TIMEOUT_S, self._left_s)
            try:
                return await self._client.ask_leader(
                    *place,
                    lambda topic_id, leader: build(topic_id, leader.epoch),
                    timeout_s=timeout_s,
                    attempt_timeout_s=timeout_s,
                )
            except RayqError:
                return None

        return ask

    def _describing(self, group: str) -> Callable[[], Awaitable[DescribeGroupResponse | None]]:
        coordinator = GroupCoordinator(self._client, group, ConsumerConfig())

        async def ask() -> DescribeGroupResponse | None:
            try:
                answer: DescribeGroupResponse = await coordinator.ask(
                    lambda topic, number, epoch: DescribeGroup(topic, number, epoch, group),
                    timeout_s=min(ATTEMPT_TIMEOUT_S, self._left_s),
                )
            except RayqError:
                return None
            return answer

        return ask


def _list_groups(number: int) -> Callable[[str, int], AnyRequest]:
    return lambda topic_id, epoch: ListGroups(topic_id, number, epoch)


def _latest(place: TopicPartition) -> Callable[[str, int], AnyRequest]:
    return lambda topic_id, epoch: ListOffsets(
        topic_id, place.partition, epoch, LATEST, READ_COMMITTED
    )


def _age(place: TopicPartition, offset: int) -> Callable[[str, int], AnyRequest]:
    return lambda topic_id, epoch: DescribeOffset(topic_id, place.partition, epoch, offset)
