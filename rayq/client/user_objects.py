"""Rules of all objects that users get from a cluster: the end of a `with` block, and that they stay
in their process."""

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
    """Wraps a close after a `with` block that ended with `error`, if any. That error reaches the
    user, and an error raised by the close is logged. One case is different: if a block should be
    undone and may be committed, the user gets that error, with the block's error as its context."""
    try:
        yield
    except RayqError as failed:
        is_left = isinstance(failed, TransactionCommittedError | TransactionOutcomeUnknownError)
        if error is None or (is_left and isinstance(error, Exception)):
            raise
        logger.error("%s", failed)


def no_pickle_error(made: object, what: str) -> TypeError:
    """The error for an object that a cluster has made. `what` names it, such as "a producer"."""
    return TypeError(
        f"{type(made).__name__} cannot be sent to another process (a Ray task, for example): send "
        f"the Cluster, and make {what} from it there."
    )
