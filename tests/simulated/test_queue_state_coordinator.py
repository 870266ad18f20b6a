"""A keeper of queues alone: whose writes it takes, and which queues it forgets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
import pytest

from proving.simulation.process import Process
from rayq import messages
from rayq.actors.access import Access
from rayq.actors.peers import Build
from rayq.actors.queues import state_coordinator
from rayq.actors.queues.persister import QueueStatePersister
from rayq.actors.queues.state_coordinator import DELETED_CHECK_INTERVAL_S, QueueStateCoordinator
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.core.cluster.topic_changes import QUEUES_TOPIC
from rayq.core.queues import queue_states
from rayq.core.queues.queue_states import (
    FENCE_BITS,
    KeptRecord,
    QueueStates,
    Record,
    StateKey,
    encode,
    pack,
    unpack,
)
from rayq.errors import (
    ControllerUnavailableError,
    CoordinatorLoadingError,
    DisconnectedError,
    InvalidRequestError,
    NotEnoughReplicasError,
    NotLeaderError,
    QueueFencedError,
    QueueLimitError,
    QueuePartsMissingError,
    RayqError,
)
from tests.simulated.coordinator_stage import EPOCH, Led, leading

FENCE = EPOCH << FENCE_BITS
"""Fences of this keeper are above."""


class Kept(Led):
    """The keeper, and the broker that says which queues there are."""

    topic, topic_id, partition = QUEUES_TOPIC, "Q", 3

    def __init__(
        self, process: Process, log: ReplicaLog, given: messages.PartitionAssignment
    ) -> None:
        super().__init__(process, log, given)
        self.queue_ids = {"q", "r"}
        self.asked: list[Any] = []
        self.version = self.newest = 9
        self.failure: RayqError | None = None
        self.begin()

    def begin(self, *, unclean_epoch: int | None = None) -> None:
        given = msgspec.structs.replace(self.given, last_unclean_epoch=unclean_epoch)
        self.keeper = QueueStateCoordinator(
            self.log, self.leader, given,
            access=Access(self.log.environment.clock), ask_broker=self._broker,
        )

    async def _broker(self, request: messages.Request[Any]) -> Any:
        self.asked.append(request)
        await asyncio.sleep(0.001)
        if self.failure is not None:
            raise self.failure
        if isinstance(request, messages.ConfirmMetadata):
            return messages.ChangeResponse(self.newest)
        assert isinstance(request, messages.DescribeQueues)
        found = [
            messages.QueueMetadata(queue_id, queue_id, "T", "t", {}, 1)
            for queue_id in sorted(self.queue_ids & set(request.queue_ids))
        ]
        return messages.DescribeQueuesResponse(self.version, found)

    async def open(
        self,
        queue_id: str = "q",
        partition: int = 0,
        *,
        epoch: int = 1,
        opener: str = "a",
        after: bytes = b"",
    ) -> tuple[messages.OpenQueueStateResponse, list[KeptRecord]]:
        return await self.ask_to_open(
            messages.OpenQueueState(
                self.topic_id, self.partition, EPOCH, queue_id, partition, epoch, opener, after
            )
        )

    async def ask_to_open(
        self, request: messages.OpenQueueState
    ) -> tuple[messages.OpenQueueStateResponse, list[KeptRecord]]:
        answer: Any = await self.keeper.handle(self.connection(), request)
        response, page = answer
        return response, unpack(page)

    async def write(
        self,
        fence: int,
        *records: KeptRecord,
        queue_id: str = "q",
        partition: int = 0,
        sequence: int = 1,
        payload: bytes | None = None,
        part: int = 0,
        is_last: bool = True,
    ) -> bool:
        """Whether the keeper is full then."""
        written = memoryview(pack(records) if payload is None else payload)
        request = messages.WriteQueueState(
            self.topic_id,
            self.partition,
            EPOCH,
            queue_id,
            partition,
            fence,
            sequence,
            part=part,
            is_last=is_last,
        )
        return (await self.ask_to_write(request, written)).is_full

    async def ask_to_write(
        self, request: messages.WriteQueueState, payload: memoryview
    ) -> messages.WriteQueueStateResponse:
        return cast(Any, await self.keeper.handle(self.connection(), request, payload))

    def measured(self) -> list[tuple[str, float]]:
        return [
            (sample.labels["partition"], sample.value)
            for sample in self.environment.metrics.collect()
            if sample.name == "rayq_queue_state_bytes"
        ]


def keeping(work: Callable[[Kept], Awaitable[None]]) -> None:
    leading(Kept, work)


def test_an_opening_gives_what_was_written_under_the_one_before() -> None:
    async def work(of: Kept) -> None:
        answer, records = await of.open()
        assert (answer, records) == (messages.OpenQueueStateResponse(FENCE + 1, None, 0), [])
        assert not await of.write(answer.fence, (b"b", b"1"), (b"a", b"2"))
        assert not await of.write(answer.fence, (b"b", None), (b"c", b""), sequence=2)
        end_offset = of.end_offset
        assert (await of.open())[0] == answer, "a repetition changes nothing"
        assert of.end_offset == end_offset
        answer, records = await of.open(epoch=2, opener="b")
        assert (answer.fence, records) == (FENCE + 2, [(b"a", b"2"), (b"c", b"")])
        assert (await of.open(partition=1))[1] == (await of.open("r"))[1] == []

    keeping(work)


def test_an_opening_is_read_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(of: Kept) -> None:
        answer, _ = await of.open()
        await of.write(answer.fence, *((key, b"v") for key in (b"a", b"b", b"c")))
        monkeypatch.setattr(queue_states, "PAGE_BYTES", 1)
        answer, page = await of.open(opener="b")
        assert (page, answer.next_after) == ([(b"a", b"v")], b"a")
        again, page = await of.open(opener="b", after=b"a")
        assert (page, again.next_after, again.fence) == ([(b"b", b"v")], b"b", answer.fence)
        assert (await of.open(opener="b", after=b"b"))[1] == [(b"c", b"v")]
        await of.open(opener="c")
        with pytest.raises(QueueFencedError, match="while this one read its state"):
            await of.open(opener="b", after=b"b")

    keeping(work)


def test_writes_come_in_the_order_of_their_numbers_under_each_opening() -> None:
    async def work(of: Kept) -> None:
        fence = (await of.open())[0].fence
        sister = (await of.open(partition=1))[0].fence
        for sequence in (0, 1, 1, 3, 3, 7):
            await of.write(fence, (b"at", b"%d" % sequence), sequence=sequence)
        for late in (0, 3, 6):
            with pytest.raises(QueueFencedError) as told:
                await of.write(fence, (b"at", b"late"), sequence=late)
            assert told.value.message == (
                f"Write {late} of partition 0 of queue q was held back: its leader has moved on to "
                "7."
            )
        await of.write(sister, (b"at", b"0"), partition=1, sequence=0)
        fence = (await of.open(opener="b"))[0].fence
        await of.write(fence, (b"new", b"0"), sequence=0)  # Each opening begins again.
        with pytest.raises(QueueFencedError, match="another leader"):
            await of.write(fence - 2, (b"at", b"late"), sequence=8)
        assert (await of.open(opener="c"))[1] == [(b"at", b"7"), (b"new", b"0")]

    keeping(work)


def test_a_refused_write_has_no_number() -> None:
    async def work(of: Kept) -> None:
        fence = (await of.open())[0].fence
        with pytest.raises(InvalidRequestError, match="empty key"):
            await of.write(fence, (b"", b"v"), sequence=5)
        with pytest.raises(QueueFencedError):
            await of.write(fence + 1, (b"a", b"v"), sequence=5)
        await of.write(fence, (b"a", b"v"), sequence=4)
        assert (await of.open(opener="b"))[1] == [(b"a", b"v")]

    keeping(work)


def test_a_payload_has_a_size_and_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_states, "WRITE_BYTES_MAX", 100)
    most = pack([(b"k", bytes(44)), (b"l", bytes(43))])
    assert len(most) == 100

    async def work(of: Kept) -> None:
        fence = (await of.open())[0].fence
        await of.write(fence, payload=most)
        with pytest.raises(InvalidRequestError) as told:
            await of.write(fence, (b"k", bytes(44)), (b"l", bytes(44)), sequence=2)
        assert told.value.message == (
            "A part of a write has 101 bytes, and 100 at most where it has more than one record: "
            "send it in more parts."
        )
        await of.write(fence, (b"k", bytes(1000)), sequence=2)  # It cannot be divided.
        with pytest.raises(InvalidRequestError, match="holds no records"):
            await of.write(fence, payload=b"\xc1", sequence=3)

    keeping(work)


def test_a_write_in_parts_is_written_with_its_last_part_or_not_at_all() -> None:
    async def work(of: Kept) -> None:
        fence = (await of.open())[0].fence
        await of.write(fence, (b"a", b"1"), is_last=False)
        await of.write(fence, (b"b", b"1"), part=1, is_last=False)
        await of.write(fence, (b"b", b"1"), part=1, is_last=False)  # Its answer was lost.
        assert (await of.open())[1] == []
        with pytest.raises(QueuePartsMissingError):
            await of.write(fence, (b"d", b"1"), part=3)
        with pytest.raises(QueuePartsMissingError):
            await of.write(fence, (b"c", b"1"), part=2, sequence=2)
        await of.write(fence, (b"c", b"1"), part=2)
        written = [(b"a", b"1"), (b"b", b"1"), (b"c", b"1")]
        assert (await of.open())[1] == written
        with pytest.raises(QueuePartsMissingError):  # Written, and the answer was lost.
            await of.write(fence, (b"c", b"1"), part=2)
        await of.write(fence, (b"a", b"2"), sequence=2, is_last=False)
        with pytest.raises(QueueFencedError):
            await of.write(fence - 1, (b"z", b"2"), sequence=3, is_last=False)
        of.keeper.end("a test")
        of.begin()
        with pytest.raises(QueuePartsMissingError):
            await of.write(fence, (b"b", b"2"), sequence=2, part=1)
        newer = (await of.open(opener="b"))[0].fence
        with pytest.raises(QueueFencedError):
            await of.write(fence, (b"a", b"2"), sequence=2, is_last=False)
        await of.write(newer, (b"a", b"3"), is_last=False)
        await of.write(newer, (b"b", b"3"), part=1)
        assert (await of.open(opener="c"))[1] == [(b"a", b"3"), (b"b", b"3"), (b"c", b"1")]

    keeping(work)


def test_a_write_that_is_too_large_for_the_log_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_states, "DECISION_BYTES_MAX", 400)

    async def work(of: Kept) -> None:
        fence = (await of.open())[0].fence
        await of.write(fence, (b"a", bytes(100)), is_last=False)
        with pytest.raises(InvalidRequestError, match="400 at most"):
            await of.write(fence, (b"b", bytes(300)), part=1)
        assert (await of.open())[1] == []

    keeping(work)


@pytest.mark.parametrize("bytes_max", [1, 30, 100, 1000])
def test_a_leader_writes_in_parts_also_while_the_keeper_changes(
    bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_states, "WRITE_BYTES_MAX", bytes_max)
    records: list[KeptRecord] = [(b"%d" % number, bytes(number)) for number in range(1, 30)]

    async def work(of: Kept) -> None:
        asked = 0

        class KeeperLinks:
            async def ask_queue_state(
                self, queue_id: str, build: Build[Any], payload: bytes = b""
            ) -> tuple[Any, memoryview]:
                nonlocal asked
                asked += 1
                request: Any = build(of.topic_id, of.partition, EPOCH)
                if isinstance(request, messages.OpenQueueState):
                    opened: Any = await of.keeper.handle(of.connection(), request)
                    answer, page = opened
                    return answer, memoryview(page)
                if asked == 3:
                    of.keeper.end("a test")
                    of.begin()
                answer = await of.ask_to_write(request, memoryview(payload))
                if asked == 5:
                    raise DisconnectedError("The answer was lost.")
                return answer, memoryview(b"")

        persister = QueueStatePersister(
            of.environment,
            cast(Any, KeeperLinks()),
            queue_id="q",
            data_partition=0,
            data_leader_epoch=1,
        )
        assert await persister.open() == []
        await persister.write(records)
        await persister.write([])
        await persister.write([(b"1", None)])
        assert asked > 10 or bytes_max == 1000
        assert (await of.open(opener="b"))[1] == sorted(records)[1:]

    keeping(work)


def test_a_full_keeper_says_so() -> None:
    async def work(of: Kept) -> None:
        fence = (await of.open())[0].fence
        with pytest.MonkeyPatch.context() as full:
            full.setattr(queue_states, "HELD_BYTES_MAX", 150)
            full.setattr(queue_states, "RESERVE_BYTES", 500)
            assert not await of.write(fence, (b"a", bytes(10)))
            assert await of.write(fence, (b"b", bytes(100)), sequence=2)
            with pytest.raises(QueueLimitError):
                await of.write(fence, (b"c", bytes(500)), sequence=3)
            assert not await of.write(fence, (b"b", None), sequence=3)
        assert of.measured() == [("3", 111.0)]
        of.keeper.end("a test")
        assert of.measured() == []

    keeping(work)


def test_the_next_keeper_knows_all_and_fences_who_opened_before_records_were_lost() -> None:
    async def work(of: Kept) -> None:
        fence = (await of.open(epoch=4))[0].fence
        await of.write(fence, (b"a", b"1"), sequence=6)
        of.keeper.end("a test")
        with pytest.raises(
            NotLeaderError, match="no longer coordinates the queues of __queue_state-3"
        ):
            await of.write(fence, (b"a", b"2"), sequence=7)
        of.begin()
        assert of.measured() == [("3", 0)], "before it knows more"
        await of.write(fence, (b"b", b"1"), sequence=1)  # What was held back names the old epoch.
        with pytest.raises(QueueFencedError, match="epoch 4: 3 is over"):
            await of.open(epoch=3, opener="b")
        of.keeper.end("a test")
        of.begin(unclean_epoch=EPOCH)
        await of.write(fence, (b"b", b"2"))  # Of this very epoch: nothing was lost since.
        of.keeper.end("a test")
        of.begin(unclean_epoch=EPOCH + 1)
        with pytest.raises(QueueFencedError, match="unclean election"):
            await of.write(fence, (b"a", b"2"))
        answer, records = await of.open(epoch=4)
        assert answer.fence > fence and answer.fence_min == (EPOCH + 1) << FENCE_BITS
        assert records == [(b"a", b"1"), (b"b", b"2")]

    keeping(work)


def test_answers_wait_until_all_is_committed() -> None:
    async def work(of: Kept) -> None:
        fence = (await of.open())[0].fence
        await of.write(fence, (b"a", b"1"))
        of.waits()
        waiting = [
            asyncio.ensure_future(call)
            for call in (
                of.write(fence, (b"a", b"2"), sequence=2),
                of.open("q"),
                of.open("r"),
                of.write(fence, (b"a", b"1"), sequence=1),  # Refused by what may yet be lost.
            )
        ]
        await asyncio.sleep(1)
        assert not any(waiter.done() for waiter in waiting)
        of.commits()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert found[:2] == [
            False,
            (messages.OpenQueueStateResponse(fence, None, 0), [(b"a", b"2")]),
        ]
        assert isinstance(found[3], QueueFencedError)
        of.is_starved()
        for refused in of.open("q"), of.write(fence, (b"a", b"3"), sequence=3):
            with pytest.raises(NotEnoughReplicasError, match="queues wait for more brokers"):
                await refused
        assert of.keeper._log.generation == 0, "it does not even try, and so keeps what it knows"

    keeping(work)


# --- queues that are deleted ------------------------------------------------------------------


def _kept(of: Kept) -> set[StateKey]:
    return set(of.keeper.state)


def test_a_deleted_queue_is_forgotten_with_all_its_partitions() -> None:
    async def work(of: Kept) -> None:
        fences = {}
        for key in (StateKey("q", 0), StateKey("q", 1), StateKey("r", 0)):
            fences[key] = (await of.open(*key))[0].fence
            await of.write(
                fences[key],
                (b"a", b"1"),
                (b"b", b"2"),
                queue_id=key[0],
                partition=key[1],
                sequence=9,
            )
        await asyncio.sleep(2.5 * DELETED_CHECK_INTERVAL_S)
        assert _kept(of) == {*fences} and len(of.asked) == 2, "one look in each interval"
        assert of.asked[0] == messages.DescribeQueues(
            [], version_min=0, wait_ms=state_coordinator.CONFIRMED_WAIT_MS, queue_ids=["q", "r"]
        )
        of.queue_ids = {"r"}
        await asyncio.sleep(DELETED_CHECK_INTERVAL_S)
        assert of.asked[2:] == [
            of.asked[0],
            messages.ConfirmMetadata(),
            messages.DescribeQueues(
                [], version_min=9, wait_ms=state_coordinator.CONFIRMED_WAIT_MS, queue_ids=["q"]
            ),
        ]
        assert _kept(of) == {StateKey("r", 0)} == set(of.keeper._sequences)
        with pytest.raises(QueueFencedError, match="deleted"):
            await of.write(fences[StateKey("q", 0)], (b"a", b"3"), sequence=10)
        of.keeper.end("a test")
        of.begin()
        assert (await of.open("r", opener="b"))[1] == [(b"a", b"1"), (b"b", b"2")]
        assert _kept(of) == {StateKey("r", 0)}

    keeping(work)


def test_the_parts_of_a_deleted_queue_are_forgotten_one_in_a_turn_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A queue has one for each partition of its topic, and a topic many queues."""

    async def work(of: Kept) -> None:
        for number in range(20):
            await of.open("q", number)
        turn, noted = 0, list[int]()
        forget = QueueStates.forget

        def bump() -> None:
            nonlocal turn
            turn += 1

        def note(self: QueueStates, state_key: StateKey) -> Any:
            noted.append(turn)
            asyncio.get_running_loop().call_soon(bump)
            return forget(self, state_key)

        monkeypatch.setattr(QueueStates, "forget", note)
        of.queue_ids = set()
        await asyncio.sleep(2 * DELETED_CHECK_INTERVAL_S)
        assert _kept(of) == set()
        assert len(noted) == len(set(noted)) == 20

    keeping(work)


def test_a_queue_is_forgotten_only_by_who_may_write_and_knows() -> None:
    async def work(of: Kept) -> None:
        async def look() -> set[StateKey]:
            await asyncio.sleep(2 * DELETED_CHECK_INTERVAL_S)
            return _kept(of)

        await of.open("gone")
        of.failure = ControllerUnavailableError("nobody knows")
        assert await look() == {StateKey("gone", 0)}
        of.failure, of.newest = None, 10
        assert await look() == {StateKey("gone", 0)}, "the broker is behind"
        of.version = 10
        of.is_starved()
        assert await look() == {StateKey("gone", 0)}
        assert of.keeper._log.generation == 0, "it does not even try"
        of.commits()
        of.has_lease = False
        assert await look() == {StateKey("gone", 0)}
        of.has_lease = True
        assert await look() == set()

    keeping(work)


def test_after_a_failed_append_the_log_says_what_is_kept() -> None:
    async def work(of: Kept) -> None:
        fence = (await of.open())[0].fence
        await of.write(fence, (b"a", b"1"))
        of.refuse_appends(NotEnoughReplicasError("refused"))
        with pytest.raises(NotEnoughReplicasError):
            await of.write(fence, (b"a", b"2"), sequence=2)
        of.refuse_appends(None)
        assert (await of.open(opener="b"))[1] == [(b"a", b"1")]
        of.queue_ids = set()
        await asyncio.sleep(2 * DELETED_CHECK_INTERVAL_S)
        assert _kept(of) == set(), "it goes on to look for deleted queues"

    keeping(work)


def test_a_queue_that_was_kept_again_while_the_broker_was_asked_is_not_forgotten() -> None:
    """The log began again meanwhile: what the answer speaks of is another state."""

    async def work(of: Kept) -> None:
        await of.open("gone")
        await asyncio.sleep(DELETED_CHECK_INTERVAL_S - 0.1)
        asked = len(of.asked)
        gate = asyncio.Event()
        answer = of._broker

        async def held(request: messages.Request[Any]) -> Any:
            await gate.wait()
            return await answer(request)

        of.keeper._ask_broker = held
        await asyncio.sleep(0.5)
        of.refuse_appends(NotEnoughReplicasError("refused"))
        with pytest.raises(NotEnoughReplicasError):
            await of.open("gone", opener="b")
        of.refuse_appends(None)
        gate.set()
        await asyncio.sleep(1)
        assert len(of.asked) > asked and _kept(of) == {StateKey("gone", 0)}
        await asyncio.sleep(2 * DELETED_CHECK_INTERVAL_S)
        assert _kept(of) == set()

    keeping(work)


def test_many_queues_are_asked_for_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "QUEUES_PAGE", 2)
    asked: list[Any] = []

    async def broker(request: Any) -> Any:
        asked.append(request)
        if isinstance(request, messages.ConfirmMetadata):
            return messages.ChangeResponse(7)
        found = [queue_id for queue_id in request.queue_ids if queue_id not in "bde"]
        return messages.DescribeQueuesResponse(
            7, [messages.QueueMetadata(queue_id, queue_id, "T", "t", {}, 1) for queue_id in found]
        )

    assert asyncio.run(state_coordinator.deleted_queues(set("abcde"), broker)) == set("bde")
    pages = [
        (question.version_min, question.queue_ids)
        for question in asked
        if hasattr(question, "queue_ids")
    ]
    assert pages == [
        (0, ["a", "b"]),
        (0, ["c", "d"]),
        (0, ["e"]),
        (7, ["b", "d"]),
        (7, ["e"]),
    ]
    asked.clear()
    assert asyncio.run(state_coordinator.deleted_queues(set(), broker)) == set() and asked == []


def test_a_record_that_is_no_queues_keeps_the_keeper_from_beginning() -> None:
    async def work(of: Kept) -> None:
        await of.store(encode(Record(StateKey("q", 0), b"a", b"1")), (b"other", b"x"))
        of.keeper.end("a test")
        of.begin()
        await asyncio.sleep(0.1)
        with pytest.raises(CoordinatorLoadingError, match="is not a queue's"):
            await of.open()

    keeping(work)
