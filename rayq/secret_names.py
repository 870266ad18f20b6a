"""Names that authorise: whoever has all of one acts as its owner.

The owner of a transactional id ends its transactions, a member commits and leaves under its member
id, a consumer of a queue settles under its holder name. Each draws its name at random, and sends it
only to the coordinator or leader that it asks. Answers, errors and logs have the beginning of it.
"""

from __future__ import annotations

SHOWN_MAX = 8
"""So many characters tell drawn names from each other."""


def shown_part(name: str) -> str:
    """The beginning of such a name: of a short one no more than half, but one character."""
    return name[: max(1, min(SHOWN_MAX, len(name) // 2))]
