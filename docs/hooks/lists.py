"""For mkdocs: lists that begin right below a paragraph, as on GitHub.

Python-Markdown, which mkdocs uses, takes such a list for a part of the paragraph.
"""

from __future__ import annotations

import re
from typing import Any

_ITEM = re.compile(r"([-*]|1\.) ")
_FENCE = re.compile(r" *(```+)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    lines: list[str] = []
    fence = ""
    for line in markdown.splitlines():
        mark = _FENCE.match(line)
        if mark and (not fence or mark[1] == fence):
            fence = "" if fence else mark[1]
        elif not fence and _ITEM.match(line) and lines and _is_text(lines[-1]):
            lines.append("")
        lines.append(line)
    return "\n".join(lines) + "\n"


def _is_text(line: str) -> bool:
    """Whether a line is one of a paragraph."""
    return bool(line) and not line.startswith((" ", "|", "#", "```")) and not _ITEM.match(line)
