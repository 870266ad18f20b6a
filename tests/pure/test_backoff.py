"""Backoff between two attempts."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rayq.backoff import Backoff


@pytest.mark.parametrize("seed", range(5))
def test_wait_times_double_up_to_the_maximum_each_with_a_quarter_of_jitter(seed: int) -> None:
    backoff = Backoff(cast(Any, SimpleNamespace(random=random.Random(seed))), 0.1, 0.7)
    for _ in range(2):
        waits_s = [backoff.next_s() for _ in range(5)]
        assert waits_s == pytest.approx([0.1, 0.2, 0.4, 0.7, 0.7], rel=0.25)
        assert len(set(waits_s)) == 5
        backoff.reset()
