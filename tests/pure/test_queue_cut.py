"""How much of what a queue knows of a log is still there after an unclean election."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from rayq.core.queues.cut import Epochs, common_end


@pytest.mark.parametrize(
    ("known", "learned", "log", "log_end", "log_start", "expected"),
    [
        # Nothing was lost.
        ([(3, 0)], 50, [(3, 0)], 80, 0, 50),
        ([(3, 0), (5, 40)], 50, [(3, 0), (5, 40), (6, 60)], 60, 0, 50),
        ([], 0, [(3, 0)], 80, 0, 0),
        # The log ends below what is known, and goes on in another epoch.
        ([(3, 0)], 50, [(3, 0), (6, 30)], 80, 0, 30),
        ([(3, 0)], 50, [(3, 0)], 30, 0, 30),
        ([], 50, [(6, 20)], 30, 0, 30),
        # The last epoch known never was here, and the one before it was longer here.
        ([(3, 0), (5, 40)], 50, [(3, 0), (6, 45)], 80, 0, 40),
        # ... or shorter.
        ([(3, 0), (5, 40)], 50, [(3, 0), (6, 30)], 80, 0, 30),
        # The same offsets, all of them others.
        ([(3, 0)], 50, [(6, 0)], 80, 0, 0),
        ([(3, 10)], 50, [(2, 0), (6, 30)], 80, 0, 10),
        # An epoch that begins later here.
        ([(3, 0), (5, 40)], 50, [(3, 0), (5, 45)], 80, 0, 40),
        # What lies below the log start is gone, and no reason to look back.
        ([(3, 0), (5, 40)], 50, [(5, 40)], 80, 40, 50),
        ([(3, 0), (5, 40)], 50, [(5, 45)], 80, 45, 50),
        ([(3, 0)], 50, [(6, 60)], 80, 60, 50),
    ],
)
def test_how_much_is_in_common(
    known: Epochs, learned: int, log: Epochs, log_end: int, log_start: int, expected: int
) -> None:
    assert common_end(known, learned, log, log_end, log_start=log_start) == expected


def epochs_of(chosen: random.Random, first: int, end: int) -> list[tuple[int, int]]:
    """Some leader epochs of the records of [first, end)."""
    begins = [first, *sorted(chosen.sample(range(first + 1, end), min(2, max(0, end - first - 1))))]
    return list(zip(sorted(chosen.sample(range(1, 6), len(begins))), begins, strict=True))


def epoch_at(epochs: Epochs, offset: int) -> int:
    """That of the record; 0 below all that is known."""
    return next((one for one, first in reversed(epochs) if first <= offset), 0)


def is_in_common(known: Epochs, log: Epochs, offset: int) -> bool:
    epoch = epoch_at(known, offset)
    # Nothing is known of a record below the first epoch but that it is no younger than that.
    return epoch_at(log, offset) == epoch if epoch else epoch_at(log, offset) <= known[0][0]


@pytest.mark.parametrize("seed", range(10))
def test_what_is_in_common_ends_at_the_first_record_of_another_epoch(seed: int) -> None:
    chosen = random.Random(seed)
    for _ in range(200):
        log_start = chosen.randint(0, 4)
        log_end = chosen.randint(log_start + 1, 14)
        first = chosen.randint(0, 4)
        learned = chosen.randint(first + 1, 14)
        log, known = epochs_of(chosen, log_start, log_end), epochs_of(chosen, first, learned)
        if chosen.random() < 0.6:
            # The history of both is the same, and goes on otherwise at most.
            known = [one for one in log if one[1] < learned]
            if learned > log_end and chosen.random() < 0.5:
                known.append((7, chosen.randint(log_end, learned - 1)))
        assert all(one < other for one, other in pairwise(known))
        expected = log_start
        while expected < min(learned, log_end) and is_in_common(known, log, expected):
            expected += 1
        if learned <= log_start:
            expected = learned
        found = common_end(known, learned, log, log_end, log_start=log_start)
        assert found == expected, (known, learned, log, log_end, log_start)
