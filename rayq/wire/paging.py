"""Answers in pages: the server says where the next one begins, which must be behind the last."""

from __future__ import annotations

from typing import TypeVar

from rayq.errors import ProtocolError

Place = TypeVar("Place", str, bytes, int, tuple[str, ...])


def check_advances(before: Place, after: Place | None, what: str) -> None:
    """Checks that the next page (None: there is none) begins behind this one: else the same page
    would be asked for forever. Raises ProtocolError; `what` names the list."""
    if after is not None and after <= before:
        raise ProtocolError(
            f"A page of {what} that begins at {before!r} is said to continue at {after!r}: that "
            "never ends. What was listed so far is not used."
        )
