"""Repetitions of a client are within its budget, whatever part of it makes them (docs/protocol.md,
rule 5)."""

from __future__ import annotations

import ast
from pathlib import Path

import rayq.client

CLIENT = Path(rayq.client.__file__).parent


def test_each_backoff_of_a_client_comes_from_the_client_that_has_the_budget() -> None:
    made = [
        path.relative_to(CLIENT).as_posix()
        for path in sorted(CLIENT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Backoff"
    ]
    assert made == ["broker_client.py"]
