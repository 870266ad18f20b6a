"""Queues while leaders and keepers are paused, killed, and elected without what others had."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from typing import Any

from rayq import messages
from rayq.config import ClusterConfig
from rayq.core.cluster.records import QueueChanged, decode_entry
from rayq.records import TopicPartition
from rayq.storage.batch import decode_columns, split_batches
from tests.simulated.staged import Stage, play

PLACE = TopicPartition("t", 0)
KEEPER = TopicPartition("__queue_state", 0)
ONE_KEEPER = ClusterConfig(queue_state_partitions=1)
TIMEOUT_S = 60.0
Lock = tuple[int, int, int]


class Worker:
    """Takes and settles records of queue `q`, which reads partition 0 of topic `t`."""

    _numbers = itertools.count(1)

    def __init__(self, stage: Stage, queue_id: str) -> None:
        self._stage = stage
        self._queue_id = queue_id
        self.holder = f"holder-{next(self._numbers)}"

    async def _ask(self, build: Any) -> Any:
        return await self._stage.process.run(
            self._stage.client.exchange_with_leader(
                "t", 0, build, timeout_s=TIMEOUT_S, attempt_timeout_s=5.0
            )
        )

    async def take(self, count: int, *, wait_ms: int = 1_000) -> messages.TakeResponse:
        answer, payload = await self._ask(
            lambda topic_id, leader: messages.Take(
                topic_id, 0, leader.epoch, self._queue_id, self.holder, count, 1 << 20, wait_ms
            )
        )
        found = set()
        for position, header in split_batches(bytes(payload)):
            found.update(decode_columns(bytes(payload), position, header).offsets)
        assert found >= set(offsets(answer.locks))
        return answer

    async def ack(self, state_epoch: int, *locks: Lock) -> list[int]:
        """The offsets whose locks were lost."""
        answer, _ = await self._ask(
            lambda topic_id, leader: messages.Settle(
                topic_id, 0, leader.epoch, self._queue_id, self.holder, state_epoch, list(locks)
            )
        )
        return offsets(answer.lost)

    async def describe(self) -> messages.DescribeQueueResponse:
        answer, _ = await self._ask(
            lambda topic_id, leader: messages.DescribeQueue(
                topic_id, 0, leader.epoch, self._queue_id
            )
        )
        return answer


def offsets(ranges: list[Any]) -> list[int]:
    return [offset for first, last, *_ in ranges for offset in range(first, last + 1)]


async def create(
    stage: Stage,
    data: list[int],
    keeper: list[int],
    topic: dict[str, Any] | None = None,
    **config: Any,
) -> tuple[Worker, Worker]:
    """A queue whose records and whose state are on these brokers, and two workers."""
    run, admin = stage.process.run, stage.admin
    await run(admin.create_topic("t", 1, len(data), **(topic or {})))
    config = {"dead_letters": "discard", "visibility_timeout_s": 10, **config}
    await run(admin.create_queue("q", topic="t", **config))
    await run(admin.reassign_partitions({PLACE: data, KEEPER: keeper}))
    for name, brokers in (("t", data), ("__queue_state", keeper)):
        await stage.until(
            lambda name=name, brokers=brokers: (  # type: ignore[misc]
                stage.value(name).replicas == tuple(brokers)
                and stage.value(name).leader == brokers[0]
                and stage.in_sync(name) == set(brokers)
            ),
            f"{name} to be where it belongs",
        )
    newest = max(stage.cluster.brokers.values(), key=lambda one: one.metadata.version)
    queue_id = newest.metadata.state.queue_ids["q"]
    return Worker(stage, queue_id), Worker(stage, queue_id)


async def send(stage: Stage, count: int) -> None:
    await stage.send("t", [b"%d" % number for number in range(count)])


def pause(stage: Stage, broker: int) -> Any:
    processes = list(stage.hosts[broker].processes)
    for process in processes:
        process.pause()

    def resume() -> None:
        for process in processes:
            process.resume()

    return resume


def test_what_was_settled_while_the_keeper_changed_stays_settled() -> None:
    async def script(stage: Stage) -> None:
        worker, other = await create(stage, [0, 1, 2], [1, 2, 0])
        await send(stage, 20)
        taken = await worker.take(10)
        assert offsets(taken.locks) == [*range(10)]
        resume = pause(stage, 1)
        acking = asyncio.create_task(worker.ack(taken.state_epoch, (0, 4, 1)))
        await stage.until(lambda: stage.value("__queue_state").leader != 1, "another keeper")
        assert await acking == []
        resume()
        await stage.until(stage.cluster.is_whole, "the keeper of before to be back")
        assert await worker.ack(taken.state_epoch, (5, 5, 1)) == []
        stage.hosts[0].power_loss()
        await stage.until(lambda: stage.value("t").leader not in (0, None), "another leader")
        # The other leader knows the locks of before, and what was settled.
        assert offsets((await other.take(100)).locks) == [*range(10, 20)]
        assert await worker.ack(taken.state_epoch, (6, 9, 1)) == []
        assert (await worker.describe()).start_offset == 10
        stage.cluster.start_broker(0)

    play(script, config=ONE_KEEPER)


def test_a_leader_that_wakes_up_settles_nothing_of_what_another_gave_out() -> None:
    async def script(stage: Stage) -> None:
        worker, other = await create(stage, [0, 1, 2], [1, 2, 0])
        await send(stage, 20)
        taken = await worker.take(10)
        assert await worker.ack(taken.state_epoch, (0, 4, 1)) == []
        resume = pause(stage, 0)
        late = asyncio.create_task(worker.ack(taken.state_epoch, (5, 6, 1)))
        await stage.until(lambda: stage.value("t").leader not in (0, None), "another leader")
        fresh = await other.take(100)
        assert fresh.state_epoch == taken.state_epoch
        assert set(offsets(fresh.locks)) == set(range(10, 20))
        # The client asks the new leader by itself, so the locks still stood.
        assert await late == []
        assert await worker.ack(taken.state_epoch, (7, 8, 1)) == []
        await stage.pause(15)  # The lock of 9 runs out, and those of the other worker.
        again = await other.take(1)
        assert again.locks == [(9, 9, 2)]
        resume()
        await stage.until(stage.cluster.is_whole, "the leader of before to be back")
        assert await worker.ack(taken.state_epoch, (9, 9, 1)) == [9]
        assert await other.ack(again.state_epoch, (9, 9, 2)) == []
        assert (await worker.describe()).start_offset == 10

    play(script, config=ONE_KEEPER)


def test_what_an_unclean_election_cut_off_is_not_done() -> None:
    async def script(stage: Stage) -> None:
        worker, other = await create(
            stage, [3, 4, 5], [0, 1, 2], topic={"unclean_leader_election": True}
        )
        await send(stage, 40)
        taken = await worker.take(10)
        assert await worker.ack(taken.state_epoch, (0, 4, 1)) == []
        stage.hosts[5].power_loss()
        await stage.until(lambda: stage.in_sync("t") == {3, 4}, "two to go on")
        await send(stage, 60)
        while (more := await other.take(100)).locks:
            assert await other.ack(more.state_epoch, *more.locks) == []
        for broker in (3, 4):
            stage.hosts[broker].power_loss()
        stage.cluster.start_broker(5)
        await stage.until(lambda: stage.value("t").leader == 5, "the one that was behind to lead")
        for broker in (3, 4):
            stage.cluster.start_broker(broker)
        await send(stage, 10)
        found = await worker.take(5)
        assert found.state_epoch > taken.state_epoch
        # Also the locks of before are gone: nobody can say any more which of them stand.
        assert offsets(found.locks) == [*range(5, 10)]
        rest = await worker.take(100)
        assert offsets(rest.locks) == [*range(40, 50)]
        assert await worker.ack(taken.state_epoch, (5, 9, 1), (40, 49, 1)) == [
            *range(5, 10),
            *range(40, 50),
        ]
        assert await worker.ack(found.state_epoch, *found.locks, *rest.locks) == []
        assert (await worker.describe()).start_offset == 50

    play(script, brokers=6, config=ONE_KEEPER, keeps_invariants=False)


def test_what_a_keeper_lost_in_an_unclean_election_is_given_out_again() -> None:
    async def script(stage: Stage) -> None:
        run, worker, other = stage.process.run, *await create(stage, [0, 1, 2], [3, 4, 5])
        await send(stage, 20)
        taken = await worker.take(10)
        assert await worker.ack(taken.state_epoch, (0, 4, 1)) == []
        stage.hosts[5].power_loss()
        await stage.until(lambda: stage.in_sync("__queue_state") == {3, 4}, "two to go on")
        assert await worker.ack(taken.state_epoch, (5, 9, 1)) == []
        lost = await worker.take(5)
        assert lost.locks == [(10, 14, 1)]
        for broker in (3, 4):
            stage.hosts[broker].power_loss()
        stage.cluster.start_broker(5)
        await stage.until(
            lambda: (
                stage.value("__queue_state").leader is None
                and stage.cluster.brokers[5].is_registered
            ),
            "no keeper",
        )
        taking = asyncio.create_task(other.take(5))
        await stage.pause(5)
        assert not taking.done()  # Nothing is given out that nobody keeps.
        await run(stage.admin.elect_leaders("__queue_state", unclean=True))
        for broker in (3, 4):
            stage.cluster.start_broker(broker)
        more = [await taking, await other.take(100)]
        assert sorted(offset for one in more for offset in offsets(one.locks)) == [*range(5, 20)]
        # Of these locks nobody knows, and they have the counts of those that were given out since.
        assert await worker.ack(lost.state_epoch, *lost.locks) == [*range(10, 15)]
        for one in more:
            assert await other.ack(one.state_epoch, *one.locks) == []
        assert (await other.describe()).start_offset == 20

    play(script, brokers=6, config=ONE_KEEPER, keeps_invariants=False)


def test_a_queue_its_topics_and_that_the_request_is_done_are_one_entry_of_the_metadata() -> None:
    async def script(stage: Stage) -> None:
        await stage.process.run(stage.admin.create_queue("q", partitions=2))
        log = stage.cluster.brokers[0].metadata._log
        entries = [decode_entry(data) for _, _, data in log.read(log.first_index, 1 << 20)]
        [created] = [
            [type(one).__name__ for one in entry]
            for entry in entries
            if any(isinstance(one, QueueChanged) for one in entry)
        ]
        topic = ["TopicCreated", "PartitionChanged"]
        assert created == [
            *topic, *topic, "PartitionChanged", *topic, "QueueChanged", "QueueChanged", "RequestDone"
        ]

    play(script, config=ONE_KEEPER)


def test_after_a_power_loss_of_all_a_queue_goes_on_where_it_was() -> None:
    async def script(stage: Stage) -> None:
        worker, other = await create(stage, [0, 1, 2], [1, 2, 0])
        await send(stage, 20)
        taken = await worker.take(10)
        assert await worker.ack(taken.state_epoch, (0, 4, 1), (7, 7, 1)) == []
        for host in stage.hosts:
            host.power_loss()
        for broker in range(3):
            stage.cluster.start_broker(broker)
        await stage.until(stage.cluster.is_whole, "all to be back")
        assert offsets((await other.take(100)).locks) == [*range(10, 20)]
        assert await worker.ack(taken.state_epoch, (5, 6, 1), (8, 9, 1)) == []
        assert (await worker.describe()).start_offset == 10

    # The metadata are a snapshot soon, which has the queue, too.
    play(script, config=dataclasses.replace(ONE_KEEPER, metadata_snapshot_records=5))


def test_a_queue_of_a_topic_that_was_made_again_starts_over() -> None:
    async def script(stage: Stage) -> None:
        run, admin = stage.process.run, stage.admin
        worker, _ = await create(stage, [0, 1, 2], [1, 2, 0])
        await send(stage, 10)
        taken = await worker.take(10)
        assert await worker.ack(taken.state_epoch, *taken.locks) == []
        await run(admin.delete_topic("t"))
        assert await run(admin.list_queues()) == []
        again, _ = await create(stage, [0, 1, 2], [1, 2, 0])
        await send(stage, 5)
        found = await again.take(100)
        assert found.locks == [(0, 4, 1)]
        assert await again.ack(found.state_epoch, *found.locks) == []

    play(script, config=ONE_KEEPER)
