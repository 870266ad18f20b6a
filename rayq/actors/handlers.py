"""Tables of the requests that a server answers, and the methods that answer them.

`@answers` marks a method as the handler of a request. A table collects the handlers of a class when
its module is imported. Building it fails unless it has a handler for exactly those requests that
declare this server in `Request.answered_by`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from rayq.messages import REQUESTS, AnyRequest
from rayq.messages.base import Answerer
from rayq.wire.handler import Result
from rayq.wire.peer import Peer

ServerT = TypeVar("ServerT")
RequestT = TypeVar("RequestT", bound=AnyRequest)
AnswerT = TypeVar("AnswerT")

NO_PAYLOAD = memoryview(b"")
NO_DECISIONS: Mapping[type[AnyRequest], Callable[..., Any]] = MappingProxyType({})
_MARK = "_rayq_answers"


class _Handler(NamedTuple):
    owner: Callable[[Any], Any] | None
    """Function that finds the part of the server that has the method. None: the server itself."""
    method: str
    takes_all: bool
    """True if the method also takes the peer and the payload."""

    def bound_to(self, server: Any) -> Callable[..., Any]:
        owner = server if self.owner is None else self.owner(server)
        method: Callable[..., Any] = getattr(owner, self.method)
        return method


def answers(
    kind: type[RequestT],
) -> Callable[
    [Callable[[ServerT, RequestT], AnswerT]], Callable[[ServerT, RequestT], AnswerT]
]:
    """Marks a method that answers a request, and takes only the request."""
    return _mark(kind, takes_all=False)


def answers_peer(
    kind: type[RequestT],
) -> Callable[
    [Callable[[ServerT, Peer, RequestT, memoryview], AnswerT]],
    Callable[[ServerT, Peer, RequestT, memoryview], AnswerT],
]:
    """Marks a method that answers a request, and also takes the peer and the payload."""
    return _mark(kind, takes_all=True)


def _mark(kind: type[AnyRequest], *, takes_all: bool) -> Callable[[Any], Any]:
    def mark(method: Any) -> Any:
        setattr(method, _MARK, (kind, takes_all))
        return method

    return mark


class HandlerTable:
    """The requests that `server` answers. `parts` are the classes of its attributes that answer
    some of them; for those in `decisions` it has no method, as functions of `core` decide them.
    Raises TypeError unless the table is complete."""

    def __init__(
        self,
        answerer: Answerer,
        server: type,
        *,
        decisions: Mapping[type[AnyRequest], Callable[..., Any]] = NO_DECISIONS,
        **parts: type,
    ) -> None:
        self._handlers: dict[type[AnyRequest], _Handler] = {}
        self.decisions = decisions
        for owner, part in (("", server), *parts.items()):
            for base in part.__mro__:
                for name, method in vars(base).items():
                    kind, takes_all = getattr(method, _MARK, (None, False))
                    if kind is None:
                        continue
                    if kind in self._handlers:
                        raise TypeError(f"{server.__name__} answers {kind.__name__} twice.")
                    self._handlers[kind] = _Handler(
                        attrgetter(owner) if owner else None, name, takes_all
                    )
        expected = {kind for kind in REQUESTS.values() if answerer in kind.answered_by}
        handled = {*self._handlers, *decisions}
        wrong = (expected ^ handled) | (self._handlers.keys() & {*decisions})
        if wrong:
            raise TypeError(
                f"{server.__name__} is the {answerer}: its handlers and the requests that say so "
                f"differ in {sorted(kind.__name__ for kind in wrong)}."
            )

    def __contains__(self, kind: type[AnyRequest]) -> bool:
        return kind in self._handlers or kind in self.decisions

    def answer(
        self, server: Any, peer: Peer, request: AnyRequest, payload: memoryview = NO_PAYLOAD
    ) -> Result | Awaitable[Result]:
        """Calls the request's handler. Raises KeyError if the table has none, and the handler's
        errors."""
        handler = self._handlers[type(request)]
        method = handler.bound_to(server)
        answer: Result | Awaitable[Result] = (
            method(peer, request, payload) if handler.takes_all else method(request)
        )
        return answer

    def decide(self, server: Any, request: AnyRequest) -> Any:
        """Calls the handler of a request whose answer `server` gives later. Raises KeyError if the
        table has none, and the handler's errors."""
        return self._handlers[type(request)].bound_to(server)(request)
