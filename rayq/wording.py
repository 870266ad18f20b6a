"""The grammar of messages that are put together from parts."""

from __future__ import annotations


def sentence(text: object) -> str:
    """The text of an error within another message: it ends with one full stop, or with its own
    question mark."""
    told = str(text).rstrip(". ")
    return told if told.endswith("?") else f"{told}."


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun, such as "1 record" or "1,234 records". `plural`: where it is not the
    noun and an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
