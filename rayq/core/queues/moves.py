"""Moves of records out of a queue: to its dead letters, or where an operator sends them.

A `FailedRecord` has failed for good; its state is MOVING. It stays in the queue until its copy is
in the target's log. The copy gets there by a numbered *move*: the records to append and the move's
number are kept before the append. So a later leader finds the copy in the target, or appends the
same records again (rule 54).
"""

from __future__ import annotations

from typing import Literal

import msgspec

DELIVERIES = "deliveries"
REJECTED = "rejected"
ERROR_BYTES_MAX = 1_000
"""Maximum size of a kept error: all locked records may be rejected in one write to the coordinator,
which has a limit (`queue_states.WRITE_BYTES_MAX`)."""

Outcome = Literal["dead", "done"]


class FailedRecord(msgspec.Struct, array_like=True, frozen=True):
    """A record that failed for good: after the most deliveries, or since it was rejected."""

    offset: int
    count: int
    reason: str
    """`DELIVERIES`, `REJECTED`, or an operator's."""
    error: str
    """The consumer's error. At most `ERROR_BYTES_MAX` bytes as UTF-8."""
    is_in_doubt: bool = False
    """True if it may already be among the dead letters."""


class Move(msgspec.Struct, array_like=True, frozen=True):
    """One batch to append to one partition of a target.

    `producer_id` and `producer_epoch` number it (the sequence is 0), `scan_from` is the end of the
    target before, `scan_epoch` the leader epoch of the last batch below (None: unknown), `crc` that
    of the batch's body. `records` are ascending. Moved records are dead letters by their `outcome`,
    or just done.
    """

    move_id: int
    outcome: Outcome
    topic_id: str
    partition: int
    producer_id: int
    producer_epoch: int
    scan_from: int
    scan_epoch: int | None
    crc: int
    records: tuple[FailedRecord, ...]
