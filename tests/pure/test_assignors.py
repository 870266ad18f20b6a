"""Assignors: their assignments are balanced within one partition, sticky, and checked."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayq.core.assignors import (
    MemberSubscription,
    find_assignor,
    load_assignors,
    range_,
    run_assignor,
    uniform,
)
from rayq.errors import InvalidAssignmentError, UnknownAssignorError
from rayq.records import TopicPartition

TOPICS = ("t", "u", "v")


def members(**topics: str) -> dict[str, MemberSubscription]:
    return {name: MemberSubscription(frozenset(named)) for name, named in sorted(topics.items())}


def at(*named: str) -> frozenset[TopicPartition]:
    return frozenset(TopicPartition(one[0], int(one[1:])) for one in named)


def assign(
    of: Mapping[str, MemberSubscription], counts: Mapping[str, int], current: Any = None
) -> dict[str, frozenset[TopicPartition]]:
    return run_assignor("uniform", uniform, of, counts, current or {})


subscriptions = st.dictionaries(
    st.sampled_from("abcdef"), st.sets(st.sampled_from(TOPICS), min_size=1), min_size=1, max_size=6
)
counts = st.fixed_dictionaries({topic: st.integers(0, 7) for topic in TOPICS})


def read_by(of: Mapping[str, MemberSubscription], sizes: Mapping[str, int]) -> dict[str, int]:
    return {t: n for t, n in sizes.items() if any(t in one.topics for one in of.values())}


def test_the_textbook_example_moves_exactly_one_partition() -> None:
    of = members(c1="t", c2="t", c3="t")
    before = {"c1": at("t0", "t1"), "c2": at("t2")}
    after = assign(of, {"t": 3}, before)
    assert [len(after[one]) for one in ("c1", "c2", "c3")] == [1, 1, 1]
    assert after["c1"] < before["c1"]
    assert after["c2"] == before["c2"]


@given(st.integers(1, 12), st.lists(st.integers(0, 20), min_size=1, max_size=4))
def test_members_of_one_subscription_differ_by_one_at_most(count: int, sizes: list[int]) -> None:
    of = {f"m{one:02d}": MemberSubscription(frozenset(TOPICS)) for one in range(count)}
    shares = assign(of, {f"{topic}": size for topic, size in zip(TOPICS, sizes, strict=False)})
    loads = [len(one) for one in shares.values()]
    assert max(loads) - min(loads) <= 1


@given(st.integers(1, 8), st.integers(0, 40), st.booleans())
def test_a_join_or_leave_moves_no_more_than_it_must(count: int, partitions: int, joins: bool) -> None:
    of = {f"m{one}": MemberSubscription(frozenset("t")) for one in range(count)}
    before = assign(of, {"t": partitions})
    if joins:
        later = {**of, "new": MemberSubscription(frozenset("t"))}
        must = partitions // (count + 1)
    else:
        later = {name: one for name, one in of.items() if name != "m0"} or of
        must = len(before["m0"]) if len(later) < count else 0
    after = assign(later, {"t": partitions}, {name: one for name, one in before.items() if name in later})
    owner = {one: name for name, share in before.items() for one in share}
    moved = sum(owner[one] != name for name, share in after.items() for one in share)
    assert moved == must


@given(subscriptions, counts)
@settings(max_examples=60)
def test_shares_are_as_level_as_subscriptions_allow(
    topics: dict[str, set[str]], sizes: dict[str, int]
) -> None:
    of = {name: MemberSubscription(frozenset(named)) for name, named in sorted(topics.items())}
    sizes = {topic: min(size, 4) for topic, size in read_by(of, sizes).items()}
    shares = assign(of, sizes)
    squares = sum(len(share) ** 2 for share in shares.values())
    assert squares == best_squares(of, sizes)


def best_squares(of: Mapping[str, MemberSubscription], sizes: Mapping[str, int]) -> int:
    """The least sum of squares over all assignments, topic by topic."""
    names = list(of)
    loads = {tuple(0 for _ in names)}
    for topic, size in sizes.items():
        readers = [place for place, name in enumerate(names) if topic in of[name].topics]
        found = set()
        for split in itertools.combinations_with_replacement(readers, size):
            for load in loads:
                new = list(load)
                for place in split:
                    new[place] += 1
                found.add(tuple(new))
        loads = found
    return min(sum(one * one for one in load) for load in loads)


@given(subscriptions, counts, subscriptions, counts)
def test_nothing_moves_twice_and_an_assignment_is_its_own_next(
    topics: dict[str, set[str]], sizes: dict[str, int], then: dict[str, set[str]], grown: dict[str, int]
) -> None:
    of = {name: MemberSubscription(frozenset(named)) for name, named in sorted(topics.items())}
    before = assign(of, read_by(of, sizes))
    assert assign(of, read_by(of, sizes), before) == before
    of = {name: MemberSubscription(frozenset(named)) for name, named in sorted(then.items())}
    after = assign(of, read_by(of, grown), before)
    assert assign(of, read_by(of, grown), after) == after


def test_a_large_group_is_assigned_fast() -> None:
    of = {f"m{one:04d}": MemberSubscription(frozenset("tu")) for one in range(500)}
    shares = assign(of, {"t": 5000, "u": 777})
    shares = assign({**of, "x": MemberSubscription(frozenset("tu"))}, {"t": 5000, "u": 777}, shares)
    loads = [len(one) for one in shares.values()]
    assert max(loads) - min(loads) <= 1


@given(subscriptions, counts)
def test_range_gives_consecutive_partitions_of_each_topic(
    topics: dict[str, set[str]], sizes: dict[str, int]
) -> None:
    of = {name: MemberSubscription(frozenset(named)) for name, named in sorted(topics.items())}
    shares = run_assignor("range", range_, of, read_by(of, sizes), {})
    for topic in TOPICS:
        ranges = [sorted(one.partition for one in share if one.topic == topic) for share in shares.values()]
        joined = [number for one in ranges for number in one]
        assert joined == list(range(len(joined)))
        lengths = [len(one) for name, one in zip(of, ranges, strict=True) if topic in of[name].topics]
        assert not lengths or max(lengths) - min(lengths) <= 1


def test_range_gives_the_same_numbers_of_two_topics_to_one_member() -> None:
    shares = range_(members(a="tu", b="tu"), {"t": 4, "u": 4}, {})
    assert frozenset(shares["a"]) == at("t0", "t1", "u0", "u1")


def test_range_orders_static_members_by_their_instance() -> None:
    of = {"x": MemberSubscription(frozenset("t"), "2"), "y": MemberSubscription(frozenset("t"), "1")}
    assert frozenset(range_(of, {"t": 2}, {})["y"]) == at("t0")


def fails(of: Any, sizes: Any, current: Any) -> Any:
    raise RuntimeError("boom")


@pytest.mark.parametrize(
    "answer, reason",
    [
        ({"a": at("t0")}, "to nobody"),
        ({"a": at("t0", "t1"), "b": at("t1")}, "twice"),
        ({"a": at("t0", "t1", "t2")}, "does not exist"),
        ({"a": at("t0", "t1"), "z": at()}, "no members"),
        ({"a": at("t0", "t1"), "b": at("u0")}, "does not subscribe"),
        ({"a": ["t0", "t1"]}, "does not exist"),
        ([], "failed"),
        (None, "failed"),
    ],
)
def test_a_wrong_answer_of_a_users_assignor_is_refused(answer: Any, reason: str) -> None:
    with pytest.raises(InvalidAssignmentError, match=reason):
        run_assignor("mine", lambda *_: answer, members(a="t", b="t"), {"t": 2}, {})


def test_a_users_assignor_that_raises_is_refused_with_its_error() -> None:
    with pytest.raises(InvalidAssignmentError, match="'mine' failed: RuntimeError: boom"):
        run_assignor("mine", fails, members(a="t"), {"t": 1}, {})


def test_assignors_are_found_by_name_or_refused_with_the_reason() -> None:
    found = load_assignors(
        {"mine": f"{__name__}:fails", "gone": "no.such.module:f", "odd": "os:sep", "none": "os"}
    )
    assert find_assignor(found, "uniform") is uniform
    assert find_assignor(found, "range") is range_
    for name, reason in (("gone", "No module"), ("odd", "no function"), ("none", "os"), ("x", "no assignor")):
        with pytest.raises(UnknownAssignorError, match=reason):
            find_assignor(found, name)
