"""Requests of a batch job to the leader of a partition, for the topic that the job began with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rayq.client.client import Client
from rayq.client.metadata import LeaderAndEpoch
from rayq.environment import Buffer
from rayq.errors import PartitionOfflineError, ProtocolError, TimeoutError, UnknownTopicError
from rayq.messages import (
    DescribeOpenTransactions,
    DescribeOpenTransactionsResponse,
    DescribeRemote,
    ListOffsets,
    RemoteRange,
    Request,
    ResponseT,
)
from rayq.records import TopicPartition

ATTEMPT_TIMEOUT_S = 10.0
"""Timeout of one request to a leader before it is repeated."""


class JobPartition(NamedTuple):
    """A partition of the topic with this id: a topic that was deleted and created again under the
    same name is another one. `timeout_s` is for each request, with its retries."""

    client: Client
    place: TopicPartition
    topic_id: str
    timeout_s: float

    def __str__(self) -> str:
        return f"{self.place.topic}-{self.place.partition}"

    async def load_topic(self) -> None:
        """Loads the topic. Raises UnknownTopicError if it is another one by now."""
        topic = self.place.topic
        found = await self.client.topic(topic, timeout_s=self.timeout_s)
        if found.topic_id != self.topic_id:  # the cache may be out of date
            found = await self.client.topic(topic, timeout_s=self.timeout_s, age_max_s=0.0)
        self._check_topic_id(found.topic_id)

    async def exchange(
        self, build: Callable[[int], Request[ResponseT]], payload: Buffer = b""
    ) -> tuple[ResponseT, memoryview]:
        """Sends a request to the leader, with retries, until `timeout_s` has passed.
        `build(leader_epoch)` makes the request. Raises UnknownTopicError (the topic is another one
        by now), PartitionOfflineError (the partition had no leader in the end), TimeoutError, and
        the error that the leader answers."""

        def build_checked(topic_id: str, leader: LeaderAndEpoch) -> Request[ResponseT]:
            self._check_topic_id(topic_id)
            return build(leader.epoch)

        try:
            return await self.client.exchange_with_leader(
                *self.place,
                build_checked,
                payload,
                timeout_s=self.timeout_s,
                attempt_timeout_s=ATTEMPT_TIMEOUT_S,
            )
        except TimeoutError as error:
            if isinstance(error.__cause__, PartitionOfflineError):  # it is not just slow
                raise PartitionOfflineError(error.message) from error
            raise

    async def offset(self, timestamp_ms: int) -> int | None:
        """The first offset at or after a time; or EARLIEST, LATEST. None: no record is that late.
        Raises as `exchange` does."""
        answer, _ = await self.exchange(
            lambda leader_epoch: ListOffsets(
                topic_id=self.topic_id,
                partition=self.place.partition,
                leader_epoch=leader_epoch,
                timestamp_ms=timestamp_ms,
            )
        )
        return answer.offset

    async def open_transactions(
        self, since_offset: int | None = None
    ) -> DescribeOpenTransactionsResponse:
        """The end of the log, its undecided transactions, and those decided from an offset on.
        Raises as `exchange` does."""
        answer, _ = await self.exchange(
            lambda leader_epoch: DescribeOpenTransactions(
                topic_id=self.topic_id,
                partition=self.place.partition,
                leader_epoch=leader_epoch,
                since_offset=since_offset,
            )
        )
        return answer

    async def objects(
        self, start: int, end: int, *, objects_max: int, expires_ms: int = 0
    ) -> list[RemoteRange]:
        """The objects that hold the records from `start` up to `end`, with URLs if `expires_ms` is
        not 0. [] if `start` is in none. Raises as `exchange` does, and ProtocolError."""
        answer, _ = await self.exchange(
            lambda leader_epoch: DescribeRemote(
                topic_id=self.topic_id,
                partition=self.place.partition,
                leader_epoch=leader_epoch,
                start=start,
                end=end,
                ranges_max=objects_max,
                expires_ms=expires_ms,
            )
        )
        next_offset = start
        for number, found in enumerate(answer.ranges):
            begins = (
                found.start_offset <= start if number == 0 else found.start_offset == next_offset
            )
            if (
                not begins
                or found.end_offset <= next_offset
                or found.data_bytes > found.object_bytes
            ):
                raise ProtocolError(
                    f"The leader of {self.place} was asked for the objects from offset {start} on, "
                    f"and said that {found.name} has {found.start_offset} to {found.end_offset} "
                    f"after {next_offset}."
                )
            next_offset = found.end_offset
        return answer.ranges

    def _check_topic_id(self, known_id: str) -> None:
        if known_id != self.topic_id:
            raise UnknownTopicError(
                f"Topic {self.place.topic!r} was deleted and created again: it is not the one that "
                "was to be used. Start the job again."
            )
