"""Plans for moves: those that empty a broker, and those that spread the load with few moves."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayq.core.cluster import move_plans

Placements = dict[tuple[str, int], list[int]]


def nodes_of(*brokers: int) -> dict[int, str]:
    return {broker: f"n{broker}" for broker in brokers}


def placed(*replicas: list[int]) -> Placements:
    return {("t", number): one for number, one in enumerate(replicas)}


def test_a_broker_is_emptied_and_its_place_taken_in_each_partition() -> None:
    before = placed([0, 1, 2], [1, 2, 0], [3, 1, 2])
    plan, impossible = move_plans.replace(nodes_of(0, 1, 2, 3), before, {0})
    assert plan == {("t", 0): [3, 1, 2], ("t", 1): [1, 2, 3]}
    assert impossible == []


def test_what_has_no_other_place_is_named() -> None:
    plan, impossible = move_plans.replace(nodes_of(0, 1, 2), placed([0, 1, 2], [0, 1]), {0})
    assert plan == {("t", 1): [2, 1]}
    assert impossible == [("t", 0)]


def test_what_is_lost_twice_is_replaced_as_far_as_possible() -> None:
    plan, impossible = move_plans.replace(nodes_of(2, 3), placed([0, 1, 2]), {0, 1})
    assert plan == {("t", 0): [3, 1, 2]}
    assert impossible == [("t", 0)]


def test_a_replacement_goes_to_a_node_that_has_no_replica_yet() -> None:
    nodes = {0: "a", 1: "b", 2: "b", 3: "c"}
    plan, _ = move_plans.replace(nodes, placed([0, 1], [3, 1], [3, 1], [3, 1]), {0})
    assert plan == {("t", 0): [3, 1]}


def test_what_is_balanced_stays() -> None:
    assert move_plans.spread(nodes_of(0, 1, 2), placed([0, 1, 2], [1, 2, 0], [2, 0, 1])) == {}
    assert move_plans.spread({}, placed([0, 1])) == {}


def test_a_new_broker_takes_its_share_and_no_more_moves_than_that() -> None:
    before = placed(*([number % 3, (number + 1) % 3, (number + 2) % 3] for number in range(8)))
    plan = move_plans.spread(nodes_of(0, 1, 2, 3), before)
    moved = sum(set(plan[key]) != set(before[key]) for key in plan)
    assert moved == 6  # 24 replicas on 4 brokers
    after = {**before, **plan}
    leads = Counter(replicas[0] for replicas in after.values())
    assert max(leads.values()) - min(leads.values()) <= 1


def test_replicas_that_share_a_node_are_taken_apart_when_another_node_comes() -> None:
    plan = move_plans.spread({0: "a", 1: "a", 2: "b"}, placed([0, 1]))
    assert plan == {("t", 0): [0, 2]}


def test_what_is_on_a_broker_that_does_not_take_part_stays_there() -> None:
    plan = move_plans.spread(nodes_of(0, 1), placed([9, 0], [9, 0], [9, 0]))
    assert all(9 in replicas for replicas in plan.values())


@pytest.mark.parametrize(
    "nodes, before, plan",
    [
        # The fullest broker gives to the emptiest one; that carries, or leads, at most one less.
        ("abc", [[0], [0], [0], [1], [2]], {0: [1]}),
        ("ab", [[0], [0], [1]], {}),
        ("abc", [[0], [0], [1]], {0: [2]}),
        ("ab", [[0, 1], [0, 1]], {0: [1, 0]}),
        ("ab", [[0, 1], [0, 1], [1, 0]], {}),
        # A new broker takes leaders, as long as who gives leads more partitions than it does.
        ("abc", [[0, 1], [1, 0], [0, 1], [1, 0]], {0: [2, 1], 1: [2, 0]}),
        ("abc", [[2], [0], [1, 0], [1, 0]], {2: [1, 2]}),
        # No two replicas come together, on a node or even on a broker.
        ("abb", [[0, 1], [0, 1], [0, 1]], {0: [2, 0], 1: [1, 0]}),
        ("aa", [[0, 1], [0], [0]], {1: [1]}),
        ("aaa", [[0, 1], [0, 2], [0, 1], [0, 2]], {1: [1, 2], 3: [2, 0]}),
        # Replicas that share a node stay together where there is no node for one of them.
        ("aab", [[0, 1, 2]], {}),
        ("aabc", [[0, 1, 2]], {0: [0, 3, 2]}),
        ("aab", [[0, 1], [1, 0], [2]], {0: [2, 0], 1: [1, 2], 2: [0]}),
        # Leadership goes to the broker that leads least, without a detour.
        ("abc", [[0, 1], [0, 2], [0, 1], [0, 2], [1, 2], [1, 2]], {1: [2, 0], 3: [2, 0]}),
    ],
)
def test_these_moves_spread_the_load(
    nodes: str, before: list[list[int]], plan: dict[int, list[int]]
) -> None:
    spread = move_plans.spread(dict(enumerate(nodes)), placed(*before))
    assert spread == {("t", number): replicas for number, replicas in plan.items()}


@pytest.mark.parametrize(
    "nodes, before, gone, plan",
    [
        ("abcd", [[0, 1], [2, 1], [2, 3]], {0}, {0: [3, 1]}),  # Broker 3 leads none, 2 two.
        ("abcd", [[0, 1], [2, 1], [2, 1], [1, 3], [1, 3], [1, 3]], {0}, {0: [3, 1]}),
        ("abcd", [[1, 0], [2, 1], [2, 1], [1, 3], [1, 3], [1, 3]], {0}, {0: [1, 2]}),
        ("abcd", [[0, 1], [2, 1]], {0, 3}, {0: [2, 1]}),  # Broker 3 carries none: it is gone.
        ("abcd", [[1, 0], [2, 1], [3, 2]], {0}, {0: [1, 3]}),  # Broker 3 carries one, 2 two.
        ("abbc", [[1, 0], [3, 2], [3, 1], [3, 2]], {0}, {0: [1, 3]}),  # 2 shares a node.
        ("abb", [[1, 0]], {0}, {0: [1, 2]}),  # Rather that than none.
        ("abcde", [[0, 1, 2]], {0, 2}, {0: [3, 1, 4]}),
        ("abc", [[0, 1], [0, 1], [0, 1]], {0}, {0: [2, 1], 1: [2, 1], 2: [2, 1]}),
        ("abcd", [[0, 1], [0, 1], [0, 1]], {0}, {0: [2, 1], 1: [3, 1], 2: [2, 1]}),
        ("abc", [[0, 1]], set(), {}),
        ("abc", [[0, 1]], {2}, {}),
    ],
)
def test_these_brokers_take_the_places_of_those_that_are_gone(
    nodes: str, before: list[list[int]], gone: set[int], plan: dict[int, list[int]]
) -> None:
    assert move_plans.replace(dict(enumerate(nodes)), placed(*before), gone) == (
        {("t", number): replicas for number, replicas in plan.items()}, []
    )


@settings(max_examples=150)
@given(st.data())
def test_a_spread_is_balanced_keeps_nodes_apart_and_is_done_once(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 7))
    nodes = {broker: f"n{data.draw(st.integers(0, 4))}" for broker in range(count)}
    factor = data.draw(st.integers(1, min(3, count)))
    before: Placements = {
        ("t", number): data.draw(st.permutations(range(count)))[:factor]
        for number in range(data.draw(st.integers(0, 12)))
    }
    plan = move_plans.spread(nodes, before)
    after = {**before, **plan}
    for key, replicas in after.items():
        assert len(set(replicas)) == factor
        assert len({nodes[one] for one in replicas}) >= len({nodes[one] for one in before[key]})
    assert move_plans.spread(nodes, after) == {}
    if len(set(nodes.values())) == count and after:
        carries = Counter(dict.fromkeys(nodes, 0))
        carries.update(broker for replicas in after.values() for broker in replicas)
        assert max(carries.values()) - min(carries.values()) <= 1


def test_more_replicas_go_where_fewest_are_and_the_others_stay_in_place() -> None:
    before = placed([0], [0], [0], [1])
    in_sync = {key: before[key] for key in list(before)[:3]}
    plan, impossible = move_plans.with_factor(nodes_of(0, 1, 2), before, in_sync, 2)
    assert impossible == []
    assert plan == {("t", 0): [0, 2], ("t", 1): [0, 1], ("t", 2): [0, 2]}
    plan, impossible = move_plans.with_factor(nodes_of(0, 1), before, in_sync, 3)
    assert impossible == list(in_sync)
    assert plan == {key: [0, 1] for key in in_sync}  # As many as there are brokers for.


def test_of_too_many_replicas_the_one_that_is_not_in_sync_goes_first() -> None:
    before = placed([0, 1, 2], [3, 1, 0], [3, 1, 0], [3, 2, 1])
    in_sync = {("t", 0): [2, 0]}
    plan, _ = move_plans.with_factor(nodes_of(0, 1, 2, 3), before, in_sync, 2)
    assert plan == {("t", 0): [0, 2]}
    # All replicas are in sync. First goes the one on a broker that takes no more, then the one on
    # the fullest broker.
    in_sync = {("t", 0): [2, 0, 1]}
    plan, _ = move_plans.with_factor(nodes_of(1, 2, 3), before, in_sync, 2)
    assert plan == {("t", 0): [1, 2]}
    plan, _ = move_plans.with_factor(nodes_of(0, 1, 2, 3), before, in_sync, 2)
    assert plan == {("t", 0): [0, 2]}
    plan, _ = move_plans.with_factor({0: "a", 1: "b", 2: "a", 3: "b"}, before, in_sync, 2)
    assert plan == {("t", 0): [1, 2]}


@pytest.mark.slow
@settings(max_examples=150)
@given(st.data())
def test_another_factor_adds_or_removes_and_does_nothing_else(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    nodes = {broker: f"n{data.draw(st.integers(0, 4))}" for broker in range(count)}
    factor = data.draw(st.integers(1, count))
    before: Placements = {
        (data.draw(st.sampled_from("tu")), number): data.draw(
            st.lists(st.sampled_from(range(count)), min_size=1, unique=True)
        )
        for number in range(data.draw(st.integers(1, 8)))
    }
    in_sync = {
        key: data.draw(st.permutations(before[key]))[: data.draw(st.integers(1, len(before[key])))]
        for key in before
        if key[0] == "t"
    }
    plan, impossible = move_plans.with_factor(nodes, before, in_sync, factor)
    assert impossible == []
    assert plan.keys() == {key for key in in_sync if len(before[key]) != factor}
    for key, after in plan.items():
        assert len(set(after)) == len(after) == factor
        was = before[key]
        if factor > len(was):
            assert after[: len(was)] == was
        else:
            assert after == [broker for broker in was if broker in after]
            assert in_sync[key][0] in after
            kept = set(in_sync[key]) & set(after)
            assert len(kept) == min(factor, len(in_sync[key]))
    if len(set(nodes.values())) == count and factor == 2 and set(map(len, before.values())) == {1}:
        added = Counter(dict.fromkeys(nodes, 0))
        added.update(broker for replicas in {**before, **plan}.values() for broker in replicas)
        takers = [added[plan[key][1]] for key in plan]
        assert not takers or max(takers) - min(added.values()) <= 1 or count == 2
