"""The leader's view: high watermark, in-sync set, proposals (docs/protocol.md, rules 6 to 8)."""

from __future__ import annotations

import pytest

from rayq.core.partition_state import PartitionState
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


def test_a_refusal_from_before_does_not_decide_the_same_proposal_made_anew() -> None:
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
