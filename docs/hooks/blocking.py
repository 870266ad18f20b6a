"""For mkdocstrings: the methods of `rayq.Admin`, which are made from those of `rayq.AsyncAdmin`.

The reference is made from the source without running it. There such a method is one line, `name =
_blocking(AsyncAdmin.name)`; in the reference it has the other's signature and documentation.
"""

from __future__ import annotations

from typing import Any

from griffe import Attribute, Class, ExprCall, Extension, Function


class Blocking(Extension):
    def on_class_members(self, *, cls: Class, **_: Any) -> None:
        for name, member in list(cls.members.items()):
            if not isinstance(member, Attribute) or not isinstance(member.value, ExprCall):
                continue
            if str(member.value.function) == "_blocking":
                kind, _, method = str(member.value.arguments[0]).rpartition(".")
                made_from = cls.parent.members[kind].members[method]
                shown = Function(
                    name,
                    lineno=member.lineno,
                    endlineno=member.endlineno,
                    parameters=made_from.parameters,
                    returns=made_from.returns,
                    docstring=made_from.docstring,
                )
                cls.set_member(name, shown)
