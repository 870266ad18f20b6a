"""The rule by which the controller and the coordinators answer: once what they decided, or saw, is
committed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from rayq.errors import RayqError

T = TypeVar("T")


async def once_committed(
    until_committed: Callable[[], Awaitable[None]], step: Callable[[], T]
) -> T:
    """Runs a step that decides and appends, and returns its answer, or raises its refusal, once
    everything that it is based on is committed: all that was appended up to its end. Raises the
    errors of `until_committed`; the outcome of the step is then unknown."""
    try:
        answer = step()
    except RayqError:
        await until_committed()
        raise
    await until_committed()
    return answer
