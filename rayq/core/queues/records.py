"""The kept records of a queue in one partition, as bytes: nothing else outlives its leader.

The coordinator stores these records in `__queue_state`, which is compacted: each is the whole value
of its key, None deletes the key. Keys: `head`, and `block`, `dying` or `move` with a number in 8
bytes. Values are msgpack arrays `[version, ...]`. Fields may be appended with a default; a change
that an older rayq must not misread raises the version, and a higher one than this rayq's is
refused.

A block whose offsets are all ready for the first time is not kept, nor is one whose offsets are all
done: the head has the start, and the runs of such blocks above it. So the head must be kept no
later than a block's record is deleted (rule 52).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from rayq.core.large.holds import Hold
from rayq.core.queues.block import BLOCK_OFFSETS, Block
from rayq.core.queues.delays import Delay
from rayq.core.queues.moves import FailedRecord, Move
from rayq.core.queues.queue_states import KeptRecord
from rayq.core.record_version import check_version
from rayq.errors import CorruptBatchError

VERSION = 1
HEAD = b"head"
_BLOCK = b"block"
_FAILED = b"dying"
_MOVE = b"move"
_NUMBER_BYTES = 8
_MASK_BYTES = BLOCK_OFFSETS // 8


class Head(msgspec.Struct, array_like=True, frozen=True):
    """`done_blocks` are runs of numbers of blocks. `holds`: see `LargeHolds.kept`; None if nobody
    noted them. See `QueueState` for the rest."""

    version: int
    state_epoch: int
    start_offset: int
    learned: int
    epochs: list[tuple[int, int]]
    done_blocks: list[tuple[int, int]]
    holds: list[Hold] | None = None


class _StoredBlock(msgspec.Struct, array_like=True, frozen=True):
    """Sets of offsets are bytes, little-endian, without zeros at the end. Learned offsets in none
    of them are ready (or failed, or in a move, by records of their own). `due`: `(index, due_ms,
    length_ms)`, see `Delay`."""

    version: int
    done: bytes
    holders: list[tuple[str, bytes]]
    counts: list[tuple[int, bytes]]
    excused: list[tuple[int, bytes]]
    due: list[tuple[int, int, int | None]]
    unbegun: bytes = b""
    """Locked offsets whose delivery does not count yet. An older rayq counts it."""


class _StoredFailedRecord(msgspec.Struct, array_like=True, frozen=True):
    version: int
    failed: FailedRecord


class _StoredMove(msgspec.Struct, array_like=True, frozen=True):
    version: int
    move: Move


class Kept(NamedTuple):
    """All kept records of a queue's partition."""

    head: Head
    blocks: dict[int, Block]
    failed: dict[int, FailedRecord]
    moves: dict[int, Move]


_encoder = msgspec.msgpack.Encoder()
_head_decoder = msgspec.msgpack.Decoder(Head)
_block_decoder = msgspec.msgpack.Decoder(_StoredBlock)
_failed_decoder = msgspec.msgpack.Decoder(_StoredFailedRecord)
_move_decoder = msgspec.msgpack.Decoder(_StoredMove)


def head_record(
    state_epoch: int,
    start_offset: int,
    learned: int,
    epochs: list[tuple[int, int]],
    done_blocks: list[tuple[int, int]],
    holds: list[Hold] | None,
) -> KeptRecord:
    head = Head(VERSION, state_epoch, start_offset, learned, epochs, done_blocks, holds)
    return HEAD, _encoder.encode(head)


def block_record(number: int, block: Block | None) -> KeptRecord:
    key = _BLOCK + number.to_bytes(_NUMBER_BYTES)
    if block is None:
        return key, None
    undone = ~block.done
    stored = _StoredBlock(
        VERSION,
        _bytes(block.done),
        [(holder, _bytes(bits)) for holder, bits in block.holders.items()],
        [(count, _bytes(bits & undone)) for count, bits in block.counts.items() if bits & undone],
        [(count, _bytes(bits & undone)) for count, bits in block.excused.items() if bits & undone],
        [(index, delay.due_ms, delay.length_ms) for index, delay in block.due.items()],
        _bytes(block.unbegun),
    )
    return key, _encoder.encode(stored)


def failed_record(offset: int, failed: FailedRecord | None) -> KeptRecord:
    key = _FAILED + offset.to_bytes(_NUMBER_BYTES)
    return key, None if failed is None else _encoder.encode(_StoredFailedRecord(VERSION, failed))


def move_record(move_id: int, move: Move | None) -> KeptRecord:
    key = _MOVE + move_id.to_bytes(_NUMBER_BYTES)
    return key, None if move is None else _encoder.encode(_StoredMove(VERSION, move))


def decode(records: Iterable[KeptRecord]) -> Kept | None:
    """Decodes kept records; None if there is no head. The blocks have their delayed, locked and
    done offsets. Raises CorruptBatchError for bytes that are not of these records,
    UnsupportedFormatError for those of a newer rayq."""
    head: Head | None = None
    blocks: dict[int, Block] = {}
    failed: dict[int, FailedRecord] = {}
    moves: dict[int, Move] = {}
    for key, value in records:
        if value is None:
            continue
        try:
            check_version(value, "__queue_state", VERSION)
            if key == HEAD:
                head = _head_decoder.decode(value)
                continue
            kind, number = key[:-_NUMBER_BYTES], int.from_bytes(key[-_NUMBER_BYTES:])
            if kind == _BLOCK:
                blocks[number] = _block(_block_decoder.decode(value))
            elif kind == _FAILED:
                failed[number] = _failed_decoder.decode(value).failed
            elif kind == _MOVE:
                moves[number] = _move_decoder.decode(value).move
            else:
                raise ValueError("its key is of no known kind")
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise CorruptBatchError(
                f"A record of __queue_state with key {key!r} is not a queue's: {error}"
            ) from error
    return None if head is None else Kept(head, blocks, failed, moves)


def _bytes(mask: int) -> bytes:
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def _mask(stored: bytes) -> int:
    if len(stored) > _MASK_BYTES:
        raise ValueError(f"{len(stored)} bytes for {BLOCK_OFFSETS} offsets")
    return int.from_bytes(stored, "little")


def _block(stored: _StoredBlock) -> Block:
    block = Block()
    block.done = _mask(stored.done)
    taken = block.done
    for holder, bits in stored.holders:
        block.holders[holder] = mask = _mask(bits)
        if mask & taken:
            raise ValueError("an offset is in two states")
        taken |= mask
        block.locked |= mask
    block.counts = {count: _mask(bits) for count, bits in stored.counts}
    block.excused = {count: _mask(bits) for count, bits in stored.excused}
    block.unbegun = _mask(stored.unbegun) & block.locked
    for index, due_ms, length_ms in stored.due:
        bit = 1 << index
        if not 0 <= index < BLOCK_OFFSETS or bit & taken:
            raise ValueError("an offset is in two states")
        block.due[index] = Delay(due_ms, length_ms)
        block.delayed |= bit
    return block
