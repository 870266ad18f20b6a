"""`python -m proving.chaos.groups`: members of a group join and leave every few seconds, some
by SIGKILL, under load; exit code 1 unless the checker finds nothing.

Three brokers on a local Ray, six partitions with three replicas; producers and every member are
processes of their own. Two members stay all the time: their longest gaps between polls, with and
without a rebalance, say whether those whose partitions do not move are disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import ray

from proving.chaos.cluster import wait_until
from proving.chaos.guard import Guard
from proving.chaos.load import LoadSpec, read_all, run_producers
from proving.chaos.members import Member, MemberReport
from proving.chaos.processes import MARK
from rayq.client.cluster import Cluster
from rayq.errors import RayqError, UnknownGroupError
from rayq.runtime.ray import cluster as ray_cluster
from rayq.testing.checker import Recorder, Verdict, check, read_history
from rayq.wire.authentication import client_key

NAME = "chaos-groups"
TOPIC, GROUP = "shared", "workers"
PARTITIONS = 6
PORT = 9592
STEADY_MEMBERS = 2
EXTRA_MEMBERS_MAX = 4
PAUSE_S = (0.5, 2.5)
"""The pause before the next change, once the group has settled."""
AT_ONCE_SHARE = 0.25
"""The share of the changes that do not wait until the group has settled after the one before."""
KILL_SHARE = 0.4
"""The share of the leaving members that are killed."""
SETTLE_TIMEOUT_S = 30.0
CATCH_UP_TIMEOUT_S = 90.0
RECORDS_PER_S = 600
LOOK_S = 0.01

What = Literal["join", "leave", "kill"]


class Change(NamedTuple):
    """A member that came or went, and the time when the group had settled again."""

    what: What
    at_s: float
    settled_s: float
    is_alone: bool
    """True if no other change came before the group had settled."""


class Gaps(NamedTuple):
    """The longest times between two polls of members whose partitions did not move meanwhile."""

    quiet_s: float
    rebalance_s: float


@dataclass
class Result:
    seed: int
    changes: list[Change] = field(default_factory=list)
    gaps: Gaps | None = None
    problems: list[str] = field(default_factory=list)
    verdict: Verdict | None = None
    load_s: float = 0.0
    history: Path | None = None
    """The history file, which is kept only after a failure."""

    @property
    def holds(self) -> bool:
        return self.verdict is not None and self.verdict.is_clean and not self.problems

    def settling_s(self, what: What) -> list[float]:
        """The times to settle of changes that no other change disturbed."""
        return [
            change.settled_s - change.at_s
            for change in self.changes
            if change.what == what and change.is_alone
        ]


def run(seconds: float, seed: int, rate: int, say: Callable[[str], None]) -> Result:
    """Runs the scenario. However it ends, no process of the run is left."""
    run_id = uuid.uuid4().hex
    os.environ[MARK] = run_id
    directory = Path(tempfile.mkdtemp(prefix="rayq-chaos-"))
    guard = Guard(run_id)
    result = Result(seed)
    is_kept = False
    try:
        _run(seconds, rate, directory, result, say)
    except (RayqError, TimeoutError, EOFError) as error:
        result.problems.append(f"The run ended early: {type(error).__name__}: {error}")
        is_kept = (directory / "history.jsonl").exists()
    else:
        is_kept = not result.holds
    finally:
        if not guard.close():
            result.problems.append("Some processes of the run would not end.")
        del os.environ[MARK]
        shutil.rmtree(directory / "data", ignore_errors=True)
        if is_kept:
            result.history = directory / "history.jsonl"
        else:
            shutil.rmtree(directory)
    return result


def _run(
    seconds: float, rate: int, directory: Path, result: Result, say: Callable[[str], None]
) -> None:
    say("starting three brokers")
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        info, _ = ray_cluster.start_cluster(
            str(directory / "data"),
            brokers=3,
            cluster_name=NAME,
            port=PORT,
            given={},
        )
        addresses = [f"{host}:{port}" for host, port in info.brokers]
        with Cluster(addresses, key=client_key(info.secret)) as cluster:
            cluster.create_topic(TOPIC, partitions=PARTITIONS, replication_factor=3)
            spec = LoadSpec(
                ",".join(addresses),
                cluster.token,
                TOPIC,
                PARTITIONS,
                str(directory / "history.jsonl"),
                rate,
                result.seed,
            )
            _churn(seconds, cluster, spec, result, say)
            say("reading everything")
            read_all(cluster, spec)
        say("judging")
        with open(spec.history, "rb") as file:
            result.verdict = check(read_history(file))
        ray_cluster.stop_cluster(NAME)
    finally:
        ray.shutdown()


def _churn(
    seconds: float, cluster: Cluster, spec: LoadSpec, result: Result, say: Callable[[str], None]
) -> None:
    recorder = spec.recorder()
    recorder.group_opened(GROUP, [TOPIC])
    stop = threading.Event()
    producers = threading.Thread(
        target=lambda: result.problems.extend(run_producers(spec, stop).problems), daemon=True
    )
    crowd = _Crowd(cluster, spec, recorder, result, say)
    try:
        producers.start()
        for number in range(STEADY_MEMBERS):
            crowd.join(f"steady-{number}")
        crowd.settle()
        result.changes.clear()
        crowd.churn(seconds)
        stop.set()
        producers.join()
        say("catching up")
        wait_until(
            lambda: cluster.admin.describe_group(GROUP).lag == 0,
            CATCH_UP_TIMEOUT_S,
            lambda: f"the group is behind: {cluster.admin.describe_group(GROUP).partitions}",
        )
        result.gaps = longest_gaps(crowd.leave_all(), result.changes)
    finally:
        stop.set()
        crowd.abort()


class _Crowd:
    """The members: some stay, the others come and go."""

    def __init__(
        self,
        cluster: Cluster,
        spec: LoadSpec,
        recorder: Recorder,
        result: Result,
        say: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._spec = spec
        self._recorder = recorder
        self._result = result
        self._say = say
        self._rng = random.Random(result.seed)
        self._members: dict[str, Member] = {}
        self._leaving: list[Member] = []
        self._open: list[tuple[What, float]] = []
        """The changes after which the group has not settled yet."""
        self._count = 0
        self._started_s = time.monotonic()

    def join(self, name: str) -> None:
        member = self._members[name] = Member(self._spec, GROUP, name)
        self._open.append(("join", member.wait_joined()))

    def churn(self, seconds: float) -> None:
        """Members join and leave. At least one is killed, however short the time."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s or not self._result.settling_s("kill"):
            self._change()
            if self._rng.random() > AT_ONCE_SHARE:
                self.settle()
                time.sleep(self._rng.uniform(*PAUSE_S))
        self.settle()

    def _change(self) -> None:
        extra = [name for name in self._members if name.startswith("extra")]
        wants_more = self._rng.random() < 0.5
        if not extra or (wants_more and len(extra) < EXTRA_MEMBERS_MAX):
            self._count += 1
            what, name = "join", f"extra-{self._count}"
            self.join(name)
        else:
            name = self._rng.choice(extra)
            member = self._members.pop(name)
            if self._rng.random() < KILL_SHARE:
                what = "kill"
                self._recorder.killed(name)
                self._open.append(("kill", time.monotonic()))
                member.kill()
            else:
                what = "leave"
                self._open.append(("leave", time.monotonic()))
                member.ask_to_leave()
                self._leaving.append(member)
        self._say(f"{time.monotonic() - self._started_s:6.1f} s  {what} {name}")

    def settle(self) -> None:
        """Waits until the members share all partitions, and no partition is on its way."""
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        while not self._is_settled():
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"{len(self._members)} members have not settled in {SETTLE_TIMEOUT_S:.0f} s: "
                    f"{self._cluster.admin.describe_group(GROUP)}"
                )
            time.sleep(LOOK_S)
        settled_s = time.monotonic()
        for what, at_s in self._open:
            change = Change(what, at_s, settled_s, len(self._open) == 1)
            self._result.changes.append(change)
        self._open.clear()
        for member in self._leaving:
            self._result.problems += member.report().problems
        self._leaving.clear()

    def _is_settled(self) -> bool:
        return is_settled(self._cluster, GROUP, len(self._members), PARTITIONS)

    def leave_all(self) -> list[MemberReport]:
        """The answers of the members that stayed all the time."""
        members, self._members = self._members, {}
        for member in members.values():
            member.ask_to_leave()
        reports = [member.report() for member in members.values()]
        for report in reports:
            self._result.problems += report.problems
        return [report for report in reports if report.name.startswith("steady")]

    def abort(self) -> None:
        for member in (*self._members.values(), *self._leaving):
            member.abort()


def is_settled(cluster: Cluster, group: str, members: int, partitions: int) -> bool:
    """Returns whether this many members own all partitions, and no partition is on its way."""
    try:
        info = cluster.admin.describe_group(group)
    except UnknownGroupError:
        return False  # No member has joined yet.
    owned = sum(len(member.assigned) for member in info.members)
    return (
        info.state == "stable"
        and len(info.members) == members
        and owned == partitions
        and not any(member.revoking for member in info.members)
    )


def longest_gaps(reports: Sequence[MemberReport], changes: Sequence[Change]) -> Gaps:
    """The longest gaps in which no partition of the member itself moved, with and without a
    rebalance in them."""
    quiet_s = rebalance_s = 0.0
    for report in reports:
        for before_s, after_s in pairwise(report.polled_s):
            place = bisect_left(report.moved_s, before_s)
            if place < len(report.moved_s) and report.moved_s[place] <= after_s:
                continue
            if any(change.at_s <= after_s and before_s <= change.settled_s for change in changes):
                rebalance_s = max(rebalance_s, after_s - before_s)
            elif changes and changes[0].at_s <= before_s and after_s <= changes[-1].settled_s:
                quiet_s = max(quiet_s, after_s - before_s)
    return Gaps(quiet_s, rebalance_s)


def as_json(result: Result) -> dict[str, Any]:
    verdict = result.verdict
    return {
        "seed": result.seed,
        "holds": result.holds,
        "load_s": round(result.load_s, 1),
        "sent": verdict and verdict.sent,
        "acknowledged": verdict and verdict.acknowledged,
        "polled": verdict and verdict.polled,
        "polled_again": verdict and verdict.repeated,
        "checker_faults": verdict
        and [f"{fault.kind}: {fault.what}" for fault in verdict.faults[:100]],
        "problems": result.problems,
        "history": None if result.history is None else str(result.history),
        "changes": len(result.changes),
        "settling_s": {
            what: [round(settled_s, 3) for settled_s in result.settling_s(what)]
            for what in ("join", "leave", "kill")
        },
        "longest_gap_quiet_s": result.gaps and round(result.gaps.quiet_s, 3),
        "longest_gap_in_rebalances_s": result.gaps and round(result.gaps.rebalance_s, 3),
    }


def show(result: Result, say: Callable[[str], None]) -> None:
    for what in ("join", "leave", "kill"):
        times = result.settling_s(what)
        if times:
            say(
                f"{what}: {len(times)} times, settled after {median(times) * 1000:.0f} ms (median),"
                f" {max(times) * 1000:.0f} ms (longest)"
            )
    if result.gaps is not None:
        say(
            "longest gap between polls of members that stayed, their partitions not moving: "
            f"{result.gaps.rebalance_s * 1000:.0f} ms in rebalances, "
            f"{result.gaps.quiet_s * 1000:.0f} ms without"
        )
    for problem in result.problems:
        say(problem)
    if result.verdict is not None:
        say(str(result.verdict))
    if result.history is not None:
        say(f"The history is kept: {result.history}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m proving.chaos.groups", description="Churn a consumer group."
    )
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--rate", type=int, default=RECORDS_PER_S, help="records per second")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    screen = sys.stdout

    def say(line: str) -> None:
        print(line, file=screen, flush=True)

    say(f"seed {options.seed}")
    try:
        # Ray prints much on stdout about each process that dies.
        with contextlib.redirect_stdout(io.StringIO()):
            started_s = time.monotonic()
            result = run(options.minutes * 60, options.seed, options.rate, say)
            result.load_s = time.monotonic() - started_s
    except KeyboardInterrupt:
        say("Interrupted.")
        return 130
    show(result, say)
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(result), indent=2) + "\n")
    return 0 if result.holds else 1


if __name__ == "__main__":
    sys.exit(main())
