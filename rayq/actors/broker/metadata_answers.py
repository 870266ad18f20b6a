"""A broker's answers from the committed metadata: topics, queues, topics in the object store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import msgspec

from rayq import messages
from rayq.actors.broker.object_store_access import ObjectStoreAccess
from rayq.actors.broker.placed_replicas import described_queue
from rayq.actors.metadata.metadata_keeper import MetadataKeeper
from rayq.core.access.rights import View, shows, topic_of_queue_denied, view_of
from rayq.core.cluster.records import (
    BrokerFenced,
    BrokerRegistered,
    BrokerRemoved,
    BrokerUnfenced,
    MetadataRecord,
)
from rayq.core.cluster.state import Topic
from rayq.core.cluster.topic_changes import offline_reason
from rayq.messages.acls import CLUSTER, ResourceType
from rayq.wire.answer_room import ANSWER_BYTES_MAX
from rayq.wire.codec import ENCODER
from rayq.wire.peer import Peer

_OF_BROKERS = (BrokerRegistered, BrokerFenced, BrokerUnfenced, BrokerRemoved)
"""Records that change the reasons why partitions of any topic have no leader. All others change the
description of the topic that they name, or of none."""


class MetadataAnswers:
    """Answers clients from this broker's copy of the metadata. What a peer may not describe is
    left out of its answers.

    `is_registered()` says whether that copy shows this broker's process with a session.
    """

    def __init__(
        self, metadata: MetadataKeeper, cluster_id: str, *, is_registered: Callable[[], bool]
    ) -> None:
        self._metadata = metadata
        self._cluster_id = cluster_id
        self._is_registered = is_registered
        self._encoded: dict[str, msgspec.Raw] = {}
        """Encoded descriptions of topics for clients, by topic id."""

    def forget(self, records: Sequence[MetadataRecord] | None) -> None:
        """Drops the encoded descriptions that these records change; None: all of them."""
        for record in records or ():
            topic_id = getattr(record, "topic_id", None)
            if topic_id is not None:
                self._encoded.pop(topic_id, None)
        if records is None or any(isinstance(record, _OF_BROKERS) for record in records):
            self._encoded.clear()

    def view(self, peer: Peer) -> View | None:
        """Returns the resources that the peer sees. None: all of them."""
        state = self._metadata.state
        return view_of(state.acls, peer.principal, peer.host, state)

    async def metadata(
        self, peer: Peer, request: messages.Metadata
    ) -> messages.MetadataResponse:
        asked = None if request.topics is None else set(request.topics)
        await self._metadata.wait_for_version(request.version_min, request.wait_ms)
        # One page per client at a time; yield so that others get a turn before its next page.
        async with peer.room.take(ANSWER_BYTES_MAX):
            answer = self._page(asked, request, self.view(peer))
            await asyncio.sleep(0)
            return answer

    def _page(
        self, asked: set[str] | None, request: messages.Metadata, view: View | None
    ) -> messages.MetadataResponse:
        metadata, state = self._metadata, self._metadata.state
        if asked is not None:
            found_topics = (state.topics.get(topic_id) for topic_id in request.topic_ids)
            asked |= {topic.name for topic in found_topics if topic is not None}
        names = state.topic_ids.keys() if asked is None else asked & state.topic_ids.keys()
        topics: list[messages.TopicMetadata] = []
        partitions = 0
        last = next_after = None
        for name in sorted(name for name in names if name > request.after):
            if view is not None and not view.knows_of("topic", name):
                continue
            if partitions >= messages.METADATA_PARTITIONS_MAX:
                next_after = last
                break
            topic = state.topics[state.topic_ids[name]]
            topics.append(self._described(topic))
            partitions += len(topic.partitions)
            last = name
        # Until its own registration is committed here, this broker's metadata may be outdated.
        controller = metadata.controller if self._is_registered() else None
        return messages.MetadataResponse(
            cluster_id=self._cluster_id,
            version=metadata.version,
            controller_epoch=metadata.controller_epoch,
            controller=None if controller is None else f"{controller[0]}:{controller[1]}",
            voters=[voter.broker for voter in state.voters],
            brokers=[
                messages.BrokerEndpoint(
                    broker=number,
                    host=broker.registration.host,
                    port=broker.registration.port,
                    node_id=broker.registration.node_id,
                    live=broker.live,
                    cordoned=broker.cordoned,
                )
                for number, broker in sorted(state.brokers.items())
            ],
            topics=topics,
            next_after=next_after,
            trouble=self._trouble(view),
            denied=_denied(view, "topic", request.topics, request.after),
        )

    def _trouble(self, view: View | None) -> str | None:
        """The reason that this broker has given up its session, which may name files: for who may
        describe the cluster."""
        trouble = self._metadata.trouble
        if trouble is None or shows(view, "cluster", CLUSTER):
            return trouble
        return "it cannot follow the metadata"

    async def queues(
        self, peer: Peer, request: messages.DescribeQueues
    ) -> messages.DescribeQueuesResponse:
        await self._metadata.wait_for_version(request.version_min, request.wait_ms)
        async with peer.room.take(ANSWER_BYTES_MAX):
            state, view = self._metadata.state, self.view(peer)
            names = set(state.queue_ids)
            if request.names is not None:
                names.intersection_update(request.names)
                by_id = (state.queues.get(queue_id) for queue_id in request.queue_ids)
                names.update(queue.name for queue in by_id if queue is not None)
            left = sorted(
                name
                for name in names
                if name > request.after and self._shows_queue(view, name)
            )
            page = left[: messages.QUEUES_PAGE]
            queues = [state.queues[state.queue_ids[name]] for name in page]
            return messages.DescribeQueuesResponse(
                self._metadata.version,
                [described_queue(queue, state.topics[queue.topic_id].name) for queue in queues],
                page[-1] if len(page) < len(left) else None,
                self._denied_queues(view, request),
            )

    def _denied_queues(
        self, view: View | None, request: messages.DescribeQueues
    ) -> dict[str, str]:
        denied = _denied(view, "queue", request.names, request.after)
        if view is None or request.after:
            return denied
        queue_ids = self._metadata.state.queue_ids
        for name in request.names or ():
            is_seen = name not in denied and name in queue_ids
            if is_seen and not self._shows_queue(view, name):
                denied[name] = topic_of_queue_denied(view, name).message
        return denied

    def _shows_queue(self, view: View | None, name: str) -> bool:
        """Returns whether a view has a queue and its topic, whose name is told with it."""
        if view is None:
            return True
        topic = self._metadata.state.topic_of_queue(name)
        return view.shows("queue", name) and topic is not None and view.shows("topic", topic)

    async def quotas(
        self, peer: Peer, request: messages.DescribeQuotas
    ) -> messages.DescribeQuotasResponse:
        await self._metadata.wait_for_version(request.version_min, request.wait_ms)
        async with peer.room.take(ANSWER_BYTES_MAX):
            view = self.view(peer)
            shown = [
                quota
                for quota in self._metadata.state.quotas
                # The default holds for each principal by itself.
                if quota.principal is None or shows(view, "principal", quota.principal)
            ]
            shown.sort(key=lambda quota: (quota.principal or "", quota.client_id or ""))
            return messages.DescribeQuotasResponse(shown, self._metadata.version)

    def object_store(
        self, peer: Peer, url: str | None, objects: ObjectStoreAccess | None
    ) -> messages.DescribeObjectStoreResponse:
        state, view = self._metadata.state, self.view(peer)
        names = (*state.topic_ids, *(garbage.name for garbage in state.garbage.values()))
        return messages.DescribeObjectStoreResponse(
            url=url,
            pins=[
                messages.PinSummary(
                    pin.pin_id, state.topics[pin.topic_id].name, dict(pin.starts), pin.ttl_ms
                )
                for pin in state.pins.values()
                if shows(view, "topic", state.topics[pin.topic_id].name)
            ],
            garbage=[
                messages.GarbageSummary(garbage.topic_id, garbage.name, garbage.deleted_ms)
                for garbage in state.garbage.values()
                if shows(view, "topic", garbage.name)
            ],
            object_server=None if objects is None else objects.endpoint,
            trouble=None if objects is None else objects.trouble or objects.halt,
            version=self._metadata.version,
            hides_topics=view is not None
            and not all(view.knows_of("topic", name) for name in names),
        )

    def _described(self, topic: Topic) -> messages.TopicMetadata:
        """A topic's description for clients, encoded once for all clients until metadata change."""
        encoded = self._encoded.get(topic.topic_id)
        if encoded is None:
            encoded = msgspec.Raw(ENCODER.encode(self._describe(topic)))
            self._encoded[topic.topic_id] = encoded
        return cast("messages.TopicMetadata", encoded)

    def _describe(self, topic: Topic) -> messages.TopicMetadata:
        partitions = []
        for number, partition in sorted(topic.partitions.items()):
            value = partition.value
            replicas = []
            for broker in value.replicas:
                process = partition.processes.get(broker)
                replicas.append(
                    messages.ReplicaEndpoint(
                        broker,
                        None if process is None else process.host,
                        None if process is None else process.port,
                    )
                )
            partitions.append(
                messages.PartitionMetadata(
                    partition=number,
                    leader=value.leader,
                    leader_epoch=value.leader_epoch,
                    partition_epoch=value.partition_epoch,
                    isr=[member.broker for member in value.isr],
                    replicas=replicas,
                    offline_reason=offline_reason(self._metadata.state, topic, number),
                    target=list(value.target),
                    origin=list(value.origin),
                    throttle_bytes_per_s=value.throttle_bytes_per_s,
                    remote=partition.remote,
                )
            )
        return messages.TopicMetadata(
            topic.name, topic.topic_id, topic.whole_config, partitions
        )


def _denied(
    view: View | None, resource_type: ResourceType, names: Iterable[str] | None, after: str
) -> dict[str, str]:
    """The names in a request that its sender may not describe, each with the error's message; only
    in the first of several answers."""
    if view is None or after:
        return {}
    return {
        name: view.refusal(resource_type, name).message
        for name in names or ()
        if not view.knows_of(resource_type, name)
    }
