"""Cost of a change for many brokers on a machine that is too small, and the sessions of live
brokers that overload ends.

    python -m benchmarks.overload [--brokers 30] [--partitions 500] [--busy 3] [--runs 1]

All servers are in this process (`LocalCluster`): one event loop for all is harder than life. With
`--busy` so many busy loops run beside it, until everything is measured; then they end, and what is
still amiss has to come right.
"""

from __future__ import annotations

import argparse
import logging
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks import machine
from benchmarks.report import Row, print_all, wide_console
from rayq.errors import TimeoutError
from rayq.testing import LocalCluster

OUTPUT = Path(".bench/overload.json")
REPLICATION_FACTOR = 3
TOPIC = "many"
WATCHED_S = 5.0
STEP_TIMEOUT_S = 600.0
SETTLE_S = 10.0
"""Time after the end of a broker in which sessions and leaders are still counted."""
POLL_S = 0.02


class Changes(logging.Handler):
    """The lines that the controller logs of partitions and sessions."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._guard = threading.Lock()
        self.leaders: dict[int, int | None] = {}
        self.isr: dict[int, list[int]] = {}
        self.sessions_ended: list[int] = []
        self.elections = 0
        self.offline = 0

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "rayq_event", None)
        fields = getattr(record, "rayq_fields", {})
        with self._guard:
            if event == "session_ended":
                self.sessions_ended.append(fields["broker"])
            if fields.get("topic") != TOPIC or "isr" not in fields:
                return
            partition = fields["partition"]
            self.isr[partition] = fields["isr"]
            if event == "partition_offline":
                self.leaders[partition] = None
                self.offline += 1
            elif event == "leader_elected":
                self.leaders[partition] = fields["leader"]
                self.elections += 1

    def led_by(self, broker: int | None) -> int:
        with self._guard:
            return sum(leader == broker for leader in self.leaders.values())

    def in_sync(self, *, without: int | None = None) -> int:
        """The partitions whose replicas are all in sync, but for those on a broker that ended."""
        with self._guard:
            missing = 0 if without is None else 1
            return sum(len(isr) >= REPLICATION_FACTOR - missing for isr in self.isr.values())


@contextmanager
def changes() -> Iterator[Changes]:
    told = Changes()
    logger = logging.getLogger("rayq")
    level, propagates = logger.level, logger.propagate
    logger.addHandler(told)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield told
    finally:
        logger.removeHandler(told)
        logger.setLevel(level)
        logger.propagate = propagates


@contextmanager
def busy_loops(count: int) -> Iterator[Callable[[], None]]:
    """Runs so many busy loops, until the block or the function that it yields ends them."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]

    def end() -> None:
        while loops:
            loop = loops.pop()
            loop.kill()
            loop.wait()

    try:
        yield end
    finally:
        end()


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Stopwatch:
    """The time and the CPU time of this process since its begin."""

    def __init__(self) -> None:
        self._time_s, self._cpu_s = time.monotonic(), cpu_s()

    def until(self, holds: Callable[[], bool], what: str) -> tuple[float, float]:
        """Waits, and returns the seconds and the CPU seconds that it took. Raises TimeoutError."""
        while not holds():
            if time.monotonic() - self._time_s > STEP_TIMEOUT_S:
                raise TimeoutError(f"Waited {STEP_TIMEOUT_S:g} s in vain for {what}.")
            time.sleep(POLL_S)
        return time.monotonic() - self._time_s, cpu_s() - self._cpu_s


class Run:
    """The figures of one run, by name."""

    def __init__(self, brokers: int, partitions: int, busy: int) -> None:
        self.figures: dict[str, float] = {}
        victim = brokers // 2
        with (
            changes() as told,
            LocalCluster(brokers=brokers) as cluster,
            busy_loops(busy) as end_busy_loops,
        ):
            watch = Stopwatch()
            with suppress(TimeoutError):  # It goes on all the same.
                cluster.create_topic(
                    TOPIC, partitions=partitions, replication_factor=REPLICATION_FACTOR
                )
            self._note("in sync", *watch.until(lambda: told.in_sync() == partitions, "in sync"))
            watch = Stopwatch()
            time.sleep(WATCHED_S)
            took_s, used_s = watch.until(lambda: True, "nothing")
            self.figures["idle CPU"] = used_s / took_s
            elections, offline = told.elections, told.offline
            led = told.led_by(victim)
            watch = Stopwatch()
            cluster.kill_broker(victim)
            self._note(
                "all led again",
                *watch.until(
                    lambda: told.led_by(victim) == told.led_by(None) == 0, "leaders"
                ),
            )
            time.sleep(SETTLE_S)
            self.figures["elections for each leader lost"] = (told.elections - elections) / led
            self.figures["times offline for each leader lost"] = (told.offline - offline) / led
            self.figures["sessions of live brokers ended"] = sum(
                broker != victim for broker in told.sessions_ended
            )
            end_busy_loops()
            watch = Stopwatch()
            took_s, _ = watch.until(
                lambda: told.led_by(None) == 0 and told.in_sync(without=victim) == partitions,
                "all to be well",
            )
            self.figures["all well after the load"] = took_s

    def _note(self, name: str, took_s: float, used_s: float) -> None:
        self.figures[name], self.figures[f"{name}, CPU"] = took_s, used_s


TARGETS = {
    "all led again": 4.0, "all led again, CPU": 1.0, "sessions of live brokers ended": 0.0,
    "all well after the load": 5.0,
}


def overload(brokers: int, partitions: int, busy: int, runs: int) -> list[Row]:
    done = [Run(brokers, partitions, busy).figures for _ in range(runs)]
    beside = f", beside {busy} busy loops" if busy else ""
    return [
        Row(
            name=f"{name}{beside}",
            unit="" if "ended" in name or "each" in name else "s",
            samples=[figures[name] for figures in done],
            target=TARGETS.get(name),
            better="lower",
            note=f"{brokers} brokers and {partitions} partitions of three replicas in one process",
        )
        for name in done[0]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--brokers", type=int, default=30)
    parser.add_argument("--partitions", type=int, default=500)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--runs", type=int, default=1)
    options = parser.parse_args()
    rows = overload(options.brokers, options.partitions, options.busy, options.runs)
    print_all(wide_console(), OUTPUT, rows, machine.describe(), [])


if __name__ == "__main__":
    main()
