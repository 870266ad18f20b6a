"""The header that says from when on a queue may give out a record.

`rayq.due` has a wall-clock time, in milliseconds since the epoch, as 8 bytes, big endian. A batch
with such a record has the attribute DELAYED: queues look at the headers of those batches only.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from rayq.records import Headers

DUE_HEADER = "rayq.due"
_DUE = struct.Struct(">q")


def due_header(due_ms: int) -> tuple[str, bytes]:
    """The header of a record that no queue gives out before `due_ms`."""
    return DUE_HEADER, _DUE.pack(due_ms)


def due_ms_of(headers: Headers | None) -> int | None:
    """The time at which a record is due; None: at once. A header that is not a time counts for
    nothing, so that a bad one never holds up a record."""
    for name, value in headers or ():
        if name == DUE_HEADER and len(value) == _DUE.size:
            due_ms: int = _DUE.unpack(value)[0]
            return due_ms
    return None


def any_is_due_later(column: Iterable[Headers | None]) -> bool:
    """Returns whether any of these records has a header that says when it is due."""
    return any(name == DUE_HEADER for headers in column if headers for name, _ in headers)
