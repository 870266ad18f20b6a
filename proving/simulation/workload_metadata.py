"""Changes of metadata, many at once and often repeated, while controllers come and go.

Each changer, a client process, owns a few names of topics. It creates and deletes them, changes
their config and adds partitions, for several names at the same time, so that a controller that is
cut off has a long tail of changes that nobody committed. Some changes go to all brokers at once
under one request id, as a client repeats one whose answer was lost.

Because nobody else changes a name, its changer knows what the cluster may say of it: one state
after an answer, two after a time-out. Each answer about metadata is held against that, and in the
end what all brokers say. What servers answer each other is judged by `metadata_answers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import msgspec

from proving.simulation import buggify
from proving.simulation.buggify import Disturbance
from proving.simulation.cluster import SimulatedCluster
from proving.simulation.disk import SYNC_S
from proving.simulation.faults_metadata import OF_METADATA
from proving.simulation.process import Process
from proving.simulation.workload import Workload
from rayq import messages
from rayq.actors.metadata import quorum
from rayq.client.client import Client
from rayq.errors import InvalidReplicationFactorError, RayqError, TimeoutError

CHANGERS = 2
NAMES = 3
"""The number of names that each changer owns."""
NOBODYS_TOPIC = "no-such-topic"
PARTITIONS_MAX = 3
REPLICAS = 2
PAUSE_S = 0.3
"""About how long a changer pauses between two rounds."""
TIMEOUTS_S = (0.5, 2.0, 6.0)
ATTEMPT_S = 1.5
"""The time that one broker has to answer a repeated change."""
POINTS = (
    "false-alarms",
    "late-timers",
    "late-threads",
    "stutters",
    "late-bytes",
    "breaking-connections",
    "early-write-backs",
    "short-writes",
)
"""The points of `buggify` that matter to metadata."""
POINTS_MAX = 3
PUSHES_BYTES_MAX = (500, 2_000, quorum.APPEND_BYTES_MAX)
"""Choices of a seed for the maximum size of a push to a voter: a tail takes several pushes."""
LOOK_TIMEOUT_S = 5.0


class TopicState(NamedTuple):
    """A topic as its changer knows it."""

    serial: int
    """The serial number of the last change of its config, kept in `retention_ms`."""
    partitions: int


Possible = frozenset[TopicState | None]
"""All that the cluster may say of a name. None: there is no such topic."""


class MetadataWorkload(Workload):
    """See the module."""

    fault_kinds = OF_METADATA
    syncs_s = (SYNC_S, (0.005, 0.1))
    lose_disks = False
    records_min = 100
    lasts_s = 34.0
    heals_at_s = 30.0
    points: frozenset[str] = frozenset()
    push_bytes_max = quorum.APPEND_BYTES_MAX

    def __init__(self, cluster: SimulatedCluster) -> None:
        super().__init__(cluster)
        self._disturbance = Disturbance(cluster, self.points)
        self._may_change = True
        self._serial = 0
        self._known: dict[str, Possible] = {}

    @classmethod
    def of_seed(cls, seed: int, features: frozenset[str] | None) -> type[MetadataWorkload]:
        rng = random.Random(f"{seed}/metadata")
        points = frozenset(rng.sample(POINTS, rng.randint(0, POINTS_MAX)))
        drawn = {"points": points, "push_bytes_max": rng.choice(PUSHES_BYTES_MAX)}
        return type(cls.__name__, (cls,), drawn)

    @classmethod
    @contextlib.contextmanager
    def conditions(cls, seed: int) -> Iterator[None]:
        with (
            buggify.patched(cls.points),
            mock.patch.object(quorum, "APPEND_BYTES_MAX", cls.push_bytes_max),
        ):
            yield

    @classmethod
    def broker_count(cls, rng: random.Random) -> int:
        return rng.choice((3, 3, 4))

    @classmethod
    def cluster_options(cls, rng: random.Random) -> dict[str, Any]:
        return {
            "metadata_snapshot_records": rng.choice((10, 40, 10_000)),
            **buggify.options(cls.points),
        }

    def start(self) -> None:
        super().start()
        self._disturbance.start()
        for number in range(CHANGERS):
            self._start(f"changer-{number}", self._change_topics)

    def calm_down(self) -> None:
        super().calm_down()
        self._may_change = False
        self._disturbance.calm_down()

    async def read_all(self, limit_s: float) -> int:
        await self._end("changer")
        await self._wait_for_none(self._wrong_names, "are not as they were left")
        return await super().read_all(limit_s)

    def _wrong_names(self) -> list[str]:
        """The names of which any broker knows something else than their changer."""
        wrong = []
        for number, broker in self._cluster.brokers.items():
            state = broker.metadata.state
            for name, possible in self._known.items():
                topic = state.topic_named(name)
                found = topic and _topic_state(topic.whole_config, len(topic.partitions))
                if found not in possible:
                    wrong.append(f"{name} on broker {number}: {found}, not of {set(possible)}")
        return wrong

    # --- a changer --------------------------------------------------------------------------------

    async def _change_topics(self, changer: str, process: Process, rng: random.Random) -> None:
        client = self._client(process)
        numbers = itertools.count()
        names = [f"{changer}-topic-{next(numbers)}" for _ in range(NAMES)]
        self._known.update((name, frozenset([None])) for name in names)
        while self._may_change:
            chosen = rng.sample(names, rng.randint(1, NAMES))
            await asyncio.gather(
                self._ask_in_vain(client, rng),
                *(self._change(client, rng, name) for name in chosen),
            )
            for place, name in enumerate(names):
                if len(self._known[name]) > 1:  # A change may come late: another name goes on.
                    names[place] = f"{changer}-topic-{next(numbers)}"
                    self._known[names[place]] = frozenset([None])
            await asyncio.sleep(rng.uniform(0, 2 * PAUSE_S))
        client.close()

    async def _ask_in_vain(self, client: Client, rng: random.Random) -> None:
        """A change that is refused, while others are under way: what it is based on may not be
        committed yet."""
        await asyncio.sleep(rng.uniform(0, 0.05))
        timeout_s = rng.choice(TIMEOUTS_S)
        with contextlib.suppress(RayqError):
            await client.change(messages.DeleteTopic(NOBODYS_TOPIC), timeout_s=timeout_s)

    async def _change(self, client: Client, rng: random.Random, name: str) -> None:
        (state,) = before = self._known[name]
        request, after = self._choose(rng, name, state)
        self._known[name] = before | {after}  # Until it is answered, both may be seen.
        timeout_s = rng.choice(TIMEOUTS_S)
        try:
            if rng.random() < 0.5:
                await client.change(request, timeout_s=timeout_s)
            else:
                await self._repeat(client, request, timeout_s)
        except RayqError as error:
            if not error.retriable:
                self._known[name] = before
                if not isinstance(error, InvalidReplicationFactorError):
                    self.problems.append(f"{name} is {state}; {request} was refused: {error}")
        else:
            self._known[name] = frozenset([after])
        if rng.random() < 0.5:
            await self._look(client, name)

    def _choose(
        self, rng: random.Random, name: str, state: TopicState | None
    ) -> tuple[messages.Change, TopicState | None]:
        """A change of a topic in this state, and the state after it."""
        self._serial += 1
        config: messages.ConfigOptions = {"retention_ms": self._serial}
        if state is None:
            partitions = rng.randint(1, PARTITIONS_MAX - 1)
            request = messages.CreateTopic(name, partitions, REPLICAS, config)
            return request, TopicState(self._serial, partitions)
        draw = rng.random()
        if draw < 0.35:
            return messages.DeleteTopic(name), None
        if draw < 0.5 and state.partitions < PARTITIONS_MAX:
            partitions = state.partitions + 1
            return messages.CreatePartitions(name, partitions), TopicState(
                state.serial, partitions
            )
        return messages.AlterTopicConfig(name, config), TopicState(self._serial, state.partitions)

    async def _repeat(self, client: Client, request: messages.Change, timeout_s: float) -> None:
        """Sends a change to all brokers at once, and to all again until one confirms it."""
        request = msgspec.structs.replace(request, request_id=client.environment.new_id())
        until_s = client.now + timeout_s
        error: RayqError | None = None
        while client.now < until_s:
            attempts = [
                client.ask(address, request, timeout_s=min(ATTEMPT_S, timeout_s))
                for address in client.addresses()
            ]
            for outcome in await asyncio.gather(*attempts, return_exceptions=True):
                if isinstance(outcome, tuple):
                    answer: messages.ChangeResponse = outcome[0]
                    client.metadata.require(answer.version)
                    return
                if not isinstance(outcome, RayqError):
                    raise outcome
                if error is None or not outcome.retriable:
                    error = outcome
            if error is not None and not error.retriable:
                raise error
            await asyncio.sleep(0.05)
        raise TimeoutError(f"{type(request).__name__} was not confirmed: {error}")

    async def _look(self, client: Client, name: str) -> None:
        """Holds what the cluster says of a name against what it may say."""
        with contextlib.suppress(RayqError):
            await client.refresh([name], timeout_s=LOOK_TIMEOUT_S)
            topic = client.metadata.topics.get(name)
            found = topic and _topic_state(topic.config, len(topic.partitions))
            if found not in self._known[name]:
                self.problems.append(
                    f"{name} is {found}, says a broker; it may be {set(self._known[name])}"
                )


def _topic_state(config: dict[str, Any], partitions: int) -> TopicState:
    return TopicState(config["retention_ms"], partitions)
