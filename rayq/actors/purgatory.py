"""Requests whose answer waits until an offset is reached (Kafka's purgatory)."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Waiter(NamedTuple, Generic[T]):
    offset: int
    deadline_s: float
    answer: T
    future: asyncio.Future[T]


class Purgatory(Generic[T]):
    """Holds answers in the order of the offsets that they wait for."""

    def __init__(self) -> None:
        self._waiters: deque[_Waiter[T]] = deque()

    def add(self, offset: int, answer: T, *, deadline_s: float = math.inf) -> asyncio.Future[T]:
        """Returns a future that gives `answer` once `offset` is reached. `deadline_s` is on the
        monotonic clock; see `expire`."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiters = self._waiters
        index = len(waiters)
        while index and waiters[index - 1].offset > offset:
            index -= 1  # A duplicate waits beside its original.
        waiters.insert(index, _Waiter(offset, deadline_s, answer, future))
        return future

    @property
    def is_empty(self) -> bool:
        return not self._waiters

    def reached(self, offset: int) -> None:
        """Answers the requests that wait for `offset`, or for less."""
        waiters = self._waiters
        while waiters and waiters[0].offset <= offset:
            waiter = waiters.popleft()
            if not waiter.future.done():
                waiter.future.set_result(waiter.answer)

    def fail(self, error: Exception) -> None:
        """Fails all requests that wait."""
        waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            if not waiter.future.done():
                waiter.future.set_exception(error)

    def expire(self, now_s: float, error: Exception) -> None:
        """Fails the requests whose deadline has passed."""
        if not any(waiter.deadline_s <= now_s for waiter in self._waiters):
            return
        kept: deque[_Waiter[T]] = deque()
        for waiter in self._waiters:
            if waiter.deadline_s > now_s:
                kept.append(waiter)
            elif not waiter.future.done():
                waiter.future.set_exception(error)
        self._waiters = kept
