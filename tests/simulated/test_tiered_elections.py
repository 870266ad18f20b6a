"""Elections after which disks and object store could hold two histories: the store's counts."""

from __future__ import annotations

from typing import Any

from rayq.actors.replica.replica_log import ReplicaLog
from rayq.client.consuming.async_consumer import AsyncConsumer
from rayq.config import ClusterConfig, ConsumerConfig
from rayq.records import TopicPartition
from tests.simulated.staged import Stage, play

PLACE = TopicPartition("t", 0)
TIERED: dict[str, Any] = {
    "remote_storage": True,
    "segment_bytes": 1024,
    "local_retention_bytes": 0,
    "local_retention_ms": None,
    "remote_max_lag_ms": 500,
    "unclean_leader_election": True,
}
CONFIG = ClusterConfig(
    remote_storage_url="s3://simulated/rayq", retention_check_interval_ms=200
)


def numbers(start: int, end: int) -> list[bytes]:
    return [b"%04d" % number for number in range(start, end)]


async def read_all(stage: Stage, count: int) -> list[bytes | None]:
    found: list[bytes | None] = []

    async def read() -> None:
        consumer = AsyncConsumer(
            stage.client, ConsumerConfig(auto_offset_reset="earliest"), ("t",)
        )
        while len(found) < count:
            found.extend(record.value for record in await consumer.poll(1.0))
        await consumer.close()

    await stage.process.run(read())
    return found


def held(stage: Stage, broker: int) -> ReplicaLog:
    found = stage.log("t", broker)
    assert found is not None
    return found


def remote_end(stage: Stage) -> int:
    newest = max(stage.cluster.brokers.values(), key=lambda broker: broker.metadata.version)
    state = newest.metadata.state
    pointer = state.topics[state.topic_ids["t"]].partitions[0].remote
    return 0 if pointer is None else pointer.end


def test_a_replica_that_was_behind_leads_and_what_was_stored_is_not_lost() -> None:
    async def script(stage: Stage) -> None:
        run, admin, cluster = stage.process.run, stage.admin, stage.cluster
        await run(admin.create_topic("t", 1, 3, **TIERED))
        await run(admin.reassign_partitions({PLACE: [3, 4, 5]}))  # The voters are 0, 1 and 2.
        await stage.send("t", numbers(0, 40))
        await stage.until(lambda: remote_end(stage) == 40, "all to be stored")
        stage.hosts[5].power_loss()
        await stage.until(lambda: stage.in_sync("t") == {3, 4}, "two to go on")
        await stage.send("t", numbers(40, 90))
        await stage.until(lambda: remote_end(stage) == 90, "all to be stored")
        stage.hosts[3].power_loss()
        stage.hosts[4].power_loss()
        cluster.start_broker(5)
        await stage.until(lambda: stage.value("t").leader == 5, "the one that was behind to lead")
        await stage.until(lambda: stage.leads("t", 5), "it to have adopted what is stored")
        log = held(stage, 5).log
        assert (log.start_offset, log.local_start_offset, log.end_offset) == (0, 90, 90)
        cluster.start_broker(3)
        cluster.start_broker(4)
        await stage.until(lambda: stage.in_sync("t") == {3, 4, 5}, "all to be in sync again")
        await stage.send("t", numbers(90, 100))
        assert await read_all(stage, 100) == numbers(0, 100)
        for broker in (3, 4):
            assert held(stage, broker).log.epochs.entries() == log.epochs.entries()

    play(script, brokers=6, config=CONFIG, keeps_invariants=False)


def test_it_waits_for_a_store_that_is_away() -> None:
    async def script(stage: Stage) -> None:
        run, admin, cluster = stage.process.run, stage.admin, stage.cluster
        await run(admin.create_topic("t", 1, 2, **TIERED))
        await run(admin.reassign_partitions({PLACE: [3, 4]}))
        await stage.send("t", numbers(0, 10))
        stage.hosts[4].power_loss()
        await stage.until(lambda: stage.in_sync("t") == {3}, "one to go on")
        await run(admin.alter_topic_config("t", min_insync_replicas=1))
        await stage.send("t", numbers(10, 30))
        await stage.until(lambda: remote_end(stage) == 30, "all to be stored")
        stage.hosts[3].power_loss()
        take_away(stage, True)
        cluster.start_broker(4)
        await stage.until(lambda: stage.value("t").leader == 4, "the one that was behind to lead")
        await stage.pause(30)
        assert not stage.leads("t", 4)
        trouble = held(stage, 4).trouble
        assert trouble is not None and "offline until" in trouble
        take_away(stage, False)
        await stage.until(lambda: stage.leads("t", 4), "it to have adopted what is stored")
        assert await read_all(stage, 30) == numbers(0, 30)

    play(script, brokers=5, config=CONFIG, keeps_invariants=False)


def take_away(stage: Stage, is_away: bool) -> None:
    faults = stage.cluster.objects.faults
    faults.away = {host.name for host in stage.hosts} if is_away else set()


def test_a_follower_that_was_down_copies_the_tail_only() -> None:
    async def script(stage: Stage) -> None:
        run, admin, cluster = stage.process.run, stage.admin, stage.cluster
        await run(admin.create_topic("t", 1, 3, **TIERED))
        await run(admin.reassign_partitions({PLACE: [3, 4, 5]}))
        await stage.send("t", numbers(0, 20))
        stage.hosts[5].power_loss()
        await stage.until(lambda: stage.in_sync("t") == {3, 4}, "two to go on")
        await stage.send("t", numbers(20, 120))
        leader = stage.value("t").leader
        assert leader is not None
        await stage.until(
            lambda: held(stage, leader).log.local_start_offset > 60, "old segments to leave"
        )
        cluster.start_broker(5)
        await stage.until(lambda: stage.in_sync("t") == {3, 4, 5}, "all to be in sync again")
        log = held(stage, 5).log
        assert log.start_offset == 0 and log.local_start_offset > 60
        # All in sync: it may lead, and readers notice nothing.
        stage.hosts[3].power_loss()
        stage.hosts[4].power_loss()
        await run(admin.alter_topic_config("t", min_insync_replicas=1))
        await stage.until(lambda: stage.leads("t", 5), "the one that copied the tail to lead")
        assert await read_all(stage, 120) == numbers(0, 120)

    play(script, brokers=6, config=CONFIG)
