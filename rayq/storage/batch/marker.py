"""The marker of a transaction: a control batch that says in one partition how it ended.

Its header has the family's first producer id, the epoch and no sequence; bit 7 of the attributes
means abort. It takes one offset and has no records. The body is a msgpack array::

    [1, partition of the coordinator, leader epoch of the coordinator]
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from rayq.environment import Buffer
from rayq.errors import CorruptBatchError, UnsupportedFormatError
from rayq.storage.batch.header import (
    ABORT,
    CONTROL,
    HEADER_BYTES,
    TRANSACTIONAL,
    BatchHeader,
    assemble,
    check_body,
)

_VERSION = 1


class Marker(NamedTuple):
    """The outcome of the transaction (`family`, `epoch`), and the coordinator that decided it."""

    family: int
    epoch: int
    is_commit: bool
    coordinator_partition: int
    coordinator_epoch: int


_Body = tuple[int, int, int]
_decoder = msgspec.msgpack.Decoder(_Body)


def encode_marker(marker: Marker) -> bytearray:
    """The batch of a marker, at offset 0. The leader stamps it."""
    body = msgspec.msgpack.encode(
        (_VERSION, marker.coordinator_partition, marker.coordinator_epoch)
    )
    header = BatchHeader(
        base_offset=0,
        length=HEADER_BYTES + len(body),
        leader_epoch=0,
        attributes=TRANSACTIONAL | CONTROL | (0 if marker.is_commit else ABORT),
        producer_id=marker.family,
        producer_epoch=marker.epoch,
    )
    return assemble(header, body)


def read_marker(data: Buffer, position: int, header: BatchHeader) -> Marker:
    """The marker at `position`, whose header `read_header` has read.

    Raises `CorruptBatchError`, or `UnsupportedFormatError` where a newer rayq wrote it.
    """
    check_body(data, position, header)
    try:
        version, partition, epoch = _decoder.decode(
            memoryview(data)[position + HEADER_BYTES : position + header.length]
        )
    except msgspec.DecodeError as error:
        raise CorruptBatchError(
            f"The control batch at offset {header.base_offset} is not a marker: {error}"
        ) from error
    if version != _VERSION:
        raise UnsupportedFormatError(
            f"The marker at offset {header.base_offset} has format {version}; this rayq reads "
            f"{_VERSION}: use a matching rayq."
        )
    if header.producer_id is None or not (header.is_control and header.is_transactional):
        raise CorruptBatchError(f"The batch at offset {header.base_offset} is not a marker.")
    return Marker(
        header.producer_id, header.producer_epoch, not header.is_abort, partition, epoch
    )
