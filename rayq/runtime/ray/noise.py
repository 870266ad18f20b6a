"""Suppresses lines that Ray prints in a program that uses rayq, and that tell its user nothing.

A replica has a process of its own, and Ray warns of many; its GCS client says at INFO how it
connects, in every JVM of Spark's. Ray's drivers leave out what matches the environment variable
RAY_DEDUP_LOGS_SKIP_REGEX; it is read when ray is imported, which may be long over.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Any

from ray._private import ray_logging

NOISE = (
    r"worker processes have been started on node",
    r" I \d+ \d+\] gcs_client\.cc:\d+: GcsClient has no Cluster ID set",
)
_TOKEN_LOGGER = "ray._private.authentication.authentication_token_setup"


def leave_out_noise() -> None:
    """Leaves out lines of what Ray copies of its other processes to this driver. What the user has
    left out stays left out."""
    for deduplicator in (ray_logging.stdout_deduplicator, ray_logging.stderr_deduplicator):
        kept: Any = getattr(deduplicator, "skip_re", None)
        patterns = [kept.pattern] if kept is not None else []
        patterns += [noise for noise in NOISE if noise not in "|".join(patterns)]
        deduplicator.skip_re = re.compile("|".join(patterns))


@contextlib.contextmanager
def without_token_warning() -> Iterator[None]:
    """While this program starts a Ray of its own, which asks for a token by default and warns of
    it."""
    logger = logging.getLogger(_TOKEN_LOGGER)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
