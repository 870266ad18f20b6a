"""What is kept of a queue, as bytes: the next leader reads what the one before wrote."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rayq.core.queues.block import Block
from rayq.core.queues.delays import Delay
from rayq.core.queues.moves import FailedRecord, Move
from rayq.core.queues.queue_states import KeptRecord
from rayq.core.queues.records import (
    HEAD,
    Head,
    block_record,
    decode,
    failed_record,
    head_record,
    move_record,
)
from rayq.errors import CorruptBatchError, UnsupportedFormatError

A_HEAD = head_record(7, 300, 900, [(3, 200), (5, 800)], [(2, 2)], [(1, 2, 0), (4, 0, 5)])
A_FAILED_RECORD = FailedRecord(301, 4, "rejected", "why", is_in_doubt=True)
A_MOVE = Move(9, "done", "T", 1, 50, 2, 70, None, 99, (A_FAILED_RECORD, FailedRecord(302, 1, "deliveries", "")))
STATES = (
    "ready",
    "blocked",
    "locked",
    "delayed",
    "claimed",
    "moving",
    "done",
    "counts",
    "excused",
    "holders",
    "due",
)


def a_block() -> Block:
    """Offsets in all states, in the first and the last bits of it."""
    block = Block()
    block.done = 1 << 255 | 0b1
    block.locked = 0b10 | 1 << 200
    block.lock(0b10, "a", (9, 1))
    block.lock(1 << 200, "b", (9, 1))
    block.counts = {1: 0b11, 2: 1 << 200 | 1 << 255, 5: 1 << 255}
    block.excused = {1: 1 << 200 | 0b1, 3: 0b1}
    block.delayed = 1 << 2 | 1 << 254
    block.due = {2: Delay(1000), 254: Delay(2000, 300, 4.5)}
    return block


def told(block: Block) -> dict[str, Any]:
    return {name: getattr(block, name) for name in STATES}


def test_the_next_leader_reads_what_the_one_before_wrote() -> None:
    records = [
        A_HEAD,
        block_record(1, a_block()),
        block_record(2**40, Block()),
        failed_record(301, A_FAILED_RECORD),
        failed_record(2**40, FailedRecord(2**40, 1, "deliveries", "")),
        move_record(9, A_MOVE),
    ]
    kept = decode(records)
    assert kept is not None
    assert kept.head == Head(
        1, 7, 300, 900, [(3, 200), (5, 800)], [(2, 2)], holds=[(1, 2, 0), (4, 0, 5)]
    )
    assert kept.failed == {301: A_FAILED_RECORD, 2**40: FailedRecord(2**40, 1, "deliveries", "")}
    assert kept.moves == {9: A_MOVE}
    assert kept.blocks.keys() == {1, 2**40}
    assert told(kept.blocks[2**40]) == told(Block())
    assert told(kept.blocks[1]) == {
        **told(a_block()),
        # Of what is done nobody asks how often it was given out; the clock is another one.
        "counts": {1: 0b10, 2: 1 << 200},
        "excused": {1: 1 << 200},
        "due": {2: Delay(1000), 254: Delay(2000, 300)},
    }


def test_records_that_ended_are_none() -> None:
    ended = [block_record(1, None), failed_record(301, None), move_record(9, None)]
    assert [value for _key, value in ended] == [None] * 3
    kept = decode([*ended, A_HEAD, *ended])
    assert kept is not None and (kept.blocks, kept.failed, kept.moves) == ({}, {}, {})
    assert decode([]) is None
    assert decode([(HEAD, None), *ended, block_record(1, a_block())]) is None


def test_each_record_has_a_key_of_its_own() -> None:
    """In the order of their numbers: a keeper reads them page by page."""
    number = 0x0102
    assert head_record(0, 0, 0, [], [], None)[0] == b"head"
    for kind, record in (
        (b"block", block_record(number, None)),
        (b"dying", failed_record(number, None)),
        (b"move", move_record(number, None)),
    ):
        assert record[0] == kind + bytes(6) + b"\x01\x02"


def test_a_head_without_holds_is_read_as_one_of_which_nobody_took_note() -> None:
    key, value = head_record(7, 300, 900, [(3, 200)], [], None)
    kept = decode([(key, value)])
    assert kept is not None and kept.head.holds is None
    older = msgspec.msgpack.encode(msgspec.msgpack.decode(value or b"")[:6])
    assert decode([(key, older)]) == kept
    kept = decode([head_record(7, 300, 900, [(3, 200)], [], [])])
    assert kept is not None and kept.head.holds == []


def changed(record: KeptRecord, at: int, value: object) -> list[KeptRecord]:
    """The record with another field."""
    key, packed = record
    fields = msgspec.msgpack.decode(packed or b"")
    fields[at] = value
    return [A_HEAD, (key, msgspec.msgpack.encode(fields))]


DONE, HOLDERS, COUNTS, EXCUSED, DUE = 1, 2, 3, 4, 5


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (DONE, bytes(33)),
        (HOLDERS, [("a", bytes(33))]),
        (COUNTS, [(1, bytes(33))]),
        (EXCUSED, [(1, bytes(33))]),
        (HOLDERS, [("a", b"\x01")]),  # It is done.
        (HOLDERS, [("a", b"\x02"), ("b", b"\x06")]),
        (DUE, [(256, 1, None)]),
        (DUE, [(-1, 1, None)]),
        (DUE, [(0, 1, None)]),  # It is done.
        (DUE, [(255, 1, None)]),
        (DUE, [(1, 1, None)]),  # It is locked.
        (DUE, [(200, 1, None)]),
    ],
)
def test_a_block_in_which_an_offset_has_two_states_or_none_is_damaged(
    at: int, value: object
) -> None:
    assert decode([A_HEAD, block_record(1, a_block())]) is not None
    with pytest.raises(CorruptBatchError, match="not a queue's"):
        decode(changed(block_record(1, a_block()), at, value))


def test_the_first_and_the_last_offset_of_a_block_can_be_in_any_state() -> None:
    for mask in (1, 1 << 255, (1 << 256) - 1):
        packed = mask.to_bytes(32, "little")
        for at, value in ((DONE, packed), (HOLDERS, [("a", packed)])):
            kept = decode(changed(block_record(1, Block()), at, value))
            assert kept is not None
            block = kept.blocks[1]
            assert (block.done, block.locked) == ((mask, 0) if at == DONE else (0, mask))
            assert block.holders == ({} if at == DONE else {"a": mask})
    for index in (0, 255):
        kept = decode(changed(block_record(1, Block()), DUE, [(index, 5, 6)]))
        assert kept is not None
        assert kept.blocks[1].due == {index: Delay(5, 6)}
        assert kept.blocks[1].delayed == 1 << index


def test_bytes_that_no_queue_wrote_are_refused() -> None:
    _key, failed = failed_record(1, A_FAILED_RECORD)
    _key, move = move_record(1, A_MOVE)
    for key in (b"", b"heads", b"other" + bytes(8), b"blocks" + bytes(8), b"mov" + bytes(8)):
        for value in (failed, move):
            with pytest.raises(CorruptBatchError, match="no known kind"):
                decode([A_HEAD, (key, value)])
    for record in (A_HEAD, block_record(1, Block()), (b"dying" + bytes(8), failed),
                   (b"move" + bytes(8), move)):
        for value in (b"", b"\xc1", b"\x90", b"\x91\x01", b"\x92\x01\xa1\xff"):
            with pytest.raises(CorruptBatchError, match=r"record of __queue_state with key"):
                decode([A_HEAD, (record[0], value)])
        with pytest.raises(UnsupportedFormatError, match="has version 2"):
            decode(changed(record, 0, 2))
