"""Decisions that are sent together lose none, however they are divided or put together."""

from __future__ import annotations

from typing import Any

import pytest

from rayq.client.queues.settling import WEIGHTS, Round
from rayq.messages import QUEUE_RANGES_MAX, Settle

DECIDED: dict[str, Any] = {
    "begins": (1, None),
    "acks": (1, None),
    "nacks": (1, 500, None),
    "rejects": (1, "why", False, None),
    "extends": (1, 30.0, None),
    "releases": (1, None),
}


def of(kind: str, *offsets: int) -> Round:
    made = Round()
    getattr(made.of("holder", 1), kind).update(dict.fromkeys(offsets, DECIDED[kind]))
    return made


@pytest.mark.parametrize("kind", WEIGHTS)
def test_what_was_decided_later_goes_with_what_is_sent_again(kind: str) -> None:
    sent = of("acks", 1)
    sent.add(of(kind, 2))
    assert 2 in getattr(sent.of("holder", 1), kind)
    assert sent.of("holder", 1).acks[1] == DECIDED["acks"]


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_large_settlement_is_divided_and_each_part_fits(kind: str) -> None:
    count = 2 * QUEUE_RANGES_MAX + 1
    whole = of(kind, *range(count)).of("holder", 1)
    parts = list(whole.parts())
    seen = [offset for part in parts for offset in getattr(part, kind)]
    assert seen == list(range(count)) and len(parts) > 1
    for part in parts:
        assert WEIGHTS[kind] * len(getattr(part, kind)) <= QUEUE_RANGES_MAX


def test_every_kind_of_decision_is_a_field_of_the_request() -> None:
    fields = of("acks", 1).of("holder", 1).fields()
    assert {*WEIGHTS} <= {*fields} <= {*Settle.__struct_fields__}
