"""For mkdocs: draws the ```mermaid blocks of pages, by a script that the site has itself.

`make docs` fetches the script where there is npm. Without it a block is shown as text: the theme
would load the script from elsewhere.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url
from pymdownx.superfences import fence_code_format

SCRIPT = Path(__file__).resolve().parents[2] / ".mermaid/package/dist/mermaid.min.js"
_URI = "assets/mermaid.min.js"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    if SCRIPT.is_file():
        fence = {"name": "mermaid", "class": "mermaid", "format": fence_code_format}
        config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    if SCRIPT.is_file():
        files.append(File.generated(config, _URI, abs_src_path=str(SCRIPT)))
    return files


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Adds the script to the pages with diagrams only: it has 3.5 MB."""
    if '<pre class="mermaid">' not in output:
        return output
    script = f'<script src="{get_relative_url(_URI, page.url)}"></script>'
    return output.replace("</head>", f"{script}</head>", 1)
