"""Plans for moves: what empties a broker, and what spreads the load with few moves."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from rayq.core import move_plans

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
