"""The documentation site: `make docs` builds it, its links hold, and it loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import rayq
from rayq import errors
from rayq.config.reference import KINDS, keys

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[2]
LOADED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}
"""The requests that a browser makes by itself, by the tag and the attribute that names the URL."""


class Built(HTMLParser):
    """One page of the site: the files that it loads, its links, and the places that links may
    name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("id"):
            self.ids.add(str(given["id"]))
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))
        if tag in LOADED and given.get(LOADED[tag]):
            self.loads.append(str(given[LOADED[tag]]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="The site needs the extra: pip install -e '.[docs]'")
    out = tmp_path_factory.mktemp("site")
    mkdocs = Path(sys.executable).with_name("mkdocs")
    ran = subprocess.run(
        [mkdocs, "build", "--strict", "--site-dir", out],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "WARNING" not in ran.stderr, ran.stderr
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Built]:
    # 404.html is for servers: its links begin at their root.
    return {path: Built(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_link_and_anchor_holds(pages: dict[Path, Built]) -> None:
    broken = []
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].ids):
                broken.append(f"{path.name}: {link}")
    assert sorted(set(broken)) == []


def test_the_rules_have_the_numbers_that_code_cites_them_by(site: Path) -> None:
    sections = (ROOT / "docs/protocol.md").read_text(encoding="utf-8").split("\n## ")
    firsts = [found[1] for one in sections if (found := re.search(r"^(\d+)\. ", one, re.MULTILINE))]
    built = (site / "protocol.html").read_text(encoding="utf-8")
    assert firsts[0] == "1" and re.findall(r'<ol start="(\d+)">', built) == firsts[1:]


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Built], site: Path) -> None:
    elsewhere = [
        f"{path.name}: {source}"
        for path, page in pages.items()
        for source in page.loads
        if urlsplit(source).netloc
    ]
    assert elsewhere == []
    for style in site.rglob("*.css"):
        assert "url(http" not in style.read_text(encoding="utf-8"), style


def test_every_public_name_and_every_config_is_in_the_reference(pages: dict[Path, Built]) -> None:
    from rayq import data, spark, testing  # slow to import

    anchors = {path.name: page.ids for path, page in pages.items() if path.parent.name == "reference"}
    configs = {kind.__name__: kind for kind in KINDS}
    documented = {anchor.rpartition(".")[2] for found in anchors.values() for anchor in found}
    names = {name for face in (rayq, testing, data, spark) for name in face.__all__}
    kinds = {name: kind for name, kind in vars(errors).items() if name.endswith("Error")}
    inside = {name for name, kind in kinds.items() if issubclass(kind, errors.InternalError)}
    names |= kinds.keys() - inside
    assert not inside & documented
    assert names - documented - set(configs) == {"__version__"}
    for name, kind in configs.items():
        section = name.removesuffix("Config").lower()
        assert {f"{section}.{key.name}" for key in keys(kind)} <= anchors["configs.html"]
