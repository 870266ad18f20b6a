"""The end of a `with` block."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rayq.errors import RayqError

logger = logging.getLogger(__name__)


@contextmanager
def closing_after(error: BaseException | None) -> Iterator[None]:
    """Around what closes something after a block that ended with `error`. That one goes first: what
    closing raises besides is logged."""
    try:
        yield
    except RayqError as failed:
        if error is None:
            raise
        logger.error("%s", failed)
