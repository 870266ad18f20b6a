"""Writes the tables of docs/reference/configs.md, from the source: `make configs`.

Below a line `<!-- keys of ProducerConfig -->`, up to `<!-- end of keys -->`, stands a table of that
config's keys, each with an anchor of its own: `configs.md#producer.linger_ms`. The page has them as
text, so that it can be read in the repository, too; a test checks that they are as the source is.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

import rayq
from rayq.config.reference import Key, keys

PAGE = Path(__file__).resolve().parents[1] / "reference/configs.md"
_END = "<!-- end of keys -->"
_PLACE = re.compile(rf"^<!-- keys of (\w+) -->\n.*?^{_END}$", re.MULTILINE | re.DOTALL)
_HEAD = "| key | type | default | range | meaning |\n|---|---|---|---|---|\n"


def written(page: str) -> str:
    """The page with its tables as the source has them."""
    return _PLACE.sub(
        lambda place: f"<!-- keys of {place[1]} -->\n\n{_table(place[1])}\n{_END}", page
    )


def _table(name: str) -> str:
    section = name.removesuffix("Config").lower()
    return _HEAD + "".join(_row(section, key) for key in keys(getattr(rayq, name)))


def _row(section: str, key: Key) -> str:
    place = f"{section}.{key.name}"
    anchor = f'<a id="{place}" href="#{place}"><code>{key.name}</code></a>'
    meaning = html.escape(key.meaning, quote=False).replace("|", "\\|")
    cells = (anchor, f"`{key.takes}`", f"`{key.default}`", key.range or "-", meaning)
    return "| " + " | ".join(cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
