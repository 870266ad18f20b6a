"""Dead letters of a pool: records that its handler keeps refusing go to their own topic."""

from __future__ import annotations

import logging

from rayq.client.cluster import Cluster
from rayq.client.producing.producer import AsyncProducer
from rayq.config import PoolConfig
from rayq.errors import RayqError
from rayq.pools.handler import described, error_message
from rayq.records import Outgoing, Record

logger = logging.getLogger(__name__)

TIMEOUT_MS = 10_000
"""Timeout of one try to write a dead letter, or a part of `max_poll_interval_ms` if that is less:
between tries the consumer polls in its group, and checks whether it is to be drained."""

CLASS_HEADER = "rayq.error.class"
MESSAGE_HEADER = "rayq.error.message"
SOURCE_HEADER = "rayq.source"
"""Header with `topic/partition/offset` of the original record."""


def source_of(record: Record) -> str:
    return f"{record.topic}/{record.partition}/{record.offset}"


def dead_letter(topic: str, record: Record, error: BaseException) -> Outgoing:
    return Outgoing(
        topic,
        record.value,
        key=record.key,
        headers=[
            *record.headers,
            (CLASS_HEADER, type(error).__qualname__.encode()),
            (MESSAGE_HEADER, error_message(error).encode()),
            (SOURCE_HEADER, source_of(record).encode()),
        ],
        timestamp_ms=record.timestamp_ms,
    )


def not_written(topic: str, record: Record, refused: BaseException) -> str:
    return f"{source_of(record)} could not be written to topic {topic!r}: {refused}"


class DeadLetters:
    """A writer of the dead letters of one consumer, which counts them."""

    def __init__(self, cluster: Cluster, config: PoolConfig) -> None:
        self._cluster = cluster
        self._config = config
        self._producer: AsyncProducer | None = None
        self.written = 0

    async def write(self, record: Record, error: BaseException) -> str | None:
        """Writes a dead letter. Returns the reason if it could not be written, or not for certain;
        None if it was."""
        topic = self._config.dead_letter_topic
        assert topic is not None
        if self._producer is None:
            timeout_ms = min(TIMEOUT_MS, self._config.max_poll_interval_ms // 6 + 1)
            self._producer = self._cluster.async_producer(
                max_block_ms=timeout_ms, delivery_timeout_ms=timeout_ms, large_values="chunks"
            )
        letter = dead_letter(topic, record, error)
        try:
            delivery = await self._producer.send(
                topic,
                letter.value,
                key=letter.key,
                headers=letter.headers,
                timestamp_ms=letter.timestamp_ms,
            )
            await delivery
        except RayqError as refused:
            return not_written(topic, record, refused)
        self.note(record, error)
        return None

    def note(self, record: Record, error: BaseException) -> None:
        """Logs and counts a dead letter that is written."""
        topic = self._config.dead_letter_topic
        logger.warning("%s went to topic %r: %s", source_of(record), topic, described(error))
        self.written += 1

    def close(self) -> None:
        if self._producer is not None:
            self._producer.abandon()  # Each dead letter was waited for.
