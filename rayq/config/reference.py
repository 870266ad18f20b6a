"""Reference of the config keys as text: each key's docstring, type, default and range.

`rayq.ProducerConfig` and its like come from here, with all of that in their docstrings, so that
`help(rayq.ProducerConfig)` shows it; the documentation's tables are made of it, too. A program
that only uses a config does not pay for that.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from typing import NamedTuple

from rayq.config import (
    Bounds,
    ClusterConfig,
    ConsumerConfig,
    PoolConfig,
    ProducerConfig,
    QueueConfig,
    TopicConfig,
    described,
    range_of,
    types_of,
)

KINDS = (TopicConfig, ClusterConfig, ProducerConfig, ConsumerConfig, PoolConfig, QueueConfig)


class Key(NamedTuple):
    name: str
    takes: str
    """The type."""
    default: str
    range: str
    """Empty where every value of the type will do."""
    meaning: str


def keys(kind: type) -> list[Key]:
    """All keys of a config, in their order. Raises OSError where rayq's source is not at hand."""
    meanings = _meanings(kind)
    types = types_of(kind)
    found = []
    for field in dataclasses.fields(kind):
        allowed = range_of(types[field.name])
        found.append(
            Key(
                name=field.name,
                takes=described(types[field.name]),
                default=_said(field.default, allowed),
                range="" if allowed is None else str(allowed),
                meaning=meanings.get(field.name, ""),
            )
        )
    return found


def _said(value: object, allowed: Bounds | None) -> str:
    if allowed is not None and isinstance(value, int | float):
        return allowed.said(value)
    return repr(value)


def _meanings(kind: type) -> dict[str, str]:
    """The string below each field of a class, which Python does not keep."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str() as meaning)),
            ):
                found[name] = " ".join(meaning.split())
    return found


def _document(kind: type) -> None:
    """Puts all keys into the docstring."""
    try:
        found = keys(kind)
    except OSError:
        return
    parts = [kind.__doc__ or ""]
    for key in found:
        allowed = f"; {key.range}" if key.range else ""
        about = f"{key.takes}, {key.default} by default{allowed}"
        meaning = textwrap.fill(key.meaning, 92, initial_indent="    ", subsequent_indent="    ")
        parts.append(f"{key.name}: {about}\n{meaning}")
    kind.__doc__ = "\n\n".join(parts)


for _kind in KINDS:
    _document(_kind)
