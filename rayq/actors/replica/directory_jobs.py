"""Jobs of threads that work in a partition's directory, whose lock is kept until all are done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from rayq.environment import Environment
from rayq.storage.data_directory import PartitionDirectory

T = TypeVar("T")


class DirectoryJobs:
    """See the module. The next process that opens or renames the directory must find no thread at
    work. Call `release` last."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._running: set[asyncio.Future[Any]] = set()
        self.directory: PartitionDirectory | None = None
        """The directory, from before it is used until it is released."""

    def begin(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Starts a job in a thread."""
        step = asyncio.ensure_future(self._environment.threads.run(job))
        self._running.add(step)
        step.add_done_callback(self._ended)
        return step

    def _ended(self, step: asyncio.Future[Any]) -> None:
        self._running.discard(step)
        if not step.cancelled():
            # The caller hears of an error, unless it was cancelled: then the log is being
            # abandoned, and its disk stays as it is.
            step.exception()

    async def run(self, job: Callable[[], T]) -> T:
        """Runs a job in a thread, to its end even when the caller is cancelled."""
        return await asyncio.shield(self.begin(job))

    async def run_and_wait(self, job: Callable[[], T]) -> T:
        """Runs a job in a thread; when the caller is cancelled it waits for the job to end."""
        step = self.begin(job)
        try:
            return await asyncio.shield(step)
        except asyncio.CancelledError:
            await asyncio.wait((step,))
            raise

    def release(self) -> None:
        """Gives the directory back once no thread works in it any more."""
        for job in self._running:
            job.add_done_callback(lambda _: self.release())
            return
        if self.directory is not None:
            self.directory.close()
            self.directory = None
