"""The audit: changes of the metadata, with who asked for them."""

from __future__ import annotations

import msgspec


class AuditedChange(msgspec.Struct, array_like=True, frozen=True):
    """A change as the audit tells it: what was asked for, when, by whom and from where."""

    time_ms: int
    """Time by the controller's wall clock. No other change has the same, and later ones have
    later times, also where that clock is set back."""
    number: int
    """The number of the change before, and 1: a gap shows that the audit lacks some."""
    request: str
    """The name of the request's class."""
    what: str
    """What it asked for, as JSON: its fields, without secrets."""
    principal: str | None
    """None: a superuser."""
    token_id: str | None
    address: str
    client_id: str
