"""Names that authorise: whoever has all of one acts as its owner.

The owner of a transactional id ends its transactions, a member commits and leaves under its member
id, a consumer of a queue settles under its holder name. Each draws its name at random, and sends it
only to the coordinator or leader that it asks. Answers, errors and logs have the beginning of it. A
holder name has the consumer's host and process in front, which are not secret: `host:pid/random`.
"""

from __future__ import annotations

SHOWN_MAX = 8
"""The number of characters that tell drawn names from each other."""
DRAWN_MIN = 16
"""The minimum length of a drawn part: a shorter one may be guessed, and is not taken for it."""


def shown_part(name: str) -> str:
    """The beginning of such a name: of a short one no more than half, but one character."""
    return name[: max(1, min(SHOWN_MAX, len(name) // 2))]


def shown_holder(holder: str) -> str:
    """A holder name with its host and process, and the beginning of what was drawn."""
    where, slash, drawn = holder.rpartition("/")
    return f"{where}{slash}{shown_part(drawn)}" if len(drawn) >= DRAWN_MIN else shown_part(holder)
