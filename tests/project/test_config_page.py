"""What repeats the configs is as the source is: their page, and the keywords that editors know."""

from __future__ import annotations

import runpy
from pathlib import Path

from rayq.config.reference import KINDS, keys

ROOT = Path(__file__).resolve().parents[2]


def test_the_keywords_for_editors_are_current() -> None:
    script = runpy.run_path(str(ROOT / "docs/hooks/write_configs.py"))
    written = script["KEYWORDS"].read_text(encoding="utf-8")
    assert written == script["keywords"](), "`make configs` writes it"


def test_the_page_of_every_config_is_current() -> None:
    script = runpy.run_path(str(ROOT / "docs/hooks/write_configs.py"))
    page = script["PAGE"].read_text(encoding="utf-8")
    assert page == script["written"](page), "`make configs` writes it"
    lines = page.splitlines()
    for kind in KINDS:
        section = kind.__name__.removesuffix("Config").lower()
        for key in keys(kind):
            row = f'| <a id="{section}.{key.name}" href="#{section}.{key.name}"><code>{key.name}</code>'
            assert sum(line.startswith(row) for line in lines) == 1, key.name
