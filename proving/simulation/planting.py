"""The register of planted bugs, and how one is planted. `mutations` has the bugs.

A bug that replaces something which is not there cannot be planted, so no run takes correct code for
code with a bug.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

Patch = tuple[object, str, object]
"""`(object, attribute, the value that replaces it)`"""


@dataclass(frozen=True)
class Mutation:
    """A planted bug: the rule of the protocol that it breaks, how it breaks the rule, and the
    scenario whose seeds have to find it."""

    rule: str
    what: str
    patches: Callable[[], list[Patch]]
    scenario: str


MUTATIONS: dict[str, Mutation] = {}


def plants(
    rule: str, what: str, scenario: str = "ordinary"
) -> Callable[[Callable[[], list[Patch]]], Callable[[], list[Patch]]]:
    """Registers a function that returns the patches of a bug, under its name."""

    def note(patches: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
        MUTATIONS[patches.__name__] = Mutation(rule, what, patches, scenario)
        return patches

    return note


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Plants a bug for the length of a `with` block."""
    with contextlib.ExitStack() as stack:
        for target, attribute, instead in MUTATIONS[name].patches():
            stack.enter_context(mock.patch.object(target, attribute, instead))
        yield


def plant(name: str) -> None:
    """Plants a bug for the whole life of this process, which runs seeds for a hunt."""
    logging.getLogger("rayq").setLevel(logging.CRITICAL + 1)
    for target, attribute, instead in MUTATIONS[name].patches():
        mock.patch.object(target, attribute, instead).start()
