"""Which replica leads: rules 1 and 2 of docs/protocol.md on values, one sentence each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayq.core.cluster.election import (
    as_member,
    elect_preferred,
    elect_unclean,
    missing,
    next_epoch,
    readmit,
    settle,
    with_isr,
)
from rayq.core.cluster.records import Member, PartitionValue, ReplicaRegistered


def process(
    broker: int, incarnation: str = "a", *, last_epoch: int | None = 1, flushed: int = 0,
    directory: str | None = None,
) -> ReplicaRegistered:
    return ReplicaRegistered(
        "t", 0, broker, directory or f"disk-{broker}", f"{broker}{incarnation}", "h", 1,
        last_epoch, flushed,
    )


def running(*processes: ReplicaRegistered) -> dict[int, ReplicaRegistered]:
    return {one.broker: one for one in processes}


def member(broker: int, incarnation: str = "a") -> Member:
    return as_member(process(broker, incarnation))


def led_by(leader: int, isr: list[int], elr: tuple[Member, ...] = ()) -> PartitionValue:
    return PartitionValue(
        (1, 2, 3), tuple(member(one) for one in isr), elr, leader, f"{leader}a", 5, 9
    )


def brokers(members: Iterable[Member]) -> list[int]:
    return sorted(one.broker for one in members)


def test_a_new_partition_is_led_by_its_first_replica_with_all_that_live_in_sync() -> None:
    value = settle(
        PartitionValue((2, 1, 3)),
        running(*(process(broker, last_epoch=None) for broker in (1, 2, 3))),
        min_insync=2, unclean=False,
    )
    assert value is not None
    assert (value.leader, value.leader_epoch, brokers(value.isr)) == (2, 1, [1, 2, 3])
    assert value.leader_incarnation == "2a" and value.partition_epoch > 0


def test_a_live_leader_stays_when_a_follower_dies_and_the_follower_leaves_the_isr() -> None:
    value = settle(
        led_by(1, [1, 2, 3]), running(process(1), process(2)), min_insync=2, unclean=False
    )
    assert value is not None
    assert (value.leader, value.leader_epoch, brokers(value.isr)) == (1, 5, [1, 2])
    assert value.elr == ()


def test_a_dead_leader_is_followed_by_a_live_member_of_the_isr_in_a_new_epoch() -> None:
    value = settle(
        led_by(1, [1, 2, 3]), running(process(2), process(3)), min_insync=2, unclean=False
    )
    assert value is not None
    assert (value.leader, value.leader_epoch, brokers(value.isr)) == (2, 6, [2, 3])


def test_a_replica_outside_isr_and_elr_is_never_elected() -> None:
    value = settle(led_by(1, [1, 2]), running(process(3)), min_insync=2, unclean=False)
    assert value is not None
    assert value.leader is None
    assert brokers(value.isr) == [1, 2]
    assert brokers(missing(value, running(process(3)))) == [1, 2]


def test_the_same_leader_in_a_new_process_gets_a_new_epoch() -> None:
    value = settle(led_by(1, [1]), running(process(1, "b", flushed=7)), min_insync=1, unclean=False)
    assert value is not None
    assert (value.leader, value.leader_incarnation, value.leader_epoch) == (1, "1b", 6)


def test_a_leader_whose_process_is_not_the_member_in_sync_is_elected_again() -> None:
    value = msgspec.structs.replace(led_by(1, [1, 2, 3]), leader_incarnation="1z")
    live = running(process(1), process(2), process(3))
    settled = settle(value, live, min_insync=2, unclean=False)
    assert settled is not None
    assert (settled.leader, settled.leader_incarnation, settled.leader_epoch) == (1, "1a", 6)


def test_members_that_restarted_wait_until_enough_have_reported_and_then_the_longest_log_leads() -> (
    None
):
    value = led_by(1, [1, 2, 3])
    one = settle(value, running(process(2, "b", flushed=10)), min_insync=2, unclean=False)
    assert one is not None and one.leader is None
    two = settle(
        one,
        running(process(2, "b", flushed=10), process(3, "b", flushed=12)),
        min_insync=2,
        unclean=False,
    )
    assert two is not None
    assert (two.leader, brokers(two.isr)) == (3, [3])
    assert brokers(two.elr) == [1, 2]


def test_a_higher_epoch_outweighs_a_longer_log() -> None:
    value = msgspec.structs.replace(
        led_by(1, []), leader=None, leader_incarnation=None, elr=(member(1), member(2))
    )
    elected = settle(
        value,
        running(
            process(1, "b", last_epoch=3, flushed=99), process(2, "b", last_epoch=4, flushed=5)
        ),
        min_insync=2,
        unclean=False,
    )
    assert elected is not None and elected.leader == 2


def test_a_member_of_the_elr_that_never_restarted_leads_before_any_that_did() -> None:
    value = msgspec.structs.replace(
        led_by(1, []), leader=None, leader_incarnation=None, elr=(member(1), member(2), member(3))
    )
    elected = settle(
        value,
        running(process(1, "b", last_epoch=9, flushed=99), process(3)),
        min_insync=2,
        unclean=False,
    )
    assert elected is not None and elected.leader == 3


def test_a_replaced_disk_has_no_vote() -> None:
    value = msgspec.structs.replace(
        led_by(1, []), leader=None, leader_incarnation=None, elr=(member(1), member(2))
    )
    live = running(process(1, "b", directory="new"), process(2, "b", flushed=3))
    assert settle(value, live, min_insync=2, unclean=False) is None
    assert missing(value, live) == [member(1)]


def test_unclean_election_takes_any_live_replica_only_where_the_topic_allows_it() -> None:
    live = running(process(3, flushed=2))
    assert settle(led_by(1, [1, 2]), live, min_insync=2, unclean=False).leader is None  # type: ignore[union-attr]
    value = settle(led_by(1, [1, 2]), live, min_insync=2, unclean=True)
    assert value is not None
    assert (value.leader, value.last_unclean_epoch, value.leader_epoch) == (3, 6, 6)
    assert value.elr == ()


def test_those_who_leave_stay_eligible_while_too_few_are_in_sync() -> None:
    value = settle(led_by(1, [1, 2]), running(process(1)), min_insync=2, unclean=False)
    assert value is not None
    assert (value.leader, brokers(value.isr), brokers(value.elr)) == (1, [1], [2])
    again = with_isr(value, (member(1), member(3)), min_insync=2)
    assert again.elr == ()


def test_a_member_that_returns_with_the_log_it_was_stopped_with_is_in_sync_at_once() -> None:
    stopped = msgspec.structs.replace(member(1), stopped_at=(4, 17))
    value = msgspec.structs.replace(
        led_by(1, []), isr=(stopped,), leader=None, leader_incarnation=None
    )
    back = process(1, "b", last_epoch=4, flushed=17)
    elected = settle(readmit(value, back), running(back), min_insync=1, unclean=False)
    assert elected is not None
    assert (elected.leader, elected.leader_incarnation) == (1, "1b")
    shorter = process(1, "b", last_epoch=4, flushed=16)
    assert readmit(value, shorter) == value


def test_a_leader_that_returns_as_it_was_stopped_leads_only_when_it_is_elected_again() -> None:
    stopped = msgspec.structs.replace(member(1), stopped_at=(1, 7))
    value = msgspec.structs.replace(led_by(1, [1, 2]), isr=(stopped, member(2)))
    returned = process(1, "b", flushed=7)
    value = readmit(value, returned)
    assert value.isr == (as_member(returned), member(2))
    assert (value.leader, value.leader_incarnation, value.leader_epoch) == (None, None, 6)


def test_leadership_moves_to_the_preferred_replica_only_when_it_is_in_sync() -> None:
    moved = elect_preferred(led_by(2, [1, 2]), running(process(1), process(2)))
    assert moved is not None and moved.leader == 1 and moved.leader_epoch == 6
    assert moved.partition_epoch > led_by(2, [1, 2]).partition_epoch
    assert elect_preferred(led_by(2, [2, 3]), {}) is None
    assert elect_preferred(led_by(1, [1, 2]), {}) is None


def test_an_unclean_election_names_its_epoch() -> None:
    value = elect_unclean(led_by(1, [1]), running(process(2, flushed=1), process(3, flushed=4)))
    assert (value.leader, value.last_unclean_epoch) == (3, 6)


def test_an_unclean_election_prefers_who_is_not_just_copying_the_log() -> None:
    value = msgspec.structs.replace(led_by(1, [1]), target=(2, 3), origin=(1, 2))
    live = running(process(2, flushed=1), process(3, flushed=4))
    assert elect_unclean(value, live).leader == 2
    del live[2]
    assert elect_unclean(value, live).leader == 3


def test_a_new_epoch_is_above_all_of_which_a_live_replica_holds_batches() -> None:
    """Metadata that was recovered from an older copy may not know the newest epochs."""
    live = running(process(2, last_epoch=5), process(3, last_epoch=8))
    elected = settle(led_by(1, [1, 2]), live, min_insync=1, unclean=False)
    assert elected is not None and (elected.leader, elected.leader_epoch) == (2, 9)
    unclean = elect_unclean(led_by(1, [1]), live)
    assert (unclean.leader, unclean.leader_epoch, unclean.last_unclean_epoch) == (3, 9, 9)
    moved = elect_preferred(led_by(2, [1, 2]), running(process(1, last_epoch=6), process(2)))
    assert moved is not None and moved.leader_epoch == 7


def test_a_partition_that_was_led_before_the_metadata_knows_begins_with_who_holds_most() -> None:
    live = running(process(1, last_epoch=None), process(2, last_epoch=3, flushed=40))
    value = settle(PartitionValue((1, 2, 3)), live, min_insync=1, unclean=False)
    assert value is not None
    assert (value.leader, value.leader_epoch, brokers(value.isr)) == (2, 4, [2])
    assert value.last_unclean_epoch == 4

# A partition that has everything: what an election does not decide stays as it was.
LED = msgspec.structs.replace(
    led_by(1, [1, 2, 3]), last_unclean_epoch=2, throttle_bytes_per_s=7, placed_epoch=3,
    restored_epoch=1,
)


def with_members(
    value: PartitionValue, isr: Iterable[Member], elr: Iterable[Member] = ()
) -> PartitionValue:
    return msgspec.structs.replace(value, isr=tuple(isr), elr=tuple(elr))


def leaderless(isr: Iterable[Member], elr: Iterable[Member] = ()) -> PartitionValue:
    value = with_members(LED, isr, elr)
    return msgspec.structs.replace(value, leader=None, leader_incarnation=None)


def members(*numbers: int) -> tuple[Member, ...]:
    return tuple(member(one) for one in numbers)


def replicas(*numbers: int) -> list[ReplicaRegistered]:
    return [process(one) for one in numbers]


def elected(leader: Member) -> dict[str, Any]:
    return {
        "leader": leader.broker, "leader_incarnation": leader.incarnation, "isr": (leader,),
        "elr": (),
    }


NOBODY = {"leader": None, "leader_incarnation": None}


@pytest.mark.parametrize(
    "value, live, min_insync, changes",
    [
        # The leader lives.
        (LED, replicas(1, 2, 3), 2, None),
        (LED, replicas(1, 2, 3), 4, None),
        (LED, replicas(1, 2), 2, {"isr": members(1, 2)}),
        (LED, replicas(1, 2), 3, {"isr": members(1, 2), "elr": members(3)}),
        (LED, replicas(1), 2, {"isr": members(1), "elr": members(2, 3)}),
        (LED, [*replicas(1, 2), process(3, "b")], 2, {"isr": members(1, 2)}),
        (with_members(LED, members(1), members(2)), replicas(1, 2, 3), 2, None),
        (with_members(LED, members(1), members(2)), replicas(1), 1, {"elr": ()}),
        (
            with_members(LED, members(1, 3), members(2)), replicas(1), 2,
            {"isr": members(1), "elr": members(3, 2)},
        ),
        # It does not: of those in sync, the first replica leads, wherever it stands in the ISR.
        (
            with_members(LED, members(1, 3, 2)), replicas(2, 3), 2,
            {**elected(member(2)), "isr": members(3, 2)},
        ),
        (LED, replicas(3), 2, {**elected(member(3)), "elr": members(1, 2)}),
        (LED, replicas(3), 1, elected(member(3))),
        (leaderless(members(2, 1)), replicas(1, 2), 1,
         {**elected(member(1)), "isr": members(2, 1)}),
        # Nobody is: one that left the ISR, and that runs since.
        (
            leaderless(members(1), members(3, 2)), replicas(2, 3), 2,
            {**elected(member(2)), "elr": members(1, 3)},
        ),
        (
            leaderless(members(1), members(3, 2)), [process(2, "b", flushed=9), process(3)], 1,
            elected(member(3)),
        ),
        # All have restarted: so many as are needed have to come back, and the longest log leads.
        (LED, [process(1, "b", flushed=9)], 2, NOBODY),
        (LED, [process(1, "b", flushed=9)], 1, elected(member(1, "b"))),
        (
            LED, [process(1, "b", flushed=3), process(2, "b", flushed=4)], 2,
            {**elected(member(2, "b")), "elr": members(1, 3)},
        ),
        (
            LED, [process(3, "b", flushed=4), process(2, "b", flushed=4)], 2,
            {**elected(member(2, "b")), "elr": members(1, 3)},  # As long: the first replica.
        ),
        (
            LED, [process(2, "b", last_epoch=None, flushed=9), process(3, "b", flushed=0)], 2,
            {**elected(member(3, "b")), "elr": members(1, 2)},
        ),
        (LED, [process(1, "b"), process(2, "b", directory="new")], 2, NOBODY),
        (leaderless(members(1)), [process(1, "b")], 2, elected(member(1, "b"))),
        (leaderless(members(1), members(2)), [process(1, "b"), process(3, flushed=9)], 2, None),
        # Nobody who may lead lives.
        (LED, [], 2, NOBODY),
        (leaderless(members(1, 2)), replicas(3), 2, None),
        (leaderless(members(1, 2), members(3)), [], 1, None),
        (leaderless(()), replicas(1, 2, 3), 2, None),
    ],
)
def test_an_election_decides_this_and_leaves_the_rest(
    value: PartitionValue,
    live: list[ReplicaRegistered],
    min_insync: int,
    changes: dict[str, Any] | None,
) -> None:
    settled = settle(value, running(*live), min_insync=min_insync, unclean=False)
    if changes is None:
        assert settled is None
    else:
        epoch = value.leader_epoch + ("leader" in changes)
        assert settled == msgspec.structs.replace(
            value, partition_epoch=value.partition_epoch + 1, leader_epoch=epoch, **changes
        )


@pytest.mark.parametrize("unclean", [False, True])
def test_where_no_replica_lives_no_election_makes_a_leader(unclean: bool) -> None:
    settled = settle(LED, {}, min_insync=2, unclean=unclean)
    assert settled == msgspec.structs.replace(
        LED, leader=None, leader_incarnation=None, leader_epoch=6, partition_epoch=10
    )
    assert settle(settled, {}, min_insync=2, unclean=unclean) is None
    assert settle(PartitionValue((1, 2)), {}, min_insync=1, unclean=unclean) is None


def test_a_new_partition_is_founded_by_those_of_its_replicas_that_live() -> None:
    value = PartitionValue((3, 1, 2), restored_epoch=4)
    live = running(process(1, last_epoch=None), process(2, last_epoch=None))
    assert settle(value, live, min_insync=2, unclean=False) == PartitionValue(
        (3, 1, 2), isr=members(1, 2), leader=1, leader_incarnation="1a", leader_epoch=5,
        partition_epoch=1, restored_epoch=4,
    )


def test_the_next_epoch_is_above_those_decided_restored_and_held() -> None:
    value = led_by(1, [1])
    assert next_epoch(value, {}) == 6
    assert next_epoch(value, running(process(2, last_epoch=5), process(3, last_epoch=None))) == 6
    assert next_epoch(value, running(process(2, last_epoch=6), process(3, last_epoch=1))) == 7
    assert next_epoch(msgspec.structs.replace(value, restored_epoch=8), {}) == 9
    assert next_epoch(PartitionValue((1,)), running(process(1, last_epoch=None))) == 1
    absurd = running(process(2, last_epoch=2**32 - 1), process(3, last_epoch=6))
    assert next_epoch(value, absurd) == 7, "a batch has 32 bits for its epoch"


@pytest.mark.parametrize(
    "live, leader",
    [
        (replicas(3), 3),
        ([process(1, "b", flushed=3), process(2, flushed=4)], 2),
        ([process(1, "b", flushed=4), process(2, flushed=4)], 1),
        ([process(2, last_epoch=2, flushed=9), process(3, last_epoch=3, flushed=1)], 3),
        ([process(2, last_epoch=None, flushed=9), process(3, last_epoch=1)], 3),
    ],
)
def test_an_unclean_election_is_a_change_of_the_whole_in_sync_set(
    live: list[ReplicaRegistered], leader: int
) -> None:
    before = with_members(LED, members(1), members(2))
    chosen = as_member(running(*live)[leader])
    after = msgspec.structs.replace(
        before, isr=(chosen,), elr=(), leader=leader, leader_incarnation=chosen.incarnation,
        leader_epoch=6, last_unclean_epoch=6, partition_epoch=10,
    )
    assert elect_unclean(before, running(*live)) == after


def test_the_preferred_leader_takes_over_a_partition_that_is_led_and_changes_nothing_else() -> None:
    before = msgspec.structs.replace(LED, leader=2, leader_incarnation="2a")
    after = elect_preferred(before, running(*replicas(1, 2, 3)))
    assert after == msgspec.structs.replace(
        before, leader=1, leader_incarnation="1a", leader_epoch=6, partition_epoch=10
    )
    assert elect_preferred(leaderless(members(1, 2)), running(*replicas(1))) is None
    assert elect_preferred(with_members(before, members(2, 3), members(1)), {}) is None


@pytest.mark.parametrize(
    "isr, elr, proposed, min_insync, left",
    [
        ((1, 2, 3), (), (1, 2), 2, ()),
        ((1, 2, 3), (), (1, 2), 3, (3,)),
        ((1, 2, 3), (), (1,), 2, (2, 3)),
        ((1, 2), (3,), (1,), 2, (2, 3)),
        ((1,), (2, 3), (1, 2), 3, (3,)),
        ((1,), (2, 3), (1, 2), 2, ()),
        ((1,), (2,), (1, 2, 3), 3, ()),
    ],
)
def test_who_leaves_the_in_sync_set_is_eligible_until_enough_are_in_sync(
    isr: tuple[int, ...],
    elr: tuple[int, ...],
    proposed: tuple[int, ...],
    min_insync: int,
    left: tuple[int, ...],
) -> None:
    before = with_members(LED, members(*isr), members(*elr))
    after = with_isr(before, members(*proposed), min_insync=min_insync)
    assert after == msgspec.structs.replace(
        before, isr=members(*proposed), elr=members(*left), partition_epoch=10
    )


def stopped(broker: int, last_epoch: int | None = 4, end: int = 17) -> Member:
    return msgspec.structs.replace(member(broker), stopped_at=(last_epoch, end))


@pytest.mark.parametrize("place", ["isr", "elr"])
@pytest.mark.parametrize(
    "back, is_same",
    [
        (process(2, "b", last_epoch=4, flushed=17), True),
        (process(2, "b", last_epoch=4, flushed=16), False),
        (process(2, "b", last_epoch=4, flushed=18), False),
        (process(2, "b", last_epoch=3, flushed=17), False),
        (process(2, "b", last_epoch=None, flushed=17), False),
        (process(2, "b", last_epoch=4, flushed=17, directory="new"), False),
        (process(1, "b", last_epoch=4, flushed=17), False),
        (process(3, "b", last_epoch=4, flushed=17, directory="disk-2"), False),
    ],
)
def test_only_the_log_that_was_stopped_on_that_very_disk_returns_as_if_never_gone(
    place: str, back: ReplicaRegistered, is_same: bool
) -> None:
    isr, elr = (member(1),), (member(3),)
    before = with_members(
        LED, (*isr, stopped(2)) if place == "isr" else isr,
        (*elr, stopped(2)) if place == "elr" else elr,
    )
    renewed = with_members(
        LED, (*isr, as_member(back)) if place == "isr" else isr,
        (*elr, as_member(back)) if place == "elr" else elr,
    )
    assert readmit(before, back) == (renewed if is_same else before)


def test_who_was_not_stopped_in_a_controlled_way_is_not_taken_for_the_same() -> None:
    assert readmit(LED, process(2, "b", last_epoch=None, flushed=0)) == LED
    empty = with_members(LED, [member(1), stopped(2, None, 0)])
    back = process(2, "b", last_epoch=None, flushed=0)
    assert readmit(empty, back) == with_members(LED, [member(1), as_member(back)])


def test_a_leader_that_returns_otherwise_than_it_was_stopped_is_left_to_the_election() -> None:
    value = with_members(LED, [stopped(1), member(2)], [stopped(3)])
    assert readmit(value, process(1, "b", last_epoch=4, flushed=16)) == value


def test_the_members_that_are_waited_for_are_named_in_the_order_of_their_brokers() -> None:
    value = leaderless(members(3, 1), members(2))
    assert missing(value, {}) == list(members(1, 2, 3))
    back = [process(1, "b"), process(2, "b", directory="new")]
    assert missing(value, running(*back)) == list(members(2, 3))
    assert missing(value, running(*replicas(1, 2, 3))) == []


LIFE = st.lists(
    st.tuples(
        st.sampled_from(["die", "return", "join", "shrink"]),
        st.integers(1, 3),
        st.integers(0, 50),
    ),
    max_size=40,
)


@given(LIFE, st.integers(1, 3))
def test_whatever_happens_epochs_only_grow_and_every_leader_is_a_live_member_of_its_isr(
    events: list[tuple[str, int, int]], min_insync: int
) -> None:
    live = running(process(1), process(2), process(3))
    value = settle(PartitionValue((1, 2, 3)), live, min_insync=min_insync, unclean=False)
    assert value is not None
    for number, (what, broker, flushed) in enumerate(events):
        before = value
        if what == "die":
            live.pop(broker, None)
        elif what == "return" and broker not in live:
            live[broker] = process(broker, f"x{number}", flushed=flushed)
        elif what == "join" and broker in live and value.leader is not None:
            members = {one.broker: one for one in value.isr}
            members[broker] = as_member(live[broker])
            value = with_isr(value, tuple(members.values()), min_insync=min_insync)
        elif what == "shrink" and value.leader not in (None, broker):
            kept = tuple(one for one in value.isr if one.broker != broker)
            value = with_isr(value, kept, min_insync=min_insync)
        value = settle(value, live, min_insync=min_insync, unclean=False) or value
        assert value.leader_epoch >= before.leader_epoch
        assert value.partition_epoch >= before.partition_epoch
        assert (value == before) == (value.partition_epoch == before.partition_epoch)
        if (value.leader, value.leader_incarnation) != (before.leader, before.leader_incarnation):
            assert value.leader_epoch > before.leader_epoch
        if value.leader is not None:
            assert live[value.leader].incarnation == value.leader_incarnation
            assert value.leader in brokers(value.isr)
        # A holder of every committed record is always remembered.
        assert len(value.isr) + len(value.elr) >= min(min_insync, len(before.isr + before.elr))
        assert not set(brokers(value.isr)) & set(brokers(value.elr))
