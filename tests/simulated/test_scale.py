"""A broker of a large cluster that nobody changes does next to nothing: its work is counted."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import scale as large_cluster
from benchmarks.scale import REAL, Scale
from proving.simulation import World
from proving.simulation.process import ProcessThreads
from rayq import messages
from rayq.actors.broker import replica_processes, replica_supervisor
from rayq.actors.broker.placed_replicas import PlacedReplicas
from rayq.actors.broker.replica_supervisor import CHECK_INTERVAL_S
from rayq.actors.metadata import quorum
from rayq.actors.metadata.quorum import Quorum, encode_entries
from rayq.core.cluster.state import ClusterState
from rayq.errors import StaleBrokerError
from rayq.storage.data_directory import DataDirectory

PARTITIONS = 300
LOOKS_MAX = 8
"""Maximum number of looks at a replica while all of them are looked at once."""


@pytest.fixture(autouse=True)
def quiet() -> Any:
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def counted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> Callable[[], int]:
    """Counts the calls of a method from now on."""
    method, calls = getattr(owner, name), 0

    def call(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return method(*arguments)

    monkeypatch.setattr(owner, name, call)
    return lambda: calls


def test_replicas_that_are_well_are_looked_at_once_in_an_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def calm(scale: Scale) -> None:
        await scale.start()
        await scale.a_broker_joins()
        await asyncio.sleep(2 * CHECK_INTERVAL_S)
        replicas = len(scale.state.index.by_broker[REAL])
        looks = counted(monkeypatch, PlacedReplicas, "find")
        await asyncio.sleep(CHECK_INTERVAL_S)
        assert replicas > PARTITIONS / 5
        assert looks() <= LOOKS_MAX * replicas

    with World(seed=1) as world:
        world.run(calm(Scale(world, 10, PARTITIONS)))


def test_the_end_of_another_broker_costs_a_broker_what_they_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ending(scale: Scale) -> None:
        await scale.start()
        await scale.a_broker_joins()
        await asyncio.sleep(2 * CHECK_INTERVAL_S)
        index = scale.state.index.by_broker
        shared = len(index[REAL].keys() & index[scale.victim.number].keys())
        assigned = counted(monkeypatch, PlacedReplicas, "assignment")
        await scale.end_of_a_broker()
        await asyncio.sleep(1)
        assert 0 < assigned() <= shared

    with World(seed=1) as world:
        world.run(ending(Scale(world, 10, PARTITIONS)))


def test_a_snapshot_costs_what_has_changed_and_goes_to_no_broker_that_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = dataclasses.replace(large_cluster.CONFIG, metadata_snapshot_records=1)
    monkeypatch.setattr(large_cluster, "CONFIG", config)
    first_bytes = 0
    snapshots: list[int] = []
    compact = Quorum.compact

    def counted(self: Quorum, snapshot: bytes) -> None:
        snapshots.append(len(snapshot))
        compact(self, snapshot)

    async def busy(scale: Scale) -> None:
        await scale.start()
        nonlocal first_bytes
        first_bytes = int(1e6 * scale.rows[0].figure)
        await scale.a_broker_joins()
        monkeypatch.setattr(Quorum, "compact", counted)
        other = scale.brokers[REAL + 3]
        pushed_bytes, told = other.received_bytes, other.received_snapshots
        for _ in range(8):
            victim = await scale.end_of_a_broker()
            other.stand_still(1.5)  # It is behind when the others have all.
            await scale.return_of(victim)
            await asyncio.sleep(1)
        pushed_bytes = other.received_bytes - pushed_bytes
        assert other.received_snapshots == told
        assert 0 < len(snapshots) <= pushed_bytes / first_bytes + 1

    with World(seed=1) as world:
        world.run(busy(Scale(world, 10, PARTITIONS)))


def test_what_all_brokers_are_sent_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded_bytes = 0

    def encode(entries: Any) -> bytes:
        nonlocal encoded_bytes
        encoded_bytes += sum(len(data) for _, _, data in entries)
        return encode_entries(entries)

    async def ending(scale: Scale) -> None:
        await scale.start()
        await scale.a_broker_joins()
        monkeypatch.setattr(quorum, "encode_entries", encode)
        before = scale.brokers[REAL + 3].received_bytes
        await scale.end_of_a_broker()
        received_bytes = scale.brokers[REAL + 3].received_bytes - before
        assert 0 < encoded_bytes < 2 * received_bytes

    with World(seed=1) as world:
        world.run(ending(Scale(world, 10, PARTITIONS)))


def lines_of(files: tuple[str, ...]) -> tuple[Callable[[], None], Callable[[], int]]:
    """Counts the lines of these files that run between a call of the first function and one of the
    second."""
    lines = 0

    def line(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return line

    def call(frame: Any, event: str, _: Any) -> Any:
        return line if frame.f_code.co_filename in files else None

    def stop() -> int:
        sys.settrace(None)
        return lines

    return lambda: sys.settrace(call), stop


def test_the_work_of_a_broker_grows_as_its_processes_do_where_each_has_one_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = dataclasses.replace(large_cluster.CONFIG, replicas_per_process=1)
    monkeypatch.setattr(large_cluster, "CONFIG", config)
    files = (replica_processes.__file__, replica_supervisor.__file__)

    def lines_of_an_interval(partitions: int) -> int:
        lines = 0

        async def start_and_rest(scale: Scale) -> None:
            nonlocal lines
            await scale.start()
            begin, end = lines_of(files)
            begin()
            try:
                await scale.a_broker_joins()
                await asyncio.sleep(2 * CHECK_INTERVAL_S)
            finally:
                lines = end()

        with World(seed=1) as world:
            world.run(start_and_rest(Scale(world, 3 * REAL, partitions)))
        return lines

    once, thrice = lines_of_an_interval(60), lines_of_an_interval(180)
    assert thrice < 4 * once


def test_a_heartbeat_changes_only_the_replicas_that_it_names_and_an_older_one_is_refused() -> None:
    """A heartbeat over an earlier connection may be read after the process has presented itself
    over another."""

    async def script(scale: Scale) -> None:
        await scale.start()
        await scale.a_broker_joins()
        assert scale._real is not None
        supervisor = scale._real._replicas
        host = next(iter(supervisor._hosts))
        assert host.endpoint is not None
        earlier, held = host.session, dict(host.statuses)
        attach = messages.AttachReplicaHost(
            host.incarnation, 1, 1, *host.endpoint, list(held.values())
        )
        again = supervisor.attach(attach)

        def beat(session: int, *closed: tuple[str, int]) -> Any:
            request = messages.ReplicaHostHeartbeat(
                host.incarnation, supervisor._metadata.version, [], 0,
                has_all=False, closed=list(closed), session=session,
            )  # fmt: skip
            return supervisor.heartbeat(request)

        first, *others = held
        with pytest.raises(StaleBrokerError):
            await beat(earlier, first)
        assert host.statuses == held
        await beat(again.session)
        assert host.statuses == held
        await beat(again.session, first)
        assert list(host.statuses) == others

    with World(seed=1) as world:
        world.run(script(Scale(world, 10, PARTITIONS)))


def test_a_broker_that_starts_looks_for_holders_of_directories_in_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own heartbeats would wait for thousands of files."""
    is_in_thread = False
    looks: list[bool] = []
    run, find = ProcessThreads.run, DataDirectory.partition_holder

    def run_noted(self: ProcessThreads, job: Any, *arguments: Any) -> Any:
        def work(*arguments: Any) -> Any:
            nonlocal is_in_thread
            is_in_thread = True
            try:
                return job(*arguments)
            finally:
                is_in_thread = False

        return run(self, work, *arguments)

    def find_noted(disk: Any, path: str) -> Any:
        looks.append(is_in_thread)
        return find(disk, path)

    monkeypatch.setattr(ProcessThreads, "run", run_noted)
    monkeypatch.setattr(DataDirectory, "partition_holder", staticmethod(find_noted))

    async def starting(scale: Scale) -> None:
        await scale.start()
        looks.clear()
        scale._start_real()
        await asyncio.sleep(2 * CHECK_INTERVAL_S)
        replicas = len(scale.state.index.by_broker[REAL])
        assert len(looks) >= replicas
        assert all(looks)

    with World(seed=1) as world:
        world.run(starting(Scale(world, 10, PARTITIONS)))


def test_a_broker_that_is_not_registered_yet_does_not_look_at_all_replicas_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its replica processes start meanwhile, and need the time."""

    async def cut_off(scale: Scale) -> None:
        await scale.start()
        await scale.a_broker_joins()
        await asyncio.sleep(2)
        host = scale._real_host
        for process in list(host.processes):
            process.kill()
        others = [broker.host for broker in scale.brokers.values()] + [scale._controller_host]
        scale._world.network.cut([host], others)
        scale._start_real()
        await asyncio.sleep(CHECK_INTERVAL_S)
        assert scale._real is not None and not scale._real.is_registered
        looks = counted(monkeypatch, PlacedReplicas, "find")
        await asyncio.sleep(CHECK_INTERVAL_S)
        assert looks() <= LOOKS_MAX * len(scale.state.index.by_broker[REAL])
        scale._world.network.heal([host], others)
        await scale._until(
            lambda state: all(
                REAL in partition.processes for _, _, partition in state.replicas_on(REAL)
            ),
            "all its replicas are registered",
        )

    with World(seed=1) as world:
        world.run(cut_off(Scale(world, 10, PARTITIONS)))


def test_who_asks_whether_a_start_is_over_makes_a_broker_look_at_few_partitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def joined(scale: Scale) -> None:
        await scale.start()
        await scale.a_broker_joins()
        broker = scale._real
        assert broker is not None
        recovering = broker.recovering_partitions()
        assert len(recovering) > PARTITIONS / 10
        looks = 0
        all_partitions = ClusterState.all_partitions

        def looked(state: ClusterState) -> Any:
            nonlocal looks
            for found in all_partitions(state):
                looks += 1
                yield found

        monkeypatch.setattr(ClusterState, "all_partitions", looked)
        assert broker.is_recovering()
        assert looks <= 10
        looks = 0
        assert broker.recovering_partitions() == recovering and looks == PARTITIONS

    with World(seed=1) as world:
        world.run(joined(Scale(world, 10, PARTITIONS)))
