"""An offline check of data directories. It reads every batch, index entry and small file.

Nothing is changed. A torn tail above the recovery point is not damage: the next start cuts it.
"""

from __future__ import annotations

import os.path
from dataclasses import dataclass, field

from rayq.environment import Disk
from rayq.errors import CorruptBatchError, RayqError, UnsupportedFormatError
from rayq.storage import checked_file
from rayq.storage.aborted_index import AbortedIndex
from rayq.storage.batch import BatchHeader, decode_columns, read_marker
from rayq.storage.checkpoint import LogCheckpoint, read_checkpoint
from rayq.storage.clean_state import read_clean_state
from rayq.storage.cleaner import CLEANING
from rayq.storage.data_directory import BROKER_LOCK, META, PARTITION_META, lock_holder, read_meta
from rayq.storage.epochs import read_epochs
from rayq.storage.index import DamagedIndexError
from rayq.storage.metadata_log import ENTRIES, MetadataLog
from rayq.storage.producer_state import ProducerState, snapshot_offsets, snapshot_path
from rayq.storage.recovery import RESET
from rayq.storage.segment import (
    ABORTED_SUFFIX,
    BODY_SCAN_BYTES,
    DELETED_SUFFIX,
    LOG_SUFFIX,
    Segment,
    base_offsets,
    pread,
    scan,
    segment_path,
)
from rayq.storage.swap import Swap, read_swap

DEPTH_MAX = 4
"""The maximum depth below the given directory at which broker and partition directories are
searched."""


@dataclass
class Report:
    """The result for one directory. `damage` is empty when the directory is sound."""

    path: str
    kind: str
    """"broker", "partition" or "metadata"."""
    start_offset: int | None = None
    end_offset: int | None = None
    recovery_point: int | None = None
    cleaned_offset: int = 0
    """Below it compaction may have left gaps."""
    batches: int = 0
    records: int = 0
    size_bytes: int = 0
    damage: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Findings that are not damage, such as what the next start mends by itself."""

    @property
    def is_sound(self) -> bool:
        return not self.damage


def verify(disk: Disk, root: str) -> list[Report]:
    """Checks `root` and every broker and partition directory below it. Raises OSError."""
    reports: list[Report] = []
    _visit(disk, root.rstrip("/") or "/", DEPTH_MAX, reports)
    return reports


def _visit(disk: Disk, path: str, depth: int, reports: list[Report]) -> None:
    names = disk.list(path)
    if META in names:
        reports.append(_broker(disk, path))
    if ENTRIES in names:
        reports.append(_metadata(disk, path))
    if PARTITION_META in names or base_offsets(names, LOG_SUFFIX):
        reports.append(_partition(disk, path))
        return
    if depth > 0:
        for name in names:
            below = f"{path}/{name}"
            if _is_directory(disk, below):
                _visit(disk, below, depth - 1, reports)


def _is_directory(disk: Disk, path: str) -> bool:
    try:
        return bool(disk.list(path))
    except NotADirectoryError:
        return False


def _broker(disk: Disk, path: str) -> Report:
    report = Report(path, "broker")
    try:
        read_meta(disk, path)
        holder = lock_holder(disk, f"{path}/{BROKER_LOCK}")
        if holder is not None:
            report.notes.append(
                f"process {holder.pid} runs on this directory: what it writes meanwhile may look "
                "torn here"
            )
    except RayqError as error:
        report.damage.append(str(error))
    return report


def _metadata(disk: Disk, path: str) -> Report:
    report = Report(path, "metadata")
    try:
        log = MetadataLog.inspect(disk, path)
    except RayqError as error:
        report.damage.append(str(error))
        return report
    report.start_offset, report.end_offset = log.first_index, log.last_index + 1
    report.records = log.last_index + 1 - log.first_index
    return report


def _partition(disk: Disk, path: str) -> Report:
    report = Report(path, "partition")
    checkpoint: LogCheckpoint | None = None
    swap: Swap | None = None
    try:
        if disk.exists(f"{path}/{RESET}"):
            report.notes.append("a reset of the log is under way; the next start finishes it")
        checkpoint = read_checkpoint(disk, path)
        read_epochs(disk, path)
        report.cleaned_offset = read_clean_state(disk, path).cleaned_offset
        swap = read_swap(disk, path)
        if swap is not None:
            report.cleaned_offset = swap.state.cleaned_offset
            report.notes.append(
                "compacted segments are being put in place; the next start finishes it"
            )
    except RayqError as error:
        report.damage.append(str(error))
    for offset in snapshot_offsets(disk, path):
        snapshot = snapshot_path(path, offset)
        try:
            ProducerState().load(checked_file.read_whole(disk, snapshot) or b"", snapshot)
        except RayqError as error:
            report.damage.append(str(error))
    names = disk.list(path)
    renamed = base_offsets(names, LOG_SUFFIX + DELETED_SUFFIX)
    bases = [base for base in base_offsets(names, LOG_SUFFIX) if base > max(renamed, default=-1)]
    made: set[int] = set()
    if swap is not None:
        bases, made = _after_swap(disk, path, bases, swap)
    if checkpoint is None:
        if bases:
            report.damage.append(f"{path}/checkpoint is missing")
        checkpoint = LogCheckpoint(recovery_point=0, high_watermark=0, log_start=0)
    local_start = checkpoint.local_start_offset
    report.start_offset, report.recovery_point = local_start, checkpoint.recovery_point
    if not bases and checkpoint.recovery_point > local_start:
        report.damage.append(f"{path}: the segments are missing")
    if checkpoint.has_remote_part:
        report.notes.append(
            f"records from {checkpoint.log_start} up to {local_start} are in the object store only"
        )
        if bases and bases[0] > local_start:
            report.damage.append(
                f"{path}: the segments from {local_start} up to {bases[0]} are missing"
            )
    end = bases[0] if bases else local_start
    for number, base in enumerate(bases):
        following = bases[number + 1] if number + 1 < len(bases) else None
        if base != end:
            _tell(report, end, f"{segment_path(path, base, LOG_SUFFIX)} does not follow on {end}")
        place = f"{path}/{CLEANING}" if base in made else path
        end = _segment(disk, place, base, following, report)
    report.end_offset = end
    if end < checkpoint.recovery_point and not report.damage:
        report.damage.append(
            f"{path}: the log ends at {end}, batches up to {checkpoint.recovery_point} were on disk"
        )
    return report


def _after_swap(
    disk: Disk, path: str, bases: list[int], swap: Swap
) -> tuple[list[int], set[int]]:
    """The segments that the log has once the swap is finished, and those of them that are still
    in the directory of the cleaner."""
    replaced = {base for group in swap.groups for base in group.base_offsets[1:]}
    made = {
        group.base_offsets[0]
        for group in swap.groups
        if disk.exists(segment_path(f"{path}/{CLEANING}", group.base_offsets[0], LOG_SUFFIX))
    }
    return [base for base in bases if base not in replaced], made


def _tell(report: Report, offset: int, what: str) -> None:
    """Reports `what` as damage below the recovery point, and as a torn tail above it."""
    if report.recovery_point is not None and offset < report.recovery_point:
        report.damage.append(what)
    else:
        report.notes.append(f"{what} (above the recovery point: the next start cuts here)")


def _segment(disk: Disk, path: str, base: int, following: int | None, report: Report) -> int:
    segment = Segment(disk, path, base, writable=False)
    log_bytes = segment.file.size()
    report.size_bytes += log_bytes
    epoch = 0
    starts: dict[int, int] = {}
    try:
        for position, header in scan(
            segment.file,
            0,
            log_bytes,
            path=segment.path,
            bodies=True,
            chunk_bytes=BODY_SCAN_BYTES,
        ):
            problem = _check(segment, position, header, epoch, report.cleaned_offset)
            if problem is not None:
                _tell(report, segment.next_offset, problem)
                return segment.next_offset
            unreadable = _unreadable(segment, position, header)
            if unreadable is not None:
                report.notes.append(unreadable)
            epoch = header.leader_epoch
            starts[header.base_offset - base] = position
            segment.count(header)
            report.batches += 1
            report.records += header.record_count
    except RayqError as error:
        _tell(report, segment.next_offset, str(error))
    _indexes(disk, segment, starts, following, report)
    return segment.next_offset


def _check(
    segment: Segment, position: int, header: BatchHeader, epoch: int, cleaned_offset: int
) -> str | None:
    where = f"{segment.path}, position {position}"
    if header.base_offset < segment.next_offset:
        return f"{where}: offset {header.base_offset} after {segment.next_offset}"
    if header.base_offset > max(segment.next_offset, cleaned_offset):
        return (
            f"{where}: offsets {segment.next_offset} to {header.base_offset - 1} are missing, "
            f"which compaction did not take (it came as far as {cleaned_offset})"
        )
    if header.leader_epoch < epoch:
        return f"{where}: leader epoch {header.leader_epoch} after {epoch}"
    return None


def _unreadable(segment: Segment, position: int, header: BatchHeader) -> str | None:
    """Why the records of a batch, or the marker, cannot be decoded, or None. Its CRC is right, so
    the disk did not damage it, and all replicas hold the same bytes."""
    batch = pread(segment.file, header.length, position)
    try:
        if header.is_control:
            read_marker(batch, 0, header)
        else:
            decode_columns(batch, 0, header, check_crc=False)
    except (CorruptBatchError, UnsupportedFormatError) as error:
        return f"{segment.path}, position {position}: written so, no disk damaged it: {error}"
    return None


def _indexes(
    disk: Disk, segment: Segment, starts: dict[int, int], following: int | None, report: Report
) -> None:
    """Checks the indexes. A wrong index is not damage, since the next start rebuilds it."""
    aborted = segment_path(segment.directory, segment.base_offset, ABORTED_SUFFIX)
    if disk.exists(aborted) and not AbortedIndex().load(disk, segment):
        report.notes.append(f"{aborted} is damaged")
    for index in (segment.offsets, segment.times):
        if not disk.exists(index.path):
            report.notes.append(f"{index.path} is missing")
            return
    if not (segment.offsets.load() and segment.times.load()):
        if following is not None:
            report.notes.append(f"{segment.offsets.path}: the indexes are not complete")
        return
    try:
        for number in range(segment.offsets.count):
            relative, position = segment.offsets.entry(number, pread)
            if starts.get(relative) != position and relative in starts:
                report.notes.append(f"{segment.offsets.path}: entry {number} is wrong")
                return
    except DamagedIndexError as error:
        report.notes.append(f"{segment.offsets.path}: {error}")


def summary(reports: list[Report]) -> str:
    """The reports as a table for people."""
    head = ("", "directory", "kind", "offsets", "batches", "records", "MiB")
    rows = [head]
    for report in reports:
        offsets = (
            "" if report.start_offset is None else f"{report.start_offset}-{report.end_offset}"
        )
        rows.append(
            (
                "ok" if report.is_sound else "DAMAGED",
                report.path,
                report.kind,
                offsets,
                f"{report.batches}" if report.kind == "partition" else "",
                f"{report.records}" if report.kind != "broker" else "",
                f"{report.size_bytes / 2**20:.1f}" if report.kind == "partition" else "",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    for report in reports:
        lines += [f"damage: {what}" for what in report.damage]
        lines += [f"note: {os.path.basename(report.path)}: {what}" for what in report.notes]
    damaged = sum(not report.is_sound for report in reports)
    lines.append(f"{len(reports)} directories checked, {damaged} damaged.")
    return "\n".join(lines)
