"""A real disk whose files below some paths fail when a test says so."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from rayq.client.environment import system_environment
from rayq.environment import Buffer, Environment, File
from rayq.storage.disk import LocalDisk
from rayq.testing import local_cluster

HOLD_MAX_S = 60.0


class Faults:
    """The faults of now, by parts of paths: a path that contains such a part fails."""

    def __init__(self) -> None:
        self.full: set[str] = set()
        self.sync_fails: set[str] = set()
        self.held: str | None = None
        """The next open of a path that ends with this waits for `go_on`; later opens do not
        wait."""
        self.is_held = threading.Event()
        self.go_on = threading.Event()

    @staticmethod
    def met(parts: Iterable[str], path: str) -> bool:
        return any(part in path for part in parts)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Gives such disks to the LocalClusters that are made from now on."""

        def environment(config: Any) -> Environment:
            return replace(system_environment(config), disk=FaultyDisk(self))

        monkeypatch.setattr(local_cluster, "system_environment", environment)


class FaultyDisk(LocalDisk):
    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> Any:
        held = self._faults.held
        if held is not None and path.endswith(held):
            self._faults.held = None
            self._faults.is_held.set()
            assert self._faults.go_on.wait(HOLD_MAX_S)
        return FaultyFile(super().open(path, create=create, writable=writable), path, self._faults)

    def free_bytes(self, path: str) -> int:
        return 0 if Faults.met(self._faults.full, path) else super().free_bytes(path)


class FaultyFile:
    def __init__(self, file: File, path: str, faults: Faults) -> None:
        self._file = file
        self._path = path
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def pwrite(self, data: Buffer, position: int) -> int:
        if Faults.met(self._faults.full, self._path):
            raise OSError(errno.ENOSPC, "No space left on device", self._path)
        return self._file.pwrite(data, position)

    def sync_data(self) -> None:
        if Faults.met(self._faults.sync_fails, self._path):
            raise OSError(errno.EIO, "Input/output error", self._path)
        self._file.sync_data()
