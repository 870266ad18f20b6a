"""The faults of a chaos run: SIGKILL or SIGSTOP of one process or of a whole node.

Each fault has a limit: this long after the signal, at the latest, writes succeed again on every
partition, while the fault still lasts. The limits are the promises of docs/architecture.md.
"""

from __future__ import annotations

import random
import signal
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from proving.chaos.cluster import TOPIC, ChaosCluster
from proving.chaos.processes import Victim, hold

KILLED_LIMIT_S = 1.0
"""A process that ends is noticed at once, by pidfd. Other processes are not disturbed."""
SILENT_LIMIT_S = 5.0
"""A process or node that falls silent is given up after one session of 3 s. So is a broker that was
killed, where Ray has it back later than in `BACK_IN_TIME_S`."""
BACK_IN_TIME_S = 2.5
"""The leases of a broker's replicas last for so long at least after the broker died."""
CONTROLLER_NODE_LIMIT_S = 9.0
"""The controller falls silent with a broker: 3 to 4.5 s until a voter stands in, then a session."""
AWAY_S = (0.0, 15.0)
"""A lost node returns so much later than a fault has to last: before Ray has noticed its loss,
which takes 12 s, or after."""


class Kind(StrEnum):
    """The processes that a fault hits. For a node: the raylet and every process below it."""

    KILL_LEADER = "kill-leader"
    KILL_FOLLOWER = "kill-follower"
    KILL_BROKER = "kill-broker"
    KILL_CONTROLLER = "kill-controller"
    KILL_NODE = "kill-node"
    KILL_CONTROLLER_NODE = "kill-controller-node"
    STOP_LEADER = "stop-leader"
    STOP_FOLLOWER = "stop-follower"
    STOP_BROKER = "stop-broker"
    STOP_CONTROLLER = "stop-controller"
    STOP_NODE = "stop-node"
    STOP_CONTROLLER_NODE = "stop-controller-node"
    STOP_STAND_IN = "stop-stand-in"
    """Replaces stop-controller while a broker hosts the controller: that broker hangs too."""

    @property
    def stops(self) -> bool:
        return self.value.startswith("stop")

    @property
    def hits_node(self) -> bool:
        return self.value.endswith("node")

    @property
    def limit_s(self) -> float:
        if self in (Kind.KILL_CONTROLLER_NODE, Kind.STOP_CONTROLLER_NODE, Kind.STOP_STAND_IN):
            return CONTROLLER_NODE_LIMIT_S
        return SILENT_LIMIT_S if self.stops or self.hits_node else KILLED_LIMIT_S

    @property
    def lasts_s(self) -> float:
        """The least time until the fault is healed, or left to heal by itself: it exceeds the
        limit."""
        return self.limit_s + 2


DRAWN = tuple(kind for kind in Kind if kind is not Kind.STOP_STAND_IN)
"""The kinds that `--kinds` accepts."""


class Target(NamedTuple):
    """The victim of a fault, chosen before the signal is sent."""

    kind: Kind
    pids: list[int]
    partitions: list[int]
    """The partitions of the load that the fault affects. The others must make progress too."""
    broker: int | None
    """The broker of the node, for faults of nodes."""
    what: str
    lasts_s: float
    killed_broker: int | None = None
    """The broker whose process, and no other, is killed: Ray starts it again."""


@dataclass
class Injected:
    """A fault that was injected, and its phases (`time.monotonic`)."""

    target: Target
    started_s: float
    healed_s: float = 0.0
    """The end of the fault phase."""
    settled_s: float = 0.0
    """The time when all replicas were in sync again."""
    stood_still_s: float = 0.0
    """The time that the machine stood still in the fault phase."""
    broker_away_s: float = 0.0
    """The time until a killed broker took connections again."""

    @property
    def limit_s(self) -> float:
        """The maximum pause of writes."""
        limit_s = self.target.kind.limit_s
        return limit_s if self.broker_away_s <= BACK_IN_TIME_S else max(limit_s, SILENT_LIMIT_S)

    @property
    def lasts_s(self) -> float:
        """The length of the fault phase, which exceeds the limit."""
        return self.target.lasts_s + self.limit_s - self.target.kind.limit_s


def choose(cluster: ChaosCluster, kind: Kind, rng: random.Random) -> Target | None:
    """A victim for a fault of this kind, or None when there is none at the moment."""
    match kind:
        case Kind.KILL_LEADER | Kind.STOP_LEADER | Kind.KILL_FOLLOWER | Kind.STOP_FOLLOWER:
            leads = kind in (Kind.KILL_LEADER, Kind.STOP_LEADER)
            return _replica(cluster, kind, leads, rng)
        case Kind.KILL_BROKER | Kind.STOP_BROKER:
            place = cluster.controller()
            if place is None:
                return None
            avoided = place.broker if place.is_stand_in else None
            broker = _leading_broker(cluster, rng, avoided)
            pid = cluster.broker_pid(broker)
            what = f"broker {broker} (pid {pid})"
            if pid is None:
                return None
            target = _of_all(cluster, kind, [pid], None, what)
            return target if kind.stops else target._replace(killed_broker=broker)
        case Kind.KILL_CONTROLLER | Kind.STOP_CONTROLLER | Kind.STOP_STAND_IN:
            place = cluster.controller()
            if place is None:
                return None
            where = f"broker {place.broker}" if place.is_stand_in else "its own process"
            what = f"controller in {where} (pid {place.pid})"
            if kind is Kind.STOP_CONTROLLER and place.is_stand_in:
                kind = Kind.STOP_STAND_IN
            target = _of_all(cluster, kind, [place.pid], None, what)
            if place.is_stand_in and not kind.stops:
                return target._replace(killed_broker=place.broker)
            return target
        case Kind.KILL_NODE | Kind.STOP_NODE:
            place = cluster.controller()
            if place is None:
                return None
            broker = _leading_broker(cluster, rng, place.broker)
            return _node(cluster, kind, broker, rng)
        case Kind.KILL_CONTROLLER_NODE | Kind.STOP_CONTROLLER_NODE:
            place = cluster.controller()
            if place is None or place.broker is None:
                return None
            return _node(cluster, kind, place.broker, rng)


def _replica(cluster: ChaosCluster, kind: Kind, leads: bool, rng: random.Random) -> Target | None:
    topic = rng.choice(cluster.topics)
    partition = rng.choice(cluster.partitions(topic))
    brokers = [
        replica.broker
        for replica in partition.replicas
        if (replica.broker == partition.leader) == leads
    ]
    broker = rng.choice(brokers)
    pid = cluster.replica_pid(partition, broker)
    if pid is None:
        return None
    role = "leader" if leads else "follower"
    what = f"{role} of {topic}-{partition.partition} on broker {broker} (pid {pid})"
    affected = [partition.partition] if topic == TOPIC else []
    return Target(kind, [pid], affected, None, what, kind.lasts_s)


def _leading_broker(cluster: ChaosCluster, rng: random.Random, avoided: int | None) -> int:
    """A broker other than `avoided`, one that leads a partition if possible."""
    allowed = [broker for broker in cluster.brokers if broker != avoided]
    leaders = {partition.leader for partition in cluster.partitions()}
    return rng.choice([broker for broker in allowed if broker in leaders] or allowed)


def _node(cluster: ChaosCluster, kind: Kind, broker: int, rng: random.Random) -> Target:
    pids = cluster.node_pids(broker)
    away_s = 0.0 if kind.stops else rng.choice(AWAY_S)
    target = _of_all(cluster, kind, pids, broker, f"the node of broker {broker}")
    return target._replace(lasts_s=kind.lasts_s + away_s)


def _of_all(
    cluster: ChaosCluster, kind: Kind, pids: list[int], broker: int | None, what: str
) -> Target:
    """A target. Every broker of a chaos run has a replica of every partition."""
    partitions = [partition.partition for partition in cluster.partitions()]
    return Target(kind, pids, partitions, broker, what, kind.lasts_s)


class Injector:
    """A context manager that sends the signals, and takes back those that it can."""

    def __init__(self, cluster: ChaosCluster) -> None:
        self._cluster = cluster
        self._stopped: list[Victim] = []

    def inject(self, target: Target) -> Injected:
        """Sends the signal. Raises ProcessLookupError when no process was hit."""
        victims = hold(target.pids)
        injected = Injected(target, time.monotonic())
        number = signal.SIGSTOP if target.kind.stops else signal.SIGKILL
        self._stopped = victims  # Before the first signal: an interrupt may come at any time.
        # The raylet of a node is hit first, so that it starts no further processes.
        hit = [victim.pid for victim in victims if victim.send(number)]
        if not hit:
            raise ProcessLookupError(f"{target.what}: gone before {target.kind} could hit it")
        return injected

    def heal(self, injected: Injected) -> None:
        """Stopped processes continue, unless somebody has killed them. A lost node returns with its
        disk. The cluster itself replaces killed processes."""
        self.resume()
        target = injected.target
        if target.kind.hits_node and not target.kind.stops:
            assert target.broker is not None
            self._cluster.forget_node(target.broker)
            self._cluster.add_node(target.broker)

    def resume(self) -> None:
        stopped, self._stopped = self._stopped, []
        for victim in stopped:
            victim.send(signal.SIGCONT)
            victim.close()

    def __enter__(self) -> Injector:
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()
