"""Queue state coordinator, which stores what queue leaders decide in a `__queue_state` partition.

It is a `Coordinator`, and does not know what the kept records mean. It makes sure that only the
newest opening of each state writes (`core.queues.queue_states`), and forgets deleted queues.
"""

from __future__ import annotations

import asyncio
import logging

from rayq import messages
from rayq.actors.access import Access
from rayq.actors.coordinator import Coordinator
from rayq.actors.handlers import HandlerTable, answers, answers_peer
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.core.cluster.topic_changes import QUEUES_TOPIC
from rayq.core.decision import Decision
from rayq.core.queues.queue_states import (
    KeptRecord,
    QueueStates,
    Record,
    StateKey,
    WriteParts,
    decode,
    encode,
    pack,
    unpack_part,
)
from rayq.errors import (
    CoordinatorLoadingError,
    QueueFencedError,
    RayqError,
)
from rayq.metrics import Sample
from rayq.wire.peer import Peer

logger = logging.getLogger(__name__)

DELETED_CHECK_INTERVAL_S = 5.0
CONFIRMED_WAIT_MS = 2_000


class QueueStateCoordinator(Coordinator[QueueStates, Record]):
    """See the module."""

    subject = "queues"
    topic = QUEUES_TOPIC

    def __init__(
        self,
        replica_log: ReplicaLog,
        leader: Leader,
        assignment: messages.PartitionAssignment,
        *,
        access: Access,
        ask_broker: messages.Ask,
    ) -> None:
        """`ask_broker` sends a request to this node's broker."""
        super().__init__(replica_log, leader, assignment, access=access, encode=encode)
        self._ask_broker = ask_broker
        self._leader_epoch = assignment.leader_epoch
        self._unclean_epoch = assignment.last_unclean_epoch or 0
        self.state = self._empty()
        """The decided state, committed or not."""
        self._sequences: dict[StateKey, tuple[int, int]] = {}
        """Fence and sequence of the last write, for the life of this coordinator. A later
        coordinator does not need it: requests to this one name its leader epoch, and are refused
        there."""
        self._parts: dict[StateKey, WriteParts] = {}
        """Parts of writes that came in parts."""
        self._forget_source = self._environment.metrics.add_source(self._measure)

    def _empty(self) -> QueueStates:
        return QueueStates(coordinator_epoch=self._leader_epoch, unclean_epoch=self._unclean_epoch)

    def _measure(self) -> list[Sample]:
        return [
            self._environment.metrics.sample(
                "rayq_queue_state_bytes", self.state.held_bytes, partition=self._partition
            )
        ]

    def end(self, reason: str) -> None:
        """Ends, as another process is the coordinator: the requests that wait are told."""
        self._forget_source()
        super().end(reason)

    # --- leaders of data partitions ---------------------------------------------------------

    @answers(messages.OpenQueueState)
    async def open_state(
        self, request: messages.OpenQueueState
    ) -> tuple[messages.OpenQueueStateResponse, bytes]:
        """See `messages.OpenQueueState`."""
        state_key = StateKey(request.queue_id, request.data_partition)

        def decide() -> Decision[Record, tuple[messages.OpenQueueStateResponse, bytes]]:
            fence, records = self.state.open_state(
                state_key,
                data_leader_epoch=request.data_leader_epoch,
                opener=request.opener,
                is_first_page=not request.after,
            )
            return Decision(records, lambda: opened(fence))

        def opened(fence: int) -> tuple[messages.OpenQueueStateResponse, bytes]:
            page, next_after = self.state.read(state_key, request.after)
            answer = messages.OpenQueueStateResponse(fence, next_after, self.state.fence_min)
            return answer, pack(page)

        return await self._answer(decide)

    @answers_peer(messages.WriteQueueState)
    async def write(
        self, _: Peer, request: messages.WriteQueueState, payload: memoryview
    ) -> messages.WriteQueueStateResponse:
        """See `messages.WriteQueueState`."""
        state_key = StateKey(request.queue_id, request.data_partition)
        records = unpack_part(payload)
        return await self._answer(
            lambda: Decision(
                self._write(state_key, request, records),
                lambda: messages.WriteQueueStateResponse(self.state.is_full),
            )
        )

    def _write(
        self,
        state_key: StateKey,
        request: messages.WriteQueueState,
        records: list[KeptRecord],
    ) -> list[Record]:
        number = request.fence, request.sequence
        if not request.is_last:
            self.state.write(state_key, request.fence, records, gives_out=False)  # May it write?
            self._parts.setdefault(state_key, WriteParts()).add(number, request.part, records)
            return []
        if request.part:
            records = self._parts.get(state_key, WriteParts()).whole(number, request.part, records)
        self._parts.pop(state_key, None)
        decided = self.state.write(
            state_key, request.fence, records, gives_out=request.gives_out
        )
        fence, sequence = self._sequences.get(state_key, (0, 0))
        if fence == request.fence and request.sequence < sequence:
            raise QueueFencedError(
                f"Write {request.sequence} of partition {request.data_partition} of queue "
                f"{request.queue_id} was held back: its leader has moved on to {sequence}."
            )
        self._sequences[state_key] = request.fence, request.sequence
        return decided

    def _replay(self, record: Record) -> None:
        self.state.replay(record)

    # --- starting over ----------------------------------------------------------------------

    async def _load(self) -> None:
        state = self._empty()
        count = await self._log.replay(lambda key, value: state.replay(decode(key, value)))
        self.state = state
        self._loaded()
        logger.info(
            "%s: the states of %d queues, %d bytes, from %d records",
            self.where,
            len(state.queue_ids()),
            state.held_bytes,
            count,
        )

    # --- background -------------------------------------------------------------------------

    async def _work(self) -> None:
        """Forgets deleted queues, until the state is dropped."""
        generation = self._log.generation
        while True:
            await self._reset_wanted.wait(DELETED_CHECK_INTERVAL_S)
            if generation != self._log.generation:
                return
            try:
                deleted = await deleted_queues(self.state.queue_ids(), self._ask_broker)
                await self._begin(is_write=True)
                self._check(generation)
            except RayqError as error:
                logger.debug("%s: which queues are deleted is not known: %s", self.where, error)
                continue
            for state_key in [key for key in self.state if key.queue_id in deleted]:
                self._sequences.pop(state_key, None)
                self._parts.pop(state_key, None)
                self._append(self.state.forget(state_key))
                await asyncio.sleep(0)  # There may be one for each of many partitions.
                if generation != self._log.generation:
                    return


async def deleted_queues(queue_ids: set[str], ask_broker: messages.Ask) -> set[str]:
    """Returns those queues that are certainly deleted; an id is never used again. Raises the
    broker's errors, and CoordinatorLoadingError if the broker does not know enough."""
    missing = await _unknown(queue_ids, ask_broker, 0)
    if not missing:
        return missing
    # The broker's metadata may be older than these queues. They are not older than this:
    confirmed = await ask_broker(messages.ConfirmMetadata())
    return await _unknown(missing, ask_broker, confirmed.version)


async def _unknown(
    queue_ids: set[str], ask_broker: messages.Ask, version_min: int
) -> set[str]:
    """Returns the queues that are missing in metadata of at least this version."""
    unknown, left = set(queue_ids), sorted(queue_ids)
    while left:
        asked, left = left[: messages.QUEUES_PAGE], left[messages.QUEUES_PAGE :]
        answer = await ask_broker(
            messages.DescribeQueues(
                [], version_min=version_min, wait_ms=CONFIRMED_WAIT_MS, queue_ids=asked
            )
        )
        if answer.version < version_min:
            raise CoordinatorLoadingError("The broker's metadata are behind the controller's.")
        unknown.difference_update(queue.queue_id for queue in answer.queues)
    return unknown


QueueStateCoordinator.handlers = HandlerTable("queue state coordinator", QueueStateCoordinator)
