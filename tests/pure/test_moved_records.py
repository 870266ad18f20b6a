"""The headers of dead letters, and what is read from them."""

from __future__ import annotations

import pytest

from rayq.core.queues.moved_records import (
    dead_letter_headers,
    header_of,
    own_headers,
    source_of,
    target_partition,
)
from rayq.core.queues.moves import FailedRecord

OWN = [("a", b"1"), ("rayq.other", b"2"), ("a", b"3")]


def test_a_dead_letter_says_where_it_was_and_why_and_keeps_its_own_headers() -> None:
    plain = dead_letter_headers("t", 3, FailedRecord(7, 2, "deliveries", ""), OWN)
    assert plain == [
        *OWN, ("rayq.source", b"t/3/7"), ("rayq.reason", b"deliveries"), ("rayq.count", b"2"),
    ]
    # It fails once more as a dead letter: what it says of itself is only said once.
    again = dead_letter_headers("t.dead", 0, FailedRecord(1, 4, "rejected", "b\udc80d", True), plain)
    assert again[:3] == OWN and len({name for name, _ in again[3:]}) == len(again[3:])
    assert dict(again[3:]) == {
        "rayq.source": b"t.dead/0/1", "rayq.reason": b"rejected", "rayq.count": b"4",
        "rayq.error": b"b?d", "rayq.doubt": b"copy",
    }
    assert own_headers(again) == OWN


@pytest.mark.parametrize(
    "value, source",
    [
        (b"t/3/7", ("t", 3)), (b"t/000003/7", ("t", 3)), (b"t/0000003/7", None), (b"t/3", None),
        (b"/3/7", None), (b"t/-3/7", None), (b"t//7", None), ("t/\u0663/7".encode(), None), (b"\xff", None),
    ],
)
def test_other_bytes_name_no_source(value: bytes, source: tuple[str, int] | None) -> None:
    assert source_of([("rayq.source", b"u/1/1"), ("rayq.source", value), ("a", b"v/2/2")]) == source


def test_without_the_header_there_is_no_source() -> None:
    assert source_of([("a", b"t/3/7")]) is None
    assert source_of([]) is None


def test_of_several_headers_of_a_name_the_last_counts() -> None:
    assert [header_of(OWN, name) for name in ("a", "rayq.other", "b")] == [b"3", b"2", None]


@pytest.mark.parametrize(
    "name",
    [
        "rayq.source", "rayq.reason", "rayq.count", "rayq.error", "rayq.doubt",
        # What consumer pools say of a record.
        "rayq.error.class", "rayq.error.message",
    ],
)
def test_a_record_that_goes_back_says_nothing_of_its_death(name: str) -> None:
    dead = [OWN[0], (name, b"1"), *OWN[1:], (name, b"2")]
    assert own_headers(dead) == OWN
    letter = dead_letter_headers("t", 3, FailedRecord(7, 2, "deliveries", ""), dead)
    assert letter[:3] == OWN and [one for one, _value in letter[3:]] == [
        "rayq.source", "rayq.reason", "rayq.count",
    ]


def test_records_keep_their_partition_where_the_target_has_it() -> None:
    assert [target_partition(one, 3) for one in range(5)] == [0, 1, 2, 0, 1]
