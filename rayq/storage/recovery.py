"""Opens a log after any end: a clean stop, kill -9, power loss, a half-finished change.

The checkpoint's recovery point divides the log. Below it everything was synced: an error there is
damage, and recovery stops with a `StorageError` that names file and position, and deletes nothing.
Above it any batch may be missing or torn, in any order: recovery reads that tail once, checks the
CRCs, and cuts at the first batch that is not intact (a valid batch behind a bad one proves
nothing). So a start only has to read the tail, not the whole log.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from itertools import zip_longest

import msgspec

from rayq.config import TopicConfig
from rayq.environment import Disk, File
from rayq.errors import CorruptBatchError, StorageError
from rayq.storage import checked_file
from rayq.storage.aborted_index import AbortedIndex
from rayq.storage.checkpoint import CHECKPOINT, LogCheckpoint, read_checkpoint, write_checkpoint
from rayq.storage.clean_state import CleanState, read_clean_state, write_clean_state
from rayq.storage.epochs import EpochCache, read_epochs, write_epochs
from rayq.storage.open_transactions import OpenTransactions
from rayq.storage.producer_state import ProducerState, snapshot_offsets, snapshot_path
from rayq.storage.recent_producers import RecentProducers, RecentState
from rayq.storage.segment import (
    BODY_SCAN_BYTES,
    DELETED_SUFFIX,
    LOG_SUFFIX,
    SUFFIXES,
    Segment,
    base_offsets,
    headers_between,
    remove_segment,
    scan,
    segment_path,
)
from rayq.storage.swap import finish_swap

logger = logging.getLogger(__name__)

RESET = "reset"
_RESET_KIND, _RESET_VERSION = "reset", 1


class Reset(msgspec.Struct, array_like=True, frozen=True):
    """The new start of an emptied log. The file `reset` holds it while the change is under way:
    after a crash the next start finds it, and does the whole change again."""

    end_offset: int
    log_start: int
    epochs: list[tuple[int, int]]
    producer_snapshot: bytes
    clean_state: CleanState = CleanState()
    local_start: int = 0
    """See `LogCheckpoint`."""

    @property
    def checkpoint(self) -> LogCheckpoint:
        """The checkpoint of the emptied log."""
        return LogCheckpoint(
            recovery_point=self.end_offset,
            high_watermark=min(max(self.log_start, self.local_start), self.end_offset),
            log_start=self.log_start,
            local_start=self.local_start,
        )


class RecoveredLog(msgspec.Struct):
    """A log as recovery found it, without its torn tail."""

    checkpoint: LogCheckpoint
    log_start: int
    local_start: int
    """See `LogCheckpoint`."""
    segments: list[Segment]
    unsynced: list[Segment]
    """The segments with batches above the recovery point."""
    epochs: EpochCache
    producers: ProducerState
    recent_producers: RecentProducers
    aborted: AbortedIndex
    clean_state: CleanState
    written_epoch_changes: int | None
    """`epochs.changes` as the file `leader-epochs` has them. None: the file has others."""
    is_new: bool
    """True if there was no log yet."""
    is_changed: bool
    """True if recovery found batches above the recovery point, cut batches, or rebuilt files: then
    sync, and write a checkpoint."""


def recover(disk: Disk, directory: str, config: TopicConfig) -> RecoveredLog:
    """Opens the log in `directory`. An empty directory becomes a new log.

    Raises `StorageError`, `UnsupportedFormatError`, or OSError from the disk.
    """
    is_new = not disk.exists(f"{directory}/{CHECKPOINT}")
    if not is_new:
        # A process that was killed may have left names that are not on disk yet, such as that of a
        # checkpoint, `reset` or `swap`. Files are removed because of them, so they come first.
        disk.sync_dir(directory)
    _finish_reset(disk, directory)
    finish_swap(disk, directory)
    checkpoint = read_checkpoint(disk, directory)
    bases = base_offsets(disk.list(directory), LOG_SUFFIX)
    if checkpoint is None:
        # A power loss while a log is made may leave its empty segment without the checkpoint.
        if bases and (bases != [0] or _has_bytes(disk, segment_path(directory, 0, LOG_SUFFIX))):
            raise StorageError(
                f"{directory}/checkpoint is missing beside {len(bases)} segment files: what was on "
                "disk cannot be told from a torn tail. Nothing was deleted. Put the file back; "
                "without this partition's directory the log is copied from its leader."
            )
        checkpoint = LogCheckpoint(recovery_point=0, high_watermark=0, log_start=0)
        write_checkpoint(disk, directory, checkpoint, syncs_directory=False)
    _remove_leftovers(disk, directory, checkpoint)
    bases = base_offsets(disk.list(directory), LOG_SUFFIX)
    log_start = _log_start(directory, bases, checkpoint)
    is_made = not bases
    if is_made:
        bases = [max(log_start, checkpoint.local_start)]
        Segment(disk, directory, bases[0]).create()
    if is_new or is_made:
        disk.sync_dir(directory)
    return _Recovery(disk, directory, config, checkpoint, log_start).run(bases, is_new=is_new)


def _has_bytes(disk: Disk, path: str) -> bool:
    with closing(disk.open(path, writable=False)) as file:
        return file.size() > 0


def _log_start(directory: str, bases: list[int], checkpoint: LogCheckpoint) -> int:
    """The first readable offset. Raises `StorageError` when the file that holds it, or the first
    one that is not in the object store only, is gone."""
    log_start, recovery_point = checkpoint.log_start, checkpoint.recovery_point
    local_start = checkpoint.local_start_offset
    first = bases[0] if bases else None
    if first is None and local_start == recovery_point:
        return log_start
    # What is in the object store only leaves the disk after the checkpoint that says so. So a first
    # segment above the local start is not a sign that the log begins there: it would be forgotten
    # what the store has (KAFKA-15351), or what nobody has.
    is_missing = checkpoint.has_remote_part and first is not None and first > local_start
    if first is None or first > recovery_point or is_missing:
        raise StorageError(
            f"{segment_path(directory, local_start, LOG_SUFFIX)}, or the segment that holds offset "
            f"{local_start}, is missing: batches up to {recovery_point} were on disk. Nothing was "
            "deleted. Without this partition's directory the log is copied from its leader."
        )
    if checkpoint.has_remote_part:
        return log_start
    if first > log_start:
        # Retention has moved the log start and removed files, and no checkpoint followed.
        logger.info("%s: the log starts at %d, not at %d", directory, first, log_start)
    return max(first, log_start)


def _remove_leftovers(disk: Disk, directory: str, checkpoint: LogCheckpoint) -> None:
    """Removes what a crash has left: temporary files, segments below the local start, snapshots
    that no checkpoint covers, indexes without a log.

    The log start moves by renaming whole segments, oldest first. A crash may undo some of the
    renames: so all segments below a renamed segment go, too.
    """
    names = disk.list(directory)
    renamed = base_offsets(names, LOG_SUFFIX + DELETED_SUFFIX)
    bases = base_offsets(names, LOG_SUFFIX)
    kept = [base for base in bases if not renamed or base > renamed[-1]]
    while len(kept) > 1 and kept[1] <= checkpoint.local_start_offset:
        del kept[0]
    doomed = [
        f"{directory}/{name}" for name in names if name.endswith(checked_file.TEMPORARY_SUFFIX)
    ]
    for suffix in SUFFIXES:
        doomed += [
            segment_path(directory, base, suffix)
            for base in base_offsets(names, suffix)
            if base not in kept
        ]
    doomed += [
        snapshot_path(directory, offset)
        for offset in snapshot_offsets(disk, directory)
        if offset > checkpoint.recovery_point
    ]
    for path in doomed:
        disk.remove(path)
    if renamed:
        disk.sync_dir(directory)
    for name in names:
        if name.endswith(DELETED_SUFFIX):
            disk.remove(f"{directory}/{name}")


class _Recovery:
    def __init__(
        self, disk: Disk, directory: str, config: TopicConfig, checkpoint: LogCheckpoint, start: int
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._config = config
        self._checkpoint = checkpoint
        self._recovery_point = checkpoint.recovery_point
        self._start = start
        self._segments: list[Segment] = []
        self._unsynced: list[Segment] = []
        self._epochs = EpochCache()
        self._has_epochs_file = False
        self._clean_state = read_clean_state(disk, directory)
        self._recent_producers = RecentProducers()
        self._is_changed = False

    def run(self, bases: list[int], *, is_new: bool) -> RecoveredLog:
        beyond = self._load_known(bases)
        try:
            self._epochs = self._load_epochs()
            self._producers = load_producers(
                self._disk,
                self._directory,
                self._segments,
                self._recovery_point,
                self._clean_state.clean_until,
            )
            self._recent_producers.begin(self._recovery_point, self._producers)
            self._aborted = self._load_aborted()
        except CorruptBatchError as error:
            raise StorageError(
                f"{error} The batches there were on disk; nothing was deleted."
            ) from error
        written = self._epochs.changes if self._has_epochs_file or is_new else None
        self._read_tail(beyond)
        return RecoveredLog(
            checkpoint=self._checkpoint,
            log_start=self._start,
            local_start=self._checkpoint.local_start,
            segments=self._segments,
            unsynced=self._unsynced,
            epochs=self._epochs,
            written_epoch_changes=written,
            is_new=is_new,
            producers=self._producers,
            recent_producers=self._recent_producers,
            aborted=self._aborted,
            clean_state=self._clean_state.cut(self._segments[-1].next_offset),
            is_changed=self._is_changed or self._start != self._checkpoint.log_start,
        )

    def _load_known(self, bases: list[int]) -> list[int]:
        """Opens the segments that begin at or below the recovery point, and loads them up to there.
        Returns the base offsets of the others."""
        interval = self._config.index_interval_bytes
        known = [base for base in bases if base <= self._recovery_point]
        for base, following in zip_longest(known, known[1:]):
            segment = Segment(self._disk, self._directory, base)
            is_closed = following is not None
            until = following if following is not None else self._recovery_point
            if not segment.load(until, interval, is_closed=is_closed) and segment.size:
                logger.warning("%s: the index was missing or wrong; rebuilt", segment.path)
            self._is_changed |= segment.has_pending_entries
            if is_closed:
                segment.release()
            self._segments.append(segment)
        return bases[len(known) :]

    def _load_epochs(self) -> EpochCache:
        try:
            epochs = read_epochs(self._disk, self._directory)
        except StorageError as error:
            logger.warning("%s It is rebuilt from the log.", error)
            epochs = None
        has_file = epochs is not None
        if epochs is None:
            epochs = EpochCache()
            end_offset = first = self._segments[0].base_offset
            for header in headers_between(self._segments, first, self._recovery_point):
                # Not at the header's offset: compaction keeps the last batch of an epoch, but may
                # have removed the first.
                epochs.assign(header.leader_epoch, end_offset)
                end_offset = header.next_offset
        known = epochs.changes
        epochs.truncate_to_end(self._recovery_point)
        self._has_epochs_file = has_file and epochs.changes == known
        return epochs

    def _load_aborted(self) -> AbortedIndex:
        """The index of aborted transactions below the recovery point. It is rebuilt from the
        headers where a file is missing or damaged."""
        used_from = self._producers.transactions.used_from
        aborted = AbortedIndex()
        if used_from is None:
            return aborted
        for segment in self._segments:
            is_concerned = segment.size and segment.next_offset > used_from
            if is_concerned and not aborted.load(self._disk, segment):
                break
        else:
            return aborted
        logger.warning(
            "%s: the index of aborted transactions was missing or wrong; rebuilt", segment.path
        )
        self._is_changed = True
        transactions, aborted = OpenTransactions(), AbortedIndex()
        for header in headers_between(self._segments, used_from, self._recovery_point):
            ended = transactions.update(header, 0)
            if ended is not None:
                aborted.add(ended)
        return aborted

    def _read_tail(self, beyond: list[int]) -> None:
        """Reads from the recovery point up to the first damaged batch, and cuts there."""
        segment = self._segments[-1]
        while self._read_segment(segment):
            if not beyond or beyond[0] != segment.next_offset:
                break
            segment.seal()
            segment = Segment(self._disk, self._directory, beyond.pop(0))
            segment.load(segment.base_offset, self._config.index_interval_bytes, is_closed=False)
            self._segments.append(segment)
            self._is_changed = True
        for base in reversed(beyond):
            logger.warning("%s: cut the segment %d, which nothing leads to", self._directory, base)
            remove_segment(self._disk, self._directory, base)
            self._is_changed = True

    def _read_segment(self, segment: Segment) -> bool:
        """Counts the intact batches of the tail. Returns False when it had to cut."""
        log_bytes = segment.file.size()
        if segment.size == log_bytes:
            return True
        self._is_changed = True
        self._unsynced.append(segment)
        places = scan(
            segment.file,
            segment.size,
            log_bytes,
            path=segment.path,
            bodies=True,
            chunk_bytes=BODY_SCAN_BYTES,
        )
        start = segment.size
        interval = self._config.index_interval_bytes
        reason = "its offset or epoch does not follow on"
        gaps_below = self._clean_state.cleaned_offset
        try:
            for _, header in places:
                latest, end_offset = self._epochs.latest(), segment.next_offset
                if (
                    header.base_offset < end_offset
                    or (header.base_offset > end_offset and header.base_offset > gaps_below)
                    or (latest is not None and header.leader_epoch < latest)
                ):
                    break
                segment.appended(header, interval)
                if header.leader_epoch != latest:
                    self._epochs.assign(header.leader_epoch, end_offset)
                aborted = self._producers.update(header)
                if aborted is not None:
                    self._aborted.add(aborted)
                self._recent_producers.appended(header.next_offset, self._producers)
        except CorruptBatchError as error:
            reason = str(error)
        _write_again(segment.file, start, segment.size)
        if segment.size == log_bytes:
            return True
        logger.warning(
            "%s: cut %d bytes of a torn tail at offset %d, position %d: %s",
            *(segment.path, log_bytes - segment.size, segment.next_offset, segment.size, reason),
        )
        segment.file.truncate(segment.size)
        return False


def _write_again(file: File, start: int, end: int) -> None:
    """Makes sure that the next sync covers these bytes.

    A process whose sync failed has left pages that count as clean, and are not on disk: reads find
    them in the cache, and no later sync writes them (the kernel reports such a failure once).
    Writing the same bytes again makes the pages dirty. A crash meanwhile changes nothing. Raises
    OSError.
    """
    while start < end:
        data = file.pread(min(BODY_SCAN_BYTES, end - start), start)
        assert data, "the tail was read a moment ago"
        checked_file.write_all(file, data, start)
        start += len(data)


def load_producers(
    disk: Disk,
    directory: str,
    segments: Sequence[Segment],
    end_offset: int,
    clean_until: int = 0,
    recent: RecentState | None = None,
) -> ProducerState:
    """The producer state of all batches below `end_offset`, from the newest intact snapshot at or
    below it (or `recent`, which is such a one in memory), and the headers of the log from there.
    The log is compacted up to `clean_until`. Raises `CorruptBatchError` or
    `UnsupportedFormatError`."""
    offset, producers = _newest_producers(disk, directory, end_offset, recent)
    first = max(segments[0].base_offset, offset)
    # What the snapshot has open in a part that was compacted or removed since has ended there,
    # perhaps by a marker that went too. The batches behind that part tell what is open.
    replayed = first
    first_open = producers.transactions.first_open
    kept_from = max(clean_until, segments[0].base_offset)
    if first_open is not None and first_open < kept_from:
        replayed = min(first, kept_from)
        producers.transactions.forget_from(replayed)
    for header in headers_between(segments, replayed, end_offset):
        if header.base_offset >= first:
            producers.update(header)
        elif header.base_offset >= replayed:
            producers.transactions.update(header, 0)
    return producers


def _newest_producers(
    disk: Disk, directory: str, end_offset: int, recent: RecentState | None
) -> tuple[int, ProducerState]:
    """The newest intact snapshot at or below `end_offset`, and its offset: 0 where there is none,
    and no producers."""
    producers = ProducerState()
    for offset in reversed(snapshot_offsets(disk, directory)):
        if offset > end_offset:
            continue
        if recent is not None and offset <= recent.offset:
            break
        path = snapshot_path(directory, offset)
        try:
            producers.load(checked_file.read_whole(disk, path) or b"", path)
        except StorageError as error:
            logger.warning("%s An older one and the log replace it.", error)
            continue
        return offset, producers
    if recent is None:
        return 0, producers
    producers.load(recent.snapshot)
    return recent.offset, producers


def reset_log(disk: Disk, directory: str, reset: Reset) -> Segment:
    """Empties the log and restarts it, durably. A crash leaves the old log or the new one.

    Returns the new segment. Raises OSError.
    """
    content = msgspec.msgpack.encode(reset)
    checked_file.write(disk, f"{directory}/{RESET}", _RESET_KIND, _RESET_VERSION, content)
    return _apply_reset(disk, directory, reset)


def _finish_reset(disk: Disk, directory: str) -> None:
    content = checked_file.read(disk, f"{directory}/{RESET}", _RESET_KIND, _RESET_VERSION)
    if content is not None:
        _apply_reset(disk, directory, msgspec.msgpack.decode(content, type=Reset))


def _apply_reset(disk: Disk, directory: str, reset: Reset) -> Segment:
    for name in disk.list(directory):
        if name.endswith((*SUFFIXES, DELETED_SUFFIX)):
            disk.remove(f"{directory}/{name}")
    for offset in snapshot_offsets(disk, directory):
        disk.remove(snapshot_path(directory, offset))
    write_clean_state(disk, directory, reset.clean_state, syncs_directory=False)
    write_epochs(disk, directory, EpochCache(reset.epochs).encode())
    if reset.producer_snapshot:
        path = snapshot_path(directory, reset.end_offset)
        checked_file.replace(disk, path, reset.producer_snapshot, syncs_directory=False)
    write_checkpoint(disk, directory, reset.checkpoint, syncs_directory=False)
    segment = Segment(disk, directory, reset.end_offset)
    segment.create()
    # As long as the file `reset` is there a start does all of this again, in whatever part it is on
    # disk. So one sync is enough, before that file goes.
    disk.sync_dir(directory)
    disk.remove(f"{directory}/{RESET}")
    disk.sync_dir(directory)
    return segment
