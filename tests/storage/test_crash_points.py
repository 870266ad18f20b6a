"""Every change of files that a crash may interrupt, with a crash after each of its operations.

Whoever writes a new change of files adds it to one of the two tables. See `crash_points`.
"""

from __future__ import annotations

import pytest

from tests.storage.changes_of_directories import DIRECTORY_CHANGES
from tests.storage.changes_of_logs import LOG_CHANGES
from tests.storage.crash_points import Change, CrashPoints

CHANGES: dict[str, Change] = {**LOG_CHANGES, **DIRECTORY_CHANGES}
SLOW = (
    "a flush after a roll",
    "a flush after a roll, without room for a checkpoint",
    "a checkpoint",
    "a checkpoint of transactions",
    "the recovery of a torn tail",
    "a truncation over segments",
    "a truncation to nothing",
    "a reset to a part that is in the object store",
    "retention",
    "deleted records",
    "local retention",
    "a compaction of transactions",
    "a compaction that removes tombstones and markers",
    "a partition that goes, and one that takes its name",
)
"""Those of more than a second. Of each kind one is not here."""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR", "rayq")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CHANGES],
)
def test_a_crash_leaves_what_was_acknowledged(name: str) -> None:
    CrashPoints(CHANGES[name]).run()
