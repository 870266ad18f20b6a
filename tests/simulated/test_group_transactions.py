"""A coordinator of groups alone, with positions inside transactions: it joins before it checks, and
what is pending is neither told nor overwritten."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from proving.simulation.process import Process
from rayq.actors.clock_watch import ClockWatch
from rayq.actors.groups.group_coordinator import GroupCoordinator
from rayq.actors.replica.replica_log import ReplicaLog
from rayq.actors.transactions.links import Links
from rayq.core.topic_changes import OFFSETS_TOPIC
from rayq.errors import (
    OffsetPendingError,
    RayqError,
    TimeoutError,
    TransactionEndedError,
    TransactionOrderError,
    UnknownMemberError,
)
from rayq.transaction_ids import make_family
from rayq.wire import messages
from rayq.wire.answer_room import AnswerRoom
from rayq.wire.server import Peer
from tests.simulated.coordinator_stage import EPOCH, Led, leading

WHERE = ("offsets", 0, EPOCH)
"""Topic id, partition and leader epoch of the coordinator's partition."""
FAMILY, OTHER = make_family(0, 1), make_family(0, 2)


class Transactions(Links):
    """Answers each join when the test says so, or at once."""

    def __init__(self) -> None:  # It has no network.
        self.joins: list[tuple[int, int, str, int]] = []
        self.aborts: list[tuple[int, int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.refusal: RayqError | None = None

    async def join(self, family: int, epoch: int, topic_id: str, partition: int) -> None:
        self.joins.append((family, epoch, topic_id, partition))
        await self.gate.wait()
        if self.refusal is not None:
            raise self.refusal

    async def abort(self, family: int, epoch: int) -> None:
        self.aborts.append((family, epoch))
        if self.refusal is not None:
            raise self.refusal


class Groups(Led):
    """The coordinator of one group, `g`."""

    topic, topic_id = OFFSETS_TOPIC, WHERE[0]

    def __init__(
        self, process: Process, log: ReplicaLog, given: messages.PartitionAssignment
    ) -> None:
        self.transactions = Transactions()
        super().__init__(process, log, given)
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.peer = Peer("client", None, "", closed, AnswerRoom(lambda: True))
        self.begin()

    def links(self) -> Links:
        return self.transactions

    def begin(self) -> None:
        self.coordinator = GroupCoordinator(
            self.log,
            self.leader,
            self.given,
            ask_broker=self._metadata,
            metadata_version=1,
            clock_watch=ClockWatch(self.log.environment.clock),
            links=self.transactions,
        )

    async def _metadata(self, request: messages.Request[Any]) -> messages.MetadataResponse:
        await asyncio.sleep(0.1)
        partitions = [
            messages.PartitionMetadata(number, 1, 1, 1, [], [], None) for number in range(2)
        ]
        topic = messages.TopicMetadata("t", "T", {}, partitions)
        return messages.MetadataResponse("c", 1, 1, None, [], [], [topic])

    async def beat(self, member: str, *owned: int, epoch: int = 0) -> int:
        answer = await self.coordinator.heartbeat(
            self.peer,
            messages.GroupHeartbeat(
                *WHERE, "g", member, epoch, None, "a test", ["t"], None, "uniform", 45_000, 60_000,
                [("T", one) for one in owned], 0,
            ),
        )
        return answer.member_epoch

    async def send(
        self,
        offset: int,
        *partitions: int,
        transaction: tuple[int, int] | None = (FAMILY, 0),
        member: str = "",
        member_epoch: int = 0,
        sequence: int = 1,
    ) -> list[tuple[str, int, str, str]]:
        offsets = [("T", one, offset, None, "") for one in partitions]
        answer = await self.coordinator.commit(
            messages.CommitOffsets(
                *WHERE, "g", member, member_epoch, sequence, offsets, transaction
            )
        )
        return answer.refused

    async def end(
        self, epoch: int = 0, *, family: int = FAMILY, is_commit: bool = True
    ) -> None:
        await self.coordinator.write_marker(
            messages.WriteMarker(*WHERE, family, epoch, is_commit, 3)
        )

    async def fetch(self, *partitions: int) -> dict[int, int]:
        answer = await self.coordinator.fetch_committed(
            messages.FetchCommitted(*WHERE, "g", [("T", one) for one in partitions] or None)
        )
        return {one.partition: one.offset for one in answer.offsets}


def coordinating(work: Callable[[Groups], Awaitable[None]]) -> None:
    leading(Groups, work)


def test_positions_take_effect_with_their_transaction() -> None:
    async def work(led: Groups) -> None:
        await led.send(3, 0, 1, transaction=None)
        assert await led.send(7, 0) == []
        assert led.transactions.joins == [(FAMILY, 0, WHERE[0], WHERE[1])]
        assert await led.fetch(1) == {1: 3}
        for wanted in ((0,), (0, 1), ()):
            with pytest.raises(OffsetPendingError):
                await led.fetch(*wanted)
        with pytest.raises(OffsetPendingError):
            await led.send(4, 0, transaction=None)
        await led.end()
        await led.end()  # repeated
        assert await led.fetch() == {0: 7, 1: 3}
        with pytest.raises(TransactionEndedError):
            await led.send(8, 0)
        await led.send(8, 0, transaction=(FAMILY, 1))
        await led.end(1, is_commit=False)
        assert await led.fetch() == {0: 7, 1: 3}

    coordinating(work)


def test_a_transaction_joins_once_for_all_its_positions() -> None:
    async def work(led: Groups) -> None:
        await led.send(3, 0)
        await led.send(4, 1, sequence=2)
        assert len(led.transactions.joins) == 1
        led.begin()  # The next coordinator knows by the positions that the transaction has joined.
        await led.send(5, 0, sequence=3)
        assert len(led.transactions.joins) == 1
        await led.end()
        assert await led.fetch() == {0: 5, 1: 4}

    coordinating(work)


def test_a_member_that_loses_its_partition_during_the_join_is_refused() -> None:
    async def work(led: Groups) -> None:
        epoch = await led.beat("a")
        led.transactions.gate.clear()
        sending = asyncio.ensure_future(led.send(3, 0, member="a", member_epoch=epoch))
        await asyncio.sleep(0.1)
        await led.beat("a", epoch=messages.MEMBER_EPOCH_LEAVE)
        await led.beat("b")
        led.transactions.gate.set()
        with pytest.raises(UnknownMemberError):
            await sending
        assert await led.fetch() == {}

    coordinating(work)


def test_a_transaction_that_may_not_join_takes_no_position() -> None:
    async def work(led: Groups) -> None:
        led.transactions.refusal = TransactionEndedError("it has ended")
        with pytest.raises(TransactionEndedError, match="it has ended"):
            await led.send(3, 0)
        assert await led.fetch() == {}

    coordinating(work)


def test_ends_come_in_the_order_of_a_producers_transactions() -> None:
    async def work(led: Groups) -> None:
        await led.send(3, 0)
        with pytest.raises(TransactionOrderError):
            await led.end(1)
        await led.end(0)
        await led.end(1)
        with pytest.raises(TransactionEndedError):
            await led.send(4, 0, transaction=(FAMILY, 1))

    coordinating(work)


def test_what_was_answered_is_known_to_the_next_coordinator() -> None:
    async def work(led: Groups) -> None:
        await led.send(3, 0)
        await led.send(4, 1, transaction=(OTHER, 5))
        await led.end(5, family=OTHER)
        led.coordinator.end("a test")
        led.begin()
        with pytest.raises(OffsetPendingError):
            await led.fetch(0)
        assert await led.fetch(1) == {1: 4}
        with pytest.raises(TransactionEndedError):
            await led.send(9, 1, transaction=(OTHER, 5))
        await led.end()
        assert await led.fetch() == {0: 3, 1: 4}

    coordinating(work)


def test_transactions_of_a_member_that_is_gone_are_aborted() -> None:
    async def work(led: Groups) -> None:
        epoch = await led.beat("a")
        await led.send(3, 0, member="a", member_epoch=epoch)
        await led.send(3, 1, transaction=(OTHER, 0), member="a", member_epoch=epoch)
        await asyncio.sleep(1)
        assert led.transactions.aborts == []
        led.transactions.refusal = TimeoutError("no coordinator")
        await led.beat("a", epoch=messages.MEMBER_EPOCH_LEAVE)
        await asyncio.sleep(0.5)
        assert sorted(led.transactions.aborts) == [(FAMILY, 0), (OTHER, 0)]
        led.transactions.refusal = None
        await asyncio.sleep(1)  # It is tried again.
        assert sorted(led.transactions.aborts) == 2 * [(FAMILY, 0)] + 2 * [(OTHER, 0)]
        await led.end(is_commit=False)
        await led.end(family=OTHER)  # This one was decided before.
        assert await led.fetch() == {1: 3}
        count = len(led.transactions.aborts)
        await asyncio.sleep(5)
        assert len(led.transactions.aborts) == count

    coordinating(work)
