"""For mkdocs: the tables of docs/reference/configs.md, made from the source.

A line `<!-- keys of ProducerConfig -->` becomes a table of that config's keys, each with an anchor
of its own: `configs.md#producer.linger_ms`.
"""

from __future__ import annotations

import html
import re
from typing import Any

import rayq
from rayq.config_reference import Key, keys

_PLACE = re.compile(r"^<!-- keys of (\w+) -->$", re.MULTILINE)
_HEAD = "| key | type | default | range | meaning |\n|---|---|---|---|---|\n"


def on_page_markdown(markdown: str, **_: Any) -> str:
    return _PLACE.sub(lambda place: _table(place[1]), markdown)


def _table(name: str) -> str:
    section = name.removesuffix("Config").lower()
    return _HEAD + "".join(_row(section, key) for key in keys(getattr(rayq, name)))


def _row(section: str, key: Key) -> str:
    place = f"{section}.{key.name}"
    anchor = f'<a id="{place}" href="#{place}"><code>{key.name}</code></a>'
    meaning = html.escape(key.meaning, quote=False).replace("|", "\\|")
    cells = (anchor, f"`{key.takes}`", f"`{key.default}`", key.range or "-", meaning)
    return "| " + " | ".join(cells) + " |\n"
