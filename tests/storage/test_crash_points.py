"""Every change of files that a crash may interrupt, with a crash after each of its operations.

Whoever writes a new change of files adds it to one of the two tables. See `crash_points`.
"""

from __future__ import annotations

import pytest

from tests.storage.changes_of_directories import DIRECTORY_CHANGES
from tests.storage.changes_of_logs import LOG_CHANGES
from tests.storage.crash_disk import Fault
from tests.storage.crash_points import Change, CrashPoints, Wrong

CHANGES: dict[str, Change] = {**LOG_CHANGES, **DIRECTORY_CHANGES}
SLOW = (
    "a flush after a roll",
    "a flush after a roll, without room for a checkpoint",
    "a checkpoint",
    "a checkpoint of transactions",
    "the recovery of a torn tail",
    "a new partition",
    "a reset",
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


FILE, DIRECTORY = "file.sync_data()", "disk.sync_dir(os.path.dirname(path))"
PLANTED = (
    ("a small file", FILE),
    ("a small file", DIRECTORY),
    ("a metadata log", "in MetadataLog._append"),
    ("a metadata log", f"{FILE} of checked_file.replace(self._disk, self._path, data)"),
    ("a metadata log", f"{DIRECTORY} of checked_file.replace(self._disk, self._path, data)"),
    ("other settings", f'{DIRECTORY} of checked_file.write(disk, f"{{path}}/{{SETTINGS}}"'),
    ("a start of a broker", "in DataDirectory.open"),
    ("a batch of a streaming query", "in LocalStore.make_directories"),
    ("objects in a directory", "file.sync_data() in _put"),
    ("a reset", f"{FILE} of write_epochs("),
    ("a reset", f'{DIRECTORY} of checked_file.write(disk, f"{{directory}}/{{RESET}}"'),
    ("a compaction", "disk.sync_dir(directory) in _clean"),
    ("a compaction", "disk.sync_dir(directory) in _complete"),
    ("a compaction", f"{DIRECTORY} of write_clean_state("),
    ("a compaction of transactions", "self.disk.sync_dir(cleaning) in SwapPlan.prepare"),
    ("a truncation over segments", f"{FILE} of write_checkpoint(self._disk"),
    ("a truncation over segments", f"{DIRECTORY} of write_checkpoint(self._disk"),
)
"""A change, and a sync without which a crash leaves what it may not leave."""


@pytest.mark.parametrize(("name", "sync"), PLANTED)
def test_a_sync_that_is_left_out_is_noticed(name: str, sync: str) -> None:
    points = CrashPoints(CHANGES[name], Fault(sync))
    with pytest.raises(Wrong):
        points.run()
    assert any(sync in line for line in points.syncs)


def test_a_sync_that_comes_after_its_rename_is_noticed() -> None:
    with pytest.raises(Wrong):
        CrashPoints(CHANGES["a small file"], Fault(FILE, is_late=True)).run()
