"""A broker's copy of the cluster's metadata log."""

from __future__ import annotations

import errno
import struct
from bisect import bisect_left
from collections.abc import Callable
from operator import itemgetter

import google_crc32c
import msgspec

from rayq.environment import Disk, File
from rayq.errors import (
    DiskFullError,
    FencedEpochError,
    InvalidRequestError,
    StorageError,
    UnsupportedFormatError,
)
from rayq.storage import checked_file

Entry = tuple[int, int, bytes]
"""(index, epoch, record)"""

ENTRIES, SNAPSHOT, PROMISE = "metadata.log", "metadata.snapshot", "promised-epoch"
_SNAPSHOT_KIND, _PROMISE_KIND, _VERSION = "metadata-snapshot", "promised-epoch", 1

_MAGIC = b"RQML"
_FRAME = struct.Struct("<4sHxxI")
"""Magic, version, padding, length of the body; a crc32c of these and the body follows."""
_CRC = struct.Struct("<I")
_FRAME_BYTES = _FRAME.size + _CRC.size
FRAME_BYTES_MAX = 256 * 1024 * 1024


class _MetadataSnapshot(msgspec.Struct, array_like=True, frozen=True):
    index: int
    epoch: int
    data: bytes


_encoder = msgspec.msgpack.Encoder()
_entries_decoder = msgspec.msgpack.Decoder(list[Entry])
_snapshot_decoder = msgspec.msgpack.Decoder(_MetadataSnapshot)


class MetadataLog:
    """The records of the metadata log as one broker holds them, with a snapshot in the place of the
    oldest records.

    The log is synchronous: the change of a call is on disk when the call returns. Indexes start at
    1. `epoch_at(0)` is 0: it stands for the place before the first record.

    Three files. `promised-epoch` and `metadata.snapshot` are small checked files. `metadata.log` is
    a sequence of frames, one for each append: `RQML`, version u16, 2 zero bytes, length of the body
    u32, crc32c u32 of all that and the body; then the body, a msgpack list of (index, epoch,
    record), little endian. An append is synced before the next begins, so a crash can tear only the
    last frame. That frame was never acknowledged, and is cut. An intact frame behind a bad one
    means damage: `StorageError`. All other changes (cutting a conflicting tail, compacting) rewrite
    the file and rename it. A crash between a new snapshot and the rewritten log leaves entries that
    the snapshot covers or contradicts: the next `open` drops them.
    """

    def __init__(self, disk: Disk, directory: str) -> None:
        """Use `MetadataLog.open`."""
        self._disk = disk
        self._directory = directory
        self._path = f"{directory}/{ENTRIES}"
        self._entries: list[Entry] = []
        self._snapshot: _MetadataSnapshot | None = None
        self._promised_epoch = 0
        self._size = 0
        self._failure: str | None = None
        self._file: File

    @staticmethod
    def open(disk: Disk, directory: str) -> MetadataLog:
        """Opens the metadata log in `directory`, or begins a new one.

        Raises `StorageError` when the disk fails, or when synced entries are damaged (nothing is
        deleted then), `UnsupportedFormatError` for another version.
        """
        log = MetadataLog(disk, directory)
        try:
            checked_file.make_directory(disk, directory)
            log._load()
        except OSError as error:
            raise StorageError(f"{directory}: the metadata log cannot be opened: {error}") from (
                error
            )
        return log

    @staticmethod
    def inspect(disk: Disk, directory: str) -> MetadataLog:
        """The log as `open` would find it, only to be read: nothing on disk is changed."""
        log = MetadataLog(disk, directory)
        log._read_small_files()
        entries, _ = log._parse(checked_file.read_whole(disk, log._path) or b"")
        log._entries = log._after_snapshot(entries)
        log._failure = f"{log._path} was opened to be looked at only."
        return log

    def _read_small_files(self) -> None:
        promise = checked_file.read(
            self._disk, f"{self._directory}/{PROMISE}", _PROMISE_KIND, _VERSION
        )
        if promise is not None:
            self._promised_epoch = int(promise)
        path = f"{self._directory}/{SNAPSHOT}"
        content = checked_file.read(self._disk, path, _SNAPSHOT_KIND, _VERSION)
        if content is not None:
            try:
                self._snapshot = _snapshot_decoder.decode(content)
            except msgspec.DecodeError as error:
                raise StorageError(f"{path} is damaged: {error}") from error

    def _load(self) -> None:
        self._read_small_files()
        self._file = self._disk.open(self._path, create=True)
        self._disk.sync_dir(self._directory)
        data = self._file.pread(self._file.size(), 0)
        entries, self._size = self._parse(data)
        if self._size < len(data):
            self._file.truncate(self._size)
        # A process may have died before its sync: now its entries must reach the disk. Where its
        # sync had failed, only bytes that are written again do.
        checked_file.write_all(self._file, data[: self._size], 0)
        self._file.sync_data()
        kept = self._after_snapshot(entries)
        if kept != entries:
            self._rewrite(kept)
        self._entries = kept

    def _parse(self, data: bytes) -> tuple[list[Entry], int]:
        """The entries of the intact frames, and the position behind these frames."""
        entries: list[Entry] = []
        position = 0
        while position < len(data):
            frame = self._frame_at(data, position)
            if frame is None:
                self._refuse_intact_frame_after(data, position)
                break
            found, length = frame
            for entry in found:
                if entries and entry[0] != entries[-1][0] + 1:
                    raise StorageError(
                        f"{self._path}, position {position}: entry {entry[0]} follows "
                        f"{entries[-1][0]}. Nothing was deleted. Check the disk."
                    )
                entries.append(entry)
            position += length
        return entries, position

    def _frame_at(self, data: bytes, position: int) -> tuple[list[Entry], int] | None:
        start = position + _FRAME_BYTES
        if len(data) < start:
            return None
        magic, version, length = _FRAME.unpack_from(data, position)
        (crc,) = _CRC.unpack_from(data, position + _FRAME.size)
        body = data[start : start + length]
        if magic != _MAGIC or len(body) < length:
            return None
        if crc != _crc(data[position : position + _FRAME.size], body):
            return None
        if version != _VERSION:
            raise UnsupportedFormatError(
                f"{self._path} has format {version}, this rayq reads {_VERSION}: use another."
            )
        try:
            return _entries_decoder.decode(body), _FRAME_BYTES + length
        except msgspec.DecodeError:
            return None

    def _refuse_intact_frame_after(self, data: bytes, position: int) -> None:
        candidate = data.find(_MAGIC, position + 1)
        while candidate >= 0:
            if self._frame_at(data, candidate) is not None:
                raise StorageError(
                    f"{self._path}, position {position}: damaged, with intact entries behind it at "
                    f"{candidate}. Nothing was deleted. Check the disk; a voter without this "
                    "directory copies the log from the others."
                )
            candidate = data.find(_MAGIC, candidate + 1)

    def _after_snapshot(self, entries: list[Entry]) -> list[Entry]:
        """The entries that follow the snapshot."""
        if self._snapshot is None:
            if entries and entries[0][0] != 1:
                raise StorageError(
                    f"{self._path} begins at entry {entries[0][0]} and {SNAPSHOT} is missing. "
                    "Nothing was deleted."
                )
            return entries
        index = self._snapshot.index
        if entries and entries[0][0] > index + 1:
            raise StorageError(
                f"{self._path} begins at entry {entries[0][0]} and {SNAPSHOT} ends at {index}. "
                "Nothing was deleted."
            )
        if entries and entries[0][0] <= index:
            place = index - entries[0][0]
            if place >= len(entries) or entries[place][1] != self._snapshot.epoch:
                return []
            return entries[place + 1 :]
        return entries

    # --- contents ---------------------------------------------------------------------------------

    @property
    def failure(self) -> str | None:
        """The reason why the log no longer accepts writes: a write failed, so the contents of the
        disk are not known. Then close this log, and open it again. None: it works."""
        return self._failure

    @property
    def promised_epoch(self) -> int:
        return self._promised_epoch

    @property
    def first_index(self) -> int:
        """The index of the first entry after the snapshot, which may be still to come."""
        return 1 if self._snapshot is None else self._snapshot.index + 1

    @property
    def last_index(self) -> int:
        """0 when there is nothing."""
        return self._entries[-1][0] if self._entries else self.first_index - 1

    @property
    def last_epoch(self) -> int:
        """The epoch of the last record, the snapshot included; 0 when there is nothing."""
        if self._entries:
            return self._entries[-1][1]
        return 0 if self._snapshot is None else self._snapshot.epoch

    @property
    def snapshot_index(self) -> int | None:
        return None if self._snapshot is None else self._snapshot.index

    @property
    def snapshot_epoch(self) -> int | None:
        return None if self._snapshot is None else self._snapshot.epoch

    @property
    def snapshot_data(self) -> bytes | None:
        return None if self._snapshot is None else self._snapshot.data

    @property
    def size_bytes(self) -> int:
        """Size of the entries behind the snapshot."""
        return self._size

    def epoch_at(self, index: int) -> int | None:
        """The epoch of a record. None where it is unknown: inside the snapshot, or past the end."""
        if index == 0:
            return 0
        if self._snapshot is not None and index == self._snapshot.index:
            return self._snapshot.epoch
        place = index - self.first_index
        return self._entries[place][1] if 0 <= place < len(self._entries) else None

    def read(self, first_index: int, bytes_max: int) -> list[Entry]:
        """The entries from `first_index` on: at most `bytes_max`, except that the first is always
        there; [] past the end. Raises `InvalidRequestError` for an index inside the snapshot."""
        if first_index < self.first_index:
            raise InvalidRequestError(
                f"Entry {first_index} is in the snapshot up to {self.snapshot_index}: read that."
            )
        place = bisect_left(self._entries, first_index, key=itemgetter(0))
        taken: list[Entry] = []
        for entry in self._entries[place:]:
            bytes_max -= len(entry[2])
            if taken and bytes_max < 0:
                break
            taken.append(entry)
        return taken

    # --- changes, durable on return; each raises StorageError -------------------------------------

    def promise(self, epoch: int) -> None:
        """Promises to take nothing from a lower epoch. Raises `FencedEpochError` when it promised a
        higher epoch before; the message ends with that epoch."""
        if epoch < self._promised_epoch:
            raise FencedEpochError(
                f"Epoch {epoch} is refused; this voter promised {self._promised_epoch}"
            )
        if epoch == self._promised_epoch:
            return
        path = f"{self._directory}/{PROMISE}"
        self._change(
            lambda: checked_file.write(self._disk, path, _PROMISE_KIND, _VERSION, b"%d" % epoch)
        )
        self._promised_epoch = epoch

    def append(self, entries: list[Entry]) -> None:
        """Adds entries with consecutive indexes, the first at most one after the last entry here.
        Entries that the log holds with the same epoch are skipped. From the first entry with
        another epoch on, the held entries are cut."""
        new = [entry for entry in entries if entry[0] >= self.first_index]
        while new and self.epoch_at(new[0][0]) == new[0][1]:
            del new[0]
        if not new:
            return
        first, last = new[0][0], new[-1][0]
        if first > self.last_index + 1 or [entry[0] for entry in new] != [*range(first, last + 1)]:
            raise InvalidRequestError(
                f"Metadata entries {first} to {last} do not follow on {self.last_index}."
            )
        if first <= self.last_index:
            changed = self._entries[: first - self.first_index] + new
            self._change(lambda: self._rewrite(changed))
            self._entries = changed
        else:
            self._change(lambda: self._append(_frame(new)))
            self._entries.extend(new)

    def install_snapshot(self, index: int, epoch: int, data: bytes) -> None:
        """Takes another broker's snapshot. Entries after it stay when the log holds the record at
        `index` with the same epoch; else all entries go. A snapshot that is older than the one here
        is ignored."""
        if self._snapshot is not None and index <= self._snapshot.index:
            return
        kept = (
            self._entries[index + 1 - self.first_index :] if self.epoch_at(index) == epoch else []
        )
        self._replace_snapshot(_MetadataSnapshot(index, epoch, data), kept)

    def compact(self, index: int, epoch: int, data: bytes) -> None:
        """Puts a snapshot of all records up to `index` in their place."""
        if self._snapshot is not None and index <= self._snapshot.index:
            return
        if self.epoch_at(index) != epoch:
            raise InvalidRequestError(
                f"Cannot compact up to entry {index} of epoch {epoch}: it is not held."
            )
        self._replace_snapshot(
            _MetadataSnapshot(index, epoch, data), self._entries[index + 1 - self.first_index :]
        )

    def _replace_snapshot(self, snapshot: _MetadataSnapshot, kept: list[Entry]) -> None:
        path = f"{self._directory}/{SNAPSHOT}"
        content = _encoder.encode(snapshot)
        self._change(
            lambda: checked_file.write(self._disk, path, _SNAPSHOT_KIND, _VERSION, content)
        )
        self._snapshot = snapshot
        self._change(lambda: self._rewrite(kept))
        self._entries = kept

    def close(self) -> None:
        """Closes the file. `failure` still says why a write failed before."""
        self._failure = self._failure or f"{self._path} is closed."
        self._file.close()

    def _change(self, change: Callable[[], None]) -> None:
        if self._failure is not None:
            raise StorageError(self._failure)
        try:
            change()
        except DiskFullError:
            raise
        except OSError as error:
            self._failure = (
                f"{self._directory}: the metadata log could not be written: {error}. It is "
                "opened again at the next write; check the disk."
            )
            raise StorageError(self._failure) from error

    def _append(self, frame: bytes) -> None:
        try:
            checked_file.write_all(self._file, frame, self._size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._file.truncate(self._size)
            self._file.sync_data()
            raise DiskFullError(
                f"{self._path}: no room for {len(frame)} bytes: free space on this disk."
            ) from error
        self._file.sync_data()
        self._size += len(frame)

    def _rewrite(self, entries: list[Entry]) -> None:
        data = _frame(entries) if entries else b""
        checked_file.replace(self._disk, self._path, data)
        self._file.close()
        self._file = self._disk.open(self._path)
        self._size = len(data)


def _frame(entries: list[Entry]) -> bytes:
    body = _encoder.encode(entries)
    if len(body) > FRAME_BYTES_MAX:
        raise InvalidRequestError(f"{len(body)} bytes of metadata at once: send fewer entries.")
    head = _FRAME.pack(_MAGIC, _VERSION, len(body))
    return head + _CRC.pack(_crc(head, body)) + body


def _crc(head: bytes, body: bytes) -> int:
    crc: int = google_crc32c.extend(google_crc32c.value(head), body)
    return crc
