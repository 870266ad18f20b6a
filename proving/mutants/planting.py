"""Puts a mutant into code that is imported already: no module and no test is then imported again
for each mutant."""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType

from proving.mutants.catalogue import Mutant


def plant(mutant: Mutant, tree: ast.Module) -> bool:
    """Gives the function with the mutant the code that it has in this tree, wherever the function
    is known. False where that is not enough, and nothing is changed: its defaults differ, or what
    it closes over, or the mutant is outside of functions."""
    if not mutant.is_in_function:
        return False
    path = inspect.getsourcefile(importlib.import_module(mutant.module))
    assert path is not None
    new_codes = {
        _place(code): code
        for code in _outer_functions(compile(tree, path, "exec", dont_inherit=True))
    }
    outer = mutant.function.split(".")
    is_planted = False
    for function in gc.get_objects():
        if type(function) is not FunctionType or function.__code__.co_filename != path:
            continue
        before = function.__code__
        if outer[: before.co_qualname.count(".") + 1] != before.co_qualname.split("."):
            continue
        after = new_codes.get(_place(before))
        if after is None or after == before or after.co_freevars != before.co_freevars:
            continue
        function.__code__ = after
        is_planted = True
    return is_planted


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _outer_functions(code: CodeType) -> Iterator[CodeType]:
    """The functions of a module and of its classes, without those inside of functions."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & inspect.CO_OPTIMIZED:
                yield constant
            else:
                yield from _outer_functions(constant)
