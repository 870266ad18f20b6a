"""Decisions that are sent together lose none, however they are divided or put together."""

from __future__ import annotations

from typing import Any

import pytest

from rayq.client.queues.ack_batch import WEIGHTS, AckBatch
from rayq.messages import QUEUE_RANGES_MAX, Settle

DECIDED: dict[str, Any] = {
    "begins": (1, None),
    "acks": (1, None),
    "nacks": (1, 500, None),
    "rejects": (1, "why", False, None),
    "extends": (1, 30.0, None),
    "releases": (1, None),
}


def of(kind: str, *offsets: int) -> AckBatch:
    made = AckBatch("holder", 1)
    getattr(made, kind).update(dict.fromkeys(offsets, DECIDED[kind]))
    return made


@pytest.mark.parametrize("kind", WEIGHTS)
def test_what_was_decided_later_goes_with_what_is_sent_again(kind: str) -> None:
    sent = of("acks", 1)
    sent.add(of(kind, 2))
    assert 2 in getattr(sent, kind)
    assert sent.acks[1] == DECIDED["acks"]


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_large_settlement_is_divided_and_each_part_fits(kind: str) -> None:
    count = 2 * QUEUE_RANGES_MAX + 1
    whole = of(kind, *range(count))
    parts = list(whole.parts())
    seen = [offset for part in parts for offset in getattr(part, kind)]
    assert seen == list(range(count)) and len(parts) > 1
    for part in parts:
        assert WEIGHTS[kind] * len(getattr(part, kind)) <= QUEUE_RANGES_MAX


def test_every_kind_of_decision_is_a_field_of_the_request() -> None:
    fields = of("acks", 1).fields()
    assert {*WEIGHTS} <= {*fields} <= {*Settle.__struct_fields__}
