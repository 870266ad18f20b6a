"""Frames: how messages lie on a connection, and the parser that finds them in what arrives.

A frame, all integers little endian:

    length          u32   bytes that follow this field
    version         u8    the agreed protocol version (1 in the handshake)
    flags           u8    1: an error answer, 2: a one-way request; other bits are refused
    api             u16   the request's number (`messages.REQUESTS`); 0 in the handshake
    correlation     u32   chosen by the client, repeated in the answer; 0 in one-way requests
    header length   u32
    header          msgpack of the message; of `[code, message]` in an error answer
    payload         raw bytes up to the end of the frame
"""

from __future__ import annotations

import mmap
import struct
from typing import NamedTuple

from rayq.environment import Buffer
from rayq.errors import ProtocolError

PREFIX = struct.Struct("<IBBHII")
PREFIX_BYTES = PREFIX.size
LENGTH_FIELD_BYTES = 4

FLAG_ERROR = 1
FLAG_ONE_WAY = 2
FLAGS_KNOWN = FLAG_ERROR | FLAG_ONE_WAY

HANDSHAKE_API = 0

HEADER_BYTES_MAX = 16 * 1024**2
"""The longest header: metadata of some hundred thousand partitions."""

RECEIVE_BUFFER_BYTES = 64 * 1024
"""Small frames are parsed in place in a buffer of this size, one for each connection."""

SMALL_FRAME_BYTES_MAX = 16 * 1024
"""A longer frame that has not arrived whole gets memory of its own, into which its rest is
received. A shorter frame waits in the receive buffer, so at most this much is ever moved."""

MAPPED_FRAME_BYTES_MIN = 2 * 1024**2
"""The memory of a frame of this size or more is mapped, so that the kernel gives it only as the
bytes arrive. Otherwise a peer that only claims to send 60 MiB would cost 16 ms for clearing them.
"""

assert SMALL_FRAME_BYTES_MAX < RECEIVE_BUFFER_BYTES

NO_PAYLOAD = memoryview(bytearray())


class Frame(NamedTuple):
    """One frame. `header` is valid until the parser's next `get_buffer`. `payload` is writable and
    belongs to the caller of `next_frame`."""

    flags: int
    api: int
    correlation: int
    header: memoryview
    payload: memoryview


def _memory(size: int) -> memoryview:
    return memoryview(bytearray(size) if size < MAPPED_FRAME_BYTES_MIN else mmap.mmap(-1, size))


def encode_head(
    version: int, flags: int, api: int, correlation: int, header: bytes, payload_bytes: int
) -> bytes:
    """The bytes of a frame up to its payload."""
    length = PREFIX_BYTES - LENGTH_FIELD_BYTES + len(header) + payload_bytes
    return PREFIX.pack(length, version, flags, api, correlation, len(header)) + header


def size_of(buffer: Buffer) -> int:
    """The length in bytes, also of a memoryview whose items are larger than a byte."""
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


class FrameParser:
    """Finds frames in a stream of bytes that the transport writes straight into its buffers.

    The caller in turn calls `get_buffer`, writes some bytes into it, calls `buffer_updated(count)`,
    then `next_frame` until it returns None. It may stop before the None and continue later, as long
    as it asks for no further buffer meanwhile: so reading can be held back without losing a frame.

    The connection accepts frames of `version` up to `frame_bytes_max` now. Both change when it is
    authenticated. After a ProtocolError nothing shows where the next frame begins: close the
    connection.
    """

    def __init__(self, version: int, frame_bytes_max: int) -> None:
        self.version = version
        self.frame_bytes_max = frame_bytes_max
        self._buffer = bytearray(RECEIVE_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        # The bytes that have arrived and were not parsed: _buffer[_start:_end].
        self._start = 0
        self._end = 0
        # The header and payload of a large frame under way, and how much of them has arrived.
        self._large: memoryview | None = None
        self._large_received = 0
        self._large_prefix = (0, 0, 0, 0)

    @property
    def large_bytes(self) -> int:
        """The number of bytes that have arrived of a large frame under way. 0 when there is no such
        frame."""
        return 0 if self._large is None else self._large_received

    def get_buffer(self) -> memoryview:
        """The memory for the next bytes; never empty."""
        if self._large is not None:
            return self._large[self._large_received :]
        if self._start == self._end:
            self._start = self._end = 0
        elif RECEIVE_BUFFER_BYTES - self._end < SMALL_FRAME_BYTES_MAX:
            rest = self._end - self._start
            self._buffer[:rest] = self._buffer[self._start : self._end]
            self._start, self._end = 0, rest
        assert self._end < RECEIVE_BUFFER_BYTES, "bytes arrived while reading was paused"
        return self._view[self._end :]

    def buffer_updated(self, count: int) -> None:
        """`count` bytes were written to the start of the last `get_buffer`."""
        if self._large is not None:
            self._large_received += count
        else:
            self._end += count

    def next_frame(self) -> Frame | None:
        """The next whole frame, or None when it has not arrived yet. Raises ProtocolError."""
        if self._large is not None:
            return self._finish_large(self._large)
        start, available = self._start, self._end - self._start
        if available < PREFIX_BYTES:
            return None
        prefix = PREFIX.unpack_from(self._buffer, start)
        length, version, flags, api, correlation, header_bytes = prefix
        frame_bytes = length + LENGTH_FIELD_BYTES
        if (
            frame_bytes > self.frame_bytes_max
            or frame_bytes < PREFIX_BYTES + header_bytes
            or header_bytes > HEADER_BYTES_MAX
            or version != self.version
            or flags & ~FLAGS_KNOWN
        ):
            raise self._refusal(frame_bytes, version, flags, header_bytes)
        body = start + PREFIX_BYTES
        if available >= frame_bytes:
            payload_start, end = body + header_bytes, start + frame_bytes
            header = self._view[body:payload_start]
            payload = NO_PAYLOAD
            if payload_start < end:
                payload = memoryview(self._buffer[payload_start:end])
            self._start = end
            return Frame(flags, api, correlation, header, payload)
        if frame_bytes > SMALL_FRAME_BYTES_MAX:
            large = _memory(frame_bytes - PREFIX_BYTES)
            self._large_received = self._end - body
            large[: self._large_received] = self._view[body : self._end]
            self._large = large
            self._large_prefix = (flags, api, correlation, header_bytes)
            self._start = self._end = 0
        return None

    def _finish_large(self, large: memoryview) -> Frame | None:
        if self._large_received < len(large):
            return None
        self._large = None
        flags, api, correlation, header_bytes = self._large_prefix
        return Frame(flags, api, correlation, large[:header_bytes], large[header_bytes:])

    def _refusal(
        self, frame_bytes: int, version: int, flags: int, header_bytes: int
    ) -> ProtocolError:
        if frame_bytes > self.frame_bytes_max:
            why = f"it claims {frame_bytes} bytes, and {self.frame_bytes_max} are allowed"
        elif frame_bytes < PREFIX_BYTES + header_bytes:
            why = f"a header of {header_bytes} bytes does not fit into {frame_bytes}"
        elif header_bytes > HEADER_BYTES_MAX:
            why = f"its header claims {header_bytes} bytes, and {HEADER_BYTES_MAX} are allowed"
        elif version != self.version:
            why = f"it has version {version}, and {self.version} was agreed"
        else:
            why = f"it has unknown flags {flags:#x}"
        return ProtocolError(
            f"Refused a frame: {why}. The peer speaks another protocol, or is damaged."
        )
