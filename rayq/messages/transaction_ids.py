"""Ids of transactions: the producer ids that belong to them, and the coordinators that know them.

Each transactional id draws a *family* of producer ids from its coordinator: the batches of a
producer carry the first of them, those of the n-th writer of a job carry the n-th. A transaction is
a family and an epoch, used once and never again. The family names the coordinator's partition of
`__transaction_state`, so a leader that meets a batch knows whom to ask.
"""

from __future__ import annotations

from zlib import crc32

TRANSACTIONAL_IDS_START = 1 << 61
"""Ids below are those of producers without transactions, and so are those from
`TRANSACTIONAL_IDS_END` on: jobs choose theirs from 2^62."""
_PARTITION_IDS = 1 << 52
FAMILY_IDS = 1 << 20
"""The number of ids of a family."""
FAMILIES_MAX = _PARTITION_IDS // FAMILY_IDS
"""The maximum number of families that a coordinator can draw."""
COORDINATORS_MAX = 256
TRANSACTIONAL_IDS_END = TRANSACTIONAL_IDS_START + COORDINATORS_MAX * _PARTITION_IDS
EPOCH_MAX = 65_535
"""The last epoch of a family: the transactional id continues with another family."""


def coordinator_partition(transactional_id: str, partitions: int) -> int:
    """The partition of `__transaction_state` that holds a transactional id, forever: the number of
    partitions is fixed. Its leader coordinates the id's transactions."""
    return crc32(transactional_id.encode()) % partitions


def make_family(partition: int, number: int) -> int:
    """The first producer id of a coordinator's family with that number, which the controller never
    grants twice."""
    assert 0 <= partition < COORDINATORS_MAX and 0 <= number < FAMILIES_MAX
    return TRANSACTIONAL_IDS_START + partition * _PARTITION_IDS + number * FAMILY_IDS


def is_transactional(producer_id: int | None) -> bool:
    """Returns whether batches under this producer id belong to transactions: all of them do, or
    none."""
    return (
        producer_id is not None and TRANSACTIONAL_IDS_START <= producer_id < TRANSACTIONAL_IDS_END
    )


def family_of(producer_id: int) -> int:
    """The family of a transactional producer id."""
    return producer_id - producer_id % FAMILY_IDS


def coordinator_of(family: int) -> int:
    """The partition of `__transaction_state` whose leader coordinates the family."""
    return (family - TRANSACTIONAL_IDS_START) // _PARTITION_IDS
