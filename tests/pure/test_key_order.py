"""The lines of unsettled records that have the same key."""

from __future__ import annotations

import random
from itertools import islice

import pytest

from rayq.core.queues.key_order import KeyOrder

KEYS = (b"x", b"y", b"z")


class Lines:
    """What `KeyOrder` says, from plain lists."""

    def __init__(self) -> None:
        self.order = KeyOrder()
        self.lines: dict[bytes, list[int]] = {key: [] for key in KEYS}
        self.end = 0

    def add(self, key: bytes) -> None:
        self.order.add(self.end, key)
        self.lines[key].append(self.end)
        self.end += 1

    def remove(self, offset: int) -> None:
        line = next((line for line in self.lines.values() if offset in line), [])
        is_first = line[:1] == [offset]
        if offset in line:
            line.remove(offset)
        assert self.order.remove(offset) == (line[0] if is_first and line else None)

    def all_after(self, offset: int) -> list[int]:
        return list(islice(self.order.all_after(offset), self.end + 1))  # It ends by itself.

    def compare(self) -> None:
        order = self.order
        in_lines = {offset for line in self.lines.values() for offset in line}
        for line in self.lines.values():
            for place, offset in enumerate(line):
                before = line[place - 1] if place else None
                assert order.before(offset) == before
                assert order.is_first(offset) == (before is None)
                later = line[place + 1 :]
                assert self.all_after(offset) == later
                assert order.after(offset) == (later[0] if later else None)
        for other in set(range(self.end + 1)) - in_lines:
            assert order.is_first(other), "nobody waits for what left"
            assert order.before(other) is None and order.after(other) is None
            assert not self.all_after(other)


@pytest.mark.parametrize("seed", range(10))
def test_each_key_has_a_line_of_its_own_in_the_order_of_its_records(seed: int) -> None:
    chosen, lines = random.Random(seed), Lines()
    for _ in range(30):
        if chosen.random() < 0.6:
            lines.add(chosen.choice(KEYS))
        else:
            lines.remove(chosen.randint(0, lines.end))
        lines.compare()


def test_a_line_closes_where_one_leaves_and_goes_on_behind_its_last() -> None:
    for leaving in ([0], [1], [2], [0, 1], [1, 2], [2, 1], [0, 2], [1, 0, 2], [2, 0, 1]):
        lines = Lines()
        for key in (b"x", b"x", b"x", b"y"):
            lines.add(key)
        for offset in (*leaving, leaving[0]):  # One that left already leaves nothing more.
            lines.remove(offset)
            lines.compare()
        for key in (b"x", b"y", b"z"):
            lines.add(key)
            lines.compare()
