"""The leader epoch of each offset, by which two replicas find where their logs diverge."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from rayq.environment import Disk
from rayq.errors import StorageError
from rayq.storage import checked_file

LEADER_EPOCHS = "leader-epochs"
_KIND = "leader-epochs"
_VERSION = 1


class EpochCache:
    """`(leader epoch, start offset)` pairs, both ascending: an epoch lasts until the next starts.

    The cache is in memory. The file `leader-epochs` (lines of `epoch start`) is written with each
    checkpoint, and trusted only below its recovery point: later epochs are read from the batches.
    KIP-101, KIP-279.
    """

    def __init__(self, entries: list[tuple[int, int]] | None = None) -> None:
        self._epochs: list[int] = []
        self._starts: list[int] = []
        self.changes = 0
        """The number of changes, so that an unchanged cache is not written again."""
        for epoch, start_offset in entries or []:
            self.assign(epoch, start_offset)

    def assign(self, epoch: int, start_offset: int) -> None:
        """`epoch` begins at `start_offset`, unless it began already. Epochs that would start there
        or later had no records: they go."""
        if self._epochs and epoch <= self._epochs[-1]:
            assert epoch == self._epochs[-1], f"epoch {epoch} after {self._epochs[-1]}"
            return
        self.truncate_to_end(start_offset)
        self._epochs.append(epoch)
        self._starts.append(start_offset)
        self.changes += 1

    def latest(self) -> int | None:
        """The last epoch assigned, with or without records."""
        return self._epochs[-1] if self._epochs else None

    def start_of(self, epoch: int) -> int | None:
        """The start of `epoch`, or None when it left no records here."""
        place = bisect_left(self._epochs, epoch)
        if place < len(self._epochs) and self._epochs[place] == epoch:
            return self._starts[place]
        return None

    def epoch_of(self, offset: int) -> int | None:
        """The epoch that wrote (or will write) `offset`, or None before the first known epoch."""
        place = bisect_right(self._starts, offset) - 1
        return self._epochs[place] if place >= 0 else None

    def end_for(self, epoch: int, end_offset: int) -> tuple[int | None, int]:
        """The largest epoch here that is not above `epoch`, and its end (KIP-279): so much a
        replica whose last batch is of `epoch` can have in common with this log, which ends at
        `end_offset`. Without such an epoch: None, and the start of the first epoch here."""
        place = bisect_right(self._epochs, epoch)
        ends = self._starts[place] if place < len(self._starts) else end_offset
        return (self._epochs[place - 1] if place > 0 else None), ends

    def entries(self) -> list[tuple[int, int]]:
        return list(zip(self._epochs, self._starts, strict=True))

    def learn(self, entries: list[tuple[int, int]]) -> None:
        """Adds the epochs that begin before the first one here: `entries` are those of earlier
        records of the same log. The first one here may have begun earlier than was known."""
        earlier = [entry for entry in entries if not self._starts or entry[1] < self._starts[0]]
        known = self.entries()
        if earlier and known and earlier[-1][0] == known[0][0]:
            del known[0]
        if not earlier or (known and earlier[-1][0] > known[0][0]):
            return  # Nothing new, or another history.
        self._epochs, self._starts = map(list, zip(*earlier, *known, strict=True))
        self.changes += 1

    def truncate_to_end(self, offset: int) -> None:
        """Drops the epochs that start at `offset` or later."""
        keep = bisect_left(self._starts, offset)
        if keep < len(self._starts):
            del self._epochs[keep:], self._starts[keep:]
            self.changes += 1

    def truncate_to_start(self, offset: int) -> None:
        """Drops the epochs that end before `offset`. The epoch of the record before `offset` stays,
        so that an emptied log still knows its last epoch."""
        drop = bisect_left(self._starts, offset) - 1
        if drop > 0:
            del self._epochs[:drop], self._starts[:drop]
            self.changes += 1

    def encode(self) -> bytes:
        """The content of the file `leader-epochs`."""
        return b"".join(b"%d %d\n" % entry for entry in self.entries())


def write_epochs(disk: Disk, directory: str, content: bytes) -> None:
    """Replaces `leader-epochs`; durable after a sync of the directory. Raises OSError."""
    path = f"{directory}/{LEADER_EPOCHS}"
    checked_file.write(disk, path, _KIND, _VERSION, content, syncs_directory=False)


def read_epochs(disk: Disk, directory: str) -> EpochCache | None:
    """The cache as it was written, or None when there is no file.

    Raises `StorageError` when it is damaged, `UnsupportedFormatError` for another version.
    """
    path = f"{directory}/{LEADER_EPOCHS}"
    content = checked_file.read(disk, path, _KIND, _VERSION)
    if content is None:
        return None
    cache = EpochCache()
    try:
        for line in content.decode("ascii").splitlines():
            epoch, start_offset = line.split(" ")
            cache.assign(int(epoch), int(start_offset))
    except ValueError as error:
        raise StorageError(f"{path} is damaged: it holds no leader epochs ({error}).") from error
    return cache
