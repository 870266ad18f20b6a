"""How much of what a queue knows of a log is still there after an unclean election."""

from __future__ import annotations

import pytest

from rayq.core.queue_cut import Epochs, common_end


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
