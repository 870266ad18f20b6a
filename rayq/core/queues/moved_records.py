"""The headers of a record that is moved out of a queue, and its target.

A dead letter has the record's own headers, then its origin, the reason, the number of deliveries,
and its consumer's error. A record that goes back loses these again.
"""

from __future__ import annotations

from collections.abc import Sequence

from rayq.core.queues.moves import FailedRecord
from rayq.records import Headers

SOURCE_HEADER = "rayq.source"
"""`topic/partition/offset`, as the dead letters of consumer pools have it."""
REASON_HEADER = "rayq.reason"
"""`deliveries` or `rejected`."""
COUNT_HEADER = "rayq.count"
"""Number of deliveries of the record, in decimal digits."""
ERROR_HEADER = "rayq.error"
"""Error of its consumer; missing if there was none."""
DOUBT_HEADER = "rayq.doubt"
"""`copy`: the same dead letter may have been here before; missing in all others."""
POOL_ERROR_HEADERS = ("rayq.error.class", "rayq.error.message")
"""Headers that the dead letters of consumer pools have instead."""
_ADDED = {
    SOURCE_HEADER,
    REASON_HEADER,
    COUNT_HEADER,
    ERROR_HEADER,
    DOUBT_HEADER,
    *POOL_ERROR_HEADERS,
}
PARTITION_DIGITS_MAX = 6


def dead_letter_headers(
    topic: str, partition: int, failed: FailedRecord, headers: Sequence[tuple[str, bytes]]
) -> Headers:
    """The headers of the dead letter of the record at this offset. If it was a dead letter before,
    the new ones replace the old ones."""
    added = [
        (SOURCE_HEADER, f"{topic}/{partition}/{failed.offset}".encode()),
        (REASON_HEADER, failed.reason.encode()),
        (COUNT_HEADER, b"%d" % failed.count),
    ]
    if failed.error:
        added.append((ERROR_HEADER, failed.error.encode(errors="replace")))
    if failed.is_in_doubt:
        added.append((DOUBT_HEADER, b"copy"))
    return own_headers(headers) + added


def own_headers(headers: Sequence[tuple[str, bytes]]) -> Headers:
    """The headers without those that made the record a dead letter."""
    return [(name, value) for name, value in headers if name not in _ADDED]


def header_of(headers: Sequence[tuple[str, bytes]], name: str) -> bytes | None:
    """The last header of this name."""
    return next((value for key, value in reversed(headers) if key == name), None)


def source_of(headers: Sequence[tuple[str, bytes]]) -> tuple[str, int] | None:
    """The topic and the partition that a dead letter came from. None where it does not say."""
    value = header_of(headers, SOURCE_HEADER)
    if value is None:
        return None
    topic, _, rest = value.decode(errors="replace").partition("/")
    partition, slash, _ = rest.partition("/")
    is_number = partition.isascii() and partition.isdigit()
    if not (topic and slash and is_number and len(partition) <= PARTITION_DIGITS_MAX):
        return None
    return topic, int(partition)


def target_partition(partition: int, partitions: int) -> int:
    """The partition of a topic with `partitions` to which records of `partition` elsewhere go: the
    same number if it exists, so that their order is kept."""
    return partition % partitions
