"""State machine of a group member: it decides which heartbeat is sent next, and what the answer
changes.

Events come in as methods, and their consequences are queried. There is no clock, no network and no
lock here. Two threads share the decisions, and each attribute has one writer:

- `MemberState` is written by the client's event loop: `grant` has the partitions that the
  coordinator lets this member own, as of its last answer;
- `OwnedPartitions` is written by the consumer's thread: `held` has the partitions of the grant that
  the consumer has taken. It takes partitions inside `poll`, and gives up those that are no longer
  granted there.

Every heartbeat lists both. A granted partition may be taken at any moment, so the coordinator gives
it to no other member before this member has seen that it is no longer granted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rayq.config import ConsumerConfig
from rayq.errors import AuthorizationError, FencedMemberError, RayqError
from rayq.messages import (
    MEMBER_EPOCH_JOIN,
    MEMBER_EPOCH_LEAVE,
    MEMBER_EPOCH_LEAVE_STATIC,
    GroupHeartbeatResponse,
)
from rayq.records import TopicPartition

Partitions = Mapping[TopicPartition, str]
"""Partitions, each with the id of its topic."""

JOIN_TIMEOUT_S = 30.0
"""Timeout after which a join without an answer is logged, and tried again."""
PAUSE_S = 0.02
"""Wait between heartbeats that the coordinator answered without holding them, or that failed."""
LAST_PAUSE_S = 0.1
"""Maximum wait between two tries when the session is about to end."""
DENIED_PAUSE_S = 0.5
"""Wait between heartbeats while the principal may not be a member."""
POLLED_TOO_LATE = "it did not poll within max_poll_interval_ms"


class Interest(NamedTuple):
    """The topics and pattern that a member subscribes to."""

    topics: tuple[str, ...]
    pattern: str | None


class Polls(NamedTuple):
    """The last poll of the consumer."""

    is_polling: bool
    """True if it waits for records inside `poll` now."""
    since_s: float
    """The time at which that poll began, or the last one ended."""


class Heartbeat(NamedTuple):
    """An action: send this heartbeat."""

    epoch: int
    generation: int
    timeout_s: float
    """The time for which it is retried."""
    wait_ms: int = 0
    """Maximum time the coordinator may hold it while nothing changes."""
    reason: str = ""
    """The reason why the member leaves."""

    @property
    def is_goodbye(self) -> bool:
        return self.epoch < 0


class Grant(NamedTuple):
    """The partitions that the coordinator lets the member own."""

    generation: int
    """The number of times the member has lost everything. Partitions held before belong to another
    generation."""
    partitions: Partitions


class Loss(NamedTuple):
    """Partitions that were taken from the member without its doing."""

    partitions: Partitions
    is_late: bool
    """True if the reason is that the consumer did not poll: the next poll raises that."""


class MemberState:
    """The state of a member in its group. Threads other than the loop's may read the public
    attributes."""

    def __init__(self, config: ConsumerConfig, interest: Interest, now_s: float) -> None:
        self.interest = interest
        self.epoch = MEMBER_EPOCH_JOIN
        self.grant = Grant(0, {})
        self.failure: RayqError | None = None
        """The reason why the member has given up for good. After an AuthorizationError it asks on,
        until it is allowed to be a member again."""
        self.is_away = False
        """True if it left because its consumer did not poll. It joins again with the next poll but
        one."""
        self.loss_reason = "this member does not own them"
        self.late_generation = -1
        """The last generation that ended because the consumer did not poll."""
        self._config = config
        self._is_static = config.group_instance_id is not None
        self._session_s = config.group_session_timeout_ms / 1000
        self._poll_limit_s = config.max_poll_interval_ms / 1000
        self._has_asked = False
        self._sent_at_s = now_s
        self._heard_at_s = now_s
        """The time at which the last answered heartbeat had been sent."""
        self._goodbye_is_due = False
        """True if the member is away, and the coordinator has not confirmed that it knows."""

    # --- events ---------------------------------------------------------------------------------

    def subscribed(self, interest: Interest) -> None:
        """Changes the subscription. The next heartbeat tells the coordinator, which decides what
        that changes."""
        self.interest = interest
        self.failure = None

    def sent(self, now_s: float) -> None:
        """Handles a heartbeat that goes out now, perhaps once more."""
        self._has_asked = True
        self._sent_at_s = now_s

    def answered(self, beat: Heartbeat, response: GroupHeartbeatResponse) -> Partitions | None:
        """Handles an answer. Returns the partitions that the coordinator lets the member own from
        now on, None if they are unchanged. They count once `granted` is called."""
        if beat.is_goodbye:
            self._goodbye_is_due = False
            return None
        self.failure = None
        if beat.generation != self.grant.generation:
            return None
        self._heard_at_s = self._sent_at_s
        self.epoch = response.member_epoch
        partitions = {
            TopicPartition(granted.topic, granted.partition): granted.topic_id
            for granted in response.assigned
        }
        return None if partitions == self.grant.partitions else partitions

    def granted(self, beat: Heartbeat, partitions: Partitions) -> None:
        """Handles the partitions that were granted by the answer to this heartbeat."""
        if beat.generation == self.grant.generation:
            self.grant = Grant(beat.generation, partitions)

    def failed(self, beat: Heartbeat, error: RayqError, now_s: float) -> float:
        """Handles a heartbeat without an answer, or with an error. Returns the time to wait before
        the next one."""
        if beat.is_goodbye:
            self._goodbye_is_due = False
        elif error.retriable:
            if beat.epoch != MEMBER_EPOCH_JOIN:
                return min(max(self._session_left_s(now_s), 0.0), LAST_PAUSE_S)
        elif isinstance(error, AuthorizationError):
            # It may be allowed again before the session ends: then nothing is lost.
            self.failure = error
            if beat.epoch != MEMBER_EPOCH_JOIN:
                return min(max(self._session_left_s(now_s), 0.0), DENIED_PAUSE_S)
            return DENIED_PAUSE_S
        elif not error.ends_membership or (self._is_static and _is_fenced(error)):
            self.failure = error
            self._lose(str(error))
        else:
            self._taken_out(error, beat.generation)
        return PAUSE_S

    def commit_failed(self, error: RayqError, generation: int) -> None:
        """Handles a commit that was answered with an error that ends the membership.

        Only an unknown member is out for certain. A fenced one may have sent an old epoch: the
        answer to a heartbeat brings the current one, or the end. Nor does the answer to a commit
        say whether another process took over the instance of a static member, and a static member
        that joined again would take it back."""
        if not self._is_static and not _is_fenced(error):
            self._taken_out(error, generation)

    def time_passed(self, now_s: float, polls: Polls) -> None:
        """Ends the session, or the membership of a consumer that does not poll, when it is time."""
        if self._polls_too_late(now_s, polls):
            self.is_away = self._goodbye_is_due = True
            self.late_generation = self.grant.generation
            self._lose(
                "the consumer did not poll for more than max_poll_interval_ms "
                f"({self._config.max_poll_interval_ms} ms), so this member left the group. "
                f"{self.advice}"
            )
        elif self._session_is_over(now_s):
            why = "the coordinator could not be reached, or this process stood still"
            self._lose(
                "no heartbeat was answered for a session (group_session_timeout_ms, "
                f"{self._config.group_session_timeout_ms} ms): {self.failure or why}"
            )

    def came_back(self) -> None:
        """Handles a consumer that polls again, after it had not for `max_poll_interval_ms`."""
        self.is_away = False

    def _taken_out(self, error: RayqError, generation: int) -> None:
        """Gives up everything held in this generation, which belongs to others. The member joins
        again."""
        if generation == self.grant.generation:
            self._lose(f"the coordinator took this member out of the group: {error}")

    def _lose(self, reason: str) -> None:
        self.loss_reason = reason
        self.epoch = MEMBER_EPOCH_JOIN
        self.grant = Grant(self.grant.generation + 1, {})

    # --- what follows ---------------------------------------------------------------------------

    def next_heartbeat(self, now_s: float) -> Heartbeat | None:
        """The heartbeat to send now; None: nothing, until something changes."""
        if self.failure is not None and not isinstance(self.failure, AuthorizationError):
            return None
        if self.is_away:
            return self.goodbye()
        generation = self.grant.generation
        if self.epoch == MEMBER_EPOCH_JOIN:
            return Heartbeat(self.epoch, generation, JOIN_TIMEOUT_S)
        left_s = max(self._session_left_s(now_s), 0.001)
        return Heartbeat(
            self.epoch, generation, left_s, wait_ms=self._config.group_heartbeat_interval_ms
        )

    def goodbye(self) -> Heartbeat | None:
        """The heartbeat that tells the coordinator that the member leaves; None if the coordinator
        knows, or has never heard of the member. The partitions of a static member stay where they
        are until its session ends, or until it comes back."""
        is_fenced = self.failure is not None and self.failure.ends_membership
        if not self._has_asked or is_fenced or (self.is_away and not self._goodbye_is_due):
            return None
        stays = self._is_static and not self.is_away
        return Heartbeat(
            epoch=MEMBER_EPOCH_LEAVE_STATIC if stays else MEMBER_EPOCH_LEAVE,
            generation=self.grant.generation,
            timeout_s=self._session_s,
            reason=POLLED_TOO_LATE if self.is_away else "the consumer was closed",
        )

    def is_overdue(self, now_s: float, polls: Polls) -> bool:
        """Returns whether `time_passed` would take the partitions away. Any thread may ask."""
        return self._polls_too_late(now_s, polls) or self._session_is_over(now_s)

    def poll_time_left_s(self, now_s: float, polls: Polls) -> float:
        """The remaining time in which the consumer need not poll."""
        if polls.is_polling or self.is_away:
            return self._poll_limit_s
        return polls.since_s + self._poll_limit_s - now_s

    @property
    def advice(self) -> str:
        """The advice for polls that come too late."""
        return (
            "Poll fewer records at a time (max_poll_records, now "
            f"{self._config.max_poll_records}), or raise max_poll_interval_ms"
        )

    def _polls_too_late(self, now_s: float, polls: Polls) -> bool:
        if self.is_away or polls.is_polling or self.failure is not None:
            return False
        return now_s - polls.since_s > self._poll_limit_s

    def _session_left_s(self, now_s: float) -> float:
        return self._heard_at_s + self._session_s - now_s

    def _session_is_over(self, now_s: float) -> bool:
        """Returns whether the member is out by its own clock: others may have its partitions by
        now."""
        return self.epoch != MEMBER_EPOCH_JOIN and self._session_left_s(now_s) <= 0


class OwnedPartitions:
    """The partitions that the consumer has taken of its member's grants. Belongs to the consumer's
    thread; the loop reads `listed`."""

    def __init__(self, state: MemberState) -> None:
        self._state = state
        self._held = state.grant
        self._followed = state.grant
        """The last grant of which everything was given up and taken."""

    @property
    def held(self) -> Partitions:
        return self._held.partitions

    @property
    def generation(self) -> int:
        """The member's generation when the consumer took these partitions."""
        return self._held.generation

    @property
    def listed(self) -> Partitions:
        """The partitions that a heartbeat lists. The loop asks, so the grant does not change
        meanwhile."""
        grant, held = self._state.grant, self._held
        if held.generation != grant.generation:
            return grant.partitions
        return {**grant.partitions, **held.partitions}

    @property
    def are_behind(self) -> bool:
        """True if partitions were lost, or are to be given up or taken."""
        return self._followed is not self._state.grant

    def take_loss(self) -> Loss | None:
        """The partitions lost since the last call, which are no longer held."""
        generation = self._state.grant.generation
        lost = self._held
        if lost.generation == generation:
            return None
        is_late = lost.generation <= self._state.late_generation < generation
        self._held = Grant(generation, {})
        return Loss(lost.partitions, is_late)

    def revoked(self) -> Partitions:
        """The partitions that are held and no longer granted: to be given up, then `gave_up`."""
        grant, held = self._state.grant, self._held
        if grant.generation != held.generation:
            return {}  # lost, not revoked
        return {p: of for p, of in held.partitions.items() if grant.partitions.get(p) != of}

    def gave_up(self, revoked: Partitions) -> None:
        """Removes partitions that the consumer no longer reads."""
        kept = {p: of for p, of in self.held.items() if revoked.get(p) != of}
        self._held = self._held._replace(partitions=kept)

    def take_added(self) -> Partitions:
        """Takes the granted partitions, and returns the new ones. If a topic was created again
        under the same name, its old partitions are given up first."""
        grant, held = self._state.grant, self._held
        if grant.generation != held.generation:
            return {}
        added = {p: of for p, of in grant.partitions.items() if p not in held.partitions}
        self._held = held._replace(partitions={**held.partitions, **added})
        # While the grant is still this one, every heartbeat after the next grant will list the
        # partitions added here. Once it is another one, a heartbeat without them may have gone out.
        if self._state.grant is not grant:
            self._held = held
            return {}
        if self.held == grant.partitions:
            self._followed = grant
        return added


def _is_fenced(error: RayqError) -> bool:
    """Returns whether another process took over the instance, or the epoch is an old one."""
    return isinstance(error, FencedMemberError)
