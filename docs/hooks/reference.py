"""For mkdocstrings, which makes the reference from the source without running it: what it cannot
see there."""

from __future__ import annotations

from typing import Any

from griffe import Attribute, Class, ExprCall, Extension, Function, Module


class Blocking(Extension):
    """The methods of `rayq.Admin`: each is a line `name = _blocking(AsyncAdmin.name)`, and is shown
    with the signature and documentation of the other."""

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


class InternalErrors(Extension):
    """Errors that no public call raises are left out."""

    def on_module_members(self, *, mod: Module, **_: Any) -> None:
        if mod.path == "rayq.errors":
            internal = {"InternalError"}
            for name, member in list(mod.members.items()):
                if isinstance(member, Class) and not internal.isdisjoint(
                    {name, *map(str, member.bases)}
                ):
                    internal.add(name)  # what derives from it comes later
                    mod.del_member(name)
