"""The register of planted bugs, which each module of them fills as it is imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from proving.simulation.patches import Patch


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
