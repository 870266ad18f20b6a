"""A snapshot of the metadata that is larger than a message may be: it travels in parts, to a broker
that lacks what it replaces and to a controller that takes over. If a process ends in the middle, a
broker has the old log or the whole snapshot, never a mixture."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from proving.simulation import World
from proving.simulation.process import Process
from rayq import messages
from rayq.actors.metadata import snapshot_parts
from rayq.actors.metadata.metadata_keeper import MetadataKeeper
from rayq.actors.metadata.quorum import Quorum
from rayq.config import ClusterConfig
from rayq.core.cluster.records import (
    EpochStarted,
    ProducerIdsAllocated,
    TopicCreated,
    Voter,
    VotersChanged,
    encode_records,
)
from rayq.core.cluster.state import ClusterState
from rayq.environment import Address
from rayq.errors import DisconnectedError, ProtocolError, TimeoutError
from rayq.runtime.local_runtime import wait_until
from rayq.storage.data_directory import DataDirectory, format_directory
from rayq.storage.metadata_log import MetadataLog

CLUSTER_ID = "c" * 32
PART_BYTES = 100
TOPICS = 50
WAIT_S = 20.0


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_parts, "PART_BYTES_MAX", PART_BYTES)


def topics(state: ClusterState) -> set[str]:
    return set(state.topic_ids)


class Broker:
    """A broker's copy of the metadata, in a process that may end."""

    def __init__(self, process: Process, number: int) -> None:
        self._environment = process.environment
        self.number = number
        self.path = f"/data/broker-{number}"
        format_directory(
            self._environment, self.path, cluster_id=CLUSTER_ID, broker=number, secret=b"s" * 32
        )
        self.is_up = True
        self.knows_parts = True
        self.sizes: list[int] = []
        """The sizes of the payloads that it was sent, and that it sent."""
        self.parts: list[messages.InstallMetadataSnapshotPart] = []
        self.on_part: Callable[[int], None] = lambda count: None
        """Called with the number of parts so far, before a part is taken."""
        self._open()

    def _open(self) -> None:
        self.directory = DataDirectory.open(self._environment, self.path)
        self.keeper = MetadataKeeper(
            self._environment,
            self.directory,
            MetadataLog.open(self._environment.disk, f"{self.path}/metadata"),
            incarnation="i",
            snapshot_records=10_000,
            now_s=self._environment.clock.monotonic,
            on_applied=lambda records: None,
        )

    def start_again(self) -> None:
        self.directory.close()
        self._open()

    @property
    def directory_id(self) -> str:
        return self.directory.meta.directory_id

    async def answer(self, request: Any, payload: bytes) -> tuple[Any, bytes]:
        if not self.is_up:
            raise TimeoutError(f"Broker {self.number} does not answer.")
        self.sizes.append(len(payload))
        match request:
            case messages.Prepare():
                return await self.keeper.prepare(request), b""
            case messages.ReadMetadataLog():
                if not self.knows_parts:
                    request = messages.ReadMetadataLog(*[getattr(request, name) for name in (
                        "epoch", "first_index", "bytes_max")])  # fmt: skip
                answer, entries = await self.keeper.read(request)
                self.sizes.append(len(entries))
                return answer, entries
            case messages.AppendMetadata():
                return await self.keeper.append(request, memoryview(payload)), b""
            case messages.InstallMetadataSnapshot():
                return await self.keeper.install(request, memoryview(payload)), b""
            case messages.InstallMetadataSnapshotPart() if self.knows_parts:
                self.on_part(len(self.parts))
                self.parts.append(request)
                if not self.is_up:
                    raise DisconnectedError("The process ended.")
                return await self.keeper.install_part(request, memoryview(payload)), b""
        raise ProtocolError("There is no request of this kind: this server is an older rayq.")


class Cluster:
    """A voter, and a broker that has no vote."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.voter, self.other = Broker(process, 1), Broker(process, 2)
        self._brokers = {1: self.voter, 2: self.other}
        self.quorum: Quorum | None = None
        voter = Voter(1, self.voter.directory_id)
        log = MetadataLog.open(process.environment.disk, f"{self.voter.path}/metadata")
        first = [EpochStarted(1, "controller", 1, CLUSTER_ID), VotersChanged((voter,))]
        created = [TopicCreated(f"T{number}", f"t{number}", {}, 1) for number in range(TOPICS)]
        self.topics = {topic.name for topic in created}
        log.promise(1)
        log.install_snapshot(9, 1, encode_records([*first, *created]))
        log.close()
        self.voter.start_again()

    async def request(
        self, host: str, port: int, request: Any, payload: bytes = b"", *, timeout_s: float
    ) -> Any:
        await asyncio.sleep(0.01)
        return await self._brokers[port].answer(request, payload)

    async def controller(self) -> Quorum:
        """Another controller takes over."""
        environment = self._process.environment
        if self.quorum is not None:
            self.quorum.end("another one comes")
        self.quorum = Quorum(
            environment,
            cast(Any, self),
            ClusterConfig(),
            cluster_id=CLUSTER_ID,
            endpoint=("controller", 1),
            now_s=environment.clock.monotonic,
            on_end=lambda reason: None,
        )
        known: list[Address] = [("h", 1), ("h", 2)]
        state = ClusterState()
        for record in await self.quorum.take_over(known, silent_s_min=0):
            state.replay(record)
        assert topics(state) == self.topics
        return self.quorum

    async def until(self, holds: Callable[[], bool]) -> None:
        await wait_until(holds, WAIT_S, "the broker")

    async def until_other_has_all(self) -> None:
        quorum = self.quorum
        assert quorum is not None
        await self.until(lambda: self.other.keeper.version == quorum.commit_index)
        assert topics(self.other.keeper.state) == self.topics
        self.other.start_again()
        assert self.other.keeper.version >= 9
        assert topics(self.other.keeper.state) == self.topics


def with_cluster(work: Callable[[Cluster], Awaitable[None]]) -> None:
    async def script(process: Process) -> None:
        cluster = Cluster(process)
        try:
            await work(cluster)
        finally:
            if cluster.quorum is not None:
                cluster.quorum.end("the test is over")

    with World(seed=1) as world:
        process = world.host("machine").process("all")
        world.run(process.run(script(process)))


def test_no_message_has_more_of_a_snapshot_than_a_part() -> None:
    async def work(cluster: Cluster) -> None:
        await cluster.controller()
        await cluster.until_other_has_all()
        assert len(cluster.other.parts) > 5
        framing_bytes = 20
        assert max(cluster.voter.sizes + cluster.other.sizes) < PART_BYTES + framing_bytes

    with_cluster(work)


def test_a_broker_that_ends_between_two_parts_keeps_its_log_and_gets_them_again() -> None:
    async def work(cluster: Cluster) -> None:
        other = cluster.other

        def end(count: int) -> None:
            if count == 4:
                other.is_up = False

        other.on_part = end
        await cluster.controller()
        await cluster.until(lambda: not other.is_up)
        other.start_again()
        assert (other.keeper.version, other.keeper.state.topic_ids) == (0, {})
        other.on_part, other.is_up = lambda count: None, True
        await cluster.until_other_has_all()
        starts = [part.position for part in other.parts]
        assert starts.count(0) == 2, "it has none of them after its start"

    with_cluster(work)


def test_a_connection_that_breaks_costs_one_part() -> None:
    async def work(cluster: Cluster) -> None:
        other = cluster.other

        def cut(count: int) -> None:
            other.is_up = count != 4

        other.on_part = cut
        await cluster.controller()
        await cluster.until(lambda: not other.is_up)
        other.is_up = True
        await cluster.until_other_has_all()
        assert [part.position for part in other.parts].count(0) == 1

    with_cluster(work)


def test_parts_of_another_controller_do_not_follow_on_those_that_are_there() -> None:
    async def work(cluster: Cluster) -> None:
        other = cluster.other

        def end(count: int) -> None:
            if count == 4:
                other.is_up = False

        other.on_part = end
        await cluster.controller()
        await cluster.until(lambda: not other.is_up)
        other.on_part, other.is_up = lambda count: None, True
        await cluster.controller()
        await cluster.until_other_has_all()
        of_the_second = [part.position for part in other.parts if part.epoch == 3]
        assert sorted(of_the_second) == of_the_second and of_the_second[0] == 0

    with_cluster(work)


def test_a_newer_snapshot_does_not_begin_the_sending_again() -> None:
    """A controller that makes snapshots faster than a broker takes one would send the first parts
    forever."""

    async def work(cluster: Cluster) -> None:
        other = cluster.other

        def append(count: int) -> None:
            quorum = cluster.quorum
            assert quorum is not None
            if count % 3 == 0:
                quorum.append([ProducerIdsAllocated(count)])

        def compact() -> None:
            quorum = cluster.quorum
            assert quorum is not None
            if quorum.commit_index == quorum.last_index == cluster.voter.keeper.version:
                quorum.compact(encode_records(cluster.voter.keeper.state.snapshot()))

        other.on_part = append
        await cluster.controller()
        indexes = set()

        def is_installed() -> bool:
            compact()
            indexes.add(cluster.quorum._snapshot[0])  # type: ignore[union-attr,index]
            return other.keeper.version >= 9

        await cluster.until(is_installed)
        assert len(indexes) > 2
        assert {part.last_index for part in other.parts} == {9}
        await cluster.until_other_has_all()

    with_cluster(work)


@pytest.mark.parametrize("number", [1, 2])
def test_a_broker_of_an_older_rayq_sends_and_gets_a_whole_snapshot(number: int) -> None:
    async def work(cluster: Cluster) -> None:
        cluster._brokers[number].knows_parts = False
        await cluster.controller()
        await cluster.until_other_has_all()
        assert max(cluster._brokers[number].sizes) > PART_BYTES * 5

    with_cluster(work)


@pytest.mark.parametrize("says", [0, 7, -1, 1 << 40])
def test_a_broker_that_never_gets_on_with_a_snapshot_is_asked_now_and_then(says: int) -> None:
    async def work(cluster: Cluster) -> None:
        other = cluster.other
        asked = []

        async def install_part(
            request: messages.InstallMetadataSnapshotPart, payload: memoryview
        ) -> messages.InstallMetadataSnapshotPartResponse:
            asked.append(request)
            return messages.InstallMetadataSnapshotPartResponse(other.directory_id, says, 0)

        other.keeper.install_part = install_part  # type: ignore[method-assign]
        await cluster.controller()
        await asyncio.sleep(5)
        assert 5 < len(asked) < 60

    with_cluster(work)


def test_a_voter_that_sends_parts_of_two_snapshots_is_not_taken_over() -> None:
    async def work(cluster: Cluster) -> None:
        read, reads = cluster.voter.keeper.read, 0

        async def changing(request: messages.ReadMetadataLog) -> Any:
            nonlocal reads
            answer, entries = await read(request)
            reads += 1
            assert reads < 100, "it is asked forever"
            size_bytes = (answer.snapshot_bytes or 0) + reads
            return messages.ReadMetadataLogResponse(9, 1, False, size_bytes), entries

        cluster.voter.keeper.read = changing  # type: ignore[method-assign]
        with pytest.raises(ProtocolError, match="parts of two snapshots"):
            await cluster.controller()

    with_cluster(work)
