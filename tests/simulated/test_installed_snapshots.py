"""A broker's copy of the metadata after it took the controller's snapshot in place of its log: what
it answers is of that snapshot, also to those who asked before."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from proving.simulation import World
from proving.simulation.process import Process
from rayq.actors.broker.metadata_answers import MetadataAnswers
from rayq.actors.metadata.metadata_keeper import MetadataKeeper
from rayq.actors.metadata.quorum import encode_entries
from rayq.core.metadata_records import (
    EpochStarted,
    MetadataRecord,
    QueueChanged,
    TopicCreated,
    Voter,
    VotersChanged,
    encode_record,
    encode_records,
)
from rayq.storage.data_directory import DataDirectory, format_directory
from rayq.storage.metadata_log import MetadataLog
from rayq.wire import messages
from rayq.wire.answer_room import AnswerRoom

PATH, CLUSTER_ID = "/data/broker-1", "c" * 32
OLD = (Voter(1, "disk-1"),)
NEW = (Voter(1, "disk-1"), Voter(2, "disk-2"), Voter(3, "disk-3"))
CREATED: tuple[MetadataRecord, ...] = (
    TopicCreated("T", "tasks", {}, 1, False),
    QueueChanged("Q", "jobs", "T", {}, 0),
)


class _Broker:
    """A broker's copy of the metadata, and its answers about them."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._open()

    def _open(self) -> None:
        environment = self._process.environment
        self.directory = DataDirectory.open(environment, PATH)
        self.keeper = MetadataKeeper(
            environment,
            self.directory,
            MetadataLog.open(environment.disk, f"{PATH}/metadata"),
            incarnation="i",
            snapshot_records=1_000,
            on_applied=lambda records: self.answers.forget(records),
        )
        self.answers = MetadataAnswers(self.keeper, CLUSTER_ID, is_registered=lambda: True)

    def start_again(self) -> None:
        """The broker's process ended, and another opens the same directory."""
        self.directory.close()
        self._open()

    async def append(self, *records: MetadataRecord, epoch: int, commit_index: int) -> None:
        """A controller's records follow the log's last one."""
        log = self.keeper._log
        entries = [
            (index, epoch, encode_record(record))
            for index, record in enumerate(records, log.last_index + 1)
        ]
        request = messages.AppendMetadata(
            epoch, "controller", 1, log.last_index, log.last_epoch, commit_index
        )
        await self.keeper.append(request, memoryview(encode_entries(entries)))

    async def install(self, *records: MetadataRecord, epoch: int, last_index: int) -> None:
        started = EpochStarted(epoch, "controller", 1, CLUSTER_ID, "")
        request = messages.InstallMetadataSnapshot(epoch, last_index, epoch)
        await self.keeper.install(request, memoryview(encode_records([started, *records])))

    async def voters(self) -> list[tuple[int, str]]:
        probe = messages.Prepare(CLUSTER_ID, 0, "candidate", 1, is_probe=True)
        return list((await self.keeper.prepare(probe)).voters)


def _with_broker(work: Callable[[_Broker], Awaitable[None]]) -> None:
    async def script(process: Process) -> None:
        format_directory(
            process.environment, PATH, cluster_id=CLUSTER_ID, broker=1, secret=b"s" * 32
        )
        await work(_Broker(process))

    with World(seed=1) as world:
        process = world.host("b").process("broker")
        world.run(process.run(script(process)))


@pytest.mark.parametrize("commit_index", [0, 1])
def test_a_candidate_hears_of_the_voters_that_a_snapshot_names(commit_index: int) -> None:
    """By other voters a candidate would count another majority than the controller before it."""

    async def work(broker: _Broker) -> None:
        await broker.append(VotersChanged(OLD), epoch=1, commit_index=commit_index)
        assert await broker.voters() == [(1, "disk-1")]
        await broker.install(VotersChanged(NEW), epoch=2, last_index=5)
        expected = [(voter.broker, voter.directory_id) for voter in NEW]
        assert await broker.voters() == expected
        broker.start_again()
        assert await broker.voters() == expected
        await broker.append(VotersChanged(OLD), epoch=2, commit_index=5)
        assert await broker.voters() == [(1, "disk-1")], "the newest count, committed or not"

    _with_broker(work)


def test_who_waits_for_a_version_is_told_that_version_also_where_it_comes_in_a_snapshot() -> None:
    """A keeper of queues forgets, for good, what metadata of a version that was confirmed lack."""

    async def work(broker: _Broker) -> None:
        room = AnswerRoom(lambda: True)
        topics = messages.Metadata(["tasks"], version_min=5, wait_ms=10_000)
        queues = messages.DescribeQueues([], version_min=5, wait_ms=10_000, queue_ids=["Q"])
        asked = [
            asyncio.ensure_future(broker.answers.metadata(topics, room)),
            asyncio.ensure_future(broker.answers.queues(queues, room)),
        ]
        await asyncio.sleep(0.1)
        assert not any(one.done() for one in asked)
        await broker.install(VotersChanged(NEW), *CREATED, epoch=2, last_index=5)
        of_topics, of_queues = await asyncio.gather(*asked)
        assert (of_topics.version, of_queues.version) == (5, 5)
        assert (len(of_topics.topics), of_topics.voters) == (1, [1, 2, 3])
        assert [one.queue_id for one in of_queues.queues] == ["Q"]

    _with_broker(work)


def test_what_was_told_before_a_snapshot_is_not_told_after_it() -> None:
    async def work(broker: _Broker) -> None:
        room = AnswerRoom(lambda: True)
        topics = messages.Metadata(["tasks"])
        await broker.append(VotersChanged(OLD), CREATED[0], epoch=1, commit_index=2)
        before = await broker.answers.metadata(topics, room)
        changed = TopicCreated("T2", "tasks", {"retention_ms": 1}, 1, False)
        await broker.install(VotersChanged(NEW), changed, epoch=2, last_index=5)
        after = await broker.answers.metadata(topics, room)
        assert (before.version, after.version) == (2, 5)
        assert before.topics != after.topics

    _with_broker(work)
