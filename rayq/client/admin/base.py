"""Base of the classes that `AsyncAdmin` consists of, one for each subject."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

from rayq.client.client import Client
from rayq.client.leader_requests import LEADER_PATIENCE_S
from rayq.client.timeouts import time_left_s
from rayq.messages import (
    CheckAclResponse,
    ConfirmMetadata,
    DescribeAclsResponse,
    DescribePrincipalsResponse,
    DescribeQueuesResponse,
    DescribeQuotasResponse,
    Request,
    ResponseT,
)

Fields = TypeVarTuple("Fields")
MetadataAnswerT = TypeVar(
    "MetadataAnswerT",
    bound=CheckAclResponse
    | DescribeAclsResponse
    | DescribePrincipalsResponse
    | DescribeQueuesResponse
    | DescribeQuotasResponse,
)

ADMIN_TIMEOUT_S = 30.0
"""Default of every call's `timeout_s`."""
ATTEMPT_TIMEOUT_S = 10.0
"""Timeout of one request to the leader of a partition."""
WAIT_MS = 1_000
"""Time that a broker may take until it has heard of what this client knows already."""


class AdminMethods:
    """Methods of `AsyncAdmin`."""

    def __init__(self, client: Client, *, awaits_callbacks: bool) -> None:
        self._client = client
        self._awaits_callbacks = awaits_callbacks


class Call:
    """One call of an admin, which may ask several times within `timeout_s`."""

    def __init__(self, client: Client, timeout_s: float) -> None:
        self.client = client
        self.deadline = client.now + timeout_s

    @property
    def left_s(self) -> float:
        """The seconds that are left. Raises TimeoutError once they are over."""
        return time_left_s(self.client.now, self.deadline)

    async def confirm_metadata(self) -> None:
        """Has further questions see all that was committed before this was called."""
        await self.client.change(ConfirmMetadata(), timeout_s=self.left_s)

    async def ask_metadata(self, request: Request[MetadataAnswerT]) -> MetadataAnswerT:
        """Returns what some broker's metadata say. What this client knows never goes back: a broker
        that has just started knows old metadata, and would deny what the client has already
        seen."""
        metadata = self.client.metadata
        answer: MetadataAnswerT = await self.client.ask_any(
            request,
            timeout_s=self.left_s,
            accept=lambda answer: answer.version >= metadata.oldest_acceptable,
        )
        metadata.require(answer.version)
        return answer

    async def ask_leader(
        self,
        topic: str,
        partition: int,
        request: Callable[[str, int, int, *Fields], Request[ResponseT]],
        *fields: *Fields,
        timeout_s: float | None = None,
        attempt_timeout_s: float = ATTEMPT_TIMEOUT_S,
        patience_s: float = LEADER_PATIENCE_S,
    ) -> ResponseT:
        """Asks the leader of a partition, at most for the time that is left, or `timeout_s`.
        `request` is the class of the request, and `fields` are those after the leader epoch."""
        return await self.client.ask_leader(
            topic,
            partition,
            lambda topic_id, leader: request(topic_id, partition, leader.epoch, *fields),
            timeout_s=self.left_s if timeout_s is None else timeout_s,
            attempt_timeout_s=attempt_timeout_s,
            patience_s=patience_s,
        )
