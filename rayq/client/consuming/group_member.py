"""A member's life in its group: joining, heartbeats, losing what it had, leaving.

It runs on the client's event loop, apart from user code. The consumer's thread meets it in a few
attributes under one lock:

- `granted` is what the coordinator lets this member own, as of its last answer;
- `held` is what the consumer has taken of it. Taking happens inside `poll`, and so does giving up
  what is no longer granted.

A signal handler may stop the consumer's thread while it has the lock, and itself wait for the loop.
So the loop does not wait for the lock without doing other things meanwhile (`_locked`).

Every heartbeat lists both: what is granted may be taken at any moment, so the coordinator gives it
to nobody else before this member has seen that it is granted no longer.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

from rayq.client.client import Client
from rayq.client.consuming.coordinator import Coordinator
from rayq.config import ConsumerConfig
from rayq.core.topic_changes import OFFSETS_TOPIC
from rayq.errors import (
    FencedMemberError,
    MaxPollIntervalError,
    RayqError,
    TimeoutError,
    UnknownMemberError,
    UnknownServerError,
)
from rayq.records import TopicPartition
from rayq.wire.messages import (
    MEMBER_EPOCH_JOIN,
    MEMBER_EPOCH_LEAVE,
    MEMBER_EPOCH_LEAVE_STATIC,
    AnyRequest,
    GroupHeartbeat,
    GroupHeartbeatResponse,
)

logger = logging.getLogger(__name__)

Partitions = Mapping[TopicPartition, str]
"""Partitions, each with the id of its topic."""

JOIN_TIMEOUT_S = 30.0
"""After so long without an answer to a join it is said in the log, and tried on."""
METADATA_PATIENCE_S = 1.0
"""How long partitions that the client has no metadata of hold up an assignment (a quarter of the
session if that is less, since no heartbeat is sent meanwhile): then they are taken all the same,
and read once the metadata has them."""
LOCK_PATIENCE_S = 0.002
"""How long the loop waits at once for the consumer's thread."""
PAUSE_S = 0.02
"""Between heartbeats that were answered without being held, or failed."""
LAST_PAUSE_S = 0.1
"""Between tries that fail when a session is about to end."""
POLLED_TOO_LATE = "it did not poll within max_poll_interval_ms"
LEAVE_TIMEOUT_S = 5.0
"""How long `close` waits until the coordinator knows that the member leaves."""


class Interest(NamedTuple):
    """What a member subscribes to."""

    topics: tuple[str, ...]
    pattern: str | None


class Loss(NamedTuple):
    """Partitions that were taken from the member without its doing."""

    partitions: Partitions
    is_late: bool
    """Because the consumer did not poll: the next poll says so."""


class GroupMember:
    """Methods under "any thread" may be called from the consumer's; the others belong to the
    loop."""

    def __init__(
        self,
        coordinator: Coordinator,
        config: ConsumerConfig,
        interest: Interest,
        tell: Callable[[], None],
    ) -> None:
        """`tell` is called on the loop when there is something for the consumer to do."""
        self.client: Client = coordinator.client
        self.member_id = self.client.environment.new_id()
        self.epoch = MEMBER_EPOCH_JOIN
        self.generation = 0
        """How often the member has lost everything: what was held before is of another life."""
        self.failure: RayqError | None = None
        """Why the member has given up for good."""
        self.loss_reason = "this member does not own them"
        self.held: Partitions = {}
        self.has_news = False
        """`held` and `granted` differ, or there is a loss, or a failure."""
        self.unpolled_s = 0.0
        """How long before the last poll the one before it had ended."""
        self.interest = interest
        self._coordinator = coordinator
        self._config = config
        self._tell = tell
        self._lock = threading.RLock()
        self._loop = asyncio.get_running_loop()
        self._granted: Partitions = {}
        self._loss: Loss | None = None
        self._changed = asyncio.Event()
        self._has_asked = False
        self._sent_at = 0.0
        self._heard_at = self.client.now
        """When the last heartbeat that was answered had been sent."""
        self._polled_at = self.client.now
        self._is_polling = False
        self._is_away = False
        """It is out because it did not poll, and joins again with the next poll but one."""
        self._goodbye_is_due = False
        """It is out, and the coordinator has not confirmed that it knows."""
        self._topics_of_interest: set[str] = set()
        tasks = self.client.environment.tasks
        self.client.add_interest(OFFSETS_TOPIC)
        self._live_task = tasks.spawn(self._live(), f"member of group {coordinator.group}")
        self._watch_task = tasks.spawn(
            self._watch_polls(), f"poll interval in group {coordinator.group}"
        )
        self._is_stopped = False

    # --- any thread -----------------------------------------------------------------------------

    def poll_began(self) -> None:
        """Until `poll_ended` the consumer waits for records. Raises nothing: a poll that comes too
        late finds the loss."""
        now = self.client.now
        with self._lock:
            is_late = self._check_poll_interval(now)
            self._is_polling = True
            self.unpolled_s = now - self._polled_at
            self._polled_at = now
        if is_late:
            self._from_any_thread(self._resume)
        self._check_session(now)

    def poll_ended(self) -> None:
        with self._lock:
            self._is_polling = False
            self._polled_at = self.client.now

    def take_loss(self) -> tuple[Loss | None, int]:
        """What was lost since the last call, and the generation of what is held now."""
        with self._lock:
            loss, self._loss = self._loss, None
            self._note_news()
            return loss, self.generation

    def revoked(self) -> Partitions:
        """What is held and no longer granted: to be given up, then `gave_up`."""
        with self._lock:
            granted = self._granted
            return {place: of for place, of in self.held.items() if granted.get(place) != of}

    def take_added(self) -> Partitions:
        """Holds what is granted from now on; what is new of it. Of a topic that was made anew under
        the same name, the old partitions are given up first."""
        with self._lock:
            granted, held = self._granted, self.held
            added = {place: of for place, of in granted.items() if place not in held}
            self.held = {**held, **added}
            self._note_news()
        return added

    def gave_up(self, revoked: Partitions) -> None:
        """The consumer does not read these any more."""
        with self._lock:
            self.held = {p: of for p, of in self.held.items() if revoked.get(p) != of}
            self._note_news()
        self._from_any_thread(self.beat_now)

    def come_back(self) -> None:
        """Joins again after `max_poll_interval_ms` had passed."""
        with self._lock:
            if not self._is_away:
                return
            self._is_away = False
            self._polled_at = self.client.now
            self._note_news()
        self._from_any_thread(self._resume)

    def _from_any_thread(self, action: Callable[[], None]) -> None:
        try:
            running: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is self._loop:
            action()
        else:
            self._loop.call_soon_threadsafe(action)

    # --- under the lock -------------------------------------------------------------------------

    def _lose(self, reason: str, *, is_late: bool = False) -> None:
        earlier = self._loss or Loss({}, False)
        self._loss = Loss({**earlier.partitions, **self.held}, is_late or earlier.is_late)
        logger.warning(
            "this member of group %r lost %d partitions: %s",
            self._coordinator.group,
            len(self.held),
            reason,
        )
        self.loss_reason = reason
        self.held = {}
        self._granted = {}
        self.epoch = MEMBER_EPOCH_JOIN
        self.generation += 1
        self._note_news()

    def _note_news(self) -> None:
        self.has_news = (
            self._loss is not None
            or self.failure is not None
            or self._is_away
            or self._granted != self.held
        )

    def _check_poll_interval(self, now: float) -> bool:
        """Whether the member goes out now because its consumer did not poll."""
        limit_ms = self._config.max_poll_interval_ms
        if self._is_away or self._is_polling or self.failure is not None:
            return False
        if now - self._polled_at <= limit_ms / 1000:
            return False
        self._is_away = self._goodbye_is_due = True
        self._lose(
            f"the consumer did not poll for more than max_poll_interval_ms ({limit_ms} ms), so "
            f"this member left the group. {self._advice}",
            is_late=True,
        )
        return True

    @property
    def _advice(self) -> str:
        return (
            "Poll fewer records at a time (max_poll_records, now "
            f"{self._config.max_poll_records}), or raise max_poll_interval_ms"
        )

    def late_error(self) -> MaxPollIntervalError:
        return MaxPollIntervalError(
            f"{self.unpolled_s:.1f} s passed between two polls, more than max_poll_interval_ms "
            f"({self._config.max_poll_interval_ms} ms): this member left group "
            f"{self._coordinator.group!r} and lost its partitions, others go on from its last "
            f"commit. {self._advice}. The next poll joins again."
        )

    # --- the loop -------------------------------------------------------------------------------

    @asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        while not self._lock.acquire(timeout=LOCK_PATIENCE_S):  # noqa: ASYNC110
            await asyncio.sleep(PAUSE_S)
        try:
            yield
        finally:
            self._lock.release()

    async def lose(self, reason: str, generation: int) -> None:
        """What was held in this generation was taken from the member, which joins anew."""
        async with self._locked():
            if generation == self.generation:
                self._lose(reason)
        self._resume()

    def subscribe(self, interest: Interest) -> None:
        """Subscribes to something else; the coordinator says what that changes."""
        self.interest = interest
        if self.failure is not None:
            self.failure = None
            with self._lock:
                self._note_news()
            self._live_task = self.client.environment.tasks.spawn(
                self._live(), f"member of group {self._coordinator.group}"
            )
        self.beat_now()

    def beat_now(self) -> None:
        """Sends a heartbeat now, instead of waiting for the answer to the last one."""
        self._changed.set()

    def stop(self) -> None:
        """No more heartbeats; the coordinator is not told."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._live_task.cancel()
        self._watch_task.cancel()
        for topic in (OFFSETS_TOPIC, *self._topics_of_interest):
            self.client.drop_interest(topic)

    async def leave(self, timeout_s: float | None = None) -> None:
        """Leaves the group. A static member leaves its partitions where they are until its session
        ends, or until it comes back. What is not confirmed within `timeout_s` is tried on in the
        background, until the client is closed or the session has ended."""
        if self._is_stopped:
            return
        self._live_task.cancel()
        self._watch_task.cancel()
        is_away = self._is_away
        is_out = isinstance(self.failure, FencedMemberError) or (
            is_away and not self._goodbye_is_due
        )
        is_static = self._config.group_instance_id is not None and not is_away
        timeout_s = LEAVE_TIMEOUT_S if timeout_s is None else timeout_s
        session_s = self._config.group_session_timeout_ms / 1000
        try:
            if self._has_asked and not is_out:
                goodbye = self._say_goodbye(
                    MEMBER_EPOCH_LEAVE_STATIC if is_static else MEMBER_EPOCH_LEAVE,
                    POLLED_TOO_LATE if is_away else "the consumer was closed",
                    max(timeout_s, session_s),
                )
                name = f"leave group {self._coordinator.group}"
                saying = self.client.environment.tasks.spawn(goodbye, name)
                await asyncio.wait([saying], timeout=timeout_s)
        finally:
            self.stop()

    async def _say_goodbye(self, epoch: int, reason: str, timeout_s: float) -> None:
        try:
            await self._coordinator.ask(
                lambda *where: self._heartbeat(*where, epoch=epoch, wait_ms=0, reason=reason),
                timeout_s=timeout_s,
            )
        except (UnknownMemberError, FencedMemberError):
            pass  # it is out already
        except RayqError as error:
            logger.warning(
                "leaving group %r could not be said, its session will end: %s",
                self._coordinator.group,
                error,
            )

    async def _live(self) -> None:
        while True:
            generation = self.generation
            try:
                if self._is_away:
                    await self._stay_away()
                else:
                    await self._beat()
            except UnknownMemberError as error:
                reason = f"the coordinator does not know this member any more: {error}"
                await self.lose(reason, generation)
                await asyncio.sleep(PAUSE_S)
            except FencedMemberError as error:
                if self._config.group_instance_id is not None:
                    await self._give_up(error)
                    return
                await self.lose(f"the coordinator has fenced this member: {error}", generation)
                await asyncio.sleep(PAUSE_S)
            except RayqError as error:
                await self._give_up(error)
                return
            except Exception as error:
                logger.exception("the member of group %r failed", self._coordinator.group)
                failure = UnknownServerError(f"The member of the group failed: {error!r}.")
                await self._give_up(failure)
                return

    async def _give_up(self, error: RayqError) -> None:
        async with self._locked():
            self.failure = error
            self._lose(str(error))
        self._tell()

    async def _stay_away(self) -> None:
        """Says that the member is out; until the consumer polls again."""
        self._changed.clear()
        goodbye: asyncio.Future[None] | None = None
        if self._goodbye_is_due:
            goodbye = asyncio.ensure_future(self._say_that_it_is_away())
        try:
            while self._is_away:
                await self._changed.wait()
                self._changed.clear()
        finally:
            if goodbye is not None:  # a join must not be overtaken by it
                goodbye.cancel()

    async def _say_that_it_is_away(self) -> None:
        session_s = self._config.group_session_timeout_ms / 1000
        await self._say_goodbye(MEMBER_EPOCH_LEAVE, POLLED_TOO_LATE, session_s)
        self._goodbye_is_due = False

    async def _beat(self) -> None:
        """One heartbeat: its answer, or what makes the next one necessary before it."""
        self._changed.clear()
        config, client = self._config, self.client
        generation, epoch = self.generation, self.epoch
        wait_ms = 0 if epoch == MEMBER_EPOCH_JOIN else config.group_heartbeat_interval_ms
        timeout_s = JOIN_TIMEOUT_S
        if epoch != MEMBER_EPOCH_JOIN:
            timeout_s = max(self._session_left_s(client.now), 0.001)
        began = client.now
        asking = asyncio.ensure_future(
            self._coordinator.ask(
                lambda *where: self._noted(self._heartbeat(*where, epoch=epoch, wait_ms=wait_ms)),
                timeout_s=timeout_s,
                hold_s=wait_ms / 1000,
            )
        )
        changing = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait((asking, changing), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return
            response = asking.result()
        except TimeoutError as error:
            if epoch == MEMBER_EPOCH_JOIN:
                logger.warning("group %r cannot be joined yet: %s", self._coordinator.group, error)
            else:
                await asyncio.sleep(min(max(self._session_left_s(client.now), 0.0), LAST_PAUSE_S))
                await self._end_session(client.now)
            return
        finally:
            asking.cancel()
            changing.cancel()
        if generation == self.generation:
            await self._take(response, self._sent_at, generation)
        if client.now - began < PAUSE_S and epoch == self.epoch and not self._changed.is_set():
            await asyncio.sleep(PAUSE_S)  # answered at once, though there was nothing new

    def _noted(self, request: AnyRequest) -> AnyRequest:
        self._sent_at = self.client.now
        self._has_asked = True
        return request

    def _heartbeat(
        self,
        topic_id: str,
        partition: int,
        leader_epoch: int,
        *,
        epoch: int,
        wait_ms: int,
        reason: str = "",
    ) -> GroupHeartbeat:
        config = self._config
        # Without the lock: taking what is granted leaves the two together as they are.
        owned = {**self._granted, **self.held}
        owned_pairs = [(of, place.partition) for place, of in owned.items()]
        return GroupHeartbeat(
            topic_id=topic_id,
            partition=partition,
            leader_epoch=leader_epoch,
            group=self._coordinator.group,
            member=self.member_id,
            member_epoch=epoch,
            instance=config.group_instance_id,
            client=self.client.name,
            topics=list(self.interest.topics),
            pattern=self.interest.pattern,
            assignor=config.assignor,
            session_timeout_ms=config.group_session_timeout_ms,
            max_poll_interval_ms=config.max_poll_interval_ms,
            owned=owned_pairs,
            wait_ms=wait_ms,
            reason=reason,
        )

    async def _take(
        self, response: GroupHeartbeatResponse, sent_at: float, generation: int
    ) -> None:
        granted = {
            TopicPartition(one.topic, one.partition): one.topic_id for one in response.assigned
        }
        async with self._locked():
            if generation != self.generation:
                return
            self._heard_at = sent_at
            self.epoch = response.member_epoch
            is_same = granted == self._granted
        if is_same:
            return
        self._keep_fresh({topic for topic, _ in granted})
        await self._learn(granted)
        async with self._locked():
            if generation != self.generation:
                return
            self._granted = granted
            self._note_news()
        self._tell()

    def _keep_fresh(self, topics: set[str]) -> None:
        for topic in topics - self._topics_of_interest:
            self.client.add_interest(topic)
        for topic in self._topics_of_interest - topics:
            self.client.drop_interest(topic)
        self._topics_of_interest = topics

    async def _learn(self, granted: Partitions) -> None:
        """Waits until the client's metadata has these partitions."""
        client = self.client
        patience_s = min(METADATA_PATIENCE_S, self._config.group_session_timeout_ms / 4000)
        deadline = client.now + patience_s
        while True:
            missing = {
                place.topic
                for place, topic_id in granted.items()
                if client.metadata.partition(place.topic, topic_id, place.partition) is None
            }
            if not missing or client.now >= deadline:
                return
            try:
                await client.refresh(missing, timeout_s=deadline - client.now)
            except RayqError as error:
                logger.info("no metadata of %s yet: %s", sorted(missing), error)
            await asyncio.sleep(PAUSE_S)

    # --- time -----------------------------------------------------------------------------------

    def _session_left_s(self, now: float) -> float:
        return self._heard_at + self._config.group_session_timeout_ms / 1000 - now

    def _check_session(self, now: float) -> None:
        """By its own clock the member is out: others may have its partitions by now."""
        with self._lock:
            is_over = self._session_is_over(now)
        if is_over:
            self._from_any_thread(self._resume)

    async def _end_session(self, now: float) -> None:
        """As `_check_session`, on the loop."""
        async with self._locked():
            is_over = self._session_is_over(now)
        if is_over:
            self._resume()

    def _session_is_over(self, now: float) -> bool:
        """Under the lock."""
        if self.epoch == MEMBER_EPOCH_JOIN or self._session_left_s(now) > 0:
            return False
        self._lose(
            "no heartbeat was answered for a session (group_session_timeout_ms, "
            f"{self._config.group_session_timeout_ms} ms): the coordinator could not be "
            "reached, or this process stood still"
        )
        return True

    def _resume(self) -> None:
        self.beat_now()
        self._tell()

    async def _watch_polls(self) -> None:
        """Leaves the group when the consumer does not poll."""
        limit_s = self._config.max_poll_interval_ms / 1000
        while True:
            now = self.client.now
            async with self._locked():
                is_late = self._check_poll_interval(now)
                waits = self._is_polling or self._is_away
                left_s = limit_s if waits else self._polled_at + limit_s - now
            if is_late:
                self._resume()
            await asyncio.sleep(max(left_s, PAUSE_S))
