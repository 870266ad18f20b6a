"""The real disk does what its protocol says."""

from __future__ import annotations

import gc
import os
import stat
from pathlib import Path

import pytest

from rayq.storage.disk import LocalDisk


def test_a_file_is_written_read_cut_and_synced(tmp_path: Path) -> None:
    disk = LocalDisk()
    path = str(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        disk.open(path)
    file = disk.open(path, create=True)
    assert file.pwrite(b"hello", 3) == 5
    assert file.size() == 8
    assert file.pread(100, 0) == b"\0\0\0hello"
    file.sync_data()
    file.truncate(4)
    assert disk.open(path, writable=False).pread(10, 2) == b"\0h"
    with pytest.raises(OSError, match="Bad file"):
        disk.open(path, writable=False).pwrite(b"x", 0)
    file.close()
    file.close()
    with pytest.raises(OSError, match="closed"):
        file.pread(1, 0)


def test_a_cached_read_gives_the_bytes_or_none(tmp_path: Path) -> None:
    file = LocalDisk().open(str(tmp_path / "file"), create=True)
    file.pwrite(b"x" * 10_000, 0)
    for length, position in ((10_000, 0), (20_000, 5000), (10, 10_000), (10, 50_000)):
        assert file.pread_cached(length, position) in (file.pread(length, position), None)
    # The file is dropped from the cache: whatever the kernel does, the answer is right or None.
    file.sync_data()
    os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    assert file.pread_cached(10_000, 0) in (b"x" * 10_000, None)
    assert file.pread(10_000, 0) == b"x" * 10_000


def test_files_and_directories_are_for_the_owner_only(tmp_path: Path) -> None:
    disk = LocalDisk()
    disk.make_dirs(str(tmp_path / "a" / "b"))
    disk.make_dirs(str(tmp_path / "a" / "b"))
    disk.open(str(tmp_path / "a" / "b" / "file"), create=True).close()
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a" / "b" / "file").stat().st_mode) == 0o600


def test_names_are_listed_renamed_and_removed(tmp_path: Path) -> None:
    disk = LocalDisk()
    assert disk.list(str(tmp_path / "nothing")) == []
    for name in ("b", "a"):
        disk.open(str(tmp_path / name), create=True).close()
    assert disk.list(str(tmp_path)) == ["a", "b"]
    disk.rename(str(tmp_path / "a"), str(tmp_path / "b"))
    disk.sync_dir(str(tmp_path))
    assert disk.list(str(tmp_path)) == ["b"]
    assert disk.exists(str(tmp_path / "b"))
    disk.remove(str(tmp_path / "b"))
    disk.make_dirs(str(tmp_path / "tree" / "below"))
    disk.remove_tree(str(tmp_path / "tree"))
    assert disk.list(str(tmp_path)) == []
    assert disk.free_bytes(str(tmp_path)) > 0


def test_a_lock_has_one_holder_until_it_is_closed(tmp_path: Path) -> None:
    disk = LocalDisk()
    path = str(tmp_path / "lock")
    first, second = disk.open(path, create=True), disk.open(path)
    assert first.try_lock()
    assert first.try_lock()
    assert not second.try_lock()
    first.close()
    assert second.try_lock()


def test_a_file_that_nobody_refers_to_is_closed(tmp_path: Path) -> None:
    file = LocalDisk().open(str(tmp_path / "file"), create=True)
    descriptor = file.descriptor
    del file
    gc.collect()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)
