"""A lack of file descriptors is a shortage that heals, never a failed disk."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayq.config import TopicConfig
from rayq.errors import OpenFilesLimitError
from rayq.storage.disk import LocalDisk
from tests.storage.support import FaultyDisk, Place, append, assert_holds, flush

SHORTAGES = [errno.EMFILE, errno.ENFILE]
SMALL_SEGMENTS = TopicConfig(segment_bytes=1024)


@pytest.fixture
def faulty(place: Place) -> FaultyDisk:
    place.disk = FaultyDisk()
    return place.disk


@pytest.mark.parametrize("error", SHORTAGES)
def test_a_roll_without_a_descriptor_refuses_the_append_and_heals(
    place: Place, faulty: FaultyDisk, error: int
) -> None:
    place.config = SMALL_SEGMENTS
    log = place.open()
    append(log, 1)
    faulty.faults["open"] = error
    appended = 1
    with pytest.raises(OpenFilesLimitError, match="ulimit"):
        for _ in range(100):
            append(log, 1)
            appended += 1
    with pytest.raises(OpenFilesLimitError):
        append(log, 1)
    assert log.failure is None
    faulty.faults.clear()
    append(log, 3)
    flush(log)
    assert_holds(log, 0, appended + 3)
    assert_holds(place.open(), 0, appended + 3)


@pytest.mark.parametrize("error", SHORTAGES)
def test_a_log_that_cannot_be_opened_for_want_of_a_descriptor_is_opened_later(
    place: Place, faulty: FaultyDisk, error: int
) -> None:
    log = place.open()
    append(log, 5)
    flush(log)
    faulty.faults["open"] = error
    with pytest.raises(OpenFilesLimitError, match="will be retried"):
        place.open()
    faulty.faults.clear()
    assert_holds(place.open(), 0, 5)


@pytest.mark.parametrize("error", SHORTAGES)
def test_a_read_without_a_descriptor_harms_nothing(
    place: Place, faulty: FaultyDisk, error: int
) -> None:
    place.config = SMALL_SEGMENTS
    log = place.open()
    for _ in range(40):
        append(log)
    flush(log)
    log = place.open()  # The files of closed segments are not open.
    faulty.faults["open"] = error
    with pytest.raises(OpenFilesLimitError):
        log.plan_read(0, 40, 10_000).run()
    faulty.faults.clear()
    assert_holds(log, 0, 40)


@pytest.fixture
def no_descriptors() -> Iterator[None]:
    """The process cannot open any more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.open(os.devnull, os.O_RDONLY)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_directory_is_synced_also_where_no_descriptor_is_free(
    tmp_path: Path, no_descriptors: None
) -> None:
    disk = LocalDisk()
    with pytest.raises(OSError, match="Too many open files"):
        disk.open(str(tmp_path / "file"), create=True)
    for _ in range(3):
        disk.sync_dir(str(tmp_path))
