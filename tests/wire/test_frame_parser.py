"""Frames are found whatever chunks they come in; other bytes raise ProtocolError, nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayq.errors import ProtocolError
from rayq.wire.frames import (
    MAPPED_FRAME_BYTES_MIN,
    PREFIX,
    PREFIX_BYTES,
    RECEIVE_BUFFER_BYTES,
    SMALL_FRAME_BYTES_MAX,
    Frame,
    FrameParser,
    encode_head,
)

LIMIT = 1024 * 1024
Plain = tuple[int, int, int, bytes, bytes]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def feed(parser: FrameParser, data: bytes, chunk_sizes: list[int]) -> list[Plain]:
    """All frames in `data`, handed over in chunks of these sizes, again and again."""
    frames: list[Plain] = []
    position = turn = 0
    while position < len(data):
        buffer = parser.get_buffer()
        size = min(len(buffer), chunk_sizes[turn % len(chunk_sizes)], len(data) - position)
        buffer[:size] = data[position : position + size]
        parser.buffer_updated(size)
        while (frame := parser.next_frame()) is not None:
            frames.append(plain(frame))
        position += size
        turn += 1
    return frames


def plain(frame: Frame) -> Plain:
    flags, api, correlation, header, payload = frame
    return flags, api, correlation, bytes(header), bytes(payload)


def encoded(frame: Plain) -> bytes:
    flags, api, correlation, header, payload = frame
    return encode_head(1, flags, api, correlation, header, len(payload)) + payload


def blob(sizes: st.SearchStrategy[int]) -> st.SearchStrategy[bytes]:
    return st.builds(
        lambda size, seed: bytes((seed + i) % 251 for i in range(min(size, 64))) * (size // 64 + 1),
        sizes,
        st.integers(0, 250),
    )


sizes = st.one_of(
    st.integers(0, 300),
    st.sampled_from(
        [SMALL_FRAME_BYTES_MAX, RECEIVE_BUFFER_BYTES, 3 * RECEIVE_BUFFER_BYTES]
    ).flatmap(lambda size: st.integers(size - 80, size + 80)),
)
frames_strategy = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 2]),
        st.integers(0, 2**16 - 1),
        st.integers(0, 2**32 - 1),
        blob(st.integers(0, 200)),
        blob(sizes),
    ),
    max_size=8,
)
chunks_strategy = st.lists(
    st.one_of(st.integers(1, 40), st.integers(1, 100_000)), min_size=1, max_size=5
)


@given(frames_strategy, chunks_strategy)
def test_any_chunks_give_the_same_frames(frames: list[Plain], chunk_sizes: list[int]) -> None:
    data = b"".join(map(encoded, frames))
    if len(data) > 50_000 and max(chunk_sizes) < 50:
        chunk_sizes = [size * 97 for size in chunk_sizes]
    assert feed(FrameParser(1, LIMIT), data, chunk_sizes) == frames


@given(st.binary(max_size=4000), chunks_strategy)
def test_any_bytes_give_frames_or_a_protocol_error(data: bytes, chunk_sizes: list[int]) -> None:
    try:
        feed(FrameParser(1, LIMIT), data, chunk_sizes)
    except ProtocolError:
        pass


@given(frames_strategy, st.data())
def test_a_damaged_stream_gives_frames_or_a_protocol_error(
    frames: list[Plain], data: st.DataObject
) -> None:
    stream = bytearray(b"".join(map(encoded, frames)) or b"x")
    position = data.draw(st.integers(0, len(stream) - 1))
    stream[position] ^= data.draw(st.integers(1, 255))
    try:
        feed(FrameParser(1, LIMIT), bytes(stream), [4096])
    except ProtocolError:
        pass


@pytest.mark.parametrize("size", [500_000, 2 * MAPPED_FRAME_BYTES_MIN])
def test_a_large_payload_is_received_into_memory_of_its_own_without_copies(size: int) -> None:
    parser = FrameParser(1, 2 * size)
    payload = bytes(size)
    head = encode_head(1, 0, 7, 9, b"head", len(payload))
    buffer = parser.get_buffer()
    buffer[: len(head)] = head
    parser.buffer_updated(len(head))
    assert parser.next_frame() is None
    rest = parser.get_buffer()
    assert len(rest) == len(payload), "the whole rest can come in one read"
    parser.buffer_updated(len(rest))
    frame = parser.next_frame()
    assert frame is not None
    assert frame.payload.obj is rest.obj
    frame.payload[-1:] = b"x"


def test_what_a_frame_claims_takes_no_memory_before_it_arrives() -> None:
    claimed = 256 * 1024**2
    parser = FrameParser(1, 2 * claimed)
    before = resident_bytes()
    head = encode_head(1, 0, 7, 9, b"head", claimed)
    parser.get_buffer()[: len(head)] = head
    parser.buffer_updated(len(head))
    assert parser.next_frame() is None
    assert len(parser.get_buffer()) == claimed
    assert resident_bytes() - before < claimed / 4


def test_payloads_are_writable_and_stay_when_the_next_frames_come() -> None:
    parser = FrameParser(1, LIMIT)
    kept = []
    for number in range(200):
        data = encoded((0, 1, number, b"h", bytes([number]) * 1000))
        buffer = parser.get_buffer()
        buffer[: len(data)] = data
        parser.buffer_updated(len(data))
        frame = parser.next_frame()
        assert frame is not None
        frame.payload[0] = 255
        kept.append(frame.payload)
    for number, payload in enumerate(kept):
        assert payload == b"\xff" + bytes([number]) * 999


def test_taking_frames_can_stop_and_go_on() -> None:
    parser = FrameParser(1, LIMIT)
    frames = [(0, 1, number, b"h", b"payload") for number in range(10)]
    data = b"".join(map(encoded, frames))
    buffer = parser.get_buffer()
    buffer[: len(data)] = data
    parser.buffer_updated(len(data))
    taken = [parser.next_frame() for _ in range(11)]
    assert [plain(frame) for frame in taken if frame is not None] == frames
    assert taken[10] is None


@pytest.mark.parametrize(
    "prefix, why",
    [
        ((LIMIT + 1, 1, 0, 1, 1, 0), "are allowed"),
        ((2**32 - 1, 1, 0, 1, 1, 0), "are allowed"),
        ((0, 1, 0, 1, 1, 0), "does not fit"),
        ((11, 1, 0, 1, 1, 0), "does not fit"),
        ((20, 1, 0, 1, 1, 9), "does not fit"),
        ((20, 1, 0, 1, 1, 2**32 - 1), "does not fit"),
        ((20, 2, 0, 1, 1, 3), "version 2"),
        ((20, 1, 4, 1, 1, 3), "flags 0x4"),
    ],
)
def test_an_impossible_prefix_is_refused_before_any_memory_is_taken(
    prefix: tuple[int, ...], why: str
) -> None:
    parser = FrameParser(1, LIMIT)
    parser.get_buffer()[:PREFIX_BYTES] = PREFIX.pack(*prefix)
    parser.buffer_updated(PREFIX_BYTES)
    with pytest.raises(ProtocolError, match=why):
        parser.next_frame()
    with pytest.raises(ProtocolError):  # and it stays refused
        parser.next_frame()


def test_a_frame_of_exactly_the_limit_passes_and_one_byte_more_does_not() -> None:
    for payload_bytes, passes in ((1024 - PREFIX_BYTES, True), (1025 - PREFIX_BYTES, False)):
        parser = FrameParser(1, 1024)
        data = encoded((0, 1, 1, b"", bytes(payload_bytes)))
        if passes:
            assert len(feed(parser, data, [10_000])) == 1
        else:
            with pytest.raises(ProtocolError):
                feed(parser, data, [10_000])
