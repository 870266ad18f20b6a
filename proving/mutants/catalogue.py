"""All mutants of a module: where an operator applies, under a key that survives line moves.

A key names the file, the function, the operator, and the code before and after the change; equal
mutants of a function are numbered. So a verdict stays with its mutant while that code stays.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from proving.mutants.operators import OPERATORS, Replacement

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("rayq/core", "rayq/actors", "rayq/storage", "rayq/wire")
NOT_MUTATED = ("__main__.py", "controller/metrics.py", "replica/replica_metrics.py")
"""Ends of the paths of files that no promise depends on."""

TOLD_ONLY = ("logger", "metrics", "_metrics", "log_event")
"""A statement that calls one of these functions or objects only reports what happens."""


@dataclass(frozen=True)
class Mutant:
    """`path` is relative to the root. `function` is the qualified name in it, or `<module>` or
    `NAME.<class>` for code outside of functions. `line` counts from 1."""

    path: str
    function: str
    operator: str
    line: int
    before: str
    after: str
    count: int
    """The number of equal mutants before this one in the function."""

    @property
    def key(self) -> str:
        count = f" #{self.count + 1}" if self.count else ""
        return (
            f"{self.path}:{self.function}: {self.operator}: {self.before} => {self.after}{count}"
        )

    @property
    def is_in_function(self) -> bool:
        """False for code that runs when its module is imported."""
        return not self.function.endswith(">")

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".")


@dataclass(frozen=True)
class _Site:
    """A node, and its place in the tree."""

    parent: ast.AST
    field: str
    place: int | None
    node: ast.AST
    function: str

    def put(self, replacement: Replacement) -> None:
        if self.place is None:
            setattr(self.parent, self.field, replacement)
        elif isinstance(replacement, list):
            getattr(self.parent, self.field)[self.place : self.place + 1] = replacement
        else:
            getattr(self.parent, self.field)[self.place] = replacement


def files(modules: Iterable[str], root: Path = ROOT) -> list[str]:
    """The files of folders, files or dotted modules, relative to the root. Raises ValueError for a
    name that is none of these."""
    found: set[str] = set()
    for name in modules:
        path = root / (name if "/" in name or name.endswith(".py") else name.replace(".", "/"))
        if path.is_dir():
            paths = sorted(path.rglob("*.py"))
        else:
            paths = [path if path.suffix == ".py" else path.with_suffix(".py")]
        for path in paths:
            if not path.is_file():
                raise ValueError(f"There is no module {name} in {root}.")
            if not any(path.match(name) for name in NOT_MUTATED):
                found.add(str(path.relative_to(root)))
    return sorted(found)


def mutants_of(path: str, source: str) -> list[Mutant]:
    return [mutant for mutant, _, _ in _mutations(path, ast.parse(source))]


def mutated(mutant: Mutant, source: str) -> ast.Module:
    """The tree with the mutant in it. Raises LookupError when the source has changed since."""
    tree = ast.parse(source)
    for found, site, replacement in _mutations(mutant.path, tree):
        if found.key == mutant.key:
            site.put(replacement)
            _place(replacement, site.node)
            return ast.fix_missing_locations(tree)
    raise LookupError(f"{mutant.path} has no mutant {mutant.key} any more.")


def sample(mutants: Iterable[Mutant], size: int | None, seed: int) -> list[Mutant]:
    """Some of the mutants, in the order in which they are judged. A larger sample of the same seed
    begins with the smaller one. A change elsewhere in the code adds or removes no mutants but its
    own."""

    def order(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{seed} {mutant.key}".encode()).digest()

    return sorted(mutants, key=order)[:size]


def _mutations(
    path: str, tree: ast.Module
) -> Iterator[tuple[Mutant, _Site, Replacement]]:
    counts: Counter[tuple[str, ...]] = Counter()
    for site in _sites(tree, "<module>"):
        for name, operator in OPERATORS.items():
            for replacement in operator(site.node):
                before, after = _shown(site.node), _shown(replacement)
                what = (site.function, name, before, after)
                line = getattr(site.node, "lineno", 0)
                yield (
                    Mutant(path, site.function, name, line, before, after, counts[what]),
                    site,
                    replacement,
                )
                counts[what] += 1


def _sites(node: ast.AST, function: str) -> Iterator[_Site]:
    """All code below a node that may be mutated: not code that only reports, checks types or makes
    errors."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        if field == "keywords" and isinstance(node, ast.ClassDef):
            continue
        children = enumerate(value) if isinstance(value, list) else [(None, value)]
        for place, child in children:
            if isinstance(child, ast.AST) and not _is_left_alone(child, node):
                yield _Site(node, field, place, child, function)
                if not isinstance(child, ast.Raise):
                    yield from _sites(child, name_inside(function, child))


def name_inside(function: str, node: ast.AST) -> str:
    """The name of the function that the code of a node belongs to, where the node stands in
    another one."""
    outer = "" if function == "<module>" else function.removesuffix(".<class>") + "."
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return outer + name
        case ast.ClassDef(name=name):
            return f"{outer}{name}.<class>"
    return function


def _is_left_alone(node: ast.AST, parent: ast.AST) -> bool:
    match node:
        case ast.Return(value=None | ast.Constant(value=None)):
            # A function does the same without this last statement.
            return (
                isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef)
                and node is parent.body[-1]
            )
        case ast.Import() | ast.ImportFrom() | ast.Assert() | ast.JoinedStr():
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.FunctionDef(name="__repr__" | "__str__"):
            return True
        case ast.Expr(value=ast.Constant()):
            return True  # A docstring.
        case ast.Expr(value=ast.Call(func=function)):
            return any(name in TOLD_ONLY for name in ast.unparse(function).split("."))
        case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__")]):
            return True
    return False


def _shown(code: ast.AST | list[ast.stmt]) -> str:
    """One line of code; for a compound statement its head."""
    first = code[0] if isinstance(code, list) else code
    return " ".join(ast.unparse(first).strip().split("\n", 1)[0].split())


def _place(replacement: Replacement, node: ast.AST) -> None:
    """Gives new nodes the line numbers of the node that they replace, for tracebacks."""
    for statement in replacement if isinstance(replacement, list) else [replacement]:
        if not hasattr(statement, "lineno"):
            ast.copy_location(statement, node)
