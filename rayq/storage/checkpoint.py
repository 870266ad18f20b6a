"""The file `checkpoint` of a partition directory: a state of the log that is surely on disk."""

from __future__ import annotations

from dataclasses import dataclass

from rayq.environment import Disk
from rayq.errors import StorageError
from rayq.storage import checked_file

CHECKPOINT = "checkpoint"
_KIND = "checkpoint"
_VERSIONS = 1, 2
"""Version 2 has a local start above the log start. Where there is none version 1 is written, so
that the log of a topic without remote storage stays what older versions of rayq read; and they
refuse the others, which they would take for logs that begin at their local start."""


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
    local_start: int = 0
    """Batches below it are in the object store only, down to `log_start`. Where it is not above
    `log_start`, all batches are here."""

    @property
    def local_start_offset(self) -> int:
        """The first offset whose record is here."""
        return max(self.log_start, self.local_start)

    @property
    def has_remote_part(self) -> bool:
        """True if batches above the log start are in the object store only."""
        return self.local_start > self.log_start

    def encode(self) -> tuple[int, bytes]:
        """Version and content of the file."""
        lines = (
            f"recovery_point {self.recovery_point}\n"
            f"high_watermark {self.high_watermark}\n"
            f"log_start {self.log_start}\n"
        )
        if not self.has_remote_part:
            return 1, lines.encode()
        return 2, f"{lines}local_start {self.local_start}\n".encode()


def write_checkpoint(
    disk: Disk, directory: str, checkpoint: LogCheckpoint, *, syncs_directory: bool = True
) -> None:
    """Replaces the checkpoint, durably once the directory is synced. Raises OSError."""
    path = f"{directory}/{CHECKPOINT}"
    version, content = checkpoint.encode()
    checked_file.write(disk, path, _KIND, version, content, syncs_directory=syncs_directory)


def read_checkpoint(disk: Disk, directory: str) -> LogCheckpoint | None:
    """The checkpoint, or None in a directory that has none yet.

    Raises `StorageError` when it is damaged, `UnsupportedFormatError` for another version.
    """
    path = f"{directory}/{CHECKPOINT}"
    content = checked_file.read(disk, path, _KIND, *_VERSIONS)
    if content is None:
        return None
    try:
        pairs = (line.split(" ") for line in content.decode("ascii").splitlines())
        values = {name: int(value) for name, value in pairs}
        return LogCheckpoint(
            recovery_point=values["recovery_point"],
            high_watermark=values["high_watermark"],
            log_start=values["log_start"],
            local_start=values.get("local_start", 0),
        )
    except (ValueError, KeyError) as error:
        raise StorageError(f"{path} is damaged: it is not a checkpoint ({error}).") from error
