"""The shape of every durable decision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

RecordT = TypeVar("RecordT")
AnswerT = TypeVar("AnswerT")


class Decision(NamedTuple, Generic[RecordT, AnswerT]):
    """The records that make a decision durable, and the answer to the request."""

    records: Sequence[RecordT]
    answer: Callable[[], AnswerT]
    """Makes the answer once the records are replayed, and may refuse by a RayqError."""
