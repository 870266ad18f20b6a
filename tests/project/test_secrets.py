"""A class that carries the cluster's secret hides it from its repr, also the next such class."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import rayq

SOURCES = Path(str(rayq.__file__)).parent
ROOT = Path(__file__).resolve().parents[2]


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


def test_no_directory_of_a_broker_is_in_the_repository() -> None:
    """It holds the secret of a cluster, and a command that is tried in the clone makes one."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no clone")
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    found = [path for path in tracked if re.search(r"(^|/)(broker-\d+/|secret$|auth_token$)", path)]
    assert "README.md" in tracked and found == []
