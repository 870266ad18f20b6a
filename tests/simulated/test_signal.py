"""Waiting for a change, in virtual time."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable

import pytest

from proving.simulation import World
from rayq.actors.signal import Signal


def played(work: Callable[[Signal], Awaitable[None]]) -> None:
    with World(seed=1) as world:
        world.run(work(Signal()), limit_s=3_600)  # type: ignore[arg-type]
        assert world.errors == []


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_a_notification_wakes_all_who_wait_and_is_not_remembered() -> None:
    async def work(signal: Signal) -> None:
        signal.notify()  # Nobody hears it.
        waiting = [asyncio.ensure_future(signal.wait(after_s)) for after_s in (5.0, 1.0, 9.0)]
        await asyncio.sleep(2)
        assert [one.done() for one in waiting] == [False, True, False]
        signal.notify()
        signal.notify()
        assert await asyncio.gather(*waiting) == [True, False, True]
        assert not await signal.wait(1.0)

    played(work)


def test_a_wait_takes_its_time_and_no_longer() -> None:
    async def work(signal: Signal) -> None:
        for seconds in (0.5, 3.0):
            began_s = now_s()
            assert not await signal.wait(seconds)
            assert now_s() - began_s == pytest.approx(seconds)

    played(work)


def test_who_is_cancelled_does_not_take_it_for_the_end_of_its_time() -> None:
    async def work(signal: Signal) -> None:
        waiting = [
            asyncio.ensure_future(one)
            for one in (signal.wait(5.0), signal.wait_until(lambda: False, 5.0))
        ]
        await asyncio.sleep(1)
        for one in waiting:
            one.cancel()
        signal.notify()  # In the same turn.
        await asyncio.wait(waiting)
        assert all(one.cancelled() for one in waiting)
        signal.notify()  # What they left behind disturbs nobody.
        await asyncio.sleep(10)

    played(work)


def test_nothing_is_left_of_those_who_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops wait for hours on a signal that nobody gives, many times a second."""

    async def work(signal: Signal) -> None:
        loop = asyncio.get_running_loop()
        create, made = loop.create_future, []

        def create_future() -> asyncio.Future[None]:
            future = create()
            made.append(weakref.ref(future))
            return future

        with monkeypatch.context() as patched:
            patched.setattr(loop, "create_future", create_future)
            for _ in range(5):
                assert not await signal.wait(0.01)
            assert [one() for one in made[:4]] == [None] * 4, "though nobody has notified"
            for _ in range(5):
                loop.call_soon(signal.notify)
                assert await signal.wait(1000.0)
        await asyncio.sleep(0)
        assert len(made) >= 10 and [one() for one in made] == [None] * len(made)

    played(work)


def test_a_condition_is_looked_at_with_each_notification() -> None:
    async def work(signal: Signal) -> None:
        looks = 0

        def holds() -> bool:
            nonlocal looks
            looks += 1
            return looks >= 4

        waiting = asyncio.ensure_future(signal.wait_until(holds, 60.0))
        for seen in (1, 2, 3):
            await asyncio.sleep(1)
            assert (looks, waiting.done()) == (seen, False)
            signal.notify()
        assert await waiting
        began_s = now_s()
        assert await signal.wait_until(lambda: True, 60.0)
        assert now_s() == began_s, "it holds already"
        assert await signal.wait_until(lambda: True, 0.0)

    played(work)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_condition_is_given_its_time_over_all_notifications_together(is_late: bool) -> None:
    async def work(signal: Signal) -> None:
        began_s = now_s()

        async def notify() -> None:
            while True:
                await asyncio.sleep(0.3)
                signal.notify()

        notifying = asyncio.ensure_future(notify())
        # What holds at the end of the time counts, also where nobody told of it.
        found = await signal.wait_until(lambda: is_late and now_s() - began_s >= 2.0, 2.0)
        assert found is is_late
        assert now_s() - began_s == pytest.approx(2.0)
        notifying.cancel()
        assert not await signal.wait_until(lambda: False, 0.0)

    played(work)


def test_who_waits_for_something_is_woken_when_it_holds_and_by_no_other_notification() -> None:
    async def work(signal: Signal) -> None:
        value, woken = 0, list[int]()

        async def wait_for(wanted: int) -> bool:
            came = await signal.wait(10.0, holds=lambda: value >= wanted)
            woken.append(wanted)
            return came

        waiting = [asyncio.ensure_future(wait_for(wanted)) for wanted in (2, 1, 3)]
        any_news = asyncio.ensure_future(signal.wait(10.0))
        await asyncio.sleep(0)
        signal.notify()
        await asyncio.sleep(1)
        assert any_news.done()
        assert woken == []
        for value in (1, 2):
            signal.notify()
            await asyncio.sleep(1)
            assert woken == [1, 2][:value]
        assert await asyncio.gather(*waiting) == [True, True, False]
        assert signal._waiters == {}

    played(work)
