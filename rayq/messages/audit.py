"""The audit: changes of the metadata with who asked for them, and lines of servers.

The lines are records of `__audit`, which has one partition. Its leader's coordinator writes them:
what servers send it, and the changes that the metadata log has.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from rayq.messages.acls import Right, Rights
from rayq.messages.base import (
    Bytes,
    CheckedInt,
    Counter,
    Done,
    Milliseconds,
    Offset,
    Response,
    ToAuditCoordinator,
    ToBroker,
)

AUDIT_LINES_MAX = 1_000
"""Maximum number of lines, or of changes, of one request."""
AUDIT_LINE_BYTES_MAX = 16 * 1024


class AuditedChange(msgspec.Struct, array_like=True, frozen=True):
    """A change as the audit tells it: what was asked for, when, by whom and from where."""

    time_ms: int
    """Time by the controller's wall clock. No other change has the same, and later ones have
    later times, also where that clock is set back."""
    number: int
    """One more than the number of the change before: a gap shows that the audit lacks changes."""
    request: str
    """The name of the request's class."""
    what: str
    """The fields of the request as JSON, without secrets."""
    principal: str | None
    """None: a superuser."""
    token_id: str | None
    address: str
    client_id: str


class ReadChangesResponse(Response, frozen=True):
    changes: list[AuditedChange]
    """The oldest first."""


class ReadChanges(ToBroker[ReadChangesResponse], frozen=True):
    """The committed changes after a time that the audit tells, the oldest first, as far as the
    broker's metadata has them."""

    api: ClassVar[int] = 156
    after_ms: CheckedInt
    changes_max: Annotated[int, msgspec.Meta(ge=1, le=AUDIT_LINES_MAX)]


class AppendAudit(ToAuditCoordinator[Done], frozen=True):
    """Lines of a server, as JSON. One line a second is written of each kind and principal, and the
    next one has the number of those that were left out. A line that is sent again may be there
    twice."""

    api: ClassVar[int] = 157
    lines: Annotated[
        list[Annotated[bytes, msgspec.Meta(max_length=AUDIT_LINE_BYTES_MAX)]],
        msgspec.Meta(max_length=AUDIT_LINES_MAX),
    ]


class ReadAuditResponse(Response, frozen=True):
    """The payload holds whole record batches, whose values are lines. The first may begin below
    the offset that was asked for."""

    next_offset: int
    """Next offset to ask for."""
    end_offset: int
    """The end of what is committed."""


class ReadAudit(ToAuditCoordinator[ReadAuditResponse], frozen=True):
    """Reads lines of the audit, from an offset on or, where that is None, those since a time by
    `since_ms`. What retention deleted is passed over. The coordinator waits up to `wait_ms` for the
    first."""

    api: ClassVar[int] = 158
    rights: ClassVar[Rights] = (Right("describe", "cluster"),)
    ends_with_connection: ClassVar[bool] = True
    offset: Offset | None
    since_ms: Counter
    bytes_max: Bytes
    wait_ms: Milliseconds
