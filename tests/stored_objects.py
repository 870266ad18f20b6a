"""Data objects for tests, made of batches as a leader writes them."""

from __future__ import annotations

from collections.abc import Sequence

from rayq.environment import Environment
from rayq.messages.remote_names import ObjectKind, new_name, partition_prefix
from rayq.storage.batch import encode_batch, stamp
from rayq.storage.remote.data_object import DataObject, describe_batches
from rayq.storage.remote.manifest import RemoteObject

PREFIX = partition_prefix("0" * 32, "1" * 32, 0)


def log_of(
    start: int, batches: Sequence[int], *, value_bytes: int = 100, first_ms: int = 1000
) -> bytes:
    """Batches of so many records each, from offset `start` on. The value of each record begins with
    its offset, and its timestamp is `first_ms` + its offset."""
    data = bytearray()
    offset = start
    for count in batches:
        offsets = range(offset, offset + count)
        batch = encode_batch(
            [b"%d " % one + b"x" * value_bytes for one in offsets],
            None,
            None,
            [first_ms + one for one in offsets],
            compression="none",
        )
        stamp(batch, 0, base_offset=offset, leader_epoch=3, append_time_ms=first_ms + offset)
        data += batch
        offset += count
    return bytes(data)


def object_of(
    environment: Environment,
    start: int,
    batches: Sequence[int],
    *,
    value_bytes: int = 100,
    aborted: Sequence[tuple[int, int]] = (),
) -> tuple[RemoteObject, bytes]:
    """An object as a manifest lists it, and all its bytes."""
    data = log_of(start, batches, value_bytes=value_bytes)
    end = start + sum(batches)
    made: DataObject = describe_batches(
        data, topic_id="1" * 32, partition=0, start=start, end=end, aborted=aborted
    )
    footer = made.footer
    row = RemoteObject(
        start=start,
        end=end,
        name=new_name(environment.random, PREFIX, ObjectKind.DATA, start, 3),
        object_bytes=made.object_bytes,
        data_bytes=len(data),
        crc32c=made.crc32c,
        first_append_ms=footer.first_append_ms,
        last_append_ms=footer.last_append_ms,
        newest_timestamp_ms=footer.newest_timestamp_ms,
        end_epoch=footer.end_epoch,
    )
    return row, data + made.tail
