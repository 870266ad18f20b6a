"""A topic that is deleted and created again while a replica process still opens a replica of the
first one: the second topic has the directory for itself, and nothing of the first one stays."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rayq import messages
from rayq.actors.replica.replica_host import ReplicaHost
from rayq.config import ClusterConfig
from rayq.records import TopicPartition
from rayq.storage.data_directory import PartitionDirectory
from tests.simulated.staged import Stage, play

BROKERS = 4
CONFIG = ClusterConfig(replicas_per_process=4)
SLOW_S = 2.0
"""Time that a process stands still, or that a disk takes: less than a session."""


@pytest.mark.parametrize("returns", ["at once", "later"])
@pytest.mark.parametrize("cause", ["the process stands still", "the disk is slow"])
def test_a_topic_that_comes_back_while_a_process_begins_to_open_the_first_one(
    cause: str, returns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(stage: Stage) -> None:
        """A replica of the topic `t` is placed on one more broker. As soon as its process is told,
        the topic is deleted, and created again with a replica on each broker."""
        admin, cluster = stage.admin, stage.cluster
        await stage.process.run(admin.create_topic("other", 1, BROKERS))  # Processes stay alive.
        await stage.process.run(admin.create_topic("t", 1, 3))
        before = stage.value("t").replicas
        (joins,) = set(range(BROKERS)) - set(before)
        first_id = cluster.topic_id("t")
        supervisor = cluster.brokers[joins]._replicas
        (process,) = cluster.replica_processes(joins)
        heartbeat, lock = supervisor.heartbeat, ReplicaHost._locked_directory
        is_told = asyncio.Event()

        async def answered(
            request: messages.ReplicaHostHeartbeat,
        ) -> messages.ReplicaHostHeartbeatResponse:
            answer = await heartbeat(request)
            if any(assignment.topic_id == first_id for assignment in answer.assignments):
                is_told.set()
                if cause == "the process stands still":
                    process.pause()
            return answer

        async def locked(
            host: ReplicaHost, assignment: messages.PartitionAssignment
        ) -> PartitionDirectory:
            if assignment.topic_id == first_id and cause == "the disk is slow":
                await asyncio.sleep(SLOW_S)
            return await lock(host, assignment)

        async def move() -> None:
            target = [*before[:2], joins]
            await admin.reassign_partitions({TopicPartition("t", 0): target}, wait=False)

        monkeypatch.setattr(supervisor, "heartbeat", answered)
        monkeypatch.setattr(ReplicaHost, "_locked_directory", locked)
        stage.hosts[joins].thread_s = (0.0, 0.0)
        await stage.pause(1)  # A heartbeat that was held before is answered.
        await stage.process.run(move())
        await is_told.wait()
        await stage.process.run(admin.delete_topic("t"))
        if returns == "later":
            await stage.pause(SLOW_S)
            process.resume()
            await stage.pause(SLOW_S)
        creating: asyncio.Task[Any] = stage.process.start(admin.create_topic("t", 1, BROKERS))
        await stage.pause(SLOW_S)
        process.resume()
        await creating
        await stage.pause(SLOW_S)
        assert stage.in_sync("t") == set(range(BROKERS))
        for number, host in enumerate(stage.hosts):
            quarantine = f"/data/broker-{number}/quarantine/"
            assert not [path for path in host.disk.paths() if path.startswith(quarantine)]
            assert cluster.brokers[number]._replicas.failed_count == 0

    play(script, brokers=BROKERS, config=CONFIG)
