"""Errors cross the wire, also those of a newer rayq."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rayq import errors
from rayq.errors import NotLeaderError, UnknownServerError, from_wire, to_wire


def test_an_error_comes_back_as_what_it_was() -> None:
    error = from_wire(*to_wire(NotLeaderError("another leads")))
    assert type(error) is NotLeaderError and error.message == "another leads"


def test_an_error_that_only_a_newer_rayq_knows_leaves_the_outcome_unknown() -> None:
    error = from_wire("ErrorOfTomorrow", "it went wrong")
    assert type(error) is UnknownServerError
    assert error.outcome_unknown and not error.retriable
    assert error.message == "ErrorOfTomorrow: it went wrong"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("it is away", "it is away."),
        ("it is away.", "it is away."),
        ("Is it there?", "Is it there?"),
        (errors.NullKeyError("No key."), "No key."),
    ],
)
def test_an_error_within_another_message_ends_once(text: object, told: str) -> None:
    assert errors.sentence(text) == told


def test_nothing_else_takes_full_stops_off_errors() -> None:
    sources = Path(str(errors.__file__)).parent.rglob("*.py")
    found = [path.name for path in sources if re.search(r"rstrip\(['\"]\.", path.read_text())]
    assert found == ["errors.py"]
