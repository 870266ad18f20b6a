"""A log with every kind of record that a reader cannot read, each between two that it can."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from rayq.actors.replica import leader as leader_module
from rayq.core.large.values import (
    Manifest,
    Place,
    chunk_headers,
    crc_of,
    manifest_of_chunks,
    manifest_of_object,
)
from rayq.storage import log as log_module
from rayq.storage.batch import encode_batch, read_header
from rayq.testing import LocalCluster
from tests.local.support import produce_raw
from tests.wrong_batches import KEYED, LARGE, LZ4, WRONG_BODIES, pack, records, sealed

ID = b"i" * 16
VALUE = b"0123456789" * 30


class Log(NamedTuple):
    """`good` has the values that readers can read, in order; `bad` the offset after which each bad
    record ends, by its own offset, and `kinds` what is wrong with it."""

    topic: str
    good: list[bytes]
    bad: dict[int, int]
    kinds: dict[int, str]


@contextmanager
def unchecked_leaders(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leaders append whatever comes, as those of older versions did."""
    with monkeypatch.context() as patch:
        patch.setattr(leader_module, "check_manifest", lambda *_, **__: None)
        patch.setattr(
            leader_module, "check_produced_batch", lambda payload, *_, **__: read_header(payload)
        )
        patch.setattr(log_module, "check_produced", lambda header: None)
        yield


def manifests(topic: str, topic_id: str, chunks: list[int], store: Path) -> dict[str, bytes]:
    """Manifests of large values that this reader, or nobody, can put together."""
    size, crc = len(VALUE), crc_of(VALUE)
    here = Manifest(1, size, crc, ID, offset_steps=[0])

    def elsewhere(place: Place, *steps: int) -> bytes:
        return msgspec.msgpack.encode(
            msgspec.structs.replace(here, place=place, offset_steps=list(steps) or [0])
        )

    own = Place(topic, topic_id, 0)
    return {
        "a partition that is not there": elsewhere(Place(topic, topic_id, 99)),
        "a topic that never was": elsewhere(Place("nowhere", "no id", 0)),
        "a topic that was deleted": elsewhere(Place(topic, "another id", 0)),
        "a topic whose name cannot be": elsewhere(Place("no/topic", "no id", 0)),
        "a chunk behind the end": elsewhere(own, 2**40),
        "a chunk above all offsets": elsewhere(own, 2**63),
        "a chunk that is a record": manifest_of_chunks(size, crc, ID, [chunks[-1] + 1]),
        "a chunk that is a manifest": manifest_of_chunks(size, crc, ID, [chunks[-1] + 2]),
        "chunks in another order": manifest_of_chunks(size, crc, ID, [chunks[1], chunks[0]]),
        "another size": manifest_of_chunks(size + 1, crc, ID, chunks),
        "another checksum": manifest_of_chunks(size, crc ^ 1, ID, chunks),
        "larger than this reader takes": manifest_of_chunks(2**40, crc, ID, chunks),
        "an object of another store": manifest_of_object(size, crc, ID, "s3://elsewhere/v.value"),
        "an object that is not there": manifest_of_object(size, crc, ID, f"file://{store}/v.value"),
        "an object that is a directory": manifest_of_object(size, crc, ID, f"file://{store}/dir"),
        "an object that is a pipe": manifest_of_object(size, crc, ID, f"file://{store}/pipe"),
        "an object that is a device": manifest_of_object(size, crc, ID, f"file://{store}/zeros"),
        "no manifest": b"\xc1 no manifest",
        "a manifest of tomorrow": b"\x97\x02" + manifest_of_chunks(size, crc, ID, chunks)[2:],
    }


BATCHES = {
    "no batch of records": sealed(records(1), b"\xc1garbage"),
    "a key that is a number": sealed(records(1), WRONG_BODIES["a number for a key"]),
    "a header of three": sealed(records(1), WRONG_BODIES["a header of three"]),
    "a batch that does not decompress": sealed({"attributes": LZ4}, b"\x10\0\0\0garbage"),
    "a codec of tomorrow": sealed({"attributes": 2}, KEYED),
    "a manifest that is null": sealed({"attributes": LARGE}, pack(None, None, [b"k"], [None], None)),
    "a batch of tomorrow": sealed({"attributes": 1 << 12}, KEYED),
}


def fill(
    cluster: LocalCluster, topic: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> Log:
    """Fills partition 0 of a topic. `store` is a directory for large values in objects."""
    (store / "dir").mkdir(parents=True)
    os.mkfifo(store / "pipe")
    (store / "zeros").symlink_to("/dev/zero")
    good: list[bytes] = []
    log = Log(topic, good, {}, {})

    def append(batch: bytes | bytearray) -> int:
        return int(produce_raw(cluster, topic, batch).base_offset)

    def append_good() -> None:
        good.append(b"good-%d" % len(good))
        append(encode_batch([good[-1]], [b"key"]))

    with unchecked_leaders(monkeypatch):
        half = len(VALUE) // 2
        chunks = [
            append(encode_batch([piece], None, [chunk_headers(ID, index)], is_chunk=True))
            for index, piece in enumerate((VALUE[:half], VALUE[half:]))
        ]
        append_good()
        topic_id = cluster.admin.describe_topic(topic).topic_id
        bad: dict[str, bytes | bytearray] = {
            what: encode_batch([value], [b"key"], [[("h", b"1")]], is_large=True)
            for what, value in manifests(topic, topic_id, chunks, store).items()
        }
        for what, batch in {**bad, **BATCHES}.items():
            offset = append(batch)
            log.bad[offset] = offset + 1
            log.kinds[offset] = what
            append_good()
    return log
