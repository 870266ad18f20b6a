"""Queues of a cluster whose servers die: what was taken stays taken, what was settled stays done."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayq import messages
from rayq.errors import InvalidRequestError, ProtocolError
from rayq.storage.batch import encode_batch
from rayq.storage.checkpoint import read_checkpoint
from rayq.storage.disk import LocalDisk
from rayq.testing import LocalCluster
from tests.local.queue_support import Raw, running
from tests.local.support import FAST, eventually, leader_of, wait_in_sync

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    directory = tmp_path_factory.mktemp("queues")
    with LocalCluster(
        brokers=3, data_dir=directory, retention_check_interval_ms=100, **FAST
    ) as cluster:
        yield cluster


@pytest.fixture
def queue(servers: LocalCluster) -> str:
    name = f"led-{next(_numbers)}"
    servers.admin.create_queue(name, partitions=1)
    return name


def put(cluster: LocalCluster, topic: str, count: int) -> None:
    with cluster.producer() as producer:
        for number in range(count):
            producer.send(topic, b"%d" % number)


def test_what_was_taken_and_settled_outlives_the_leader(
    servers: LocalCluster, queue: str
) -> None:
    wait_in_sync(servers, queue)
    put(servers, queue, 100)

    async def work() -> None:
        raw = Raw(servers, queue)
        taken = await raw.take(60)
        assert taken.offsets == [*range(60)]
        assert await raw.settle(taken, acks=[(0, 39, 1)]) == []
        dead = leader_of(servers, queue)
        await asyncio.to_thread(servers.kill_broker, dead)
        others = await raw.take(100, holder="other")
        assert others.offsets == [*range(60, 100)]
        # The holder has no connection to the new leader yet, and has all of its time.
        assert await raw.settle(taken, acks=[(40, 49, 1)]) == []
        raw.close()
        back = Raw(servers, queue)
        rest = await back.take(100)
        while len(rest.offsets) < 50:
            more = await back.take(100)
            rest.counts |= more.counts
            rest.locks.extend(more.locks)
        assert rest.counts == dict.fromkeys(range(50, 100), 2)
        assert await back.ack(rest) == []
        described = await back.describe()
        assert (described.start_offset, described.ready) == (100, 0)
        back.close()
        await asyncio.to_thread(servers.restart_broker, dead)

    running(work)


def test_what_a_transaction_aborted_is_given_to_nobody(
    servers: LocalCluster, queue: str
) -> None:
    with servers.producer(transactional_id="t") as producer:
        with producer.transaction():
            producer.send(queue, b"committed")
        with pytest.raises(ZeroDivisionError), producer.transaction():
            producer.send(queue, b"aborted")
            raise ZeroDivisionError
        with producer.transaction():
            open_one = producer.send(queue, b"open")
            producer.flush()
            open_one.result()

            async def while_open() -> None:
                raw = Raw(servers, queue)
                taken = await raw.take(10)
                assert list(taken.values.values()) == [b"committed"]
                assert (await raw.take(10, wait_ms=200)).locks == []
                await raw.ack(taken)
                raw.close()

            running(while_open)

    async def work() -> None:
        raw = Raw(servers, queue)
        taken = await raw.take(10)
        assert list(taken.values.values()) == [b"open"]
        assert await raw.ack(taken) == []
        described = await raw.describe()
        # The last marker may not have been looked at yet.
        assert described.ready <= 1
        raw.close()

    running(work)


def test_the_log_follows_a_queue_that_deletes_what_is_done(servers: LocalCluster) -> None:
    name = f"led-{next(_numbers)}"
    servers.admin.create_queue(name, partitions=1, retention="delete_done")
    put(servers, name, 20)

    async def work() -> None:
        raw = Raw(servers, name)
        taken = await raw.take(20)
        await raw.settle(taken, acks=[(0, 9, 1), (11, 19, 1)])
        raw.close()

    def log_start() -> int | None:
        topic = servers.admin.describe_topic(name)
        return topic.partitions[0].replicas[0].log_start_offset

    running(work)
    eventually(lambda: log_start() == 10, "the log begins at the first unsettled record")
    figures = {
        one.name.removeprefix("rayq_queue_"): one.value
        for one in servers.metrics()
        if one.labels.get("queue") == name
    }
    assert figures["ready"] + figures["locked"] == 1
    assert figures["trouble"] == figures["dead_total"] == figures["expired_total"] == 0


def test_a_client_that_sends_nonsense_harms_no_queue(servers: LocalCluster, queue: str) -> None:
    put(servers, queue, 3)

    async def work() -> None:
        raw = Raw(servers, queue)
        taken = await raw.take(1)
        for parts in (
            {"acks": [(2**62, 2**62, 1), (5, 2, 1), (7, 1, 2)]},
            {"nacks": [(0, 10**5, 3, 2**40)], "releases": [(1, 2**10, 8)]},
            {"extends": [(0, 2**12, 1, 2**53)], "rejects": [(2**60, 2, "no")]},
        ):
            lost = await raw.settle(taken, **parts)
            assert all(isinstance(who, str) for _, _, who in lost)
        for out_of_range in (
            {"acks": [(-7, -1, 2)]},
            {"nacks": [(0, 2, 1, -1)]},
            {"extends": [(0, 2, 1, 2**60)]},
            {"releases": [(0, 2**64 - 1, 1)]},
        ):
            with pytest.raises(ProtocolError, match="Not a valid Settle message"):
                await raw.settle(taken, **out_of_range)
        with pytest.raises(InvalidRequestError):
            await raw.settle(taken, nacks=[(0, 2**62, 1, None)])
        assert (await raw.describe()).locked == 1
        answer, _ = await raw.ask(messages.ListQueueRecords, 2**50, ["no such state"], 10)
        assert answer.records == []
        assert await raw.ack(taken) == []
        raw.close()

    running(work)


def test_a_queue_reads_what_is_only_in_the_object_store(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with LocalCluster(
        1,
        data_dir=tmp_path / "data",
        remote_storage_url=f"file://{tmp_path / 'store'}",
        retention_check_interval_ms=100,
        **FAST,
    ) as cluster:
        cluster.create_topic(
            "t",
            remote_storage=True,
            segment_bytes=64 * 1024,
            local_retention_bytes=0,
            local_retention_ms=None,
        )
        values = [b"%06d" % number + b"." * 1000 for number in range(400)]
        with cluster.producer(compression_type="none", batch_size=8 * 1024) as producer:
            producer.send_many("t", values).result(60)
        path = Path(cluster.data_dir) / "broker-0" / "t-0"

        def local_start() -> int:
            found = read_checkpoint(LocalDisk(), str(path))
            return 0 if found is None else found.local_start_offset

        eventually(lambda: local_start() > 200, "the disk has let go of old records")
        cluster.admin.create_queue("q", topic="t")

        async def work() -> None:
            raw = Raw(cluster, "q")
            found: list[bytes | None] = []
            while len(found) < 400:
                taken = await raw.take(100)
                found += taken.values.values()
                assert await raw.ack(taken) == []
            assert found == values
            raw.close()

        running(work)


def test_a_batch_of_a_thousand_records_is_shared(servers: LocalCluster, queue: str) -> None:
    batch = encode_batch([b"%d" % number for number in range(1000)])
    assert len(batch) > 4096
    put(servers, queue, 1000)

    async def work() -> None:
        consumers = [Raw(servers, queue) for _ in range(4)]
        takes = [await one.take(50) for one in consumers]
        found = [offset for taken in takes for offset in taken.offsets]
        assert sorted(found) == [*range(200)]
        for one, taken in zip(consumers, takes, strict=True):
            assert list(taken.values.values()) == [b"%d" % offset for offset in taken.offsets]
            assert await one.ack(taken) == []
            one.close()

    running(work)
