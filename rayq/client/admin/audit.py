"""Reads the audit: who changed the metadata, logged in, or was denied."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from rayq.client.admin.base import ADMIN_TIMEOUT_S, ATTEMPT_TIMEOUT_S, AdminMethods, Call
from rayq.client.timeouts import takes_timeout
from rayq.config import MIB
from rayq.core.access.audit import AuditLine, decode_line
from rayq.core.cluster.topic_changes import AUDIT_TOPIC
from rayq.errors import ProtocolError, UnknownTopicError
from rayq.messages import MILLISECONDS_MAX, ReadAudit
from rayq.storage.batch import decode_columns, split_batches


class AuditPage(NamedTuple):
    """A part of the audit."""

    lines: list[AuditLine]
    """In order of time, and within a millisecond in the order in which they were written. A page
    later in the audit may have lines that are older, which a server could not send sooner. A line
    that a server sent twice has the same `id`."""
    next_offset: int | None
    """Ask for this `offset` next: so no line is missed, and none is told again. None: nothing has
    been audited yet."""
    is_end: bool
    """True if there was no more at that moment."""


class AuditAdmin(AdminMethods):
    """Methods of `AsyncAdmin` about the audit."""

    @takes_timeout
    async def read_audit(
        self,
        *,
        since_ms: int = 0,
        offset: int | None = None,
        wait_ms: int = 0,
        timeout_s: float = ADMIN_TIMEOUT_S,
    ) -> AuditPage:
        """Reads a page of the audit: the lines from Unix time `since_ms` on, or from an `offset` on
        that a page gave. It waits up to `wait_ms` for a first line. The audit begins with the first
        principal, and has the last 30 days (`retention_ms` of `__audit`). The caller needs the
        right to describe the cluster. Raises AuthorizationError."""
        call = Call(self._client, timeout_s)
        wait_ms = max(0, min(wait_ms, int(call.left_s * 500), MILLISECONDS_MAX))
        try:
            answer, payload = await self._client.exchange_with_leader(
                AUDIT_TOPIC,
                0,
                lambda topic_id, leader: ReadAudit(
                    topic_id, 0, leader.epoch, offset, since_ms, MIB, wait_ms
                ),
                timeout_s=call.left_s,
                attempt_timeout_s=ATTEMPT_TIMEOUT_S + wait_ms / 1000,
            )
        except UnknownTopicError:
            return AuditPage([], None, is_end=True)
        lines: list[AuditLine] = []
        for position, header in split_batches(payload):
            columns = decode_columns(payload, position, header)
            for found, value in zip(columns.offsets, columns.values, strict=True):
                if offset is not None and found < offset:
                    continue
                line = _line(value or b"")
                if line.time_ms >= since_ms:
                    lines.append(line)
        lines.sort(key=lambda line: line.time_ms)
        return AuditPage(lines, answer.next_offset, answer.next_offset >= answer.end_offset)


def _line(value: bytes) -> AuditLine:
    try:
        return decode_line(value)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"A record of {AUDIT_TOPIC} is not a line of the audit: {error}") from (
            error
        )
