"""Whether an error is that of one record or of its reader, and what a reader does about the former.

Whatever no retry mends while one record is read is an error of that record: an
`UnreadableRecordError`, with its place. What can be retried (a leader that moves, a store that is
away) is retried as ever, and is never one.
"""

from __future__ import annotations

import logging

from rayq.client.client import may_retry
from rayq.errors import (
    AuthenticationError,
    ClosedError,
    CorruptBatchError,
    InvalidRequestError,
    InvalidTopicError,
    LargeValueError,
    LargeValueRefusedError,
    LargeValueUnavailableError,
    RayqError,
    UnreadableRecordError,
    UnsupportedFormatError,
    UnsupportedVersionError,
    WrongClusterError,
)

logger = logging.getLogger(__name__)

_OF_THE_READER = (
    AuthenticationError,
    ClosedError,
    UnsupportedVersionError,
    WrongClusterError,
)
"""They end whatever this reader asks for."""
_OF_THE_MANIFEST = (InvalidRequestError, InvalidTopicError)
"""What a manifest names cannot be, for whoever asks."""


def of_large_value(error: Exception) -> UnreadableRecordError | None:
    """The error of a large value that one step of reading it has raised. None: it is the reader's,
    or can be retried."""
    if isinstance(error, UnreadableRecordError) and not error.retriable:
        return error
    if isinstance(error, _OF_THE_MANIFEST):
        return LargeValueError(f"its manifest names what is nowhere: {error}")
    if isinstance(error, UnsupportedFormatError):
        return LargeValueRefusedError(f"a newer rayq wrote it: {error}")
    if isinstance(error, RayqError):
        if may_retry(error) or isinstance(error, _OF_THE_READER):
            return None
        return LargeValueUnavailableError(f"it cannot be had now: {error}")
    return LargeValueUnavailableError(
        f"reading it failed in this process: {type(error).__name__}: {error}"
    )


def is_final(error: UnreadableRecordError) -> bool:
    """Whether nobody has better bytes. A wrong CRC may be of this answer only."""
    return not isinstance(error, CorruptBatchError) or error.crc_matches


def is_skipped(error: UnreadableRecordError, on_corrupt: str) -> bool:
    """Whether a reader goes on behind what it cannot read, which leaves a line in the log."""
    if on_corrupt != "skip" or error.never_skipped:
        return False
    logger.warning("passed over, as on_corrupt='skip' says: %s", error)
    return True
