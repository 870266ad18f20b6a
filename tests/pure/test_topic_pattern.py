"""Patterns over topic names: they match as `re` does where both can, and are never slow."""

from __future__ import annotations

import itertools
import random
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayq.core.groups.topic_pattern import LEGAL, REMEMBERED_MAX, _automaton, check_pattern, matches
from rayq.errors import InvalidRequestError

atoms = st.sampled_from(
    ["a", "b", ".", "-", "_", "0", "[ab]", "[^a]", "[a-c0]", "[-a]", "[]a]", "\\d", "\\w", "\\D", "\\.", "\\-",
     "\\s", "\\S", "\\W", "[\\d_]", "[^\\w.]", "[^]a]", "[a\\-c]", "[.-0]", "[0-b]", "[^a-b-]", "[^\\S]"]
)
repeats = st.sampled_from(["", "*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "*?", "{0}", "{2,3}?", "??", "+?"])


def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    group = st.builds("({}){}".format, inner, repeats)
    return st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("{}|{}".format, inner, inner),
        group,
        st.builds("(?:{})".format, inner),
    )


patterns = st.recursive(st.builds("{}{}".format, atoms, repeats), grow, max_leaves=6)


NAMES = ["".join(one) for length in range(5) for one in itertools.product("ab0-", repeat=length)]
NAMES += ["_", "_a", "a_", ".", "a.", "a.b", "..a", "c", "cab", "Z", "aaaaa", "ababab", "b0b0b0b"]


@given(patterns)
def test_a_pattern_matches_what_re_matches(pattern: str) -> None:
    expected = {name for name in NAMES if re.fullmatch(pattern, name)}
    assert matches(pattern, NAMES) == expected


@given(st.text(max_size=40))
def test_any_text_is_a_pattern_or_refused(text: str) -> None:
    try:
        check_pattern(text)
    except InvalidRequestError as error:
        assert repr(text) in str(error)


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+b", "(a*)*b", "(a|a)*b", "(.*a){20}b", ".*" * 50 + "b", "(a?){200}b", "([a-z]+)*-b"],
)
def test_catastrophic_patterns_cost_no_more_than_others(pattern: str) -> None:
    started_s = time.thread_time()
    assert matches(pattern, ["a" * 200, "a" * 199 + "b", "a" * 200 + "-b"])
    assert time.thread_time() - started_s < 2


@pytest.mark.parametrize("pattern", ["(.?){249}", "((.?a?){60}.*){2}", ".*a.{0,100}b.{0,60}"])
def test_a_character_costs_little_however_many_states_it_may_lead_to(pattern: str) -> None:
    """Each of these has hundreds of states, most of which most names are in at one time."""
    rng = random.Random(pattern)
    names = ["".join(rng.choices("ab", k=200)) for _ in range(400)]
    began_s = time.thread_time()
    assert matches(pattern, names)
    assert time.thread_time() - began_s < 1


@pytest.mark.parametrize(
    "pattern",
    ["(", ")", "[", "[z-a]", "[\\d-z]", "[a-\\d]", "*", "a**", "a{3,2}", "a{x}", "(?=a)", "(?i)a", "(a)\\1", "\\b", "a$b", "a^b",
     "a\\", "x" * 1025, "[" + "x" * 1023 + "]", "(" * 21 + "a" + ")" * 21, "(a{100}){5}", "(" * 9 + ")" + "{249})" * 8 + "{249}", "a{250}"],
)
def test_what_cannot_be_matched_in_bounded_time_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequestError, match="pattern"):
        check_pattern(pattern)


def test_anchors_around_a_pattern_change_nothing() -> None:
    assert matches("^flights-.*$", ["flights-1", "xflights-1"]) == {"flights-1"}
    assert matches("a\\.b$", ["a.b", "axb"]) == {"a.b"}
    assert matches("", ["a"]) == set()


def test_a_range_has_both_its_ends() -> None:
    assert matches("[b-d]", "abcde") == set("bcd")
    assert matches("[b-b]", "abc") == {"b"}
    assert matches("[b-]", "abc-") == {"b", "-"}
    assert matches("[^b-d]", "abcde") == set("ae")


def test_internal_topics_match_no_pattern() -> None:
    assert matches(".*", ["__consumer_offsets", "a"]) == {"a"}


def test_every_legal_character_can_be_named() -> None:
    assert matches("[A-Za-z0-9._-]+", ["".join(sorted(LEGAL))]) == {"".join(sorted(LEGAL))}


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("x" * 1025, "up to 1024 characters, not 1025"),
        ("a)", "has an unbalanced '\\)'"),
        ("(a))", "has an unbalanced '\\)'"),
        ("(a", "has an unbalanced '\\('"),
        ("(a|b", "has an unbalanced '\\('"),
        ("[a", "has an unbalanced '\\['"),
        ("[]", "has an unbalanced '\\['"),
        ("[^]", "has an unbalanced '\\['"),
        ("[a-", "has an unbalanced '\\['"),
        ("[$", "has an unbalanced '\\['"),
        ("[b-a]", "has a range that is none"),
        ("[\\d-z]", "has a range that is none"),
        ("[0-\\d]", "has a range that is none"),
        ("[\\s-a]", "has a range that is none"),
        ("[a-\\s]", "has a range that is none"),
        ("*a", "has '\\*' where it means nothing"),
        ("a|+", "has '\\+' where"),
        ("(?)", "has a look-around, flag or named group"),
        ("(?P<n>a)", "has a look-around, flag or named group"),
        ("(*)", "has '\\*' where"),
        ("{2}", "has '{' where"),
        ("^^a", "has '\\^' where"),
        ("a$$", "has '\\$' where"),
        ("a*+", "has a repeat of a repeat"),
        ("a??*", "has a repeat of a repeat"),
        ("a{2}{2}", "has a repeat of a repeat"),
        ("a{2", "has a '{' that is not a repeat"),
        ("a{}", "has a '{' that is not a repeat"),
        ("a{,}", "has a '{' that is not a repeat"),
        ("a{x}", "has a '{' that is not a repeat"),
        ("a{x,2}", "has a '{' that is not a repeat"),
        ("a{2,x}", "has a '{' that is not a repeat"),
        ("a{1,2,3}", "has a '{' that is not a repeat"),
        ("a{250}", "has a repeat above 249"),
        ("a{1,250}", "has a repeat above 249"),
        ("a{250,}", "has a repeat above 249"),
        ("a{0001}", "has a repeat above 249"),
        ("a{2,1}", "has a repeat whose bounds are the wrong way round"),
        ("\\", "has the escape '\\\\', which is not supported"),
        ("\\n", "has the escape '\\\\n', which is not supported"),
        ("[\\b]", "has the escape '\\\\b', which is not supported"),
        ("(" * 21 + ")" * 21, "has more than 20 groups within each other"),
        ("a" * 500, "has repeats that come to more than 500 states"),
        ("((){249}){39}" + "()" * 210, "has repeats that come to more than 10000 parts"),
    ],
)
def test_a_refusal_says_what_is_wrong(pattern: str, what: str) -> None:
    with pytest.raises(InvalidRequestError, match=what):
        check_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "()" * 512,
        "(" * 20 + ")" * 20,
        "()" * 30,
        "a{249}",
        "a{0,249}",
        "a{249,249}",
        "a" * 499,
        "((){249}){39}" + "()" * 209,
    ],
)
def test_a_pattern_at_its_limits_is_taken(pattern: str) -> None:
    check_pattern(pattern)


@pytest.mark.parametrize(
    ("repeat", "lengths"),
    [
        ("", {1}), ("?", {0, 1}), ("*", {0, 1, 2, 3, 4, 5, 6}), ("+", {1, 2, 3, 4, 5, 6}),
        ("{0}", {0}), ("{1}", {1}), ("{3}", {3}), ("{2,4}", {2, 3, 4}), ("{4,4}", {4}),
        ("{,3}", {0, 1, 2, 3}), ("{0,0}", {0}), ("{4,}", {4, 5, 6}), ("{0,}", {0, 1, 2, 3, 4, 5, 6}),
        ("{2,4}?", {2, 3, 4}), ("+?", {1, 2, 3, 4, 5, 6}), ("??", {0, 1}),
    ],
)
@pytest.mark.parametrize("part", ["a", "(a)", "(?:a)", "[a]", "(a|b)"])
def test_a_repeat_is_of_the_part_before_it(part: str, repeat: str, lengths: set[int]) -> None:
    found = matches(f"x{part}{repeat}y", [f"x{'a' * length}y" for length in range(7)])
    assert {len(name) - 2 for name in found} == lengths


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("^a", {"a"}), ("a$", {"a"}), ("^a$", {"a"}), ("^$", {""}), ("$", {""}), ("^", {""}),
        ("a\\$", {"a$"}), ("a\\\\$", {"a\\"}), ("a\\\\\\$", {"a\\$"}), ("\\^a", {"^a"}),
        ("[a$]", {"a", "$"}), ("[$^]", {"$", "^"}), ("a|", {"a", ""}), ("|a", {"a", ""}),
        ("a||b", {"a", "", "b"}), ("(a|b)$", {"a", "b"}), ("^a|b$", {"a", "b"}),
    ],
)
def test_anchors_stand_at_the_ends_and_are_characters_where_they_are_escaped(
    pattern: str, names: set[str]
) -> None:
    all_names = ["", "a", "b", "$", "^", "a$", "^a", "a\\", "a\\$", "ab", "aa"]
    assert matches(pattern, all_names) == names


def test_only_two_underscores_make_a_topic_rayqs_own() -> None:
    assert matches(".*", ["_", "_a", "__", "__a", "a__", "_a_"]) == {"_", "_a", "a__", "_a_"}


def test_what_an_automaton_remembers_is_bounded_and_changes_no_answer() -> None:
    pattern = "(a|b)*a(a|b){12}"
    names = ["".join(one) for one in itertools.product("ab", repeat=13)][:1500]
    automaton = _automaton(pattern)
    for name in names:
        assert automaton.matches(name) == (name[0] == "a")
        assert len(automaton._remembered) <= REMEMBERED_MAX
