"""One partition of a queue, and the requests to its leader. Belongs to the loop; names, number and
config are read by other threads."""

from __future__ import annotations

from typing import Protocol, TypeVar

from rayq.client.client import Client
from rayq.client.leader_requests import LEADER_PATIENCE_S, epoch_of
from rayq.client.metadata import LeaderAndEpoch
from rayq.config import QueueConfig, parse_stored
from rayq.errors import LockLostError, RayqError, UnknownQueueError, UnknownTopicError
from rayq.messages import QueueMetadata, Request, Response
from rayq.wire.connection import Connection

REQUEST_TIMEOUT_S = 10.0
"""Timeout of a request, in addition to the time that it waits for."""
BACKOFF_FIRST_S = 0.02
BACKOFF_MAX_S = 1.0

ResponseT = TypeVar("ResponseT", bound=Response)


class ResolvedQueue:
    """A queue's name with the topic, ids and config that it stands for."""

    def __init__(self, found: QueueMetadata) -> None:
        self.name = found.name
        self.topic = found.topic
        self.topic_id = found.topic_id
        self.queue_id = found.queue_id
        self.config = parse_stored(QueueConfig, found.config)

    def update(self, found: QueueMetadata) -> bool:
        """Takes over a newer config. Returns False if it is another queue of this name."""
        if (found.queue_id, found.topic_id) != (self.queue_id, self.topic_id):
            return False
        self.config = parse_stored(QueueConfig, found.config)
        return True


class PartitionListener(Protocol):
    """Receiver of a partition's events."""

    def arrived(self, partition: QueuePartitionClient) -> None:
        """A take was answered, or failed."""
        ...

    def doubts(self, partition: QueuePartitionClient, error: RayqError) -> None:
        """The leader reports that there is no such queue, or topic."""
        ...

    def failed(self, partition: QueuePartitionClient, error: RayqError) -> None:
        """A take failed for a reason that no retry fixes."""
        ...

    def was_lost(self, error: LockLostError) -> None:
        """A user's acknowledgement came too late."""
        ...

    def wanted(self, partition: QueuePartitionClient, count: int) -> None:
        """`count` other consumers are idle, and the leader has no records for them."""
        ...


class QueuePartitionClient:
    """See the module."""

    def __init__(
        self, client: Client, queue: ResolvedQueue, number: int, listener: PartitionListener
    ) -> None:
        self.client = client
        self.queue = queue
        self.number = number
        self.listener = listener
        self._address = queue.topic, queue.topic_id, number
        self.is_closed = False
        self.named_over: Connection | None = None
        """The connection over which the leader last heard of this consumer."""

    @property
    def name(self) -> str:
        return f"{self.queue.topic}-{self.number}"

    def leader(self) -> LeaderAndEpoch:
        """The current leader. Raises RayqError while there is none."""
        leader = self.client.metadata.leader(*self._address)
        if leader is None:
            raise self.client.no_leader_error(*self._address)
        return leader

    async def ask(
        self, leader: LeaderAndEpoch, request: Request[ResponseT], *, wait_s: float = 0.0
    ) -> tuple[ResponseT, memoryview]:
        """Sends a request that the leader may hold for `wait_s`. Raises RayqError."""
        answer = await self.client.ask_while_leader(
            *self._address,
            leader,
            request,
            timeout_s=wait_s + REQUEST_TIMEOUT_S,
            patience_s=wait_s + LEADER_PATIENCE_S,
        )
        self.named_over = self.client.pool.current(leader.host, leader.port)
        return answer

    def request_failed(self, leader: LeaderAndEpoch | None, error: RayqError) -> None:
        """Notes a failed request: another broker may lead, or the queue may be gone."""
        if error.stale_metadata or leader is None:
            self.client.suspect(*self._address, epoch_of(leader))
        if is_gone(error):
            self.listener.doubts(self, error)

    async def wait_for_leader(self, failed: LeaderAndEpoch | None, wait_s: float) -> None:
        """Waits for `wait_s`, or until a leader other than `failed` appears."""
        await self.client.wait_for_leader(*self._address, failed, wait_s)


def is_gone(error: RayqError) -> bool:
    """Returns whether the leader reports that there is no such queue, or topic."""
    return isinstance(error, UnknownQueueError | UnknownTopicError)
