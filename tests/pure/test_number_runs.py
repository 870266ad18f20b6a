"""Runs of numbers behave as the set of these numbers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayq.core.queues.number_runs import NumberRuns

NUMBERS = range(-2, 23)
numbers = st.integers(0, 20)
changes = st.lists(
    st.one_of(
        st.tuples(st.just("add"), numbers, numbers),
        st.tuples(st.just("remove_below"), numbers),
        st.tuples(st.just("remove_from"), numbers),
    ),
    max_size=8,
)


def runs_of(members: set[int]) -> list[tuple[int, int]]:
    """The runs of a set, the plain way."""
    firsts = sorted(one for one in members if one - 1 not in members)
    lasts = sorted(one for one in members if one + 1 not in members)
    return list(zip(firsts, lasts, strict=True))


def check_is(found: NumberRuns, members: set[int]) -> None:
    assert found.runs() == runs_of(members)
    assert found.count() == len(members)
    assert bool(found) == bool(members)
    assert {one for one in NUMBERS if one in found} == members
    for number in NUMBERS:
        last = number - 1
        while last + 1 in members:
            last += 1
        assert found.last_of_run(number) == last


@settings(max_examples=60)
@given(changes)
def test_runs_are_what_a_set_would_be_after_any_changes(changed: list[tuple[str, int]]) -> None:
    found, members = NumberRuns(), set[int]()
    for what, *bounds in changed:
        getattr(found, what)(*bounds)
        if what == "add":
            members |= set(range(bounds[0], bounds[1] + 1))
        elif what == "remove_below":
            members = {one for one in members if one >= bounds[0]}
        else:
            members = {one for one in members if one < bounds[0]}
        check_is(found, members)


@pytest.mark.parametrize(
    ("added", "runs"),
    [
        ((1, 2), [(1, 2), (5, 7), (11, 11)]),
        ((3, 3), [(3, 3), (5, 7), (11, 11)]),
        ((4, 4), [(4, 7), (11, 11)]),
        ((6, 6), [(5, 7), (11, 11)]),
        ((5, 9), [(5, 9), (11, 11)]),
        ((8, 9), [(5, 9), (11, 11)]),
        ((8, 10), [(5, 11)]),
        ((0, 20), [(0, 20)]),
        ((9, 9), [(5, 7), (9, 9), (11, 11)]),
        ((12, 12), [(5, 7), (11, 12)]),
        ((13, 14), [(5, 7), (11, 11), (13, 14)]),
        ((9, 8), [(5, 7), (11, 11)]),
        ((6, 5), [(5, 7), (11, 11)]),
    ],
)
def test_runs_that_touch_become_one_and_others_stay_apart(
    added: tuple[int, int], runs: list[tuple[int, int]]
) -> None:
    found = NumberRuns([(11, 11), (5, 7)])
    found.add(*added)
    assert found.runs() == runs


@pytest.mark.parametrize(
    ("number", "left"),
    [(5, [(5, 7), (11, 11)]), (6, [(6, 7), (11, 11)]), (7, [(7, 7), (11, 11)]), (8, [(11, 11)]),
     (11, [(11, 11)]), (12, [])],
)
def test_what_is_below_goes_and_the_number_itself_stays(
    number: int, left: list[tuple[int, int]]
) -> None:
    found = NumberRuns([(5, 7), (11, 11)])
    found.remove_below(number)
    assert found.runs() == left


@pytest.mark.parametrize(
    ("number", "left"),
    [(12, [(5, 7), (11, 11)]), (11, [(5, 7)]), (8, [(5, 7)]), (7, [(5, 6)]), (6, [(5, 5)]),
     (5, [])],
)
def test_what_is_above_goes_and_so_does_the_number_itself(
    number: int, left: list[tuple[int, int]]
) -> None:
    found = NumberRuns([(5, 7), (11, 11)])
    found.remove_from(number)
    assert found.runs() == left
