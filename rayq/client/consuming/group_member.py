"""Group member of a consumer: it joins, sends heartbeats, and leaves.

`MemberState` decides which heartbeat to send and what follows. This module has the timers and the
requests, which run on the client's event loop, apart from user code.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rayq.client.client import Client
from rayq.client.consuming.member_state import (
    PAUSE_S,
    Heartbeat,
    Interest,
    MemberState,
    OwnedPartitions,
    Partitions,
    Polls,
)
from rayq.client.coordinator import GroupCoordinator
from rayq.config import ConsumerConfig
from rayq.core.cluster.topic_changes import OFFSETS_TOPIC
from rayq.errors import MaxPollIntervalError, RayqError, UnknownServerError, counted
from rayq.messages import MEMBER_EPOCH_JOIN, GroupHeartbeat, GroupHeartbeatResponse

logger = logging.getLogger(__name__)

METADATA_PATIENCE_S = 1.0
"""Maximum time that partitions without metadata delay an assignment (a quarter of the session if
that is less, because no heartbeat is sent meanwhile). Then they are taken all the same, and read
once the metadata has them."""
LEAVE_TIMEOUT_S = 5.0
"""Maximum time `close` waits until the coordinator knows that the member leaves."""


class GroupMember:
    """A member of a group. The consumer's thread calls the methods under its heading; the others
    belong to the loop."""

    def __init__(
        self,
        coordinator: GroupCoordinator,
        config: ConsumerConfig,
        interest: Interest,
        tell: Callable[[], None],
    ) -> None:
        """`tell` is called on the loop when there is something for the consumer to do."""
        self.client: Client = coordinator.client
        self.member_id = self.client.environment.new_id()
        self.state = MemberState(config, interest, self.client.now)
        self.owned = OwnedPartitions(self.state)
        self.unpolled_s = 0.0
        """The time between the last poll and the end of the one before it."""
        self.missed: Polls | None = None
        """The earlier polls, after which the current one may have come too late: `check_time`
        decides."""
        self._polls = Polls(is_polling=False, since_s=self.client.now)
        self._coordinator = coordinator
        self._config = config
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        """Set when another heartbeat is necessary, before the answer to the last one."""
        self._topics_of_interest: set[str] = set()
        tasks = self.client.environment.tasks
        self.client.add_interest(OFFSETS_TOPIC)
        self._live_task = tasks.spawn(self._live(), f"member of group {coordinator.group}")
        self._watch_task = tasks.spawn(
            self._watch_time(), f"poll interval in group {coordinator.group}"
        )
        self._is_stopped = False

    # --- the consumer's thread ------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """True if there is something for the consumer to do: a loss, a failure, partitions to take
        or to give up, or a poll that may have come too late."""
        state = self.state
        return (
            self.owned.are_behind
            or state.is_away
            or state.failure is not None
            or self.missed is not None
        )

    def poll_began(self) -> None:
        """Notes that the consumer waits for records, until `poll_ended`."""
        now, before = self.client.now, self._polls
        self.unpolled_s = now - before.since_s
        self.missed = before if self.state.is_overdue(now, before) else None
        self._polls = Polls(is_polling=True, since_s=now)

    def poll_ended(self) -> None:
        self._polls = Polls(is_polling=False, since_s=self.client.now)

    def touch(self) -> bool:
        """Notes a poll that takes no time. Returns False, and notes nothing, if there is something
        to do in it."""
        now = self.client.now
        if self.has_news or self.state.is_overdue(now, self._polls):
            return False
        self._polls = Polls(is_polling=False, since_s=now)
        return True

    def gave_up(self, revoked: Partitions) -> None:
        """Notes partitions that the consumer no longer reads."""
        self.owned.gave_up(revoked)
        self._loop.call_soon_threadsafe(self.beat_now)

    def late_error(self) -> MaxPollIntervalError:
        return MaxPollIntervalError(
            f"{self.unpolled_s:.1f} s passed between two polls, more than max_poll_interval_ms "
            f"({self._config.max_poll_interval_ms} ms): this member left group "
            f"{self._coordinator.group!r} and lost its partitions; others continue from its last "
            f"commit. {self.state.advice}. The next poll joins again."
        )

    # --- the loop -------------------------------------------------------------------------------

    async def check_time(self, polls: Polls) -> None:
        """Decides whether a poll came too late, before any record is returned."""
        generation = self.state.grant.generation
        self.state.time_passed(self.client.now, polls)
        self._note_loss(generation)

    async def come_back(self) -> None:
        """Joins again after `max_poll_interval_ms` had passed."""
        self.state.came_back()
        self.beat_now()

    def commit_failed(self, error: RayqError, generation: int) -> None:
        """Handles a commit of positions of this generation that was answered with an error that
        ends the membership."""
        before = self.state.grant.generation
        self.state.commit_failed(error, generation)
        self._note_loss(before)
        self.beat_now()

    def subscribe(self, interest: Interest) -> None:
        """Changes the subscription; the coordinator decides what that changes."""
        self.state.subscribed(interest)
        self.beat_now()

    def beat_now(self) -> None:
        """Sends a heartbeat now, instead of waiting for the answer to the last one."""
        self._changed.set()

    def stop(self) -> None:
        """Stops the heartbeats; the coordinator is not told."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._live_task.cancel()
        self._watch_task.cancel()
        for topic in (OFFSETS_TOPIC, *self._topics_of_interest):
            self.client.drop_interest(topic)

    async def leave(self, timeout_s: float | None = None) -> None:
        """Leaves the group. A static member leaves its partitions where they are until its session
        ends, or until it comes back. A goodbye that is not confirmed within `timeout_s` is retried
        in the background, until the client is closed or the session has ended."""
        if self._is_stopped:
            return
        self._live_task.cancel()
        self._watch_task.cancel()
        timeout_s = LEAVE_TIMEOUT_S if timeout_s is None else timeout_s
        goodbye = self.state.goodbye()
        try:
            if goodbye is not None:
                patient = goodbye._replace(timeout_s=max(goodbye.timeout_s, timeout_s))
                name = f"leave group {self._coordinator.group}"
                saying = self.client.environment.tasks.spawn(self._say_goodbye(patient), name)
                await asyncio.wait([saying], timeout=timeout_s)
        finally:
            self.stop()

    async def _say_goodbye(self, goodbye: Heartbeat) -> None:
        try:
            await self._ask(goodbye)
        except RayqError as error:
            self._log_failure(goodbye, error)

    async def _live(self) -> None:
        while True:
            await self.check_time(self._polls)
            self._changed.clear()
            beat = self.state.next_heartbeat(self.client.now)
            if beat is None:
                await self._changed.wait()
            else:
                await asyncio.sleep(await self._beat(beat))

    async def _beat(self, beat: Heartbeat) -> float:
        """Sends one heartbeat, and follows its answer unless something makes another one necessary
        first. Returns the time to wait until the next."""
        state, client = self.state, self.client
        began = client.now
        epoch = state.epoch
        asking = asyncio.ensure_future(self._ask(beat))
        changing = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait((asking, changing), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return 0.0
            await self._follow(beat, asking.result())
        except Exception as error:
            failure = error
            if not isinstance(failure, RayqError):
                logger.exception("the member of group %r failed", self._coordinator.group)
                failure = UnknownServerError(f"The member of the group failed: {error!r}.")
            self._log_failure(beat, failure)
            generation = state.grant.generation
            pause_s = state.failed(beat, failure, client.now)
            self._note_loss(generation)
            return pause_s
        finally:
            asking.cancel()  # so that a goodbye does not overtake the join after it
            changing.cancel()
        is_news = epoch != state.epoch or self._changed.is_set()
        return PAUSE_S if client.now - began < PAUSE_S and not is_news else 0.0

    async def _ask(self, beat: Heartbeat) -> GroupHeartbeatResponse:
        response: GroupHeartbeatResponse = await self._coordinator.ask(
            lambda *where: self._heartbeat(beat, *where),
            timeout_s=beat.timeout_s,
            hold_s=beat.wait_ms / 1000,
        )
        return response

    def _heartbeat(
        self, beat: Heartbeat, topic_id: str, partition: int, leader_epoch: int
    ) -> GroupHeartbeat:
        config, interest = self._config, self.state.interest
        self.state.sent(self.client.now)
        return GroupHeartbeat(
            topic_id=topic_id,
            partition=partition,
            leader_epoch=leader_epoch,
            group=self._coordinator.group,
            member=self.member_id,
            member_epoch=beat.epoch,
            instance=config.group_instance_id,
            client=self.client.name,
            topics=list(interest.topics),
            pattern=interest.pattern,
            assignor=config.assignor,
            session_timeout_ms=config.group_session_timeout_ms,
            max_poll_interval_ms=config.max_poll_interval_ms,
            owned=[(of, place.partition) for place, of in self.owned.listed.items()],
            wait_ms=beat.wait_ms,
            reason=beat.reason,
        )

    async def _follow(self, beat: Heartbeat, response: GroupHeartbeatResponse) -> None:
        partitions = self.state.answered(beat, response)
        if partitions is not None:
            self._keep_fresh({topic for topic, _ in partitions})
            await self._learn(partitions)
            self.state.granted(beat, partitions)
            self._tell()

    def _note_loss(self, generation: int) -> None:
        """Tells the consumer after an event which partitions the member has lost since this
        generation."""
        state = self.state
        if state.grant.generation == generation:
            return
        logger.warning(
            "this member of group %r lost %s: %s",
            self._coordinator.group,
            counted(len(self.owned.held), "partition"),
            state.loss_reason,
        )
        self.beat_now()
        self._tell()

    def _log_failure(self, beat: Heartbeat, error: RayqError) -> None:
        group = self._coordinator.group
        if beat.is_goodbye:
            if not error.ends_membership:  # otherwise it is out already
                logger.warning("leaving group %r was not confirmed: %s", group, error)
        elif error.retriable and beat.epoch == MEMBER_EPOCH_JOIN:
            logger.warning("group %r cannot be joined yet: %s", group, error)

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

    async def _watch_time(self) -> None:
        """Leaves the group when the consumer does not poll."""
        while True:
            await self.check_time(self._polls)
            left_s = self.state.poll_time_left_s(self.client.now, self._polls)
            await asyncio.sleep(max(left_s, PAUSE_S))
