"""The validity of signed URLs: nobody can take back a URL that a leader has handed out."""

from __future__ import annotations

from typing import Literal

VALID_MS_MAX = 15 * 60_000
"""Maximum validity. A client that loses the right to read a topic can read by its URLs for this
long."""
VALID_MS_MIN = 1_000
"""URLs for a shorter time are of no use, and stores count in seconds."""

DirectReads = Literal["all", "superuser", "none"]
"""The clients that get URLs: see `ClusterConfig.remote_direct_reads`."""


def url_validity_ms(
    wanted_ms: int,
    *,
    direct_reads: DirectReads,
    principal: str | None,
    token_expires_ms: int | None,
    now_ms: int,
) -> int:
    """Returns the validity in milliseconds of the URLs for a client that may read the records, and
    whose token expires at `token_expires_ms` (None: never). `principal` None is a superuser. 0: the
    client gets no URLs, and reads through leaders."""
    if direct_reads == "none" or (direct_reads == "superuser" and principal is not None):
        return 0
    valid_ms = min(wanted_ms, VALID_MS_MAX)
    if token_expires_ms is not None:
        valid_ms = min(valid_ms, token_expires_ms - now_ms)
    return valid_ms if valid_ms >= VALID_MS_MIN else 0
