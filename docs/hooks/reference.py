"""For mkdocstrings, which makes the reference from the source without running it: what it cannot
see there."""

from __future__ import annotations

from typing import Any

from griffe import Attribute, Class, ExprCall, Extension, Function, Module


class Blocking(Extension):
    """The methods of `rayq.Admin`: each is a line `name = _blocking(AsyncAdmin.name)`, and is shown
    with the signature and documentation of the other, which the classes of its subjects have."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        if pkg.path != "rayq":
            return
        module = pkg["client.admin.admin"]
        admin, coroutines = module["Admin"], module["AsyncAdmin"]
        for name, member in list(admin.members.items()):
            if not isinstance(member, Attribute) or not isinstance(member.value, ExprCall):
                continue
            if str(member.value.function) == "_blocking":
                method = str(member.value.arguments[0]).rpartition(".")[2]
                made_from = coroutines.all_members[method]
                shown = Function(
                    name,
                    lineno=member.lineno,
                    endlineno=member.endlineno,
                    parameters=made_from.parameters,
                    returns=made_from.returns,
                    docstring=made_from.docstring,
                )
                admin.set_member(name, shown)


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
