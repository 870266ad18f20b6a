"""The way of a replica process to leaders and coordinators, with a broker and servers played."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
import pytest

from proving.simulation import World
from proving.simulation.process import Process
from rayq import messages
from rayq.actors import peers
from rayq.actors.peers import (
    ATTEMPT_TIMEOUT_S,
    PATIENCE_S,
    RETRY_MAX_S,
    RETRY_S,
    TOPIC_GONE_S,
    Peers,
)
from rayq.core.queues.queue_states import queue_state_partition
from rayq.errors import (
    ClosedError,
    ControllerUnavailableError,
    CoordinatorLoadingError,
    DisconnectedError,
    NotLeaderError,
    RayqError,
    TimeoutError,
    TransactionEndedError,
    UnknownTopicError,
)
from rayq.messages.transaction_ids import make_family

FAMILY = make_family(1, 7)


def topic(name: str, topic_id: str, *leaders: int | None, epoch: int = 1) -> messages.TopicMetadata:
    """A topic whose partitions have these leaders, on hosts of the same number."""
    replicas = [messages.ReplicaEndpoint(number, f"host-{number}", 1) for number in range(3)]
    partitions = [
        messages.PartitionMetadata(number, leader, epoch, 1, [0, 1, 2], replicas, None)
        for number, leader in enumerate(leaders)
    ]
    return messages.TopicMetadata(name, topic_id, {}, partitions)


class Servers:
    """The broker of the node and the servers of all leaders. `answer` answers the requests."""

    def __init__(self, process: Process) -> None:
        self.topics = [topic("__transaction_state", "S", 0, 1), topic("t", "T", 2)]
        self.controller: str | None = "host:1"
        self.asked: list[tuple[str, Any]] = []
        self.sent: list[tuple[int, bytes, float]] = []
        """Port, payload and time-out of each request."""
        self.questions: list[Any] = []
        """To the broker."""
        self.looks = 0
        self.given = b""
        self.answer: Callable[[Any], Awaitable[Any]] = self.done
        self.peers = Peers(process.environment, cast(Any, self), ask_broker=cast(Any, self.broker))

    async def done(self, request: Any) -> Any:
        return messages.Done()

    async def broker(self, request: Any) -> Any:
        self.questions.append(request)
        self.looks += 1
        await asyncio.sleep(0.001)
        if isinstance(request, messages.AllocateProducerId):
            return messages.AllocateProducerIdResponse(77, 0)
        found = [
            topic
            for topic in self.topics
            if topic.name in (request.topics or []) or topic.topic_id in request.topic_ids
        ]
        return messages.MetadataResponse("c", 1, 1, self.controller, [], [], found)

    async def request(
        self, host: str, port: int, request: Any, payload: bytes = b"", *, timeout_s: float
    ) -> Any:
        self.asked.append((host, request))
        self.sent.append((port, payload, timeout_s))
        await asyncio.sleep(0.001)
        return await self.answer(request), memoryview(self.given)

    def fails(self, *errors: RayqError) -> None:
        """The next answers are these errors."""
        left = list(errors)

        async def answer(request: Any) -> Any:
            if left:
                raise left.pop(0)
            return messages.Done()

        self.answer = answer

    async def mark(self, topic_id: str = "T", partition: int = 0) -> None:
        await self.peers.ask_leader(
            topic_id,
            partition,
            lambda topic_id, partition, epoch: messages.WriteMarker(
                topic_id, partition, epoch, FAMILY, 0, True, 1
            ),
        )

    @property
    def hosts(self) -> list[str]:
        return [host for host, _ in self.asked]


def played(work: Callable[[Servers], Awaitable[None]]) -> None:
    async def script(process: Process) -> None:
        await work(Servers(process))

    with World(seed=1) as world:
        process = world.host("broker").process("replica")
        world.run(process.run(script(process)), limit_s=3_600)


def test_a_leader_is_asked_in_its_epoch_and_looked_up_once() -> None:
    async def work(of: Servers) -> None:
        await asyncio.gather(*(of.mark() for _ in range(5)))
        await of.mark()
        assert of.hosts == ["host-2"] * 6 and of.looks == 1
        assert of.asked[0][1].leader_epoch == 1

    played(work)


@pytest.mark.parametrize("error", [NotLeaderError("moved"), DisconnectedError("gone")])
def test_after_a_refusal_the_next_attempt_finds_the_next_leader(error: RayqError) -> None:
    async def work(of: Servers) -> None:
        await of.mark()
        of.fails(error)
        of.topics[1] = topic("t", "T", 0, epoch=2)
        with pytest.raises(type(error)):
            await of.mark()
        await of.mark()
        assert of.hosts == ["host-2", "host-2", "host-0"] and of.looks == 2
        assert of.asked[-1][1].leader_epoch == 2

    played(work)


def test_an_error_that_any_leader_gives_costs_no_look() -> None:
    async def work(of: Servers) -> None:
        of.fails(TransactionEndedError("late"))
        with pytest.raises(TransactionEndedError):
            await of.mark()
        await of.mark()
        assert of.looks == 1

    played(work)


def test_a_partition_without_a_leader_is_looked_up_again() -> None:
    async def work(of: Servers) -> None:
        of.topics[1] = topic("t", "T", None)
        for partition in (0, 1, 5):
            with pytest.raises(NotLeaderError):
                await of.mark(partition=partition)
        of.topics[1] = topic("t", "T", 1)
        await of.mark()
        assert of.hosts == ["host-1"]

    played(work)


def test_a_topic_is_gone_once_it_was_missing_for_long() -> None:
    async def work(of: Servers) -> None:
        async def look(after_s: float) -> bool:
            await asyncio.sleep(after_s)
            with pytest.raises(RayqError):
                await of.mark()
            return of.peers.is_gone("T")

        kept = of.topics.pop()
        assert not await look(0)
        assert not await look(TOPIC_GONE_S / 2)
        of.topics.append(kept)
        await of.mark()
        of.topics.pop()
        of.fails(NotLeaderError("gone"))
        assert not await look(TOPIC_GONE_S)
        assert not await look(0), "it was there a moment ago"
        of.controller = None
        with pytest.raises(ControllerUnavailableError):
            await of.mark()
        of.controller = "host:1"
        assert await look(TOPIC_GONE_S + 1)

    played(work)


def test_one_question_is_under_way_for_all_who_join_alike() -> None:
    async def work(of: Servers) -> None:
        await asyncio.gather(*(of.peers.join(FAMILY, 3, "T", 0, principal=None) for _ in range(5)))
        assert of.hosts == ["host-1"], "the family names the coordinator's partition"
        request = of.asked[0][1]
        assert (request.topic_id, request.partition, request.family) == ("S", 1, FAMILY)
        await asyncio.gather(of.peers.join(FAMILY, 3, "T", 1, principal=None), of.peers.join(FAMILY, 4, "T", 1, principal=None))
        assert len(of.asked) == 3

    played(work)


def test_questions_are_repeated_while_coordinators_move_and_begin() -> None:
    async def work(of: Servers) -> None:
        of.fails(CoordinatorLoadingError("."), NotLeaderError("."), UnknownTopicError("."))
        await of.peers.join(FAMILY, 3, "T", 0, principal=None)
        assert len(of.asked) == 4
        of.fails(TransactionEndedError("late"))
        with pytest.raises(TransactionEndedError):
            await of.peers.join(FAMILY, 3, "T", 0, principal=None)

    played(work)


def test_without_an_answer_a_question_ends_in_time() -> None:
    async def work(of: Servers) -> None:
        del of.topics[0]
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with pytest.raises(TimeoutError, match="__transaction_state"):
            await of.peers.join(FAMILY, 3, "T", 0, principal=None)
        assert PATIENCE_S - 2 < loop.time() - began_s <= PATIENCE_S
        with pytest.raises(UnknownTopicError):
            await of.peers.coordinators()

    played(work)


def test_how_a_transaction_ended_and_how_many_coordinators_there_are() -> None:
    async def work(of: Servers) -> None:
        async def answer(request: Any) -> Any:
            return messages.DescribeOutcomeResponse("aborting")

        of.answer = answer
        assert await of.peers.outcome(FAMILY, 0) == "aborting"
        assert await of.peers.coordinators() == 2

    played(work)


def test_each_question_says_all_that_its_caller_said() -> None:
    async def work(of: Servers) -> None:
        of.topics[0] = topic("__transaction_state", "S", 0, 1, epoch=6)

        async def answer(request: Any) -> Any:
            if isinstance(request, messages.DescribeOutcome):
                return messages.DescribeOutcomeResponse("open")
            return messages.Done()

        of.answer = answer
        await of.peers.join(FAMILY, 3, "T", 9, principal=None)
        await of.peers.abort(FAMILY, 4)
        assert await of.peers.outcome(FAMILY, 5) == "open"
        assert of.asked == [
            ("host-1", messages.JoinTransaction("S", 1, 6, FAMILY, 3, "T", 9)),
            ("host-1", messages.AbortTransaction("S", 1, 6, FAMILY, 4)),
            ("host-1", messages.DescribeOutcome("S", 1, 6, FAMILY, 5)),
        ]
        assert of.sent == [(1, b"", ATTEMPT_TIMEOUT_S)] * 3
        assert of.questions == [messages.Metadata(["__transaction_state"])], "looked up once"

    played(work)


def test_questions_that_differ_are_asked_apart_and_equal_ones_together() -> None:
    async def work(of: Servers) -> None:
        async def answer(request: Any) -> Any:
            if isinstance(request, messages.DescribeOutcome):
                return messages.DescribeOutcomeResponse(f"{request.family}, {request.epoch}")
            return messages.Done()

        of.answer = answer
        other = make_family(0, 7)
        assert await asyncio.gather(
            *(
                of.peers.outcome(*transaction)
                for transaction in 2 * [(FAMILY, 0), (FAMILY, 1), (other, 0)]
            )
        ) == 2 * [f"{FAMILY}, 0", f"{FAMILY}, 1", f"{other}, 0"]
        assert len(of.asked) == 3
        await asyncio.gather(
            *(of.peers.abort(*transaction) for transaction in 2 * [(FAMILY, 0), (FAMILY, 1)])
        )
        assert len(of.asked) == 5
        joins = [(FAMILY, 0, "T", 0), (FAMILY, 0, "T", 1), (FAMILY, 0, "U", 0), (FAMILY, 1, "T", 0)]
        await asyncio.gather(*(of.peers.join(*join, principal=None) for join in 2 * joins))
        assert len(of.asked) == 9
        await of.peers.join(*joins[0], principal=None)
        assert len(of.asked) == 10, "an answer is for those who waited for it"

    played(work)


def test_who_gives_up_a_question_leaves_it_to_the_others() -> None:
    async def work(of: Servers) -> None:
        of.fails(*(NotLeaderError(".") for _ in range(3)), TransactionEndedError("late"))
        waiting = [asyncio.ensure_future(of.peers.join(FAMILY, 3, "T", 0, principal=None)) for _ in range(3)]
        await asyncio.sleep(0.01)
        waiting[0].cancel()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert [repr(error) for error in found[1:]] == ["TransactionEndedError('late')"] * 2
        assert found[1] is not found[2], "one object is never raised twice"

    played(work)


def test_a_question_ends_with_its_process() -> None:
    async def work(of: Servers) -> None:
        async def answer(request: Any) -> Any:
            await asyncio.sleep(1000)

        of.answer = answer
        before = set(asyncio.all_tasks())
        waiting = asyncio.ensure_future(of.peers.join(FAMILY, 3, "T", 0, principal=None))
        await asyncio.sleep(0.1)
        for task in asyncio.all_tasks() - before - {waiting}:
            task.cancel()
        with pytest.raises(ClosedError):
            await waiting

    played(work)


def test_a_question_is_repeated_less_and_less_often() -> None:
    async def work(of: Servers) -> None:
        times: list[float] = []

        async def answer(request: Any) -> Any:
            times.append(asyncio.get_running_loop().time())
            raise CoordinatorLoadingError("not yet")

        of.answer = answer
        with pytest.raises(TimeoutError) as told:
            await of.peers.join(FAMILY, 3, "T", 0, principal=None)
        assert told.value.message == (
            "The coordinator of transactions in __transaction_state-1 did not answer for 30 s: "
            "not yet"
        )
        pauses = [later - at for at, later in zip(times, times[1:], strict=False)]
        expected = [min(RETRY_S * 2**number, RETRY_MAX_S) for number in range(len(pauses))]
        assert pauses == pytest.approx(expected, rel=0.25, abs=0.01)
        assert PATIENCE_S - 1.25 * RETRY_MAX_S - 0.1 < sum(pauses) < PATIENCE_S

    played(work)


@pytest.mark.parametrize("error", [NotLeaderError("moved"), TransactionEndedError("late")])
def test_what_was_learnt_meanwhile_is_kept(error: RayqError) -> None:
    """The request was sent by an older picture: its error says nothing of the newer one."""

    async def work(of: Servers) -> None:
        gate = asyncio.Event()

        async def answer(request: Any) -> Any:
            if request.leader_epoch == 1:
                await gate.wait()
                raise error
            return messages.Done()

        of.answer = answer
        slow = asyncio.ensure_future(of.mark())
        await asyncio.sleep(0.1)
        of.topics[1] = topic("t", "T", 0, epoch=2)
        await of.peers._look_up([], ["T"])
        looks = of.looks
        gate.set()
        with pytest.raises(type(error)):
            await slow
        await of.mark()
        assert of.hosts[-1] == "host-0" and of.looks == looks

    played(work)


def test_a_leader_without_an_address_is_none() -> None:
    async def work(of: Servers) -> None:
        whole = topic("t", "T", 0).partitions[0]
        endpoint = messages.ReplicaEndpoint
        for replicas in (
            [endpoint(0, None, 1)],
            [endpoint(0, "host-0", None)],
            [endpoint(1, "host-1", 1)],
            [],
        ):
            partition = msgspec.structs.replace(whole, replicas=replicas)
            of.topics[1] = messages.TopicMetadata("t", "T", {}, [partition])
            with pytest.raises(NotLeaderError) as told:
                await of.mark()
            assert told.value.message == "Partition 0 of topic T has no leader now."
        assert of.asked == []
        replicas = [endpoint(1, "host-1", 1), endpoint(0, "host-0", 5)]
        partition = msgspec.structs.replace(whole, replicas=replicas)
        of.topics[1] = messages.TopicMetadata("t", "T", {}, [partition])
        await of.mark()
        assert (of.hosts, of.sent) == (["host-0"], [(5, b"", ATTEMPT_TIMEOUT_S)])

    played(work)


def test_a_keeper_is_asked_once_with_a_payload_there_and_back() -> None:
    async def work(of: Servers) -> None:
        def build(topic_id: str, partition: int, epoch: int) -> messages.WriteQueueState:
            return messages.WriteQueueState(topic_id, partition, epoch, "q", 4, 5, 6)

        with pytest.raises(UnknownTopicError, match="There is no topic __queue_state"):
            await of.peers.ask_queue_state("q", build, b"there")
        of.topics.append(topic("__queue_state", "Q", 0, 1, 2, epoch=3))
        of.given = b"back"

        async def answer(request: Any) -> Any:
            return messages.WriteQueueStateResponse(True)

        of.answer = answer
        found, payload = await of.peers.ask_queue_state("q", build, b"there")
        assert (found, bytes(payload)) == (messages.WriteQueueStateResponse(True), b"back")
        partition = queue_state_partition("q", 3)
        assert of.asked == [(f"host-{partition}", build("Q", partition, 3))]
        assert of.sent == [(1, b"there", ATTEMPT_TIMEOUT_S)]
        looks = of.looks
        await of.peers.ask_queue_state("r", build)
        assert of.hosts[1:] == [f"host-{queue_state_partition('r', 3)}"] and of.looks == looks
        of.fails(CoordinatorLoadingError("not yet"))
        with pytest.raises(CoordinatorLoadingError):
            await of.peers.ask_queue_state("q", build)
        of.controller = None
        of.fails(NotLeaderError("moved"))
        for error in NotLeaderError, ControllerUnavailableError:
            with pytest.raises(error):
                await of.peers.ask_queue_state("q", build)

    played(work)


def test_topics_are_found_by_name() -> None:
    async def work(of: Servers) -> None:
        of.topics.append(topic("u", "U", 1, None, 2))
        assert await of.peers.find_topic("u") == ("U", 3)
        assert await asyncio.gather(of.peers.find_topic("t"), of.peers.find_topic("t")) == [
            ("T", 1),
            ("T", 1),
        ]
        assert of.questions == [messages.Metadata(["u"]), messages.Metadata(["t"])]
        of.topics.append(topic("empty", "E"))
        for name in "nobody", "empty":
            with pytest.raises(UnknownTopicError, match=f"There is no topic '{name}'"):
                await of.peers.find_topic(name)
        of.controller = None
        with pytest.raises(ControllerUnavailableError, match="may be old"):
            await of.peers.find_topic("t")
        assert await of.peers.new_producer_id() == 77

    played(work)


def test_own_topics_are_looked_up_until_they_are_there_and_then_never_again() -> None:
    async def work(of: Servers) -> None:
        own = of.topics.pop(0)
        for _ in range(2):
            with pytest.raises(UnknownTopicError):
                await of.peers.coordinators()
        of.topics.append(own)
        looks = of.looks
        assert [await of.peers.coordinators() for _ in range(3)] == [2, 2, 2]
        assert of.looks == looks + 1
        await of.mark()  # Another topic's look-up changes nothing about it.
        assert await of.peers.find_own("__transaction_state") == "S"
        assert of.looks == looks + 2
        assert not of.peers.is_gone("S") and not of.peers.is_gone("nobody asked")

    played(work)


def test_topics_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "TOPICS_MAX", 10)

    async def work(servers: Servers) -> None:
        for number in range(50):
            servers.topics.append(topic(f"t{number}", f"T{number}", 1))
            await servers.mark(f"T{number}")
            with pytest.raises(NotLeaderError):
                await servers.mark(f"gone{number}")
        known = servers.peers._leaders, servers.peers._missing_since_s
        assert [len(ids) for ids in known] == [10, 10]
        await servers.mark("T0")  # It is looked up again.

    played(work)
