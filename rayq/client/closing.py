"""The end of a `with` block."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rayq.errors import RayqError

logger = logging.getLogger(__name__)


@contextmanager
def closing_after(error: BaseException | None) -> Iterator[None]:
    """Wraps what closes something after a `with` block that ended with `error`, if any. That error
    reaches the user; an error that closing raises besides is logged."""
    try:
        yield
    except RayqError as failed:
        if error is None:
            raise
        logger.error("%s", failed)
