"""Logs when the event loop of a process stood still, and in which code: it answers nobody
meanwhile.

A thread looks from outside, as the stall detector of Seastar does. Time in which the whole process
stood still (SIGSTOP, a machine that sleeps) is not told: no code is to blame for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from types import FrameType

from rayq.logs import log_event

logger = logging.getLogger(__name__)

STALL_S = 0.25
"""The minimum duration of a stall that is logged."""
LOOK_INTERVAL_S = 0.1
FRAMES_MAX = 8
HELD_INTERPRETER = "code that let no other thread run"


class LoopWatch:
    """Watches the running event loop until its process ends, or `stop` is called."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._cpu_clock = time.pthread_getcpuclockid(self._thread_id)
        self._due_s = 0.0
        """The time at which the loop should have its next turn."""
        self._cpu_s = 0.0
        """The CPU time that the loop's thread had used at its last turn."""
        self._seen: str | None = None
        """The code at which the loop stands, once it is late."""
        self._stopped_s = 0.0
        """For how long the watching thread stood still too, since the loop's last turn."""
        self._is_stopped = threading.Event()
        self._turn_again()
        threading.Thread(target=self._look_forever, name="rayq-loop-watch", daemon=True).start()

    def stop(self) -> None:
        self._is_stopped.set()
        self._timer.cancel()

    def _turn(self) -> None:
        late_s = time.monotonic() - self._due_s
        cpu_s = time.clock_gettime(self._cpu_clock) - self._cpu_s
        where, self._seen = self._seen, None
        if where is not None:
            late_s -= self._stopped_s
        elif cpu_s > STALL_S:
            where = HELD_INTERPRETER
        if late_s > STALL_S and where is not None:
            # Not a warning, which Ray would print: on a crowded machine no code is to blame.
            log_event(
                logger, logging.INFO, "loop_stood_still",
                still_s=round(late_s, 2), cpu_s=round(cpu_s, 2), where=where,
            )
        self._turn_again()

    def _turn_again(self) -> None:
        self._cpu_s = time.clock_gettime(self._cpu_clock)
        self._stopped_s = 0.0
        self._due_s = time.monotonic() + LOOK_INTERVAL_S
        self._timer = self._loop.call_later(LOOK_INTERVAL_S, self._turn)

    def _look_forever(self) -> None:
        looked_s = time.monotonic()
        while not self._is_stopped.wait(LOOK_INTERVAL_S):
            now_s = time.monotonic()
            late_s = now_s - looked_s - LOOK_INTERVAL_S
            # Where this thread is late as well, all of the process stood still. On a busy machine
            # each look comes a little late, which says nothing of the loop.
            if late_s > LOOK_INTERVAL_S:
                self._stopped_s += late_s
            looked_s = now_s
            if self._seen is None and now_s - self._due_s - self._stopped_s > STALL_S:
                self._seen = _place(sys._current_frames().get(self._thread_id))


def _place(frame: FrameType | None) -> str | None:
    if frame is None:
        return None
    frames = traceback.extract_stack(frame)[-FRAMES_MAX:]
    return " < ".join(
        f"{frame.name} ({os.path.basename(frame.filename)}:{frame.lineno})"
        for frame in reversed(frames)
    )
