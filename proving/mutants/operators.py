"""The changes that make mutants: each operator looks at one node of a syntax tree and yields the
code that could stand there instead, one small mistake each.

An operator yields new nodes, which may hold parts of the node that it was shown. It never changes
that node.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

Replacement = ast.expr | list[ast.stmt]
"""An expression in place of an expression; statements in place of one statement."""

Operator = Callable[[ast.AST], Iterator[Replacement]]

BOUNDS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
NEGATIONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OTHER_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


def bound_off_by_one(node: ast.AST) -> Iterator[Replacement]:
    """`a < b` becomes `a <= b`, and so on."""
    yield from _with_other_comparison(node, BOUNDS)


def comparison_negated(node: ast.AST) -> Iterator[Replacement]:
    yield from _with_other_comparison(node, NEGATIONS)


def condition_fixed(node: ast.AST) -> Iterator[Replacement]:
    """`if a` becomes `if True` and `if False`. A loop only ends sooner: none runs forever."""
    match node:
        case ast.If(test=test, body=body, orelse=orelse):
            if not isinstance(test, ast.Constant):
                yield [ast.If(ast.Constant(True), body, orelse)]
                yield [ast.If(ast.Constant(False), body, orelse)]
        case ast.IfExp(body=body, orelse=orelse):
            yield body
            yield orelse
        case ast.While(test=test, body=body, orelse=orelse):
            if not isinstance(test, ast.Constant):
                yield [ast.While(ast.Constant(False), body, orelse)]
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            for place, generator in enumerate(node.generators):
                for left_out in range(len(generator.ifs)):
                    changed = copy.copy(node)
                    changed.generators = list(node.generators)
                    changed.generators[place] = ast.comprehension(
                        generator.target,
                        generator.iter,
                        _without(generator.ifs, left_out),
                        generator.is_async,
                    )
                    yield changed


def operand_dropped(node: ast.AST) -> Iterator[Replacement]:
    """`a and b` becomes `a`, and `b`."""
    if isinstance(node, ast.BoolOp):
        for left_out in range(len(node.values)):
            left = _without(node.values, left_out)
            yield left[0] if len(left) == 1 else ast.BoolOp(node.op, left)


def negation_dropped(node: ast.AST) -> Iterator[Replacement]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand


def statement_dropped(node: ast.AST) -> Iterator[Replacement]:
    """Leaves out a call (awaited or not), an assignment to what outlives the function, or a jump.

    Local names stay assigned: without them any run of the function ends with a NameError."""
    match node:
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield [ast.Pass()]
        case ast.Assign(targets=targets) if all(map(_outlives, targets)):
            yield [ast.Pass()]
        case ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break() | ast.Delete():
            yield [ast.Pass()]
        case ast.Return(value=None | ast.Constant(value=None)):
            yield [ast.Pass()]


def lock_left_out(node: ast.AST) -> Iterator[Replacement]:
    """The body of a `with` whose value has no name runs without it."""
    match node:
        case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
            if all(item.optional_vars is None for item in items):
                yield body


def arguments_swapped(node: ast.AST) -> Iterator[Replacement]:
    """Two neighbouring arguments change places."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) in ("min", "max"):
        return
    for place in range(len(node.args) - 1):
        left, other = node.args[place : place + 2]
        if isinstance(left, ast.Starred) or isinstance(other, ast.Starred):
            continue
        if ast.dump(left) != ast.dump(other):
            swapped = [*node.args[:place], other, left, *node.args[place + 2 :]]
            yield ast.Call(node.func, swapped, node.keywords)


def field_not_carried(node: ast.AST) -> Iterator[Replacement]:
    """A field that `replace` or a constructor is given keeps its old value, or its default."""
    if isinstance(node, ast.Call) and _makes_a_value(node.func):
        for place, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                yield ast.Call(node.func, node.args, _without(node.keywords, place))


def number_changed(node: ast.AST) -> Iterator[Replacement]:
    """A number grows by one; True becomes False."""
    match node:
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)


def sum_turned(node: ast.AST) -> Iterator[Replacement]:
    """`a + b` becomes `a - b`; `min` becomes `max`, `any` becomes `all`."""
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            if not any(
                isinstance(operand, ast.Constant | ast.JoinedStr) for operand in (left, right)
            ):
                yield ast.BinOp(left, ast.Sub(), right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            yield ast.BinOp(left, ast.Add(), right)
        case ast.Call(func=ast.Name(id=name)) if name in OTHER_NAMES:
            yield ast.Call(ast.Name(OTHER_NAMES[name], ast.Load()), node.args, node.keywords)


OPERATORS: dict[str, Operator] = {
    operator.__name__: operator
    for operator in (
        bound_off_by_one,
        comparison_negated,
        condition_fixed,
        operand_dropped,
        negation_dropped,
        statement_dropped,
        lock_left_out,
        arguments_swapped,
        field_not_carried,
        number_changed,
        sum_turned,
    )
}


def _with_other_comparison(
    node: ast.AST, others: dict[type[ast.cmpop], type[ast.cmpop]]
) -> Iterator[Replacement]:
    if isinstance(node, ast.Compare):
        for place, comparison in enumerate(node.ops):
            other = others.get(type(comparison))
            if other is not None:
                ops = [*node.ops[:place], other(), *node.ops[place + 1 :]]
                yield ast.Compare(node.left, ops, node.comparators)


def _without(values: list[T], place: int) -> list[T]:
    return values[:place] + values[place + 1 :]


def _outlives(target: ast.expr) -> bool:
    return isinstance(target, ast.Attribute | ast.Subscript)


def _makes_a_value(function: ast.expr) -> bool:
    name = ast.unparse(function).rpartition(".")[2]
    return name == "replace" or name[:1].isupper()
