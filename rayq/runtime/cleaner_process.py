"""The cleaner in a process of its own: at low priority, throttled, and ended with its parent.

A compaction in the replica's process would hold its interpreter lock. The helper is started for one
pass: the job goes in by stdin, the result or an error comes back by stdout.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import resource
import signal
import sys
import time

import msgspec

from rayq.errors import RayqError, from_wire, to_wire
from rayq.storage.appending import open_failed
from rayq.storage.cleaner import CleaningJob, CleaningResult, clean, cleaner_turn
from rayq.storage.disk import LocalDisk

logger = logging.getLogger(__name__)

IDLE_PATIENCE_S = 30.0
"""A helper of idle priority may take so long, and `PATIENCE_FACTOR` times what its pace takes."""
PATIENCE_FACTOR = 10
BUSY_NICE = 10
"""The niceness of the helper that takes over: about a tenth of what a process of normal priority
gets."""
_PR_SET_PDEATHSIG = 1


class _Failure(msgspec.Struct, frozen=True):
    """An error on its way to the parent."""

    code: str
    message: str


class _Answer(msgspec.Struct, frozen=True):
    result: CleaningResult | None = None
    failure: _Failure | None = None


async def run_cleaner_process(job: CleaningJob) -> CleaningResult:
    """`RunCleaner` by a helper process, which ends with the task that waits for it.

    The helper has idle priority. Where the machine is never idle it would not get on, and the log
    would grow forever; then, or when it hangs, another takes its place that gets some time in any
    case.
    """
    size_bytes = sum(source.size_bytes for group in job.groups for source in group)
    patience_s = IDLE_PATIENCE_S + PATIENCE_FACTOR * size_bytes / job.bytes_per_s
    try:
        async with asyncio.timeout(patience_s):
            return await _run_helper(job, "idle")
    except TimeoutError:
        logger.info(
            "compacting %s took more than %.0f s at idle priority: once more with some priority",
            *(job.directory, patience_s),
        )
    return await _run_helper(job, "busy")


async def _run_helper(job: CleaningJob, priority: str) -> CleaningResult:
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __name__,
            priority,
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Ray may have given this process more places to import from.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    except OSError as error:
        raise RayqError(f"The cleaner's process could not be started: {error}") from error
    try:
        output, _ = await process.communicate(msgspec.msgpack.encode(job))
    except RuntimeError as error:  # What uvloop raises where a pipe is closed already.
        raise RayqError(
            f"The cleaner's process {process.pid} ended before it was told what to do."
        ) from error
    finally:
        if process.returncode is None:
            process.kill()
            await _ended(process)
    try:
        answer = msgspec.msgpack.decode(output, type=_Answer)
    except msgspec.DecodeError as error:
        raise RayqError(
            f"The cleaner's process {process.pid} ended ({process.returncode}) without a result."
        ) from error
    if answer.failure is not None:
        raise from_wire(answer.failure.code, answer.failure.message)
    assert answer.result is not None
    return answer.result


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Returns when a killed process is gone, and its lock with it; also if cancelled once more
    (the task that calls this is ending already)."""
    while process.returncode is None:
        try:
            await process.wait()
        except asyncio.CancelledError:
            continue


def _main() -> None:
    priority, parent = sys.argv[1], int(sys.argv[2])
    _die_with(parent)
    # A low weight (nice 19) is not enough: a thread that wakes waits for the end of the time slice
    # of such a process, but not of a SCHED_IDLE one. During a pass of three helpers on two busy
    # cores, SCHED_IDLE raised producers' p99 1.2 to 1.6 times; nice 19 raised it 1.5 to 2.5 times.
    # On a machine without idle time a SCHED_IDLE process still gets about 0.3% of a core.
    if priority == "idle":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(BUSY_NICE)
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=CleaningJob)
    try:
        answer = _Answer(result=_run(job))
    except RayqError as error:
        answer = _Answer(failure=_Failure(*to_wire(error)))
    except OSError as error:
        answer = _Answer(failure=_Failure(*to_wire(open_failed(job.directory, error))))
    sys.stdout.buffer.write(msgspec.msgpack.encode(answer))


def _die_with(parent: int) -> None:
    """The kernel kills this process when the thread that started it ends. To notice by itself that
    its work is not wanted any more would take time that it may not get, and it holds a lock."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent process is gone")


def _run(job: CleaningJob) -> CleaningResult:
    disk = LocalDisk()
    with cleaner_turn(disk, job.directory):
        steps = clean(disk, job)
        started_s, bytes_moved = time.monotonic(), 0
        while True:
            try:
                bytes_moved += next(steps)
            except StopIteration as end:
                result: CleaningResult = end.value
                break
            ahead_s = bytes_moved / job.bytes_per_s - (time.monotonic() - started_s)
            time.sleep(max(ahead_s, 0.0))
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return msgspec.structs.replace(result, peak_memory_bytes=peak_bytes)


if __name__ == "__main__":
    _main()
