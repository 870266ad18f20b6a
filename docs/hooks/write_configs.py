"""Writes what repeats the configs, from the source: `make configs`.

These are the tables of docs/reference/configs.md and the types of keywords in
rayq/config/keywords.py.

Below a line `<!-- keys of ProducerConfig -->`, up to `<!-- end of keys -->`, stands a table of that
config's keys, each with an anchor of its own: `configs.md#producer.linger_ms`. The page has them as
text, so that it can be read in the repository, too; a test checks that they are as the source is.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import rayq
from rayq.config import Partitioner
from rayq.config.reference import KINDS, Key, keys

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/configs.md"
KEYWORDS = ROOT / "rayq/config/keywords.py"
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


# --- keywords -------------------------------------------------------------------------------------

_NAMED = ("value_serializer", "key_serializer", "value_deserializer", "key_deserializer")
_HEADING = '''"""Types of the `**config` keywords of public calls, for editors and type checkers.

`make configs` writes this file from the configs, which have each key's meaning, range and default.
Serializers and deserializers are named parameters of the calls.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Literal, TypedDict

from rayq.config import Partitioner
'''


def keywords() -> str:
    """The text of rayq/config/keywords.py."""
    return _HEADING + "".join(map(_typed_dict, KINDS))


def _typed_dict(kind: type) -> str:
    title = kind.__name__.removesuffix("Config")
    lines = [f"\n\nclass {title}Keywords(TypedDict, total=False):"]
    lines += [f'    """The keys of `{kind.__name__}`."""', ""]
    types = get_type_hints(kind).items()
    lines += [f"    {name}: {_type(found)}" for name, found in types if name not in _NAMED]
    return "\n".join(lines) + "\n"


def _type(found: Any) -> str:
    """A type as source code."""
    if found == Partitioner:
        return "Partitioner"
    arguments = get_args(found)
    if get_origin(found) in (Union, UnionType):
        return " | ".join(map(_type, arguments))
    if get_origin(found) is Literal:
        said = (f'"{value}"' if isinstance(value, str) else repr(value) for value in arguments)
        return f"Literal[{', '.join(said)}]"
    if arguments:
        return f"{get_origin(found).__name__}[{', '.join(map(_type, arguments))}]"
    return "None" if found is NoneType else str(found.__name__)


if __name__ == "__main__":
    KEYWORDS.write_text(keywords(), encoding="utf-8")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
