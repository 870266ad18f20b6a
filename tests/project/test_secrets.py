"""A class that carries the cluster's secret hides it from its repr, also the next such class."""

from __future__ import annotations

import ast
from pathlib import Path

import rayq

SOURCES = Path(str(rayq.__file__)).parent


def test_every_class_with_a_secret_hides_it() -> None:
    found, shown = set(), []
    for path in SOURCES.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for one in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            fields = [
                field
                for field in one.body
                if isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and field.target.id in ("secret", "token")
            ]
            for field in fields:
                found.add(one.name)
                is_hidden = "HasSecret" in map(ast.unparse, one.bases)
                if not is_hidden and "repr=False" not in ast.unparse(field):
                    shown.append(f"{path}: {one.name}")
    assert {"ClusterSpec", "Current"} <= found
    assert not shown, "these show a secret in their repr: derive them from HasSecret"
