"""What queues see in a piece of a log, and what they cut out of it."""

from __future__ import annotations

import pytest

from rayq.actors.queues.reads import Piece
from rayq.errors import CorruptBatchError
from rayq.messages.transaction_ids import make_family
from rayq.storage.batch import (
    Marker,
    decode_columns,
    due_header,
    encode_batch,
    encode_marker,
    keep_records,
    read_header,
    split_batches,
    stamp,
)
from tests.wrong_batches import moved, records, sealed

FAMILY = make_family(0, 1)


def at(offset: int, batch: bytearray) -> bytes:
    stamp(batch, 0, base_offset=offset, leader_epoch=1, append_time_ms=1)
    return bytes(batch)


def values(offset: int, count: int, *, padding: int = 0) -> bytearray:
    return encode_batch(
        [b"%d" % one + b"." * padding for one in range(offset, offset + count)],
        compression="none",
    )


def thinned(offset: int, count: int, kept: list[int]) -> bytes:
    """A batch as compaction leaves it."""
    whole = at(offset, values(offset, count))
    header = read_header(whole)
    return bytes(keep_records(header, decode_columns(whole, 0, header), kept))


def offsets_in(parts: list[memoryview | bytearray]) -> list[int]:
    payload = b"".join(bytes(part) for part in parts)
    found: list[int] = []
    for position, header in split_batches(payload):
        found += decode_columns(payload, position, header).offsets
    return found


def test_markers_aborted_records_and_what_compaction_removed_are_gaps() -> None:
    aborted = encode_batch(
        [b"a"], producer_id=FAMILY, producer_epoch=3, base_sequence=0, is_transactional=True
    )
    data = b"".join(
        [
            at(10, values(10, 5)),
            at(15, aborted),
            at(16, bytearray(encode_marker(Marker(FAMILY, 3, False, 0, 1)))),
            at(20, values(20, 2)),
            thinned(22, 5, [1, 2]),
        ]
    )
    piece = Piece(12, data, 30, frozenset({(FAMILY, 3)}))
    found = [(one.first, one.next_offset, one.is_gap) for one in piece.found(12, with_keys=False)]
    assert found == [
        (12, 15, False), (15, 20, True), (20, 22, False), (22, 23, True), (23, 25, False),
        (25, 30, True),
    ]


def test_the_records_of_delayed_batches_say_when_they_are_due() -> None:
    batch = encode_batch([b"a", b"b"], headers=[None, [due_header(77)]])
    (found,) = Piece(0, at(0, batch), 2, frozenset()).found(0, with_keys=False)
    assert found.due_ms is not None and list(found.due_ms) == [None, 77]


def test_a_record_is_read_whole_wherever_it_lies_and_nothing_in_its_place() -> None:
    headers = [("h", b"1")]
    aborted = encode_batch(
        [b"a"], producer_id=FAMILY, producer_epoch=3, base_sequence=0, is_transactional=True
    )
    batch = encode_batch([b"b", None], keys=[None, b"k"], headers=[headers, None])
    data = at(10, batch) + at(12, aborted) + thinned(20, 5, [1, 2])
    piece = Piece(10, data, 30, frozenset({(FAMILY, 3)}))
    assert piece.record(10) == (None, b"b", headers, False)
    assert piece.record(11) == (b"k", None, [], False)
    assert piece.record(21) == (None, b"21", [], False)
    assert [piece.record(offset) for offset in (9, 12, 15, 20, 24, 25)] == [None] * 6


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([(0, 0, 1)], [0]),
        ([(3, 3, 1), (7, 8, 2), (99, 99, 1)], [3, 7, 8, 99]),
        # The small batches come whole.
        ([(98, 101, 1)], [98, 99, 100, 101, 102, 103]),
        ([(0, 1, 1), (104, 104, 1), (106, 106, 1)], [0, 1, 104, 105, 106, 107]),
        # Compaction removed these since they were learned.
        ([(108, 112, 1), (113, 113, 1)], [113, 114]),
        ([(108, 109, 1)], []),
        ([(114, 114, 1), (117, 118, 1)], [113, 114]),
    ],
)
def test_batches_of_which_little_was_given_out_are_cut(
    runs: list[tuple[int, int, int]], expected: list[int]
) -> None:
    data = b"".join(
        [
            at(0, values(0, 100, padding=100)),
            at(100, values(100, 4)),
            at(104, values(104, 2)),
            at(106, values(106, 2)),
            at(113, values(113, 2)),
        ]
    )
    found = offsets_in(Piece(0, data, 120, frozenset()).cut(runs))
    assert found == expected


def test_a_take_ends_where_its_bytes_are_spent() -> None:
    batches = [at(number, values(number, 1, padding=50)) for number in range(10)]
    piece = Piece(0, b"".join(batches), 10, frozenset())
    one = len(batches[0])
    assert piece.end_of(2, 3 * one, at_least_one=True) == 5
    assert piece.end_of(2, one - 1, at_least_one=True) == 3
    assert piece.end_of(2, one - 1, at_least_one=False) == 2
    assert piece.end_of(8, 100 * one, at_least_one=False) == 10
    assert piece.bytes_between(2, 5) == 3 * one
    assert piece.bytes_between(0, 0) == 0


def test_what_belongs_to_large_values_is_told_once() -> None:
    data = b"".join(
        [
            at(10, encode_batch([b"1"], is_chunk=True)),
            at(11, values(11, 1)),
            at(12, encode_batch([b"2"], is_chunk=True)),
            at(13, encode_batch([b"a manifest"], is_large=True)),
        ]
    )
    piece = Piece(10, data, 14, frozenset())
    assert list(piece.large(10, 12)) == [(10, 1, None)]
    assert list(piece.large(12, 14)) == [(12, 1, None), (13, 1, b"a manifest")]


def test_a_batch_that_nobody_can_decode_is_given_out_and_one_that_is_damaged_here_is_not() -> None:
    garbage = moved(sealed(records(3), b"\xc1garbage"), 2)
    data = at(0, values(0, 2)) + garbage + at(5, values(5, 1))
    piece = Piece(0, data, 6, frozenset())
    found = list(piece.found(0, with_keys=True))
    assert [(one.first, one.next_offset, one.is_gap) for one in found] == [(0, 6, False)]
    assert piece.record(3) == (None, None, [], False)
    assert list(piece.large(0, 6)) == []
    assert b"".join(piece.cut([(3, 3, 1)])) == garbage
    damaged = Piece(0, data.replace(b"garbage", b"GARBAGE"), 6, frozenset())
    with pytest.raises(CorruptBatchError):
        list(damaged.found(0, with_keys=True))
    with pytest.raises(CorruptBatchError):
        damaged.record(3)
