"""Reads around damage: all records that are left are answered, and lost ones are named."""

from __future__ import annotations

import pytest

from rayq.config import TopicConfig
from rayq.errors import CorruptBatchError
from rayq.storage.batch import check_body, read_header, split_batches
from tests.storage.support import Place, append, flush, value_of, values_in

BATCHES = 24


@pytest.mark.parametrize("bytes_max", [1, 400, 1 << 20])
def test_whatever_byte_is_damaged_the_rest_is_read_and_the_gap_is_named(
    place: Place, bytes_max: int
) -> None:
    place.config = TopicConfig(segment_bytes=1024, index_interval_bytes=200)
    log = place.open()
    for _ in range(BATCHES):
        append(log, 2)
    flush(log, checkpoint=True)
    path = place.files(".log")[1]
    sound = path.read_bytes()
    batches = list(split_batches(sound))
    first, last = batches[0][1].base_offset, batches[-1][1].next_offset
    # Two whole batches are damaged: one inside the segment, and its last.
    positions = [
        position
        for at, header in (batches[2], batches[-1])
        for position in range(at, at + header.length, 3)
    ]
    for position in positions:
        damaged = bytearray(sound)
        damaged[position] ^= 0x10
        with path.open("r+b") as file:
            file.write(damaged)
        found: set[bytes | None] = set()
        lost: set[int] = set()
        offset = first
        while offset < last:
            result = log.plan_salvage(offset, log.end_offset, bytes_max).run()
            assert len(result.data) <= bytes_max or len(list(split_batches(result.data))) == 1
            for at, header in split_batches(result.data):
                try:
                    check_body(result.data, at, header)
                except CorruptBatchError:
                    lost.update(range(max(header.base_offset, offset), header.next_offset))
                else:
                    found.update(values_in(result.data[at : at + header.length]))
            assert result.next_offset > offset
            offset = result.next_offset
        (hit,) = (one for at, one in batches if at <= position < at + one.length)
        wanted = {*range(first, last)} - {hit.base_offset, hit.base_offset + 1}
        assert found == {value_of(number) for number in wanted}, position
        assert lost >= {hit.base_offset, hit.base_offset + 1}, position
    with path.open("r+b") as file:
        file.write(sound)
    assert read_header(log.plan_salvage(first, last, 1).run().data).base_offset == first
