"""Group commit of a queue leader's decisions: all decisions since the last write go to the keeper
together, and every answer waits for the write that it depends on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rayq.actors.queues.journal import Journal
from rayq.core.queues.state import QueueState
from rayq.errors import RayqError

FULL_GIVEN = 16
"""Maximum number of records that a write may lock for a full keeper to take it: else its data about
records that nobody has would never shrink."""

LINGER_S = 0.01
"""Time that acknowledgements nobody waits for are held back after the end of the current write, to
be written with the locks of the next take: consumers then need one write for each take, not two,
and no take waits for a write that has only acknowledgements."""

Kept = asyncio.Future[None]


class QueueCommits:
    """See the module. `run` writes until an error ends it; all waiters get that error. `on_kept()`
    is called after each write."""

    def __init__(
        self, state: QueueState, journal: Journal, *, on_kept: Callable[[], None]
    ) -> None:
        self._state = state
        self._journal = journal
        self._on_kept = on_kept
        self._loop = asyncio.get_running_loop()
        self._current: Kept | None = None
        """Future of the current write."""
        self._next: Kept | None = None
        """Future of the next write, with all decisions since the current one began."""
        self._wanted: asyncio.Future[None] | None = None
        self._may_linger = False
        """True if the write of `_next` need not begin at once."""
        self._linger: asyncio.TimerHandle | None = None
        """Timer that starts it anyway."""
        self._error: RayqError | None = None
        self.kept_start = 0
        """Offset below which everything is durably settled."""

    def kept(self, *, may_linger: bool = False) -> Kept | None:
        """Returns a future that is done once all decisions so far are kept; None if they already
        are. Many callers share one. `may_linger`: the write need not begin at once. Raises the
        error that ended the writes."""
        if self._error is not None:
            raise self._error
        if self._next is None:
            if not self._state.is_changed:
                return self._current
            self._next = self._loop.create_future()
            self._may_linger = may_linger
            if not may_linger:
                self._write_now()
            elif self._current is None:
                self._linger_now()
        elif self._may_linger and not may_linger:
            self._write_now()
        return self._next

    def ask_for_room(self) -> None:
        """Asks a full keeper again, even if there is nothing to write."""
        if self._error is None and self._next is None:
            self._next = self._loop.create_future()
            self._write_now()

    def _linger_now(self) -> None:
        self._linger = self._loop.call_later(LINGER_S, self._write_now)

    def _write_now(self) -> None:
        self._may_linger = False
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        if self._wanted is not None and not self._wanted.done():
            self._wanted.set_result(None)

    async def until_kept(self) -> None:
        """Returns once all decisions so far are kept. Raises the error that ended the writes."""
        kept = self.kept()
        if kept is not None:
            await asyncio.shield(kept)

    async def run(self) -> None:
        """Writes, one at a time. Raises the permanent errors of the journal."""
        while True:
            if self._next is None or self._may_linger:
                if self._may_linger and self._linger is None:
                    self._linger_now()
                self._wanted = self._loop.create_future()
                await self._wanted
                # Decisions of this turn of the loop are written with it.
                await asyncio.sleep(0)
            self._current, self._next = self._next, None
            assert self._current is not None
            start_offset, gives_out = self._state.start_offset, self._state.given > FULL_GIVEN
            records = self._state.changes()
            if records or self._journal.is_full:
                await self._journal.write(records, gives_out=gives_out)
            self.kept_start = start_offset
            current, self._current = self._current, None
            current.set_result(None)
            self._on_kept()

    def end(self, error: RayqError) -> None:
        """Ends the writes: all waiters get the error."""
        self._error = error
        if self._linger is not None:
            self._linger.cancel()
        for kept in (self._current, self._next):
            if kept is not None and not kept.done():
                kept.set_exception(error)
                kept.exception()  # Perhaps nobody waits for it.
        self._current = self._next = None


def as_error(error: BaseException) -> RayqError:
    """The error with which a future of `kept` failed."""
    assert isinstance(error, RayqError)
    return error
