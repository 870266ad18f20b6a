"""A broker's copy of the metadata after it took the controller's snapshot in place of its log, or
opened its log again after a failed write: what it answers is of what the disk holds then, also to
those who asked before."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable

import pytest

from proving.simulation import World
from proving.simulation.metadata_answers import MetadataJudge
from proving.simulation.process import Process
from proving.simulation.server_view import metadata_log_of
from rayq import messages
from rayq.actors.broker.metadata_answers import MetadataAnswers
from rayq.actors.metadata.metadata_keeper import MetadataKeeper
from rayq.actors.metadata.quorum import encode_entries
from rayq.core.cluster.records import (
    EpochStarted,
    MetadataRecord,
    QueueChanged,
    TopicCreated,
    Voter,
    VotersChanged,
    encode_record,
    encode_records,
)
from rayq.errors import StorageError
from rayq.storage.data_directory import DataDirectory, format_directory
from rayq.storage.metadata_log import MetadataLog
from rayq.wire.answer_room import AnswerRoom
from rayq.wire.peer import Peer

PATH, CLUSTER_ID = "/data/broker-1", "c" * 32
OLD = (Voter(1, "disk-1"),)
NEW = (Voter(1, "disk-1"), Voter(2, "disk-2"), Voter(3, "disk-3"))
CREATED: tuple[MetadataRecord, ...] = (
    TopicCreated("T", "tasks", {}, 1, False),
    QueueChanged("Q", "jobs", "T", {}, 0),
)


def _peer() -> Peer:
    closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    return Peer("server", 1, "broker-1", closed, AnswerRoom(lambda: True))


class _Broker:
    """A broker's copy of the metadata, and its answers about them."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.disk = process.host.disk
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
            now_s=environment.clock.monotonic,
            on_applied=lambda records: self.answers.forget(records),
        )
        self.answers = MetadataAnswers(self.keeper, CLUSTER_ID, is_registered=lambda: True)

    def start_again(self) -> None:
        """The broker's process ended, and another opens the same directory."""
        self.directory.close()
        self._open()

    async def append(self, *records: MetadataRecord, epoch: int, commit_index: int) -> None:
        """A controller's records follow the log's last one."""
        log = metadata_log_of(self.keeper)
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
        peer = _peer()
        topics = messages.Metadata(["tasks"], version_min=5, wait_ms=10_000)
        queues = messages.DescribeQueues([], version_min=5, wait_ms=10_000, queue_ids=["Q"])
        asked = [
            asyncio.ensure_future(broker.answers.metadata(peer, topics)),
            asyncio.ensure_future(broker.answers.queues(peer, queues)),
        ]
        await asyncio.sleep(0.1)
        assert not any(request.done() for request in asked)
        await broker.install(VotersChanged(NEW), *CREATED, epoch=2, last_index=5)
        of_topics, of_queues = await asyncio.gather(*asked)
        assert (of_topics.version, of_queues.version) == (5, 5)
        assert (len(of_topics.topics), of_topics.voters) == (1, [1, 2, 3])
        assert [queue.queue_id for queue in of_queues.queues] == ["Q"]

    _with_broker(work)


def test_what_was_told_before_a_snapshot_is_not_told_after_it() -> None:
    async def work(broker: _Broker) -> None:
        peer = _peer()
        topics = messages.Metadata(["tasks"])
        await broker.append(VotersChanged(OLD), CREATED[0], epoch=1, commit_index=2)
        before = await broker.answers.metadata(peer, topics)
        changed = TopicCreated("T2", "tasks", {"retention_ms": 1}, 1, False)
        await broker.install(VotersChanged(NEW), changed, epoch=2, last_index=5)
        after = await broker.answers.metadata(peer, topics)
        assert (before.version, after.version) == (2, 5)
        assert before.topics != after.topics

    _with_broker(work)


def test_a_candidate_hears_of_the_voters_that_a_failed_write_has_left_on_the_disk() -> None:
    """The sync of the record failed, and the bytes are there: the log that is opened again counts,
    with its voters."""

    async def work(broker: _Broker) -> None:
        await broker.append(VotersChanged(OLD), epoch=1, commit_index=1)
        broker.disk.fail("sync", path_part="/metadata", error=errno.EIO, times=1)
        with pytest.raises(StorageError):
            await broker.append(VotersChanged(NEW), epoch=1, commit_index=1)
        promise = messages.Prepare(CLUSTER_ID, 2, "candidate", 1)
        answer = await broker.keeper.prepare(promise)
        assert answer.last_index == 2, "what was written is there"
        assert list(answer.voters) == [(voter.broker, voter.directory_id) for voter in NEW]

    _with_broker(work)


@pytest.mark.parametrize("is_sent_again", [False, True])
def test_a_snapshot_that_a_failed_write_has_left_on_the_disk_is_what_the_broker_goes_on_from(
    is_sent_again: bool,
) -> None:
    """The next controller hears that the records of the snapshot are there, and sends what
    follows."""

    async def work(broker: _Broker) -> None:
        await broker.append(VotersChanged(OLD), epoch=1, commit_index=1)
        broker.disk.fail("sync", path_part="/metadata.log", error=errno.EIO, times=1)
        with pytest.raises(StorageError):
            await broker.install(VotersChanged(NEW), *CREATED, epoch=2, last_index=5)
        answer = await broker.keeper.prepare(messages.Prepare(CLUSTER_ID, 3, "candidate", 1))
        assert (answer.last_epoch, answer.last_index) == (2, 5)
        assert list(answer.voters) == [(voter.broker, voter.directory_id) for voter in NEW]
        if is_sent_again:  # By a controller whose own snapshot is older.
            await broker.install(VotersChanged(OLD), epoch=3, last_index=4)
        assert broker.keeper.version == 5
        await broker.append(VotersChanged(OLD), epoch=3, commit_index=6)
        assert (broker.keeper.version, broker.keeper.trouble) == (6, None)
        assert broker.keeper.state.voters == OLD
        assert "tasks" in broker.keeper.state.topic_ids

    _with_broker(work)


def test_the_simulation_judges_which_voters_and_queues_are_told() -> None:
    async def work(broker: _Broker) -> None:
        peer = _peer()
        every = messages.DescribeQueues()
        await broker.append(VotersChanged(OLD), epoch=1, commit_index=1)
        voters_before = await broker.voters()
        queues_before = await broker.answers.queues(peer, every)
        await broker.install(VotersChanged(NEW), *CREATED, epoch=2, last_index=5)
        right = MetadataJudge()
        right.judge_voters(broker.keeper, await broker.voters())
        right.judge_queues(broker.keeper, every, await broker.answers.queues(peer, every))
        assert right.fault is None
        for_voters, for_queues = MetadataJudge(), MetadataJudge()
        for_voters.judge_voters(broker.keeper, voters_before)
        for_queues.judge_queues(broker.keeper, every, queues_before)
        assert for_voters.fault is not None and "names the voters" in for_voters.fault
        assert for_queues.fault is not None and "tells of the queues" in for_queues.fault

    _with_broker(work)
