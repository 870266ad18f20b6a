"""The process of a worker of queues, which never imports Ray: it takes records and settles them.

All that it does and sees goes to the history, which all processes share. What became of the last
settlements of a process that was killed nobody knows.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import socket
import stat
import threading
import time
from types import FrameType

from proving.chaos.load import LoadSpec
from rayq.client.queues.queue import Queue
from rayq.client.queues.task import QueueTask, lock_count
from rayq.errors import LockLostError, RayqError
from rayq.testing.checker import Recorder

TAKE_MAX = 200
TAKE_TIMEOUT_S = 0.5
FLUSH_TIMEOUT_S = 30.0
CUT_OFF = signal.SIGUSR1
"""Breaks all connections of the process for a while."""
CUT_OFF_S = (0.0, 4.0)
"""The leader frees the locks of a consumer that is gone for a second."""
CUT_STEP_S = 0.05
NACK_SHARE, REJECT_SHARE = 0.02, 0.003


class Worker:
    """A process: it works at one queue until SIGTERM."""

    def __init__(self, spec: LoadSpec, queue: str, name: str) -> None:
        self._spec = spec
        self._queue = queue
        self._name = name
        self._rng = random.Random(f"{spec.seed}/{name}")
        self._is_ending = False

    def run(self) -> None:
        def end(_number: int, _frame: FrameType | None) -> None:
            self._is_ending = True

        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, end)
        signal.signal(CUT_OFF, self._cut_off)
        recorder = self._spec.recorder()
        while not self._is_ending:
            try:
                self._work(recorder)
            except RayqError:
                time.sleep(TAKE_TIMEOUT_S)  # Nobody answered for long: start over.

    def _work(self, recorder: Recorder) -> None:
        with self._spec.connect() as cluster, cluster.queue(self._queue) as queue:
            while not self._is_ending:
                try:
                    tasks = queue.take(self._rng.randint(1, TAKE_MAX), timeout_s=TAKE_TIMEOUT_S)
                except RayqError:
                    continue  # The leaders do not answer just now.
                self._handle(recorder, queue, tasks)

    def _cut_off(self, _number: int, _frame: FrameType | None) -> None:
        until_s = time.monotonic() + self._rng.uniform(*CUT_OFF_S)

        def cut() -> None:
            _break_connections()
            while time.monotonic() < until_s:
                time.sleep(CUT_STEP_S)
                _break_connections()

        threading.Thread(target=cut, daemon=True).start()

    def _handle(self, recorder: Recorder, queue: Queue, tasks: list[QueueTask]) -> None:
        settled: list[tuple[int, QueueTask]] = []
        for partition in sorted({task.partition for task in tasks}):
            some = [task for task in tasks if task.partition == partition]
            now_s = time.monotonic()
            locks = [
                (record.offset, lock_count(record), record.value or b"", record.key)
                for record in some
            ]
            recorder.took(
                self._queue, self._name, partition, locks, asked_s=now_s, at_s=now_s
            )
            for what, share in self._divided(some).items():
                if share:
                    settled += self._settle(recorder, partition, what, share)
        failed: RayqError | None = None
        try:
            queue.flush(FLUSH_TIMEOUT_S)
        except LockLostError:
            pass  # Each task's own error says so.
        except RayqError as error:
            failed = error
        now_s = time.monotonic()
        by_number: dict[int, list[QueueTask]] = {}
        for number, task in settled:
            by_number.setdefault(number, []).append(task)
        for number, of_it in by_number.items():
            lost = [task for task in of_it if task.lost is not None]
            doubts = [record.lost for record in lost if "could not be told" in str(record.lost)]
            doubt = doubts[0] if doubts else failed
            if doubt is not None:
                recorder.not_settled(self._name, number, doubt, at_s=now_s)
            else:
                offsets = [task.offset for task in lost]
                recorder.settled(self._name, number, at_s=now_s, lost=offsets)

    def _divided(self, tasks: list[QueueTask]) -> dict[str, list[QueueTask]]:
        """The records, divided by what is done with them."""
        found: dict[str, list[QueueTask]] = {"ack": [], "nack": [], "reject": []}
        for task in tasks:
            drawn = self._rng.random()
            if drawn < REJECT_SHARE:
                found["reject"].append(task)
            else:
                found["nack" if drawn < REJECT_SHARE + NACK_SHARE else "ack"].append(task)
        return found

    def _settle(
        self, recorder: Recorder, partition: int, what: str, tasks: list[QueueTask]
    ) -> list[tuple[int, QueueTask]]:
        number = recorder.settling(
            self._queue,
            self._name,
            partition,
            what,  # type: ignore[arg-type]
            [(task.offset, lock_count(task)) for task in tasks],
            at_s=time.monotonic(),
        )
        for task in tasks:
            try:
                if what == "ack":
                    task.ack()
                elif what == "nack":
                    task.nack(0.2)
                else:
                    task.reject("unwanted")
            except LockLostError:
                pass  # As above.
        return [(number, task) for task in tasks]


def _break_connections() -> None:
    """Breaks connections: their readers and writers find them closed by the other side."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(descriptor))
        except OSError:
            continue  # It is gone.
        if not stat.S_ISSOCK(os.fstat(copy).st_mode):
            os.close(copy)
            continue
        with socket.socket(fileno=copy) as held, contextlib.suppress(OSError):
            if held.family == socket.AF_INET and held.type == socket.SOCK_STREAM:
                held.shutdown(socket.SHUT_RDWR)


def live(spec: LoadSpec, queue: str, name: str) -> None:
    """The work of the process."""
    logging.getLogger("rayq").setLevel(logging.ERROR)  # Whoever hung hears of many lost locks.
    Worker(spec, queue, name).run()
