"""Consumer of a queue's pool: it takes a record, calls the user's handler, and settles it.

If the handler returns, the record is acknowledged. If it raises, the record is given back, and goes
to the queue's dead letters with its error after the last delivery. The lock is extended while the
handler runs; a consumer that dies loses it within about a second, and another one gets the record.
"""

from __future__ import annotations

from collections.abc import Callable

from rayq.client.cluster import Cluster
from rayq.client.consumer_pool import Handler, PoolSpec
from rayq.client.queues.queue import AsyncQueue
from rayq.client.queues.task import QueueTask
from rayq.environment import Environment
from rayq.errors import LockLostError, RayqError
from rayq.pools.handler import PoolHandler, described
from rayq.pools.member import ABORT_TIMEOUT_S, FAILED_POLL_PAUSE_S, POLL_S, Member


class QueueMember(Member):
    """See the module."""

    def __init__(
        self,
        environment: Environment,
        cluster: Cluster,
        spec: PoolSpec,
        load_handler: Callable[[], Handler],
    ) -> None:
        """See `PoolHandler` for `environment.threads` and `load_handler`."""
        super().__init__(environment, spec, PoolHandler(environment.threads, load_handler))
        self._cluster = cluster

    async def _consume(self) -> None:
        assert self._spec.queue is not None
        queue = self._cluster.async_queue(
            self._spec.queue,
            large_values=self._spec.large_values,
            prefetch=self._spec.prefetch,
        )
        try:
            while self._is_going_on:
                await self._turn(queue)
                await self._check_lease()
            await self._leave(queue)
        except BaseException:
            await queue.close(ABORT_TIMEOUT_S)
            raise

    async def _turn(self, queue: AsyncQueue) -> None:
        try:
            tasks = await queue.take(1, POLL_S)
        except RayqError as error:
            self._failed_polls += 1
            self._note(f"taking failed: {type(error).__name__}: {error}")
            await self._sleep(FAILED_POLL_PAUSE_S)
            return
        self._failed_polls = 0
        for task in tasks:
            await self._handle(task)

    async def _handle(self, task: QueueTask) -> None:
        began_s = self._handling_since_s = self._now_s
        try:
            result = await self._handler.call(task)
        finally:
            self._busy_s += self._now_s - began_s
            self._handling_since_s = None
        try:
            if isinstance(result, BaseException):
                self._failed(task, result)
            else:
                self._records += 1
                self._problem = None
                if not task.is_settled:
                    task.ack()
        except LockLostError as error:
            self._note(str(error))

    def _failed(self, task: QueueTask, error: BaseException) -> None:
        self._note(
            f"the handler raised {described(error)} (delivery {task.delivery_count} of offset "
            f"{task.offset} of {task.topic}-{task.partition})"
        )
        if not task.is_settled:
            task.fail(error)
        if task.was_rejected:
            self._records += 1
            self._dead_letter_count += 1
        else:
            self._retries += 1

    async def _leave(self, queue: AsyncQueue) -> None:
        try:
            await queue.close(self._config.drain_timeout_s)
        except LockLostError as error:
            self._note(str(error))
