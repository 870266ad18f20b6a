"""Persistence of a queue leader's decisions by the queue state coordinator: the leader of one
partition of `__queue_state`.

`GroupCommit` collects the decisions. All since the last write go to the coordinator together, and
every answer waits for the write that it depends on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from rayq import messages
from rayq.actors.peers import Build, Peers
from rayq.backoff import Backoff
from rayq.core.queues.queue_states import KeptRecord, parts_of, unpack
from rayq.core.queues.state import QueueState
from rayq.environment import Environment
from rayq.errors import (
    QueueLimitError,
    QueuePartsMissingError,
    RayqError,
    UnknownTopicError,
)
from rayq.wire.paging import check_advances

logger = logging.getLogger(__name__)

RETRY_S = 0.02
RETRY_MAX_S = 0.5
FULL_GIVEN = 16
"""Maximum number of records that a write may lock for a full coordinator to take it: else its data
about records that nobody has would never shrink."""
LINGER_S = 0.01
"""Time that acknowledgements nobody waits for are held back after the end of the current write, to
be written with the locks of the next take: consumers then need one write for each take, not two,
and no take waits for a write that has only acknowledgements."""

Kept = asyncio.Future[None]


class QueueStatePersister:
    """The state of one queue in one data partition, for one opening by its leader. It may be used
    by one task at a time. Its calls wait as long as the coordinator cannot be reached: cancel the
    task when the leader ends.

    Raises QueueFencedError for good once a later leader has opened the state, or the queue was
    deleted.
    """

    def __init__(
        self,
        environment: Environment,
        peers: Peers,
        *,
        queue_id: str,
        data_partition: int,
        data_leader_epoch: int,
        is_full: bool = False,
    ) -> None:
        """`is_full`: the coordinator has just refused to keep locks."""
        self._peers = peers
        self._queue_id = queue_id
        self._data_partition = data_partition
        self._data_leader_epoch = data_leader_epoch
        self._environment = environment
        self._opener = environment.new_id()
        self._sequence = 0
        self.fence = 0
        """Fence of this opening; each opening of the state has a higher one. 0 before the
        opening."""
        self.fence_min = 0
        """Locks that were given out under lower state epochs are void: the coordinator lost records
        since."""
        self.is_full = is_full
        """True if the coordinator, as of the last write, is so full that no more records should be
        given out. `write([])` asks again."""
        self.trouble: str | None = None
        """The reason that the coordinator cannot be reached, while it cannot."""

    async def open(self) -> list[KeptRecord]:
        """Takes over the state, and returns its kept records in the order of their keys. From now
        on earlier openings can no longer write."""
        records: list[KeptRecord] = []
        after: bytes | None = b""
        while after is not None:
            answer, payload = await self._ask(self._page(after))
            records += unpack(payload)
            self.fence, self.fence_min = answer.fence, answer.fence_min
            check_advances(after, answer.next_after, f"what is kept of queue {self._queue_id}")
            after = answer.next_after
        return records

    def _page(self, after: bytes) -> Build[messages.OpenQueueStateResponse]:
        return lambda topic_id, partition, epoch: messages.OpenQueueState(
            topic_id,
            partition,
            epoch,
            self._queue_id,
            self._data_partition,
            self._data_leader_epoch,
            self._opener,
            after,
        )

    async def write(self, records: Sequence[KeptRecord], *, gives_out: bool = True) -> None:
        """Returns once all of the records are durable. Only one write may be in flight. Raises
        QueueLimitError if it `gives_out` many records and the coordinator is full to its last
        reserve: nothing is written then."""
        self._sequence += 1
        parts = parts_of(records)
        number = 0
        while number < len(parts):
            build = self._part(self._sequence, gives_out, number, number == len(parts) - 1)
            try:
                answer, _ = await self._ask(build, parts[number])
            except QueuePartsMissingError:
                # Another coordinator has started meanwhile, or an answer was lost.
                await asyncio.sleep(RETRY_S)
                number = 0
                continue
            self.is_full = answer.is_full
            number += 1

    def _part(
        self, sequence: int, gives_out: bool, number: int, is_last: bool
    ) -> Build[messages.WriteQueueStateResponse]:
        return lambda topic_id, partition, epoch: messages.WriteQueueState(
            topic_id,
            partition,
            epoch,
            self._queue_id,
            self._data_partition,
            self.fence,
            sequence,
            gives_out,
            number,
            is_last,
        )

    async def _ask(
        self, build: Build[messages.ResponseT], payload: bytes = b""
    ) -> tuple[messages.ResponseT, memoryview]:
        """Asks the coordinator until it answers. A retry is harmless: see `messages.OpenQueueState`
        and `messages.WriteQueueState`."""
        backoff = Backoff(self._environment, RETRY_S, RETRY_MAX_S)
        while True:
            try:
                answered = await self._peers.ask_queue_state(self._queue_id, build, payload)
            except RayqError as error:
                if not (error.retriable or isinstance(error, UnknownTopicError)):
                    raise
                if isinstance(error, QueueLimitError):
                    raise
                self.trouble = str(error)
                logger.debug(
                    "queue %s, partition %d: %s", self._queue_id, self._data_partition, error
                )
            else:
                self.trouble = None
                return answered
            await asyncio.sleep(backoff.next_s())


class GroupCommit:
    """Group commit of a queue leader's decisions. `run` writes until an error ends it; all waiters
    get that error. `on_kept()` is called after each write."""

    def __init__(
        self, state: QueueState, persister: QueueStatePersister, *, on_kept: Callable[[], None]
    ) -> None:
        self._state = state
        self._persister = persister
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
        """Asks a full coordinator again, even if there is nothing to write."""
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
        """Writes, one at a time. Raises the permanent errors of the persister."""
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
            if records or self._persister.is_full:
                await self._persister.write(records, gives_out=gives_out)
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
