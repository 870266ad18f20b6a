"""Pages, help, messages and errors are in plain English, and docstrings begin with their subject."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.local.test_pages import PAGES, ROOT

OLD = re.compile(r"\b(anew|for\s+ever)\b")
"""Say "again", "forever"."""
QUESTION = re.compile(
    r"(What|Whatever|Which|How|Where|Whether|Who|Whom|Of|So|From|As|When|Since|Until"
    r"|Also|Else|It|Its|There|They|To)\b"
)
"""No noun phrase and no verb."""


def lines_with_old_words(text: str) -> list[int]:
    return [text.count("\n", 0, found.start()) + 1 for found in OLD.finditer(text)]


def test_pages_say_again_and_forever() -> None:
    pages = [*PAGES, *(ROOT / "deploy").iterdir()]
    found = {
        page.relative_to(ROOT).as_posix(): lines
        for page in pages
        if (lines := lines_with_old_words(page.read_text(encoding="utf-8")))
    }
    assert found == {}


def test_messages_and_help_say_again_and_forever() -> None:
    found = []
    for path in sorted((ROOT / "rayq").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        comments = {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        found += [
            f"{path.relative_to(ROOT)}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if node not in comments and OLD.search(node.value)
        ]
    assert found == []


def test_code_says_again_and_forever() -> None:
    old = re.compile(r"(?<![A-Za-z])(anew|for[\s_]+ever)(?![A-Za-z])")
    found = [
        path.relative_to(ROOT).as_posix()
        for folder in ("rayq", "proving", "benchmarks", "examples", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != Path(__file__)
        if old.search(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_docstrings_begin_with_a_noun_phrase_or_a_verb() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in ("rayq", "proving")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and QUESTION.match(node.value.value)
    ]
    assert found == []
