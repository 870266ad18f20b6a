"""Robust access to the standard streams: non-blocking, closed half-way, or left by their reader.

A stream may be non-blocking although nobody asked for it: programs that share a terminal or an end
of a pipe share its flags, too.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import io
import os
import select
import stat
import sys
import termios
import time
from typing import Any

CHUNK_BYTES = 256 * 1024
TAKEN_CHECK_S = 0.001
"""The interval at which is checked whether the reader of a pipe has taken what was written."""
TAKEN_CHECKS_AT_ONCE = 20
SIGNAL_CHECK_MS = 250
"""Interval at which a wait for a stream lets Python see its signals: one that comes in the instant
before the call begins does not end it."""


def read_some(descriptor: int, size: int = CHUNK_BYTES) -> bytes:
    """Reads at most `size` bytes; waits until some are there. b"" at the end."""
    while True:
        _wait(descriptor, select.POLLIN)
        with contextlib.suppress(BlockingIOError):  # Another program has read it.
            return os.read(descriptor, size)


def write_all(descriptor: int, data: bytes | bytearray | memoryview) -> None:
    """Writes all of it, however long that takes. Raises OSError: BrokenPipeError where the reader
    is gone."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:
            _wait(descriptor, select.POLLOUT)


def _wait(descriptor: int, event: int) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    while not poll.poll(SIGNAL_CHECK_MS):
        pass


class Pipe:
    """The output for records. For a pipe it knows how much its reader has taken out of it: what is
    left in it when the reader ends was seen by nobody."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        self._poll = select.poll()
        self._poll.register(descriptor, 0)

    def write(self, data: bytes) -> None:
        """Raises OSError."""
        write_all(self._descriptor, data)

    def check_reader(self) -> None:
        """Raises BrokenPipeError where the reader is gone."""
        if any(events & (select.POLLERR | select.POLLNVAL) for _, events in self._poll.poll(0)):
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    @property
    def is_taken(self) -> bool:
        """Returns whether the reader of a pipe has taken all that is in it. Always true for what is
        no pipe."""
        if not self._is_pipe:
            return True
        left = array.array("i", [0])
        fcntl.ioctl(self._descriptor, termios.FIONREAD, left)
        return left[0] == 0

    def wait_taken(self) -> None:
        """Waits until `is_taken`. Raises BrokenPipeError where the reader ends before."""
        checks = 0
        while not self.is_taken:
            self.check_reader()
            checks += 1
            time.sleep(0 if checks < TAKEN_CHECKS_AT_ONCE else TAKEN_CHECK_S)


class _Waiting(io.RawIOBase):
    """A standard stream that waits where it is non-blocking."""

    def __init__(self, descriptor: int, mode: str) -> None:
        self._descriptor = descriptor
        self.mode = mode

    def readable(self) -> bool:
        return self.mode == "rb"

    def writable(self) -> bool:
        return self.mode == "wb"

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def readinto(self, buffer: Any) -> int:
        data = read_some(self._descriptor, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        write_all(self._descriptor, data)
        return len(data)


def let_standard_streams_wait() -> None:
    """Makes stdin, stdout and stderr wait where they are non-blocking: Python reads a part then, or
    loses what there is no room for."""
    for name in ("stdin", "stdout", "stderr"):
        found = getattr(sys, name)
        try:
            descriptor = found.fileno()
            if os.get_blocking(descriptor):
                continue
        except OSError:
            continue
        is_input = name == "stdin"
        raw = _Waiting(descriptor, "rb" if is_input else "wb")
        buffered: Any = io.BufferedReader(raw) if is_input else io.BufferedWriter(raw)
        waiting = io.TextIOWrapper(
            buffered,
            encoding=found.encoding,
            errors=found.errors,
            line_buffering=found.line_buffering,
        )
        setattr(sys, name, waiting)
