"""Makes text safe for a terminal. Other people choose the names of groups and clients and the texts
of errors, and could otherwise colour, clear or retype what an operator sees. Pure."""

from __future__ import annotations

import re

_UNSEEN = re.compile(
    "["
    "\x00-\x1f\x7f-\x9f"  # C0 (ESC among them), DEL and C1 (which has a CSI of its own)
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # what turns the order of letters round
    "\u2028\u2029"  # ends of lines
    "\ud800-\udfff"  # bytes that were not UTF-8
    "]"
)


def visible(text: str) -> str:
    """The text on one line. Characters that a terminal would obey stand as `\\x1b` and the like."""
    return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


def visible_json(text: str) -> str:
    """JSON, in which such characters stand only inside of strings, as the same JSON."""
    return _UNSEEN.sub(lambda found: _json_escape(found[0]), text)


def _json_escape(character: str) -> str:
    return character if character == "\n" else f"\\u{ord(character):04x}"
