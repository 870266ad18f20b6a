"""The client that the producers, consumers and admins of one event loop share: it asks any broker
or the leader of a partition, and caches the metadata that says where these are."""

from __future__ import annotations

import asyncio
import builtins
import logging
import math
from collections.abc import Callable, Iterable, Sequence

from rayq.client.arguments import topic_name
from rayq.client.broker_client import (
    ASK_TIMEOUT_S,
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    HEDGE_S,
    BrokerClient,
)
from rayq.client.leader_requests import LEADER_PATIENCE_S, epoch_of, may_retry
from rayq.client.metadata import LeaderAndEpoch
from rayq.client.timeouts import time_left_s
from rayq.config import ClusterConfig
from rayq.environment import Address, Buffer, Environment
from rayq.errors import (
    AuthorizationError,
    InvalidRequestError,
    NotLeaderError,
    PartitionOfflineError,
    RayqError,
    TimeoutError,
    UnknownTopicError,
    WrongClusterError,
)
from rayq.messages import (
    METADATA_TOPICS_MAX,
    Metadata,
    MetadataResponse,
    Request,
    ResponseT,
    TopicMetadata,
)
from rayq.wire.authentication import Identity
from rayq.wire.metadata_pages import all_pages

logger = logging.getLogger(__name__)

LONG_POLL_MS = 200
"""Maximum time a broker holds a request for newer metadata."""

METADATA_AGE_MAX_S = 60.0
"""Maximum age of metadata before it is fetched again, to learn of new partitions."""

TOPIC_AGE_MAX_S = 1.0
"""Maximum age of a topic's metadata that nobody keeps fresh, before it is fetched again."""

TOPICS_KNOWN_MAX = METADATA_TOPICS_MAX
"""Maximum number of topics that a client knows one by one. Beyond it those go that nobody keeps
fresh, first those that were fetched longest ago."""

UNKNOWN_TOPIC_PATIENCE_S = 1.0
"""Time after which a topic unknown to the brokers counts as missing. Until then a broker may only
be behind."""

LEADER_BACKOFF_MAX_S = 1.0
"""Maximum wait between two requests to a partition's leader."""

SUSPICION_S = 3.0
"""Time for which a partition's leader stays suspect, and newer metadata is wanted, after one
failure."""


class Client(BrokerClient):
    """A client of one event loop; all methods run on that loop."""

    def __init__(
        self,
        environment: Environment,
        identity: Identity,
        bootstrap: Sequence[Address],
        config: ClusterConfig,
        name: str | None = None,
    ) -> None:
        """`name` tells operators the host and process of this client."""
        super().__init__(environment, identity, bootstrap, config)
        self.name = name or f"process {environment.pid}"
        self._cluster_id = identity.cluster_id
        self._interests: dict[str, int] = {}
        self._topic_seen_at: dict[str, float] = {}
        """The time at which each topic's metadata was last fetched."""
        self._topics_asked: dict[str, asyncio.Future[bool]] = {}
        """The topics with a request in flight, and whether it was answered."""
        self._suspects: dict[tuple[str, str, int], tuple[int, float]] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._ager: asyncio.Task[None] | None = None

    def close(self) -> None:
        for task in (self._watcher, self._ager):
            if task is not None:
                task.cancel()
        super().close()

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
        """Fetches metadata of `topics` and of all topics with an interest."""
        asked = sorted({*topics, *self._interests})
        metadata = self.metadata
        response = await self._ask_for_metadata(
            Metadata(
                topics=asked if len(asked) <= METADATA_TOPICS_MAX else None,
                version_min=max(version_min, metadata.oldest_acceptable),
                wait_ms=wait_ms,
            ),
            timeout_s=timeout_s,
        )
        metadata.apply(response, asked)
        for name in asked:
            self._topic_seen_at.pop(name, None)
            if name in metadata.topics:
                self._topic_seen_at[name] = self.now
        self._forget_old_topics()

    def _forget_old_topics(self) -> None:
        """A topic that was deleted is not asked for again, so nobody would say that it is gone."""
        unused = len(self._topic_seen_at) - TOPICS_KNOWN_MAX
        if unused > 0:
            old = [name for name in self._topic_seen_at if name not in self._interests]
            for name in old[:unused]:
                del self._topic_seen_at[name]
                self.metadata.forget(name)

    async def fetch_all(
        self, *, timeout_s: float, version_min: int = 0, wait_ms: int = 0
    ) -> MetadataResponse:
        """Fetches metadata of every topic from a broker, which waits up to `wait_ms` for at least
        `version_min`."""
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
                timeout_s=time_left_s(self.now, deadline),
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
        """Returns a topic from the cache. The topic is fetched if it is missing there, or is older
        than `age_max_s` and not kept fresh. Raises UnknownTopicError once brokers have denied it
        for a second, AuthorizationError where this client may not know whether it exists, and
        TimeoutError."""
        topic_name(name)
        start = self.now
        deadline = start + timeout_s
        backoff = self.backoff(BACKOFF_FIRST_S, BACKOFF_MAX_S)
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
                start = self.now  # A broker that has just started may know no topic yet.
                if self.now + wait_s > deadline:
                    raise TimeoutError(
                        f"The brokers that answered within {timeout_s:g} s have just started: they "
                        f"do not know yet whether there is a topic {name!r}."
                    )
            elif self.now + wait_s > min(deadline, start + UNKNOWN_TOPIC_PATIENCE_S):
                raise self.missing_topic_error(
                    name,
                    f"There is no topic {name!r} in this cluster. Create it with "
                    f"cluster.create_topic({name!r}).",
                )
            await asyncio.sleep(wait_s)

    async def fetch_with_others(self, name: str, deadline: float) -> None:
        """Refreshes one topic. A call made while the request is in flight waits for the same
        answer, so members of a group that start together ask once."""
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
        """Refreshes metadata by age, to learn of new partitions and deleted topics while nothing
        else asks."""
        while True:
            await asyncio.sleep(METADATA_AGE_MAX_S)
            try:
                await self.refresh(timeout_s=METADATA_AGE_MAX_S)
            except RayqError as error:
                # Without a topic in use nobody misses the metadata: the cluster may have ended by
                # now.
                level = logging.WARNING if self._interests else logging.DEBUG
                logger.log(level, "metadata could not be refreshed: %s", error)

    def suspect(self, topic: str, topic_id: str, partition: int, epoch: int) -> None:
        """Marks the leader known under `epoch` as failed. Newer metadata is fetched at once and
        again, until a newer leader appears or nobody has complained for SUSPICION_S."""
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
        backoff = self.backoff(BACKOFF_FIRST_S, BACKOFF_MAX_S)
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
        """Does the same as `exchange_with_leader`, and returns the answer without its payload."""
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
    ) -> tuple[ResponseT, memoryview]:
        """Asks the leader of a partition, with retries and newer metadata in between, until
        `timeout_s` has passed. `build(topic_id, leader)` makes the request of each attempt. An
        error that `build` raises is raised at once, and so is a break in a producer's sequence.
        Returns the answer and its payload."""
        deadline = self.now + timeout_s
        check_partition(await self.topic(topic, timeout_s=timeout_s), partition)
        backoff = self.backoff(retry_backoff_s, LEADER_BACKOFF_MAX_S)
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
                if caught.breaks_sequence or not may_retry(caught):
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
        """Sends one request to a leader. The leader becomes suspect if the answer takes longer than
        `patience_s`. Raises NotLeaderError as soon as another leader appears."""
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
                connection = self.pool.current(leader.host, leader.port)
                if connection is None or not connection.throttled_s(type(request)):
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
        """Waits for `wait_s`, or until a leader other than `failed` appears, and then returns
        True."""
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

    def missing_topic_error(self, topic: str, message: str) -> RayqError:
        """The error for a topic that the metadata lack: UnknownTopicError with this message, or
        AuthorizationError where the client's principal may not describe it."""
        denied = self.metadata.denied.get(topic)
        return UnknownTopicError(message) if denied is None else AuthorizationError(denied)

    def no_leader_error(self, topic: str, topic_id: str, partition: int) -> RayqError:
        """The error that says why the partition has no leader."""
        known = self.metadata.partition(topic, topic_id, partition)
        if known is None:
            return self.missing_topic_error(
                topic, f"Topic {topic!r} was deleted (or has no partition {partition} any more)."
            )
        reason = known.offline_reason or "its leader's process is not running"
        return PartitionOfflineError(f"{topic}-{partition} has no leader now: {reason}.")


def check_partition(topic: TopicMetadata, partition: int) -> None:
    """Raises InvalidRequestError if the topic does not have the partition."""
    if type(partition) is not int:
        raise TypeError(f"A partition must be an int, not {type(partition).__name__}.")
    if not 0 <= partition < len(topic.partitions):
        raise InvalidRequestError(
            f"Topic {topic.name!r} has partitions 0 to {len(topic.partitions) - 1}, "
            f"not {partition}."
        )
