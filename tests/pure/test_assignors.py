"""Assignors: their assignments are balanced within one partition, sticky, and checked."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayq.core.groups.assignors import (
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


def test_half_of_many_partitions_go_to_a_second_member_at_a_cost_in_proportion() -> None:
    """Each move looked for the highest number among all partitions of its giver."""
    count = 40_000
    before = {"a": frozenset(TopicPartition("t", number) for number in range(count))}
    began_s = time.thread_time()
    after = assign(members(a="t", b="t"), {"t": count}, before)
    assert time.thread_time() - began_s < 4
    assert after["a"] == frozenset(TopicPartition("t", one) for one in range(count // 2))


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


@pytest.mark.parametrize(
    "of, sizes, current, expected",
    [
        ({"a": "t"}, {"t": 0}, {}, {"a": ""}),
        ({"b": "t", "a": "t"}, {"t": 3}, {}, {"a": "t0 t2", "b": "t1"}),
        ({"a": "tu", "b": "t"}, {"t": 2, "u": 2}, {}, {"a": "u0 u1", "b": "t0 t1"}),
        ({"a": "t", "b": "t"}, {"t": 3}, {"b": "t0"}, {"a": "t1 t2", "b": "t0"}),
        # Two partitions fewer is a reason to give, one is none.
        ({"a": "t", "b": "t"}, {"t": 3}, {"a": "t0 t1 t2"}, {"a": "t0 t1", "b": "t2"}),
        ({"a": "t", "b": "t"}, {"t": 3}, {"a": "t0", "b": "t1 t2"}, {"a": "t0", "b": "t1 t2"}),
        # Who has most gives to who has least, and nobody between them moves.
        (
            {"a": "t", "b": "t", "c": "t"}, {"t": 18},
            {"a": "t0 t1 t2 t3 t4 t5 t6 t7 t8 t9", "c": "t10 t11 t12 t13 t14 t15 t16 t17"},
            {"a": "t0 t1 t2 t3 t4 t5", "b": "t6 t7 t8 t9 t16 t17", "c": "t10 t11 t12 t13 t14 t15"},
        ),
        # Who was asked already is not asked once more before the others.
        (
            {"m0": "tuvwx", "m1": "tuvwx", "m2": "tuvwx", "m3": "u"},
            {"t": 6, "u": 4, "v": 2, "w": 4, "x": 7},
            {
                "m0": "t2 u0 u1 u3 x1", "m1": "t1 t4 t5 u2 w2", "m2": "v1 w0 w3 x0 x2 x3 x4 x5 x6",
            },
            {
                "m0": "t0 t2 v0 v1 w3 x1", "m1": "t1 t3 t4 t5 w1 w2",
                "m2": "w0 x0 x2 x3 x4 x5 x6", "m3": "u0 u1 u2 u3",
            },
        ),
        # What nobody may keep: another's, of no such number, of no such topic, of no reader.
        (
            {"a": "t", "b": "tu"}, {"t": 3, "u": 1}, {"a": "t0 t3 u0 v0", "b": "t0 t1"},
            {"a": "t0 t2", "b": "t1 u0"},
        ),
        # Of a topic that is gone there is not even a first one, though some subscribe to it still.
        ({"a": "tv", "b": "v"}, {"t": 1}, {"a": "t0 v0", "b": "v1"}, {"a": "t0", "b": ""}),
        # Who is no member keeps nothing.
        ({"a": "t"}, {"t": 2}, {"z": "t0", "a": "t1"}, {"a": "t0 t1"}),
        # A chain of hand-overs: a and c read nothing together.
        (
            {"a": "t", "b": "tu", "c": "u"}, {"t": 4, "u": 2},
            {"a": "t0 t1 t2 t3", "b": "u0 u1"},
            {"a": "t0 t1", "b": "t2 t3", "c": "u0 u1"},
        ),
        (
            {"a": "t", "b": "tu", "c": "uv", "d": "v"}, {"t": 2, "u": 1, "v": 1},
            {"a": "t0 t1", "b": "u0", "c": "v0"},
            {"a": "t0", "b": "t1", "c": "u0", "d": "v0"},
        ),
        # A topic that nobody reads goes to nobody.
        ({"a": "t", "b": "t"}, {"t": 2, "u": 2}, {}, {"a": "t0", "b": "t1"}),
        ({}, {"t": 2}, {}, {}),
    ],
)
def test_what_uniform_gives_to_whom(
    of: dict[str, str], sizes: dict[str, int], current: dict[str, str], expected: dict[str, str]
) -> None:
    had = {name: at(*named.split()) for name, named in current.items()}
    shares = uniform(members(**of), sizes, had)
    assert shares == {name: at(*named.split()) for name, named in expected.items()}


@given(st.lists(st.sets(st.integers(0, 14)), min_size=1, max_size=5), st.integers(0, 12))
@settings(max_examples=25)
def test_nobody_gives_and_takes_among_members_of_one_subscription(
    had: list[set[int]], count: int
) -> None:
    of = {f"m{one}": MemberSubscription(frozenset("t")) for one in range(len(had))}
    current = {f"m{one}": at(*(f"t{number}" for number in named)) for one, named in enumerate(had)}
    shares = assign(of, {"t": count}, current)
    left, kept = set(range(count)), []
    for named in had:
        kept.append(named & left)
        left -= named
    for before, share in zip(kept, shares.values(), strict=True):
        after = {one.partition for one in share}
        assert before <= after or after <= before
        assert len(after) in (count // len(had), -(-count // len(had)))


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


@pytest.mark.parametrize(
    "of, sizes, expected",
    [
        ({"a": "t", "b": "t"}, {"t": 5}, {"a": "t0 t1 t2", "b": "t3 t4"}),
        ({"b": "tu", "a": "t"}, {"u": 2, "t": 3}, {"a": "t0 t1", "b": "t2 u0 u1"}),
        ({"a": "t", "b": "t", "c": "t"}, {"t": 2}, {"a": "t0", "b": "t1", "c": ""}),
        ({"a": "t", "b": "t", "c": "t"}, {"t": 8}, {"a": "t0 t1 t2", "b": "t3 t4 t5", "c": "t6 t7"}),
        ({"a": "u", "b": "t"}, {"t": 2, "u": 0, "v": 4}, {"a": "", "b": "t0 t1"}),
        ({}, {"t": 2}, {}),
    ],
)
def test_what_range_gives_to_whom(
    of: dict[str, str], sizes: dict[str, int], expected: dict[str, str]
) -> None:
    shares = range_(members(**of), sizes, {})
    found = {name: " ".join(f"{one.topic}{one.partition}" for one in share) for name, share in shares.items()}
    assert found == expected


def test_range_orders_static_members_by_their_instance() -> None:
    of = {
        name: MemberSubscription(frozenset("t"), instance)
        for name, instance in {"b": None, "w": "2", "x": "1", "y": "1", "z": "c"}.items()
    }
    shares = range_(of, {"t": 5}, {})
    assert [min(one.partition for one in shares[name]) for name in "xywbz"] == [0, 1, 2, 3, 4]


def fails(of: Any, sizes: Any, current: Any) -> Any:
    raise RuntimeError("boom")


@pytest.mark.parametrize(
    "answer, reason",
    [
        ({}, r"'mine' gave .*'t', partition=0. to nobody \(2 in all\)"),
        ({"a": at("t0")}, r"'mine' gave .*'t', partition=1. to nobody \(1 in all\)"),
        ({"a": at("t0", "t1"), "b": at("t1")}, "'mine' gave .*'t', partition=1. twice"),
        ({"a": [*at("t0"), *at("t0"), *at("t1")]}, "'mine' gave .*'t', partition=0. twice"),
        ({"a": at("t0", "t1", "t2")}, "does not exist"),
        ({"a": at("t0", "t1"), "z": at(), "y": at()}, r"'mine' assigned to \['y', 'z'\], who are not"),
        ({"a": at("t0", "t1"), "b": at("u0")}, "gave .*'u', partition=0. to b, which does not subscribe to 'u'"),
        ({"a": ["t0", "t1"]}, "does not exist"),
        ([], "failed"),
        (None, "failed"),
    ],
)
def test_a_wrong_answer_of_a_users_assignor_is_refused(answer: Any, reason: str) -> None:
    with pytest.raises(InvalidAssignmentError, match=reason):
        run_assignor("mine", lambda *_: answer, members(a="t", b="t"), {"t": 2}, {})


def test_an_answer_may_leave_out_who_gets_nothing_and_name_partitions_as_pairs() -> None:
    of = members(a="t", b="t", c="u")

    def mine(*asked: Any) -> Any:
        assert asked == (of, {"t": 2, "u": 1}, {"a": at("t0")})
        return {"b": [("t", 1), ("t", 0)], "c": {("u", 0)}}

    shares = run_assignor("mine", mine, of, {"t": 2, "u": 1}, {"a": at("t0")})
    assert shares == {"a": at(), "b": at("t0", "t1"), "c": at("u0")}
    assert all(isinstance(one, TopicPartition) for share in shares.values() for one in share)


def test_a_users_assignor_that_raises_is_refused_with_its_error() -> None:
    with pytest.raises(InvalidAssignmentError, match="'mine' failed: RuntimeError: boom"):
        run_assignor("mine", fails, members(a="t"), {"t": 1}, {})


def test_assignors_are_found_by_name_or_refused_with_the_reason() -> None:
    named = {
        "mine": f"{__name__}:fails", "gone": "no.such.module:f", "odd": "os:sep", "none": "os",
        "range": f"{__name__}:at",
    }
    found = load_assignors(named)
    assert find_assignor(found, "uniform") is uniform
    assert find_assignor(found, "mine").__name__ == "fails"
    assert find_assignor(found, "range").__name__ == "at", "an own one of that name"
    assert load_assignors(None) == load_assignors({}) == {"uniform": uniform, "range": range_}
    for name, reason in (
        ("gone", "'gone' cannot be used: 'no.such.module:f' could not be loaded: ModuleNotFoundError: No"),
        ("odd", "'odd' cannot be used: 'os:sep' has to be a function, not str"),
        ("none", "'none' cannot be used: 'os' could not be loaded: AttributeError"),
        ("x", "no assignor 'x': gone, mine, none, odd, range, uniform, or one of your own"),
    ):
        with pytest.raises(UnknownAssignorError, match=reason):
            find_assignor(found, name)
