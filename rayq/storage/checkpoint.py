"""The file `checkpoint` of a partition directory: a state of the log that is surely on disk."""

from __future__ import annotations

from dataclasses import dataclass

from rayq.environment import Disk
from rayq.errors import StorageError
from rayq.storage import checked_file

CHECKPOINT = "checkpoint"
_KIND = "checkpoint"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class LogCheckpoint:
    """One state of a log that is on disk as a whole.

    The file has lines of `name value`. A crash leaves the previous checkpoint or the new one. A
    checkpoint is written after all that it covers is synced, and lowered before anything is cut.
    Recovery never cuts below `recovery_point`, whatever the log looks like there.
    """

    recovery_point: int
    """All batches below it are on disk, with their index entries, epochs and producer states."""
    high_watermark: int
    log_start: int
    """The first offset that readers may ask for."""

    def encode(self) -> bytes:
        return (
            f"recovery_point {self.recovery_point}\n"
            f"high_watermark {self.high_watermark}\n"
            f"log_start {self.log_start}\n"
        ).encode()


def write_checkpoint(
    disk: Disk, directory: str, checkpoint: LogCheckpoint, *, syncs_directory: bool = True
) -> None:
    """Replaces the checkpoint, durably once the directory is synced. Raises OSError."""
    path = f"{directory}/{CHECKPOINT}"
    checked_file.write(
        disk, path, _KIND, _VERSION, checkpoint.encode(), syncs_directory=syncs_directory
    )


def read_checkpoint(disk: Disk, directory: str) -> LogCheckpoint | None:
    """The checkpoint, or None in a directory that has none yet.

    Raises `StorageError` when it is damaged, `UnsupportedFormatError` for another version.
    """
    path = f"{directory}/{CHECKPOINT}"
    content = checked_file.read(disk, path, _KIND, _VERSION)
    if content is None:
        return None
    try:
        pairs = (line.split(" ") for line in content.decode("ascii").splitlines())
        values = {name: int(value) for name, value in pairs}
        return LogCheckpoint(
            recovery_point=values["recovery_point"],
            high_watermark=values["high_watermark"],
            log_start=values["log_start"],
        )
    except (ValueError, KeyError) as error:
        raise StorageError(f"{path} is damaged: it is no checkpoint ({error}).") from error
