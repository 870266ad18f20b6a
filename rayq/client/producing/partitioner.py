"""Choice of the partition that a record goes to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from zlib import crc32

from rayq.client.callbacks import call_callback
from rayq.config import Partitioner
from rayq.errors import InvalidRequestError
from rayq.user_functions import close_unrun


def partition_of_key(key: bytes, partition_count: int) -> int:
    """crc32 of the key modulo the count, as in librdkafka's `consistent` partitioner, so that
    producers in other languages agree."""
    return crc32(key) % partition_count


def next_sticky_partition(
    candidates: Sequence[int], previous: int | None, source: random.Random
) -> int:
    """The partition for the next batch of records without a key: any but the previous one
    (KIP-480: one batch is filled after another, so batches are large and load still spreads)."""
    rest = [candidate for candidate in candidates if candidate != previous]
    return source.choice(rest or list(candidates))


def call_partitioner(partitioner: Partitioner, key: bytes | None, partition_count: int) -> int:
    """Calls a user's partitioner and checks its result. Raises InvalidRequestError, HandlerError,
    and the function's own errors."""
    partition = call_callback("The partitioner", partitioner, key, partition_count)
    if type(partition) is not int or not 0 <= partition < partition_count:
        close_unrun(partition)
        raise InvalidRequestError(
            f"The partitioner answered {partition!r} for {partition_count} partitions: it has to "
            f"return an int from 0 to {partition_count - 1}."
        )
    return partition
