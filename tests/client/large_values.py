"""What tests of large values share: logs of a fake cluster that have chunks and manifests."""

from __future__ import annotations

import random
from typing import Any

from rayq.client.consuming.consumer import Consumer
from rayq.config import KIB
from rayq.core.large.values import chunk_headers
from rayq.records import TopicPartition
from tests.client.fake_broker import FakeCluster

T0 = TopicPartition("t", 0)
LIMIT = 4 * KIB
"""The topic's `max_message_bytes`."""
ID = b"i" * 16
OTHER_ID = b"o" * 16


def bytes_of(size_bytes: int, seed: int = 0) -> bytes:
    """That many bytes, which do not compress."""
    return random.Random(seed).randbytes(size_bytes)


def read(consumer: Consumer) -> list[tuple[int, bytes | None]]:
    return [(record.offset, record.value) for record in consumer.until_end()]


def write_chunks(
    fake: FakeCluster, value: bytes, count: int, value_id: bytes = ID, **columns: Any
) -> list[int]:
    """Appends a value in so many chunks, without its record. Their offsets."""
    step = -(-len(value) // count)
    return [
        fake.write(
            "t",
            [value[index * step : (index + 1) * step]],
            headers=[chunk_headers(value_id, index)],
            is_chunk=True,
            **columns,
        )
        for index in range(count)
    ]


def write_manifest(fake: FakeCluster, manifest: bytes | None, **columns: Any) -> int:
    return fake.write("t", [manifest], is_large=True, **columns)  # type: ignore[list-item]
