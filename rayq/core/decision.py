"""The shape of every durable decision, and the tables of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from rayq.messages import AnyRequest

RecordT = TypeVar("RecordT")
AnswerT = TypeVar("AnswerT")
StateT = TypeVar("StateT")
FactsT = TypeVar("FactsT")
RequestT = TypeVar("RequestT", bound=AnyRequest)


class Decision(NamedTuple, Generic[RecordT, AnswerT]):
    """The records that make a decision durable, and the answer to the request."""

    records: Sequence[RecordT]
    answer: Callable[[], AnswerT]
    """Makes the answer once the records are replayed, and may refuse by a RayqError."""


Decide = Callable[[StateT, RequestT, FactsT], Decision[RecordT, Any]]


class Times(NamedTuple):
    """The present time: the fact besides the state on which a coordinator's decisions depend."""

    now_s: float
    """By the monotonic clock."""
    now_ms: int
    """By the wall clock."""


class DecisionTable(dict[type[AnyRequest], Decide[StateT, Any, FactsT, RecordT]]):
    """The decision of each request that needs only the state and the facts: a function
    `(state, request, facts) -> Decision`. The server replays and appends its records, and answers
    once they are committed."""

    def decides(
        self, kind: type[RequestT]
    ) -> Callable[
        [Decide[StateT, RequestT, FactsT, RecordT]], Decide[StateT, RequestT, FactsT, RecordT]
    ]:
        """Adds the function that decides requests of this kind."""

        def add(
            function: Decide[StateT, RequestT, FactsT, RecordT],
        ) -> Decide[StateT, RequestT, FactsT, RecordT]:
            assert kind not in self, kind.__name__
            self[kind] = function
            return function

        return add
