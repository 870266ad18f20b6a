"""The code of the README and the pages can be typed as it stands: it names what is there."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import symtable
from collections.abc import Iterator
from pathlib import Path

import pytest

import rayq
from tests.local.test_pages import PAGES, ROOT, Fence, fences

OF_THE_READER = {
    "README.md": {"handle"},
    "docs/consumer-pools.md": {"database", "parse", "price_of"},
    "docs/transactions.md": {"price_of"},
}
"""Names that stand for a reader's own code."""
EXTRAS = ("rayq.data", "rayq.spark")
NAME = re.compile(r"rayq(\.\w+)+")
PARTS = ("rayq.errors", "rayq.metrics", "rayq.testing")


def code_of(page: Path) -> list[Fence]:
    return [fence for fence in fences(page) if fence.language in ("py", "python")]


def tables(top: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield top
    for inner in top.get_children():
        yield from tables(inner)


def test_a_page_defines_what_its_code_uses() -> None:
    missing = []
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        known = {*dir(builtins), "__name__", "__file__", *OF_THE_READER.get(name, ())}
        for fence in code_of(page):
            top = symtable.symtable(fence.text, str(fence), "exec")
            here = {
                symbol.get_name()
                for symbol in top.get_symbols()
                if symbol.is_assigned() or symbol.is_imported()
            }
            used = {
                symbol.get_name()
                for table in tables(top)
                for symbol in table.get_symbols()
                if symbol.is_referenced() and (symbol.is_global() or table is top)
            }
            missing += [f"{fence}: {unknown}" for unknown in sorted(used - known - here)]
            known |= here
    assert missing == []


def test_what_pages_name_of_rayq_exists() -> None:
    for part in PARTS:
        importlib.import_module(part)
    for extra in EXTRAS:
        pytest.importorskip(extra)
    missing = []
    for page in PAGES:
        for fence in code_of(page):
            for node in ast.walk(ast.parse(fence.text)):
                if isinstance(node, ast.Attribute) and NAME.fullmatch(ast.unparse(node)):
                    found: object = rayq
                    for word in ast.unparse(node).split(".")[1:]:
                        found = getattr(found, word, None)
                    if found is None:
                        missing.append(f"{fence}: {ast.unparse(node)}")
                if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "rayq":
                    module = importlib.import_module(str(node.module))
                    missing += [
                        f"{fence}: from {node.module} import {name.name}"
                        for name in node.names
                        if not hasattr(module, name.name)
                    ]
    assert missing == []
