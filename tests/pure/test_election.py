"""Which replica leads: rules 1 and 2 of docs/protocol.md on values, one sentence each."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rayq.core.election import (
    as_member,
    elect_preferred,
    elect_unclean,
    missing,
    readmit,
    settle,
    with_isr,
)
from rayq.core.metadata_records import Member, PartitionValue, ReplicaRegistered


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


def test_a_leader_whose_process_is_not_the_member_in_sync_is_elected_anew() -> None:
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
