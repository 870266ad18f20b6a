"""The decisions of a member, event by event: heartbeats, losses, partitions taken and given up."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rayq.client.consuming.member_state import (
    DENIED_PAUSE_S,
    JOIN_TIMEOUT_S,
    LAST_PAUSE_S,
    PAUSE_S,
    POLLED_TOO_LATE,
    Heartbeat,
    Interest,
    Loss,
    MemberState,
    OwnedPartitions,
    Polls,
)
from rayq.config import ConsumerConfig
from rayq.errors import (
    AuthorizationError,
    CommitRefusedError,
    CoordinatorLoadingError,
    DisconnectedError,
    FencedMemberError,
    GroupLimitError,
    InvalidRequestError,
    RayqError,
    TimeoutError,
    UnknownAssignorError,
    UnknownMemberError,
    UnknownServerError,
)
from rayq.messages import GroupHeartbeatResponse, TopicPartitionId
from rayq.records import TopicPartition

SESSION_S, INTERVAL_S, POLL_LIMIT_S = 6.0, 2.0, 60.0
A, B, C = (TopicPartition("t", number) for number in range(3))
POLLING, NOT_SINCE_0 = Polls(is_polling=True, since_s=0.0), Polls(is_polling=False, since_s=0.0)


def config(**given: Any) -> ConsumerConfig:
    return ConsumerConfig(
        group_session_timeout_ms=int(SESSION_S * 1000),
        group_heartbeat_interval_ms=int(INTERVAL_S * 1000),
        max_poll_interval_ms=int(POLL_LIMIT_S * 1000),
        **given,
    )


def answer(epoch: int, *places: TopicPartition, topic_id: str = "id") -> GroupHeartbeatResponse:
    return GroupHeartbeatResponse(
        epoch, [TopicPartitionId(place.topic, topic_id, place.partition) for place in places]
    )


class Member:
    """A state and the partitions that its consumer has taken; the test acts for the loop."""

    def __init__(self, **given: Any) -> None:
        self.state = MemberState(config(**given), Interest(("t",), None), 0.0)
        self.owned = OwnedPartitions(self.state)

    def beat(self, now_s: float, response: GroupHeartbeatResponse | RayqError) -> float:
        """Sends the next heartbeat and hears this answer."""
        beat = self.state.next_heartbeat(now_s)
        assert beat is not None
        self.state.sent(now_s)
        if isinstance(response, RayqError):
            return self.state.failed(beat, response, now_s)
        partitions = self.state.answered(beat, response)
        if partitions is not None:
            self.state.granted(beat, partitions)
        return 0.0

    def poll(self) -> tuple[set[TopicPartition], set[TopicPartition]]:
        """Gives up and takes partitions. Returns both sets."""
        gone = dict(self.owned.revoked())
        self.owned.gave_up(gone)
        return set(gone), set(self.owned.take_added())


def joined(*places: TopicPartition, **given: Any) -> Member:
    """A member in epoch 1 that has taken these partitions, and heard an answer at 0 s."""
    member = Member(**given)
    member.beat(0.0, answer(1, *places))
    member.poll()
    assert set(member.owned.held) == set(places) and not member.owned.are_behind
    return member


# --- heartbeats -----------------------------------------------------------------------------------


def test_a_member_joins_and_then_lets_its_heartbeats_be_held() -> None:
    member = Member()
    assert member.state.next_heartbeat(0.0) == Heartbeat(0, 0, JOIN_TIMEOUT_S)
    member.beat(0.0, answer(3, A))
    assert member.state.next_heartbeat(1.0) == Heartbeat(3, 0, SESSION_S - 1.0, wait_ms=2000)
    assert member.state.next_heartbeat(100.0) == Heartbeat(3, 0, 0.001, wait_ms=2000)


def test_a_session_counts_from_when_the_answered_heartbeat_was_sent_last() -> None:
    member = joined(A)
    beat = member.state.next_heartbeat(1.0)
    assert beat is not None
    member.state.sent(1.0)
    member.state.sent(3.0)  # the same heartbeat, tried again
    member.state.answered(beat, answer(1, A))
    assert not member.state.is_overdue(3.0 + SESSION_S - 0.1, POLLING)
    assert member.state.is_overdue(3.0 + SESSION_S, POLLING)


def test_an_answer_that_changes_nothing_asks_for_nothing() -> None:
    member = joined(A)
    grant = member.state.grant
    beat = member.state.next_heartbeat(1.0)
    assert beat is not None and member.state.answered(beat, answer(2, A)) is None
    assert member.state.epoch == 2
    assert member.state.grant is grant and not member.owned.are_behind


def test_an_answer_to_a_heartbeat_of_before_a_loss_is_not_followed() -> None:
    member = joined(A)
    before = member.state.next_heartbeat(1.0)
    assert before is not None
    member.state.time_passed(SESSION_S, POLLING)
    assert member.state.answered(before, answer(2, A, B)) is None
    member.state.granted(before, {B: "id"})
    assert (member.state.epoch, member.state.grant) == (0, (1, {}))
    assert member.state.failed(before, UnknownMemberError("who?"), 7.0) == PAUSE_S
    assert member.state.grant.generation == 1, "it is lost once"


OUT = "the coordinator took this member out of the group: "


@pytest.mark.parametrize(
    ("instance", "error", "generation", "fails"),
    [
        (None, UnknownMemberError("e"), 1, False),
        (None, FencedMemberError("e"), 1, False),
        ("me", UnknownMemberError("e"), 1, False),
        ("me", FencedMemberError("e"), 1, True),
        (None, UnknownAssignorError("e"), 1, True),
        (None, InvalidRequestError("e"), 1, True),
        (None, GroupLimitError("e"), 1, True),
        (None, UnknownServerError("e"), 1, True),
        (None, TimeoutError("e"), 0, False),
        (None, CoordinatorLoadingError("e"), 0, False),
        ("me", DisconnectedError("e"), 0, False),
    ],
)
def test_what_an_error_does_to_a_member_is_said_by_its_flags(
    instance: str | None, error: RayqError, generation: int, fails: bool
) -> None:
    member = joined(A, group_instance_id=instance)
    pause_s = member.beat(1.0, error)
    state = member.state
    assert state.grant.generation == generation
    assert state.failure is (error if fails else None)
    if generation == 0:
        assert (state.epoch, pause_s) == (1, LAST_PAUSE_S)
        assert set(member.owned.listed) == {A}
        return
    assert pause_s == PAUSE_S and state.epoch == 0 and not member.owned.listed
    assert member.owned.take_loss() == Loss({A: "id"}, is_late=False)
    assert state.loss_reason == ("e" if fails else f"{OUT}e")
    beat = state.next_heartbeat(1.0)
    assert beat == (None if fails else Heartbeat(0, 1, JOIN_TIMEOUT_S))


@pytest.mark.parametrize(
    ("now_s", "pause_s"),
    [(1.0, LAST_PAUSE_S), (SESSION_S - 0.04, 0.04), (SESSION_S, 0.0), (9.0, 0.0)],
)
def test_tries_that_fail_become_more_frequent_at_the_end_of_a_session(
    now_s: float, pause_s: float
) -> None:
    assert joined(A).beat(now_s, TimeoutError("e")) == pytest.approx(pause_s)


def test_a_join_without_an_answer_is_tried_again_forever() -> None:
    member = Member()
    for now_s in range(0, 1000, 30):
        assert member.beat(float(now_s), TimeoutError("nobody is there")) == PAUSE_S
        member.state.time_passed(float(now_s), POLLING)
    assert member.state.grant == (0, {}) and member.state.failure is None


def test_a_member_that_is_denied_has_its_session_to_be_allowed_again() -> None:
    member, denied = joined(A), AuthorizationError("you may not")
    state = member.state
    assert member.beat(1.0, denied) == DENIED_PAUSE_S
    assert state.failure is denied and set(member.owned.listed) == {A}
    member.beat(2.0, answer(1, A))
    assert state.failure is None and state.grant == (0, {A: "id"})
    assert member.beat(SESSION_S + 1.9, denied) == pytest.approx(0.1)
    state.time_passed(SESSION_S + 2.1, POLLING)
    assert state.grant == (1, {}) and state.loss_reason.endswith("you may not")
    assert member.beat(SESSION_S + 2.2, denied) == DENIED_PAUSE_S
    assert state.next_heartbeat(SESSION_S + 3.0) == Heartbeat(0, 1, JOIN_TIMEOUT_S)


def test_subscribing_to_something_else_ends_a_failure() -> None:
    member = Member()
    member.beat(0.0, UnknownAssignorError("e"))
    assert member.state.next_heartbeat(1.0) is None
    member.state.subscribed(Interest(("u",), "v.*"))
    assert member.state.failure is None
    assert member.state.next_heartbeat(1.0) == Heartbeat(0, 1, JOIN_TIMEOUT_S)


# --- commits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("instance", "error", "is_lost"),
    [
        (None, UnknownMemberError("e"), True),
        (None, FencedMemberError("e"), False),
        ("me", UnknownMemberError("e"), False),
        ("me", FencedMemberError("e"), False),
    ],
)
def test_of_commits_only_an_unknown_dynamic_member_takes_no_for_an_answer(
    instance: str | None, error: RayqError, is_lost: bool
) -> None:
    member = joined(A, group_instance_id=instance)
    member.state.commit_failed(error, 0)
    assert member.state.grant.generation == int(is_lost)
    member.state.commit_failed(error, 0)
    assert member.state.grant.generation == int(is_lost), "the second is about what is lost already"
    assert member.state.failure is None


def test_only_two_errors_end_a_membership() -> None:
    assert UnknownMemberError.ends_membership and FencedMemberError.ends_membership
    assert not CommitRefusedError.ends_membership and not TimeoutError.ends_membership


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("polls", "now_s", "generation", "is_away"),
    [
        (POLLING, 5.9, 0, False),
        (POLLING, SESSION_S, 1, False),
        (NOT_SINCE_0, 5.9, 0, False),
        (NOT_SINCE_0, SESSION_S, 1, False),
        (NOT_SINCE_0, POLL_LIMIT_S + 0.1, 1, True),
        (POLLING, POLL_LIMIT_S + 0.1, 1, False),
    ],
)
def test_what_time_takes_from_a_member(
    polls: Polls, now_s: float, generation: int, is_away: bool
) -> None:
    member = joined(A)
    assert member.state.is_overdue(now_s, polls) == bool(generation)
    member.state.time_passed(now_s, polls)
    assert member.state.grant.generation == generation
    assert member.state.is_away == is_away
    assert member.owned.take_loss() == (Loss({A: "id"}, is_away) if generation else None)
    assert not member.state.is_overdue(now_s, polls), "it is taken once"


@pytest.mark.parametrize(
    ("polls", "now_s", "left_s"),
    [(NOT_SINCE_0, 10.0, 50.0), (NOT_SINCE_0, 70.0, -10.0), (POLLING, 70.0, POLL_LIMIT_S)],
)
def test_how_long_a_consumer_may_do_without_a_poll(
    polls: Polls, now_s: float, left_s: float
) -> None:
    assert joined(A).state.poll_time_left_s(now_s, polls) == pytest.approx(left_s)


def test_who_polls_too_late_says_goodbye_and_joins_again_when_it_polls() -> None:
    member = joined(A, group_instance_id="me")
    state = member.state
    state.time_passed(POLL_LIMIT_S + 1, NOT_SINCE_0)
    goodbye = state.next_heartbeat(61.0)
    assert goodbye == Heartbeat(-1, 1, SESSION_S, reason=POLLED_TOO_LATE), "also a static member"
    state.answered(goodbye, answer(0))
    assert state.next_heartbeat(61.0) is None and state.goodbye() is None
    assert state.poll_time_left_s(200.0, NOT_SINCE_0) == POLL_LIMIT_S
    state.came_back()
    assert state.next_heartbeat(200.0) == Heartbeat(0, 1, JOIN_TIMEOUT_S)


@pytest.mark.parametrize("error", [UnknownMemberError("e"), TimeoutError("e")])
def test_a_goodbye_that_fails_is_not_said_again(error: RayqError) -> None:
    member = joined(A)
    member.state.time_passed(POLL_LIMIT_S + 1, NOT_SINCE_0)
    member.beat(61.0, error)
    assert member.state.next_heartbeat(61.0) is None
    assert member.state.failure is None and member.state.grant.generation == 1


def test_two_losses_between_two_polls_are_one_and_late_if_either_was() -> None:
    member = joined(A)
    member.beat(1.0, UnknownMemberError("e"))
    member.state.time_passed(POLL_LIMIT_S + 1, NOT_SINCE_0)
    assert member.owned.take_loss() == Loss({A: "id"}, is_late=True)
    assert member.owned.take_loss() is None
    member.state.came_back()
    member.beat(62.0, UnknownMemberError("e"))
    assert member.owned.take_loss() == Loss({}, is_late=False)


# --- leaving --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("instance", "epoch"), [(None, -1), ("me", -2)], ids=["dynamic", "static"]
)
def test_leaving(instance: str | None, epoch: int) -> None:
    assert Member(group_instance_id=instance).state.goodbye() is None, "nobody knows it"
    member = joined(A, group_instance_id=instance)
    assert member.state.goodbye() == Heartbeat(
        epoch, 0, SESSION_S, reason="the consumer was closed"
    )
    member.beat(1.0, FencedMemberError("another is 'me'"))
    goodbye = member.state.goodbye()
    assert goodbye is None if instance else goodbye is not None, "the instance is another's now"


def test_a_join_that_was_sent_and_not_answered_is_taken_back() -> None:
    member = Member()
    member.state.sent(0.0)
    assert member.state.goodbye() is not None


# --- partitions -----------------------------------------------------------------------------------


def test_a_partition_is_listed_until_the_consumer_has_given_it_up() -> None:
    member = joined(A, B)
    member.beat(1.0, answer(2, A))
    assert member.owned.are_behind
    assert set(member.owned.listed) == {A, B}
    assert member.owned.revoked() == {B: "id"}
    assert set(member.owned.listed) == {A, B}, "its positions are being committed"
    member.owned.gave_up({B: "id"})
    assert set(member.owned.listed) == {A}
    assert member.owned.take_added() == {} and not member.owned.are_behind


def test_a_partition_that_is_granted_is_listed_before_the_consumer_takes_it() -> None:
    member = joined(A)
    member.beat(1.0, answer(2, A, B))
    assert set(member.owned.listed) == {A, B} and set(member.owned.held) == {A}
    assert member.owned.take_added() == {B: "id"}
    assert set(member.owned.held) == {A, B} and not member.owned.are_behind


def test_a_topic_made_again_is_given_up_before_it_is_taken() -> None:
    member = joined(A)
    member.beat(1.0, answer(2, A, topic_id="new"))
    assert member.owned.take_added() == {} and member.owned.are_behind
    assert member.owned.held == {A: "id"}
    assert member.poll() == ({A}, {A})
    assert member.owned.held == {A: "new"} and not member.owned.are_behind


def test_nothing_is_revoked_or_taken_before_a_loss_is_told() -> None:
    member = joined(A)
    member.beat(1.0, UnknownMemberError("e"))
    member.beat(2.0, answer(5, B))
    assert set(member.owned.listed) == {B}, "what was lost is not listed"
    assert member.poll() == (set(), set()) and member.owned.are_behind
    assert member.owned.take_loss() == Loss({A: "id"}, is_late=False)
    assert member.poll() == (set(), {B}) and not member.owned.are_behind


def test_what_is_taken_while_the_grant_changes_is_put_back() -> None:
    """The loop runs in another thread, and may act between any two lines."""

    class Interrupted(OwnedPartitions):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "_held" and between:
                between.pop()()

    between: list[Any] = []
    member = joined(A)
    member.owned = Interrupted(member.state)
    member.owned.take_added()
    member.beat(1.0, answer(2, A, B))
    between.append(lambda: member.beat(2.0, answer(3, A)))
    assert member.owned.take_added() == {}
    assert set(member.owned.held) == {A} and member.owned.are_behind
    assert member.poll() == (set(), set()) and not member.owned.are_behind


@pytest.mark.parametrize("seed", range(50))
def test_two_members_never_read_one_partition(seed: int) -> None:
    """The coordinator gives a partition to another member only once a heartbeat leaves it out."""
    rng = random.Random(seed)
    members = [Member(), Member()]
    given: list[set[TopicPartition]] = [set(), set()]
    reading: list[set[TopicPartition]] = [set(), set()]
    epoch = 0
    for now_s in range(200):
        one = rng.randrange(2)
        member, other = members[one], given[1 - one]
        match rng.randrange(4):
            case 0:  # a heartbeat and its answer, which grants free partitions
                listed = set(member.owned.listed) if member.state.epoch else set()
                wanted = {place for place in (A, B, C) if rng.random() < 0.5} - other
                given[one] = listed | wanted
                epoch += 1
                member.beat(float(now_s), answer(epoch, *wanted))
            case 1 if rng.random() < 0.2:  # the coordinator has forgotten the member, and says so
                member.beat(float(now_s), UnknownMemberError("who?"))
                given[one] = reading[one] = set()
            case _:
                if (loss := member.owned.take_loss()) is not None:
                    reading[one] = reading[one] - set(loss.partitions)
                gone, added = member.poll()
                reading[one] = (reading[one] - gone) | added
        assert not reading[0] & reading[1]
        assert reading[one] <= set(member.owned.held)
