"""Requests to one process of the cluster, or to any broker that answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from rayq.backoff import Backoff, RetryBudget
from rayq.client.metadata import MetadataCache
from rayq.config import ClusterConfig
from rayq.environment import Address, Buffer, Environment
from rayq.errors import (
    AuthenticationError,
    AuthorizationError,
    ClosedError,
    DisconnectedError,
    InvalidRequestError,
    RayqError,
    TimeoutError,
    WrongClusterError,
    sentence,
)
from rayq.messages import (
    AnyRequest,
    Change,
    ChangeResponse,
    Request,
    ResponseT,
    ToGroupCoordinator,
)
from rayq.wire.authentication import Identity
from rayq.wire.connection import Connection
from rayq.wire.pool import ConnectionPool

BACKOFF_FIRST_S = 0.02
BACKOFF_MAX_S = 0.2
"""Maximum wait between two rounds of asking every broker for newer metadata."""

HEDGE_S = 0.25
"""Time without an answer after which the next broker is asked too."""

ASK_TIMEOUT_S = 3.0
"""Timeout of one request that a broker answers from memory."""

CHANGE_ATTEMPT_TIMEOUT_S = 10.0
"""Timeout of one broker for a change, before another broker is asked for it."""

BOOTSTRAP_MAX = 100
"""Maximum number of addresses that a client remembers: this many of those given and this many of
those learned. The newest are kept when brokers move again and again."""


FAILED_MAX = 1000
"""Maximum number of addresses that did not answer which a client remembers: the latest ones."""

_REFUSALS = (AuthenticationError, AuthorizationError)
"""Errors of a server that has not checked whether a repeated change was made already."""


class BrokerClient:
    """The part of a `Client` that needs no metadata except the brokers' addresses."""

    def __init__(
        self,
        environment: Environment,
        identity: Identity,
        bootstrap: Sequence[Address],
        config: ClusterConfig,
    ) -> None:
        if not bootstrap:
            raise InvalidRequestError("A cluster needs at least one bootstrap address.")
        self.environment = environment
        self.metadata = MetadataCache()
        self.refusal_listeners: dict[Callable[[Connection, RayqError], None], None] = {}
        """Called when a one-way request was refused; it is not known which request it was."""
        self.pool = ConnectionPool(environment, identity, config, self._refused)
        self._coordinators = ConnectionPool(environment, identity, config, self._refused)
        """The connections to coordinators of groups: behind records a heartbeat would wait."""
        self._retries = RetryBudget(environment.clock)
        self._bootstrap = list(bootstrap)
        self._learned: dict[Address, None] = {}
        """The addresses of brokers seen since this client was made, the newest last. A broker that
        is back at an old address may be the only one that answers."""
        self.metadata.add_listener(self._learn)
        self._failed_at: dict[Address, float] = {}
        """Times at which addresses, also those of leaders, did not answer; the latest last."""
        self._closed = False

    @property
    def now(self) -> float:
        return self.environment.clock.monotonic()

    def close(self) -> None:
        """Ends the connections and background tasks. Idempotent."""
        if not self._closed:
            self._closed = True
            self.pool.close()
            self._coordinators.close()

    def _refused(self, connection: Connection, error: RayqError) -> None:
        for listener in list(self.refusal_listeners):
            listener(connection, error)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("The connection to the cluster is closed.")

    def add_bootstrap(self, addresses: Sequence[Address]) -> None:
        """Adds addresses of brokers, which may have moved since this client was made."""
        known = dict.fromkeys([*addresses, *self._bootstrap])
        self._bootstrap = list(known)[:BOOTSTRAP_MAX]

    def addresses(self) -> list[Address]:
        """The addresses of all known brokers in random order, those that failed recently last."""
        known = [(b.host, b.port) for b in self.metadata.brokers.values() if b.live]
        known = list(dict.fromkeys([*known, *self._bootstrap, *self._learned]))
        self.environment.random.shuffle(known)
        return sorted(known, key=lambda address: self._failed_at.get(address, 0.0))

    def _learn(self) -> None:
        for broker in self.metadata.brokers.values():
            address = (broker.host, broker.port)
            if address not in self._learned:
                self._learned[address] = None
        while len(self._learned) > BOOTSTRAP_MAX:
            del self._learned[next(iter(self._learned))]

    def _is_stale(self, address: Address) -> bool:
        """Returns whether a broker was at this address once, and no current source lists one
        there."""
        said = [*self._bootstrap, *((b.host, b.port) for b in self.metadata.brokers.values())]
        return address in self._learned and address not in said

    async def ask(
        self,
        address: Address,
        request: Request[ResponseT],
        payload: Buffer = b"",
        *,
        timeout_s: float,
    ) -> tuple[ResponseT, memoryview]:
        """Sends one request to one process, and remembers whether it could be reached. Returns the
        answer and its payload."""
        self._check_open()
        try:
            pool = self._coordinators if isinstance(request, ToGroupCoordinator) else self.pool
            answer = await pool.request(*address, request, payload, timeout_s=timeout_s)
        except (DisconnectedError, TimeoutError):
            self._failed_at.pop(address, None)
            self._failed_at[address] = self.now
            if len(self._failed_at) > FAILED_MAX:  # Processes that start again have other ports.
                del self._failed_at[next(iter(self._failed_at))]
            raise
        except (AuthenticationError, WrongClusterError) as error:
            if not self._is_stale(address):
                raise
            self._learned.pop(address, None)  # The port belongs to another cluster by now.
            raise DisconnectedError(str(error)) from error
        self._failed_at.pop(address, None)
        self._retries.answered()
        return answer

    def backoff(self, first_s: float, max_s: float) -> Backoff:
        """A new backoff, within the budget of this client."""
        return Backoff(self.environment, first_s, max_s, self._retries)

    async def ask_any(
        self,
        request: Request[ResponseT],
        *,
        timeout_s: float,
        accept: Callable[[ResponseT], bool] = lambda _response: True,
        hedge_s: float = HEDGE_S,
    ) -> ResponseT:
        """Returns the first acceptable answer of any broker, for requests that may be sent twice.
        It asks one broker after another, and the next one when the last takes longer than
        `hedge_s`, in rounds until `timeout_s` has passed. A broker that has not answered yet may
        still do so while the next round asks the others. Raises TimeoutError, and errors that are
        not retriable."""
        deadline = self.now + timeout_s
        backoff = self.backoff(BACKOFF_FIRST_S, BACKOFF_MAX_S)
        reason: RayqError | None = None
        pending: dict[asyncio.Task[Any], Address] = {}
        try:
            while True:
                self._check_open()
                error = None
                outcomes = await self._ask_round(request, pending, accept, hedge_s, deadline)
                for outcome in outcomes:
                    if not isinstance(outcome, RayqError):
                        answer: ResponseT = outcome
                        return answer
                    if error is None or not outcome.retriable:
                        error = outcome
                if error is not None and not error.retriable:
                    raise error
                reason = error or reason  # The last round may be too short for any answer.
                wait_s = backoff.next_s()
                if self.now + wait_s >= deadline:
                    raise self._none_answered(request, timeout_s, reason)
                await asyncio.sleep(wait_s)
        finally:
            for task in pending:
                task.cancel()

    def _none_answered(
        self, request: AnyRequest, timeout_s: float, error: RayqError | None
    ) -> RayqError:
        tried = ", ".join(f"{host}:{port}" for host, port in self.addresses())
        reason = sentence(
            error or "no answer in time, or metadata older than what was seen before"
        )
        return TimeoutError(
            f"No broker answered {type(request).__name__} within {timeout_s:.1f} s. Tried {tried}; "
            f"the last reason: {reason} Check that the cluster runs and can be "
            "reached."
        )

    async def _ask_round(
        self,
        request: AnyRequest,
        pending: dict[asyncio.Task[Any], Address],
        accept: Callable[[Any], bool],
        hedge_s: float,
        deadline: float,
    ) -> list[Any]:
        """Asks each broker once. Returns the errors; an acceptable answer, if there is one, is the
        last element. `pending` holds the unanswered requests from round to round. They delay a
        round in which others answered by at most `hedge_s`: a broker that hangs must not hold up
        what the others will know in a moment."""
        outcomes: list[Any] = []
        waiting = [address for address in self.addresses() if address not in pending.values()]
        is_anyone_alive = False
        while waiting or pending:
            left_s = deadline - self.now
            if left_s <= 0:
                break
            # Where answers are late, hedging would slow them further.
            may_ask = not pending or self._retries.take()
            if waiting and may_ask:
                address = waiting.pop(0)
                question = self._answer_or_error(
                    address, request, timeout_s=min(ASK_TIMEOUT_S, left_s)
                )
                pending[asyncio.ensure_future(question)] = address
            is_waited_for = not waiting and not is_anyone_alive
            done, _ = await asyncio.wait(
                pending,
                timeout=left_s if is_waited_for or not may_ask else min(hedge_s, left_s),
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in [finished for finished in pending if finished in done]:
                del pending[task]
                outcome = task.result()
                if isinstance(outcome, RayqError):
                    outcomes.append(outcome)
                elif accept(outcome):
                    outcomes.append(outcome)
                    return outcomes
                else:
                    is_anyone_alive = True
            if not done and not waiting and is_anyone_alive:
                break
        return outcomes

    async def _answer_or_error(
        self, address: Address, request: AnyRequest, *, timeout_s: float
    ) -> Any:
        """The answer, or the error as a value, because asyncio logs errors of tasks that nobody
        awaits."""
        try:
            response, _ = await self.ask(address, request, timeout_s=timeout_s)
        except RayqError as error:
            return error
        return response

    async def change(self, request: Request[ChangeResponse], *, timeout_s: float) -> None:
        """Asks one broker after another for a change, until one confirms it, for at most
        `timeout_s`. After a lost answer the client asks for the change again under the same id, so
        it happens once. Metadata fetched later shows the change, whichever broker answers."""
        if isinstance(request, Change):
            request = msgspec.structs.replace(request, request_id=self.environment.new_id())
        deadline = self.now + timeout_s
        backoff = self.backoff(BACKOFF_FIRST_S, BACKOFF_MAX_S)
        error: RayqError | None = None
        while True:
            for address in self.addresses():
                left_s = deadline - self.now
                if left_s <= 0:
                    break
                try:
                    response, _ = await self.ask(
                        address, request, timeout_s=min(left_s, CHANGE_ATTEMPT_TIMEOUT_S)
                    )
                    self.metadata.require(response.version)
                    return
                except RayqError as caught:
                    if not caught.retriable:
                        if error is not None and isinstance(caught, _REFUSALS):
                            raise caught.with_message(
                                f"{type(request).__name__} may have been made before this refusal, "
                                f"since an earlier attempt brought no answer. {caught}"
                            ) from error
                        raise
                    is_cut_short = left_s < CHANGE_ATTEMPT_TIMEOUT_S
                    if error is None or not (is_cut_short and isinstance(caught, TimeoutError)):
                        error = caught  # Otherwise the earlier refusal says more.
            wait_s = backoff.next_s()
            if self.now + wait_s >= deadline:
                raise TimeoutError(
                    f"{type(request).__name__} was not confirmed within {timeout_s:.1f} s: "
                    f"{sentence(error)} It may still take effect: look before you repeat it."
                )
            await asyncio.sleep(wait_s)
