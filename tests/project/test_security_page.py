"""docs/security.md tells what needs which right as the requests themselves say it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest

from rayq.core.access.rights import needed_by
from rayq.messages.acls import Operation, ResourceType
from tests.pure.test_rights import CLIENT_REQUESTS, NAMES
from tests.wire.recorded_messages import example_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
RIGHT = re.compile(rf"({'|'.join(get_args(ResourceType))}) ({'|'.join(get_args(Operation))})\b")


class Row(NamedTuple):
    always: set[tuple[str, ...]]
    """The rights that the row names without a condition."""
    at_most: set[tuple[str, ...]]


def rows() -> dict[str, Row]:
    """The rows of the table, by the requests that they name."""
    found: dict[str, Row] = {}
    section = PAGE.read_text(encoding="utf-8").partition("## What needs which right")[2]
    for line in section.partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 3 or not cells[2].startswith("`"):
            continue
        needs = cells[1]
        row = Row(set(RIGHT.findall(needs.partition(";")[0])), set(RIGHT.findall(needs)))
        for name in re.findall(r"`(\w+)`", cells[2]):
            assert name not in found, f"{name} is in two rows of {PAGE.name}"
            found[name] = row
    return found


def test_the_table_has_each_request_that_clients_send() -> None:
    assert rows().keys() == {kind.__name__ for kind in CLIENT_REQUESTS}


@pytest.mark.parametrize("kind", CLIENT_REQUESTS, ids=lambda kind: kind.__name__)
def test_the_table_says_what_a_request_needs(kind: type[Any]) -> None:
    row = rows()[kind.__name__]
    needed = {(need.resource_type, need.operation) for need in needed_by(example_of(kind), NAMES)}
    assert row.always <= needed <= row.at_most
