"""Base class of the coordinators: of groups, of transactions, and of the states of queues.

A coordinator lives with the leader of one partition of an internal topic. Its hard state is that
partition's log (`CoordinatorLog`): the records of a decision are replayed in memory at once and
appended, and every answer waits until everything that it is based on is committed. So nothing that
a deposed coordinator says or writes is acknowledged (docs/protocol.md, rule 20). A coordinator
starts by reading the whole log. If an append fails, it drops its state and loads the log again.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from rayq import messages
from rayq.actors.access import Access
from rayq.actors.coordinator_log import CoordinatorLog
from rayq.actors.handlers import NO_PAYLOAD, HandlerTable
from rayq.actors.once_committed import once_committed
from rayq.actors.replica.leader import Leader
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.actors.signal import Signal
from rayq.core.access.rights import View
from rayq.core.decision import Decision, Times
from rayq.errors import (
    CoordinatorLoadingError,
    CorruptBatchError,
    NotEnoughReplicasError,
    NotLeaderError,
    RayqError,
    StorageError,
    UnsupportedFormatError,
)
from rayq.wire.handler import Result
from rayq.wire.peer import Peer

logger = logging.getLogger(__name__)
StateT = TypeVar("StateT")
RecordT = TypeVar("RecordT")
T = TypeVar("T")

LOADING_WAIT_S = 0.5
"""Maximum time that a request waits for the coordinator to load before it is told to try again."""
RETRY_S = 0.1
READ_RETRY_S = 1.0


class Coordinator(ABC, Generic[StateT, RecordT]):
    """See the module. Ends with its leader's role. `encode` makes `(key, value)` of a record."""

    subject: ClassVar[str]
    """Name of the coordinated things, for messages."""
    topic: ClassVar[str]
    """The topic whose partitions have such a coordinator."""
    handlers: ClassVar[HandlerTable]
    """The functions that decide requests in one step, and the coroutines that answer the others:
    these use `_answer` for each step."""
    only_reads: ClassVar[Collection[type[messages.AnyRequest]]] = ()
    """The requests that are also answered while too few replicas are in sync."""
    state: StateT
    """The decided state, committed or not."""

    def __init__(
        self,
        replica_log: ReplicaLog,
        leader: Leader,
        assignment: messages.PartitionAssignment,
        *,
        access: Access,
        encode: Callable[[RecordT], tuple[bytes, bytes | None]],
    ) -> None:
        self._access = access
        self._replica_log = replica_log
        self._leader = leader
        self._environment = replica_log.environment
        self._config = replica_log.config
        self._log = CoordinatorLog(
            replica_log, leader, assignment, encode=encode, on_failure=self._reset
        )
        self._partition = assignment.partition
        self._is_loaded = False
        self._failure: str | None = None
        self._ended: RayqError | None = None
        self._ready = Signal()
        self._reset_wanted = Signal()
        self.where = replica_log.where
        self._tasks: list[asyncio.Task[None]] = []
        self._spawn(self._run, f"{self.subject} of {self.where}")

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Runs a task up to the end of this coordinator."""
        self._tasks.append(self._environment.tasks.spawn(self._replica_log.guard(work), name))

    def end(self, reason: str) -> None:
        """Ends this coordinator, as another process coordinates: the requests that wait are
        told."""
        self._ended = NotLeaderError(
            f"Broker {self._replica_log.broker} no longer coordinates the {self.subject} of "
            f"{self.where} ({reason}): ask for new metadata."
        )
        for task in self._tasks:
            task.cancel()
        self._fail_all(self._ended)
        self._ready.notify()

    # --- requests ---------------------------------------------------------------------------

    async def handle(
        self, peer: Peer, request: messages.AnyRequest, payload: memoryview = NO_PAYLOAD
    ) -> Result:
        """Answers a request without what the peer may not describe, once everything that the answer
        or the refusal is based on is committed."""
        answer = await self._handle(peer, request, payload)
        view = self._access.view(peer)
        return answer if view is None else self._shown(view, answer)

    async def _handle(
        self, peer: Peer, request: messages.AnyRequest, payload: memoryview
    ) -> Result:
        await self._admit(request)
        decide = self.handlers.decisions.get(type(request))
        if decide is None:
            answering: Any = self.handlers.answer(self, peer, request, payload)
            answer: Result = await answering
            return answer
        return await self._answer(lambda: decide(self.state, request, self._times()))

    def _shown(self, view: View, answer: Result) -> Result:
        """The answer without what is hidden from a named principal."""
        return answer

    async def _admit(self, request: messages.AnyRequest) -> None:
        """Returns when the request may be decided. Raises what `_begin` raises."""
        await self._begin(is_write=type(request) not in self.only_reads)

    def _times(self) -> Times:
        clock = self._environment.clock
        return Times(clock.monotonic(), clock.wall_ms())

    # --- before and after a decision --------------------------------------------------------

    async def _begin(
        self, *, is_write: bool, is_ready: Callable[[], bool] = lambda: True
    ) -> None:
        """Returns when a request may be decided, at which `is_ready()` holds. Raises
        NotLeaderError, CoordinatorLoadingError, NotEnoughReplicasError."""
        await self._ready.wait_until(
            lambda: self._ended is not None or (self._is_loaded and is_ready()), LOADING_WAIT_S
        )
        self._check(None)
        if not self._is_loaded or not is_ready():
            raise CoordinatorLoadingError(
                f"The coordinator of {self.where} is starting"
                f"{'' if self._failure is None else f' and failed so far: {self._failure}'}: try "
                "again."
            )
        if is_write and self._leader.state.is_under_min_isr:
            raise NotEnoughReplicasError(
                f"{self.where} has too few in-sync replicas: {self.subject} wait for more brokers."
            )

    def _check(self, generation: int | None) -> None:
        """Raises NotLeaderError once another replica may coordinate, CoordinatorLoadingError if the
        state of `generation` was dropped."""
        if self._ended is not None:
            raise self._ended
        self._leader.check()
        if generation is not None and generation != self._log.generation:
            raise CoordinatorLoadingError(
                f"The coordinator of {self.where} starts over: try again."
            )

    async def _answer(self, decide: Callable[[], Decision[RecordT, T]]) -> T:
        """Decides, and returns the answer once the decision, or the state that a refusal is based
        on, is committed."""

        def step() -> T:
            decision = decide()
            self._append(decision.records)
            return decision.answer()

        return await once_committed(self._until_committed, step)

    async def _until_committed(self) -> None:
        """Returns when everything decided so far is committed, and this object still
        coordinates."""
        await self._log.until_committed()
        self._check(None)

    def _append(self, records: Sequence[RecordT]) -> None:
        """Applies the records of a decision here at once, and sends them to the log."""
        if not records:
            return
        for record in records:
            self._replay(record)
        self._log.append(list(records))

    @abstractmethod
    def _replay(self, record: RecordT) -> None:
        """Applies a record to the state."""

    def _may_be_heard(self) -> bool:
        """Returns whether requests are currently not refused."""
        try:
            self._leader.check()
        except NotLeaderError:
            return False
        return not self._leader.state.is_under_min_isr

    # --- starting over ----------------------------------------------------------------------

    def _reset(self, error: RayqError) -> None:
        """Starts over from the log: an append failed, so what was decided may never be
        committed."""
        logger.warning("the coordinator of %s starts over: %s", self.where, error)
        self._is_loaded = False
        self._fail_all(error)
        self._reset_wanted.notify()

    def _fail_all(self, error: RayqError) -> None:
        """Drops what is not committed, and fails the requests that wait for it."""
        self._log.drop(error)

    async def _run(self) -> None:
        while True:
            try:
                await self._load()
            except (CorruptBatchError, StorageError, UnsupportedFormatError) as error:
                if self._failure is None:
                    logger.error("%s cannot be read: %s", self.where, error)
                self._failure = str(error)
                await asyncio.sleep(READ_RETRY_S)
                continue
            await self._work()
            await asyncio.sleep(RETRY_S)

    @abstractmethod
    async def _load(self) -> None:
        """Rebuilds the state from the log, and calls `_loaded`."""

    def _loaded(self) -> None:
        self._is_loaded = True
        self._failure = None
        self._ready.notify()

    @abstractmethod
    async def _work(self) -> None:
        """Does the periodic work, until the state is dropped."""
