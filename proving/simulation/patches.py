"""Patches of the code under test, which end with a `with` block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from unittest import mock

Patch = tuple[object, str, object]
"""`(object, attribute, the value that replaces it)`"""


@contextlib.contextmanager
def applied(patches: Iterable[Patch]) -> Iterator[None]:
    """Applies patches for the length of a `with` block. They are drawn one after the other, so a
    later one may wrap what an earlier one has put there."""
    with contextlib.ExitStack() as stack:
        for target, attribute, instead in patches:
            stack.enter_context(mock.patch.object(target, attribute, instead))
        yield
