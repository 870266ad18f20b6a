"""A leader's proposals of a new in-sync set to the controller (docs/protocol.md, rule 6).

`PartitionState` decides what to propose. A refused proposal is repeated less and less often within
one partition epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from rayq import messages
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.backoff import Backoff
from rayq.core.partition.state import Isr, PartitionState
from rayq.errors import FencedEpochError, RayqError, StalePartitionError

logger = logging.getLogger(__name__)

PROPOSAL_PAUSE_S = 0.1
"""Backoff after a failed proposal: the metadata that explains it is on its way. Without the pause
each fetch of a follower would repeat the proposal, as fast as the controller answers."""
PROPOSAL_PAUSE_MAX_S = 0.8
"""Maximum backoff. It doubles with each refusal in one partition epoch: a follower whose broker
stopped has all records, and must not be in sync as long as that broker is away."""


class IsrProposals:
    """See the module. `propose` sends a proposal to the controller; `may_propose()` says whether
    this process still leads; `on_decided()` is called when the outcome of a proposal is known, or
    certain to stay unknown; `now_s()` is the time by which followers are judged."""

    def __init__(
        self,
        replica_log: ReplicaLog,
        state: PartitionState,
        assignment: messages.PartitionAssignment,
        *,
        propose: Callable[[messages.AlterPartition], Awaitable[None]],
        may_propose: Callable[[], bool],
        on_decided: Callable[[], None],
        now_s: Callable[[], float],
    ) -> None:
        self._replica_log = replica_log
        self._environment = replica_log.environment
        self._state = state
        self._topic_id = assignment.topic_id
        self._partition = assignment.partition
        self._propose = propose
        self._may_propose = may_propose
        self._on_decided = on_decided
        self._now_s = now_s
        self._where = replica_log.where
        self._propose_from_s = 0.0
        self._refusals = Backoff(self._environment, PROPOSAL_PAUSE_S, PROPOSAL_PAUSE_MAX_S)

    def reset(self) -> None:
        """Forgets earlier failures: a newer partition epoch begins."""
        self._propose_from_s = 0.0
        self._refusals.reset()

    def propose(self) -> None:
        """Proposes the in-sync set that is due, if it is another than the committed one."""
        state = self._state
        if self._environment.clock.monotonic() < self._propose_from_s or not self._may_propose():
            return
        state.log_start_offset = self._replica_log.log.start_offset
        isr = state.proposal(self._now_s())
        if isr is None:
            return
        request = messages.AlterPartition(
            topic_id=self._topic_id,
            partition=self._partition,
            broker=state.broker,
            incarnation=state.incarnation,
            leader_epoch=state.leader_epoch,
            partition_epoch=state.partition_epoch,
            isr=list(isr),
        )
        self._environment.tasks.spawn(
            self._send(isr, request), f"propose the ISR of {self._where}"
        )

    async def _send(self, isr: Isr, request: messages.AlterPartition) -> None:
        try:
            await self._propose(request)
        except (StalePartitionError, FencedEpochError) as error:
            logger.info("ISR of %s: %s", self._where, error)
            self._state.proposal_refused(isr, request.partition_epoch)
            # Under min_insync_replicas writes wait for the refused member.
            is_urgent = self._state.is_under_min_isr
            self._pause(
                request.partition_epoch, PROPOSAL_PAUSE_S if is_urgent else self._refusals.next_s()
            )
        except RayqError as error:
            logger.info("ISR of %s: %s", self._where, error)
            self._state.proposal_unknown(isr, request.partition_epoch)
            self._pause(request.partition_epoch, PROPOSAL_PAUSE_S)
        self._on_decided()

    def _pause(self, partition_epoch: int, pause_s: float) -> None:
        if partition_epoch == self._state.partition_epoch:
            self._propose_from_s = self._environment.clock.monotonic() + pause_s
