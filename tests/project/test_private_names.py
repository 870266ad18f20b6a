"""What proves the servers reads their private names in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from proving.mutants.catalogue import ROOT

VIEW = "proving/simulation/server_view.py"
PATCHES = ("proving/simulation/mutations*.py", "proving/simulation/situations.py")
"""They stand for the code that they replace, and a test plants each: see test_planted_bugs."""
PUBLIC = {"_asdict", "_exit", "_replace"}
"""Names that are documented."""
OF_ASYNCIO = {
    *("_args", "_callback", "_cancelled", "_context", "_scheduled"),
    *("_get_running_loop", "_set_running_loop", "_log_destroy_pending"),
}
"""Names that an event loop of one's own needs."""


def test_only_the_view_reads_private_names_of_others() -> None:
    found = []
    for path in sorted((ROOT / "proving").rglob("*.py")):
        name = path.relative_to(ROOT)
        if name.as_posix() != VIEW and not any(name.match(pattern) for pattern in PATCHES):
            reads = private_reads(ast.parse(path.read_text()), is_in_class=False)
            found += [f"{name}:{node.lineno}: {ast.unparse(node)}" for node in reads]
    assert found == [], f"Read it by a function of {VIEW}."


@pytest.mark.parametrize(
    "source, count",
    [
        ("replica._log._segments", 2),
        ("class A:\n    def f(self):\n        return self._a._b, A._c", 2),
        ("class A:\n    def f(self):\n        def g():\n            return self._a", 0),
        ("def f(self):\n    return self._a", 1),
        ("found._replace(a=1), self.__class__, super()._f", 0),
    ],
)
def test_each_private_read_counts(source: str, count: int) -> None:
    assert len(list(private_reads(ast.parse(source), is_in_class=False))) == count


def private_reads(node: ast.AST, *, is_in_class: bool) -> Iterator[ast.Attribute]:
    """The private names of other objects that code reads, or sets."""
    is_in_class = is_in_class or isinstance(node, ast.ClassDef)
    if (
        isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in PUBLIC | OF_ASYNCIO
    ):
        match node.value:
            case ast.Name(id="self" | "cls") if is_in_class:
                pass
            case ast.Call(func=ast.Name(id="super")):
                pass
            case _:
                yield node
    for child in ast.iter_child_nodes(node):
        yield from private_reads(child, is_in_class=is_in_class)
