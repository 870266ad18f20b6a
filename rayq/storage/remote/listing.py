"""Lists of objects, page by page, as far as what the other side says can be true.

Where a list ends is for the store to say, and what it names is deleted, adopted or restored. So
names go up strictly, from behind where the page before ended, and begin with what was asked for:
a store that begins again at each page would be asked forever.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from rayq.errors import RemoteListError

LISTED_MAX = 10_000_000
"""No list of rayq's is so long. A page alone has 1,000 names at most."""
_SHOWN_CHARACTERS_MAX = 200

Listed = TypeVar("Listed", bound=tuple[str, int, int])
"""`(name, bytes, last modified in ms)`."""


def check_page(page: Sequence[tuple[str, int, int]], prefix: str, after: str, store: str) -> None:
    """Raises RemoteListError for a page that cannot be the answer to "the names that begin with
    `prefix` and come after `after`"."""
    last = after
    for name, _, _ in page:
        problem = None
        if not name.startswith(prefix):
            problem = "is not one of them"
        elif name <= last:
            problem = f"does not come after {last!r}"
        if problem is not None:
            raise RemoteListError(
                f"{store} was asked for the names that begin with {prefix!r} and come after "
                f"{after!r}, and listed {name[:_SHOWN_CHARACTERS_MAX]!r}, which {problem}. Its "
                "lists cannot be used, and nothing is deleted by them: is it a store that ignores "
                "where a list is to begin (`start-after`)?"
            )
        last = name


async def pages(
    list_page: Callable[[str], Awaitable[Sequence[Listed]]], prefix: str, store: str
) -> AsyncIterator[Sequence[Listed]]:
    """All names below `prefix`: `list_page(after)` asks `store` for a page, and an empty one is the
    end. Raises what it raises, and RemoteListError."""
    after, count = "", 0
    while page := await list_page(after):
        check_page(page, prefix, after, store)
        count += len(page)
        if count > LISTED_MAX:
            raise RemoteListError(
                f"{store} has listed {count} names below {prefix!r}, and continues: that cannot be."
            )
        yield page
        after = page[-1][0]
