"""When a controller takes a metadata record for committed, and which voter's log it takes over
(Raft's rules, docs/protocol.md, rule 3): a quorum against voters that a test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from proving.simulation import World
from proving.simulation.process import Process
from rayq import messages
from rayq.actors.metadata.quorum import (
    APPEND_BYTES_MAX,
    Quorum,
    decode_entries,
    encode_entries,
)
from rayq.config import ClusterConfig
from rayq.core.cluster.records import (
    BrokerFenced,
    BrokerRegistered,
    EpochStarted,
    Member,
    PartitionChanged,
    PartitionValue,
    TopicCreated,
    Voter,
    VotersChanged,
    decode_entry,
    encode_record,
)
from rayq.errors import (
    ControllerUnavailableError,
    NotControllerError,
    ProtocolError,
    StalePartitionError,
    TimeoutError,
)
from rayq.storage.metadata_log import MetadataLog

WAIT_S = 5.0
RECORD = encode_record(BrokerFenced(9, "gone"))


class PlayedVoter:
    """A broker that keeps the metadata log of entries `(index, epoch, record)`."""

    def __init__(self, broker: int, *epochs: int, directory: str | None = None) -> None:
        self.broker = broker
        self.directory = directory or f"disk-{broker}"
        self.log = [(index, epoch, RECORD) for index, epoch in enumerate(epochs, 1)]
        self.promised_epoch = max(epochs, default=0)
        self.start_counter, self.incarnation = 1, f"{broker}a"
        self.heard_ms_ago: int | None = None
        self.is_up = True
        self.takes_up_to: int | None = None
        """The last index that reaches the voter's disk; None: all do."""
        self.commit_index = 0

    def answer(self, request: Any, payload: bytes, voters: list[tuple[int, str]]) -> Any:
        match request:
            case messages.Prepare():
                if not request.is_probe:
                    self.promised_epoch = request.epoch
                last_index, last_epoch, _ = self.log[-1] if self.log else (0, 0, b"")
                return messages.PrepareResponse(
                    self.broker, self.directory, self.start_counter, self.incarnation,
                    self.promised_epoch, last_epoch, last_index, voters, self.heard_ms_ago,
                ), b""
            case messages.ReadMetadataLog():
                return messages.ReadMetadataLogResponse(None, None, True), encode_entries(
                    [entry for entry in self.log if entry[0] >= request.first_index]
                )
            case messages.AppendMetadata():
                self.commit_index = max(self.commit_index, request.commit_index)
                taken = [
                    entry
                    for entry in decode_entries(payload)
                    if self.takes_up_to is None or entry[0] <= self.takes_up_to
                ]
                self.log = self.log[: request.previous_index] + taken
                return messages.AppendMetadataResponse(self.directory, len(self.log)), b""
        raise AssertionError(request)


class PlayedPool:
    def __init__(self, brokers: list[PlayedVoter], voters: list[int]) -> None:
        self._brokers = {one.broker: one for one in brokers}
        self._voters = [(number, f"disk-{number}") for number in voters]

    async def request(
        self, host: str, port: int, request: Any, payload: bytes = b"", *, timeout_s: float
    ) -> Any:
        await asyncio.sleep(0.01)
        broker = self._brokers[port]
        if not broker.is_up:
            raise TimeoutError(f"Broker {port} does not answer.")
        return broker.answer(request, payload, self._voters)


def with_quorum(
    brokers: list[PlayedVoter],
    voters: list[int],
    work: Callable[[Quorum, list[tuple[str, int]]], Awaitable[None]],
) -> None:
    async def script(process: Process) -> None:
        quorum = Quorum(
            process.environment,
            cast(Any, PlayedPool(brokers, voters)),
            ClusterConfig(),
            cluster_id="c",
            endpoint=("controller", 1),
            now_s=process.environment.clock.monotonic,
            on_end=lambda reason: None,
        )
        try:
            await work(quorum, [("h", broker.broker) for broker in brokers])
        finally:
            quorum.end("the test is over")

    with World(seed=1) as world:
        process = world.host("controller").process("controller")
        world.run(process.run(script(process)))


async def is_committed(quorum: Quorum, index: int) -> bool:
    try:
        await asyncio.wait_for(quorum.committed(index), WAIT_S)
    except asyncio.TimeoutError:
        return False
    return True


@pytest.mark.parametrize("voters, enough", [([1], 1), ([1, 2, 3], 2), ([1, 2, 3, 4, 5], 3)])
def test_a_record_is_committed_when_a_majority_of_the_voters_has_it_whoever_else_does(
    voters: list[int], enough: int
) -> None:
    brokers = [PlayedVoter(number, 1) for number in range(1, 8)]

    async def work(quorum: Quorum, at: list[tuple[str, int]]) -> None:
        await quorum.take_over(at, silent_s_min=0)
        for voter in voters:
            brokers[voter - 1].is_up = False
        index = quorum.append([BrokerFenced(7, "gone")])
        for voter in voters[: enough - 1]:
            brokers[voter - 1].is_up = True
        assert not await is_committed(quorum, index)
        assert brokers[6].log[-1][0] == index, "one that has no vote"
        brokers[voters[enough - 1] - 1].is_up = True
        assert await is_committed(quorum, index)
        await asyncio.sleep(WAIT_S)
        assert brokers[6].commit_index == index, "and is told"

    with_quorum(brokers, voters, work)


def test_a_record_of_an_earlier_epoch_is_committed_only_by_one_of_this_epoch_after_it() -> None:
    brokers = [PlayedVoter(1, 1, 1, 2), PlayedVoter(2, 1, 1), PlayedVoter(3, 1, 1)]
    brokers[0].is_up = False

    async def work(quorum: Quorum, at: list[tuple[str, int]]) -> None:
        # All have two records of epoch 1, and no voter takes the record that begins epoch 2.
        for broker in brokers:
            broker.takes_up_to = 2
        taking = asyncio.ensure_future(quorum.take_over(at, silent_s_min=0))
        await asyncio.sleep(WAIT_S)
        assert quorum.commit_index == 0 and not taking.done()
        brokers[2].takes_up_to = None
        await asyncio.sleep(WAIT_S)
        assert quorum.commit_index == 0 and not taking.done(), "one of three"
        brokers[1].takes_up_to = None
        records = await taking
        assert quorum.commit_index == 3
        assert records[-1] == EpochStarted(2, "controller", 1, "c")

    with_quorum(brokers, [1, 2, 3], work)


@pytest.mark.parametrize(
    "logs, best",
    [
        ([(1, 1, 1), (1, 2), (1,)], (1, 2)),  # A later epoch is worth more than more records.
        ([(1,), (1, 1, 1), (1, 1)], (1, 1, 1)),
        ([(2, 3), (2, 2, 2, 2), (2, 3, 3)], (2, 3, 3)),
    ],
)
def test_the_log_that_ends_with_the_latest_epoch_and_then_the_longest_is_taken_over(
    logs: list[tuple[int, ...]], best: tuple[int, ...]
) -> None:
    brokers = [PlayedVoter(number, *epochs) for number, epochs in enumerate(logs, 1)]

    async def work(quorum: Quorum, at: list[tuple[str, int]]) -> None:
        records = await quorum.take_over(at, silent_s_min=0)
        assert quorum.epoch == max(best) + 1 == max(max(epochs) for epochs in logs) + 1
        assert len(records) == len(best) + 1
        await asyncio.sleep(WAIT_S)
        for broker in brokers:
            assert [epoch for _, epoch, _ in broker.log][-1] == quorum.epoch

    with_quorum(brokers, [1, 2, 3], work)


def test_nothing_is_taken_over_without_a_majority_of_the_voters() -> None:
    brokers = [PlayedVoter(number, 1) for number in range(1, 6)]
    brokers[1].is_up = brokers[2].is_up = False

    async def work(quorum: Quorum, at: list[tuple[str, int]]) -> None:
        with pytest.raises(ControllerUnavailableError, match="broker 2"):
            await quorum.take_over(at, silent_s_min=0)
        assert all(broker.promised_epoch == 1 for broker in brokers)

    with_quorum(brokers, [1, 2, 3], work)


def test_a_broker_with_another_disk_is_not_the_voter() -> None:
    brokers = [PlayedVoter(1, 1), PlayedVoter(2, 1), PlayedVoter(3, 1, directory="new")]

    async def work(quorum: Quorum, at: list[tuple[str, int]]) -> None:
        await quorum.take_over(at, silent_s_min=0)
        brokers[1].is_up = False
        index = quorum.append([BrokerFenced(7, "gone")])
        assert not await is_committed(quorum, index)
        assert brokers[2].log[-1][0] == index
        brokers[1].is_up = True
        assert await is_committed(quorum, index)

    with_quorum(brokers, [1, 2, 3], work)


@pytest.mark.parametrize("start_counter, is_old", [(3, True), (4, True), (5, False)])
def test_an_old_copy_of_a_voters_disk_has_no_vote(start_counter: int, is_old: bool) -> None:
    brokers = [PlayedVoter(number, 1) for number in (1, 2, 3)]
    known = BrokerRegistered(3, "disk-3", 4, "3-later", "h", 3, "node", 10)
    for broker in brokers:
        broker.log[0] = (1, 1, encode_record(known))
    brokers[2].start_counter = start_counter

    async def work(quorum: Quorum, at: list[tuple[str, int]]) -> None:
        await quorum.take_over(at, silent_s_min=0)
        brokers[1].is_up = False
        assert await is_committed(quorum, quorum.append([BrokerFenced(7, "gone")])) is not is_old

    with_quorum(brokers, [1, 2, 3], work)


def test_the_newest_voters_count_committed_or_not() -> None:
    brokers = [PlayedVoter(number, 1) for number in (1, 2, 3)]

    async def work(quorum: Quorum, at: list[tuple[str, int]]) -> None:
        await quorum.take_over(at, silent_s_min=0)
        brokers[1].is_up = brokers[2].is_up = False
        changed = VotersChanged((Voter(1, "disk-1"), Voter(2, "disk-2")))
        assert not await is_committed(quorum, quorum.append([changed]))
        brokers[1].is_up = True
        assert await is_committed(quorum, quorum.append([BrokerFenced(7, "gone")]))

    with_quorum(brokers, [1], work)


def test_who_waits_for_a_commit_hears_that_the_epoch_ended() -> None:
    brokers = [PlayedVoter(number, 1) for number in (1, 2, 3)]

    async def work(quorum: Quorum, at: list[tuple[str, int]]) -> None:
        await quorum.take_over(at, silent_s_min=0)
        for broker in brokers:
            broker.is_up = False
        waiting = asyncio.ensure_future(quorum.committed(quorum.append([BrokerFenced(7, "gone")])))
        await asyncio.sleep(WAIT_S)
        assert not quorum.has_majority()
        quorum.end("another one")
        with pytest.raises(NotControllerError, match="another one"):
            await waiting
        with pytest.raises(NotControllerError):
            quorum.append([BrokerFenced(7, "gone")])

    with_quorum(brokers, [1, 2, 3], work)


@pytest.mark.parametrize("sent", [[], [(1, 1, RECORD)], [(7, 1, RECORD)]])
def test_a_voter_that_never_comes_to_the_end_of_its_log_is_not_taken_over(sent: list[Any]) -> None:
    class Endless(PlayedVoter):
        reads = 0

        def answer(self, request: Any, payload: bytes, voters: list[tuple[int, str]]) -> Any:
            if not isinstance(request, messages.ReadMetadataLog):
                return super().answer(request, payload, voters)
            self.reads += 1
            assert self.reads < 5, "it is asked forever"
            return messages.ReadMetadataLogResponse(None, None, False), encode_entries(sent)

    async def work(quorum: Quorum, at: list[tuple[str, int]]) -> None:
        with pytest.raises(ProtocolError, match=r"The voter at \('h', 1\)"):
            await quorum.take_over(at, silent_s_min=0)

    with_quorum([Endless(1, 1, 1)], [1], work)


@pytest.mark.parametrize("says", [0, 99, None])
def test_a_broker_that_never_gets_on_with_the_log_is_asked_now_and_then(says: int | None) -> None:
    class Stuck(PlayedVoter):
        appends = 0

        def answer(self, request: Any, payload: bytes, voters: list[tuple[int, str]]) -> Any:
            if not isinstance(request, messages.AppendMetadata):
                return super().answer(request, payload, voters)
            self.appends += 1
            if says is None:
                raise StalePartitionError("that is not what comes next")
            return messages.AppendMetadataResponse(self.directory, says), b""

    stuck = Stuck(2, 1)

    async def work(quorum: Quorum, at: list[tuple[str, int]]) -> None:
        await quorum.take_over(at, silent_s_min=0)
        before = stuck.appends
        await asyncio.sleep(WAIT_S)
        assert 10 < stuck.appends - before < 60
        assert await is_committed(quorum, quorum.append([BrokerFenced(7, "gone")]))

    with_quorum([PlayedVoter(1, 1), stuck, PlayedVoter(3, 1)], [1, 2, 3], work)


@pytest.mark.parametrize("is_whole", [False, True])
def test_of_one_decision_the_next_controller_finds_all_or_nothing(is_whole: bool) -> None:
    voter = PlayedVoter(0, 1)
    decided = [BrokerFenced(number, "gone") for number in range(3)]

    async def work(quorum: Quorum, known: list[tuple[str, int]]) -> None:
        await quorum.take_over(known, silent_s_min=0)
        last_index = quorum.last_index
        voter.takes_up_to = last_index + (1 if is_whole else 0)
        quorum.append(decided, together=True)
        await asyncio.sleep(WAIT_S)
        quorum.end("it dies")

    async def next_work(quorum: Quorum, known: list[tuple[str, int]]) -> None:
        voter.takes_up_to = None
        found = await quorum.take_over(known, silent_s_min=0)
        assert [one for one in found if one in decided] == (decided if is_whole else [])

    with_quorum([voter], [0], work)
    with_quorum([voter], [0], next_work)


def test_a_topic_of_ten_thousand_partitions_is_one_entry() -> None:
    voter = PlayedVoter(0, 1)
    members = tuple(Member(broker, "d" * 32, "i" * 32) for broker in range(3))
    value = PartitionValue((0, 1, 2), members, leader=0, leader_incarnation="i" * 32)
    decided = [
        TopicCreated("id", "t", {}, 3),
        *(PartitionChanged("id", number, value) for number in range(10_000)),
    ]

    async def work(quorum: Quorum, known: list[tuple[str, int]]) -> None:
        await quorum.take_over(known, silent_s_min=0)
        await quorum.committed(quorum.append(decided, together=True))
        disk = quorum._environment.disk
        log = MetadataLog.open(disk, "/metadata")
        log.append(voter.log)
        log.close()
        entries = MetadataLog.inspect(disk, "/metadata").read(3, APPEND_BYTES_MAX)
        assert [len(data) > APPEND_BYTES_MAX for _, _, data in entries] == [True]
        assert decode_entry(entries[0][2]) == decided

    async def next_work(quorum: Quorum, known: list[tuple[str, int]]) -> None:
        assert (await quorum.take_over(known, silent_s_min=0))[2:-1] == decided

    with_quorum([voter], [0], work)
    with_quorum([voter], [0], next_work)
