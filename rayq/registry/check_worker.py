"""The program of a process that checks schemas (`CheckPool`): a question on stdin, an answer on
stdout, until stdin ends.

Beyond its limits the kernel ends it, whatever it is doing. The pool would kill it sooner; the timer
here is for a pool that is gone. An exception that no format means to raise ends it as well: who
knows what a parser left behind.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import Any, BinaryIO

import msgspec

from rayq.errors import RayqError, to_wire
from rayq.registry.check_requests import (
    LENGTH_BYTES,
    READY,
    Canonicalize,
    Check,
    Compare,
    Reply,
    Write,
)
from rayq.registry.checks import canonical_schema, incompatibilities, written

MEMORY_BYTES_MAX = 4 * 1024**3
"""The address space, of which the libraries take about 1 GiB."""
RECURSION_MAX = 6_000
"""Frames of Python: enough for schemas that are nested as deep as `strict_json.py` lets them be,
and no more than the stack of this process has room for."""


def main() -> None:
    seconds_max = float(sys.argv[1])
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # What a library prints is no answer.
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the pool, which ends this.
    sys.setrecursionlimit(RECURSION_MAX)
    answers.write(READY)
    answers.flush()
    while (question := _read(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds_max)
        answer = msgspec.msgpack.encode(_reply(msgspec.msgpack.decode(question, type=Check)))
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(len(answer).to_bytes(LENGTH_BYTES) + answer)
        answers.flush()


def _read(stream: BinaryIO) -> bytes | None:
    length = stream.read(LENGTH_BYTES)
    return stream.read(int.from_bytes(length)) if len(length) == LENGTH_BYTES else None


def _reply(check: Check) -> Reply:
    try:
        return Reply(msgspec.msgpack.encode(_run(check)))
    except RayqError as error:
        return Reply(failure=to_wire(error))


def _run(check: Check) -> Any:
    match check:
        case Canonicalize(resolved, normalize):
            return canonical_schema(resolved, normalize=normalize)
        case Compare(new, versions, level):
            return incompatibilities(new, versions, level)
        case Write(resolved, text_format):
            return written(resolved, text_format)


if __name__ == "__main__":
    main()
