"""The audit's account of changes of the metadata, and the ids under which they are remembered."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from rayq import messages
from rayq.core.cluster.state import ClusterState
from rayq.messages.acls import Acl
from rayq.messages.audit import AuditedChange

TOLD_LENGTH_MAX = 400
"""Maximum length of what the audit tells of a change."""


def done_id(request_id: str, forward: messages.Forward | None) -> str:
    """The id under which a request is remembered. Names of principals have no spaces, so nobody
    gets the answer to the request of another principal by its id."""
    if forward is None or forward.by is None:
        return request_id
    return f"{forward.by} {request_id}"


def audited_change(
    state: ClusterState, forward: messages.Forward, request: messages.Change, now_ms: int
) -> AuditedChange:
    """The audit's account of a change that is about to be made."""
    last = next((change for change in reversed(state.requests_done.values()) if change), None)
    return AuditedChange(
        time_ms=now_ms if last is None else max(now_ms, last.time_ms + 1),
        number=1 if last is None else last.number + 1,
        request=type(request).__name__,
        what=told(request),
        principal=forward.by,
        token_id=forward.token_id,
        address=forward.address,
        client_id=forward.client_id,
    )


def told(request: messages.AnyRequest) -> str:
    """The fields of a request that differ from their defaults, as JSON; without its `request_id`,
    and without bytes, which may be secrets. A long text is cut, and ends with three dots."""
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(type(request)):
        value = getattr(request, field.name)
        if field.name != "request_id" and value != field.default:
            plain = _plain(value)
            if plain is not None:
                fields[field.name] = plain
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    return text if len(text) <= TOLD_LENGTH_MAX else f"{text[: TOLD_LENGTH_MAX - 3]}..."


def _plain(value: object) -> Any:
    """The value as JSON has it. None: it is not told."""
    match value:
        case bool() | int() | float() | str():
            return value
        case Acl():
            return str(value)
        case Mapping():
            return {str(key): _plain(part) for key, part in value.items()}
        case list() | tuple():
            return [_plain(part) for part in value]
    return None
