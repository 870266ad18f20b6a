"""The answer to a check: what does not fit, where, and why."""

from __future__ import annotations

import msgspec


class Incompatibility(msgspec.Struct, frozen=True):
    """A reason why a reader does not read all that a writer writes.

    `kind` is a word for programs, such as `reader_field_missing_default_value`; `path` is where in
    the reader's schema; `message` is a sentence.
    """

    kind: str
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.message} ({self.kind} at {self.path})"
