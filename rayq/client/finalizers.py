"""Producers, consumers and async admins that nobody closed: the user dropped them, or they are
still open when their event loop or the program ends. They leave all the same, and a ResourceWarning
reports them, as Python does for open files.

All of this works on the inner half of each, which refers to nothing that the user holds.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import time
import warnings
import weakref
from typing import Protocol

from rayq.client.loop_thread import leave_all_for_good
from rayq.client.producing.producer_core import ProducerCore
from rayq.client.queues.queue_core import QueueCore
from rayq.errors import RayqError, counted

logger = logging.getLogger(__name__)

LAST_PATIENCE_S = 5.0
"""Maximum time that open objects may delay the end of their event loop, or of the program."""

CANCELLED_PAUSE_S = 0.01
"""Time to wait for the tasks that were cancelled with the loop: their work is then started
again."""


class Core(Protocol):
    """The inner half of a producer, a consumer or an async admin."""

    loop: asyncio.AbstractEventLoop
    is_closed: bool

    def unsent_count(self) -> int:
        """The number of accepted records without an outcome. May be called from any thread."""
        ...

    async def leave(self, timeout_s: float | None) -> None:
        """Sends unsent records, leaves the group, and closes."""
        ...

    def loop_has_ended(self) -> None:
        """Closes the rest when nothing can be sent any longer. May be called from any thread."""
        ...


def watch(owner: object, core: Core, name: str) -> None:
    """Makes the core leave when its owner is dropped. `name` is for the warning."""
    weakref.finalize(owner, _dropped, core, name).atexit = False
    if isinstance(core, ProducerCore):
        _producers[core] = name
    if isinstance(core, QueueCore):
        _queues[core] = name


def watch_loop(owner: object, core: Core, name: str) -> None:
    """Does the same as `watch`; the core also leaves when the running loop ends as `asyncio.run`
    ends it, by cancelling all tasks."""
    watch(owner, core, name)
    keeper = core.loop.create_task(_until_the_loop_ends(core, name), name=f"keep {name}")
    _keepers[core] = keeper


def unwatch(core: Core) -> None:
    """Reports that a core is closed, and needs no watching any longer."""
    keeper = _keepers.pop(core, None)
    if keeper is not None and not core.loop.is_closed():
        keeper.cancel()


_producers: weakref.WeakKeyDictionary[ProducerCore, str] = weakref.WeakKeyDictionary()
_queues: weakref.WeakKeyDictionary[QueueCore, str] = weakref.WeakKeyDictionary()
_keepers: weakref.WeakKeyDictionary[Core, asyncio.Task[None]] = weakref.WeakKeyDictionary()


# --- dropped --------------------------------------------------------------------------------------


def _dropped(core: Core, name: str) -> None:
    """Handles a dropped owner. The garbage collector calls this, at any moment and in any thread:
    it must not wait."""
    if core.is_closed:
        return
    unsent = core.unsent_count()
    try:
        core.loop.call_soon_threadsafe(_leave_soon, core, name)
    except RuntimeError:  # the loop is closed
        core.loop_has_ended()
        _warn(name, "is lost with its event loop, and was not closed", unsent, are_lost=True)
    else:
        _warn(name, "was dropped without close()", unsent, are_lost=False)


def _warn(name: str, what: str, unsent: int, *, are_lost: bool) -> None:
    records = ""
    if unsent:
        records = f"; {counted(unsent, 'record is', 'records are')} unsent"
        if are_lost:
            records = "; " + counted(
                unsent,
                "record has no outcome, and is lost unless it was sent",
                "records have no outcome, and are lost unless they were sent",
            )
    text = f"{name} {what}{records}. Close it, or use it in a `with` block."
    if unsent and are_lost:
        logger.error("%s", text)
    warnings.warn(text, ResourceWarning, stacklevel=2)


def _leave_soon(core: Core, name: str) -> None:
    task = core.loop.create_task(_leave(core, name, None), name=f"{name} leaves")
    _leaving.add(task)
    task.add_done_callback(_leaving.discard)


_leaving: set[asyncio.Task[None]] = set()
"""The leaving tasks, kept here because loops refer to their tasks weakly."""


async def _leave(core: Core, name: str, timeout_s: float | None) -> None:
    try:
        await core.leave(timeout_s)
    except RayqError as error:
        logger.error("%s was not closed: %s", name, error)


# --- the end of the loop, and of the program ------------------------------------------------------


async def _until_the_loop_ends(core: Core, name: str) -> None:
    try:
        await asyncio.get_running_loop().create_future()
    except asyncio.CancelledError:
        if not core.is_closed:
            unsent = core.unsent_count()
            await asyncio.sleep(CANCELLED_PAUSE_S)
            await _leave(core, name, LAST_PATIENCE_S)
            _warn(name, "was open when its event loop ended", unsent, are_lost=False)
        raise


@atexit.register
def _at_exit() -> None:
    """Delivers and settles at exit. Nothing of the client runs any longer once the interpreter
    ends."""
    _deliver()
    _settle()
    loops = leave_all_for_good(LAST_PATIENCE_S)
    for core in list(_producers):  # Functions that atexit calls later might wait for their records.
        if not core.is_closed and core.loop in loops:
            core.loop_has_ended()


def _deliver() -> None:
    """Delivers unsent records of producers for threads when the program ends. It logs an error for
    undelivered records, and for transactions that nobody ended."""
    deadline = time.monotonic() + LAST_PATIENCE_S
    for core, name in list(_producers.items()):
        if not core.is_closed and core.has_open_transaction:
            logger.error(
                "%s has an open transaction, which nobody ended before the program did: it will be "
                "aborted. Use transactions in a `with` block.",
                name,
            )
        if core.is_closed or not core.unsent_count():
            continue
        if core.loop.is_running():
            core.accumulator.close_open_batches()
            core.work_soon()
            for batch in core.accumulator.incomplete():
                batch.wait(max(deadline - time.monotonic(), 0.0))
        unsent = core.unsent_count()
        if unsent:
            logger.error(
                "%s was never closed: %s not delivered before the program ended. "
                "Close it, or use it in a `with` block.",
                name,
                counted(unsent, "record was", "records were"),
            )


def _settle() -> None:
    """Reports decisions of queue consumers, and gives back the records that they hold. It logs an
    error if the leaders do not answer."""
    deadline = time.monotonic() + LAST_PATIENCE_S
    for core, name in list(_queues.items()):
        if not core.loop.is_running():
            continue
        left = asyncio.run_coroutine_threadsafe(_all_left(core, name), core.loop)
        try:
            left.result(max(deadline - time.monotonic(), 0.0))
        except asyncio.TimeoutError:
            logger.error(
                "%s was never closed, and its leaders did not answer before the program ended: "
                "what it settled last may be redelivered. Close it, or use it in a `with` block.",
                name,
            )
        except Exception:
            logger.exception("%s was not closed", name)


async def _all_left(core: Core, name: str) -> None:
    """Leaves, and waits for dropped cores that are leaving."""
    if not core.is_closed:
        await _leave(core, name, LAST_PATIENCE_S)
    leaving = [task for task in _leaving if task.get_loop() is core.loop]
    if leaving:
        await asyncio.wait(leaving)


def _forked() -> None:
    """Forgets the open objects of the parent: they are the parent's."""
    _leaving.clear()
    _queues.clear()


os.register_at_fork(after_in_child=_forked)
