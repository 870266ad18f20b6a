"""`rayq log`: reads data directories from disk; the cluster may be down."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from rayq.cli import output
from rayq.cli.exit_codes import UNHEALTHY
from rayq.cli.formats import JSON, formatter
from rayq.cli.options import Json
from rayq.cli.values import topic_partition
from rayq.core.cluster.records import decode_entry
from rayq.errors import InvalidRequestError
from rayq.records import Record, TopicPartition
from rayq.storage.batch import BatchHeader, decode_columns
from rayq.storage.data_directory import find_brokers
from rayq.storage.disk import LocalDisk
from rayq.storage.metadata_log import ENTRIES, MetadataLog
from rayq.storage.segment import LOG_SUFFIX, base_offsets, pread, scan, segment_path
from rayq.storage.verify import Report
from rayq.storage.verify import verify as verify_directories

METADATA_READ_BYTES = 1024 * 1024
ROW_OPTIONAL = (
    *("crc", "segment", "first time", "producer epoch", "compression", "position", "sequence"),
    *("epoch", "producer", "append time"),
)
"""The columns of a batch that a narrow terminal leaves out, from the left."""


def verify(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="A data directory.")],
    json: Json = False,
) -> None:
    """Read every batch, index and small file below DIR; exit 3 when something is damaged.

    Nothing is changed. Files that a running cluster is writing may look torn.
    """
    place = _existing(directory)
    with output.waiting(f"Reading {directory}"):
        reports = verify_directories(LocalDisk(), place)
    if not reports:
        raise InvalidRequestError(
            f"{directory} holds no data of rayq: name the directory given to `rayq start`, or one "
            "below it."
        )
    if json:
        output.print_json([dataclasses.asdict(report) for report in reports])
    else:
        _show(reports)
    if not all(report.is_sound for report in reports):
        raise typer.Exit(UNHEALTHY)


def _show(reports: list[Report]) -> None:
    output.table(
        ("state", "directory", "kind", "offsets", "batches", "records", "size"),
        [
            (
                "ok" if report.is_sound else "DAMAGED",
                report.path,
                report.kind,
                None
                if report.start_offset is None
                else f"{report.start_offset}-{report.end_offset}",
                report.batches if report.kind == "partition" else None,
                report.records if report.kind != "broker" else None,
                output.human_size(report.size_bytes if report.kind == "partition" else None),
            )
            for report in reports
        ],
        styles=["ok" if report.is_sound else "error" for report in reports],
        optional=("batches", "size", "kind", "records"),
    )
    for report in reports:
        for what in report.damage:
            output.verdict(f"damage: {what}", "error")
        for what in report.notes:
            output.say(f"note: {os.path.basename(report.path)}: {what}", hang=2)
    damaged = sum(not report.is_sound for report in reports)
    output.say(
        f"{output.counted(len(reports), 'directory', 'directories')} checked, {damaged} damaged."
    )


def dump(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A segment file, a partition's directory, a broker's metadata directory, or with "
            "--partition a data directory.",
        ),
    ],
    partition: Annotated[
        str | None,
        typer.Option("-p", "--partition", metavar="TOPIC/N", help="The partition below PATH."),
    ] = None,
    broker: Annotated[
        int | None,
        typer.Option(
            "-b",
            "--broker",
            help="The broker whose replica is read. Default: the first that has one.",
            min=0,
        ),
    ] = None,
    records: Annotated[
        bool,
        typer.Option("-r", "--records", help="Print the records, not only the batches' headers."),
    ] = False,
    format_: Annotated[
        str | None,
        typer.Option(
            "-f", "--format", help="The format of the records, as for `rayq topic consume`."
        ),
    ] = None,
    offset: Annotated[int, typer.Option("-o", "--offset", help="Start at this offset.", min=0)] = 0,
    count: Annotated[
        int | None, typer.Option("-n", "--num", help="Maximum number of batches or records.", min=0)
    ] = None,
    json: Json = False,
) -> None:
    """Print the batches of a log, or its records (--records, or a --format)."""
    disk = LocalDisk()
    place = _existing(path)
    if partition is not None:
        place = _find(disk, place, topic_partition(partition), broker)
    if disk.exists(f"{place}/{ENTRIES}"):
        _dump_metadata(disk, place, offset, count)
        return
    batches = _batches(disk, place, offset)
    if records or format_ is not None:
        template = JSON if json or format_ is None else format_
        _dump_records(batches, place, template, offset, count)
        return
    rows = [
        _row(segment, position, header)
        for _, (segment, position, header, _) in zip(
            range(sys.maxsize if count is None else count), batches, strict=False
        )
    ]
    if json:
        output.print_json(rows)
    else:
        names = [name.replace("_", " ") for name in rows[0]] if rows else ["segment"]
        output.table(names, [list(row.values()) for row in rows], optional=ROW_OPTIONAL)


def _existing(path: str) -> str:
    found = os.path.abspath(os.path.expanduser(path))
    if not os.path.exists(found):
        raise InvalidRequestError(f"There is no {path}.")
    return found


def _find(disk: LocalDisk, root: str, place: TopicPartition, broker: int | None) -> str:
    name = f"{place.topic}-{place.partition}"
    brokers = find_brokers(disk, root) or [(broker or 0, root)]
    for number, path in brokers:
        if broker in (None, number) and os.path.isdir(f"{path}/{name}"):
            return f"{path}/{name}"
    where = "" if broker is None else f" of broker {broker}"
    raise InvalidRequestError(f"There is no {name}{where} below {root}.")


Batch = tuple[str, int, BatchHeader, bytes]
"""Segment file, position, header, bytes."""


def _batches(disk: LocalDisk, path: str, from_offset: int) -> Iterator[Batch]:
    """The batches from an offset on. Raises CorruptBatchError, naming file and position, where it
    can read no further."""
    if os.path.isdir(path):
        names = disk.list(path)
        bases = base_offsets(names, LOG_SUFFIX)
        later = [base for base in bases if base > from_offset]
        segments = [segment_path(path, base, LOG_SUFFIX) for base in bases]
        # The last segment that begins at or below the offset holds it.
        segments = segments[max(0, len(bases) - len(later) - 1) :]
    else:
        segments = [path]
    if not segments or not all(segment.endswith(LOG_SUFFIX) for segment in segments):
        raise InvalidRequestError(
            f"{path} is neither a segment ({LOG_SUFFIX}) nor a partition's directory: name one, or "
            "a partition with --partition TOPIC/N."
        )
    for segment in segments:
        file = disk.open(segment, writable=False)
        try:
            for position, header in scan(file, 0, file.size(), path=segment, bodies=True):
                if header.next_offset > from_offset:
                    yield segment, position, header, pread(file, header.length, position)
        finally:
            file.close()


def _row(segment: str, position: int, header: BatchHeader) -> dict[str, Any]:
    return {
        "segment": os.path.basename(segment),
        "position": position,
        "base_offset": header.base_offset,
        "last_offset": header.last_offset,
        "records": header.record_count,
        "bytes": header.length,
        "epoch": header.leader_epoch,
        "compression": "lz4" if header.is_compressed else "none",
        "first_time": output.moment(header.first_timestamp_ms),
        "append_time": output.moment(header.append_time_ms),
        "producer": header.producer_id,
        "producer_epoch": header.producer_epoch,
        "sequence": header.base_sequence,
        "crc": f"{header.body_crc:08x}",
    }


def _dump_records(
    batches: Iterator[Batch], place: str, template: str, offset: int, count: int | None
) -> None:
    write = formatter(template)
    directory = place if os.path.isdir(place) else os.path.dirname(place)
    topic, _, number = os.path.basename(directory).rpartition("-")
    left = sys.maxsize if count is None else count
    for _, _, header, data in batches:
        columns = decode_columns(data, 0, header)
        some = [
            Record(
                topic=topic,
                partition=int(number) if number.isdecimal() else 0,
                offset=columns.offsets[index],
                timestamp_ms=columns.timestamps_ms[index],
                key=None if columns.keys is None else columns.keys[index],
                value=columns.values[index],
                headers=(columns.headers[index] if columns.headers is not None else None) or [],
            )
            for index in range(header.record_count)
            if columns.offsets[index] >= offset
        ][:left]
        left -= len(some)
        sys.stdout.buffer.write(write(some))
        if left <= 0:
            return


def _dump_metadata(disk: LocalDisk, path: str, from_index: int, count: int | None) -> None:
    """Prints lines of JSON, always: the records are of many kinds."""
    log = MetadataLog.inspect(disk, path)
    index = max(log.first_index, from_index)
    left = sys.maxsize if count is None else count
    while index <= log.last_index and left > 0:
        for index_of, epoch, data in log.read(index, METADATA_READ_BYTES):
            for record in decode_entry(data):
                fields = {name: getattr(record, name) for name in record.__struct_fields__}
                kind = type(record).__name__
                output.print_json_line(
                    {"index": index_of, "epoch": epoch, "record": kind, **fields}
                )
            index, left = index_of + 1, left - 1
            if left <= 0:
                return
