"""Validation of a produced batch before a leader appends it."""

from __future__ import annotations

from rayq.config import TopicConfig
from rayq.core.large.values import read_manifest
from rayq.errors import (
    InvalidRecordError,
    InvalidRequestError,
    InvalidTimestampError,
    LargeValueError,
    LargeValueRefusedError,
    NullKeyError,
    RecordTooLargeError,
)
from rayq.storage.batch import (
    BatchHeader,
    check_body,
    check_produced,
    check_records,
    decode_columns,
    read_header,
)


def check_produced_batch(
    payload: memoryview,
    config: TopicConfig,
    *,
    topic: str,
    partition: int,
    now_ms: int,
    is_move: bool,
) -> BatchHeader:
    """Returns the header of a batch that may be appended. See `messages.Produce` for the errors.
    `is_move`: a queue's leader sends it."""
    if len(payload) > config.max_message_bytes:
        raise RecordTooLargeError(
            f"A batch of {len(payload)} bytes is above max_message_bytes = "
            f"{config.max_message_bytes} of topic {topic!r}: send smaller records, or raise it "
            "with alter_topic_config."
        )
    header = read_header(payload)
    if header.length != len(payload) or header.record_count == 0:
        raise InvalidRequestError("A produce request carries exactly one batch with records.")
    if header.is_chunk and config.is_compacted:
        raise InvalidRequestError(
            f"{topic}-{partition} is compacted, which would separate the chunks of a large value "
            "from each other. Nothing was written; send the value as an object (the producer's "
            "large_values is a URL)."
        )
    # Such records from before the topic was compacted stay forever.
    if header.has_null_keys and config.is_compacted:
        raise NullKeyError(
            f"{topic}-{partition} is compacted: it keeps the latest record of each key, and a "
            "record of this batch has none. Nothing was written; give every record a key."
        )
    if header.base_offset != 0 or header.last_offset_delta != header.record_count - 1:
        raise InvalidRequestError("The offsets of a new batch are its leader's to give.")
    check_body(payload, 0, header)
    check_produced(header)
    if header.is_dead_letter and not is_move:
        raise InvalidRecordError(
            f"A batch for {topic}-{partition} says that a queue's leader wrote it: only leaders "
            "may say so. Nothing was written."
        )
    latest_ms = now_ms + config.message_timestamp_after_max_ms
    if header.max_timestamp_ms > latest_ms or header.first_timestamp_ms < 0:
        raise InvalidTimestampError(
            f"A record's timestamp {header.max_timestamp_ms} ms is negative or more than "
            f"message_timestamp_after_max_ms = {config.message_timestamp_after_max_ms} in the "
            "future: check the producer's clock and unit (milliseconds)."
        )
    # Last, since it is the most expensive check: a batch that fails another one is not unpacked.
    check_records(payload, 0, header, plain_bytes_max=config.plain_bytes_max)
    return header


def check_manifest(
    payload: memoryview, header: BatchHeader, *, where: str, log_start: int, log_end: int
) -> None:
    """Checks the manifest of a large value in a checked batch that will be appended at `log_end`:
    its chunks must be in this log, as far as the ends of the log tell. Raises
    InvalidRecordError."""
    (value,) = decode_columns(payload, 0, header, check_crc=False).values
    try:
        manifest = read_manifest(value, offset=log_end)
    except (LargeValueError, LargeValueRefusedError) as error:
        raise InvalidRecordError(
            f"A batch for {where} stands for a large value that could not be read: {error} "
            "Nothing was written."
        ) from error
    if manifest.place is not None:
        raise InvalidRecordError(
            f"A batch for {where} stands for a large value whose chunks are in "
            f"{manifest.place.topic}-{manifest.place.partition}: a producer writes them to the "
            "partition of the record. Nothing was written; send the value again."
        )
    first = min(manifest.offsets, default=log_end)
    if first < log_start:
        raise InvalidRecordError(
            f"A batch for {where} stands for a large value, of which a chunk is at offset {first}: "
            f"the log begins at {log_start}, so it has expired. Nothing was written; send the "
            "value again."
        )
