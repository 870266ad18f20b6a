"""The cleaner in a process of its own: at the lowest priority, paced, gone when its parent is.

A compaction in the replica's process would hold its interpreter lock. The helper is started for one
pass: the job goes in by stdin, the result or an error comes back by stdout.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time

import msgspec

from rayq.errors import RayqError, from_wire, to_wire
from rayq.storage.appending import open_failed
from rayq.storage.cleaner import CleaningJob, CleaningResult, clean, cleaner_turn
from rayq.storage.disk import LocalDisk

SLEEP_MAX_S = 0.1
"""Between two looks at whether the parent is still there."""


class _Failure(msgspec.Struct, frozen=True):
    """An error on its way to the parent."""

    code: str
    message: str


class _Answer(msgspec.Struct, frozen=True):
    result: CleaningResult | None = None
    failure: _Failure | None = None


async def run_cleaner_process(job: CleaningJob) -> CleaningResult:
    """`RunCleaner` by a helper process, which ends with the task that waits for it."""
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __name__,
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
    finally:
        if process.returncode is None:
            process.kill()
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


def _main() -> None:
    parent = int(sys.argv[1])
    # A low weight (nice 19) is not enough: a thread that wakes waits for the end of the time slice
    # of such a process, but not of an idle one. With three helpers on two busy cores that made the
    # 99th percentile of producers 1.2 to 1.6 times as high during a pass, not 1.5 to 2.5 times.
    # What is left to it on a machine without idle time is about 0.3% of a core.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=CleaningJob)
    try:
        answer = _Answer(result=_run(job, parent))
    except RayqError as error:
        answer = _Answer(failure=_Failure(*to_wire(error)))
    except OSError as error:
        answer = _Answer(failure=_Failure(*to_wire(open_failed(job.directory, error))))
    sys.stdout.buffer.write(msgspec.msgpack.encode(answer))


def _run(job: CleaningJob, parent: int) -> CleaningResult:
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
            resume_s = started_s + bytes_moved / job.bytes_per_s
            while True:
                if os.getppid() != parent:
                    sys.exit("the parent process is gone")
                wait_s = resume_s - time.monotonic()
                if wait_s <= 0:
                    break
                time.sleep(min(wait_s, SLEEP_MAX_S))
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return msgspec.structs.replace(result, peak_memory_bytes=peak_bytes)


if __name__ == "__main__":
    _main()
