"""Text for a terminal of some width: lines fold where words end, tables keep words whole. Pure.

A number and its unit are one word. Text may fold behind a comma, except within a number.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

GAP = "  "
"""The separator of columns."""
_BREAK = re.compile(r"((?<!\d) | (?!(?:B|[KMGT]iB)\b)|(?<=,)(?=[^\s\d]))")


def fold(text: str, width: int, hang: int = 0) -> list[str]:
    """The text in lines of at most `width` columns. Those after the first are indented as the first
    is, and by `hang` more. A word that is longer than a line has a line of its own."""
    bare = text.lstrip(" ")
    indent = " " * (len(text) - len(bare))
    pieces = _BREAK.split(bare)
    lines = [indent + pieces[0]]
    for separator, piece in zip(pieces[1::2], pieces[2::2], strict=True):
        longer = f"{lines[-1]}{separator}{piece}"
        if width_of(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(indent + " " * hang + piece)
    return lines


def width_of(text: str) -> int:
    """The number of terminal columns that a text takes."""
    if text.isascii():
        return len(text)
    return sum(1 + (unicodedata.east_asian_width(character) in "WF") for character in text)


class Laid(NamedTuple):
    """A table as lines: of the head, and of each row; and which columns it had to leave out."""

    head: list[str]
    rows: list[list[str]]
    left_out: list[str]


def lay_out(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    is_number: Sequence[bool],
    width: int | None,
    optional: Sequence[str] = (),
) -> Laid:
    """The columns side by side, as wide as their contents (always, where `width` is None). Where
    that is too wide, cells fold where words end; then `optional` columns are left out, the first of
    them first; and at last the cells of each row stand one below the other."""
    for left_out in range(len(optional) + 1):
        dropped = optional[:left_out]
        shown = [column for column, name in enumerate(head) if name not in dropped]
        cells = [[row[column] for column in shown] for row in (head, *rows)]
        widths = _widths(cells, width)
        if widths is not None:
            numeric = [is_number[column] for column in shown]
            lines = [_side_by_side(row, widths, numeric) for row in cells]
            return Laid(lines[0], lines[1:], list(dropped))
    assert width is not None
    return Laid([], [_below_each_other(head, row, width) for row in rows], [])


def _widths(cells: Sequence[Sequence[str]], width: int | None) -> list[int] | None:
    """The widths of the columns. None where they do not fit, however they fold."""
    columns = list(zip(*cells, strict=True))
    widths = [max(map(width_of, column)) for column in columns]
    if width is None:
        return widths
    words = [max(_word_width(cell) for cell in column) for column in columns]
    room = width - len(GAP) * (len(columns) - 1)
    if sum(words) > room:
        return None
    while sum(widths) > room:
        # The widest of those that can fold.
        widest = max(
            range(len(widths)), key=lambda column: (widths[column] > words[column], widths[column])
        )
        widths[widest] -= 1
    return widths


def _word_width(text: str) -> int:
    return max(width_of(piece) for piece in _BREAK.split(text))


def _side_by_side(
    row: Sequence[str], widths: Sequence[int], is_number: Sequence[bool]
) -> list[str]:
    folded = [fold(cell, width) for cell, width in zip(row, widths, strict=True)]
    lines = []
    for number in range(max(map(len, folded), default=0)):
        parts = []
        for cell, width, to_the_right in zip(folded, widths, is_number, strict=True):
            text = cell[number] if number < len(cell) else ""
            padding = " " * (width - width_of(text))
            parts.append(padding + text if to_the_right else text + padding)
        lines.append(GAP.join(parts).rstrip())
    return lines


def _below_each_other(head: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    longest = max(map(width_of, head)) + len(GAP)
    lines = []
    for name, cell in zip(head, row, strict=True):
        lines += fold(f"{name.ljust(longest)}{cell}", width, hang=longest)
    return [*lines, ""]
