"""The end of a `with` block."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rayq.errors import (
    RayqError,
    TransactionCommittedError,
    TransactionOutcomeUnknownError,
)

logger = logging.getLogger(__name__)


@contextmanager
def closing_after(error: BaseException | None) -> Iterator[None]:
    """Wraps what closes something after a `with` block that ended with `error`, if any. That error
    reaches the user; an error that closing raises besides is logged. But where a block is to be
    undone and may be committed, the user hears that, with the error as its context."""
    try:
        yield
    except RayqError as failed:
        is_left = isinstance(failed, TransactionCommittedError | TransactionOutcomeUnknownError)
        if error is None or (is_left and isinstance(error, Exception)):
            raise
        logger.error("%s", failed)
