"""Checkpoint of a streaming query: which offsets each batch reads, and which batches are done.

Laid out as Spark's own::

    lock            the process that uses the checkpoint
    metadata        the query: its id, its topics and cluster, and where it starts
    offsets/<N>     the ranges that batch N reads, written before it runs
    commits/<N>     written after batch N has run

Each file is a line `rayq <kind> <version> <crc32c>` and JSON (`rayq.storage.checked_file`), and is
replaced as a whole. `metadata` is written first, with the starting positions: so a query that
started at "latest" starts there again, even when it died before its first batch. A crash leaves at
most one batch without a commit, the last. It is run again, with the same offsets.

Only the last batch says where to continue. `BATCHES_KEPT` batches are kept for people to look at.
"""

from __future__ import annotations

import contextlib
import os
from typing import TypeVar

import msgspec

from rayq.batch.offset_ranges import Split
from rayq.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointInUseError,
    StorageError,
    UnsupportedFormatError,
    sentence,
)
from rayq.spark.batches import MicroBatch, Resumption, resume
from rayq.spark.checkpoint_store import Store, open_store
from rayq.storage import checked_file

FORMAT_VERSION = 1
METADATA, OFFSETS, COMMITS = "metadata", "offsets", "commits"
BATCHES_KEPT = 100
"""The same number as Spark's minBatchesToRetain."""


class QueryMetadata(msgspec.Struct, frozen=True):
    """The file `metadata`. `start` has an empty range for each partition, where the query starts.
    `topics` is empty where there is a pattern."""

    id: str
    cluster_id: str
    topics: list[str]
    pattern: str | None
    created_ms: int
    start: list[Split]


class WrittenBatch(msgspec.Struct, frozen=True):
    """A file `offsets/<N>`."""

    query_id: str
    batch: MicroBatch


class BatchCommit(msgspec.Struct, frozen=True):
    """A file `commits/<N>`."""

    query_id: str
    batch_id: int
    timestamp_ms: int


Content = TypeVar("Content", QueryMetadata, WrittenBatch, BatchCommit)


class Checkpoint:
    """A checkpoint, which one query holds from `open` to `close`. Every method raises
    CheckpointError."""

    def __init__(self, store: Store) -> None:
        """Use `Checkpoint.open`."""
        self._store = store
        self._query_id = ""
        self._last_written: int | None = None
        self._last_committed: int | None = None

    @property
    def path(self) -> str:
        return self._store.path

    @staticmethod
    def open(path: str | os.PathLike[str], run_id: str) -> Checkpoint:
        """Takes the lock. Raises CheckpointInUseError, CheckpointError."""
        return Checkpoint.of(open_store(path, run_id))

    @staticmethod
    def of(store: Store) -> Checkpoint:
        store.lock()
        return Checkpoint(store)

    def close(self) -> None:
        """Releases the lock. Idempotent."""
        self._store.unlock()

    # --- the start ------------------------------------------------------------------------------

    def metadata(self) -> QueryMetadata | None:
        """The metadata, or None in a new checkpoint. Raises CheckpointDamagedError,
        UnsupportedFormatError."""
        found = self._read(METADATA, METADATA, QueryMetadata)
        if found is None:
            left = [*self._numbers(OFFSETS), *self._numbers(COMMITS)]
            if left:
                raise self._damaged(
                    f"{METADATA} is missing, and there are batches up to {max(left)}"
                )
            return None
        self._query_id = found.id
        return found

    def create(self, metadata: QueryMetadata) -> None:
        """Writes the metadata of a new checkpoint, durably."""
        assert self._query_id == "", "made once"
        self._store.make_directories(OFFSETS, COMMITS)
        self._write(METADATA, METADATA, metadata)
        self._query_id = metadata.id

    def resume(self, metadata: QueryMetadata) -> Resumption:
        """The batch to run again, and the position after it. Raises CheckpointDamagedError,
        UnsupportedFormatError."""
        # Both may be missing after a power loss at the first start.
        self._store.make_directories(OFFSETS, COMMITS)
        written, committed = self._numbers(OFFSETS), self._numbers(COMMITS)
        batch = self._batch(written[-1]) if written else None
        if committed:
            self._check_commit(committed[-1])
        self._last_written = written[-1] if written else None
        self._last_committed = committed[-1] if committed else None
        try:
            found = resume(metadata.start, batch, self._last_committed)
        except CheckpointDamagedError as error:
            raise self._damaged(str(error)) from error
        for directory, numbers in ((OFFSETS, written), (COMMITS, committed)):
            for number in numbers[:-BATCHES_KEPT]:
                self._store.remove(f"{directory}/{number}")
        return found

    def _batch(self, number: int) -> MicroBatch:
        name = f"{OFFSETS}/{number}"
        found = self._read(name, OFFSETS, WrittenBatch)
        if found is None:
            raise self._damaged(f"{name} is missing")
        self._check_owner(name, found.query_id, found.batch.batch_id, number)
        ranges = found.batch.ranges
        places = [split.place for split in ranges]
        if places != sorted(set(places)) or any(
            not 0 <= split.start <= split.end for split in ranges
        ):
            raise self._damaged(f"the ranges in {name} contradict each other")
        return found.batch

    def _check_commit(self, number: int) -> None:
        name = f"{COMMITS}/{number}"
        found = self._read(name, COMMITS, BatchCommit)
        if found is None:
            raise self._damaged(f"{name} is missing")
        self._check_owner(name, found.query_id, found.batch_id, number)

    def _check_owner(self, name: str, query_id: str, batch_id: int, number: int) -> None:
        if (query_id, batch_id) != (self._query_id, number):
            raise self._damaged(
                f"{name} is of batch {batch_id} of query {query_id}, not of {self._query_id}"
            )

    # --- batches --------------------------------------------------------------------------------

    def write_batch(self, batch: MicroBatch) -> None:
        """Writes a batch ahead, durably. Raises CheckpointInUseError if another query did."""
        expected = 0 if self._last_written is None else self._last_written + 1
        assert batch.batch_id == expected, (batch.batch_id, expected)
        name = f"{OFFSETS}/{batch.batch_id}"
        self._store.check_lock()
        if self._store.read(name) is not None:
            raise CheckpointInUseError(
                f"{name} of the checkpoint {self.path} was written by another query meanwhile: one "
                "at a time may use it."
            )
        self._write(name, OFFSETS, WrittenBatch(self._query_id, batch))
        self._last_written = batch.batch_id

    def commit(self, batch_id: int, now_ms: int) -> None:
        """Writes that a batch is done, durably, and removes an old batch."""
        assert batch_id == self._last_written, (batch_id, self._last_written)
        self._store.check_lock()
        self._write(f"{COMMITS}/{batch_id}", COMMITS, BatchCommit(self._query_id, batch_id, now_ms))
        self._last_committed = batch_id
        for directory in (OFFSETS, COMMITS):
            # The next start removes the files that cannot be removed now.
            with contextlib.suppress(CheckpointError):
                self._store.remove(f"{directory}/{batch_id - BATCHES_KEPT}")

    # --- files ----------------------------------------------------------------------------------

    def _numbers(self, directory: str) -> list[int]:
        return sorted(int(name) for name in self._store.names(directory) if name.isdecimal())

    def _read(self, name: str, kind: str, content: type[Content]) -> Content | None:
        data = self._store.read(name)
        if data is None:
            return None
        path = f"{self.path}/{name}"
        try:
            decoded = checked_file.decode(kind, FORMAT_VERSION, data, path)
            return msgspec.json.decode(decoded, type=content)
        except UnsupportedFormatError:
            raise
        except (StorageError, msgspec.DecodeError) as error:
            raise self._damaged(f"{name} cannot be used: {error}") from error

    def _write(self, name: str, kind: str, content: Content) -> None:
        data = msgspec.json.encode(content) + b"\n"
        self._store.write(name, checked_file.encode(kind, FORMAT_VERSION, data))

    def _damaged(self, why: str) -> CheckpointDamagedError:
        return CheckpointDamagedError(
            f"The checkpoint {self.path} is damaged: {sentence(why)} Restore it from a copy, or "
            "start a new checkpoint with starting_offsets= set to what the sink holds."
        )
