"""How long a 1 GiB partition takes to open: after a clean stop, and after kill -9.

    python -m benchmarks.reopen fill DIR clean|kill     writes a log, then closes it or kills itself
    python -m benchmarks.reopen open DIR                opens it, prints the seconds, closes it

Each step is a process of its own. The page cache is warm, so rayq's work is measured, and not the
disk's.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.machine import MIB
from benchmarks.report import Row
from rayq.config import ClusterConfig, TopicConfig
from rayq.storage.batch import encode_batch, read_header
from rayq.storage.disk import LocalDisk
from rayq.storage.log import Log

SIZE_BYTES = 1020 * MIB
"""As much as one segment takes, and just below the 64 MiB after which the recovery point moves:
kill -9 leaves the longest tail to read again."""
BATCHES_PER_FLUSH = 16
RECORDS_PER_BATCH = 64
REPETITIONS = 3
CHECKPOINT_BYTES = ClusterConfig().flush_checkpoint_bytes


def open_log(directory: str) -> Log:
    return Log.open(
        LocalDisk(),
        directory,
        TopicConfig(),
        checkpoint_bytes=CHECKPOINT_BYTES,
        now_ms=time.time_ns() // 1_000_000,
    )


def fill(directory: str, end: str) -> None:
    """Appends and flushes as a replica does, up to 1 GiB."""
    values = [os.urandom(1024) for _ in range(RECORDS_PER_BATCH)]
    log = open_log(directory)
    log.epochs.assign(0, 0)
    while log.size_bytes < SIZE_BYTES:
        for _ in range(BATCHES_PER_FLUSH):
            now_ms = time.time_ns() // 1_000_000
            batch = encode_batch(values, timestamps_ms=now_ms, compression="none")
            log.append_as_leader(batch, read_header(batch), leader_epoch=0, now_ms=now_ms)
        if (plan := log.plan_flush(log.end_offset)) is not None:
            plan.run()
            log.apply_flush(plan)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    log.close(log.end_offset)


def open_and_time(directory: str) -> None:
    started_s = time.perf_counter()
    log = open_log(directory)
    print(time.perf_counter() - started_s, log.end_offset)
    log.close(log.end_offset)


def _step(*arguments: str) -> str:
    command = [sys.executable, "-m", "benchmarks.reopen", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode not in (0, -signal.SIGKILL):
        raise RuntimeError(f"{' '.join(arguments)} failed: {ran.stderr}")
    return ran.stdout


def reopen(directory: Path) -> list[Row]:
    rows = []
    for end, name, target_s in (("clean", "a clean stop", 0.3), ("kill", "kill -9", 1.5)):
        samples = []
        path = directory / f"reopen-{end}"
        for repetition in range(REPETITIONS):
            # The step that opens a log also stops cleanly: a log to kill is made again each time.
            if repetition == 0 or end == "kill":
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir()
                _step("fill", str(path), end)
            took_s, end_offset = _step("open", str(path)).split()
            assert int(end_offset) >= SIZE_BYTES // 1200, "the log lost records"
            samples.append(float(took_s))
        shutil.rmtree(path)
        rows.append(
            Row(
                name=f"open a 1 GiB partition after {name}",
                unit="s",
                samples=samples,
                target=target_s,
                better="lower",
                note="page cache warm",
            )
        )
    return rows


if __name__ == "__main__":
    if sys.argv[1] == "fill":
        fill(sys.argv[2], sys.argv[3])
    else:
        open_and_time(sys.argv[2])
