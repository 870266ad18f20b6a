"""One run: steady, fault, recovery, again and again. Then all records are read and judged."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from proving.chaos.cluster import (
    PARTITIONS,
    REPLICAS,
    SETTLE_TIMEOUT_S,
    TOPIC,
    ChaosCluster,
    wait_until,
)
from proving.chaos.faults import Injected, Injector, Kind, Target, choose
from proving.chaos.guard import Guard
from proving.chaos.load import Load, LoadSpec, read_all
from proving.chaos.measure import Measured, measure, violations
from proving.chaos.principals import PrincipalLoad
from proving.chaos.processes import MARK
from proving.chaos.queues import QUEUE_TOPICS, QueueLoad
from proving.chaos.stalls import Stall
from proving.chaos.standstill import Standstill
from proving.chaos.transactions import TRANSACTION_TOPICS, TransactionLoad
from rayq.errors import RayqError
from rayq.testing.checker import Verdict, check, read_history
from rayq.testing.checker.writes import DUPLICATE, LOST, UNSEEN

HISTORY = "history.jsonl"
STEADY_S = 3.0
CHOICE_TIMEOUT_S = 5.0
RECORDS_PER_S = 1500
BESIDE = "beside"
"""The topic of the partitions beside."""
RECORDS_BESIDE_PER_S = 300
"""Over all of them: each is idle most of the time, as most partitions of a large cluster are."""


@dataclass(frozen=True)
class Plan:
    """The plan of a run. Faults are drawn without replacement until all `kinds` had their turn,
    then again, for `minutes` from the first record on. All kinds have their turn, however long that
    takes."""

    minutes: float
    seed: int
    kinds: Sequence[Kind]
    records_per_s: int = RECORDS_PER_S
    leniency: float = 1.0
    """The factor by which the limits of pauses and of recoveries grow."""
    has_transactions: bool = False
    has_queues: bool = False
    has_principals: bool = False
    partitions_beside: int = 0
    """Number of partitions of one more topic, which faults hit as well and whose records are
    judged. How long its partitions pause is not: they are written to too seldom."""


@dataclass
class Result:
    """The result of a run. `problems` has all reasons to fail but those that the checker finds."""

    seed: int
    faults: list[Injected] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    verdict: Verdict | None = None
    load_s: float = 0.0
    transactions: Counter[str] = field(default_factory=Counter)
    """The history of the clients with transactions, where the plan has some."""
    principals: Counter[str] = field(default_factory=Counter)
    """The revocations, and the answers that guests got, where the plan has principals."""
    queues: Counter[str] = field(default_factory=Counter)
    """The outcome of the workers of queues, where the plan has some."""
    stalls: list[Stall] = field(default_factory=list)
    """Event loops of servers that stood still, the longest first. They are shown; judged are only
    the pauses that they make."""
    history: Path | None = None
    """The history file, which is kept only after a failure."""

    @property
    def holds(self) -> bool:
        clean = self.verdict is not None and self.verdict.is_clean
        return clean and not self.problems

    @property
    def lost(self) -> int:
        return self._count(LOST, UNSEEN)

    @property
    def duplicated(self) -> int:
        return self._count(DUPLICATE)

    @property
    def injected(self) -> Counter[Kind]:
        return Counter(fault.target.kind for fault in self.faults)

    def _count(self, *kinds: str) -> int:
        faults = [] if self.verdict is None else self.verdict.faults
        return sum(fault.kind in kinds for fault in faults)


def run(plan: Plan, say: Callable[[str], None]) -> Result:
    """Runs the plan. However the run ends, no process of it is left."""
    run_id = uuid.uuid4().hex
    os.environ[MARK] = run_id
    directory = Path(tempfile.mkdtemp(prefix="rayq-chaos-"))
    guard = Guard(run_id)
    result = Result(plan.seed)
    is_kept = False
    try:
        _run(plan, directory, result, say)
    except (RayqError, TimeoutError, ProcessLookupError) as error:
        result.problems.append(f"The run ended early: {type(error).__name__}: {error}")
        is_kept = (directory / HISTORY).exists()
    else:
        is_kept = not result.holds
    finally:
        if not guard.close():
            result.problems.append("Some processes of the run would not end.")
        del os.environ[MARK]
        shutil.rmtree(directory / "data", ignore_errors=True)
        if is_kept:
            result.history = directory / HISTORY
        else:
            shutil.rmtree(directory)
    return result


def _run(plan: Plan, directory: Path, result: Result, say: Callable[[str], None]) -> None:
    cluster = ChaosCluster(directory / "data")
    loads: list[Load] = []
    transactions: TransactionLoad | None = None
    queues: QueueLoad | None = None
    principals: PrincipalLoad | None = None
    try:
        say("starting a Ray head and three nodes with a broker each")
        cluster.start()
        spec = LoadSpec(
            addresses=",".join(cluster.rayq.addresses),
            token=cluster.rayq.token,
            topic=TOPIC,
            partitions=PARTITIONS,
            history=str(directory / HISTORY),
            records_per_s=plan.records_per_s,
            seed=plan.seed,
        )
        specs = [spec]
        if plan.partitions_beside:
            say(f"making {plan.partitions_beside} partitions more")
            cluster.rayq.create_topic(BESIDE, plan.partitions_beside, REPLICAS)
            cluster.topics += [BESIDE]
            cluster.wait_settled()
            specs.append(
                replace(
                    spec,
                    topic=BESIDE,
                    partitions=plan.partitions_beside,
                    records_per_s=RECORDS_BESIDE_PER_S,
                    clients=f"{BESIDE}-",
                )
            )
        if plan.has_principals:
            principals = PrincipalLoad(cluster.rayq, spec, cluster.topics, plan.leniency)
            specs = [principals.spec_of(each) for each in specs]
        loads += [Load(spec) for spec in specs]
        for load in loads:
            load.start()
        if plan.has_transactions:
            transactions = TransactionLoad(spec)
            transactions.start(cluster.rayq)
            cluster.topics += TRANSACTION_TOPICS
            cluster.wait_settled()
        if plan.has_queues:
            queues = QueueLoad(spec)
            queues.start(cluster.rayq)
            cluster.topics += QUEUE_TOPICS
            cluster.wait_settled()
        for load in loads:
            load.wait_until_writing(cluster.rayq)
        started_s = time.monotonic()
        if principals is not None:
            principals.start()
        with Injector(cluster) as injector, Standstill() as standstill:
            _break(plan, cluster, injector, standstill, result, say, started_s)
        if principals is not None:
            say("revoking rights while nothing is broken")
            result.principals = principals.counts
            result.problems += principals.finish(result.faults)
        say("stopping the clients; reading everything")
        finished = [load.finish() for load in loads]
        result.load_s = time.monotonic() - started_s
        for finished_load in finished:
            result.problems += finished_load.problems
        result.measured = measure(result.faults, finished[0].acknowledged)
        result.problems += violations(result.measured, plan.leniency)
        if transactions is not None:
            result.transactions = transactions.counts
            result.problems += transactions.finish(cluster.rayq)
        if queues is not None:
            result.queues = queues.counts
            result.problems += queues.finish(cluster.rayq)
        for each in specs:
            read_all(cluster.rayq, each)
        say("judging")
        with open(spec.history, "rb") as file:
            result.verdict = check(read_history(file))
        result.stalls = cluster.stalls()
        if result.verdict.is_clean:
            cluster.stop()
    finally:
        if transactions is not None:
            transactions.abort()
        if queues is not None:
            queues.abort()
        if principals is not None:
            principals.abort()
        for load in loads:
            load.abort()
        cluster.close()


def _break(
    plan: Plan,
    cluster: ChaosCluster,
    injector: Injector,
    standstill: Standstill,
    result: Result,
    say: Callable[[str], None],
    started_s: float,
) -> None:
    """Injects the faults one after the other."""
    rng = random.Random(plan.seed)
    end_s = started_s + plan.minutes * 60
    deck = rng.sample(plan.kinds, len(plan.kinds))
    is_first = True
    while (is_first and deck) or time.monotonic() < end_s - STEADY_S:
        if not deck:
            is_first = False
            deck = rng.sample(plan.kinds, len(plan.kinds))
        time.sleep(STEADY_S)
        target = _draw(cluster, deck, rng)
        injected = injector.inject(target)
        result.faults.append(injected)
        at_s = injected.started_s - started_s
        say(f"{at_s:6.1f} s  {target.kind}: {target.what}, for {target.lasts_s:g} s")
        if target.killed_broker is not None:
            injected.broker_away_s = cluster.until_back_s(
                target.killed_broker, injected.started_s
            )
            say(
                f"          the broker was away for {injected.broker_away_s:.1f} s: writes may "
                f"pause for {injected.limit_s:g} s"
            )
        time.sleep(max(injected.started_s + injected.lasts_s - time.monotonic(), 0.0))
        injected.healed_s = injected.settled_s = time.monotonic()
        injected.stood_still_s = standstill.between_s(injected.started_s, injected.healed_s)
        if injected.stood_still_s:
            say(f"          the machine stood still for {injected.stood_still_s:.1f} s of them")
        injector.heal(injected)
        cluster.wait_settled(plan.leniency * SETTLE_TIMEOUT_S)
        injected.settled_s = time.monotonic()


def _draw(cluster: ChaosCluster, deck: list[Kind], rng: random.Random) -> Target:
    """The first kind of the deck that can be injected now. A controller on the head cannot be lost
    with a node: then it is killed, and Ray starts it somewhere else. Raises TimeoutError."""
    found: list[Target] = []

    def can_draw(kinds: Sequence[Kind]) -> bool:
        for kind in kinds:
            target = choose(cluster, kind, rng)
            if target is not None:
                found.append(target)
                return True
        return False

    def why_not() -> str:
        return f"nobody to hit with {', '.join(deck)}"

    try:
        wait_until(lambda: can_draw(deck), CHOICE_TIMEOUT_S, why_not)
    except TimeoutError:
        wait_until(lambda: can_draw([Kind.KILL_CONTROLLER]), CHOICE_TIMEOUT_S, why_not)
    (target,) = found
    if target.kind in deck:
        deck.remove(target.kind)
    return target
