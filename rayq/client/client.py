"""What the producers, consumers and admin of one event loop share: the way to any broker, the way
to a partition's leader, and the metadata that shows the ways."""

from __future__ import annotations

import asyncio
import builtins
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from rayq.client.arguments import topic_name
from rayq.client.metadata import LeaderAndEpoch, MetadataCache
from rayq.config import ClusterConfig
from rayq.environment import Address, Buffer, Environment
from rayq.errors import (
    ClosedError,
    DisconnectedError,
    InvalidRequestError,
    NotLeaderError,
    PartitionOfflineError,
    RayqError,
    TimeoutError,
    UnknownTopicError,
    WrongClusterError,
)
from rayq.wire.authentication import Identity
from rayq.wire.connection import Connection
from rayq.wire.messages import (
    METADATA_TOPICS_MAX,
    AnyRequest,
    Change,
    ChangeResponse,
    Metadata,
    MetadataResponse,
    Request,
    ResponseT,
    TopicMetadata,
)
from rayq.wire.metadata_pages import all_pages
from rayq.wire.pool import ConnectionPool

logger = logging.getLogger(__name__)

BACKOFF_FIRST_S = 0.02
BACKOFF_MAX_S = 0.2
"""Between two rounds of asking every broker for newer metadata."""

HEDGE_S = 0.25
"""A broker that has not answered for so long is no longer waited for alone."""

LONG_POLL_MS = 200
"""How long a broker holds a question for newer metadata."""

ASK_TIMEOUT_S = 3.0
"""How long one broker may take for a question that it answers from memory."""

CHANGE_ATTEMPT_TIMEOUT_S = 10.0
"""How long one broker may take for a change, before another is asked for it."""

METADATA_AGE_MAX_S = 60.0
"""Metadata is fetched anew at least this often, to learn of new partitions."""

TOPIC_AGE_MAX_S = 1.0
"""Metadata of a topic that nobody keeps fresh is fetched again after so long."""

UNKNOWN_TOPIC_PATIENCE_S = 1.0
"""A topic that brokers do not know counts as missing after so long: the one asked may be behind."""

BOOTSTRAP_MAX = 100
"""Addresses remembered, the newest, of a cluster whose brokers moved again and again."""

LEADER_BACKOFF_MAX_S = 1.0
"""Longest wait between two questions to a partition's leader."""

LEADER_PATIENCE_S = 1.0
"""A leader that has not answered for so long, where it could have, is suspect: it may hang."""

SUSPICION_S = 3.0
"""How long a partition's leader stays suspect, and newer metadata wanted, after one failure."""


class Backoff:
    """Waits that double, with jitter."""

    def __init__(self, environment: Environment, first_s: float, max_s: float) -> None:
        self._environment = environment
        self._first_s = first_s
        self._max_s = max_s
        self._next_s = first_s

    def reset(self) -> None:
        self._next_s = self._first_s

    def next_s(self) -> float:
        """0.75 to 1.25 of a time that doubles from call to call."""
        wait_s = self._next_s
        self._next_s = min(2 * wait_s, self._max_s)
        return wait_s * (0.75 + 0.5 * self._environment.random.random())


class Client:
    """Belongs to one event loop; all methods run on it."""

    def __init__(
        self,
        environment: Environment,
        identity: Identity,
        bootstrap: Sequence[Address],
        config: ClusterConfig,
        name: str | None = None,
    ) -> None:
        """`name` says to operators who this is: host and process."""
        if not bootstrap:
            raise InvalidRequestError("A cluster needs at least one bootstrap address.")
        self.environment = environment
        self.name = name or f"process {environment.pid}"
        self.metadata = MetadataCache()
        self.refusal_listeners: dict[Callable[[Connection, RayqError], None], None] = {}
        """Called when a one-way request was refused; which one it was is not known."""
        self.pool = ConnectionPool(environment, identity, config, self._refused)
        self._cluster_id = identity.cluster_id
        self._bootstrap = list(bootstrap)
        self._failed_at: dict[Address, float] = {}
        self._interests: dict[str, int] = {}
        self._topic_seen_at: dict[str, float] = {}
        """When a topic's metadata was last fetched."""
        self._topics_asked: dict[str, asyncio.Future[bool]] = {}
        """Topics that are being asked for; whether that was answered."""
        self._suspects: dict[tuple[str, str, int], tuple[int, float]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._ager: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def now(self) -> float:
        return self.environment.clock.monotonic()

    def close(self) -> None:
        """Ends the connections and background tasks. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for task in (self._watcher, self._ager):
            if task is not None:
                task.cancel()
        self.pool.close()

    def _refused(self, connection: Connection, error: RayqError) -> None:
        for listener in list(self.refusal_listeners):
            listener(connection, error)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("The connection to the cluster is closed.")

    # --- any broker -----------------------------------------------------------------------------

    def add_bootstrap(self, addresses: Sequence[Address]) -> None:
        """Further ways to the cluster: its brokers may have moved since this client was made."""
        known = dict.fromkeys([*addresses, *self._bootstrap])
        self._bootstrap = list(known)[:BOOTSTRAP_MAX]

    def addresses(self) -> list[Address]:
        """Every broker known, in a random order, those that failed lately last."""
        known = [(b.host, b.port) for b in self.metadata.brokers.values() if b.live]
        known = list(dict.fromkeys(known + self._bootstrap))
        self.environment.random.shuffle(known)
        return sorted(known, key=lambda address: self._failed_at.get(address, 0.0))

    async def ask(
        self,
        address: Address,
        request: Request[ResponseT],
        payload: Buffer = b"",
        *,
        timeout_s: float,
    ) -> tuple[ResponseT, memoryview]:
        """One question to one process; remembers whether it could be reached."""
        self._check_open()
        try:
            answer = await self.pool.request(*address, request, payload, timeout_s=timeout_s)
        except (DisconnectedError, TimeoutError):
            self._failed_at[address] = self.now
            raise
        self._failed_at.pop(address, None)
        return answer

    async def ask_any(
        self,
        request: Request[ResponseT],
        *,
        timeout_s: float,
        accept: Callable[[ResponseT], bool] = lambda _response: True,
        hedge_s: float = HEDGE_S,
    ) -> ResponseT:
        """The first acceptable answer of any broker, for questions that may be asked twice. Brokers
        are asked one after another, the next one when the last takes longer than `hedge_s`; in
        rounds, until `timeout_s` has passed. A broker that has not answered yet is left its time,
        while the next round asks the others."""
        deadline = self.now + timeout_s
        backoff = Backoff(self.environment, BACKOFF_FIRST_S, BACKOFF_MAX_S)
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
                reason = error or reason  # the last round may be too short for any answer
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
        reason = str(error or "no answer in time, or metadata older than what was seen before")
        return TimeoutError(
            f"No broker answered {type(request).__name__} within {timeout_s:.1f} s. Tried {tried}; "
            f"the last reason: {reason.rstrip('.')}. Check that the cluster runs and can be "
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
        """Errors of the brokers asked; the last is an acceptable answer if one came. `pending` are
        questions that have no answer yet, from round to round. Where the others have nothing
        acceptable, these hold a round up by no more than `hedge_s`: a broker that hangs must not
        keep back what the others hear in a moment."""
        outcomes: list[Any] = []
        waiting = [one for one in self.addresses() if one not in pending.values()]
        is_anyone_alive = False
        while waiting or pending:
            left_s = deadline - self.now
            if left_s <= 0:
                break
            if waiting:
                address = waiting.pop(0)
                question = self._answer_or_error(
                    address, request, timeout_s=min(ASK_TIMEOUT_S, left_s)
                )
                pending[asyncio.ensure_future(question)] = address
            is_waited_for = not waiting and not is_anyone_alive
            done, _ = await asyncio.wait(
                pending,
                timeout=left_s if is_waited_for else min(hedge_s, left_s),
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in [one for one in pending if one in done]:
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
        """An error is a value here: one that nobody waits for any more is not logged."""
        try:
            response, _ = await self.ask(address, request, timeout_s=timeout_s)
        except RayqError as error:
            return error
        return response

    async def change(self, request: Request[ChangeResponse], *, timeout_s: float) -> None:
        """Asks one broker after another for a change, until one confirms it, for at most
        `timeout_s`. Where an answer was lost the client asks for the change again, under the same
        id: it happens once. Metadata that is fetched later shows the change, whichever broker
        answers."""
        if isinstance(request, Change):
            request = msgspec.structs.replace(request, request_id=self.environment.new_id())
        deadline = self.now + timeout_s
        backoff = Backoff(self.environment, BACKOFF_FIRST_S, BACKOFF_MAX_S)
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
                        raise
                    error = caught
            wait_s = backoff.next_s()
            if self.now + wait_s >= deadline:
                reason = str(error).rstrip(".")
                raise TimeoutError(
                    f"{type(request).__name__} was not confirmed within {timeout_s:.1f} s: "
                    f"{reason}. It may still take effect: look before you repeat it."
                )
            await asyncio.sleep(wait_s)

    # --- metadata -------------------------------------------------------------------------------

    def add_interest(self, topic: str) -> None:
        """Keeps a topic's metadata fresh until `drop_interest`."""
        self._interests[topic] = self._interests.get(topic, 0) + 1
        if self._ager is None:
            self._ager = self.environment.tasks.spawn(self._age(), "refresh metadata by age")

    def drop_interest(self, topic: str) -> None:
        self._interests[topic] -= 1
        if self._interests[topic] == 0:
            del self._interests[topic]

    async def refresh(
        self,
        topics: Iterable[str] = (),
        *,
        timeout_s: float,
        version_min: int = 0,
        wait_ms: int = 0,
    ) -> None:
        """Fetches metadata of `topics` and of those that somebody is interested in."""
        asked = sorted({*topics, *self._interests})
        metadata = self.metadata
        response = await self._ask_for_metadata(
            Metadata(
                topics=asked if len(asked) <= METADATA_TOPICS_MAX else None,
                version_min=max(version_min, metadata.version_min, metadata.version),
                wait_ms=wait_ms,
            ),
            timeout_s=timeout_s,
        )
        metadata.apply(response, asked)
        self._topic_seen_at.update(dict.fromkeys(asked, self.now))

    async def fetch_all(
        self, *, timeout_s: float, version_min: int = 0, wait_ms: int = 0
    ) -> MetadataResponse:
        """Metadata of every topic, fresh from a broker, which waits up to `wait_ms` for one of at
        least `version_min`."""
        response = await self._ask_for_metadata(
            Metadata(
                topics=None,
                version_min=max(version_min, self.metadata.version_min),
                wait_ms=wait_ms,
            ),
            timeout_s=timeout_s,
        )
        self.metadata.apply(response, None)
        self._topic_seen_at = dict.fromkeys(self.metadata.topics, self.now)
        return response

    async def _ask_for_metadata(self, request: Metadata, *, timeout_s: float) -> MetadataResponse:
        deadline = self.now + timeout_s

        async def ask(page: Metadata) -> MetadataResponse:
            response: MetadataResponse = await self.ask_any(
                page,
                timeout_s=max(deadline - self.now, 0.001),
                accept=self._is_acceptable,
                hedge_s=HEDGE_S + page.wait_ms / 1000,
            )
            return response

        return await all_pages(ask, request)

    def _is_acceptable(self, response: MetadataResponse) -> bool:
        expected = self._cluster_id or self.metadata.cluster_id
        if expected is not None and response.cluster_id != expected:
            raise WrongClusterError(
                f"A broker that answered is of cluster {response.cluster_id}, this client is "
                f"connected to {expected}. Check the addresses given to rayq.connect."
            )
        return self.metadata.is_acceptable(response)

    async def topic(
        self, name: str, *, timeout_s: float, age_max_s: float = TOPIC_AGE_MAX_S
    ) -> TopicMetadata:
        """A topic from the cache; fetched when it is not there, or older than `age_max_s` and kept
        fresh by nobody. Raises UnknownTopicError once brokers have denied it for a second, and
        TimeoutError."""
        topic_name(name)
        start = self.now
        deadline = start + timeout_s
        backoff = Backoff(self.environment, BACKOFF_FIRST_S, BACKOFF_MAX_S)
        while True:
            found = self.metadata.topics.get(name)
            age_s = self.now - self._topic_seen_at.get(name, -math.inf)
            is_kept_fresh = name in self._interests and age_max_s > 0
            if found is not None and (is_kept_fresh or age_s <= age_max_s):
                return found
            if age_max_s > 0:
                await self.fetch_with_others(name, deadline)
            else:
                await self.refresh([name], timeout_s=max(deadline - self.now, 0.001))
            if name in self.metadata.topics:
                return self.metadata.topics[name]
            wait_s = backoff.next_s()
            if self.metadata.controller is None:
                start = self.now  # A broker that has just started may know of nothing yet.
                if self.now + wait_s > deadline:
                    raise TimeoutError(
                        f"The brokers that answered within {timeout_s:g} s have just started: they "
                        f"do not know yet whether there is a topic {name!r}."
                    )
            elif self.now + wait_s > min(deadline, start + UNKNOWN_TOPIC_PATIENCE_S):
                raise UnknownTopicError(
                    f"There is no topic {name!r} in this cluster. Create it with "
                    f"cluster.create_topic({name!r})."
                )
            await asyncio.sleep(wait_s)

    async def fetch_with_others(self, name: str, deadline: float) -> None:
        """Refreshes one topic. Whoever comes while it is asked for waits for the same answer: the
        members of a group that start together ask once."""
        while (asked := self._topics_asked.get(name)) is not None and self.now < deadline:
            await asyncio.wait([asked], timeout=deadline - self.now)
            if asked.done() and asked.result():
                return
        asked = self._topics_asked[name] = asyncio.get_running_loop().create_future()
        try:
            await self.refresh([name], timeout_s=max(deadline - self.now, 0.001))
            asked.set_result(True)
        finally:
            if not asked.done():
                asked.set_result(False)
            if self._topics_asked.get(name) is asked:
                del self._topics_asked[name]

    async def _age(self) -> None:
        """Learns of new partitions and of deleted topics while nothing else asks."""
        while True:
            await asyncio.sleep(METADATA_AGE_MAX_S)
            try:
                await self.refresh(timeout_s=METADATA_AGE_MAX_S)
            except RayqError as error:
                logger.warning("metadata could not be refreshed: %s", error)

    def suspect(self, topic: str, topic_id: str, partition: int, epoch: int) -> None:
        """The leader known under `epoch` failed: newer metadata is fetched, at once and again,
        until a newer leader shows up or nobody has complained for some seconds."""
        self._suspects[topic, topic_id, partition] = (epoch, self.now + SUSPICION_S)
        if self._watcher is None and not self._closed:
            self._watcher = self.environment.tasks.spawn(self._watch(), "watch for new leaders")

    def _drop_settled_suspects(self) -> None:
        for (topic, topic_id, partition), (epoch, until) in list(self._suspects.items()):
            known = self.metadata.partition(topic, topic_id, partition)
            leader = self.metadata.leader(topic, topic_id, partition)
            settled = known is None or (leader is not None and leader.epoch > epoch)
            if settled or until < self.now:
                del self._suspects[topic, topic_id, partition]

    async def _watch(self) -> None:
        """Long-polls brokers for newer metadata while leaders are suspect."""
        backoff = Backoff(self.environment, BACKOFF_FIRST_S, BACKOFF_MAX_S)
        try:
            while self._suspects:
                version = self.metadata.version
                topics = {topic for topic, _, _ in self._suspects}
                try:
                    await self.refresh(
                        topics,
                        timeout_s=ASK_TIMEOUT_S,
                        version_min=version + 1,
                        wait_ms=LONG_POLL_MS,
                    )
                except RayqError as error:
                    logger.info("no newer metadata yet: %s", error)
                self._drop_settled_suspects()
                if self.metadata.version > version:
                    backoff.reset()
                elif self._suspects:
                    await asyncio.sleep(backoff.next_s())
        finally:
            self._watcher = None

    # --- a partition's leader -------------------------------------------------------------------

    async def ask_leader(
        self,
        topic: str,
        partition: int,
        build: Callable[[str, LeaderAndEpoch], Request[ResponseT]],
        *,
        timeout_s: float,
        attempt_timeout_s: float,
        patience_s: float = LEADER_PATIENCE_S,
        retry_backoff_s: float = BACKOFF_FIRST_S,
    ) -> ResponseT:
        """As `exchange_with_leader`: the answer, without its payload."""
        response, _ = await self.exchange_with_leader(
            topic,
            partition,
            build,
            timeout_s=timeout_s,
            attempt_timeout_s=attempt_timeout_s,
            patience_s=patience_s,
            retry_backoff_s=retry_backoff_s,
        )
        return response

    async def exchange_with_leader(
        self,
        topic: str,
        partition: int,
        build: Callable[[str, LeaderAndEpoch], Request[ResponseT]],
        payload: Buffer = b"",
        *,
        timeout_s: float,
        attempt_timeout_s: float,
        patience_s: float = LEADER_PATIENCE_S,
        retry_backoff_s: float = BACKOFF_FIRST_S,
        not_retried: tuple[type[RayqError], ...] = (),
    ) -> tuple[ResponseT, memoryview]:
        """Asks whoever leads, with retries and new metadata in between, until `timeout_s` is over.
        `build(topic_id, leader)` makes the request of each attempt; what it raises, and errors of
        the kinds `not_retried`, are raised at once."""
        deadline = self.now + timeout_s
        check_partition(await self.topic(topic, timeout_s=timeout_s), partition)
        backoff = Backoff(self.environment, retry_backoff_s, LEADER_BACKOFF_MAX_S)
        while True:
            known = self.metadata.topics.get(topic)
            topic_id = "" if known is None else known.topic_id
            if self.metadata.partition(topic, topic_id, partition) is None:
                raise self.no_leader_error(topic, topic_id, partition)
            leader = self.metadata.leader(topic, topic_id, partition)
            request = None if leader is None else build(topic_id, leader)
            error: RayqError
            try:
                if leader is None or request is None:
                    raise self.no_leader_error(topic, topic_id, partition)
                return await self.ask_while_leader(
                    topic,
                    topic_id,
                    partition,
                    leader,
                    request,
                    payload,
                    timeout_s=min(attempt_timeout_s, max(deadline - self.now, 0.001)),
                    patience_s=patience_s,
                )
            except RayqError as caught:
                if isinstance(caught, not_retried) or not may_retry(caught):
                    raise
                error = caught
            wait_s = backoff.next_s()
            if self.now + wait_s >= deadline:
                raise TimeoutError(
                    f"The leader of {topic}-{partition} did not answer within "
                    f"{timeout_s:.1f} s: {error}"
                ) from error
            if error.stale_metadata:
                self.suspect(topic, topic_id, partition, epoch_of(leader))
            await self.wait_for_leader(topic, topic_id, partition, leader, wait_s)

    async def ask_while_leader(
        self,
        topic: str,
        topic_id: str,
        partition: int,
        leader: LeaderAndEpoch,
        request: Request[ResponseT],
        payload: Buffer = b"",
        *,
        timeout_s: float,
        patience_s: float,
    ) -> tuple[ResponseT, memoryview]:
        """One question to a leader. It becomes suspect when it takes longer than `patience_s`, and
        is given up with NotLeaderError when another one shows up."""
        question = asyncio.ensure_future(
            self.ask((leader.host, leader.port), request, payload, timeout_s=timeout_s)
        )
        replaced = asyncio.ensure_future(
            self.wait_for_leader(topic, topic_id, partition, leader, timeout_s)
        )
        try:
            done, _ = await asyncio.wait(
                (question, replaced), timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                self.suspect(topic, topic_id, partition, leader.epoch)
                await asyncio.wait((question, replaced), return_when=asyncio.FIRST_COMPLETED)
            if not question.done() and replaced.result():
                raise NotLeaderError(
                    f"{leader.host}:{leader.port} no longer leads {topic}-{partition}."
                )
            return await question
        finally:
            question.cancel()
            replaced.cancel()

    async def wait_for_leader(
        self,
        topic: str,
        topic_id: str,
        partition: int,
        failed: LeaderAndEpoch | None,
        wait_s: float,
    ) -> bool:
        """Waits `wait_s`, or less when another leader than `failed` shows up: then True."""
        changed = asyncio.Event()
        self.metadata.add_listener(changed.set)
        try:
            async with asyncio.timeout(wait_s):
                while self.metadata.leader(topic, topic_id, partition) == failed:
                    changed.clear()
                    await changed.wait()
        except builtins.TimeoutError:
            return False
        finally:
            self.metadata.remove_listener(changed.set)
        return True

    def no_leader_error(self, topic: str, topic_id: str, partition: int) -> RayqError:
        """Why there is nobody to ask."""
        known = self.metadata.partition(topic, topic_id, partition)
        if known is None:
            return UnknownTopicError(
                f"Topic {topic!r} was deleted (or has no partition {partition} any more)."
            )
        reason = known.offline_reason or "its leader's process is not running"
        return PartitionOfflineError(f"{topic}-{partition} has no leader now: {reason}.")


def epoch_of(leader: LeaderAndEpoch | None) -> int:
    """The epoch under which a leader failed, below every epoch when there was none."""
    return -1 if leader is None else leader.epoch


def may_retry(error: RayqError) -> bool:
    """Whether a partition's leader may be asked again. A process that does not know a topic may
    only be behind: the metadata says whether the topic is gone."""
    return error.retriable or isinstance(error, UnknownTopicError)


def check_partition(topic: TopicMetadata, partition: int) -> None:
    """Raises InvalidRequestError for a partition that the topic does not have."""
    if type(partition) is not int:
        raise TypeError(f"A partition is an int, not {type(partition).__name__}.")
    if not 0 <= partition < len(topic.partitions):
        raise InvalidRequestError(
            f"Topic {topic.name!r} has partitions 0 to {len(topic.partitions) - 1}, "
            f"not {partition}."
        )
