"""The takes that wait at a queue's leader: their order, and what many of them cost."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from rayq import messages
from rayq.actors.queues.waiting import WaitingTakes
from rayq.errors import NotLeaderError

EMPTY: Any = "nothing"


def take(number: int, *, is_ahead: bool = False, wait_ms: int = 60_000) -> messages.Take:
    return messages.Take(
        "t" * 32, 0, 1, "q" * 32, f"holder {number}", 1, 1000, wait_ms, is_ahead=is_ahead
    )


def test_who_has_nothing_to_do_comes_first_and_what_was_put_back_stays_the_next() -> None:
    async def work() -> None:
        takes, connection = WaitingTakes(lambda: EMPTY), asyncio.get_running_loop().create_future()
        for number, is_ahead in enumerate([True, False, True, False]):
            takes.add(take(number, is_ahead=is_ahead), connection)
        assert (len(takes), takes.idle_count(), takes.share(8)) == (4, 2, 2)
        first = takes.next()
        assert first is not None
        assert takes.back(first)
        assert takes.next() is first
        order = [first.holder]
        while (one := takes.next()) is not None:
            order.append(one.holder)
        assert order == [f"holder {number}" for number in (1, 3, 0, 2)]
        assert takes.back(first)
        connection.set_result(None)
        takes.closed(connection)
        assert first.answer.cancelled()
        assert len(takes) == 0
        answer = takes.add(take(9), asyncio.get_running_loop().create_future())
        takes.fail(NotLeaderError("it ended"))
        with pytest.raises(NotLeaderError):
            await answer
        assert len(takes) == 0

    asyncio.run(work())


def test_takes_that_end_look_at_no_other_take() -> None:
    """Each of 40,000 looked at 40,000 others: that held the process for minutes."""

    async def cost_s(count: int) -> float:
        loop = asyncio.get_running_loop()
        takes = WaitingTakes(lambda: EMPTY)
        stays, goes = loop.create_future(), loop.create_future()
        for number in range(count):
            takes.add(take(number, is_ahead=True), stays)
        late = [takes.add(take(number, wait_ms=0), stays) for number in range(count)]
        for number in range(count):
            takes.add(take(number), goes)
        began_s = time.process_time()
        await asyncio.gather(*late)
        for _ in range(count):
            takes.idle_count()
            one = takes.next()
            assert one is not None
            takes.back(one)
        takes.closed(goes)
        took_s = time.process_time() - began_s
        assert len(takes) == count
        takes.closed(stays)
        return took_s

    async def work() -> None:
        few_s, many_s = await cost_s(500), await cost_s(8_000)
        assert many_s < 64 * few_s + 0.05  # 16 times as many.

    asyncio.run(work())
