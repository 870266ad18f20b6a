"""Requests that wait for an offset, against a model that looks at each of them every time."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rayq.actors.purgatory import Purgatory
from rayq.errors import NotLeaderError


@dataclass
class _Asked:
    offset: int
    deadline_s: float
    answer: int
    future: asyncio.Future[int]
    outcome: object = None
    """What the request got; None while it waits."""

    @property
    def got(self) -> object:
        if not self.future.done():
            return None
        return (
            "gave up"
            if self.future.cancelled()
            else self.future.exception() or self.future.result()
        )


_numbers = st.integers(0, 5)
_steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), _numbers, st.one_of(_numbers, st.just(math.inf))),
        st.tuples(st.sampled_from(["reached", "expire", "give up"]), _numbers),
        st.tuples(st.just("fail"), st.just(0)),
    ),
    max_size=20,
)


@settings(max_examples=50, deadline=None)
@given(_steps)
def test_each_request_gets_what_it_waits_for_and_waits_for_nothing_else(
    steps: list[tuple[Any, ...]],
) -> None:
    async def story() -> None:
        purgatory: Purgatory[int] = Purgatory()
        asked: list[_Asked] = []
        for number, (step, limit, *more) in enumerate(steps, start=1):
            waiting = [one for one in asked if one.outcome is None]
            error = NotLeaderError(f"step {number}")
            if step == "add":
                deadline_s = more[0]
                future = purgatory.add(limit, number, deadline_s=deadline_s)
                asked.append(_Asked(limit, deadline_s, number, future))
            elif step == "reached":
                purgatory.reached(limit)
                for one in waiting:
                    one.outcome = one.answer if one.offset <= limit else None
            elif step == "expire":
                purgatory.expire(limit, error)
                for one in waiting:
                    one.outcome = error if one.deadline_s <= limit else None
            elif step == "fail":
                purgatory.fail(error)
                for one in waiting:
                    one.outcome = error
            elif limit < len(waiting):
                waiting[limit].future.cancel()
                waiting[limit].outcome = "gave up"
            assert [one.got for one in asked] == [one.outcome for one in asked]
        purgatory.reached(5)
        assert purgatory.is_empty
        assert [one.got for one in asked] == [
            one.answer if one.outcome is None else one.outcome for one in asked
        ]

    asyncio.run(story())


def test_it_is_empty_once_nobody_waits() -> None:
    async def story() -> None:
        purgatory: Purgatory[str] = Purgatory()
        assert purgatory.is_empty
        first, second, third = (purgatory.add(offset, "done") for offset in (7, 3, 7))
        purgatory.reached(6)
        assert second.done() and not purgatory.is_empty
        purgatory.reached(7)
        assert (first.result(), third.result()) == ("done", "done") and purgatory.is_empty
        purgatory.add(9, "late", deadline_s=2.0)
        purgatory.expire(1.0, NotLeaderError("early"))
        assert not purgatory.is_empty
        patient = purgatory.add(8, "in time", deadline_s=3.0)
        purgatory.expire(2.5, NotLeaderError("late"))
        assert not purgatory.is_empty and not patient.done()
        purgatory.reached(8)
        assert purgatory.is_empty and patient.result() == "in time"
        for drop in (
            lambda: purgatory.fail(NotLeaderError("over")),
            lambda: purgatory.expire(3.0, NotLeaderError("late")),
            lambda: purgatory.reached(9),
        ):
            gave_up = purgatory.add(9, "late", deadline_s=3.0)
            gave_up.cancel()
            drop()
            assert purgatory.is_empty and gave_up.cancelled()

    asyncio.run(story())


def test_answers_are_given_in_the_order_of_their_offsets_then_of_the_questions() -> None:
    async def story() -> None:
        purgatory: Purgatory[str] = Purgatory()
        order: list[str] = []
        for name, offset in (("b", 4), ("d", 6), ("c", 4), ("a", 2), ("e", 6)):
            future = purgatory.add(offset, name)
            future.add_done_callback(lambda done: order.append(done.result()))
        purgatory.reached(6)
        await asyncio.sleep(0)
        assert order == ["a", "b", "c", "d", "e"]

    asyncio.run(story())
