"""For mkdocs: what stands outside of docs/ and belongs to the site.

README.md is its home. Peers lead where they lead on GitHub, also to files of the repository, of
which the site has copies below files/.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]

PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Files of the repository that are pages of the site."""
DIRECTORIES = {"examples": "examples.md", "deploy": "deploy.md"}
"""Directories, and the page that shows what is in each."""
SHOWN = {".py": "python", ".yaml": "yaml"}
"""By their ending, the files whose text their directory's page shows, and its language."""

_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")
"""Where a Markdown link leads, if not to another site or a place on the same page."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    needed = {name for page in files.documentation_pages() for name in _needs(page)}
    for directory, page in DIRECTORIES.items():
        needed |= {f"{directory}/{path.name}" for path in _files_of(directory)}
        files.append(File.generated(config, page, content=_shown(directory)))
    for name in sorted(needed):
        files.append(File.generated(config, f"files/{name}", abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri in DIRECTORIES.values():
        return markdown
    here = posixpath.dirname(page.file.src_uri) or "."

    def lead(link: re.Match[str]) -> str:
        target = _target(page.file, link[1])
        if target.startswith("docs/"):
            uri = target.removeprefix("docs/")
        else:
            uri = (PAGES | DIRECTORIES).get(target) or f"files/{target}"
        return posixpath.relpath(uri, here)

    return _LINK.sub(lead, markdown)


def _target(page: File, link: str) -> str:
    """Where in the repository a link of a page leads."""
    names = {uri: name for name, uri in PAGES.items()}
    source = names.get(page.src_uri, f"docs/{page.src_uri}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _needs(page: File) -> Iterator[str]:
    """The files outside of docs/ that a page links to and that are not pages."""
    for link in _LINK.finditer(page.content_string):
        target = _target(page, link[1])
        outside = not target.startswith("docs/") and target not in PAGES
        if outside and (ROOT / target).is_file():
            yield target


def _files_of(directory: str) -> list[Path]:
    return sorted(path for path in (ROOT / directory).iterdir() if path.is_file())


def _shown(directory: str) -> str:
    """A page with all files of a directory."""
    parts = [f"# {directory.capitalize()}"]
    for path in _files_of(directory):
        parts.append(f"## {path.name}")
        parts.append(f"[{directory}/{path.name}](files/{directory}/{path.name})")
        if path.suffix in SHOWN:
            parts.append(f"````{SHOWN[path.suffix]}\n{path.read_text()}````")
    return "\n\n".join(parts) + "\n"
