"""A coordinator of groups alone, with positions inside transactions: it joins before it checks, and
what is pending is neither told nor overwritten."""

from __future__ import annotations

import asyncio

import pytest

from rayq import messages
from rayq.errors import (
    AuthorizationError,
    OffsetPendingError,
    TimeoutError,
    TransactionEndedError,
    TransactionOrderError,
    UnknownMemberError,
)
from tests.simulated.group_stage import FAMILY, OTHER, WHERE, Groups, coordinating


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


def test_a_stranger_puts_no_positions_into_a_transaction() -> None:
    async def work(led: Groups) -> None:
        led.transactions.principal = "orders"
        await led.send(3, 0, principal="orders")
        await led.send(4, 0, sequence=2, principal="orders")
        assert len(led.transactions.joins) == 1
        for _ in range(2):
            with pytest.raises(AuthorizationError):
                await led.send(9, 1, sequence=3, principal="billing")
        await led.send(5, 0, sequence=4, principal="orders")
        await led.end()
        assert await led.fetch() == {0: 5}
        led.transactions.principal = "billing"  # It owns the transactional id by now.
        with pytest.raises(AuthorizationError):
            await led.send(9, 0, transaction=(FAMILY, 1), principal="orders")
        await led.send(6, 0, transaction=(FAMILY, 1), principal="billing")

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
