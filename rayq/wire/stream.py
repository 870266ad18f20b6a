"""Frames over a transport: the common part of the client's and the server's side."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

from rayq.environment import Buffer
from rayq.errors import InvalidRequestError, ProtocolError
from rayq.wire.frames import (
    HEADER_BYTES_MAX,
    PREFIX_BYTES,
    Frame,
    FrameParser,
    encode_head,
    size_of,
)

COPY_BYTES_MAX = 16 * 1024
"""Buffers up to this size are joined with their neighbours: copying them costs less than further
system calls. Larger buffers go to the transport as they are."""

FLUSH_BYTES = 256 * 1024
"""This many bytes go to the transport at once, before the end of the loop's turn."""

WRITE_BUFFER_HIGH_BYTES = 1024**2
WRITE_BUFFER_LOW_BYTES = 256 * 1024
"""The transport asks to stop writing above the first, and to continue below the second."""


class FrameStream(asyncio.BufferedProtocol):
    """An asyncio protocol that speaks frames, on any transport that has `write`, `writelines`,
    `close`, `abort`, `is_closing`, `pause_reading`, `resume_reading`, `get_extra_info`,
    `set_write_buffer_limits` and `get_write_buffer_size`.

    Small frames that are written within one turn of the loop leave in one write. Subclasses get the
    frames in `frame_received`, and the end in `stream_ended`.
    """

    def __init__(self, version: int, frame_bytes_max: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._parser = FrameParser(version, frame_bytes_max)
        self._transport: asyncio.Transport | None = None
        self._ended = False
        self.is_reading_held = False
        self._is_transport_paused = False
        self._outgoing: list[Buffer] = []
        self._outgoing_bytes = 0
        self._flush_scheduled = False
        self._write_resumed: asyncio.Future[None] | None = None
        self.received_at = self._loop.time()
        """The time at which the last bytes came, on the loop's clock."""
        self.address = "an unconnected peer"

    # --- for subclasses -------------------------------------------------------------------------

    def frame_received(self, frame: Frame) -> None:
        """Gets each frame, in the order of arrival. A ProtocolError from here ends the stream."""
        raise NotImplementedError

    def stream_ended(self, cause: BaseException | None) -> None:
        """Called once, whichever side ended the stream: with the ProtocolError, with the error of
        the transport, or with None."""
        raise NotImplementedError

    def accept(self, version: int, frame_bytes_max: int) -> None:
        """Makes the stream take and write frames of this version, up to this size."""
        self._parser.version = version
        self._parser.frame_bytes_max = frame_bytes_max

    # --- writing --------------------------------------------------------------------------------

    def write_frame(
        self,
        flags: int,
        api: int,
        correlation: int,
        header: bytes,
        payload: Buffer | Sequence[Buffer] = b"",
    ) -> int:
        """Queues a frame, and returns its length in bytes. A large payload is not copied, so it
        must not change until it is sent. Raises InvalidRequestError for a frame that is too large,
        and queues nothing then."""
        single = isinstance(payload, (bytes, bytearray, memoryview))
        parts = cast("Sequence[Buffer]", (payload,) if single else payload)
        payload_bytes = sum(map(size_of, parts))
        frame_bytes = PREFIX_BYTES + len(header) + payload_bytes
        if frame_bytes > self._parser.frame_bytes_max or len(header) > HEADER_BYTES_MAX:
            raise InvalidRequestError(
                f"A message of {frame_bytes} bytes (header {len(header)}) is above the limit of "
                f"{self._parser.frame_bytes_max} (header {HEADER_BYTES_MAX}): send less at once, "
                "or raise max_frame_bytes on both sides."
            )
        outgoing = self._outgoing
        outgoing.append(
            encode_head(self._parser.version, flags, api, correlation, header, payload_bytes)
        )
        if payload_bytes:
            outgoing.extend(parts)
        self._outgoing_bytes += frame_bytes
        if self._outgoing_bytes >= FLUSH_BYTES:
            self.flush()
        elif not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._scheduled_flush)
        return frame_bytes

    def _scheduled_flush(self) -> None:
        self._flush_scheduled = False
        self.flush()

    def flush(self) -> None:
        """Hands everything queued to the transport."""
        outgoing = self._outgoing
        if not outgoing:
            return
        total_bytes = self._outgoing_bytes
        self._outgoing = []
        self._outgoing_bytes = 0
        transport = self._transport
        if transport is None or self._ended or transport.is_closing():
            return
        if total_bytes <= COPY_BYTES_MAX:
            transport.write(outgoing[0] if len(outgoing) == 1 else b"".join(outgoing))
        else:
            transport.writelines(_join_small(outgoing))
            if (
                self._write_resumed is None
                and transport.get_write_buffer_size() > WRITE_BUFFER_HIGH_BYTES
            ):
                # asyncio of Python 3.12.0 to 3.12.8 and 3.13.0 to 3.13.1 does not pause its
                # protocol here (CVE-2024-12254). It checks the buffer when the limits are set.
                self._limit_write_buffer(transport)

    @staticmethod
    def _limit_write_buffer(transport: asyncio.WriteTransport) -> None:
        transport.set_write_buffer_limits(
            high=WRITE_BUFFER_HIGH_BYTES, low=WRITE_BUFFER_LOW_BYTES
        )

    async def drain(self) -> None:
        """Waits while the peer takes bytes more slowly than they are written."""
        self.flush()
        while self._write_resumed is not None:
            await asyncio.shield(self._write_resumed)

    @property
    def unsent_bytes(self) -> int:
        """The bytes that were written and that the peer has not taken."""
        handed = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return self._outgoing_bytes + handed

    @property
    def is_write_paused(self) -> bool:
        return self._write_resumed is not None

    def pause_writing(self) -> None:
        if self._write_resumed is None:
            self._write_resumed = self._loop.create_future()

    def resume_writing(self) -> None:
        resumed, self._write_resumed = self._write_resumed, None
        if resumed is not None and not resumed.done():
            resumed.set_result(None)

    # --- reading --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._ended:  # The caller gave up while the stream was being connected.
            self._transport.abort()
            return
        self._limit_write_buffer(self._transport)
        self.address = _address(transport.get_extra_info("peername"))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._parser.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.received_at = self._loop.time()
        self._parser.buffer_updated(nbytes)
        self._take_frames()

    def _take_frames(self) -> None:
        try:
            while not self.is_reading_held and not self._ended:
                frame = self._parser.next_frame()
                if frame is None:
                    break
                self.frame_received(frame)
        except ProtocolError as error:
            self.end(error)
        self.flush()

    def hold_reading(self) -> None:
        """Stops taking frames, and bytes from the network."""
        self.is_reading_held = True
        transport = self._transport
        if transport is not None and not self._is_transport_paused and not transport.is_closing():
            self._is_transport_paused = True
            transport.pause_reading()

    def release_reading(self) -> None:
        """Continues with the frames that have arrived already, then with the network."""
        if not self.is_reading_held:
            return
        self.is_reading_held = False
        self._take_frames()
        transport = self._transport
        if self.is_reading_held or transport is None or not self._is_transport_paused:
            return
        self._is_transport_paused = False
        if not transport.is_closing():
            transport.resume_reading()

    # --- the end --------------------------------------------------------------------------------

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(exc)

    def end(self, cause: BaseException | None) -> None:
        """Ends the stream at once. Bytes that were not sent are dropped."""
        if self._transport is not None:
            self._transport.abort()
        self._finish(cause)

    def end_after_writing(self) -> None:
        """Ends the stream once the transport has sent all that was written."""
        self.flush()
        if self._transport is not None:
            self._transport.close()
        self._finish(None)

    def _finish(self, cause: BaseException | None) -> None:
        if self._ended:
            return
        self._ended = True
        self._outgoing = []
        self._outgoing_bytes = 0
        self.resume_writing()
        self.stream_ended(cause)


def _join_small(parts: list[Buffer]) -> list[Buffer]:
    """Neighbouring small buffers joined, large ones as they are."""
    joined: list[Buffer] = []
    small: list[Buffer] = []
    for part in parts:
        if size_of(part) <= COPY_BYTES_MAX:
            small.append(part)
            continue
        if small:
            joined.append(b"".join(small))
            small = []
        joined.append(part)
    if small:
        joined.append(b"".join(small))
    return joined


IPV4_MAPPED = "::ffff:"
"""Beginning of an IPv4 address as a socket for IPv6 has it."""


def _address(peername: object) -> str:
    """Host and port. An IPv4 address that came to a socket for IPv6 is one of IPv4: a rule about it
    holds wherever it connects."""
    if isinstance(peername, tuple) and len(peername) >= 2:
        return f"{str(peername[0]).removeprefix(IPV4_MAPPED)}:{peername[1]}"
    return str(peername)
