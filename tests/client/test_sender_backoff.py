"""How long a partition waits after a failure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rayq.client.producing.flight import Flight
from rayq.client.producing.sender import Sender
from rayq.errors import NotEnoughReplicasError


class CountedBackoff:
    def __init__(self) -> None:
        self.calls = 0

    def next_s(self) -> float:
        self.calls += 1
        return 0.02 * 2**self.calls


def test_the_batches_of_one_window_that_fail_together_are_one_failure() -> None:
    # Five batches in flight to a leader that died once cost five doublings: writes to its
    # successor paused for up to a second where 20 ms were meant.
    sender: Any = object.__new__(Sender)
    sender._client = SimpleNamespace(now=100.0)
    sender._pump_at = lambda flight, at: None
    backoff: Any = CountedBackoff()
    queue: Any = SimpleNamespace(topic="t", topic_id="id", partition=0)
    flight = Flight(queue, backoff)
    for _ in range(5):
        sender._stall(flight, NotEnoughReplicasError("too few"))
    assert backoff.calls == 1
    assert flight.resume_at == 100.04
    sender._client.now = 101.0
    sender._stall(flight, NotEnoughReplicasError("too few, again"))
    assert backoff.calls == 2
