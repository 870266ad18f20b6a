"""The watch of an event loop, on real threads and a real clock."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from proving.chaos.stalls import Stall, stalls_in
from rayq.runtime.loop_watch import HELD_INTERPRETER, LOOK_INTERVAL_S, STALL_S, LoopWatch

LONG_S = 4 * STALL_S


def told_after(stands_still: Callable[[], None], caplog: pytest.LogCaptureFixture) -> Stall:
    """What is told, as chaos reads it."""

    def told() -> list[Stall]:
        return list(stalls_in("a process", caplog.messages))

    async def live() -> None:
        watch = LoopWatch()
        await asyncio.sleep(0.2)
        stands_still()
        deadline_s = time.monotonic() + 30
        while not told():
            assert time.monotonic() < deadline_s, "it was not told"
            await asyncio.sleep(0.05)
        watch.stop()

    with caplog.at_level(logging.INFO, "rayq.runtime.loop_watch"):
        asyncio.run(live())
    return told()[0]


@pytest.mark.parametrize("machine", ["quiet", "busy"])
def test_it_says_how_long_the_loop_stood_still_and_where(
    machine: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine each look of the watching thread comes a little late."""

    def waits_for_a_disk() -> None:
        time.sleep(LONG_S)

    wait = threading.Event.wait

    def wait_longer(event: threading.Event, timeout: float | None = None) -> bool:
        return wait(event, timeout + 0.05 if timeout == LOOK_INTERVAL_S else timeout)

    if machine == "busy":
        monkeypatch.setattr(threading.Event, "wait", wait_longer)
    _, still_s, _, where = told_after(waits_for_a_disk, caplog)
    assert still_s >= LONG_S - 0.2
    assert where.startswith("waits_for_a_disk (test_loop_watch.py:"), where


def test_code_that_holds_the_interpreter_is_told_of_by_its_cpu(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # The C library that is called without letting the interpreter go spends the CPU.
    library = ctypes.PyDLL(None)
    library.clock.restype = ctypes.c_long

    def computes() -> None:
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(30.0)
        try:
            end_s = time.thread_time() + LONG_S
            while time.thread_time() < end_s:
                library.clock()
        finally:
            sys.setswitchinterval(interval_s)

    _, still_s, cpu_s, where = told_after(computes, caplog)
    assert still_s >= LONG_S - 0.2 and cpu_s >= LONG_S - 0.2
    assert where == HELD_INTERPRETER or where.startswith("computes ("), where


def test_a_process_that_was_stopped_as_a_whole_is_not_blamed() -> None:
    script = (
        "import asyncio, logging, os, signal, sys\n"
        "from rayq.runtime.loop_watch import LoopWatch\n"
        "logging.basicConfig(stream=sys.stdout, level=logging.INFO)\n"
        "async def live():\n"
        "    LoopWatch()\n"
        "    await asyncio.sleep(0.3)\n"
        "    print('up', flush=True)\n"
        "    await asyncio.to_thread(sys.stdin.readline)\n"
        "    await asyncio.sleep(0.5)\n"
        "asyncio.run(live())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == "up\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(LONG_S)
        os.kill(process.pid, signal.SIGCONT)
        process.stdin.write("\n")
        process.stdin.close()
        # A busy machine may hold up the loop beside that, but not for as long.
        told = stalls_in("a process", process.stdout)
        assert all(one.still_s < LONG_S / 2 for one in told)
        assert process.wait(30) == 0
