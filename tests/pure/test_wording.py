"""Messages that are put together from parts are in grammatical English."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rayq
from rayq.errors import NullKeyError, counted, sentence


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("it is away", "it is away."),
        ("it is away.", "it is away."),
        ("Is it there?", "Is it there?"),
        (NullKeyError("No key."), "No key."),
    ],
)
def test_an_error_within_another_message_ends_once(text: object, told: str) -> None:
    assert sentence(text) == told


def test_nothing_else_takes_full_stops_off_errors() -> None:
    sources = Path(str(rayq.__file__)).parent.rglob("*.py")
    found = [path.name for path in sources if re.search(r"rstrip\(['\"]\.", path.read_text())]
    assert found == ["errors.py"]


def test_a_number_and_its_noun_agree() -> None:
    assert [counted(number, "record") for number in (0, 1, 1234)] == [
        "0 records",
        "1 record",
        "1,234 records",
    ]
    assert counted(1, "record was", "records were") == "1 record was"
