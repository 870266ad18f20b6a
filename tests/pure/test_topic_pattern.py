"""Patterns over topic names: they match as `re` does where both can, and are never slow."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayq.core.topic_pattern import LEGAL, check_pattern, matches
from rayq.errors import InvalidRequestError

atoms = st.sampled_from(
    ["a", "b", ".", "-", "_", "0", "[ab]", "[^a]", "[a-c0]", "[-a]", "[]a]", "\\d", "\\w", "\\D", "\\.", "\\-"]
)
repeats = st.sampled_from(["", "*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "*?"])


def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    group = st.builds("({}){}".format, inner, repeats)
    return st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("{}|{}".format, inner, inner),
        group,
        st.builds("(?:{})".format, inner),
    )


patterns = st.recursive(st.builds("{}{}".format, atoms, repeats), grow, max_leaves=6)


@given(patterns, st.text("ab0c.-_", max_size=6))
def test_a_pattern_matches_what_re_matches(pattern: str, name: str) -> None:
    expected = re.fullmatch(pattern, name) is not None and not name.startswith("__")
    assert (name in matches(pattern, [name])) == expected


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
