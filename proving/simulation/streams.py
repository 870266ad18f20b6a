"""One TCP connection of the simulation: two transports, a byte stream each way.

What the kernel does (bytes under way, acknowledgements, FIN, RST, giving up) belongs to the world,
and continues while a process is paused or after it has died. What the transport does for its
protocol runs in the process's own context.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import os
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from proving.simulation.link import Link
from proving.simulation.loop import SimulationLoop
from proving.simulation.owner import Owner

WINDOW_BYTES = (32 * 1024, 512 * 1024)
"""The range of the bytes that the two kernels hold of one stream, under way or not yet read."""

RECEIVE_BYTES_MAX = 256 * 1024
"""The most bytes that one `data_received` gets."""

RESET_AFTER_S = 0.00001
"""A reset comes this long after the last bytes."""

RETRANSMIT_S = (0.05, 1.0)
"""The lost bytes are sent again this long after the cut is healed."""

_HIGH_WATER_BYTES = 64 * 1024


class Stream:
    """The bytes from one transport to its peer, in order."""

    def __init__(
        self, sender: SimulatedTransport, receiver: SimulatedTransport, link: Link, back: Link
    ) -> None:
        self.sender = sender
        self.receiver = receiver
        self.link = link
        self.back = back
        self.received = bytearray()
        self.ended = False
        self._loop = sender.loop
        self._rng = sender.rng
        self._window_bytes = self._rng.randint(*WINDOW_BYTES)
        self._under_way: deque[tuple[float, bytes | None]] = deque()
        self._under_way_bytes = 0
        self._unacknowledged_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def room(self) -> int:
        used = self._under_way_bytes + self._unacknowledged_bytes + len(self.received)
        return max(0, self._window_bytes - used)

    def send(self, data: bytes | None) -> None:
        """Sends bytes, or the end of the stream (None)."""
        size = len(data) if data is not None else 0
        arrival = max(self.link.arrival(size), self.last_arrival())
        self._under_way.append((arrival, data))
        self._under_way_bytes += size
        if self._timer is None:
            self._set_timer(arrival)

    def break_off(self) -> None:
        """Loses the last part of the bytes under way, cut at any byte."""
        kept = self._rng.randint(0, self._under_way_bytes)
        under_way, self._under_way = self._under_way, deque()
        self._under_way_bytes = kept
        for arrival, data in under_way:
            if data is not None and kept > 0:
                self._under_way.append((arrival, data[:kept]))
                kept -= len(data)

    def last_arrival(self) -> float:
        """The time when all bytes under way will have arrived."""
        return self._under_way[-1][0] if self._under_way else self._loop.time()

    def drop(self) -> None:
        """Loses all bytes under way."""
        self._under_way.clear()
        self._under_way_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def link_is_back(self) -> None:
        """The link, or the way back of its acknowledgements, is no longer cut."""
        if self.link.is_cut() or self.back.is_cut():
            return
        self._unacknowledged_bytes = 0
        if self._under_way and self._timer is None:
            again = self._loop.time() + self._rng.uniform(*RETRANSMIT_S)
            self._under_way = deque((max(again, when), data) for when, data in self._under_way)
            self._set_timer(self._under_way[0][0])
        self.sender.pump()

    def _breaks(self) -> bool:
        """Returns whether the connection ends instead of what arrives."""
        share = self.link.break_share
        return share > 0 and not self.receiver.gone and self._rng.random() < share

    def _set_timer(self, when: float) -> None:
        self._timer = self._loop.call_at(when, self._arrive, context=self._loop.root.context)

    def _arrive(self) -> None:
        self._timer = None
        if self.link.is_cut():
            return  # The bytes are lost. `link_is_back` sends them again.
        if self._breaks():
            self.drop()
            self.receiver.reset()
            return
        now = self._loop.time()
        size = 0
        while self._under_way and self._under_way[0][0] <= now:
            _, data = self._under_way.popleft()
            if data is None:
                self.ended = True
            else:
                size += len(data)
                self.received += data
        self._under_way_bytes -= size
        if self.back.is_cut():
            self._unacknowledged_bytes += size
        if self._under_way:
            self._set_timer(self._under_way[0][0])
        if self.receiver.gone:
            self.received.clear()
            if size:
                self.receiver.send_reset()
        else:
            self.receiver.wake()


class SimulatedTransport(asyncio.Transport):
    """The transport that a protocol is given: one end of a connection.

    `gone` is set once the kernel keeps no state of this end: a reset answers bytes that arrive
    after that.
    """

    out: Stream
    into: Stream

    def __init__(
        self,
        loop: SimulationLoop,
        rng: random.Random,
        owner: Owner,
        context: contextvars.Context,
        names: dict[str, Any],
    ) -> None:
        super().__init__(names)
        self.loop = loop
        self.owner = owner
        self.gone = False
        self.on_lost: Callable[[SimulatedTransport], None] | None = None
        self.rng = rng
        self._context = context
        self._protocol: asyncio.BaseProtocol | None = None
        self._unsent = bytearray()
        self._high, self._low = _HIGH_WATER_BYTES, _HIGH_WATER_BYTES // 4
        self._writing_paused = False
        self._reading_paused = False
        self._closing = False
        self._end_delivered = False
        self._delivery_is_due = False

    # --- asyncio.Transport ------------------------------------------------------------------------

    def is_reading(self) -> bool:
        return not self._reading_paused and not self._closing

    def is_closing(self) -> bool:
        return self._closing

    def get_protocol(self) -> asyncio.BaseProtocol:
        assert self._protocol is not None
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def pause_reading(self) -> None:
        self.owner.check_alive()
        self._reading_paused = True

    def resume_reading(self) -> None:
        self.owner.check_alive()
        self._reading_paused = False
        self.wake()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.owner.check_alive()
        content = bytes(memoryview(data))
        if self._closing or not content:
            return
        self.owner.handled_bytes += len(content)
        if not self._unsent:
            room = self.out.room()
            if room:
                self.out.send(content[:room] if room < len(content) else content)
            if room >= len(content):
                return
            content = content[room:]
        self._unsent += content
        if not self._writing_paused and len(self._unsent) > self._high:
            self._writing_paused = True
            self._call_protocol("pause_writing")

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is None:
            high = _HIGH_WATER_BYTES if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high!r}) must be >= low ({low!r}) must be >= 0")
        self._high, self._low = high, low

    def close(self) -> None:
        """Ends the stream once all bytes are written."""
        self.owner.check_alive()
        self._start_close()

    def abort(self) -> None:
        """Resets the connection: bytes that have not arrived are lost."""
        self.owner.check_alive()
        if not self.gone:
            self.out.break_off()
            self.send_reset()
            self.lose(None)

    # --- for the network --------------------------------------------------------------------------

    def connect(self, protocol: asyncio.BaseProtocol) -> None:
        """Opens the connection for the protocol (called in the owner's context)."""
        self._protocol = protocol
        protocol.connection_made(self)
        self.wake()

    def lose(self, error: OSError | None) -> None:
        """Ends this side of the connection, and tells its protocol."""
        if self.gone:
            return
        self.gone = self._closing = True
        if self.on_lost is not None:
            self.on_lost(self)
        self._unsent.clear()
        self.into.received.clear()
        self.loop.call_soon(self._tell_lost, error, context=self._context)

    def reset(self) -> None:
        """Something between the hosts ends the connection, on both sides."""
        if not self.gone:
            self.out.break_off()
            self.send_reset()
            self.lose(ConnectionResetError(errno.ECONNRESET, "reset by the test"))

    def vanish(self) -> None:
        """The host lost its power: this end sends nothing, and its peer is not told."""
        self.gone = self._closing = True
        self.out.drop()

    def process_died(self) -> None:
        """The kernel closes the dead process's socket: with a reset, or with the bytes that it held
        and the end of the stream."""
        if self.gone:
            return
        self.gone = self._closing = True
        self._unsent.clear()
        if self.into.received or self.rng.random() < 0.5:
            self.out.break_off()
            self.send_reset()
        else:
            self.out.send(None)

    def send_reset(self) -> None:
        """Resets the peer after the bytes that are still under way, unless the link is cut by
        then."""
        arrival = max(self.out.link.arrival(0), self.out.last_arrival() + RESET_AFTER_S)
        self.loop.call_at(arrival, self._reset_arrives, context=self.loop.root.context)

    def give_up(self) -> None:
        """The kernel has heard nothing of the peer for too long."""
        self.out.drop()
        self.lose(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))

    def pump(self) -> None:
        """Sends as many bytes as the window has room for."""
        if self.gone or not self._unsent:
            return
        room = self.out.room()
        if room == 0:
            return
        self.out.send(bytes(self._unsent[:room]))
        del self._unsent[:room]
        if self._writing_paused and len(self._unsent) <= self._low:
            self._writing_paused = False
            self.loop.call_soon(self._call_protocol, "resume_writing", context=self._context)
        if not self._unsent and self._closing:
            self._finish_close()

    def wake(self) -> None:
        """Reads, if there are bytes to read."""
        if not self._delivery_is_due:
            self._delivery_is_due = True
            self.loop.call_soon(self._deliver, context=self._context)

    # --- inside -----------------------------------------------------------------------------------

    def _reset_arrives(self) -> None:
        peer = self.out.receiver
        if not self.out.link.is_cut() and not peer.gone:
            peer.out.drop()
            peer.lose(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))

    def _start_close(self) -> None:
        if not self._closing:
            self._closing = True
            if not self._unsent:
                self._finish_close()

    def _finish_close(self) -> None:
        if self.into.received:
            self.out.break_off()
            self.send_reset()  # Linux does this when the closed socket holds unread bytes.
        else:
            self.out.send(None)
        self.lose(None)

    def _deliver(self) -> None:
        self._delivery_is_due = False
        if self._closing or self._reading_paused or self._protocol is None:
            return
        received = self.into.received
        try:
            if received:
                self._deliver_data(self._protocol, received)
            elif self.into.ended and not self._end_delivered:
                self._end_delivered = True
                keep_open = isinstance(
                    self._protocol, asyncio.Protocol | asyncio.BufferedProtocol
                ) and (self._protocol.eof_received())
                if not keep_open:
                    self._start_close()
        except Exception as error:  # noqa: BLE001 - reported, as asyncio does
            self.loop.call_exception_handler(
                {"message": f"{self._protocol!r} failed at receiving", "exception": error}
            )
            self.out.break_off()
            self.send_reset()
            self.lose(None)

    def _deliver_data(self, protocol: asyncio.BaseProtocol, received: bytearray) -> None:
        """Hands over some of the arrived bytes: mostly all, otherwise a part cut at a random
        place."""
        size = min(len(received), RECEIVE_BYTES_MAX)
        if size > 1 and self.rng.random() < self.into.link.chunking:
            size = self.rng.randint(1, min(size, self.rng.choice((4, 64, size))))
        if isinstance(protocol, asyncio.BufferedProtocol):
            with memoryview(protocol.get_buffer(size)).cast("B") as buffer:
                size = min(size, len(buffer))
                if size == 0:
                    raise RuntimeError("get_buffer() returned an empty buffer")
                buffer[:size] = received[:size]
        if size == len(received):
            data = bytes(received)
            received.clear()
        else:
            data = bytes(received[:size])
            del received[:size]
        self.owner.handled_bytes += size
        self.loop.trace.mix(size, zlib.crc32(data))
        if isinstance(protocol, asyncio.BufferedProtocol):
            protocol.buffer_updated(size)
        else:
            assert isinstance(protocol, asyncio.Protocol), protocol
            protocol.data_received(data)
        if not self.into.sender.gone:
            self.into.sender.pump()
        if received or self.into.ended:
            self.wake()

    def _tell_lost(self, error: OSError | None) -> None:
        if self._protocol is not None:
            self._protocol.connection_lost(error)

    def _call_protocol(self, method: str) -> None:
        if self._protocol is not None and not self.gone:
            getattr(self._protocol, method)()
