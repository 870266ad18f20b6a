"""The leader's view: high watermark, in-sync set, proposals (docs/protocol.md, rules 6 to 8)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayq.core.partition.state import Isr, PartitionState
from rayq.errors import FencedEpochError

ALL = [(1, "1a"), (2, "2a"), (3, "3a")]


def leader(*, end: int = 10, flushed: int = 10, hw: int = 0, isr: object = None) -> PartitionState:
    state = PartitionState(
        broker=1, incarnation="1a", leader_epoch=5, epoch_start_offset=end, min_insync=2,
        lag_time_max_s=10.0, end_offset=end, flushed_offset=flushed, high_watermark=hw,
        started_s=0.0,
    )
    state.committed(7, ALL if isr is None else isr, ALL, 2)  # type: ignore[arg-type]
    return state


def fetched(state: PartitionState, broker: int, flushed: int, now_s: float = 1.0) -> None:
    state.follower_fetched(
        broker, f"{broker}a", flushed=flushed, log_start_offset=0, now_s=now_s
    )


def test_the_high_watermark_waits_for_every_in_sync_replicas_disk() -> None:
    state = leader()
    assert state.high_watermark == 0
    fetched(state, 2, 10)
    assert state.high_watermark == 0
    fetched(state, 3, 9)
    assert state.high_watermark == 9
    state.follower_flushed(3, "3a", flushed=10, now_s=1.0)
    assert state.high_watermark == 10


def test_a_follower_that_has_nothing_on_disk_holds_the_high_watermark_at_0() -> None:
    state = leader()
    fetched(state, 2, 10)
    fetched(state, 3, 0)
    assert state.high_watermark == 0
    state.follower_flushed(3, "3a", flushed=1, now_s=1.0)
    assert state.high_watermark == 1


def test_a_notice_of_a_flush_counts_for_nothing_before_the_followers_first_fetch() -> None:
    # Only its fetch says that its log agrees with the leader's: what it flushed may go again.
    state = leader()
    fetched(state, 2, 10)
    state.follower_flushed(3, "3a", flushed=10, now_s=1.0)
    fetched(state, 3, 5)
    assert state.high_watermark == 5


def test_the_high_watermark_waits_for_a_member_without_a_process() -> None:
    state = leader()
    state.committed(8, ALL, [*ALL[:2], (3, None)], 2)
    fetched(state, 2, 10)
    fetched(state, 3, 10)  # It ran when the epoch began.
    assert state.high_watermark == 10
    fresh = PartitionState(
        broker=1, incarnation="1a", leader_epoch=6, epoch_start_offset=0, min_insync=2,
        lag_time_max_s=10.0, end_offset=10, flushed_offset=10, high_watermark=0, started_s=0.0,
    )
    fresh.committed(9, ALL, [*ALL[:2], (3, None)], 2)
    fetched(fresh, 2, 10)
    assert fresh.high_watermark == 0


def test_a_replica_that_moved_away_is_refused() -> None:
    state = leader(isr=ALL[:2])
    fetched(state, 3, 10)
    state.committed(8, ALL[:2], ALL[:2], 2)
    with pytest.raises(FencedEpochError):
        fetched(state, 3, 10)
    assert state.proposal(1.0) is None


def test_the_leaders_own_disk_counts_too() -> None:
    state = leader(flushed=4)
    fetched(state, 2, 10)
    fetched(state, 3, 10)
    assert state.high_watermark == 4
    state.flushed(10)
    assert state.high_watermark == 10


def test_nothing_is_committed_while_fewer_than_min_insync_are_in_sync() -> None:
    state = leader(isr=[(1, "1a")])
    state.flushed(10)
    assert state.high_watermark == 0 and state.is_under_min_isr


def test_a_follower_joins_only_with_the_epochs_start_and_the_high_watermark_on_disk() -> None:
    state = leader(isr=ALL[:2])
    fetched(state, 2, 10)
    assert state.high_watermark == 10
    fetched(state, 3, 9)
    assert state.proposal(1.0) is None
    fetched(state, 3, 10)
    assert state.proposal(1.0) == tuple(ALL)


def test_the_high_watermark_waits_for_a_proposed_member_until_the_proposal_is_decided() -> None:
    state = leader(isr=ALL[:2])
    fetched(state, 2, 10)
    fetched(state, 3, 10)
    proposed = state.proposal(1.0)
    assert proposed is not None
    state.appended(20, now_s=1.0)
    state.flushed(20)
    fetched(state, 2, 20)
    assert state.high_watermark == 10
    state.proposal_refused(proposed, 7)
    assert state.high_watermark == 20


def test_a_lost_answer_leaves_the_proposal_undecided_until_a_newer_partition_epoch() -> None:
    state = leader(isr=ALL[:2])
    fetched(state, 2, 10)
    fetched(state, 3, 10)
    proposed = state.proposal(1.0)
    assert proposed is not None
    state.proposal_unknown(proposed, 7)
    state.appended(20, now_s=1.0)
    state.flushed(20)
    fetched(state, 2, 20)
    again = state.proposal(1.5)
    assert again == proposed
    state.proposal_refused(again, 7)
    assert state.high_watermark == 10  # The first copy may still arrive.
    state.committed(8, ALL[:2], ALL, 2)
    assert state.high_watermark == 20


def test_a_refusal_from_before_does_not_decide_the_same_proposal_made_again() -> None:
    state = leader(isr=ALL[:2])
    fetched(state, 2, 10)
    fetched(state, 3, 10)
    first = state.proposal(1.0)
    assert first == tuple(ALL)
    state.committed(8, ALL[:2], ALL, 2)  # Another part of the partition was changed.
    assert state.proposal(1.0) == first
    state.proposal_refused(first, 7)
    assert state.proposal(1.0) is None  # The second one is still under way.
    state.appended(12, now_s=1.0)
    state.flushed(12)
    state.follower_flushed(2, "2a", flushed=12, now_s=1.0)
    assert state.high_watermark == 10
    state.proposal_unknown(first, 7)
    assert state.proposal(1.0) is None
    state.proposal_refused(first, 8)
    assert state.high_watermark == 12


def test_one_proposal_is_in_flight_at_a_time() -> None:
    state = leader(isr=ALL[:2])
    fetched(state, 2, 10)
    fetched(state, 3, 10)
    assert state.proposal(1.0) is not None
    assert state.proposal(1.0) is None


def test_a_follower_that_is_not_caught_up_for_too_long_is_proposed_out() -> None:
    state = leader()
    fetched(state, 2, 10, 1.0)
    fetched(state, 3, 10, 1.0)
    state.appended(20, now_s=1.0)
    fetched(state, 2, 20, 9.0)
    fetched(state, 3, 12, 9.0)
    assert state.proposal(10.5) is None
    assert state.proposal(11.5) == tuple(ALL[:2])


def test_a_member_that_has_all_stays_however_long_ago_it_was_heard() -> None:
    state = leader()
    fetched(state, 2, 10, 1.0)
    fetched(state, 3, 10, 1.0)
    assert state.proposal(100.0) is None  # Their fetches wait here.
    state.appended(20, now_s=100.0)
    assert state.proposal(109.0) is None
    fetched(state, 2, 20, 110.5)
    assert state.proposal(110.5) == tuple(ALL[:2])


def test_a_member_that_was_never_heard_in_this_epoch_does_not_count_as_having_all() -> None:
    state = leader(end=0, hw=0)
    fetched(state, 2, 0, 1.0)
    assert state.proposal(9.0) is None
    assert state.proposal(10.5) == tuple(ALL[:2])


def test_a_follower_that_keeps_up_with_a_moving_end_stays() -> None:
    state = leader()
    for second in range(1, 30):
        state.appended(10 * second, now_s=1.0)
        fetched(state, 2, 10 * (second - 1), float(second))
        fetched(state, 3, 10 * (second - 1), float(second))
        assert state.proposal(float(second)) is None


def test_a_process_that_is_not_the_registered_one_is_refused() -> None:
    state = leader()
    state.check_process(2, "2a")
    with pytest.raises(FencedEpochError):
        state.check_process(2, "2b")
    with pytest.raises(FencedEpochError):
        state.check_process(4, "4a")
    with pytest.raises(FencedEpochError):
        state.follower_fetched(2, "2b", flushed=10, log_start_offset=0, now_s=1.0)


def test_a_new_process_of_a_member_is_not_counted_for_the_old_one() -> None:
    state = leader()
    fetched(state, 2, 10)
    fetched(state, 3, 10)
    state.appended(20, now_s=1.0)
    state.flushed(20)
    state.committed(7, ALL, [(1, "1a"), (2, "2b"), (3, "3a")], 2)
    fetched(state, 3, 20)
    state.follower_fetched(2, "2b", flushed=20, log_start_offset=0, now_s=1.0)
    assert state.high_watermark == 10  # The ISR still names 2a.
    state.committed(8, [(1, "1a"), (3, "3a")], [(1, "1a"), (2, "2b"), (3, "3a")], 2)
    assert state.high_watermark == 20


def test_a_new_leader_may_serve_once_its_high_watermark_reached_its_epochs_start() -> None:
    state = leader(hw=6)
    assert not state.may_serve
    fetched(state, 2, 10)
    fetched(state, 3, 10)
    assert state.may_serve


def starts_at(state: PartitionState, broker: int, log_start_offset: int) -> None:
    state.follower_fetched(
        broker, f"{broker}a", flushed=10, log_start_offset=log_start_offset, now_s=1.0
    )


def test_a_log_start_is_committed_once_all_in_sync_followers_have_it() -> None:
    state = leader()
    starts_at(state, 2, 4)
    assert not state.is_log_start_committed(4)  # The third replica was not heard yet.
    starts_at(state, 3, 0)
    assert not state.is_log_start_committed(4)
    starts_at(state, 3, 4)
    assert state.is_log_start_committed(4) and not state.is_log_start_committed(5)


def test_nobody_is_told_of_a_log_start_that_only_the_leader_has() -> None:
    state = leader()
    starts_at(state, 2, 4)
    starts_at(state, 3, 6)
    assert [state.committed_log_start(own) for own in (3, 4, 9)] == [3, 4, 4]


def test_a_log_start_is_not_committed_by_fewer_than_min_insync() -> None:
    state = leader(isr=[(1, "1a")])  # A replica that left since may be elected.
    starts_at(state, 2, 4)
    assert not state.is_log_start_committed(4)


def test_a_log_start_waits_for_a_follower_that_may_be_joining() -> None:
    state = leader(isr=ALL[:2])
    starts_at(state, 2, 0)
    starts_at(state, 3, 0)
    assert state.proposal(1.0) == tuple(ALL)
    starts_at(state, 2, 4)
    assert not state.is_log_start_committed(4)
    starts_at(state, 3, 4)
    assert state.is_log_start_committed(4)


def test_a_follower_joins_only_with_the_leaders_log_start() -> None:
    state = leader(isr=ALL[:2])
    state.log_start_offset = 4
    starts_at(state, 2, 4)
    starts_at(state, 3, 0)
    assert state.proposal(1.0) is None
    starts_at(state, 3, 4)
    assert state.proposal(1.0) == tuple(ALL)


def test_a_fetch_that_was_overtaken_by_a_flush_notice_does_not_take_it_back() -> None:
    # This was seen as 500 ms stalls: notice and fetch arrive in one read, and the notice is handled
    # first.
    state = leader()
    fetched(state, 2, 10)
    fetched(state, 3, 10)
    state.appended(20, now_s=1.0)
    state.flushed(20)
    fetched(state, 2, 20)
    state.follower_flushed(3, "3a", flushed=20, now_s=1.0)
    fetched(state, 3, 10)
    state.appended(30, now_s=1.0)
    state.flushed(30)
    fetched(state, 2, 30)
    assert state.high_watermark == 20


def test_a_follower_that_went_silent_does_not_join_again_until_it_is_heard() -> None:
    state = leader(isr=ALL[:2])
    fetched(state, 2, 10, now_s=11.0)
    fetched(state, 3, 10, now_s=1.0)
    assert state.proposal(11.5) is None
    fetched(state, 3, 10, now_s=12.0)
    assert state.proposal(12.0) == tuple(ALL)


def test_a_proposal_goes_on_top_of_whatever_partition_epoch_was_seen_first() -> None:
    state = PartitionState(
        broker=1, incarnation="1a", leader_epoch=1, epoch_start_offset=0, min_insync=1,
        lag_time_max_s=10.0, end_offset=0, flushed_offset=0, high_watermark=0, started_s=0.0,
    )
    assert state.proposal(0.0) is None
    state.committed(0, ALL, ALL[:1], 1)
    assert state.proposal(0.0) == tuple(ALL[:1])


def test_metadata_that_is_known_already_decides_no_proposal() -> None:
    state = leader(isr=ALL[:2])
    fetched(state, 2, 10)
    fetched(state, 3, 10)
    assert state.proposal(1.0) == tuple(ALL)
    for epoch, isr in ((7, ALL[:2]), (6, ALL[:1])):
        state.committed(epoch, isr, ALL, 2)
        assert (state.partition_epoch, state.isr) == (7, tuple(ALL[:2]))
        assert state.undecided == [tuple(ALL)]
        assert state.proposal(1.0) is None  # It is under way.


def test_a_proposal_that_was_refused_is_made_again() -> None:
    state = leader(isr=ALL[:2])
    fetched(state, 2, 10)
    fetched(state, 3, 10)
    for _ in range(2):
        assert state.proposal(1.0) == tuple(ALL)
        for _ in range(2):  # An answer that came twice says no more than once.
            state.proposal_refused(tuple(ALL), 7)
        assert state.undecided == []


def test_a_follower_that_was_never_heard_in_this_epoch_does_not_join_even_an_empty_log() -> None:
    state = leader(end=0, isr=ALL[:2])
    fetched(state, 2, 0)
    assert state.proposal(1.0) is None
    fetched(state, 3, 0)
    assert state.proposal(1.0) == tuple(ALL)


def test_what_was_unknown_of_an_older_partition_epoch_says_nothing_of_the_same_set_now() -> None:
    state = leader(isr=ALL[:2])
    fetched(state, 2, 10)
    fetched(state, 3, 10)
    assert state.proposal(1.0) == tuple(ALL)
    state.proposal_unknown(tuple(ALL), 7)
    state.committed(8, ALL[:2], ALL, 2)
    assert state.proposal(1.0) == tuple(ALL)
    state.proposal_refused(tuple(ALL), 8)
    assert state.undecided == []


def test_a_set_of_unknown_fate_that_nobody_wants_now_is_settled_by_what_is_committed() -> None:
    state = leader(isr=ALL[:2])
    fetched(state, 2, 10)
    fetched(state, 3, 10)
    assert state.proposal(1.0) == tuple(ALL)
    state.proposal_unknown(tuple(ALL), 7)
    state.appended(20, now_s=1.0)
    fetched(state, 2, 20, 12.0)
    # The third lags now. What is committed is proposed once more, so that a newer epoch comes.
    assert state.proposal(12.0) == tuple(ALL[:2])


@pytest.mark.parametrize("min_insync, high_watermark", [(1, 10), (2, 10), (3, 0)])
def test_how_many_have_to_be_in_sync_may_change(min_insync: int, high_watermark: int) -> None:
    state = leader(isr=ALL[:2])
    state.committed(7, ALL[:2], ALL, min_insync)
    fetched(state, 2, 10)
    assert state.high_watermark == high_watermark
    assert state.is_under_min_isr is (min_insync == 3)


def lags(state: PartitionState, now_s: float) -> list[int]:
    """The members that a proposal leaves out now."""
    proposed = state.proposal(now_s)
    return [] if proposed is None else [one[0] for one in state.isr if one not in proposed]


def test_a_member_leaves_when_it_has_lacked_something_for_longer_than_it_may() -> None:
    state = leader()
    fetched(state, 2, 10, 1.0)
    fetched(state, 3, 10, 1.0)
    state.appended(20, now_s=4.0)
    fetched(state, 3, 20, 5.0)
    assert lags(state, 14.0) == []
    assert lags(state, 14.25) == [2]


def test_a_follower_that_fetches_and_comes_no_closer_leaves() -> None:
    state = leader()
    fetched(state, 2, 10, 1.0)
    fetched(state, 3, 10, 1.0)
    state.appended(20, now_s=1.0)
    for now_s in (2.0, 5.0, 8.0, 11.0):
        fetched(state, 2, 20, now_s)
        fetched(state, 3, 19, now_s)
    assert lags(state, 11.5) == [3]


def test_a_follower_was_caught_up_when_it_fetched_what_it_has_flushed_since() -> None:
    state = leader()
    fetched(state, 2, 10, 1.0)
    fetched(state, 3, 10, 1.0)
    state.appended(20, now_s=1.0)
    fetched(state, 3, 12, 8.0)  # The log ended at 20 then.
    state.appended(30, now_s=9.0)
    fetched(state, 2, 30, 10.0)
    fetched(state, 3, 20, 10.0)
    assert lags(state, 18.0) == []
    assert lags(state, 18.25) == [3]


def test_a_follower_that_lacks_something_is_not_excused_by_what_is_appended() -> None:
    state = leader()
    fetched(state, 2, 10, 1.0)
    fetched(state, 3, 10, 1.0)
    for now_s in range(1, 12):
        state.appended(10 + now_s, now_s=float(now_s))
        fetched(state, 2, 10 + now_s, float(now_s))
    assert lags(state, 11.0) == []
    assert lags(state, 11.25) == [3]


@pytest.mark.parametrize("flushed, joins", [(9, False), (10, True)])
def test_a_follower_that_tells_that_it_has_flushed_all_is_caught_up(
    flushed: int, joins: bool
) -> None:
    state = leader(isr=ALL[:2])
    fetched(state, 2, 10, 1.0)
    fetched(state, 3, 5, 1.0)
    state.follower_flushed(3, "3a", flushed=flushed, now_s=20.0)
    assert (state.proposal(25.0) == tuple(ALL)) is joins


@pytest.mark.parametrize("flushed, left", [(19, [3]), (20, [])])
def test_a_member_that_tells_that_it_has_flushed_less_still_lags(
    flushed: int, left: list[int]
) -> None:
    state = leader()
    fetched(state, 3, 10, 1.0)
    state.appended(20, now_s=1.0)
    fetched(state, 2, 20, 11.0)
    state.follower_flushed(3, "3a", flushed=flushed, now_s=11.0)
    assert lags(state, 11.5) == left


def test_a_notice_of_a_flush_from_a_process_that_is_not_the_registered_one_is_refused() -> None:
    state = leader()
    fetched(state, 2, 10)
    fetched(state, 3, 9)
    with pytest.raises(FencedEpochError):
        state.follower_flushed(3, "3b", flushed=10, now_s=1.0)
    assert state.high_watermark == 9


@pytest.mark.parametrize("flushed, serves", [(5, False), (6, True), (7, True)])
def test_readers_are_answered_from_the_epochs_start_on(flushed: int, serves: bool) -> None:
    state = PartitionState(
        broker=1, incarnation="1a", leader_epoch=5, epoch_start_offset=6, min_insync=2,
        lag_time_max_s=10.0, end_offset=10, flushed_offset=10, high_watermark=2, started_s=0.0,
    )
    state.committed(7, ALL[:2], ALL, 2)
    fetched(state, 2, flushed)
    assert (state.high_watermark, state.may_serve) == (flushed, serves)


@pytest.mark.parametrize("start, high_watermark, flushed, joins", [
    (6, 8, 7, False), (6, 8, 8, True), (8, 6, 7, False), (8, 6, 8, True),
])  # fmt: skip
def test_a_follower_joins_with_both_on_disk_whichever_is_further(
    start: int, high_watermark: int, flushed: int, joins: bool
) -> None:
    state = PartitionState(
        broker=1, incarnation="1a", leader_epoch=5, epoch_start_offset=start, min_insync=2,
        lag_time_max_s=10.0, end_offset=20, flushed_offset=20, high_watermark=high_watermark,
        started_s=0.0,
    )
    state.committed(7, ALL[:2], ALL, 2)
    fetched(state, 3, flushed)
    assert (state.proposal(1.0) == tuple(ALL)) is joins


class Rule6:
    """The high watermark as rule 6 of docs/protocol.md says it, from a list of all that came.

    `copies` are the proposals whose fate is unknown, each as often as it was sent."""

    def __init__(self) -> None:
        self.epoch = 7
        self.isr: Isr = tuple(ALL)
        self.min_insync = 2
        self.registered = dict(ALL)
        self.flushed: dict[tuple[int, str], int] = {}
        self.leaders = 10
        self.copies: list[Isr] = []
        self.in_flight: Isr | None = None
        self.high_watermark = 0

    def disk_of(self, member: tuple[int, str]) -> int:
        if member[0] == 1:
            return self.leaders
        is_registered = self.registered.get(member[0]) == member[1]
        return self.flushed.get(member, 0) if is_registered else 0

    def advance(self) -> None:
        if len(self.isr) >= self.min_insync:
            members = {member for isr in (self.isr, *self.copies) for member in isr}
            least = min(self.disk_of(one) for one in members)
            self.high_watermark = max(self.high_watermark, least)


STEPS = st.lists(
    st.tuples(
        st.sampled_from([
            "append", "flush", "fetch", "fetch", "notice", "propose", "propose", "refuse", "lose",
            "commit", "accept", "restart", "late", "again",
        ]),
        st.integers(2, 3),
        st.integers(0, 6),
    ),
    max_size=40,
)  # fmt: skip


@settings(max_examples=50)
@given(STEPS)
def test_the_high_watermark_is_what_all_that_are_or_may_be_in_sync_have_on_disk(
    steps: list[tuple[str, int, int]],
) -> None:
    state, rule = leader(), Rule6()
    now_s = 0.0

    def commit(epoch: int, isr: Isr) -> None:
        state.committed(epoch, isr, rule.registered.items(), rule.min_insync)

    def moved_on(isr: Isr) -> None:
        rule.epoch, rule.isr, rule.copies, rule.in_flight = rule.epoch + 1, isr, [], None
        commit(rule.epoch, isr)

    for what, broker, number in steps:
        now_s += number
        member = (broker, rule.registered[broker])
        match what:
            case "append":
                state.appended(state.end_offset + number, now_s=now_s)
            case "flush":
                rule.leaders = min(state.end_offset, rule.leaders + number)
                state.flushed(rule.leaders)
            case "fetch":
                flushed = min(state.end_offset, rule.flushed.get(member, 6) + number - 2)
                rule.flushed[member] = max(flushed, rule.flushed.get(member, 0))
                state.follower_fetched(
                    *member, flushed=flushed, log_start_offset=0, now_s=now_s
                )
            case "notice":
                flushed = min(state.end_offset, rule.flushed.get(member, 0) + number)
                if member in rule.flushed:
                    rule.flushed[member] = flushed
                state.follower_flushed(*member, flushed=flushed, now_s=now_s)
            case "propose":
                proposed = state.proposal(now_s)
                assert rule.in_flight is None or proposed is None
                if proposed is not None:
                    assert (1, "1a") in proposed and proposed == tuple(sorted(proposed))
                    rule.in_flight = proposed
                    rule.copies.append(proposed)
            case "refuse" if rule.in_flight is not None:
                state.proposal_refused(rule.in_flight, rule.epoch)
                rule.copies.remove(rule.in_flight)
                rule.in_flight = None
            case "lose" if rule.in_flight is not None:
                state.proposal_unknown(rule.in_flight, rule.epoch)
                rule.in_flight = None
            case "accept" if rule.copies:
                moved_on(rule.copies[number % len(rule.copies)])
            case "commit":
                rule.min_insync = 1 + number % 3
                moved_on(rule.isr if number % 2 else tuple(ALL[: 1 + number % 3]))
            case "restart":
                rule.registered[broker] += "b"
                commit(rule.epoch, rule.isr)
            case "late":
                state.proposal_refused(tuple(ALL), rule.epoch - 1)
                state.proposal_unknown(tuple(ALL), rule.epoch - 1)
            case "again":
                commit(rule.epoch - number % 2, tuple(ALL[:1]))
        rule.advance()
        state.validate()
        assert (state.partition_epoch, state.isr) == (rule.epoch, rule.isr)
        assert (state.high_watermark, set(state.undecided)) == (
            rule.high_watermark, set(rule.copies)
        )
