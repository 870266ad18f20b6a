"""The owners of simulated code: each process, and the world outside of all processes."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any

OPEN, HELD, DEAD = 0, 1, 2
"""The states of an owner's gate: its callbacks run, wait, are dropped."""

OWNER: contextvars.ContextVar[Owner] = contextvars.ContextVar("owner of the running callback")

_CLOSES_MAX = 10


class ProcessDied(BaseException):
    """Raised wherever a dead process would touch the world. It is no `Exception`, so that the code
    of that process does not catch it."""


class Owner:
    """An owner of callbacks and tasks. What is scheduled in its `context` belongs to it."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.context = contextvars.Context()
        self.context.run(OWNER.set, self)
        self.gate = OPEN
        self.paused = False
        self.blocked_until = 0.0
        self.handled_bytes = 0
        """Bytes that its code has sent, received, written and read (see `charged`)."""
        self._tasks: list[asyncio.Task[Any]] = []
        self._tasks_prune_at = 64

    @property
    def alive(self) -> bool:
        return self.gate != DEAD

    def check_alive(self) -> None:
        """Raises `ProcessDied` when the owner is dead."""
        if self.gate == DEAD:
            raise ProcessDied(f"{self.name} is dead")

    def copy_context(self) -> contextvars.Context:
        """A context for a callback of this owner: the running context when it is the owner's
        own."""
        running = contextvars.copy_context()
        return running if running.get(OWNER, None) is self else self.context.copy()

    def tasks(self) -> list[asyncio.Task[Any]]:
        """The tasks that have not ended, oldest first."""
        return [task for task in self._tasks if not task.done()]

    def add_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.append(task)
        if len(self._tasks) >= self._tasks_prune_at:
            self._tasks = self.tasks()
            self._tasks_prune_at = max(64, 2 * len(self._tasks))

    def close_tasks(self) -> bool:
        """Ends every task where it stands, `finally` blocks included. False when one of the tasks
        is running and has to be closed later."""
        all_closed = True
        for task in self.tasks():
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine = task.get_coro()
            assert isinstance(coroutine, Coroutine)
            if coroutine.cr_running:  # type: ignore[attr-defined]
                all_closed = False
                continue
            self.context.copy().run(_close, coroutine)
        return all_closed


def _close(coroutine: Coroutine[Any, Any, Any]) -> None:
    for _ in range(_CLOSES_MAX):
        try:
            coroutine.close()
        except RuntimeError:
            continue  # A `finally` block awaited something. A dead process does not wait.
        except BaseException:  # noqa: BLE001 - whatever its last words are, nobody hears them
            pass
        return
