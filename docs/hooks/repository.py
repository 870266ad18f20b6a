"""For mkdocs: what stands outside of docs/ and belongs to the site.

README.md is its home. Links lead where they lead on GitHub, also to files of the repository, of
which the site has copies below files/.
"""

from __future__ import annotations

import posixpath
import re
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


def files_of(directory: str) -> list[Path]:
    return sorted(path for path in (ROOT / directory).iterdir() if path.is_file())


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    copied = [ROOT / "cluster.yaml", ROOT / "Dockerfile"]
    for directory, page in DIRECTORIES.items():
        copied += files_of(directory)
        files.append(File.generated(config, page, content=_shown(directory)))
    for path in copied:
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, f"files/{name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    name_of = {uri: name for name, uri in PAGES.items()}
    directory = posixpath.dirname(name_of.get(here, f"docs/{here}"))

    def lead(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(directory, link[1]))
        if target.startswith("docs/"):
            uri = target.removeprefix("docs/")
        elif here in DIRECTORIES.values():
            return link[1]
        else:
            uri = (PAGES | DIRECTORIES).get(target) or f"files/{target}"
        return posixpath.relpath(uri, posixpath.dirname(here) or ".")

    return _LINK.sub(lead, markdown)


def _shown(directory: str) -> str:
    """A page with all files of a directory."""
    parts = [f"# {directory.capitalize()}"]
    for path in files_of(directory):
        parts.append(f"## {path.name}")
        parts.append(f"[{directory}/{path.name}](files/{directory}/{path.name})")
        if path.suffix in SHOWN:
            parts.append(f"````{SHOWN[path.suffix]}\n{path.read_text()}````")
    return "\n\n".join(parts) + "\n"
