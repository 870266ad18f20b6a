"""Which batches a leader appends: each of the limits on both sides, and what the errors are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rayq.actors.replica.produced_batch import check_manifest, check_produced_batch
from rayq.config import TopicConfig
from rayq.core.large.values import manifest_of_chunks, manifest_of_object, pinned
from rayq.errors import (
    CorruptBatchError,
    InvalidRecordError,
    InvalidRequestError,
    InvalidTimestampError,
    NullKeyError,
    RayqError,
    RecordTooLargeError,
)
from rayq.storage.batch import encode_batch, read_header
from tests.wrong_batches import CHUNK, CONTROL, GOOD, KEYED, NULL_KEYS, WRONG_BODIES, pack, sealed

NOW_MS = 1_000_000
AFTER_MS = 5_000
COMPACTED = {"cleanup_policy": "compact"}
CHUNKED = sealed({"attributes": NULL_KEYS | CHUNK}, GOOD)
KEYED_CHUNK = sealed({"attributes": CHUNK}, KEYED)


def check(payload: bytes | bytearray, is_move: bool = False, **config: Any) -> Any:
    return check_produced_batch(
        memoryview(payload),
        TopicConfig(message_timestamp_after_max_ms=AFTER_MS, **config),
        topic="t",
        partition=3,
        now_ms=NOW_MS,
        is_move=is_move,
    )


def test_only_leaders_say_that_a_queue_wrote_a_dead_letter() -> None:
    letter = encode_batch([b"v"], [b"k"], timestamps_ms=NOW_MS, is_dead_letter=True)
    with pytest.raises(InvalidRecordError, match="only leaders may say so. Nothing was written"):
        check(letter)
    assert check(letter, is_move=True).is_dead_letter


def keyed(*timestamps_ms: int) -> bytearray:
    count = len(timestamps_ms)
    return encode_batch([b"v"] * count, [b"k"] * count, timestamps_ms=timestamps_ms)


def cut(batch: bytearray) -> bytearray:
    return batch[:-1]


def longer(batch: bytearray) -> bytearray:
    return batch + b"\0"


def flipped(batch: bytearray) -> bytearray:
    batch[-1] ^= 1
    return batch


@pytest.mark.parametrize(
    "payload, config",
    [
        (keyed(0), {}),
        (keyed(NOW_MS + AFTER_MS, 1), {}),
        (encode_batch([b"v"], timestamps_ms=5), {}),
        (encode_batch([b"v"] * 3, [b"k", None, b"k"], timestamps_ms=5), {}),
        (keyed(5, 6), COMPACTED),
        (keyed(5, 6), {"cleanup_policy": "compact,delete"}),
        (keyed(5), {"max_message_bytes": len(keyed(5))}),
        (CHUNKED, {}),
    ],
)
def test_the_header_of_a_sound_batch_is_what_it_says(
    payload: bytes | bytearray, config: dict[str, Any]
) -> None:
    assert check(payload, **config) == read_header(payload)


@pytest.mark.parametrize(
    "payload, config, error, message",
    [
        (keyed(5), {"max_message_bytes": len(keyed(5)) - 1}, RecordTooLargeError,
         f"{len(keyed(5))} bytes is above max_message_bytes = {len(keyed(5)) - 1} of topic 't'"),
        (keyed(5) + keyed(5), {}, InvalidRequestError, "exactly one batch"),
        (sealed({"record_count": 0}, GOOD), {}, InvalidRequestError, "exactly one batch"),
        (CHUNKED, COMPACTED, InvalidRequestError, "t-3 is compacted, which would separate"),
        (KEYED_CHUNK, COMPACTED, InvalidRequestError, "t-3 is compacted, which would separate"),
        (encode_batch([b"v"] * 2, [b"k", None], timestamps_ms=5), COMPACTED, NullKeyError,
         "t-3 is compacted: it keeps"),
        (sealed({"base_offset": 1, "attributes": NULL_KEYS}, GOOD), {}, InvalidRequestError,
         "leader's to give"),
        (sealed({"last_offset_delta": 1, "attributes": NULL_KEYS}, pack([0], None, None, [b"v"],
                                                                         None)),
         {}, InvalidRequestError, "leader's to give"),
        (sealed({"attributes": NULL_KEYS | CONTROL}, GOOD), {}, InvalidRecordError, "control"),
        (keyed(NOW_MS + AFTER_MS + 1), {}, InvalidTimestampError, "1005001 ms is negative or more"),
        (keyed(1, NOW_MS + AFTER_MS + 1), {}, InvalidTimestampError, "= 5000 in the future"),
        (sealed({}, GOOD), {}, InvalidRecordError, "no key"),
        (sealed({}, WRONG_BODIES["other counts"]), {}, InvalidRecordError, "no reader could read"),
    ],
)  # fmt: skip
def test_what_is_refused_and_why(
    payload: bytes | bytearray, config: dict[str, Any], error: type[RayqError], message: str
) -> None:
    with pytest.raises(error, match=message):
        check(payload, **config)


@pytest.mark.parametrize(
    "change, error",
    [(cut, InvalidRequestError), (longer, InvalidRequestError), (flipped, CorruptBatchError)],
)
def test_a_batch_that_was_damaged_on_the_way_is_refused(
    change: Callable[[bytearray], bytearray], error: type[RayqError]
) -> None:
    with pytest.raises(error):
        check(change(keyed(5)))


@pytest.mark.parametrize("first_ms, greatest_ms", [(-1, 5), (6, 5)])
def test_times_that_cannot_be_are_damage(first_ms: int, greatest_ms: int) -> None:
    with pytest.raises(CorruptBatchError, match="impossible timestamps"):
        check(sealed({"first": first_ms, "max": greatest_ms}, KEYED))


def test_a_small_batch_may_not_grow_beyond_what_readers_unpack() -> None:
    config = {"max_message_bytes": 1 << 20}
    plain_bytes_max = TopicConfig(**config).plain_bytes_max
    sound = encode_batch([b"v" * (plain_bytes_max - 100)], [b"k"], timestamps_ms=5)
    assert check(sound, **config) == read_header(sound)
    with pytest.raises(RecordTooLargeError, match=f"the limit is {plain_bytes_max}"):
        check(encode_batch([b"v" * plain_bytes_max], [b"k"], timestamps_ms=5), **config)


ID = b"i" * 16
HERE = manifest_of_chunks(300, 7, ID, [10, 12])


def check_large(value: bytes | None) -> None:
    """In a log of the offsets 10 to 19."""
    batch = encode_batch([value], [b"k"], is_large=True)
    check_manifest(
        memoryview(batch), read_header(batch), where="t-3", log_start=10, log_end=20
    )


@pytest.mark.parametrize(
    "value",
    [
        HERE,
        manifest_of_chunks(300, 7, ID, [19, 10]),
        manifest_of_object(300, 7, ID, "s3://bucket/v.value"),
    ],
)
def test_a_manifest_names_an_object_or_offsets_of_the_log_that_it_is_appended_to(
    value: bytes,
) -> None:
    check_large(value)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "it is none"),
        (b"garbage", "it is none"),
        (b"\x97\x02" + HERE[2:], "version 2"),
        (manifest_of_chunks(1, 7, ID, [10, 12]), "cannot be"),
        (manifest_of_chunks(300, 7, ID, [10, 10]), "cannot be"),
        (manifest_of_chunks(300, 7, ID, [10, 20]), "cannot be"),
        (manifest_of_chunks(300, 7, ID, [9, 12]), "the log begins at 10"),
        (pinned(HERE, "t", "topic id", 3), "are in t-3"),
        (pinned(HERE, "other", "another id", 0), "are in other-0"),
    ],
)
def test_a_manifest_that_no_producer_writes_is_refused(value: bytes | None, told: str) -> None:
    with pytest.raises(InvalidRecordError, match=told):
        check_large(value)
