"""Positions of a group, as callers give them, and on their way into a transaction: a consumer
provides them, a producer commits them, and neither knows the other."""

from __future__ import annotations

from typing import NamedTuple

from rayq.config import is_unicode
from rayq.errors import InvalidRequestError
from rayq.records import OffsetAndMetadata

GROUP_NAME_MAX = 249
METADATA_CHARACTERS_MAX = 4096


class GroupPositions(NamedTuple):
    """The part of a `CommitOffsets` about a group and one of its members."""

    group: str
    member: str
    """"" where no member owns the partitions."""
    member_epoch: int
    sequence: int
    """Sequence number that grows with each commit of the member."""
    offsets: list[tuple[str, int, int, int | None, str]]
    """`(topic id, partition, offset of the next record, leader epoch of the record before it,
    metadata)`"""


def check_group(group: object) -> str:
    """Checks the name of a group. Raises TypeError, InvalidRequestError."""
    if not isinstance(group, str):
        raise TypeError(f"A group name must be a str, not {type(group).__name__}.")
    if not 0 < len(group) <= GROUP_NAME_MAX:
        raise InvalidRequestError(
            f"The name of a group has 1 to {GROUP_NAME_MAX} characters, not {len(group)}."
        )
    if not is_unicode(group):
        raise InvalidRequestError(f"The name of a group is Unicode text, which {group!r} is not.")
    return group


def checked_position(value: int | OffsetAndMetadata) -> OffsetAndMetadata:
    """The position to commit for a partition, checked. Raises TypeError, InvalidRequestError."""
    found = value if isinstance(value, OffsetAndMetadata) else OffsetAndMetadata(value)
    if type(found.offset) is not int or not isinstance(found.metadata, str):
        raise TypeError(
            "What is committed for a partition must be an int (the offset of the next record) or "
            f"OffsetAndMetadata(offset, metadata), not {value!r}."
        )
    if not 0 <= found.offset < 2**62:
        raise InvalidRequestError(f"Offsets count from 0: {found.offset} is not an offset.")
    if len(found.metadata) > METADATA_CHARACTERS_MAX:
        raise InvalidRequestError(
            f"Commit metadata has up to {METADATA_CHARACTERS_MAX} characters, not "
            f"{len(found.metadata)}."
        )
    if not is_unicode(found.metadata):
        raise InvalidRequestError(
            f"Commit metadata is Unicode text, which {found.metadata!r} is not."
        )
    return found
