"""Classification of errors as those of one record or of its reader, and the reader's reaction to
the former.

An error that no retry fixes while one record is read is an error of that record: an
`UnreadableRecordError`, with its partition and offset. Errors that can be retried (a leader that
moves, a store that is unavailable) are retried as usual, and never become one.
"""

from __future__ import annotations

import logging

from rayq.client.leader_requests import may_retry
from rayq.errors import (
    AuthenticationError,
    AuthorizationError,
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
    AuthorizationError,
    ClosedError,
    UnsupportedVersionError,
    WrongClusterError,
)
"""Errors that end the reader, whatever it asks for."""
_OF_THE_MANIFEST = (InvalidRequestError, InvalidTopicError)
"""Errors of a manifest that names something that cannot exist, for any reader."""


def of_large_value(error: Exception) -> UnreadableRecordError | None:
    """The record error for an error that reading a large value has raised. None: it is the
    reader's, or can be retried."""
    if isinstance(error, UnreadableRecordError) and not error.retriable:
        return error
    if isinstance(error, _OF_THE_MANIFEST):
        return LargeValueError(f"its manifest names what is nowhere: {error}")
    if isinstance(error, UnsupportedFormatError):
        return LargeValueRefusedError(f"a newer rayq wrote it: {error}")
    if isinstance(error, RayqError):
        if may_retry(error) or isinstance(error, _OF_THE_READER):
            return None
        return LargeValueUnavailableError(f"it is not available now: {error}")
    return LargeValueUnavailableError(
        f"reading it failed in this process: {type(error).__name__}: {error}"
    )


def is_final(error: UnreadableRecordError) -> bool:
    """Returns whether nobody has better bytes. A wrong CRC may be in this answer only."""
    return not isinstance(error, CorruptBatchError) or error.crc_matches


def is_skipped(error: UnreadableRecordError, on_corrupt: str) -> bool:
    """Returns whether a reader skips a record that it cannot read. Logs a line if so."""
    if on_corrupt != "skip" or error.never_skipped:
        return False
    logger.warning("passed over, as on_corrupt='skip' says: %s", error)
    return True
