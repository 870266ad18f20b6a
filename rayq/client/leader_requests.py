"""Requests to the leader of a partition: how long it may be silent, after which errors it is asked
again, and the requests that several parts of a client make. A function builds one for each attempt,
as `Client.ask_leader` takes it."""

from __future__ import annotations

from collections.abc import Callable

from rayq.client.metadata import LeaderAndEpoch
from rayq.errors import ProtocolError, RayqError, UnknownTopicError
from rayq.messages import CheckRange, Fetch, ListOffsets, ListOffsetsResponse

LEADER_PATIENCE_S = 1.0
"""Time without an answer after which a leader is suspect: it may hang."""


def epoch_of(leader: LeaderAndEpoch | None) -> int:
    """The epoch under which a leader failed; below every epoch if there was none."""
    return -1 if leader is None else leader.epoch


def may_retry(error: RayqError) -> bool:
    """Returns whether the client may ask the leader of a partition again after this error. A
    process that does not know a topic may only be behind: the metadata says whether the topic is
    gone."""
    return error.retriable or isinstance(error, UnknownTopicError)


def fetch_now(
    partition: int, offset: int, bytes_max: int, isolation: int
) -> Callable[[str, LeaderAndEpoch], Fetch]:
    """Reads the records that are there from `offset` on, without waiting."""
    return lambda topic_id, leader: Fetch(
        topic_id=topic_id,
        partition=partition,
        leader_epoch=leader.epoch,
        offset=offset,
        last_epoch=None,
        bytes_max=bytes_max,
        wait_ms=0,
        isolation=isolation,
    )


def list_offset(
    partition: int, timestamp_ms: int, isolation: int
) -> Callable[[str, LeaderAndEpoch], ListOffsets]:
    """Asks for the first offset at or after a time, or for EARLIEST or LATEST."""
    return lambda topic_id, leader: ListOffsets(
        topic_id=topic_id,
        partition=partition,
        leader_epoch=leader.epoch,
        timestamp_ms=timestamp_ms,
        isolation=isolation,
    )


def known_end(answer: ListOffsetsResponse, where: str) -> int:
    """The answer to where a log begins or ends (EARLIEST, LATEST), which every log does. Raises
    ProtocolError where the leader does not say."""
    if answer.offset is None:
        raise ProtocolError(
            f"The leader of {where} was asked where its log begins or ends, and does not say."
        )
    return answer.offset


def check_range(partition: int, offset: int) -> Callable[[str, LeaderAndEpoch], CheckRange]:
    """Makes the leader compare its disk with the CRC of a batch that arrived with a wrong one, and
    act on the result."""
    return lambda topic_id, leader: CheckRange(
        topic_id=topic_id, partition=partition, offset=offset
    )
