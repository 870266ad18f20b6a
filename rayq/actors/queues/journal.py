"""Durable journal of a queue leader's decisions, which the queue's keeper stores: the leader of one
partition of `__queue_state`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from rayq import messages
from rayq.actors.peers import Build, Peers
from rayq.backoff import Backoff
from rayq.core.queues.kept_queues import KeptRecord, parts_of, unpack
from rayq.environment import Environment
from rayq.errors import (
    QueueLimitError,
    QueuePartsMissingError,
    RayqError,
    UnknownTopicError,
)
from rayq.wire.paging import check_goes_on

logger = logging.getLogger(__name__)

RETRY_S = 0.02
RETRY_MAX_S = 0.5


class Journal:
    """The state of one queue in one data partition, for one opening by its leader. It may be used
    by one task at a time. Its calls wait as long as the keeper cannot be reached: cancel the task
    when the leader ends.

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
        """`is_full`: the keeper has just refused to keep locks."""
        self._environment = environment
        self._peers = peers
        self._queue_id = queue_id
        self._data_partition = data_partition
        self._data_leader_epoch = data_leader_epoch
        self._opener = environment.new_id()
        self._sequence = 0
        self.fence = 0
        """Fence of this opening; each opening of the state has a higher one. 0 before the
        opening."""
        self.fence_min = 0
        """Locks that were given out under lower state epochs are void: the keeper lost records
        since."""
        self.is_full = is_full
        """True if the keeper, as of the last write, is so full that no more records should be given
        out. `write([])` asks again."""
        self.trouble: str | None = None
        """The reason that the keeper cannot be reached, while it cannot."""

    async def open(self) -> list[KeptRecord]:
        """Takes over the state, and returns its kept records in the order of their keys. From now
        on earlier openings can no longer write."""
        records: list[KeptRecord] = []
        after: bytes | None = b""
        while after is not None:
            answer, payload = await self._ask(self._page(after))
            records += unpack(payload)
            self.fence, self.fence_min = answer.fence, answer.fence_min
            check_goes_on(after, answer.next_after, f"what is kept of queue {self._queue_id}")
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
        QueueLimitError if it `gives_out` many records and the keeper is full to its last reserve:
        nothing is written then."""
        self._sequence += 1
        parts = parts_of(records)
        number = 0
        while number < len(parts):
            build = self._part(self._sequence, gives_out, number, number == len(parts) - 1)
            try:
                answer, _ = await self._ask(build, parts[number])
            except QueuePartsMissingError:
                # Another keeper has started meanwhile, or an answer was lost.
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
        """Asks the keeper until it answers. A retry is harmless: see `messages.OpenQueueState` and
        `messages.WriteQueueState`."""
        backoff = Backoff(self._environment, RETRY_S, RETRY_MAX_S)
        while True:
            try:
                answered = await self._peers.ask_keeper(self._queue_id, build, payload)
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
