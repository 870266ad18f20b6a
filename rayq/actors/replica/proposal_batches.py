"""The in-sync sets that the leaders of a process propose, on their way to the controller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from rayq import messages
from rayq.environment import Environment
from rayq.errors import ProtocolError, RayqError, from_wire
from rayq.messages.limits import PROPOSALS_MAX

logger = logging.getLogger(__name__)

IN_FLIGHT_MAX = 4
"""Maximum number of requests in flight. The next one takes what has come meanwhile, so the busier
the controller is, the more it decides at once. One that is not answered does not hold up all."""
OLDER_CONTROLLER_S = 60.0
"""Time during which a controller that knows no batches is sent single proposals."""

Waiting = tuple[messages.AlterPartition, asyncio.Future[None]]


class ProposalBatches:
    """Sends proposals that wait at the same time as one request, as Kafka's AlterPartition does. A
    broker that returns has thousands of replicas, and each leader takes them back by a proposal for
    each."""

    def __init__(self, environment: Environment, ask_broker: messages.Ask) -> None:
        self._environment = environment
        self._ask_broker = ask_broker
        self._waiting: list[Waiting] = []
        self._in_flight = 0
        self._single_until_s = 0.0

    async def propose(self, proposal: messages.AlterPartition) -> None:
        """Returns once the proposal is committed. Raises StalePartitionError and FencedEpochError
        if it was refused, another RayqError if its outcome is unknown."""
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((proposal, outcome))
        if self._in_flight < IN_FLIGHT_MAX:
            self._in_flight += 1
            self._environment.tasks.spawn(self._send_waiting(), "propose in-sync sets")
        await outcome

    async def _send_waiting(self) -> None:
        try:
            while self._waiting:
                is_single = self._environment.clock.monotonic() < self._single_until_s
                count = 1 if is_single else PROPOSALS_MAX
                batch, self._waiting = self._waiting[:count], self._waiting[count:]
                await self._send(batch)
        finally:
            self._in_flight -= 1

    async def _send(self, batch: Sequence[Waiting]) -> None:
        refused: dict[tuple[str, int], RayqError] = {}
        failure: RayqError | None = None
        try:
            if len(batch) == 1:
                await self._ask_broker(batch[0][0])
            else:
                answer = await self._ask_broker(
                    messages.AlterPartitions([proposal for proposal, _ in batch])
                )
                refused = {
                    (topic_id, partition): from_wire(code, text)
                    for topic_id, partition, code, text in answer.refused
                }
        except RayqError as error:
            failure = error
            if isinstance(error, ProtocolError) and len(batch) > 1:
                logger.info("in-sync sets are proposed one by one: %s", error)
                self._single_until_s = self._environment.clock.monotonic() + OLDER_CONTROLLER_S
        except asyncio.CancelledError:
            for _, outcome in batch:
                outcome.cancel()
            raise
        for proposal, outcome in batch:
            if outcome.done():
                continue
            reason = failure or refused.get((proposal.topic_id, proposal.partition))
            if reason is None:
                outcome.set_result(None)
            else:
                outcome.set_exception(reason.with_message(reason.message))
